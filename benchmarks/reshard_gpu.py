"""The hand-over from training to rollout on one GPU: sleep, wake, weight sync, wake.

    python benchmarks/reshard_gpu.py --shape llama-3.2-3b
    python benchmarks/reshard_gpu.py --shape tiny --device cpu

An actor and a vLLM engine in one process, both TP1, bfloat16 on a GPU. Each round goes through the
trainer's order: sleep, free what torch caches, wake the weights, sync, wake the KV cache. The sync
is set against one device-to-device copy of the same bytes, taken in the same round, and, to tell
launches from bytes, against one copy for each parameter. Medians of the rounds; the ratio is the
median of the rounds' ratios. The first sync, which is not counted, is verified.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_engine import fill_with_noise, rollout_config, vllm_engine
from gpu_machine import describe, gpu_state, join, print_header, seconds_of
from gpu_roles import RoleOptions, build_role, new_factory, settle
from gpu_shapes import SHAPES
from torch import Tensor

from rlhf_megatron.distributed.start import DistributedContext, finish, release_cached_memory
from rlhf_megatron.placed_role import placed
from rlhf_megatron.reshard.config import ReshardConfig
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.weight_sync import WeightSync

STEPS = ("sleep", "free_cache", "wake_weights", "sync", "wake_kv_cache")


class Copies:
    """Copies of as many bytes as the engine's weights have, in memory of their own."""

    def __init__(self, engine: RolloutEngine) -> None:
        parameters = list(engine.parameters().values())
        # Tied parameters are one tensor.
        distinct = {tensor.data_ptr(): tensor for tensor in parameters}.values()
        self.sizes = [tensor.numel() for tensor in distinct]
        self.num_bytes = sum(tensor.nbytes for tensor in distinct)
        first = parameters[0]
        self._from, self._to = (
            torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device) for _ in range(2)
        )
        self._pairs: list[tuple[Tensor, Tensor]] = list(
            zip(self._to.split(self.sizes), self._from.split(self.sizes), strict=True)
        )

    def at_once(self) -> None:
        self._to.copy_(self._from)

    def one_by_one(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)


def measure(
    engine: RolloutEngine, *, sync: WeightSync, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Seconds of each step of the hand-over, round by round."""
    seconds: dict[str, list[float]] = {
        name: [] for name in (*STEPS, "resharder", "copy", "copy_each")
    }
    reports: list[float] = []

    def timed(name: str, work: Callable[[], object], *, counts: bool) -> None:
        took = seconds_of(work, device=device)
        if counts:
            seconds[name].append(took)

    copies = Copies(engine)
    for number in range(-1, rounds):
        counts = number >= 0

        def run_sync(version: int = number + 2) -> None:
            reports.append(sync.run(version=version).seconds)

        def free() -> None:
            release_cached_memory(device)

        timed("sleep", engine.sleep, counts=counts)
        timed("free_cache", free, counts=counts)
        timed("wake_weights", lambda: engine.wake(tags=["weights"]), counts=counts)
        timed("sync", run_sync, counts=counts)
        timed("copy", copies.at_once, counts=counts)
        timed("copy_each", copies.one_by_one, counts=counts)
        timed("wake_kv_cache", lambda: engine.wake(tags=["kv_cache"]), counts=counts)
        if counts:
            seconds["resharder"].append(reports[-1])
    return {
        "seconds": seconds,
        "bytes": copies.num_bytes,
        "num_parameters": len(copies.sizes),
        "ratios": {
            f"{way}_to_copy": median(
                mine / copy for mine, copy in zip(seconds[way], seconds["copy"], strict=True)
            )
            for way in ("sync", "resharder", "copy_each")
        },
    }


def prepare(
    options: argparse.Namespace, *, context: DistributedContext, folder: str
) -> tuple[RolloutEngine, WeightSync]:
    """Actor, engine, and the sync between them."""
    shape = SHAPES[options.shape]
    arch = shape.write(folder)
    precision = options.precision or ("bf16" if context.is_cuda else "fp32")
    actor = build_role(
        "actor",
        arch=arch,
        options=RoleOptions(precision=precision, layer_spec=options.layer_spec),
        context=context,
        factory=new_factory(context),
        trained=False,
    )
    engine = vllm_engine(
        shape,
        model_dir=folder,
        config=rollout_config(
            gpu_memory_utilization=options.gpu_memory_utilization, sleep_level=options.sleep_level
        ),
        precision=precision,
        context=context,
    )
    fill_with_noise(engine)
    sync = WeightSync(
        placed(actor),
        engine=engine,
        engine_layouts={0: engine.layout()},
        config=ReshardConfig(bucket_mb=options.bucket_mb, verify="first"),
        rank=0,
        group=context.job_group,
        device=context.device,
        node_of=context.node_of,
    )
    return engine, sync


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-3b")
    parser.add_argument(
        "--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sleep-level", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--bucket-mb", type=float, default=256.0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    context = join(options.device)
    machine = describe(context.device)
    print_header(
        f"reshard_gpu, {options.shape}, TP1 to TP1, sleep level {options.sleep_level}",
        machine=machine,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine, sync = prepare(options, context=context, folder=folder)
    print(f"  {sync}")
    settle(context.device)
    found = measure(engine, sync=sync, rounds=options.rounds, device=context.device)
    print(
        f"  {found['bytes'] / 1e9:.2f} GB in {found['num_parameters']} parameters; "
        f"median of {options.rounds} rounds"
    )
    print(f"{'':<34}{'ms':>10}{'GB/s':>10}")
    labels = {
        "sync": "sync, caches reset included",
        "resharder": "  of it the resharder's copies",
        "copy": "one copy of the same bytes",
        "copy_each": "one copy for each parameter",
    }
    for name, values in found["seconds"].items():
        took = median(values)
        # Read and written.
        rate = f"{2 * found['bytes'] / took / 1e9:>10.0f}" if name in labels else ""
        print(f"{labels.get(name, name):<34}{took * 1e3:>10.2f}{rate}")
    total = sum(median(found["seconds"][name]) for name in STEPS)
    print(f"{'sleep to awake':<34}{total * 1e3:>10.2f}")
    for name, ratio in found["ratios"].items():
        print(f"{name.replace('_', ' ')}: {ratio:.2f}")
    if options.json is not None:
        report = found | {
            "machine": machine | gpu_state("memory.used"),
            "options": {name: str(value) for name, value in vars(options).items()},
            "hand_over_seconds": total,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    finish(0)


if __name__ == "__main__":
    main()
