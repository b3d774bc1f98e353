"""Runs killed with SIGKILL at random moments, resumed, and compared with the run that was not.

    python tests/faults/kill_runs.py --engine hf --kills 20 --in-save 8 --seed 1
    python tests/faults/kill_runs.py --engine vllm --kills 20 --in-save 8 --seed 1

Float32, TP2 x PP2, 4 processes, a checkpoint after each step. `--in-save` of the runs are killed
while a checkpoint is being written, the others at a moment drawn from the whole run, its start
included. Each is resumed by the same command to the end; metrics.jsonl (less times, memory and
speed), evaluations, rollouts and the final weights must be those of the unbroken run, bit by bit.
Exit code 0 where all were, 1 otherwise. With --small 2 processes at TP2 and three steps. `make
test` runs the same with a few kills.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_run import (
    WORLD_SIZE,
    Job,
    assert_same_run,
    make_files,
    preload,
    run_to_the_end,
    settings,
)

SMALL: dict[str, Any] = {
    "run__steps": 3,
    "warmup__steps": 0,
    **{f"{role}__parallel__pipeline_model_parallel_size": 1 for role in ("actor", "critic", "ref")},
}
POLL_SECONDS = 0.002
LONGEST_SAVE_SECONDS = 0.15


@dataclass(frozen=True)
class Kill:
    """How one run was killed."""

    number: int
    in_save: bool
    """A checkpoint was being written: its folder had its temporary name."""
    steps_done: int
    seconds: float

    def __str__(self) -> str:
        where = "in a save" if self.in_save else "elsewhere"
        when = f"after {self.seconds:.2f} s and {self.steps_done} steps"
        return f"run {self.number}: killed {when}, {where}"


class Killer:
    """Breaks runs in a folder that holds the unbroken one, `whole`."""

    def __init__(
        self, folder: Path, *, engine: str, seed: int, whole_seconds: float, small: bool = False
    ) -> None:
        self._folder, self._engine, self._small = folder, engine, small
        self._random = random.Random(seed)
        self._whole_seconds = whole_seconds

    def kill_and_resume(self, number: int, *, in_save: bool) -> Kill:
        """Raises AssertionError where the resumed run differs from the unbroken one."""
        run = self._folder / f"run_{number}"
        words = self.words(run, asynchronous=number % 2 == 0)
        kill = None
        while kill is None:  # a run may end before its moment comes
            shutil.rmtree(run, ignore_errors=True)
            moment = self._random.uniform(0.2, self._whole_seconds)
            skipped = self._random.randrange(2 if self._small else 4) if in_save else None
            kill = self.kill(run, words=words, number=number, moment=moment, skip_saves=skipped)
        logs = self._folder / f"run_{number}_resumed"
        run_to_the_end(words, logs=logs, world_size=world_size(self._small))
        assert_same_run(run, expected=self._folder / "whole")
        return kill

    def words(self, run: Path, *, asynchronous: bool) -> list[str]:
        """The command line of the run in a folder."""
        # overwrite: a run that is killed before its first checkpoint begins anew.
        return settings(
            self._folder,
            output=run,
            engine=self._engine,
            run__overwrite=True,
            checkpoint__asynchronous=asynchronous,
            **(SMALL if self._small else {}),
        )

    def kill(
        self,
        run: Path,
        *,
        words: list[str],
        number: int,
        moment: float = 0.0,
        skip_saves: int | None = None,
    ) -> Kill | None:
        """Start the run in a folder and kill it in the save after `skip_saves` others; where that
        is None, `moment` seconds after the start. None where it, or the save, ended before."""
        former = _unfinished_saves(run)
        logs = run.with_name(f"{run.name}_killed")
        job = Job(words, logs=logs, world_size=world_size(self._small))
        if skip_saves is not None:
            self._wait_for_save(job, run=run, former=former, skip=skip_saves)
            time.sleep(self._random.uniform(0, LONGEST_SAVE_SECONDS))
        else:
            while job.running and time.monotonic() - job.started < moment:
                time.sleep(POLL_SECONDS)
        was_running = job.running
        seconds = time.monotonic() - job.started
        job.kill()
        in_save = bool(_unfinished_saves(run) - former)
        if not was_running or (skip_saves is not None and not in_save):
            return None
        metrics = run / "metrics.jsonl"
        steps = metrics.read_text().count("\n") if metrics.exists() else 0
        return Kill(number, in_save, steps, seconds)

    def _wait_for_save(self, job: Job, *, run: Path, former: set[str], skip: int) -> None:
        """Until the save after `skip` others has begun."""
        seen: set[str] = set()
        while job.running and len(seen) <= skip:
            seen |= _unfinished_saves(run) - former
            time.sleep(POLL_SECONDS)


def _unfinished_saves(run: Path) -> set[str]:
    """Names of checkpoints that are being written, or were when the run was killed."""
    return {path.name for path in (run / "checkpoints").glob("step_*.tmp-*")}


def world_size(small: bool) -> int:
    """Processes of a run."""
    return 2 if small else WORLD_SIZE


def make_whole(folder: Path, *, engine: str, small: bool = False) -> float:
    """The unbroken run; returns the seconds it took."""
    begin = time.monotonic()
    changes = SMALL if small else {}
    words = settings(folder, output=folder / "whole", engine=engine, **changes)
    run_to_the_end(words, logs=folder / "whole_logs", world_size=world_size(small))
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--kills", type=int, default=20, help="runs to kill (default: 20)")
    parser.add_argument("--in-save", type=int, default=8, help="of them in a save (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="fewer processes and steps")
    options = parser.parse_args()
    preload(options.engine)
    failed, inside = 0, 0
    with tempfile.TemporaryDirectory(prefix="kill_runs_") as folder:
        make_files(Path(folder))
        seconds = make_whole(Path(folder), engine=options.engine, small=options.small)
        killer = Killer(
            Path(folder),
            engine=options.engine,
            seed=options.seed,
            whole_seconds=seconds,
            small=options.small,
        )
        for number in range(options.kills):
            try:
                kill = killer.kill_and_resume(number, in_save=number < options.in_save)
            except AssertionError as error:
                failed += 1
                print(f"run {number}: DIFFERS: {error}", flush=True)
                continue
            inside += kill.in_save
            print(f"{kill}; resumed, bit-equal", flush=True)
            shutil.rmtree(Path(folder) / f"run_{number}")
    print(
        f"{options.engine}: {options.kills - failed} of {options.kills} killed runs resumed "
        f"bit-equal, {inside} of them killed in a save"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
