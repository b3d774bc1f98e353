"""YAML files and `key.path=value` overrides onto typed dataclasses, with every problem collected.

Nothing here knows the options themselves: the tree of dataclasses is an argument. Values go through
omegaconf, which converts them to the declared types and resolves `${oc.env:VAR}` and references to
other keys.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_megatron.config_names import Answer, answer
from rlhf_megatron.schema import CHOICES, EXCLUSIVE, MAXIMUM, MINIMUM, SECRET
from rlhf_megatron.secret_values import HIDDEN, Secrets, find_secrets

T = TypeVar("T")

COMMAND_LINE = "command line"
SHOWN_CHARACTERS = 80
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[int]": "a list of whole numbers, such as [1, 2]",
    "list[str]": "a list of texts, such as [a, b]",
    "list[dict[str, typing.Any]]": "a list of mappings, such as [{ranks: 0-3, roles: [actor]}]",
    "dict[str, typing.Any]": "a mapping of names to values",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that the user gave, and where."""

    key: str
    value: Any
    source: str
    text: str | None = None
    """A single value as it was written: text options take it so, and `name: 007` stays 007."""


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the tree of options."""

    type_name: str
    default: Any
    metadata: Mapping[str, Any]


@dataclass
class Loaded(Generic[T]):
    """A configuration, with what was wrong about it. Faulty keys hold their defaults."""

    config: T
    problems: list[str] = field(default_factory=list)
    faulty_keys: set[str] = field(default_factory=set)
    all_read: bool = True
    """False where a file could not be read: what follows from its absence is no news."""
    secrets: Secrets = field(default_factory=Secrets)
    """What must not be shown. The problems hold none of it."""


def load(root: type[T], *, paths: Sequence[str], overrides: Sequence[str]) -> Loaded[T]:
    """Merge the files in order, then the overrides; the last setting of a key wins."""
    options, sections = options_of(root), sections_of(root)
    problems: list[str] = []
    settings: list[Setting] = []
    unread = 0
    for path in paths:
        found = read_file(path, problems=problems)
        unread += bool(problems and not found)
        settings.extend(found)
    for text in overrides:
        settings.extend(read_override(text, options=options, problems=problems))
    winners = {s.key: s for s in settings}
    tree = OmegaConf.structured(root)
    loaded = Loaded(config=root(), problems=problems, all_read=not unread)
    for setting in winners.values():
        _apply(setting, tree=tree, options=options, sections=sections, loaded=loaded)
    for key in [o for o in options if any(o == k or k.startswith(f"{o}.") for k in winners)]:
        _resolve(key, tree=tree, options=options, winners=winners, loaded=loaded)
    loaded.config = OmegaConf.to_object(tree)
    for key, option in options.items():
        rule = broken_bound(value_of(loaded.config, key=key), option=option)
        if rule and key not in loaded.faulty_keys:
            value = value_of(loaded.config, key=key)
            source = winners[key].source if key in winners else "default"
            _report(key, loaded=loaded, text=f"{key}={show(value)}: {rule} ({source})")
    loaded.secrets = _secrets(loaded.config, options=options, winners=winners)
    loaded.problems = list(dict.fromkeys(map(loaded.secrets.hide, loaded.problems)))
    return loaded


def options_of(root: type, *, prefix: str = "") -> dict[str, Option]:
    """Every leaf option by its full key path, in the order of declaration."""
    return dict(_walk(root(), prefix=prefix))


def sections_of(root: Any, *, prefix: str = "") -> list[str]:
    """Full key paths of all inner nodes of the tree."""
    found = []
    for name, kind in get_type_hints(root).items():
        if is_dataclass(kind):
            key = f"{prefix}{name}"
            found += [key, *sections_of(kind, prefix=f"{key}.")]
    return found


def value_of(config: Any, *, key: str) -> Any:
    """The value at a full key path."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def show(value: Any) -> str:
    """A value as it would be written in YAML, cut where it is long."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def nearest(key: str, *, candidates: Sequence[str]) -> str:
    """The candidate most like `key`; on a bare name, one that ends in it comes first."""
    endings = [c for c in candidates if c.endswith(f".{key}")]
    return difflib.get_close_matches(key, endings or candidates, n=1, cutoff=0.0)[0]


def broken_bound(value: Any, *, option: Option) -> str:
    """The rule of the option's metadata that `value` breaks, with the way out; "" if none."""
    choices = option.metadata.get(CHOICES)
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}; the default is {choices[0]}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    low, high = option.metadata.get(MINIMUM), option.metadata.get(MAXIMUM)
    above = bool(option.metadata.get(EXCLUSIVE))
    too_low = low is not None and (value <= low if above else value < low)
    if math.isfinite(value) and not too_low and (high is None or value <= high):
        return ""
    bounds = [f"above {low}" if above else f"at least {low}"] if low is not None else []
    bounds += [f"at most {high}"] if high is not None else []
    rule = "must be a finite number" if not math.isfinite(value) else "must be"
    return " ".join([rule, " and ".join(bounds)]) + f"; the default is {show(option.default)}"


