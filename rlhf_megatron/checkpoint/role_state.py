"""A role's weights and optimizer as dist_checkpointing takes them, copied to host memory, and back.

Each parameter is written by one of its replicas: they take turns, so that all write and none holds
the state of a whole model. The keys of the optimizer are those of Megatron-Core's fully reshardable
format: optimizer.state.<param, exp_avg or exp_avg_sq>.<key of the parameter>.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlhf_megatron.checkpoint.host_buffers import HostBuffers
from rlhf_megatron.checkpoint.manifest import RoleCheckpoint
from rlhf_megatron.checkpoint.optimizer_slices import (
    OwnRange,
    own_ranges,
    set_adam_steps,
    state_names,
)
from rlhf_megatron.checkpoint.sharded import sharded_state_dict
from rlhf_megatron.checkpoint.sharded_files import (
    StoredTensor,
    audit_sharded,
    model_parameters,
    open_sharded,
)
from rlhf_megatron.errors import UserError
from rlhf_megatron.models.build import RoleModel

Entry: TypeAlias = "ShardedTensor | ShardedTensorFactory"
_PREFIX = "optimizer.state."


@dataclass(frozen=True)
class _Held:
    """A parameter as the checkpoint knows it, and the replica that reads and writes it."""

    path: str
    entry: Entry
    parameter: Tensor
    owner: int
    """Data-parallel rank."""


@dataclass(frozen=True)
class RoleParts:
    """What a model's checkpoints are made of: found once, read in each save."""

    model: RoleModel
    held: tuple[_Held, ...]
    has_others: bool
    """Whether there is anything that is no tensor (Transformer Engine's extra states)."""


def role_parts(model: RoleModel) -> RoleParts:
    """The parts of this rank; they stay the same as long as the model does."""
    replicas = model.groups.layout.data_parallel_size
    held: list[_Held] = []
    has_others = False
    for chunk, state in sharded_state_dict(model).items():
        for name, entry in state.items():
            if isinstance(entry, ShardedTensor | ShardedTensorFactory):
                owner = len(held) % replicas
                held.append(_Held(f"{chunk}.{name}", entry, entry.data, owner))
            else:
                has_others = True
    return RoleParts(model, tuple(held), has_others)


Readable: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor -> itself or, where its memory is offloaded, its values on the host."""


def as_it_is(tensor: Tensor) -> Tensor:
    """Of a role whose memory stays on the device."""
    return tensor


def captured_weights(
    parts: RoleParts, *, buffers: HostBuffers, readable: Readable = as_it_is
) -> dict[str, Any]:
    """This rank's part of the weights, in host memory; complete after buffers.synchronize()."""
    mine = {}
    for held in parts.held:
        if _writes(held, model=parts.model):
            entry = replace(_alone(held.entry), data=readable(held.parameter))
            mine[held.path] = _in_host_memory(entry, path=f"weights.{held.path}", buffers=buffers)
    return mine | (_other_entries(parts.model) if parts.has_others else {})


def captured_optimizer(
    parts: RoleParts, *, optimizer: Any, buffers: HostBuffers, readable: Readable = as_it_is
) -> dict[str, Any]:
    """This rank's part of the optimizer's state, in host memory; complete after
    buffers.synchronize(). Collective over the role's data-parallel groups.

    Moments are zero before the first step.
    """
    ranges, model = own_ranges(optimizer), parts.model
    mine: dict[str, Any] = {}
    for held in parts.held:
        if not _is_first_copy(held.entry):  # alike on all replicas
            continue
        for name in state_names(held.parameter):
            own = ranges.get(held.parameter)
            values = own.get(name) if own is not None else None
            values = _gathered(
                held,
                own=own,
                values=readable(values) if values is not None else None,
                model=model,
            )
            if values is not None:
                path = f"{name}.{held.path}"
                mine[path] = _in_host_memory(
                    _of_optimizer(_alone(held.entry), name=name, data=values),
                    path=f"optimizer.{path}",
                    buffers=buffers,
                )
    return mine


