"""The fallback engine and oracle: transformers' generate, on one rank, weights written in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import (
    Prompt,
    ResponseListener,
    RolloutEngine,
    SamplingParameters,
)
from rlhf_megatron.rollout.parameters import check_parameters
from rlhf_megatron.rollout.responses import Request, Response, SeedPlan, list_requests, to_batch
from rlhf_megatron.rollout.seeds import preserved_generators

NO_TOKEN = -1
"""A stop token that no response holds. transformers reads an empty list as "the model's own"."""


class HfEngine(RolloutEngine):
    """One whole model on one rank. The weights are random until written (`parameters()`) and
    announced (`weights_written`)."""

    name = "hf"

    def __init__(
        self,
        model_dir: str | Path,
        *,
        config: RolloutConfig,
        ranks: tuple[int, ...],
        replica: int,
        dtype: str,
        run_seed: int,
        max_model_len: int,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        """`model_dir`: Hugging Face directory (config.json; weights are not read). `dtype`:
        float32 or bfloat16. `max_model_len`: most tokens of prompt and response together."""
        assert len(ranks) == 1, ranks
        self.ranks = tuple(ranks)
        self._config = config
        self._replica = replica
        self._run_seed = run_seed
        self._max_model_len = max_model_len
        self._device = device
        self._weight_version: int | None = None
        self._architecture = read_architecture(model_dir)
        settings = transformers.AutoConfig.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code
        )
        with preserved_generators(device):
            model = transformers.AutoModelForCausalLM.from_config(
                settings, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        self._model: Any = model.to(device).eval().requires_grad_(False)
        check_parameters(
            self.parameters(),
            layout=self.layout(),
            dtype=getattr(torch, dtype),
            engine=self.name,
        )

    def parameters(self) -> dict[str, Tensor]:
        # named_parameters gives a tied weight once, under the embedding's name.
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def layout(self) -> RankLayout:
        return hf_layout(self._architecture, head="lm")

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParameters,
        step: int,
        on_response: ResponseListener | None = None,
    ) -> RaggedBatch:
        """See `RolloutEngine.generate`; responses finish as their batch of `rollout.max_num_seqs`
        does. Raises UserError on a prompt that does not fit."""
        assert self._weight_version is not None, "generate() before weights_written()"
        # Every request has a generator of its own anyhow: `rollout.seed_per` changes nothing here.
        seeds = SeedPlan(per="request", run_seed=self._run_seed, replica=self._replica, step=step)
        requests = list_requests(
            prompts, sampling=sampling, seeds=seeds, max_model_len=self._max_model_len
        )
        size = self._config.max_num_seqs
        responses: list[Response] = []
        for start in range(0, len(requests), size):
            for response in self._run(requests[start : start + size], sampling=sampling):
                responses.append(response)
                if on_response is not None:
                    on_response(len(responses) - 1, token_ids=response.token_ids)
        return to_batch(requests, responses=responses, weight_version=self._weight_version)

    @torch.no_grad()
    def _run(self, requests: list[Request], *, sampling: SamplingParameters) -> list[Response]:
        """Responses of one padded batch."""
        lengths = [len(r.prompt.token_ids) for r in requests]
        width = max(lengths)
        tokens = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(requests):
            tokens[row, width - lengths[row] :] = torch.tensor(request.prompt.token_ids)
            mask[row, width - lengths[row] :] = 1
        sampler = GumbelSampler(
            [request.seed for request in requests],
            temperature=sampling.temperature,
            device=self._device,
        )
        with preserved_generators(self._device):
            output = self._model.generate(
                tokens.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=sampling.max_response_tokens,
                do_sample=False,  # the sampler has added the noise: the best token is the sample
                eos_token_id=list(sampling.stop_token_ids) or [NO_TOKEN],
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([sampler]),
            )
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        return [
            _cut(row, logprobs=values, stop_token_ids=sampling.stop_token_ids)
            for row, values in zip(output[:, width:].tolist(), logprobs, strict=True)
        ]

    def sleep(self) -> None:
        """Nothing: the engine keeps its memory."""

    def wake(self, *, tags: Sequence[str]) -> None:
        """Nothing, as `sleep`."""

    def weights_written(self, *, version: int) -> None:
        # Nothing computed with old weights outlives a call of generate().
        self._weight_version = version

    def close(self) -> None:
        """Nothing to do."""


class GumbelSampler(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes greedy decoding draw from softmax(logits / temperature), each row by its own seed.

    argmax(log p + G), with G from the standard Gumbel distribution, has the distribution p (the
    Gumbel-max trick: Maddison et al. 2014, arXiv:1411.0030, section 2). The noise of a row comes
    from a generator of its own, so a response does not depend on the rows beside it.
    """

    def __init__(self, seeds: Sequence[int], *, temperature: float, device: torch.device) -> None:
        """temperature 0 is greedy: no noise, log-probs of the untempered distribution."""
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []  # of each step's chosen tokens, [B] float32

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] logits -> [B, V] scores whose largest is the token to take."""
        logits = scores.float() / (self.temperature or 1.0)
        logprobs = logits.log_softmax(dim=-1)
        perturbed = logprobs
        if self.temperature > 0:
            draws = torch.empty_like(logprobs)
            for row, generator in zip(draws, self.generators, strict=True):
                row.exponential_(generator=generator)
            # -log of an exponential variate is a Gumbel variate; a draw of 0 would be infinite.
            perturbed = logprobs - draws.clamp_min(torch.finfo(draws.dtype).tiny).log()
        chosen = perturbed.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, chosen)[:, 0])
        return perturbed


def _cut(tokens: list[int], *, logprobs: list[float], stop_token_ids: Sequence[int]) -> Response:
    """End a row at its first stop token, which stays in; without one it is truncated."""
    stop = next((i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), None)
    return Response(token_ids=tokens[:stop], logprobs=logprobs[:stop], truncated=stop is None)
