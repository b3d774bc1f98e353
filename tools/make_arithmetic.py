"""Make arithmetic questions with a checkable answer, for a small instruction-tuned model.

    python tools/make_arithmetic.py --output data/arithmetic

Writes `train.jsonl` and `heldout.jsonl`. A row is {"prompt": [{"role": "user", "content": "What is
17 + 5? Answer with the number only."}], "answer": "22"}. No question of one file is in the other,
nor the same question with its numbers swapped.

Why so small: reinforcement needs a model that is right now and then. SmolLM2-135M-Instruct (4 bits)
is, with numbers up to 20, in 14% of samples at temperature 1 and 30% at 0.7 (64 questions); with
numbers up to 50 in none at temperature 1. Numbers up to 20 make 210 sums.
"""

import argparse
import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError


def question_row(a: int, b: int) -> dict[str, object]:
    content = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": content}], "answer": str(a + b)}


def draw_questions(
    count: int, *, smallest: int, largest: int, rng: random.Random
) -> list[dict[str, object]]:
    """Distinct sums of numbers in [smallest, largest]; a + b and b + a count as the same.

    Raises UserError where there are fewer than `count`.
    """
    pairs = list(combinations_with_replacement(range(smallest, largest + 1), 2))
    if count > len(pairs):
        raise UserError(
            f"{count} questions asked for, and numbers from {smallest} to {largest} make only "
            f"{len(pairs)}; lower --train or --heldout, or raise --largest"
        )
    return [
        question_row(*rng.sample(pair, k=2))  # either order
        for pair in rng.sample(pairs, k=count)
    ]


def write_rows(path: Path, *, rows: list[dict[str, object]]) -> None:
    """Write beside `path`, then put in place."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make arithmetic questions with answers.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=160, help="training questions (160)")
    parser.add_argument("--heldout", type=int, default=50, help="held-out questions (50)")
    parser.add_argument("--smallest", type=int, default=1, help="smallest number (1)")
    parser.add_argument("--largest", type=int, default=20, help="largest number (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    options = parser.parse_args(arguments)
    try:
        if options.train < 1 or options.heldout < 1:
            raise UserError("--train and --heldout must be at least 1")
        questions = draw_questions(
            options.train + options.heldout,
            smallest=options.smallest,
            largest=options.largest,
            rng=random.Random(options.seed),
        )
        options.output.mkdir(parents=True, exist_ok=True)
        write_rows(options.output / "train.jsonl", rows=questions[: options.train])
        write_rows(options.output / "heldout.jsonl", rows=questions[options.train :])
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"wrote {options.train} and {options.heldout} questions to {options.output}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
