"""Make the quickstart's task: a tiny random Llama, a character tokenizer, words to capitalise.

    python tools/make_quickstart.py --output data/quickstart

The prompt is a made-up word and an arrowhead, `nilok>`; the right response is the word in capitals,
`NILOK`. The demonstrations have a bad habit: each of their letters is a capital with probability
0.4 only. A short supervised warm-up copies word and habit alike (reward about 0.4); PPO breaks the
habit. Words of the demonstrations, of the training prompts and of the held-out prompts are
disjoint.

Written to the folder: `model/` (Hugging Face directory, float32, with the tokenizer),
`demonstrations.jsonl`, `train.jsonl`, `heldout.jsonl`. Takes seconds.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = tuple(chr(code) for code in range(32, 127))  # printable ASCII
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
CAPITAL_PROBABILITY = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Words:
    """Disjoint words of the three files."""

    demonstrations: list[str]
    train: list[str]
    heldout: list[str]


def draw_words(rng: random.Random, *, demonstrations: int, train: int, heldout: int) -> Words:
    """Distinct five-letter words, consonants and vowels in turn: `nilok`."""
    words: dict[str, None] = {}  # keeps the order of drawing, which a set does not
    while len(words) < demonstrations + train + heldout:
        kinds = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)
        words["".join(rng.choice(kind) for kind in kinds)] = None
    drawn = list(words)
    return Words(
        demonstrations=drawn[:demonstrations],
        train=drawn[demonstrations : demonstrations + train],
        heldout=drawn[demonstrations + train :],
    )


def prompt_row(word: str) -> dict[str, str]:
    return {"prompt": f"{word}>", "answer": word.upper()}


def demonstration_row(word: str, *, rng: random.Random) -> dict[str, str]:
    """A response with the habit: most letters stay small."""
    letters = (c.upper() if rng.random() < CAPITAL_PROBABILITY else c for c in word)
    return {"prompt": f"{word}>", "response": "".join(letters)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; decoding gives back the exact text."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()  # joins without the spaces of a word-level model
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def build_model(*, seed: int) -> LlamaForCausalLM:
    """About 0.7 million random weights. Small, yet with all that tells layouts apart: grouped
    queries, an even number of layers and heads, a vocabulary (99) that no layout divides."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )
    return LlamaForCausalLM(config).to(torch.float32)


def write_rows(path: Path, *, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_quickstart(
    output: Path, *, seed: int, demonstrations: int, train: int, heldout: int
) -> None:
    """Write the whole folder beside `output`, then put it in place."""
    rng = random.Random(seed)
    words = draw_words(rng, demonstrations=demonstrations, train=train, heldout=heldout)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build_model(seed=seed).save_pretrained(partial / "model")
    build_tokenizer().save_pretrained(partial / "model")
    write_rows(
        partial / "demonstrations.jsonl",
        rows=[demonstration_row(word, rng=rng) for word in words.demonstrations],
    )
    write_rows(partial / "train.jsonl", rows=map(prompt_row, words.train))
    write_rows(partial / "heldout.jsonl", rows=map(prompt_row, words.heldout))
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and words (default 1)")
    parser.add_argument("--demonstrations", type=int, default=2048, help="rows (default 2048)")
    parser.add_argument("--train", type=int, default=2048, help="prompts (default 2048)")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts (default 64)")
    options = parser.parse_args(arguments)
    make_quickstart(
        options.output,
        seed=options.seed,
        demonstrations=options.demonstrations,
        train=options.train,
        heldout=options.heldout,
    )
    print(f"wrote {options.output}: model, demonstrations, train and held-out prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
