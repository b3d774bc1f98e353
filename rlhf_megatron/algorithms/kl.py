"""Estimates of the KL divergence from sampled tokens, and the controller of its coefficient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.config import KlConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp(): exp(20) = 4.9e8 keeps sums and squares finite in
float32, and two policies that far apart on one token are no longer near each other in any sense.
Beyond the bound the gradient is zero."""

_MAXIMUM_RELATIVE_ERROR = 0.2


def kl_estimate(logprobs: Tensor, *, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) at tokens sampled from pi; all [R], in nats.

    With D = log pi - log pi_ref: k1 = D, k2 = D^2 / 2, k3 = exp(-D) - 1 + D. k1 and k3 are unbiased
    as values; as a loss on-policy, k2 has the gradient of the KL and k3 only near it.
    D is clamped to +-LOG_RATIO_BOUND inside k3. http://joschu.net/blog/kl-approx.html
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        # expm1 keeps the small values exact, which exp(-D) - 1 would round away.
        return torch.expm1(-bounded) + bounded
    raise AssertionError(f"unknown estimator {estimator}")


@dataclass
class KlController:
    """beta, fixed or steered towards a target KL.

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.

    `target` is the mean KL of a response in nats (a sum over its tokens); `horizon_samples` the
    number of responses over which beta reacts.
    """

    coefficient: float
    adaptive: bool
    target: float
    horizon_samples: int

    def update(self, kl: float, *, num_samples: int) -> None:
        """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon; no-op when fixed.

        More samples than the horizon count as one horizon, so that beta cannot turn negative.
        Raises ValueError on a KL that is not finite.
        """
        if not self.adaptive:
            return
        if not math.isfinite(kl):
            raise ValueError(f"the KL coefficient cannot follow a mean KL of {kl}")
        error = kl / self.target - 1
        error = min(max(error, -_MAXIMUM_RELATIVE_ERROR), _MAXIMUM_RELATIVE_ERROR)
        self.coefficient *= 1 + error * min(num_samples / self.horizon_samples, 1.0)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; the rest comes from the configuration."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the coefficient. Raises KeyError where it is missing."""
        self.coefficient = float(state["coefficient"])


def kl_controller(config: KlConfig) -> KlController:
    """The controller that the options ask for; with `place: off` its coefficient is 0."""
    return KlController(
        coefficient=0.0 if config.place == "off" else config.coefficient,
        adaptive=config.adaptive and config.place != "off",
        target=config.target,
        horizon_samples=config.horizon_samples,
    )
