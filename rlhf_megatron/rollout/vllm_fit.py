"""The one file that fits vLLM into a training process: its patches and all private names in use.

Every patch is undone when its context ends. What stays: the environment variables of
`prepare_environment`, and on a CPU what `torch_kept_whole` names. File and function names
are those of vLLM 0.32.0 (the CPU build) and 0.25.1 (the GPU build), and of torch 2.13 and 2.11.
"""

import importlib
import importlib.util
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

# --- Environment and import -------------------------------------------------------------------


def prepare_environment(*, device: torch.device) -> None:
    """Set what vLLM and torch read at import; what the user has set stays. Call it early."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are local directories
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's weights must be in this process
    }
    if importlib.util.find_spec("flashinfer") is None:
        # 0.25.1 imports it for sampling without asking: "No module named 'flashinfer'".
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if device.type == "cpu":
        # Without it the first log-probs compile a helper in C++ (20 s, needs a compiler).
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        dynamo.disable = True  # type: ignore[attr-defined]  # it read the environment before


def _nothing(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what vLLM makes torch say on every rank, and no user can act on."""
    with warnings.catch_warnings():
        # torch 2.13: reduce_op and all_gather_into_tensor are deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        log = logging.getLogger("torch._library.triton")  # "Triton not available", on a CPU
        log.addFilter(_nothing)
        try:
            yield
        finally:
            log.removeFilter(_nothing)


def import_vllm(*, device: torch.device) -> Any:
    """The module `vllm`, ready for `LLM()` on `device`.

    Raises ImportError where it is missing, does not load, or is built for another kind of device.
    """
    prepare_environment(device=device)
    try:
        with quiet():
            vllm = importlib.import_module("vllm")
            # The module loads its parts on first use; these are where a broken install shows.
            _ = vllm.LLM, vllm.SamplingParams
        platform = importlib.import_module("vllm.platforms").current_platform
    except ImportError:
        raise
    except Exception as error:  # an install at odds with its torch fails in many ways
        raise ImportError(f"{type(error).__name__}: {error}") from error
    if platform.device_type != device.type:
        raise ImportError(
            f"vLLM {vllm.__version__} runs on {platform.device_type or 'no device here'}, "
            f"not on {device.type}"
        )
    return vllm


# --- torch's default group: an engine is a world of its own -----------------------------------
#
# Three private names of torch.distributed.distributed_c10d (2.11 to 2.13):
#   _get_default_group()   the default group (the public GroupMember.WORLD is the same object)
#   _update_default_pg(g)  makes g the default group, this rank's number included
#   _world.group_count     numbers the groups; every new_group takes its store's key from it
# vLLM spans the whole default group (parallel_state.init_distributed_environment), so that is what
# must be the engine's ranks while LLM() runs.

PRIVATE_TORCH_NAMES = ("_get_default_group", "_update_default_pg", "_world")


