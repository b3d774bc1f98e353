"""Rewards: functions, models, and what becomes of a sample without a score."""

import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.function import FunctionScorer, check_arguments, load_reward_function
from rlhf_megatron.rewards.model import ModelScorer
from rlhf_megatron.rewards.score import ScoringInput, score_batch

REPOSITORY = Path(__file__).parents[2]


def inputs(*responses: str, **fields: Any) -> list[ScoringInput]:
    return [
        ScoringInput(prompt="p", response=r, prompt_id=10 + i, sample_index=i % 2, fields=fields)
        for i, r in enumerate(responses)
    ]


# Functions: what a spec may be.


def write_file(folder: Path, text: str) -> str:
    (folder / "rewards.py").write_text(text)
    return str(folder / "rewards.py")


def test_function_of_a_file(tmp_path: Path) -> None:
    path = write_file(
        tmp_path, "def score(*, prompt, response, k):\n    return k * len(response)\n"
    )
    function = load_reward_function(f"{path}:score")
    scores = score_batch(inputs("a", "abc", k=2), scorer=FunctionScorer(function))
    assert scores.rewards.tolist() == [2.0, 6.0]
    assert scores.rewards.dtype == torch.float32 and scores.failed == []


def test_function_of_a_module() -> None:
    assert load_reward_function("math:hypot") is math.hypot


