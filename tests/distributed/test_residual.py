"""What is left after sleep, against its bound, on all ranks alike."""

import torch.distributed as dist
from pool import run_ranks
from roles import CPU, Shape, build_role, new_factory

from rlhf_megatron.engine.offload import WEIGHTS, Copier, storage_bytes
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.errors import JobError
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.residual import ResidualCheck, resident_bytes


def sleeps(rank: int, directory, bound_gb: float, used_gb: list[list[float]]) -> str:
    """The message that ends the sleeps; used_gb: [sleep][rank], beside the roles."""
    roles = [
        build_role(directory, shape=Shape(dp=2), factory=new_factory(), optimizer=OptimizerConfig())
    ]
    held = sum(resident_bytes(roles).values()) / 1e9
    readings = iter([used[rank] + held for used in used_gb])
    check = ResidualCheck(
        bound_gb=bound_gb,
        device=CPU,
        group=dist.group.WORLD,
        roles=roles,
        measure=lambda _: next(readings),
    )
    ledger = PhaseLedger(rank=rank, device=CPU)
    ledger.listeners.append(check)
    try:
        for step in range(1, len(used_gb) + 1 + (bound_gb == 0)):
            ledger.start_step(step)
            with ledger.phase("log_prob"):
                pass  # only sleeps are measured
            with ledger.phase("sleep"):
                pass
    except JobError as error:
        return f"after {step} sleeps: {error}"
    return ""


def test_under_its_bound_nothing_is_said(models):
    assert run_ranks(2, sleeps, models / "llama", 3.0, [[2.9, 1.0], [3.0, 2.0]]) == ["", ""]


def test_one_rank_beyond_the_bound_ends_all_with_what_it_holds(models):
    found = run_ranks(2, sleeps, models / "llama", 3.0, [[2.0, 1.0], [3.5, 1.0]])
    assert found[0] == found[1]
    assert found[0].startswith("after 2 sleeps: sleep of step 2: more is left on the device")
    assert "Rank 0: 3.50 GB beside the roles (bound 3.00 GB, rollout.sleep_residual_gb)" in found[0]
    assert "Largest tensors:" in found[0] and "float32" in found[0]


def test_without_a_bound_it_may_not_grow_by_two_gb_from_the_second_step_on(models):
    readings = [[4.0, 1.0], [5.9, 1.0], [3.0, 3.1]]
    found = run_ranks(2, sleeps, models / "llama", 0.0, readings)
    assert found[0] == found[1]
    assert found[0].startswith("after 4 sleeps") and "Rank 1: 3.10 GB" in found[0]


def held_bytes(rank: int, directory) -> list[int]:
    engine = build_role(
        directory, shape=Shape(), factory=new_factory(), optimizer=OptimizerConfig()
    )
    weights = storage_bytes(named_parts(engine.model, optimizer=engine.optimizer)[WEIGHTS]())
    before = resident_bytes([engine])
    engine.make_offloadable((WEIGHTS,), copier=Copier(CPU, current_phase=lambda: ""), moves=True)
    engine.memory.release(WEIGHTS)
    after = resident_bytes([engine])
    return [weights, sum(before.values()), sum(after.values())]


def test_what_is_away_is_not_counted_as_held(models):
    ((weights, before, after),) = run_ranks(1, held_bytes, models / "llama")
    assert weights > 0 and before - after == weights
