"""One rank of the trainer's command line where there may be fewer GPUs than ranks.

Then all are on device 0. NCCL refuses two ranks on one GPU unless it takes them for different hosts
(NCCL_HOSTID). A way to test tensor and pipeline parallelism where there is a single GPU; far too
slow for training. Where there is a GPU for each rank, each has its own, as in a job.
"""

import os
import sys

import torch

if torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "1")):
    os.environ["NCCL_HOSTID"] = f"host{os.environ.get('RANK', '0')}"
    os.environ["LOCAL_RANK"] = "0"

from rlhf_megatron.main import main

if __name__ == "__main__":
    # The doctor would refuse ranks that all call themselves local rank 0.
    sys.exit(main([*sys.argv[1:], "doctor.at_start=false"]))
