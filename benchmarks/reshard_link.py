"""The weight sync between GPUs: share of the link's rate, and speed-up over a full gather.

    torchrun --nproc-per-node 2 benchmarks/reshard_link.py
    torchrun --nproc-per-node 2 benchmarks/reshard_link.py --device cpu --shapes tiny --rounds 2

Many shapes, pairs of layouts (as in reshard.py) and settings in one start of the ranks. A setting
is BUCKET_MB:DIRECT_MB: transfer buffers as reshard.bucket_mb has them, and the size in 10^6 bytes
from which a strip is a message of its own; the first is compared with the gather, which has the
same buckets. Rounds alternate between the ways; results are compared bit for bit.

  of link   bytes a second that a rank received, as a share of the rate of large all-to-alls (a2a),
            all-gathers and single messages in the same start
  bytes x   received by the gather here, whose broadcasts of a tied embedding count, over ours
  pair x    the same by formula, of a model without embeddings
  speed x   seconds of the gather over ours; asked: at least 0.8 times the pair's ratio
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path

import torch.distributed as dist
from gpu_machine import describe, print_header
from gpu_profile import profiled
from link_rates import link_rates, over_ranks
from reshard import (
    SHAPES,
    Pair,
    gather_way,
    measure_ways,
    parse_pair,
    planned,
    prepare,
    speed_up,
)

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.groups import GroupFactory
from rlhf_megatron.distributed.start import DistributedContext, release_cached_memory
from rlhf_megatron.ranks import run_ranks

PAIRS = ("pp2>tp2", "pp2>tp1", "tp2>tp1")
SETTINGS = ("256:0.524288", "256:8", "256:100000", "512:8", "1024:0.524288", "1024:8")
HEADER = (
    f"{'shape':<6}{'pair':<10}{'setting':<15}{'/minimum':>9}{'ms':>8}{'ms from':>9}{'to':>8}"
    f"{'of a2a':>8}{'gather':>8}{'message':>8}{'gather ms':>10}{'bytes x':>8}{'pair x':>7}"
    f"{'speed x':>8}{'asked':>7}{'extra MB':>9}"
)


def pair_ratio(pair: Pair) -> float:
    """What a full gather receives over the least, by formula, of layers alike: 1 where nothing
    has to move."""
    tp, pp = pair.train.tensor_model_parallel_size, pair.train.pipeline_model_parallel_size
    gathered = (pp - 1) / (pp * tp) + (tp - 1) / tp
    own = tp * pp if pair.rollout <= tp else pair.rollout * pp
    least = 1 / pair.rollout - 1 / own
    return gathered / least if least > 0 else 1.0


def measure(
    shape: str,
    *,
    pair: Pair,
    options: argparse.Namespace,
    context: DistributedContext,
    factory: GroupFactory,
) -> dict:
    """Seconds of each way and setting. Collective over the job."""
    prepared = prepare(pair, arch=SHAPES[shape], context=context, factory=factory)
    minimum: list[int] = []
    ways = []
    for setting in options.settings:
        bucket_mb, direct_mb = map(float, setting.split(":"))
        ours = planned(
            prepared.model, name=setting, source_layouts=prepared.source_layouts,
            target_layouts=prepared.target_layouts, source=prepared.source,
            target=prepared.target, bucket_bytes=int(1e6 * bucket_mb), context=context,
            minimum=minimum, direct_bytes=int(1e6 * direct_mb),
        )  # fmt: skip
        ways.append(ours)
    bucket_bytes = int(1e6 * float(options.settings[0].split(":")[0]))
    ways.append(gather_way(prepared, bucket_bytes=bucket_bytes, context=context))
    group, device = context.job_group, context.device
    found = measure_ways(ways, rounds=options.rounds, group=group, device=device)
    found |= {
        "shape": shape,
        "pair": pair.text,
        "pair_ratio": pair_ratio(pair),
        "minimum": int(over_ranks(minimum[0], dist.ReduceOp.SUM, group, device)),
    }
    if options.profile and pair.text == options.pairs[0]:
        for way in ways[:-1]:
            profile = profiled(way.run, device=device)
            found[f"{way.name}_profile"] = profile.figures()
            if context.rank == 0:
                print(f"{shape} {pair.text} {way.name}\n{profile.table(top=6)}", flush=True)
    return found


def rows(found: dict, *, settings: list[str], link: dict[str, float], num_ranks: int) -> str:
    """A line for each setting."""
    gather = found["gather_seconds"]
    lines = []
    for setting in settings:
        ours, received = found[f"{setting}_seconds"], found[f"{setting}_bytes"]
        median = statistics.median(ours)
        rate = received / num_ranks / median / 1e9
        shares = [rate / link[name] for name in ("all_to_all", "all_gather", "messages")]
        lines.append(
            f"{found['shape']:<6}{found['pair']:<10}{setting:<15}"
            f"{received / max(found['minimum'], 1):>9.3f}"
            f"{1e3 * median:>8.2f}{1e3 * min(ours):>9.2f}{1e3 * max(ours):>8.2f}"
            + "".join(f"{share:>8.2f}" for share in shares)
            + f"{1e3 * statistics.median(gather):>10.2f}"
            f"{found['gather_bytes'] / max(received, 1):>8.2f}{found['pair_ratio']:>7.2f}"
            f"{speed_up(gather, ours):>8.2f}{0.8 * found['pair_ratio']:>7.2f}"
            f"{found[f'{setting}_memory'] / 1e6:>9.0f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["1b", "3b"])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--profile", action="store_true", help="where the time of one sync of the first pair goes"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    def body(context: DistributedContext, _: object) -> None:
        factory = GroupFactory(timeout_seconds=600.0, backend=context.backend)
        link = link_rates(context.job_group, device=context.device)
        if context.rank == 0:
            print_header("reshard_link", machine=describe(context.device))
            text = ", ".join(f"{name} {rate:.1f}" for name, rate in link.items())
            print(f"  10^9 bytes a second received by a rank: {text}\n{HEADER}", flush=True)
        report: dict = {"link": link, "pairs": []}
        for shape in options.shapes:
            for text in options.pairs:
                pair = parse_pair(text, num_ranks=context.world_size)
                found = measure(shape, pair=pair, options=options, context=context, factory=factory)
                report["pairs"].append(found)
                gc.collect()
                release_cached_memory(context.device)
                if context.rank == 0:
                    print(
                        rows(
                            found,
                            settings=options.settings,
                            link=link,
                            num_ranks=context.world_size,
                        ),
                        flush=True,
                    )
        if context.rank == 0 and options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    return run_ranks(body, config=DistributedConfig(device=options.device))


if __name__ == "__main__":
    sys.exit(main())
