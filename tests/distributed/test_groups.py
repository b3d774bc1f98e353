"""Process groups per role, the scoped switch of Megatron-Core's global state, random numbers, and
the redirection of CUDA to the CPU."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from roles import Shape
from torch import Tensor

from rlhf_megatron.distributed import start as start_module
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.cpu_platform import is_redirected, use_cpu_in_place_of_cuda
from rlhf_megatron.distributed.groups import GroupFactory, RoleGroups, build_role_groups
from rlhf_megatron.layout.parallel import ParallelLayout

ORDERS = [("tp", "dp", "pp"), ("pp", "tp", "dp"), ("dp", "pp", "tp")]
SHARED_DIMENSIONS = {
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp",),
    "mp": ("tp", "pp"),
    "tp_dp_cp": ("tp", "dp"),
    "intra_dist_opt": ("tp", "dp", "pp"),
    "cp": (),
}


def build(shape: Shape, factory: GroupFactory) -> RoleGroups:
    groups = build_role_groups(str(shape), layout=shape.layout, factory=factory)
    assert groups is not None
    return groups


def grid(shape: Shape) -> dict[int, dict[str, int]]:
    """Coordinates by counting: the first dimension of the order is the fastest."""
    sizes = {"tp": shape.tp, "pp": shape.pp, "dp": shape.dp}
    slowest_first = list(reversed(shape.order))
    points = product(*(range(sizes[d]) for d in slowest_first))
    return {rank: dict(zip(slowest_first, point, strict=True)) for rank, point in enumerate(points)}


def members_and_sums(rank: int, shapes: list[Shape]) -> list[dict]:
    """Of each role: members of its groups, this rank's place in them, a sum over each."""
    factory, found = GroupFactory(timeout_seconds=30), []
    for shape in shapes:
        collection, role = build(shape, factory).collection, {}
        for name in SHARED_DIMENSIONS:
            group = getattr(collection, name)
            total = torch.tensor([10**rank], dtype=torch.int64)
            dist.all_reduce(total, group=group)
            members = dist.get_process_group_ranks(group)
            role[name] = (members, dist.get_rank(group), int(total))
        found.append(role)
    return found


def test_groups_of_roles_on_the_same_ranks_in_every_grid_order():
    shapes = [Shape(tp=2, pp=2, dp=2, order=order) for order in ORDERS] + [Shape(tp=4, dp=2)]
    everyone = run_ranks(8, members_and_sums, shapes)
    for rank, roles in enumerate(everyone):
        for shape, groups in zip(shapes, roles, strict=True):
            at = grid(shape)
            for name, shared in SHARED_DIMENSIONS.items():
                fixed = [d for d in ("tp", "pp", "dp") if d not in shared]
                expected = [r for r in at if all(at[r][d] == at[rank][d] for d in fixed)]
                members, place, total = groups[name]
                assert members == expected, (shape, name)
                assert total == sum(10**r for r in expected)
                if len(shared) == 1:
                    assert place == at[rank][shared[0]], (shape, name)


def reuse_and_absence(rank: int) -> dict[str, bool]:
    factory = GroupFactory(timeout_seconds=30)
    first, second = build(Shape(tp=2, pp=2), factory), build(Shape(tp=2, dp=2), factory)
    part = build_role_groups("part", layout=ParallelLayout((1, 3), 2), factory=factory)
    if part is not None:
        dist.barrier(group=part.collection.tp)
    return {
        "shares_tp": first.collection.tp is second.collection.tp,
        "shares_everyone": first.everyone is second.everyone,
        "has_part": part is not None,
        "has_embedding_group": first.collection.embd is not None,
        "first_stage": first.is_first_stage,
        "last_stage": first.is_last_stage,
        "position": first.collection.pos_embd is not None,
    }


def test_roles_share_groups_and_a_rank_may_have_no_part():
    for rank, found in enumerate(run_ranks(4, reuse_and_absence)):
        assert found["shares_tp"] and found["shares_everyone"]
        assert found["has_part"] == (rank in (1, 3))
        assert found["has_embedding_group"]  # of two stages both are an end
        assert found["first_stage"] == found["position"] == (rank < 2)
        assert found["last_stage"] == (rank >= 2)


