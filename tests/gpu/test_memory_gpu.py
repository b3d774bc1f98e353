"""Memory on a CUDA device: offload, lean loss, recompute, running out. Figures are printed (-s)."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_training_gpu import ONE_RANK, quickstart, run  # noqa: F401 - a fixture
from torch import Tensor
from transformers import LlamaConfig

from rlhf_megatron.batch import from_sequences
from rlhf_megatron.config import Config
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.distributed.start import start
from rlhf_megatron.engine.microbatch import MicroBatch, make_micro_batch
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.engine.offload import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, Copier
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.errors import JobError
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.compat import transformer_engine_imports
from rlhf_megatron.models.config import OptimizerConfig, RecomputeConfig
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.memory import allocator_summary, monitor_line
from rlhf_megatron.out_of_memory import OutOfMemoryReport

ROOT = Path(__file__).parents[2]
JOB_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SPECS = ["local", "transformer_engine"]


@pytest.fixture(scope="module")
def context():
    """A job of this process alone."""
    former = {name: os.environ.pop(name) for name in JOB_VARIABLES if name in os.environ}
    found = start(DistributedConfig())
    yield found
    dist.destroy_process_group()
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(former)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """160M parameters."""
    folder = tmp_path_factory.mktemp("memory") / "model"
    LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


def build(context, model_dir, *, spec="local", recompute=RecomputeConfig()) -> ModelEngine:  # noqa: B008
    if spec == "transformer_engine" and not transformer_engine_imports():
        pytest.skip("Transformer Engine is not installed here")
    groups = build_role_groups(
        "actor",
        layout=ParallelLayout((0,)),
        factory=GroupFactory(timeout_seconds=60, backend=context.backend),
    )
    model = build_model(
        read_architecture(model_dir),
        head="lm",
        groups=groups,
        precision="bf16",
        layer_spec_name=spec,
        recompute=recompute,
        device=context.device,
        seed=1,
    )
    return ModelEngine(
        model,
        device=context.device,
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
    )


def train(engine: ModelEngine, *, samples: int = 4, takes=None) -> None:
    """One update on `samples` sequences of 1024 tokens, packed."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(0, 32000, (count,), generator=generator).tolist()

    batch = from_sequences(
        [draw(24) for _ in range(samples)], responses=[draw(1000) for _ in range(samples)]
    )
    micro = make_micro_batch(
        batch,
        samples=list(range(samples)),
        fields=(),
        pad_to_multiple=engine.pad_to_multiple,
        device=engine.device,
    )

    def loss(hidden: Tensor, micro: MicroBatch) -> LossResult:
        found = engine.log_probs(hidden, micro_batch=micro, temperature=1.0)
        value = -found.logprobs.sum() - 0.01 * found.entropy.sum()
        count = torch.tensor(found.logprobs.numel(), device=engine.device)
        sums = {"loss": torch.stack([value.detach().double(), count.double()])}
        return LossResult(loss_sum=value, count=count, sums=sums)

    engine.train_step([micro], loss=loss, learning_rate=1e-3, takes=takes)


def state_of(engine: ModelEngine) -> dict[str, Tensor]:
    """On the host."""
    parts = named_parts(engine.model, optimizer=engine.optimizer)
    return {
        f"{kind} {name}": tensor.detach().cpu()
        for kind in (WEIGHTS, OPTIMIZER)
        for name, tensor in parts[kind]().items()
    }


