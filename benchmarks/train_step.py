"""Speed of the training step: log-prob pass, actor update, value pass, critic update.

    python benchmarks/train_step.py --shape llama-3.2-1b --layer-spec transformer_engine
    python benchmarks/train_step.py --shape tiny --device cpu --rounds 2

One rank, random weights, random tokens of realistic lengths (gpu_shapes.py), through the code that
the trainer calls, the packing of the micro-batches included. Each role is alone in memory while it
is measured. Medians of the rounds, from an idle device to an idle device. MFU is against the rate
of a large matrix product in the same call, the higher of before and after; gpu_work.py says what
counts as FLOPs. --profile FILE adds a table of one actor update's kernels, and its trace in FILE.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_machine import dense_tflops, describe, join, print_header, seconds_of, synchronize
from gpu_profile import host_syncs, profiled, sync_table
from gpu_roles import (
    LEARNING_RATE,
    RoleOptions,
    build_role,
    micro_batches,
    new_factory,
    ppo_step,
    settle,
)
from gpu_shapes import SHAPES, Shape, draw_lengths, lengths_of_about, random_batch
from gpu_work import Flops, Packing, flops_of, packing_of

from rlhf_megatron.algorithms.minibatch import mini_batches
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.distributed.groups import GroupFactory
from rlhf_megatron.distributed.start import DistributedContext, finish
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import ModelArchitecture

FILL = 0.99
"""Share of the micro-batches' token budget that the samples come to."""
STEP_SAMPLES, MINI_BATCH_SAMPLES = 1024, 256
"""Of the whole step whose packing is shown beside that of the measured batch."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind of work on the batch."""

    name: str
    seconds: list[float]
    """Of each round."""
    tokens: int
    flops: Flops
    peak_gb: float
    """Most that torch had allocated on the GPU, in 10^9 bytes; 0 on a CPU."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    def row(self, *, dense_tflops: float) -> str:
        rates = [
            flops / self.median_seconds / 1e12
            for flops in (self.flops.response_tokens, self.flops.all_tokens)
        ]
        spread = (max(self.seconds) - min(self.seconds)) / self.median_seconds
        return (
            f"{self.name:<16}{self.median_seconds * 1e3:>10.1f}{spread:>8.1%}"
            f"{self.tokens / self.median_seconds:>12,.0f}"
            + "".join(f"{rate:>10.4g}{rate / dense_tflops:>8.1%}" for rate in rates)
            + f"{self.peak_gb:>9.2f}"
        )

    def figures(self, *, dense_tflops: float) -> dict[str, Any]:
        return asdict(self) | {
            "median_seconds": self.median_seconds,
            "tokens_per_second": self.tokens / self.median_seconds,
            "mfu": self.flops.response_tokens / self.median_seconds / 1e12 / dense_tflops,
            "mfu_all_tokens": self.flops.all_tokens / self.median_seconds / 1e12 / dense_tflops,
        }


HEADER = (
    f"{'':<16}{'':>10}{'':>8}{'':>12}{'head at response':>18}{'head at all':>18}\n"
    f"{'':<16}{'median ms':>10}{'spread':>8}{'tokens/s':>12}"
    f"{'TFLOP/s':>10}{'MFU':>8}{'TFLOP/s':>10}{'MFU':>8}{'peak GB':>9}"
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured, and where."""

    arch: ModelArchitecture
    shape: Shape
    batch: RaggedBatch
    micro_batch_tokens: int
    options: RoleOptions
    rounds: int
    context: DistributedContext
    factory: GroupFactory

    @property
    def device(self) -> torch.device:
        return self.context.device


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of work of a role."""

    name: str
    run: Callable[[], object]
    is_update: bool


def works_of(role: str, *, engine: ModelEngine, setting: Setting) -> list[Work]:
    """The role's pass and its update, on the whole batch as one mini-batch."""
    batch = setting.batch
    ppo = ppo_step(
        **{role: engine},
        micro_batch_tokens=setting.micro_batch_tokens,
        max_response_tokens=setting.shape.max_response_tokens,
    )
    mini_batches = [list(range(len(batch)))]

    def update() -> None:
        epochs = [mini_batches]
        if role == "critic":
            report = ppo.update_critic(batch, plan=epochs, learning_rate=LEARNING_RATE)
        else:
            report = ppo.update_actor(
                batch, plan=epochs, learning_rate=LEARNING_RATE, kl_coefficient=0.0
            )
        assert len(report.steps) == 1 and report.grad_norm > 0, report

    def log_probs() -> None:
        found = ppo.log_probs(engine, batch=batch, plan=mini_batches)
        batch.response["old_logprobs"] = found  # so that the update's ratios are near 1

    def values() -> None:
        ppo.values(batch, plan=mini_batches)

    passes = {"actor": log_probs, "critic": values}
    names = {"actor": "log-prob pass", "critic": "value pass"}
    return [
        Work(name=names[role], run=passes[role], is_update=False),
        Work(name=f"{role} update", run=update, is_update=True),
    ]


def measure(work: Work, *, role: str, setting: Setting) -> Measured:
    """Two calls that are not counted, then the rounds."""
    device = setting.device
    for _ in range(2):
        work.run()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [seconds_of(work.run, device=device) for _ in range(setting.rounds)]
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return Measured(
        name=work.name,
        seconds=seconds,
        tokens=setting.batch.num_tokens,
        flops=flops_of(
            setting.arch,
            batch=setting.batch,
            output_size=1 if role == "critic" else setting.arch.vocab_size,
            is_update=work.is_update,
        ),
        peak_gb=peak,
    )


