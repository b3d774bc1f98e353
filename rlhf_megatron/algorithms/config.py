"""Options of the PPO algorithm (DESIGN.md, section 7)."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class KlConfig:
    """The penalty that keeps the policy near the reference."""

    place: str = choice("reward", "loss", "off")
    """reward (default): -coefficient * k1 in each token's reward. loss: coefficient * estimator in
    the policy loss. off: none, and no reference model is built."""

    estimator: str = choice("k1", "k2", "k3")
    """k1 = log pi - log pi_ref (reward only); k2 = k1^2 / 2 and k3 = exp(-k1) - 1 + k1 (loss only).
    http://joschu.net/blog/kl-approx.html"""

    coefficient: float = number(0.05, minimum=0)
    """Start value of beta. Default 0.05."""

    adaptive: bool = False
    """Adapt beta to keep the KL near `target`: beta *= 1 + clip(KL/target - 1, -0.2, 0.2) *
    samples / horizon (Ziegler et al. 2019, section 2.2). Default false."""

    target: float = number(6.0, minimum=0, exclusive=True)
    """Target of the mean KL per response, in nats, for `adaptive`. Default 6."""

    horizon_samples: int = number(10000, minimum=1)
    """Samples over which the adaptive coefficient reacts. Default 10000."""


@dataclass(kw_only=True)
class ImportanceSamplingConfig:
    """Correction for tokens that the engine sampled from another policy than the trainer's: with
    its own kernels and precision, or with older weights (reshard.interval)."""

    cap: float = number(0.0, minimum=0)
    """Multiply the policy loss of each token by min(exp(old_logprobs - rollout_logprobs), cap); 2
    is usual. 0 (default) does not; off_policy/is_weight_* are reported all the same. Between 0 and
    1 is refused. arXiv:1802.01561, section 4.1, and Yao et al. 2025."""


@dataclass(kw_only=True)
class PpoConfig:
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    epochs: int = number(1, minimum=1)
    """Passes over each step's samples. Default 1."""

    mini_batch_samples: int = number(64, minimum=1)
    """Samples (responses) per optimizer step, over all data-parallel ranks. Must divide
    prompts_per_step x responses_per_prompt. Default 64."""

    micro_batch_tokens: int = number(16384, minimum=1)
    """Most packed tokens, prompts included, in one forward and backward pass of a data-parallel
    rank. As few micro-batches as these allow get about equally many. A longer sequence makes a
    micro-batch of its own. Changes memory and speed, never the gradient. Default 16384."""

    micro_batch_samples: int = number(0, minimum=0)
    """Largest number of sequences in a micro-batch; 0 (default) sets no such limit."""

    gamma: float = number(1.0, minimum=0, maximum=1)
    """Discount per token. Default 1."""

    gae_lambda: float = number(0.95, minimum=0, maximum=1)
    """Lambda of generalised advantage estimation (arXiv:1506.02438). Default 0.95."""

    whiten_advantages: bool = True
    """Shift and scale the advantages of the whole step to mean 0, deviation 1, after the returns
    are taken. Default true."""

    clip_ratio_low: float = number(0.2, minimum=0, maximum=1)
    """Lower clip of the probability ratio: 1 - clip_ratio_low. Default 0.2."""

    clip_ratio_high: float = number(0.2, minimum=0)
    """Upper clip: 1 + clip_ratio_high. Default 0.2."""

    dual_clip: float = number(0.0, minimum=0)
    """Bound of the loss for negative advantages, as a multiple c > 1 of the advantage
    (arXiv:1912.09729, equation 5). 0 (default) is off; between 0 and 1 is refused."""

    aggregation: str = choice("token_mean", "sequence_mean", "sequence_sum_norm")
    """token_mean (default): sum over tokens / response tokens of the mini-batch. sequence_mean:
    mean over tokens of each response, then over responses. sequence_sum_norm: sum over tokens /
    max_response_tokens, then mean over responses (arXiv:2503.20783)."""

    value_clip: float = number(0.2, minimum=0)
    """Clip range of the value around its old one in the value loss; 0 switches it off. Default
    0.2."""

    entropy_coefficient: float = number(0.0, minimum=0)
    """Weight of the entropy bonus in the policy loss. Default 0."""

    truncated: str = choice("bootstrap", "zero", "mask", "penalty")
    """What ends the return of a response cut at max_response_tokens. bootstrap (default): the
    critic's value at its last token. zero: 0, as after EOS. mask: the response leaves the losses.
    penalty: as zero, with truncation_penalty subtracted from its reward."""

    truncation_penalty: float = number(1.0, minimum=0)
    """Subtracted from the reward of a truncated response under truncated=penalty. Default 1."""

    critic_warmup_steps: int = number(0, minimum=0)
    """First steps in which only the critic is updated. Default 0."""

    target_kl: float = number(0.0, minimum=0)
    """Stop a step's remaining actor updates once a mini-batch's approx KL exceeds this; 0 (default)
    never stops."""

    reward_clip: float = number(0.0, minimum=0)
    """Clip scores to [-reward_clip, reward_clip] before use; 0 (default) does not. reward/mean
    shows scores before the clip."""

    importance_sampling: ImportanceSamplingConfig = items(ImportanceSamplingConfig)
    """Truncated importance sampling."""

    kl: KlConfig = items(KlConfig)
    """The KL penalty."""
