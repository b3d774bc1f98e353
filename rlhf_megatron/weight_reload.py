"""Weights for engines that lay them out in a way of their own: whole tensors, a bucket at a time.

The engine's own loader takes each tensor whole and keeps its part, so every rollout rank receives
all it does not hold: more than resharding in place, and never the whole model at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.layout.boxes import LogicalTensor, RankLayout
from rlhf_megatron.layout.cuts import whole
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.pieces import Layouts
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, make_plan
from rlhf_megatron.reshard.verify import verify_reshard
from rlhf_megatron.rollout.contract import RolloutEngine


@dataclass(kw_only=True)
class ReloadStats:
    """What one reload did on this rank."""

    bytes_received: int = 0
    bytes_minimum: int = 0
    seconds: float = 0.0
    """Of the transfers alone."""


@dataclass(kw_only=True)
class _Part:
    """Tensors that are gathered together, and what is allocated for them while they are."""

    tensors: tuple[LogicalTensor, ...]
    source: Layouts
    target: Layouts
    resharder: Resharder
    whole: dict[str, Tensor] = field(default_factory=dict)


class ReloadSync:
    """Gathers the actor's tensors and hands them to the engines' own loaders."""

    def __init__(
        self,
        *,
        source: Layouts,
        tensors: Sequence[LogicalTensor],
        rollout_ranks: Sequence[int],
        actor_parameters: Callable[[], Mapping[str, Tensor]],
        dtype: torch.dtype,
        bucket_bytes: int,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        node_of: Callable[[int], int],
    ) -> None:
        """`source`: the actor's layouts; `tensors`: of the model, in the order of its layers."""
        self._actor_parameters = actor_parameters
        self._dtype, self._rank, self._group, self._device = dtype, rank, group, device
        self._rolls_out = rank in rollout_ranks
        self._parts: list[_Part] = []
        for part in buckets_of(tensors, bucket_bytes=bucket_bytes, itemsize_bytes=dtype.itemsize):
            held = restricted(source, names={tensor.name for tensor in part})
            shared = tuple(whole(tensor, parameter=tensor.name) for tensor in part)
            target = dict.fromkeys(rollout_ranks, shared)
            plan = make_plan(
                held,
                target,
                itemsize_bytes=dtype.itemsize,
                bucket_bytes=max(1, bucket_bytes // BUCKETS_IN_FLIGHT),
                node_of=node_of,
                ranks=[rank],
            )
            gathered: dict[str, Tensor] = {}
            resharder = Resharder(
                plan,
                rank=rank,
                group=group,
                source=actor_parameters,
                target=gathered,
                dtype=dtype,
                device=device,
            )
            self._parts.append(
                _Part(tensors=part, source=held, target=target, resharder=resharder, whole=gathered)
            )

    def run(self, engine: RolloutEngine | None, *, verify: bool) -> ReloadStats:
        """Load the actor's present weights into the engines. Collective over the group.

        Raises RuntimeError on all ranks where an engine fails to load them, and, with `verify`,
        where a gathered tensor differs from what the actor's ranks hold.
        """
        stats = ReloadStats()
        stream = self._stream(stats, verify=verify)
        raised: Exception | None = None
        try:
            if engine is not None:
                engine.load_weights(stream)
        except Exception as error:
            raised = error
        try:
            for _ in stream:  # the others wait for this rank in every bucket
                pass
        except Exception as error:
            raised = raised or error
        self._raise_together(raised)
        return stats

    def _raise_together(self, error: Exception | None) -> None:
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        texts: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, text, group=self._group)
        found = dict.fromkeys(other for other in texts if other)
        if found:
            by_rank = [
                f"ranks {[rank for rank, other in enumerate(texts) if other == message]}: {message}"
                for message in found
            ]
            raise RuntimeError("weight reload failed on " + "; on ".join(by_rank)) from error

    def _stream(self, stats: ReloadStats, *, verify: bool) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole, on rollout ranks; elsewhere nothing, bucket by bucket all the same.

        Loaders keep tensors until a layer is complete, so none is written a second time.
        """
        for part in self._parts:
            if self._rolls_out:
                part.whole.update(
                    (t.name, torch.empty(t.shape, dtype=self._dtype, device=self._device))
                    for t in part.tensors
                )
            found = part.resharder.run()
            part.resharder.release()  # its views would hold every bucket until the next reload
            stats.bytes_received += found.bytes_received
            stats.bytes_minimum += found.bytes_minimum
            stats.seconds += found.seconds
            if verify:
                self._verify(part)
            gathered = list(part.whole.items())
            part.whole.clear()
            yield from gathered

    def _verify(self, part: _Part) -> None:
        verify_reshard(
            part.source,
            part.target,
            rank=self._rank,
            group=self._group,
            source=self._actor_parameters(),
            target=part.whole,
            shapes={tensor.name: tensor.shape for tensor in part.tensors},
            dtype=self._dtype,
            device=self._device,
        )


def buckets_of(
    tensors: Sequence[LogicalTensor], *, bucket_bytes: int, itemsize_bytes: int
) -> list[tuple[LogicalTensor, ...]]:
    """The tensors in their order, cut into groups of at most `bucket_bytes`; a larger tensor makes
    a group of its own."""
    found: list[list[LogicalTensor]] = []
    size = 0
    for tensor in tensors:
        own = prod(tensor.shape) * itemsize_bytes
        if not found or size + own > bucket_bytes:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += own
    return [tuple(group) for group in found]


def restricted(layouts: Layouts, *, names: set[str]) -> dict[int, RankLayout]:
    """The layouts of the named tensors alone; ranks that share a layout object still do."""
    shared = {
        id(layout): tuple(place for place in layout if place.tensor in names)
        for layout in layouts.values()
    }
    return {rank: shared[id(layout)] for rank, layout in layouts.items()}