def allocated_bytes(device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@pytest.mark.parametrize("spec", SPECS)
def test_offload_frees_what_it_says_and_brings_back_every_bit(context, model_dir, spec):
    engine, device = build(context, model_dir, spec=spec), context.device
    train(engine)
    copier = Copier(device, current_phase=lambda: "test")
    engine.make_offloadable(KINDS, copier=copier, moves=True)
    before = state_of(engine)
    host = engine.memory.parts[WEIGHTS]._host
    counts = []
    for cycle in range(10):
        here = allocated_bytes(device)
        engine.memory.release(*KINDS)
        # Memory that is free too early would be overwritten by this, while it is still copied.
        noise = [torch.full((1 << 26,), float("nan"), device=device) for _ in range(8)]
        del noise
        away = sum(part.away_bytes for part in engine.memory.parts.values())
        freed = here - allocated_bytes(device)
        assert away <= freed + 512 * len(before), (away, freed)  # the allocator rounds up
        assert freed <= away * 1.01 + (1 << 22)
        engine.memory.fetch(*KINDS)
        engine.memory.wait(*KINDS)
        # A storage that comes back may lie in a block of its own: 2 MB at most are left over.
        assert abs(allocated_bytes(device) - here) <= 2 * len(before) * 512 + (1 << 24)
        if cycle in (0, 9):
            after = state_of(engine)
            assert all(torch.equal(after[name], before[name]) for name in before)
        engine.memory.will_change(WEIGHTS, OPTIMIZER)  # so that the next cycle copies again
        counts.append((host.num_allocations, host.num_bytes))
    assert len(set(counts)) == 1, counts
    kept = sum(place.numel() for place in host._places.values())
    assert kept <= host.num_bytes <= kept + 512 * len(before)
    assert all(place.is_pinned() for place in host._places.values())
    torch.cuda.synchronize()
    finished = copier.take_finished()
    for direction in ("to_host", "to_device"):
        done = [transfer for transfer in finished if transfer.direction == direction]
        size, seconds = sum(t.num_bytes for t in done), sum(t.seconds for t in done)
        print(f"\n{spec} {direction}: {size / 1e9:.2f} GB in {seconds:.3f} s, "
              f"{size / 1e9 / seconds:.1f} GB/s")  # fmt: skip
        assert size > 0 and seconds > 0


def test_offload_in_parts_and_training_between(context, model_dir):
    """Two engines take the same updates; one is off the device between them."""
    plain, moved = (build(context, model_dir) for _ in range(2))
    copier = Copier(context.device, current_phase=lambda: "test")
    moved.make_offloadable((GRADIENTS, OPTIMIZER), copier=copier, moves=True)
    moved.memory.release(GRADIENTS, OPTIMIZER)
    for _ in range(3):
        train(plain)
        with moved.memory.on_device(GRADIENTS, OPTIMIZER):
            train(moved)
    with moved.memory.on_device(OPTIMIZER):
        mine, other = state_of(moved), state_of(plain)
    # The embedding's gradient is added up by atomics, in any order.
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name].float(), tensor.float(), atol=2e-2, rtol=2e-2)
    readable = moved.memory.readable
    optimizer = named_parts(moved.model, optimizer=moved.optimizer)[OPTIMIZER]()
    for name, tensor in optimizer.items():
        assert torch.equal(readable(tensor), mine[f"{OPTIMIZER} {name}"]), name


