"""Which tensors make up a role's weights, gradients and optimizer state on this rank."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rlhf_megatron.engine.offload import GRADIENTS, OPTIMIZER, WEIGHTS, NamedTensors
from rlhf_megatron.models.build import RoleModel


def named_parts(model: RoleModel, *, optimizer: Any) -> dict[str, NamedTensors]:
    """Kind -> its tensors by names that stay. `optimizer`: None of a role that is not trained."""
    found: dict[str, NamedTensors] = {WEIGHTS: lambda: _weights(model)}
    if optimizer is not None:
        found[GRADIENTS] = lambda: _gradients(model)
        found[OPTIMIZER] = lambda: _optimizer_state(model, optimizer=optimizer)
    return found


def _weights(model: RoleModel) -> Mapping[str, Tensor]:
    """Of a trained role, views of Megatron-Core's flat parameter buffers."""
    return model.parameters()


def _gradients(model: RoleModel) -> Mapping[str, Tensor]:
    """Views of the flat gradient buffers, which DistributedDataParallel puts on parameters."""
    return {
        name: parameter.main_grad  # type: ignore[attr-defined]
        for name, parameter in model.parameters().items()
        if hasattr(parameter, "main_grad")
    }


def _optimizer_state(model: RoleModel, *, optimizer: Any) -> Mapping[str, Tensor]:
    """Master weights and moments. In float32 the master weights are views of the weights and are
    left out; the moments come with the first step."""
    weights = {p.untyped_storage() for p in model.parameters().values()}
    return {
        name: tensor
        for name, tensor in _optimizer_tensors(optimizer)
        if tensor.untyped_storage() not in weights
    }


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Megatron-Core's optimizers of a role, which are chained where there are several."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for part_number, part in enumerate(optimizer_parts(optimizer)):
        adam = part.optimizer
        for group_number, group in enumerate(adam.param_groups):
            for number, main in enumerate(group["params"]):
                name = f"{part_number}.{group_number}.{number}"
                yield f"{name}.param", main
                for key, value in adam.state.get(main, {}).items():
                    if isinstance(value, Tensor) and value.dim() > 0:  # not the count of steps
                        yield f"{name}.{key}", value
