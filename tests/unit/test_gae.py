"""GAE, token rewards and truncation against plain loops over Python lists."""

import random

import pytest
import torch

from rlhf_megatron.algorithms.gae import (
    bootstrap_values,
    generalized_advantage_estimation,
    truncated_loss_mask,
)
from rlhf_megatron.algorithms.ragged import last_valid_indices, response_sums, sample_of_token
from rlhf_megatron.algorithms.rewards import token_rewards
from rlhf_megatron.batch import from_sequences


def oracle_gae(rewards, values, bootstrap, mask, gamma, lam):
    """One response, straight from the definition: A_t = sum_l (gamma*lambda)^l delta_{t+l}."""
    steps = [t for t in range(len(rewards)) if mask[t] > 0]
    deltas = []
    for position, t in enumerate(steps):
        after = values[steps[position + 1]] if position + 1 < len(steps) else bootstrap
        deltas.append(rewards[t] + gamma * after - values[t])
    advantages = [0.0] * len(rewards)
    for position, t in enumerate(steps):
        advantages[t] = sum(
            (gamma * lam) ** power * delta for power, delta in enumerate(deltas[position:])
        )
    returns = [a + v if m > 0 else 0.0 for a, v, m in zip(advantages, values, mask, strict=True)]
    return advantages, returns


def random_case(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 5, 9, 17]) for _ in range(rng.randint(1, 8))]
    count = sum(lengths)
    mask = [float(rng.random() > 0.3) for _ in range(count)]
    return rng, lengths, mask, [rng.gauss(0, 1) for _ in range(count)]


def split(flat, lengths):
    start = 0
    for length in lengths:
        yield flat[start : start + length]
        start += length


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (1.0, 1.0), (0.99, 0.0)])
def test_gae_matches_the_definition(seed, gamma, lam):
    rng, lengths, mask, rewards = random_case(seed)
    values = [rng.gauss(0, 1) for _ in rewards]
    bootstrap = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in lengths]
    result = generalized_advantage_estimation(
        torch.tensor(rewards, dtype=torch.float64),
        values=torch.tensor(values, dtype=torch.float64),
        bootstrap_values=torch.tensor(bootstrap, dtype=torch.float64),
        response_lengths=torch.tensor(lengths),
        loss_mask=torch.tensor(mask),
        gamma=gamma,
        gae_lambda=lam,
    )
    advantages, returns = [], []
    parts = zip(*(split(x, lengths) for x in (rewards, values, mask)), bootstrap, strict=True)
    for r, v, m, b in parts:
        a, ret = oracle_gae(r, v, b, m, gamma, lam)
        advantages += a
        returns += ret
    torch.testing.assert_close(result.advantages.tolist(), advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.returns.tolist(), returns, rtol=1e-12, atol=1e-12)


def test_a_tool_token_changes_nothing_but_its_own_place():
    arguments = {"gamma": 0.9, "gae_lambda": 0.8, "bootstrap_values": torch.tensor([0.7])}
    without = generalized_advantage_estimation(
        torch.tensor([0.1, 0.2, 1.0]),
        values=torch.tensor([0.5, 0.4, 0.3]),
        response_lengths=torch.tensor([3]),
        loss_mask=torch.ones(3),
        **arguments,
    )
    # Two masked tokens between the second and the third, with values that would poison everything.
    with_tool = generalized_advantage_estimation(
        torch.tensor([0.1, 0.2, float("nan"), 5.0, 1.0]),
        values=torch.tensor([0.5, 0.4, float("nan"), float("inf"), 0.3]),
        response_lengths=torch.tensor([5]),
        loss_mask=torch.tensor([1.0, 1, 0, 0, 1]),
        **arguments,
    )
    keep = [0, 1, 4]
    assert torch.equal(with_tool.advantages[keep], without.advantages)
    assert torch.equal(with_tool.returns[keep], without.returns)
    assert with_tool.advantages[2:4].tolist() == [0, 0] == with_tool.returns[2:4].tolist()
    assert without.advantages.dtype == torch.float32


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_gae_without_tokens(lengths):
    result = generalized_advantage_estimation(
        torch.zeros(0),
        values=torch.zeros(0),
        bootstrap_values=torch.ones(len(lengths)),
        response_lengths=torch.tensor(lengths, dtype=torch.int64),
        loss_mask=torch.zeros(0),
        gamma=1.0,
        gae_lambda=0.95,
    )
    assert result.advantages.shape == result.returns.shape == (0,)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", ["bootstrap", "zero", "mask", "penalty"])
