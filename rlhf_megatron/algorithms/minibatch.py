"""The mini-batches of a step: which samples each optimizer step sees."""

import math
import random
from itertools import pairwise


def mini_batches(num_samples: int, *, mini_batch_samples: int, seed: int) -> list[list[int]]:
    """Shuffle 0..num_samples-1 into ceil(num_samples / mini_batch_samples) mini-batches.

    Their sizes differ by at most one (a last mini-batch of a few samples would take a full-sized
    step on little evidence). No samples give no mini-batches.
    """
    # Sorting random() keys, since random() alone is the same in all versions of Python.
    generator = random.Random(seed)
    keys = [generator.random() for _ in range(num_samples)]
    order = sorted(range(num_samples), key=lambda index: keys[index])
    count = math.ceil(num_samples / mini_batch_samples)
    bounds = [index * num_samples // count for index in range(count + 1)] if count else [0]
    return [order[start:stop] for start, stop in pairwise(bounds)]
