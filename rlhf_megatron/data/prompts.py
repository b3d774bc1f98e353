"""Prompt sets and demonstrations, checked row by row before anything else starts."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_megatron.data.rows import Row, read_rows, refuse_rows
from rlhf_megatron.data.tokenizer import AddBos, Tokenizer
from rlhf_megatron.errors import UserError

RESERVED_FIELDS = ("prompt", "response")  # the reward function's own arguments


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt."""

    prompt_id: int
    """Number of the row in its file, from 0; it stays the same when other rows are dropped."""

    text: str
    """What a reward function gets as `prompt`: the field itself, or, of chat messages, the content
    of the last user message."""

    token_ids: tuple[int, ...]
    """What the model reads: through the chat template where the prompt is a list of messages."""

    messages: tuple[Mapping[str, str], ...] | None
    """The chat messages; None for a plain prompt."""

    fields: Mapping[str, Any]
    """The row's other fields, which go to the reward function."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file. Never empty."""

    path: Path
    rows: tuple[PromptRow, ...]
    dropped_long: int = 0
    """Rows left out because they were too long."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def by_id(self) -> Mapping[int, PromptRow]:
        """The rows by prompt id."""
        return {row.prompt_id: row for row in self.rows}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of ids and tokens: tells on resume whether these are the same prompts."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"{row.prompt_id}:{row.token_ids};".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A prompt and the response to imitate, which ends with EOS."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def load_prompts(
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    prompt_field: str = "prompt",
    long_prompts: str = "refuse",
    add_bos: AddBos = "auto",
    max_prompts: int = 0,
    key: str = "data.prompts",
) -> PromptSet:
    """Read, check and tokenize a prompt file (JSONL or Parquet).

    long_prompts: "refuse" or "drop" those of more than max_prompt_tokens. max_prompts: only the
    first so many rows, 0 for all. key: the option that named the file, for messages.

    Raises UserError, one for all rows at fault: a missing or empty file, bad JSON, a prompt that is
    missing, of the wrong type, without tokens or too long, a field named as one of the reward
    function's own arguments.
    """
    path = Path(path)
    rows = read_rows(path, key=key)
    prompts: list[PromptRow] = []
    problems: list[str] = []
    for row in rows[: max_prompts or len(rows)]:
        try:
            prompts.append(
                _parse(row, prompt_field=prompt_field, tokenizer=tokenizer, add_bos=add_bos)
            )
        except _RowError as problem:
            problems.append(f"{row.place}: {problem}")
    refuse_rows(path, key=key, problems=problems)
    fitting = tuple(p for p in prompts if len(p.token_ids) <= max_prompt_tokens)
    if len(fitting) < len(prompts) and long_prompts == "refuse":
        _refuse_long(path, key=key, prompts=prompts, limit=max_prompt_tokens, rows=rows)
    if not fitting:
        raise UserError(
            f"{key}={str(path)!r}: no prompt is left, all {len(prompts)} have more than "
            f"{max_prompt_tokens} tokens; raise rollout.max_prompt_tokens"
        )
    return PromptSet(path, fitting, dropped_long=len(prompts) - len(fitting))


def load_demonstrations(
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    max_tokens: int,
    prompt_field: str = "prompt",
    response_field: str = "response",
    add_bos: AddBos = "auto",
    key: str = "warmup.demonstrations",
) -> list[Demonstration]:
    """Read, check and tokenize prompts with responses; EOS is added to each response.

    max_tokens: most tokens of prompt and response together (the model's context).

    Raises UserError, one for all rows at fault, as `load_prompts`.
    """
    path = Path(path)
    demonstrations: list[Demonstration] = []
    problems: list[str] = []
    for row in read_rows(path, key=key):
        try:
            prompt = _prompt_of(
                row, prompt_field=prompt_field, tokenizer=tokenizer, add_bos=add_bos
            )
            response = _field(row, name=response_field)
            if not isinstance(response, str):
                raise _RowError(_wrong_type(response_field, value=response, rule="a string"))
            ids = (*tokenizer.encode(response, add_bos="no"), tokenizer.eos_token_ids[0])
            if len(prompt.token_ids) + len(ids) > max_tokens:
                count = len(prompt.token_ids) + len(ids)
                raise _RowError(f"{count} tokens, more than the model's context of {max_tokens}")
            demonstrations.append(Demonstration(prompt_ids=prompt.token_ids, response_ids=ids))
        except _RowError as problem:
            problems.append(f"{row.place}: {problem}")
    refuse_rows(path, key=key, problems=problems)
    return demonstrations


class _RowError(Exception):
    """What is wrong with one row; collected into the one UserError."""


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | None


def _parse(row: Row, *, prompt_field: str, tokenizer: Tokenizer, add_bos: AddBos) -> PromptRow:
    prompt = _prompt_of(row, prompt_field=prompt_field, tokenizer=tokenizer, add_bos=add_bos)
    fields = {name: value for name, value in row.values.items() if name != prompt_field}
    clashes = [name for name in RESERVED_FIELDS if name in fields]
    if clashes:
        raise _RowError(
            f"field {clashes[0]!r} is an argument of the reward function already; rename the field"
        )
    return PromptRow(
        prompt_id=row.number,
        text=prompt.text,
        token_ids=prompt.token_ids,
        messages=prompt.messages,
        fields=fields,
    )


def _prompt_of(row: Row, *, prompt_field: str, tokenizer: Tokenizer, add_bos: AddBos) -> _Prompt:
    value = _field(row, name=prompt_field)
    if isinstance(value, str):
        messages = None
        text = value
        ids = tokenizer.encode(text, add_bos=add_bos)
    else:
        messages = _messages(value, name=prompt_field)
        text = [m["content"] for m in messages if m["role"] == "user"][-1]
        ids = tokenizer.apply_chat_template(messages)
    if not ids:
        raise _RowError("the prompt is empty (no tokens)")
    return _Prompt(text=text, token_ids=tuple(ids), messages=messages)


def _field(row: Row, *, name: str) -> Any:
    if name not in row.values:
        found = ", ".join(repr(n) for n in row.values) or "none"
        raise _RowError(f"no field {name!r} (fields: {found})")
    return row.values[name]


def _messages(value: Any, *, name: str) -> tuple[Mapping[str, str], ...]:
    rule = "a string or a list of {role, content} messages"
    if not isinstance(value, list) or not value:
        raise _RowError(_wrong_type(name, value=value, rule=rule))
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(part), str) for part in ("role", "content")
        ):
            raise _RowError(
                f"{name!r} holds a message without the strings role and content: {message!r:.80}"
            )
    if all(message["role"] != "user" for message in value):
        raise _RowError(f"{name!r} holds no message of the role 'user'")
    return tuple(value)


def _wrong_type(name: str, *, value: Any, rule: str) -> str:
    kind = "an empty list" if value == [] else f"of type {type(value).__name__}"
    return f"{name!r} is {kind}, must be {rule}"


def _refuse_long(
    path: Path, *, key: str, prompts: list[PromptRow], limit: int, rows: list[Row]
) -> None:
    way_out = "raise rollout.max_prompt_tokens or set data.long_prompts=drop"
    refuse_rows(
        path,
        key=key,
        problems=[
            f"{rows[p.prompt_id].place}: {len(p.token_ids)} tokens, more than "
            f"rollout.max_prompt_tokens={limit}; {way_out}"
            for p in prompts
            if len(p.token_ids) > limit
        ],
    )
