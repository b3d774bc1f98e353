"""torchrun --nproc-per-node N launch/train.py --config FILE [key.path=value ...] [--dry-run]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, uninstalled

from rlhf_megatron.main import main

if __name__ == "__main__":
    sys.exit(main())
