"""The peak of one role's forward or training pass on one pipeline stage."""

from dataclasses import dataclass
from math import ceil

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import padded_vocab_size
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.memory.activations import (
    FP32_BYTES,
    INDEX_BYTES,
    Kernels,
    LayerActivations,
    in_flight,
    layer_activations,
)
from rlhf_megatron.memory.head import (
    HeadMemory,
    embedding_saved,
    packing_saved,
    policy_head,
    value_head,
)
from rlhf_megatron.memory.switches import RecomputeChoice

FIELDS_PER_RESPONSE_TOKEN = 3
"""float32 values of a response token that a loss reads (old log-probs, advantages, mask)."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Tokens of one data-parallel rank."""

    micro_tokens: int
    """Of the largest micro-batch."""
    micro_response_tokens: int
    mini_micro_batches: int
    """Micro-batches of a mini-batch."""
    mini_tokens: int
    step_tokens: int


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Bytes at the instant of a pass at which it needs most."""

    activations: int
    """Saved for the backward pass, or alive in a forward pass."""
    recomputed: int
    logits: int
    """Chunks of logits, their gradients, and the output weight's gradient."""
    workspace: int
    batch: int
    """Token ids and per-token values of all micro-batches."""
    instant: str
    """What runs then."""

    @property
    def total(self) -> int:
        return self.activations + self.recomputed + self.logits + self.workspace + self.batch


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """One role's model on the ranks of one pipeline stage."""

    arch: ModelArchitecture
    layout: ParallelLayout
    stage: int
    head: Head
    itemsize: int
    kernels: Kernels
    recompute: RecomputeChoice

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pipeline_model_parallel_size - 1

    @property
    def recomputed_and_kept_layers(self) -> tuple[int, int]:
        chunks = self.layout.virtual_pipeline_model_parallel_size
        return self.recompute.split(self.num_layers, chunks=chunks)

    @property
    def num_layers(self) -> int:
        return self.arch.num_layers // self.layout.pipeline_model_parallel_size

    def layer(self, tokens: int) -> LayerActivations:
        return layer_activations(
            self.arch,
            layout=self.layout,
            tokens=tokens,
            itemsize=self.itemsize,
            kernels=self.kernels,
        )

    def head_memory(self, layer: LayerActivations, *, response_tokens: int) -> HeadMemory:
        if self.head == "value":
            return value_head(layer)
        tp = self.layout.tensor_model_parallel_size
        return policy_head(
            layer,
            response_tokens=response_tokens,
            vocabulary_rows=padded_vocab_size(self.arch.vocab_size, tensor_model_parallel_size=tp)
            // tp,
        )


def saved_activations(model: StageModel, *, sizes: BatchSizes) -> int:
    """Bytes saved for the backward passes when the first of them begins, the loss's aside."""
    layer = model.layer(sizes.micro_tokens)
    waiting = in_flight(model.layout, stage=model.stage, num_micro_batches=sizes.mini_micro_batches)
    full, kept = model.recomputed_and_kept_layers
    one = full * layer.saved("full")
    one += kept * layer.saved(model.recompute.granularity_of_kept)
    one += packing_saved(layer)
    if model.is_first:
        one += embedding_saved(layer)
    if full:  # the checkpoints keep the rotary angles
        one += layer.tokens * layer.head_dim * FP32_BYTES
    if model.is_last:
        head = model.head_memory(layer, response_tokens=sizes.micro_response_tokens)
        one += head.saved
    if model.layout.pipeline_model_parallel_size > 1:
        one += _pipeline_ends(model, layer=layer)
    return ceil(waiting * one)


def _pipeline_ends(model: StageModel, *, layer: LayerActivations) -> int:
    """What a stage received and what it sent, which the schedule holds until the backward pass.
    The first layer saves what it received, but where its norm takes a copy."""
    is_copied = layer.kernels == "composite" and layer.itemsize < FP32_BYTES
    received = layer.stream if not model.is_first and is_copied else 0
    return received + (0 if model.is_last else layer.stream)


def training_pass(model: StageModel, *, sizes: BatchSizes) -> PassMemory:
    """Forward and backward over a mini-batch's micro-batches."""
    layer = model.layer(sizes.micro_tokens)
    saved = saved_activations(model, sizes=sizes)
    full, _ = model.recomputed_and_kept_layers
    granularity = "full" if full else model.recompute.granularity_of_kept
    again = layer.recomputed(granularity)
    batch = _batch_bytes(sizes.mini_tokens, fields=FIELDS_PER_RESPONSE_TOKEN)
    layers = PassMemory(
        activations=saved,
        recomputed=again,
        logits=0,
        workspace=layer.backward_workspace,
        batch=batch,
        instant="backward pass of a layer",
    )
    if not model.is_last:
        return layers
    head = model.head_memory(layer, response_tokens=sizes.micro_response_tokens)
    loss = PassMemory(
        activations=saved + head.loss_saved,
        recomputed=0,
        logits=head.backward,
        workspace=0,
        batch=batch,
        instant="backward pass of the loss",
    )
    return max(layers, loss, key=lambda found: found.total)


def inference_pass(model: StageModel, *, sizes: BatchSizes) -> PassMemory:
    """Forward without gradients over a step's micro-batches."""
    layer = model.layer(sizes.micro_tokens)
    batch = _batch_bytes(sizes.step_tokens, fields=0)
    streams = layer.stream + layer.tokens * layer.head_dim * FP32_BYTES + packing_saved(layer)
    layers = PassMemory(
        activations=streams,
        recomputed=0,
        logits=0,
        workspace=layer.forward_workspace,
        batch=batch,
        instant="forward pass of a layer",
    )
    if not model.is_last:
        return layers
    head = model.head_memory(layer, response_tokens=sizes.micro_response_tokens)
    outputs = PassMemory(
        activations=streams,
        recomputed=0,
        logits=head.forward,
        workspace=0,
        batch=batch,
        instant="log-probs" if model.head == "lm" else "value head",
    )
    return max(layers, outputs, key=lambda found: found.total)


def _batch_bytes(tokens: int, *, fields: int) -> int:
    """Ids and positions of `tokens`, and of each, at most a response token, its state, target and
    fields."""
    return tokens * (4 * INDEX_BYTES + fields * FP32_BYTES)
