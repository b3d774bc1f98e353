"""What every engine does alike: list its requests, and turn the responses into a ragged batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_megatron.batch import RaggedBatch, from_sequences
from rlhf_megatron.errors import UserError
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters
from rlhf_megatron.rollout.seeds import engine_seed, request_seed


@dataclass(frozen=True, kw_only=True)
class SeedPlan:
    """Where the seeds of a step come from (`rollout.seed_per`)."""

    per: str  # "request" or "engine"
    run_seed: int
    replica: int
    step: int

    @property
    def engine(self) -> int:
        """The seed of this engine's step."""
        return engine_seed(self.run_seed, replica=self.replica, step=self.step)

    def request(self, *, prompt_id: int, sample_index: int) -> int:
        """The seed that response is recorded with."""
        if self.per == "engine":
            return self.engine
        return request_seed(
            self.run_seed, step=self.step, prompt_id=prompt_id, sample_index=sample_index
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to draw."""

    prompt: Prompt
    sample_index: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response as drawn: n tokens, the stop token included, and their n log-probs."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool


def list_requests(
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingParameters,
    seeds: SeedPlan,
    max_model_len: int,
) -> list[Request]:
    """One request per sample, in the order of (prompt, sample).

    Raises UserError, naming every prompt that does not leave room for its response.
    """
    room = max_model_len - sampling.max_response_tokens
    problems = [
        f"prompt {p.prompt_id}: {len(p.token_ids)} prompt tokens"
        for p in prompts
        if not 0 < len(p.token_ids) <= room
    ]
    if problems:
        raise UserError(
            f"prompts must have 1 to {room} tokens: the context of {max_model_len} tokens less "
            f"{sampling.max_response_tokens} response tokens; shorten rollout.max_response_tokens "
            "or drop " + "; ".join(problems)
        )
    return [
        Request(
            prompt=prompt,
            sample_index=index,
            seed=seeds.request(prompt_id=prompt.prompt_id, sample_index=index),
        )
        for prompt in prompts
        for index in range(sampling.responses_per_prompt)
    ]


def to_batch(
    requests: Sequence[Request], *, responses: Sequence[Response], weight_version: int
) -> RaggedBatch:
    """The batch that `RolloutEngine.generate` promises; empty, with all fields, for no requests."""
    batch = from_sequences(
        [r.prompt.token_ids for r in requests], responses=[r.token_ids for r in responses]
    )
    logprobs = [value for response in responses for value in response.logprobs]
    sample = {
        "prompt_ids": torch.tensor([r.prompt.prompt_id for r in requests], dtype=torch.int64),
        "sample_indices": torch.tensor([r.sample_index for r in requests], dtype=torch.int64),
        "truncated": torch.tensor([r.truncated for r in responses], dtype=torch.bool),
        "weight_versions": torch.full((len(requests),), weight_version, dtype=torch.int64),
        "seeds": torch.tensor([r.seed for r in requests], dtype=torch.int64),
    }
    response = {
        "rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "loss_mask": torch.ones(len(logprobs), dtype=torch.float32),
    }
    return replace(batch, sample=sample, response=response)
