"""The planner's peak of an update against torch's allocator. Figures are printed (-s)."""

import gc

import pytest
import torch
from test_memory_gpu import build, context, model_dir, train  # noqa: F401 - two are fixtures

from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.memory.roles import RoleSetting, role_memory, update_pass
from rlhf_megatron.memory.switches import OffloadChoice, RecomputeChoice
from rlhf_megatron.memory.training import BatchSizes
from rlhf_megatron.models.config import RecomputeConfig

SEQUENCE_TOKENS, RESPONSE_TOKENS = 1024, 1000


@pytest.mark.parametrize("samples", [4, 32])
@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
def test_an_updates_peak_is_as_planned(context, model_dir, granularity, samples):  # noqa: F811
    """With few samples the optimizer's step needs most, with many the passes."""
    gc.collect()
    before = torch.cuda.memory_allocated(context.device)
    engine = build(context, model_dir, recompute=RecomputeConfig(granularity=granularity))
    train(engine, samples=samples)  # after it the optimizer has all its state
    gc.collect()
    torch.cuda.reset_peak_memory_stats(context.device)
    train(engine, samples=samples)
    torch.cuda.synchronize(context.device)
    measured = torch.cuda.max_memory_allocated(context.device) - before
    role = role_memory(
        RoleSetting(
            name="actor",
            arch=read_architecture(model_dir),
            layout=ParallelLayout((0,)),
            head="lm",
            precision="bf16",
            is_trained=True,
            recompute=RecomputeChoice(granularity=granularity),
            offload=OffloadChoice(),
        ),
        rank=0,
        kernels="flash",
        on_gpu=True,
    )
    sizes = BatchSizes(
        micro_tokens=samples * SEQUENCE_TOKENS,
        micro_response_tokens=samples * RESPONSE_TOKENS,
        mini_micro_batches=1,
        mini_tokens=samples * SEQUENCE_TOKENS,
        step_tokens=samples * SEQUENCE_TOKENS,
    )
    found = update_pass(role, sizes=sizes)
    planned = sum(role.resident.values()) + found.total
    print(
        f"\n{granularity}, {samples} x {SEQUENCE_TOKENS} tokens: {measured / 1e9:.3f} GB measured, "
        f"{planned / 1e9:.3f} planned ({planned / measured - 1:+.1%}), in the {found.instant}"
    )
    assert abs(planned - measured) <= 0.05 * measured
