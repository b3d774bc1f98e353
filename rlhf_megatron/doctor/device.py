"""GPUs: number, memory, health and speed."""

from collections.abc import Iterator
from statistics import median

from rlhf_megatron.doctor.facts import (
    GpuFacts,
    JobFacts,
    RankFacts,
    SmiFacts,
    gigabytes,
    grouped,
    where,
)
from rlhf_megatron.doctor.report import Finding, good, note, red, warning

FREE_SHARE = 0.9
"""Less free memory than so much of a GPU means that somebody else uses it."""
SLOW_SHARE = 0.85
"""A GPU that computes below so much of the median is slow."""
MATMUL_TFLOPS = {"H200": 500.0, "H100 80GB HBM3": 500.0, "GH200": 500.0, "A100": 180.0}
"""Least bf16 matrix product of GPUs, by part of the name: two thirds of what a healthy one reaches
(an H200: 795)."""

UNCLEAN = "end what runs there (nvidia-smi shows it), or leave the node out"


def check_device(job: JobFacts) -> Iterator[Finding]:
    """All of them. Without GPUs, where none is asked for, one note."""
    if job.needs.device == "cuda" or job.uses_cuda:
        yield from _number(job)
    if not job.uses_cuda:
        seen = any(rank.num_gpus for rank in job.ranks)
        if job.needs.device != "cuda" and not seen:
            yield note("GPUs", "none: runs on the CPU")
        return
    yield from _sharing(job)
    yield from _kind(job)
    yield from _memory(job)
    yield from _health(job)
    yield from _speed(job)


def _number(job: JobFacts) -> Iterator[Finding]:
    """Ranks against GPUs that they see."""
    blind = [rank for rank in job.ranks if rank.num_gpus == 0]
    if blind:
        values = sorted({r.variables.get("CUDA_VISIBLE_DEVICES", "not set") for r in blind})
        yield red(
            "GPUs",
            f"torch sees none on {where(blind)} (CUDA_VISIBLE_DEVICES: {', '.join(values)})",
            expected="one for each rank",
            way_out="check `nvidia-smi` there, ask the scheduler for GPUs (--gpus-per-node), and "
            "take a CUDA build of torch; or set distributed.device=cpu",
        )
        return
    if job.node_only:
        yield good("GPUs", f"{job.ranks[0].num_gpus} x {job.ranks[0].gpus[0].name}")
        return
    # With one visible GPU a rank, the scheduler has bound them.
    few = [rank for rank in job.ranks if 1 < rank.num_gpus < rank.local_world_size]
    many = [rank for rank in job.ranks if rank.num_gpus > rank.local_world_size]
    if few:
        yield red(
            "GPUs",
            f"{few[0].num_gpus} visible for {few[0].local_world_size} ranks of a node: "
            f"{where(few)}",
            expected="one for each rank",
            way_out="start as many ranks on a node as it has GPUs (--nproc-per-node, "
            "--ntasks-per-node), or ask for more GPUs",
        )
    elif many:
        yield warning(
            "GPUs",
            f"{many[0].num_gpus} visible for {many[0].local_world_size} ranks of a node: the "
            f"others idle ({where(many)})",
            expected="one for each rank",
            way_out="start as many ranks on a node as it has GPUs, or ask for fewer",
        )
    else:
        names = grouped([gpu for rank in job.ranks for gpu in rank.gpus], by=lambda gpu: gpu.name)
        yield good("GPUs", ", ".join(f"{len(gpus)} x {name}" for name, gpus in names.items()))


def _sharing(job: JobFacts) -> Iterator[Finding]:
    """Two ranks on one GPU: NCCL refuses it."""
    groups = grouped([(gpu.uuid, rank) for rank in job.ranks for gpu in rank.gpus], by=_uuid)
    for uuid, pairs in groups.items():
        ranks = [rank for _, rank in pairs]
        if len(ranks) == 1:
            continue
        hosts = {rank.variables.get("NCCL_HOSTID") for rank in ranks}
        if len(hosts) == len(ranks) and None not in hosts:
            yield warning(
                "GPUs",
                f"{where(ranks)} share GPU {uuid}, which NCCL_HOSTID hides from NCCL",
                expected="a GPU of its own for each rank",
                way_out="good for a test, far too slow for a run: start one rank per GPU",
            )
        else:
            yield red(
                "GPUs",
                f"{where(ranks)} share GPU {uuid}",
                expected="a GPU of its own for each rank",
                way_out="start one rank per GPU; under srun without --gpus-per-task all tasks see "
                "all GPUs and choose by SLURM_LOCALID",
            )


def _uuid(pair: tuple[str, RankFacts]) -> str:
    return pair[0]


def _kind(job: JobFacts) -> Iterator[Finding]:
    groups = grouped(job.ranks, by=lambda rank: tuple(gpu.name for gpu in rank.gpus[:1]))
    if len(groups) > 1:
        found = [f"{name[0]}: {where(ranks)}" for name, ranks in groups.items() if name]
        yield warning(
            "GPUs alike",
            "; ".join(found),
            expected="one kind",
            way_out="the slowest kind sets the pace: ask the scheduler for one (--constraint)",
        )
    built = job.nodes[0].software.torch_architectures
    for gpu in _one_of_each(job):
        if built and not runs_on(gpu, architectures=built):
            yield red(
                "torch and GPU",
                f"torch has no code for {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}); it "
                f"has {', '.join(built)}",
                way_out="install a torch build for this GPU",
            )


def _one_of_each(job: JobFacts) -> list[GpuFacts]:
    return list({gpu.name: gpu for rank in job.ranks for gpu in rank.gpus}.values())


