"""Supervised warm-up: the actor imitates demonstrations before PPO begins."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.batch import from_sequences
from rlhf_megatron.data.config import WarmupConfig
from rlhf_megatron.data.prompts import Demonstration
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.micro_batches import micro_batches_of


class SupervisedWarmup:
    """Maximum likelihood of the demonstrations' responses, a mean over tokens."""

    def __init__(
        self,
        actor: ModelEngine,
        *,
        demonstrations: Sequence[Demonstration],
        config: WarmupConfig,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        self._actor, self._config = actor, config
        self._demonstrations = list(demonstrations)
        self._micro_batch_tokens = micro_batch_tokens
        self._random = random.Random(f"warmup {seed}")

    def step(self) -> float:
        """One optimizer step on freshly drawn demonstrations; returns the loss before it."""
        drawn = [
            self._random.choice(self._demonstrations) for _ in range(self._config.samples_per_step)
        ]
        batch = from_sequences(
            [d.prompt_ids for d in drawn], responses=[d.response_ids for d in drawn]
        )
        result = self._actor.train_step(
            micro_batches_of(
                self._actor,
                batch=batch,
                samples=range(len(batch)),
                fields=(),
                micro_batch_tokens=self._micro_batch_tokens,
            ),
            loss=self._loss,
            learning_rate=self._config.learning_rate,
        )
        return result.metrics["loss"]

    def _loss(self, hidden: Tensor, micro: MicroBatch) -> LossResult:
        found = self._actor.log_probs(hidden, micro_batch=micro, temperature=1.0)
        loss = -found.logprobs.sum()
        count = torch.full((), len(found.logprobs), device=loss.device)
        return LossResult(
            loss_sum=loss,
            count=count,
            sums={"loss": torch.stack([loss.detach().double(), count.double()])},
        )
