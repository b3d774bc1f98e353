"""The console command `rlhf-megatron`: training on this node, and the tools."""

import importlib
import sys
from collections.abc import Sequence

from rlhf_megatron import __version__
from rlhf_megatron.errors import EXIT_BAD_INPUT

TOOLS = {
    "doctor": "doctor",
    "hf-to-megatron": "hf_to_megatron",
    "megatron-to-hf": "megatron_to_hf",
    "convert-checkpoint": "convert_checkpoint",
    "inspect-checkpoint": "inspect_checkpoint",
    "plan-memory": "plan_memory",
    "plan-reshard": "plan_reshard",
    "report": "report",
    "trace": "trace",
    "simulate": "simulate",
    "config-reference": "config_reference",
    "fetch-smollm2": "fetch_smollm2",
    "make-arithmetic": "make_arithmetic",
    "make-quickstart": "make_quickstart",
    "reward-server": "reward_server",
}

USAGE = f"""usage: rlhf-megatron COMMAND ...

  train --nproc-per-node N --config FILE [key.path=value ...]
                     train on this node with N processes (on a cluster: torchrun or srun
                     with launch/train.py, which takes the same arguments)
  {"  ".join(TOOLS)}
                     the scripts of tools/, with their own --help
  --version          {__version__}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else EXIT_BAD_INPUT
    command, rest = words[0], words[1:]
    if command == "--version":
        print(__version__)
        return 0
    if command == "train":
        return train(rest)
    if command in TOOLS:
        module = importlib.import_module(f"rlhf_megatron_tools.{TOOLS[command]}")
        return int(module.main(rest) or 0)
    print(f"error: {command}: no such command\n\n{USAGE}", file=sys.stderr)
    return EXIT_BAD_INPUT


def train(arguments: Sequence[str]) -> int:
    """Split off --nproc-per-node and start that many ranks."""
    from rlhf_megatron.launcher import launch, training_command

    rest = [
        part
        for word in arguments
        for part in (word.split("=", 1) if word.startswith("--nproc-per-node=") else (word,))
    ]
    num_processes = 1
    if "--nproc-per-node" in rest:
        at = rest.index("--nproc-per-node")
        text = rest[at + 1] if at + 1 < len(rest) else ""
        if not text.isdigit() or int(text) < 1:
            print(
                f"error: --nproc-per-node {text!r}: must be a number of 1 or more", file=sys.stderr
            )
            return EXIT_BAD_INPUT
        num_processes = int(text)
        del rest[at : at + 2]
    if num_processes == 1 or "--dry-run" in rest:
        from rlhf_megatron.main import main as run

        return run(rest)
    return launch(training_command(rest), num_processes=num_processes)


if __name__ == "__main__":
    sys.exit(main())
