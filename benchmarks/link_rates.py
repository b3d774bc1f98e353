"""The rate at which ranks receive in large transfers: what a weight sync is measured against."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

LINK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Of each transfer."""


def link_rates(group: dist.ProcessGroup, *, device: torch.device) -> dict[str, float]:
    """10^9 bytes a second that a rank receives in large collectives of all ranks at once, and
    ("messages") in one large message to and from each of the others."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count = (LINK_BYTES[device.type] // size) * size
    sent, received = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    share = received[: count // size]

    def messages() -> None:
        operations = [
            dist.P2POp(call, buffer.chunk(size)[peer], group=group, group_peer=peer)
            for call, buffer in ((dist.irecv, received), (dist.isend, sent))
            for peer in range(size)
            if peer != rank
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    ways: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(sent, share, group=group),
        "messages": messages,
    }
    rates = {}
    for name, run in ways.items():
        times = []
        for _ in range(6):
            synchronize(device)
            dist.barrier(group=group)
            start = time.perf_counter()
            run()
            synchronize(device)
            took = over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX, group, device)
            times.append(took)
        rates[name] = count * (size - 1) / size / statistics.median(times[1:]) / 1e9
    return rates


def over_ranks(
    value: float, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device
) -> float:
    """The sum, the largest, ... of a number over the ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=operation, group=group)
    return float(tensor)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
