"""Rewards from servers over HTTP: in batches, from several endpoints, each sample scored once.

Every endpoint has a few threads that take the next batch when they are free, so that a faster one
does more. A batch that failed waits a while and goes to another endpoint; one that has been under
way for long is given to a second endpoint, and the first answer counts.
"""

import logging
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.config import RemoteRewardConfig
from rlhf_megatron.rewards.contract import BackgroundScorer, PendingScores, ScoringInput, one_line
from rlhf_megatron.rewards.endpoint import Channel, Health, RequestError, Response
from rlhf_megatron.rewards.protocol import (
    HEALTH_PATH,
    SCORE_PATH,
    ProtocolError,
    decode_answer,
    encode_request,
    sample_json,
)
from rlhf_megatron.rewards.remote_job import Batch, Endpoint, Flight, Job

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How long an endpoint may take to say that it is well."""
THE_REQUESTS_FAULT = (400, 413, 422)
"""Statuses that another try would meet again."""


class RemoteScorer(BackgroundScorer):
    """Scores by the servers of `reward.remote`. Of a sample that none of them scores, its outcome
    is NoScoreError, which names the endpoint and what it did."""

    def __init__(self, config: RemoteRewardConfig) -> None:
        self._config = config
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Its own: the program's generators are part of what a resumed run takes up again.
        self._random = random.Random()
        self._endpoints = [
            Endpoint(
                url=url.rstrip("/"),
                health=Health(
                    eject_after_failures=config.eject_after_failures,
                    eject_seconds=config.eject_seconds,
                ),
            )
            for url in config.endpoints
        ]

    def check(self) -> None:
        """Ask all endpoints whether they are well, until one is or reward.remote.timeout_seconds
        have passed; those that are not are ejected. Raises UserError where none is."""
        ends = time.monotonic() + self._config.timeout_seconds
        while True:
            problems = {each.url: self._probe(each) for each in self._endpoints}
            sick = [f"{url}: {problem}" for url, problem in problems.items() if problem]
            if len(sick) < len(problems):
                break
            if time.monotonic() > ends:
                raise UserError(
                    f"reward.remote.endpoints: none is well ({'; '.join(sick)}); start the servers "
                    "(tools/reward_server.py), or mend the addresses or reward.remote.auth_token"
                )
            time.sleep(min(1.0, self._config.timeout_seconds / 10))
        for each in self._endpoints:
            if problems[each.url]:
                each.health.is_sick(now=time.monotonic())
                logger.warning("reward server %s: %s", each.url, problems[each.url])

    def begin(self) -> PendingScores:
        job = Job(
            self._endpoints,
            config=self._config,
            lock=self._lock,
            counts=self._counts,
            jitter=self._random,
        )
        return _Requests(job, config=self._config, more_threads=lambda: self._more_threads(job))

    def take_counts(self) -> dict[str, float]:
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
            ejected = sum(each.health.is_ejected for each in self._endpoints)
        names = ("requests", "failed_requests", "hedged_requests", "late_answers", "ejections")
        found = {f"reward/remote_{name}": float(counts.get(name, 0)) for name in names}
        return found | {"reward/remote_ejected_endpoints": float(ejected)}

    def _more_threads(self, job: Job) -> None:
        """One of each endpoint."""
        threads = [
            threading.Thread(
                target=self._serve,
                args=(job, endpoint),
                name=f"rewards of {endpoint.url}",
                daemon=True,
            )
            for endpoint in self._endpoints
        ]
        self._random.shuffle(threads)  # ranks do not all begin with the same endpoint
        for thread in threads:
            thread.start()

    def _serve(self, job: Job, endpoint: Endpoint) -> None:
        """What one thread of an endpoint does until the job is over."""
        channel = Channel(endpoint.url)
        try:
            while True:
                task = job.next_task(endpoint, channel=channel)
                if task is None:
                    return
                if isinstance(task, Flight):
                    self._fly(job, task)
                    if task.aborted:
                        channel = Channel(endpoint.url)
                else:
                    job.probed(endpoint, problem=self._probe(endpoint))
        except Exception as error:
            job.crashed(error)
        finally:
            channel.close()

    def _fly(self, job: Job, flight: Flight) -> None:
        batch, url = flight.batch, flight.endpoint.url
        try:
            response = flight.channel.send(
                "POST",
                SCORE_PATH,
                body=batch.body,
                headers=self._headers() | {"Content-Type": "application/json"},
                timeout_seconds=self._config.timeout_seconds,
            )
            if response.status != 200:
                job.failed(
                    flight,
                    reason=f"HTTP status {response.status}{_detail(response)}",
                    is_final=response.status in THE_REQUESTS_FAULT,
                    retry_after_seconds=response.retry_after_seconds,
                )
                return
            outcomes = decode_answer(
                response.body, request_id=batch.request_id, count=len(batch.indices), source=url
            )
        except (RequestError, ProtocolError) as error:
            job.failed(flight, reason=str(error))
        else:
            job.answered(flight, outcomes=outcomes)

    def _probe(self, endpoint: Endpoint) -> str:
        """What is wrong with it, "" for nothing."""
        channel = Channel(endpoint.url)
        try:
            response = channel.send(
                "GET",
                HEALTH_PATH,
                headers=self._headers(),
                timeout_seconds=min(PROBE_SECONDS, self._config.timeout_seconds),
            )
        except RequestError as error:
            return str(error)
        finally:
            channel.close()
        return "" if response.status == 200 else f"HTTP status {response.status}{_detail(response)}"

    def _headers(self) -> dict[str, str]:
        token = self._config.auth_token
        return {"Authorization": f"Bearer {token}"} if token else {}


class _Requests(PendingScores):
    """Samples on their way into requests: as many as a request holds, and at the end the rest."""

    def __init__(
        self, job: Job, *, config: RemoteRewardConfig, more_threads: Callable[[], None]
    ) -> None:
        """`more_threads`: called for each of the first `config.concurrency` requests."""
        self._job, self._config, self._more_threads = job, config, more_threads
        self._waiting: list[tuple[int, str]] = []
        self._num_requests = 0

    def add(self, sample: ScoringInput) -> None:
        index = self._job.new_place()
        try:
            self._waiting.append((index, sample_json(sample)))
        except (TypeError, ValueError) as error:
            outcome = TypeError(f"a field has no place in JSON: {error}")
            self._job.settle(index, outcome=outcome)
        if len(self._waiting) == self._config.batch_samples:
            self._send()

    def all_added(self) -> None:
        if self._waiting:
            self._send()
        self._job.all_added()

    @property
    def num_scored(self) -> int:
        return self._job.num_scored

    def result(self) -> list[Any]:
        return self._job.result()

    def cancel(self) -> None:
        self._job.cancel()

    def _send(self) -> None:
        indices = [index for index, _ in self._waiting]
        request_id = uuid.uuid4().hex
        body = encode_request(request_id, [text for _, text in self._waiting])
        self._waiting.clear()
        self._job.add(Batch(indices, request_id=request_id, body=body))
        self._num_requests += 1
        if self._num_requests <= self._config.concurrency:
            self._more_threads()


def _detail(response: Response) -> str:
    """The beginning of what came with a status, for a message."""
    text = one_line(response.body[:200].decode(errors="replace"))
    return f": {text}" if text else ""
