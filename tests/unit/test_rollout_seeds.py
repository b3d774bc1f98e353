import random
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.distributed.seeds import seed_everything
from rlhf_megatron.rollout.seeds import (
    engine_seed,
    preserved_generators,
    request_seed,
)

NUMBERS = st.integers(min_value=0, max_value=2**40)


@given(run_seed=NUMBERS, step=NUMBERS, prompt_id=NUMBERS, sample_index=NUMBERS)
def test_seeds_are_in_range_and_take_every_part(
    run_seed: int, step: int, prompt_id: int, sample_index: int
) -> None:
    seed = request_seed(run_seed, step=step, prompt_id=prompt_id, sample_index=sample_index)
    assert 0 <= seed < 2**63
    others = {
        request_seed(run_seed + 1, step=step, prompt_id=prompt_id, sample_index=sample_index),
        request_seed(run_seed, step=step + 1, prompt_id=prompt_id, sample_index=sample_index),
        request_seed(run_seed, step=step, prompt_id=prompt_id + 1, sample_index=sample_index),
        request_seed(run_seed, step=step, prompt_id=prompt_id, sample_index=sample_index + 1),
    }
    assert len({seed, *others}) == 5
    assert 0 <= engine_seed(run_seed, replica=step, step=prompt_id) < 2**32


def test_no_two_of_many_requests_share_a_seed() -> None:
    seeds = {
        request_seed(1, step=step, prompt_id=prompt, sample_index=sample)
        for step in range(20)
        for prompt in range(100)
        for sample in range(8)
    }
    assert len(seeds) == 20 * 100 * 8


def test_seeds_are_the_same_in_another_process() -> None:
    code = (
        "from rlhf_megatron.rollout.seeds import *;"
        "print(request_seed(3, step=4, prompt_id=5, sample_index=6),"
        " engine_seed(3, replica=4, step=5))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    expected = (
        request_seed(3, step=4, prompt_id=5, sample_index=6),
        engine_seed(3, replica=4, step=5),
    )
    assert tuple(map(int, printed.split())) == expected


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_are_put_back_even_after_an_error() -> None:
    seed_everything(0)
    expected = draw()
    seed_everything(0)
    try:
        with preserved_generators(torch.device("cpu")):
            seed_everything(99)
            draw()
            raise KeyError
    except KeyError:
        pass
    assert draw() == expected
