"""The quick form, at the start of a training job."""

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.config import Config
from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.doctor.examine import examine_job
from rlhf_megatron.doctor.needs import needs_of
from rlhf_megatron.doctor.report import Level
from rlhf_megatron.doctor.watch import Watch
from rlhf_megatron.errors import UserError


def check_machines(
    config: Config,
    *,
    architectures: Architectures,
    context: DistributedContext,
    channel: FailureChannel,
) -> None:
    """Collective over the job: print warnings from rank 0; raises UserError on all ranks, with the
    red lines, where the run would not start or would be spoilt."""
    watch = Watch(timeout_seconds=config.doctor.timeout_seconds)
    before, channel.position = channel.position, watch.position
    needs = needs_of(config, architectures=architectures, world_size=context.world_size)
    report = examine_job(context, config=config, needs=needs, full=False, watch=watch)
    channel.position = before
    if not report.is_go:
        raise UserError(
            f"{report.table(worst_only=True)}\n(doctor.at_start=false starts all the same)"
        )
    if context.rank == 0:
        warned = report.count(Level.WARNING)
        print(report.table(worst_only=True) if warned else report.summary, flush=True)
