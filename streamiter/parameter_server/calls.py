"""Calls to shards: a reply that has to wait, a call to several shards, and limits on both.

A shard answers a request at once, or with a ``WaitingReply`` that a later request settles. A client makes one ``Call``
of its requests to several shards; ``Outstanding`` limits the calls of one client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, final

from streamiter.numbers import whole_number
from streamiter.parameter_server.requests import Request

T = TypeVar("T")
R = TypeVar("R")


class WaitingReply(Generic[T]):
    """A reply that has not come yet; settled once, with a result or an error.

    A waiting reply belongs to no event loop until it is awaited. A task that is cancelled while it awaits the reply
    gives the reply up: then ``on_given_up`` is called.
    """

    __slots__ = ("_callbacks", "_error", "_result", "is_settled", "on_given_up")

    def __init__(self, on_given_up: Callable[[], None] | None = None) -> None:
        self.is_settled = False
        self.on_given_up = on_given_up
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def succeed(self, result: T) -> None:
        """Settle with a result. Nothing happens if it was settled before."""
        if not self.is_settled:
            self._result = result
            self._settle()

    def fail(self, error: BaseException) -> None:
        """Settle with an error. Nothing happens if it was settled before."""
        if not self.is_settled:
            self._error = error
            self._settle()

    def give_up(self) -> None:
        """The caller does not wait for the reply any more: settle with CancelledError."""
        if not self.is_settled:
            self.fail(asyncio.CancelledError())
            if self.on_given_up is not None:
                self.on_given_up()

    def follow(self, reply: T | WaitingReply[T]) -> None:
        """Settle with another reply, when that one is settled; to give this one up gives up the other one."""
        if not isinstance(reply, WaitingReply):
            self.succeed(reply)
            return

        def settle() -> None:
            try:
                self.succeed(reply.result())
            except BaseException as error:
                self.fail(error)

        self.on_given_up = reply.give_up
        reply.when_settled(settle)

    def result(self) -> T:
        """Return the result, or raise the error. Call this only once the reply is settled."""
        assert self.is_settled
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the reply is settled: at once if it is settled already."""
        if self.is_settled:
            callback()
        else:
            self._callbacks.append(callback)

    def _settle(self) -> None:
        self.is_settled = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.is_settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            self.when_settled(wake)
            try:
                yield from future
            except asyncio.CancelledError:
                self.give_up()
                raise
        return self.result()


async def until_settled(waiting: WaitingReply[Any]) -> None:
    """Return once the reply is settled. Cancellation does not give the reply up, because others wait for it, too."""
    if waiting.is_settled:
        return
    settled = asyncio.Event()
    waiting.when_settled(settled.set)
    await settled.wait()


class ShardLink(Protocol):
    """The way of one client's requests to one shard, which handles them in order, each once."""

    def send(self, request: Request[R]) -> R | WaitingReply[R]:
        """Send a request; return the reply or a WaitingReply. Raises what the shard refuses at once."""


@final
class Call(Generic[T]):
    """A call to several shards: awaiting it gives the result. The shards do what was sent even if no task awaits it.

    >>> import asyncio
    >>> asyncio.run(_sum_of(Call([1, 2], sum)))
    3
    """

    __slots__ = ("_finish", "_replies", "_result")

    def __init__(
        self, replies: Sequence[Any | WaitingReply[Any]], finish: Callable[[Sequence[Any]], T]
    ) -> None:
        self._replies = replies
        self._finish = finish
        self._result: list[T] = []

    @property
    def is_done(self) -> bool:
        """Whether the result, or an error, is available without waiting."""
        return all(reply.is_settled for reply in self._replies if isinstance(reply, WaitingReply))

    def __await__(self) -> Generator[Any, None, T]:
        if self._result:
            return self._result[0]
        replies = list(self._replies)
        try:
            for number, reply in enumerate(replies):
                if isinstance(reply, WaitingReply):
                    replies[number] = yield from reply.__await__()
        except BaseException:
            self.give_up()
            raise
        self._result.append(self._finish(replies))
        return self._result[0]

    def give_up(self) -> None:
        """The caller does not wait for the result any more."""
        for reply in self._replies:
            if isinstance(reply, WaitingReply):
                reply.give_up()


async def _sum_of(call: Call[int]) -> int:
    return await call


@dataclass(frozen=True, slots=True)
class OutstandingStatistics:
    """The calls of one client at a moment."""

    now: int
    """Calls that have begun and not ended."""
    peak: int
    """The highest value of ``now`` so far."""
    waiting: int
    """Callers that wait for room at this moment."""
    waited: int
    """Calls so far that had to wait for room."""


class _Room(WaitingReply[None]):
    __slots__ = ("is_given",)

    def __init__(self, on_given_up: Callable[[], None]) -> None:
        super().__init__(on_given_up)
        self.is_given = False


@final
class Outstanding:
    """The limit on one client's calls: at most ``limit`` at a time; further calls wait for room, in order.

    A call has room when ``take`` returns None, when the reply that ``take`` returns succeeds, or when ``acquire``
    returns. Each call that has room ends with one ``release``, which hands the room to the call that has waited
    longest.

    >>> async def main():
    ...     outstanding = Outstanding(limit=1)
    ...     await outstanding.acquire()
    ...     second = asyncio.ensure_future(outstanding.acquire())
    ...     await asyncio.sleep(0)
    ...     outstanding.release()
    ...     await second
    ...     return outstanding.statistics()
    >>> asyncio.run(main())
    OutstandingStatistics(now=1, peak=1, waiting=0, waited=1)
    """

    def __init__(self, limit: int) -> None:
        self._limit = whole_number("Outstanding(limit=)", limit, 1)
        self._now = self._peak = self._waited = 0
        self._queue: deque[_Room] = deque()

    def take(self) -> _Room | None:
        """Take room for a call, and return None; or return a reply that succeeds once room is taken for the call.

        The callbacks of the reply are called within the ``release`` of another call. Use ``acquire`` to await it: a
        task that is cancelled while it awaits the reply cannot know whether room was taken.
        """
        if self._now < self._limit:  # Then no call waits: release would have handed the room on.
            self._now += 1
            self._peak = max(self._peak, self._now)
            return None
        self._waited += 1
        room = _Room(on_given_up=lambda: self._queue.remove(room))
        self._queue.append(room)
        return room

    async def acquire(self) -> None:
        """Take room for a call, and wait for it if necessary. Raises the error given to ``fail_waiting``."""
        room = self.take()
        if room is None:
            return
        try:
            await room
        except asyncio.CancelledError:
            if room.is_given:  # In the same turn of the event loop in which this task was cancelled.
                self.release()
            raise

    def release(self) -> None:
        """A call has ended."""
        assert self._now > 0
        if self._queue:
            room = self._queue.popleft()
            room.is_given = True
            room.succeed(None)
        else:
            self._now -= 1

    def fail_waiting(self, error: Exception) -> None:
        """Fail the calls that wait for room: the client leaves. Calls that have room release it as always."""
        while self._queue:
            self._queue.popleft().fail(error)

    def statistics(self) -> OutstandingStatistics:
        """Return the numbers of calls."""
        return OutstandingStatistics(self._now, self._peak, len(self._queue), self._waited)
