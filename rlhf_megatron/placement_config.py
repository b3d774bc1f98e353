"""Which roles go on which ranks, in words, and how far ahead the rollout runs.

`placement` names groups of ranks with the roles on them. It is another way to write the ranks of
each role, which is where everything else reads them (`actor.parallel.ranks`, `rollout.ranks`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.schema import number

ROLES = ("actor", "critic", "ref", "reward", "rollout")
ALL = "all"
_EXAMPLE = "{ranks: 0-3, roles: [actor, ref, rollout]}"


@dataclass(kw_only=True)
class PipelineConfig:
    """How far the rollout runs ahead of the updates."""

    depth: int = number(0, minimum=0, maximum=1)
    """0 (default): strictly on policy, each batch is sampled by the weights that it updates. 1: the
    next batch is rolled out while the critic is updated on the present one, so its samples are one
    step older than the actor, which ppo.importance_sampling corrects (its cap must be above 0).
    docs/placement.md says when that is faster."""


def placed_by(config: Any) -> dict[str, int]:
    """Role -> number of the entry of `placement` that names it, from 0."""
    found: dict[str, int] = {}
    for index, entry in enumerate(config.placement):
        roles = entry.get("roles") if isinstance(entry, dict) else None
        for role in roles if isinstance(roles, list) else ():
            if isinstance(role, str):
                found.setdefault(role, index)
    return found


def ranks_text(config: Any, *, role: str) -> str:
    """The ranks of a role as written: "all", or a list such as "0-3,6"."""
    found = config.rollout.ranks if role == "rollout" else getattr(config, role).parallel.ranks
    return str(found)


def ranks_key(config: Any, *, role: str) -> str:
    """The key that says them, for messages."""
    entry = placed_by(config).get(role)
    if entry is not None:
        return f"placement[{entry}].ranks"
    return "rollout.ranks" if role == "rollout" else f"{role}.parallel.ranks"


def apply_placement(config: Any) -> list[str]:
    """Write the ranks of `placement` into the roles' own keys; returns what is wrong with it.

    Ranks themselves are looked at by validation_placement.py, which knows how many there are.
    """
    problems: list[str] = []
    seen: dict[str, int] = {}
    for index, entry in enumerate(config.placement):
        at = f"placement[{index}]"
        found = list(_entry_problems(entry, at=at))
        problems += found
        if found:
            continue
        ranks = str(entry["ranks"]).strip()
        for role in entry["roles"]:
            if role in seen:
                problems.append(
                    f"{at}.roles: {role} is in placement[{seen[role]}] as well; name each role once"
                )
                continue
            seen[role] = index
            problems += _set_ranks(config, role=role, ranks=ranks, at=at)
    return problems


def _entry_problems(entry: Any, *, at: str) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{at}={entry}: must be a group of ranks with its roles, such as {_EXAMPLE}"
        return
    unknown = sorted(set(map(str, entry)) - {"ranks", "roles"})
    if unknown:
        yield f"{at}.{unknown[0]}: unknown key; an entry has ranks and roles, such as {_EXAMPLE}"
    ranks, roles = entry.get("ranks"), entry.get("roles")
    if isinstance(ranks, bool) or not isinstance(ranks, str | int):
        yield f"{at}.ranks={ranks}: must be all or an ascending list of ranks; write it like 0-3,6"
    if not isinstance(roles, list) or not roles:
        yield f"{at}.roles={roles}: must be a list of {', '.join(ROLES)}, such as [actor, rollout]"
        return
    wrong = [role for role in roles if role not in ROLES]
    if wrong:
        yield f"{at}.roles: {wrong[0]} is no role; take some of {', '.join(ROLES)}"


def _set_ranks(config: Any, *, role: str, ranks: str, at: str) -> Iterator[str]:
    own = ranks_text(config, role=role)
    if own not in (ALL, ranks):  # a saved configuration says both alike
        key = "rollout.ranks" if role == "rollout" else f"{role}.parallel.ranks"
        yield (
            f"{key}={own}: {at} puts {role} on ranks {ranks}; say it in one place, and remove "
            "the other"
        )
        return
    if role == "rollout":
        config.rollout.ranks = ranks
    else:
        getattr(config, role).parallel.ranks = ranks
