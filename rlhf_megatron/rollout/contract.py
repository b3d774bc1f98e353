"""What a rollout engine is, and what it takes and gives."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.layout.boxes import RankLayout


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt to answer. `prompt_id` is its row number in the prompt set."""

    prompt_id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How responses are drawn. temperature 0 is greedy (evaluation only)."""

    temperature: float
    max_response_tokens: int
    responses_per_prompt: int
    stop_token_ids: tuple[int, ...]
    """Every token that ends a response, the model's EOS included. The stop token is kept."""


class ResponseListener(Protocol):
    """Hears of responses as they finish, in any order."""

    def __call__(self, index: int, *, token_ids: Sequence[int]) -> None:
        """Sample `index` of the batch that `generate` will return has all its tokens: these, the
        stop token included. The engine waits for the call to return."""


class RolloutEngine(ABC):
    """One engine, on the ranks `ranks` (ascending), each of which holds one tensor-parallel shard.

    All methods are collective over the engine's ranks: each calls them with the same arguments.
    """

    name: str
    ranks: tuple[int, ...]
    reload_reason: str = ""
    """Why new weights must come through `load_weights`; empty where `parameters()` may be written
    in place, as `layout` says."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParameters,
        step: int,
        on_response: ResponseListener | None = None,
    ) -> RaggedBatch:
        """Answer each prompt `responses_per_prompt` times.

        `on_response` is called once for each of them before this returns, and changes nothing of
        what it returns.

        Returns, the same on all ranks of the engine, in the order of (prompt, sample): sample
        fields `prompt_ids`, `sample_indices`, `truncated` (bool), `weight_versions`, `seeds`;
        response fields `rollout_logprobs` (float32, of the tempered distribution; for greedy
        sampling of the untempered one) and `loss_mask` (float32, ones).
        """

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The live parameter tensors of this rank, to be written in place."""

    @abstractmethod
    def layout(self) -> RankLayout:
        """Where the logical tensors lie in `parameters()`, for this rank."""

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take new weights as whole tensors with Hugging Face's names, each once, in any order.

        Only where there is a `reload_reason`; `weights_written` follows.
        """
        raise NotImplementedError(f"the {self.name} engine's weights are written in place")

    @property
    def sleeping_bytes(self) -> int:
        """Device memory that it gave back by `sleep` and torch's allocator still counts."""
        return 0

    @abstractmethod
    def sleep(self) -> None:
        """Give up device memory until `wake`. A no-op where the engine cannot."""

    @abstractmethod
    def wake(self, *, tags: Sequence[str]) -> None:
        """Take back "weights", then "kv_cache". A no-op where `sleep` is."""

    @abstractmethod
    def weights_written(self, *, version: int) -> None:
        """New weights are in place: drop caches computed with the old ones, note the version."""