def measure_role(role: str, *, setting: Setting, profile: Path | None) -> dict[str, Any]:
    """Its works and, of the actor, packing and profile. The role is gone afterwards."""
    engine = build_role(
        role,
        arch=setting.arch,
        options=setting.options,
        context=setting.context,
        factory=setting.factory,
    )
    works = works_of(role, engine=engine, setting=setting)
    settle(setting.device)
    found: dict[str, Any] = {
        "works": [measure(work, role=role, setting=setting) for work in works],
        "packing": packing_of(
            micro_batches(
                engine,
                batch=setting.batch,
                samples=range(len(setting.batch)),
                micro_batch_tokens=setting.micro_batch_tokens,
            ),
            batch=setting.batch,
        ),
        "step_packing": packing_of_step(engine, setting=setting),
    }
    if profile is not None:
        update = works[-1].run
        found["pass_profile"] = profiled(works[0].run, device=setting.device)
        found["profile"] = profiled(update, device=setting.device, trace_file=profile)
        found["host_syncs"] = host_syncs(update, device=setting.device)
    del works, engine
    gc.unfreeze()
    gc.collect()
    return found


def packing_of_step(engine: ModelEngine, *, setting: Setting) -> list[Packing]:
    """Of each mini-batch of a step whose size was not chosen to fill its micro-batches."""
    lengths = draw_lengths(setting.shape, num_samples=STEP_SAMPLES, responses_per_prompt=4)
    batch = random_batch(lengths, vocab_size=setting.arch.vocab_size)
    return [
        packing_of(
            micro_batches(
                engine,
                batch=batch,
                samples=samples,
                micro_batch_tokens=setting.micro_batch_tokens,
            ),
            batch=batch,
        )
        for samples in mini_batches(STEP_SAMPLES, mini_batch_samples=MINI_BATCH_SAMPLES, seed=0)
    ]


def build_setting(
    options: argparse.Namespace, *, context: DistributedContext, folder: str
) -> Setting:
    shape = SHAPES[options.shape]
    arch = shape.write(folder)
    micro_batch_tokens = options.micro_batch_tokens or shape.micro_batch_tokens
    lengths = lengths_of_about(
        shape, num_tokens=int(FILL * micro_batch_tokens * options.micro_batches)
    )
    return Setting(
        arch=arch,
        shape=shape,
        batch=random_batch(lengths, vocab_size=arch.vocab_size),
        micro_batch_tokens=micro_batch_tokens,
        options=RoleOptions(
            precision=options.precision or ("bf16" if context.is_cuda else "fp32"),
            layer_spec=options.layer_spec,
            recompute=options.recompute,
            kept_logits_gb=options.kept_logits_gb,
            fp8=options.fp8,
        ),
        rounds=options.rounds,
        context=context,
        factory=new_factory(context),
    )


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Of every benchmark that trains."""
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument(
        "--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto"
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--kept-logits-gb", type=float, default=0.0)
    parser.add_argument("--fp8", action="store_true", help="as actor.fp8; Transformer Engine only")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=0, help="default: the shape's (16384)"
    )
    parser.add_argument("--micro-batches", type=int, default=8, help="of an update, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_shared_options(parser)
    parser.add_argument("--roles", nargs="+", choices=("actor", "critic"), default=None)
    parser.add_argument("--profile", type=Path, help="write the trace of one actor update there")
    options = parser.parse_args()
    roles = options.roles or ["actor", "critic"]

    context = join(options.device)
    machine = describe(context.device)
    with tempfile.TemporaryDirectory() as folder:
        setting = build_setting(options, context=context, folder=folder)
    batch = setting.batch
    print_header(f"train_step, {options.shape}, {setting.options}", machine=machine)
    print(
        f"  {len(batch)} samples, {batch.num_tokens} tokens, of them {batch.num_response_tokens} "
        f"in responses; median of {options.rounds} rounds"
    )
    before = dense_tflops(context.device)
    found = {
        role: measure_role(
            role, setting=setting, profile=options.profile if role == roles[0] else None
        )
        for role in roles
    }
    after = dense_tflops(context.device)
    dense = max(before, after)
    print(f"  dense product: {before:.4g} TFLOP/s before, {after:.4g} after")
    print(f"  packing: {found[roles[0]]['packing']}")
    step = found[roles[0]]["step_packing"]
    print(f"  packing of {STEP_SAMPLES} samples in mini-batches of {MINI_BATCH_SAMPLES}:")
    for packing in step:
        print(f"    {packing}")
    print(HEADER)
    works = [work for role in roles for work in found[role]["works"]]
    for work in works:
        print(work.row(dense_tflops=dense))
    report: dict[str, Any] = {
        "machine": machine,
        "options": {name: str(value) for name, value in vars(options).items()},
        "samples": len(batch),
        "tokens": batch.num_tokens,
        "response_tokens": batch.num_response_tokens,
        "dense_tflops": {"before": before, "after": after},
        "packing": asdict(found[roles[0]]["packing"]),
        "step_packing": [asdict(packing) for packing in step],
        "works": {work.name: work.figures(dense_tflops=dense) for work in works},
    }
    if options.profile is not None:
        profile, syncs = found[roles[0]]["profile"], found[roles[0]]["host_syncs"]
        print(f"profile of its pass without gradients\n{found[roles[0]]['pass_profile'].table()}")
        print(f"profile of one {roles[0]} update\n{profile.table()}\n{sync_table(syncs)}")
        report |= {"profile": profile.figures(), "host_syncs": syncs}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    finish(0)


if __name__ == "__main__":
    main()
