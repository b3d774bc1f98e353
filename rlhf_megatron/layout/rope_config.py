"""Reading and auditing the rotary embedding of a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CONTEXT = "original_max_position_embeddings"

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "yarn": ("factor", _CONTEXT),
}
"""Positive numbers that each supported scaling cannot do without."""

_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""Positive numbers, or null for transformers' default."""

_FLAGS: dict[str, tuple[str, ...]] = {"yarn": ("truncate",)}

_REFUSED = {
    "dynamic": "its base depends on the sequence length, and vLLM computes it in another way than"
    " transformers; within max_position_embeddings tokens transformers uses the unscaled"
    " frequencies, so a model that stays within them can drop the scaling",
    "longrope": "its factors depend on the sequence length",
}

_SPELLING = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, scaling or None, and what was wrong."""

    theta: float
    scaling: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Both spellings: transformers 5's `rope_parameters`, and `rope_theta` with `rope_scaling`."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        text = f"rope_scaling: {old!r} contradicts rope_parameters; keep one of the two"
        return Rope(0.0, problems=[text])
    key = "rope_parameters" if new else "rope_scaling"
    parameters = new or old or {}
    if not isinstance(parameters, Mapping):
        return Rope(0.0, problems=[f"{key}: {parameters!r} is not a mapping"])
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    if not _positive(theta):
        return Rope(0.0, problems=[f"rope_theta: {theta!r} must be a positive number"])
    problems = [
        f"partial_rotary_factor: {source['partial_rotary_factor']!r} is not supported; only 1.0 is"
        for source in (config, parameters)
        if source.get("partial_rotary_factor") not in (None, 1, 1.0)
    ]
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        reason = _REFUSED.get(str(kind), f"known: {', '.join(_NEEDED)}")
        problems.append(f"{key}: type {kind!r} is not supported: {reason}")
        return Rope(float(theta), problems=problems)
    problems += _audit(parameters, key=key, kind=kind)
    names = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()), *_FLAGS.get(kind, ()))
    found = {name: parameters[name] for name in names if parameters.get(name) is not None}
    scaling = {"rope_type": kind, **found} if kind != "default" else None
    return Rope(float(theta), scaling, problems)


def _audit(parameters: Mapping[str, Any], *, key: str, kind: str) -> list[str]:
    """Missing, strange and wrong parameters of a scaling."""
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    flags = _FLAGS.get(kind, ())
    problems = [f"{key}: {kind} needs {name}" for name in needed if name not in parameters]
    for name, value in parameters.items():
        if name in _SPELLING:
            continue
        if name in needed or (name in optional and value is not None):
            if not _positive(value):
                problems.append(f"{key}: {name} {value!r} must be a positive number")
        elif name in flags:
            if not isinstance(value, bool):
                problems.append(f"{key}: {name} {value!r} must be true or false")
        elif name not in optional and value is not None:
            problems.append(f"{key}: {name} {value!r} is not understood for {kind}")
    return problems


def _positive(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0