@pytest.mark.parametrize("with_reference", [True, False])
def test_token_rewards_match_a_plain_loop(seed, policy, with_reference):
    rng, lengths, mask, logprobs = random_case(seed)
    ref = [x + rng.gauss(0, 0.1) for x in logprobs]
    scores = [rng.gauss(0, 1) for _ in lengths]
    truncated = [rng.random() < 0.5 for _ in lengths]
    rewards = token_rewards(
        torch.tensor(scores, dtype=torch.float64),
        response_lengths=torch.tensor(lengths),
        loss_mask=torch.tensor(mask),
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        ref_logprobs=torch.tensor(ref, dtype=torch.float64) if with_reference else None,
        kl_coefficient=0.3,
        truncated=torch.tensor(truncated),
        policy=policy,
        truncation_penalty=2.5,
    )
    expected = []
    parts = zip(scores, truncated, *(split(x, lengths) for x in (mask, logprobs, ref)), strict=True)
    for score, cut, m, p, q in parts:
        row = [0.0] * len(m)
        for t in range(len(m)):
            if m[t] and with_reference:
                row[t] = -0.3 * (p[t] - q[t])
        for t in reversed(range(len(m))):
            if m[t]:
                row[t] += score - (2.5 if cut and policy == "penalty" else 0.0)
                break
        expected += row
    torch.testing.assert_close(rewards.tolist(), expected, rtol=1e-12, atol=1e-12)


def test_garbage_at_masked_tokens_does_not_reach_the_rewards():
    rewards = token_rewards(
        torch.tensor([2.0, 9.0]),
        response_lengths=torch.tensor([3, 1]),
        loss_mask=torch.tensor([1.0, 1, 0, 0]),
        logprobs=torch.tensor([-1.0, -1.0, float("nan"), float("-inf")]),
        ref_logprobs=torch.tensor([-1.0, -2.0, 0.0, float("-inf")]),
        kl_coefficient=0.5,
        truncated=torch.tensor([False, False]),
        policy="bootstrap",
        truncation_penalty=1.0,
    )
    assert rewards.tolist() == [0.0, 1.5, 0.0, 0.0]


def test_bootstrap_only_where_a_response_was_cut():
    last = torch.tensor([1.0, float("nan"), 3.0])
    truncated = torch.tensor([True, False, True])
    assert bootstrap_values(last, truncated=truncated, policy="bootstrap").tolist() == [1, 0, 3]
    for policy in ("zero", "mask", "penalty"):
        assert bootstrap_values(last, truncated=truncated, policy=policy).tolist() == [0, 0, 0]


def test_mask_policy_takes_truncated_responses_out_of_the_losses():
    arguments = {
        "truncated": torch.tensor([True, False, True, False]),
        "response_lengths": torch.tensor([2, 3, 0, 1]),
    }
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1])
    assert truncated_loss_mask(mask, policy="mask", **arguments).tolist() == [0, 0, 1, 0, 1, 1]
    for policy in ("bootstrap", "zero", "penalty"):
        assert torch.equal(truncated_loss_mask(mask, policy=policy, **arguments), mask)


def test_ragged_helpers():
    lengths = torch.tensor([2, 0, 3, 1])
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0])
    batch = from_sequences([[1]] * 4, responses=[[1, 2], [], [3, 4, 5], [6]])
    owners = sample_of_token(lengths, num_tokens=6)
    assert torch.equal(owners, batch.sample_of_response_token)
    assert last_valid_indices(lengths, loss_mask=mask).tolist() == [0, -1, 3, -1]
    values = torch.tensor([1.0, float("nan"), 2, 3, 50, 60])
    sums = response_sums(values, loss_mask=mask, response_lengths=lengths)
    assert sums.tolist() == [1, 0, 5, 0]
