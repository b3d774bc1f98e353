"""What a configured run needs of the machines."""

import math

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.config import Config
from rlhf_megatron.doctor.facts import Needs
from rlhf_megatron.layout.parallel import parse_ranks
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.shared_backbone import actor_head, trained_roles

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
"""Two moments, and a master copy of bf16 weights (checkpoint/optimizer_slices.py)."""


def needs_of(config: Config, *, architectures: Architectures | None, world_size: int) -> Needs:
    """`architectures`: None where the models cannot be read here; sizes are not judged then."""
    rollout, checkpoint = config.rollout, config.checkpoint
    specs = {role.layer_spec for role in trained_roles(config).values()}
    if config.ppo.kl.place != "off":
        specs.add(config.ref.layer_spec)
    checkpoint_bytes = weights = 0
    if architectures is not None:
        precision = config.actor.precision
        weights = num_parameters(architectures.actor, head="lm") * WEIGHT_BYTES[precision]
        per_parameter = WEIGHT_BYTES[precision] + OPTIMIZER_BYTES[precision]
        trained = num_parameters(architectures.actor, head=actor_head(config))
        if architectures.critic is not None:
            trained += num_parameters(architectures.critic, head="value")
        checkpoint_bytes = per_parameter * trained
        if config.warmup.steps > 0 and not config.ref.model:
            checkpoint_bytes += weights  # of the reference, which exists nowhere else
    sleeps = rollout.engine != "hf" and rollout.sleep_level == 1
    exports = int(config.export.final) + int(
        bool(config.evaluation.prompts) and config.evaluation.keep_best
    )
    return Needs(
        config=config.doctor,
        device=config.distributed.device,
        uses_vllm=rollout.engine != "hf",
        requires_vllm=rollout.engine == "vllm",
        sleep_level=rollout.sleep_level,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        wants_transformer_engine="transformer_engine" in specs,
        sequence_parallel=config.actor.parallel.sequence_parallel
        or config.critic.parallel.sequence_parallel,
        checkpoint_bytes=checkpoint_bytes,
        max_checkpoints=checkpoint.keep_last + 1,
        export_bytes=exports * weights,
        host_bytes_per_rank=(weights // rollout.tensor_parallel_size if sleeps else 0)
        + (checkpoint_bytes // world_size if checkpoint.asynchronous else 0),
        stop_before_seconds=checkpoint.stop_before_minutes * 60,
    )


def smallest_world(config: Config) -> int:
    """Ranks for which the layouts of all roles and of the engines can come out even."""
    sizes = [config.rollout.tensor_parallel_size]
    highest = 0
    for role in (config.actor, config.critic, config.ref, config.reward):
        parallel = role.parallel
        sizes.append(
            parallel.tensor_model_parallel_size
            * parallel.pipeline_model_parallel_size
            * max(parallel.data_parallel_size, 1)
        )
        try:
            highest = max(highest, *parse_ranks(parallel.ranks, default=(0,)), 0)
        except ValueError:
            continue  # validation names it
    product = math.lcm(*sizes)
    return product * math.ceil((highest + 1) / product)
