"""A model's weights in sharded files: saved by any layout, loaded at any other.

Through megatron.core.dist_checkpointing, with the keys of GPTModel's own `sharded_state_dict`, so
that other Megatron tools read what is written here. Vocabulary padding may differ between layouts:
Megatron-Core allows it for the embedding and the output layer, and fills what is new with zeros.
"""

import errno
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch.distributed.checkpoint.api import CheckpointException

from rlhf_megatron.checkpoint.compat import results_in_this_process, writes_in_pieces
from rlhf_megatron.checkpoint.manifest import RoleCheckpoint
from rlhf_megatron.checkpoint.sharded_files import audit_sharded, model_parameters, open_sharded
from rlhf_megatron.distributed.agreement import together
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.megatron import chunk_prefix
from rlhf_megatron.models.build import RoleModel

FULL_BYTES = 64e6
"""A file system with less free counts as full where a write has failed."""

logger = logging.getLogger(__name__)


def sharded_state_dict(model: RoleModel | None) -> dict[str, Any]:
    """A model's parameters as dist_checkpointing takes them, chunk by chunk; empty on a rank
    without a part of the model."""
    if model is None:
        return {}
    metadata = {"dp_cp_group": model.groups.collection.dp_cp}
    with model.groups.active():
        return {
            f"model{number}": chunk.sharded_state_dict(prefix="", metadata=metadata)
            for number, chunk in enumerate(model.chunks)
        }


def save_weights(
    model: RoleModel | None, *, directory: Path, group: dist.ProcessGroup, consume: bool = False
) -> None:
    """Write the weights into `directory`, which exists and is empty. Collective over the job, which
    `group` is. `consume`: the model's weights are gone afterwards, which saves memory.

    Raises UserError on all ranks where any could not write.
    """

    def save() -> None:
        try:
            state = sharded_state_dict(model)
            if consume:
                _cut_apart(state)
            with results_in_this_process(), writes_in_pieces():
                dist_checkpointing.save(state, str(directory))
        except CheckpointException as error:
            # Raised on all ranks alike; rank 0's holds what the writers of all ranks met.
            found = [str(failure[0]) for failure in error.failures.values()]
            if found:
                text = "; ".join(dict.fromkeys(found))
                raise OSError(f"{directory}: {_with_free_space(text, directory)}") from error

    together(save, group=group, what="checkpoint")


def _with_free_space(text: str, directory: Path) -> str:
    """torch's archive writer says "unexpected pos" where the disk is full: say what it means."""
    free = shutil.disk_usage(directory).free
    reason = os.strerror(errno.ENOSPC)
    if free < FULL_BYTES and reason not in text:
        text = f"{reason} ({text})"
    return f"{text}; {free / 1e6:,.1f} MB free there"


@torch.no_grad()
def _cut_apart(state: dict[str, Any]) -> None:
    """Give each saved part of a parameter memory of its own, one parameter after another.

    `linear_fc1` is saved as gate and up. Megatron-Core copies such views before it writes, all of
    them at once (filesystem_async.py, _clone_if_needed): a third of a model more in memory.
    """
    for chunk in state.values():
        for name, entry in chunk.items():
            if isinstance(entry, ShardedTensorFactory):
                parts = entry.build()
                for part in parts:
                    part.data = part.data.clone()
                entry.data.untyped_storage().resize_(0)
                chunk[name] = parts


@torch.no_grad()
def load_weights(model: RoleModel | None, *, checkpoint: RoleCheckpoint) -> None:
    """Fill the model's parameters in place, whatever layout wrote them. Collective over the job.

    Raises UserError, the same on all ranks, listing every missing, unknown, wrongly shaped or
    truncated piece; no parameter is touched then.
    """
    start = time.perf_counter()
    directory, arch = checkpoint.folder.weights, checkpoint.arch
    stored = open_sharded(directory)
    audit_sharded(
        directory,
        stored=stored,
        parameters=model_parameters(arch, head=checkpoint.manifest.head, stored=stored),
        num_layers=arch.num_layers,
    )
    try:
        state = dist_checkpointing.load(sharded_state_dict(model), str(directory))
    except CheckpointException as error:  # raised on all ranks alike
        found = [str(failure[0]) for failure in error.failures.values()]
        raise UserError(f"{directory}: {'; '.join(dict.fromkeys(found))}") from error
    for number, chunk in enumerate(model.chunks if model else ()):
        chunk.load_state_dict(state[f"model{number}"])
    logger.info("read %s in %.1f s", directory, time.perf_counter() - start)


def saved_parameters(model: RoleModel) -> frozenset[str]:
    """Names of the parameters that this rank writes, of all the ranks that hold a copy."""
    size = model.groups.layout.virtual_pipeline_model_parallel_size
    return frozenset(
        chunk_prefix(number, virtual_pipeline_model_parallel_size=size) + name
        for number, state in enumerate(sharded_state_dict(model).values())
        for name, entry in state.items()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        and is_main_replica(entry.replica_id)
    )
