"""Show what a weight sync moves from a training layout to rollout engines on the same ranks.

    python tools/plan_reshard.py --model models/Llama-3.3-70B --train tp=8,pp=8,dp=8 --rollout tp=8

Reads config.json alone (`--model` takes the file itself too, and the name of a folder in
configs/models). Starts no processes and needs no GPU.
`--plot traffic.png` draws who sends how much to whom (needs matplotlib: pip install -e
'.[tools]').
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.architectures import find_model, stand_in_folders
from rlhf_megatron.errors import EXIT_DONE, ConfigError, UserError
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture_file
from rlhf_megatron.layout.megatron import megatron_problems
from rlhf_megatron.layout.parallel import DIMENSIONS, ParallelLayout
from rlhf_megatron.layout.vllm import vllm_problems
from rlhf_megatron.ranks import refuse
from rlhf_megatron.reshard.describe import ReshardDescription, describe_reshard
from rlhf_megatron.reshard.plan import ReshardPlan

ITEMSIZE_BYTES = {"bf16": 2, "fp32": 4}
MOST_ENGINES_SHOWN = 8
MOST_RANKS_LISTED = 1024
"""A plan of all ranks has some 10^4 transfers per rank."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        arch = _architecture(options.model)
        train, size = _train(options.train), _rollout(options.rollout)
        _check(arch, train=train, rollout_size=size, options=options)
        found = describe_reshard(
            arch,
            train=train,
            rollout_tensor_parallel_size=size,
            itemsize_bytes=ITEMSIZE_BYTES[options.dtype],
            bucket_bytes=int(options.bucket_mb * 1e6),
            gpus_per_node=options.gpus_per_node,
            all_ranks=options.all_ranks or options.plot is not None,
        )
        if options.plot is not None:
            _plot(found.plan, path=options.plot, ranks=len(train.ranks))
    except UserError as error:
        return refuse(error)
    figures = _figures(found, train=train, rollout_size=size)
    print(json.dumps(figures) if options.json else _text(figures, plot=options.plot))
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Show what a weight sync moves from a training layout to rollout engines."
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="Hugging Face directory, or a config.json alone"
    )
    parser.add_argument(
        "--train",
        required=True,
        metavar="tp=N,pp=N,dp=N[,vpp=N][,order=tp-dp-pp]",
        help="training layout; order: the fastest dimension of the rank numbers first",
    )
    parser.add_argument("--rollout", required=True, metavar="tp=N", help="size of an engine")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--dtype", choices=ITEMSIZE_BYTES, default="bf16", help="of the engines")
    parser.add_argument(
        "--bucket-mb", type=float, default=256.0, metavar="N", help="reshard.bucket_mb (256)"
    )
    parser.add_argument(
        "--all-ranks", action="store_true", help="plan the transfers of all ranks, not of the first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw who sends what to whom")
    return parser


def _architecture(model: Path) -> ModelArchitecture:
    if model.is_file():
        return read_architecture_file(model)
    found = find_model(model, stand_ins=stand_in_folders())
    if found.note:
        print(found.note, file=sys.stderr)
    return read_architecture_file(found.config_file)


