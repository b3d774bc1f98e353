"""What is in a training checkpoint, how large it is, who wrote it, and whether it is complete.

    python tools/inspect_checkpoint.py runs/first                    all checkpoints of a run
    python tools/inspect_checkpoint.py runs/first/checkpoints/step_000010
    python tools/inspect_checkpoint.py runs/first --verify           read every byte

Also of a checkpoint that hf_to_megatron.py or convert_checkpoint.py wrote, which has no checksums.
Exit code 0 where everything is complete (with --verify: and every byte is the one recorded), 2
where something is not. Starts no processes and needs no GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    from rlhf_megatron.checkpoint.inspect import find_checkpoints, inspect, marked

    try:
        folders = find_checkpoints(options.checkpoint)
        current = marked(options.checkpoint)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    found = [inspect(folder, verify=options.verify) for folder in folders]
    if options.json:
        report: list[dict[str, Any]] = [
            entry.as_json() | {"current": entry.folder == current} for entry in found
        ]
        print(json.dumps(report, indent=2))
    else:
        for entry in found:
            print(entry.describe(current=entry.folder == current, verified=options.verify))
    problems = [f"{e.folder}: {problem}" for e in found for problem in e.problems]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_BAD_INPUT if problems else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Say what is in a checkpoint, and whether it is complete."
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare the checksums"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
