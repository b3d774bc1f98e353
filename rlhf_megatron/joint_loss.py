"""The shared backbone: a critic that is a second head on the actor (critic.shared_backbone).

One forward pass gives log-probs and values, one backward pass the gradient of both losses, and the
actor's optimizer takes the step. There is no critic model, optimizer or checkpoint folder.
"""

from rlhf_megatron.engine.model_engine import LossResult


def joint_loss(policy: LossResult, *, value: LossResult, weight: float) -> LossResult:
    """policy + weight * value, of one micro-batch.

    Both are sums over the same tokens (or samples) with one aggregation, so they have one count,
    and the gradient is that of (mean policy loss) + weight * (mean value loss). The metrics are
    those of both, the value loss without its weight.
    """
    return LossResult(
        loss_sum=policy.loss_sum + weight * value.loss_sum,
        count=policy.count,
        sums=policy.sums | value.sums,
        maxima=policy.maxima | value.maxima,
    )
