"""What looks after a run's memory once its roles are there: residual check, monitor, summary."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.monitor import MemoryMonitor
from rlhf_megatron.out_of_memory import named_tensors
from rlhf_megatron.residual import ResidualCheck
from rlhf_megatron.rollout.contract import RolloutEngine


def watch_memory(
    config: Config,
    *,
    context: DistributedContext,
    ledger: PhaseLedger,
    roles: Sequence[ModelEngine],
    engine: RolloutEngine | None,
    say: Callable[[str], None],
) -> MemoryMonitor:
    """Hang the residual check on the ledger, write the first summary, and return the monitor.

    `engine`: this rank's, whose sleep the ledger's figures of memory then know of.
    """
    if engine is not None:
        ledger.sleeping_bytes = lambda: engine.sleeping_bytes
    ledger.listeners.append(
        ResidualCheck(
            bound_gb=config.rollout.sleep_residual_gb,
            device=context.device,
            group=context.job_group,
            roles=roles,
        )
    )
    monitor = MemoryMonitor(
        device=context.device,
        folder=Path(config.run.output_dir),
        interval_steps=config.logging.monitor_interval_steps,
        say=say,
        names=named_tensors,
    )
    monitor.summary("after the setup")
    return monitor
