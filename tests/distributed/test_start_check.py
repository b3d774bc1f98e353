"""The check before step 1, with engines whose answers are known: what breaks is named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks

from rlhf_megatron.batch import from_sequences
from rlhf_megatron.checks import InvariantError
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.reshard.config import ParityConfig
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.start_check import check_start
from rlhf_megatron.weight_sync import NO_SYNC

ENGINES = [(0, 2), (1,)]  # rank 3 rolls nothing out
SAMPLING = SamplingParameters(
    temperature=0.7, max_response_tokens=5, responses_per_prompt=4, stop_token_ids=(1,)
)
ROWS = [
    PromptRow(prompt_id=i, text=str(i), token_ids=[3] * (i + 1), fields={}, messages=None)
    for i in range(20)
]
LOGPROB = -0.5


class KnownEngine:
    """Answers prompt i with i tokens of its number; a sleep may change what it says."""

    def __init__(self, ranks: tuple[int, ...], *, forgets: bool, error: float) -> None:
        self.ranks, self.forgets, self.error = ranks, forgets, error
        self.calls: list[Any] = []
        self.shift = 0

    def generate(self, prompts, *, sampling, step):
        self.calls.append((len(prompts), sampling.temperature, sampling.responses_per_prompt))
        batch = from_sequences(
            [p.token_ids for p in prompts],
            responses=[[p.prompt_id + self.shift] * p.prompt_id for p in prompts],
        )
        count = len(prompts)
        batch.sample["prompt_ids"] = torch.tensor([p.prompt_id for p in prompts])
        batch.sample["sample_indices"] = torch.zeros(count, dtype=torch.int64)
        batch.sample["weight_versions"] = torch.full((count,), 4)
        logprobs = torch.full((batch.num_response_tokens,), LOGPROB)
        logprobs[-1] += self.error
        batch.response["rollout_logprobs"] = logprobs
        return batch

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self, *, tags) -> None:
        self.calls.append(f"wake {tags[0]}")
        if self.forgets and tags == ["kv_cache"]:
            self.shift = 1

    def weights_written(self, *, version: int) -> None:
        self.calls.append(f"written {version}")


def check_on_rank(rank: int, forgets: bool, error: float, action: str, level: int) -> Any:
    mine = next((ranks for ranks in ENGINES if rank in ranks), None)
    # Only the second engine is at fault.
    faults = {"forgets": forgets and rank == 1, "error": error * (rank == 1)}
    engine: Any = KnownEngine(mine, **faults) if mine else None
    syncs: list[int] = []

    def sync_run(*, version: int):
        syncs.append(version)
        return NO_SYNC

    ledger = PhaseLedger(rank=rank, device=torch.device("cpu"))
    ledger.start_step(0)
    weights = EngineWeights(
        engine,
        sync=SimpleNamespace(run=sync_run),  # type: ignore[arg-type]
        sleep_level=level,
        ledger=ledger,
        device=torch.device("cpu"),
    )
    before = torch.get_rng_state()
    try:
        report = check_start(
            weights,
            rank=rank,
            rows=ROWS,
            num_engines=2,
            sampling=SAMPLING,
            log_probs=lambda batch: torch.full((batch.num_response_tokens,), LOGPROB),
            group=dist.group.WORLD,
            config=ParityConfig(action=action),
            precision="fp32",
            version=4,
        )
    except InvariantError as failure:
        return str(failure), syncs
    assert torch.equal(before, torch.get_rng_state())
    return report, syncs, engine.calls if engine else None


@pytest.fixture
def check() -> Callable[..., list[Any]]:
    def run(*, forgets=False, error=0.0, action="stop", level=1) -> list[Any]:
        return run_ranks(4, check_on_rank, forgets, error, action, level)

    return run


def test_all_engines_answer_before_and_after_a_sleep(check) -> None:
    results = check()
    report = results[0][0]
    assert [result[0] for result in results] == [report] * 4
    assert (report.num_prompts, report.changed_prompts) == (16, 0)
    assert report.num_tokens == 2 * sum(range(8))
    assert report.metrics["parity/logprob_abs_diff_max"] == 0
    assert "16 of 16" in str(report)
    greedy, sampled = (8, 0.0, 1), (8, 0.7, 1)
    cycle = ["sleep", "wake weights", "wake kv_cache", "written 4"]
    assert [calls for *_, calls in results] == [[greedy, *cycle, greedy, sampled]] * 3 + [None]
    assert [syncs for _, syncs, _ in results] == [[]] * 4


def test_what_level_2_drops_comes_with_a_sync(check) -> None:
    assert [syncs for _, syncs, _ in check(level=2)] == [[4]] * 4


def test_tokens_that_a_sleep_changes_stop_all_ranks(check) -> None:
    messages = [message for message, *_ in check(forgets=True)]
    assert len(set(messages)) == 1
    # Prompt 0 has an empty answer, which is the same either way.
    assert "greedy tokens of 7 of 16 prompts changed" in messages[0]
    assert "rollout.sleep_level" in messages[0]


def test_log_probs_that_differ_stop_all_ranks_and_warn_goes_on(check) -> None:
    messages = [message for message, *_ in check(error=0.25)]
    assert len(set(messages)) == 1 and "max 0.25" in messages[0]
    report = check(error=0.25, forgets=True, action="warn")[3][0]
    assert report.changed_prompts == 7
    assert report.metrics["parity/logprob_abs_diff_max"] == pytest.approx(0.25)
