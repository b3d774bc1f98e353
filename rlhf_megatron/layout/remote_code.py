"""Python code that a model or tokenizer directory brings with it, which nobody has asked to run.

transformers and vLLM take classes from files beside the weights where a configuration names them
(`auto_map`). They do so only on request (`trust_remote_code`); here such a directory is refused by
name before anything reads it, since its own code may also mean another model than is trained.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def code_of(directory: str | Path) -> list[str]:
    """The places that name code, such as "config.json: auto_map.AutoModel=modeling_x.Model". Empty
    for most directories, and for a path that is none."""
    found = []
    for path in sorted(Path(directory).glob("*config*.json")):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # whoever needs the file says what is wrong
            continue
        found += [f"{path.name}: {place}" for place in _auto_maps(config, at="")]
    generate = Path(directory) / "custom_generate" / "generate.py"
    if generate.is_file():
        found.append("custom_generate/generate.py")
    return found


def refused_code(directory: str | Path, *, key: str, trusted: bool, trust_key: str) -> list[str]:
    """A problem where the directory of `key` names code and `trust_key` does not allow it."""
    if not directory or trusted:
        return []
    places = code_of(directory)
    if not places:
        return []
    return [
        f"{key}={directory}: brings code of its own ({', '.join(places)}), which is not run; give "
        f"a directory without it, or read the code and set {trust_key}=true"
    ]


def _auto_maps(config: Any, *, at: str) -> Iterator[str]:
    if isinstance(config, list):
        for item in config:
            yield from _auto_maps(item, at=at)
    if not isinstance(config, dict):
        return
    for name, value in config.items():
        if name != "auto_map":
            yield from _auto_maps(value, at=f"{at}{name}.")
        elif isinstance(value, dict):
            yield from (f"{at}auto_map.{kind}={target}" for kind, target in value.items() if target)
        elif value:
            yield f"{at}auto_map={value}"
