"""What a configuration would run: batches, layouts, engines and reshard bytes; no GPU, no peers."""

from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import megatron_rank_layout
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.vllm import vllm_rank_layout
from rlhf_megatron.reshard.engines import propose_engines
from rlhf_megatron.reshard.plan import bytes_minimum
from rlhf_megatron.resolve import describe_batch, parallel_layout, rollout_ranks

GPUS_PER_NODE = 8
BYTES_PER_PARAMETER = {"bf16": 2, "fp32": 4}


def describe(config: Config, *, world_size: int) -> str:
    """The report of --dry-run. Raises ConfigError where the model does not fit the layouts."""
    actor = read_architectures(config).actor
    lines = [describe_batch(config, world_size=world_size), "", "roles:"]
    for role, parallel in (
        ("actor", config.actor.parallel),
        ("critic", config.critic.parallel),
        ("ref", config.ref.parallel),
    ):
        layout = parallel_layout(parallel, world_size=world_size)
        virtual = layout.virtual_pipeline_model_parallel_size
        lines.append(
            f"  {role:<8} ranks {layout.ranks[0]}-{layout.ranks[-1]}  "
            f"TP{layout.tensor_model_parallel_size} PP{layout.pipeline_model_parallel_size} "
            f"{f'VPP{virtual} ' if virtual > 1 else ''}DP{layout.data_parallel_size}, "
            f"fastest first: {'-'.join(layout.order)}"
        )
    lines += ["", *_reshard(config, arch=actor, world_size=world_size)]
    return "\n".join(lines)


def _reshard(config: Config, *, arch: ModelArchitecture, world_size: int) -> list[str]:
    """Bytes that each weight sync moves, at the layouts' minimum."""
    layout = parallel_layout(config.actor.parallel, world_size=world_size)
    size = config.rollout.tensor_parallel_size
    source = {rank: _actor_layout(arch, layout=layout, rank=rank) for rank in layout.ranks}
    shards = [
        vllm_rank_layout(arch, tensor_parallel_size=size, tp_rank=shard) for shard in range(size)
    ]
    engines = propose_engines(
        source,
        shards=shards,
        ranks=rollout_ranks(config, world_size=world_size),
        node_of=lambda rank: rank // GPUS_PER_NODE,
    )
    target = {rank: shards[k] for engine in engines for k, rank in enumerate(engine)}
    received = bytes_minimum(
        source, target, itemsize_bytes=BYTES_PER_PARAMETER[config.actor.precision]
    )
    mean = sum(received.values()) / len(received)
    return [
        f"reshard: {len(engines)} engines of TP{size}; the first: ranks {engines[0]}",
        f"  each sync receives {mean / 1e9:.3f} GB per rank (most "
        f"{max(received.values()) / 1e9:.3f} GB), {sum(received.values()) / 1e9:.3f} GB in all",
    ]


def _actor_layout(arch: ModelArchitecture, *, layout: ParallelLayout, rank: int) -> RankLayout:
    at = layout.coordinates(rank)
    return megatron_rank_layout(
        arch,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        tp_rank=at.tp,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        stage=at.pp,
        head="lm",
        fused_norms=False,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
    )
