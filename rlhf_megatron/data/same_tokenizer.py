"""Models that read the actor's token ids must have its tokenizer: a vocabulary of the same size may
be another one."""

from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.config import Config
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of them is in a directory that has a tokenizer."""
_ALSO_READ = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "generation_config.json"),
)


def check_same_tokenizers(config: Config) -> None:
    """Compare the tokenizers that critic.model and ref.model bring with the one of the run
    (data.tokenizer, or actor.model's). Not collective.

    A directory without tokenizer files, or one that is not here (a plan's), brings none. Raises
    ConfigError where a token has another id, or another token begins or ends a text; UserError
    where one cannot be read. The padding token may differ: nothing is padded.
    """
    own = Path(config.data.tokenizer or config.actor.model)
    problems = []
    for role, directory in (("critic", config.critic.model), ("ref", config.ref.model)):
        other = Path(directory)
        if not directory or not has_tokenizer(other) or not has_tokenizer(own):
            continue
        if _same_files(own, other):
            continue
        trust = config.run.trust_remote_code
        difference = first_difference(
            load_tokenizer(own, trust_remote_code=trust),
            other=load_tokenizer(other, trust_remote_code=trust),
        )
        if difference:
            key = "data.tokenizer" if config.data.tokenizer else "actor.model"
            problems.append(
                f"{role}.model={directory}: its tokenizer must equal that of {key}={own}, whose "
                f"token ids the {role} reads: {difference}; take a model with the same tokenizer "
                "(or, if only its tokenizer files are wrong, put the others in their place)"
            )
    if problems:
        raise ConfigError(problems)


def has_tokenizer(path: Path) -> bool:
    """Whether the path is a tokenizer file or a directory with one."""
    return path.is_file() or any((path / name).is_file() for name in TOKENIZER_FILES)


def first_difference(own: Tokenizer, *, other: Tokenizer) -> str:
    """In words, of the lowest id that differs; "" where they are the same."""
    ours, theirs = own.vocabulary(), other.vocabulary()
    if ours != theirs:
        return _different_token(ours, theirs=theirs)
    for name, here, there in (
        ("the token that begins a text", own.bos_token_id, other.bos_token_id),
        ("the token that ends a text", own.eos_token_ids[0], other.eos_token_ids[0]),
    ):
        if here != there:
            return f"{name} has the id {here}, and there {there}"
    return ""


def _different_token(ours: Mapping[str, int], *, theirs: Mapping[str, int]) -> str:
    def place(token: str) -> tuple[int, str]:
        return min(m[token] for m in (ours, theirs) if token in m), token

    token = min((t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=place)
    here, there = (
        f"has the id {m[token]}" if token in m else "does not exist" for m in (ours, theirs)
    )
    sizes = f" ({len(ours)} tokens, and there {len(theirs)})" if len(ours) != len(theirs) else ""
    return f"the token {token!r} {here}, and there {there}{sizes}"


def _same_files(own: Path, other: Path) -> bool:
    """Byte by byte; then there is nothing to load."""
    if own.is_file():
        return False
    return all(
        _content(own / name) == _content(other / name) for name in (*TOKENIZER_FILES, *_ALSO_READ)
    )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
