"""Reward servers as a client sees them: none of what they do loses a sample or scores it twice."""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from recording_server import RecordingServer, dead_url, flapping, right_answer, slow

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.config import RemoteRewardConfig
from rlhf_megatron.rewards.contract import NoScoreError, ScoringInput
from rlhf_megatron.rewards.endpoint import Health
from rlhf_megatron.rewards.remote import RemoteScorer
from rlhf_megatron.rewards.score import score_batch


def samples(count: int, **fields: Any) -> list[ScoringInput]:
    return [
        ScoringInput(prompt="p", response=str(i), prompt_id=i, sample_index=0, fields=fields)
        for i in range(count)
    ]


def scorer_of(*urls: str, **options: Any) -> RemoteScorer:
    quick = {"timeout_seconds": 5.0, "backoff_seconds": 0.02, "hedge_seconds": 0.0}
    return RemoteScorer(RemoteRewardConfig(endpoints=list(urls), **(quick | options)))


def test_order_fields_and_batches() -> None:
    with RecordingServer() as server:
        scorer = scorer_of(server.url + "/", batch_samples=4, concurrency=3)
        assert scorer(samples(10, k=0.5)) == [i + 0.5 for i in range(10)]
        assert scorer([]) == []
    assert sorted(len(r["samples"]) for r in server.requests) == [2, 4, 4]
    assert len({r["request_id"] for r in server.requests}) == 3
    sample = min(server.requests, key=lambda r: r["samples"][0]["prompt_id"])["samples"][1]
    assert sample == {
        "prompt": "p",
        "response": "1",
        "prompt_id": 1,
        "sample_index": 0,
        "fields": {"k": 0.5},
    }
    assert all("Authorization" not in headers for headers in server.headers)


def test_the_token_is_sent_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with RecordingServer(lambda *_: (401, b"who are you")) as server:
        scorer = scorer_of(server.url, auth_token="s3cret", retries=1)
        scorer.check()
        (outcome,) = scorer(samples(1))
    assert [h["Authorization"] for h in server.headers] == ["Bearer s3cret"] * 2
    assert str(outcome) == f"{server.url}: HTTP status 401: who are you (try 2 of 2)"
    config = RemoteRewardConfig(endpoints=[server.url], auth_token="s3cret")
    assert "s3cret" not in f"{outcome} {config} {caplog.text}"


def test_concurrency_is_per_endpoint() -> None:
    with RecordingServer(slow(0.05)) as one, RecordingServer(slow(0.05)) as other:
        assert scorer_of(one.url, other.url, batch_samples=1, concurrency=2)(samples(20)) == [
            *map(float, range(20))
        ]
    assert one.most_under_way == other.most_under_way == 2


def test_a_thousand_requests_to_one_dead_one_slow_and_one_flapping_endpoint() -> None:
    """What the issue asks for: none lost, none scored twice in the result, and a bound."""
    with RecordingServer(slow(1.0)) as late, RecordingServer(flapping(0.07)) as moody:
        scorer = scorer_of(
            *(dead_url(), late.url, moody.url),
            batch_samples=1,
            concurrency=4,
            hedge_seconds=0.2,
            retries=20,
            eject_seconds=0.1,
            deadline_seconds=60.0,
        )
        began = time.monotonic()
        outcomes = scorer(samples(1000))
        seconds = time.monotonic() - began
        counts = scorer.take_counts()
        time.sleep(1.2)  # what the slow one still had under way
    assert outcomes == [float(i) for i in range(1000)]
    answers = Counter(late.answered + moody.answered)
    asked = {r["request_id"]: r["samples"][0]["response"] for r in late.requests + moody.requests}
    assert set(answers) == set(asked) and sorted(map(int, asked.values())) == list(range(1000))
    twice = sum(answers.values()) - 1000
    print(f"{seconds:.2f} s, answered twice: {twice}, slow one: {len(late.answered)}, {counts}")
    assert twice <= counts["reward/remote_hedged_requests"]  # and only the first of them counted
    assert counts["reward/remote_ejections"] >= 1
    assert counts["reward/remote_failed_requests"] >= 10
    assert seconds < 60.0  # the deadline; it takes about 3 on an idle machine


