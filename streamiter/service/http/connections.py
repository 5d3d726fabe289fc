"""Connections of the HTTP server: uvicorn's protocol, with limits for all that a client may send or omit.

uvicorn bounds the body that it keeps, but not the head of a request, and it waits for a head without an end of time.
Here a head has a longest time and a largest size, and so has everything between two parts of a body. A client that does
not read is cut off. Bytes that are no HTTP get a problem document, unless their client is gone.
Connections on which TLS is being set up count, too: uvicorn would not know them.

A client that asks for predictions sends the same head again and again. The answer to the first such request tells how
to answer further ones (:class:`KnownHeads`): they are neither parsed nor do they get a task, which take two thirds of
the time of a prediction.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from streamiter.service.http.answers import CONTENT_TYPE, Problem

# Each connection has a descriptor, and the job needs descriptors, too: most systems allow 1,024 in a process.
CONNECTIONS_MAX: Final = 512
# Browsers send up to 16 KiB of cookies and headers.
HEAD_BYTES_MAX: Final = 64 * 1024
# Longer than the 15 s from one scrape of Prometheus to the next, so that scrapes keep their connection.
KEEP_ALIVE_S: Final = 30
# Hardly any client sends a request before the answer to the one before; each waiting request takes some kilobytes.
PIPELINED_MAX: Final = 32
# Bytes are parsed in parts, so that a client cannot fill the pipeline with thousands of requests at once.
_PARSED_BYTES: Final = 8 * 1024
# Longer parts of an answer do not wait for others.
_SENT_AT_ONCE_BYTES: Final = 16 * 1024
# uvloop rounds timers to milliseconds.
_TIMER_S: Final = 0.01
# If no descriptor is left, connections wait in the kernel.
_ACCEPT_AGAIN_S: Final = 0.1

_END_OF_HEAD: Final = b"\r\n\r\n"
_HEADS_MAX: Final = 256
_HEAD_BYTES_KEPT_MAX: Final = 2 * 1024
# A request with one of these is not answered by its head and body alone.
_OTHER_HEADERS: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade"})

Again = Callable[[bytes], bytes | None]
"""Returns the answer to the body of a further request with the same head; None: it is answered as any other request."""
Refused = Callable[[Mapping[str, Any], int], None]
"""Is called with the scope and the status of a request that the connection has refused; the scope may be empty."""


class KnownHeads:
    """Heads of requests, to the byte, which the server has parsed, admitted and answered with JSON."""

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[int, Again]] = {}
        self.cleared = 0
        """How often all heads were forgotten."""

    def clear(self) -> None:
        """Forget all heads: they may have a token that is no longer one."""
        self._found.clear()
        self.cleared += 1

    def keep(self, head: bytes, scope: Mapping[str, Any], cleared: int) -> None:
        """Keep the head of a request that was answered, whose scope says how to answer further ones (``again``).

        ``cleared`` is that of the time at which the request began: a token in it may be gone since.
        """
        if cleared != self.cleared:
            return
        names = [name for name, _ in scope["headers"]]
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        if len(head) > _HEAD_BYTES_KEPT_MAX or len(lengths) != 1 or not _OTHER_HEADERS.isdisjoint(names):
            return
        if head.count(b"\n") != head.count(b"\r\n"):  # The parser may have found its end elsewhere.
            return
        if len(self._found) >= _HEADS_MAX:
            self._found.clear()
        self._found[head] = lengths[0], scope["again"]

    def answer(self, data: bytes) -> bytes | None:
        """Return the answer to a whole request whose head is known; None if it is another one."""
        head, _, body = data.partition(_END_OF_HEAD)
        length, again = self._found.get(head, (-1, None))
        return None if again is None or len(body) != length else again(body)


class ClientConnection(HttpToolsProtocol):
    """A connection of a client.

    A request must arrive, and be answered, within ``request_s`` from its first byte. An answer that has begun may take
    longer, unless the client does not read it.
    """

    def __init__(self, request_s: float, refused: Refused, heads: KnownHeads, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._heads = heads
        self._head = b""
        """The head of the request that is not answered yet, if it came in one piece."""
        self._cleared = 0
        """How often all heads had been forgotten when it came."""
        self._request_s = request_s
        self._refused = refused
        self._waits_since_s = 0.0
        """When the last request was answered, or the connection was made."""
        self._unparsed_bytes = 0
        """Bytes since the last progress: a part of a body, or a whole request."""
        self._began_s: float | None = None
        """When the request began that is not answered yet, or the connection; None between requests."""
        self._unread_since_s: float | None = None
        """Since when the client does not read; None while it does."""
        self._answering: asyncio.Task[None] | None = None
        # What uvicorn logs here are faults of clients, which could fill a disk; the application logs its own errors.
        self.logger = logging.Logger("streamiter.service.http.connections", logging.CRITICAL)
        self.access_log = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport = _JoinedWrites(transport, self.loop)
        super().connection_made(transport)
        self._began_s = self._waits_since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None:  # Otherwise it would keep its place, and the server would wait for it.
            self._answering.cancel()

    def cut_off(self) -> None:
        """End the connection at once."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests and not self._unparsed_bytes and (self.cycle is None or not self.cycle.more_body):
            if not self.flow.write_paused and (answer := self._heads.answer(data)) is not None:
                self._send(answer)
                return
            head, end, _ = data.partition(_END_OF_HEAD)
            self._head, self._cleared = head if end else b"", self._heads.cleared
        if self._began_s is None:
            self._began_s = self.loop.time()
        for start in range(0, len(data), _PARSED_BYTES):
            part = data[start : start + _PARSED_BYTES]
            self._unparsed_bytes += len(part)
            super().data_received(part)
            if self._unparsed_bytes > HEAD_BYTES_MAX:
                detail = f"expected a request line and headers of at most {HEAD_BYTES_MAX:,} bytes"
                self._refuse(431, "head-too-large", detail)
            if len(self.pipeline) > PIPELINED_MAX:
                detail = f"expected at most {PIPELINED_MAX} requests before their answers; wait for answers"
                self._refuse(429, "too-many-requests", detail)
            if self.transport.is_closing():
                return

    def _send(self, answer: bytes) -> None:
        """Answer a request that uvicorn does not see."""
        head = [STATUS_LINE[200]]
        for name, value in self.server_state.default_headers:
            head += (name, b": ", value, b"\r\n")
        head.append(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer))
        head.append(answer)
        self.transport.write(b"".join(head))
        self._waits_since_s, self._began_s = self.loop.time(), None
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._is_between_requests:
            self._began_s = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # The rest of a body that the application does not read must come in time, too.
        is_more = bool(self.pipeline) or self.cycle.more_body
        self._waits_since_s = self.loop.time()
        self._began_s = self._waits_since_s if is_more else None
        if self._head and "again" in self.cycle.scope and self.cycle.keep_alive:
            self._heads.keep(self._head, self.cycle.scope, self._cleared)
        self._head = b""
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = self.loop.create_task(cycle.run_asgi(app))
        self._answering.add_done_callback(self.tasks.discard)
        self.tasks.add(self._answering)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "not-http", "expected a request of HTTP/1.1, given other bytes")

    def pause_writing(self) -> None:
        self._unread_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        waited_s = self.loop.time() - self._waits_since_s
        if waited_s < KEEP_ALIVE_S - _TIMER_S:
            # A timer that is set for each request takes as long as a part of its answer.
            self.timeout_keep_alive_task = self.loop.call_later(
                KEEP_ALIVE_S - waited_s, self.timeout_keep_alive_handler
            )
        else:
            # A client that has not read its answer until now does not get the rest.
            self.transport.abort()

    def check_time(self, now_s: float) -> None:
        """Refuse a request that takes too long. The server calls this several times a second.

        A timer for each request would take as long as the parser.
        """
        if self._unread_since_s is None and self.transport.is_closing():
            # What is left to send is a few bytes, so nothing paused the writing; yet nobody may read them.
            self._unread_since_s = now_s
        if self._unread_since_s is not None and now_s - self._unread_since_s >= self._request_s:
            self.transport.abort()
        if self._began_s is None or self._has_begun_to_answer or now_s - self._began_s < self._request_s:
            return
        if self._is_between_requests and not self._unparsed_bytes:
            self.transport.close()
        else:
            self._refuse(408, "too-slow", f"expected the whole request within {self._request_s:g} s; send smaller ones")

    @property
    def waits(self) -> tuple[bool, float] | None:
        """Whether a part of a request is there, and since when the connection waits for one; None if it has one."""
        return (self._unparsed_bytes > 0, self._waits_since_s) if self._is_between_requests else None

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _has_begun_to_answer(self) -> bool:
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _refuse(self, status: int, kind: str, detail: str) -> None:
        """Answer in the place of the application, unless it has begun to answer, and close."""
        if self.transport.is_closing():
            return
        self._refused({} if self._is_between_requests else self.cycle.scope, status)
        if not self._has_begun_to_answer:
            body = Problem(status, kind, detail).body()
            head = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()
        if self._answering is not None:
            self._answering.cancel()


