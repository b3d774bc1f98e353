"""How much time a step one batch ahead saves: pipeline.depth 0 against 1 in one paired run.

    python benchmarks/overlap.py --steps 3 --sleep-seconds 2

Eight processes on this machine's CPU, a tiny random model, no vLLM. Actor, reference and engines
are on ranks 0-3, the critic on 4-6, rewards on 7. Rewards and the critic are made slow by a fixed
sleep: so long for the rewards and the values of a step, half of it for the critic's update. So the
figure says how the phases lie beside each other, and little of how busy the machine is. The two
runs go one after the other; the first step, which fills the pipeline, and the last, which drains
it, are left out. Prints the mean step times and their ratio.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from tiny_run import listen_to_phases, make_files, preload, run_to_the_end, settings  # noqa: E402

WORLD_SIZE = 8
PLACEMENT = (
    "[{ranks: 0-3, roles: [actor, ref, rollout]}, {ranks: 4-6, roles: [critic]}, "
    "{ranks: 7, roles: [reward]}]"
)
SLOW_PHASES = {"reward": 1.0, "value": 1.0, "update_critic": 0.5}
"""Of the sleep."""


class Slow:
    """A PhaseListener that sleeps at the entry of some phases, as a Trigger of tiny_run.Job."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def install(self, rank: int) -> None:
        listen_to_phases(self)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if step > 0 and phase in SLOW_PHASES:
            time.sleep(self.seconds * SLOW_PHASES[phase])

    def phase_exited(self, record: Any) -> None:
        pass


def step_seconds(files: Path, *, output: Path, depth: int, options: argparse.Namespace) -> float:
    """Mean of the steps between the first and the last."""
    changes: dict[str, Any] = {
        "run__steps": options.steps + 2,
        "warmup__steps": 0,
        "evaluation__prompts": "",
        "checkpoint__interval_steps": 0,
        "checkpoint__final": "false",
        "export__final": "false",
        "parity__at_start": "false",
        "rollout__prompts_per_step": 4,
        "ppo__mini_batch_samples": 8,
        "ppo__epochs": 1,
        "placement": PLACEMENT,
        "pipeline__depth": depth,
        "ppo__importance_sampling__cap": 2,
        "distributed__timeout_seconds": 600,
        "critic__parallel__tensor_model_parallel_size": 1,
        "critic__parallel__pipeline_model_parallel_size": 1,
    }
    words = settings(files, output=output, engine="hf", **changes)
    trigger: Any = Slow(options.sleep_seconds)
    run_to_the_end(
        words, logs=output.with_name(f"{output.name}_logs"), world_size=WORLD_SIZE, trigger=trigger
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["time/step_seconds"] for line in lines[1:-1])


@contextmanager
def _folder(name: str) -> Any:
    """A given folder, which stays, or a temporary one."""
    if name:
        Path(name).mkdir(parents=True, exist_ok=True)
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="overlap_") as made:
        yield Path(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default: 3)")
    parser.add_argument(
        "--sleep-seconds", type=float, default=4.0, help="of a slow phase (default: 4)"
    )
    parser.add_argument("--folder", default="", help="where runs stay (default: nowhere)")
    options = parser.parse_args()
    preload("hf")
    with _folder(options.folder) as folder:
        make_files(folder)
        seconds = [
            step_seconds(folder, output=folder / f"depth_{depth}", depth=depth, options=options)
            for depth in (0, 1)
        ]
    print(
        f"mean step: depth 0 {seconds[0]:.2f} s, depth 1 {seconds[1]:.2f} s, "
        f"ratio {seconds[1] / seconds[0]:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
