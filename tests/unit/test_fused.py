"""Which calls of an element-wise function are compiled."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_megatron.models import fused


class Rows(SimpleNamespace):
    """What is asked of a first argument."""

    def size(self, axis: int) -> int:
        return self.shape[axis]


@pytest.mark.parametrize(
    ("on_gpu", "rows", "is_compiled"),
    [(False, 7, False), (True, 7, True), (True, 2, True), (True, 1, False), (True, 0, False)],
)
def test_rows_on_a_gpu_are_compiled_where_they_are_several(
    monkeypatch, on_gpu, rows, is_compiled
) -> None:
    """Sizes 0 and 1 would each be compiled anew, for each temperature."""
    monkeypatch.setattr(torch, "compile", lambda function: lambda *given: "compiled")
    function = fused.compiled_on_gpu(lambda first, factor: "plain")
    found = function(Rows(is_cuda=on_gpu, shape=(rows, 5)), 0.7)
    assert found == ("compiled" if is_compiled else "plain")
