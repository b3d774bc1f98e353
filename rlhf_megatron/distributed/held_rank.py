"""The watch over a job's peers in place of a rank whose interpreter is held up (stand_in.py)."""

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import DistNetworkError

from rlhf_megatron.distributed.failure import SHOWN_KEY, FailureChannel
from rlhf_megatron.distributed.heartbeat import Sign, process_state
from rlhf_megatron.distributed.stand_in import STACKS_SIGNAL
from rlhf_megatron.distributed.watchdog import RankReport, SilentRank

CONNECT_SECONDS = 5.0
STACKS_SECONDS = 0.5


class _NoStore:
    """In place of a store that cannot be reached, as it is where rank 0 held it and died."""

    def __getattr__(self, name: str) -> Any:
        raise DistNetworkError(f"{name}: the job's store is gone")


class HeldRank(FailureChannel):
    """As the rank's own watch, but that it gives no sign of life, cannot say what the rank's
    threads do, and leaves by ending the rank."""

    def __init__(
        self,
        *,
        process: int,
        rank: int,
        world_size: int,
        silent_seconds: float,
        own: dict[str, Any],
        seconds: float,
        watched: dict[str, Any] | None,
        writes_stacks: bool,
    ) -> None:
        """`own`, `watched`: heartbeat.Sign of the rank and of the one that it watches. `seconds`:
        how long the rank had been where it is when it fell silent. `writes_stacks`: it does so at
        STACKS_SIGNAL."""
        super().__init__(rank=rank, world_size=world_size, silent_seconds=silent_seconds)
        self._process, self._sign = process, Sign(**own)
        self._rank_writes_stacks = writes_stacks
        self.position = lambda: self._sign.position
        self._heartbeat.stand_in(
            self._sign.position,
            seconds=seconds,
            watched=Sign(**watched) if watched is not None else None,
        )

    def _connect(self, *, seconds: float) -> Any:
        try:
            return super()._connect(seconds=CONNECT_SECONDS)
        except Exception:
            return _NoStore()

    def _start_stand_in(self) -> None:
        """It is one."""

    def _own_reports(self) -> list[RankReport]:
        return []

    def _silent_rank(self, rank: int) -> SilentRank:
        if rank != self.rank:
            return super()._silent_rank(rank)
        sign = self._sign
        return SilentRank(
            rank=rank, phase=sign.phase, number=sign.number, process=process_state(sign)
        )

    def _leave_with(self, failure: dict) -> NoReturn:
        with suppress(Exception):
            if self._store.check([SHOWN_KEY]):  # perhaps by the rank itself
                self._leave(int(failure["exit_code"]))
        super()._leave_with(failure)

    def _leave(self, exit_code: int) -> NoReturn:
        sys.stderr.flush()
        with suppress(ProcessLookupError):
            if self._rank_writes_stacks:
                os.kill(self._process, STACKS_SIGNAL)
                time.sleep(STACKS_SECONDS)
            os.kill(self._process, signal.SIGKILL)
        os._exit(exit_code)
