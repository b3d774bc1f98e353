"""Who gets which batch of samples, and whose answer counts: the state of one scoring over HTTP.

Its threads meet here. Nothing in this file waits for the network.
"""

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rewards.config import RemoteRewardConfig
from rlhf_megatron.rewards.contract import NoScoreError
from rlhf_megatron.rewards.endpoint import Channel, Health

LONGEST_BACKOFF_SECONDS = 30.0
MOST_COPIES = 2
"""Endpoints that work at one batch at a time."""


@dataclass(eq=False, kw_only=True)
class Endpoint:
    """A server; its health outlives the job."""

    url: str
    health: Health
    is_probed: bool = False


class Batch:
    """Samples that are asked for in one request."""

    def __init__(self, indices: Sequence[int], *, request_id: str, body: bytes) -> None:
        """`indices`: places of its samples in the job. `request_id`: of all tries."""
        self.indices, self.request_id, self.body = list(indices), request_id, body
        self.flights: list[Flight] = []
        self.failures = 0
        self.not_before = 0.0
        self.last_endpoint: Endpoint | None = None
        self.last_reason = ""
        self.is_done = False


@dataclass(eq=False, kw_only=True)
class Flight:
    """One try of a batch that is under way."""

    batch: Batch
    endpoint: Endpoint
    channel: Channel
    began_at: float
    aborted: bool = False


class Probe:
    """Find out whether the endpoint is well."""


