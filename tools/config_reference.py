"""Print the reference page of all configuration keys, or write it.

python tools/config_reference.py --output docs/config.md
python tools/config_reference.py --check docs/config.md     exit code 2 where it is out of date
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.config_reference import reference_page
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="The reference page of all configuration keys.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--output", type=Path, metavar="FILE", help="write it to FILE")
    what.add_argument("--check", type=Path, metavar="FILE", help="is FILE what would be written?")
    options = parser.parse_args(arguments)
    page = reference_page()
    if options.check is not None:
        if options.check.is_file() and options.check.read_text(encoding="utf-8") == page:
            return EXIT_DONE
        print(f"error: {options.check}: out of date; run `make docs`", file=sys.stderr)
        return EXIT_BAD_INPUT
    if options.output is None:
        print(page, end="")
        return EXIT_DONE
    try:
        options.output.write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"error: --output {options.output}: cannot be written: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
