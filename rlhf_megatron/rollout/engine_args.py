"""Which of `rollout.engine_args` vLLM takes."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from rlhf_megatron.errors import ConfigError
from rlhf_megatron.rollout.config import refused_engine_args


def check_engine_args(engine_args: Mapping[str, Any], *, known: Collection[str]) -> None:
    """Raise ConfigError, with all problems, unless each is one that vLLM takes and we do not set.

    `known`: the names that vLLM takes.
    """
    problems = refused_engine_args(engine_args)
    for name in sorted(set(engine_args) - set(known)):
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
        mean = f"; did you mean {', '.join(near)}?" if near else "; remove it"
        problems.append(f"rollout.engine_args.{name}: vLLM takes no such argument{mean}")
    if problems:
        raise ConfigError(problems)
