"""Two links joined by a pipe in memory, whose bytes arrive in pieces of any size, and the owner of a link for tests."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import LinkError, LinkIdentity, ProcessLink
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.plain_data import PlainData

SECRET = b"s" * 32


def identity(process: int, *, run: str = "run-1", attempt: int = 1, secret: bytes = SECRET) -> LinkIdentity:
    return LinkIdentity(process, run, attempt, "fingerprint", secret)


class Owner:
    """Notes what happens to its link."""

    def __init__(self, on_open: Callable[[ProcessLink], None] = lambda link: None) -> None:
        self.messages: list[Any] = []
        self.ends: list[LinkError | None] = []
        self.is_open = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.on_message: Callable[[ProcessLink, Any], None] = lambda link, message: self.messages.append(message)
        self._on_open = on_open

    def opened(self, link: ProcessLink) -> None:
        self._on_open(link)
        self.is_open.set()

    def received(self, link: ProcessLink, message: Any) -> None:
        self.on_message(link, message)

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        self.ends.append(error)
        self.has_ended.set()


def link_of(owner: Owner, who: LinkIdentity) -> ProcessLink:
    return ProcessLink(who, owner, FrameEncoding(PlainData()), SystemClock())


class PipeEnd:
    """The transport of one link; what it sends waits here until it is delivered."""

    def __init__(self, link: asyncio.BufferedProtocol) -> None:
        self.link = link
        self.waiting = bytearray()
        self.writes = 0
        self.is_closed = self.is_lost = False
        self.on_write: Callable[[], None] = lambda: None

    def writelines(self, parts: Any) -> None:
        assert not self.is_closed
        self.writes += 1
        for part in parts:
            self.waiting += part
        self.on_write()

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def get_extra_info(self, name: str) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.waiting.clear()
        self.is_closed = True

    def lose(self) -> None:
        """Tell the link once that its connection has ended."""
        if not self.is_lost:
            self.is_lost = self.is_closed = True
            self.link.connection_lost(None)


class Pipe:
    """Joins two links."""

    def __init__(self, first: asyncio.BufferedProtocol, second: asyncio.BufferedProtocol) -> None:
        self.ends = (PipeEnd(first), PipeEnd(second))
        for end in self.ends:
            end.link.connection_made(end)  # type: ignore[arg-type]

    def deliver(self, sender: int, at_most: int) -> bool:
        """Deliver some bytes, or the end of the connection; return whether there was anything to deliver."""
        source, target = self.ends[sender], self.ends[1 - sender]
        if source.waiting and not target.is_closed:
            room = memoryview(target.link.get_buffer(-1))
            assert len(room) > 0
            count = min(at_most, len(room), len(source.waiting))
            room[:count] = source.waiting[:count]
            del source.waiting[:count]
            target.link.buffer_updated(count)
            return True
        if source.is_closed and not (source.is_lost and target.is_lost):
            source.lose()
            target.lose()
            return True
        source.waiting.clear()
        return False

    async def settle(self, random: Random | None = None) -> None:
        """Deliver everything, in random pieces from both sides, until nothing is sent any more."""
        random = random or Random(0)
        quiet = 0
        while quiet < 3:
            await asyncio.sleep(0)
            sender = random.randrange(2)
            moved = self.deliver(sender, random.choice((1, 3, 100, 1 << 20)))
            quiet = 0 if self.deliver(1 - sender, random.choice((1, 20, 5000))) or moved else quiet + 1


class MovingPipe(Pipe):
    """Delivers by itself, a random piece in each turn of the event loop."""

    def __init__(self, first: ProcessLink, second: ProcessLink, random: Random) -> None:
        self._random = random
        super().__init__(first, second)
        self._is_moving = False
        while any(end.waiting for end in self.ends):  # The handshake.
            self.deliver(0, 1000)
            self.deliver(1, 1000)
        for end in self.ends:
            end.on_write = self._move

    def _move(self) -> None:
        if not self._is_moving:
            self._is_moving = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_moving = False
        for sender in self._random.sample((0, 1), 2):
            self.deliver(sender, self._random.choice((30, 300, 1 << 20)))
        if any(end.waiting for end in self.ends):
            self._move()


async def open_pipe(random: Random | None = None) -> tuple[ProcessLink, ProcessLink, Owner, Owner, Pipe]:
    """Return two open links, of processes 0 and 1."""
    owners = Owner(), Owner()
    links = link_of(owners[0], identity(0)), link_of(owners[1], identity(1))
    pipe = Pipe(*links)
    await pipe.settle(random)
    assert owners[0].is_open.is_set()
    assert owners[1].is_open.is_set()
    return *links, *owners, pipe
