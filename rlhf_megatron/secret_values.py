"""Values that are never printed or saved: those of `schema.secret` fields, and whatever comes from
an environment variable whose name says so.

They are known by value, so that they are found wherever they end up: in a message, a log line, a
reference from another key, or within a longer text such as a URL.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "***"
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
"""A variable with one of them anywhere in its name holds a secret."""

SHORTEST_WITHIN_TEXT = 4
"""Characters. A shorter secret is hidden only where it is the whole text: "a" is in every line."""

_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")
_COMPUTED_NAME = re.compile(r"\$\{\s*oc\.env\s*:\s*\$")


@dataclass(frozen=True)
class Secrets:
    """Secret values, each with what is shown in its place."""

    shown: Mapping[str, str] = field(default_factory=dict, repr=False)

    def hide(self, text: str) -> str:
        """`text` with each secret replaced by `${oc.env:NAME}` where it came from the environment,
        else by ***."""
        if text in self.shown:
            return self.shown[text]
        for value in sorted(self.shown, key=len, reverse=True):
            if len(value) >= SHORTEST_WITHIN_TEXT:
                text = text.replace(value, self.shown[value])
        return text

    def hide_in(self, tree: Any) -> Any:
        """A copy of plain lists and mappings in which every text is hidden so."""
        if isinstance(tree, str):
            return self.hide(tree)
        if isinstance(tree, Mapping):
            return {name: self.hide_in(value) for name, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.hide_in(value) for value in tree]
        return tree


def is_secret_name(variable: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return any(word in variable.upper() for word in SECRET_WORDS)


def find_secrets(
    written: Iterable[tuple[str, bool]],
    *,
    resolved: Iterable[str],
    environment: Mapping[str, str] | None = None,
) -> Secrets:
    """What has to be hidden of a configuration.

    written: each value as it was written, and whether its key is a secret one (any variable in it
    then holds a secret). resolved: the values that the secret keys have come to.
    """
    environment = os.environ if environment is None else environment
    shown = {value: HIDDEN for value in resolved if value}
    for text, is_secret_key in written:
        names = [n for n in _VARIABLE.findall(text) if is_secret_key or is_secret_name(n)]
        if _COMPUTED_NAME.search(text):  # ${oc.env:${...}}: it may be any of them
            names += filter(is_secret_name, environment)
        shown |= {environment[n]: f"${{oc.env:{n}}}" for n in names if environment.get(n)}
    return Secrets(shown)