def runs_on(gpu: GpuFacts, *, architectures: tuple[str, ...]) -> bool:
    """Whether a GPU can run code built for the architectures: binary code of the same major and no
    newer minor version, or PTX (compute_) of no newer version."""
    major, minor = gpu.capability
    for text in architectures:
        kind, _, digits = text.partition("_")
        number = "".join(c for c in digits if c.isdigit())
        if not number:
            continue
        built = (int(number[:-1]), int(number[-1]))
        specific = number != digits  # sm_90a runs on that architecture alone
        if kind == "compute" and built <= (major, minor) and not specific:
            return True
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
    return False


def _memory(job: JobFacts) -> Iterator[Finding]:
    wanted = job.needs.gpu_memory_utilization if job.needs.uses_vllm else 0.0
    shares = [
        (gpu.memory_free_bytes / gpu.memory_total_bytes, gpu, rank)
        for rank in job.ranks
        for gpu in rank.gpus
    ]
    short = [(gpu, rank) for share, gpu, rank in shares if share < wanted]
    used = [(gpu, rank) for share, gpu, rank in shares if wanted <= share < FREE_SHARE]
    if short:
        yield red(
            "GPU memory",
            _memory_in_words(short),
            expected=f"rollout.gpu_memory_utilization={wanted:g} of it free, or vLLM does not "
            "start",
            way_out=UNCLEAN,
        )
    if used:
        yield warning(
            "GPU memory",
            _memory_in_words(used),
            expected=f"{FREE_SHARE:.0%} free before the run",
            way_out=UNCLEAN,
        )
    if not short and not used:
        least = min(gpu.memory_free_bytes for _, gpu, _ in shares)
        yield good("GPU memory", f"at least {gigabytes(least)} free on each")


def _memory_in_words(found: list[tuple[GpuFacts, RankFacts]]) -> str:
    worst = min(found, key=lambda pair: pair[0].memory_free_bytes)[0]
    return (
        f"{gigabytes(worst.memory_free_bytes)} of {gigabytes(worst.memory_total_bytes)} free, of "
        f"{where([rank for _, rank in found])}"
    )


def _health(job: JobFacts) -> Iterator[Finding]:
    """What nvidia-smi tells of the GPUs that ranks use: ECC errors and held-down clocks."""
    used = [(gpu.uuid, rank) for rank in job.ranks for gpu in rank.gpus]
    known = {
        (node.number, smi.uuid): smi for node in job.nodes for smi in node.smi or () if smi.uuid
    }
    pairs = [(known.get((job.node_of(rank).number, uuid)), rank) for uuid, rank in used]
    read = [(smi, rank) for smi, rank in pairs if smi is not None]
    if not read:
        yield note("GPU health", "nvidia-smi tells nothing here: clocks and ECC are not checked")
        return
    broken = [(smi, rank) for smi, rank in read if smi.uncorrected_ecc_errors]
    if broken:
        yield red(
            "GPU ECC",
            "; ".join(
                f"{smi.uncorrected_ecc_errors} uncorrected errors on {where([rank])} ({smi.uuid})"
                for smi, rank in broken
            ),
            expected="none since the driver was loaded",
            way_out="leave the node out (--exclude) and have the GPU reset or replaced",
        )
    off = [rank for smi, rank in read if smi.ecc_mode == "Disabled"]
    if off:
        yield warning(
            "GPU ECC",
            f"off on {where(off)}",
            expected="on",
            way_out="have it turned on: a flipped bit would go unnoticed",
        )
    if not broken and not off:
        yield good("GPU ECC", "no uncorrected errors")
    yield from _clocks(read)


def _clocks(read: list[tuple[SmiFacts, RankFacts]]) -> Iterator[Finding]:
    held = [(smi, rank) for smi, rank in read if smi.slowdowns]
    if held:
        yield warning(
            "GPU clocks",
            "; ".join(f"{', '.join(smi.slowdowns)}: {where([rank])}" for smi, rank in held),
            expected="not held down by the hardware",
            way_out="look at cooling and power of the node, or leave it out",
        )
    groups = grouped(read, by=lambda pair: pair[0].max_clock_mhz)
    if len(groups) > 1:
        parts = [f"{mhz} MHz: {where([r for _, r in pairs])}" for mhz, pairs in groups.items()]
        yield warning(
            "GPU clocks",
            "; ".join(parts),
            expected="the same highest clock on all",
            way_out="the slowest GPU sets the pace: have its clock limit removed",
        )
    if not held and len(groups) == 1:
        smi = read[0][0]
        yield good(
            "GPU clocks", f"up to {smi.max_clock_mhz} MHz, now {smi.clock_mhz}; none held down"
        )


def _speed(job: JobFacts) -> Iterator[Finding]:
    measured = [
        (gpu.matmul_tflops, gpu, rank)
        for rank in job.ranks
        for gpu in rank.gpus
        if gpu.matmul_tflops is not None
    ]
    if not measured:
        return
    middle = median(tflops for tflops, _, _ in measured)
    name = measured[0][1].name
    expected = next((least for part, least in MATMUL_TFLOPS.items() if part in name), 0.0)
    least = max(expected, SLOW_SHARE * middle)
    slow = [(tflops, rank) for tflops, _, rank in measured if tflops < least]
    text = f"at least {least:.0f} TFLOP/s in a bf16 product of 8192 cubed"
    if slow:
        worst = min(tflops for tflops, _ in slow)
        yield warning(
            "GPU speed",
            f"{worst:.0f} TFLOP/s at worst, median {middle:.0f}: "
            f"{where([rank for _, rank in slow])}",
            expected=text,
            way_out="look at clocks and cooling there, or leave the node out",
        )
    else:
        lowest = min(tflops for tflops, _, _ in measured)
        yield good("GPU speed", f"{lowest:.0f} to {max(m[0] for m in measured):.0f} TFLOP/s", text)
