"""What a person sees on rank 0: a progress line, a table per step, samples, before and after."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rlhf_megatron.observability.ledger import PhaseRecord
from rlhf_megatron.observability.text import cut, display_width, format_number, one_line, pad

_SHORT_PHASE_SECONDS = 1.0
_LABEL_WIDTH = 9
_NAME_WIDTH = 14
_REWARD_WIDTH = 8
_MAXIMUM_WIDTH = 100
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(frozen=True)
class _Cell:
    name: str
    key: str
    scale: float = 1.0


_ROWS: dict[str, tuple[_Cell, ...]] = {
    "reward": (
        _Cell("mean", "reward/mean"),
        _Cell("std", "reward/std"),
        _Cell("kl", "kl/mean"),
        _Cell("kl coef", "kl/coef"),
    ),
    "response": (
        _Cell("tokens", "response/length_mean"),
        _Cell("truncated", "response/truncated_fraction"),
        _Cell("dropped", "reward/dropped"),
    ),
    "actor": (
        _Cell("loss", "ppo/policy_loss"),
        _Cell("approx kl", "ppo/approx_kl"),
        _Cell("ratio", "ppo/ratio_mean"),
        _Cell("clipped", "ppo/clip_fraction"),
        _Cell("entropy", "ppo/entropy"),
        _Cell("grad norm", "grad_norm/actor"),
        _Cell("lr", "lr/actor"),
    ),
    "critic": (
        _Cell("loss", "critic/value_loss"),
        _Cell("expl var", "critic/explained_variance"),
        _Cell("grad norm", "grad_norm/critic"),
        _Cell("lr", "lr/critic"),
    ),
    "parity": (
        _Cell("mean", "parity/logprob_abs_diff_mean"),
        _Cell("max", "parity/logprob_abs_diff_max"),
        _Cell("is weight", "off_policy/is_weight_mean"),
        _Cell("lag", "off_policy/weight_version_lag_max"),
    ),
    "reshard": (
        _Cell("MB", "reshard/bytes_received", 1e-6),
        _Cell("least MB", "reshard/bytes_minimum", 1e-6),
        _Cell("seconds", "reshard/seconds"),
    ),
    "speed": (
        _Cell("tokens/s", "train/throughput_tokens_per_sec"),
        _Cell("mfu", "train/mfu"),
        _Cell("memory GB", "gpu/memory_active_gb"),
        _Cell("idle", "time/idle_share"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class SampleLine:
    """One sampled response to show."""

    prompt: str
    response: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class BeforeAfterLine:
    """The responses to one prompt before and after training."""

    prompt: str
    before: str
    before_reward: float
    after: str
    after_reward: float


class Console:
    """Prints on rank 0; made with `enabled=False` on the others, it prints nothing.

    `width` in columns; by default the terminal's, at most 100. A PhaseListener: the progress line
    overwrites itself on a terminal; elsewhere (a Slurm log) a phase of a second or more gets a line
    of its own when it ends.
    """

    def __init__(
        self,
        *,
        total_steps: int = 0,
        stream: TextIO | None = None,
        width: int | None = None,
        enabled: bool = True,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._width = width or min(shutil.get_terminal_size().columns - 1, _MAXIMUM_WIDTH)
        self._total_steps = total_steps
        self._enabled = enabled
        self._overwrites = self._stream.isatty()
        self._line_open = False

    def message(self, text: str) -> None:
        """Print text as it is, below the progress line."""
        self._end_progress_line()
        self._write(text + "\n")

    def phase_entered(self, *, step: int, phase: str) -> None:
        """Show the running phase on a terminal."""
        if self._overwrites:
            text = cut(f"{self._step_title(step)}  {phase} ...", width=self._width)
            self._write(_CLEAR_LINE + text)
            self._line_open = True

    def phase_exited(self, record: PhaseRecord) -> None:
        """Report a phase of a second or more where lines cannot be overwritten."""
        if not self._overwrites and record.seconds >= _SHORT_PHASE_SECONDS:
            title = self._step_title(record.step)
            self._write(f"{title}  {record.phase:<14}{record.seconds:8.1f} s\n")

    def step_table(self, step: int, *, metrics: Mapping[str, float]) -> None:
        """Print a step's figures; rows and cells without a figure are left out."""
        title = self._step_title(step) + " "
        lines = [title + "-" * max(self._width - len(title), 3)]
        lines += _table(_cells(metrics), width=self._width)
        lines += _time_lines(metrics, width=self._width)
        self.message("\n".join(lines))

    def samples(self, rows: Sequence[SampleLine]) -> None:
        """Print responses, one a line: reward, the end of the prompt, the start of the response."""
        room = self._width - _LABEL_WIDTH - _REWARD_WIDTH - len("  ") - len(" -> ")
        for row in rows:
            prompt = one_line(row.prompt)
            response = one_line(row.response)
            prompt_room = max(room * 2 // 5, room - display_width(response))
            prompt = cut(prompt, width=prompt_room, keep_end=True)
            response = cut(response, width=room - display_width(prompt))
            reward = format_number(row.reward).rjust(_REWARD_WIDTH)
            self.message(f"{'sample':<{_LABEL_WIDTH}}{reward}  {prompt} -> {response}")

    def before_after(self, rows: Sequence[BeforeAfterLine]) -> None:
        """Print responses and rewards for the same prompts before and after training."""
        if not rows:
            return
        cells = [("prompt", "before", "reward", "after", "reward")]
        cells += [
            (
                one_line(row.prompt),
                one_line(row.before),
                format_number(row.before_reward),
                one_line(row.after),
                format_number(row.after_reward),
            )
            for row in rows
        ]
        before = sum(row.before_reward for row in rows) / len(rows)
        after = sum(row.after_reward for row in rows) / len(rows)
        mean = ("mean", "", format_number(before), "", format_number(after))
        widths = _text_widths(cells, width=self._width)
        lines = [_before_after_line(line, widths=widths) for line in (*cells, mean)]
        rule = "-" * display_width(lines[0])
        self.message("\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]]))

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        self._end_progress_line()

    def _step_title(self, step: int) -> str:
        return f"step {step}/{self._total_steps}" if self._total_steps else f"step {step}"

    def _end_progress_line(self) -> None:
        if self._line_open:
            self._write(_CLEAR_LINE)
            self._line_open = False

    def _write(self, text: str) -> None:
        if not self._enabled:
            return
        # A response may hold characters that the stream's encoding (a C locale) has not.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


def _cells(metrics: Mapping[str, float]) -> dict[str, list[tuple[str, str]]]:
    """Label -> (name, formatted value) of each figure that there is."""
    rows = {
        label: [
            (cell.name, format_number(metrics[cell.key] * cell.scale))
            for cell in cells
            if cell.key in metrics
        ]
        for label, cells in _ROWS.items()
    }
    held_out = [
        (cut(key.removeprefix("evaluation/"), width=_NAME_WIDTH), format_number(value))
        for key, value in metrics.items()
        if key.startswith("evaluation/")
    ]
    return {label: row for label, row in {**rows, "eval": held_out}.items() if row}


def _table(rows: Mapping[str, list[tuple[str, str]]], *, width: int) -> list[str]:
    """Rows of name-value cells in as many aligned columns, at most four, as the width holds."""
    lines: list[str] = []
    for columns in (4, 3, 2, 1):
        grid = [
            (label if start == 0 else "", cells[start : start + columns])
            for label, cells in rows.items()
            for start in range(0, len(cells), columns)
        ]
        widths = [
            _cell_widths([cells[c] for _, cells in grid if c < len(cells)]) for c in range(columns)
        ]
        lines = []
        for label, cells in grid:
            line = label.ljust(_LABEL_WIDTH)
            for (name, value), (name_width, value_width) in zip(cells, widths, strict=False):
                line += f"{name:<{name_width}} {value:>{value_width}}  "
            lines.append(line.rstrip())
        if max(map(len, lines), default=0) <= width:
            break
    return lines


def _cell_widths(cells: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """Width of the names and of the values of one column."""
    names = max((len(name) for name, _ in cells), default=0)
    return names, max((len(value) for _, value in cells), default=0)


def _time_lines(metrics: Mapping[str, float], *, width: int) -> list[str]:
    phases = {
        key.removeprefix("time/").removesuffix("_seconds"): value
        for key, value in metrics.items()
        if key.startswith("time/") and key.endswith("_seconds")
    }
    total = phases.pop("step", None)
    parts = [f"{name} {seconds:.2f}" for name, seconds in phases.items()]
    if total is None and not parts:
        return []
    text = "" if total is None else f"{total:.2f} s" + (": " if parts else "")
    # A no-break space keeps a phase and its seconds on one line.
    lines = textwrap.wrap(
        text + ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts),
        width=max(width, 2 * _LABEL_WIDTH),
        initial_indent="time".ljust(_LABEL_WIDTH),
        subsequent_indent=" " * _LABEL_WIDTH,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _text_widths(rows: Sequence[tuple[str, ...]], *, width: int) -> tuple[int, int, int]:
    """Columns of prompt, before and after: what they need, or a third of the room each."""
    room = width - 2 * _REWARD_WIDTH - 4 * len("  ")
    needs = [max(display_width(row[column]) for row in rows) for column in (0, 1, 3)]
    left, widths = room, [0, 0, 0]
    # The column that needs least is served first, so that its spare room goes to the others.
    for served, column in enumerate(sorted(range(3), key=lambda c: needs[c])):
        widths[column] = max(min(needs[column], left // (3 - served)), 4)
        left -= widths[column]
    return widths[0], widths[1], widths[2]


def _before_after_line(row: tuple[str, ...], *, widths: tuple[int, int, int]) -> str:
    prompt, before, before_reward, after, after_reward = row
    return "  ".join(
        (
            pad(cut(prompt, width=widths[0], keep_end=True), width=widths[0]),
            pad(cut(before, width=widths[1]), width=widths[1]),
            before_reward.rjust(_REWARD_WIDTH),
            pad(cut(after, width=widths[2]), width=widths[2]),
            after_reward.rjust(_REWARD_WIDTH),
        )
    )
