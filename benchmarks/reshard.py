"""The weight sync against the ways of others: bytes received, seconds, extra memory.

    python benchmarks/reshard.py                      # 8 processes over gloo
    python benchmarks/reshard.py --num-ranks 2 --shape 1b --pairs "pp2>tp2" "tp2>tp1"

For each pair of layouts, on the same ranks with the same random bfloat16 weights and the same
bucket size:

  ours    the plan, with the engines that it proposes
  gather  (a) pipeline broadcast and tensor all-gather of whole buckets, cut to the engine's shard
  of link bytes a second that ours received, as a share of the rate of large all-to-alls
  core    (b) megatron.core.resharding from one Megatron model into another, where it applies (no
          virtual stages); beside it ours between the same two models

Rounds alternate between the ways; each figure is the median over the rounds of the slowest rank's
seconds, each speed-up the median of the rounds' ratios. Every way's result is compared, bit for
bit, with slices of the whole model. Extra memory is measured in a round of its own. On GPUs with
--device cuda over NCCL.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from link_rates import link_rates, over_ranks, synchronize
from memory_peak import MemoryPeak

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.launcher import launch
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import vllm_rank_layout
from rlhf_megatron.ranks import run_ranks
from rlhf_megatron.reshard.engines import propose_engines
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, make_plan

if TYPE_CHECKING:
    from rlhf_megatron.distributed.groups import GroupFactory, RoleGroups
    from rlhf_megatron.distributed.start import DistributedContext

DTYPE = torch.bfloat16
PAIRS = ("tp2,pp4>tp2", "tp4,pp2>tp4", "tp2,pp2,dp2>tp4", "tp1,pp4,dp2>tp2")
PERIOD, LONGEST_ROW = 1 << 20, 1 << 15


def _llama(**numbers: int | bool) -> ModelArchitecture:
    common: dict = {"family": "llama", "head_dim": 64, "tie_word_embeddings": False}
    return ModelArchitecture(**(common | numbers))


SHAPES = {
    "350m": _llama(
        num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=32000,
    ),
    "1b": _llama(
        num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
    ),
    "3b": _llama(
        num_layers=28, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=24,
        num_key_value_heads=8, vocab_size=128256, head_dim=128, tie_word_embeddings=True,
    ),
    "tiny": _llama(
        num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, head_dim=8, tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Training layout and the engines' tensor-parallel size."""

    text: str
    train: ParallelLayout
    rollout: int


