"""What stands in the place of the output layer: the policy's hidden states, the critic's values,
or both.

Shape letters: T packed tokens, H hidden size, V padded vocabulary, t tensor-parallel size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


class HiddenStatesOutput(ColumnParallelLinear):
    """The output layer's weight, [V / t, H], without its product.

    The model then ends in hidden states, and log-probs are taken from them chunk by chunk
    (vocab_parallel.py), so that [T, V] logits never exist. The parameter keeps Megatron-Core's
    name, attributes and checkpoint key.
    """

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """[T (/ t under sequence parallelism), 1, H] -> [T, 1, H]; sums gradients over TP."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            ), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group), None


def replace_output_layer(model: Any, *, with_values: bool = False) -> None:
    """Put a HiddenStatesOutput in the place of a GPTModel's output layer, with its parameter.

    with_values: a JointOutput, whose value head is new.
    """
    old = model.output_layer
    output_class = JointOutput if with_values else HiddenStatesOutput
    new = output_class(
        old.input_size,
        old.output_size,
        config=model.config,
        init_method=model.config.init_method,
        bias=False,
        gather_output=False,
        skip_bias_add=False,
        skip_weight_param_allocation=True,
        tp_group=model.pg_collection.tp,
    )
    if old.weight is not None:
        new.weight = old.weight
    if isinstance(new, JointOutput):
        new.value_head = ValueHead(model.config, tp_group=model.pg_collection.tp)
    model.output_layer = new


class ValueHead(nn.Module):
    """V(s_t) from the hidden state: a linear map to one number, the same on every TP rank.

    Begins at zero, so that an untrained critic answers 0 everywhere.
    """

    def __init__(self, config: Any, *, tp_group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T (/ t), 1, H] -> [T, 1, 1] in float32 (or float64 where the model is)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = F.linear(hidden.to(dtype), self.weight.to(dtype))
        if self.sequence_parallel:
            # Each TP rank computes the whole loss from the gathered values, so the gradient of its
            # own part is complete: no reduction (tensor_parallel_output_grad=False).
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class JointOutput(HiddenStatesOutput):
    """The policy's hidden states, and beside them the values of a scalar head on the same ones.

    A GPTModel returns one tensor, in the model's dtype: the values, in float32, are taken from here
    after each forward pass.
    """

    value_head: ValueHead
    _values: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """As HiddenStatesOutput."""
        # From the states before they are gathered or copied to the TP ranks: those passes sum the
        # gradients of TP ranks that each have a part, and here each has the whole.
        self._values, _ = self.value_head(hidden)
        return super().forward(hidden, *args, **kwargs)

    def take_values(self) -> Tensor:
        """The last forward pass's, [T]; differentiable. Only once."""
        values, self._values = self._values, None
        assert values is not None, "no forward pass since the last call"
        return values[:, 0, 0]
