"""What the engines share, and the choice of one: no engine is built here."""

from pathlib import Path

import pytest
import torch

from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.config import (
    ENGINE_ARGS_SET_HERE,
    ENGINE_ARGS_WITH_KEYS,
    RolloutConfig,
)
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters
from rlhf_megatron.rollout.engine_args import check_engine_args
from rlhf_megatron.rollout.engine_ranks import parse_engines
from rlhf_megatron.rollout.factory import check_head_size, resolve_engine
from rlhf_megatron.rollout.kv_cache import CPU_KV_CACHE_BYTES_MAX, cpu_kv_cache_bytes
from rlhf_megatron.rollout.parameters import check_parameters, layout_problems
from rlhf_megatron.rollout.responses import Response, SeedPlan, list_requests, to_batch
from rlhf_megatron.rollout.seeds import engine_seed, request_seed
from rlhf_megatron.rollout.vllm import VllmEngine, llm_arguments

CPU = torch.device("cpu")
SAMPLING = SamplingParameters(
    temperature=1.0, max_response_tokens=4, responses_per_prompt=2, stop_token_ids=(1,)
)
ARCHITECTURE = ModelArchitecture(
    family="llama",
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=61,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("text", "ranks", "size", "engines"),
    [
        ("0,2;1,3", range(4), 2, [(0, 2), (1, 3)]),
        (" 0 ; 3 ", range(4), 1, [(0,), (3,)]),
        ("4,5,6", (4, 5, 6, 9), 3, [(4, 5, 6)]),
        ("0-1;2-3", range(4), 2, [(0, 1), (2, 3)]),
        ("0,2-3;1,4-5", range(6), 3, [(0, 2, 3), (1, 4, 5)]),
    ],
)
def test_engines_are_parsed(
    text: str, ranks: range, size: int, engines: list[tuple[int, ...]]
) -> None:
    assert parse_engines(text, ranks=ranks, tensor_parallel_size=size) == engines


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("1,0;2,3", ["ascending"]),
        ("0,0;2,3", ["ascending"]),
        ("0,1;1,2", ["another engine"]),
        ("0,1;2", ["has 1 ranks"]),
        ("0,1;2,7", ["[7] is not among"]),
        ("1,0;0,9,4", ["ascending", "ascending", "has 3 ranks", "[9]", "another engine"]),
    ],
)
def test_wrong_engines_are_refused_with_all_problems(text: str, rules: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_engines(text, ranks=range(5), tensor_parallel_size=2)
    assert len(caught.value.problems) == len(rules)
    for rule in set(rules):
        assert rule in str(caught.value)


@pytest.mark.parametrize("text", ["", "a,b", "0,1;", "0-1;2-x"])
def test_unreadable_engines_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engines"):
        parse_engines(text, ranks=range(4), tensor_parallel_size=2)


def test_auto_falls_back_and_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*, device: torch.device) -> None:
        raise ImportError("No module named 'vllm'")

    monkeypatch.setattr(vllm_fit, "import_vllm", missing)
    resolved = resolve_engine("auto", device=CPU)
    assert resolved.name == "hf" and "No module named 'vllm'" in resolved.reason
    with pytest.raises(UserError, match=r"rollout\.engine"):
        resolve_engine("vllm", device=CPU)
    assert resolve_engine("hf", device=CPU).name == "hf"


def test_heads_that_vllm_has_no_kernel_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fit, "cpu_head_sizes", lambda: [32, 64])
    check_head_size("vllm", head_dim=64, device=CPU)
    check_head_size("hf", head_dim=16, device=CPU)
    check_head_size("vllm", head_dim=16, device=torch.device("cuda"))
    with pytest.raises(UserError, match=r"32, 64 dimensions.*have 16; set rollout.engine=hf"):
        check_head_size("vllm", head_dim=16, device=CPU)


def test_requests_are_in_order_with_the_seeds_of_the_plan() -> None:
    prompts = [Prompt(prompt_id=i, token_ids=(3, 4)) for i in (8, 2)]
    by_request = SeedPlan(per="request", run_seed=1, replica=2, step=3)
    requests = list_requests(prompts, sampling=SAMPLING, seeds=by_request, max_model_len=6)
    order = [(r.prompt.prompt_id, r.sample_index) for r in requests]
    assert order == [(8, 0), (8, 1), (2, 0), (2, 1)]
    assert [r.seed for r in requests] == [
        request_seed(1, step=3, prompt_id=p, sample_index=s) for p, s in order
    ]
    by_engine = SeedPlan(per="engine", run_seed=1, replica=2, step=3)
    requests = list_requests(prompts, sampling=SAMPLING, seeds=by_engine, max_model_len=6)
    assert {r.seed for r in requests} == {engine_seed(1, replica=2, step=3)}


