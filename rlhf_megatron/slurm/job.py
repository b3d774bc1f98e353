"""The batch step of a job: check the nodes, train, and decide whether to go back into the queue.

Slurm runs it on the first node of the allocation, outside any container. It is the process that
SIGUSR1 reaches before the time limit (`sbatch --signal=B:USR1@SECONDS`), and hands the signal on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED_RESUMABLE,
    UserError,
)
from rlhf_megatron.slurm.control import Scontrol
from rlhf_megatron.slurm.follow import Follower
from rlhf_megatron.slurm.history import History, Start, current_checkpoint, now
from rlhf_megatron.slurm.node_check import BadNodes, check_nodes, report
from rlhf_megatron.slurm.plan import JobPlan, make_plan
from rlhf_megatron.slurm.steps import check_step, single_step, training_step
from rlhf_megatron.slurm.verdict import Ending, Verdict, judge

LAST_SECONDS = 15.0
"""After the SIGTERM of a time limit that came too soon: so long for the tasks to save. This script
is killed KillWait after it (30 s by default), and has to put the job back before."""
POLL_SECONDS = 0.2
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def main(arguments: Sequence[str], *, repository: Path) -> int:
    """Run the batch step; returns its exit code. The working folder becomes `repository`."""
    os.chdir(repository)
    try:
        plan = make_plan(arguments, environment=os.environ, repository=repository)
        plan.logs.mkdir(parents=True, exist_ok=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: OUTPUT_DIR: {error}; give a folder that all nodes share", file=sys.stderr)
        return EXIT_BAD_INPUT
    return BatchJob(plan).run()


class BatchJob:
    """One start of a job. Made on the main thread, once: it takes over the signals."""

    def __init__(self, plan: JobPlan) -> None:
        self._step: subprocess.Popen[bytes] | None = None
        self._asked_to_yield = False
        self._terminated_at = 0.0
        signal.signal(signal.SIGUSR1, self._yield)
        signal.signal(signal.SIGTERM, self._terminate)
        self._plan, self._allocation = plan, plan.allocation
        self._scontrol = Scontrol(plan.allocation.job)
        self._end_seconds = self._scontrol.end_seconds()
        self._history = History(plan.run, job=plan.allocation.job)
        self._bad_nodes = BadNodes(plan.bad_nodes)

    def run(self) -> int:
        """All of it. Returns the exit code of the batch script."""
        began, before = now(), current_checkpoint(self._plan.run)
        self._announce()
        self._set_rendezvous()
        bad = self._check_nodes()
        if bad and len(bad) == len(self._allocation.nodes) > 1:
            say(
                "no node passed the check, so it is hardly the nodes: see "
                f"{self._plan.logs}/check_*.txt; not put back into the queue"
            )
            return EXIT_FAILED
        code = EXIT_FAILED if bad else self._train()
        after = current_checkpoint(self._plan.run)
        cancelled = code != EXIT_DONE and self._is_cancelled()
        fruitless = self._history.num_fruitless() + 1 if before == after else 0
        ending = Ending(
            exit_code=code,
            asked_to_yield=self._asked_to_yield,
            cancelled=cancelled,
            fruitless=fruitless,
            restarts=self._allocation.restarts,
            bad_nodes=bad,
        )
        verdict = judge(ending, limits=self._plan.limits)
        self._history.add(
            Start(
                restarts=self._allocation.restarts,
                began=began,
                ended=now(),
                nodes=self._allocation.nodes,
                bad_nodes=bad,
                exit_code=code,
                checkpoint_before=before,
                checkpoint_after=after,
                requeue=verdict.requeue,
                reason=verdict.reason,
            )
        )
        self._act(verdict, bad=bad)
        return code

    def _announce(self) -> None:
        allocation = self._allocation
        end = self._end_seconds
        limit = "none" if end is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end))
        say(
            f"job {allocation.job}, start {allocation.restarts + 1}: {len(allocation.nodes)} nodes "
            f"({', '.join(allocation.nodes)}) of {allocation.tasks_per_node} tasks; time limit: "
            f"{limit}; run: {self._plan.run}; logs: {self._plan.logs}"
        )

    def _set_rendezvous(self) -> None:
        """In the steps' environment, in place of what the shell of the sbatch may have held."""
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
        os.environ["MASTER_ADDR"] = self._scontrol.address_of(self._allocation.nodes[0])
        os.environ["MASTER_PORT"] = str(self._allocation.port)
        if self._end_seconds is not None:  # older Slurms do not say it
            os.environ.setdefault("SLURM_JOB_END_TIME", str(int(self._end_seconds)))
        say(f"ranks meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")

    def _check_nodes(self) -> tuple[str, ...]:
        """The nodes on which not to train."""
        plan, nodes = self._plan, self._allocation.nodes
        known = self._bad_nodes.among(nodes)
        if known:
            say(f"listed in {self._bad_nodes.path}: {', '.join(known)}")
            return known
        if not plan.check:
            return ()
        begin = time.monotonic()
        result = check_nodes(
            {
                node: check_step(
                    plan.check,
                    node=node,
                    allocation=self._allocation,
                    container=plan.container,
                    logs=plan.logs,
                )
                for node in nodes
            },
            logs=plan.logs,
            timeout_seconds=plan.check_seconds,
            interrupted=lambda: self._asked_to_yield or bool(self._terminated_at),
        )
        for node, code in result.unknown.items():
            say(
                f"the check could not be run on {node} (exit code {code}, see "
                f"{plan.logs}/check_{node}.txt); going on without it"
            )
        for node in result.bad:
            say(f"{node} did not pass the check:\n{last_lines(report(node, logs=plan.logs))}")
        if len(result.bad) < len(nodes) or len(nodes) == 1:
            self._bad_nodes.add(result.bad, job=self._allocation.job, logs=plan.logs)
        say(f"nodes checked in {time.monotonic() - begin:.0f} s, not fit: {len(result.bad)}")
        return result.bad

    def _train(self) -> int:
        plan, allocation = self._plan, self._allocation
        if plan.prepare:
            code = self._run_step(
                single_step(plan.prepare, allocation=allocation, container=plan.container)
            )
            if code != EXIT_DONE:
                return code
        command = training_step(
            plan.train, allocation=allocation, container=plan.container, logs=plan.logs
        )
        with Follower(plan.logs / "task_0000.txt"):
            code = self._run_step(command)
        if code not in (EXIT_DONE, EXIT_STOPPED_RESUMABLE):
            say(f"srun ended with exit code {code}; {further_errors(plan.logs)}")
        return code

    def _run_step(self, command: Sequence[str]) -> int:
        """srun's exit code, 128 + N where signal N has ended it."""
        if self._terminated_at or self._asked_to_yield:
            return EXIT_STOPPED_RESUMABLE
        self._step = subprocess.Popen(command)
        if self._asked_to_yield:  # between the two lines above
            self._step.send_signal(signal.SIGUSR1)
        while (code := self._step.poll()) is None and not self._is_out_of_time():
            time.sleep(POLL_SECONDS)
        self._step = None
        if code is None:
            return 128 + signal.SIGKILL  # as it will be
        return code if code >= 0 else 128 - code

    def _is_out_of_time(self) -> bool:
        return bool(self._terminated_at) and time.monotonic() > self._terminated_at + LAST_SECONDS

    def _is_cancelled(self) -> bool:
        """Whether the job was ended from outside, and not by its time limit."""
        seen = self._scontrol.state()
        return seen.name not in ("RUNNING", "") and seen.reason != "TimeLimit"

    def _act(self, verdict: Verdict, *, bad: tuple[str, ...]) -> None:
        if not verdict.requeue:
            say(verdict.reason)
            return
        say(f"{verdict.reason}; put back into the queue")
        error = self._scontrol.requeue()
        if error:
            say(f"scontrol requeue {self._allocation.job}: {error}; submit it again by hand")
        elif bad:
            error = self._scontrol.exclude(bad)
            if error:  # then the list of bad nodes keeps the next start off them
                say(f"could not exclude {', '.join(bad)}: {error}")

    def _yield(self, number: int, _: object) -> None:
        self._asked_to_yield = True
        say(f"{signal.Signals(number).name}: the run will stop and save")
        if self._step is not None:
            self._step.send_signal(signal.SIGUSR1)  # srun hands it on to all tasks

    def _terminate(self, *_: object) -> None:
        self._terminated_at = time.monotonic()  # Slurm has sent it to the tasks as well


def say(text: str) -> None:
    """A line of the job's own output."""
    print(f"[{time.strftime('%H:%M:%S')} slurm_job] {text}", flush=True)


def last_lines(text: str, *, count: int = 30) -> str:
    return "\n".join(text.splitlines()[-count:])


def further_errors(logs: Path) -> str:
    """What tasks other than 0, whose output is shown anyway, call an error."""
    found = []
    for path in sorted(logs.glob("task_*.txt"))[1:]:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"\n  {path.name}: {line}" for line in lines if "error:" in line.lower()][:2]
    if not found:
        return f"logs of all tasks: {logs}"
    return f"from the tasks' logs in {logs}:{''.join(found[:10])}"
