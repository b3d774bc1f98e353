"""The same model on one GPU and on two, at TP2, PP2 and DP2: the same numbers, and how much faster.

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --shapes llama-3.2-1b llama-3.2-3b
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --shapes tiny --device cpu --rounds 1

Every layout gets the same weights, by the names of the logical tensors, and the same batch: a
log-prob pass and an actor update, a value pass and a critic update, of the whole batch as one
mini-batch, at learning rate 0, so that nothing moves. Compared with one GPU (rank 0 alone) are all
metrics, gradient norms, log-probs and values. The row "one, half" is one GPU with micro-batches of
half the size: what rounding alone does. Times are medians of the rounds after one that is not
counted. Exit code 1 where a layout differs by more than TOLERANCES.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from zlib import crc32

import torch
import torch.distributed as dist
from gpu_machine import describe, print_header, seconds_of
from gpu_roles import RoleOptions, build_role, new_factory, ppo_step, settle
from gpu_shapes import SHAPES, lengths_of_about, random_batch
from torch import Tensor
from train_step import Setting

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.groups import GroupFactory
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.models.build import RoleModel
from rlhf_megatron.ppo import UpdateReport
from rlhf_megatron.ranks import run_ranks

LAYOUTS = {
    "one": ParallelLayout((0,)),
    "one, half": ParallelLayout((0,)),
    "tp2": ParallelLayout((0, 1), tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelLayout((0, 1), pipeline_model_parallel_size=2),
    "dp2": ParallelLayout((0, 1), data_parallel_size=2),
}
FILL = 0.99
"""Share of the micro-batches' token budget that the samples come to."""
WEIGHTS_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What may lie between a layout and one GPU."""

    relative: float
    """Of losses and gradient norms."""
    absolute: float
    """Of losses, beside it: the policy loss is a mean whose parts cancel."""
    mean: float
    """Of |difference| over log-probs, and over values."""


TOLERANCES = {
    "bf16": Tolerance(relative=0.02, absolute=2e-3, mean=0.02),
    "fp32": Tolerance(relative=1e-4, absolute=1e-5, mean=1e-4),
}
COMPARED = (
    "ppo/policy_loss",
    "ppo/entropy",
    "ppo/approx_kl",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
)


@dataclass
class Found:
    """What one layout gave, on its first rank."""

    metrics: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """"logprobs" and "values" of each response token."""
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gb: dict[str, float] = field(default_factory=dict)
    """Per role, the most that torch had allocated on rank 0's GPU; 0 on a CPU."""


def fill_by_name(model: RoleModel, *, rank: int, device: torch.device) -> None:
    """Weights that depend on the logical tensors' names alone, whatever the layout."""
    shapes = {t.name: t.shape for t in logical_tensors(model.arch, head=model.head)}
    parameters, whole = model.parameters(), {}
    with torch.no_grad():
        for place in model.rank_layout(rank):
            if place.tensor not in whole:
                whole = {place.tensor: _values(place.tensor, shapes[place.tensor], device=device)}
            value = whole[place.tensor][place.box.slices()]
            target = parameters[place.parameter][place.region(place.box)]
            target.copy_(value)


