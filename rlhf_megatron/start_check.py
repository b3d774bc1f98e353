"""Before step 1: does the engine answer as the trainer's policy would, and after a sleep, too?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron import checks
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.exchange import gather_batch, gather_lists
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.reshard.config import ParityConfig
from rlhf_megatron.rollout.contract import Prompt, RolloutEngine, SamplingParameters

PROMPTS_PER_ENGINE = 8
PROMPTS_IN_ALL = 64
"""With many engines each answers fewer prompts: every rank looks at all answers."""
RESPONSE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """What was compared, over all engines."""

    num_prompts: int
    num_tokens: int
    changed_prompts: int
    """Whose greedy tokens a sleep has changed."""
    metrics: dict[str, float]

    def __str__(self) -> str:
        return (
            f"start check: greedy tokens of {self.num_prompts - self.changed_prompts} of "
            f"{self.num_prompts} prompts are the same after a sleep; trainer and engine log-probs "
            f"of {self.num_tokens} sampled tokens differ by at most "
            f"{self.metrics['parity/logprob_abs_diff_max']:.2g}, on average "
            f"{self.metrics['parity/logprob_abs_diff_mean']:.2g}"
        )


def check_start(
    weights: EngineWeights,
    *,
    rank: int,
    rows: Sequence[PromptRow],
    num_engines: int,
    sampling: SamplingParameters,
    log_probs: Callable[[RaggedBatch], Tensor],
    group: dist.ProcessGroup,
    config: ParityConfig,
    precision: str,
    version: int,
) -> StartReport:
    """Collective over the job. The engines hold the actor's weights, `version`.

    `log_probs` gives the trainer's of a whole batch, [R]. The same prompts go to all engines:
    greedy before and after the sleep, then sampled as training samples. Engines seed each request
    and put the global generators back, so the run's random numbers stay as they are.

    Raises checks.InvariantError on all ranks where greedy tokens change or the log-probs differ by
    more than `config` allows, under its action "stop"; "warn" logs it.
    """
    count = max(1, min(PROMPTS_PER_ENGINE, PROMPTS_IN_ALL // num_engines))
    prompts = [
        Prompt(prompt_id=row.prompt_id, token_ids=tuple(row.token_ids)) for row in rows[:count]
    ]
    tokens = min(RESPONSE_TOKENS, sampling.max_response_tokens)
    sampled = replace(sampling, max_response_tokens=tokens, responses_per_prompt=1)
    greedy = replace(sampled, temperature=0.0)

    engine = weights.engine
    before = _answers(engine, prompts=prompts, sampling=greedy)
    weights.sleep_and_wake(version=version)
    after = _answers(engine, prompts=prompts, sampling=greedy)
    # Every rank of an engine has all its answers; its first one hands them on.
    is_speaker = engine is not None and rank == engine.ranks[0]
    pairs = list(zip(before, after, strict=True)) if is_speaker else []
    pairs = gather_lists(pairs, group=group)
    changed = sum(first != second for first, second in pairs)
    if changed:
        checks.stop_or_warn(
            f"start check: greedy tokens of {changed} of {len(pairs)} prompts changed when the "
            "rollout engine slept and woke. Usual causes: weights or buffers lost "
            "(rollout.sleep_level=2 where the engine does not restore all; take 1), an allocator "
            "that breaks sleeping (PYTORCH_CUDA_ALLOC_CONF with expandable_segments), a prefix "
            "cache kept; rollout.sleep_level=0 keeps the engine awake",
            config=config,
        )
    part = None
    if engine is not None:
        part = engine.generate(prompts, sampling=sampled, step=0)
    batch = gather_batch(part if is_speaker else None, group=group).batch
    batch.response["old_logprobs"] = log_probs(batch)
    metrics = checks.check_parity(batch, config=config, precision=precision, version=version)
    return StartReport(
        num_prompts=len(pairs),
        num_tokens=batch.num_response_tokens,
        changed_prompts=changed,
        metrics=metrics,
    )


def _answers(
    engine: RolloutEngine | None, *, prompts: Sequence[Prompt], sampling: SamplingParameters
) -> list[list[int]]:
    if engine is None:
        return []
    batch = engine.generate(prompts, sampling=sampling, step=0)
    return batch.responses(range(len(batch)))
