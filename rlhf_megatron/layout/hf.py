"""The layout of Hugging Face files: every logical tensor is a parameter of its own, whole."""

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.cuts import whole
from rlhf_megatron.layout.tensors import Head, logical_tensors


def hf_layout(arch: ModelArchitecture, *, head: Head) -> RankLayout:
    """One box per tensor, in the order of the layers."""
    return tuple(
        whole(tensor, parameter=tensor.name) for tensor in logical_tensors(arch, head=head)
    )
