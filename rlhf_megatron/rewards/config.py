"""Options of the reward."""

from dataclasses import dataclass

from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class RewardConfig:
    """Where a response's score comes from: a Python function or a model, exactly one of them."""

    function: str = ""
    """"path/to/file.py:name" or "module:name". Called as name(prompt=..., response=..., **fields)
    with the texts and the prompt row's other fields; returns a number."""

    model: str = ""
    """Directory of a transformers sequence-classification model with one label, read with its own
    tokenizer on prompt and response text."""

    model_batch_samples: int = number(16, minimum=1)
    """Responses the reward model scores at once. Default 16."""

    on_error: str = choice("stop", "drop", "value")
    """What a reward that raises, returns NaN or infinity, or takes longer than timeout_seconds
    does: stop (default) ends the run and names the sample; drop leaves the sample out of the step
    and counts it in reward/dropped; value gives it error_value. faults/reward_failures counts the
    last two."""

    error_value: float = number(0.0)
    """The score of such a sample under on_error=value. Default 0."""

    timeout_seconds: float = number(0.0, minimum=0)
    """How long the function may take for one response before it counts as failed. It is interrupted
    by an alarm signal, which code outside Python does not heed: then faults.phase_limits.reward
    ends the run. Not for reward models. 0 (default): as long as it likes."""

    parallel: ParallelConfig = items(ParallelConfig)
    """Ranks that score. Only ranks and data_parallel_size apply: a reward model is held whole."""
