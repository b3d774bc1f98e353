"""What vLLM costs the training step once it is in the process, and by what.

    python benchmarks/vllm_beside.py --shape llama-3.2-1b
    python benchmarks/vllm_beside.py --shape tiny --device cpu --rounds 2

One process: the actor's update before vLLM is there, after its import, and with an engine built by
the project's own code, awake and asleep in turns. Each update is measured together with what may
explain it: the rate of a large matrix product, clock and power while it ran, seconds in Python's
collector, CPU seconds. The ways of an update change one thing each, in the first round alone but
for the first of them:

  as the trainer   what was there before is frozen for the collector, as Trainer.fit does
  thawed           nothing is frozen: a full collection walks through all objects
  collector off    gc.disable()
  threads before   torch.set_num_threads as it was before vLLM

Beside the updates: the settings that vLLM has changed, probes of the host (process_state.py), and
profiles (busy time of the GPU against the clock's, time by kind of kernel). Those are taken last,
since a profiler's hooks may stay and slow launches down; --profile-before takes one before vLLM
all the same, after the updates there, to compare kernels with.
"""

import argparse
import gc
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from gpu_engine import fill_with_noise, rollout_config, vllm_engine
from gpu_machine import dense_tflops, describe, join, print_header, seconds_of
from gpu_profile import Profile, profiled
from gpu_roles import build_role, settle
from gpu_shapes import SHAPES
from process_state import CollectorClock, changes, host_probes, snapshot
from train_step import add_shared_options, build_setting, works_of

from rlhf_megatron.distributed.start import finish, release_cached_memory
from rlhf_megatron.rollout import vllm_fit

AS_THE_TRAINER = "as the trainer"
BEFORE, IMPORTED, AWAKE, ASLEEP = "before", "imported", "awake", "asleep"
STATE_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One update."""

    stage: str
    """before, imported, awake or asleep."""
    way: str
    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""
    collector_seconds: float
    collections: list[int]
    dense_tflops: float
    """Taken just before."""
    gpu: dict[str, str]
    """What nvidia-smi said while the update ran."""


class StateDuring:
    """Asks nvidia-smi in a process of its own, which answers while the work goes on."""

    def __init__(self, device: torch.device) -> None:
        self._process = None
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            query = f"--query-gpu={','.join(STATE_FIELDS)}"
            self._process = subprocess.Popen(
                ["nvidia-smi", query, "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                text=True,
            )

    def result(self) -> dict[str, str]:
        if self._process is None:
            return {}
        text, _ = self._process.communicate(timeout=60)
        values = text.splitlines()[0].split(",") if text.strip() else []
        return {name: v.strip() for name, v in zip(STATE_FIELDS, values, strict=False)}


@contextmanager
def thawed() -> Iterator[None]:
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def threads(count: int) -> Iterator[None]:
    now = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(now)


class Updates:
    """Takes updates in turns, and keeps what was found of each."""

    def __init__(self, update: Callable[[], object], *, device: torch.device) -> None:
        self._update, self._device = update, device
        self._threads_before = torch.get_num_threads()
        self.samples: list[Sample] = []

    def ways(self) -> dict[str, AbstractContextManager[None]]:
        return {
            AS_THE_TRAINER: nullcontext(),
            "thawed": thawed(),
            "collector off": collector_off(),
            "threads before": threads(self._threads_before),
        }

    def take(self, stage: str, *, only: str | None = None) -> None:
        """One update each way. The first after a change of stage is one more, not counted."""
        release_cached_memory(self._device)
        self._update()
        for way, context in self.ways().items():
            if only is None or way == only:
                with context:
                    self.samples.append(self._sample(stage, way))

    def _sample(self, stage: str, way: str) -> Sample:
        dense = dense_tflops(self._device)
        state, clock = StateDuring(self._device), CollectorClock()
        cpu = time.process_time()
        with clock.watching():
            seconds = seconds_of(self._update, device=self._device)
        return Sample(
            stage=stage,
            way=way,
            seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            collector_seconds=clock.seconds,
            collections=clock.collections,
            dense_tflops=dense,
            gpu=state.result(),
        )

    def of(self, stage: str, way: str) -> list[Sample]:
        return [sample for sample in self.samples if (sample.stage, sample.way) == (stage, way)]

    def ratio(self, stage: str, way: str = AS_THE_TRAINER) -> float:
        """Median seconds over those of the trainer's way before vLLM came."""
        now, before = (
            median(sample.seconds for sample in self.of(*key))
            for key in ((stage, way), (BEFORE, AS_THE_TRAINER))
        )
        return now / before

    def table(self) -> str:
        lines = [
            f"{'update':<28}{'median ms':>10}{'ratio':>8}{'at equal rate':>14}{'CPU ms':>9}"
            f"{'gc ms':>8}{'full gc':>8}{'TFLOP/s':>9}{'SM MHz':>8}{'W':>7}"
        ]
        rate_before = median(s.dense_tflops for s in self.of(BEFORE, AS_THE_TRAINER))
        for stage, way in dict.fromkeys((s.stage, s.way) for s in self.samples):
            found = self.of(stage, way)
            rate = median(s.dense_tflops for s in found)
            ratio = self.ratio(stage, way)
            lines.append(
                f"{f'{stage}, {way}':<28}{median(s.seconds for s in found) * 1e3:>10.1f}"
                f"{ratio:>8.3f}{ratio * rate / rate_before:>14.3f}"
                f"{median(s.cpu_seconds for s in found) * 1e3:>9.0f}"
                f"{median(s.collector_seconds for s in found) * 1e3:>8.1f}"
                f"{sum(s.collections[2] for s in found):>8}{rate:>9.4g}"
                f"{_middle(found, 'clocks.sm'):>8}{_middle(found, 'power.draw'):>7}"
            )
        return "\n".join(lines)


