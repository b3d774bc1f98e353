"""Cuts a mini-batch to one role's replicas and packs each part: for PPO and for the warm-up."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.algorithms.partition import balanced_partition, pack_for_ranks
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch, make_micro_batch, padding_tokens
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.models.build import VALUE_HEAD
from rlhf_megatron.observability.flops import numbers_of, sequence_flops


@dataclass(frozen=True, kw_only=True)
class PackingFigures:
    """How evenly a mini-batch is packed, over all replicas of a role."""

    tokens: int
    """Of the samples."""
    padding_tokens: int
    """Computed beside them."""
    token_imbalance: float
    """Tokens of the largest micro-batch over the mean, less 1."""
    cost_imbalance: float
    """FLOPs of the replica that has most over the mean, less 1."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Who computes which samples of a mini-batch: the same on every rank of the role."""

    samples: Sequence[Sequence[Sequence[int]]]
    """[replica][micro-batch] -> sample numbers; all replicas have as many micro-batches."""
    figures: PackingFigures


def packing_metrics(packings: Sequence[PackingFigures], *, role: str) -> dict[str, float]:
    """Of a step's updates of a role: padding among the tokens computed, and the largest imbalances
    of an update. Empty where there were none."""
    if not packings:
        return {}
    padding = sum(packing.padding_tokens for packing in packings)
    computed = padding + sum(packing.tokens for packing in packings)
    return {
        f"padding_fraction/{role}": padding / computed,
        f"token_imbalance/{role}": max(packing.token_imbalance for packing in packings),
        f"cost_imbalance/{role}": max(packing.cost_imbalance for packing in packings),
    }


def pack_samples(
    engine: ModelEngine,
    *,
    batch: RaggedBatch,
    samples: Sequence[int],
    micro_batch_tokens: int,
    micro_batch_samples: int = 0,
) -> Packing:
    """Spread `samples` over the replicas of the role, evenly by their FLOPs, and pack each part."""
    layout = engine.model.groups.layout
    lengths: list[int] = batch.lengths[list(samples)].tolist()
    costs = _costs(engine, lengths=lengths)
    parts = balanced_partition(costs, num_parts=layout.data_parallel_size)
    interleaved = layout.virtual_pipeline_model_parallel_size > 1
    packed = pack_for_ranks(
        [[lengths[i] for i in part] for part in parts],
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_samples=micro_batch_samples,
        number_multiple=layout.pipeline_model_parallel_size if interleaved else 1,
    )
    # From places in a part to places in `samples`.
    places = [
        [[part[i] for i in pack] for pack in packs]
        for part, packs in zip(parts, packed, strict=True)
    ]
    tokens = [[sum(lengths[i] for i in pack) for pack in packs] for packs in places]
    return Packing(
        samples=[[[samples[i] for i in pack] for pack in packs] for packs in places],
        figures=PackingFigures(
            tokens=sum(lengths),
            padding_tokens=_computed_tokens(
                tokens, pad_to_multiple=engine.pad_to_multiple, equal=interleaved
            )
            - sum(lengths),
            token_imbalance=_imbalance([count for counts in tokens for count in counts]),
            cost_imbalance=_imbalance([sum(costs[i] for i in part) for part in parts]),
        ),
    )


def micro_batches_of(
    engine: ModelEngine,
    *,
    batch: RaggedBatch,
    samples: Sequence[int],
    fields: Sequence[str],
    micro_batch_tokens: int,
    micro_batch_samples: int = 0,
) -> list[MicroBatch]:
    """This rank's micro-batches of `samples`, packed by `pack_samples`."""
    packing = pack_samples(
        engine,
        batch=batch,
        samples=samples,
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_samples=micro_batch_samples,
    )
    return packed_micro_batches(engine, batch=batch, packing=packing, fields=fields)


def packed_micro_batches(
    engine: ModelEngine, *, batch: RaggedBatch, packing: Packing, fields: Sequence[str]
) -> list[MicroBatch]:
    """This rank's micro-batches: as many as every other replica of the role has."""
    return [
        make_micro_batch(
            batch,
            samples=samples,
            fields=fields,
            pad_to_multiple=engine.pad_to_multiple,
            device=engine.device,
        )
        for samples in packing.samples[engine.model.groups.coordinates.dp]
    ]


def _costs(engine: ModelEngine, *, lengths: Sequence[int]) -> list[int]:
    """Of a sample of each length. A value head beside the other one is left out, so that actor and
    reference are cut alike."""
    model = engine.model
    output_size = 1 if model.head == VALUE_HEAD else model.arch.vocab_size
    return sequence_flops(numbers_of(model.arch, output_size=output_size), sequence_lengths=lengths)


def _computed_tokens(tokens: Sequence[Sequence[int]], *, pad_to_multiple: int, equal: bool) -> int:
    """`tokens`: [replica][micro-batch], of the samples; equal: as the interleaved schedule wants
    them, the micro-batches of a replica are filled up to its largest."""
    total = 0
    for counts in tokens:
        padded = [n + padding_tokens(n, pad_to_multiple=pad_to_multiple) for n in counts]
        total += max(padded) * len(padded) if equal else sum(padded)
    return total


def _imbalance(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1) - 1