def lean_loss():
    path = ROOT / "benchmarks" / "lean_loss.py"
    spec = importlib.util.spec_from_file_location("lean_loss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_array_of_logits_never_exists(context, dtype):
    figures = dict(tokens=8192, vocabulary=131072, hidden=1024, device=context.device, dtype=dtype)
    lean_loss().measure(**figures)  # libraries allocate workspaces
    found = lean_loss().measure(**figures)
    print(f"\n{dtype}: {json.dumps(found)}")
    assert 0 < found["share"] <= 1 / 8


@pytest.mark.parametrize("spec", SPECS)
def test_recompute_keeps_less_and_gives_the_same_gradients(context, model_dir, spec):
    ways = {
        "none": RecomputeConfig(),
        "again": RecomputeConfig(),
        "selective": RecomputeConfig(granularity="selective"),
        "full_4": RecomputeConfig(granularity="full", num_layers=4),
        "full": RecomputeConfig(granularity="full"),
    }
    peaks, gradients = {}, {}
    for way, recompute in ways.items():
        engine = build(context, model_dir, spec=spec, recompute=recompute)
        train(engine, takes=lambda _: False)
        before = allocated_bytes(context.device)
        torch.cuda.reset_peak_memory_stats(context.device)
        train(engine, takes=lambda _: False)
        torch.cuda.synchronize()
        peaks[way] = torch.cuda.max_memory_allocated(context.device) - before
        gradients[way] = {n: p.main_grad.cpu() for n, p in engine.model.parameters().items()}
        del engine
    print(f"\n{spec}, activations' peak, GB:", {w: round(p / 1e9, 3) for w, p in peaks.items()})
    assert peaks["full"] < peaks["full_4"] < peaks["none"]
    # Fused attention keeps little that could be computed again.
    assert peaks["selective"] <= peaks["none"] * 1.1
    for way in ways:
        for name, expected in gradients["none"].items():
            # bf16 kernels that add by atomics do not give the same twice.
            noise = (gradients["again"][name] - expected).norm()
            difference = (gradients[way][name] - expected).norm()
            assert difference <= 3 * noise + 1e-3 * expected.norm() + 1e-6, (way, name, noise)


def test_running_out_says_where_and_of_what(context, model_dir, tmp_path):
    engine = build(context, model_dir)
    config = Config()
    config.run.output_dir = str(tmp_path)
    config.logging.memory_snapshot_on_oom = True
    ledger = PhaseLedger(rank=0, device=context.device)
    report = OutOfMemoryReport(
        config, context=context, ledger=ledger, suggest=lambda *_, **__: ["offload the optimizer"]
    )
    try:
        ledger.start_step(7)
        with ledger.phase("log_prob"):
            torch.ones(1 << 20, device=context.device)
        with pytest.raises(JobError) as caught:
            try:
                with ledger.phase("update_actor"):
                    torch.empty(1 << 44, dtype=torch.uint8, device=context.device)
            except torch.cuda.OutOfMemoryError as error:
                report.raise_for(error)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    message = str(caught.value)
    print(f"\n{message}")
    first = message.splitlines()[0]
    assert first.startswith("out of memory on rank 0, cuda:0, in update_actor of step 7: CUDA out")
    assert "GB free on the device" in message and "  log_prob  " in message
    assert "actor weights (" in message and "actor gradients (" in message
    assert message.count("offload the optimizer") == 1
    assert (tmp_path / "oom_rank_0000.pickle").stat().st_size > 0
    del engine


def test_ledger_and_monitor_of_a_gpu(context):
    device = context.device
    ledger = PhaseLedger(rank=0, device=device)
    ledger.start_step(1)
    with ledger.phase("value"):
        held = torch.ones(250_000_000, device=device)  # 1 GB
    record = ledger.finish_step().phases[0]
    assert record.allocated_gb - record.entry_gb == pytest.approx(1.0, abs=0.01)
    assert record.active_gb >= record.allocated_gb
    assert record.device_used_gb >= record.reserved_gb >= record.allocated_gb
    assert 0 <= record.fragmentation < 1 and record.alloc_retries == 0
    line = monitor_line(device, step=100)
    assert line.startswith("[Step 100] GPU: cuda:0 | Allocated: ") and "| Active: " in line
    assert "Allocated memory" in allocator_summary(device)
    del held


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_a_run_with_everything_offloaded(quickstart, tmp_path, engine):  # noqa: F811
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed here")
    overrides = [
        *ONE_RANK,
        f"rollout.engine={engine}",
        "rollout.tensor_parallel_size=1",
        "ref.offload=true",
        "logging.monitor_interval_steps=1",
        "checkpoint.interval_steps=2",
        "faults.check_weights=true",
    ]
    overrides += [f"{r}.offload_{k}=true" for r in ("actor", "critic") for k in KINDS]
    metrics = run(quickstart, tmp_path / "run", overrides, num_processes=1)
    assert len(metrics) == 4
    for step in metrics:
        assert step["parity/logprob_abs_diff_mean"] <= 0.05
        assert step["grad_norm/actor"] > 0 and step["grad_norm/critic"] > 0
    ledger = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    moved = [line for line in ledger if line.get("purpose") == "offload" and line["step"] == 3]
    for line in moved:
        print(line)
    assert {line["collective"] for line in moved} == {"to_host", "to_device"}
    assert (tmp_path / "run/checkpoints/step_000004").exists()
