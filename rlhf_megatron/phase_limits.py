"""Where a rank is in the loop, with the time it may stay there: what the watchdog goes by."""

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.heartbeat import Position
from rlhf_megatron.faults_config import SETUP, phase_limit
from rlhf_megatron.observability.ledger import PhaseLedger


def position_of(ledger: PhaseLedger, *, config: Config) -> Position:
    """Of this rank, as of now. May be called from any thread."""
    phase = ledger.current_phase or ("" if ledger.last_phase else SETUP)
    limit = phase_limit(
        config.faults,
        phase=phase,
        rollout_timeout_seconds=config.rollout.timeout_seconds,
    )
    return Position(
        phase=ledger.describe_position(),
        number=ledger.progress,
        limit_seconds=limit.seconds,
        limit_key=limit.key,
    )
