"""Whether a run's memory stays flat: reads a run folder's ledger.jsonl.

    make quickstart STEPS=300 ARGS="evaluation.prompts="
    python benchmarks/memory_flat.py runs/quickstart --after-step 20

Prints, for each rank, what was allocated at the end of the steps (the resident set on a CPU): at
step 20, at the last, and the least and most in between. Exit code 1 where any step after it lies
more than --bound above step 20.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def by_rank(lines: Iterable[str]) -> dict[int, dict[int, float]]:
    """Rank -> step -> GB at the step's end."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for line in lines:
        record = json.loads(line)
        if record.get("phase") == "step":
            found[record["rank"]][record["step"]] = record["allocated_gb"]
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--after-step", type=int, default=20)
    parser.add_argument("--bound", type=float, default=0.02)
    options = parser.parse_args()
    is_flat = True
    with (options.run / "ledger.jsonl").open(encoding="utf-8") as file:
        ranks = by_rank(file)
    for rank, steps in ranks.items():
        after = {s: gb for s, gb in steps.items() if s >= options.after_step}
        if not after:
            sys.exit(f"error: --after-step {options.after_step}: the last step is {max(steps)}")
        begin, end = after[min(after)], after[max(after)]
        growth = max(after.values()) / begin - 1
        is_flat &= growth <= options.bound
        print(
            f"rank {rank}: {begin:.4f} GB at step {min(after)}, {end:.4f} GB at step {max(after)}, "
            f"{min(after.values()):.4f} to {max(after.values()):.4f} GB, "
            f"growth {100 * growth:.2f} %"
        )
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
