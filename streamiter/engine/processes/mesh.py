"""The links of one process to all others of a run, and the messages of its job over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import final

from streamiter.engine.plan.messages import Handler
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import (
    Address,
    LinkError,
    LinkIdentity,
    ProcessLink,
    address_of,
    connect_link,
    listen,
)
from streamiter.engine.processes.remote_channel import LinkChannels
from streamiter.errors import InternalError
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock

OnLoss = Callable[[int, str], None]
"""Is told of the first link that was lost: the number of the other process, and the reason."""


@final
class ProcessMesh:
    """Joins a process to all others of the run: a link to each, made by the process with the higher number.

    It carries the messages of the job (:class:`~streamiter.engine.plan.messages.Messages`). Another process may be
    faster, so messages wait here until this job is made and calls :meth:`deliver`.
    """

    def __init__(
        self, identity: LinkIdentity, processes: int, encoding: FrameEncoding, clock: Clock, on_loss: OnLoss
    ) -> None:
        self._identity = identity
        self._processes = processes
        self._encoding = encoding
        self._clock = clock
        self._on_loss = on_loss
        self._server: asyncio.Server | None = None
        self._links: dict[int, ProcessLink] = {}
        """The open links, by the number of the other process."""
        self._calls: dict[ProcessLink, int] = {}
        """The links that this process makes, each with the number of the other process."""
        self._handshaking: set[ProcessLink] = set()
        """The links that are not open yet, also the links of strangers."""
        self._ended: set[int] = set()
        self._has_failed = False
        self._changed = asyncio.Event()
        """Set when a link has opened or ended."""
        self._handlers: dict[str, Handler] = {}
        self._kept: list[tuple[int, PlainValue]] | None = []
        """The messages that have arrived before the job was made; None after it."""

    # -- connections -----------------------------------------------------------------------------------

    async def listen(self, address: Address) -> Address:
        """Accept links at an address; return the address for the other processes."""
        self._server = await listen(address, self._new_link)
        return address_of(self._server)

    async def connect(self, addresses: Sequence[Address]) -> dict[int, LinkChannels]:
        """Connect to the processes with smaller numbers; return all others when all links are open."""
        for number in range(self._identity.process):
            link = self._new_link()
            self._calls[link] = number
            try:
                await connect_link(addresses[number], link)
            except OSError as error:
                self._lose(number, f"it does not answer at {addresses[number]}: {error}")
        while len(self._links) < self._processes - 1:
            self._changed.clear()
            await self._changed.wait()
        return {number: LinkChannels(link) for number, link in self._links.items()}

    def _new_link(self) -> ProcessLink:
        link = ProcessLink(self._identity, self, self._encoding, self._clock)
        self._handshaking.add(link)
        return link

    def opened(self, link: ProcessLink) -> None:
        """Note an open link; the second one to a process is refused."""
        assert link.peer is not None
        self._handshaking.discard(link)
        if link.peer in self._links or not 0 <= link.peer < self._processes:
            link.abort(f"expected one link to each of {self._processes} processes, given another")
            return
        self._links[link.peer] = link
        self._changed.set()

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """Tell of the loss of a link. A connection from outside that was never open may be a stranger's."""
        self._handshaking.discard(link)
        if link.peer is None or self._links.get(link.peer) is not link:
            if link in self._calls:
                self._lose(self._calls[link], str(error))
            return
        self._ended.add(link.peer)
        self._changed.set()
        if error is not None:
            self._lose(link.peer, str(error))

    def _lose(self, number: int, reason: str) -> None:
        if not self._has_failed:  # The others follow from the first one.
            self._has_failed = True
            self._on_loss(number, reason)

    async def close(self) -> None:
        """Close all links; return when the other processes have closed them, too."""
        for link in self._links.values():
            link.close()
        while len(self._ended) < len(self._links):
            self._changed.clear()
            await self._changed.wait()
        self._close_server()

    def abort(self) -> None:
        """End all connections at once, and tell of no loss."""
        self._has_failed = True
        for link in self._links.values():
            link.abort("this process ends the attempt")
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._handshaking):
            link.abort("this process accepts no more links")

    # -- messages --------------------------------------------------------------------------------------

    def send(self, process: int, kind: str, *contents: PlainValue) -> Callable[[], None]:
        """Send a message to another process, as :meth:`ProcessLink.send_message` does."""
        return self._links[process].send_message([kind, *contents])

    def handle(self, kind: str, handler: Handler) -> None:
        """Give the messages of this kind to ``handler``."""
        if kind in self._handlers:
            raise InternalError(f"messages {kind!r}: expected one handler, given a second one")
        self._handlers[kind] = handler

    def deliver(self) -> None:
        """Handle the messages that have arrived so far, and from now on each when it arrives: the job is made."""
        kept, self._kept = self._kept or [], None
        for sender, message in kept:
            self._handle(sender, message)

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """Handle a message, or keep it until the job is made."""
        assert link.peer is not None
        if self._kept is not None:
            self._kept.append((link.peer, message))
        else:
            self._handle(link.peer, message)

    def _handle(self, sender: int, message: PlainValue) -> None:
        kind, *contents = message
        if kind not in self._handlers:
            raise InternalError(f"expected a message of a known kind of process {sender}, given {kind!r}")
        self._handlers[kind](sender, *contents)
