"""One rank of two raises, exits, hangs or is stopped, in each phase of a step: how the job ends.

    python tests/faults/rank_faults.py --all

prints, for each phase and kind, how long after the fault the other rank has ended, and the first
line that it said. The limit of a phase is LIMIT_SECONDS; the jobs mostly wait for it, so that some
can run side by side (--at-once). The fault is planted through a listener of the phase ledger,
SECONDS_INTO_PHASE after it begins.

    python tests/faults/rank_faults.py --all --device cuda --kind exit --kind kill --at-once 13

does it on two GPUs (or with both ranks on one) over NCCL, in bf16, and looks afterwards whether any
process is left on them.
"""

import argparse
import faulthandler
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_use import gpu_use, left_on_gpus
from tiny_run import LONGEST_SECONDS, Job, listen_to_phases, make_files, preload, settings

LIMIT_SECONDS = 30.0
SECONDS_BEYOND_LIMIT = 15.0
"""Within which the job is over."""
KINDS = ("raise", "exit", "stop", "hang")
"""RuntimeError; os._exit; SIGSTOP to its own process; an endless wait in Python."""
KILL = "kill"
"""SIGKILL to its own process: as exit, but nothing of Python or the driver's runs any more."""
PHASES = (
    ("evaluation_rollout", 0),
    ("evaluation_reward", 0),
    ("rollout", 1),
    ("reward", 1),
    ("sleep", 1),
    ("log_prob", 1),
    ("ref_log_prob", 1),
    ("value", 1),
    ("advantage", 1),
    ("update_critic", 1),
    ("update_actor", 1),
    ("reshard", 1),
    ("checkpoint", 1),
)
WHERE_SIGNAL = signal.SIGUSR2
"""Makes a rank print where its threads are, even one that cannot run Python."""
EXIT_CODE = 7
SECONDS_INTO_PHASE = 1.5
"""More than heartbeat.READ_SECONDS: the others have seen the phase begin."""


@dataclass(frozen=True, kw_only=True)
class RankFault:
    """What happens to one rank."""

    kind: str
    phase: str
    step: int
    rank: int
    note: Path
    """Gets the time of the fault, in seconds since 1970."""
    limit_seconds: float = LIMIT_SECONDS
    """Of each phase of the job."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keys of the job, with __ for dots."""
    on_gpus: bool = False
    """Two of them, over NCCL; on a CPU else."""

    def install(self, rank: int) -> None:
        """In the process of `rank`, before the program starts."""
        faulthandler.register(WHERE_SIGNAL)
        if self.on_gpus and torch.cuda.device_count() == 1:
            # NCCL takes two ranks on one GPU only where they seem to be on hosts of their own.
            os.environ |= {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": "0"}
        if rank == self.rank:
            listen_to_phases(self)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if (step, phase) != (self.step, self.phase):
            return
        time.sleep(SECONDS_INTO_PHASE)
        self.note.write_text(str(time.time()))
        if self.kind == "raise":
            raise RuntimeError("planted")
        if self.kind == "exit":
            os._exit(EXIT_CODE)
        if self.kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)

    def phase_exited(self, record: Any) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job with a fault has ended."""

    codes: list[int]
    seconds: float
    """From the fault to the end of the last rank; infinity where either has not come."""
    text: str
    folder: Path
    """Of the run."""

    @property
    def first_line(self) -> str:
        return self.error_lines[0] if self.error_lines else ""

    @property
    def error_lines(self) -> list[str]:
        """Of the program: NCCL and torch write lines of other forms."""
        return [line for line in self.text.splitlines() if line.startswith("error: ")]

    def problems(self, fault: RankFault) -> list[str]:
        """What is not as it should be."""
        others = [code for rank, code in enumerate(self.codes) if rank != fault.rank]
        place = f"{fault.phase} of step {fault.step}"
        cause = {
            "raise": f"rank {fault.rank} failed in {place}: RuntimeError: planted",
            "exit": f"rank {fault.rank} died in {place}: its process is gone",
            KILL: f"rank {fault.rank} died in {place}: its process is gone",
            "stop": f"rank {fault.rank} stopped responding in {place}: its process is stopped",
            "hang": f"rank {fault.rank} hangs in {place}: for ",
        }[fault.kind]
        found = []
        # A rank whose interpreter is held up is ended from outside (distributed/stand_in.py).
        if others not in ([1], [-signal.SIGKILL]):
            found.append(f"exit codes {self.codes}")
        if not self.first_line.startswith(f"error: {cause}"):
            found.append(f"does not begin with {cause!r}")
        if len(self.error_lines) != 1:
            found.append("more than one error")
        if self.seconds > fault.limit_seconds + SECONDS_BEYOND_LIMIT:
            found.append(f"{self.seconds:.0f} s")
        return found


def run_side_by_side(
    faults: Sequence[RankFault],
    *,
    files: Path,
    folder: Path,
    longest_seconds: float = LONGEST_SECONDS - 60,  # before the limit of one test
) -> list[Outcome]:
    """A job for each fault, all at once, until they end. What has not ended after
    `longest_seconds` says where it is, and is killed."""
    jobs = [
        _start(fault, files=files, folder=folder / str(number))
        for number, fault in enumerate(faults)
    ]
    deadline = time.monotonic() + longest_seconds
    ends: dict[int, float] = {}
    try:
        while len(ends) < len(jobs) and time.monotonic() < deadline:
            for number, job in enumerate(jobs):
                if number not in ends and not job.alive:
                    ends[number] = time.time()
            time.sleep(0.05)
        for number, job in enumerate(jobs):
            if number not in ends:
                _say_where(job)
    finally:
        for job in jobs:
            job.kill()
    return [
        _outcome(job, fault=fault, end=ends.get(number))
        for number, (job, fault) in enumerate(zip(jobs, faults, strict=True))
    ]


def _say_where(job: Job) -> None:
    """Into the log of each rank that is left: its threads' stacks, and what the kernel says."""
    job.signal(WHERE_SIGNAL, ranks=range(len(job.ranks)))
    time.sleep(1)
    for rank, process in enumerate(job.ranks):
        if not process.is_alive():
            continue
        with (job.logs / f"rank_{rank}.txt").open("a") as file:
            file.write(f"\nrank {rank} has not ended; its threads in the kernel:\n")
            for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
                with suppress(OSError):
                    words = [(task / name).read_text().strip() for name in ("comm", "wchan")]
                    state = re.search(r"^State:\s*(.*)$", (task / "status").read_text(), re.M)
                    file.write(f"  {task.name} {' '.join(words)} {state and state[1]}\n")


