"""Secrets out of what is shown: by the name of a key, and by the look of a value.

The files of a run already hide those that the configuration knows (secret_values.py); this is for
what it does not know: an older run's files, a library's warning, a password in an address.
"""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

_HIDDEN_ALREADY = re.compile(r"\*+|\$\{oc\.env:\w+\}")
_NAMES = {"auth", "authorization", "cookie", "credential", "credentials", "passphrase"}
_NAMES |= {"passwd", "password", "secret", "secrets", "token"}
_NAME_ENDS = ("apikey", "api_key", "access_key", "private_key", "secret_key", "auth_token")
_VALUES = (
    (re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"), REDACTED),  # https://user:password@host
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-)[\w-]{8,}"), REDACTED),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), REDACTED),
    (
        re.compile(
            r"(?i)([\w-]*(?:api[_-]?key|access[_-]?key|password|passwd|secret|token)"
            r"[\"']?\s*[=:]\s*[\"']?)(?=[^\s\"'&,;]*[a-z])[^\s\"'&,;]{4,}"
        ),
        rf"\1{REDACTED}",
    ),
)


def redact_text(text: str) -> str:
    """`text` without what looks like a password, a key or a token of access."""
    for pattern, replacement in _VALUES:
        text = pattern.sub(replacement, text)
    return text


def redact_tree(tree: Any) -> Any:
    """A copy of nested mappings and lists in which secrets are replaced.

    A key that names a secret hides all texts below it; numbers stay (max_response_tokens: 12).
    """
    return _redacted(tree, is_secret=False)


def _redacted(tree: Any, *, is_secret: bool) -> Any:
    if isinstance(tree, Mapping):
        return {
            key: _redacted(value, is_secret=is_secret or _names_secret(str(key)))
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_redacted(value, is_secret=is_secret) for value in tree]
    if isinstance(tree, str) and tree and not _HIDDEN_ALREADY.fullmatch(tree):
        return REDACTED if is_secret else redact_text(tree)
    return tree


def _names_secret(key: str) -> bool:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+", "_", key).lower().strip("_")
    return name.endswith(_NAME_ENDS) or bool(set(name.split("_")) & _NAMES)
