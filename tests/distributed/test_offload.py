"""Offload really done on a CPU: storages are emptied and filled, and nothing changes by it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from pool import run_ranks
from roles import CPU, Shape, build_role, micro_batches, new_factory
from saved_runs import Place, build_run, engines
from test_checkpoint_layouts import assert_equal_state
from test_models import as_result, ragged_batch, split
from torch import Tensor
from updates import record_rollout

from rlhf_megatron.config import Config
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, Copier, storage_bytes
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.offloading import NEEDS, ORDER, Offloader

CYCLES = 50


def build(directory: Path, shape: Shape, precision: str) -> ModelEngine:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return build_role(
        directory, shape=shape, factory=new_factory(), optimizer=optimizer, precision=precision
    )


def train(engine: ModelEngine) -> None:
    batch = ragged_batch()
    parts = split(engine.model.groups.layout.data_parallel_size)
    micros = micro_batches(engine, batch, samples_by_replica=parts, fields=("w",))

    def loss(hidden, micro):
        found = engine.log_probs(hidden, micro_batch=micro, temperature=1.0)
        return as_result((found.logprobs * micro.fields["w"]).sum())

    engine.train_step(micros, loss=loss, learning_rate=1e-3)


def tensors_of(engine: ModelEngine, *kinds: str) -> dict[str, Tensor]:
    parts = named_parts(engine.model, optimizer=engine.optimizer)
    return {f"{kind} {name}": t for kind in kinds for name, t in parts[kind]().items()}


def copies(engine: ModelEngine) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in tensors_of(engine, WEIGHTS, OPTIMIZER).items()}


def copier() -> Copier:
    return Copier(CPU, current_phase=lambda: "test")


@dataclass
class Cycled:
    freed_bytes: dict[str, int] = field(default_factory=dict)
    tensor_bytes: dict[str, int] = field(default_factory=dict)
    allocations: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    equal: bool = True
    num_tensors: int = 0


def many_cycles(rank: int, directory: Path, shape: Shape, precision: str) -> Cycled:
    """Two roles from the same weights train on the same batches; one is offloaded between."""
    plain, moved = (build(directory, shape, precision) for _ in range(2))
    moved.make_offloadable(KINDS, copier=copier(), moves=True)
    moved.memory.release(*KINDS)
    found, host = Cycled(), moved.memory.parts[WEIGHTS]._host
    for cycle in range(CYCLES):
        if cycle < 3 or cycle % 10 == 0:
            train(plain)
            with moved.memory.on_device(*KINDS):
                train(moved)
        with moved.memory.on_device(*KINDS):
            mine, other = copies(moved), copies(plain)
            found.equal &= all(torch.equal(mine[name], other[name]) for name in other)
            found.num_tensors = len(other)
            for kind in KINDS:
                found.tensor_bytes[kind] = storage_bytes(tensors_of(moved, kind))
        for kind in KINDS:
            found.freed_bytes[kind] = moved.memory.parts[kind].away_bytes
            assert storage_bytes(tensors_of(moved, kind)) == 0, kind
        found.allocations.append(host.num_allocations)
        found.host_bytes.append(host.num_bytes)
    return found


@pytest.mark.parametrize(
    ("shape", "precision"),
    [(Shape(tp=2, dp=2, sp=True), "bf16"), (Shape(pp=2), "fp32"), (Shape(), "bf16")],
    ids=str,
)
def test_fifty_cycles_change_no_bit_and_take_host_memory_once(models, shape, precision):
    for found in run_ranks(shape.world_size, many_cycles, models / "llama", shape, precision):
        assert found.equal and found.num_tensors > 20
        assert found.freed_bytes == found.tensor_bytes
        assert all(size > 0 for size in found.freed_bytes.values())
        # The first release brings weights (and bf16's master weights), the first after a step the
        # moments. Nothing after that.
        assert found.allocations[-1] <= 3
        assert len(set(found.allocations)) == 1
        assert len(set(found.host_bytes)) == 1
        kept = found.freed_bytes[WEIGHTS] + found.freed_bytes[OPTIMIZER]
        assert kept <= found.host_bytes[-1] <= kept + 512 * found.num_tensors


def what_is_copied(rank: int, directory: Path) -> list[int]:
    """Bytes copied to the host by three releases: first, unchanged, after a step."""
    engine, transfers = build(directory, Shape(), "bf16"), copier()
    engine.make_offloadable(KINDS, copier=transfers, moves=True)
    copied = []
    for trains in (False, False, True):
        with engine.memory.on_device(*KINDS):
            if trains:
                train(engine)
        if not copied:
            engine.memory.release(*KINDS)
        done = transfers.take_finished()
        copied.append(sum(t.num_bytes for t in done if t.direction == "to_host"))
    with engine.memory.on_device(*KINDS):
        copied.append(storage_bytes(tensors_of(engine, WEIGHTS, OPTIMIZER)))
        gradients = tensors_of(engine, GRADIENTS)
        copied.append(int(sum(bool(g.any()) for g in gradients.values())))
    return copied


def test_only_what_changed_is_copied_and_gradients_never(models):
    (copied,) = run_ranks(1, what_is_copied, models / "llama")
    first, unchanged, after_a_step, state, nonzero_gradients = copied
    assert first > 0 and unchanged == 0
    assert after_a_step == state > first  # with the moments
    assert nonzero_gradients == 0


def guarded_calls(rank: int, directory: Path) -> list[str]:
    engine = build(directory, Shape(), "fp32")
    engine.make_offloadable(KINDS, copier=copier(), moves=True)
    before = {name: p.detach().clone() for name, p in engine.model.parameters().items()}
    engine.memory.release(*KINDS)
    errors = []
    for call in (lambda: train(engine), engine.weights_changed, engine.reset_optimizer):
        try:
            call()
        except AssertionError as error:
            errors.append(str(error))
    # These bring what they need, or read it where it is.
    assert engine.nonfinite_weights() == [] and not engine.memory.is_here(WEIGHTS)
    for name, parameter in engine.model.parameters().items():
        assert torch.equal(engine.memory.readable(parameter), before[name]), name
    assert storage_bytes(tensors_of(engine, WEIGHTS)) == 0
    return errors


def test_what_is_away_is_not_touched(models):
    (errors,) = run_ranks(1, guarded_calls, models / "llama")
    assert len(errors) == 3
    assert "are on the host" in errors[0] and "are on the host" in errors[1]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, 12)
    return path


def saved_while_away(rank: int, place: Place, other: Place, shape: Shape) -> list[bool]:
    """Run A stays on the device; run B is saved and resumed with everything away."""
    plain, moved = build_run(rank, place, shape), build_run(rank, other, shape)
    for engine in engines(moved).values():
        engine.make_offloadable(KINDS, copier=copier(), moves=True)
        engine.memory.release(*KINDS)
    for run in (plain, moved):
        for engine in engines(run).values():
            engine.memory.fetch(*KINDS)
        run.round()
        for engine in engines(run).values():
            engine.memory.release(*KINDS)
        run.save()
    resumed = build_run(rank, other, shape)
    for engine in engines(resumed).values():
        engine.make_offloadable(KINDS, copier=copier(), moves=True)
        engine.memory.release(*KINDS)
    resumed.resume()
    results = []
    for name, engine in engines(resumed).items():
        assert not engine.memory.is_here(WEIGHTS)
        with engine.memory.on_device(*KINDS):
            mine, expected = copies(engine), copies(engines(plain)[name])
            results.append(
                mine.keys() == expected.keys()
                and all(torch.equal(mine[key], expected[key]) for key in mine)
            )
    return results


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_checkpoint_finds_the_state_on_the_host(models, rollout, tmp_path, precision):
    shape = Shape(tp=2, dp=2)
    places = [
        Place(
            models=models,
            rollout=rollout,
            output=tmp_path / name,
            precision=precision,
        )
        for name in ("plain", "moved")
    ]
    for results in run_ranks(shape.world_size, saved_while_away, *places, shape):
        assert results == [True, True]
    assert_equal_state(
        *(tmp_path / name / "checkpoints/step_000001" for name in ("plain", "moved"))
    )


def phases(rank: int, directory: Path, moves: bool) -> dict[str, object]:
    """What is here in each phase of two steps, with all keys on, and the ledger's records."""
    config = Config()
    for role in (config.actor, config.critic):
        role.offload_weights = role.offload_gradients = role.offload_optimizer = True
    config.ref.offload = True
    ledger = PhaseLedger(rank=0, device=CPU)
    offloader = Offloader(config, device=CPU, ledger=ledger, moves=moves)
    ledger.listeners.append(offloader)
    factory = new_factory()
    roles = {
        name: build_role(
            directory,
            shape=Shape(),
            factory=factory,
            optimizer=None if name == "ref" else OptimizerConfig(),
        )
        for name in ("actor", "critic", "ref")
    }
    for name, engine in roles.items():
        offloader.add(name, engine)
    here: dict[str, list[str]] = {}
    for step in (1, 2):
        ledger.start_step(step)
        for phase in ORDER:
            with ledger.phase(phase):
                here[f"{step} {phase}"] = [
                    f"{name}.{kind}"
                    for name, engine in roles.items()
                    for kind, part in engine.memory.parts.items()
                    if part.is_here
                ]
                if phase == "update_actor":
                    train(roles["actor"])
                if phase == "reshard":
                    offloader.release()
                    assert not roles["actor"].memory.is_here(WEIGHTS)
        with ledger.phase("checkpoint"):
            here[f"{step} checkpoint"] = [n for n, e in roles.items() if e.memory.is_here(*KINDS)]
        records = ledger.finish_step().communication
    return {"here": here, "records": records, "text": str(offloader)}


