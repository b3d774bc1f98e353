"""Options of the models: one dataclass per role."""

from dataclasses import dataclass

from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, and its learning-rate schedule."""

    learning_rate: float = number(1e-6, minimum=0)
    """Peak learning rate. 0 runs every phase without changing a weight (a control run)."""

    minimum_learning_rate: float = number(0.0, minimum=0)
    """Where the schedule ends. At most learning_rate. Default 0."""

    schedule: str = choice("constant", "linear", "cosine")
    """Shape after the warm-up: constant (default), or a linear or cosine fall to
    minimum_learning_rate at the run's last step."""

    warmup_steps: int = number(0, minimum=0)
    """Steps over which the rate climbs linearly from 0. The first step after k of n warm-up steps
    takes (k + 1) / (n + 1) of the peak, so no step is wasted at rate 0. Default 0."""

    weight_decay: float = number(0.0, minimum=0)
    """Decoupled weight decay of matrices (norms and biases are spared). Default 0."""

    beta1: float = number(0.9, minimum=0, maximum=1)
    """Decay of Adam's first moment. Default 0.9."""

    beta2: float = number(0.95, minimum=0, maximum=1)
    """Decay of Adam's second moment. Default 0.95."""

    epsilon: float = number(1e-8, minimum=0, exclusive=True)
    """Adam's denominator offset. Default 1e-8."""

    clip_grad: float = number(1.0, minimum=0)
    """Largest global gradient norm; larger gradients are scaled down. 0 switches clipping off.
    Default 1."""

    overlap_grad_reduce: bool = False
    """Between replicas: add gradients up bucket by bucket (40 million elements, or 1 million for
    each replica where that is more) while the backward pass of an update's last micro-batch goes
    on, not all of them after it. Default false."""

    overlap_param_gather: bool = False
    """Between replicas: gather an update's new weights beneath the forward pass of the next update
    of the same phase, bucket by bucket; those of the last one are gathered at once. Needs
    overlap_grad_reduce. Default false."""


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activations that are computed again in the backward pass instead of kept: memory for time."""

    granularity: str = choice("none", "selective", "full")
    """none (default), selective (the attention core; costs little), or full (whole layers, of which
    only the input is kept; about a third more compute)."""

    num_layers: int = number(0, minimum=0)
    """With full: how many layers of each pipeline stage (of each virtual stage, where there are
    several) are recomputed; the others keep everything. 0 (default): all."""


@dataclass(kw_only=True)
class ActorConfig:
    """The policy that is trained."""

    model: str = ""
    """Hugging Face directory of the starting weights. Required."""

    precision: str = choice("bf16", "fp32")
    """bf16: weights and activations in bfloat16 with float32 master weights in the optimizer.
    fp32: everything in float32. Default bf16."""

    layer_spec: str = choice("auto", "local", "transformer_engine")
    """Layer implementation. "auto" (the default) takes Transformer Engine where it imports and the
    device is a GPU, else the project's own norm and attention in Megatron-Core's local layers."""

    fp8: bool = False
    """Matrix products of the layers in 8-bit floats through Transformer Engine: E4M3 forward, E5M2
    for gradients, scaled tensor by tensor; weights, attention, embedding and output layer stay in
    bf16. Needs precision bf16 and layer_spec transformer_engine. Log-probs then differ more from
    the engine's, which computes in bf16: parity bounds and ppo.importance_sampling.cap may have to
    follow. Default false."""

    recompute: RecomputeConfig = items(RecomputeConfig)
    """Activations recomputed in the backward pass."""

    kept_logits_gb: float = number(0.0, minimum=0)
    """The logits of a micro-batch's responses stay from the forward to the backward pass where they
    take no more than this; otherwise they are computed twice, a fourth of the output layer's work
    in an update. Response tokens x vocabulary / tensor_model_parallel_size x 2 bytes in bf16: 2.1
    for 8192 tokens of 128256 words. Default 0: computed twice."""

    offload_weights: bool = False
    """Keep the weights in pinned host memory outside the role's own phases (log_prob, update_actor,
    reshard). Copied back to the host only after an update. Default false."""

    offload_gradients: bool = False
    """Give up the gradients' memory outside update_actor. They are not copied: each update begins
    at zero. Default false."""

    offload_optimizer: bool = False
    """Keep Adam's moments, and in bf16 the float32 master weights, in pinned host memory outside
    update_actor. Default false."""

    parallel: ParallelConfig = items(ParallelConfig)
    """Layout of the actor's training ranks."""

    optimizer: OptimizerConfig = items(OptimizerConfig)
    """Optimizer of the actor."""


@dataclass(kw_only=True)
class CriticConfig:
    """The value model: a scalar head in place of the output layer."""

    model: str = ""
    """Hugging Face directory of the starting weights: a language model (the head starts at 0) or a
    sequence-classification model with one label (its head is taken over). May be another, smaller
    architecture with the actor's vocabulary; a tokenizer that it brings must equal the actor's.
    Empty (the default) takes the actor's directory."""

    shared_backbone: bool = False
    """Make the critic a second head on the actor, in place of a model of its own: one pass gives
    log-probs and values, one update trains both heads and the backbone (docs/shared_backbone.md).
    model, optimizer, recompute and offload_* of the critic, and ppo.critic_warmup_steps, are then
    refused; parallel and layer_spec may equal the actor's. Default false."""

    shared_loss_weight: float = number(1.0, minimum=0)
    """With shared_backbone: the loss of an update is policy loss + shared_loss_weight * value loss.
    Refused without. Default 1."""

    precision: str = choice("bf16", "fp32")
    """As actor.precision; must equal it, since the roles exchange tensors. Default bf16."""

    layer_spec: str = choice("auto", "local", "transformer_engine")
    """As actor.layer_spec."""

    fp8: bool = False
    """As actor.fp8. Default false."""

    recompute: RecomputeConfig = items(RecomputeConfig)
    """As actor.recompute."""

    offload_weights: bool = False
    """As actor.offload_weights; the critic's phases are value and update_critic."""

    offload_gradients: bool = False
    """As actor.offload_gradients."""

    offload_optimizer: bool = False
    """As actor.offload_optimizer."""

    parallel: ParallelConfig = items(ParallelConfig)
    """Layout of the critic's ranks. Free to differ from the actor's."""

    optimizer: OptimizerConfig = items(lambda: OptimizerConfig(learning_rate=5e-6))
    """Optimizer of the critic. Default learning rate 5e-6."""


@dataclass(kw_only=True)
class ReferenceConfig:
    """The frozen policy that the KL penalty measures against."""

    model: str = ""
    """Hugging Face directory. Empty (the default) takes the actor's directory: the policy before
    training (after the supervised warm-up, where there is one)."""

    precision: str = choice("bf16", "fp32")
    """As actor.precision; must equal it."""

    layer_spec: str = choice("auto", "local", "transformer_engine")
    """As actor.layer_spec."""

    fp8: bool = False
    """As actor.fp8; must equal it, or the KL penalty would measure rounding. Default false."""

    parallel: ParallelConfig = items(ParallelConfig)
    """Layout of the reference's ranks. Free to differ from the actor's."""

    offload: bool = False
    """Keep the weights in pinned host memory outside ref_log_prob. Default false."""
