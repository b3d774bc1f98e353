"""Memory and limits of the hosts, and the job's time limit."""

from collections.abc import Iterator

from rlhf_megatron.doctor.facts import JobFacts, RankFacts, gigabytes, nodes_in_words, where
from rlhf_megatron.doctor.report import Finding, good, note, red, warning

SHM_RED_BYTES = 256 * 2**20
"""Docker gives 64 MiB, with which NCCL and vLLM end in bus errors."""
SHM_BYTES_PER_RANK = 2**30
FILES_AT_LEAST = 1024
FILES_PER_PEER = 8
"""Sockets that gloo and NCCL open to each peer."""
UNLIMITED = -1
SOON_SECONDS = 900.0
"""Less time before a stop is hardly worth a start."""


def check_host(job: JobFacts) -> Iterator[Finding]:
    yield from _shm(job)
    yield from _open_files(job)
    yield from _locked_memory(job)
    yield from _memory(job)
    yield from _time(job)


def _ranks_per_node(job: JobFacts) -> int:
    """Of a node that is examined alone, as many as it has GPUs."""
    first = job.ranks[0]
    return max(first.num_gpus, 1) if job.node_only else first.local_world_size


def _shm(job: JobFacts) -> Iterator[Finding]:
    known = [(node, node.shm_bytes) for node in job.nodes if node.shm_bytes is not None]
    ranks = _ranks_per_node(job)
    if not known or ranks == 1:
        return
    least = min(size for _, size in known)
    small = [node for node, size in known if size < SHM_BYTES_PER_RANK * ranks]
    found = f"{gigabytes(least)}"
    expected = f"{gigabytes(SHM_BYTES_PER_RANK * ranks)}, 1 GiB a rank"
    if not small:
        yield good("/dev/shm", found, expected)
        return
    tell = red if least < SHM_RED_BYTES and job.uses_cuda else warning
    yield tell(
        "/dev/shm",
        f"{found} on {nodes_in_words(small)}",
        expected=expected,
        way_out="docker run --ipc=host, or --shm-size=16g; mount -o remount,size=50% /dev/shm",
    )


def _open_files(job: JobFacts) -> Iterator[Finding]:
    wanted = FILES_AT_LEAST + FILES_PER_PEER * len(job.ranks)
    small = [rank for rank in job.ranks if rank.open_files < wanted]
    if not small:
        yield good("open files", _limit(job.ranks[0].open_files), f"at least {wanted}")
        return
    worst = min(small, key=lambda rank: rank.open_files)
    tell = red if worst.open_files < FILES_PER_PEER * len(job.ranks) else warning
    yield tell(
        "open files",
        f"limit {worst.open_files} on {where(small)}",
        expected=f"at least {wanted}",
        way_out=f"ulimit -n {min(worst.open_files_hard, max(wanted, 65536))} in the job script"
        if worst.open_files_hard >= wanted
        else "have the hard limit raised (nofile in limits.conf, LimitNOFILE of slurmd)",
    )


def _limit(number: int) -> str:
    return "no limit" if number >= 2**31 else f"limit {number}"


def _locked_memory(job: JobFacts) -> Iterator[Finding]:
    """InfiniBand and pinned buffers need it."""
    if not job.uses_cuda or len(job.nodes) == 1:
        return
    limited: list[RankFacts] = [r for r in job.ranks if r.locked_memory_bytes != UNLIMITED]
    if limited:
        yield warning(
            "locked memory",
            f"limit {gigabytes(min(r.locked_memory_bytes for r in limited))} on {where(limited)}",
            expected="unlimited: InfiniBand pins its buffers",
            way_out="ulimit -l unlimited; docker run --ulimit memlock=-1; PropagateResourceLimits "
            "in slurm.conf",
        )
    else:
        yield good("locked memory", "unlimited")


def _memory(job: JobFacts) -> Iterator[Finding]:
    least = min(job.nodes, key=lambda node: node.memory_available_bytes)
    need = job.needs.host_bytes_per_rank * _ranks_per_node(job)
    found = f"{gigabytes(least.memory_available_bytes)} available"
    if len(job.nodes) > 1:
        found += f" on {least.hostname}, least of all"
    if need == 0:
        yield note("host memory", found)
        return
    expected = f"{gigabytes(need)} a node: weights of sleeping engines, copies of checkpoints"
    if least.memory_available_bytes < need:
        yield red(
            "host memory",
            found,
            expected=expected,
            way_out="ask the scheduler for all of the node's memory (--mem=0), spread the model "
            "over more nodes, or set checkpoint.asynchronous=false",
        )
    else:
        yield good("host memory", found, expected)


def _time(job: JobFacts) -> Iterator[Finding]:
    if job.seconds_left is None:
        if job.in_slurm:
            yield good("time limit", "none that Slurm tells")
        return
    stop_before = job.needs.stop_before_seconds
    found = f"{job.seconds_left / 60:.0f} minutes left"
    if job.seconds_left <= stop_before:
        yield red(
            "time limit",
            found,
            expected=f"more than checkpoint.stop_before_minutes={stop_before / 60:g}",
            way_out="ask for more time (sbatch --time), or lower checkpoint.stop_before_minutes",
        )
    elif job.seconds_left - stop_before < SOON_SECONDS:
        yield warning(
            "time limit",
            found,
            expected=f"{SOON_SECONDS / 60:.0f} minutes and checkpoint.stop_before_minutes",
            way_out="ask for more time (sbatch --time)",
        )
    elif stop_before == 0:
        yield note(
            "time limit",
            f"{found}; checkpoint.stop_before_minutes=0, so the run counts on a signal beforehand "
            "(sbatch --signal)",
        )
    else:
        yield good("time limit", f"{found}; stops {stop_before / 60:g} minutes before")