def test_prompts_without_room_are_refused_all_at_once() -> None:
    prompts = [Prompt(prompt_id=i, token_ids=(3,) * n) for i, n in enumerate((2, 3, 0, 9))]
    seeds = SeedPlan(per="request", run_seed=1, replica=0, step=0)
    with pytest.raises(UserError) as caught:
        list_requests(prompts, sampling=SAMPLING, seeds=seeds, max_model_len=6)
    for part in ("prompt 1: 3", "prompt 2: 0", "prompt 3: 9", "1 to 2 tokens"):
        assert part in str(caught.value)
    assert "prompt 0" not in str(caught.value)


def test_responses_become_a_batch() -> None:
    prompts = [Prompt(prompt_id=4, token_ids=(3, 5, 6))]
    seeds = SeedPlan(per="request", run_seed=1, replica=0, step=0)
    requests = list_requests(prompts, sampling=SAMPLING, seeds=seeds, max_model_len=9)
    responses = [
        Response(token_ids=[9, 1], logprobs=[-0.5, -1.5], truncated=False),
        Response(token_ids=[8, 8, 8, 8], logprobs=[-1.0] * 4, truncated=True),
    ]
    batch = to_batch(requests, responses=responses, weight_version=11)
    assert batch.tokens.tolist() == [3, 5, 6, 9, 1, 3, 5, 6, 8, 8, 8, 8]
    assert batch.response["rollout_logprobs"].tolist() == [-0.5, -1.5, -1, -1, -1, -1]
    assert batch.sample["truncated"].tolist() == [False, True]
    assert batch.sample["weight_versions"].tolist() == [11, 11]


def placement(name: str, *, rows: int, columns: int, offset: int = 0) -> Placement:
    return Placement(name, Box((0, 0), (rows, columns)), name, (offset, 0))


def test_parameters_that_the_layout_covers_pass() -> None:
    parameters = {"a": torch.zeros(4, 2), "lm_head.weight": torch.zeros(8, 2)}
    layout = (
        placement("a", rows=3, columns=2),
        placement("a", rows=1, columns=2, offset=3),
        placement("lm_head.weight", rows=5, columns=2),
    )
    common = {"layout": layout, "dtype": torch.float32}
    assert layout_problems(parameters, padded={"lm_head.weight"}, **common) == []
    (problem,) = layout_problems(parameters, **common)
    assert "lm_head.weight (8, 2): 10 of its 16" in problem
    with pytest.raises(UserError, match=r"rollout\.engine hf.*\n  - lm_head\.weight"):
        check_parameters(parameters, engine="hf", **common)


def test_parameters_laid_out_anew_are_named() -> None:
    layout = tuple(placement(name, rows=4, columns=2) for name in ("a", "b", "c", "d"))
    packed = {
        "a": torch.zeros(0),
        "b": torch.zeros(4, 3),
        "b_scale": torch.zeros(1),
        "d": torch.zeros(4, 2, dtype=torch.int8),
    }
    problems = layout_problems(packed, layout=layout, dtype=torch.float32)
    assert problems == [
        "a has shape (0,), expected at least (4, 2)",
        "b (4, 3): 8 of its 12 elements belong to the model",
        "b_scale (1,): 0 of its 1 elements belong to the model",
        "c is missing",
        "d is torch.int8, expected torch.float32",
    ]


def test_an_overlap_does_not_make_up_for_a_gap() -> None:
    layout = (
        placement("a", rows=3, columns=2),
        placement("a", rows=3, columns=2, offset=2),
    )
    (problem,) = layout_problems({"a": torch.zeros(6, 2)}, layout=layout, dtype=torch.float32)
    assert "overlap" in problem


