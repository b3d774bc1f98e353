"""What two ranks exchange at once: a large strip, or all small ones of a bucket. Integers only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from rlhf_megatron.reshard.plan import Transfer
from rlhf_megatron.reshard.strips import Strip, View, join

DIRECT_BYTES = 1 << 19
"""A strip from this size on is a message of its own. Smaller ones would cost more as messages than
to be packed."""

GPU_DIRECT_BYTES = 1 << 23
"""The same between GPUs, which copy faster than they send: two H200s reach 356 GB/s in large sends
and 6 in sends of 128 KiB (docs/resharding.md)."""


def direct_bytes(*, on_gpu: bool) -> int:
    """The size for a device."""
    return GPU_DIRECT_BYTES if on_gpu else DIRECT_BYTES


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Message:
    """A strip, or several, between two ranks."""

    peer: int
    """Global rank."""
    strips: list[Strip]

    @property
    def numel(self) -> int:
        return sum(strip.numel for strip in self.strips)


@dataclass(frozen=True)
class Exchange:
    """One bucket of one rank."""

    sends: list[Message]
    receives: list[Message]


def make_exchange(
    sends: Sequence[Transfer],
    *,
    receives: Sequence[Transfer],
    position: Callable[[int], int],
    direct_numel: int,
) -> Exchange:
    """Both ends of a message make it of the same transfers, in the same order: by the `position` of
    the other rank in the group, and as the plan lists them. Strips of `direct_numel` elements or
    more are messages of their own."""
    return Exchange(
        sends=_messages(sends, peer_of="dst", position=position, direct_numel=direct_numel),
        receives=_messages(receives, peer_of="src", position=position, direct_numel=direct_numel),
    )


def packed_numel(
    messages: Sequence[Message], *, view_of: Callable[[Strip], View], shapes: Shapes
) -> int:
    """Elements of the messages that need a buffer at the end that `view_of` tells, in contiguous
    parameters of these shapes and of the dtype that travels."""
    return sum(
        message.numel
        for message in messages
        if len(message.strips) > 1
        or not (view := view_of(message.strips[0])).lies_in_one_piece(shapes[view.parameter])
    )


def _messages(
    transfers: Sequence[Transfer],
    *,
    peer_of: str,
    position: Callable[[int], int],
    direct_numel: int,
) -> list[Message]:
    peer = attrgetter(peer_of)
    strips = join(sorted(transfers, key=lambda transfer: position(peer(transfer))))
    messages = []
    for number, group in groupby(strips, key=peer):
        small = []
        for strip in group:
            if strip.numel >= direct_numel:
                messages.append(Message(number, [strip]))
            else:
                small.append(strip)
        if small:
            messages.append(Message(number, small))
    return messages
