"""Ranks, nodes and what is between them."""

from collections.abc import Iterator

from rlhf_megatron.doctor.facts import (
    BandwidthFacts,
    JobFacts,
    NodeFacts,
    RankFacts,
    gigabytes,
    grouped,
    nodes_in_words,
    where,
)
from rlhf_megatron.doctor.report import Finding, good, note, red, warning

USUAL_NODE_GB = {"H200": 200.0, "H100 80GB HBM3": 200.0, "GH200": 200.0, "B200": 300.0}
"""Bus bandwidth between GPUs of a node in 10^9 bytes a second that a healthy one exceeds, by part
of the GPU's name. Two H200s reach 288 in an all-gather."""
USUAL_CROSS_NODE_GB = {"H200": 20.0, "H100 80GB HBM3": 20.0, "GH200": 20.0, "B200": 20.0}
"""Half of a 400 Gb/s port for each GPU."""

BAD_SKEW_FACTOR = 10.0


def check_network(job: JobFacts) -> Iterator[Finding]:
    """All of them, for a job of several ranks."""
    if job.node_only:
        return
    yield from _numbering(job)
    yield from _names(job)
    yield from _clock(job)
    for measured in job.bandwidths or ():
        yield from _bandwidth(measured, job=job)


def _numbering(job: JobFacts) -> Iterator[Finding]:
    """Ranks are numbered node by node, as many on each (DistributedContext.node_of)."""
    sizes = grouped(job.ranks, by=lambda rank: rank.local_world_size)
    if len(sizes) > 1:
        parts = [f"{size} on {where(ranks)}" for size, ranks in sizes.items()]
        yield red(
            "ranks of a node",
            "; ".join(parts),
            expected="as many on each node",
            way_out="start the same number of ranks on each node (--ntasks-per-node, "
            "--nproc-per-node)",
        )
        return
    size = job.ranks[0].local_world_size
    wrong = [
        rank
        for rank in job.ranks
        if rank.local_rank != rank.rank % size
        or rank.boot_id != job.ranks[rank.rank // size * size].boot_id
    ]
    if wrong:
        yield red(
            "ranks of a node",
            f"{where(wrong)}: not numbered node by node",
            expected=f"ranks 0-{size - 1} on the first node, the next {size} on the second, ...",
            way_out="srun --distribution=block, or torchrun's own numbering",
        )
    else:
        yield good("ranks of a node", f"{size} on each, numbered node by node")


def _names(job: JobFacts) -> Iterator[Finding]:
    if len(job.nodes) > 1:
        yield from _unique_names(job)
    troubled = [rank for rank in job.ranks if rank.network_problem]
    for problem, ranks in grouped(troubled, by=lambda rank: rank.network_problem).items():
        yield red(
            "network interface",
            f"{problem} ({where(ranks)})",
            expected="an interface of the node",
            way_out="set it to an interface that `ip address` shows there, or unset it",
        )


def _unique_names(job: JobFacts) -> Iterator[Finding]:
    boots = {node.number: _first_rank(node, job=job).boot_id for node in job.nodes}
    problems = 0
    for name, nodes in grouped(job.nodes, by=lambda node: node.hostname).items():
        machines = {boots[node.number] for node in nodes}
        if len(machines) > 1:
            problems += 1
            yield red(
                "host names",
                f"{len(machines)} machines are called {name}",
                expected="a name of its own for each",
                way_out="set different host names: messages, logs and NCCL tell nodes apart by "
                "them (docker run --hostname, or --network=host)",
            )
        elif len(nodes) > 1:
            problems += 1
            yield note("host names", f"{len(nodes)} nodes are one machine, {name}")
    if not problems:
        yield good("host names", f"{len(job.nodes)} different ones")


def _first_rank(node: NodeFacts, *, job: JobFacts) -> RankFacts:
    return next(rank for rank in job.ranks if job.node_of(rank) is node)


def _clock(job: JobFacts) -> Iterator[Finding]:
    if len(job.nodes) == 1:
        return
    first = {node.number: _first_rank(node, job=job).clock_seconds for node in job.nodes}
    times = sorted(first.values())
    middle = times[len(times) // 2]
    skew, limit = times[-1] - times[0], job.needs.config.max_clock_skew_seconds
    off = [node for node in job.nodes if abs(first[node.number] - middle) > limit / 2]
    expected = f"within {limit:g} s (doctor.max_clock_skew_seconds)"
    if skew <= limit:
        yield good("clocks", f"{skew:.2f} s apart at most", expected)
        return
    tell = red if skew > BAD_SKEW_FACTOR * limit else warning
    yield tell(
        "clocks",
        f"{skew:.1f} s apart; far from the others: {nodes_in_words(off)}",
        expected=expected,
        way_out="start chrony or ntpd there: time limits, logs and file times go by the clocks",
    )


def _bandwidth(measured: BandwidthFacts, *, job: JobFacts) -> Iterator[Finding]:
    across = measured.scope == "cross-node"
    check = f"{measured.collective} {'across nodes' if across else 'in a node'}"
    speeds = {name: rate / 1e9 for name, rate in measured.bytes_per_second.items()}
    found = (
        f"{min(speeds.values()):.1f} to {max(speeds.values()):.1f} GB/s bus bandwidth, "
        f"{measured.backend}, {gigabytes(measured.num_bytes)} a rank"
    )
    if measured.backend != "nccl":
        yield note(check, found, "nothing: not the network of a GPU run")
        return
    config = job.needs.config
    wanted = (
        config.cross_node_bandwidth_gb_per_second if across else config.node_bandwidth_gb_per_second
    )
    name = next((gpu.name for rank in job.ranks for gpu in rank.gpus), "")
    table = USUAL_CROSS_NODE_GB if across else USUAL_NODE_GB
    usual = next((rate for part, rate in table.items() if part in name), 0.0)
    least = wanted or usual
    key = f"doctor.{'cross_node' if across else 'node'}_bandwidth_gb_per_second"
    if least == 0:
        yield note(check, found, f"not known for {name or 'this device'}; set {key}")
        return
    expected = f"at least {least:g} ({key if wanted else 'usual for this GPU; ' + key})"
    slow = [name for name, rate in speeds.items() if rate < least]
    if not slow:
        yield good(check, found, expected)
        return
    tell = red if wanted else warning
    yield tell(
        check,
        f"{found}; below: {', '.join(slow[:8])}{' ...' if len(slow) > 8 else ''}",
        expected=expected,
        way_out="NCCL_DEBUG=INFO says which transport is taken: TCP in place of InfiniBand, or no "
        "NVLink; a single slow node is best left out (--exclude)"
        if across
        else "look at `nvidia-smi topo -m` and `nvidia-smi nvlink -s` there, and at "
        "NCCL_P2P_DISABLE; leave the node out",
    )
