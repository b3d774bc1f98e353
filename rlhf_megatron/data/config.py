"""Options of prompts, tokenizer, evaluation and supervised warm-up."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, number


@dataclass(kw_only=True)
class DataConfig:
    """The prompts to train on and how text becomes tokens."""

    prompts: str = ""
    """JSONL or Parquet file, one prompt a row. Required."""

    prompt_field: str = "prompt"
    """Field with the prompt: a string, or a list of {role, content} messages, which go through the
    tokenizer's chat template. Every other field goes to the reward function."""

    tokenizer: str = ""
    """Hugging Face directory or a sentencepiece .model file. Empty (default): actor.model."""

    shuffle: bool = True
    """Shuffle the prompts anew in each pass, from run.seed. Default true."""

    long_prompts: str = choice("refuse", "drop")
    """A prompt longer than rollout.max_prompt_tokens: refuse (default) ends the run before it
    starts and names the row; drop leaves it out and says how many."""

    add_bos: str = choice("auto", "yes", "no")
    """Begin plain prompts with the BOS token: auto (default) does as the tokenizer does."""


@dataclass(kw_only=True)
class EvaluationConfig:
    """Held-out prompts, sampled and scored without an update."""

    prompts: str = ""
    """JSONL or Parquet file as data.prompts. Empty (default): no evaluation."""

    interval_steps: int = number(10, minimum=1)
    """Evaluate every so many steps, before the first and after the last. Default 10."""

    max_prompts: int = number(0, minimum=0)
    """Only the first so many prompts; 0 (default) takes all."""

    responses_per_prompt: int = number(1, minimum=1)
    """Samples per prompt. Default 1."""

    temperature: float = number(0.0, minimum=0, maximum=2)
    """Sampling temperature; 0 (default) is greedy."""

    max_response_tokens: int = number(0, minimum=0)
    """Longest response; 0 (default) takes rollout.max_response_tokens."""

    keep_best: bool = True
    """Export the actor with the best mean score to RUN/checkpoints/best (Hugging Face format).
    Default true."""


@dataclass(kw_only=True)
class WarmupConfig:
    """Supervised warm-up of the actor before PPO (a convenience for small models)."""

    steps: int = number(0, minimum=0)
    """Optimizer steps on the demonstrations; 0 (default) is off."""

    demonstrations: str = ""
    """JSONL or Parquet file with data.prompt_field and `response_field`."""

    response_field: str = "response"
    """Field with the answer to imitate; EOS is added. Default response."""

    samples_per_step: int = number(32, minimum=1)
    """Demonstrations per optimizer step. Default 32."""

    learning_rate: float = number(1e-3, minimum=0)
    """Constant learning rate of the warm-up; the PPO optimizer starts afresh. Default 1e-3."""
