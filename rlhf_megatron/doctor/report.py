"""What the checks found, as one table: red lines first."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from rlhf_megatron.errors import EXIT_DONE, EXIT_FAILED

WIDTH = 110


class Level(StrEnum):
    """How bad a finding is, worst first."""

    RED = "RED"
    """The run would not start, would break, or would be spoilt."""
    WARNING = "warning"
    """It would run, slowly or at a risk."""
    NOTE = "note"
    """Only for information: nothing was expected, or nothing could be read."""
    GOOD = "good"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    level: Level
    check: str
    found: str
    """With the nodes or ranks it was found on."""
    expected: str = ""
    way_out: str = ""
    """What to do about it. Only good lines and notes have none."""

    def __post_init__(self) -> None:
        assert self.way_out or self.level in (Level.GOOD, Level.NOTE), self


@dataclass(frozen=True)
class Report:
    """All findings on one subject."""

    subject: str
    """What was examined: "16 ranks on 2 nodes"."""
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, subject: str, findings: Iterable[Finding]) -> "Report":
        """Sorted by level; within one, in the order of the checks."""
        order = list(Level)
        return cls(subject, tuple(sorted(findings, key=lambda f: order.index(f.level))))

    @property
    def is_go(self) -> bool:
        """Whether there is no red line."""
        return not self.count(Level.RED)

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.is_go else EXIT_FAILED

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def summary(self) -> str:
        """ "doctor: no-go: 1 red, 2 warnings, 20 good; 16 ranks on 2 nodes"."""
        verdict = "go" if self.is_go else "no-go"
        warnings = self.count(Level.WARNING)
        counts = (
            f"{self.count(Level.RED)} red, {warnings} warning{'' if warnings == 1 else 's'}, "
            f"{self.count(Level.GOOD)} good"
        )
        return f"doctor: {verdict}: {counts}; {self.subject}"

    def table(self, *, worst_only: bool = False) -> str:
        """The summary, then a line or more for each finding (`worst_only`: red ones and warnings).

        What to do about a finding stands indented below it.
        """
        shown = [f for f in self.findings if not worst_only or f.way_out]
        width = max((len(f.check) for f in shown), default=0)
        lines = [self.summary]
        for finding in shown:
            head = f"  {finding.level.value:<7}  {finding.check:<{width}}  "
            text = finding.found
            if finding.expected:
                text += f"   [expected: {finding.expected}]"
            indent = " " * len(head)
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
            )
            if finding.way_out:
                lines += textwrap.wrap(
                    finding.way_out,
                    WIDTH,
                    initial_indent=f"{indent}-> ",
                    subsequent_indent=f"{indent}   ",
                    break_on_hyphens=False,
                    break_long_words=False,
                )
        return "\n".join(lines)

    def as_json(self) -> str:
        """One object: go, exit_code, subject, and findings as the table has them."""
        return json.dumps(
            {
                "go": self.is_go,
                "exit_code": self.exit_code,
                "subject": self.subject,
                "findings": [asdict(f) | {"level": f.level.value.lower()} for f in self.findings],
            }
        )


def good(check: str, found: str, expected: str = "") -> Finding:
    return Finding(level=Level.GOOD, check=check, found=found, expected=expected)


def note(check: str, found: str, expected: str = "") -> Finding:
    return Finding(level=Level.NOTE, check=check, found=found, expected=expected)


def warning(check: str, found: str, *, way_out: str, expected: str = "") -> Finding:
    return Finding(
        level=Level.WARNING, check=check, found=found, expected=expected, way_out=way_out
    )


def red(check: str, found: str, *, way_out: str, expected: str = "") -> Finding:
    return Finding(level=Level.RED, check=check, found=found, expected=expected, way_out=way_out)
