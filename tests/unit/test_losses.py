"""The PPO losses against plain per-token loops, finite differences, and any split of the batch."""

import math
import random
from dataclasses import replace

import pytest
import torch

from rlhf_megatron.algorithms.config import ImportanceSamplingConfig, KlConfig, PpoConfig
from rlhf_megatron.algorithms.losses import explained_variance, policy_loss, value_loss
from rlhf_megatron.algorithms.metric_sums import MetricSums

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum_norm"]
MAX_RESPONSE_TOKENS = 13
KL_COEFFICIENT = 0.3
OPTIONS = {
    "plain": PpoConfig(),
    "asymmetric": PpoConfig(clip_ratio_low=0.1, clip_ratio_high=0.4, entropy_coefficient=0.02),
    "dual_clip": PpoConfig(dual_clip=1.5),
    "k2": PpoConfig(kl=KlConfig(place="loss", estimator="k2"), entropy_coefficient=0.01),
    "k3": PpoConfig(kl=KlConfig(place="loss", estimator="k3"), dual_clip=2.0),
    "importance": PpoConfig(
        importance_sampling=ImportanceSamplingConfig(cap=2.0),
        kl=KlConfig(place="loss", estimator="k2"),
        entropy_coefficient=0.02,
        dual_clip=1.5,
    ),
}


class Case:
    """Random ragged inputs in float64, with empty and fully masked responses."""

    def __init__(self, seed, lengths=(4, 0, 1, 7, 3, 5)):
        rng = random.Random(seed)
        self.lengths = list(lengths)
        n = sum(self.lengths)
        self.old = [-rng.random() * 3 for _ in range(n)]
        self.new = [x + rng.gauss(0, 0.5) for x in self.old]
        self.ref = [x + rng.gauss(0, 0.5) for x in self.old]
        self.advantages = [rng.gauss(0, 1) for _ in range(n)]
        self.entropy = [rng.random() for _ in range(n)]
        self.mask = [float(rng.random() > 0.25) for _ in range(n)]
        self.mask[:4] = [0.0] * min(4, n)  # the first response has no valid token
        self.values = [rng.gauss(0, 1) for _ in range(n)]
        self.old_values = [x + rng.gauss(0, 0.3) for x in self.values]
        self.returns = [rng.gauss(0, 1) for _ in range(n)]
        self.weights = [min(math.exp(rng.gauss(0, 1)), 2.0) for _ in range(n)]

    def samples(self):
        start = 0
        for length in self.lengths:
            yield [t for t in range(start, start + length)]
            start += length

    def tensor(self, name, samples=None):
        rows = list(self.samples())
        chosen = [t for s in (range(len(rows)) if samples is None else samples) for t in rows[s]]
        values = getattr(self, name)
        return torch.tensor([values[t] for t in chosen], dtype=torch.float64)

    def response_lengths(self, samples=None):
        chosen = range(len(self.lengths)) if samples is None else samples
        return torch.tensor([self.lengths[s] for s in chosen], dtype=torch.int64)

    def policy(self, config, samples=None, **replaced):
        inputs = {
            "logprobs": self.tensor("new", samples),
            "old_logprobs": self.tensor("old", samples),
            "advantages": self.tensor("advantages", samples),
            "loss_mask": self.tensor("mask", samples),
            "response_lengths": self.response_lengths(samples),
            "entropy": self.tensor("entropy", samples),
            "ref_logprobs": self.tensor("ref", samples) if config.kl.place == "loss" else None,
            "importance_weights": (
                self.tensor("weights", samples) if config.importance_sampling.cap else None
            ),
        } | replaced
        return policy_loss(
            inputs.pop("logprobs"),
            **inputs,
            config=config,
            kl_coefficient=KL_COEFFICIENT,
            max_response_tokens=MAX_RESPONSE_TOKENS,
        )

    def value(self, config, samples=None, **replaced):
        inputs = {
            "values": self.tensor("values", samples),
            "old_values": self.tensor("old_values", samples),
            "returns": self.tensor("returns", samples),
            "loss_mask": self.tensor("mask", samples),
            "response_lengths": self.response_lengths(samples),
        } | replaced
        return value_loss(
            inputs.pop("values"),
            **inputs,
            config=config,
            max_response_tokens=MAX_RESPONSE_TOKENS,
        )