def _middle(samples: list[Sample], name: str) -> str:
    values = [s.gpu.get(name, "") for s in samples]
    numbers = [float(value) for value in values if value.replace(".", "").isdigit()]
    return f"{median(numbers):.0f}" if numbers else "-"


def kinds_table(profiles: dict[str, Profile]) -> str:
    """Milliseconds of each kind of kernel, stage beside stage."""
    kinds = dict.fromkeys(kind for p in profiles.values() for kind in p.by_kind())
    lines = [f"{'ms, profiled':<16}" + "".join(f"{stage:>12}" for stage in profiles)]
    for name in ("wall", "busy"):
        values = [getattr(p, f"{name}_seconds") * 1e3 for p in profiles.values()]
        lines.append(f"{name:<16}" + "".join(f"{value:>12.1f}" for value in values))
    for kind in kinds:
        found = [p.by_kind().get(kind) for p in profiles.values()]
        values = [kernel.seconds * 1e3 if kernel else 0.0 for kernel in found]
        lines.append(f"{kind:<16}" + "".join(f"{value:>12.1f}" for value in values))
    counts = [p.num_kernels for p in profiles.values()]
    return "\n".join([*lines, f"{'kernels':<16}" + "".join(f"{n:>12}" for n in counts)])


def probes_table(probes: dict[str, dict[str, float]]) -> str:
    lines = [f"{'host probe':<22}" + "".join(f"{stage:>12}" for stage in probes)]
    for name in next(iter(probes.values())):
        lines.append(f"{name:<22}" + "".join(f"{p[name]:>12.2f}" for p in probes.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_shared_options(parser)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--sleep-level", type=int, choices=(1, 2), default=1)
    parser.add_argument("--profile-before", action="store_true")
    parser.set_defaults(micro_batches=4, rounds=3)
    options = parser.parse_args()

    context = join(options.device)
    device, machine = context.device, describe(context.device)
    print_header(f"vllm_beside, {options.shape}", machine=machine)
    report: dict[str, Any] = {
        "machine": machine,
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        setting = build_setting(options, context=context, folder=folder)
        actor = build_role(
            "actor",
            arch=setting.arch,
            options=setting.options,
            context=context,
            factory=setting.factory,
        )
        update = works_of("actor", engine=actor, setting=setting)[-1].run
        update()
        settle(device)
        updates = Updates(update, device=device)
        states, probes, profiles = {}, {}, {}

        def look(stage: str) -> None:
            states[stage] = snapshot()
            probes[stage] = host_probes(device)
            profiles[stage] = profiled(update, device=device)

        for number in range(options.rounds):
            updates.take(BEFORE, only=AS_THE_TRAINER if number else None)
        states[BEFORE], probes[BEFORE] = snapshot(), host_probes(device)
        if options.profile_before:
            profiles[BEFORE] = profiled(update, device=device)
            updates.take("profiled once", only=AS_THE_TRAINER)

        vllm_fit.import_vllm(device=device)
        settle(device)
        states[IMPORTED] = snapshot()
        for _ in range(options.rounds):
            updates.take(IMPORTED, only=AS_THE_TRAINER)

        engine = vllm_engine(
            SHAPES[options.shape],
            model_dir=folder,
            config=rollout_config(
                gpu_memory_utilization=options.gpu_memory_utilization,
                sleep_level=options.sleep_level,
            ),
            precision=setting.options.precision,
            context=context,
        )
    fill_with_noise(engine)
    states["built"] = snapshot()  # before anything is frozen anew
    settle(device)
    for number in range(options.rounds):
        updates.take(AWAKE, only=AS_THE_TRAINER if number else None)
        release_cached_memory(device)
        engine.sleep()
        updates.take(ASLEEP, only=AS_THE_TRAINER if number else None)
        if number + 1 < options.rounds:
            release_cached_memory(device)
            engine.wake(tags=["weights", "kv_cache"])
    look(ASLEEP)
    release_cached_memory(device)
    engine.wake(tags=["weights", "kv_cache"])
    look(AWAKE)

    print(updates.table())
    print(probes_table(probes))
    print(kinds_table(profiles))
    for earlier, later in ((BEFORE, IMPORTED), (IMPORTED, "built")):
        print(f"changed from {earlier} to {later}:")
        for line in changes(states[earlier], states[later]):
            print(f"  {line[:200]}")
    for stage in (AWAKE, ASLEEP):
        print(f"update with vLLM {stage} / before: {updates.ratio(stage):.3f}")
    if options.json is not None:
        report |= {
            "samples": [asdict(sample) for sample in updates.samples],
            "probes": probes,
            "profiles": {stage: p.figures() for stage, p in profiles.items()},
            "changes": changes(states[BEFORE], states["built"]),
            "ratios": {stage: updates.ratio(stage) for stage in (IMPORTED, AWAKE, ASLEEP)},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    finish(0)


if __name__ == "__main__":
    main()
