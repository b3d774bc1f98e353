"""A reward server that keeps what it is asked and answers, and can be told to misbehave."""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes] | None
"""Status and body; None closes the connection without a word."""


def right_answer(request: dict[str, Any]) -> tuple[int, bytes]:
    """The score of a sample is its response, read as a number, plus its field k."""
    results = [
        {"score": float(s["response"]) + s["fields"].get("k", 0)} for s in request["samples"]
    ]
    body = {"request_id": request["request_id"], "results": results}
    return 200, json.dumps(body).encode()


class RecordingServer:
    """Use as a context manager. `behave` gets the request's number, from 0, and its content; it
    runs on the request's thread."""

    def __init__(
        self,
        behave: Callable[[int, dict[str, Any]], Answer] = lambda _, request: right_answer(request),
        *,
        is_well: Callable[[], bool] = lambda: True,
        port: int = 0,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answered: list[str] = []
        """Ids of the requests whose samples it has scored."""
        self.headers: list[dict[str, str]] = []
        self.probes = 0
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer.probes += 1
                self.reply(200 if is_well() else 503, b"{}")

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(request)
                    outer.headers.append(dict(self.headers))
                    outer.under_way += 1
                    outer.most_under_way = max(outer.most_under_way, outer.under_way)
                answer = behave(number, request)
                with outer._lock:
                    outer.under_way -= 1
                    if answer is not None and b'"results"' in answer[1]:
                        outer.answered.append(request["request_id"])
                if answer is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.reply(*answer)

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 128

            def handle_error(self, *_: Any) -> None:
                pass  # the client has gone to another server

        self._http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> "RecordingServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def dead_url() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def slow(seconds: float) -> Callable[[int, dict[str, Any]], Answer]:
    """Right, but late."""

    def behave(number: int, request: dict[str, Any]) -> Answer:
        time.sleep(seconds)
        return right_answer(request)

    return behave


def flapping(seconds: float) -> Callable[[int, dict[str, Any]], Answer]:
    """Well for so long, then failing for as long, in turns of its three ways to fail."""
    began = time.monotonic()

    def behave(number: int, request: dict[str, Any]) -> Answer:
        if (time.monotonic() - began) // seconds % 2 == 0:
            return right_answer(request)
        failures: tuple[Answer, ...] = (None, (500, b"out of order"), (200, b"<html>sorry</html>"))
        return failures[number % 3]

    return behave
