"""The report's page: one HTML file that needs nothing else, not even a network.

Responses, prompts, names and log lines are untrusted text: everything goes through `escape`, and
the figures are embedded as JSON in which no `<` is left (`json_for_script`).
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import yaml

from rlhf_megatron import __version__
from rlhf_megatron.observability.report_assets import SCRIPT, STYLE
from rlhf_megatron.observability.report_charts import Chart, run_color
from rlhf_megatron.observability.report_data import RunData, finite
from rlhf_megatron.observability.report_events import Event
from rlhf_megatron.observability.report_lines import EVALUATION, SECTIONS
from rlhf_megatron.observability.report_phases import phase_color
from rlhf_megatron.observability.report_samples import Sample, spread
from rlhf_megatron.observability.report_summary import facts, time_shares, warnings
from rlhf_megatron.observability.text import format_number

MOST_EVALUATIONS = 40
MOST_EVENTS = 200
LEAST_SHARE_NAMED = 0.03


def page(runs: Sequence[RunData], *, charts: Sequence[Chart], plotly_script: str) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side"
    sections = {"Summary": _summary(runs)}
    sections |= {name: _section(name, runs=runs, charts=charts) for name in SECTIONS}
    sections["Events"] = _events(runs)
    sections["Responses"] = _responses(runs)
    sections["All figures"] = _figures_of_last_step(runs)
    sections["Configuration"] = _configuration(runs)
    sections = {name: body for name, body in sections.items() if body}
    links = "".join(f'<a href="#{_id(name)}">{escape(name)}</a>' for name in sections)
    body = "".join(
        f'<section><h2 id="{_id(name)}">{escape(name)}</h2>{text}</section>'
        for name, text in sections.items()
    )
    figures = {
        f"chart{number}": chart.figure.to_plotly_json() for number, chart in enumerate(charts)
    }
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body data-charts="{len(charts)}" data-errors="0">
<header><h1>{escape(title)}</h1>{_heading(runs)}</header>
<div class="warn" id="errors" hidden></div>
<nav>{links}</nav>
<main>{body}</main>
<script type="application/json" id="figures">{json_for_script(figures)}</script>
<script>{plotly_script}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def json_for_script(value: Any) -> str:
    """JSON that nothing in it can end the script element around it, or open another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _dot(index: int) -> str:
    return f'<span class="dot" style="background:{run_color(index)}"></span>'


def _run_title(runs: Sequence[RunData], index: int) -> str:
    """Dot and name of a run; nothing where there is only one."""
    return f"<p><b>{_dot(index)}{escape(runs[index].label)}</b></p>" if len(runs) > 1 else ""


def _heading(runs: Sequence[RunData]) -> str:
    now = datetime.now(UTC)
    made = f"report of {now:%Y-%m-%d %H:%M} UTC, rlhf-megatron {__version__}"
    if len(runs) == 1:
        return f'<p class="faint">{escape(str(runs[0].folder.resolve()))} · {made}</p>'
    names = "".join(
        f"<span>{_dot(index)}{escape(run.label)}</span>" for index, run in enumerate(runs)
    )
    return f'<p class="faint">{made}</p><div class="runs">{names}</div>'


def _summary(runs: Sequence[RunData]) -> str:
    columns = [facts(run) for run in runs]
    head = ""
    if len(runs) > 1:
        cells = "".join(f"<th>{_dot(i)}{escape(run.label)}</th>" for i, run in enumerate(runs))
        head = f"<tr><th></th>{cells}</tr>"
    rows = []
    for row in zip(*columns, strict=True):
        if any(fact.value for fact in row):
            cells = "".join(f"<td>{escape(fact.value) or '–'}</td>" for fact in row)
            rows.append(f'<tr><th scope="row">{escape(row[0].name)}</th>{cells}</tr>')
    shares = [_where_time_went(run) for run in runs]
    if any(shares):
        cells = "".join(f"<td>{text}</td>" for text in shares)
        rows.append(f'<tr><th scope="row">Where the time went</th>{cells}</tr>')
    several = " several" if len(runs) > 1 else ""
    table = f'<div class="scroll"><table class="facts{several}">{head}{"".join(rows)}</table></div>'
    return _warnings(runs) + table + _notes(runs)