def oracle_aggregate(case, per_token, aggregation):
    """(sum, count) in plain Python; per_token maps a token's position to its loss."""
    valid = [[t for t in rows if case.mask[t]] for rows in case.samples()]
    kept = [rows for rows in valid if rows]
    if aggregation == "token_mean":
        return sum(per_token(t) for rows in kept for t in rows), sum(map(len, kept))
    if aggregation == "sequence_mean":
        return sum(sum(map(per_token, rows)) / len(rows) for rows in kept), len(kept)
    total = sum(per_token(t) for rows in kept for t in rows)
    return total / MAX_RESPONSE_TOKENS, len(kept)


def oracle_surrogate(case, config, t):
    ratio = math.exp(case.new[t] - case.old[t])
    advantage = case.advantages[t]
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    clipped = min(max(ratio, low), high)
    objective = min(ratio * advantage, clipped * advantage)
    if config.dual_clip and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    return -objective * (case.weights[t] if config.importance_sampling.cap else 1.0)


def oracle_policy(case, config, t):
    loss = oracle_surrogate(case, config, t)
    loss -= config.entropy_coefficient * case.entropy[t]
    if config.kl.place == "loss":
        d = case.new[t] - case.ref[t]
        kl = d * d / 2 if config.kl.estimator == "k2" else math.exp(-d) - 1 + d
        loss += KL_COEFFICIENT * kl
    return loss


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_policy_loss_matches_a_plain_loop(aggregation, options, seed):
    case, config = Case(seed), replace(OPTIONS[options], aggregation=aggregation)
    loss = case.policy(config)
    total, count = oracle_aggregate(case, lambda t: oracle_policy(case, config, t), aggregation)
    assert float(loss.loss_sum) == pytest.approx(total, rel=1e-12)
    assert int(loss.count) == count and loss.count.dtype == torch.int64
    surrogate, _ = oracle_aggregate(case, lambda t: oracle_surrogate(case, config, t), aggregation)
    assert loss.metrics.means()["ppo/policy_loss"] == pytest.approx(surrogate / count, rel=1e-12)


