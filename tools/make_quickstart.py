"""Make the quickstart's task: a tiny random Llama, a character tokenizer, words to capitalise.

    python tools/make_quickstart.py --output data/quickstart

The prompt is a made-up word and an arrowhead, `nilok>`; the right response is the word in capitals,
`NILOK`. The demonstrations have a bad habit: only one letter in three is a capital. A short
supervised warm-up learns to copy the word, and the habit with it (reward about 0.33); PPO breaks
the habit. The words of demonstrations, training prompts and held-out prompts are disjoint.

Written to the folder: `model/` (Hugging Face directory, float32, with the tokenizer),
`demonstrations.jsonl`, `train.jsonl`, `heldout.jsonl`. Takes seconds.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError
from rlhf_megatron.folders import whole_folder

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = tuple(chr(code) for code in range(32, 127))  # printable ASCII
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
CAPITAL_PROBABILITY = 1 / 3
MAX_WORDS = 100_000  # half of all such words: drawing distinct ones stays quick
CONTENTS = ("model", "demonstrations.jsonl", "train.jsonl", "heldout.jsonl")


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
    """Write model and data; what an earlier run of this tool left in `output` is replaced."""
    rng = random.Random(seed)
    words = draw_words(rng, demonstrations=demonstrations, train=train, heldout=heldout)
    with whole_folder(output, replaces=CONTENTS) as folder:
        logging.disable_progress_bar()
        build_model(seed=seed).save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        demonstration_rows = [demonstration_row(word, rng=rng) for word in words.demonstrations]
        write_rows(folder / "demonstrations.jsonl", rows=demonstration_rows)
        write_rows(folder / "train.jsonl", rows=map(prompt_row, words.train))
        write_rows(folder / "heldout.jsonl", rows=map(prompt_row, words.heldout))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and words (1)")
    parser.add_argument("--demonstrations", type=int, default=2048, help="demonstrations (2048)")
    parser.add_argument("--train", type=int, default=2048, help="training prompts (2048)")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts (64)")
    options = parser.parse_args(arguments)
    counts = (options.demonstrations, options.train, options.heldout)
    try:
        if min(counts) < 1 or sum(counts) > MAX_WORDS:
            raise UserError(
                f"--demonstrations, --train and --heldout must be at least 1, and together at most "
                f"{MAX_WORDS}; they are {', '.join(map(str, counts))}"
            )
        make_quickstart(
            options.output,
            seed=options.seed,
            demonstrations=options.demonstrations,
            train=options.train,
            heldout=options.heldout,
        )
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"wrote {options.output}: model, demonstrations, training and held-out prompts")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
