"""What roles tell the ranks that do not hold them: per-token scalars, and figures of their updates.

A role's results are the same on all of its ranks; its first one sends them to those outside, in one
broadcast. Where all ranks hold all roles nothing is sent, and there is no `exchange` phase.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.distributed.groups import GroupFactory
from rlhf_megatron.observability.ledger import EXCHANGE, PhaseLedger
from rlhf_megatron.role_ranks import RolePlacement

T = TypeVar("T")

PHASE = "exchange"
FIGURES = "figures"
"""Purpose under which the metrics of updates and other small objects are recorded."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExchangeGroups:
    """The process groups of the exchange that this rank is in."""

    outside: Mapping[str, dist.ProcessGroup]
    """Role -> its first rank and those that do not hold it."""
    sync: dist.ProcessGroup | None
    """The ranks with a part in the weight sync."""


def build_exchange_groups(
    placement: RolePlacement, *, factory: GroupFactory, rank: int
) -> ExchangeGroups:
    """Collective over the job: all ranks ask in the same order."""
    outside = {}
    for role, ranks in placement.ranks.items():
        members = tuple(sorted({ranks[0], *placement.outside(role)}))
        if len(members) > 1 and rank in members:
            outside[role] = factory.group(members)
    sync = factory.group(placement.sync_ranks) if rank in placement.sync_ranks else None
    return ExchangeGroups(outside=outside, sync=sync)


class RoleExchange:
    """Tells all ranks what the ranks of a role know. Every method is collective over the job."""

    def __init__(
        self, placement: RolePlacement, *, groups: ExchangeGroups, rank: int, ledger: PhaseLedger
    ) -> None:
        self.placement = placement
        self._groups, self._rank, self._ledger = groups, rank, ledger
        self._debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"

    @property
    def is_split(self) -> bool:
        return self.placement.is_split

    def holds(self, role: str) -> bool:
        """Whether this rank has the role."""
        return self._rank in self.placement.ranks[role]

    @contextmanager
    def joined(self, *, prefix: str = "") -> Iterator[None]:
        """Inside, in split placement, all ranks are in the phase `exchange`: those that come first
        wait there for the slowest role."""
        if not self.is_split:
            yield
            return
        with self._ledger.phase(f"{prefix}{PHASE}"):
            yield

    def await_actor(self) -> None:
        """On the ranks of the weight sync: the actor's weights are ready. Engines on ranks of their
        own wait for that here, not in the sync, whose time is limited."""
        placement = self.placement
        if self._groups.sync is None or not placement.is_split:
            return
        if set(placement.ranks["rollout"]) <= set(placement.ranks["actor"]):
            return
        with self._ledger.phase(PHASE, apart=True):
            dist.barrier(group=self._groups.sync)

    def tensors(
        self, role: str, own: Mapping[str, Tensor] | None, *, sizes: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Float32 tensors of these sizes that the role's ranks have (`own`), on all ranks."""
        if self.placement.is_everywhere(role):
            assert own is not None
            return {name: own[name] for name in sizes}
        is_source = self._rank == self.placement.ranks[role][0]
        group = self._groups.outside.get(role)
        if group is not None:
            flat = torch.empty(sum(sizes.values()))
            if own is not None:
                torch.cat([own[name].float().cpu() for name in sizes], out=flat)
            begin = time.perf_counter()
            dist.broadcast(flat, src=self.placement.ranks[role][0], group=group)
            self._record(
                EXCHANGE,
                what=f"{role}: {', '.join(sizes)}",
                num_bytes=0 if is_source else flat.nbytes,
                seconds=time.perf_counter() - begin,
            )
            if own is None:
                parts = flat.split(list(sizes.values()))
                return dict(zip(sizes, (part.clone() for part in parts), strict=True))
        assert own is not None
        return {name: own[name] for name in sizes}

    def figures(self, role: str, own: T | None) -> T:
        """A small object that the role's ranks have, on all ranks."""
        if self.placement.is_everywhere(role) or role not in self._groups.outside:
            assert own is not None
            return own
        source = self.placement.ranks[role][0]
        shared: list[Any] = [own if self._rank == source else None]
        begin = time.perf_counter()
        dist.broadcast_object_list(shared, src=source, group=self._groups.outside[role])
        self._record(
            FIGURES, what=f"{role}: figures", num_bytes=0, seconds=time.perf_counter() - begin
        )
        found: T = shared[0] if own is None else own
        return found

    def _record(self, purpose: str, *, what: str, num_bytes: int, seconds: float) -> None:
        self._ledger.communication.record(
            purpose, collective="broadcast", num_bytes=num_bytes, seconds=seconds
        )
        if self._debug:
            logger.info(
                "exchange of %s, broadcast: %d bytes received, %.3f ms",
                what,
                num_bytes,
                1e3 * seconds,
            )
