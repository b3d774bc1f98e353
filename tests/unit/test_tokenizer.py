"""Tokenizers: Hugging Face directories and sentencepiece models, and what is refused."""

import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from rlhf_megatron.errors import UserError

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?+=0123456789\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}<bos>{{ m.role }} {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant {% endif %}"
)


def make_directory(
    path: Path, *, begins_with_bos: bool = True, template: str | None = None
) -> Path:
    """A character tokenizer as transformers saves it."""
    names = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    backend = Backend(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    if begins_with_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair=None, special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def characters(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sp")
    words = ["the cat sat on the mat", "a dog ran to the cat", "what is two and three"] * 40
    (folder / "text").write_text("\n".join(words))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tiny"),
        vocab_size=60,
        model_type="bpe",
        user_defined_symbols=["<end>"],
        minloglevel=2,
    )
    return folder / "tiny.model"


def test_bos_is_added_as_asked(directory: Path, tmp_path: Path) -> None:
    with_bos = load_tokenizer(directory)
    without = load_tokenizer(make_directory(tmp_path / "plain", begins_with_bos=False))
    plain = [4, 5, 6]  # a, b, c after four special tokens
    assert with_bos.encode("abc") == [1, *plain]
    assert with_bos.encode("abc", add_bos="no") == plain
    assert without.encode("abc") == plain
    assert without.encode("abc", add_bos="yes") == [1, *plain]


@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_decoding_gives_back_the_exact_text(characters: Tokenizer, text: str) -> None:
    assert characters.decode(characters.encode(text)) == text


def test_special_tokens_are_skipped_or_shown(characters: Tokenizer) -> None:
    ids = [1, 4, 5, 2, 0]
    assert characters.decode(ids) == "ab"
    assert characters.decode(ids, skip_special_tokens=False) == "<bos>ab<eos><pad>"


def test_token_id_takes_exactly_one_token(characters: Tokenizer) -> None:
    assert characters.token_id("<eos>") == 2
    assert characters.token_id("b") == 5
    for name in ("ab", "", "é"):
        with pytest.raises(UserError, match="is not exactly one token of the tokenizer"):
            characters.token_id(name)


def test_eos_of_generation_config_counts_too(directory: Path, tmp_path: Path) -> None:
    path = make_directory(tmp_path / "chat")
    assert load_tokenizer(path).eos_token_ids == (2,)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_tokenizer(path).eos_token_ids == (2, 7)
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json: not a JSON object"):
        load_tokenizer(path)


def test_no_eos_is_refused(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "hf")
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="names no EOS token, so no response could end"):
        load_tokenizer(path)


def test_vocabulary_size(characters: Tokenizer) -> None:
    assert characters.vocab_size == 4 + len(CHARACTERS)


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_directory(tmp_path / "chat", template=TEMPLATE))
    messages = [{"role": "user", "content": "2+3?"}]
    ids = tokenizer.apply_chat_template(messages)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<bos>user 2+3?<eos><bos>assistant "
    with pytest.raises(UserError, match=r"rejects the messages: .*no such role"):
        tokenizer.apply_chat_template([{"role": "bad", "content": "x"}])


def test_chat_messages_need_a_template(characters: Tokenizer) -> None:
    with pytest.raises(UserError, match="has no chat template, which prompts that are lists"):
        characters.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["missing", "missing.model"])
def test_missing_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        load_tokenizer(tmp_path / name)


def test_unreadable_paths(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"neither a directory nor a \.model file"):
        load_tokenizer(tmp_path / "notes.txt")
    with pytest.raises(UserError, match="cannot be read as a Hugging Face tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")


def test_sentencepiece_agrees_with_its_library(sentencepiece_model: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_model)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    text = "the dog sat on a cat"
    assert tokenizer.encode(text) == oracle.encode(text, add_bos=True)
    assert tokenizer.encode(text, add_bos="no") == oracle.encode(text)
    assert tokenizer.decode([*tokenizer.encode(text), oracle.eos_id()]) == text
    assert tokenizer.vocab_size == oracle.vocab_size() == 60
    assert tokenizer.eos_token_ids == (oracle.eos_id(),)
    shown = tokenizer.decode([*tokenizer.encode("a cat"), 2], skip_special_tokens=False)
    assert shown == "<s>a cat</s>"


def test_sentencepiece_token_id_and_chat(sentencepiece_model: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_model)
    assert tokenizer.token_id("</s>") == 2
    assert tokenizer.decode([tokenizer.token_id("<end>")]) == "<end>"
    with pytest.raises(UserError, match="is not exactly one token"):
        tokenizer.token_id("the cat")
    with pytest.raises(UserError, match="a sentencepiece model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_sentencepiece_without_bos_or_eos(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a cat and a dog\n" * 20)
    for name, options in {"no_bos": {"bos_id": -1}, "no_eos": {"eos_id": -1}}.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(tmp_path / name),
            vocab_size=16,
            model_type="char",
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    tokenizer = load_tokenizer(tmp_path / "no_bos.model")
    assert tokenizer.encode("a cat") == tokenizer.encode("a cat", add_bos="no")
    with pytest.raises(UserError, match=r"data\.add_bos=yes: .* has no BOS token"):
        tokenizer.encode("a cat", add_bos="yes")
    with pytest.raises(UserError, match="names no EOS token"):
        load_tokenizer(tmp_path / "no_eos.model")