def self_test(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError unless torch's private names exist and do what is needed of them."""
    missing = [name for name in PRIVATE_TORCH_NAMES if not hasattr(distributed_c10d, name)]
    works = not missing
    if works:
        before = (dist.get_rank(), dist.get_world_size())
        with as_world(group):
            works = (dist.get_rank(), dist.get_world_size()) == (group.rank(), group.size())
        works = works and (dist.get_rank(), dist.get_world_size()) == before
        works = works and isinstance(getattr(distributed_c10d._world, "group_count", None), int)
    if not works:
        raise RuntimeError(
            f"torch {torch.__version__} does not let its default process group be exchanged "
            f"(distributed_c10d: {', '.join(missing) or 'changed meaning'}); vLLM engines need it: "
            "use torch 2.11 to 2.13, or rollout.engine=hf"
        )


@contextmanager
def as_world(group: dist.ProcessGroup, *, local_rank: int | None = None) -> Iterator[None]:
    """Inside, torch's default group is `group`, and RANK and WORLD_SIZE count within it.

    LOCAL_RANK is changed only where `local_rank` is given: on a GPU it stays, since it names the
    device. The group's ranks must ascend: `new_group` sorts them, vLLM does not.
    """
    ranks = dist.get_process_group_ranks(group)
    assert ranks == sorted(ranks), ranks
    world = distributed_c10d._get_default_group()
    numbers = {"RANK": str(group.rank()), "WORLD_SIZE": str(group.size())}
    if local_rank is not None:
        numbers["LOCAL_RANK"] = str(local_rank)
    with environment(numbers, restore=("LOCAL_WORLD_SIZE",)):
        distributed_c10d._update_default_pg(group)
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(world)


def level_group_count(
    group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu"
) -> None:
    """Bring torch's group counter to its maximum over the ranks of `group` (default: all).

    Collective. Needed after engines were built: their ranks have made more groups than the others,
    and the next new_group() would wait for ever under a name that its peers do not use.
    """
    count = torch.tensor([distributed_c10d._world.group_count], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    distributed_c10d._world.group_count = int(count)


# --- Building LLM() ---------------------------------------------------------------------------


@contextmanager
def environment(values: dict[str, str], *, restore: tuple[str, ...] = ()) -> Iterator[None]:
    """Set environment variables; put them, and those named in `restore`, back at the end."""
    before = {name: os.environ.get(name) for name in (*values, *restore)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the time of the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def ready_for_llm(group: dist.ProcessGroup, *, device: torch.device) -> Iterator[None]:
    """Everything around `LLM()`: the engine's own world, and on a CPU the patches it needs.

    Collective over `group`.
    """
    on_cpu = device.type == "cpu"
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if on_cpu:
            job = [uuid.uuid4().hex]
            dist.broadcast_object_list(job, group=group, group_src=0)
            stack.enter_context(torch_kept_whole())
            stack.enter_context(plain_cpu_linears())
            stack.enter_context(own_shared_memory(job[0]))
        stack.enter_context(as_world(group, local_rank=group.rank() if on_cpu else device.index))
        yield


@contextmanager
def torch_kept_whole() -> Iterator[None]:
    """Undo what vLLM does to the process on a CPU.

    It replaces torch.set_num_threads by a warning (v1/worker/cpu_worker.py, init_device) and sets
    LD_PRELOAD and LOCAL_WORLD_SIZE (platforms/cpu.py, check_and_update_config), which child
    processes would inherit. torch.accelerator.synchronize and empty_cache stay empty functions
    (cpu_model_runner.py, _set_torch_accelerator_to_noop): generate() calls them, and there is no
    accelerator that would miss them. The binding of memory to this process's NUMA node stays, too
    (cpu_worker.py, init_cpu_memory_env).
    """
    threads = torch.get_num_threads()
    with (
        environment({}, restore=("LD_PRELOAD", "LOCAL_WORLD_SIZE")),
        replaced(torch, "set_num_threads", torch.set_num_threads),
    ):
        yield
    torch.set_num_threads(threads)


@contextmanager
def plain_cpu_linears() -> Iterator[None]:
    """Keep the weights of CPU linear layers as they are, so that they can be written in place.

    vLLM packs them for oneDNN on loading and leaves an empty `weight` behind
    (model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm, called by
    process_weights_after_loading of linear.py and vocab_parallel_embedding.py).
    """
    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with replaced(utils, "dispatch_cpu_unquantized_gemm", plain):
        yield


@contextmanager
def own_shared_memory(name: str) -> Iterator[None]:
    """Give this engine's shared memory a name of its own.

    CPU ranks of a tensor-parallel group meet in /dev/shm under the part of the init method after
    its last colon (v1/worker/cpu_worker.py, init_device). With env:// that is the same for every
    engine of every job, also one that was killed and left its files: "create shm in SHMManager
    failed. errno: 17". The init method is not used otherwise, torch.distributed being up already.
    """
    executor = importlib.import_module("vllm.v1.executor.uniproc_executor")

    def distributed_args(self: Any) -> tuple[str, int, int]:
        rank, local_rank = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK"))
        return f"engine:{name}", rank, local_rank

    with replaced(executor.ExecutorWithExternalLauncher, "_distributed_args", distributed_args):
        yield


# --- A built LLM ------------------------------------------------------------------------------


def inner_model(llm: Any) -> nn.Module:
    """The model that this rank computes with; its parameters are the live ones."""
    return llm.apply_model(lambda model: model)[0]  # type: ignore[no-any-return]


def drop_message_queue() -> None:
    """Free the Python shared memory of the tensor-parallel group, which nothing here uses.

    Its ranks get their work from their own schedulers. Kept, it is reported as leaked at exit
    (distributed/parallel_state.py, GroupCoordinator.mq_broadcaster; without it the group falls back
    to torch's broadcast).
    """
    state = importlib.import_module("vllm.distributed.parallel_state")
    state.get_tp_group().mq_broadcaster = None


def keep_groups_on_exit(llm: Any) -> None:
    """Take back vLLM's clean-up, which destroys the trainer's default process group.

    0.32.0: v1/engine/core_client.py, InprocClient, runs EngineCore.shutdown when the LLM is deleted
    and at exit; it ends in parallel_state.destroy_distributed_environment. 0.25.1 has no finalizer
    there and cleans up nothing by itself.
    """
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
