"""Speed and memory of the checkpoint tools against `safetensors` in one process.

    python benchmarks/checkpoint_conversion.py --folder /disk/with/10GB/free

Makes a random Llama of 1.2 billion parameters in bfloat16 (2.5 GB). A round reads and writes its
bytes in one process with the safetensors library, imports it at TP2 x PP2 and exports it again on 4
processes. The three are measured alike:

- before each, what is to be written elsewhere is on the disk, what it will read is in the page
  cache, and nothing has been removed for some seconds: in a virtual machine that reports free
  memory to its host, writing costs a tenth of the processor time right after large files were
  removed, while their memory has not been given back;
- writes are timed until they are on the disk (fsync); starting the processes is not timed;
- every other round runs safetensors last instead of first.

An extra first round, which is not timed, compares all tensors and measures memory: asking the
kernel for it takes as much processor time as the work. Prints, and with --json writes, seconds and
processor seconds, ratios to safetensors (median of the rounds against median), bytes read over all
ranks, and each rank's peak of resident anonymous memory, its writer processes included: pages of
mapped files are the page cache's.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from memory_peak import MemoryPeak
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.launcher import launch
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.ranks import run_ranks

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
NUM_RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL
FILE_BYTES = 1.0e9
PAUSE_SECONDS = 15.0
SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}


def make_model(folder: Path) -> int:
    """Write the random model; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    noise = torch.randn(1 << 26, generator=torch.Generator().manual_seed(1)).bfloat16()
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled, total, start = 0, 0, 0
    for tensor in logical_tensors(read_architecture(folder), head="lm"):
        count = tensor.box.numel
        repeated = noise.roll(start).repeat(-(-count // noise.numel()))[:count]
        start += 7919
        if filled + 2 * count > FILE_BYTES and groups[-1]:
            _write_group(folder, groups)
            groups.append({})
            filled = 0
        groups[-1][tensor.name] = repeated.view(tensor.shape).clone()
        filled, total = filled + 2 * count, total + 2 * count
    _write_group(folder, groups)
    index = {"weight_map": {name: _file(i) for i, group in enumerate(groups) for name in group}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _file(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def _write_group(folder: Path, groups: list[dict[str, torch.Tensor]]) -> None:
    save_file(groups[-1], folder / _file(len(groups) - 1))
    groups[-1] = dict.fromkeys(groups[-1], torch.empty(0))


def get_ready(source: Path) -> None:
    """Bring disk, page cache and memory into the state that every measurement starts from."""
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
    time.sleep(PAUSE_SECONDS)


def processor_seconds() -> float:
    """Of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in used)


def safetensors_alone(model: Path, output: Path) -> dict[str, float]:
    """Read all tensors into memory and write them, file by file."""
    output.mkdir()
    get_ready(model)
    before, start = processor_seconds(), time.perf_counter()
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # clone: the library maps the file, and reads nothing until it must
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        save_file(tensors, output / path.name)
        written = os.open(output / path.name, os.O_RDONLY)
        os.fsync(written)
        os.close(written)
    seconds = time.perf_counter() - start
    used = processor_seconds() - before
    shutil.rmtree(output)
    return {"seconds": seconds, "processor_seconds": used}


def measure_rank(options: argparse.Namespace) -> int:
    """One rank of an import or export; rank 0 writes what all have measured."""

    def body(context: object, channel: object) -> None:
        import torch.distributed as dist

        from rlhf_megatron.checkpoint import convert

        work: dict[str, Callable[[], int]] = {
            "import": lambda: (
                convert.import_hf(
                    options.source,
                    output=options.target,
                    role="actor",
                    layout=ParallelLayout(
                        tuple(range(NUM_RANKS)), TENSOR_PARALLEL, PIPELINE_PARALLEL
                    ),
                    dtype="bfloat16",
                ).bytes_read
            ),
            "export": lambda: (
                convert.export_sharded(
                    options.source,
                    output=options.target,
                    role="actor",
                    max_shard_bytes=FILE_BYTES,
                    ranks_per_node=NUM_RANKS,
                ).bytes_read
            ),
        }
        if dist.get_rank() == 0:
            get_ready(options.source)
        dist.barrier()
        peak = MemoryPeak(torch.device("cpu")) if options.memory else None
        used, start = processor_seconds(), time.perf_counter()
        bytes_read = work[options.measure]()
        dist.barrier()
        mine = {
            "seconds": time.perf_counter() - start,
            "processor_seconds": processor_seconds() - used,
            "bytes_read": bytes_read,
            "peak_bytes": peak.stop() if peak else 0,
        }
        everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            options.result.write_text(json.dumps(everyone))

    return run_ranks(body, config=DistributedConfig(device="cpu"))


def measured(
    kind: str, *, source: Path, target: Path, result: Path, memory: bool
) -> list[dict[str, float]]:
    """Run a conversion on its ranks; what each measured."""
    words = ["--measure", kind, "--source", source, "--target", target, "--result", result]
    command = [sys.executable, __file__, *map(str, words), *(["--memory"] if memory else [])]
    code = launch(command, num_processes=NUM_RANKS)
    if code:
        raise SystemExit(code)
    found: list[dict[str, float]] = json.loads(result.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to write and remove")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    for name in ("--measure", "--source", "--target", "--result"):
        parser.add_argument(name, type=str if name == "--measure" else Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.measure:
        return measure_rank(options)
    folder = options.folder / "checkpoint_conversion_benchmark"
    try:
        return benchmark(folder, rounds=options.rounds, json_path=options.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def benchmark(folder: Path, *, rounds: int, json_path: Path | None) -> int:
    """All rounds; prints each, then the ratios."""
    model = folder / "model"
    total = make_model(model)
    print(f"model: {total / 2e9:.3f} billion parameters, {total / 1e9:.3f} GB", flush=True)
    ranks = _convert(folder, memory=True)
    _check_equal(model, folder / "hf")
    _remove_outputs(folder)
    figures: dict[str, list[dict[str, float]]] = {"safetensors": [], "import": [], "export": []}
    for number in range(rounds):
        if number % 2 == 0:
            figures["safetensors"].append(safetensors_alone(model, folder / "copy"))
        for kind, found in _convert(folder, memory=False).items():
            figures[kind].append(
                {
                    "seconds": max(rank["seconds"] for rank in found),
                    "processor_seconds": sum(rank["processor_seconds"] for rank in found),
                }
            )
        _remove_outputs(folder)
        if number % 2 == 1:
            figures["safetensors"].append(safetensors_alone(model, folder / "copy"))
        line = ", ".join(
            f"{name} {found[-1]['seconds']:.2f} s ({found[-1]['processor_seconds']:.1f} CPU s)"
            for name, found in figures.items()
        )
        print(f"round {number + 1}: {line}", flush=True)
    summary: dict[str, object] = {"rounds": figures, "ranks": ranks}
    for kind in ("import", "export"):
        ratio = _median_seconds(figures["safetensors"]) / _median_seconds(figures[kind])
        read = sum(rank["bytes_read"] for rank in ranks[kind]) / total
        peak = max(rank["peak_bytes"] for rank in ranks[kind])
        over = peak - total / NUM_RANKS
        print(
            f"{kind}: {ratio:.2f} of the speed of safetensors; read {read:.4f} of the bytes; peak "
            f"{peak / 1e6:.0f} MB a rank, {over / 1e6:.0f} MB over a shard"
        )
        summary[kind] = {"speed_ratio": ratio, "read_ratio": read, "peak_over_shard_bytes": over}
    if json_path:
        json_path.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


def _convert(folder: Path, *, memory: bool) -> dict[str, list[dict[str, float]]]:
    """Import and export; what each rank measured."""
    result, checkpoint = folder / "result.json", folder / "checkpoint"
    return {
        kind: measured(kind, source=source, target=target, result=result, memory=memory)
        for kind, source, target in (
            ("import", folder / "model", checkpoint),
            ("export", checkpoint, folder / "hf"),
        )
    }


def _remove_outputs(folder: Path) -> None:
    for name in ("checkpoint", "hf"):
        shutil.rmtree(folder / name)


def _median_seconds(rounds: list[dict[str, float]]) -> float:
    return statistics.median(found["seconds"] for found in rounds)


def _check_equal(model: Path, again: Path) -> None:
    """Every tensor came back, bit for bit."""
    places = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    found = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(places) == set(found)
    for name, file in places.items():
        with (
            safe_open(model / file, framework="pt") as a,
            safe_open(again / found[name], framework="pt") as b,
        ):
            assert torch.equal(a.get_tensor(name), b.get_tensor(name)), name


if __name__ == "__main__":
    sys.exit(main())
