"""Tokens per second and model FLOPs utilisation of a step."""

from collections.abc import Sequence

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.assembly import DTYPES
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.config import Config
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.observability.flops import (
    device_peak_tflops,
    forward_flops,
    model_flops_utilization,
    numbers_of,
    training_flops,
)
from rlhf_megatron.role_ranks import role_placement

TRAINING_PHASES = {
    "log_prob": "actor",
    "ref_log_prob": "ref",
    "value": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
}
"""Phases whose work and time make train/mfu, with the role whose ranks are in them: the Megatron
models', not the engine's."""


class Throughput:
    """Counts a step's model FLOPs and sets them against its time."""

    def __init__(
        self, config: Config, *, architectures: Architectures, context: DistributedContext
    ) -> None:
        critic = architectures.critic
        outputs = architectures.actor.vocab_size + (critic is None)
        self._actor = numbers_of(architectures.actor, output_size=outputs)
        self._critic = numbers_of(critic, output_size=1) if critic is not None else None
        self._ref = (
            numbers_of(architectures.ref, output_size=architectures.ref.vocab_size)
            if architectures.ref is not None
            else None
        )
        placement = role_placement(config, world_size=context.world_size)
        self._num_devices = {
            phase: len(placement.ranks[role])
            for phase, role in TRAINING_PHASES.items()
            if role in placement.ranks
        }
        self._peak_tflops = config.logging.peak_tflops or device_peak_tflops(
            context.device, dtype=DTYPES[config.actor.precision]
        )

    def work(
        self,
        batch: RaggedBatch,
        *,
        actor_updates: Sequence[Sequence[int]],
        critic_updates: Sequence[Sequence[int]],
    ) -> dict[str, float]:
        """FLOPs of the step's training phases, under a key that is not written out.

        The updates are the mini-batches, as sample numbers, of the optimizer steps taken.
        """
        lengths = batch.lengths.tolist()
        flops = forward_flops(self._actor, sequence_lengths=lengths)
        for model in (self._critic, self._ref):
            if model is not None:
                flops += forward_flops(model, sequence_lengths=lengths)
        for model, updates in ((self._actor, actor_updates), (self._critic, critic_updates)):
            if model is None:
                continue
            trained = [lengths[i] for mini_batch in updates for i in mini_batch]
            flops += training_flops(model, sequence_lengths=trained)
        return {"_flops": float(flops)}

    def metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """train/throughput_tokens_per_sec: prompt and response tokens of the step over its time
        without evaluation; train/mfu: over the time of the training phases, each on its role's
        ranks.
        """
        evaluation = sum(v for k, v in metrics.items() if k.startswith("time/evaluation_"))
        seconds = metrics["time/step_seconds"] - evaluation
        training = sum(
            metrics.get(f"time/{phase}_seconds", 0.0) * devices
            for phase, devices in self._num_devices.items()
        )
        return {
            "train/throughput_tokens_per_sec": metrics["_tokens"] / max(seconds, 1e-9),
            "train/mfu": model_flops_utilization(
                metrics["_flops"],
                seconds=max(training, 1e-9),
                num_devices=1,
                peak_tflops=self._peak_tflops,
            ),
        }