def _where_time_went(run: RunData) -> str:
    shares = time_shares(run)
    bars = "".join(
        f'<span style="width:{share:.2%};background:{phase_color(phase)}" '
        f'title="{escape(phase)} {share:.1%}"></span>'
        for phase, share in shares.items()
    )
    named = ", ".join(
        f"{escape(phase)} {share:.0%}"
        for phase, share in shares.items()
        if share >= LEAST_SHARE_NAMED
    )
    return f'<div class="split">{bars}</div>{named}' if shares else ""


def _warnings(runs: Sequence[RunData]) -> str:
    found = [(run, text) for run in runs for text in warnings(run)]
    if not found:
        return "<p>Nothing unusual is recorded.</p>" if any(run.steps for run in runs) else ""
    items = "".join(
        f"<li>{escape(f'{run.label}: {text}' if len(runs) > 1 else text)}</li>"
        for run, text in found
    )
    return f'<div class="warn"><b>Worth a look</b><ul>{items}</ul></div>'


def _notes(runs: Sequence[RunData]) -> str:
    items = "".join(
        f"<li>{escape(f'{run.label}: {note}' if len(runs) > 1 else note)}</li>"
        for run in runs
        for note in run.notes
    )
    return f'<div class="notes faint"><ul>{items}</ul></div>' if items else ""


def _section(name: str, *, runs: Sequence[RunData], charts: Sequence[Chart]) -> str:
    parts = [
        f'<figure class="{"wide" if chart.is_wide else ""}"><h3>{escape(chart.title)}</h3>'
        f"<figcaption>{escape(chart.caption)}</figcaption>"
        f'<div class="chart" id="chart{number}" style="height:{chart.height}px"></div></figure>'
        for number, chart in enumerate(charts)
        if chart.section == name
    ]
    text = f'<div class="charts">{"".join(parts)}</div>' if parts else ""
    return text + (_evaluations(runs) if name == EVALUATION else "")


def _evaluations(runs: Sequence[RunData]) -> str:
    text = ""
    for index, run in enumerate(runs):
        rows = spread(run.evaluations, most=MOST_EVALUATIONS)
        keys = list({key: None for row in rows for key in row if key.startswith("evaluation/")})
        if not keys:
            continue
        head = "".join(
            f'<th class="number">{escape(key.removeprefix("evaluation/").replace("_", " "))}</th>'
            for key in keys
        )
        lines = "".join(
            f"<tr><td>{row['step']}</td>{''.join(_cell(row.get(key)) for key in keys)}</tr>"
            for row in rows
        )
        shown = f"{len(rows)} of {len(run.evaluations)} evaluations"
        left_out = f"<p class='faint'>{shown}</p>" if len(rows) < len(run.evaluations) else ""
        text += (
            f"{_run_title(runs, index)}{left_out}<div class='scroll'><table>"
            f"<tr><th>after step</th>{head}</tr>{lines}</table></div>"
        )
    return text and f"<details><summary>Evaluations as a table</summary><div>{text}</div></details>"


def _cell(value: Any) -> str:
    number = finite(value)
    return f'<td class="number">{"–" if number is None else format_number(number)}</td>'


def _events(runs: Sequence[RunData]) -> str:
    text = ""
    for index, run in enumerate(runs):
        if not run.events:
            continue
        shown = run.events[-MOST_EVENTS:]
        left_out = len(run.events) - len(shown)
        more = f'<p class="faint">{left_out} earlier ones are left out</p>' if left_out else ""
        lines = "".join(_event_line(event) for event in shown)
        text += (
            f"{_run_title(runs, index)}{more}<div class='scroll'><table><tr><th>time</th>"
            f"<th class='number'>step</th><th>what</th></tr>{lines}</table></div>"
        )
    return text


