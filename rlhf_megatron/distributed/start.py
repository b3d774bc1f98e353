"""The distributed start: device, backend, rendezvous, and a clean end."""

import ctypes
import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.roll_call import call_roll
from rlhf_megatron.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """Who this process is among its peers, and where its tensors live."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    timeout_seconds: float
    job_group: dist.ProcessGroup
    """All ranks of the job."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def node_of(self, rank: int) -> int:
        """Node number of a global rank; launchers number ranks node by node."""
        return rank // self.local_world_size


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """The device of this process for `distributed.device`.

    Raises UserError where "cuda" is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(
            "distributed.device=cuda: torch sees no CUDA device here; take auto or cpu, or install "
            "a CUDA build of torch and check `nvidia-smi`"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def world_size_from_environment() -> int:
    """WORLD_SIZE as torchrun or srun set it; 1 for a plain `python` start."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_environment() -> int:
    """RANK as torchrun or srun set it; 0 for a plain `python` start."""
    return int(os.environ.get("RANK", "0"))


def start(config: DistributedConfig) -> DistributedContext:
    """Join the job: choose the device, initialise torch.distributed, redirect CUDA on a CPU.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them
    the job is this one process. Raises UserError where some are missing, and where ranks stay away.
    """
    single = "WORLD_SIZE" not in os.environ
    if single:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    rank, world_size = rank_from_environment(), world_size_from_environment()
    missing = [
        f"{name}: not set, though WORLD_SIZE={world_size} is; start with torchrun or srun"
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ and not single
    ]
    if missing:
        raise ConfigError(missing)
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])

    device = choose_device(config.device, local_rank=local_rank)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if "OMP_NUM_THREADS" not in os.environ:
            # What a rank computes on the CPU is small; the threads that help it go on spinning
            # after that, and the one that launches kernels waits for a core (docs/benchmarks.md).
            torch.set_num_threads(1)
    else:
        from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda

        use_cpu_in_place_of_cuda()

    # No device_id: a bound device makes new_group split the parent communicator, which needs every
    # rank of the job, while role groups are made by their members alone (groups.py).
    if single:
        store: Store = TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))  # type: ignore[attr-defined]
    else:
        store = _job_store(rank, timeout=timedelta(seconds=config.join_timeout_seconds))
        call_roll(
            store,
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            timeout_seconds=config.join_timeout_seconds,
        )
        store.set_timeout(timedelta(seconds=config.timeout_seconds))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout_seconds),
    )
    return DistributedContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        backend=backend,
        timeout_seconds=config.timeout_seconds,
        job_group=dist.group.WORLD,  # type: ignore[arg-type]
    )


def _job_store(rank: int, *, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which a torchrun agent or rank 0 holds.

    Raises UserError where it cannot be made or reached within `timeout`.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not held_by_agent
    try:
        store = TCPStore(
            address, int(port), is_master=is_master, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        if is_master:
            problem = "cannot listen there; take a free port for MASTER_PORT"
        else:
            problem = (
                f"cannot be reached within {timeout.total_seconds():g} s; MASTER_ADDR must be a "
                "name or address of rank 0's node that every node reaches, and rank 0 be running"
            )
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"rank {rank} on {socket.gethostname()}: the job's store at {address}:{port} {problem} "
            f"({first_line})"
        ) from None
    if held_by_agent:
        # torchrun may keep its store through restarts (2.13: dynamic_rendezvous.py shares that of
        # the rendezvous): without a prefix ranks would find the addresses of the processes before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt_{attempt}", store)
    return store


def release_cached_memory(device: torch.device) -> None:
    """Give back what is held without being used: torch's allocator to the GPU, or on a CPU the C
    library to the system, which else keeps a heap as large as the most that any step has needed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def finish(exit_code: int) -> None:
    """End the process after all ranks have arrived.

    Leaves through os._exit: vLLM's and NCCL's destructors run in no useful order at interpreter
    exit (a deleted engine destroys the trainer's process group) and print alarming tracebacks.
    """
    for child in multiprocessing.active_children():  # os._exit would leave them behind
        child.kill()
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
