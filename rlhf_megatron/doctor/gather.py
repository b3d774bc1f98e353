"""Facts of this rank and of its node."""

import os
import resource
import shutil
import socket
import uuid
from pathlib import Path

import psutil
import torch

from rlhf_megatron.doctor.facts import FileFacts, FolderFacts, NodeFacts, RankFacts
from rlhf_megatron.doctor.gather_gpu import gather_gpus, gather_smi
from rlhf_megatron.doctor.gather_software import gather_software
from rlhf_megatron.doctor.variables import NAMES, PREFIXES

NO_LIMIT = 2**40


def gather_rank(
    *,
    rank: int,
    local_rank: int,
    local_world_size: int,
    device: torch.device,
    measure: bool,
    all_gpus: bool = False,
) -> RankFacts:
    """`measure`: time a matrix product. `all_gpus`: of all that this process sees, not of its own
    device alone."""
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    own = [device.index or 0] if device.type == "cuda" else []
    indices = list(range(num_gpus)) if all_gpus else own
    soft, hard = (_limit(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        device=device.type,
        num_gpus=num_gpus,
        gpus=gather_gpus(indices, measure=measure),
        variables=gather_variables(),
        open_files=soft,
        open_files_hard=hard,
        locked_memory_bytes=-1 if locked == resource.RLIM_INFINITY else locked,
        network_problem=network_problem(),
    )


def _limit(number: int) -> int:
    return NO_LIMIT if number == resource.RLIM_INFINITY else number


def gather_variables() -> dict[str, str]:
    """Those that the checks look at."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in NAMES or name.startswith(PREFIXES)
    }


def boot_id() -> str:
    """The same for all processes of a machine since its start, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def network_problem() -> str:
    """What is wrong with interfaces that the environment names."""
    known = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = os.environ.get(variable, "")
        if problem := interface_problem(text, known=known):
            return f"{variable}={text}: {problem}"
    return ""


def interface_problem(text: str, *, known: set[str]) -> str:
    """NCCL's rule for both: a list of beginnings of names; = in front: whole names; ^: all but."""
    if not text or text.startswith("^"):
        return ""
    exact = text.startswith("=")
    names = [name.strip() for name in text.lstrip("=").split(",") if name.strip()]
    found = [n for n in names if (n in known if exact else any(k.startswith(n) for k in known))]
    return "" if found else f"the node has only {', '.join(sorted(known))}"


def gather_node(
    *,
    number: int,
    imports: bool,
    files: tuple[FileFacts, ...] = (),
    folder: FolderFacts | None = None,
    tokenizer_problem: str | None = None,
) -> NodeFacts:
    """What the first rank of a node tells of it; what of the run's files was looked at is given."""
    return NodeFacts(
        number=number,
        hostname=socket.gethostname(),
        software=gather_software(imports=imports),
        smi=gather_smi(),
        shm_bytes=_shm_bytes(),
        memory_available_bytes=memory_available_bytes(),
        files=files,
        folder=folder,
        tokenizer_problem=tokenizer_problem,
    )


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def memory_available_bytes() -> int:
    """Of the host, or what the limit of this process's control group leaves, if that is less."""
    available = int(psutil.virtual_memory().available)
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            left = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            statistics = dict(
                line.split() for line in Path(folder, "memory.stat").read_text().splitlines()
            )
        except (OSError, ValueError):  # no such file, or "max"
            continue
        # File cache that is not in use goes when memory is asked for.
        available = min(available, max(left, 0) + int(statistics.get(cache, 0)))
    return available
