"""The distributed optimizer of a role: AdamW over float32 master weights, sharded over replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.module import Float16Module

from rlhf_megatron.engine.parts import optimizer_parts
from rlhf_megatron.models.build import RoleModel
from rlhf_megatron.models.config import OptimizerConfig

LARGEST_NORM = 1e15
"""Of one rank's gradient: its square, summed over any number of ranks, is within float32."""


def in_model_precision(model: RoleModel) -> list[Any]:
    """The chunks as the schedules run them: wrapped where activations are bf16."""
    if not model.config.bf16:
        return list(model.chunks)
    return [Float16Module(model.config, chunk) for chunk in model.chunks]


def wrap_for_training(
    model: RoleModel, *, config: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Gradient buffers in float32, reduced once per optimizer step as sums, not means.

    Without replicas the overlaps of `config` mean nothing.
    """
    has_replicas = model.groups.layout.data_parallel_size > 1
    overlaps = config.overlap_grad_reduce and has_replicas
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=config.overlap_param_gather and has_replicas,
        use_distributed_optimizer=True,
    )
    wrapped = [
        DistributedDataParallel(model.config, options, chunk, pg_collection=model.groups.collection)
        for chunk in in_model_precision(model)
    ]
    model.config.finalize_model_grads_func = finalize_model_grads
    if overlaps:
        # The schedules keep all micro-batches but the last from setting reductions off.
        functions = [module.no_sync for module in wrapped]
        model.config.no_sync_func = functions if len(functions) > 1 else functions[0]
    if options.overlap_param_gather:
        for module in wrapped:
            module.disable_forward_pre_hook(param_sync=False)  # LateGather sets them
    if model.fused_norms:
        _accumulate_in_place(wrapped)
    return wrapped


class LateGather:
    """Whether new weights reach the other replicas at once, or beneath the next forward pass.

    Megatron-Core leaves the gather to hooks of the forward pass where overlap_param_gather is set,
    and to whoever reads weights otherwise. Here weights are whole wherever hooks are not set, which
    is anywhere but between the updates of one phase.
    """

    def __init__(self, wrapped: list[DistributedDataParallel]) -> None:
        self._wrapped = wrapped
        self._is_wanted = wrapped[0].ddp_config.overlap_param_gather
        self._has_hooks = False
        self._more_updates_follow = False

    @contextmanager
    def between_updates(self) -> Iterator[None]:
        """Around the updates of a phase. Collective at the end, unless the block raises: then the
        job is over."""
        self._more_updates_follow = True
        yield
        self._more_updates_follow = False
        if self._has_hooks:
            self._has_hooks = False
            for module in self._wrapped:
                module.disable_forward_pre_hook(param_sync=True)

    def updated(self) -> None:
        """The optimizer has changed this replica's share of the weights. Collective."""
        if not self._is_wanted or self._has_hooks:
            return
        for module in self._wrapped:
            if self._more_updates_follow:
                module.enable_forward_pre_hook()
            else:
                module.start_param_sync(force_sync=True)
        self._has_hooks = self._more_updates_follow


def _accumulate_in_place(wrapped: list[DistributedDataParallel]) -> None:
    """Let Transformer Engine's linears add weight gradients to the float32 buffer as they compute
    them.

    TransformerConfig.gradient_accumulation_fusion would ask for NVIDIA's apex as well, for
    Megatron-Core's own linears (tensor_parallel/layers.py, ColumnParallelLinear).
    """
    from transformer_engine.pytorch import LayerNormLinear, Linear

    for module in wrapped:
        for layer in module.modules():
            if isinstance(layer, (Linear, LayerNormLinear)):
                layer.fuse_wgrad_accumulation = True


def build_optimizer(
    model: RoleModel, *, wrapped: list[DistributedDataParallel], config: OptimizerConfig
) -> Any:
    """Megatron-Core's distributed optimizer; the learning rate is set before each step."""
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=True,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
    )
    with model.groups.as_default_group():
        optimizer = get_megatron_optimizer(
            options,
            wrapped,
            config_overrides=get_standard_config_overrides(options),
            use_gloo_process_groups=False,
            pg_collection=model.groups.collection,
        )
    model.config.grad_scale_func = optimizer.scale_loss
    _use_fused_adam(optimizer)
    return optimizer


def _use_fused_adam(optimizer: Any) -> None:
    """One kernel over all parameters, which needs no workspace, where Megatron-Core took torch's
    AdamW (without Transformer Engine or NVIDIA's apex) and the master weights are on a GPU.

    Megatron-Core (0.16.1, 0.19.2) hands no such option on, but the step reads it from the groups.
    """
    for part in optimizer_parts(optimizer):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.AdamW):
            continue
        for group in adam.param_groups:
            if all(p.is_cuda for p in group["params"]):
                group.update(fused=True, foreach=False)


def set_rates(optimizer: Any, *, learning_rate: float, weight_decay: float) -> None:
    """Set this step's rates; norms and biases (wd_mult 0) are spared the decay."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def gradients_are_finite(optimizer: Any) -> bool:
    """Of this rank's share, once `prepare_grads` has run. Also False where the sum of squares over
    all ranks would be infinite: clipping would make such a gradient 0.

    Megatron-Core 0.16 to 0.19 look for NaN only where a loss scale is in use (fp16), or end the
    process (DistributedDataParallelConfig.check_for_nan_in_grad); the norm alone does not tell, as
    it leaves out what tensor-parallel ranks hold alike.
    """
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if not gradients:
        return True
    return bool(torch.nn.utils.get_total_norm(gradients) < LARGEST_NORM)  # NaN is not


def as_float(value: Any) -> float:
    """Gradient norms are floats, or tensors where Transformer Engine is installed."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
