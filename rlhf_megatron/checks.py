"""Invariants that hold before training changes anything, and the parity of trainer and engine."""

import logging
import math

import torch
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.model_engine import StepResult
from rlhf_megatron.reshard.config import ParityConfig

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
KL_TOLERANCE = {"fp32": 1e-8, "bf16": 1e-3}
REFERENCE_TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}
"""Of the mean difference: in bf16 two layouts may round a rare token far apart."""
PARITY_MAX = {"fp32": 1e-3, "bf16": math.inf}
PARITY_MEAN = {"fp32": 1e-4, "bf16": 0.05}


class InvariantError(RuntimeError):
    """Something that must hold by construction does not: the program's fault, not the user's."""


def check_first_update(result: StepResult, *, precision: str) -> None:
    """In the first mini-batch the policy is the one that gave old_logprobs: ratio 1, KL 0.

    Raises InvariantError.
    """
    ratio, kl = result.metrics["ppo/ratio_mean"], result.metrics["ppo/approx_kl"]
    if ratio == kl == 0:  # a mean over no tokens (ppo.truncated=mask): a ratio itself is above 0
        return
    holds = abs(ratio - 1) <= RATIO_TOLERANCE[precision] and abs(kl) <= KL_TOLERANCE[precision]
    if not holds:  # so that NaN is a breach
        raise InvariantError(
            f"first mini-batch: mean ratio {ratio:.7f} and approximate KL {kl:.3g}, must be 1 and "
            "0: the update computes other log-probs than the log_prob phase did (dropout, another "
            "packing, another temperature, or weights that moved in between)"
        )


def check_reference(batch: RaggedBatch, *, precision: str) -> None:
    """Before any update the actor is the reference. Raises InvariantError."""
    response = batch.response
    difference = (response["old_logprobs"] - response["ref_logprobs"]).abs()
    mean = float(difference.double().mean()) if len(difference) else 0.0
    if not mean <= REFERENCE_TOLERANCE[precision]:  # NaN is a breach
        raise InvariantError(
            f"before any update actor and reference log-probs differ by {mean:.3g} on average, "
            f"must be within {REFERENCE_TOLERANCE[precision]}: their weights, layouts or "
            "precisions disagree"
        )


def check_parity(
    batch: RaggedBatch, *, config: ParityConfig, precision: str, version: int
) -> dict[str, float]:
    """Compare the trainer's and the engine's log-probs of the sampled tokens; the metrics of it.

    The bounds hold for the samples of the actor's present weights, `version`: older ones come from
    another policy by design. Raises InvariantError on a breach under action "stop"; logs a warning
    under "warn".
    """
    difference = (batch.response["old_logprobs"] - batch.response["rollout_logprobs"]).abs()
    present = batch.sample["weight_versions"] == version
    _check_bounds(
        difference[present[batch.sample_of_response_token]], config=config, precision=precision
    )
    return {
        "parity/logprob_abs_diff_mean": _mean(difference),
        "parity/logprob_abs_diff_max": _largest(difference),
    }


def _check_bounds(difference: Tensor, *, config: ParityConfig, precision: str) -> None:
    mean, worst = _mean(difference), _largest(difference)
    bound_max = config.logprob_abs_diff_max or PARITY_MAX[precision]
    bound_mean = config.logprob_abs_diff_mean or PARITY_MEAN[precision]
    if not (worst <= bound_max and mean <= bound_mean):  # NaN is a breach
        stop_or_warn(
            f"trainer and rollout engine disagree: |log-prob difference| max {worst:.3g} (bound "
            f"{bound_max}), mean {mean:.3g} (bound {bound_mean}). Usual causes: weights not synced "
            "or synced into the wrong place (reshard.verify=always tells), a cache kept across the "
            "sync, top-p/top-k or untempered log-probs, a rope or epsilon the two read "
            "differently, a quantised engine (raise parity.logprob_abs_diff_mean for it)",
            config=config,
        )


def stop_or_warn(message: str, *, config: ParityConfig) -> None:
    """Raises InvariantError under action "stop"; logs a warning under "warn"."""
    if config.action == "stop":
        raise InvariantError(message)
    logger.warning(message)


def check_finite(metrics: dict[str, float], *, names: tuple[str, ...]) -> None:
    """Raises RuntimeError naming losses and gradient norms that are NaN or infinite."""
    wrong = [
        f"{name}={metrics[name]}"
        for name in names
        if name in metrics and not torch.isfinite(torch.tensor(metrics[name]))
    ]
    if wrong:
        raise RuntimeError(
            f"not finite: {', '.join(wrong)}; the weights of this step are spoilt. Look at the "
            "step's rewards and lengths, then lower the learning rate or the gradient clip"
        )


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0