def test_the_slow_copy_of_a_batch_does_not_count() -> None:
    release = threading.Event()

    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes]:
        release.wait(10.0)
        body = {"request_id": request["request_id"], "results": [{"score": -1}]}
        return 200, json.dumps(body).encode()

    with RecordingServer(behave) as stuck, RecordingServer() as server:
        scorer = scorer_of(stuck.url, server.url, batch_samples=1, concurrency=1, hedge_seconds=0.1)
        began = time.monotonic()
        pending = scorer.start(samples(20))
        assert pending.result() == [float(i) for i in range(20)]
        assert time.monotonic() - began < 5.0
        release.set()
        time.sleep(0.3)
        assert pending.result() == [float(i) for i in range(20)]
    assert 1 <= scorer.take_counts()["reward/remote_hedged_requests"] <= 20


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, b"<html>"), "not JSON (Expecting value: line 1 column 1 (char 0)): '<html>'"),
        ((200, b"[1]"), "must be a JSON object, not a list"),
        ((200, b'{"request_id": "x", "results": []}'), "it answers request 'x', this was"),
        ((500, b"ouch\n" * 2), "HTTP status 500: ouch ouch"),
        ((302, b""), "HTTP status 302"),
        (None, "Remote end closed connection without response"),
    ],
)
def test_a_bad_answer_names_endpoint_and_reason(answer: Any, reason: str) -> None:
    with RecordingServer(lambda *_: answer) as server:
        (outcome,) = scorer_of(server.url, retries=2)(samples(1))
    assert isinstance(outcome, NoScoreError) and outcome.unavailable
    assert server.url in str(outcome) and reason in str(outcome), str(outcome)
    assert str(outcome).endswith("(try 3 of 3)")
    assert len({r["request_id"] for r in server.requests}) == 1 and len(server.requests) == 3


@pytest.mark.parametrize("results", [[], [{"score": 1}] * 3, ["x", "y"], [{}, {"score": 1}], 7])
def test_a_wrong_number_of_results_is_no_answer(results: Any) -> None:
    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes]:
        if number > 0:
            return right_answer(request)
        body = {"request_id": request["request_id"], "results": results}
        return 200, json.dumps(body).encode()

    with RecordingServer(behave) as server:
        scorer = scorer_of(server.url)
        assert scorer(samples(2)) == [0.0, 1.0]
    assert scorer.take_counts()["reward/remote_failed_requests"] == 1.0


def test_errors_and_nan_are_those_of_single_samples() -> None:
    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes]:
        results = [{"score": math.nan}, {"error": "raised ValueError: no"}, {"score": "1"}]
        results += [{"score": 4}]
        body = {"request_id": request["request_id"], "results": results}
        return 200, json.dumps(body).encode()

    with RecordingServer(behave) as server:
        scores = score_batch(samples(4), scorer=scorer_of(server.url), on_error="drop")
    assert scores.rewards.isnan().tolist() == [True, True, True, False]
    assert [f.reason for f in scores.failed] == [
        f"{server.url} returned nan",
        f"{server.url}: raised ValueError: no",
        f"{server.url} returned '1' (str), must be a number",
    ]
    assert not any(f.unavailable for f in scores.failed) and len(server.requests) == 1


def test_a_request_that_is_wrong_everywhere_is_not_sent_again() -> None:
    with RecordingServer(lambda *_: (400, b"no such field")) as server:
        (outcome,) = scorer_of(server.url)(samples(1))
    assert isinstance(outcome, NoScoreError) and not outcome.unavailable
    assert len(server.requests) == 1 and "HTTP status 400: no such field" in str(outcome)


def test_a_field_without_a_place_in_json_is_that_samples_failure() -> None:
    good = samples(1)
    bad = samples(1, when=time.gmtime, k=1)
    with RecordingServer() as server:
        first, second = scorer_of(server.url)(bad + good)
    assert isinstance(first, TypeError) and "has no place in JSON" in str(first)
    assert second == 0.0


def test_a_silent_endpoint_times_out_and_the_deadline_bounds_the_step() -> None:
    with RecordingServer(slow(3.0)) as server:
        began = time.monotonic()
        (outcome,) = scorer_of(server.url, timeout_seconds=0.2, retries=1)(samples(1))
        assert "no answer within 0.2 s (try 2 of 2)" in str(outcome)
        outcomes = scorer_of(server.url, batch_samples=1, concurrency=1, deadline_seconds=0.4)(
            samples(3)
        )
        assert time.monotonic() - began < 2.5
    texts = sorted(str(outcome) for outcome in outcomes)
    assert all("no score within reward.remote.deadline_seconds=0.4" in text for text in texts)
    assert f"waiting for {server.url}" in texts[2] and "no endpoint had room" in texts[0]
    assert all(outcome.unavailable for outcome in outcomes)


def test_an_ejected_endpoint_comes_back_when_it_is_well() -> None:
    is_well = threading.Event()

    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes]:
        return right_answer(request) if is_well.is_set() else (503, b"")

    options = {"batch_samples": 1, "concurrency": 1, "eject_seconds": 0.1, "retries": 9}
    with (
        RecordingServer(behave, is_well=is_well.is_set) as sick,
        RecordingServer(slow(0.01)) as server,
    ):
        scorer = scorer_of(sick.url, server.url, **options)
        assert scorer(samples(50)) == [float(i) for i in range(50)]
        assert len(sick.requests) == 3  # eject_after_failures
        assert scorer.take_counts()["reward/remote_ejected_endpoints"] == 1.0
        is_well.set()
        time.sleep(0.5)
        assert scorer(samples(50)) == [float(i) for i in range(50)]
        assert sick.probes >= 1 and len(sick.answered) > 5
        assert scorer.take_counts()["reward/remote_ejected_endpoints"] == 0.0


