"""How large a model is, from its logical tensors."""

from math import prod

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.tensors import Head, logical_tensors


def num_parameters(arch: ModelArchitecture, *, head: Head) -> int:
    """Elements of all tensors, each counted once, without vocabulary padding."""
    return sum(prod(tensor.shape) for tensor in logical_tensors(arch, head=head))