class Job:
    """One scoring. The first answer to a batch counts, each outcome is set once."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        config: RemoteRewardConfig,
        lock: threading.Lock,
        counts: Counter[str],
        jitter: random.Random,
    ) -> None:
        """`lock` guards the endpoints and `counts`, which are those of all jobs."""
        self._outcomes: list[Any] = []
        self._num_scored = 0
        self._endpoints, self._config, self._counts = endpoints, config, counts
        self._random = jitter
        self._changed = threading.Condition(lock)
        # A batch is in one of these, or done.
        self._fresh: deque[Batch] = deque()
        self._flying: list[Batch] = []
        self._failed: list[Batch] = []
        self._left = 0  # batches that are not done
        self._is_complete = False
        self._deadline = math.inf
        self._is_over = False
        self._crash: Exception | None = None

    @property
    def num_scored(self) -> int:
        """Samples whose outcome is there."""
        with self._changed:
            return self._num_scored

    def new_place(self) -> int:
        """Of one more sample, in the order of the result."""
        with self._changed:
            self._outcomes.append(None)
            return len(self._outcomes) - 1

    def settle(self, index: int, *, outcome: Any) -> None:
        """Of a sample that goes into no batch."""
        with self._changed:
            self._outcomes[index] = outcome
            self._num_scored += 1

    def add(self, batch: Batch) -> None:
        """Before `all_added`."""
        with self._changed:
            self._fresh.append(batch)
            self._left += 1
            self._changed.notify_all()

    def all_added(self) -> None:
        """No more batches come; the deadline counts from here."""
        with self._changed:
            self._is_complete = True
            self._deadline = time.monotonic() + self._config.deadline_seconds
            self._changed.notify_all()

    def cancel(self) -> None:
        """Break off what is under way, begin nothing more."""
        with self._changed:
            self._end()

    def result(self) -> list[Any]:
        """Waits until all batches are done, or the deadline has come. After `all_added`."""
        assert self._is_complete
        with self._changed:
            while self._left and self._crash is None:
                wait = self._deadline - time.monotonic()
                if wait <= 0:
                    self._give_up()
                    break
                self._changed.wait(wait)
            self._end()
        if self._crash is not None:
            raise self._crash
        return self._outcomes

    def next_task(self, endpoint: Endpoint, *, channel: Channel) -> Flight | Probe | None:
        """Waits for something that `endpoint` is to do; None once the job is over."""
        with self._changed:
            while not self._is_over and (self._left or not self._is_complete):
                now = time.monotonic()
                if now >= self._deadline:
                    self._give_up()
                    break
                if self._may_fly(endpoint):
                    batch = self._choose(endpoint, now=now)
                    if batch is not None:
                        return self._begin(batch, endpoint=endpoint, channel=channel, now=now)
                if self._wants_probe(endpoint, now=now):
                    endpoint.is_probed = True
                    return Probe()
                event = self._next_event(endpoint, now=now)
                self._changed.wait(None if math.isinf(event) else event - now)
            return None

    def answered(self, flight: Flight, *, outcomes: Sequence[Any]) -> None:
        """A whole answer came."""
        batch = flight.batch
        with self._changed:
            batch.flights.remove(flight)
            if not flight.aborted:
                flight.endpoint.health.succeeded()
            if batch.is_done or self._is_over:
                self._counts["late_answers"] += 1
                return
            self._finish(batch, outcomes=outcomes)

    def failed(
        self,
        flight: Flight,
        *,
        reason: str,
        is_final: bool = False,
        retry_after_seconds: float = 0.0,
    ) -> None:
        """A try came to nothing. `is_final`: another one would, too."""
        batch, endpoint = flight.batch, flight.endpoint
        with self._changed:
            batch.flights.remove(flight)
            if flight.aborted or self._is_over:  # by us: nobody's failure
                return
            now = time.monotonic()
            self._counts["failed_requests"] += 1
            if endpoint.health.failed(now=now):
                self._counts["ejections"] += 1
            batch.failures += 1
            batch.last_endpoint, batch.last_reason = endpoint, f"{endpoint.url}: {reason}"
            if is_final:
                outcomes = self._no_scores(batch, batch.last_reason, unavailable=False)
                self._finish(batch, outcomes=outcomes)
            elif not batch.flights and batch.failures > self._config.retries:
                text = f"{batch.last_reason} (try {batch.failures} of {self._config.retries + 1})"
                self._finish(batch, outcomes=self._no_scores(batch, text))
            else:
                batch.not_before = now + max(self._backoff(batch.failures), retry_after_seconds)
                if not batch.flights:
                    self._flying.remove(batch)
                    self._failed.append(batch)
            self._changed.notify_all()

    def probed(self, endpoint: Endpoint, *, problem: str) -> None:
        """`problem`: "" where the endpoint is well."""
        with self._changed:
            endpoint.is_probed = False
            if endpoint.health.is_ejected:
                if problem:
                    endpoint.health.is_sick(now=time.monotonic())
                else:
                    endpoint.health.admit()
            self._changed.notify_all()

    def crashed(self, error: Exception) -> None:
        """A mistake of this program in one of the threads: `result` raises it."""
        with self._changed:
            self._crash = error
            self._changed.notify_all()

    # What follows is called with the lock held.

    def _may_fly(self, endpoint: Endpoint) -> bool:
        return not endpoint.health.is_ejected or all(e.health.is_ejected for e in self._endpoints)

    def _wants_probe(self, endpoint: Endpoint, *, now: float) -> bool:
        health = endpoint.health
        return health.is_ejected and not endpoint.is_probed and now >= health.probe_due_at

    def _choose(self, endpoint: Endpoint, *, now: float) -> Batch | None:
        """A batch that waits, or else one that has been under way elsewhere for long."""
        others = any(self._may_fly(e) for e in self._endpoints if e is not endpoint)
        for batch in self._failed:
            if batch.not_before <= now and not (batch.last_endpoint is endpoint and others):
                self._failed.remove(batch)
                self._flying.append(batch)
                return batch
        if self._fresh:
            self._flying.append(self._fresh.popleft())
            return self._flying[-1]
        for batch in self._flying:
            if self._hedge_due_at(batch, endpoint=endpoint) <= now:
                self._counts["hedged_requests"] += 1
                return batch
        return None

    def _hedge_due_at(self, batch: Batch, *, endpoint: Endpoint) -> float:
        """When `endpoint` may take a copy of a batch that is under way."""
        taken = {flight.endpoint.url for flight in batch.flights}
        after = self._config.hedge_seconds
        if after == 0 or not 0 < len(batch.flights) < MOST_COPIES or endpoint.url in taken:
            return math.inf
        return max(batch.flights[0].began_at + after, batch.not_before)

    def _begin(self, batch: Batch, *, endpoint: Endpoint, channel: Channel, now: float) -> Flight:
        flight = Flight(batch=batch, endpoint=endpoint, channel=channel, began_at=now)
        batch.flights.append(flight)
        self._counts["requests"] += 1
        return flight

    def _next_event(self, endpoint: Endpoint, *, now: float) -> float:
        """When there may be something new for `endpoint` that nobody will tell."""
        times = [self._deadline]
        times += [self._hedge_due_at(batch, endpoint=endpoint) for batch in self._flying]
        times += [batch.not_before for batch in self._failed]
        if endpoint.health.is_ejected and not endpoint.is_probed:
            times.append(endpoint.health.probe_due_at)
        return min([t for t in times if t > now], default=self._deadline)

    def _finish(self, batch: Batch, *, outcomes: Sequence[Any]) -> None:
        for index, outcome in zip(batch.indices, outcomes, strict=True):
            self._outcomes[index] = outcome
        self._num_scored += len(batch.indices)
        batch.is_done = True
        self._flying.remove(batch)
        self._left -= 1
        self._abort(batch)
        if self._left == 0:
            self._changed.notify_all()

    def _give_up(self) -> None:
        """The deadline has come."""
        limit = self._config.deadline_seconds
        self._flying += [*self._failed, *self._fresh]
        self._failed.clear()
        self._fresh.clear()
        for batch in list(self._flying):
            asked = [flight.endpoint.url for flight in batch.flights]
            last = batch.last_reason or ("waiting for " + ", ".join(asked) if asked else "")
            text = f"no score within reward.remote.deadline_seconds={limit:g}"
            text += f"; the last: {last}" if last else "; no endpoint had room for it"
            self._finish(batch, outcomes=self._no_scores(batch, text))

    def _end(self) -> None:
        self._is_over = True
        for batch in self._flying:
            self._abort(batch)
        self._changed.notify_all()

    def _abort(self, batch: Batch) -> None:
        for flight in batch.flights:
            flight.aborted = True
            flight.channel.abort()

    def _no_scores(
        self, batch: Batch, reason: str, *, unavailable: bool = True
    ) -> list[NoScoreError]:
        return [NoScoreError(reason, unavailable=unavailable) for _ in batch.indices]

    def _backoff(self, failures: int) -> float:
        longest = min(self._config.backoff_seconds * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS)
        return longest * self._random.uniform(0.5, 1.0)
