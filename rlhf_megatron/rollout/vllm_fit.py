"""The one file that fits vLLM into a training process: its patches and all private names in use.

Every patch is undone when its context ends. What stays: the environment variables of
`prepare_environment`, and on a CPU some that vLLM sets for itself (VLLM_*, TORCHINDUCTOR_*,
NUMEXPR_MAX_THREADS) and the binding of memory to this process's NUMA node. File and function names
are those of vLLM 0.32.0 (the CPU build) and 0.25.1 (the GPU build), and of torch 2.13 and 2.11.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Collection, Generator, Iterator, Sequence
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


def cpu_head_sizes() -> list[int]:
    """Head dimensions that vLLM's attention takes on a CPU. It does not look itself: another one
    fails in the first forward pass, in a kernel (v1/attention/backends/cpu_attn.py)."""
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    return list(backend.get_supported_head_sizes())


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
def ready_for_llm(
    group: dist.ProcessGroup, *, device: torch.device, plain_linears: bool
) -> Iterator[None]:
    """Everything around `LLM()`: the engine's own world, and on a CPU the patches it needs.

    Collective over `group`. `plain_linears`: on a CPU keep weights as they can be written in place.
    """
    on_cpu = device.type == "cpu"
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if on_cpu:
            job = [uuid.uuid4().hex]
            dist.broadcast_object_list(job, group=group, group_src=0)
            stack.enter_context(torch_kept_whole())
            stack.enter_context(torch_as_vllm_has_it(device))
            if plain_linears:
                stack.enter_context(plain_cpu_linears())
            stack.enter_context(own_shared_memory(job[0]))
        stack.enter_context(as_world(group, local_rank=group.rank() if on_cpu else device.index))
        yield


@contextmanager
def torch_kept_whole() -> Iterator[None]:
    """Undo what vLLM does to the process on a CPU.

    It replaces torch.set_num_threads by a warning (v1/worker/cpu_worker.py, init_device) and sets
    LD_PRELOAD and LOCAL_WORLD_SIZE (platforms/cpu.py, check_and_update_config), which child
    processes would inherit. What else it replaces, `torch_as_vllm_has_it` keeps to its calls.
    """
    threads = torch.get_num_threads()
    with (
        environment({}, restore=("LD_PRELOAD", "LOCAL_WORLD_SIZE")),
        replaced(torch, "set_num_threads", torch.set_num_threads),
    ):
        yield
    torch.set_num_threads(threads)


_REPLACED_ON_A_CPU: tuple[tuple[Any, str], ...] = (
    (torch, "Event"),
    (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
    *((torch.cuda, name) for name in ("Event", "Stream", "set_stream", "current_stream", "stream")),
    *((torch.accelerator, name) for name in ("synchronize", "empty_cache", "get_memory_info")),
)
_vllm_torch: dict[int, Any] = {}
"""What vLLM has put there, by place in the list: it does so once in a process, on the first import
of v1/worker/cpu/shm.py, and its engines call it for ever after."""


@contextmanager
def torch_as_vllm_has_it(device: torch.device) -> Iterator[None]:
    """On a CPU, inside, the functions of torch that vLLM replaces; torch's own outside.

    For every call of the engine: events, streams and pinned memory do nothing there.
    """
    if device.type != "cpu":
        yield
        return
    before = {
        place: getattr(owner, name)
        for place, (owner, name) in enumerate(_REPLACED_ON_A_CPU)
        if hasattr(owner, name)
    }
    for place, value in _vllm_torch.items():
        setattr(*_REPLACED_ON_A_CPU[place], value)
    try:
        yield
    finally:
        for place, value in before.items():
            owner, name = _REPLACED_ON_A_CPU[place]
            _vllm_torch[place] = getattr(owner, name)
            setattr(owner, name, value)


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


PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""vLLM's layer methods that compute with the weight as it is loaded."""


def is_plain(method: Any) -> bool:
    """Whether a layer's method computes with its weight as it is."""
    return type(method).__name__ in PLAIN_METHODS


def layers_of_other_methods(llm: Any) -> list[str]:
    """Layers whose method (quantisation, fused experts) may keep weights in a form of its own, also
    where names and shapes look alike."""
    found = []
    for name, layer in inner_model(llm).named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not is_plain(method):
            found.append(f"{name} is computed by {type(method).__name__}")
    return found


def finished_outputs(
    llm: Any, inputs: Sequence[Any], parameters: Sequence[Any]
) -> Generator[tuple[int, Any]]:
    """What LLM.generate does, request by request: as each finishes, its number among `inputs` and
    its CompletionOutput. Closed early, it takes back what is unfinished.

    Both versions: LLM.generate is LLM.enqueue, then LLMEngine.step until nothing is unfinished
    (entrypoints/common/offline.py; entrypoints/offline_utils.py in 0.25.1). enqueue returns ids of
    the form NUMBER-RANDOM, outputs carry the NUMBER (v1/engine/input_processor.py,
    assign_request_id).
    """
    engine = llm.llm_engine
    ids = llm.enqueue(inputs, parameters, use_tqdm=False)
    index_of = {own_id.partition("-")[0]: index for index, own_id in enumerate(ids)}
    unfinished = dict(enumerate(ids))
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index = index_of[output.request_id]
                    del unfinished[index]
                    yield index, output.outputs[0]
    except GeneratorExit:
        engine.abort_request(list(unfinished.values()), internal=True)
        raise


def reload_weights(llm: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load whole tensors with Hugging Face's names, and let each layer process its own anew.

    Worker.reload_weights (v1/worker/gpu_worker.py, both versions): layer by layer into the tensors
    that the engine computes with, whose addresses stay. A tied head gets no tensor of its own, so
    vLLM does not process it again, and one that was packed for a CPU would stay as it was packed.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    model = inner_model(llm)
    embeddings = {id(m.weight) for n, m in model.named_modules() if n.endswith("embed_tokens")}
    head: Any = getattr(model, "lm_head", None)
    method: Any = getattr(head, "quant_method", None)
    if id(getattr(head, "weight", None)) in embeddings and is_plain(method):
        method.process_weights_after_loading(head)


def engine_argument_names(vllm: Any) -> set[str]:
    """Names that LLM() takes: its own, and those it hands on to EngineArgs."""
    own = inspect.signature(vllm.LLM.__init__).parameters
    fields = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    return fields | {name for name in own if name not in ("self", "kwargs")}


def pool_bytes(tags: Collection[str]) -> int:
    """What sleep mode's memory pools with these tags take when they are awake.

    device_allocator/cumem.py: a sleep gives physical memory back, and leaves torch's allocator to
    think that it is there. The second entry of a handle is its size.
    """
    if not tags:
        return 0
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    allocations = cumem.CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.tag in tags)


def check_tensor_parallel_group(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError unless vLLM's tensor-parallel group has exactly the ranks of `group`.

    vLLM keeps one set of groups in a process (distributed/parallel_state.py): a second engine on
    other ranks would reduce over the first one's, and answer garbage without an error.
    """
    state = importlib.import_module("vllm.distributed.parallel_state")
    wanted = dist.get_process_group_ranks(group)
    own = torch.tensor([wanted[group.rank()]])
    found = [torch.empty_like(own) for _ in range(state.get_tp_group().world_size)]
    dist.all_gather(found, own, group=state.get_tp_group().cpu_group)
    ranks = [int(rank) for rank in found]
    if ranks != wanted:
        raise RuntimeError(
            f"vLLM's tensor-parallel group has ranks {ranks}, the engine has {wanted}: this "
            "process had an engine on other ranks before; it can serve one set of ranks"
        )


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