def _pairs(text: str, *, option: str, keys: Sequence[str]) -> dict[str, str]:
    """ "tp=8,pp=2" as a dictionary. Raises UserError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in keys or key in found:
            raise UserError(
                f"{option} {text!r}: {part.strip()!r} is not one of {', '.join(keys)}, each given"
                " once, as in tp=8"
            )
        found[key] = value
    return found


def _sizes(found: dict[str, str], *, option: str) -> dict[str, int]:
    problems = [
        f"{option}: {key}={value!r} must be a whole number of 1 or more"
        for key, value in found.items()
        if not value.isdecimal() or int(value) < 1
    ]
    if problems:
        raise ConfigError(problems)
    return {key: int(value) for key, value in found.items()}


def _train(text: str) -> ParallelLayout:
    found = _pairs(text, option="--train", keys=("tp", "pp", "dp", "vpp", "order"))
    order = tuple(found.pop("order", "-".join(DIMENSIONS)).split("-"))
    if sorted(order) != sorted(DIMENSIONS):
        raise UserError(f"--train: order={'-'.join(order)} must name tp, dp and pp, as tp-dp-pp")
    sizes = {"tp": 1, "pp": 1, "dp": 1, "vpp": 1} | _sizes(found, option="--train")
    if sizes["vpp"] > 1 and sizes["pp"] == 1:
        raise UserError(f"--train: vpp={sizes['vpp']} needs pp above 1")
    return ParallelLayout(
        ranks=tuple(range(sizes["tp"] * sizes["pp"] * sizes["dp"])),
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        data_parallel_size=sizes["dp"],
        order=order,
        virtual_pipeline_model_parallel_size=sizes["vpp"],
    )


def _rollout(text: str) -> int:
    found = _sizes(_pairs(text, option="--rollout", keys=("tp",)), option="--rollout")
    return found["tp"]


def _check(
    arch: ModelArchitecture,
    *,
    train: ParallelLayout,
    rollout_size: int,
    options: argparse.Namespace,
) -> None:
    problems = [
        f"--train: {problem}"
        for problem in megatron_problems(
            arch,
            tensor_model_parallel_size=train.tensor_model_parallel_size,
            pipeline_model_parallel_size=train.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=train.virtual_pipeline_model_parallel_size,
        )
    ]
    problems += [f"--rollout: {p}" for p in vllm_problems(arch, tensor_parallel_size=rollout_size)]
    if len(train.ranks) % rollout_size:
        problems.append(
            f"--rollout tp={rollout_size}: does not divide the {len(train.ranks)} ranks of --train"
        )
    if options.gpus_per_node < 1:
        problems.append(f"--gpus-per-node {options.gpus_per_node}: must be 1 or more")
    if not options.bucket_mb > 0:
        problems.append(f"--bucket-mb {options.bucket_mb}: must be above 0")
    if (options.plot or options.all_ranks) and len(train.ranks) > MOST_RANKS_LISTED:
        problems.append(
            f"--plot and --all-ranks: {len(train.ranks)} ranks; at most {MOST_RANKS_LISTED}, which"
            " fewer replicas (dp) may give"
        )
    if options.plot is not None and not options.plot.absolute().parent.is_dir():
        problems.append(f"--plot {options.plot}: there is no such folder")
    if problems:
        raise ConfigError(problems)


def _figures(
    found: ReshardDescription, *, train: ParallelLayout, rollout_size: int
) -> dict[str, Any]:
    """What --json prints. Bytes are totals over all ranks unless their name says otherwise."""
    plan = found.plan
    received, minimum = plan.bytes_received_total, found.bytes_minimum_total
    mine = plan.by_rank[found.first_rank]
    proposal = found.proposal
    return {
        "ranks": len(train.ranks),
        "train": {
            "tp": train.tensor_model_parallel_size,
            "pp": train.pipeline_model_parallel_size,
            "dp": train.data_parallel_size,
            "vpp": train.virtual_pipeline_model_parallel_size,
            "order": "-".join(train.order),
        },
        "rollout": {"tp": rollout_size},
        "bytes_received_total": received,
        "bytes_minimum_total": minimum,
        "ratio": _ratio(received, minimum),
        "bytes_minimum_in_nodes_total": found.bytes_minimum_in_nodes,
        "bytes_minimum_unconstrained_total": found.bytes_minimum_unconstrained,
        "cross_node_bytes": plan.cross_node_bytes,
        "bytes_received_per_rank_mean": received / len(train.ranks),
        "bytes_received_per_rank_max": max(plan.received_bytes.values()),
        "full_gather_bytes_per_rank": found.full_gather_bytes_per_rank,
        "plan_seconds": round(found.plan_seconds, 3),
        "ranks_planned": len(plan.by_rank),
        "buckets": plan.num_buckets,
        "first_rank_operations": {
            "collectives": plan.num_buckets,
            "copies": len(mine.copies),
            "sends": sum(map(len, mine.sends)),
            "receives": sum(map(len, mine.receives)),
        },
        "engines": [list(engine) for engine in found.engines],
        "proposed_order": None if proposal is None else "-".join(proposal.order),
        "proposed_order_bytes_minimum_total": proposal and proposal.bytes_minimum_total,
    }


def _ratio(received: int, minimum: int) -> float | None:
    """1 where nothing need move and nothing does."""
    if minimum:
        return received / minimum
    return None if received else 1.0


def _text(figures: dict[str, Any], *, plot: Path | None) -> str:
    train, operations = figures["train"], figures["first_rank_operations"]
    ranks, received = figures["ranks"], figures["bytes_received_total"]
    virtual = f" VPP{train['vpp']}" if train["vpp"] > 1 else ""
    engines = figures["engines"]
    shown = [",".join(map(str, engine)) for engine in engines[:MOST_ENGINES_SHOWN]]
    more = len(engines) - len(shown)
    lines = [
        f"{ranks} ranks: TP{train['tp']} PP{train['pp']}{virtual} DP{train['dp']}, fastest first:"
        f" {train['order']}  ->  {len(engines)} engines of TP{figures['rollout']['tp']}",
        f"  engines             {'; '.join(shown)}{f'; and {more} more' if more else ''}",
        f"  received in all     {_gb(received)}",
        f"  lower bound         {_gb(figures['bytes_minimum_total'])}, ratio {figures['ratio']:.3f}"
        if figures["ratio"] is not None
        else "  lower bound         0",
        *(
            f"  {label:<19} {_per_rank(figures[key], ranks=ranks)} per rank"
            for label, key in (
                ("bound, any numbering", "bytes_minimum_in_nodes_total"),
                ("and across nodes", "bytes_minimum_unconstrained_total"),
            )
        ),
        f"  per rank            {_gb(received / ranks)} on average, at most "
        f"{_gb(figures['bytes_received_per_rank_max'])}",
        f"  full gather         {_gb(figures['full_gather_bytes_per_rank'])} per rank",
        f"  across nodes        {_gb(figures['cross_node_bytes'])} in all",
        f"  rank 0              {operations['copies']} local copies, {operations['sends']} sends"
        f" and {operations['receives']} receives in {figures['buckets']} collectives",
        f"  planned in          {figures['plan_seconds']:.2f} s, transfers of "
        f"{figures['ranks_planned']} of {ranks} ranks",
    ]
    if figures["proposed_order"] is not None:
        fewer = _gb(figures["proposed_order_bytes_minimum_total"] / ranks)
        lines.append(
            f"  fewer bytes         {fewer} per rank with order={figures['proposed_order']}"
        )
    if plot is not None:
        lines.append(f"wrote {plot}")
    return "\n".join(lines)


def _gb(number: float) -> str:
    return f"{number / 1e9:.3f} GB"


def _per_rank(total: int | None, *, ranks: int) -> str:
    return "(too large to compute)" if total is None else _gb(total / ranks)


def _plot(plan: ReshardPlan, *, path: Path, ranks: int) -> None:
    """Draw the bytes from each rank (row) to each rank (column). Raises UserError."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    traffic = np.zeros((ranks, ranks))
    for mine in plan.by_rank.values():
        for transfer in (t for bucket in mine.sends for t in bucket):
            traffic[transfer.src, transfer.dst] += transfer.box.numel * plan.itemsize_bytes
    figure, axes = plt.subplots(figsize=(8, 7), layout="constrained")
    image = axes.imshow(
        np.ma.masked_equal(traffic / 1e9, 0), interpolation="nearest", cmap="viridis", vmin=0
    )
    figure.colorbar(image, label="GB")
    axes.set(
        xlabel="receiving rank",
        ylabel="sending rank",
        title=f"One weight sync: {plan.bytes_received_total / 1e9:.3f} GB between {ranks} ranks",
    )
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error}") from None
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