class _JoinedWrites(asyncio.Transport):
    """Sends all that is written in one turn of the event loop together.

    uvicorn writes the head of an answer and its body one after the other, and each call of the system takes as long as
    a third of a prediction; the client, too, wakes up once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []
        # All else that uvicorn calls is the transport's own: a method here would be one more call for each request.
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.abort = transport.abort  # type: ignore[method-assign]

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)
        if len(data) > _SENT_AT_ONCE_BYTES:  # Otherwise the limit of unsent bytes would not be noticed.
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written, self._written = self._written, []
        if written and not self._transport.is_closing():
            self._transport.write(b"".join(written))


class EmbeddedServer(Server):
    """A server in the event loop of the job, which handles the signals.

    It accepts connections itself, and sets up ``tls``, if given, within ``tls_s``: uvicorn would limit neither the
    number of connections nor this time. Above ``CONNECTIONS_MAX``, a new connection takes the place of one whose TLS is
    being set up, or of the one that has waited longest for a request; if all have a request, the new one is cut off.
    """

    def __init__(self, config: Config, tls: ssl.SSLContext | None, tls_s: float) -> None:
        super().__init__(config)
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": tls_s}
        self._accepting: asyncio.Task[None] | None = None
        self._set_up: dict[asyncio.Task[Any], None] = {}
        """Connections that are being set up, the oldest first."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup([])
        [listener] = sockets or []
        self._accepting = asyncio.create_task(self._accept(listener), name="accept connections")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and end those without a request."""
        tasks = [task for task in (self._accepting, *self._set_up) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # The client is gone again, or there is no descriptor left.
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            is_full = len(self._set_up) + len(self.server_state.connections) >= CONNECTIONS_MAX
            if is_full and not self._has_made_room():
                client.close()
                continue
            connecting = loop.connect_accepted_socket(self._connection, client, **self._tls)
            task = loop.create_task(connecting)
            self._set_up[task] = None
            task.add_done_callback(functools.partial(self._connected, client))
            await asyncio.sleep(0)

    def _has_made_room(self) -> bool:
        """Cut off a connection that has no request; return whether there was one."""
        if (oldest := next(iter(self._set_up), None)) is not None:
            del self._set_up[oldest]
            return oldest.cancel()
        connections: Any = self.server_state.connections
        waiting = [(waits, id(each), each) for each in connections if (waits := each.waits) is not None]
        if waiting:
            min(waiting)[-1].cut_off()
        return bool(waiting)

    def _connection(self) -> asyncio.Protocol:
        options = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return self.config.http_protocol_class(**options)

    def _connected(self, client: socket.socket, task: asyncio.Task[Any]) -> None:
        self._set_up.pop(task, None)
        if task.cancelled() or task.exception() is not None:  # The client speaks no TLS, takes too long, or is gone.
            client.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the job."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Check the time of all requests, ten times a second."""
        now_s = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            connection.check_time(now_s)  # type: ignore[union-attr]
        if self._accepting is not None and self._accepting.done():
            self._accepting.result()  # Raises its error.
        return await super().on_tick(counter)

    async def stop(self, running: asyncio.Task[None], grace_s: float) -> None:
        """Take no more connections, wait for answers that are under way, and cut off clients that do not end."""
        self.should_exit = True
        await asyncio.wait([running], timeout=grace_s)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