def _start(fault: RankFault, *, files: Path, folder: Path) -> Job:
    """Two ranks, TP2, the hf engine."""
    gpu_settings: dict[str, Any] = {
        "parity__action": "warn",
        "doctor__at_start": False,
        "rollout__sleep_residual_gb": 1000,  # the jobs share the GPUs
    }
    gpu_settings |= {f"{role}__precision": "bf16" for role in ("actor", "critic", "ref")}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    words = settings(
        files,
        output=folder / "run",
        engine="hf",
        warmup__steps=0,
        run__steps=2,
        faults__phase_limit_seconds=fault.limit_seconds,
        distributed__timeout_seconds=300,
        **{
            f"{role}__parallel__pipeline_model_parallel_size": 1
            for role in ("actor", "critic", "ref")
        },
        **(gpu_settings if fault.on_gpus else {}),
        **fault.settings,
    )
    return Job(
        words,
        logs=folder / "logs",
        world_size=2,
        trigger=fault,  # type: ignore[arg-type]
        environment={"CUDA_VISIBLE_DEVICES": visible} if fault.on_gpus else None,
        start_method="spawn" if fault.on_gpus else "forkserver",
    )


def _outcome(job: Job, *, fault: RankFault, end: float | None) -> Outcome:
    came = end is not None and fault.note.exists()
    return Outcome(
        codes=[int(process.exitcode or 0) for process in job.ranks],
        seconds=end - float(fault.note.read_text()) if came else math.inf,
        text=job.text(),
        folder=job.logs.parent / "run",
    )


def faults(
    phases: Iterable[tuple[str, int]],
    *,
    kinds: Iterable[str],
    folder: Path,
    limit_seconds: float = LIMIT_SECONDS,
    on_gpus: bool = False,
) -> Iterator[RankFault]:
    """Each kind in each phase, of rank 0 and rank 1 in turn."""
    for index, (phase, step) in enumerate(phases):
        for number, kind in enumerate(kinds):
            yield RankFault(
                kind=kind,
                phase=phase,
                step=step,
                rank=(index + number) % 2,
                note=folder / f"{phase}_{kind}",
                limit_seconds=limit_seconds,
                on_gpus=on_gpus,
            )


def show(outcome: Outcome, *, fault: RankFault) -> bool:
    """Print the row of the table, and all that was said where something is wrong; whether so."""
    problems = outcome.problems(fault)
    print(
        f"| {fault.phase} | {fault.kind} | {fault.rank} | {outcome.seconds:.1f} | "
        f"{outcome.first_line} {'; '.join(['', *problems])}|",
        flush=True,
    )
    if problems:
        print(outcome.text, file=sys.stderr, flush=True)
    return bool(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every phase (default: rollout)")
    parser.add_argument("--phase", action="append", help="only this phase; may be repeated")
    parser.add_argument(
        "--kind", action="append", choices=(*KINDS, KILL), help="only this kind; may be repeated"
    )
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--limit-seconds", type=float, default=LIMIT_SECONDS, help="of a phase (default: 30)"
    )
    parser.add_argument(
        "--longest-seconds",
        type=float,
        default=LONGEST_SECONDS - 60,
        help="of a job (220)",
    )
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    before = gpu_use() if on_gpus else None
    wanted = options.phase or ([name for name, _ in PHASES] if options.all else ["rollout"])
    preload("hf")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rank_faults_") as name:
        folder = Path(name)
        make_files(folder / "files")
        print(f"limit of a phase: {options.limit_seconds:.0f} s\n")
        print("| phase | kind | rank | seconds to the end | first line |\n|---|---|---|---|---|")
        phases = [(phase, step) for phase, step in PHASES if phase in wanted]
        wanted_faults = list(
            faults(
                phases,
                kinds=options.kind or KINDS,
                folder=folder,
                limit_seconds=options.limit_seconds,
                on_gpus=on_gpus,
            )
        )
        for first in range(0, len(wanted_faults), options.at_once):
            some = wanted_faults[first : first + options.at_once]
            outcomes = run_side_by_side(
                some,
                files=folder / "files",
                folder=folder / "jobs",
                longest_seconds=options.longest_seconds,
            )
            for fault, outcome in zip(some, outcomes, strict=True):
                failed += show(outcome, fault=fault)
            shutil.rmtree(folder / "jobs")
    if before is not None:
        left = left_on_gpus(before)
        print(f"\non the GPUs afterwards: {'; '.join(left) or 'nothing that was not there before'}")
        failed += len(left)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
