"""The simulator against real runs: rates from one run, the step times of other placements.

    python benchmarks/simulator_check.py --folder /tmp/check

Makes a small Llama and the quickstart's prompts, runs 10 steps of each placement on 4 ranks of this
machine's CPU (transformers as the engine), calibrates the simulator on the run `calibration`, whose
roles have layouts of their own, and prints the step time of every other one: simulated, measured,
ratio. Measured is the median of the steps after the second. On a quiet machine of two cores about 8
minutes. Runs that the folder holds already are not run again; --only NAME runs one of them.

CPU seconds tell what a noisy machine hides: they hardly depend on what else runs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.config import read_config
from rlhf_megatron.errors import UserError
from rlhf_megatron.launcher import launch, training_command
from rlhf_megatron.memory_report import role_models
from rlhf_megatron.simulator.calibrate import calibrate
from rlhf_megatron.simulator.cluster import Cluster, read_cluster, write_cluster
from rlhf_megatron.simulator.measured import read_run
from rlhf_megatron.simulator.setup import Workload, make_setup
from rlhf_megatron.simulator.steps import simulate
from rlhf_megatron.validation import METRICS_FILE

ROOT = Path(__file__).parents[1]
WORLD_SIZE = 4
STEPS = 10
CALIBRATION = "calibration"
ROLES = ("actor", "critic", "ref")
SPLIT = (
    "placement=[{ranks: 0-1, roles: [actor, ref, rollout]}, {ranks: 2-3, roles: [critic]}, "
    "{ranks: 0-3, roles: [reward]}]"
)


def sizes(role: str, *, tensor: int = 1, pipeline: int = 1) -> list[str]:
    at = f"{role}.parallel"
    return [
        f"{at}.tensor_model_parallel_size={tensor}",
        f"{at}.pipeline_model_parallel_size={pipeline}",
    ]


def everywhere(*, tensor: int = 1, pipeline: int = 1) -> list[str]:
    return [word for role in ROLES for word in sizes(role, tensor=tensor, pipeline=pipeline)]


PLACEMENTS: dict[str, list[str]] = {
    CALIBRATION: [*sizes("actor", tensor=2), *sizes("critic", pipeline=2), *sizes("ref")],
    "DP4": everywhere(),
    "TP2 x DP2": everywhere(tensor=2),
    "PP2 x DP2": everywhere(pipeline=2),
    "TP2 x PP2": everywhere(tensor=2, pipeline=2),
    "split, TP2 | PP2": [*everywhere(tensor=2), *sizes("critic", pipeline=2), SPLIT],
    "split, DP2 | DP2, depth 1": [
        *everywhere(),
        SPLIT,
        "pipeline.depth=1",
        "ppo.importance_sampling.cap=2",
    ],
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One placement."""

    name: str
    simulated: float
    measured: float
    simulated_cpu: float
    measured_cpu: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder: Path = options.folder
    make_files(folder)
    names = [options.only] if options.only else list(PLACEMENTS)
    for name in names:
        run_one(name, folder=folder)
    if options.only:
        return 0
    cluster, workload = calibrated(folder, cluster_file=options.cluster)
    checks = [
        check(name, folder=folder, cluster=cluster, workload=workload)
        for name in PLACEMENTS
        if (run_folder(name, folder=folder) / METRICS_FILE).is_file()
    ]
    show(checks)
    if options.json:
        found = [{"name": c.name, "ratio": c.ratio, **vars(c)} for c in checks]
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(0.8 <= c.ratio <= 1.25 for c in checks if c.name != CALIBRATION) else 1


def make_files(folder: Path) -> None:
    """The quickstart's prompts and tokenizer, and a model that is slow enough to be measured."""
    data = folder / "data"
    if data.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tool = ROOT / "tools" / "make_quickstart.py"
    subprocess.run([sys.executable, tool, "--output", data], check=True, stdout=subprocess.DEVNULL)
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(data / "model")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 768, 8
    LlamaForCausalLM(config).save_pretrained(data / "model")