def read_file(path: str, *, problems: list[str]) -> list[Setting]:
    """The settings of a YAML file; what is wrong with the file goes into `problems`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.append(
            f"{path}: no such file; give the path of a YAML file, such as those in configs/"
        )
        return []
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read as a UTF-8 text file ({error}); give a YAML file")
        return []
    return read_text(text, source=path, problems=problems)


def read_text(text: str, *, source: str, problems: list[str]) -> list[Setting]:
    """The settings of YAML text, each with its line."""
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            problems.append(f"{source}: must hold keys and values, such as `run: {{steps: 10}}`")
            return []
        return list(_flatten(node, loader=loader, prefix="", source=source, problems=problems))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problems.append(f"{source}{line}: not valid YAML: {error.problem or error}; mend this line")
    except yaml.YAMLError as error:
        problems.append(f"{source}: not valid YAML: {' '.join(str(error).split())}; mend the file")
    except RecursionError:
        problems.append(f"{source}: not valid YAML: an anchor contains itself; write it out")
    return []


def read_override(
    text: str, *, options: Mapping[str, Option], problems: list[str]
) -> list[Setting]:
    """The setting of one `key.path=value`; the value is YAML, or plain text for a text option."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        problems.append(f"{text}: an override has the form key.path=value, such as run.steps=10")
        return []
    broken: list[str] = []
    parsed = read_text(f"value: {raw}", source=COMMAND_LINE, problems=broken)
    if key in options and options[key].type_name == "str":
        quoted = raw[:1] in ("'", '"') and len(parsed) == 1
        return [Setting(key, parsed[0].value if quoted else raw, COMMAND_LINE)]
    if broken:
        problems.append(
            f"{key}={show(raw)}: the value is not valid YAML; quote it ({COMMAND_LINE})"
        )
        return []
    return [Setting(key + s.key.removeprefix("value"), s.value, COMMAND_LINE) for s in parsed]


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2 scalars. PyYAML follows 1.1, where `off` and `no` are booleans and 1e-6 is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _YamlLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _flatten(
    node: yaml.MappingNode, *, loader: _YamlLoader, prefix: str, source: str, problems: list[str]
) -> Iterator[Setting]:
    loader.flatten_mapping(node)
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = f"{source} line {key_node.start_mark.line + 1}"
        if key in seen:
            problems.append(f"{key}: given twice in one section; keep one of them ({line})")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            yield from _flatten(
                value_node, loader=loader, prefix=f"{key}.", source=source, problems=problems
            )
        else:
            value = loader.construct_object(value_node, deep=True)
            is_text = isinstance(value_node, yaml.ScalarNode) and value is not None
            yield Setting(key, value, line, text=value_node.value if is_text else None)


def _walk(instance: Any, *, prefix: str) -> Iterator[tuple[str, Option]]:
    hints = get_type_hints(type(instance))
    for declared in fields(instance):
        key, value = f"{prefix}{declared.name}", getattr(instance, declared.name)
        if is_dataclass(hints[declared.name]):
            yield from _walk(value, prefix=f"{key}.")
        else:
            kind = hints[declared.name]
            name = kind.__name__ if kind in (int, float, bool, str) else str(kind)
            yield key, Option(type_name=name, default=value, metadata=declared.metadata)


