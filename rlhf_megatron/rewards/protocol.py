"""What a trainer and a reward server say to each other: JSON over HTTP. docs/rewards.md has it in
full."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rewards.contract import NoScoreError, ScoringInput, failure_reason, one_line

VERSION = 1
SCORE_PATH = "/score"
HEALTH_PATH = "/health"
MAX_BODY_BYTES = 256 * 1024 * 1024


class ProtocolError(ValueError):
    """A request or an answer that is not as it should be: what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """One request of a trainer."""

    request_id: str
    """The same for each try of the same samples."""
    samples: list[ScoringInput]


def sample_json(sample: ScoringInput) -> str:
    """Raises TypeError or ValueError where a field of the prompt row has no place in JSON."""
    found = {
        "prompt": sample.prompt,
        "response": sample.response,
        "prompt_id": sample.prompt_id,
        "sample_index": sample.sample_index,
        "fields": dict(sample.fields),
    }
    if sample.messages is not None:
        found["messages"] = [dict(message) for message in sample.messages]
    return json.dumps(found, allow_nan=False)


def encode_request(request_id: str, samples: Sequence[str]) -> bytes:
    """`samples`: of sample_json."""
    return (
        f'{{"version": {VERSION}, "request_id": {json.dumps(request_id)}, '
        f'"samples": [{", ".join(samples)}]}}'
    ).encode()


def decode_request(body: bytes) -> ScoreRequest:
    """Raises ProtocolError."""
    found = _object(body)
    if found.get("version") != VERSION:
        raise ProtocolError(f"version {found.get('version')!r}, this server speaks {VERSION}")
    request_id, samples = found.get("request_id"), found.get("samples")
    if not isinstance(request_id, str) or not request_id:
        raise ProtocolError("request_id must be a text")
    if not isinstance(samples, list):
        raise ProtocolError("samples must be a list")
    return ScoreRequest(
        request_id=request_id, samples=[_sample(i, each) for i, each in enumerate(samples)]
    )


def _sample(index: int, found: Any) -> ScoringInput:
    at = f"samples[{index}]"
    if not isinstance(found, dict):
        raise ProtocolError(f"{at} must be an object")
    for name, kind in (
        ("prompt", str),
        ("response", str),
        ("prompt_id", int),
        ("sample_index", int),
        ("fields", dict),
    ):
        if not isinstance(found.get(name), kind):
            raise ProtocolError(f"{at}.{name} must be {_JSON_NAMES[kind]}")
    messages = found.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise ProtocolError(f"{at}.messages must be a list")
    return ScoringInput(
        prompt=found["prompt"],
        response=found["response"],
        prompt_id=found["prompt_id"],
        sample_index=found["sample_index"],
        fields=found["fields"],
        messages=None if messages is None else tuple(messages),
    )


_JSON_NAMES: dict[type, str] = {str: "a text", int: "an integer", dict: "an object"}


def encode_answer(request_id: str, outcomes: Sequence[Any]) -> bytes:
    """`outcomes`: of a Scorer."""
    results = []
    for outcome in outcomes:
        reason = failure_reason(outcome)
        results.append({"score": float(outcome)} if reason is None else {"error": reason})
    return json.dumps({"request_id": request_id, "results": results}).encode()


def decode_answer(body: bytes, *, request_id: str, count: int, source: str) -> list[Any]:
    """Of each sample its score, or NoScoreError with `source`, the server's name, and the reason.

    Raises ProtocolError where the answer does not tell the score of each.
    """
    found = _object(body)
    if found.get("request_id") != request_id:
        shown = str(found.get("request_id"))[:40]
        raise ProtocolError(f"it answers request {shown!r}, this was {request_id!r}")
    results = found.get("results")
    if not isinstance(results, list):
        raise ProtocolError("results must be a list")
    if len(results) != count:
        raise ProtocolError(f"{len(results)} results for {count} samples")
    return [_outcome(i, each, source=source) for i, each in enumerate(results)]


def _outcome(index: int, found: Any, *, source: str) -> Any:
    if not isinstance(found, dict) or ("score" in found) == ("error" in found):
        raise ProtocolError(f"results[{index}] must be an object with either score or error")
    if "error" in found:
        return NoScoreError(f"{source}: {one_line(str(found['error']))}")
    reason = failure_reason(found["score"])
    return found["score"] if reason is None else NoScoreError(f"{source} {reason}")


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        shown = one_line(body[:80].decode(errors="replace"))
        raise ProtocolError(f"not JSON ({one_line(str(error))}): {shown!r}") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"must be a JSON object, not a {type(found).__name__}")
    return found
