"""Log-probs of every model family in every layout against transformers: a table of the errors.

    python benchmarks/family_logits.py [--model DIR ...]

Random models of each family with awkward numbers, and those of `--model`, in float32 on the CPU, at
every valid layout out of TP {1,2,3,4} x PP {1,2,3} x VPP {1,2} on up to 8 processes. Shown is the
largest absolute difference of a log-prob over the whole vocabulary and all tokens. Exits 1 where
one is above the bound.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "distributed"), str(ROOT)]

from family_models import (  # noqa: E402
    KINDS,
    save_family_models,
    save_reference,
    valid_shapes,
    worst_errors,
)
from pool import run_ranks  # noqa: E402

from rlhf_megatron.layout.architecture import read_architecture  # noqa: E402

BOUND = 2e-4
TIMEOUT_SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, action="append", default=[])
    models: list[Path] = parser.parse_args().model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(1, save_family_models, folder, KINDS, timeout_seconds=TIMEOUT_SECONDS)
        for model in models:
            run_ranks(
                1, save_reference, model, folder / model.name, timeout_seconds=TIMEOUT_SECONDS
            )
        kinds = [*KINDS, *(model.name for model in models)]
        errors = measure({kind: folder / kind for kind in kinds})
    print(table(errors))
    worst = max(value for row in errors.values() for value in row.values())
    print(f"\nworst {worst:.1e}, bound {BOUND:.0e}")
    return int(worst > BOUND)


def measure(directories: dict[str, Path]) -> dict[str, dict[str, float]]:
    """kind -> layout -> error; all models of a layout in one set of processes."""
    valid = {kind: valid_shapes(read_architecture(path)) for kind, path in directories.items()}
    errors: dict[str, dict[str, float]] = {kind: {} for kind in directories}
    for shape in dict.fromkeys(shape for shapes in valid.values() for shape in shapes):
        begin = time.monotonic()
        fitting = {kind: directories[kind] for kind, shapes in valid.items() if shape in shapes}
        every = run_ranks(
            shape.world_size, worst_errors, fitting, shape, timeout_seconds=TIMEOUT_SECONDS
        )
        for kind in fitting:
            errors[kind][str(shape)] = max(found[kind] for found in every)
        print(f"{shape}: {len(fitting)} models, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return errors


def table(errors: dict[str, dict[str, float]]) -> str:
    """Rows are models, columns layouts; "-" where the numbers do not divide."""
    layouts = list(dict.fromkeys(layout for row in errors.values() for layout in row))
    lines = ["| model | " + " | ".join(name.removesuffix("dp1") for name in layouts) + " |"]
    lines.append("| --- " * (len(layouts) + 1) + "|")
    for kind, row in errors.items():
        cells = (f"{row[name]:.1e}" if name in row else "-" for name in layouts)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