def parse_pair(text: str, *, num_ranks: int) -> Pair:
    """ "tp2,pp4>tp2": sizes left out are 1, dp fills the ranks."""
    left, right = text.split(">")
    sizes = {word[:2]: int(word[2:]) for word in left.split(",")}
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    dp = sizes.get("dp", num_ranks // (tp * pp))
    train = ParallelLayout(tuple(range(num_ranks)), tp, pp, dp)
    return Pair(text, train, int(right.removeprefix("tp")))


@dataclass
class Way:
    """One way to sync."""

    name: str
    run: Callable[[], int]
    """Syncs; returns the bytes this rank received."""
    check: Callable[[], None]
    """Asserts that the target holds what it should, then spoils it."""


class Model:
    """The whole model's values, by formula: every rank knows any slice without a gather."""

    def __init__(self, arch: ModelArchitecture, *, device: torch.device) -> None:
        self._device = device
        self._names = {t.name: number for number, t in enumerate(logical_tensors(arch, head="lm"))}
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(PERIOD + LONGEST_ROW, generator=generator)
        self._noise = noise.to(device=device, dtype=DTYPE)

    def fill(self, layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        for placement in layout:
            tensors[placement.parameter][placement.region(placement.box)] = self._values(placement)

    def is_in(self, layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(tensors[p.parameter][p.region(p.box)], self._values(p)) for p in layout
        )

    def _values(self, placement) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """Each row is a window on the noise, so that every box of a tensor can be made alone."""
        box = placement.box
        numbers = torch.arange(box.start[0], box.stop[0], device=self._device)
        rows = numbers * 104729 + 7919 * self._names[placement.tensor]
        columns = range(1)
        if len(box.start) > 1:
            columns = range(box.start[1], box.stop[1])
        windows = self._noise.unfold(0, len(columns), 1)
        values = windows[rows % PERIOD + columns.start]
        return values.view(box.shape)


def empty_tensors(layout: RankLayout, *, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters just large enough for the layout."""
    shapes: dict[str, list[int]] = {}
    for p in layout:
        stop = [o + n for o, n in zip(p.offset, p.box.shape, strict=True)]
        old = shapes.get(p.parameter, stop)
        shapes[p.parameter] = [max(a, b) for a, b in zip(stop, old, strict=True)]
    return {name: torch.zeros(shape, dtype=DTYPE, device=device) for name, shape in shapes.items()}


def planned(
    model: Model,
    *,
    name: str,
    source_layouts: Mapping[int, RankLayout],
    target_layouts: Mapping[int, RankLayout],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    bucket_bytes: int,
    context,  # type: ignore[no-untyped-def]
    minimum: list[int],
    direct_bytes: int | None = None,
) -> Way:
    """Our sync. Appends this rank's least bytes to `minimum`."""
    plan = make_plan(
        source_layouts,
        target_layouts,
        itemsize_bytes=DTYPE.itemsize,
        bucket_bytes=bucket_bytes // BUCKETS_IN_FLIGHT,
        node_of=context.node_of,
        ranks=[context.rank],
    )
    resharder = Resharder(
        plan,
        rank=context.rank,
        group=context.job_group,
        source=source,
        target=target,
        dtype=DTYPE,
        device=context.device,
        least_direct_bytes=direct_bytes,
    )
    minimum.append(plan.minimum_bytes.get(context.rank, 0))

    def run() -> int:
        received = resharder.run().bytes_received
        resharder.release_buffers()  # as the trainer does after each sync
        return received

    return Way(name, run, checker(model, target_layouts[context.rank], target, name=name))


def checker(
    model: Model, layout: RankLayout, target: Mapping[str, torch.Tensor], *, name: str
) -> Callable[[], None]:
    def check() -> None:
        assert model.is_in(layout, target), f"{name}: wrong weights"
        for tensor in target.values():
            tensor.detach().zero_()

    return check


def measure_rank(options: argparse.Namespace) -> int:
    """One rank of one pair; rank 0 writes what was found."""

    def body(context, channel) -> None:  # type: ignore[no-untyped-def]
        import torch.distributed as dist

        from rlhf_megatron.distributed.groups import GroupFactory

        factory = GroupFactory(timeout_seconds=600.0, backend=context.backend)
        pair = parse_pair(options.pairs[0], num_ranks=dist.get_world_size())
        found = {"num_ranks": dist.get_world_size()}
        found["link"] = link_rates(context.job_group, device=context.device)
        found |= _measure_pair(pair, options=options, context=context, factory=factory)
        if context.rank == 0:
            options.result.write_text(json.dumps(found))

    return run_ranks(body, config=DistributedConfig(device=options.device))


@dataclass(frozen=True)
class Prepared:
    """A pair's layouts, and this rank's parameters on both sides: full, and 0."""

    model: Model
    groups: "RoleGroups"
    engines: list[tuple[int, ...]]
    source_layouts: Mapping[int, RankLayout]
    target_layouts: Mapping[int, RankLayout]
    source: dict[str, torch.Tensor]
    target: dict[str, torch.Tensor]


def prepare(
    pair: Pair,
    *,
    arch: ModelArchitecture,
    context: "DistributedContext",
    factory: "GroupFactory",
) -> Prepared:
    """Collective over the job."""
    from rlhf_megatron.distributed.groups import build_role_groups

    rank, device = context.rank, context.device
    groups = build_role_groups("train", layout=pair.train, factory=factory)
    assert groups is not None
    model = Model(arch, device=device)
    source_layouts = megatron_layouts(arch, parallel=pair.train, head="lm", fused_norms=False)
    shards = [
        vllm_rank_layout(arch, tensor_parallel_size=pair.rollout, tp_rank=k)
        for k in range(pair.rollout)
    ]
    engines = propose_engines(
        source_layouts, shards=shards, ranks=pair.train.ranks, node_of=context.node_of
    )
    target_layouts = {r: shards[k] for engine in engines for k, r in enumerate(engine)}
    source = empty_tensors(source_layouts[rank], device=device)
    model.fill(source_layouts[rank], source)
    target = empty_tensors(target_layouts[rank], device=device)
    return Prepared(model, groups, engines, source_layouts, target_layouts, source, target)


def gather_way(prepared: Prepared, *, bucket_bytes: int, context: "DistributedContext") -> Way:
    """(a) of this file's head."""
    from reshard_baselines import GatherSync

    layout, target = prepared.target_layouts[context.rank], prepared.target
    gather = GatherSync(
        prepared.groups, source_layouts=prepared.source_layouts, target_layout=layout,
        source=prepared.source, target=target, dtype=DTYPE, device=context.device,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip
    return Way("gather", gather.run, checker(prepared.model, layout, target, name="gather"))


def _measure_pair(pair: Pair, *, options, context, factory) -> dict:  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    arch, bucket_bytes = SHAPES[options.shape], int(options.bucket_mb * 1e6)
    prepared = prepare(pair, arch=arch, context=context, factory=factory)
    minimum: list[int] = []
    ours = planned(
        prepared.model, name="ours", source_layouts=prepared.source_layouts,
        target_layouts=prepared.target_layouts, source=prepared.source, target=prepared.target,
        bucket_bytes=bucket_bytes, context=context, minimum=minimum,
    )  # fmt: skip
    ways = [ours, gather_way(prepared, bucket_bytes=bucket_bytes, context=context)]
    group, device = context.job_group, context.device
    result = measure_ways(ways, rounds=options.rounds, group=group, device=device)
    least = over_ranks(minimum[0], dist.ReduceOp.SUM, group, device)
    result |= {"pair": pair.text, "engines": prepared.engines, "minimum": int(least)}
    model, groups = prepared.model, prepared.groups
    del ways, ours, prepared
    gc.collect()
    if not options.skip_core:
        result |= _against_core(
            pair, arch=arch, model=model, groups=groups, options=options, context=context,
            factory=factory,
        )  # fmt: skip
    return result


def _against_core(pair, *, arch, model, groups, options, context, factory) -> dict:  # type: ignore[no-untyped-def]
    """Ours and megatron.core.resharding, from one Megatron model into another."""
    from megatron.core.resharding.refit import swap_model_weights
    from reshard_baselines import PointToPoint

    from rlhf_megatron.distributed.groups import build_role_groups
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.placed_role import role_layouts

    rank, device = context.rank, context.device
    wanted = ParallelLayout(
        pair.train.ranks, pair.rollout, 1, len(pair.train.ranks) // pair.rollout
    )
    target_groups = build_role_groups("rollout", layout=wanted, factory=factory)
    models = [
        build_model(
            arch, head="lm", groups=g, precision="bf16", layer_spec_name="local", device=device,
            seed=1,
        )
        for g in (groups, target_groups)
    ]  # fmt: skip
    source, target = (
        {name: p.detach() for name, p in role.parameters().items()} for role in models
    )
    source_layouts, target_layouts = (role_layouts(role) for role in models)
    model.fill(source_layouts[rank], source)
    minimum: list[int] = []
    ours = planned(
        model, name="ours_megatron", source_layouts=source_layouts, target_layouts=target_layouts,
        source=source, target=target, bucket_bytes=int(options.bucket_mb * 1e6), context=context,
        minimum=minimum,
    )  # fmt: skip
    service = PointToPoint(context.job_group)

    def core() -> int:
        before = service.bytes_received
        swap_model_weights(models[0].chunks[0], models[1].chunks[0], service)
        return service.bytes_received - before

    ways = [ours, Way("core", core, checker(model, target_layouts[rank], target, name="core"))]
    return measure_ways(ways, rounds=options.rounds, group=context.job_group, device=device)


def measure_ways(ways: list[Way], *, rounds: int, group, device: torch.device) -> dict:  # type: ignore[no-untyped-def]
    """Seconds of every round, bytes over all ranks, and the worst rank's extra memory."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    received: dict[str, int] = {}
    memory: dict[str, float] = {}
    for way in ways:  # warm: connections, buffers, plans; and the memory
        gc.collect()
        dist.barrier(group=group)
        peak = MemoryPeak(device)
        mine = way.run()
        memory[way.name] = over_ranks(
            peak.stop() - peak.before_bytes, dist.ReduceOp.MAX, group, device
        )
        received[way.name] = int(over_ranks(mine, dist.ReduceOp.SUM, group, device))
        way.check()
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            synchronize(device)
            dist.barrier(group=group)
            start = time.perf_counter()
            way.run()
            synchronize(device)
            took = time.perf_counter() - start
            seconds[way.name].append(over_ranks(took, dist.ReduceOp.MAX, group, device))
    for way in ways[:1]:
        way.run()
        way.check()
    return {
        f"{way.name}_{kind}": values[way.name]
        for kind, values in (("seconds", seconds), ("bytes", received), ("memory", memory))
        for way in ways
    }


HEADER = (
    "pair                ratio to minimum |  ours s  of link  gather s  bytes x  speed x  needed |"
    " extra MB ours  gather | Megatron to Megatron: ours s  core s  speed x  extra MB ours  core"
)


def row(found: dict) -> str:
    """One line of the table."""
    ours, gather = found["ours_seconds"], found["gather_seconds"]
    byte_ratio = found["gather_bytes"] / (found["ours_bytes"] or math.nan)
    rate = found["ours_bytes"] / found["num_ranks"] / statistics.median(ours) / 1e9
    text = (
        f"{found['pair']:20s}{found['ours_bytes'] / (found['minimum'] or math.nan):16.3f} |"
        f"{statistics.median(ours):8.4f}{rate / found['link']['all_to_all']:9.2f}"
        f"{statistics.median(gather):10.4f}{byte_ratio:9.2f}"
        f"{speed_up(gather, ours):9.2f}{0.8 * byte_ratio:8.2f} |"
        f"{found['ours_memory'] / 1e6:14.0f}{found['gather_memory'] / 1e6:8.0f} |"
    )
    if "core_seconds" in found:
        ours, core = found["ours_megatron_seconds"], found["core_seconds"]
        text += (
            f"{statistics.median(ours):29.4f}{statistics.median(core):8.4f}"
            f"{speed_up(core, ours):9.2f}{found['ours_megatron_memory'] / 1e6:15.0f}"
            f"{found['core_memory'] / 1e6:6.0f}"
        )
    return text


def speed_up(other: list[float], ours: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(b / a for a, b in zip(ours, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="350m")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--skip-core", action="store_true", help="leave megatron.core's out")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        return measure_rank(options)
    arch = SHAPES[options.shape]
    print(
        f"{num_parameters(arch, head='lm') / 1e6:.0f} million parameters, {DTYPE}, "
        f"{options.num_ranks} ranks, buckets of {options.bucket_mb:g} MB, medians of "
        f"{options.rounds} rounds\n{HEADER}",
        flush=True,
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    found = [measured(pair, options=options) for pair in options.pairs]
    rates = {name: statistics.median(f["link"][name] for f in found) for name in found[0]["link"]}
    text = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
    print(f"received by a rank in large collectives: {text}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def measured(pair: str, *, options: argparse.Namespace) -> dict:
    """Measure a pair on ranks of its own, and print its line."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = ["--pairs", pair, "--shape", options.shape, "--device", options.device]
        words += ["--bucket-mb", str(options.bucket_mb), "--rounds", str(options.rounds)]
        words += ["--skip-core"] if options.skip_core else []
        command = [sys.executable, __file__, *words, "--result", str(result)]
        code = launch(command, num_processes=options.num_ranks)
        if code:
            raise SystemExit(code)
        found: dict = json.loads(result.read_text())
    print(row(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