def random_numbers(rank: int) -> dict[str, Tensor]:
    """Draws from two roles' trackers, in turns."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    factory = GroupFactory(timeout_seconds=30)
    roles = {"a": build(Shape(tp=2, dp=2), factory), "b": build(Shape(dp=4), factory)}
    for seed, groups in enumerate(roles.values()):
        groups.seed(seed)
    draws: dict[str, list[Tensor]] = {name: [] for name in roles}
    for name in ("a", "b", "b", "a"):
        with roles[name].active(), get_cuda_rng_tracker().fork():
            draws[name].append(torch.rand(4))
    return {name: torch.cat(values) for name, values in draws.items()}


def test_random_numbers_differ_over_tensor_parallel_ranks_and_agree_over_replicas():
    zero, one, two, three = run_ranks(4, random_numbers)
    assert torch.equal(zero["a"], two["a"]) and torch.equal(one["a"], three["a"])
    assert not torch.equal(zero["a"], one["a"])
    assert not torch.equal(zero["a"][:4], zero["a"][4:])  # a role's stream goes on
    assert all(torch.equal(zero["b"], other["b"]) for other in (one, two, three))


def switching(rank: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    def state() -> dict:
        values = {n: v for n, v in vars(parallel_state).items() if n.startswith("_")}
        values.pop("__builtins__", None)
        return values | {"tracker": dict(get_cuda_rng_tracker().get_states())}

    factory = GroupFactory(timeout_seconds=30)
    roles = [build(Shape(tp=2, pp=2), factory), build(Shape(pp=2, dp=2), factory)]
    before = state()
    for seed, groups in enumerate(roles):
        groups.seed(seed)
    assert state() == before
    for groups in roles * 2:
        layout, at = groups.layout, groups.coordinates
        with groups.active():
            assert parallel_state.get_tensor_model_parallel_rank() == at.tp
            size = parallel_state.get_tensor_model_parallel_world_size()
            assert size == layout.tensor_model_parallel_size
            assert parallel_state.get_pipeline_model_parallel_rank() == at.pp
            assert parallel_state.get_data_parallel_rank() == at.dp
            assert parallel_state.get_data_parallel_world_size() == layout.data_parallel_size
            assert parallel_state.is_pipeline_last_stage() == groups.is_last_stage
            assert get_cuda_rng_tracker().get_states()
        assert state() == before
    with pytest.raises(KeyError), roles[0].active():
        raise KeyError
    assert state() == before


def test_a_role_is_active_within_its_scope_alone():
    run_ranks(4, switching)


def redirected(rank: int) -> dict[str, bool]:
    use_cpu_in_place_of_cuda()  # a second time
    return {
        "is_redirected": is_redirected(),
        "factory": torch.zeros(2, device="cuda").device.type == "cpu",
        "to": torch.zeros(2).to("cuda").device.type == "cpu",
        "to_device": torch.zeros(2).to(torch.device("cuda", 0)).device.type == "cpu",
        "to_keyword": torch.zeros(2).to(device="cuda").device.type == "cpu",
        "cuda": torch.zeros(2).cuda().device.type == "cpu",
        "type": torch.zeros(2).type() == "torch.cuda.FloatTensor",
        "type_conversion": torch.zeros(2).type(torch.float64).dtype == torch.float64,
        "to_dtype": torch.zeros(2).to(torch.float64).dtype == torch.float64,
    }


def test_cuda_means_cpu_where_there_is_none():
    (found,) = run_ranks(1, redirected)
    assert all(found.values()), found


def test_nothing_is_redirected_where_there_is_a_gpu(monkeypatch):
    names = ("synchronize", "empty_cache", "current_device", "current_stream", "manual_seed")
    before = {name: getattr(torch.cuda, name) for name in names}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="has a CUDA device"):
        use_cpu_in_place_of_cuda()
    assert not is_redirected()
    assert {name: getattr(torch.cuda, name) for name in names} == before


def test_the_start_on_a_gpu_redirects_nothing_and_takes_nccl(monkeypatch):
    begun = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", begun.append)
    monkeypatch.setattr(
        start_module.dist, "init_process_group", lambda backend, **_: begun.append(backend)
    )
    # The other ranks, and the store that rank 0 would hold, are not there.
    monkeypatch.setattr(start_module, "_job_store", lambda rank, *, timeout: dist.HashStore())
    monkeypatch.setattr(start_module, "call_roll", lambda store, **_: begun.append("roll call"))
    values = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in (values | {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    context = start_module.start(DistributedConfig())
    assert begun == [torch.device("cuda", 1), "roll call", "cpu:gloo,cuda:nccl"]
    assert context.device == torch.device("cuda", 1) and context.is_cuda
    assert context.node_of(1) == 0 and context.node_of(context.rank) == 1
    assert not is_redirected()
