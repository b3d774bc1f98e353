"""The project's vLLM engine on this one rank, and the bare vLLM inside it, for the GPU benchmarks.

The bare calls go to the very LLM object that the engine drives, so that a ratio between the two
says what the engine adds, and nothing of two differently built ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import Shape

from rlhf_megatron.distributed.start import DistributedContext, release_cached_memory
from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.rollout.factory import build_engine, resolve_engine
from rlhf_megatron.rollout.worlds import make_engine_groups

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def rollout_config(*, gpu_memory_utilization: float, **changes: Any) -> RolloutConfig:
    """Seeds per engine, which costs a GPU less than a generator for each request."""
    options: dict[str, Any] = {"engine": "vllm", "seed_per": "engine"}
    return RolloutConfig(**options, gpu_memory_utilization=gpu_memory_utilization, **changes)


def vllm_engine(
    shape: Shape,
    *,
    model_dir: str | Path,
    config: RolloutConfig,
    precision: str,
    context: DistributedContext,
) -> RolloutEngine:
    """As assembly.build_rollout_engine builds it, on a job of one rank."""
    device = context.device
    resolve_engine("vllm", device=device)
    (group,) = make_engine_groups([(0,)], device=device)
    release_cached_memory(device)  # the engine measures what is free
    engine = build_engine(
        "vllm",
        model_dir=model_dir,
        config=config,
        ranks=(0,),
        replica=0,
        group=group,
        dtype=DTYPES[precision],
        run_seed=1,
        max_model_len=shape.max_model_len,
        device=device,
    )
    vllm_fit.level_group_count(device=device)
    return engine


def fill_with_noise(engine: RolloutEngine, *, version: int = 0) -> None:
    """Weights as of a fresh model: vLLM's own placeholders are so small that all logits are 0."""
    with torch.no_grad():
        for parameter in engine.parameters().values():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
    engine.weights_written(version=version)


class FixedLengths:
    """Stands in for vLLM's SamplingParams in an engine: request after request the given lengths.

    Random weights never end a response by themselves. `lengths` are begun anew after the last, so
    each call of `generate` must have as many requests as there are lengths.
    """

    def __init__(self, make: Any, *, lengths: Sequence[int]) -> None:
        self.make = make
        self._lengths = cycle(lengths)

    def __call__(self, **options: Any) -> Any:
        fixed = {"max_tokens": next(self._lengths), "ignore_eos": True, "stop_token_ids": []}
        return self.make(**(options | fixed))


def fix_lengths(engine: RolloutEngine, lengths: Sequence[int]) -> None:
    """From now on the engine's responses have these lengths."""
    inner: Any = engine
    inner._sampling_params = FixedLengths(_sampling_params(engine), lengths=lengths)


def _sampling_params(engine: RolloutEngine) -> Any:
    """vLLM's SamplingParams, also where the lengths are fixed."""
    inner: Any = engine
    found = inner._sampling_params
    return found.make if isinstance(found, FixedLengths) else found


class BareVllm:
    """The engine's LLM, called as a plain user of vLLM would."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logprobs: int | None = 0,
    ) -> None:
        """One request for each prompt and length. logprobs: 0 the sampled token's alone, as the
        engine asks for; None none at all."""
        inner: Any = engine
        make = _sampling_params(engine)
        self._llm, self._context, self._lengths = inner._llm, inner._calling_vllm, list(lengths)
        self._inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._parameters = [
            make(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
            )
            for length in lengths
        ]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Around calls of `run`: drops cached prompts; on a CPU gives vLLM torch as it wants it."""
        with self._context():
            self._llm.reset_prefix_cache()
            yield

    def run(self) -> None:
        outputs = self._llm.generate(self._inputs, self._parameters, use_tqdm=False)
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == self._lengths, "responses of other lengths than asked for"


def drop_cached_prompts(engine: RolloutEngine) -> None:
    """So that a round does not find the keys and values of the one before."""
    inner: Any = engine
    with inner._calling_vllm():
        inner._llm.reset_prefix_cache()
