"""What counts as a bad update, in one process."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlhf_megatron.bad_steps import LEAST_HISTORY_UPDATES, BadSteps, describe_nonfinite
from rlhf_megatron.batch import RaggedBatch, from_sequences, load_batch
from rlhf_megatron.engine.model_engine import StepResult
from rlhf_megatron.errors import JobError
from rlhf_megatron.faults_config import FaultsConfig
from rlhf_megatron.updates import Update


def small_batch(**response: list[float]) -> RaggedBatch:
    batch = from_sequences([[1, 2], [3]], responses=[[4], [5, 6]])
    batch.response |= {name: torch.tensor(values) for name, values in response.items()}
    return batch


def update(role: str = "actor", number: int = 1) -> Update:
    batch = small_batch()
    return Update(role=role, number=number, count=4, step_batch=batch, samples=range(len(batch)))


def result(norm: float = 1.0, *, loss: float = 0.5, nonfinite_rank: int = -1) -> StepResult:
    return StepResult(
        grad_norm=norm,
        updated=False,
        metrics={"ppo/policy_loss": loss},
        nonfinite_rank=nonfinite_rank,
    )


def guard(folder: Path, **changes) -> BadSteps:
    options = {"bad_step": "skip", "grad_norm_factor": 5.0, "grad_norm_window_updates": 20}
    config = FaultsConfig(**(options | changes))
    return BadSteps(config, output_dir=folder, rank=0, group=None, say=lambda text: None)


def test_a_norm_is_far_outside_by_the_median_of_the_role(tmp_path):
    steps = guard(tmp_path)
    steps.step_begins(1)
    assert steps.takes(result(1e6), update=update())  # no history: taken as it comes
    for _ in range(LEAST_HISTORY_UPDATES):
        assert steps.takes(result(2.0), update=update())
    assert steps.takes(result(10.0), update=update())  # 5 times: not more
    assert not steps.takes(result(10.01), update=update())
    assert steps.takes(result(10.01), update=update("critic"))  # a history of its own
    assert not steps.takes(result(10.01), update=update())  # what is not taken is no history
    assert steps.step_ends() == {"faults/bad_steps": 1.0, "faults/skipped_updates": 2.0}


def test_the_window_forgets(tmp_path):
    steps = guard(tmp_path, grad_norm_window_updates=3)
    steps.step_begins(1)
    for norm in (1.0, 1.0, 4.0, 4.0, 4.0, 19.0):
        assert steps.takes(result(norm), update=update())
    assert not steps.takes(result(21.0), update=update())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite(tmp_path, loss):
    steps = guard(tmp_path, grad_norm_factor=0.0)
    assert not steps.wants_norm
    steps.step_begins(1)
    assert not steps.takes(result(math.nan, loss=loss), update=update())
    assert steps.takes(result(math.nan), update=update())  # the norm is not known


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path):
    steps = guard(tmp_path, max_bad_steps_in_row=2)
    for step, bad in enumerate([True, False, True], start=1):
        steps.step_begins(step)
        steps.takes(result(nonfinite_rank=3 if bad else -1), update=update())
        assert steps.step_ends()["faults/skipped_updates"] == bad
    steps.step_begins(4)
    steps.takes(result(), update=update("critic"))
    steps.takes(result(nonfinite_rank=3), update=update(number=2))
    with pytest.raises(JobError) as error:
        steps.step_ends()
    assert "bad steps in a row: 2, up to step 4 (faults.max_bad_steps_in_row=2)" in str(error.value)
    assert "update_actor of step 4, update 2 of 4: the gradient on rank 3" in str(error.value)


def test_stop_names_place_cause_and_file(tmp_path):
    steps = guard(tmp_path, bad_step="stop")
    steps.step_begins(7)
    with pytest.raises(JobError) as error:
        steps.takes(result(loss=math.inf), update=update(number=3))
    path = tmp_path / "bad_batches" / "step_000007_update_actor_003.pt"
    start = "bad step on all ranks in update_actor of step 7, update 3 of 4: ppo/policy_loss=inf."
    assert str(error.value).startswith(start) and str(path) in str(error.value)
    assert torch.equal(load_batch(path).tokens, small_batch().tokens)


def test_only_the_newest_batches_stay(tmp_path):
    steps = guard(tmp_path, keep_bad_batches=2, max_bad_steps_in_row=9)
    for step in range(1, 5):
        steps.step_begins(step)
        steps.takes(result(nonfinite_rank=0), update=update())
        steps.step_ends()
    names = sorted(path.name for path in (tmp_path / "bad_batches").iterdir())
    assert names == ["step_000003_update_actor_001.pt", "step_000004_update_actor_001.pt"]
    none = guard(tmp_path / "none", keep_bad_batches=0)
    none.step_begins(1)
    none.takes(result(nonfinite_rank=0), update=update())
    assert not (tmp_path / "none").exists()


def test_a_step_whose_outputs_are_not_finite_is_not_accepted(tmp_path):
    steps = guard(tmp_path)
    steps.step_begins(1)
    fine = small_batch(old_logprobs=[-1.0, -2.0, -3.0])
    assert steps.accepts(fine, last_values=torch.zeros(2))
    assert not steps.accepts(fine, last_values=torch.tensor([0.0, math.nan]))
    bad = small_batch(old_logprobs=[-1.0, math.nan, -math.inf], values=[0.0, 0.0, 0.0])
    assert describe_nonfinite(bad) == "2 of 3 old_logprobs that are not finite"
    assert not steps.accepts(bad, last_values=torch.zeros(2))
    saved = load_batch(tmp_path / "bad_batches" / "step_000001_outputs.pt")
    assert math.isnan(saved.response["old_logprobs"][1])


def test_what_a_resumed_run_needs_is_plain_json(tmp_path):
    steps = guard(tmp_path)
    steps.step_begins(1)
    for norm in range(1, 12):
        steps.takes(result(float(norm)), update=update())
    steps.takes(result(nonfinite_rank=0), update=update())
    steps.step_ends()
    resumed = guard(tmp_path)
    resumed.load_state_dict(json.loads(json.dumps(steps.state_dict())))
    assert resumed.state_dict() == steps.state_dict()
    assert (resumed.bad_steps, resumed.bad_in_row) == (1, 1)
    resumed.step_begins(2)
    assert not resumed.takes(result(31.0), update=update())  # the median is 6
    assert resumed.takes(result(30.0), update=update())
