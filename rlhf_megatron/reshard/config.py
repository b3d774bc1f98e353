"""Options of the weight sync from training to rollout layout."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, number


@dataclass(kw_only=True)
class ReshardConfig:
    """How the actor's weights travel into the engines."""

    bucket_mb: float = number(256.0, minimum=0, exclusive=True)
    """A sync's transfer buffers take at most twice this, in 10^6 bytes: two to send from and two to
    receive in, so that one travels while its neighbour is packed. A larger tensor is cut. Default
    256."""

    interval: int = number(1, minimum=1)
    """Steps from one weight sync to the next. 1 (default): the engines always sample from the
    actor's present weights. Above 1 they lag by up to interval - 1 steps, which
    ppo.importance_sampling corrects. Before an evaluation there is always a sync, since it measures
    the actor as it is."""

    verify: str = choice("first", "always", "never")
    """Compare fingerprints of every logical tensor on both sides after the first sync (default),
    after each, or never."""


@dataclass(kw_only=True)
class ParityConfig:
    """Agreement of trainer and rollout engine on the log-probs of the sampled tokens, in each step.
    The bounds hold for samples of the actor's present weights (reshard.interval)."""

    logprob_abs_diff_max: float = number(0.0, minimum=0)
    """Largest |trainer - engine| log-prob of a sampled token. 0 (default): 1e-3 in float32, and no
    bound in bf16, where a rare token may differ much (the mean is bounded)."""

    logprob_abs_diff_mean: float = number(0.0, minimum=0)
    """Largest mean of the same. 0 (default): 1e-4 in float32 and 0.05 in bf16."""

    action: str = choice("stop", "warn")
    """What a breach does: end the run with the likely causes (default), or only say so."""

    at_start: bool = True
    """Check before step 1, on a few prompts: greedy tokens are the same before and after the engine
    sleeps and wakes, and trainer and engine agree on the log-probs of sampled tokens. Default
    true."""
