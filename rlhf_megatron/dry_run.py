"""What a configuration would run: batches, layouts, engines, reshard bytes and memory; no GPU."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.architectures import Architectures, read_architectures
from rlhf_megatron.config import Config
from rlhf_megatron.data.same_tokenizer import check_same_tokenizers
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.memory_report import GPU_MEMORY_GB, machine_of, planned, role_models
from rlhf_megatron.placement import place_engines
from rlhf_megatron.placement_table import placement_lines
from rlhf_megatron.reshard.minimum import bytes_minimum
from rlhf_megatron.resolve import describe_batch, parallel_layout
from rlhf_megatron.shared_backbone import trained_roles
from rlhf_megatron.validation import validate_paths

GPUS_PER_NODE = 8
MOST_ENGINES_SHOWN = 8
BYTES_PER_PARAMETER = {"bf16": 2, "fp32": 4}


def describe(
    config: Config,
    *,
    world_size: int,
    stand_ins: Sequence[Path] = (),
    gpu_memory_gb: float = GPU_MEMORY_GB,
) -> str:
    """The report of --dry-run. Raises ConfigError where the model does not fit the layouts.

    stand_ins: where a model's numbers are taken from that is not here (architectures.py). Files
    that a run needs and that are not here are listed; they are no fault of the configuration.
    """
    architectures = read_architectures(config, stand_ins=stand_ins)
    check_same_tokenizers(config)
    actor = architectures.actor
    lines = [describe_batch(config, world_size=world_size), "", "roles:"]
    roles = [(name, role.parallel) for name, role in trained_roles(config).items()]
    if config.ppo.kl.place != "off":
        roles.append(("ref", config.ref.parallel))
    for role, parallel in roles:
        layout = parallel_layout(parallel, world_size=world_size)
        virtual = layout.virtual_pipeline_model_parallel_size
        lines.append(
            f"  {role:<8} {len(layout.ranks)} ranks  "
            f"TP{layout.tensor_model_parallel_size} PP{layout.pipeline_model_parallel_size} "
            f"{f'VPP{virtual} ' if virtual > 1 else ''}DP{layout.data_parallel_size}, "
            f"fastest first: {'-'.join(layout.order)}"
        )
    if config.critic.shared_backbone:
        weight = config.critic.shared_loss_weight
        lines.append(f"  critic   a head on the actor; its loss weighs {weight}")
    lines += ["", "placement:", *placement_lines(config, world_size=world_size)]
    lines += ["", *_reshard(config, arch=actor, world_size=world_size)]
    memory = planned(
        config,
        models=role_models(config, architectures=architectures),
        machine=machine_of(
            config,
            world_size=world_size,
            gpu_memory_gb=gpu_memory_gb,
            gpus_per_node=min(world_size, GPUS_PER_NODE),
        ),
    )
    lines += ["", str(memory)]
    lines += _absent(config, architectures=architectures)
    return config.secrets.hide("\n".join(lines))


def _absent(config: Config, *, architectures: Architectures) -> list[str]:
    """What a run would refuse to start without."""
    missing = validate_paths(config, check_output=False)
    lines = ["", *architectures.notes] if architectures.notes else []
    if missing:
        lines += ["", "not here yet, and a run needs it:", *(f"  {line}" for line in missing)]
    return lines


def _reshard(config: Config, *, arch: ModelArchitecture, world_size: int) -> list[str]:
    """The engines, and the bytes that each weight sync moves at the layouts' minimum."""
    source = megatron_layouts(
        arch,
        parallel=parallel_layout(config.actor.parallel, world_size=world_size),
        head="lm",
        fused_norms=False,
    )
    placement = place_engines(
        config,
        arch=arch,
        source=source,
        engine_name="hf" if config.rollout.engine == "hf" else "vllm",
        world_size=world_size,
        node_of=lambda rank: rank // GPUS_PER_NODE,
    )
    received = bytes_minimum(
        source, placement.layouts, itemsize_bytes=BYTES_PER_PARAMETER[config.actor.precision]
    )
    mean = sum(received.values()) / len(received)
    shown = placement.engines[:MOST_ENGINES_SHOWN]
    more = len(placement.engines) - len(shown)
    return [
        f"rollout: {len(placement.engines)} {placement.engine_name} engines of "
        f"TP{config.rollout.tensor_parallel_size} (nodes of {GPUS_PER_NODE} ranks):",
        *(f"  ranks {','.join(map(str, engine))}" for engine in shown),
        *([f"  and {more} more"] if more > 0 else []),
        *_across_nodes(placement.engines),
        f"reshard: each sync receives {mean / 1e9:.3f} GB per rank (most "
        f"{max(received.values()) / 1e9:.3f} GB), {sum(received.values()) / 1e9:.3f} GB in all",
    ]


def _across_nodes(engines: Sequence[Sequence[int]]) -> list[str]:
    """A line on engines that do not fit in a node."""
    spans = [len({rank // GPUS_PER_NODE for rank in engine}) for engine in engines]
    across = [span for span in spans if span > 1]
    if not across:
        return []
    return [
        f"  {len(across)} of them span {max(across)} nodes: two all-reduces per layer and token "
        "cross the network; only for a model that one node does not hold"
    ]
