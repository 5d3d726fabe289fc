"""Connections between the processes of a simulated flow: bytes arrive late and in pieces, or not at all.

The event loops of all processes share one ``SimulatedSockets``, in which real links listen and connect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.testing.simulation.network import SimulatedNetwork

if TYPE_CHECKING:
    from streamiter.testing.simulated_time import SimulatedTime

# Bytes on one machine take some 50 µs; a piece that the network holds back is as late as a slow call.
_DELAY_S_MAX: Final = 0.002
# A piece may end within the header of a frame, within a body, or behind many frames.
_PIECES: Final = (1, 30, 3000, 1 << 20, 1 << 20, 1 << 20)
# Shorter than the limit of a handshake, so that a partition also ends during one.
_SILENT_S_MAX: Final = 20.0


@final
class SimulatedSockets:
    """The addresses at which processes listen, and the connections between processes."""

    def __init__(self, network: SimulatedNetwork, time: SimulatedTime, chosen: random.Random) -> None:
        self._network = network
        self._time = time
        self._random = chosen
        self._listening: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[], Any]]] = {}
        self._ends: list[SocketEnd] = []
        """Both ends of each connection that has not ended."""

    def listen(self, loop: asyncio.AbstractEventLoop, address: str, factory: Callable[[], Any]) -> SimulatedServer:
        """Accept connections; a process of a later attempt takes over the address."""
        self._listening[address] = loop, factory
        return SimulatedServer(address, lambda: self._unlisten(address, factory))

    def _unlisten(self, address: str, factory: Callable[[], Any]) -> None:
        if address in self._listening and self._listening[address][1] is factory:
            del self._listening[address]

    def connect(self, loop: asyncio.AbstractEventLoop, protocol: Any, address: str) -> None:
        """Connect a protocol. Raises ``OSError`` if no process listens at the address."""
        if address not in self._listening:
            raise ConnectionRefusedError(f"no process listens at {address}")
        other, factory = self._listening[address]
        ends = [SocketEnd(self, loop, protocol), SocketEnd(self, other, factory())]
        for end, peer in zip(ends, reversed(ends), strict=True):
            end.peer = peer
            end.loop.call_soon(end.protocol.connection_made, end)
        self._ends = [end for end in self._ends if not end.is_over] + ends

    def call_later(self, callback: Callable[[], None]) -> None:
        """Call a function when a piece of bytes has arrived."""
        levels = self._network.levels
        longest_s = levels.slow_s_max if self._network.draws(levels.slow * 0.1) else _DELAY_S_MAX
        self._time.call_later(self._random.random() * longest_s, callback)

    def piece(self) -> int:
        """Return the most bytes of the next piece."""
        return self._random.choice(_PIECES)

    def disturb(self, loops: Iterable[asyncio.AbstractEventLoop]) -> None:
        """Cut a connection of these processes, or let it carry nothing in one direction for a while."""
        chosen = set(map(id, loops))
        ends = [end for end in self._ends if id(end.loop) in chosen and not end.is_over]
        if not ends:
            return
        end = self._random.choice(ends)
        if self._random.random() < 0.5:
            self._network.event("a connection between two processes is cut")
            end.abort()
            return
        silent_s = self._random.random() * _SILENT_S_MAX
        self._network.event(f"a connection carries nothing in one direction for {silent_s:.1f} s")
        end.is_silent = True
        self._time.call_later(silent_s, end.speak)

    def heal(self) -> None:
        """Let all connections carry bytes in both directions."""
        for end in self._ends:
            end.speak()

    def drop(self, loop: asyncio.AbstractEventLoop) -> None:
        """End all that a process has, as its death does; what it has sent still arrives."""
        self._listening = {address: each for address, each in self._listening.items() if each[0] is not loop}
        for end in self._ends:
            if end.loop is loop:
                end.die()


@final
class SimulatedServer:
    """Listens at an address, for ``asyncio.Server``."""

    def __init__(self, address: str, close: Callable[[], None]) -> None:
        self._address = address
        self.close = close
        self.sockets = [self]

    def getsockname(self) -> str:
        """Return the address."""
        return self._address


@final
class SocketEnd(asyncio.WriteTransport):
    """The transport of one end of a connection."""

    peer: SocketEnd

    def __init__(self, sockets: SimulatedSockets, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__()
        self.loop = loop
        self.protocol = protocol
        self.is_over = False
        """Whether it writes and reads no more."""
        self.is_silent = False
        """Whether nothing that it sends arrives."""
        self._sockets = sockets
        self._sent = bytearray()
        """Bytes on their way to the peer."""
        self._is_moving = self._is_closing = self._is_paused = False
        self._limit = 1 << 16

    # -- what the process does -------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._limit = self._limit if high is None else high

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.writelines([data])

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        if self._is_closing:
            return
        for part in parts:
            self._sent += part
        if len(self._sent) > self._limit and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()
        self._move()

    def close(self) -> None:
        """Read no more; the peer gets what was sent, then the end."""
        self.die()
        self.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        """End the connection; what is on its way is lost."""
        self._sent.clear()
        if not self.is_over:
            self.close()

    def die(self) -> None:
        """Close without telling the process, which is dead."""
        self.is_over = self._is_closing = True
        self._move()

    # -- the way to the peer ---------------------------------------------------------------------------

    def speak(self) -> None:
        """End the silence: what was sent meanwhile arrives."""
        self.is_silent = False
        self._move()

    def _move(self) -> None:
        if not self._is_moving and not self.is_silent and (self._sent or self._is_closing) and not self.peer.is_over:
            self._is_moving = True
            self._sockets.call_later(self._arrive)

    def _arrive(self) -> None:
        self._is_moving = False
        if not self.is_silent and not self.peer.loop.is_closed():
            self._is_moving = True
            self.peer.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Give the peer a piece, or the end of the connection, in a turn of its process."""
        self._is_moving = False
        peer = self.peer
        if peer.is_over:
            self._sent.clear()
        elif self._sent:
            room = peer.protocol.get_buffer(-1)
            count = min(self._sockets.piece(), len(room), len(self._sent))
            room[:count] = self._sent[:count]
            del self._sent[:count]
            peer.protocol.buffer_updated(count)
        else:
            peer.abort()
        if self._is_paused and len(self._sent) <= self._limit and not self.loop.is_closed():
            self._is_paused = False
            self.loop.call_soon(self._resume)
        self._move()

    def _resume(self) -> None:
        if not self.is_over:
            self.protocol.resume_writing()