@torch.no_grad()
def restore_optimizer(
    model: RoleModel | None,
    *,
    optimizer: Any,
    checkpoint: RoleCheckpoint,
    directory: Path,
    steps: int,
    dtype: torch.dtype,
) -> None:
    """Overwrite the optimizer's state by the one in `directory`, whatever layout wrote it.

    model: None on a rank without a part of it. steps: how often the optimizer had stepped. dtype:
    of the parameters. Collective over the job. Raises UserError, the same on all ranks, for
    whatever is missing or does not fit; nothing is touched then.
    """
    _audit(checkpoint, directory=directory, dtype=dtype)
    if model is None:
        _load({}, directory=directory)
        return
    own_replica = model.groups.coordinates.dp
    parts = role_parts(model)
    wanted = {
        f"{name}.{held.path}": _of_optimizer(
            _alone(held.entry),
            name=name,
            data=torch.empty(held.parameter.shape, dtype=torch.float32),
        )
        for held in parts.held
        for name in state_names(held.parameter)
        if held.owner == own_replica
    }
    loaded = _load(wanted, directory=directory)
    ranges = own_ranges(optimizer)
    for held in parts.held:
        for name in state_names(held.parameter):
            values = loaded.get(f"{name}.{held.path}")
            values = _shared(held, values=values, model=model)
            own = ranges.get(held.parameter)
            if own is not None and (steps > 0 or own.get(name) is not None):
                own.set(name, values=values.flatten()[own.start : own.stop])
    if steps > 0:
        set_adam_steps(optimizer, steps=steps)


def _load(wanted: dict[str, Any], *, directory: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(directory))
    except CheckpointException as error:  # raised on all ranks alike
        found = [str(failure[0]) for failure in error.failures.values()]
        raise UserError(f"{directory}: {'; '.join(dict.fromkeys(found))}") from error
    return loaded


def _audit(checkpoint: RoleCheckpoint, *, directory: Path, dtype: torch.dtype) -> None:
    stored = open_sharded(directory)
    parameters = model_parameters(checkpoint.arch, head=checkpoint.manifest.head, stored={})
    for name in state_names(torch.empty(0, dtype=dtype)):
        prefix = f"{_PREFIX}{name}."
        part: dict[str, StoredTensor] = {
            key.removeprefix(prefix): value
            for key, value in stored.items()
            if key.startswith(prefix)
        }
        if not part:
            raise UserError(f"{directory}: holds no {prefix}*: the optimizer's state is missing")
        audit_sharded(
            directory,
            stored=part,
            parameters=parameters,
            num_layers=checkpoint.arch.num_layers,
        )


def _is_first_copy(entry: Entry) -> bool:
    """Not one of the further copies on tensor-parallel ranks or, of a tied embedding, stages."""
    return all(number == 0 for number in entry.replica_id[:-1])


def _writes(held: _Held, *, model: RoleModel) -> bool:
    return _is_first_copy(held.entry) and held.owner == model.groups.coordinates.dp


def _alone(entry: Entry) -> Entry:
    """The entry as that of the only replica: the others have none."""
    return replace(entry, replica_id=(*entry.replica_id[:-1], 0))


def _of_optimizer(entry: Entry, *, name: str, data: Tensor) -> Entry:
    changes: dict[str, Any] = {"key": f"{_PREFIX}{name}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


@torch.no_grad()
def _in_host_memory(entry: Entry, *, path: str, buffers: HostBuffers) -> Any:
    """A factory's parts are copied one by one: Megatron-Core would copy views of one tensor again
    before it writes (filesystem_async.py, _clone_if_needed)."""
    parts = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
    tensors = [parts] if isinstance(parts, ShardedTensor) else list(nested_values(parts))
    for number, part in enumerate(tensors):
        part.data = buffers.copy(f"{path}.{number}", tensor=part.data)
    return parts


def _other_entries(model: RoleModel) -> dict[str, Any]:
    """What is no tensor (Transformer Engine's extra states); every replica brings its own."""
    return {
        f"{chunk}.{name}": entry
        for chunk, state in sharded_state_dict(model).items()
        for name, entry in state.items()
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }


@torch.no_grad()
def _gathered(
    held: _Held, *, own: OwnRange | None, values: Tensor | None, model: RoleModel
) -> Tensor | None:
    """The whole parameter's state, on its owner, None elsewhere. `values`: this rank's."""
    replicas = model.groups.layout.data_parallel_size
    shape = held.parameter.shape
    if replicas == 1 and values is not None:
        return values.view(shape)
    whole = torch.zeros(shape.numel(), dtype=torch.float32, device=held.parameter.device)
    if values is not None and own is not None:
        whole[own.start : own.stop] = values
    if replicas > 1:
        group = model.groups.collection.dp
        # As integers: x + 0 is exact then whatever x is, -0.0 and NaN included.
        dist.reduce(
            whole.view(torch.int32), dst=dist.get_global_rank(group, held.owner), group=group
        )
    return whole.view(shape) if held.owner == model.groups.coordinates.dp else None


def _shared(held: _Held, *, values: Tensor | None, model: RoleModel) -> Tensor:
    """The whole parameter's state on all replicas, from its owner."""
    device, shape = held.parameter.device, held.parameter.shape
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    if values is not None:
        whole.copy_(values)
    if model.groups.layout.data_parallel_size > 1:
        group = model.groups.collection.dp
        dist.broadcast(whole, src=dist.get_global_rank(group, held.owner), group=group)
    return whole
