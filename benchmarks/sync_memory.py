"""Whether weight syncs and rollouts leave memory behind: resident memory over many of them.

    python benchmarks/sync_memory.py                          200 syncs, vLLM on two CPU processes
    python benchmarks/sync_memory.py --weight-update reload   through vLLM's own reload

A random Llama of 8 million parameters in float32, as an actor of two pipeline stages, and one vLLM
engine of TP2 over the same two ranks. Each round changes all weights, syncs them, and answers 16
prompts, of which some share a beginning. After each round every rank notes its resident memory.
Prints, and with --json writes, the largest deviation from the memory after the warm-up, in percent;
exit code 1 where a rank's is above --bound.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "engine"), str(ROOT)]

from synced_actor import CPU, build_synced, new_factory  # noqa: E402

from rlhf_megatron.distributed.config import DistributedConfig  # noqa: E402
from rlhf_megatron.launcher import launch  # noqa: E402
from rlhf_megatron.layout.parallel import ParallelLayout  # noqa: E402
from rlhf_megatron.ranks import run_ranks  # noqa: E402
from rlhf_megatron.rollout.config import RolloutConfig  # noqa: E402
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters  # noqa: E402

RANKS = (0, 1)
RESPONSE_TOKENS = 24
PROMPT_TOKENS = (5, 40, 70, 9) * 4
PAGE_BYTES = 4096
SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measure(rank: int, *, model: Path, syncs: int, weight_update: str) -> list[int]:
    """One rank's resident bytes after each round."""
    import torch

    from rlhf_megatron.rollout.worlds import make_engine_groups

    factory = new_factory()
    synced = build_synced(
        rank,
        directory=model,
        layout=ParallelLayout(RANKS, 1, 2),
        engines=[RANKS],
        engine_groups=make_engine_groups([RANKS], device=CPU),
        factory=factory,
        config=RolloutConfig(tensor_parallel_size=2, max_num_seqs=16, weight_update=weight_update),
        bucket_mb=4,
        verify="first",
    )
    sampling = SamplingParameters(
        temperature=1.0,
        max_response_tokens=RESPONSE_TOKENS,
        responses_per_prompt=1,
        stop_token_ids=(),
    )
    prompts = [
        Prompt(prompt_id=i, token_ids=tuple(3 + (j * 7) % 3000 for j in range(length)))
        for i, length in enumerate(PROMPT_TOKENS)
    ]
    memory = []
    for version in range(syncs):
        with torch.no_grad():
            for parameter in synced.actor.parameters().values():
                parameter.mul_(1.001 if version % 2 else 0.999)
        synced.sync.run(version=version)
        synced.engine.generate(prompts, sampling=sampling, step=version)
        memory.append(resident_bytes())
    return memory


def measure_rank(options: argparse.Namespace) -> int:
    """One rank of the benchmark; rank 0 writes what all have measured."""

    def body(context: object, channel: object) -> None:
        import torch.distributed as dist

        start = time.perf_counter()
        memory = measure(
            dist.get_rank(),
            model=options.model,
            syncs=options.syncs,
            weight_update=options.weight_update,
        )
        found: list[list[int]] = [[] for _ in RANKS]
        dist.all_gather_object(found, memory)
        if dist.get_rank() == 0:
            result = {"seconds": time.perf_counter() - start, "resident_bytes": found}
            options.result.write_text(json.dumps(result))

    return run_ranks(body, config=DistributedConfig(device="cpu"))


def report(result: dict, *, options: argparse.Namespace) -> int:
    """Print the figures; the exit code."""
    worst = 0.0
    ranks = []
    for rank, memory in enumerate(result["resident_bytes"]):
        base, *after = memory[options.warmup - 1 :]
        percent = [100 * (now - base) / base for now in after]
        worst = max(worst, *map(abs, percent))
        ranks.append({"base_bytes": base, "end_percent": percent[-1], "most_percent": max(percent)})
        print(
            f"rank {rank}: {base / 1e6:.1f} MB after {options.warmup} syncs; then "
            f"{min(percent):+.3f} to {max(percent):+.3f} %, {percent[-1]:+.3f} % at the end"
        )
    summary = {
        "syncs": options.syncs,
        "warmup": options.warmup,
        "weight_update": options.weight_update,
        "seconds": result["seconds"],
        "worst_percent": worst,
        "ranks": ranks,
    }
    print(f"{options.syncs} syncs with rollouts in {result['seconds']:.1f} s; worst {worst:.3f} %")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if worst <= options.bound else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="syncs before the base is taken")
    parser.add_argument("--bound", type=float, default=1.0, help="percent (default: 1)")
    parser.add_argument("--weight-update", choices=("auto", "reload"), default="auto")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0 < options.warmup < options.syncs:
        parser.error("--warmup must be at least 1 and below --syncs")
    if options.result:
        return measure_rank(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SETTINGS))
        result = folder / "result.json"
        words = [*sys.argv[1:], "--model", str(folder), "--result", str(result)]
        code = launch([sys.executable, __file__, *words], num_processes=len(RANKS))
        return code or report(json.loads(result.read_text()), options=options)


if __name__ == "__main__":
    sys.exit(main())
