"""Process groups per role, and the one switch of Megatron-Core's global state.

Every role (actor, critic, reference, reward) has a `ProcessGroupCollection` over its own ranks and
layout, handed to every Megatron object explicitly. What Megatron-Core 0.16 to 0.19 reads from the
global `parallel_state` all the same (attention with fewer KV heads than TP, the initialisation on
the CPU, the checkpoint's sharded tensors) is switched per role by `RoleGroups.active`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import sha1
from itertools import count

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch.distributed import distributed_c10d

from rlhf_megatron.layout.parallel import Coordinates, ParallelLayout


class GroupFactory:
    """Makes each set of ranks into a process group once, so that roles of one layout share groups.

    A group is made by its members alone (use_local_synchronization): at 512 ranks that is a handful
    of groups a rank in place of thousands. All ranks must ask for their groups in the same order.
    """

    def __init__(self, *, timeout_seconds: float, backend: str = "gloo") -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._backend = backend
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`, to which this process belongs."""
        assert dist.get_rank() in ranks, ranks
        if ranks not in self._groups:
            with _named_by_ranks():
                self._groups[ranks] = dist.new_group(
                    list(ranks),
                    timeout=self._timeout,
                    backend=self._backend,
                    use_local_synchronization=True,
                )
        return self._groups[ranks]


@contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Inside, torch names a group that its members make alone by their ranks and by how many groups
    of these very ranks there are.

    Its own name counts all groups that the process has made (2.11 to 2.13, distributed_c10d.py,
    _hash_ranks_to_str). Ranks with other roles, or another pipeline stage, have made other numbers
    of them, and would wait for each other under different names.
    """

    def name_of(ranks: list[int]) -> str:
        taken = set(distributed_c10d._world.pg_names.values())
        members = "_".join(map(str, ranks))
        names = (sha1(f"{members} {number}".encode()).hexdigest() for number in count())
        return next(name for name in names if name not in taken)

    former = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = name_of
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = former


@dataclass
class RoleGroups:
    """One role's place in the job: its layout, its groups, this rank's coordinates in it."""

    role: str
    layout: ParallelLayout
    coordinates: Coordinates
    collection: ProcessGroupCollection
    everyone: dist.ProcessGroup
    """All ranks of the role."""

    _rng_states: dict | None = None
    _memory_buffer: object | None = None

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pipeline_model_parallel_size - 1

    def seed(self, seed: int) -> None:
        """Seed the role's tensor-parallel RNG tracker: distinct per tensor-parallel rank."""
        with self.active():
            model_parallel_cuda_manual_seed(
                seed, tp_rank=self.coordinates.tp, ep_rank=0, etp_rank=self.coordinates.tp
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this role the one that Megatron-Core's global state describes.

        Not re-entrant across roles: one role computes at a time in a process.
        """
        wanted = self._global_values()
        saved = {name: getattr(parallel_state, name) for name in wanted}
        tracker = get_cuda_rng_tracker()
        saved_states = tracker.get_states()
        for name, value in wanted.items():
            setattr(parallel_state, name, value)
        if self._rng_states is not None:
            tracker.set_states(self._rng_states)
        try:
            yield
        finally:
            tracker = get_cuda_rng_tracker()
            self._rng_states = tracker.get_states()
            self._memory_buffer = parallel_state._GLOBAL_MEMORY_BUFFER
            tracker.set_states(saved_states)
            for name, value in saved.items():
                setattr(parallel_state, name, value)

    @contextmanager
    def as_default_group(self) -> Iterator[None]:
        """Inside, torch's default group is that of the role's ranks, and ranks count within it.

        For what Megatron-Core does over all processes and means those of one model: the keys of an
        optimizer's parameter groups (optimizer/__init__.py:181 of 0.16.1).
        """
        world = distributed_c10d._get_default_group()
        if self.everyone.size() == world.size():
            yield
            return
        distributed_c10d._update_default_pg(self.everyone)
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(world)

    def _global_values(self) -> dict[str, object]:
        """parallel_state's module globals for this role (names of 0.16.1, all there in 0.19.2)."""
        from megatron.core.utils import GlobalMemoryBuffer

        groups = self.collection
        layout, at = self.layout, self.coordinates
        if self._memory_buffer is None:
            self._memory_buffer = GlobalMemoryBuffer()

        def line(dimension: str) -> list[int]:
            return list(_line(layout, at, dimension))

        values: dict[str, object] = {
            "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
            "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": line("tp"),
            "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
            "_PIPELINE_GLOBAL_RANKS": line("pp"),
            "_MODEL_PARALLEL_GROUP": groups.mp,
            "_EMBEDDING_GROUP": groups.embd,
            "_POSITION_EMBEDDING_GROUP": groups.pos_embd,
            "_EMBEDDING_GLOBAL_RANKS": sorted({line("pp")[0], line("pp")[-1]}),
            "_POSITION_EMBEDDING_GLOBAL_RANKS": line("pp")[:1],
            "_DATA_PARALLEL_GROUP": groups.dp,
            "_DATA_PARALLEL_GLOBAL_RANKS": line("dp"),
            "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
            "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": line("dp"),
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
            "_TENSOR_AND_DATA_PARALLEL_GROUP": groups.tp_dp_cp,
            "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": groups.tp_dp_cp,
            "_CONTEXT_PARALLEL_GROUP": groups.cp,
            "_CONTEXT_PARALLEL_GLOBAL_RANKS": [layout.rank(tp=at.tp, dp=at.dp, pp=at.pp)],
            "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp_cp,
            "_EXPERT_MODEL_PARALLEL_GROUP": groups.ep,
            "_EXPERT_TENSOR_PARALLEL_GROUP": groups.expt_tp,
            "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": groups.tp_ep,
            "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": groups.tp_ep_pp,
            "_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
            "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
            "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": groups.intra_dist_opt,
            "_GLOBAL_MEMORY_BUFFER": self._memory_buffer,
        }
        # Of 0.19.2 alone: what a tied embedding's sharded state asks for its replica.
        newer = {"_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": groups.dp_cp}
        return values | {name: v for name, v in newer.items() if name in vars(parallel_state)}


def _line(layout: ParallelLayout, at: Coordinates, *dimensions: str) -> tuple[int, ...]:
    """Ascending ranks that differ from `at` in `dimensions` only."""
    steps = {d: range(layout.size(d)) if d in dimensions else None for d in ("tp", "dp", "pp")}
    return tuple(
        sorted(
            layout.rank(tp=tp, dp=dp, pp=pp)
            for tp in steps["tp"] or (at.tp,)
            for dp in steps["dp"] or (at.dp,)
            for pp in steps["pp"] or (at.pp,)
        )
    )


def build_role_groups(
    role: str, *, layout: ParallelLayout, factory: GroupFactory
) -> RoleGroups | None:
    """The groups of one role, or None on a rank that has no part in it."""
    rank = dist.get_rank()
    if rank not in layout.ranks:
        return None
    at = layout.coordinates(rank)
    # Tensor-parallel ranks of one line ascend with the coordinate in every grid order, so the
    # group's own numbering (torch sorts) is the coordinate.
    tp = factory.group(_line(layout, at, "tp"))
    pp_ranks = _line(layout, at, "pp")
    pp = factory.group(pp_ranks)
    dp = factory.group(_line(layout, at, "dp"))
    mp = factory.group(_line(layout, at, "tp", "pp"))
    tp_dp = factory.group(_line(layout, at, "tp", "dp"))
    everyone = factory.group(layout.ranks)
    alone = factory.group((rank,))
    ends = tuple(sorted({pp_ranks[0], pp_ranks[-1]}))
    embedding = factory.group(ends) if rank in ends else None
    position = factory.group(pp_ranks[:1]) if rank == pp_ranks[0] else None
    collection = ProcessGroupCollection(
        tp=tp,
        pp=pp,
        mp=mp,
        dp=dp,
        dp_cp=dp,
        intra_dp_cp=dp,
        tp_dp_cp=tp_dp,
        cp=alone,
        tp_cp=tp,
        ep=alone,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=mp,
        expt_dp=dp,
        intra_expt_dp=dp,
        embd=embedding,
        pos_embd=position,
        inter_dist_opt=None,
        intra_dist_opt=everyone,
    )
    _fill_newer_fields(collection, alone=alone, dp=dp, mp=mp)
    return RoleGroups(
        role=role, layout=layout, coordinates=at, collection=collection, everyone=everyone
    )


def _fill_newer_fields(
    collection: ProcessGroupCollection,
    *,
    alone: dist.ProcessGroup,
    dp: dist.ProcessGroup,
    mp: dist.ProcessGroup,
) -> None:
    """Groups that megatron-core 0.19.2 added: weight rematerialisation, which is not used here."""
    newer = {
        "gtp_remat": alone,
        "expt_gtp_remat": alone,
        "dp_cp_gtp_remat": dp,
        "expt_dp_gtp_remat": dp,
        "tp_ep_pp_with_egtp_remat": mp,
    }
    known = {f.name for f in fields(ProcessGroupCollection)}
    for name, group in newer.items():
        if name in known:
            setattr(collection, name, group)
