"""The whole PPO step, phase by phase, against the sum of its parts measured alone.

    python benchmarks/ppo_step.py --shape llama-3.2-1b --prompts 256 --steps 2
    python benchmarks/ppo_step.py --shape tiny --device cpu --prompts 4 --micro-batch-tokens 256
    torchrun --nproc-per-node 2 benchmarks/ppo_step.py --layout tp2 --engines tp2

A run of the trainer with actor, critic, reference and vLLM on one GPU; random weights, prompts and
response lengths of the realistic spread (gpu_shapes.py), a reward that costs nothing. The first
step is not counted. Then, in the same process, on the same lengths, the four parts alone:

  rollout     bare vllm.LLM.generate, the sampled tokens' log-probs with it
  passes      log-probs of actor and reference, values
  updates     of critic and actor
  reshard     sleep, wake, weight sync, wake

Figures are medians over the counted steps, and over the rounds of the parts. On a GPU each phase's
peak of memory stands beside what the planner says.

On several ranks, started with torchrun, the step alone is measured: --layout is that of all roles,
--engines one vLLM over both ranks or one on each. What has to leave a GPU between its phases, so
that a large model fits, is said with --override.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import yaml
from gpu_engine import BareVllm, fix_lengths
from gpu_machine import dense_tflops, describe, join, print_header, seconds_of
from gpu_roles import LEARNING_RATE
from gpu_shapes import SHAPES, Lengths, Shape, draw_lengths, prompt_token_ids, random_batch
from ppo_step_files import write_model, write_prompts, write_reward

from rlhf_megatron.config import Config
from rlhf_megatron.data.exchange import share_out
from rlhf_megatron.distributed.seeds import seed_everything
from rlhf_megatron.distributed.start import DistributedContext, finish, release_cached_memory
from rlhf_megatron.memory_report import planned_peaks
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.logs import setup_logging
from rlhf_megatron.ppo import PpoStep
from rlhf_megatron.role_ranks import role_placement
from rlhf_megatron.run_folder import open_run_folder
from rlhf_megatron.stopping import StopAgreement
from rlhf_megatron.trainer import Trainer
from rlhf_megatron.validation import load_and_validate

PARTS = {
    "rollout": ("rollout",),
    "passes": ("log_prob", "ref_log_prob", "value"),
    "updates": ("update_critic", "update_actor"),
    "reshard": ("sleep", "reshard"),
}
"""Part -> the phases of a step that do its work."""
OTHER_PHASES = ("reward", "advantage")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}
"""Of all roles; data parallelism takes the ranks that are left."""
ENGINES = {"tp1": 1, "2xtp1": 1, "tp2": 2}
"""-> rollout.tensor_parallel_size"""
SHOWN_METRICS = (
    "ppo/policy_loss",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
    "ppo/ratio_mean",
    "kl/mean",
    "parity/logprob_abs_diff_mean",
    "parity/logprob_abs_diff_max",
    "reshard/bytes_received",
    "reshard/bytes_minimum",
    "reshard/seconds",
    "train/mfu",
    "gpu/memory_active_gb",
)


def model_folder(options: argparse.Namespace, *, folder: Path) -> Path:
    """Where the model is."""
    found: Path = options.model_folder or folder / "model"
    return found


def write_config(options: argparse.Namespace, *, shape: Shape, folder: Path, on_gpu: bool) -> Path:
    """The run's YAML file."""
    precision = options.precision or ("bf16" if on_gpu else "fp32")
    samples = options.prompts * options.responses_per_prompt
    role = {
        "precision": precision,
        "layer_spec": options.layer_spec,
        "parallel": LAYOUTS[options.layout],
    }
    trained = role | {"recompute": {"granularity": options.recompute}}
    text = {
        "run": {"output_dir": str(folder / "run"), "steps": options.steps + 1},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "shuffle": False,
            "add_bos": "no",
        },
        "actor": trained
        | {
            "model": str(model_folder(options, folder=folder)),
            "optimizer": {"learning_rate": LEARNING_RATE},
        },
        "critic": trained | {"optimizer": {"learning_rate": LEARNING_RATE}},
        "ref": role,
        "reward": {"function": f"{folder / 'reward.py'}:reward"},
        "rollout": {
            "engine": "vllm",
            "seed_per": options.seed_per,
            "prompts_per_step": options.prompts,
            "responses_per_prompt": options.responses_per_prompt,
            "max_prompt_tokens": shape.max_prompt_tokens,
            "max_response_tokens": shape.max_response_tokens,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "max_num_seqs": options.max_num_seqs,
            "tensor_parallel_size": ENGINES[options.engines],
        },
        "ppo": {
            "mini_batch_samples": max(samples // options.updates, 1),
            "micro_batch_tokens": options.micro_batch_tokens or shape.micro_batch_tokens,
        },
        "parity": {"at_start": False, "action": "warn"},
        "checkpoint": {"interval_steps": 0, "final": False, "resume": "never"},
        "export": {"final": False},
        "logging": {"report": False, "sample_responses": 0, "rollouts_interval_steps": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


def build_trainer(config: Config, *, context: DistributedContext) -> Trainer:
    """As main.train does."""
    if context.rank == 0:
        open_run_folder(config, point=None)
    dist.barrier(group=context.job_group)
    setup_logging(config.run.output_dir, rank=context.rank, hide=config.secrets.hide)
    seed_everything(config.run.seed)
    placement = role_placement(config, world_size=context.world_size)
    return Trainer(
        config,
        context=context,
        ledger=PhaseLedger(rank=context.rank, device=context.device, apart=placement.phases_apart),
        stop=StopAgreement(
            signals=None, time_limit=None, group=context.job_group, device=context.device
        ),
    )


def lengths_of_engine(
    trainer: Trainer, *, lengths: Lengths, responses_per_prompt: int
) -> list[int]:
    """Of the responses of this rank's engine, which answers its share of the prompts."""
    engine, count = trainer.weights.engine, trainer.num_engines
    assert engine is not None
    by_prompt = lengths.responses.view(-1, responses_per_prompt)
    # Of two ranks, an engine's first rank is its number.
    mine = share_out(len(by_prompt), part=engine.ranks[0], num_parts=count)
    return by_prompt[list(mine)].flatten().tolist()


def step_seconds(run: Path) -> dict[str, list[float]]:
    """Phase -> seconds of each step but the first; "step" is the whole one."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    phases = [phase for part in PARTS.values() for phase in part]
    return {
        phase: [line.get(f"time/{phase}_seconds", 0.0) for line in lines[1:]]
        for phase in (*phases, *OTHER_PHASES, "step")
    }


class Alone:
    """The parts of a step by themselves, with the trainer's own models and engine."""

    def __init__(self, trainer: Trainer, *, prompts: list[tuple[int, ...]], lengths: Lengths):
        self._trainer, self._device = trainer, trainer.context.device
        config = trainer.config
        assert trainer.actor.engine is not None and trainer.weights.engine is not None
        self._bare = BareVllm(
            trainer.weights.engine, prompts=prompts, lengths=lengths.responses.tolist()
        )
        self._batch = random_batch(lengths, vocab_size=trainer.actor.arch.vocab_size)
        self._ppo = PpoStep(  # without the trainer's judge of bad steps
            config.ppo,
            actor=trainer.ppo.actor,
            critic=trainer.ppo.critic,
            ref=trainer.ppo.ref,
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
        )
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def round(self, number: int, *, counts: bool) -> None:
        """Once through all parts, from an engine that is awake to one that is awake."""
        ppo, batch, weights = self._ppo, self._batch, self._trainer.weights
        actor, ref = ppo.actor, ppo.ref
        assert actor is not None and ref is not None
        plan = ppo.plan(batch, step=number)
        self._trainer.ledger.start_step(number)

        def log_prob() -> None:
            batch.response["old_logprobs"] = ppo.log_probs(actor, batch=batch, plan=plan[0])

        def update_actor() -> None:
            ppo.update_actor(batch, plan=plan, learning_rate=LEARNING_RATE, kl_coefficient=0.0)

        works: dict[str, Callable[[], object]] = {
            "sleep": weights.sleep,
            "log_prob": log_prob,
            "ref_log_prob": lambda: ppo.log_probs(ref, batch=batch, plan=plan[0]),
            "value": lambda: ppo.values(batch, plan=plan[0]),
            "update_critic": lambda: ppo.update_critic(
                batch, plan=plan, learning_rate=LEARNING_RATE
            ),
            "update_actor": update_actor,
            "reshard": lambda: weights.sync(version=number),
        }
        release_cached_memory(self._device)
        with self._bare.ready():
            found = {"rollout": seconds_of(self._bare.run, device=self._device)}
        for phase, work in works.items():
            found[phase] = seconds_of(work, device=self._device)
        for phase, seconds in found.items():
            if counts:
                self.seconds[phase].append(seconds)


def table(steps: dict[str, list[float]], *, alone: dict[str, list[float]]) -> str:
    """Phase by phase, then parts, then the whole."""
    in_step = {phase: median(seconds) for phase, seconds in steps.items()}
    by_itself = {phase: median(seconds) for phase, seconds in alone.items()}
    whole = in_step.pop("step")
    lines = [f"{'phase':<16}{'in the step s':>14}{'alone s':>10}{'ratio':>8}{'of step':>9}"]
    for phase, seconds in in_step.items():
        line = f"{phase:<16}{seconds:>14.3f}"
        if phase in by_itself:
            line += f"{by_itself[phase]:>10.3f}{seconds / max(by_itself[phase], 1e-9):>8.2f}"
        lines.append(line.ljust(48) + f"{seconds / whole:>9.1%}")
    rest = whole - sum(in_step.values())
    lines.append(f"{'between phases':<16}{rest:>14.3f}".ljust(48) + f"{rest / whole:>9.1%}")
    return "\n".join(lines)


def peaks(run: Path, *, config: Config, world_size: int) -> dict[str, dict[str, float]]:
    """Phase -> what torch's allocator held at most on any rank in a step after the first, and
    what the planner says of the ranks that need most, both in GB."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    found = {}
    for phase, planned in planned_peaks(config, world_size=world_size).items():
        key = f"memory/{phase}_peak_gb"
        measured = [line[key] for line in lines if key in line]
        if measured:
            found[phase] = {"measured": max(measured), "planned": planned}
    return found


def peaks_table(found: dict[str, dict[str, float]]) -> str:
    """By phase: measured, planned, and the difference as a share of what was measured."""
    lines = [f"{'peak of':<16}{'measured GB':>14}{'planned GB':>12}"]
    for phase, gb in found.items():
        off = gb["planned"] / gb["measured"] - 1
        lines.append(f"{phase:<16}{gb['measured']:>14.2f}{gb['planned']:>12.2f}{off:>+9.1%}")
    return "\n".join(lines)


def ratios(steps: dict[str, list[float]], *, alone: dict[str, list[float]]) -> dict[str, float]:
    """The step over the sum of the parts, with and without the engine's sleep; and the share of
    the hand-over in the step."""
    whole = median(steps["step"])
    parts = sum(median(seconds) for seconds in alone.values())
    without_sleep = parts - median(alone["sleep"])
    hand_over = sum(median(steps[phase]) for phase in PARTS["reshard"])
    return {
        "step_seconds": whole,
        "parts_seconds": parts,
        "step_to_parts": whole / parts,
        "step_to_parts_without_sleep": whole / without_sleep,
        "hand_over_share": hand_over / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses-per-prompt", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="counted steps")
    parser.add_argument("--rounds", type=int, default=1, help="of the parts alone; 0: leave them")
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps a step")
    parser.add_argument(
        "--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto"
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=0, help="default: the shape's (16384)"
    )
    parser.add_argument(
        "--model-folder", type=Path, help="keep the random weights there, for the next run"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="one", help="of all roles")
    parser.add_argument("--engines", choices=ENGINES, default="tp1")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--seed-per", choices=("engine", "request"), default="engine")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--override", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    context = join(options.device)
    assert context.world_size == (1 if options.layout == "one" else 2), options.layout
    with tempfile.TemporaryDirectory() as name:  # rank 0's is everyone's
        shared = [name]
        dist.broadcast_object_list(shared, src=0, group=context.job_group)
        measure(options, context=context, folder=Path(shared[0]))
        dist.barrier(group=context.job_group)
    finish(0)


def measure(options: argparse.Namespace, *, context: DistributedContext, folder: Path) -> None:
    """Run the trainer, and on a job of one rank the parts alone; print and write the figures."""
    machine = describe(context.device)
    shape, responses = SHAPES[options.shape], options.responses_per_prompt
    dense = dense_tflops(context.device)
    lengths = draw_lengths(
        shape, num_samples=options.prompts * responses, responses_per_prompt=responses
    )
    arch = shape.write(folder / f"config_{context.rank}")
    prompts = prompt_token_ids(random_batch(lengths, vocab_size=arch.vocab_size))[::responses]
    if context.rank == 0:
        print_header(f"ppo_step, {shape.name}, {options.layout}", machine=machine)
        if options.model_folder is None or not (options.model_folder / "tokenizer.json").exists():
            write_model(shape, model_folder(options, folder=folder), device=context.device)
        write_prompts(folder / "prompts.jsonl", prompts)
        write_reward(folder / "reward.py")
        write_config(options, shape=shape, folder=folder, on_gpu=context.is_cuda)
    dist.barrier(group=context.job_group)
    config = load_and_validate(
        [str(folder / "config.yaml")], overrides=options.override, world_size=context.world_size
    )
    release_cached_memory(context.device)
    trainer = build_trainer(config, context=context)
    assert trainer.weights.engine is not None
    fix_lengths(
        trainer.weights.engine,
        lengths_of_engine(trainer, lengths=lengths, responses_per_prompt=responses),
    )
    trainer.fit()
    if context.rank != 0:
        return
    steps = step_seconds(folder / "run")
    metrics = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    mean_length = float(lengths.responses.double().mean())
    assert abs(metrics["response/length_mean"] - mean_length) < 1e-3, "other lengths than asked for"
    print(
        f"  {len(lengths.responses)} samples, {int(lengths.totals.sum())} tokens, of them "
        f"{int(lengths.responses.sum())} in responses; {options.steps} steps counted; dense "
        f"product {dense:.4g} TFLOP/s"
    )
    report: dict[str, Any] = {
        "machine": machine,
        "options": {name: str(value) for name, value in vars(options).items()},
        "dense_tflops": dense,
        "steps": steps,
        "last_metrics": metrics,
    }
    if context.world_size == 1 and options.rounds > 0:
        requests = [prompt for prompt in prompts for _ in range(responses)]
        report |= measure_alone(
            trainer, prompts=requests, lengths=lengths, steps=steps, rounds=options.rounds
        )
    else:
        print(table(steps, alone={}))
        shown = [key for key in SHOWN_METRICS if key in metrics]
        print("last step: " + ", ".join(f"{key} {metrics[key]:.5g}" for key in shown))
    if context.is_cuda:
        report["peaks"] = peaks(folder / "run", config=config, world_size=context.world_size)
        print(peaks_table(report["peaks"]))
    row = {phase: round(median(seconds), 3) for phase, seconds in steps.items()}
    print(f"ROW {shape.name} {options.layout} {options.engines} {json.dumps(row)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure_alone(
    trainer: Trainer,
    *,
    prompts: list[tuple[int, ...]],
    lengths: Lengths,
    steps: dict[str, list[float]],
    rounds: int,
) -> dict[str, Any]:
    """The parts by themselves, printed beside the step; the figures."""
    alone = Alone(trainer, prompts=prompts, lengths=lengths)
    for number in range(rounds):
        alone.round(trainer.config.run.steps + 1 + number, counts=True)
    found = ratios(steps, alone=alone.seconds)
    print(f"parts alone {rounds} times\n{table(steps, alone=alone.seconds)}")
    for part, phases in PARTS.items():
        one, other = (
            sum(median(seconds[phase]) for phase in phases) for seconds in (steps, alone.seconds)
        )
        print(f"{part:<16}{one:>14.3f}{other:>10.3f}{one / max(other, 1e-9):>8.2f}")
    print(
        f"step {found['step_seconds']:.3f} s / its parts alone {found['parts_seconds']:.3f} s: "
        f"{found['step_to_parts']:.3f} ({found['step_to_parts_without_sleep']:.3f} without the "
        f"engine's sleep among the parts); sleep, wake and reshard {found['hand_over_share']:.1%} "
        "of the step"
    )
    return found | {"alone": dict(alone.seconds)}


if __name__ == "__main__":
    main()