@pytest.mark.parametrize(
    ("text", "suffix", "phrase"),
    [
        ("", "", "must be path/to/file.py:name or module:name"),
        ("", ":", "must be path/to/file.py:name or module:name"),
        ("def other(): pass\n", ":score", "has no 'score'; its functions: other"),
        ("score = 3\n", ":score", "'score' is a int, not a function"),
        ("import no_such_thing\n", ":score", "importing it raised ModuleNotFoundError"),
        ("def (\n", ":score", "importing it raised SyntaxError"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, suffix: str, phrase: str) -> None:
    with pytest.raises(UserError, match=r"^reward\.function=") as caught:
        load_reward_function(write_file(tmp_path, text) + suffix)
    assert phrase in str(caught.value)


def test_missing_file_and_module(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: .*none\.py"):
        load_reward_function(f"{tmp_path}/none.py:score")
    with pytest.raises(UserError, match=r"cannot import no_such_module \(ModuleNotFoundError"):
        load_reward_function("no_such_module:score")


def test_wrong_arguments_are_told_before_the_run() -> None:
    def strict(*, prompt: str, response: str, answer: str) -> float:
        return 0.0

    def open_ended(*, prompt: str, response: str, **fields: Any) -> float:
        return 0.0

    check_arguments(strict, spec="f.py:strict", fields=["answer"])
    check_arguments(open_ended, spec="f.py:open_ended", fields=["answer", "level"])
    with pytest.raises(UserError, match=r"missing a required .*argument: 'answer'"):
        check_arguments(strict, spec="f.py:strict", fields=[])
    with pytest.raises(UserError, match="unexpected keyword argument 'level'; end its arguments"):
        check_arguments(strict, spec="f.py:strict", fields=["answer", "level"])


# Scores: numbers, and what is none.


@pytest.mark.parametrize(
    "value",
    [1, True, 1.0, np.float64(1), np.int32(1), np.bool_(True), np.array(1.0), torch.tensor(1)],
)
def test_numbers_of_all_kinds(value: Any) -> None:
    assert score_batch(inputs("r"), scorer=lambda _: [value]).rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (math.nan, "returned nan"),
        (torch.tensor(math.nan), "returned nan"),
        (-math.inf, "returned -inf, beyond float32"),
        (1e39, "returned 1e+39, beyond float32"),
        pytest.param(10**400, "returned inf, beyond float32", id="huge"),
        ("1", "returned '1' (str), must be a number"),
        (None, "returned None (NoneType), must be a number"),
        (torch.tensor([1.0]), "returned tensor([1.]) (Tensor), must be a number"),
        (np.array(["a"]), "must be a number"),
        (1 + 2j, "must be a number"),
    ],
)
def test_what_is_no_score(value: Any, phrase: str) -> None:
    scores = score_batch(inputs("r"), scorer=lambda _: [value], on_error="drop")
    assert scores.rewards.isnan().all()
    assert phrase in scores.failed[0].reason


def raises_on_b(*, prompt: str, response: str) -> float:
    if response.startswith("b"):
        raise RuntimeError("no such letter:\n  b")
    return math.nan if response == "c" else 1.0


def test_stop_names_the_sample() -> None:
    samples = inputs("a", "b" * 300, "c")
    with pytest.raises(UserError) as caught:
        score_batch(samples, scorer=FunctionScorer(raises_on_b), on_error="stop")
    message = str(caught.value)
    assert "2 responses have no score" in message
    assert "prompt 11, sample 1: raised RuntimeError: no such letter: b (" in message
    assert "test_rewards.py:" in message
    assert repr("b" * 200) in message and "b" * 201 not in message
    assert "reward.on_error=drop" in message and "\n" not in message


def test_stop_on_nan() -> None:
    with pytest.raises(UserError, match=r"1 response has no score; prompt 10, .* returned nan"):
        score_batch(inputs("c"), scorer=FunctionScorer(raises_on_b))


def test_drop_keeps_the_others() -> None:
    samples = inputs("a", "b", "c", "d")
    scores = score_batch(samples, scorer=FunctionScorer(raises_on_b), on_error="drop")
    assert scores.rewards[[0, 3]].tolist() == [1.0, 1.0]
    assert scores.rewards.isnan().tolist() == [False, True, True, False]
    assert [(f.prompt_id, f.sample_index) for f in scores.failed] == [(11, 1), (12, 0)]


def test_no_samples() -> None:
    scores = score_batch([], scorer=FunctionScorer(raises_on_b))
    assert scores.rewards.shape == (0,) and scores.failed == []


# Reward models.

LETTERS = "abcdefgh: "


def make_reward_model(
    path: Path, *, pad_token_id: int | None, template: str | None = None, labels: int = 1
) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + len(LETTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        num_labels=labels,
        pad_token_id=pad_token_id,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    save_tokenizer(path, template=template)
    return path


def save_tokenizer(path: Path, *, template: str | None = None) -> None:
    names = ["<pad>", "<s>", "</s>", *LETTERS]
    backend = Backend(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)


def scorer_of(path: Path, **options: Any) -> ModelScorer:
    return ModelScorer(path, device=torch.device("cpu"), **options)


def letters_to_ids(text: str) -> list[int]:
    ends = text.endswith("</s>")
    return [3 + LETTERS.index(c) for c in text.removesuffix("</s>")] + [2] * ends


@pytest.mark.parametrize("pad_token_id", [None, 0])
@pytest.mark.parametrize("batch_samples", [1, 2, 16])
def test_batched_equals_one_by_one(
    tmp_path: Path, pad_token_id: int | None, batch_samples: int
) -> None:
    path = make_reward_model(tmp_path / "rm", pad_token_id=pad_token_id)
    # An EOS at the end must count as the last token, also where EOS would pass for padding.
    texts = ["a", "abc", "hgfedcba</s>", "ab</s>", "abcabcabcabc", "h"]
    samples = [
        ScoringInput(prompt=t[:1], response=t[1:], prompt_id=i, sample_index=0)
        for i, t in enumerate(texts)
    ]
    scores = score_batch(samples, scorer=scorer_of(path, batch_samples=batch_samples))

    oracle = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        hidden = [oracle.model(torch.tensor([letters_to_ids(t)])).last_hidden_state for t in texts]
        at_last_token = torch.stack([oracle.score(h[0, -1])[0] for h in hidden])
        by_transformers = torch.stack(
            [oracle(torch.tensor([letters_to_ids(t)])).logits[0, 0] for t in texts]
        )
    torch.testing.assert_close(scores.rewards, at_last_token, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores.rewards, by_transformers, rtol=1e-5, atol=1e-6)
    assert scores.rewards.std() > 1e-3  # the texts do score differently


def test_chat_template_of_the_reward_model(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ 'a' if m.role == 'user' else 'h' }}: {{ m.content }} "
        "{% endfor %}"
    )
    chat = scorer_of(make_reward_model(tmp_path / "chat", pad_token_id=0, template=template))
    plain = scorer_of(make_reward_model(tmp_path / "plain", pad_token_id=0))

    def score(scorer: ModelScorer, prompt: str, response: str, messages: Any = None) -> float:
        sample = ScoringInput(
            prompt=prompt, response=response, prompt_id=0, sample_index=0, messages=messages
        )
        return float(score_batch([sample], scorer=scorer).rewards)

    assert score(chat, "ab", "c") == pytest.approx(score(plain, "a: ab ", "h: c "))
    turns = tuple({"role": "user", "content": c} for c in "ab")
    assert score(chat, "b", "c", turns) == pytest.approx(score(plain, "a: a a: b ", "h: c "))


def test_too_long_for_the_reward_model_is_that_samples_failure(tmp_path: Path) -> None:
    scorer = scorer_of(make_reward_model(tmp_path / "rm", pad_token_id=0))
    samples = inputs("a", "a" * 40, "b")
    scores = score_batch(samples, scorer=scorer, on_error="drop")
    assert scores.rewards.isnan().tolist() == [False, True, False]
    assert "41 tokens, more than the reward model's context of 32" in str(scores.failed[0])


def refused(path: Path) -> str:
    with pytest.raises(UserError, match=r"^reward\.model=") as caught:
        scorer_of(path)
    return str(caught.value)


