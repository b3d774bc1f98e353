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
    joint_head,
    packing_saved,
    policy_head,
    value_head,
)
from rlhf_megatron.memory.switches import RecomputeChoice

FIELDS_PER_RESPONSE_TOKEN = 3
"""float32 values of a response token that a loss reads (old log-probs, advantages, mask)."""
JOINT_FIELDS = 2
"""More of them where the loss is that of both heads (old values, returns)."""

HEAD_INSTANTS: dict[Head, str] = {
    "lm": "log-probs",
    "value": "value head",
    "joint": "log-probs and values",
}

PASSED_ON_BEFORE = 3
"""Residual streams of the micro-batch before, which the schedule still holds."""


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
        value = value_head(layer)
        if self.head == "value":
            return value
        tp = self.layout.tensor_model_parallel_size
        policy = policy_head(
            layer,
            response_tokens=response_tokens,
            vocabulary_rows=padded_vocab_size(self.arch.vocab_size, tensor_model_parallel_size=tp)
            // tp,
            kept_logits_bytes=self.recompute.kept_logits_bytes,
        )
        return joint_head(layer, policy=policy, value=value) if self.head == "joint" else policy


def saved_activations(model: StageModel, *, sizes: BatchSizes) -> int:
    """Bytes saved for the backward passes when the first of them begins, the loss's aside."""
    layer = model.layer(sizes.micro_tokens)
    waiting = in_flight(model.layout, stage=model.stage, num_micro_batches=sizes.mini_micro_batches)
    full, kept = model.recomputed_and_kept_layers
    one = full * layer.saved("full") + kept * layer.saved(model.recompute.granularity_of_kept)
    one += packing_saved(layer) if kept else 0
    if model.is_first:
        one += embedding_saved(layer)
    one += layer.angles if kept else 0
    if model.is_last:
        one += _head(model, layer=layer, sizes=sizes).saved
    return ceil(waiting * one)


def held_by_schedule(model: StageModel, *, sizes: BatchSizes) -> int:
    """Bytes that a pipeline's schedule holds beside what autograd saves: of each pass in flight
    what the stage received and sent; of the one before, on all stages but the first, what it
    received, and that one's gradient (and a third array, as counted)."""
    layout = model.layout
    if layout.pipeline_model_parallel_size == 1:
        return 0
    layer = model.layer(sizes.micro_tokens)
    virtual = layout.virtual_pipeline_model_parallel_size
    waiting = in_flight(layout, stage=model.stage, num_micro_batches=sizes.mini_micro_batches)
    # The first layer saves what the stage received, but where its norm takes a copy.
    is_copied = layer.kernels == "composite" and layer.itemsize < FP32_BYTES
    received = is_copied and (not model.is_first or virtual > 1)
    sent = not model.is_last or virtual > 1
    before = 0 if model.is_first else PASSED_ON_BEFORE
    return ceil((waiting * virtual * (received + sent) + before) * layer.stream)


def _head(model: StageModel, *, layer: LayerActivations, sizes: BatchSizes) -> HeadMemory:
    return model.head_memory(layer, response_tokens=sizes.micro_response_tokens)


def training_pass(model: StageModel, *, sizes: BatchSizes) -> PassMemory:
    """Forward and backward over a mini-batch's micro-batches."""
    layer = model.layer(sizes.micro_tokens)
    saved = saved_activations(model, sizes=sizes) + held_by_schedule(model, sizes=sizes)
    fields = FIELDS_PER_RESPONSE_TOKEN + JOINT_FIELDS * (model.head == "joint")
    batch = _batch_bytes(sizes.mini_tokens, fields=fields)
    head = _head(model, layer=layer, sizes=sizes) if model.is_last else None
    full, kept = model.recomputed_and_kept_layers
    # Where all is recomputed nothing keeps the angles but the layers, of one micro-batch.
    saved += 0 if kept else layer.angles
    # By the time that layers are recomputed, those that are kept, which come after them, are done.
    again = layer.recomputed - kept * layer.saved(model.recompute.granularity_of_kept)
    layers = PassMemory(
        activations=saved - (head.saved if head is not None else 0),
        recomputed=max(0, again) if full else 0,
        logits=0,
        workspace=layer.backward_workspace,
        batch=batch,
        instant="backward pass of a layer",
    )
    if head is None:
        return layers
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
    # The layer's input; what was sent last, and of stages that also receive, that as well.
    sends = not model.is_last or model.layout.virtual_pipeline_model_parallel_size > 1
    ends = 1 + sends + (sends and not model.is_first)
    streams = ends * layer.stream + layer.angles + packing_saved(layer)
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
    head = _head(model, layer=layer, sizes=sizes)
    outputs = PassMemory(
        activations=streams,
        recomputed=0,
        logits=head.forward,
        workspace=0,
        batch=batch,
        instant=HEAD_INSTANTS[model.head],
    )
    return max(layers, outputs, key=lambda found: found.total)


def _batch_bytes(tokens: int, *, fields: int) -> int:
    """Ids and positions of `tokens`, and of each, at most a response token, its state, target and
    fields."""
    return tokens * (4 * INDEX_BYTES + fields * FP32_BYTES)