def _secrets(
    config: Any, *, options: Mapping[str, Option], winners: Mapping[str, Setting]
) -> Secrets:
    secret_keys = {key for key, option in options.items() if option.metadata.get(SECRET)}
    written = [(s.text or str(s.value), key in secret_keys) for key, s in winners.items()]
    return find_secrets(written, resolved=[value_of(config, key=key) for key in secret_keys])


def _report(key: str, *, loaded: Loaded[Any], text: str) -> None:
    loaded.problems.append(text)
    loaded.faulty_keys.add(key)


def _owner(key: str, *, options: Mapping[str, Option]) -> str | None:
    """The option that `key` is, or is inside of, as a key of a mapping."""
    return next((o for o in options if key == o or key.startswith(f"{o}.")), None)


def _apply(
    setting: Setting,
    *,
    tree: DictConfig,
    options: Mapping[str, Option],
    sections: Sequence[str],
    loaded: Loaded[Any],
) -> None:
    """Put one setting into the tree, or say why it does not fit."""
    key, value = setting.key, setting.value
    owner = _owner(key, options=options)
    if owner is None:
        _report_no_option(setting, options=options, sections=sections, loaded=loaded)
        return
    is_mapping = options[owner].type_name.startswith("dict")
    if key == owner and is_mapping and value is None:
        return
    rule = f"must be {TYPE_NAMES[options[owner].type_name]}"
    way_out = f"{rule}; the default is {show(options[owner].default) or 'empty'} ({setting.source})"
    if key != owner and not is_mapping:
        _report(owner, loaded=loaded, text=f"{owner}: {key} sets a key inside it, but it {way_out}")
        return
    if options[owner].type_name == "str" and setting.text is not None:
        value = setting.text
    is_secret = bool(options[owner].metadata.get(SECRET))
    if is_secret and value == HIDDEN:
        text = f"{key}={value}: a saved configuration does not hold it; give it again, such as"
        _report(owner, loaded=loaded, text=f"{text} {key}='${{oc.env:NAME}}' ({setting.source})")
        return
    try:
        OmegaConf.update(tree, key, value, force_add=is_mapping)
    except OmegaConfBaseException:
        shown = HIDDEN if is_secret else show(value)
        _report(owner, loaded=loaded, text=f"{key}={shown}: {way_out}")


def _report_no_option(
    setting: Setting,
    *,
    options: Mapping[str, Option],
    sections: Sequence[str],
    loaded: Loaded[Any],
) -> None:
    key = setting.key
    if key in sections:
        if setting.value is not None:  # a section left empty in a file says nothing
            inner = next(o for o in options if o.startswith(f"{key}."))
            text = (
                f"{key}={show(setting.value)}: is a section, not a value; set a key in it, such as"
            )
            _report(key, loaded=loaded, text=f"{text} {inner} ({setting.source})")
        return
    known = answer(key, own_endings={option.rpartition(".")[2] for option in options})
    if known is None:
        near = nearest(key, candidates=[*options, *sections])
        known = Answer(f"did you mean {near}?", (near,))
    text = f"{key}: unknown key; {known.text} ({setting.source})"
    loaded.problems.append(text)
    loaded.faulty_keys |= set(known.keys)


def _resolve(
    key: str,
    *,
    tree: DictConfig,
    options: Mapping[str, Option],
    winners: Mapping[str, Setting],
    loaded: Loaded[Any],
) -> None:
    """Replace references by their values, so that the tree can be turned into objects."""
    setting = winners.get(key)
    section, _, name = key.rpartition(".")
    try:
        if OmegaConf.is_missing(OmegaConf.select(tree, section) if section else tree, name):
            raise OmegaConfBaseException("it is missing")
        value = OmegaConf.select(tree, key)
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        cause = " ".join(str(error).split("\n")[0].split())
        given = show(setting.value) if setting else "???"
        source = f" ({setting.source})" if setting else ""
        way_out = "set it, or write a plain value"
        missing = re.search(r"Environment variable '.*' not found", cause)
        if missing:
            cause = missing[0]
            way_out = "export it (or set it, or give a default as ${oc.env:NAME,default})"
        text = f"{key}={given}: cannot be resolved: {cause}; {way_out}{source}"
        _report(key, loaded=loaded, text=text)
        value = options[key].default
    OmegaConf.update(tree, key, value, merge=False)
