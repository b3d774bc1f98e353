"""Text to token ids and back: a Hugging Face directory or a sentencepiece model behind one face."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.errors import UserError

AddBos = Literal["auto", "yes", "no"]


class Tokenizer(ABC):
    """What the rest of the project needs of a tokenizer."""

    path: Path
    vocab_size: int
    """Number of token ids, added tokens included; the model's embedding may have more rows."""

    eos_token_ids: tuple[int, ...]
    """Every token that ends a response; the first one ends a demonstration."""

    bos_token_id: int | None
    _begins_with_bos: bool

    def encode(self, text: str, *, add_bos: AddBos = "auto") -> list[int]:
        """Token ids of `text`; never an EOS at the end.

        add_bos: "auto" begins with BOS where the tokenizer itself does (for a sentencepiece model:
        where it has a BOS piece).

        Raises UserError for "yes" on a tokenizer without a BOS token.
        """
        if add_bos == "yes" and self.bos_token_id is None:
            raise UserError(
                f"data.add_bos=yes: the tokenizer {str(self.path)!r} has no BOS token; "
                "set data.add_bos to auto or no"
            )
        ids = self._encode_plain(text)
        if self.bos_token_id is not None and (
            add_bos == "yes" or (add_bos == "auto" and self._begins_with_bos)
        ):
            return [self.bos_token_id, *ids]
        return ids

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` without BOS or EOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces untouched."""

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Every token's id, added tokens included."""

    @abstractmethod
    def token_id(self, name: str) -> int:
        """Id of the one token `name` stands for. Raises UserError where it is none or several."""

    @abstractmethod
    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to answer.

        Raises UserError without a chat template, or where the template rejects the messages.
        """

    def _no_such_token(self, name: str) -> UserError:
        return UserError(
            f"{name!r} is not exactly one token of the tokenizer {str(self.path)!r}; "
            "give a token's exact name, or its id (rollout.stop_token_ids)"
        )


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face directory."""

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # transformers raises whatever its readers do
            raise UserError(
                f"tokenizer {str(path)!r}: cannot be read as a Hugging Face tokenizer "
                f"({_first_line(error)}); the directory needs tokenizer.json or tokenizer.model"
            ) from error
        self.path = path
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.bos_token_id = tokenizer.bos_token_id
        self._begins_with_bos = self._default_first_id() == self.bos_token_id
        self.eos_token_ids = _eos_token_ids(path, own=tokenizer.eos_token_id)

    def _default_first_id(self) -> int | None:
        ids = self._tokenizer("a").input_ids
        return ids[0] if ids else None

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def token_id(self, name: str) -> int:
        vocabulary = self.vocabulary()
        if name in vocabulary:
            return vocabulary[name]
        ids = self._encode_plain(name)  # a name as text: byte-level models store "\n" otherwise
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            raise self._no_such_token(name)
        return ids[0]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"tokenizer {str(self.path)!r} has no chat template, which prompts that are lists "
                "of messages need; use plain strings or an instruction-tuned model's tokenizer"
            )
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template raises what it likes
            raise UserError(
                f"the chat template of {str(self.path)!r} rejects the messages: "
                f"{_first_line(error)}"
            ) from error
        return list(ids)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            processor: Any = SentencePieceProcessor(model_file=str(path))
        except Exception as error:
            raise UserError(
                f"tokenizer {str(path)!r}: not a sentencepiece model ({_first_line(error)})"
            ) from error
        if processor.eos_id() < 0:
            raise _no_eos(path)
        self.path = path
        self._processor = processor
        self.vocab_size = processor.get_piece_size()
        self.eos_token_ids = (processor.eos_id(),)
        self.bos_token_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self._begins_with_bos = self.bos_token_id is not None

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            kept = [i for i in ids if not self._processor.is_control(i)]
            return str(self._processor.decode(kept))
        # The processor leaves control pieces out: name them, and decode what lies between.
        text, run = "", list[int]()
        for token in ids:
            if self._processor.is_control(token):
                text += self._processor.decode(run) + self._processor.id_to_piece(token)
                run = []
            else:
                run.append(token)
        return text + str(self._processor.decode(run))

    def vocabulary(self) -> dict[str, int]:
        return {str(self._processor.id_to_piece(i)): i for i in range(self.vocab_size)}

    def token_id(self, name: str) -> int:
        token = int(self._processor.piece_to_id(name))
        if self._processor.id_to_piece(token) != name:  # an unknown piece gives the id of <unk>
            raise self._no_such_token(name)
        return token

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise UserError(
            f"tokenizer {str(self.path)!r}: a sentencepiece model has no chat template, which "
            "prompts that are lists of messages need; use a Hugging Face directory"
        )


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a sentencepiece `.model` file.

    Only reads local files, and runs no code from them without `trust_remote_code`. Raises
    UserError where there is nothing to read, where it cannot be read, or where no token ends a
    response.
    """
    path = Path(path)
    if path.is_dir():
        return HuggingFaceTokenizer(path, trust_remote_code=trust_remote_code)
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path)
    rule = "neither a directory nor a .model file" if path.exists() else "no such file or directory"
    raise UserError(
        f"tokenizer {str(path)!r}: {rule}; data.tokenizer (or actor.model) must be a Hugging Face "
        "directory on this machine or a sentencepiece .model file"
    )


def _eos_token_ids(path: Path, *, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own EOS, then those of generation_config.json (chat models may have more)."""
    ids: list[int] = [] if own is None else [own]
    config = path / "generation_config.json"
    if config.is_file():
        try:
            listed = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{config}: not a JSON object ({_first_line(error)})") from error
        more = listed if isinstance(listed, list) else [listed]
        ids += [i for i in more if isinstance(i, int) and i not in ids]
    if not ids:
        raise _no_eos(path)
    return tuple(ids)


def _no_eos(path: Path) -> UserError:
    return UserError(
        f"tokenizer {str(path)!r} names no EOS token, so no response could end; "
        "set eos_token in its tokenizer_config.json"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
