"""What the console prints: widths, alignment, escapes, terminal and file."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.observability.console import BeforeAfterLine, Console, SampleLine
from rlhf_megatron.observability.ledger import PhaseRecord
from rlhf_megatron.observability.text import cut, display_width, format_number, one_line

METRICS = {
    "reward/mean": 0.5123456,
    "reward/std": 0.2,
    "kl/mean": 1.25e-5,
    "kl/coef": 0.05,
    "response/length_mean": 123.456,
    "response/truncated_fraction": 0.0625,
    "ppo/policy_loss": -0.0012345,
    "ppo/approx_kl": 1.2345e-4,
    "ppo/ratio_mean": 1.00012345,
    "ppo/clip_fraction": 0.0123,
    "ppo/entropy": 2.3456,
    "grad_norm/actor": 123456.789,
    "lr/actor": 1e-6,
    "critic/value_loss": 0.3456,
    "critic/explained_variance": -0.75,
    "grad_norm/critic": math.nan,
    "parity/logprob_abs_diff_mean": 1.2e-7,
    "parity/logprob_abs_diff_max": 4.5e-6,
    "reshard/bytes_received": 15_300_000_000,
    "reshard/bytes_minimum": 15_300_000_000,
    "reshard/seconds": 0.31,
    "time/rollout_seconds": 5.123,
    "time/ref_log_prob_seconds": 0.5,
    "time/update_critic_seconds": 1.5,
    "time/update_actor_seconds": 2.25,
    "time/log_prob_seconds": 0.75,
    "time/value_seconds": 0.5,
    "time/step_seconds": 12.3456,
    "train/throughput_tokens_per_sec": 123456.7,
    "train/mfu": 0.4123,
    "gpu/memory_active_gb": 71.2345,
    "evaluation/reward_mean": 0.625,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class AsciiFile(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii", newline="")

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode("ascii")


def record(phase, seconds, step=3):
    return PhaseRecord(
        step=step,
        rank=0,
        phase=phase,
        seconds=seconds,
        allocated_gb=1.0,
        reserved_gb=1.0,
        peak_gb=1.0,
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_and_holds_every_figure(width):
    stream = io.StringIO()
    Console(stream=stream, width=width, total_steps=100).step_table(3, metrics=METRICS)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 3/100 ---") and len(lines[0]) == width
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for shown in (
        "mean 0.5123",
        "kl 1.25e-05",
        "loss -0.001234",
        "grad norm 123457",
        "grad norm nan",
        "least MB 15300",
        "12.35 s: rollout 5.12, ",
        "update_critic 1.50",
        "memory GB 71.23",
        "reward_mean 0.625",
    ):
        assert shown in text, shown
    assert len(lines) <= (14 if width >= 80 else 20)


def test_the_table_is_aligned():
    stream = io.StringIO()
    Console(stream=stream, width=100).step_table(1, metrics=METRICS)
    rows = {line[:9].strip(): line for line in stream.getvalue().splitlines() if line[:1] != " "}
    assert rows["reward"].index("0.5123") + 6 == rows["actor"].index("-0.001234") + 9
    assert rows["reward"].index("mean") == rows["speed"].index("tokens/s") == 9


def test_missing_figures_leave_no_holes():
    stream = io.StringIO()
    Console(stream=stream, width=80).step_table(1, metrics={"reward/mean": 1.0})
    assert stream.getvalue().splitlines()[1:] == ["reward   mean 1"]


def test_progress_overwrites_itself_on_a_terminal():
    stream = Terminal()
    console = Console(stream=stream, width=80, total_steps=9)
    console.phase_entered(step=3, phase="rollout")
    console.phase_exited(record("rollout", 60.0))
    console.phase_entered(step=3, phase="reward")
    console.message("hello")
    console.close()
    clear = "\r\x1b[2K"
    assert stream.getvalue() == (
        f"{clear}step 3/9  rollout ...{clear}step 3/9  reward ...{clear}hello\n"
    )


def test_a_file_gets_a_line_for_long_phases_only():
    stream = io.StringIO()
    console = Console(stream=stream, width=80, total_steps=9)
    for phase, seconds in (("rollout", 61.24), ("reward", 0.2)):
        console.phase_entered(step=3, phase=phase)
        console.phase_exited(record(phase, seconds))
    console.close()
    assert stream.getvalue() == "step 3/9  rollout           61.2 s\n"


def test_other_ranks_print_nothing():
    stream = Terminal()
    console = Console(stream=stream, enabled=False)
    console.phase_entered(step=1, phase="rollout")
    console.step_table(1, metrics=METRICS)
    console.samples([SampleLine(prompt="a", response="b", reward=1.0)])
    console.close()
    assert stream.getvalue() == ""


def test_samples_are_one_escaped_line_each():
    stream = io.StringIO()
    rows = [
        SampleLine(prompt="2+3=", response="5\nand\x1b[31m\ttab", reward=1.0),
        SampleLine(prompt="p" * 500 + "END", response="START" + "r" * 500, reward=-0.5),
        SampleLine(prompt="q" * 500, response="", reward=0.0),
    ]
    Console(stream=stream, width=80).samples(rows)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines)
    assert lines[0].split(maxsplit=2) == ["sample", "1", r"2+3= -> 5\nand\x1b[31m\ttab"]
    assert "...pppp" in lines[1] and "END -> START" in lines[1] and lines[1].endswith("r...")
    assert len(lines[2]) >= 78  # an empty response leaves its room to the prompt


def test_before_and_after():
    stream = io.StringIO()
    rows = [
        BeforeAfterLine(prompt="1+1=", before="7", before_reward=0.0, after="2", after_reward=1.0),
        BeforeAfterLine(
            prompt="say\n" + "x" * 90,
            before="日本" * 60,
            before_reward=0.25,
            after="",
            after_reward=0.5,
        ),
    ]
    Console(stream=stream, width=80).before_after(rows)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["prompt", "before", "reward", "after", "reward"]
    assert {display_width(line) for line in lines} == {display_width(lines[0])}
    assert display_width(lines[0]) <= 80
    assert lines[2].split() == ["1+1=", "7", "0", "2", "1"]
    assert lines[-1].split() == ["mean", "0.125", "0.75"]
    Console(stream=stream, width=80).before_after([])


def test_an_ascii_stream_does_not_fail():
    stream = AsciiFile()
    Console(stream=stream, width=80).samples([SampleLine(prompt="ü", response="日", reward=1)])
    assert r"\xfc -> \u65e5" in stream.text()


@given(st.text(), st.integers(0, 40), st.booleans())
def test_cut_keeps_the_width_and_short_text(text, width, keep_end):
    line = one_line(text)
    assert line.isprintable()
    short = cut(line, width=width, keep_end=keep_end)
    assert display_width(short) <= width
    if display_width(line) <= width:
        assert short == line


@given(
    st.one_of(
        st.floats(-1e300, 1e300) | st.just(math.nan) | st.just(-math.inf),
        st.integers(-(10**15), 10**15),
    )
)
def test_numbers_are_short_and_close(value):
    text = format_number(value)
    assert len(text) <= 10
    if math.isfinite(value):
        assert float(text) == pytest.approx(value, rel=0.006, abs=0)
