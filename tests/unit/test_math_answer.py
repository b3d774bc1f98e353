"""The ready reward for mathematics, on what models write."""

import signal
import threading
import time

import pytest

from rlhf_megatron.rewards import math_answer
from rlhf_megatron.rewards.function import FunctionScorer, check_arguments, load_reward_function
from rlhf_megatron.rewards.math_answer import reward
from rlhf_megatron.rewards.time_limit import time_limit

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("1/2", "The answer is $\\frac{2}{4}$.", 1.0),
        ("\\frac{1}{2}", "so it is 0.5", 1.0),
        (42, "It is 42", 1.0),
        (42, "It is 41", 0.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
        ("$x^2+1$", "\\boxed{1+x^2}", 1.0),
        ("x^2+1", "\\boxed{x^2-1}", 0.0),
        ("3\\sqrt{2}", "$\\sqrt{18}$", 1.0),
        ("\\{1,2\\}", "$\\{2,1\\}$", 1.0),
        ("(1,2)", "\\boxed{(2,1)}", 0.0),
        ("1,000", "1000", 1.0),
        ("42", "\\boxed{41}, no: \\boxed{42}", 1.0),
        ("42", "\\boxed{42}, no: \\boxed{41}", 0.0),
        ("42", "\\boxed{42", 0.0),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}} because 7", 1.0),
        ("42", "word " * 5000 + "42", 1.0),
        ("7", "$" + "9" * 300 + "$", 0.0),
    ],
)
def test_answers(answer: object, response: str, score: float) -> None:
    assert reward(prompt="", response=response, answer=answer, level=3) == score


def test_an_answer_that_cannot_be_read_is_the_datas_fault() -> None:
    with pytest.raises(ValueError, match="answer '' is neither a number nor an expression"):
        reward(prompt="", response="1", answer="")


def test_it_is_named_as_any_function() -> None:
    spec = "rlhf_megatron.rewards.math_answer:reward"
    check_arguments(load_reward_function(spec), spec=spec, fields=["answer", "level"])


def test_a_comparison_that_takes_for_ever_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    before_seconds, _ = signal.getitimer(signal.ITIMER_REAL)  # pytest-timeout's, if any
    monkeypatch.setattr(math_answer, "LIMIT_SECONDS", 0.5)
    began = time.monotonic()
    assert reward(prompt="", response="$10^{10^{10}}$", answer="1") == 0.0
    assert time.monotonic() - began < 20.0
    left_seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left_seconds <= before_seconds
    assert (left_seconds > 0) == (before_seconds > 0)


def test_it_works_on_other_threads() -> None:
    """Where math-verify's own time limits would not."""
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.append(reward(prompt="", response="\\boxed{2}", answer="2"))
    )
    thread.start()
    thread.join()
    assert found == [1.0]


def test_time_limits_nest() -> None:
    with (
        pytest.raises(TimeoutError, match=r"reward\.timeout_seconds=0\.3"),
        time_limit(0.3),
        time_limit(20.0, name="the inner limit of"),
    ):
        time.sleep(0.5)
    with pytest.raises(TimeoutError, match=r"the inner limit of 0\.1 s"), time_limit(20.0):
        try:
            with time_limit(0.1, name="the inner limit of"):
                time.sleep(5.0)
        finally:
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 10.0

    def own_limit(*, prompt: str, response: str) -> float:
        with time_limit(0.05):
            pass
        time.sleep(20.0)
        return 1.0

    from rlhf_megatron.rewards.contract import ScoringInput

    began = time.monotonic()
    sample = ScoringInput(prompt="", response="", prompt_id=0, sample_index=0)
    (outcome,) = FunctionScorer(own_limit, timeout_seconds=0.3)([sample])
    assert isinstance(outcome, TimeoutError) and time.monotonic() - began < 10.0
