"""Environment variables that slow a run down or break it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rlhf_megatron.doctor.facts import JobFacts, RankFacts, grouped, where
from rlhf_megatron.doctor.report import Finding, good, note, red, warning
from rlhf_megatron.doctor.software import within

PREFIXES = ("NCCL_", "GLOO_", "UCX_")
"""All of them are shown, and must be equal on all ranks but for those that name something local."""
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID")
NAMES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_DISTRIBUTED_DEBUG",
    "VLLM_USE_FLASHINFER_SAMPLER",
)


@dataclass(frozen=True, kw_only=True)
class Slows:
    """A setting that costs speed."""

    name: str
    values: tuple[str, ...]
    what: str
    only_across_nodes: bool = False


SLOWS = (
    Slows(
        name="CUDA_LAUNCH_BLOCKING",
        values=("1",),
        what="each kernel waits for the one before it; meant for finding errors",
    ),
    Slows(name="NCCL_P2P_DISABLE", values=("1",), what="GPUs of a node do not use NVLink"),
    Slows(name="NCCL_SHM_DISABLE", values=("1",), what="no shared memory within a node"),
    Slows(
        name="NCCL_IB_DISABLE",
        values=("1",),
        what="InfiniBand and RoCE are off, nodes talk over TCP",
        only_across_nodes=True,
    ),
    Slows(
        name="NCCL_NET_GDR_LEVEL",
        values=("LOC", "0"),
        what="the network does not read GPU memory directly",
        only_across_nodes=True,
    ),
    Slows(
        name="TORCH_DISTRIBUTED_DEBUG",
        values=("DETAIL",),
        what="each collective is checked by another one; meant for finding errors",
    ),
    Slows(name="TORCH_NCCL_BLOCKING_WAIT", values=("1",), what="the host waits in each collective"),
)


def check_variables(job: JobFacts) -> Iterator[Finding]:
    """All of them. A healthy environment gives one good line."""
    found = [*_allocator(job), *_slow(job), *_connections(job), *_threads(job), *_differing(job)]
    yield from found
    if not found:
        yield good("environment variables", _shown(job) or "none set that matters")
    elif _shown(job):
        yield note("environment variables", _shown(job))


def _shown(job: JobFacts) -> str:
    variables = job.ranks[0].variables
    names = [n for n in variables if n.startswith(PREFIXES) or n == "CUDA_DEVICE_MAX_CONNECTIONS"]
    return " ".join(f"{name}={variables[name]}" for name in sorted(names))


def _ranks_with(job: JobFacts, *, name: str, values: tuple[str, ...]) -> list[RankFacts]:
    return [r for r in job.ranks if r.variables.get(name, "").upper() in values]


def _at(ranks: list[RankFacts], *, job: JobFacts) -> str:
    return "" if len(ranks) == len(job.ranks) else f" on {where(ranks)}"


def _allocator(job: JobFacts) -> Iterator[Finding]:
    """The allocator of vLLM's sleep mode (device_allocator/cumem.py) does not work with expandable
    segments: 0.25.1 turns them off while it allocates, as far as it knows the variable's name;
    older ones refuse to start."""
    if not (job.uses_cuda and job.needs.uses_vllm and job.needs.sleep_level > 0):
        return
    vllm = job.nodes[0].software.packages.get("vllm")
    copes = vllm is None or not within(vllm.version, low="0", high="0.25")
    for name, is_known in (("PYTORCH_CUDA_ALLOC_CONF", copes), ("PYTORCH_ALLOC_CONF", False)):
        ranks = [
            r for r in job.ranks if "expandable_segments:true" in r.variables.get(name, "").lower()
        ]
        if not ranks:
            continue
        found = f"{ranks[0].variables[name]}{_at(ranks, job=job)}"
        way_out = f"unset {name}, or set rollout.sleep_level=0"
        if is_known:
            what = ": vLLM's sleep mode turns it, and what else the variable sets, off for itself"
            yield warning(name, found + what, expected="no expandable_segments", way_out=way_out)
        else:
            yield red(
                name,
                found,
                expected="no expandable_segments with vLLM's sleep mode",
                way_out=way_out,
            )


def _slow(job: JobFacts) -> Iterator[Finding]:
    if not job.uses_cuda:
        return
    for slow in SLOWS:
        if slow.only_across_nodes and len(job.nodes) == 1:
            continue
        ranks = _ranks_with(job, name=slow.name, values=slow.values)
        if ranks:
            yield warning(
                slow.name,
                f"{ranks[0].variables[slow.name]}{_at(ranks, job=job)}: {slow.what}",
                expected="unset",
                way_out=f"unset {slow.name}, unless this cluster needs it",
            )


def _connections(job: JobFacts) -> Iterator[Finding]:
    """Megatron-Core overlaps the collectives of sequence parallelism in launch order: GPUs before
    Blackwell keep to that with one connection only (core/tensor_parallel/layers.py, 0.19.2)."""
    old = any(gpu.capability[0] < 10 for rank in job.ranks for gpu in rank.gpus)
    if not (job.needs.sequence_parallel and old):
        return
    ranks = [r for r in job.ranks if r.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"]
    if ranks:
        value = ranks[0].variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
        yield warning(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"{value}{_at(ranks, job=job)}",
            expected="1 with sequence parallelism on GPUs before Blackwell",
            way_out="export CUDA_DEVICE_MAX_CONNECTIONS=1, so that communication and products "
            "overlap in the order meant",
        )


def _threads(job: JobFacts) -> Iterator[Finding]:
    ranks = [r for r in job.ranks if "OMP_NUM_THREADS" not in r.variables]
    if ranks and ranks[0].local_world_size > 1:
        yield warning(
            "OMP_NUM_THREADS",
            f"not set{_at(ranks, job=job)}: each of {ranks[0].local_world_size} ranks starts as "
            "many threads as the node has cores",
            way_out="export OMP_NUM_THREADS=1 to 8: the node's cores divided by its ranks",
        )


def _differing(job: JobFacts) -> Iterator[Finding]:
    names = {n for r in job.ranks for n in r.variables if n.startswith(PREFIXES)}
    for name in sorted(names - set(MAY_DIFFER)):
        groups = grouped(job.ranks, by=partial(_value_of, name=name))
        if len(groups) > 1:
            parts = [f"{value or 'not set'} on {where(ranks)}" for value, ranks in groups.items()]
            yield warning(
                name,
                "; ".join(parts),
                expected="the same on all ranks",
                way_out="set it for all ranks or for none (srun --export=ALL; torchrun passes its "
                "own environment on)",
            )


def _value_of(rank: RankFacts, *, name: str) -> str:
    return rank.variables.get(name, "")
