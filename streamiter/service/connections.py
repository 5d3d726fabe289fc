"""Connections of the HTTP server: uvicorn's protocol, with limits for whatever a client may send or leave out.

uvicorn bounds the body that it keeps, but not the head of a request, and it waits for a head without an end of time.
Here a head has a longest time and a largest size, and so has everything between two parts of a body. A client that does
not read is cut off by the kernel. Bytes that are no HTTP get a problem document.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from uvicorn import Server
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from streamiter.service.problems import CONTENT_TYPE, Problem

# Each connection has a descriptor, and the job needs descriptors, too: most systems allow 1,024 in a process.
CONNECTIONS_MAX: Final = 512
# Browsers send up to 16 KiB of cookies and headers.
HEAD_BYTES_MAX: Final = 64 * 1024
# Longer than the 15 s from one scrape of Prometheus to the next, so that scrapes keep their connection.
KEEP_ALIVE_S: Final = 30
# A client that reads nothing for so long is cut off.
_UNREAD_S: Final = 30

Refused = Callable[[int], None]
"""Is called with the status of a request that never became one."""


class Connection(HttpToolsProtocol):
    """A connection of a client."""

    def __init__(self, head_s: float, refused: Refused, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_s = head_s
        self._refused = refused
        self._bytes_of_head = 0
        """Bytes since the last progress: a whole head, or a part of a body."""
        self._head_timer: asyncio.TimerHandle | None = None
        # What uvicorn logs here are faults of clients, which could fill a disk; the application logs its own errors.
        self.logger = logging.Logger("streamiter.service.connections", logging.CRITICAL)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
            return
        self._await_head()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            with contextlib.suppress(OSError):  # The client may be gone again.
                own = transport.get_extra_info("socket")
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self._is_between_requests:
            self._await_head()
        self._bytes_of_head += len(data)
        super().data_received(data)
        if self._bytes_of_head > HEAD_BYTES_MAX:
            self._refuse(
                431, "head-too-large", f"expected a request line and headers of at most {HEAD_BYTES_MAX} bytes"
            )

    def on_headers_complete(self) -> None:
        self._head_has_come()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_of_head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_of_head = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "not-http", "expected a request of HTTP/1.1, given other bytes")

    def timeout_keep_alive_handler(self) -> None:
        # A client that has not read its answer until now does not get the rest.
        self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._bytes_of_head = 0
        self._head_timer = self.loop.call_later(self._head_s, self._head_is_late)

    def _head_has_come(self) -> None:
        self._bytes_of_head = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._bytes_of_head:
            self._refuse(408, "too-slow", f"expected a request line and headers within {self._head_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, kind: str, detail: str) -> None:
        """Answer what is not a request, unless the answer to an earlier request is under way, and close."""
        if self.transport.is_closing():
            return
        self._refused(status)
        if self._is_between_requests:
            body = Problem(status, kind, detail).body()
            head = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


class EmbeddedServer(Server):
    """A server in the event loop of the job, which handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the job."""
        yield

    async def stop(self, running: asyncio.Task[None], grace_s: float) -> None:
        """Take no more connections, wait for answers that are under way, and cut off clients that do not end."""
        self.should_exit = True
        await asyncio.wait([running], timeout=grace_s)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
