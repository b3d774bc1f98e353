"""The reference page of all keys, docs/config.md, from the dataclasses that declare them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from rlhf_megatron.config import Config
from rlhf_megatron.config_names import ELSEWHERE, RENAMED
from rlhf_megatron.loader import show
from rlhf_megatron.schema import CHOICES, EXCLUSIVE, MAXIMUM, MINIMUM, SECRET

INTRODUCTION = """# Configuration: every key

Made by `make docs` (`tools/config_reference.py`) from the code; change the docstrings there, not
this page.

    rlhf-megatron train --nproc-per-node 8 --config configs/ppo_8b_8gpu.yaml \\
        --config configs/profiles/careful.yaml \\
        run.steps=500 actor.optimizer.learning_rate=5e-7

- **Files are merged in order, a later one wins**, and `key.path=value` on the command line wins
  over all of them. A profile is a file with a few keys; `configs/profiles/` has some. Training, the
  dry run and the tools that read a configuration take the same options.
- **All problems come in one message**, each with its key, value, rule, way out, file and line, and
  exit code 2. Unknown keys are refused: with the nearest one, with the new name of a key that was
  renamed, or with the key that takes the place of another trainer's ([below](#names-elsewhere)).
- **`${oc.env:NAME}`** takes an environment variable, `${oc.env:NAME,default}` one that may be
  missing, `${run.name}` the value of another key.
- **Secrets are not shown or saved.** A key that is a secret, and whatever comes from a variable
  with TOKEN, KEY, SECRET, PASSWORD, PASSWD or CREDENTIAL in its name, appears in `config.yaml`,
  checkpoints, logs, messages and trackers as `${oc.env:NAME}`, or as `***` if it was written out.
- **YAML** is 1.2: `off`, `yes` and `007` are text, `1e-6` is a number.
- `--dry-run --world-size N` checks everything, needs no GPU, no model and no peers, and prints what
  the configuration comes to."""

TYPES = {
    "int": "whole number",
    "float": "number",
    "bool": "true, false",
    "str": "text",
    "list[int]": "whole numbers",
    "list[str]": "texts",
    "list[dict[str, typing.Any]]": "list of mappings",
    "dict[str, typing.Any]": "mapping",
}


@dataclass(frozen=True)
class Entry:
    """A row of the page."""

    key: str
    rule: str
    default: str
    meaning: str


def reference_page() -> str:
    """The whole page, as Markdown."""
    first_seen: dict[type, str] = {}
    parts = [INTRODUCTION]
    for name, kind in get_type_hints(Config).items():
        if is_dataclass(kind):
            assert isinstance(kind, type)
            parts += _section(getattr(Config(), name), key=name, kind=kind, first_seen=first_seen)
        else:
            parts += _single_key(name, kind=kind)
    return "\n\n".join([*parts, *_names_elsewhere()]) + "\n"


def docstrings_of(cls: type) -> dict[str, str]:
    """The text below each declared field, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for declared, described in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(declared, ast.AnnAssign)
            and isinstance(declared.target, ast.Name)
            and isinstance(described, ast.Expr)
            and isinstance(described.value, ast.Constant)
        ):
            found[declared.target.id] = " ".join(str(described.value.value).split())
    return found


def rule_of(kind: Any, *, metadata: Mapping[str, Any]) -> str:
    """Type and bounds, in words."""
    if metadata.get(CHOICES):
        return ", ".join(f"`{value}`" for value in metadata[CHOICES])
    text = TYPES[kind.__name__ if kind in (int, float, bool, str) else str(kind)]
    low, high = metadata.get(MINIMUM), metadata.get(MAXIMUM)
    if low is not None:
        text += f", above {low}" if metadata.get(EXCLUSIVE) else f", at least {low}"
    if high is not None:
        text += f", at most {high}"
    return f"secret {text}" if metadata.get(SECRET) else text


def _single_key(name: str, *, kind: Any) -> Iterator[str]:
    """A key that is not inside a section."""
    (declared,) = (field for field in fields(Config) if field.name == name)
    row = Entry(
        key=name,
        rule=rule_of(kind, metadata=declared.metadata),
        default=show(getattr(Config(), name)),
        meaning=docstrings_of(Config)[name],
    )
    yield f"## {name}"
    yield _table([row])


def _section(instance: Any, *, key: str, kind: type, first_seen: dict[type, str]) -> Iterator[str]:
    """The tables of a section and of those inside it. A kind of section that was shown already is
    listed with its keys and defaults, and a pointer for their meaning."""
    original = first_seen.setdefault(kind, key)
    told = original != key
    meaning = docstrings_of(kind)
    hints = get_type_hints(kind)
    rows = [
        Entry(
            key=f"{key}.{declared.name}",
            rule=rule_of(hints[declared.name], metadata=declared.metadata),
            default=show(getattr(instance, declared.name)),
            meaning=f"as `{original}.{declared.name}`" if told else meaning[declared.name],
        )
        for declared in fields(instance)
        if not is_dataclass(hints[declared.name])
    ]
    summary = f"As [{original}](#{_anchor(original)})." if told else _escaped(_summary(kind))
    yield f"## {key}\n\n{summary}"
    yield _table(rows)
    for declared in fields(instance):
        inner = hints[declared.name]
        if is_dataclass(inner):
            assert isinstance(inner, type)
            value = getattr(instance, declared.name)
            yield from _section(
                value, key=f"{key}.{declared.name}", kind=inner, first_seen=first_seen
            )


def _summary(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def _table(rows: list[Entry]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = f"`{row.default}`" if row.default else "empty"
        lines.append(f"| `{row.key}` | {row.rule} | {default} | {_escaped(row.meaning)} |")
    return "\n".join(lines)


def _names_elsewhere() -> Iterator[str]:
    yield (
        "## Names elsewhere\n\nWhat keys of other trainers are here. Typed as they are, these names"
        " are refused with the answer in this table."
    )
    lines = ["| name | of | here | |", "|---|---|---|---|"]
    for name, found in ELSEWHERE.items():
        keys = ", ".join(f"`{key}`" for key in found.keys) or "-"
        lines.append(f"| `{name}` | {found.trainers} | {keys} | {_escaped(found.remark)} |")
    yield "\n".join(lines)
    lines = ["| former name | now |", "|---|---|"]
    lines += [f"| `{before}` | `{now}` |" for before, now in RENAMED.items()]
    yield "\n".join(["Keys of this project that were renamed:", "", *lines])


def _anchor(key: str) -> str:
    return key.replace(".", "")


def _escaped(text: str) -> str:
    """Signs that Markdown would take for its own, outside of code."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        for sign, written in (("<", "&lt;"), ("*", r"\*")):
            parts[i] = parts[i].replace(sign, written)
    return "`".join(parts).replace("|", r"\|")