def test_policy_metrics_match_a_plain_loop():
    case, config = Case(3), PpoConfig(clip_ratio_low=0.1, clip_ratio_high=0.3)
    means = case.policy(config).metrics.means()
    valid = [t for t, m in enumerate(case.mask) if m]
    logs = {t: case.new[t] - case.old[t] for t in valid}
    clipped = [
        t
        for t in valid
        if (case.advantages[t] > 0 and math.exp(logs[t]) > 1.3)
        or (case.advantages[t] < 0 and math.exp(logs[t]) < 0.9)
    ]
    assert 0 < len(clipped) < len(valid)
    expected = {
        "ppo/approx_kl": sum(math.exp(x) - 1 - x for x in logs.values()) / len(valid),
        "ppo/approx_kl_k1": -sum(logs.values()) / len(valid),
        "ppo/ratio_mean": sum(math.exp(x) for x in logs.values()) / len(valid),
        "ppo/ratio_max": max(math.exp(x) for x in logs.values()),
        "ppo/clip_fraction": len(clipped) / len(valid),
        "ppo/entropy": sum(case.entropy[t] for t in valid) / len(valid),
    }
    assert {name: means[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_unchanged_policy_has_ratio_one_and_no_kl():
    case = Case(0)
    loss = case.policy(PpoConfig(), logprobs=case.tensor("old"))
    means = loss.metrics.means()
    assert means["ppo/ratio_mean"] == means["ppo/ratio_max"] == 1.0
    assert means["ppo/approx_kl"] == means["ppo/clip_fraction"] == 0.0
    valid = [a for a, m in zip(case.advantages, case.mask, strict=True) if m]
    assert float(loss.loss_sum) == pytest.approx(-sum(valid), rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("value_clip", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_value_loss_matches_a_plain_loop(aggregation, value_clip, seed):
    case, config = Case(seed), PpoConfig(aggregation=aggregation, value_clip=value_clip)
    loss = case.value(config)

    def per_token(t):
        v, old, target = case.values[t], case.old_values[t], case.returns[t]
        if not value_clip:
            return 0.5 * (v - target) ** 2
        near = min(max(v, old - value_clip), old + value_clip)
        return 0.5 * max((v - target) ** 2, (near - target) ** 2)

    total, count = oracle_aggregate(case, per_token, aggregation)
    assert float(loss.loss_sum) == pytest.approx(total, rel=1e-12)
    assert int(loss.count) == count
    means = loss.metrics.means()
    assert means["critic/value_loss"] == pytest.approx(total / count, rel=1e-12)
    larger = [
        t
        for t, m in enumerate(case.mask)
        if m and per_token(t) > 0.5 * (case.values[t] - case.returns[t]) ** 2
    ]
    assert means["critic/value_clip_fraction"] == pytest.approx(len(larger) / sum(case.mask))
    assert larger or not value_clip or seed == 3  # the option bites in all cases but one


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_policy_gradient_matches_finite_differences(aggregation, options):
    case = Case(7)
    config = replace(OPTIONS[options], aggregation=aggregation, entropy_coefficient=0.02)

    def loss(logprobs, entropy):
        return case.policy(config, logprobs=logprobs, entropy=entropy).loss_sum

    inputs = [case.tensor(name).requires_grad_() for name in ("new", "entropy")]
    check_gradients(loss, inputs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_value_gradient_matches_finite_differences(aggregation, value_clip):
    case, config = Case(8), PpoConfig(aggregation=aggregation, value_clip=value_clip)
    values = case.tensor("values").requires_grad_()
    check_gradients(lambda v: case.value(config, values=v).loss_sum, [values])


def check_gradients(function, inputs, step=1e-6):
    gradients = torch.autograd.grad(function(*inputs), inputs)
    assert any(bool(gradient.abs().max() > 0.01) for gradient in gradients)
    for which, gradient in enumerate(gradients):
        for position in range(len(gradient)):
            ends = []
            for sign in (1, -1):
                moved = [x.detach().clone() for x in inputs]
                moved[which][position] += sign * step
                ends.append(float(function(*moved)))
            numeric = (ends[0] - ends[1]) / (2 * step)
            assert float(gradient[position]) == pytest.approx(numeric, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "split", [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3], [4, 5]], [[5, 1], [], [4, 0, 3, 2]]]
)
def test_any_split_gives_the_same_loss_gradient_and_metrics(aggregation, options, split):
    case, config = Case(5), replace(OPTIONS[options], aggregation=aggregation)

    def whole_and_parts(run, name):
        inputs = case.tensor(name).requires_grad_()
        whole = run(None, inputs)
        rows = list(case.samples())
        parts = [run(s, inputs[[t for i in s for t in rows[i]]]) for s in split]
        merged = MetricSums()
        for part in parts:
            merged.merge(part.metrics)
        loss = sum(part.loss_sum for part in parts) / sum(part.count for part in parts)
        expected = whole.loss_sum / whole.count
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, inputs)[0],
            torch.autograd.grad(expected, inputs)[0],
        )
        assert merged.means() == pytest.approx(whole.metrics.means(), rel=1e-12)

    whole_and_parts(lambda s, x: case.policy(config, s, logprobs=x), "new")
    whole_and_parts(lambda s, x: case.value(config, s, values=x), "values")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [(), (0, 0), (2, 2)])
def test_a_micro_batch_without_valid_tokens_is_zero_and_differentiable(aggregation, lengths):
    case, config = Case(1, lengths), replace(OPTIONS["k3"], aggregation=aggregation)
    logprobs = case.tensor("new").requires_grad_()
    loss = case.policy(config, logprobs=logprobs)
    assert float(loss.loss_sum.detach()) == 0 and int(loss.count) == 0
    loss.loss_sum.backward()
    assert logprobs.grad is not None and not logprobs.grad.any()
    values = case.tensor("values").requires_grad_()
    critic = case.value(config, values=values)
    critic.loss_sum.backward()
    assert float(critic.loss_sum.detach()) == 0 and not values.grad.any()
    assert set(loss.metrics.means().values()) == {0.0}
    full = Case(2).policy(config).metrics
    assert full.sums.keys() == loss.metrics.sums.keys()
    assert full.maxima.keys() == loss.metrics.maxima.keys()


