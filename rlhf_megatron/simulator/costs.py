"""Seconds of each phase of a step, from the rates of the machine and the sizes of the work.

Every formula is a sum of parts, which the report shows by name. A micro-batch costs on each stage

    arithmetic + fixed cost per layer and pass + tensor-parallel collectives + the hop to the next,

the slowest stage (the last, with the head) sets the pace, and m micro-batches on p stages of v
chunks take m + (p - 1) / v of these (1F1B and interleaved schedule: Narayanan et al. 2021, section
2.2, arXiv:2104.04473).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.memory.parameters import optimizer_bytes_per_element
from rlhf_megatron.memory.roles import RoleSetting
from rlhf_megatron.memory.rollout import itemsize_of
from rlhf_megatron.observability.flops import forward_flops, numbers_of
from rlhf_megatron.resolve import num_micro_batches
from rlhf_megatron.simulator.setup import Setup

FP32_BYTES = 4
OPTIMIZER_TRAFFIC_BYTES = 28
"""Read and written by AdamW for each of its elements: gradient, master weight, moments, weight."""
COLLECTIVES_PER_LAYER = 2
COLLECTIVES_BESIDE_LAYERS = 2
"""Of a pass: the embedding's, and the head's or the loss's."""
TOKEN_BYTES = 8
SCALARS_PER_TOKEN = 4
"""float32 values that go with a response token: its log-probs by engine, actor and reference, and
its value."""
WAITING = ("bubble",)
"""Parts in which a rank computes nothing."""


@lru_cache(maxsize=64)
def parameters_of(arch: ModelArchitecture, *, head: Head) -> int:
    """num_parameters, which walks through all tensors, remembered."""
    return num_parameters(arch, head=head)


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """One passage of a role's ranks through a phase."""

    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they go to; together the passage."""
    uneven_seconds: float = 0.0
    """Of them, those that a stage waits on average for the slowest stage."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def busy_seconds(self) -> float:
        """Mean over the ranks."""
        waiting = sum(self.parts.get(name, 0.0) for name in WAITING)
        return max(0.0, self.seconds - waiting - self.uneven_seconds)

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds else 0.0

    def times(self, factor: float) -> "PhaseCost":
        """A passage that takes `factor` times as long."""
        parts = {name: factor * seconds for name, seconds in self.parts.items()}
        return PhaseCost(parts=parts, uneven_seconds=factor * self.uneven_seconds)

    def plus(self, **parts: float) -> "PhaseCost":
        """With further parts; those of no time are left out."""
        added = dict(self.parts)
        for name, seconds in parts.items():
            if seconds:
                added[name] = added.get(name, 0.0) + seconds
        return PhaseCost(parts=added, uneven_seconds=self.uneven_seconds)


def phase_costs(setup: Setup) -> dict[str, PhaseCost]:
    """Phase -> its cost, with the factors of a calibration; `exchange` is one passage of it."""
    found = {
        "rollout": rollout_cost(setup),
        "sleep": PhaseCost().plus(host=_engine_to_host(setup)),
        "reward": reward_cost(setup),
        "log_prob": forward_cost(setup, setup.roles["actor"]),
        "value": forward_cost(setup, setup.roles["critic"]),
        "advantage": PhaseCost().plus(fixed=setup.cluster.rates.step_seconds),
        "update_critic": update_cost(setup, setup.roles["critic"]),
        "update_actor": update_cost(setup, setup.roles["actor"]),
        "reshard": reshard_cost(setup),
        "exchange": exchange_cost(setup),
    }
    if "ref" in setup.roles:
        found["ref_log_prob"] = forward_cost(setup, setup.roles["ref"])
    factors = setup.cluster.phase_factors
    return {phase: cost.times(factors.get(phase, 1.0)) for phase, cost in found.items()}


