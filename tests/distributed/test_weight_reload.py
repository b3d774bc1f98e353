"""Whole tensors for engines that load them by themselves, against a full gather."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pool import run_ranks
from small_reshards import ARCHITECTURES, CPU, filled, full_state, train_layouts
from torch.multiprocessing.reductions import StorageWeakRef

from rlhf_megatron.layout.boxes import LogicalTensor
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.weight_reload import ReloadSync, buckets_of

# Ranks 0 and 1 train, 1 and 2 roll out, 3 does neither.
TRAINING = {"tp": 2, "pp": 1, "ranks": (0, 1)}
ROLLING = (1, 2)
BUCKET_BYTES = 3000


class Loader:
    """Keeps what it is given, as an engine's loader does until a layer is complete."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            assert name not in self.tensors
            self.tensors[name] = tensor


class LazyLoader(Loader):
    """Leaves the rest where it has enough."""

    def load_weights(self, tensors) -> None:
        self.tensors = dict([next(tensors)])


class CopyingLoader(Loader):
    """Keeps nothing that it is given, and knows of what memory that was."""

    def load_weights(self, tensors) -> None:
        self.memory = [StorageWeakRef(tensor.untyped_storage()) for _, tensor in tensors]


def reload_sync(arch, *, rank: int, live) -> ReloadSync:
    return ReloadSync(
        source=train_layouts(arch, **TRAINING),
        tensors=logical_tensors(arch, head="lm"),
        rollout_ranks=ROLLING,
        actor_parameters=live,
        dtype=torch.bfloat16,
        bucket_bytes=BUCKET_BYTES,
        rank=rank,
        group=dist.group.WORLD,
        device=CPU,
        node_of=lambda _: 0,
    )


def reload_on_rank(rank: int, name: str, lazy: bool, stale: bool) -> Any:
    arch = ARCHITECTURES[name]
    layouts = train_layouts(arch, **TRAINING)
    live: dict[str, torch.Tensor] = {}
    sync = reload_sync(arch, rank=rank, live=lambda: live)
    results = []
    for seed in (1, 2):
        changed = seed + 7 * (stale and rank == 1)
        state = full_state(arch, seed=changed)
        live = filled(layouts.get(rank, ()), state=state, dtype=torch.float32)
        loader: Any = (LazyLoader() if lazy else Loader()) if rank in ROLLING else None
        try:
            stats = sync.run(loader, verify=True)
        except RuntimeError as error:
            return str(error)
        assert stats.bytes_received == stats.bytes_minimum
        results.append((stats.bytes_received, loader.tensors if loader else {}))
    return results


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_rollout_rank_is_given_every_tensor_whole(name) -> None:
    arch = ARCHITECTURES[name]
    results = run_ranks(4, reload_on_rank, name, False, False)
    state_bytes = sum(2 * t.box.numel for t in logical_tensors(arch, head="lm"))
    for which, seed in enumerate((1, 2)):
        expected = {k: v.bfloat16() for k, v in full_state(arch, seed=seed).items()}
        for rank, result in enumerate(results):
            received, tensors = result[which]
            assert list(tensors) == (list(expected) if rank in ROLLING else [])
            assert all(torch.equal(tensors[k], expected[k]) for k in tensors)
            # Rank 1 trains, too, and has about half (the vocabulary's padding is in its part).
            assert received == 0 or rank in ROLLING
            if rank == 2:
                assert received == state_bytes
            if rank == 1:
                assert 0.4 * state_bytes < received < 0.6 * state_bytes


def test_a_loader_that_stops_early_keeps_no_rank_waiting() -> None:
    results = run_ranks(4, reload_on_rank, "llama", True, False)
    assert [len(result[1][1]) for result in results] == [0, 1, 1, 0]


def test_stale_weights_are_named() -> None:
    messages = run_ranks(4, reload_on_rank, "tied", False, True)
    assert len(set(messages)) == 1
    assert "norm.weight: the source side of rank 1 differs" in messages[0]


def kept_after_a_reload(rank: int) -> tuple[int, int]:
    """How many tensors the loader was given, and of how many the memory is still there."""
    arch = ARCHITECTURES["llama"]
    held = train_layouts(arch, **TRAINING).get(rank, ())
    live = filled(held, state=full_state(arch, seed=1), dtype=torch.bfloat16)
    sync = reload_sync(arch, rank=rank, live=lambda: live)
    loader: Any = CopyingLoader() if rank in ROLLING else None
    sync.run(loader, verify=False)
    memory = loader.memory if loader else []
    return len(memory), sum(not ref.expired() for ref in memory)


def test_the_model_is_not_kept_whole() -> None:
    count = len(logical_tensors(ARCHITECTURES["llama"], head="lm"))
    assert run_ranks(4, kept_after_a_reload) == [(0, 0), (count, 0), (count, 0), (0, 0)]


@given(
    sizes=st.lists(st.integers(1, 40), max_size=30),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_keep_the_order_and_the_bound(sizes: list[int], bucket_bytes: int) -> None:
    tensors = [LogicalTensor(str(i), (size, 2)) for i, size in enumerate(sizes)]
    groups = buckets_of(tensors, bucket_bytes=bucket_bytes, itemsize_bytes=4)
    assert [t for group in groups for t in group] == tensors
    for group in groups:
        assert len(group) == 1 or sum(8 * t.shape[0] for t in group) <= bucket_bytes
    for first, following in pairwise(groups):  # none could have taken one more
        assert sum(8 * t.shape[0] for t in (*first, following[0])) > bucket_bytes
