"""A run in one HTML file: rewards, losses, time, memory, evaluations, responses, configuration.

    python tools/report.py runs/first                      writes runs/first/report.html
    python tools/report.py runs/first runs/second --output compare.html
                                                           the runs side by side

The file needs no network and can be mailed or opened on a phone. The run may still be going. Needs
the package plotly (pip install -e ".[report]"), no GPU and no processes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    from rlhf_megatron.observability.report import write_report

    try:
        written = write_report(options.run, output=options.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: the report cannot be written ({error})", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(
        f"wrote {written.path}: {written.num_charts} charts, {written.num_bytes / 1e6:.1f} MB, "
        f"{written.seconds:.1f} s"
    )
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a run's report, one HTML file.")
    parser.add_argument(
        "run", type=Path, nargs="+", help="run folder (run.output_dir); several: side by side"
    )
    parser.add_argument(
        "--output", type=Path, help="file to write (default: report.html in the first run's folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
