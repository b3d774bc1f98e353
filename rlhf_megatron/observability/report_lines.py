"""The metrics that a report draws by step, and the words beside each."""

from dataclasses import dataclass

LEARNING, UPDATES, AGREEMENT, SPEED, EVALUATION = (
    "Learning",
    "Updates",
    "Trainer against engine",
    "Speed and memory",
    "Held-out evaluation",
)
SECTIONS = (LEARNING, EVALUATION, SPEED, UPDATES, AGREEMENT)
"""In the order of the page."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """What a chart of one or two metrics by step is made of."""

    section: str
    title: str
    caption: str
    unit: str
    keys: tuple[str, ...]
    """The first is drawn solid, the second dotted."""
    std: str = ""
    """Metric key of the standard deviation that makes the band."""
    tickformat: str = ""
    is_log: bool = False
    marks_events: bool = False
    only_if_varies: bool = False


TRAINING_LINES = (
    Lines(
        section=LEARNING,
        title="Reward",
        caption="mean of the step's responses; band: one standard deviation to either side",
        unit="reward",
        keys=("reward/mean",),
        std="reward/std",
        marks_events=True,
    ),
    Lines(
        section=LEARNING,
        title="KL to the reference",
        caption="nats per response, of the policy that sampled",
        unit="nats",
        keys=("kl/mean",),
    ),
    Lines(
        section=LEARNING,
        title="KL coefficient",
        caption="weight of the KL penalty (adaptive)",
        unit="beta",
        keys=("kl/coef",),
        only_if_varies=True,
    ),
    Lines(
        section=LEARNING,
        title="Response length",
        caption="tokens, mean of the step's responses",
        unit="tokens",
        keys=("response/length_mean",),
    ),
    Lines(
        section=LEARNING,
        title="Truncated responses",
        caption="share of responses cut at the length limit",
        unit="share",
        keys=("response/truncated_fraction",),
        tickformat=".1~%",
    ),
    Lines(
        section=LEARNING,
        title="Entropy",
        caption="nats per response token; a fall to 0 means that the policy has stopped exploring",
        unit="nats",
        keys=("ppo/entropy",),
    ),
    Lines(
        section=UPDATES,
        title="Policy loss",
        caption="mean over the step's updates of the actor",
        unit="loss",
        keys=("ppo/policy_loss",),
    ),
    Lines(
        section=UPDATES,
        title="Value loss",
        caption="mean over the step's updates of the critic",
        unit="loss",
        keys=("critic/value_loss",),
    ),
    Lines(
        section=UPDATES,
        title="Gradient norm, actor",
        caption="before clipping",
        unit="norm",
        keys=("grad_norm/actor",),
        marks_events=True,
    ),
    Lines(
        section=UPDATES,
        title="Gradient norm, critic",
        caption="before clipping",
        unit="norm",
        keys=("grad_norm/critic",),
        marks_events=True,
    ),
    Lines(
        section=UPDATES,
        title="Explained variance of the critic",
        caption="1 is a perfect prediction of the returns, 0 no better than their mean",
        unit="share",
        keys=("critic/explained_variance",),
    ),
    Lines(
        section=UPDATES,
        title="Approximate KL of the update",
        caption="nats per token, how far the step's updates moved the policy",
        unit="nats",
        keys=("ppo/approx_kl",),
    ),
    Lines(
        section=UPDATES,
        title="Clipped tokens",
        caption="share of tokens whose ratio left the clip range",
        unit="share",
        keys=("ppo/clip_fraction",),
        tickformat=".1~%",
    ),
    Lines(
        section=UPDATES,
        title="Probability ratio",
        caption="new over old policy; solid: mean, dotted: largest",
        unit="ratio",
        keys=("ppo/ratio_mean", "ppo/ratio_max"),
    ),
    Lines(
        section=UPDATES,
        title="Learning rate",
        caption="solid: actor, dotted: critic",
        unit="rate",
        keys=("lr/actor", "lr/critic"),
    ),
    Lines(
        section=AGREEMENT,
        title="Log-prob difference",
        caption="|trainer - engine|, nats per sampled token; solid: mean, dotted: largest",
        unit="nats",
        keys=("parity/logprob_abs_diff_mean", "parity/logprob_abs_diff_max"),
        is_log=True,
    ),
    Lines(
        section=AGREEMENT,
        title="Weight lag",
        caption="updates by which the sampling weights are behind; largest of the step",
        unit="steps",
        keys=("off_policy/weight_version_lag_max",),
        only_if_varies=True,
    ),
    Lines(
        section=SPEED,
        title="Model FLOPs utilisation",
        caption="of the training phases, as a share of the devices' peak",
        unit="MFU",
        keys=("train/mfu",),
        tickformat=".1~%",
    ),
    Lines(
        section=SPEED,
        title="Idle share",
        caption="of the step, in which a rank does none of its work; solid: mean over ranks, "
        "dotted: the rank that idles most",
        unit="share",
        keys=("time/idle_share", "time/idle_share_max"),
        tickformat=".1~%",
    ),
    Lines(
        section=SPEED,
        title="Fragmentation",
        caption="memory reserved but not allocated at the step's end, as a share; worst rank",
        unit="share",
        keys=("memory/fragmentation",),
        tickformat=".1~%",
        only_if_varies=True,
    ),
    Lines(
        section=SPEED,
        title="Resharding",
        caption="seconds per step to bring the new weights into the engines",
        unit="seconds",
        keys=("reshard/seconds",),
    ),
)

EVALUATION_LINES = (
    Lines(
        section=EVALUATION,
        title="Held-out reward",
        caption="mean on the held-out prompts; band: one standard deviation to either side",
        unit="reward",
        keys=("evaluation/reward_mean",),
        std="evaluation/reward_std",
    ),
    Lines(
        section=EVALUATION,
        title="Held-out response length",
        caption="tokens, mean on the held-out prompts",
        unit="tokens",
        keys=("evaluation/response_length_mean",),
    ),
)
