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
from typing import TYPE_CHECKING

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.launcher import launch
from rlhf_megatron.ranks import run_ranks

if TYPE_CHECKING:
    from rlhf_megatron.distributed.start import DistributedContext

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


def measure(context: "DistributedContext", *, options: argparse.Namespace) -> None:
    """One rank; rank 0 writes every rank's memory after each round."""
    import torch
    import torch.distributed as dist

    from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
    from rlhf_megatron.layout.architecture import read_architecture
    from rlhf_megatron.layout.parallel import ParallelLayout
    from rlhf_megatron.layout.vllm import vllm_layouts
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.reshard.config import ReshardConfig
    from rlhf_megatron.rollout.config import RolloutConfig
    from rlhf_megatron.rollout.contract import Prompt, SamplingParameters
    from rlhf_megatron.rollout.factory import build_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.rollout.worlds import make_engine_groups
    from rlhf_megatron.weight_sync import WeightSync

    arch = read_architecture(options.model)
    factory = GroupFactory(timeout_seconds=context.timeout_seconds, backend=context.backend)
    groups = build_role_groups("actor", layout=ParallelLayout(RANKS, 1, 2), factory=factory)
    assert groups is not None
    actor = build_model(
        arch,
        head="lm",
        groups=groups,
        precision="fp32",
        layer_spec_name="local",
        device=context.device,
        seed=1,
    )
    (group,) = make_engine_groups([RANKS], device=context.device)
    engine = build_engine(
        "vllm",
        model_dir=options.model,
        config=RolloutConfig(
            tensor_parallel_size=2, max_num_seqs=16, weight_update=options.weight_update
        ),
        ranks=RANKS,
        replica=0,
        group=group,
        dtype="float32",
        run_seed=1,
        max_model_len=128,
        device=context.device,
    )
    level_group_count()
    sync = WeightSync(
        actor,
        engine=engine,
        engine_layouts=vllm_layouts(arch, engines=[RANKS]),
        dtype=torch.float32,
        config=ReshardConfig(bucket_mb=4, verify="first"),
        rank=context.rank,
        job_group=context.job_group,
        device=context.device,
        node_of=context.node_of,
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
    memory, start = [], time.perf_counter()
    for version in range(options.syncs):
        with torch.no_grad():
            for parameter in actor.parameters().values():
                parameter.mul_(1.001 if version % 2 else 0.999)
        sync.run(version=version)
        engine.generate(prompts, sampling=sampling, step=version)
        memory.append(resident_bytes())
    found: list[list[int]] = [[] for _ in RANKS]
    dist.all_gather_object(found, memory)
    if context.rank == 0:
        result = {"seconds": time.perf_counter() - start, "resident_bytes": found}
        options.result.write_text(json.dumps(result))


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
        return run_ranks(
            lambda context, _: measure(context, options=options),
            config=DistributedConfig(device="cpu"),
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SETTINGS))
        result = folder / "result.json"
        words = [*sys.argv[1:], "--model", str(folder), "--result", str(result)]
        code = launch([sys.executable, __file__, *words], num_processes=len(RANKS))
        return code or report(json.loads(result.read_text()), options=options)


if __name__ == "__main__":
    sys.exit(main())
