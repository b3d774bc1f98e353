"""Which engine, on which ranks, built how."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.errors import UserError
from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.rollout.engine_args import check_engine_args
from rlhf_megatron.rollout.engine_ranks import check_engine_size


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    """The engine that `rollout.engine` stands for here, and a line for the log that says why."""

    name: str  # "vllm" or "hf"
    reason: str


def resolve_engine(
    name: str, *, device: torch.device, engine_args: Mapping[str, Any] = MappingProxyType({})
) -> ResolvedEngine:
    """What "auto", "vllm" or "hf" means on this machine. Imports vLLM, which takes seconds.

    Raises UserError where vLLM is asked for by name and does not import for `device`; ConfigError
    where it does not take the arguments `engine_args`.
    """
    if name == "hf":
        return ResolvedEngine(name="hf", reason="rollout.engine=hf: transformers' generate")
    assert name in ("auto", "vllm"), name
    try:
        vllm = vllm_fit.import_vllm(device=device)
    except ImportError as error:
        if name == "vllm":
            raise UserError(
                f"rollout.engine: vllm does not import here ({error}); install it, or set "
                "rollout.engine=hf (slow, for small models)"
            ) from error
        return ResolvedEngine(
            name="hf",
            reason=f"rollout.engine=auto: transformers' generate; vLLM does not import ({error})",
        )
    check_engine_args(engine_args, known=vllm_fit.engine_argument_names(vllm))
    return ResolvedEngine(name="vllm", reason=f"rollout.engine={name}: vLLM {vllm.__version__}")


def check_head_size(name: str, *, head_dim: int, device: torch.device) -> None:
    """Raise UserError where the engine `name` has no attention for heads of that size."""
    if name != "vllm" or device.type != "cpu":
        return  # on a GPU vLLM says so itself, and names its backends
    taken = vllm_fit.cpu_head_sizes()
    if head_dim not in taken:
        raise UserError(
            f"rollout.engine: on a CPU vLLM's attention takes heads of "
            f"{', '.join(map(str, taken))} dimensions, and those of actor.model have {head_dim}; "
            "set rollout.engine=hf"
        )


def build_engine(
    name: str,
    *,
    model_dir: str | Path,
    config: RolloutConfig,
    ranks: tuple[int, ...],
    replica: int,
    group: dist.ProcessGroup,
    dtype: str,
    run_seed: int,
    max_model_len: int,
    device: torch.device,
    trust_remote_code: bool = False,
) -> RolloutEngine:
    """The engine `name` ("vllm" or "hf"), number `replica`, on `ranks`, whose world is `group`.

    `trust_remote_code`: run code that the directory brings with it. Collective over `ranks`.
    Afterwards all ranks of the job, also those without an engine, must call
    `vllm_fit.level_group_count`. Raises UserError: see the engines.
    """
    check_engine_size(name, tensor_parallel_size=len(ranks))
    if name == "hf":
        from rlhf_megatron.rollout.hf import HfEngine

        return HfEngine(
            model_dir,
            config=config,
            ranks=ranks,
            replica=replica,
            dtype=dtype,
            run_seed=run_seed,
            max_model_len=max_model_len,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    assert name == "vllm", name
    from rlhf_megatron.rollout.vllm import VllmEngine

    return VllmEngine(
        model_dir,
        config=config,
        ranks=ranks,
        replica=replica,
        group=group,
        dtype=dtype,
        run_seed=run_seed,
        max_model_len=max_model_len,
        device=device,
        trust_remote_code=trust_remote_code,
    )
