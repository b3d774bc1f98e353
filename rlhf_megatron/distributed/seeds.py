"""The global random number generators."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all GPUs included.

    Megatron-Core's tensor-parallel tracker is seeded per role (groups.RoleGroups.seed), rollouts
    per request or per engine (rollout/seeds.py).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