def test_importance_weights_of_one_change_nothing():
    case, config = Case(4), OPTIONS["importance"]
    ones = torch.ones(len(case.weights), dtype=torch.float64)
    same = case.policy(config, importance_weights=ones)
    assert torch.equal(same.loss_sum, case.policy(config, importance_weights=None).loss_sum)
    assert not torch.equal(same.loss_sum, case.policy(config).loss_sum)


def test_garbage_at_masked_tokens_reaches_neither_loss_nor_gradient():
    case, config = Case(2), OPTIONS["importance"]
    poison = case.tensor("mask") == 0
    clean = case.policy(config)
    poisoned = {}
    for argument, name in {
        "logprobs": "new",
        "old_logprobs": "old",
        "ref_logprobs": "ref",
        "advantages": "advantages",
        "entropy": "entropy",
        "importance_weights": "weights",
    }.items():
        poisoned[argument] = case.tensor(name).masked_fill(poison, float("nan"))
    poisoned["logprobs"].requires_grad_()
    loss = case.policy(config, **poisoned)
    assert torch.equal(loss.loss_sum.detach(), clean.loss_sum)
    loss.loss_sum.backward()
    assert poisoned["logprobs"].grad.isfinite().all()
    assert not poisoned["logprobs"].grad[poison].any()
    values = case.tensor("values").masked_fill(poison, float("inf")).requires_grad_()
    critic = case.value(config, values=values)
    assert torch.equal(critic.loss_sum.detach(), case.value(config).loss_sum)
    critic.loss_sum.backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_far_apart_policies_stay_finite_in_float32(advantage, distance):
    logprobs = torch.tensor([distance, -1.0], requires_grad=True)
    loss = policy_loss(
        logprobs,
        old_logprobs=torch.tensor([0.0, -1.0]),
        advantages=torch.full((2,), advantage),
        loss_mask=torch.ones(2),
        response_lengths=torch.tensor([2]),
        entropy=torch.zeros(2),
        ref_logprobs=torch.zeros(2),
        config=OPTIONS["k3"],
        kl_coefficient=0.1,
        max_response_tokens=2,
    )
    loss.loss_sum.backward()
    assert loss.loss_sum.dtype == torch.float32
    assert torch.isfinite(loss.loss_sum) and logprobs.grad.isfinite().all()


def test_a_nan_at_a_valid_token_is_not_hidden():
    case = Case(2)
    logprobs = case.tensor("new")
    logprobs[case.mask.index(1.0)] = float("nan")
    assert case.policy(PpoConfig(), logprobs=logprobs).loss_sum.isnan()


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    mask = torch.tensor([1.0, 1, 1, 0])
    assert explained_variance(returns, returns=returns, mask=mask) == 1.0
    constant = torch.full((4,), 7.0)
    assert explained_variance(constant, returns=returns, mask=mask) == 0.0
    assert explained_variance(-returns, returns=returns, mask=mask) == pytest.approx(-3.0)
    assert explained_variance(returns, returns=constant, mask=mask) == 0.0
    assert explained_variance(returns, returns=returns, mask=torch.zeros(4)) == 0.0
    assert explained_variance(torch.zeros(0), returns=torch.zeros(0), mask=torch.zeros(0)) == 0.0


def test_metric_sums_add_up_over_parts():
    first, second = (Case(seed).policy(PpoConfig()).metrics for seed in (1, 2))
    merged = MetricSums(dict(first.sums), dict(first.maxima))
    merged.merge(second)
    name = "ppo/entropy"
    total, count = (first.sums[name] + second.sums[name]).tolist()
    assert merged.means()[name] == pytest.approx(total / count)
    assert merged.means()["ppo/ratio_max"] == max(
        float(part.maxima["ppo/ratio_max"]) for part in (first, second)
    )
    assert not any(tensor.requires_grad for tensor in merged.sums.values())
