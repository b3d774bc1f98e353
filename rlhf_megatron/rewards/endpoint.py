"""One reward server as a client sees it: its address, a request to it, and how well it is."""

import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlhf_megatron.rewards.protocol import MAX_BODY_BYTES

LONGEST_EJECTION_SECONDS = 60.0
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Response:
    """What a server answered."""

    status: int
    body: bytes
    retry_after_seconds: float = 0.0


class RequestError(Exception):
    """No answer: why, as it is to be shown."""


class Channel:
    """A connection to an endpoint, kept open between requests. One thread sends; any may abort."""

    def __init__(self, url: str) -> None:
        """`url`: http or https, with an optional port and path, as in reward.remote.endpoints."""
        parts = urlsplit(url)
        assert parts.hostname is not None, url
        self._path = parts.path.rstrip("/")
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port)
        self._aborted = False

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str],
        timeout_seconds: float,
    ) -> Response:
        """Raises RequestError where no whole answer comes within `timeout_seconds`, or the request
        is aborted. Redirections are not followed: the token is for this server."""
        ends = time.monotonic() + timeout_seconds
        kept_open = self._connection.sock is not None
        try:
            try:
                return self._send(method, path, body=body, headers=headers, ends=ends)
            except (ConnectionError, http.client.RemoteDisconnected):
                # A server may close a connection that has been idle, which is seen only now.
                if not kept_open or self._aborted:
                    raise
                self._connection.close()
                return self._send(method, path, body=body, headers=headers, ends=ends)
        except TimeoutError:
            self._connection.close()
            raise RequestError(f"no answer within {timeout_seconds:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise RequestError("aborted" if self._aborted else _shown(error)) from None

    def abort(self) -> None:
        """End the request under way, and all later ones."""
        self._aborted = True
        open_socket = self._connection.sock
        if open_socket is not None:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _send(
        self, method: str, path: str, *, body: bytes | None, headers: Mapping[str, str], ends: float
    ) -> Response:
        connection = self._connection
        connection.timeout = _left(ends)
        if connection.sock is not None:
            connection.sock.settimeout(_left(ends))
        connection.request(method, self._path + path, body=body, headers=dict(headers))
        if self._aborted:
            raise ConnectionAbortedError
        connection.sock.settimeout(_left(ends))
        answer = connection.getresponse()
        pieces, size = [], 0
        while True:
            if connection.sock is not None:  # else the answer ends with the connection
                connection.sock.settimeout(_left(ends))
            piece = answer.read1(_PIECE_BYTES)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise ValueError(f"an answer of more than {MAX_BODY_BYTES} bytes")
            _left(ends)
        if answer.length:  # read1 takes an early end for the end
            raise http.client.IncompleteRead(b"".join(pieces), answer.length)
        answer.close()  # the connection is free for the next request
        return Response(
            status=answer.status,
            body=b"".join(pieces),
            retry_after_seconds=_seconds(answer.getheader("Retry-After", "")),
        )


def _left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _shown(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended in the middle of the answer"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Health:
    """Whether an endpoint gets requests. Not locked: its owner sees to that.

    After `eject_after_failures` failures in a row it is ejected: it gets none until a probe, due
    after `eject_seconds`, has found it well. A probe that finds it sick doubles the wait.
    """

    def __init__(self, *, eject_after_failures: int, eject_seconds: float) -> None:
        self._threshold, self._first_seconds = eject_after_failures, eject_seconds
        self._failures, self._seconds = 0, eject_seconds
        self.is_ejected = False
        self.probe_due_at = 0.0
        """On the monotonic clock; while it is ejected."""

    def succeeded(self) -> None:
        """A request was answered well."""
        self._failures = 0
        self.admit()

    def failed(self, *, now: float) -> bool:
        """A request failed. Whether it is ejected for it."""
        self._failures += 1
        if self.is_ejected or self._failures < self._threshold:
            return False
        self._eject(now=now, seconds=self._first_seconds)
        return True

    def is_sick(self, *, now: float) -> None:
        """A probe has found it so."""
        longer = min(2 * self._seconds, max(self._first_seconds, LONGEST_EJECTION_SECONDS))
        self._eject(now=now, seconds=longer if self.is_ejected else self._first_seconds)

    def admit(self) -> None:
        """A probe has found it well; unless a request succeeds, one more failure ejects it."""
        self.is_ejected = False
        self._failures = min(self._failures, self._threshold - 1)

    def _eject(self, *, now: float, seconds: float) -> None:
        self.is_ejected, self._seconds = True, seconds
        self.probe_due_at = now + seconds
