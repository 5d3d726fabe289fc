"""A link: the one connection between two processes of a flow, which all their channels share.

Frames of batches, control records, reports and messages arrive in the order in which they were sent. The reader of a
link never waits for a channel, because no half of a channel sends more than the other half has room for. So channels
can share a link without waiting for each other.

Both ends begin with a *hello*: a line that names the protocol, a length, and the process, run, attempt and fingerprint
of the sender, with a number that is used once. Then each end proves that it knows the secret of the run: it sends the
HMAC of both hellos. Frames follow (see :mod:`~streamiter.engine.processes.frames`). Each end sends CLOSE when it has
nothing more to send; a connection that ends before both have done so is a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, Protocol, final

import msgspec
import numpy as np

from streamiter.engine.processes.frames import (
    BODY_BYTES_MAX,
    CLOSE,
    FREE,
    HEADER,
    MESSAGE,
    SEGMENT,
    SHARED,
    TAKEN,
    FrameEncoding,
    Taken,
)
from streamiter.engine.processes.shared_memory import LinkMemory
from streamiter.engine.processes.silence import SILENCE_S, ask_while_idle, is_tcp, unacknowledged_s
from streamiter.errors import InternalError, PlainDataError, StreamiterError, shortened
from streamiter.values.deferred import PlainValue
from streamiter.values.encoding import Parts
from streamiter.values.helpers.clock import Clock, TimerHandle

_GREETING: Final = b"streamiter link 1\n"
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32

# A hello has some 150 bytes. A connection that is not of the run takes no more memory than this.
_HELLO_BYTES_MAX: Final = 4096

# A handshake takes some milliseconds, or seconds if the other process is busy with a long call of a user's function.
_HANDSHAKE_S: Final = 30.0

# More than Linux keeps for a socket unless it is told otherwise (208 KiB), so that one read can empty it.
_BUFFER_BYTES: Final = 256 << 10

# So much may wait in a Unix socket, so that both processes copy large arrays at the same time: with 208 KiB, 40 MB took
# 35 ms, with 1 MiB or 4 MiB 17 to 20 ms. The size of a TCP socket follows from the network.
_SOCKET_BYTES: Final = 1 << 20

# A longer body uses shared memory, if there is any. Otherwise a longer part is written to the socket directly,
# as much as has room, because a transport would keep the rest. Copies of shorter ones take less than a millisecond.
_LONG_BYTES: Final = 1 << 20

# A longer body that has arrived in part gets memory of its own, and the rest is read into that memory.
_BUFFERED_BYTES_MAX: Final = 64 << 10

# The memory of a body of more than 1 MiB is kept for this long, for the next one. New memory for 40 MB takes 3 to 5 ms,
# which is a third of the time in which they arrive.
_KEPT_BODY_S: Final = 1.0

# A second is short beside SILENCE_S, and TCP sends again what was lost after .2, .4 and .8 s.
_CHECK_S: Final = 1.0

# Frames of this many bytes leave at once, so that the other process handles the first while this one makes the next.
# While so much waits in the transport, frames stay in the link, where a watermark replaces the one before it. uvloop
# keeps smaller writes until the end of the turn. 32 to 128 KiB measure alike; with 1 MiB, batches took a third longer.
_WRITE_BYTES: Final = 64 << 10


class LinkError(StreamiterError):
    """A link between two processes was lost, or refused."""


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """One end of a link. Both ends must agree on everything but the process."""

    process: int
    """The number of the process in the flow."""
    run: str
    """The id of the run."""
    attempt: int
    """How many times the flow was started again after a loss."""
    fingerprint: str
    """The fingerprint of the flow's graph."""
    secret: bytes = field(repr=False)
    """Known only to the processes of the run. It is never sent."""
    silence_s: float = SILENCE_S
    """How long the other machine may acknowledge nothing."""

    def hello(self) -> bytes:
        """Return a new hello."""
        fields = (self.process, self.run, self.attempt, self.fingerprint, secrets.token_bytes(_NONCE_BYTES))
        packed = msgspec.msgpack.encode(fields)
        return _GREETING + len(packed).to_bytes(2, "big") + packed

    def proof(self, sender: bytes, receiver: bytes) -> bytes:
        """Return the proof that the sender of the first hello knows the secret."""
        return hmac.digest(self.secret, sender + receiver, "sha256")

    def check(self, hello: bytes) -> int:
        """Return the process that a hello names. Raises ``LinkError`` if it is not of this run and attempt."""
        try:
            process, run, attempt, fingerprint, _ = msgspec.msgpack.decode(
                hello[len(_GREETING) + 2 :], type=tuple[int, str, int, str, bytes]
            )
        except msgspec.MsgspecError as error:
            raise LinkError(
                f"expected the hello of a process, given {shortened(hello)}; the connection is not of this run"
            ) from error
        mine = (self.run, self.attempt, self.fingerprint)
        words = ("run {!r}", "attempt {}", "the flow with the fingerprint {!r}")
        for word, expected, given in zip(words, mine, (run, attempt, fingerprint), strict=True):
            if expected != given:
                raise LinkError(
                    f"expected {word.format(expected)}, given process {process} of {word.format(given)}; end older "
                    "processes, and start all with the same flow"
                )
        if process == self.process:
            raise LinkError(f"expected another process, given process {process} again; give each its own number")
        return process


