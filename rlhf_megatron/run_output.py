"""What a run shows and writes beside its checkpoints: console, metrics, rollouts, trackers."""

import logging
from pathlib import Path

from rlhf_megatron.config import Config, plain_config
from rlhf_megatron.experience import Experience
from rlhf_megatron.observability.console import BeforeAfterLine, Console, SampleLine
from rlhf_megatron.observability.metrics import MetricsWriter
from rlhf_megatron.observability.profiler import PROFILE_FOLDER
from rlhf_megatron.observability.report import report_at_end
from rlhf_megatron.observability.rollouts import RolloutRow, write_rollouts
from rlhf_megatron.observability.trace import trace_at_end
from rlhf_megatron.run_state import Evaluations

logger = logging.getLogger(__name__)

BEFORE_AFTER_PROMPTS = 10


class RunOutput:
    """Shows and writes on rank 0; on the others only their log gets what is said."""

    def __init__(self, config: Config, *, is_main: bool) -> None:
        self.folder = Path(config.run.output_dir)
        self.console = Console(total_steps=config.run.steps, enabled=is_main)
        self._config, self._is_main = config, is_main
        self._writer: MetricsWriter | None = None

    def open(self, *, first_step: int) -> None:
        """Open metrics.jsonl and the trackers. Raises ConfigError where a tracker cannot run."""
        if not self._is_main:
            return
        self._writer = MetricsWriter(
            self.folder,
            config=self._config.logging,
            run_name=self._config.logging.wandb.name or self._config.run.name,
            resolved_config=plain_config(self._config),
            first_step=first_step,
        )

    def say(self, text: str) -> None:
        """Print on rank 0 and keep in the logs."""
        logger.info(text)
        self.console.message(text)

    def responses(self, experience: Experience, *, step: int) -> None:
        """Write the step's responses and print some."""
        options = self._config.logging
        if not self._is_main:
            return
        if options.rollouts_interval_steps and step % options.rollouts_interval_steps == 0:
            write_rollouts(self.folder, step=step, rows=experience.rows)
        self.console.samples(
            [
                SampleLine(prompt=row.prompt, response=row.response, reward=row.reward)
                for row in experience.rows
                if row.reward is not None
            ][: options.sample_responses]
        )

    def step(self, step: int, *, metrics: dict[str, float]) -> None:
        """Write and print the step's figures; keys with an underscore before them are left out."""
        if self._writer is None:
            return
        shown = {name: value for name, value in metrics.items() if not name.startswith("_")}
        self._writer.write(step, metrics=shown)
        self.console.step_table(step, metrics=shown)

    def before_and_after(self, evaluations: Evaluations) -> None:
        """Print the answers to held-out prompts at the first and at the last evaluation."""
        first, last = evaluations.first, evaluations.last
        if self._is_main and first is not None and last is not None:
            self.console.message("\nheld-out prompts before and after:")
            self.console.before_after(_before_after(first.rows, after=last.rows))

    def close(self, evaluations: Evaluations) -> None:
        """Say where the results are, and close files and trackers."""
        if self._writer is not None:
            self._writer.close()
        wanted = self._is_main and self._config.logging.report
        has_report = wanted and report_at_end(self.folder) is not None
        steps = self._config.logging.trace_steps
        has_trace = self._is_main and trace_at_end(self.folder, steps=steps) is not None
        lines = _where_to_look(
            self.folder,
            exported=self._config.export.final,
            evaluations=evaluations,
            has_report=has_report,
            has_trace=has_trace,
        )
        self.say(lines)
        self.console.close()


def _before_after(before: list[RolloutRow], *, after: list[RolloutRow]) -> list[BeforeAfterLine]:
    """The first response to each of the first prompts, then and now."""
    then = {row.prompt_id: row for row in before if row.sample_index == 0}
    lines = []
    for row in after:
        old = then.get(row.prompt_id)
        if row.sample_index or old is None or old.reward is None or row.reward is None:
            continue  # dropped then or now
        lines.append(
            BeforeAfterLine(
                prompt=row.prompt,
                before=old.response,
                before_reward=old.reward,
                after=row.response,
                after_reward=row.reward,
            )
        )
    return lines[:BEFORE_AFTER_PROMPTS]


def _where_to_look(
    folder: Path, *, exported: bool, evaluations: Evaluations, has_report: bool, has_trace: bool
) -> str:
    lines = ["", f"run folder: {folder}"]
    lines.append("  metrics.jsonl     one line per step")
    if has_report:
        lines.append("  report.html       the run in charts, for a browser")
    if has_trace:
        lines.append("  trace.json        every rank's phases on a timeline, for ui.perfetto.dev")
    if (folder / PROFILE_FOLDER).is_dir():
        lines.append(
            "  profile/          operators and kernels of profile.steps, for ui.perfetto.dev"
        )
    lines.append("  rollouts/         every sampled response with its reward")
    if evaluations.best_step:
        lines.append(
            f"  checkpoints/best  the actor after step {evaluations.best_step}, held-out reward "
            f"{evaluations.best_reward_mean:.4f}"
        )
    if exported:
        lines.append("  hf/               the trained model, for transformers and vLLM")
    return "\n".join(lines)
