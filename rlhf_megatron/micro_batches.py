"""Cuts a mini-batch to one role's replicas and packs each part: for PPO and for the warm-up."""

from collections.abc import Sequence

from rlhf_megatron.algorithms.partition import balanced_partition, pack_for_ranks
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch, make_micro_batch
from rlhf_megatron.engine.model_engine import ModelEngine


def micro_batches_of(
    engine: ModelEngine,
    *,
    batch: RaggedBatch,
    samples: Sequence[int],
    fields: Sequence[str],
    micro_batch_tokens: int,
    micro_batch_samples: int = 0,
) -> list[MicroBatch]:
    """This rank's micro-batches of `samples`: as many as every other replica of the role has."""
    groups = engine.model.groups
    lengths: list[int] = batch.lengths.tolist()
    parts = balanced_partition(
        [lengths[i] for i in samples], num_parts=groups.layout.data_parallel_size
    )
    samples_of = [[samples[i] for i in part] for part in parts]
    packed = pack_for_ranks(
        [[lengths[i] for i in part] for part in samples_of],
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_samples=micro_batch_samples,
    )
    replica = groups.coordinates.dp
    return [
        make_micro_batch(
            batch,
            samples=[samples_of[replica][i] for i in pack],
            fields=fields,
            pad_to_multiple=engine.pad_to_multiple,
            device=engine.device,
        )
        for pack in packed[replica]
    ]
