"""The batch step of a Slurm job, called by the scripts in slurm/. Python 3.9, standard library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf_megatron.slurm.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], repository=Path(__file__).resolve().parents[1]))
