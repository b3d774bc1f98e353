"""How long the quickstart takes to stop, phase by phase, and whether it then goes on as if nothing
had been.

    python tools/make_quickstart.py --output data/quickstart
    python tests/faults/stop_runs.py [--engine hf|vllm] [--data data/quickstart]

One run, started again and again. Each start is sent SIGTERM as one of its ranks enters a phase, and
has to save, end with exit code 3, and leave a run that the next start takes up. At the end metrics,
evaluations, rollouts and weights must be bit-equal to those of a run that nobody stopped.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from test_stopping import ALL
from tiny_run import Job, Trigger, assert_same_run, preload, run_to_the_end

ROOT = Path(__file__).parents[2]
SECONDS = 30.0
STEPS = 6


def words(data: Path, *, output: Path, engine: str) -> list[str]:
    """The quickstart at its own size, with little warm-up and few steps."""
    changes = {
        "run.output_dir": output,
        "run.steps": STEPS,
        "logging.report": "false",
        "actor.model": data / "model",
        "data.prompts": data / "train.jsonl",
        "evaluation.prompts": data / "heldout.jsonl",
        "evaluation.max_prompts": 16,
        "evaluation.interval_steps": 2,
        "warmup.demonstrations": data / "demonstrations.jsonl",
        "warmup.steps": 5,
        "rollout.engine": engine,
        "rollout.tensor_parallel_size": 2 if engine == "vllm" else 1,
    }
    config = ROOT / "configs" / "quickstart_cpu.yaml"
    return ["--config", str(config), *(f"{key}={value}" for key, value in changes.items())]


def stop_in(phase: str, *, step: int, rank: int, options: list[str], logs: Path) -> float:
    """Seconds from the signal until the last rank has gone."""
    job = Job(options, logs=logs, trigger=Trigger(phase=phase, step=step, rank=rank))
    codes = job.wait(timeout_seconds=600)
    ended = time.time()
    assert codes == [3] * len(codes), f"{phase}: {codes}\n{job.text()}"
    signalled = re.findall(r"signalled at (\d+\.\d+)", job.text())
    assert len(signalled) == 1, f"{phase}: {signalled}\n{job.text()}"
    return ended - float(signalled[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=["hf", "vllm"], default="vllm")
    parser.add_argument("--data", type=Path, default=Path("data/quickstart"))
    options = parser.parse_args()
    preload(options.engine)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stopped = words(options.data, output=folder / "stopped", engine=options.engine)
        took = []
        for number, (phase, step, _) in enumerate(ALL):
            seconds = stop_in(
                phase, step=step, rank=number % 4, options=stopped, logs=folder / f"logs_{number}"
            )
            took.append(seconds)
            print(
                f"SIGTERM in {phase} of step {step}: exit code 3 after {seconds:.1f} s", flush=True
            )
        run_to_the_end(stopped, logs=folder / "logs_end")
        whole = words(options.data, output=folder / "whole", engine=options.engine)
        run_to_the_end(whole, logs=folder / "logs_whole")
        assert_same_run(folder / "stopped", expected=folder / "whole")
    print(f"{len(ALL)} stops, {max(took):.1f} s at most; the run is bit-equal to one without")
    return 0 if max(took) <= SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
