"""Whether a model can be cut as a layout says."""

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import megatron_problems
from rlhf_megatron.layout.parallel import ParallelLayout


def check_layout(arch: ModelArchitecture, *, layout: ParallelLayout) -> None:
    """Raise UserError, listing why the model cannot be cut this way."""
    problems = megatron_problems(
        arch,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
    )
    if problems:
        raise UserError(f"the {arch.family} model cannot be cut this way: " + "; ".join(problems))
