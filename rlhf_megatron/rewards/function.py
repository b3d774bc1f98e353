"""Rewards from a Python function of the user's."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.contract import ScoringInput
from rlhf_megatron.rewards.time_limit import time_limit

RewardFunction = Callable[..., Any]


def load_reward_function(spec: str) -> RewardFunction:
    """The function that `reward.function` names: "path/to/file.py:name" or "module:name".

    Raises UserError for a malformed spec, a missing file, module or name, a file that fails while
    it is imported, and a name that cannot be called.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise _refusal(spec, rule="must be path/to/file.py:name or module:name")
    module = _load_file(spec, path=Path(place)) if place.endswith(".py") else _load(spec, place)
    if not hasattr(module, name):
        found = sorted(n for n, v in vars(module).items() if inspect.isfunction(v))
        raise _refusal(spec, rule=f"{place} has no {name!r}; its functions: {', '.join(found)}")
    function = getattr(module, name)
    if not callable(function):
        raise _refusal(spec, rule=f"{name!r} is a {type(function).__name__}, not a function")
    return function


def check_arguments(function: RewardFunction, *, spec: str, fields: Iterable[str]) -> None:
    """Raise UserError where name(prompt=..., response=..., **fields) would be a wrong call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins tell nothing of their arguments
        return
    names = list(fields)
    try:
        signature.bind(**dict.fromkeys(["prompt", "response", *names]))
    except TypeError as error:
        raise _refusal(
            spec,
            rule=f"it takes {signature}, and is called with prompt, response and the prompt "
            f"row's fields ({', '.join(names) or 'none'}): {error}; end its arguments with "
            "**fields to take what it does not use",
        ) from error


@dataclass(frozen=True)
class FunctionScorer:
    """Calls the function once a sample; what it raises takes the place of the score, and so does
    TimeoutError where it takes longer than `timeout_seconds` (0: no limit)."""

    function: RewardFunction
    timeout_seconds: float = 0.0

    def __call__(self, samples: Sequence[ScoringInput]) -> list[Any]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: ScoringInput) -> Any:
        try:
            with time_limit(self.timeout_seconds):
                return self.function(
                    prompt=sample.prompt, response=sample.response, **sample.fields
                )
        except Exception as error:  # user code: score_batch names the sample and decides
            return error


def _load(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _refusal(
            spec, rule=f"cannot import {name} ({type(error).__name__}: {error})"
        ) from error


def _load_file(spec: str, *, path: Path) -> ModuleType:
    if not path.is_file():
        raise _refusal(spec, rule=f"no such file: {path}")
    name = f"reward_file_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _refusal(spec, rule=f"importing it raised {type(error).__name__}: {error}") from error
    return module


def _refusal(spec: str, *, rule: str) -> UserError:
    return UserError(f"reward.function={spec!r}: {rule}")
