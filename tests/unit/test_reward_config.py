"""Rules of the reward section."""

from typing import Any

import pytest

from rlhf_megatron.rewards.config import RemoteRewardConfig, RewardConfig, refused_reward


def problems_of(
    *, limit: float = 1800.0, remote: dict[str, Any] | None = None, **keys: Any
) -> list:
    config = RewardConfig(remote=RemoteRewardConfig(**(remote or {})), **keys)
    return refused_reward(config, phase_limit_seconds=limit, limit_key="faults.phase_limit_seconds")


def test_good_ones() -> None:
    assert problems_of(function="f.py:score", workers=2) == []
    assert problems_of(model="rm") == []
    endpoints = ["http://a:8000", "https://b/deep/path/", "http://[::1]:8000"]
    assert problems_of(remote={"endpoints": endpoints, "auth_token": "abc"}) == []
    assert problems_of(limit=0.0, remote={"endpoints": ["http://a"], "deadline_seconds": 1e6}) == []


@pytest.mark.parametrize(
    ("keys", "phrase"),
    [
        ({}, "reward.function=: neither it nor reward.model nor reward.remote.endpoints is set"),
        (
            {"function": "f.py:s", "remote": {"endpoints": ["http://a"]}},
            "reward.function=f.py:s, reward.remote.endpoints=http://a: exactly one of them",
        ),
        ({"function": "f.py"}, "reward.function=f.py: must name a file or module and a function"),
        ({"model": "rm", "workers": 2}, "reward.workers=2: processes call reward.function"),
        ({"remote": {"endpoints": ["a:8000"]}}, "endpoints=a:8000: not an address; write it like"),
        ({"remote": {"endpoints": ["http://"]}}, "endpoints=http://: not an address"),
        ({"remote": {"endpoints": ["http://a:x"]}}, "endpoints=http://a:x: not an address"),
        ({"remote": {"endpoints": ["http://a/?q=1"]}}, "cut what follows ? or #"),
        (
            {"remote": {"endpoints": ["http://a", "http://a/"]}},
            "endpoints=http://a: is listed twice",
        ),
        (
            {"remote": {"endpoints": ["http://a"], "auth_token": "ä b"}},
            "reward.remote.auth_token: must be printable ASCII without spaces",
        ),
        (
            {"remote": {"endpoints": ["http://a"], "timeout_seconds": 700.0}},
            "timeout_seconds=700: must be at most reward.remote.deadline_seconds=600",
        ),
        (
            {"limit": 500.0, "remote": {"endpoints": ["http://a"]}},
            "deadline_seconds=600: must be below the phase's limit, faults.phase_limit_seconds=500",
        ),
    ],
)
def test_bad_ones(keys: dict[str, Any], phrase: str) -> None:
    (problem,) = problems_of(**keys)
    assert phrase in problem


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    (problem,) = problems_of(remote={"endpoints": ["http://me:hunter2@a:80"]})
    assert "put a token into reward.remote.auth_token" in problem and "hunter2" not in problem
