"""Held-out evaluation: its own prompts and sampling, and no update."""

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.data.config import EvaluationConfig
from rlhf_megatron.data.prompts import PromptSet
from rlhf_megatron.experience import ExperienceMaker
from rlhf_megatron.observability.rollouts import RolloutRow
from rlhf_megatron.ppo import score_metrics
from rlhf_megatron.rollout.contract import SamplingParameters

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """One evaluation; `step` 0 is the policy before training."""

    step: int
    metrics: dict[str, float]  # evaluation/reward_mean and its like
    rows: list[RolloutRow]  # on rank 0

    @property
    def reward_mean(self) -> float:
        return self.metrics["evaluation/reward_mean"]


class Evaluator:
    """Answers the held-out prompts with the engines' present weights and scores the answers."""

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        prompts: PromptSet,
        maker: ExperienceMaker,
        max_response_tokens: int,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._prompts, self._maker = prompts, maker
        self._sampling = SamplingParameters(
            temperature=config.temperature,
            max_response_tokens=config.max_response_tokens or max_response_tokens,
            responses_per_prompt=config.responses_per_prompt,
            stop_token_ids=stop_token_ids,
        )

    def run(self, *, step: int) -> EvaluationReport:
        """Collective over the job. Seeds do not depend on the step, so that evaluations compare."""
        found = self._maker.run(
            self._prompts.rows, sampling=self._sampling, step=0, prefix="evaluation_"
        )
        metrics = {
            f"evaluation/{name.replace('/', '_')}": value
            for name, value in score_metrics(found.batch).items()
        }
        metrics["evaluation/dropped"] = float(found.num_dropped)  # not in the means
        return EvaluationReport(step=step, metrics=metrics, rows=found.rows)


def append_evaluation(output_dir: str | Path, *, report: EvaluationReport) -> None:
    """Add a line to RUN/evaluations.jsonl, which also holds the evaluation before step 1."""
    with (Path(output_dir) / EVALUATIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": report.step, **report.metrics}) + "\n")