def test_each_phase_has_what_it_needs_and_the_next_is_fetched_ahead(models):
    (found,) = run_ranks(1, phases, models / "llama", True)
    here = found["here"]
    for phase in ORDER:
        role, kinds = NEEDS.get(phase, ("", ()))
        needed = {f"{role}.{kind}" for kind in kinds}
        # In the first passage nothing is fetched ahead, as nothing is known of the phase's peak.
        assert set(here[f"1 {phase}"]) == needed, phase
        following = NEEDS.get(ORDER[(ORDER.index(phase) + 1) % len(ORDER)], ("", ()))
        ahead = {f"{following[0]}.{kind}" for kind in following[1]}
        assert set(here[f"2 {phase}"]) == needed | ahead, phase
    assert here["1 checkpoint"] == here["2 checkpoint"] == []
    by_direction = {(r.during_phase, r.collective): r for r in found["records"]}
    assert {r.purpose for r in found["records"]} == {"offload"}
    # Fetched while the critic was updated; written back when the update was over.
    assert by_direction["update_critic", "to_device"].bytes > 0
    assert by_direction["update_actor", "to_host"].bytes > 0
    assert "counted only" not in found["text"]


def test_on_a_cpu_it_is_only_counted(models):
    (found,) = run_ranks(1, phases, models / "llama", False)
    assert found["records"] == []
    assert "actor.weights 0.001 GB" in found["text"] and "counted only" in found["text"]
