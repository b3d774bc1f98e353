"""Prompt files: what is read, and every refusal as one message."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_megatron.data.prompts import PromptSet, load_demonstrations, load_prompts
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import UserError


class LetterTokenizer(Tokenizer):
    """One token a character, its code point; BOS 1, EOS 2. Chat: role:content| for each message."""

    path = Path("letters")
    vocab_size = 256
    eos_token_ids = (2, 3)
    bos_token_id = 1
    _begins_with_bos = False

    def _encode_plain(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)

    def vocabulary(self) -> dict[str, int]:
        return {chr(i): i for i in range(self.vocab_size)}

    def token_id(self, name: str) -> int:
        return ord(name)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._encode_plain("".join(f"{m['role']}:{m['content']}|" for m in messages))


TOKENIZER = LetterTokenizer()


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **options: Any) -> PromptSet:
    return load_prompts(path, **{"tokenizer": TOKENIZER, "max_prompt_tokens": 40, **options})


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, **options)
    return str(caught.value)


def test_plain_prompts_keep_their_fields(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "answer": 3}, {"prompt": "c", "answer": None}]
    prompts = load(write_jsonl(tmp_path / "p.jsonl", rows))
    assert [p.prompt_id for p in prompts.rows] == [0, 1]
    assert [p.text for p in prompts.rows] == ["ab", "c"]
    assert [p.token_ids for p in prompts.rows] == [(97, 98), (99,)]
    assert [p.fields for p in prompts.rows] == [{"answer": 3}, {"answer": None}]
    assert all(p.messages is None for p in prompts.rows)
    assert len(prompts) == 2 and prompts.dropped_long == 0


def test_bos_and_other_prompt_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": "ab"}])
    prompts = load(path, prompt_field="question", add_bos="yes")
    assert prompts.rows[0].token_ids == (1, 97, 98)
    assert prompts.rows[0].fields == {}


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "two"},
    ]
    row = load(write_jsonl(tmp_path / "p.jsonl", [{"prompt": messages}])).rows[0]
    assert row.text == "two"
    assert row.messages == tuple(messages)
    assert TOKENIZER.decode(row.token_ids) == "system:s|user:one|assistant:x|user:two|"


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    chat = [[{"role": "user", "content": f"q{i}"}] for i in range(3)]
    rows = [{"prompt": chat[i], "answer": str(i), "level": i} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    from_parquet = load(tmp_path / "p.parquet")
    assert from_parquet.rows == load(write_jsonl(tmp_path / "p.jsonl", rows)).rows


def test_only_the_first_prompts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": c} for c in "abc"])
    assert [p.text for p in load(path, max_prompts=2).rows] == ["a", "b"]
    assert len(load(path, max_prompts=9)) == 3


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b\u2028c"}\n')
    prompts = load(tmp_path / "p.jsonl")
    assert [(p.prompt_id, p.text) for p in prompts.rows] == [(0, "a"), (1, "b\u2028c")]


def test_missing_and_empty_files(tmp_path: Path) -> None:
    message = refusal(tmp_path / "none.jsonl", key="evaluation.prompts")
    assert message.startswith("evaluation.prompts=") and "no such file" in message
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "the file is empty; it needs at least one row" in refusal(tmp_path / "empty.jsonl")
    (tmp_path / "p.csv").write_text("prompt\na\n")
    assert "the name must end in .jsonl or .parquet" in refusal(tmp_path / "p.csv")
    (tmp_path / "bad.parquet").write_text("no")
    assert "not a Parquet file" in refusal(tmp_path / "bad.parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    assert "not UTF-8 text" in refusal(tmp_path / "latin.jsonl")


def test_empty_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": pyarrow.array([], type=pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert "the file is empty" in refusal(tmp_path / "p.parquet")


def test_bad_json_names_every_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n[1]\n')
    message = refusal(tmp_path / "p.jsonl")
    assert "2 rows are refused" in message
    assert "line 3: bad JSON" in message
    assert "line 4: of type list, must be an object" in message


@pytest.mark.parametrize(
    ("row", "phrase"),
    [
        ({"text": "a"}, "no field 'prompt' (fields: 'text')"),
        ({"prompt": 5}, "'prompt' is of type int, must be a string or a list of {role, content}"),
        ({"prompt": None}, "'prompt' is of type NoneType, must be"),
        ({"prompt": []}, "'prompt' is an empty list, must be"),
        ({"prompt": ["a"]}, "a message without the strings role and content"),
        ({"prompt": [{"role": "user"}]}, "a message without the strings role and content"),
        ({"prompt": [{"role": "system", "content": "a"}]}, "no message of the role 'user'"),
        ({"prompt": ""}, "the prompt is empty (no tokens)"),
        ({"prompt": "a", "response": "b"}, "field 'response' is an argument of the reward"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], phrase: str) -> None:
    message = refusal(write_jsonl(tmp_path / "p.jsonl", [{"prompt": "fine"}, row]))
    assert "1 row is refused" in message
    assert phrase in message.split("line 2: ")[1]


def test_long_prompts_refused_five_listed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a" * n} for n in range(1, 10)])
    message = refusal(path, max_prompt_tokens=2)
    assert "7 rows are refused" in message and "and 2 more" in message
    assert "line 3: 3 tokens, more than rollout.max_prompt_tokens=2" in message
    assert "line 7" in message and "line 8" not in message
    assert "data.long_prompts=drop" in message


def test_long_prompts_dropped_keep_the_row_numbers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": p} for p in ("aaa", "b", "cccc", "dd")])
    prompts = load(path, max_prompt_tokens=2, long_prompts="drop")
    assert [p.prompt_id for p in prompts.rows] == [1, 3]
    assert prompts.dropped_long == 2
    assert prompts.by_id[3].text == "dd" and 0 not in prompts.by_id
    assert "no prompt is left, all 4 have more than" in refusal(
        write_jsonl(tmp_path / "p.jsonl", [{"prompt": "aaa"}] * 4),
        max_prompt_tokens=2,
        long_prompts="drop",
    )


def test_fingerprint_tells_prompts_apart(tmp_path: Path) -> None:
    first = load(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    same = load(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    other = load(write_jsonl(tmp_path / "c.jsonl", [{"prompt": "a"}, {"prompt": "c"}]))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_demonstrations_end_with_eos(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "response": "C"}, {"prompt": "a", "response": ""}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    demonstrations = load_demonstrations(path, tokenizer=TOKENIZER, max_tokens=9, add_bos="yes")
    assert [d.prompt_ids for d in demonstrations] == [(1, 97, 98), (1, 97)]
    assert [d.response_ids for d in demonstrations] == [(67, 2), (2,)]


def test_bad_demonstrations_in_one_message(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "response": 4}, {"prompt": "aaaa", "response": "bb"}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(UserError) as caught:
        load_demonstrations(path, tokenizer=TOKENIZER, max_tokens=6)
    message = str(caught.value)
    assert message.startswith("warmup.demonstrations=") and "3 rows are refused" in message
    assert "line 1: no field 'response' (fields: 'prompt')" in message
    assert "line 2: 'response' is of type int, must be a string" in message
    assert "line 3: 7 tokens, more than the model's context of 6" in message
