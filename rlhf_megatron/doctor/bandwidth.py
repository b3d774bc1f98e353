"""All-reduce and all-gather, timed within nodes and between them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.doctor.facts import BandwidthFacts
from rlhf_megatron.doctor.watch import Watch

CUDA_BYTES = 256 * 2**20
CPU_BYTES = 4 * 2**20
WARM_UPS = 3
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Groups of ranks that run at the same time; each rank is in one of them."""

    name: str
    """node or cross-node."""
    groups: dict[str, tuple[int, ...]]


def scopes_of(*, hostnames: Sequence[str], ranks_per_node: int) -> list[Scope]:
    """Within nodes, then between them: groups of the ranks with the same number on their node, so
    that each GPU talks through its own port. `hostnames`: one a node."""
    num_nodes = len(hostnames)
    found = []
    if ranks_per_node > 1:
        groups = {}
        for node, hostname in enumerate(hostnames):
            # Two nodes may be one machine, in a test.
            name = hostname if hostnames.count(hostname) == 1 else f"{hostname} (node {node})"
            first = node * ranks_per_node
            groups[name] = tuple(range(first, first + ranks_per_node))
        found.append(Scope(name="node", groups=groups))
    if num_nodes > 1:
        groups = {
            f"local rank {local}": tuple(node * ranks_per_node + local for node in range(num_nodes))
            for local in range(ranks_per_node)
        }
        found.append(Scope(name="cross-node", groups=groups))
    return found


def measure_bandwidths(
    context: DistributedContext,
    *,
    scopes: Sequence[Scope],
    timeout_seconds: float,
    watch: Watch,
) -> tuple[BandwidthFacts, ...]:
    """Collective over the job."""
    num_bytes = CUDA_BYTES if context.is_cuda else CPU_BYTES
    measured = []
    for scope in scopes:
        watch.enter(f"making groups ({scope.name})")
        own, name = _make_groups(context, scope=scope, timeout_seconds=timeout_seconds)
        for collective in ("all-reduce", "all-gather"):
            watch.enter(f"{collective} ({scope.name})")
            rate = _measure(collective, group=own, device=context.device, num_bytes=num_bytes)
            rates: list[tuple[str, float]] = [("", 0.0)] * context.world_size
            dist.all_gather_object(rates, (name, rate), group=context.job_group)
            slowest: dict[str, float] = {}
            for group, value in rates:
                slowest[group] = min(value, slowest.get(group, value))
            measured.append(
                BandwidthFacts(
                    collective=collective,
                    scope=scope.name,
                    backend="nccl" if context.is_cuda else "gloo",
                    num_bytes=num_bytes,
                    bytes_per_second=slowest,
                )
            )
        dist.destroy_process_group(own)
    return tuple(measured)


def _make_groups(
    context: DistributedContext, *, scope: Scope, timeout_seconds: float
) -> tuple[dist.ProcessGroup, str]:
    """This rank's group and its name. Every rank takes part in the making of all of them."""
    own: tuple[dist.ProcessGroup, str] | None = None
    for name, ranks in scope.groups.items():
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_seconds),
            backend="nccl" if context.is_cuda else "gloo",
        )
        if context.rank in ranks:
            own = (group, name)
    assert own is not None, scope
    return own


def _measure(
    collective: str, *, group: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> float:
    """Bus bandwidth as nccl-tests counts it (doc/PERFORMANCE.md), bytes a second: what each link
    carries. All-reduce of S bytes: 2 (n-1)/n S; all-gather into S bytes: (n-1)/n S."""
    size = group.size()
    data = torch.ones(num_bytes // 4, device=device)
    if collective == "all-reduce":
        run: Callable[[], object] = lambda: dist.all_reduce(data, group=group)  # noqa: E731
        carried = 2 * (size - 1) / size * num_bytes
    else:
        own = data[: data.numel() // size]
        whole = data.new_empty(own.numel() * size)
        run = lambda: dist.all_gather_into_tensor(whole, own, group=group)  # noqa: E731
        carried = (size - 1) / size * whole.numel() * 4
    for _ in range(WARM_UPS):
        run()
    _wait(data)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        run()
        data.fill_(1.0)  # sums would run over
    _wait(data)
    return carried * REPEATS / (time.perf_counter() - begin)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
