"""Which ranks form an engine, as the configuration lists them. Imports no torch."""

from collections.abc import Iterator, Sequence

from rlhf_megatron.errors import ConfigError, UserError


def parse_engines(
    text: str, *, ranks: Sequence[int], tensor_parallel_size: int
) -> list[tuple[int, ...]]:
    """ "0,2;1,3" -> [(0, 2), (1, 3)]: the rank lists of `rollout.engines`, one engine each. A range
    is written 0-7.

    `ranks` may hold ranks that no engine takes. Raises ConfigError with all problems.
    """
    try:
        engines = [tuple(_ranks(part)) for part in text.split(";")]
    except ValueError:
        raise ConfigError(
            [f'rollout.engines: {text!r} is not a list such as "0,2;1,3" (or "auto")']
        ) from None
    problems: list[str] = []
    seen: set[int] = set()
    for engine in engines:
        label = f"rollout.engines: engine {','.join(map(str, engine))}"
        if list(engine) != sorted(set(engine)):
            problems.append(f"{label} must list its ranks in ascending order, each once")
        if len(engine) != tensor_parallel_size:
            problems.append(
                f"{label} has {len(engine)} ranks, rollout.tensor_parallel_size is "
                f"{tensor_parallel_size}; make them equal"
            )
        outside = sorted(set(engine) - set(ranks))
        if outside:
            problems.append(f"{label}: {outside} is not among rollout.ranks {list(ranks)}")
        twice = sorted(seen & set(engine))
        if twice:
            problems.append(f"{label}: {twice} belongs to another engine already")
        seen |= set(engine)
    if problems:
        raise ConfigError(problems)
    return engines


def _ranks(part: str) -> Iterator[int]:
    """Raises ValueError."""
    for item in part.split(","):
        first, dash, last = item.strip().partition("-")
        yield from range(int(first), int(last if dash else first) + 1)


def check_engine_size(name: str, *, tensor_parallel_size: int) -> None:
    """Raise UserError where the engine `name` cannot be spread over so many ranks."""
    if name == "hf" and tensor_parallel_size != 1:
        raise UserError(
            f"rollout.tensor_parallel_size={tensor_parallel_size}: the hf engine holds a whole "
            "model on each rank; set it to 1, or install vLLM"
        )
