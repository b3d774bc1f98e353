"""The charts of a report, as plotly figures: one line per run in most of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rlhf_megatron.observability.report_data import RunData
from rlhf_megatron.observability.report_events import RESUME, SKIPPED
from rlhf_megatron.observability.report_lines import (
    EVALUATION,
    EVALUATION_LINES,
    SECTIONS,
    SPEED,
    TRAINING_LINES,
    Lines,
)
from rlhf_megatron.observability.report_phases import (
    idle_by_rank,
    peak_text,
    phase_color,
    phase_order,
    time_by_phase,
)
from rlhf_megatron.observability.thinning import MEAN, Thinned, rule_of, thin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RUN_COLORS = ("#4477aa", "#ee6677", "#228833", "#b59a1a", "#33aadd", "#aa3377", "#888888")
"""Told apart by colour-blind readers, on white and on black (after Paul Tol's "bright")."""

MOST_POINTS = 1000
LEAST_POINTS = 100
MOST_BARS = 60
MOST_RANKS = 64
MOST_MARKS = 40
LINE_HEIGHT = 240
DASHES = ("solid", "dot")
BAND = "band"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure and the words around it."""

    section: str
    title: str
    caption: str
    """What is shown, with its unit."""
    figure: "Figure"
    height: int = LINE_HEIGHT
    """Pixels."""
    is_wide: bool = False


def all_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The charts that the runs have figures for, by section."""
    found = [_throughput_and_memory(runs), _memory_by_phase(runs), _seconds_by_phase(runs)]
    found += [_line_chart(spec, runs=runs) for spec in (*TRAINING_LINES, *EVALUATION_LINES)]
    charts = [
        *_time_stacks(runs),
        *_idle_grids(runs),
        *(chart for chart in found if chart is not None),
    ]
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def points_per_line(num_runs: int) -> int:
    """Of a long run more steps are put together, and more so the more runs there are."""
    return max(min(MOST_POINTS, 4 * MOST_POINTS // num_runs), LEAST_POINTS)


def run_color(index: int) -> str:
    return RUN_COLORS[index % len(RUN_COLORS)]


def _line_chart(spec: Lines, *, runs: Sequence[RunData]) -> Chart | None:
    is_evaluation = spec.section == EVALUATION
    figure = _figure(unit=spec.unit, tickformat=spec.tickformat, is_log=spec.is_log)
    most, seen, bucket = points_per_line(len(runs)), set(), 1
    for index, run in enumerate(runs):
        rows = run.evaluations if is_evaluation else run.steps
        steps = [int(row["step"]) for row in rows]
        for key, dash in zip(spec.keys, DASHES, strict=False):
            values = run.series(key, of=rows)
            if all(value is None for value in values):
                continue
            seen |= set(values)
            line = thin(steps, values, most=most, key=key)
            bucket = max(bucket, line.bucket_steps)
            if spec.std and key == spec.keys[0]:
                std = thin(steps, run.series(spec.std, of=rows), most=most, key=spec.std)
                _add_band(figure, mean=line, std=std, color=run_color(index))
            _add_line(
                figure,
                line,
                name=run.label if len(spec.keys) == 1 else f"{run.label} {_last_word(key)}",
                color=run_color(index),
                dash=dash,
                mode="lines+markers" if is_evaluation or len(line.steps) < 3 else "lines",
            )
    if not figure.data or (spec.only_if_varies and len(seen) < 2):
        return None
    figure.data = sorted(figure.data, key=lambda trace: trace.name != BAND)  # bands lie below
    caption = spec.caption + _thinned_text(bucket, how=rule_of(spec.keys[0]))
    if spec.marks_events:
        caption += _mark_events(figure, runs=runs)
    return Chart(section=spec.section, title=spec.title, caption=caption, figure=figure)


def _thinned_text(bucket: int, *, how: str) -> str:
    return "" if bucket == 1 else f"; each point the {how} of {bucket} steps"


def _last_word(key: str) -> str:
    return key.replace("/", "_").rsplit("_", 1)[-1]


def _add_line(
    figure: "Figure",
    line: Thinned,
    *,
    name: str,
    color: str,
    dash: str = "solid",
    mode: str = "lines",
    yaxis: str = "y",
) -> None:
    figure.add_scatter(
        x=line.steps,
        y=line.values,
        name=escape(name),
        mode=mode,
        line={"color": color, "dash": dash, "width": 2},
        hovertemplate="%{y:.4~g}",
        yaxis=yaxis,
    )


def _add_band(figure: "Figure", *, mean: Thinned, std: Thinned, color: str) -> None:
    """One filled shape, out along the upper edge and back along the lower."""
    points = [
        (step, middle + spread, middle - spread)
        for step, middle, spread in zip(mean.steps, mean.values, std.values, strict=True)
        if middle is not None and spread is not None
    ]
    if not points:
        return
    figure.add_scatter(
        x=[p[0] for p in points] + [p[0] for p in reversed(points)],
        y=[p[1] for p in points] + [p[2] for p in reversed(points)],
        fill="toself",
        fillcolor=_transparent(color, opacity=0.18),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        name=BAND,
    )


def _mark_events(figure: "Figure", *, runs: Sequence[RunData]) -> str:
    """Draw resumes and skipped updates as upright lines; says so for the caption."""
    text = ""
    for kind, dash, words in ((RESUME, "dash", "resumed"), (SKIPPED, "dot", "updates skipped")):
        places = [
            (event.step, run_color(index))
            for index, run in enumerate(runs)
            for event in run.events
            if event.kind == kind and event.step is not None
        ]
        for step, color in places[:MOST_MARKS]:
            figure.add_vline(x=step, line={"color": color, "dash": dash, "width": 1})
        text += f"; upright {'dashes' if kind == RESUME else 'dots'}: {words}" if places else ""
    return text


def _throughput_and_memory(runs: Sequence[RunData]) -> Chart | None:
    throughput, memory = "train/throughput_tokens_per_sec", "gpu/memory_active_gb"
    figure = _figure(unit="tokens/s (solid)")
    most, bucket, largest_gb = points_per_line(len(runs)), 1, 0.0
    for index, run in enumerate(runs):
        steps = [int(row["step"]) for row in run.steps]
        largest_gb = max(largest_gb, *(gb or 0.0 for gb in (0.0, *run.series(memory))))
        for key, dash, axis in ((throughput, "solid", "y"), (memory, "dot", "y2")):
            values = run.series(key)
            if all(value is None for value in values):
                continue
            line = thin(steps, values, most=most, key=key)
            bucket = max(bucket, line.bucket_steps)
            name = f"{run.label} {'tokens/s' if axis == 'y' else 'GB'}"
            _add_line(figure, line, name=name, color=run_color(index), dash=dash, yaxis=axis)
    if not figure.data:
        return None
    figure.update_layout(
        yaxis={"rangemode": "tozero"},
        yaxis2={
            "title": {"text": "GB (dotted)", "standoff": 8},
            "overlaying": "y",
            "side": "right",
            "range": [0, largest_gb * 1.1 or 1.0],
            "tickmode": "auto",
            "nticks": 6,
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
    return Chart(
        section=SPEED,
        title="Throughput and memory",
        caption="left: prompt and response tokens per second of all ranks together; right: memory "
        "active at the step's end, worst rank (on a CPU the resident memory)"
        + _thinned_text(bucket, how="mean (memory: the largest)"),
        figure=figure,
    )


def _time_stacks(runs: Sequence[RunData]) -> Iterator[Chart]:
    """One chart per run, with one scale."""
    times = [time_by_phase(run, most_bars=MOST_BARS) for run in runs]
    tallest = max((time.tallest_seconds for time in times), default=0.0)
    for run, time in zip(runs, times, strict=True):
        if not time.steps:
            continue
        figure = _figure(unit="seconds per step")
        for phase, seconds in time.seconds.items():
            figure.add_bar(
                x=time.steps,
                y=seconds,
                name=escape(phase),
                marker={"color": phase_color(phase), "line": {"width": 0}},
                hovertemplate="%{y:.3~g} s",
            )
        figure.update_layout(
            barmode="stack",
            bargap=0.08,
            yaxis={"range": [0, tallest * 1.03]},
            showlegend=True,
            legend={
                "orientation": "h",
                "y": -0.2,
                "yanchor": "top",
                "x": 0,
                "traceorder": "normal",
            },
            margin={"b": 8},
        )
        title = "Time per phase" + (f": {run.label}" if len(runs) > 1 else "")
        yield Chart(
            section=SPEED,
            title=title,
            caption="seconds per step, slowest rank of each phase, in the order of the step"
            + _thinned_text(time.bucket_steps, how=MEAN),
            figure=figure,
            height=430,
            is_wide=len(runs) == 1,
        )


def _idle_grids(runs: Sequence[RunData]) -> Iterator[Chart]:
    """One chart per run."""
    for run in runs:
        idle = idle_by_rank(run, most_steps=MOST_BARS, most_ranks=MOST_RANKS)
        if not idle.steps:
            continue
        figure = _figure(unit="rank")
        figure.add_heatmap(
            x=idle.steps,
            y=idle.ranks,
            z=idle.shares,
            zmin=0,
            zmax=1,
            colorscale=[[0, "#dfeaf4"], [0.5, "#4477aa"], [1, "#0c1f33"]],
            colorbar={"tickformat": ".0%", "thickness": 12},
            name="idle",
            hovertemplate="step %{x}, rank %{y}: %{z:.1%}<extra></extra>",
        )
        figure.update_layout(
            hovermode="closest", yaxis={"autorange": "reversed", "type": "category", "nticks": 16}
        )
        yield Chart(
            section=SPEED,
            title="Idle per rank" + (f": {run.label}" if len(runs) > 1 else ""),
            caption="share of the step in which a rank does none of its work: outside phases, or "
            "waiting for other ranks where phases join"
            + _thinned_text(idle.bucket_steps, how=MEAN),
            figure=figure,
            height=max(LINE_HEIGHT, min(90 + 16 * len(idle.ranks), 700)),
            is_wide=len(runs) == 1,
        )


def _seconds_by_phase(runs: Sequence[RunData]) -> Chart | None:
    times = [time_by_phase(run, most_bars=MOST_BARS) for run in runs]
    phases = phase_order({phase for time in times for phase in time.mean_seconds})
    figure = _figure(unit="")
    for index, (run, time) in enumerate(zip(runs, times, strict=True)):
        if not time.mean_seconds:
            continue
        figure.add_bar(
            y=list(phases),
            x=[time.mean_seconds.get(phase) for phase in phases],
            orientation="h",
            name=escape(run.label),
            marker={
                "color": [phase_color(p) for p in phases] if len(runs) == 1 else run_color(index)
            },
            hovertemplate="%{x:.3~g} s",
        )
    if not figure.data:
        return None
    height = _turn(figure, num_bars=len(phases) * len(runs), unit="seconds per step")
    return Chart(
        section=SPEED,
        title="Mean time per step",
        caption="seconds by phase, mean over all steps, slowest rank",
        figure=figure,
        height=height,
    )


def _memory_by_phase(runs: Sequence[RunData]) -> Chart | None:
    phases = phase_order({phase for run in runs for phase in (*run.peaks, *run.planned_gb)})
    has_plan = any(run.planned_gb for run in runs)
    figure = _figure(unit="")
    num_traces = 0
    for index, run in enumerate(runs):
        color = run_color(index)
        bars: list[tuple[str, Mapping[str, float], dict[str, Any]]] = [
            ("measured", {p: peak.gb for p, peak in run.peaks.items()}, {"color": color}),
            (
                "planned",
                run.planned_gb,
                {
                    "color": _transparent(color, opacity=0.15),
                    "line": {"color": color, "width": 1.5},
                },
            ),
        ]
        for what, values, marker in bars:
            if not values:
                continue
            num_traces += 1
            figure.add_bar(
                y=list(phases),
                x=[values.get(phase) for phase in phases],
                orientation="h",
                name=escape(f"{run.label} {what}" if has_plan else run.label),
                marker=marker,
                customdata=[
                    peak_text(run, phase=phase) if what == "measured" else "planned"
                    for phase in phases
                ],
                hovertemplate="%{x:.4~g} GB (%{customdata})",
            )
    if not figure.data:
        return None
    height = _turn(figure, num_bars=len(phases) * num_traces, unit="GB")
    plan = "; filled: measured, outlined: planned" if has_plan else ""
    return Chart(
        section=SPEED,
        title="Peak memory",
        caption="GB by phase, worst rank and step (on a CPU the resident memory)" + plan,
        figure=figure,
        height=height,
    )


def _turn(figure: "Figure", *, num_bars: int, unit: str) -> int:
    """Lay out bars that lie, the first on top; the height that they need, in pixels."""
    figure.update_layout(
        barmode="group",
        bargap=0.25,
        hovermode="closest",
        xaxis={"title": {"text": unit}, "rangemode": "tozero", "tickformat": "", "nticks": 6},
        yaxis={"autorange": "reversed", "type": "category", "nticks": 0, "dtick": 1},
    )
    return max(LINE_HEIGHT, min(90 + 20 * num_bars, 900))


def _figure(*, unit: str, tickformat: str = "", is_log: bool = False) -> "Figure":
    from plotly.graph_objects import Figure

    return Figure(
        layout={
            "template": "none",
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "font": {"family": "system-ui, sans-serif", "size": 12},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "hovermode": "x unified",
            "xaxis": {
                "title": {"text": "step", "standoff": 4},
                "automargin": True,
                "tickformat": "d",
                "nticks": 8,
                "zeroline": False,
            },
            "yaxis": {
                "title": {"text": unit, "standoff": 8},
                "automargin": True,
                "tickformat": tickformat,
                "type": "log" if is_log else "-",
                "exponentformat": "power" if is_log else "e",
                "nticks": 6,
                "zeroline": False,
            },
        }
    )


def _transparent(color: str, *, opacity: float) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
