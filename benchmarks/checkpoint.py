"""Training checkpoints against `torch.save` and `torch.load` of the same bytes.

    python benchmarks/checkpoint.py --folder /disk/with/20GB/free

Builds an actor and a critic of random weights and moments, 300 million parameters together in
float32 (3.6 GB of state), at TP2 x PP2 on 4 processes. Each round

- writes each rank's part of that state with one torch.save a rank, to the disk (fsync), and reads
  it with torch.load;
- writes a checkpoint synchronously, from the call until it is current;
- writes one asynchronously: how long training is held up (copy, plan, and the conclusion once all
  is written), and until it is current; a second time, with the host buffers there already;
- resumes: every byte against its checksum, then models and optimizers.

Prints, and with --json writes, the seconds of the slowest rank and the ratios of the best rounds.
--layers makes the models smaller.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_megatron.distributed.config import DistributedConfig, ParallelConfig
from rlhf_megatron.launcher import launch
from rlhf_megatron.ranks import run_ranks

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
NUM_RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL
LAYERS = 12
SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40064,
    "hidden_size": 768,
    "intermediate_size": 2688,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}


class Bench:
    """One rank's roles, and a stopwatch that all ranks share."""

    def __init__(self, folder: Path, *, context: Any) -> None:
        import torch
        import torch.distributed as dist

        from rlhf_megatron.checkpoint.optimizer_slices import MOMENTS, own_ranges, set_adam_steps
        from rlhf_megatron.checkpointing import Checkpointer
        from rlhf_megatron.config import Config
        from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
        from rlhf_megatron.engine.model_engine import ModelEngine
        from rlhf_megatron.layout.architecture import read_architecture
        from rlhf_megatron.layout.sizes import num_parameters
        from rlhf_megatron.models.build import build_model
        from rlhf_megatron.observability.ledger import PhaseLedger
        from rlhf_megatron.placed_role import placed
        from rlhf_megatron.resolve import parallel_layout
        from rlhf_megatron.run_state import RunState
        from rlhf_megatron.stopping import StopAgreement

        self._dist, self._torch, self.context, self.folder = dist, torch, context, folder
        self.config = config = Config()
        config.run.output_dir = str(folder / "run")
        config.ppo.kl.place = "off"
        parallel = ParallelConfig(
            tensor_model_parallel_size=TENSOR_PARALLEL,
            pipeline_model_parallel_size=PIPELINE_PARALLEL,
        )
        for role in (config.actor, config.critic):
            role.model, role.precision, role.parallel = str(folder / "model"), "fp32", parallel
        arch = read_architecture(folder / "model")
        factory = GroupFactory(timeout_seconds=600)
        layout = parallel_layout(parallel, world_size=NUM_RANKS)
        self.roles: dict[str, ModelEngine] = {}
        self.num_parameters = 0
        for name, head in (("actor", "lm"), ("critic", "value")):
            groups = build_role_groups(name, layout=layout, factory=factory)
            assert groups is not None
            model = build_model(
                arch,
                head=head,  # type: ignore[arg-type]
                groups=groups,
                precision="fp32",
                layer_spec_name="local",
                device=context.device,
                seed=1,
            )
            options = config.actor.optimizer
            engine = ModelEngine(
                model,
                device=context.device,
                optimizer_config=options,
            )
            for own in own_ranges(engine.optimizer).values():
                for moment in MOMENTS:
                    own.set(moment, values=torch.rand_like(own.main))
            set_adam_steps(engine.optimizer, steps=7)
            self.roles[name] = engine
            self.num_parameters += num_parameters(arch, head=head)  # type: ignore[arg-type]
        self.checkpointer = Checkpointer(
            config,
            run=RunState(
                roles={name: placed(engine) for name, engine in self.roles.items()},
                ref=None,
                parts={},
            ),
            stop=StopAgreement(
                signals=None, time_limit=None, group=context.job_group, device=context.device
            ),
            context=context,
            ledger=PhaseLedger(rank=context.rank, device=context.device),
            say=lambda _: None,
        )
        self.checkpointer.begins()

    def seconds(self, work: Callable[[], None]) -> float:
        """Of the slowest rank, from a common start."""
        if self.context.rank == 0:
            os.sync()
        self._dist.barrier()
        start = time.perf_counter()
        work()
        took = self._torch.tensor(time.perf_counter() - start)
        self._dist.all_reduce(took, op=self._dist.ReduceOp.MAX)
        return float(took)

    def plain_state(self) -> dict[str, Any]:
        """This rank's weights and moments: what a checkpoint holds of it."""
        from rlhf_megatron.checkpoint.optimizer_slices import MOMENTS, own_ranges

        state: dict[str, Any] = {}
        for name, engine in self.roles.items():
            state[f"{name}/weights"] = {
                key: value.detach() for key, value in engine.model.parameters().items()
            }
            state[f"{name}/optimizer"] = [
                own.get(moment)
                for own in own_ranges(engine.optimizer).values()
                for moment in MOMENTS
            ]
        return state

    def torch_save(self) -> None:
        path = self.folder / f"plain_{self.context.rank}.pt"
        with path.open("wb") as file:
            self._torch.save(self.plain_state(), file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        self._torch.load(self.folder / f"plain_{self.context.rank}.pt", weights_only=True)

    def save(self, *, asynchronous: bool) -> None:
        self.config.checkpoint.asynchronous = asynchronous
        self.checkpointer.save()

    def wait_for_writers(self) -> None:
        """As training would go on meanwhile."""
        pending = self.checkpointer._save
        assert pending is not None
        while not pending[0].is_written():
            time.sleep(0.01)
        self._dist.barrier()

    def resume(self) -> None:
        from rlhf_megatron.resume import find_resume_point

        point = find_resume_point(self.config, context=self.context)
        assert point is not None
        self.checkpointer.resume(point)

    def remove_checkpoints(self) -> None:
        self._dist.barrier()
        if self.context.rank == 0:
            shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        self._dist.barrier()


def measure_round(bench: Bench) -> dict[str, float]:
    """The seconds of one round."""
    found = {
        "torch_save": bench.seconds(bench.torch_save),
        "torch_load": bench.seconds(bench.torch_load),
        "save": bench.seconds(lambda: bench.save(asynchronous=False)),
    }
    for name in ("first_async", "async"):
        bench.remove_checkpoints()
        begin = time.perf_counter()
        held_up = bench.seconds(lambda: bench.save(asynchronous=True))
        bench.wait_for_writers()
        held_up += bench.seconds(bench.checkpointer.finish)
        found[f"{name}_held_up"] = held_up
        found[f"{name}_total"] = time.perf_counter() - begin
    found["resume"] = bench.seconds(bench.resume)
    bench.remove_checkpoints()
    return found


def measure_rank(options: argparse.Namespace) -> int:
    """One of the ranks; rank 0 writes the figures."""

    def body(context: Any, channel: object) -> None:
        bench = Bench(options.folder, context=context)
        gc.collect()
        gc.freeze()  # as the trainer does
        rounds = []
        for number in range(options.rounds):
            rounds.append(measure_round(bench))
            if context.rank == 0:
                line = ", ".join(f"{name} {value:.2f} s" for name, value in rounds[-1].items())
                print(f"round {number + 1}: {line}", flush=True)
        if context.rank == 0:
            result = {"parameters": bench.num_parameters, "rounds": rounds}
            options.result.write_text(json.dumps(result))

    return run_ranks(body, config=DistributedConfig(device="cpu"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to write and remove")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each model (default: 12)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.result:
        return measure_rank(options)
    folder = options.folder / "checkpoint_benchmark"
    try:
        return benchmark(folder, options=options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def benchmark(folder: Path, *, options: argparse.Namespace) -> int:
    (folder / "model").mkdir(parents=True)
    settings = SETTINGS | {"num_hidden_layers": options.layers}
    (folder / "model" / "config.json").write_text(json.dumps(settings))
    words = ["--folder", folder, "--rounds", options.rounds, "--result", folder / "result.json"]
    code = launch([sys.executable, __file__, *map(str, words)], num_processes=NUM_RANKS)
    if code:
        return code
    result = json.loads((folder / "result.json").read_text())
    best = {name: min(r[name] for r in result["rounds"]) for name in result["rounds"][0]}
    size = 12 * result["parameters"]
    ratios = {
        "save_to_torch_save": best["save"] / best["torch_save"],
        "resume_to_torch_load": best["resume"] / best["torch_load"],
        "held_up_to_save": best["async_held_up"] / best["save"],
    }
    print(f"{result['parameters'] / 1e6:.0f} M parameters, {size / 1e9:.2f} GB of state")
    print(
        f"save {best['save']:.2f} s, {ratios['save_to_torch_save']:.2f} of torch.save's; resume "
        f"{best['resume']:.2f} s, {ratios['resume_to_torch_load']:.2f} of torch.load's; an "
        f"asynchronous save holds training up for {best['async_held_up']:.2f} s, "
        f"{ratios['held_up_to_save']:.3f} of a synchronous one"
    )
    if options.json:
        options.json.write_text(json.dumps(result | {"ratios": ratios}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
