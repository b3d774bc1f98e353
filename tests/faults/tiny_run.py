"""Whole runs of the training program on a tiny model, quick to start and easy to kill.

The ranks are forked from a server that has imported everything once (multiprocessing's forkserver),
as in tests/distributed/pool.py; what they run is `rlhf_megatron.main.main`, as torchrun would, or
the `main` of a tool.
"""

import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
NOT_COMPARED = ("time/", "memory/", "gpu/", "train/throughput", "train/mfu", "reshard/seconds")
STEPS = 5
ENGINE = os.environ.get("FAULTS_ENGINE", "hf")
"""Of the runs of these tests: hf or vllm."""
WORLD_SIZE = 4
LONGEST_SECONDS = 280.0
PRELOADED = ["transformers.models.llama.modeling_llama", "rlhf_megatron.trainer"]

os.environ.setdefault("OMP_NUM_THREADS", "1")


def preload(engine: str) -> None:
    """Call before the first job of a process: what the server of the ranks imports."""
    get_context("forkserver").set_forkserver_preload(
        PRELOADED + (["vllm"] if engine == "vllm" else [])
    )


def make_files(folder: Path) -> None:
    """Two random Llamas of 4 layers with a word tokenizer, prompts, demonstrations and a reward."""
    for name, hidden in (("model", 64), ("other_model", 48)):
        _save_model(folder / name, hidden_size=hidden)
    prompts = [{"prompt": f"t{i} t{i * 7 % 60} t{i * 11 % 60}"} for i in range(24)]
    _write_lines(folder / "train.jsonl", prompts[:16])
    _write_lines(folder / "heldout.jsonl", prompts[16:])
    _write_lines(
        folder / "demonstrations.jsonl",
        [{"prompt": row["prompt"], "response": "t1 t2 t3"} for row in prompts],
    )
    (folder / "rewards.py").write_text(
        "def score(prompt, response, **fields):\n"
        "    words = response.split()\n"
        "    return sum(int(word[1:]) % 2 for word in words if word[1:].isdigit()) / 8\n"
    )
    (folder / "config.yaml").write_text("run:\n  name: tiny\n")


def _save_model(path: Path, *, hidden_size: int) -> None:
    import torch

    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"t{i}": i + 3 for i in range(61)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            vocab_size=64,
            hidden_size=hidden_size,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # vLLM's attention on a CPU takes no smaller one
            max_position_embeddings=64,
        )
    ).save_pretrained(path)


def _write_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(files: Path, *, output: Path, engine: str = ENGINE, **changes: Any) -> list[str]:
    """The command line of a run at TP2 x PP2 that saves after each step. `changes`: further keys,
    with __ for dots."""
    found: dict[str, Any] = {
        "run.output_dir": output,
        "run.steps": STEPS,
        "logging.report": "false",  # a second each; tests/unit/test_report.py has it
        "actor.model": files / "model",
        "data.prompts": files / "train.jsonl",
        "evaluation.prompts": files / "heldout.jsonl",
        "evaluation.interval_steps": 2,
        "evaluation.temperature": 1.0,
        "warmup.steps": 2,
        "warmup.demonstrations": files / "demonstrations.jsonl",
        "warmup.response_field": "response",
        "warmup.samples_per_step": 4,
        "reward.function": f"{files}/rewards.py:score",
        "rollout.engine": engine,
        "rollout.tensor_parallel_size": 2 if engine == "vllm" else 1,
        "rollout.prompts_per_step": 6,
        "rollout.responses_per_prompt": 2,
        "rollout.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 8,
        "ppo.mini_batch_samples": 6,
        "ppo.epochs": 2,
        "ppo.kl.adaptive": "true",
        "actor.optimizer.learning_rate": 1e-3,
        "critic.optimizer.learning_rate": 1e-3,
        "checkpoint.interval_steps": 1,
        "distributed.timeout_seconds": 100,
    }
    for role in ("actor", "critic", "ref"):
        found[f"{role}.precision"] = "fp32"
        found[f"{role}.parallel.tensor_model_parallel_size"] = 2
        found[f"{role}.parallel.pipeline_model_parallel_size"] = 2
    found |= {key.replace("__", "."): value for key, value in changes.items()}
    overrides = [f"{key}={value}" for key, value in found.items()]
    return ["--config", str(files / "config.yaml"), *overrides]


