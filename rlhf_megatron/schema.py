"""Field declarations with the bounds that the loader checks.

Each part's options are a dataclass in the `config.py` of the room that uses it. A field carries its
allowed values or bounds as metadata, so that the loader can check every key and report all problems
at once; the docstring under a field states meaning, unit, default and what happens at the edge.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any

CHOICES = "choices"
MINIMUM = "minimum"
MAXIMUM = "maximum"
EXCLUSIVE = "exclusive"
SECRET = "secret"


def choice(default: str, *others: str) -> Any:
    """A string field that takes `default` or one of `others`."""
    return field(default=default, metadata={CHOICES: (default, *others)})


def number(
    default: float | int | None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
) -> Any:
    """A numeric field within [minimum, maximum], or above `minimum` where `exclusive` is set."""
    return field(
        default=default,
        metadata={MINIMUM: minimum, MAXIMUM: maximum, EXCLUSIVE: exclusive},
    )


def secret(default: str = "") -> Any:
    """A text field, such as an access token, whose value is never printed or saved: messages and
    files show *** or the environment variable that it came from (rlhf_megatron/secret_values.py).
    """
    return field(default=default, repr=False, metadata={SECRET: True})


def items(factory: Callable[[], Any] = list) -> Any:
    """A list, mapping or nested options field with its own default for each instance."""
    return field(default_factory=factory)
