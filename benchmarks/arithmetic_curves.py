"""Curves and a table of runs that differ in their seed alone: their mean, lowest and highest.

    python benchmarks/arithmetic_curves.py RUN1 RUN2 RUN3 --svg docs/arithmetic.svg

Reads RUN/metrics.jsonl and RUN/evaluations.jsonl; prints a table in Markdown, whose accuracy is the
mean held-out reward (of configs/rewards/arithmetic.py:correct, which is 1 or 0). Runs that were
stopped count as far as all have come.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError

ACCURACY = "evaluation/reward_mean"
PARITY = "parity/logprob_abs_diff_mean"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of the runs."""

    key: str
    title: str
    digits: int = 3


COLUMNS = (
    Column(key=ACCURACY, title="held-out accuracy"),
    Column(key="reward/mean", title="reward in training"),
    Column(key="kl/mean", title="KL to the reference, nats a response", digits=2),
    Column(key="ppo/entropy", title="entropy, nats a token"),
    Column(key="critic/explained_variance", title="explained variance of the values", digits=2),
    Column(key=PARITY, title="log-prob difference, trainer and vLLM", digits=4),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A figure after a step, over the runs."""

    step: int
    mean: float
    lowest: float
    highest: float


Run = dict[str, dict[int, float]]
"""Key -> step -> value."""


def read_run(folder: Path) -> Run:
    """Raises UserError where the folder holds no run."""
    run: Run = {column.key: {} for column in COLUMNS}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the folders of runs (run.output_dir)")
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for key in run.keys() & row.keys():
                run[key][row["step"]] = row[key]
    return run


def over_runs(runs: Sequence[Run], *, key: str) -> list[Point]:
    """At the steps that all have."""
    steps = set.intersection(*(set(run[key]) for run in runs))
    points = []
    for step in sorted(steps):
        values = [run[key][step] for run in runs]
        points.append(Point(step=step, mean=mean(values), lowest=min(values), highest=max(values)))
    return points


def table(runs: Sequence[Run]) -> str:
    """A row for each evaluation: the mean over the runs, lowest and highest in brackets."""
    columns = {c.key: {p.step: p for p in over_runs(runs, key=c.key)} for c in COLUMNS}
    lines = [
        "| step | " + " | ".join(c.title for c in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for step in columns[ACCURACY]:
        cells = [_cell(columns[c.key].get(step), digits=c.digits) for c in COLUMNS]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(point: Point | None, *, digits: int) -> str:
    if point is None:  # step 0 has an evaluation alone
        return ""
    return f"{point.mean:.{digits}f} ({point.lowest:.{digits}f} to {point.highest:.{digits}f})"


def summary(folders: Sequence[Path], *, runs: Sequence[Run]) -> str:
    """Of each run: accuracy at its first and last evaluation, and the worst parity of any step."""
    lines = []
    for folder, run in zip(folders, runs, strict=True):
        accuracy, parity = run[ACCURACY], run[PARITY]
        text = f"{folder.name}: {len(parity)} steps"
        if accuracy:
            first, last = min(accuracy), max(accuracy)
            text += f"; held-out accuracy {accuracy[first]:.3f} after step {first}, "
            text += f"{accuracy[last]:.3f} after step {last}"
        if parity:
            worst = max(parity, key=lambda step: parity[step])
            text += f"; largest {PARITY} {parity[worst]:.4f} in step {worst}"
        lines.append(text)
    return "\n".join(lines)


# --- The drawing ------------------------------------------------------------------------------

PANEL_WIDTH, PANEL_HEIGHT = 300, 170
LEFT, TOP, RIGHT, BOTTOM = 48, 30, 12, 24
"""Margins of a panel, in pixels, for its figures and title."""
PANELS_IN_ROW = 3
STYLE = (
    "text{font:11px sans-serif;fill:#666}.title{font-size:12px;fill:#444}"
    ".line{fill:none;stroke:#4477aa;stroke-width:1.5}.band{fill:#4477aa;opacity:.25}"
    ".axis{stroke:#999;stroke-width:.5}"
)


def svg(runs: Sequence[Run]) -> str:
    """A panel for each figure: the mean as a line, lowest to highest as a band."""
    rows = -(-len(COLUMNS) // PANELS_IN_ROW)
    width, height = PANELS_IN_ROW * PANEL_WIDTH, rows * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}</style>'
    ]
    for index, column in enumerate(COLUMNS):
        x, y = index % PANELS_IN_ROW * PANEL_WIDTH, index // PANELS_IN_ROW * PANEL_HEIGHT
        points = over_runs(runs, key=column.key)
        parts.append(f'<g transform="translate({x},{y})">{"".join(_panel(column, points))}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(column: Column, points: Sequence[Point]) -> Iterator[str]:
    yield f'<text class="title" x="{LEFT}" y="18">{escape(column.title)}</text>'
    if not points:
        return
    last = max(points[-1].step, 1)
    low, high = min(0.0, *(p.lowest for p in points)), max(p.highest for p in points)
    span = high - low or 1.0
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM

    def place(step: int, value: float) -> str:
        x = LEFT + (right - LEFT) * step / last
        return f"{x:.1f},{bottom - (bottom - TOP) * (value - low) / span:.1f}"

    band = [place(p.step, p.highest) for p in points]
    band += [place(p.step, p.lowest) for p in reversed(points)]
    yield f'<polygon class="band" points="{" ".join(band)}"/>'
    yield f'<polyline class="line" points="{" ".join(place(p.step, p.mean) for p in points)}"/>'
    yield f'<path class="axis" d="M{LEFT},{TOP}V{bottom}H{right}" fill="none"/>'
    for value, y in ((low, bottom), (high, TOP + 8)):
        text = f"{value:.{column.digits}f}"
        yield f'<text x="{LEFT - 5}" y="{y}" text-anchor="end">{text}</text>'
    yield f'<text x="{LEFT}" y="{bottom + 15}">0</text>'
    yield f'<text x="{right}" y="{bottom + 15}" text-anchor="end">step {last}</text>'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Curves of runs that differ in their seed.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--svg", type=Path, help="write the curves there")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
        if options.svg is not None:
            options.svg.write_text(svg(runs), encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{summary(options.runs, runs=runs)}\n\n{table(runs)}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