def _values(name: str, shape: tuple[int, ...], *, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    noise = torch.randn(shape, device=device, generator=generator)
    return WEIGHTS_STD * noise if len(shape) > 1 else 1 + 0.1 * noise


def run_layout(name: str, *, setting: Setting) -> Found:
    """Actor and critic, one after the other, on the ranks of the layout."""
    found = Found()
    if setting.context.rank in LAYOUTS[name].ranks:
        for role in ("actor", "critic"):
            engine = build_role(
                role, arch=setting.arch, options=setting.options, context=setting.context,
                factory=setting.factory, layout=LAYOUTS[name],
            )  # fmt: skip
            fill_by_name(engine.model, rank=setting.context.rank, device=setting.device)
            engine.weights_changed()
            settle(setting.device)
            _run_role(role, engine=engine, name=name, setting=setting, found=found)
            del engine
            settle(setting.device)
    dist.barrier(group=setting.context.job_group)
    return found


def _run_role(role: str, *, engine: ModelEngine, name: str, setting: Setting, found: Found) -> None:
    batch, device = setting.batch, setting.device
    ppo = ppo_step(
        **{role: engine},
        micro_batch_tokens=setting.micro_batch_tokens // (2 if name == "one, half" else 1),
        max_response_tokens=setting.shape.max_response_tokens,
    )
    plan = [[list(range(len(batch)))]]

    def infer() -> None:
        if role == "critic":
            found.tokens["values"] = ppo.values(batch, plan=plan[0])["values"]
        else:
            found.tokens["logprobs"] = ppo.log_probs(engine, batch=batch, plan=plan[0])

    def update() -> UpdateReport:
        if role == "critic":
            return ppo.update_critic(batch, plan=plan, learning_rate=0.0)
        return ppo.update_actor(batch, plan=plan, learning_rate=0.0, kl_coefficient=0.0)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    infer()
    if role == "actor":
        _set_old_logprobs(name, setting=setting, found=found)
    report = update()
    found.metrics |= report.metrics() | {f"grad_norm/{role}": report.grad_norm}
    works: dict[str, Callable[[], object]] = {f"{role} pass": infer, f"{role} update": update}
    for work, run in works.items():
        found.seconds[work] = median(seconds_of(run, device=device) for _ in range(setting.rounds))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    found.peak_gb[role] = peak / 1e9


def _set_old_logprobs(name: str, *, setting: Setting, found: Found) -> None:
    """Those of the first layout plus noise, so that ratios lie around 1: most tokens count, and
    some are clipped. The others have them from its rank."""
    if name == "one":
        generator = torch.Generator().manual_seed(3)
        logprobs = found.tokens["logprobs"]
        noise = 0.1 * torch.randn(len(logprobs), generator=generator)
        setting.batch.response["old_logprobs"] = logprobs + noise


def share_old_logprobs(setting: Setting) -> None:
    """From rank 0 to all. Collective over the job."""
    old = setting.batch.response["old_logprobs"].to(setting.device)
    dist.broadcast(old, src=0, group=setting.context.job_group)
    setting.batch.response["old_logprobs"] = old.cpu()


def problems(found: Found, *, one: Found, tolerance: Tolerance) -> list[str]:
    """Where a layout differs from one GPU by more than it may."""
    wrong = []
    for key in COMPARED:
        value, expected = found.metrics[key], one.metrics[key]
        bound = tolerance.relative * abs(expected)
        bound += 0 if key.startswith("grad_norm") else tolerance.absolute
        if not abs(value - expected) <= bound:
            wrong.append(f"{key} {value:.6g} instead of {expected:.6g}")
    for key, values in found.tokens.items():
        mean = float((values - one.tokens[key]).abs().mean())
        if not mean <= tolerance.mean:
            wrong.append(f"{key}: |difference| {mean:.3g} on average")
    if not all(math.isfinite(value) for value in found.metrics.values()):
        wrong.append("not finite")
    return wrong


def table(results: dict[str, Found]) -> str:
    """Numbers with their difference to one GPU, then times."""
    one = results["one"]
    lines = [f"{'':<20}" + "".join(f"{name:>34}" for name in results)]
    for key in COMPARED:
        cells = [
            f"{found.metrics[key]:>13.6g} ({found.metrics[key] - one.metrics[key]:+10.2e})"
            for found in results.values()
        ]
        lines.append(f"{key:<20}" + "".join(f"{cell:>34}" for cell in cells))
    for key in ("logprobs", "values"):
        differences = [(f.tokens[key] - one.tokens[key]).abs() for f in results.values()]
        cells = [f"mean {d.mean():8.2e} max {d.max():8.2e}" for d in differences]
        lines.append(f"{key:<20}" + "".join(f"{cell:>34}" for cell in cells))
    for work, seconds in one.seconds.items():
        cells = [
            f"{1e3 * f.seconds[work]:9.1f} ms  x {seconds / f.seconds[work]:.2f}"
            for f in results.values()
        ]
        lines.append(f"{work:<20}" + "".join(f"{cell:>34}" for cell in cells))
    for role in one.peak_gb:
        cells = [f"{found.peak_gb[role]:.1f} GB" for found in results.values()]
        lines.append(f"{f'{role} peak':<20}" + "".join(f"{cell:>34}" for cell in cells))
    return "\n".join(lines)


def run_shape(
    name: str,
    *,
    options: argparse.Namespace,
    context: DistributedContext,
    factory: GroupFactory,
    folder: str,
) -> dict:
    """All layouts, "one" first; prints the table on rank 0 and returns what goes into the file."""
    shape = SHAPES[name]
    arch = shape.write(folder)
    micro_batch_tokens = options.micro_batch_tokens or shape.micro_batch_tokens
    lengths = lengths_of_about(
        shape, num_tokens=int(FILL * micro_batch_tokens * options.micro_batches)
    )
    precision = options.precision or ("bf16" if context.is_cuda else "fp32")
    setting = Setting(
        arch=arch, shape=shape, batch=random_batch(lengths, vocab_size=arch.vocab_size),
        micro_batch_tokens=micro_batch_tokens,
        options=RoleOptions(
            precision=precision, layer_spec=options.layer_spec, recompute=options.recompute,
            kept_logits_gb=options.kept_logits_gb,
        ),
        rounds=options.rounds, context=context, factory=factory,
    )  # fmt: skip
    results: dict[str, Found] = {}
    for layout in ["one", *(word for word in options.layouts if word != "one")]:
        results[layout] = run_layout(layout, setting=setting)
        if layout == "one":
            share_old_logprobs(setting)
        if context.rank == 0:
            times = ", ".join(f"{k} {1e3 * s:.1f}" for k, s in results[layout].seconds.items())
            print(f"{name} {layout}: {results[layout].metrics}\n  ms: {times}", flush=True)
    if context.rank != 0:
        return {}
    tolerance = TOLERANCES[precision]
    wrong = {
        layout: problems(found, one=results["one"], tolerance=tolerance)
        for layout, found in results.items()
    }
    batch = setting.batch
    print(
        f"\n{name}, {precision}: {len(batch)} samples, {batch.num_tokens} tokens, of them "
        f"{batch.num_response_tokens} in responses; x: one GPU's time over this one's\n"
        f"{table(results)}\n{tolerance}"
    )
    for layout, texts in wrong.items():
        print(f"{layout}: {'; '.join(texts) or 'equal within tolerance'}", flush=True)
    return {
        "tokens": batch.num_tokens,
        "problems": wrong,
        "layouts": {
            layout: {"metrics": f.metrics, "seconds": f.seconds, "peak_gb": f.peak_gb}
            for layout, f in results.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-3.2-1b"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto"
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--kept-logits-gb", type=float, default=0.0)
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="default: the shape's")
    parser.add_argument("--micro-batches", type=int, default=8, help="of an update, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    def body(context: DistributedContext, _: object) -> int:
        assert context.world_size == 2, "start it on two ranks"
        if context.rank == 0:
            print_header("two_gpus", machine=describe(context.device))
        factory = new_factory(context)
        report = {}
        for name in options.shapes:
            with tempfile.TemporaryDirectory() as folder:
                report[name] = run_shape(
                    name, options=options, context=context, factory=factory, folder=folder
                )
        failed = torch.tensor(
            [context.rank == 0 and any(t for f in report.values() for t in f["problems"].values())],
            dtype=torch.int64,
            device=context.device,
        )
        dist.broadcast(failed, src=0, group=context.job_group)
        if context.rank == 0 and options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        return int(failed)

    return run_ranks(body, config=DistributedConfig(device=options.device))


if __name__ == "__main__":
    sys.exit(main())