def _event_line(event: Event) -> str:
    when = f"{event.when:%Y-%m-%d %H:%M:%S}" if event.when is not None else ""
    step = "" if event.step is None else event.step
    return f"<tr><td>{when}</td><td class='number'>{step}</td><td>{escape(event.text)}</td></tr>"


def _responses(runs: Sequence[RunData]) -> str:
    """By step, the runs below each other."""
    steps = sorted({step for run in runs for step in run.samples.by_step})
    if not steps:
        return ""
    per_run = [
        f"{f'{run.label}: ' if len(runs) > 1 else ''}{len(run.samples.by_step)} of "
        f"{run.samples.num_files} steps"
        for run in runs
        if run.samples.num_files
    ]
    text = (
        f'<p class="faint">{escape("; ".join(per_run))}. Of each step the responses with the '
        "highest and the lowest reward and some evenly in between, prompt above response; all are "
        "in rollouts/ of the run's folder.</p>"
    )
    for step in steps:
        body = ""
        for index, run in enumerate(runs):
            samples = run.samples.by_step.get(step)
            if samples:
                count = f"{len(samples)} of {run.samples.num_responses[step]} responses"
                body += f"{_run_title(runs, index)}<p class='faint'>{count}</p>"
                body += "".join(map(_sample, samples))
        is_open = " open" if step == steps[-1] else ""
        text += f"<details{is_open}><summary>Step {step}</summary><div>{body}</div></details>"
    return text


def _sample(sample: Sample) -> str:
    reward = "no score" if sample.reward is None else f"reward {format_number(sample.reward)}"
    facts_of = [reward]
    if sample.response_tokens is not None:
        facts_of.append(f"{sample.response_tokens} tokens")
    if sample.truncated:
        facts_of.append("truncated")
    response = escape(sample.response) or '<i class="faint">(empty)</i>'
    return (
        f'<div class="sample"><b>{", ".join(facts_of)}</b>'
        f'<div class="text faint">{escape(sample.prompt)}</div>'
        f'<div class="text response">{response}</div></div>'
    )


def _figures_of_last_step(runs: Sequence[RunData]) -> str:
    last = [run.steps[-1] if run.steps else {} for run in runs]
    keys = list({key: None for row in last for key in row if key not in ("step", "nonfinite")})
    if not keys:
        return ""
    head = "".join(
        f'<th class="number">{f"{escape(run.label)}, " if len(runs) > 1 else ""}'
        f"step {run.last_step}</th>"
        for run in runs
    )
    lines = "".join(
        f"<tr><td>{escape(key)}</td>{''.join(_cell(row.get(key)) for row in last)}</tr>"
        for key in sorted(keys)
    )
    return (
        "<details><summary>Every metric of the last step</summary><div class='scroll'><table>"
        f"<tr><th>metric</th>{head}</tr>{lines}</table></div></details>"
    )


def _configuration(runs: Sequence[RunData]) -> str:
    text = _differences(runs) if len(runs) > 1 else ""
    for run in runs:
        if run.config:
            shown = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            name = f"{run.label}: " if len(runs) > 1 else ""
            text += (
                f"<details><summary>{escape(name)}the whole configuration, as resolved</summary>"
                f"<div><pre>{escape(shown)}</pre></div></details>"
            )
    return text


def _differences(runs: Sequence[RunData]) -> str:
    flat = [_flat(run.config) for run in runs]
    keys = list({key: None for config in flat for key in config})
    lines = "".join(
        f"<tr><td>{escape(key)}</td>"
        + "".join(f"<td>{escape(str(config.get(key, '–')))}</td>" for config in flat)
        + "</tr>"
        for key in keys
        if len({str(config.get(key)) for config in flat}) > 1
    )
    if not lines:
        return "<p>The runs have the same configuration.</p>"
    head = "".join(f"<th>{_dot(i)}{escape(run.label)}</th>" for i, run in enumerate(runs))
    return (
        "<p>Keys in which the runs differ:</p><div class='scroll'><table>"
        f"<tr><th>key</th>{head}</tr>{lines}</table></div>"
    )


def _flat(tree: Any, *, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, prefix=f"{prefix}.{key}" if prefix else str(key))
    return found
