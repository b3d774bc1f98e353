"""Seeds of sampling, and the shield that keeps an engine from moving the trainer's generators."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _hash_bits(*parts: int, bits: int) -> int:
    """The same number in every process and on every machine, unlike Python's hash()."""
    text = ",".join(str(part) for part in parts).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def request_seed(run_seed: int, *, step: int, prompt_id: int, sample_index: int) -> int:
    """Seed of one response, in [0, 2^63).

    It depends on nothing else, so a response is the same whichever engine draws it, and beside
    whichever others.
    """
    return _hash_bits(0, run_seed, step, prompt_id, sample_index, bits=63)


def engine_seed(run_seed: int, *, replica: int, step: int) -> int:
    """Seed of one engine's step, in [0, 2^32): the range that NumPy takes, which vLLM seeds too.

    The same on all ranks of the engine; different between replicas, which would otherwise draw the
    same responses.
    """
    return _hash_bits(1, run_seed, replica, step, bits=32)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Put the global generators back as they were: Python, NumPy, torch, and `device`'s if a GPU.

    vLLM's LLM() reseeds them all and generate() advances them (0.25.1 and 0.32.0); a trainer that
    drew from them afterwards would depend on its rollouts.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