def settings(name: str, *, folder: Path) -> list[str]:
    data = folder / "data"
    return [
        f"run.output_dir={run_folder(name, folder=folder)}",
        f"run.steps={STEPS}",
        f"actor.model={data}/model",
        f"data.prompts={data}/train.jsonl",
        f"reward.function={ROOT}/configs/rewards/quickstart.py:reward",
        "rollout.engine=hf",
        "rollout.prompts_per_step=32",
        "rollout.responses_per_prompt=2",
        "rollout.max_prompt_tokens=16",
        "rollout.max_response_tokens=24",
        "ppo.mini_batch_samples=32",
        "ppo.micro_batch_tokens=128",
        "actor.optimizer.learning_rate=1e-6",
        "logging.report=false",
        "logging.sample_responses=0",
        "checkpoint.interval_minutes=0",
        "checkpoint.final=false",
        "export.final=false",
        "parity.at_start=false",
        *[f"{role}.precision=fp32" for role in ROLES],
        *PLACEMENTS[name],
    ]


def run_folder(name: str, *, folder: Path) -> Path:
    word = "".join(c if c.isalnum() else "_" for c in name)
    return folder / "runs" / word


def run_one(name: str, *, folder: Path) -> None:
    """Nothing where the folder has the run; a placement that is refused is left out."""
    output = run_folder(name, folder=folder)
    metrics = output / METRICS_FILE
    if metrics.is_file() and len(metrics.read_text().splitlines()) == STEPS:
        return
    print(f"{name}: {STEPS} steps ...", flush=True)
    command = training_command(["--config", str(_base(folder)), *settings(name, folder=folder)])
    log = folder / f"{output.name}.log"
    with log.open("w") as file:
        process = subprocess.run(
            [sys.executable, __file__, "--as-ranks", *command], stdout=file, stderr=file
        )
    if process.returncode:
        print(f"{name}: ended with {process.returncode}; see {log}", file=sys.stderr)


def _base(folder: Path) -> Path:
    path = folder / "base.yaml"
    path.write_text("run:\n  name: simulator-check\n  overwrite: true\n")
    return path


def calibrated(folder: Path, *, cluster_file: Path) -> tuple[Cluster, Workload]:
    output = run_folder(CALIBRATION, folder=folder)
    run = read_run(output)
    setup = _setup(
        CALIBRATION, folder=folder, cluster=read_cluster(cluster_file), workload=run.workload
    )
    found = calibrate(setup, run=run)
    write_cluster(found.cluster, path=folder / "calibrated.yaml")
    print(f"calibrated on {output}, {run.num_steps} steps; CPU seconds of a rank and step:")
    for phase, (simulated, measured) in found.phases.items():
        print(f"  {phase:<14} {simulated:8.3f} simulated {measured:8.3f} measured")
    print(f"cores that the run had: {found.cluster.cores_per_node:.2f}")
    return found.cluster, run.workload


def _setup(name: str, *, folder: Path, cluster: Cluster, workload: Workload):  # type: ignore[no-untyped-def]
    loaded = read_config([str(_base(folder))], overrides=settings(name, folder=folder))
    if loaded.problems:
        raise UserError("\n".join(loaded.problems))
    models = role_models(loaded.config, architectures=read_architectures(loaded.config))
    return make_setup(
        loaded.config, models=models, cluster=cluster, world_size=WORLD_SIZE, workload=workload
    )


def check(name: str, *, folder: Path, cluster: Cluster, workload: Workload) -> Check:
    run = read_run(run_folder(name, folder=folder))
    found = simulate(_setup(name, folder=folder, cluster=cluster, workload=workload))
    cpu = sum(phase.passages * phase.cost.busy_seconds * len(phase.ranks) for phase in found.phases)
    return Check(
        name=name,
        simulated=found.step_seconds,
        measured=run.step_seconds,
        simulated_cpu=cpu,
        measured_cpu=run.step_cpu_seconds,
    )


def show(checks: Sequence[Check]) -> None:
    print(f"\n{'seconds per step':<28}{'simulated':>10}{'measured':>10}{'ratio':>8}", end="")
    print(f"{'CPU sim.':>12}{'CPU meas.':>10}{'ratio':>8}")
    for c in checks:
        print(f"{c.name:<28}{c.simulated:>10.2f}{c.measured:>10.2f}{c.ratio:>8.2f}", end="")
        print(f"{c.simulated_cpu:>12.2f}{c.measured_cpu:>10.2f}", end="")
        print(f"{c.simulated_cpu / c.measured_cpu:>8.2f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs; kept")
    parser.add_argument("--only", choices=list(PLACEMENTS), help="run this placement and end")
    parser.add_argument(
        "--cluster", type=Path, default=ROOT / "configs" / "clusters" / "cpu_2_cores.yaml"
    )
    parser.add_argument("--json", type=Path, help="write the table there as well")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-ranks"]:
        sys.exit(launch(sys.argv[2:], num_processes=WORLD_SIZE))
    sys.exit(main())
