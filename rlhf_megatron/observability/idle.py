"""The share of a step in which a rank does none of its work, as far as the ledger's records tell.

Counted of a rank's step (its record STEP) are three things:

- outside phases: the step's seconds less those of its phases;
- waiting in a join, a phase in which all that enter it wait for the last (JOINS): from the rank's
  entry until the last entry of a rank before it left;
- waiting in a job-wide collective at the end of own work (WAITED, such as the gathering of the
  responses after the rollout): its seconds less those of the rank that waited least, which came
  last, so that what is left is the transfer itself.

Not counted: waiting inside a model's passes (pipeline bubbles, tensor and data parallel
collectives), and for the device. Entries of ranks on several hosts are compared by the hosts'
clocks, which NTP keeps within milliseconds of each other.
"""

from bisect import bisect_right
from collections.abc import Sequence

from rlhf_megatron.observability.ledger import (
    STEP,
    CommunicationRecord,
    PhaseRecord,
    StepLedger,
)

EXCHANGE = "exchange"
JOINS = (EXCHANGE, f"evaluation_{EXCHANGE}", "reshard")
"""Phases that begin with a collective of all ranks that enter."""
WAITED = ("exchange", "rewards")
"""Purposes of collectives that follow a rank's own work in a phase; in JOINS the entries tell."""


def idle_metrics(ledger: StepLedger) -> dict[str, float]:
    """time/idle_share, the mean over ranks, and time/idle_share_max; none without a whole step."""
    shares = idle_shares(ledger.phases, communication=ledger.communication)
    if not shares:
        return {}
    return {
        "time/idle_share": sum(shares.values()) / len(shares),
        "time/idle_share_max": max(shares.values()),
    }


def idle_shares(
    phases: Sequence[PhaseRecord], *, communication: Sequence[CommunicationRecord] = ()
) -> dict[int, float]:
    """Rank -> share, 0 to 1, of the one step that the records of all ranks cover.

    Records of older runs, without times of entry, give what is outside phases and in WAITED.
    """
    wholes = {record.rank: record for record in phases if record.phase == STEP}
    inside = [
        record
        for record in phases
        if record.phase != STEP and record.rank in wholes and _within(wholes[record.rank], record)
    ]
    idle = {rank: whole.seconds for rank, whole in wholes.items()}
    for record in inside:
        idle[record.rank] -= record.seconds
    for rank, seconds in (*_in_joins(inside), *_in_collectives(communication)):
        if rank in idle:
            idle[rank] += seconds
    return {
        rank: min(max(seconds / wholes[rank].seconds, 0.0), 1.0)
        for rank, seconds in idle.items()
        if wholes[rank].seconds > 0
    }


def _within(whole: PhaseRecord, record: PhaseRecord) -> bool:
    """Not a checkpoint between this step and the next, nor one that came before."""
    if record.step != whole.step:
        return False
    return not record.start_unix_seconds or record.start_unix_seconds < whole.end_unix_seconds


def _in_joins(phases: Sequence[PhaseRecord]) -> list[tuple[int, float]]:
    """(rank, seconds) of each wait. Nobody leaves a join before the last has entered, so a rank
    waits until the last entry before it leaves."""
    waits = []
    for phase in JOINS:
        records = [r for r in phases if r.phase == phase and r.start_unix_seconds]
        starts = sorted(record.start_unix_seconds for record in records)
        for record in records:
            last = starts[bisect_right(starts, record.end_unix_seconds) - 1]
            waits.append((record.rank, last - record.start_unix_seconds))
    return waits


def _in_collectives(communication: Sequence[CommunicationRecord]) -> list[tuple[int, float]]:
    """(rank, seconds) of each wait."""
    groups: dict[tuple[str, str, str], list[CommunicationRecord]] = {}
    for record in communication:
        if record.purpose in WAITED and record.during_phase not in ("", *JOINS):
            key = (record.during_phase, record.purpose, record.collective)
            groups.setdefault(key, []).append(record)
    waits = []
    for records in groups.values():
        least = min(record.seconds for record in records)
        waits += [(record.rank, record.seconds - least) for record in records]
    return waits
