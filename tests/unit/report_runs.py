"""Run folders as the trainer leaves them, and what a report's page holds."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PHASES = ("rollout", "reward", "update_critic", "update_actor", "reshard")
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def metrics_row(step: int, *, seed: int = 1) -> dict[str, Any]:
    """Figures that differ from each other, and from step to step."""
    noise = (step * 7919 * seed % 101) / 1000
    row: dict[str, Any] = {
        "step": step,
        "reward/mean": 0.3 + noise,
        "reward/std": 0.05 + noise / 7,
        "response/length_mean": 100.5 + noise,
        "response/truncated_fraction": noise / 3,
        "kl/mean": noise * 11,
        "kl/coef": 0.02 + step * 1e-4,
        "ppo/entropy": 2.0 - noise,
        "ppo/policy_loss": -noise / 13,
        "ppo/approx_kl": noise / 17,
        "ppo/clip_fraction": noise / 19,
        "ppo/ratio_mean": 1 + noise / 23,
        "ppo/ratio_max": 1.5 + noise,
        "critic/value_loss": noise / 29,
        "critic/explained_variance": 0.5 - noise,
        "grad_norm/actor": 0.7 + noise,
        "grad_norm/critic": 1.7 + noise,
        "lr/actor": 1e-6 * step,
        "lr/critic": 2e-6 * step,
        "parity/logprob_abs_diff_mean": 1e-7 * (1 + noise),
        "parity/logprob_abs_diff_max": 1e-6 * (1 + noise),
        "reshard/seconds": 0.02 + noise,
        "train/throughput_tokens_per_sec": 400 + 100 * noise,
        "train/mfu": 0.3 + noise,
        "gpu/memory_active_gb": 0.7 + noise / 31,
        "time/step_seconds": 6.0 + noise,
        "time/idle_share": 0.1 + noise,
        "time/idle_share_max": 0.2 + noise,
        "memory/step_peak_gb": 9.0,
    }
    for number, phase in enumerate(PHASES, start=1):
        row[f"time/{phase}_seconds"] = 0.3 * number + noise / 10
        row[f"memory/{phase}_peak_gb"] = 0.5 + number / 10 + noise
    return row


def ledger_rows(step: int, *, ranks: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "rank": rank,
            "phase": phase,
            "seconds": 1.0,
            "allocated_gb": 0.5,
            "reserved_gb": 0.6,
            "peak_gb": 0.5 + number / 10 + (step * (rank + 3) % 7) / 100,
        }
        for rank in range(ranks)
        for number, phase in enumerate((*PHASES, "step"), start=1)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_run(
    folder: Path, *, steps: int = 6, seed: int = 1, name: str = "tiny", response: str = "fine"
) -> Path:
    """A run of so many steps out of 6, evaluated every 2, with two responses a step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"run:\n  name: {json.dumps(name)}\n  steps: 6\n  seed: {seed}\n"
        "rollout:\n  max_response_tokens: 12\n"
        "reward:\n  api_key: hunter2hunter2\n  url: https://me:pass@host/score\n"
    )
    write_lines(folder / "metrics.jsonl", [metrics_row(s, seed=seed) for s in range(1, steps + 1)])
    write_lines(folder / "ledger.jsonl", [r for s in range(steps + 1) for r in ledger_rows(s)])
    write_lines(
        folder / "evaluations.jsonl",
        [
            {"step": s, "evaluation/reward_mean": 0.2 + s / 10, "evaluation/reward_std": 0.1}
            for s in range(0, steps + 1, 2)
        ],
    )
    for step in range(1, steps + 1):
        rows = [
            {
                "prompt": f"prompt {step} <b>",
                "response": response,
                "reward": 0.25 * sample,
                "truncated": sample == 1,
                "response_tokens": 5,
            }
            for sample in range(2)
        ]
        write_lines(folder / "rollouts" / f"step_{step:06d}.jsonl", rows)
    return folder


@dataclass
class Page(HTMLParser):
    """What a browser would make of the page, as far as the tests ask."""

    text: str = ""
    """Of the body, scripts left out, entities resolved."""
    tags: dict[str, int] = field(default_factory=dict)
    handlers: list[str] = field(default_factory=list)
    """Attributes that would run a script, or load something."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Chart's title -> figure."""

    @classmethod
    def read(cls, path: Path) -> "Page":
        page = cls()
        HTMLParser.__init__(page)
        page._open, page._titles, page._scripts = [], [], []
        page.feed(path.read_text(encoding="utf-8"))
        by_id = json.loads(next(text for text in page._scripts if text.startswith("{")))
        assert list(by_id) == [f"chart{number}" for number in range(len(by_id))]
        page.figures = {name: by_id[chart] for chart, name in page._titles}
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in ("meta", "link", "img"):
            self._open.append(tag)
        for name, value in attrs:
            outside = name in ("src", "href") and not str(value).startswith(("#", "data:,"))
            if name.startswith("on") or outside:
                self.handlers.append(f"{tag} {name}={value}")
        if tag == "h3":
            self._title = ""
        if dict(attrs).get("class") == "chart":
            self._titles.append((dict(attrs)["id"], self._title))

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self._scripts.append(data)
        elif inside != "style":
            self.text += data
        if inside == "h3":
            self._title += data

    def lines(self, title: str) -> list[dict[str, Any]]:
        """The traces of a chart, bands left out."""
        return [trace for trace in self.figures[title]["data"] if trace["name"] != "band"]
