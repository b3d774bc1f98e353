"""A rank beyond its time limit: what every rank is doing, and which of them the others wait for."""

import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_megatron.distributed.heartbeat import Position

SHOWN_FRAMES = 12


@dataclass(frozen=True)
class Alarm:
    """Where a limit was exceeded. Not always by the rank that is to blame: others may have waited
    for it just as long."""

    rank: int
    phase: str
    seconds: float
    limit_seconds: float
    limit_key: str
    by_timeout: str = ""
    """What a collective said that has timed out, where that came first."""

    @property
    def limit(self) -> str:
        if self.by_timeout:
            return f"a collective timed out: {self.by_timeout}"
        return f"the limit is {self.limit_seconds:.0f} s ({self.limit_key})"


@dataclass(frozen=True)
class RankReport:
    """What one rank's main thread is doing."""

    rank: int
    phase: str
    number: int
    seconds: float
    waits_in: str
    """The collective it waits in; "" where it is busy with something else."""
    place: str
    """The innermost line of this program, or of the user's, that it is at."""
    stack: str
    """Its innermost frames."""

    @property
    def doing(self) -> str:
        return f"waits in {self.waits_in}, {self.place}" if self.waits_in else f"is at {self.place}"


@dataclass(frozen=True)
class SilentRank:
    """A rank that has not answered."""

    rank: int
    phase: str
    number: int
    process: str
    """To be read after "its process"."""


def report_of_this_rank(
    rank: int, *, position: Position, seconds: float, frames: list[traceback.FrameSummary]
) -> RankReport:
    """`frames`: of the main thread, from the outermost to the innermost."""
    waits_in, frames_outside = _collective(frames)
    last = frames_outside[-1] if frames_outside else None
    place = f"{last.filename}:{last.lineno} {last.name}" if last else "no Python frame"
    return RankReport(
        rank=rank,
        phase=position.phase,
        number=position.number,
        seconds=seconds,
        waits_in=waits_in,
        place=place,
        stack="".join(traceback.format_list(frames[-SHOWN_FRAMES:])),
    )


def main_thread_frames() -> list[traceback.FrameSummary]:
    """Of the main thread as it is, from the outermost to the innermost."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(traceback.extract_stack(frame)) if frame is not None else []


def stacks_of_all_threads() -> str:
    """For the log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for identity, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(identity, identity)}:\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def _collective(
    frames: list[traceback.FrameSummary],
) -> tuple[str, list[traceback.FrameSummary]]:
    """The collective that the frames are in, or "", and the frames outside of it."""
    for index, frame in enumerate(frames):
        if _is_collective(frame) and frame.name != "wrapper":
            name = frame.name if "torch" in frame.filename else "a pipeline's send or receive"
            outside = [f for f in frames[:index] if "c10d_logger" not in f.filename]
            return name, outside
    if frames and frames[-1].line is not None and ".wait()" in frames[-1].line:
        return "the end of a collective", frames
    return "", frames


def _is_collective(frame: traceback.FrameSummary) -> bool:
    path = frame.filename.replace("\\", "/")
    return path.endswith(
        (
            "torch/distributed/distributed_c10d.py",
            "megatron/core/pipeline_parallel/p2p_communication.py",
        )
    )


def describe(alarm: Alarm, *, reports: Iterable[RankReport], silent: Iterable[SilentRank]) -> str:
    """The message of the job's end. Its first line names the rank that is to blame, its phase and
    the cause; then come what all ranks are doing, and the stack of the one to blame."""
    found = sorted(reports, key=lambda report: report.rank)
    mute = sorted(silent, key=lambda rank: rank.rank)
    lines = [_first_line(alarm, found=found, mute=mute)]
    lines += _silent_lines(mute) + _report_lines(found)
    shown = _to_blame(found, alarm=alarm) if not mute else None
    if shown is not None:
        lines.append(f"the innermost frames of rank {shown.rank}:\n{shown.stack.rstrip()}")
    lines.append("the stacks of all threads are in logs/rank_*.log")
    return "\n".join(lines)


def _silent_lines(mute: list[SilentRank]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for rank in mute:
        text = f"no answer; last seen in {rank.phase}; its process {rank.process}"
        groups.setdefault(text, []).append(rank.rank)
    return [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in groups.items()]


def _report_lines(found: list[RankReport]) -> list[str]:
    groups: dict[tuple[str, str], list[RankReport]] = {}
    for report in found:
        groups.setdefault((report.phase, report.doing), []).append(report)
    return [
        f"  {ranks_in_words([r.rank for r in reports])}: {phase} for "
        f"{max(r.seconds for r in reports):.0f} s, {doing}"
        for (phase, doing), reports in groups.items()
    ]


def _first_line(alarm: Alarm, *, found: list[RankReport], mute: list[SilentRank]) -> str:
    if mute:
        rank = min(mute, key=lambda r: r.number)
        also = f" (and {len(mute) - 1} more ranks)" if len(mute) > 1 else ""
        return (
            f"rank {rank.rank}{also} stopped responding in {rank.phase}: its process "
            f"{rank.process}; rank {alarm.rank} has been in {alarm.phase} for "
            f"{alarm.seconds:.0f} s, {alarm.limit}"
        )
    blamed = _to_blame(found, alarm=alarm)
    if blamed is None:
        return f"rank {alarm.rank} hangs in {alarm.phase}: no rank has answered; {alarm.limit}"
    others = [report for report in found if report is not blamed]
    if blamed.waits_in and all(r.waits_in and r.number == blamed.number for r in others):
        return (
            f"rank {alarm.rank} hangs in {alarm.phase}: all ranks wait in a collective for "
            f"{alarm.seconds:.0f} s, so the network or the order of their collectives is at fault; "
            f"{alarm.limit}"
        )
    waiting = ", and the others wait for it or have gone on" if others else ""
    return (
        f"rank {blamed.rank} hangs in {blamed.phase}: for {blamed.seconds:.0f} s, "
        f"{alarm.limit}; it {blamed.doing}{waiting}"
    )


def _to_blame(found: list[RankReport], *, alarm: Alarm) -> RankReport | None:
    """The rank that is furthest behind; of several one in the phase that took too long, since roles
    on ranks of their own are in different ones, and one that waits for no other."""

    def order(report: RankReport) -> tuple[int, bool, bool, int]:
        return report.number, report.phase != alarm.phase, bool(report.waits_in), report.rank

    return min(found, key=order, default=None)


def ranks_in_words(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