def listen_to_phases(listener: Any) -> None:
    """Add a PhaseListener to the ledgers that this process will make."""
    from rlhf_megatron.observability.ledger import PhaseLedger

    plain = PhaseLedger.__init__

    def with_listener(ledger: Any, **options: Any) -> None:
        plain(ledger, **options)
        ledger.listeners.append(listener)

    PhaseLedger.__init__ = with_listener  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """Something that happens on one rank as it enters a phase."""

    phase: str
    step: int
    rank: int = 0
    signals: tuple[int, ...] = (signal.SIGTERM,)
    """Sent to the rank's own process, `seconds_between` apart."""
    seconds_before: float = 0.0
    """From the entry to the first signal: others hear of a phase some tenths of a second later."""
    seconds_between: float = 3.0

    def install(self, rank: int) -> None:
        """In the process of `rank`, before the program starts."""
        if rank == self.rank:
            listen_to_phases(self)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if (step, phase) == (self.step, self.phase):
            time.sleep(self.seconds_before)
            print(f"signalled at {time.time():.3f}", flush=True)
            for index, number in enumerate(self.signals):
                if index > 0:
                    time.sleep(self.seconds_between)
                os.kill(os.getpid(), number)

    def phase_exited(self, record: Any) -> None:
        pass


class Job:
    """The ranks of one start of the program."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        logs: Path,
        world_size: int = WORLD_SIZE,
        environment: dict[str, str] | None = None,
        trigger: Trigger | None = None,
        start_method: str = "forkserver",
        tool: str = "",
    ) -> None:
        """start_method: "spawn" for ranks that use a GPU, which no process may do that was forked
        from one that has looked for GPUs. tool: run that of tools/ in place of the training."""
        logs.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.logs = logs
        self.started = time.monotonic()
        context = get_context(start_method)
        self.ranks = [
            context.Process(  # type: ignore[attr-defined]
                target=_rank,
                args=(list(words), rank, world_size, port, logs, environment or {}, trigger, tool),
            )
            for rank in range(world_size)
        ]
        for process in self.ranks:
            process.start()

    def wait(self, *, timeout_seconds: float = LONGEST_SECONDS) -> list[int]:
        """The ranks' exit codes."""
        deadline = time.monotonic() + timeout_seconds
        try:
            for process in self.ranks:
                process.join(max(deadline - time.monotonic(), 0))
            codes = [process.exitcode for process in self.ranks]
            assert None not in codes, f"{codes}: did not end in time\n{self.text()}"
            return [int(code) for code in codes if code is not None]
        finally:
            self.kill()

    def signal(self, number: int, *, ranks: Sequence[int] = range(WORLD_SIZE)) -> None:
        for rank in ranks:
            process = self.ranks[rank]
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        self.signal(signal.SIGKILL, ranks=range(len(self.ranks)))
        for process in self.ranks:
            process.join()

    @property
    def running(self) -> bool:
        """No rank has ended."""
        return all(process.is_alive() for process in self.ranks)

    @property
    def alive(self) -> bool:
        """Some rank has not ended."""
        return any(process.is_alive() for process in self.ranks)

    def text(self) -> str:
        """What the ranks printed."""
        return "".join(path.read_text() for path in sorted(self.logs.glob("rank_*.txt")))


def _rank(
    words: list[str],
    rank: int,
    world_size: int,
    port: int,
    logs: Path,
    environment: dict[str, str],
    trigger: Trigger | None,
    tool: str,
) -> None:
    file = os.open(logs / f"rank_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    import torch

    from rlhf_megatron.main import main

    torch.set_num_threads(1)
    if trigger is not None:
        trigger.install(rank)
    program = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["main"] if tool else main
    os._exit(program(words))


def run_to_the_end(words: Sequence[str], *, logs: Path, **options: Any) -> Job:
    """Run and see it end well."""
    job = Job(words, logs=logs, **options)
    codes = job.wait()
    assert set(codes) == {0}, f"{codes}\n{job.text()}"
    return job


def metrics(run: Path, *, ignoring: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Each step's line of metrics.jsonl, less what may differ between equal runs."""
    left_out = NOT_COMPARED + ignoring
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(left_out)}
        for line in lines
    ]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, bytes]:
    """The exported model, tensor by tensor, as bytes."""
    import torch

    with safe_open(run / "hf" / "model.safetensors", framework="pt") as file:
        return {
            name: file.get_tensor(name).view(torch.uint8).numpy().tobytes()
            for name in file.keys()  # noqa: SIM118
        }


def assert_same_run(run: Path, *, expected: Path, ignoring: tuple[str, ...] = ()) -> None:
    """Bit by bit: metrics but those to ignore, evaluations, rollouts, final weights."""
    found = metrics(run, ignoring=ignoring)
    assert found == metrics(expected, ignoring=ignoring), "metrics.jsonl"
    assert evaluations(run) == evaluations(expected), "evaluations.jsonl"
    assert weights(run) == weights(expected), "weights"
    names = sorted(path.name for path in (expected / "rollouts").iterdir())
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == names
    for name in names:
        assert (run / "rollouts" / name).read_text() == (expected / "rollouts" / name).read_text()