Receive = Callable[[int, memoryview], None]
"""Takes the kind and the body of a frame. A read-only body is valid only during the call; others may be kept."""


def check_length(body: Parts) -> int:
    """Return the bytes of the body of a frame. Raises ``PlainDataError`` for a body that is too long."""
    length = sum(map(len, body))
    if length > BODY_BYTES_MAX:
        raise PlainDataError(
            f"expected at most {BODY_BYTES_MAX >> 20} MiB at a time for another process, given {length >> 20} MiB; "
            "emit smaller batches"
        )
    return length


class LinkOwner(Protocol):
    """Is told of the events of a link, in the thread of the event loop."""

    def opened(self, link: ProcessLink) -> None:
        """The handshake is done and ``link.peer`` known: attach the halves of channels. No frame has been read."""

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """A message has arrived."""

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """The connection has ended; None if both processes had closed the link. It may never have been opened."""


class LinkState(Enum):
    """How far a link has come."""

    GREETING = "in the handshake"
    """The hello or the proof of the other process has not arrived completely."""
    OPEN = "while it was open"
    """Frames travel."""
    ENDED = "after its end"
    """The connection has ended, or will end. Frames that are sent now are dropped."""


@final
class ProcessLink(asyncio.BufferedProtocol):
    """One end of a link. All its methods must be called in the thread of its event loop.

    Frames that are sent in one turn of the event loop leave in one write, behind the reports of consumers' halves. Many
    frames leave in several writes, the first ones before the end of the turn.
    Frames are neither encrypted nor signed: the network between the processes must be trusted.
    """

    def __init__(self, identity: LinkIdentity, owner: LinkOwner, encoding: FrameEncoding, clock: Clock) -> None:
        self.encoding = encoding
        self.peer: int | None = None
        """The number of the other process, once the link is open."""
        self._identity = identity
        self._owner = owner
        self._clock = clock
        self._state = LinkState.GREETING
        self._receivers: dict[int, Receive] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._error: LinkError | None = None
        self._timer: TimerHandle | None = None
        self._silence_timer: TimerHandle | None = None
        # -- receiving
        self._buffer = memoryview(bytearray(_HELLO_BYTES_MAX))
        self._filled = 0
        self._body = memoryview(b"")
        """Memory of its own for a long body; empty if there is none."""
        self._last_body = np.empty(0, np.uint8)
        """Memory of the last body, for the next one; arrays may still be in it."""
        self._body_filled = 0
        self._body_header = (0, 0)
        """The channel and the kind of this body."""
        self._hello, self._peer_hello = identity.hello(), b""
        # -- sending
        self._outbox: Parts = []
        self._outbox_bytes = 0
        self._leaving: Parts = []
        """Parts that have left the outbox, but not this process, because the socket is full."""
        self._memory: LinkMemory | None = None
        """For long bodies, if the connection is a Unix socket."""
        self._socket = -1
        """The number of the socket's file; −1: long parts leave through the transport only."""
        self._sent_parts = 0
        """Parts that have left the outbox, in all."""
        self._fixed_parts = 0
        """The number of the first part, counted from the start, that may be replaced."""
        self._reports: dict[int, Callable[[], Taken]] = {}
        self._is_scheduled = self._is_paused = False
        self._has_closed = self._peer_has_closed = False

    def attach(self, channel: int, receive: Receive) -> None:
        """Give all frames of the channel with this number to ``receive``."""
        self._receivers[channel] = receive

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, channel: int, kind: int, body: Parts) -> int:
        """Send a frame; return the place of its last part, for :meth:`replace`.

        Arrays in the body must not change any more. Raises ``PlainDataError`` for a body that is too long.
        """
        length = check_length(body)
        if self._has_closed:
            raise InternalError(f"the link to process {self.peer}: a frame was sent after the link was closed")
        if self._state is not LinkState.ENDED:
            self._outbox_bytes += HEADER.size + length
            if length > _LONG_BYTES and self._memory is not None:
                kind, body = self._memory.put(kind, body, length)
                length = sum(map(len, body))
            self._outbox.append(HEADER.pack(length, channel, kind))
            self._outbox += body
            if self._outbox_bytes >= _WRITE_BYTES:
                self._flush()
            else:
                self._schedule()
        return self._sent_parts + len(self._outbox) - 1

    def replace(self, place: int, body: bytes) -> bool:
        """Replace the body of a frame of one part by another of the same length, if it has not left.

        A frame before a message is not replaced, because the message may refer to it. Return whether it was replaced.
        """
        if place < self._fixed_parts or len(self._outbox[place - self._sent_parts]) != len(body):
            return False
        self._outbox[place - self._sent_parts] = body
        return True

    def send_message(self, message: PlainValue) -> Callable[[], None]:
        """Send plain data, which arrives behind all frames sent before. Raises ``PlainDataError`` for other data.

        Return a function that must be called before an array in the message changes that may not have left.
        """
        parts = self.encoding.encode_message(message)
        place = self.send(0, MESSAGE, [part if len(part) > _LONG_BYTES else bytes(part) for part in parts])
        self._fixed_parts = place + 1
        return self._copy_arrays

    def _copy_arrays(self) -> None:
        """Let the arrays that have not left change."""
        for parts in (self._leaving, self._outbox):
            parts[:] = map(bytes, parts)

    def report_later(self, channel: int, report: Callable[[], Taken]) -> None:
        """Send the report of a consumer's half at the end of this turn."""
        self._reports[channel] = report
        self._schedule()

    def close(self) -> None:
        """Send nothing more but reports. The connection ends when the other process has closed the link, too."""
        if not self._has_closed:
            self.send(0, CLOSE, [])
            self._has_closed = True

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """End the connection at once; the owner hears of it with an error for this reason."""
        is_open = self._state is LinkState.OPEN
        self._fail(reason, cause)
        if self._transport is None:
            return
        if is_open:
            self._transport.abort()
        else:
            self._transport.close()  # The hello leaves, so that the other process has the reason, too.

    def _fail(self, reason: str, cause: BaseException | None) -> None:
        if self._error is None:
            self._error = LinkError(f"the link to process {'?' if self.peer is None else self.peer}: {reason}")
            self._error.__cause__ = cause
        self._state = LinkState.ENDED

    def _schedule(self) -> None:
        if not self._is_scheduled and self._state is LinkState.OPEN:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send frames of the memory at the end of this turn; called in any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._schedule)

    def _flush_turn(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._state is not LinkState.OPEN or self._is_paused or (self._leaving and not self._write()):
            return
        assert self._transport is not None
        parts: Parts = [] if self._memory is None else self._memory.frames()
        for channel, report in self._reports.items():
            body = report().encode()
            parts.append(HEADER.pack(len(body), channel, TAKEN) + body)
        self._reports.clear()
        is_small = self._outbox_bytes < _WRITE_BYTES
        parts += self._take_outbox()
        if is_small and parts:
            self._transport.write(b"".join(parts))  # A write of five pieces takes 10 µs longer.
        elif parts:
            self._leaving = parts
            self._write()
        if self._has_closed and self._peer_has_closed and not self._leaving:
            self._state = LinkState.ENDED
            self._transport.close()

    def _write(self) -> bool:
        """Write the parts that leave until the socket is full; return whether all have left and more may follow."""
        while self._leaving and not self._is_paused:
            assert self._transport is not None
            long = (number for number, part in enumerate(self._leaving) if len(part) > _LONG_BYTES)
            if short := self._leaving[: next(long, len(self._leaving))]:
                # The rest of an array may be short; from Python 3.12 on, asyncio keeps views of what waits.
                self._transport.writelines([bytes(part) for part in short])
                del self._leaving[: len(short)]
            else:
                self._write_long(self._transport, memoryview(self._leaving.pop(0)))
        return not self._is_paused

    def _write_long(self, transport: asyncio.WriteTransport, part: memoryview) -> None:
        """Write the beginning of a long part. It is copied only where the transport waits for room, and pauses."""
        count = 0
        if self._socket >= 0 and not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # No room, or an end that the transport finds, too.
                count = os.write(self._socket, part)
        if not count:
            count = _WRITE_BYTES + 1
            transport.write(bytes(part[:count]))
        if rest := part[count:]:
            self._leaving.insert(0, rest)

    def _take_outbox(self) -> Parts:
        outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
        self._sent_parts += len(outbox)
        self._fixed_parts = self._sent_parts
        return outbox

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    # -- the connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._state is LinkState.ENDED:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_BYTES)
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None and os.name == "posix":
            self._socket = connection.fileno()
        if connection is not None and connection.family == getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._memory = LinkMemory(self._clock, partial(self._wake, asyncio.get_running_loop()))
        elif connection is not None and is_tcp(connection):
            ask_while_idle(connection, self._identity.silence_s)
            self._silence_timer = self._clock.call_later(_CHECK_S, lambda: self._check_silence(connection))
        self._timer = self._clock.call_later(_HANDSHAKE_S, self._check_handshake)
        transport.write(self._hello)

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._timer, self._silence_timer):
            if timer is not None:
                timer.cancel()
        if not (self._has_closed and self._peer_has_closed):
            given = "its end" if error is None else f"{type(error).__name__}: {error}"
            self._fail(
                f"expected CLOSE before its end, given {given}, {self._state.value}; the process may be lost", error
            )
        self._state = LinkState.ENDED
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._leaving.clear()
        self._take_outbox()
        self._reports.clear()
        self._owner.ended(self, self._error)

    def _check_handshake(self) -> None:
        self._timer = None
        if self._state is not LinkState.OPEN:
            self.abort(f"expected the handshake within {_HANDSHAKE_S:g} s, given silence")

    def _check_silence(self, connection: socket.socket, since_s: float = 0.0) -> None:
        """End the connection if the other machine acknowledges nothing, at two checks: this machine may have slept."""
        silent_s = unacknowledged_s(connection)
        if since_s > self._identity.silence_s and silent_s > since_s:
            self.abort(f"expected the other machine to acknowledge what was sent, given silence for {silent_s:.0f} s")
            return
        self._silence_timer = self._clock.call_later(_CHECK_S, lambda: self._check_silence(connection, silent_s))

    # -- receiving -------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body[self._body_filled :] if self._body else self._buffer[self._filled :]

    def buffer_updated(self, count: int) -> None:
        try:
            if self._body:
                self._body_filled += count
                if self._body_filled == len(self._body):
                    body, self._body = self._body, memoryview(b"")
                    self._dispatch(*self._body_header, body)
            else:
                self._filled += count
                self._read()
        except LinkError as error:
            self.abort(str(error), error)
        except Exception as error:
            self.abort(f"expected frames that can be read, given {type(error).__name__}: {error}", error)

    def _read(self) -> None:
        if not self._peer_hello:
            self._read_hello()
        if self._peer_hello and self._state is LinkState.GREETING and self._filled >= _PROOF_BYTES:
            self._read_proof()
        if self._state is LinkState.OPEN:
            self._read_frames()

    def _read_hello(self) -> None:
        start = len(_GREETING) + 2
        given = bytes(self._buffer[: self._filled])
        length = int.from_bytes(given[len(_GREETING) : start], "big") if len(given) >= start else 0
        if not given.startswith(_GREETING[: len(given)]) or start + length + _PROOF_BYTES > len(self._buffer):
            raise LinkError(
                f"expected the hello of a process, given {shortened(given)}; the connection is not of this run"
            )
        if length and len(given) >= start + length:
            self._peer_hello = given[: start + length]
            self.peer = self._identity.check(self._peer_hello)
            assert self._transport is not None
            self._transport.write(self._identity.proof(self._hello, self._peer_hello))
            self._drop(start + length)

    def _read_proof(self) -> None:
        expected = self._identity.proof(self._peer_hello, self._hello)
        if not hmac.compare_digest(expected, self._buffer[:_PROOF_BYTES]):
            raise LinkError(
                "expected the proof that it knows the secret of the run, given another; "
                "the connection is not of this run"
            )
        self._drop(_PROOF_BYTES)
        rest, self._buffer = self._buffer, np.empty(_BUFFER_BYTES, np.uint8).data
        self._buffer[: self._filled] = rest[: self._filled]
        self._state = LinkState.OPEN
        self._owner.opened(self)
        self._schedule()

    def _read_frames(self) -> None:
        start, readable = 0, self._buffer.toreadonly()
        while self._filled - start >= HEADER.size and self._state is LinkState.OPEN:
            length, channel, kind = HEADER.unpack_from(readable, start)
            if length > BODY_BYTES_MAX:
                raise LinkError(f"expected frames of at most {BODY_BYTES_MAX} bytes, given {length}")
            body_start, stop = start + HEADER.size, start + HEADER.size + length
            if stop <= self._filled:
                self._dispatch(channel, kind, readable[body_start:stop])
            elif length > _BUFFERED_BYTES_MAX:
                self._body, self._body_header = self._body_memory(length), (channel, kind)
                self._body_filled = self._filled - body_start
                self._body[: self._body_filled] = readable[body_start : self._filled]
                start = self._filled
                break
            else:
                break
            start = stop
        self._drop(start)

    def _body_memory(self, length: int) -> memoryview:
        """Return memory for a body; for a long one the last memory again, if it fits and no array is in it any more."""
        if length <= _LONG_BYTES:
            return np.empty(length, np.uint8).data
        # A reference of this link, and one of the call.
        if len(self._last_body) != length or sys.getrefcount(self._last_body) > 2:
            self._last_body = np.empty(length, np.uint8)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(_KEPT_BODY_S, self._forget_body)
        return self._last_body.data

    def _forget_body(self) -> None:
        self._timer, self._last_body = None, np.empty(0, np.uint8)

    def _drop(self, count: int) -> None:
        """Drop bytes that were read."""
        rest = self._filled - count
        self._buffer[:rest] = self._buffer[count : self._filled]
        self._filled = rest

    def _dispatch(self, channel: int, kind: int, body: memoryview) -> None:
        if kind <= TAKEN:
            if channel not in self._receivers:
                raise LinkError(f"expected one of its {len(self._receivers)} channels, given channel {channel}")
            self._receivers[channel](kind, body)
        elif kind == MESSAGE:
            self._owner.received(self, self.encoding.decode_message(body))
        elif kind == CLOSE:
            self._peer_has_closed = True
            self._schedule()
        elif kind == SHARED and self._memory is not None:
            self._dispatch(channel, *self._memory.body(body))
        elif kind in (SEGMENT, FREE) and self._memory is not None:
            self._memory.received(kind, body)
        else:
            raise LinkError(f"expected a kind of frame of this version, given {kind}")


Address = str | tuple[str, int]
"""The path of a Unix socket, or host and port."""


async def listen(address: Address, new_link: Callable[[], ProcessLink]) -> asyncio.Server:
    """Accept connections at an address; each gets a new link. The caller closes the server."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        return await loop.create_unix_server(new_link, address)
    return await loop.create_server(new_link, *address)


def address_of(server: asyncio.Server) -> Address:
    """Return the address at which a server listens, with the number of a free port in place of port 0."""
    address = server.sockets[0].getsockname()
    if isinstance(address, bytes):  # a name that is no file
        return os.fsdecode(address)
    return address if isinstance(address, str) else tuple(address[:2])


async def connect_link(address: Address, link: ProcessLink) -> None:
    """Connect a link to an address; its owner hears when it is open. Raises ``OSError`` if no process listens there."""
    loop = asyncio.get_running_loop()
    if isinstance(address, tuple):
        await loop.create_connection(lambda: link, *address)
    elif not address.startswith("\0"):
        await loop.create_unix_connection(lambda: link, address)
    else:  # uvloop itself does not connect to a name that is no file.
        with contextlib.ExitStack() as unless_connected:
            connection = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            await loop.create_unix_connection(lambda: link, sock=connection)
            unless_connected.pop_all()
