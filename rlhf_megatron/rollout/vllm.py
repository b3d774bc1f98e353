"""The rollout engine of choice: vLLM in the trainer's own processes, weights written in place."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.distributed.seeds import seed_everything
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.vllm import VOCAB_PARAMETERS, vllm_problems, vllm_rank_layout
from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import (
    Prompt,
    ResponseListener,
    RolloutEngine,
    SamplingParameters,
)
from rlhf_megatron.rollout.kv_cache import cpu_kv_cache_bytes
from rlhf_megatron.rollout.parameters import layout_problems, listed
from rlhf_megatron.rollout.responses import Request, Response, SeedPlan, list_requests, to_batch
from rlhf_megatron.rollout.seeds import engine_seed, preserved_generators

CPU_BLOCK_TOKENS = 32
"""KV cache block on a CPU: the smallest that its attention is fast with (vLLM's default, 128,
wastes most of a block on short sequences)."""

SLEEPING = frozenset(("weights", "kv_cache"))


class VllmEngine(RolloutEngine):
    """One vLLM engine over the ranks of `group`, through vLLM's `external_launcher`.

    Construction is collective over the engine's ranks; afterwards all ranks of the job must call
    `vllm_fit.level_group_count`. The weights are random until they are written through
    `parameters()` and announced by `weights_written`.

    Where vLLM lays the weights out in a way of its own, `reload_reason` says so, and they come
    through `load_weights`. Raises ConfigError where the model cannot be cut over the ranks.
    `factory.resolve_engine` has checked `config.engine_args`.
    """

    name = "vllm"

    def __init__(
        self,
        model_dir: str | Path,
        *,
        config: RolloutConfig,
        ranks: tuple[int, ...],
        replica: int,
        group: dist.ProcessGroup,
        dtype: str,
        run_seed: int,
        max_model_len: int,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        """`model_dir`: Hugging Face directory (config.json; weights are not read). `dtype`:
        float32 or bfloat16. `max_model_len`: most tokens of prompt and response together."""
        assert dist.get_process_group_ranks(group) == list(ranks), ranks
        self.ranks = tuple(ranks)
        self._config = config
        self._replica = replica
        self._run_seed = run_seed
        self._max_model_len = max_model_len
        self._device = device
        self._asleep: frozenset[str] = frozenset()
        self._weight_version: int | None = None
        self._kept_parameters: dict[str, torch.nn.Parameter] | None = None
        self._architecture = read_architecture(model_dir)
        self._tp_rank = group.rank()
        problems = vllm_problems(self._architecture, tensor_parallel_size=len(ranks))
        if problems:
            raise ConfigError([f"rollout.tensor_parallel_size: {text}" for text in problems])
        vllm = vllm_fit.import_vllm(device=device)
        self._sampling_params = vllm.SamplingParams
        arguments = llm_arguments(
            model_dir,
            config=config,
            architecture=self._architecture,
            tensor_parallel_size=len(ranks),
            dtype=dtype,
            seed=engine_seed(run_seed, replica=replica, step=0),
            max_model_len=max_model_len,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        with preserved_generators(device):
            vllm_fit.self_test(group)
            in_place = config.weight_update != "reload"
            with vllm_fit.ready_for_llm(group, device=device, plain_linears=in_place):
                self._llm = vllm.LLM(**arguments)
        vllm_fit.check_tensor_parallel_group(group)
        vllm_fit.drop_message_queue()
        vllm_fit.keep_groups_on_exit(self._llm)
        self.reload_reason = self._find_reload_reason(getattr(torch, dtype))

    def _find_reload_reason(self, dtype: torch.dtype) -> str:
        if self._config.weight_update == "reload":
            return "rollout.weight_update=reload"
        problems = vllm_fit.layers_of_other_methods(self._llm) + layout_problems(
            self.parameters(), layout=self.layout(), dtype=dtype, padded=VOCAB_PARAMETERS
        )
        return "vLLM lays out weights in a way of its own:\n" + listed(problems) if problems else ""

    def parameters(self) -> dict[str, Tensor]:
        assert "weights" not in self._asleep, "parameters() of a sleeping engine"
        return {name: parameter.data for name, parameter in self._parameters.items()}

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """In place they stay the objects that they are; a reload may put others there."""
        if self._kept_parameters is None or self.reload_reason:
            model = vllm_fit.inner_model(self._llm)
            self._kept_parameters = dict(model.named_parameters())
        return self._kept_parameters

    def layout(self) -> RankLayout:
        return vllm_rank_layout(
            self._architecture, tensor_parallel_size=len(self.ranks), tp_rank=self._tp_rank
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParameters,
        step: int,
        on_response: ResponseListener | None = None,
    ) -> RaggedBatch:
        """See `RolloutEngine.generate`. Raises UserError on a prompt that does not fit."""
        assert self._weight_version is not None, "generate() before weights_written()"
        assert not self._asleep, f"generate() while {sorted(self._asleep)} sleep"
        seeds = SeedPlan(
            per=self._config.seed_per, run_seed=self._run_seed, replica=self._replica, step=step
        )
        requests = list_requests(
            prompts, sampling=sampling, seeds=seeds, max_model_len=self._max_model_len
        )
        # An engine without a request does nothing: there may be more engines than prompts.
        responses = []
        if requests:
            responses = self._run(requests, sampling=sampling, seeds=seeds, on_response=on_response)
        return to_batch(requests, responses=responses, weight_version=self._weight_version)

    def _run(
        self,
        requests: list[Request],
        *,
        sampling: SamplingParameters,
        seeds: SeedPlan,
        on_response: ResponseListener | None,
    ) -> list[Response]:
        per_request = self._config.seed_per == "request"
        parameters = [
            self._sampling_params(
                temperature=sampling.temperature,
                max_tokens=sampling.max_response_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=request.seed if per_request else None,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for request in requests
        ]
        inputs = [{"prompt_token_ids": list(r.prompt.token_ids)} for r in requests]
        found: dict[int, Response] = {}
        with self._calling_vllm():
            if not per_request:
                # The ranks of an engine sample each for itself, from the global generators: they
                # must agree, or tokens differ silently and the engine hangs at the first EOS.
                seed_everything(seeds.engine)
            with closing(vllm_fit.finished_outputs(self._llm, inputs, parameters)) as outputs:
                for index, output in outputs:
                    found[index] = response = _response(output)
                    if on_response is not None:
                        on_response(index, token_ids=response.token_ids)
        return [found[index] for index in range(len(requests))]

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        assert self.reload_reason and "weights" not in self._asleep
        with self._calling_vllm():
            vllm_fit.reload_weights(self._llm, tensors)

    @contextmanager
    def _calling_vllm(self) -> Iterator[None]:
        """What vLLM does to the process is undone at the end."""
        with (
            preserved_generators(self._device),
            vllm_fit.torch_as_vllm_has_it(self._device),
            vllm_fit.quiet(),
        ):
            yield

    def sleep(self) -> None:
        if self._device.type == "cpu" or self._config.sleep_level == 0 or self._asleep:
            return
        # Level 2 drops the weights; vLLM itself keeps the buffers (rotary tables) in host memory
        # and restores them (v1/worker/gpu_worker.py, Worker.sleep and wake_up, both versions).
        self._llm.sleep(level=self._config.sleep_level)
        self._asleep = SLEEPING
        if self._config.sleep_level == 2:
            self._weight_version = None

    @property
    def sleeping_bytes(self) -> int:
        return vllm_fit.pool_bytes(self._asleep)

    def wake(self, *, tags: Sequence[str]) -> None:
        assert set(tags) <= SLEEPING, tags
        waking = [tag for tag in tags if tag in self._asleep]
        if waking:
            self._llm.wake_up(tags=waking)
            self._asleep -= set(waking)

    def weights_written(self, *, version: int) -> None:
        self._weight_version = version
        # Keys and values of the old weights would be reused for prompts that begin alike.
        with vllm_fit.torch_as_vllm_has_it(self._device):
            self._llm.reset_prefix_cache()
            self._llm.reset_mm_cache()

    def close(self) -> None:
        """Nothing to do: the engine lives until its process ends.

        vLLM's own shutdown destroys torch's default process group, the trainer's, whoever made it;
        `vllm_fit.keep_groups_on_exit` takes it back, and the operating system frees the rest.
        """


def llm_arguments(
    model_dir: str | Path,
    *,
    config: RolloutConfig,
    architecture: ModelArchitecture,
    tensor_parallel_size: int,
    dtype: str,
    seed: int,
    max_model_len: int,
    device: torch.device,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Arguments of vLLM's LLM(); `engine_args` come last but for the trainer's own."""
    on_cpu = device.type == "cpu"
    fixed: dict[str, Any] = {
        "model": os.fspath(model_dir),
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
        "generation_config": "vllm",  # the directory's stop tokens come through the request alone
        "load_format": "dummy",
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",  # the default gives untempered ones
        "enable_sleep_mode": not on_cpu and config.sleep_level > 0,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enforce_eager": on_cpu or config.enforce_eager,
    }
    block_tokens = config.block_size or (CPU_BLOCK_TOKENS if on_cpu else 0)
    if block_tokens:
        fixed["block_size"] = block_tokens
    if config.max_num_batched_tokens:
        fixed["max_num_batched_tokens"] = config.max_num_batched_tokens
    if not on_cpu:
        fixed["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.kv_cache_memory_gb > 0:
        fixed["kv_cache_memory_bytes"] = int(config.kv_cache_memory_gb * 1e9)
    elif on_cpu:
        fixed["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(
            architecture,
            tensor_parallel_size=tensor_parallel_size,
            bytes_per_element=getattr(torch, dtype).itemsize,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            block_tokens=block_tokens,
        )
    free = {"disable_log_stats": True, "enable_prefix_caching": True}
    return {**free, **config.engine_args, **fixed}


def _response(output: Any) -> Response:
    """vLLM's CompletionOutput as a Response."""
    tokens = list(output.token_ids)
    logprobs = [at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True)]
    return Response(token_ids=tokens, logprobs=logprobs, truncated=output.finish_reason == "length")
