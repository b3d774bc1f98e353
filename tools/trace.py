"""A run's phases on a timeline, rank by rank, for ui.perfetto.dev or chrome://tracing.

    python tools/trace.py runs/first                               writes runs/first/trace.json
    python tools/trace.py runs/first --steps 10-20 --output trace.json

Reads the run's ledger.jsonl; the run may still be going. A run writes the same file as it ends, of
the steps of logging.trace_steps. Needs no GPU and no processes. docs/timeline.md says how to read
it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    from rlhf_megatron.observability.trace import write_trace

    try:
        written = write_trace(options.run, steps=options.steps, output=options.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: the trace cannot be written ({error})", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(written)
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a run's phases as a timeline.")
    parser.add_argument("run", type=Path, help="run folder (run.output_dir)")
    parser.add_argument(
        "--steps", default="all", metavar="STEPS", help="such as 10-20 or 1-5,50 (default: all)"
    )
    parser.add_argument(
        "--output", type=Path, help="file to write (default: trace.json in the run's folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