def forward_cost(setup: Setup, role: RoleSetting) -> PhaseCost:
    """log_prob, ref_log_prob or value: all samples once, in one pass of the pipeline."""
    minis = setup.num_samples // setup.config.ppo.mini_batch_samples
    cost = _pass(setup, role, minis=max(1, minis), trains=False)
    weights = _parameters_per_rank(role) * itemsize_of(role.precision)
    to_device = weights / setup.cluster.rates.host_bytes_per_second if role.offload.weights else 0.0
    return cost.plus(host=to_device, fixed=setup.cluster.rates.phase_seconds)


def update_cost(setup: Setup, role: RoleSetting) -> PhaseCost:
    """update_actor or update_critic: each mini-batch of each epoch, with its optimizer step."""
    config, rates = setup.config, setup.cluster.rates
    ppo, layout = config.ppo, role.layout
    steps = ppo.epochs * max(1, setup.num_samples // ppo.mini_batch_samples)
    parameters, replicas = _parameters_per_rank(role), layout.data_parallel_size
    itemsize = itemsize_of(role.precision)
    data_parallel = 0.0
    if replicas > 1:
        group = tuple(layout.rank(tp=0, dp=dp, pp=0) for dp in range(replicas))
        received = parameters * (FP32_BYTES + itemsize) * (replicas - 1) / replicas
        data_parallel = received / setup.cluster.bytes_per_second(group)
        data_parallel += 2 * rates.collective_seconds
    shard = parameters / replicas
    one = _pass(setup, role, minis=1, trains=True).plus(
        data_parallel=data_parallel,
        optimizer=rates.optimizer_seconds
        + shard * OPTIMIZER_TRAFFIC_BYTES / rates.memory_bytes_per_second,
    )
    moved = 0.0  # to the device and back
    if role.offload.optimizer:
        moved += 2 * shard * optimizer_bytes_per_element(role.precision)
    if role.offload.weights:
        moved += 2 * parameters * itemsize
    return one.times(steps).plus(
        host=moved / rates.host_bytes_per_second, fixed=rates.phase_seconds
    )


def _pass(setup: Setup, role: RoleSetting, *, minis: int, trains: bool) -> PhaseCost:
    """`minis` mini-batches through the pipeline as one, forward or forward and backward."""
    rates, layout, ppo = setup.cluster.rates, role.layout, setup.config.ppo
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    virtual, arch = layout.virtual_pipeline_model_parallel_size, role.arch
    sample_tokens = setup.workload.sample_tokens
    samples = minis * ppo.mini_batch_samples / layout.data_parallel_size
    count = minis * num_micro_batches(
        setup.config,
        replicas=layout.data_parallel_size,
        sample_tokens=max(1, round(sample_tokens)),
    )
    if virtual > 1:
        count = -(-count // stages) * stages
    output = 1 if role.head == "value" else arch.vocab_size
    numbers = numbers_of(arch, output_size=output)
    whole = samples * forward_flops(numbers, sequence_lengths=[sample_tokens])  # type: ignore[list-item]
    head = 2 * samples * sample_tokens * arch.hidden_size * output
    layers = arch.num_layers / stages
    again = _recomputed_share(role) if trains else 0.0
    passes, speed = (3.0, rates.train_flops_per_second) if trains else (1.0, rates.flops_per_second)
    slowest = ((whole - head) / stages * (passes + again) + head * passes) / (tensor * speed)
    mean = ((whole - head) * (passes + again) + head * passes) / (stages * tensor * speed)
    tokens = samples * sample_tokens / count
    fixed = (layers * rates.layer_seconds + rates.micro_batch_seconds) * (passes + again)
    tensor_parallel = _collectives(setup, role, tokens=tokens, layers=layers)
    tensor_parallel *= (2 if trains else 1) + again
    hops = _hop(setup, role, tokens=tokens) * (2 if trains else 1)
    one = slowest / count + fixed + tensor_parallel + hops
    return PhaseCost(uneven_seconds=slowest - mean).plus(
        compute=slowest,
        fixed=count * fixed,
        tensor_parallel=count * tensor_parallel,
        pipeline=count * hops,
        bubble=one * (stages - 1) / virtual,
    )


def _recomputed_share(role: RoleSetting) -> float:
    """Of the layers that run forward once more in a backward pass."""
    stages = role.layout.pipeline_model_parallel_size
    own = role.arch.num_layers // stages
    chunks = role.layout.virtual_pipeline_model_parallel_size
    return role.recompute.split(own, chunks=chunks)[0] / own


def _collectives(setup: Setup, role: RoleSetting, *, tokens: float, layers: float) -> float:
    """Seconds of a stage's tensor-parallel collectives in a forward pass of a micro-batch."""
    layout = role.layout
    tensor = layout.tensor_model_parallel_size
    if tensor == 1:
        return 0.0
    group = tuple(layout.rank(tp=tp, dp=0, pp=0) for tp in range(tensor))
    stream = tokens * role.arch.hidden_size * itemsize_of(role.precision)
    seconds = 2 * (tensor - 1) / tensor * stream / setup.cluster.bytes_per_second(group)
    # Sequence parallelism: a gather and a scatter, of half the bytes each.
    calls = 2 if layout.sequence_parallel else 1
    each = seconds + calls * setup.cluster.rates.collective_seconds
    return (COLLECTIVES_PER_LAYER * layers + COLLECTIVES_BESIDE_LAYERS) * each


def _hop(setup: Setup, role: RoleSetting, *, tokens: float) -> float:
    """Seconds in which a stage hands a micro-batch on, in each virtual stage."""
    layout = role.layout
    stages = layout.pipeline_model_parallel_size
    if stages == 1:
        return 0.0
    pair = tuple(sorted(layout.rank(tp=0, dp=0, pp=pp) for pp in (0, 1)))
    stream = tokens * role.arch.hidden_size * itemsize_of(role.precision)
    if layout.sequence_parallel:
        stream /= layout.tensor_model_parallel_size
    each = setup.cluster.rates.hop_seconds + stream / setup.cluster.bytes_per_second(pair)
    return layout.virtual_pipeline_model_parallel_size * each


def _parameters_per_rank(role: RoleSetting) -> float:
    layout = role.layout
    share = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    return parameters_of(role.arch, head=role.head) / share


def rollout_cost(setup: Setup) -> PhaseCost:
    """An engine's share of the step: prompts in, then token after token, until the longest ends.

    A token of b sequences reads the weights and their keys and values, or computes for longer than
    that takes.
    """
    config, rates, arch = setup.config, setup.cluster.rates, setup.models.actor
    size, lengths = setup.engine_size, setup.workload
    samples = setup.num_samples / setup.num_engines
    at_once = min(samples, setup.sequences_at_once, config.rollout.max_num_seqs)
    is_padded = config.rollout.engine == "hf"  # every sequence goes on to the longest's end
    if is_padded:
        waves = -(-samples // config.rollout.max_num_seqs)
        steps, at_once = waves * lengths.longest_response_tokens, samples / waves
    else:
        work = samples * lengths.response_tokens
        steps = max(lengths.longest_response_tokens, work / at_once)
        at_once = work / steps
    itemsize = itemsize_of(config.actor.precision)
    parameters = parameters_of(arch, head="lm")
    kv_heads = max(1, arch.num_key_value_heads // size)
    token_bytes = 2 * arch.num_layers * kv_heads * arch.head_dim * itemsize
    context = lengths.prompt_tokens + lengths.response_tokens / 2
    read = parameters * itemsize / size + at_once * context * token_bytes
    numbers = numbers_of(arch, output_size=arch.vocab_size)
    flops = forward_flops(numbers, sequence_lengths=[1]) * at_once
    decode = max(read / rates.memory_bytes_per_second, flops / (size * rates.flops_per_second))
    prefills = samples if is_padded else samples / config.rollout.responses_per_prompt
    prompt_flops = prefills * forward_flops(
        numbers,
        sequence_lengths=[lengths.prompt_tokens],  # type: ignore[list-item]
    )
    return PhaseCost().plus(
        prefill=prompt_flops / (size * rates.flops_per_second),
        decode=steps * decode,
        sampling=steps * at_once * rates.decode_sequence_seconds,
        fixed=steps * rates.decode_step_seconds + rates.phase_seconds,
        tensor_parallel=steps * _decode_collectives(setup, sequences=at_once),
    )


def _decode_collectives(setup: Setup, *, sequences: float) -> float:
    """Seconds of an engine's all-reduces for one token of each sequence."""
    size, arch = setup.engine_size, setup.models.actor
    if size == 1:
        return 0.0
    itemsize = itemsize_of(setup.config.actor.precision)
    num_bytes = 2 * (size - 1) / size * sequences * arch.hidden_size * itemsize
    group = setup.rollout_ranks[:size]
    each = num_bytes / setup.cluster.bytes_per_second(group)
    each += setup.cluster.rates.collective_seconds
    return (COLLECTIVES_PER_LAYER * arch.num_layers + COLLECTIVES_BESIDE_LAYERS) * each


def _engine_to_host(setup: Setup) -> float:
    """Seconds in which the engine's weights cross to the host, or back, where it keeps them."""
    rollout = setup.config.rollout
    if rollout.engine == "hf" or rollout.sleep_level != 1 or setup.cluster.memory_gb is None:
        return 0.0
    num_bytes = parameters_of(setup.models.actor, head="lm") / setup.engine_size
    num_bytes *= itemsize_of(setup.config.actor.precision)
    return num_bytes / setup.cluster.rates.host_bytes_per_second


def reward_cost(setup: Setup) -> PhaseCost:
    """A function on each rank's share, or a model; servers score while the ranks work on."""
    rates, reward = setup.cluster.rates, setup.models.reward
    samples = setup.num_samples / len(setup.reward_ranks)
    compute = 0.0
    if reward is not None:
        numbers = numbers_of(reward, output_size=1)
        tokens = setup.workload.sample_tokens
        flops = samples * forward_flops(numbers, sequence_lengths=[tokens])  # type: ignore[list-item]
        compute = flops / rates.flops_per_second
    elif setup.config.reward.function:
        compute = samples * rates.reward_sample_seconds
    return PhaseCost().plus(compute=compute, fixed=rates.reward_seconds)


def reshard_bytes_per_rank(setup: Setup) -> float:
    """Received on average by a rollout rank, with engines numbered well (DESIGN: M/g less what the
    rank holds of it anyway)."""
    layout = setup.roles["actor"].layout
    whole = parameters_of(setup.models.actor, head="lm")
    whole *= itemsize_of(setup.config.actor.precision)
    held = 1 / (layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size)
    size = setup.engine_size
    if setup.config.rollout.engine == "hf":
        size = 1
    shared = len(set(setup.rollout_ranks) & set(layout.ranks)) / len(setup.rollout_ranks)
    return whole * (1 / size - shared * min(held, 1 / size))


def reshard_cost(setup: Setup) -> PhaseCost:
    """Weights from actor to engines, and the engines' waking."""
    rates = setup.cluster.rates
    both = tuple(sorted({*setup.rollout_ranks, *setup.roles["actor"].layout.ranks}))
    speed = rates.reshard_bytes_per_second
    if setup.cluster.spans_nodes(both):
        speed = min(speed, rates.inter_node_bytes_per_second)
    return PhaseCost().plus(
        transfer=reshard_bytes_per_rank(setup) / speed,
        host=_engine_to_host(setup),
        fixed=rates.reshard_seconds,
    )


def exchange_cost(setup: Setup) -> PhaseCost:
    """Token ids and per-token scalars of a step to every rank."""
    lengths = setup.workload
    per_sample = lengths.sample_tokens * TOKEN_BYTES
    per_sample += lengths.response_tokens * SCALARS_PER_TOKEN * FP32_BYTES
    everyone = tuple(range(setup.world_size))
    return PhaseCost().plus(
        transfer=setup.num_samples * per_sample / setup.cluster.bytes_per_second(everyone),
        fixed=setup.cluster.rates.exchange_seconds,
    )
