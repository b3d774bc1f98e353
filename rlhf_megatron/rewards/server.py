"""A reward server: the function of `reward.function` behind HTTP, as reward.remote asks for it.

docs/rewards.md describes what goes over the wire. The function runs in worker processes (pool.py);
the server's own threads only read, wait and answer.
"""

import hmac
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf_megatron.rewards.contract import BackgroundScorer, PendingScores, one_line
from rlhf_megatron.rewards.protocol import (
    HEALTH_PATH,
    MAX_BODY_BYTES,
    SCORE_PATH,
    ProtocolError,
    decode_request,
    encode_answer,
)

logger = logging.getLogger(__name__)

REMEMBERED_REQUESTS = 4096
"""A request that comes again within so many others is not scored again."""
IDLE_SECONDS = 120.0
"""A connection without a request for so long is closed."""


class RewardServer:
    """Serves from `start` to `stop`. `scorer` is the caller's to close."""

    def __init__(
        self, scorer: BackgroundScorer, *, host: str, port: int, auth_token: str = ""
    ) -> None:
        """`port` 0 takes a free one. With `auth_token` a request has to bring it. Raises OSError
        where the address cannot be had."""
        self._scorer, self._token = scorer, auth_token
        self._known: OrderedDict[str, PendingScores] = OrderedDict()
        self._lock = threading.Condition()
        self._under_way = self._requests = self._samples = 0
        self._is_stopping = False
        self._http = _HttpServer((host, port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, grace_seconds: float = 30.0) -> bool:
        """Refuse what is new, wait for what is under way, and leave. Whether all was answered."""
        ends = time.monotonic() + grace_seconds
        with self._lock:
            self._is_stopping = True
            while self._under_way and time.monotonic() < ends:
                self._lock.wait(ends - time.monotonic())
            answered = self._under_way == 0
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        return answered

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of GET /health."""
        with self._lock:
            body = {
                "status": "stopping" if self._is_stopping else "ok",
                "requests": self._requests,
                "samples": self._samples,
                "requests_under_way": self._under_way,
            }
        return (503 if self._is_stopping else 200), body

    def may(self, authorization: str | None, *, is_needed: bool = True) -> bool:
        """Whether the header's token is the one; a wrong one is refused also where none is needed,
        so that a trainer hears of it as it starts."""
        if not self._token or (authorization is None and not is_needed):
            return True
        wanted = f"Bearer {self._token}"
        return hmac.compare_digest((authorization or "").encode(), wanted.encode())

    def score(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of POST /score."""
        try:
            request = decode_request(body)
        except ProtocolError as error:
            return 400, _error(str(error))
        with self._lock:
            if self._is_stopping:
                return 503, _error("this server is being stopped")
            pending = self._known.get(request.request_id)
            if pending is None:
                pending = self._scorer.start(request.samples)
                self._requests += 1
                self._samples += len(request.samples)
                self._known[request.request_id] = pending
                if len(self._known) > REMEMBERED_REQUESTS:
                    self._known.popitem(last=False)
        outcomes = pending.result()
        if len(outcomes) != len(request.samples):
            return 409, _error(f"request_id {request.request_id!r} was that of other samples")
        return 200, encode_answer(request.request_id, outcomes)

    @contextmanager
    def request_under_way(self) -> Iterator[None]:
        """From its first line to the last byte of its answer."""
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._lock.notify_all()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True  # idle connections do not hold up the end
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], owner: RewardServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news: it has asked another server, or stopped."""
        logger.debug("connection of %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rlhf-megatron-reward-server", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms
    server: _HttpServer

    def do_GET(self) -> None:
        owner = self.server.owner
        if self.path != HEALTH_PATH:
            self._answer(404, _error(f"no such path; there are {SCORE_PATH} and {HEALTH_PATH}"))
        elif not owner.may(self.headers.get("Authorization"), is_needed=False):
            self._answer(401, _error("wrong token"))
        else:
            status, body = owner.health()
            self._answer(status, json.dumps(body).encode())

    def do_POST(self) -> None:
        owner = self.server.owner
        with owner.request_under_way():
            text = self.headers.get("Content-Length", "")
            if self.path != SCORE_PATH:
                status, answer = 404, _error(f"no such path; scores are at {SCORE_PATH}")
            elif not owner.may(self.headers.get("Authorization")):
                status, answer = 401, _error("no token, or a wrong one")
            elif not text.isdigit():
                status, answer = 411, _error("Content-Length is needed")
            elif int(text) > MAX_BODY_BYTES:
                status, answer = 413, _error(f"more than {MAX_BODY_BYTES} bytes")
            else:
                status, answer = owner.score(self.rfile.read(int(text)))
            if status in (404, 401, 411, 413):
                self.close_connection = True  # its body is still unread
            self._answer(status, answer)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.info("%s %s", self.address_string(), one_line(format % args))


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