@pytest.mark.parametrize(("tensor_parallel_size", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_cpu_cache_holds_all_sequences(tensor_parallel_size: int, kv_heads: int) -> None:
    found = cpu_kv_cache_bytes(
        ARCHITECTURE,
        tensor_parallel_size=tensor_parallel_size,
        bytes_per_element=4,
        max_model_len=70,
        max_num_seqs=5,
        block_tokens=32,
    )
    token_bytes = sum(2 * kv_heads * 16 * 4 for _ in range(3))
    assert found == token_bytes * 32 * (5 * 3 + 1)


def test_cpu_cache_is_bounded_but_holds_one_sequence() -> None:
    sizes = [
        cpu_kv_cache_bytes(
            ARCHITECTURE,
            tensor_parallel_size=1,
            bytes_per_element=4,
            max_model_len=length,
            max_num_seqs=10**6,
            block_tokens=32,
        )
        for length in (64, 10**7)
    ]
    assert 0.99 * CPU_KV_CACHE_BYTES_MAX < sizes[0] < 1.01 * CPU_KV_CACHE_BYTES_MAX
    assert sizes[1] >= 10**7 * 3 * 2 * 2 * 16 * 4


def arguments(device: torch.device, config: RolloutConfig) -> dict[str, object]:
    return llm_arguments(
        Path("model"),
        config=config,
        architecture=ARCHITECTURE,
        tensor_parallel_size=2,
        dtype="bfloat16",
        seed=3,
        max_model_len=64,
        device=device,
    )


def test_engine_arguments_pass_through() -> None:
    config = RolloutConfig(
        engine_args={"enable_prefix_caching": False, "swap": 1},
        block_size=64,
        max_num_batched_tokens=512,
        enable_chunked_prefill=False,
    )
    found = arguments(CPU, config)
    assert found["enable_prefix_caching"] is False and found["swap"] == 1
    assert found["enforce_eager"] and not found["enable_sleep_mode"]
    assert found["block_size"] == 64 and found["max_num_batched_tokens"] == 512
    assert found["enable_chunked_prefill"] is False
    plain = arguments(CPU, RolloutConfig())
    assert plain["block_size"] == 32 and "max_num_batched_tokens" not in plain


def test_engine_arguments_that_vllm_does_not_know_or_we_set_are_refused_at_once() -> None:
    given = {
        "logprobs_mode": "raw_logprobs",
        "dtype": "float16",
        "enable_prefix_cashing": True,
        "zzz": 1,
        "quantization": "fp8",
    }
    with pytest.raises(ConfigError) as caught:
        check_engine_args(
            given, known={"dtype", "logprobs_mode", "enable_prefix_caching", "quantization"}
        )
    assert caught.value.problems == [
        "rollout.engine_args.dtype: has a key of its own; set actor.precision instead",
        "rollout.engine_args.logprobs_mode: is set by the trainer, since log-probs must be those "
        "of the tempered distribution; remove it",
        "rollout.engine_args.enable_prefix_cashing: vLLM takes no such argument; did you mean "
        "enable_prefix_caching?",
        "rollout.engine_args.zzz: vLLM takes no such argument; remove it",
    ]
    check_engine_args({"quantization": "fp8"}, known={"quantization"})


def test_every_argument_of_ours_has_its_reason() -> None:
    """What the trainer hands to LLM() is refused in `engine_args`, but for the free defaults."""
    gpu = arguments(torch.device("cuda", 0), RolloutConfig(kv_cache_memory_gb=1, block_size=16))
    ours = gpu.keys() - {"disable_log_stats", "enable_prefix_caching"}
    assert ours <= ENGINE_ARGS_WITH_KEYS.keys() | ENGINE_ARGS_SET_HERE.keys()


def test_arguments_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    found = arguments(gpu, RolloutConfig(gpu_memory_utilization=0.4))
    assert found["gpu_memory_utilization"] == 0.4 and "kv_cache_memory_bytes" not in found
    assert found["enable_sleep_mode"] and not found["enforce_eager"]
    assert "block_size" not in found and found["enable_chunked_prefill"]
    found = arguments(gpu, RolloutConfig(kv_cache_memory_gb=1.5, sleep_level=0))
    assert found["kv_cache_memory_bytes"] == 1_500_000_000 and not found["enable_sleep_mode"]


class SleepingLlm:
    """Notes what the engine asks of vLLM."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append(("wake", tags))


def sleeping_engine(*, level: int, device: str) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = SleepingLlm()
    engine._config = RolloutConfig(sleep_level=level)
    engine._device = torch.device(device)
    engine._asleep, engine._weight_version = frozenset(), 3
    return engine


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_once_and_wakes_by_tag(level: int) -> None:
    engine = sleeping_engine(level=level, device="cuda")
    engine.sleep()
    engine.sleep()
    # What level 2 dropped must be written before it is used.
    assert (engine._weight_version is None) == (level == 2)
    with pytest.raises(AssertionError, match="sleeping"):
        engine.parameters()
    engine.wake(tags=["weights"])
    engine.wake(tags=["weights", "kv_cache"])
    engine.wake(tags=["kv_cache"])
    assert engine._llm.calls == [
        ("sleep", level),
        ("wake", ["weights"]),
        ("wake", ["kv_cache"]),
    ]


@pytest.mark.parametrize(("level", "device"), [(0, "cuda"), (1, "cpu"), (2, "cpu")])
def test_an_engine_that_cannot_or_may_not_sleep_stays_awake(level: int, device: str) -> None:
    engine = sleeping_engine(level=level, device=device)
    engine.sleep()
    engine.wake(tags=["weights", "kv_cache"])
    assert engine._llm.calls == [] and engine._weight_version == 3
