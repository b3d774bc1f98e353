"""A parameter that lies elsewhere than the transfer buffers, as in an export from GPUs to files."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlhf_megatron.layout.boxes import LogicalTensor
from rlhf_megatron.layout.cuts import whole
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import make_plan

SHAPE = (64, 64)
ELSEWHERE = torch.device("meta")
"""In place of a GPU."""


class ExchangeBegins(Exception):  # noqa: N818 - no error
    """What is to be sent and received is known."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parameters_are_there", [False, True])
def test_what_travels_is_where_the_buffers_are(monkeypatch, rank, parameters_are_there) -> None:
    """Sender and receiver would else take different backends of their group and never meet."""
    travels: list[SimpleNamespace] = []

    def begin(operations) -> None:
        travels.extend(operations)
        raise ExchangeBegins

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(
        dist,
        "P2POp",
        lambda call, tensor, peer, group: SimpleNamespace(tensor=tensor, peer=peer),
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", begin)
    layout = (whole(LogicalTensor("w", SHAPE), parameter="w"),)
    plan = make_plan({0: layout}, {1: layout}, itemsize_bytes=2, bucket_bytes=1 << 20, ranks=[rank])
    device = ELSEWHERE if parameters_are_there else torch.device("cpu")
    parameters = {"w": torch.empty(SHAPE, dtype=torch.bfloat16, device=device)}
    resharder = Resharder(
        plan,
        rank=rank,
        group=None,  # type: ignore[arg-type]  # nothing is sent
        source=parameters if rank == 0 else {},
        target=parameters if rank == 1 else {},
        dtype=torch.bfloat16,
        device=ELSEWHERE,
        least_direct_bytes=1,
    )
    with pytest.raises(ExchangeBegins):
        resharder.run()
    (message,) = travels
    assert message.peer == 1 - rank
    assert message.tensor.shape == (64 * 64,)
    assert message.tensor.device == ELSEWHERE
    # In place where it may be, else through a buffer.
    in_place = message.tensor.untyped_storage()._cdata == parameters["w"].untyped_storage()._cdata
    assert in_place == parameters_are_there
