"""The examination: gather facts on every rank, put them together, judge."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.config import Config
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.doctor import device, host, network, software, storage, variables
from rlhf_megatron.doctor.bandwidth import measure_bandwidths, scopes_of
from rlhf_megatron.doctor.facts import BandwidthFacts, JobFacts, Needs, NodeFacts, RankFacts
from rlhf_megatron.doctor.gather import gather_node, gather_rank
from rlhf_megatron.doctor.gather_files import (
    gather_files,
    gather_folder,
    input_paths,
    leave_probe,
    tokenizer_problem,
)
from rlhf_megatron.doctor.gather_software import IMPORT_SECONDS
from rlhf_megatron.doctor.report import Finding, Level, Report, note
from rlhf_megatron.doctor.watch import Watch
from rlhf_megatron.stopping import slurm_time_limit

CHECKS: tuple[Callable[[JobFacts], Iterator[Finding]], ...] = (
    software.check_software,
    device.check_device,
    network.check_network,
    storage.check_storage,
    host.check_host,
    variables.check_variables,
)


def judge(job: JobFacts) -> Report:
    """All checks over the facts. Pure."""
    return Report.of(job.subject, (finding for check in CHECKS for finding in check(job)))


def examine_node(config: Config | None, *, needs: Needs, full: bool) -> Report:
    """This machine alone, all of its GPUs, from one process without peers. `full` as below."""
    uses_cuda = torch.cuda.is_available() and needs.device != "cpu"
    rank = gather_rank(
        rank=0,
        local_rank=0,
        local_world_size=1,
        device=torch.device("cuda", 0) if uses_cuda else torch.device("cpu"),
        measure=full,
        all_gpus=True,
    )
    node = _node(config, number=0, probe=None, full=full)
    return judge(
        JobFacts(
            ranks=(rank,),
            nodes=(node,),
            needs=needs,
            node_only=True,
            seconds_left=_seconds_left(),
            in_slurm="SLURM_JOB_ID" in os.environ,
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Own:
    """What a rank contributes."""

    rank: RankFacts
    node: NodeFacts | None
    needs: Needs
    seconds_left: float | None


def examine_job(
    context: DistributedContext, *, config: Config | None, needs: Needs, full: bool, watch: Watch
) -> Report:
    """Collective over the job: the same report on all ranks.

    `full`: measure speeds and try imports, a minute or two; else a second or so.
    """
    # On each node packages are imported by one process, for whose end all wait.
    watch.enter("facts of ranks and nodes", more_seconds=IMPORT_SECONDS if full else 0.0)
    with _probe(config, context=context) as probe:
        own = _own_facts(context, config=config, needs=needs, full=full, probe=probe)
        found = gather_lists([own], group=context.job_group)
    job = JobFacts(
        ranks=tuple(own.rank for own in found),
        nodes=tuple(own.node for own in found if own.node is not None),
        # A node that cannot read the model does not know its size.
        needs=max((own.needs for own in found), key=lambda own: own.checkpoint_bytes),
        seconds_left=found[0].seconds_left,
        in_slurm="SLURM_JOB_ID" in os.environ,
    )
    extra: list[Finding] = []
    if full and context.world_size > 1:
        if any(finding.level == Level.RED for finding in _layout_findings(job)):
            extra.append(note("bandwidth", "not measured: mend the ranks and GPUs first"))
        else:
            job = replace(job, bandwidths=_bandwidths(context, job=job, watch=watch))
    watch.enter("judgement")
    report = judge(job)
    return Report.of(report.subject, (*report.findings, *extra))


@contextmanager
def _probe(config: Config | None, *, context: DistributedContext) -> Iterator[Path | None]:
    """Rank 0's file in the run's folder, for the other nodes to look for; all ranks know its path.
    None without a folder, or where rank 0 cannot write there."""
    probe: list[Path | None] = [None]
    if config is not None and context.rank == 0:
        probe = [leave_probe(config.run.output_dir)]
    dist.broadcast_object_list(probe, src=0, group=context.job_group)
    try:
        yield probe[0]
    finally:
        if probe[0] is not None and context.rank == 0:
            probe[0].unlink(missing_ok=True)


def _own_facts(
    context: DistributedContext,
    *,
    config: Config | None,
    needs: Needs,
    full: bool,
    probe: Path | None,
) -> _Own:
    """Collective: the clocks are read together."""
    rank = gather_rank(
        rank=context.rank,
        local_rank=context.local_rank,
        local_world_size=context.local_world_size,
        device=context.device,
        measure=full,
    )
    node = None
    if context.rank % context.local_world_size == 0:  # whatever its local rank says
        number = context.node_of(context.rank)
        node = _node(config, number=number, probe=probe, full=full)
    # All arrive here. Not a barrier, which would start NCCL before the GPUs have been looked at.
    gather_lists([], group=context.job_group)
    return _Own(
        rank=replace(rank, clock_seconds=time.time()),
        node=node,
        needs=needs,
        seconds_left=_seconds_left() if context.rank == 0 else None,
    )


def _layout_findings(job: JobFacts) -> Iterable[Finding]:
    """What would make NCCL fail or hang."""
    return [*device.check_device(job), *network.check_network(job)]


def _bandwidths(
    context: DistributedContext, *, job: JobFacts, watch: Watch
) -> tuple[BandwidthFacts, ...]:
    scopes = scopes_of(
        hostnames=[node.hostname for node in job.nodes], ranks_per_node=context.local_world_size
    )
    timeout = job.needs.config.timeout_seconds
    return measure_bandwidths(context, scopes=scopes, timeout_seconds=timeout, watch=watch)


def _node(config: Config | None, *, number: int, probe: Path | None, full: bool) -> NodeFacts:
    if config is None:
        return gather_node(number=number, imports=full)
    return gather_node(
        number=number,
        imports=full,
        files=gather_files(input_paths(config), weights=full),
        folder=gather_folder(config.run.output_dir, probe=probe, measure=full),
        tokenizer_problem=tokenizer_problem(config) if full else None,
    )


def _seconds_left() -> float | None:
    """Until Slurm's time limit; None where there is none."""
    # Any number of minutes but 0, with which the limit would not be looked up.
    limit = slurm_time_limit(stop_before_minutes=1.0)
    return limit.end - time.time() if limit is not None else None
