"""Options of the reward."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.schema import choice, items, number, secret


@dataclass(kw_only=True)
class RemoteRewardConfig:
    """Reward servers. docs/rewards.md says what they are asked and answer."""

    endpoints: list[str] = items()
    """Their addresses, such as [http://scorer-1:8000, http://scorer-2:8000/math]; each is asked at
    ADDRESS/score and ADDRESS/health. Any of them may get any sample."""

    batch_samples: int = number(16, minimum=1)
    """Samples of one request, which goes out when so many responses of the rank have finished; the
    last one takes what is left. Default 16."""

    concurrency: int = number(4, minimum=1)
    """Requests that each rank has under way at one endpoint. Default 4."""

    timeout_seconds: float = number(60.0, minimum=0, exclusive=True)
    """How long an endpoint may be silent about a request before the try has failed. Default 60."""

    retries: int = number(4, minimum=0)
    """Further tries of a request that failed, on another endpoint where one is well. Default 4."""

    backoff_seconds: float = number(0.5, minimum=0)
    """Wait before the second try; it doubles with each further one, up to 30 s, less up to half of
    it at random. An answer's Retry-After is heeded where it is longer. Default 0.5."""

    hedge_seconds: float = number(20.0, minimum=0)
    """A request that has been under way for longer is given to a second endpoint that has nothing
    else to do; the first answer counts. 0: never. Default 20."""

    eject_after_failures: int = number(3, minimum=1)
    """Failures in a row after which an endpoint gets no more requests. Where all are in this state
    they are used all the same. Default 3."""

    eject_seconds: float = number(5.0, minimum=0, exclusive=True)
    """Then its /health is asked; if it is well it gets requests again, otherwise it is left alone
    for twice as long, up to a minute. Default 5."""

    deadline_seconds: float = number(600.0, minimum=0, exclusive=True)
    """A sample without a score so long after the last of a step's responses was handed over has
    failed. Must be below the limit of the phase (faults.phase_limits.reward). Default 600."""

    auth_token: str = secret(default="")
    """Sent as `Authorization: Bearer ...` with every request, where it is set."""


@dataclass(kw_only=True)
class RewardConfig:
    """Where a response's score comes from: a Python function, a model, or reward servers; exactly
    one of them."""

    function: str = ""
    """"path/to/file.py:name" or "module:name". Called as name(prompt=..., response=..., **fields)
    with the texts and the prompt row's other fields; returns a number."""

    model: str = ""
    """Directory of a transformers sequence-classification model with one label, read with its own
    tokenizer on prompt and response text."""

    remote: RemoteRewardConfig = items(RemoteRewardConfig)
    """Servers that score over HTTP, where reward.remote.endpoints names any."""

    model_batch_samples: int = number(16, minimum=1)
    """Responses the reward model scores at once. Default 16."""

    trust_remote_code: bool = False
    """Let transformers run Python code that the directory of reward.model brings with it. Default
    false: such a directory is refused."""

    workers: int = number(0, minimum=0)
    """Processes of each rank that call the function, one response at a time each, from when it has
    finished, while the rank goes on with the rollout, log-probs and values. They have no GPU. 0
    (default): the rank calls it itself, after the rollout."""

    on_error: str = choice("stop", "drop", "value")
    """What a reward that raises, returns NaN or infinity, takes longer than timeout_seconds, or
    whose worker or server fails does: stop (default) ends the run and names the sample; drop leaves
    the sample out of the step and counts it in reward/dropped; value gives it error_value.
    faults/reward_failures counts the last two. Where servers cannot be reached, stop saves the
    state first, and the run can be gone on with (exit code 3)."""

    error_value: float = number(0.0)
    """The score of such a sample under on_error=value. Default 0."""

    timeout_seconds: float = number(0.0, minimum=0)
    """How long the function may take for one response before it counts as failed. With workers the
    one that runs it is killed and replaced. Without, it is interrupted by an alarm signal, which
    code outside Python does not heed: then faults.phase_limits.reward ends the run. For functions
    alone. 0 (default): as long as it likes."""

    parallel: ParallelConfig = items(ParallelConfig)
    """Ranks that score. Only ranks and data_parallel_size apply: a reward model is held whole."""


def refused_reward(reward: RewardConfig, *, phase_limit_seconds: float, limit_key: str) -> list:
    """Problems of the section. `phase_limit_seconds` (0: none) of the reward phase comes from
    `limit_key`."""
    return [
        *_source(reward),
        *_function(reward),
        *_endpoints(reward.remote),
        *_times(reward, phase_limit_seconds=phase_limit_seconds, limit_key=limit_key),
    ]


def _source(reward: RewardConfig) -> Iterator[str]:
    given = {
        "reward.function": reward.function,
        "reward.model": reward.model,
        "reward.remote.endpoints": ", ".join(reward.remote.endpoints),
    }
    named = [f"{key}={value}" for key, value in given.items() if value]
    if len(named) > 1:
        yield f"{', '.join(named)}: exactly one of them gives the score; clear the other"
    if not named:
        yield (
            "reward.function=: neither it nor reward.model nor reward.remote.endpoints is set; "
            "give path/to/file.py:name, module:name, a model directory or servers' addresses"
        )


def _function(reward: RewardConfig) -> Iterator[str]:
    function = reward.function
    module, colon, name = function.rpartition(":")
    if function and not (colon and module and name.isidentifier()):
        yield (
            f"reward.function={function}: must name a file or module and a function; write "
            "path/to/file.py:name or module:name"
        )
    if reward.workers and not function:
        yield (
            f"reward.workers={reward.workers}: processes call reward.function, which is not set; "
            "set 0"
        )


def _endpoints(remote: RemoteRewardConfig) -> Iterator[str]:
    key = "reward.remote.endpoints"
    for endpoint in remote.endpoints:
        try:
            parts = urlsplit(endpoint)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number
            known = None
        if not known:
            yield f"{key}={endpoint}: not an address; write it like http://scorer-1:8000"
        elif parts.username is not None or parts.password is not None:
            shown = f"{parts.scheme}://...@{parts.hostname}"
            yield f"{key}={shown}: holds a password; put a token into reward.remote.auth_token"
        elif parts.query or parts.fragment:
            yield f"{key}={endpoint}: must end with its path; cut what follows ? or #"
    plain = [endpoint.rstrip("/") for endpoint in remote.endpoints]
    for endpoint in sorted({e for e in plain if plain.count(e) > 1}):
        yield f"{key}={endpoint}: is listed twice; list it once, and raise concurrency"
    if any(not " " < sign <= "~" for sign in remote.auth_token):
        yield "reward.remote.auth_token: must be printable ASCII without spaces; give it again"


def _times(reward: RewardConfig, *, phase_limit_seconds: float, limit_key: str) -> Iterator[str]:
    remote = reward.remote
    deadline = remote.deadline_seconds
    if not remote.endpoints:
        return
    if remote.timeout_seconds > deadline:
        yield (
            f"reward.remote.timeout_seconds={remote.timeout_seconds:g}: must be at most "
            f"reward.remote.deadline_seconds={deadline:g}, which ends the step's requests; lower it"
        )
    if 0 < phase_limit_seconds <= deadline:
        yield (
            f"reward.remote.deadline_seconds={deadline:g}: must be below the phase's limit, "
            f"{limit_key}={phase_limit_seconds:g}, which ends the run; lower it, or raise the limit"
        )