def test_ejection_lasts_longer_with_each_probe_that_finds_it_sick() -> None:
    health = Health(eject_after_failures=2, eject_seconds=10.0)
    assert not health.failed(now=0.0) and health.failed(now=1.0)
    assert health.is_ejected and health.probe_due_at == 11.0
    assert not health.failed(now=2.0) and health.probe_due_at == 11.0  # it was under way
    health.is_sick(now=11.0)
    assert health.probe_due_at == 31.0
    for _ in range(9):
        health.is_sick(now=0.0)
    assert health.probe_due_at == 60.0
    health.admit()
    assert not health.is_ejected
    assert health.failed(now=40.0) and health.probe_due_at == 50.0
    health.succeeded()  # of a request that was under way
    assert not health.is_ejected and not health.failed(now=0.0) and health.failed(now=0.0)


def test_an_idle_connection_that_the_server_has_closed_is_no_failure() -> None:
    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes] | None:
        return None if number % 2 else right_answer(request)

    with RecordingServer(behave) as server:  # closes after each first request, unasked
        scorer = scorer_of(server.url, batch_samples=1, concurrency=1)
        assert scorer(samples(4)) == [0.0, 1.0, 2.0, 3.0]
    assert scorer.take_counts()["reward/remote_failed_requests"] == 0.0


def test_the_start_check() -> None:
    dead = dead_url()
    with RecordingServer() as server:
        scorer = scorer_of(dead, server.url)
        scorer.check()
        assert scorer.take_counts()["reward/remote_ejected_endpoints"] == 1.0
    with pytest.raises(UserError, match=r"none is well .*Connection refused.*start the servers"):
        scorer_of(dead, timeout_seconds=0.2).check()


def test_the_programs_random_numbers_are_left_alone() -> None:
    import random

    import numpy as np

    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with RecordingServer(flapping(0.05)) as server:
        scorer_of(server.url, batch_samples=1, retries=9)(samples(5))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_samples_that_come_one_by_one_go_out_in_whole_requests() -> None:
    with RecordingServer() as server:
        scorer = scorer_of(server.url, batch_samples=2, concurrency=1)
        pending = scorer.begin()
        for sample in samples(3):
            pending.add(sample)
        wait_until(lambda: pending.num_scored == 2)  # the third waits for a fourth
        assert [len(r["samples"]) for r in server.requests] == [2]
        pending.add(replace(samples(1)[0], fields={"when": time.gmtime}))
        assert pending.num_scored == 3  # one that goes out to nobody
        pending.add(samples(5)[4])
        wait_until(lambda: pending.num_scored == 5)
        pending.add(samples(6)[5])
        pending.all_added()
        first, second, third, odd, fourth, last = pending.result()
    assert [first, second, third, fourth, last] == [0.0, 1.0, 2.0, 4.0, 5.0]
    assert isinstance(odd, TypeError) and pending.num_scored == 6
    assert [len(r["samples"]) for r in server.requests] == [2, 2, 1]
    assert scorer.take_counts()["reward/remote_requests"] == 3.0


def test_the_deadline_counts_from_the_last_sample() -> None:
    with RecordingServer(slow(0.5)) as server:
        scorer = scorer_of(server.url, batch_samples=1, concurrency=1, deadline_seconds=0.25)
        pending = scorer.begin()
        for sample in samples(2):
            pending.add(sample)
        wait_until(lambda: pending.num_scored == 2)  # twice 0.5 s, before the deadline begins
        pending.add(samples(3)[2])
        pending.all_added()
        *good, late = pending.result()
    assert good == [0.0, 1.0]
    assert "no score within reward.remote.deadline_seconds=0.25" in str(late) and late.unavailable


def test_scores_that_are_given_up_keep_no_server_busy() -> None:
    release = threading.Event()

    def behave(number: int, request: dict[str, Any]) -> tuple[int, bytes]:
        if number == 0:
            release.wait(10.0)
        return right_answer(request)

    with RecordingServer(behave) as server:
        scorer = scorer_of(server.url, batch_samples=1, concurrency=1)
        given_up = scorer.begin()
        for sample in samples(5):
            given_up.add(sample)
        wait_until(lambda: server.under_way == 1)
        given_up.cancel()
        assert scorer(samples(3, k=0.5)) == [0.5, 1.5, 2.5]
        release.set()
        wait_until(lambda: server.under_way == 0)
        assert len(server.requests) == 1 + 3 and given_up.num_scored == 0
        assert scorer.take_counts()["reward/remote_failed_requests"] == 0.0


def wait_until(happened: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20.0
    while not happened():
        assert time.monotonic() < ends, "it did not happen within 20 s"
        time.sleep(0.005)
