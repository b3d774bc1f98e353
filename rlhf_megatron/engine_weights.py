"""The rollout engine between rollouts: it sleeps, wakes, and takes the actor's weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlhf_megatron.distributed.start import release_cached_memory
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.weight_sync import NO_SYNC, SyncReport, WeightSync


class EngineWeights:
    """Sleeping, waking and syncing in an order that fits the memory of a GPU.

    Collective over the job, also on ranks whose `engine` is None; those whose `sync` is None have
    no part in the weights and pass by. `sleep_level`: of the config.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        *,
        sync: WeightSync | None,
        sleep_level: int,
        ledger: PhaseLedger,
        device: torch.device,
        after_sync: Callable[[], None] = lambda: None,
    ) -> None:
        """after_sync: called when the engine has its weights, before its KV cache takes what is
        free on the device."""
        self.engine = engine
        self._after_sync = after_sync
        self._sync, self._sleep_level = sync, sleep_level
        self._ledger, self._device = ledger, device

    def sleep(self) -> None:
        """Give up the engine's memory, as far as the level says."""
        with self._ledger.phase("sleep"):
            if self.engine is not None:
                self.engine.sleep()

    def sync(self, *, version: int) -> SyncReport:
        """Wake the engine with the actor's present weights, which become `version`."""
        if self._sync is None:
            return NO_SYNC
        with self._waking():
            report = self._sync.run(version=version)
        self._ledger.communication.record(
            "reshard",
            collective="all_to_all_single",
            num_bytes=report.own_bytes_received,
            seconds=report.seconds,
        )
        return report

    def wake(self) -> SyncReport:
        """Wake the engine with the weights that it has."""
        if self._sync is None:
            return NO_SYNC
        with self._waking():
            return NO_SYNC

    def sleep_and_wake(self, *, version: int) -> None:
        """A whole cycle, from weights `version` to the same ones, the caches dropped."""
        with self.asleep(version=version):
            pass

    @contextmanager
    def asleep(self, *, version: int) -> Iterator[None]:
        """Inside, the engine leaves the device's memory to others; it has weights `version`, before
        and after."""
        self.sleep()
        yield
        if self._sleep_level == 2:  # what it drops comes with the next sync
            self.sync(version=version)
            return
        self.wake()
        if self.engine is not None:
            self.engine.weights_written(version=version)

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Inside, the engine's weights are awake; afterwards its KV cache is, too."""
        with self._ledger.phase("reshard"):
            # The engine's allocator cannot use what torch's still holds in its cache.
            release_cached_memory(self._device)
            if self.engine is not None:
                self.engine.wake(tags=["weights"])
            yield
            self._after_sync()
            release_cached_memory(self._device)
            if self.engine is not None:
                self.engine.wake(tags=["kv_cache"])