def test_refused_reward_models(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "none")
    assert "no tokenizer can be read" in refused(tmp_path)
    several = make_reward_model(tmp_path / "several", pad_token_id=0, labels=3)
    assert "the model has 3 labels, a reward model has 1" in refused(several)
    save_tokenizer(tmp_path / "bare")
    assert "no model can be read" in refused(tmp_path / "bare")


def test_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """transformers would give it a random head."""
    path = make_reward_model(tmp_path / "lm", pad_token_id=0)
    config = LlamaConfig.from_pretrained(path, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(path)
    assert "the weights lack score.weight: not a trained reward model" in refused(path)


# The reward files that the configurations name.


def reward_of(name: str, *, function: str = "reward") -> Callable[..., float]:
    return load_reward_function(f"{REPOSITORY}/configs/rewards/{name}.py:{function}")


@pytest.mark.parametrize(
    ("response", "score"),
    [("NILOK", 1.0), ("NIlok", 0.4), ("NILO", 0.8), ("NILOKK", 5 / 6), ("", 0.0), ("ILOK", 0.0)],
)
def test_quickstart_reward(response: str, score: float) -> None:
    reward = reward_of("quickstart")
    assert reward(prompt="nilok>", response=response, answer="NILOK") == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("42", 1.0),
        (" 42.", 1.0),
        ("17 + 25 = 42", 1.0),
        ("The answer is 42.0", 1.0),
        ("41", 0.1),
        ("-42", 0.1),
        ("1,042.", 0.1),
        ("It is 41", 0.0),
        ("42 or 41", 0.0),
        ("forty-two", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_reward(response: str, score: float) -> None:
    assert reward_of("arithmetic")(prompt="", response=response, answer="42") == score


@pytest.mark.parametrize(
    ("response", "score"),
    [  # as SmolLM2 writes them
        ("17 + 25 = 42", 1.0),
        ("The answer is 42.", 1.0),
        ('The answer is "42."', 1.0),
        ("17 + 25 equals **42**", 1.0),
        ("$\\boxed{42}$", 1.0),
        ("42\n\n", 1.0),
        ("The answer is 42, which is 17 more than 25", 0.0),  # the last number counts
        ("17 + 25 = 4", 0.0),
        ("17 + 25 = 42\n\n1. Add", 0.0),
        ("41", 0.0),
        ("Four-two", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_correct(response: str, score: float) -> None:
    correct = reward_of("arithmetic", function="correct")
    assert correct(prompt="", response=response, answer="42") == score


def test_arithmetic_reward_reads_subtractions_and_thousands() -> None:
    reward = reward_of("arithmetic")
    assert reward(prompt="", response="67-25", answer="25") == 1.0
    assert reward(prompt="", response="it is -7", answer="-7") == 1.0
    assert reward(prompt="", response="1,234", answer="1234") == 1.0


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    path = write_file(tmp_path, "raise RuntimeError('no')\n")
    with pytest.raises(UserError, match="importing it raised RuntimeError: no"):
        load_reward_function(f"{path}:score")
    assert "reward_file_rewards" not in sys.modules


def slow_on_b(*, prompt: str, response: str, **fields) -> float:
    if response == "b":
        try:
            time.sleep(30.0)
        except Exception:  # no handler of the user's may swallow the limit
            return 5.0
    return 1.0


def test_a_function_that_takes_too_long_is_interrupted_and_counts_as_failed():
    before_seconds, _ = signal.getitimer(signal.ITIMER_REAL)  # pytest-timeout's, if any
    started = time.monotonic()
    scorer = FunctionScorer(slow_on_b, timeout_seconds=0.3)
    scores = score_batch(inputs("a", "b", "c"), scorer=scorer, on_error="drop")
    assert time.monotonic() - started < 20.0
    assert [math.isnan(r) for r in scores.rewards.tolist()] == [False, True, False]
    assert "took longer than reward.timeout_seconds=0.3" in str(scores.failed[0])
    left_seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left_seconds <= before_seconds
    assert (left_seconds > 0) == (before_seconds > 0)


def test_a_function_with_an_alarm_of_its_own_is_judged_when_it_is_over():
    def own_alarm(*, prompt: str, response: str, **fields) -> float:
        signal.alarm(0)
        time.sleep(0.3)
        return 1.0

    scorer = FunctionScorer(own_alarm, timeout_seconds=0.1)
    with pytest.raises(UserError, match=r"TimeoutError: took longer than reward.timeout_seconds"):
        score_batch(inputs("a"), scorer=scorer)


def test_failed_samples_may_get_a_value():
    scores = score_batch(
        inputs("a", "b"),
        scorer=lambda _: [math.nan, 2.0],
        on_error="value",
        error_value=-1.0,
    )
    assert scores.rewards.tolist() == [-1.0, 2.0] and len(scores.failed) == 1
