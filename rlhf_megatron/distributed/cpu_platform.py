"""Run Megatron-Core's hard-coded CUDA paths on CPU tensors over gloo.

Megatron-Core 0.16 to 0.19 writes device="cuda" and torch.cuda.current_device() in its schedules,
buffers and optimizers, with no flag to change it. `use_cpu_in_place_of_cuda` redirects those for
the life of one process, and refuses to where there is a GPU. This is the only module that may
change another library's behaviour for the CPU; each redirection names the line that needs it
(line numbers of megatron-core 0.16.1).
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _names_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


_METHODS = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})


class CudaMeansCpu(TorchFunctionMode):
    """Answer requests for CUDA tensors with CPU tensors."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # schedules.py:596 torch.zeros(..., device="cuda"); param_and_grad_buffer.py:800;
        # p2p_communication.py:313; optimizer.py:481; clip_grads.py:103; filesystem_async.py:230
        if _names_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": "cpu"}
        if func not in _METHODS:  # every call of torch comes through here: no more than needed
            return func(*args, **kwargs)
        # layers.py:261 and finalize_model_grads.py:300 call tensor.cuda()
        if func is torch.Tensor.cuda:
            return args[0]
        # optimizer.py:671 and distrib_optimizer.py:361 compare Tensor.type() with
        # "torch.cuda.FloatTensor" and friends, and raise TypeError on anything else
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        # rotary_pos_embedding.py:162 and schedules.py:418 move tensors with .to(device)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], "cpu" if _names_cuda(args[1]) else args[1], *args[2:])
        return func(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def is_redirected() -> bool:
    """Whether this process runs with CUDA redirected to the CPU."""
    return getattr(torch.cuda.synchronize, "__module__", "") == __name__


def use_cpu_in_place_of_cuda() -> None:
    """Redirect for the life of the process; a second call changes nothing.

    Raises RuntimeError where a CUDA device is present.
    """
    if torch.cuda.is_available():
        raise RuntimeError("use_cpu_in_place_of_cuda: this process has a CUDA device")
    if is_redirected():
        return
    # tensor_parallel/layers.py:261, p2p_communication.py:190, clip_grads.py:174 ask for the device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # p2p_communication.py:242 and :398, state_dict_saver.py:252, filesystem_async.py:230
    torch.cuda.synchronize = _nothing
    torch.cuda.empty_cache = _nothing
    # param_and_grad_buffer.py (0.19.2:632) asks for the stream on every gradient sync
    torch.cuda.current_stream = _nothing  # type: ignore[assignment]
    # tensor_parallel/random.py:422 seeds the default state
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.manual_seed = _manual_seed
    CudaMeansCpu().__enter__()

    from megatron.core.tensor_parallel import random

    # random.py:55 and :66: torch's lazy CUDA calls would drop the state silently
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
