"""Memory and time of a critic that is a head on the actor, against a critic of its own.

    python benchmarks/shared_backbone.py --hidden 512 --layers 8 --vocabulary 16384 --rounds 2

Each round starts a process for either way, one after the other, so that both meet the same machine.
A process trains random models on one random batch, on one CPU core or GPU: after a step that is not
counted, STEPS steps of log-probs, values and updates. No rollout engine and no reference, which are
the same in both. Seconds of the process's own CPU time (on a CPU, so that others on the machine
count little) and of the clock; bytes counted tensor by tensor, and the peak of resident memory (on
a GPU of allocated memory) beyond what there was before the models.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.algorithms.config import KlConfig, PpoConfig
from rlhf_megatron.batch import RaggedBatch, from_sequences
from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import KINDS
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.models.build import JOINT_HEAD, LM_HEAD, VALUE_HEAD, build_model
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.observability.memory import PeakMemory
from rlhf_megatron.ppo import PpoStep

WAYS = ("two models", "shared")
STEPS = 3
LOSS_WEIGHT = 1.0


def architecture(options: argparse.Namespace) -> ModelArchitecture:
    heads = options.hidden // 64
    return ModelArchitecture(
        family="llama",
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=3 * options.hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=64,
        vocab_size=options.vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )


def random_batch(options: argparse.Namespace) -> RaggedBatch:
    """Half of each sample is the response."""
    generator = torch.Generator().manual_seed(0)
    half = options.length // 2

    def tokens() -> list[list[int]]:
        shape = (options.samples, half)
        return torch.randint(0, options.vocabulary, shape, generator=generator).tolist()

    batch = from_sequences(tokens(), responses=tokens())
    count = batch.num_response_tokens
    batch.response["loss_mask"] = torch.ones(count)
    batch.sample["truncated"] = torch.zeros(options.samples, dtype=torch.bool)
    batch.sample["rewards"] = torch.randn(options.samples, generator=generator)
    return batch


def build(head: str, *, options: argparse.Namespace, factory: GroupFactory) -> ModelEngine:
    groups = build_role_groups(head, layout=ParallelLayout((0,)), factory=factory)
    assert groups is not None and dist.group.WORLD is not None
    device = torch.device(options.device)
    model = build_model(
        architecture(options),
        head=head,  # type: ignore[arg-type]
        groups=groups,
        precision=options.precision,
        layer_spec_name="local",
        device=device,
        seed=1,
    )
    return ModelEngine(
        model,
        device=device,
        optimizer_config=OptimizerConfig(learning_rate=1e-4),
    )


def ppo_step(way: str, *, options: argparse.Namespace) -> PpoStep:
    backend = "nccl" if options.device == "cuda" else "gloo"
    factory = GroupFactory(timeout_seconds=600, backend=backend)
    shared = way == "shared"
    return PpoStep(
        PpoConfig(
            mini_batch_samples=max(options.samples // 2, 1),
            micro_batch_tokens=options.micro_batch_tokens,
            kl=KlConfig(place="off"),
        ),
        actor=build(JOINT_HEAD if shared else LM_HEAD, options=options, factory=factory),
        critic=None if shared else build(VALUE_HEAD, options=options, factory=factory),
        ref=None,
        temperature=1.0,
        max_response_tokens=options.length // 2,
        seed=0,
        shared_loss_weight=LOSS_WEIGHT if shared else None,
    )


class Clock:
    """Adds up the seconds of what is run, by name."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device == "cuda"
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        begin = self._now()
        result = work()
        for key, start, end in zip(("clock", "cpu"), begin, self._now(), strict=True):
            self.seconds[f"{name}_{key}"] = self.seconds.get(f"{name}_{key}", 0) + end - start
        return result

    def _now(self) -> list[float]:
        if self._is_gpu:
            torch.cuda.synchronize()
        return [time.perf_counter(), time.process_time()]


def one_step(ppo: PpoStep, *, batch: RaggedBatch, step: int, clock: Clock) -> None:
    """As TrainingStep.run."""
    plan = ppo.plan(batch, step=step)
    first = plan[0]
    if ppo.critic is None:
        found = clock.run("inference", lambda: ppo.log_probs_and_values(batch, plan=first))
        batch.response["old_logprobs"] = found["logprobs"]
    else:
        batch.response["old_logprobs"] = clock.run(
            "inference", lambda: ppo.log_probs(ppo.actor, batch=batch, plan=first)
        )
        found = clock.run("inference", lambda: ppo.values(batch, plan=first))
    batch.response["values"] = found["values"]
    ppo.advantages(batch, last_values=found["last"], kl_coefficient=0.0)
    if ppo.critic is not None:
        clock.run("updates", lambda: ppo.update_critic(batch, plan=plan, learning_rate=1e-4))
    clock.run(
        "updates",
        lambda: ppo.update_actor(batch, plan=plan, learning_rate=1e-4, kl_coefficient=0.0),
    )


def counted_bytes(ppo: PpoStep) -> dict[str, int]:
    """Of all roles: weights, gradients, optimizer."""
    found = dict.fromkeys(KINDS, 0)
    for engine in (ppo.actor, ppo.critic):
        if engine is not None:
            parts = named_parts(engine.model, optimizer=engine.optimizer)
            for kind in KINDS:
                found[kind] += total_bytes(parts[kind]().values())
    return found


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def measure(way: str, *, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    if options.device == "cpu":
        use_cpu_in_place_of_cuda()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        peak = PeakMemory(torch.device(options.device))
        ppo = ppo_step(way, options=options)
        batch = random_batch(options)
        one_step(ppo, batch=batch, step=0, clock=Clock(options.device))
        clock = Clock(options.device)
        for step in range(1, STEPS + 1):
            one_step(ppo, batch=batch, step=step, clock=clock)
        found: dict[str, Any] = {name: value / STEPS for name, value in clock.seconds.items()}
        found |= {f"{kind}_bytes": size for kind, size in counted_bytes(ppo).items()}
        found["peak_bytes"] = peak.extra_bytes()
        dist.destroy_process_group()
    return found


def compare(words: list[str], *, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, __file__, *words, "--way", way],
                check=True,
                capture_output=True,
                text=True,
            )
            rounds[way].append(json.loads(done.stdout.splitlines()[-1]))
    two, shared = (
        {name: median(found[name] for found in rounds[way]) for name in rounds[way][0]}
        for way in WAYS
    )
    return {
        "two": two,
        "shared": shared,
        "ratio": {name: shared[name] / two[name] for name in two},
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="processes of either way")
    parser.add_argument("--json", action="store_true", help="print all figures")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options=options)))
        return
    found = compare(sys.argv[1:], options=options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'per step, median of the rounds':<32}{'two models':>14}{'shared':>14}{'ratio':>8}")
    for name, ratio in found["ratio"].items():
        is_bytes = name.endswith("_bytes")
        label = name.replace("_bytes", ", MB").replace("_", ", ") + ("" if is_bytes else " seconds")
        scale = 1e6 if is_bytes else 1
        row = [found[way][name] / scale for way in ("two", "shared")]
        print(f"{label:<32}{row[0]:>14.3f}{row[1]:>14.3f}{ratio:>8.3f}")


if __name__ == "__main__":
    main()
