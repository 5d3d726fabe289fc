"""Calls to shards: replies that have to wait, calls to several shards, and how a worker takes part in a server.

A shard answers a request at once, or with a ``WaitingReply`` that a later request settles. A client makes one ``Call``
of its requests to several shards; ``Outstanding`` limits the calls of one client.

A worker *joins* in two steps, because shards may be at different clocks: on each shard it joins at the shard's minimum
clock; then its clock is raised to the highest of these clocks on all shards. Every request is a *heartbeat*, a sign
that the worker is alive. A worker without a heartbeat for the timeout is *silent*, and is made to leave, so that other
workers do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast, final

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server.requests import ClockRequest, JoinRequest, LeaveRequest, RaiseRequest, Request
from streamiter.values.helpers.clock import Clock, TimerHandle
from streamiter.values.numbers import positive, whole_number

S = TypeVar("S")
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

    def follow(self, reply: S | WaitingReply[S], change: Callable[[S], T]) -> None:
        """Settle with the changed result of another reply once that is settled; to give this up gives up the other."""
        if not isinstance(reply, WaitingReply):
            self.succeed(change(reply))
            return

        def settle() -> None:
            try:
                self.succeed(change(reply.result()))
            except BaseException as error:
                self.fail(error)

        self.on_given_up = reply.give_up
        reply.when_settled(settle)

    def result(self) -> T:
        """Return the result, or raise the error. Call this only once the reply is settled."""
        assert self.is_settled
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

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


async def until_settled(waiting: AnyReply) -> None:
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


AnyReply: TypeAlias = WaitingReply[Any]
"""A reply of any type."""

Replies: TypeAlias = Sequence[Any]
"""The replies of several shards to one call, each of the type that its request has."""


@final
class Call(Generic[T]):
    """A call to several shards: awaiting it gives the result. The shards do what was sent even if no task awaits it.

    >>> import asyncio
    >>> asyncio.run(_sum_of(Call([1, 2], sum)))
    3
    """

    __slots__ = ("_finish", "_replies", "_result")

    def __init__(self, replies: Replies, finish: Callable[[Replies], T]) -> None:
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


class _Room(WaitingReply[None]):
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
    ...     return outstanding.now
    >>> asyncio.run(main())
    1
    """

    def __init__(self, limit: int) -> None:
        self._limit = whole_number("Outstanding(limit=)", limit, 1)
        self.now = 0
        """The calls that have room."""
        self._queue: deque[_Room] = deque()

    def take(self) -> _Room | None:
        """Take room for a call, and return None; or return a reply that succeeds once room is taken for the call.

        The callbacks of the reply are called within the ``release`` of another call. Use ``acquire`` to await it: a
        task that is cancelled while it awaits the reply cannot know whether room was taken.
        """
        if self.now < self._limit:  # Then no call waits: release would have handed the room on.
            self.now += 1
            return None
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
        assert self.now > 0
        if self._queue:
            room = self._queue.popleft()
            room.is_given = True
            room.succeed(None)
        else:
            self.now -= 1

    def fail_waiting(self, error: Exception) -> None:
        """Fail the calls that wait for room: the client leaves. Calls that have room release it as always."""
        while self._queue:
            self._queue.popleft().fail(error)


@final
class Participation:
    """One worker's part in a server: its clocks, its links to all shards, and the limit on its calls.

    A call to several shards is ``begin``, then ``send``. The call's room is released when all shards have replied.
    """

    def __init__(
        self,
        worker: int,
        links: Sequence[ShardLink],
        max_calls: int,
        heartbeats: Heartbeats | None,
        on_left: Callable[[int], None],
    ) -> None:
        self.worker = worker
        self.links = links
        self.clocks: dict[str, int] = {}
        """The worker's clocks, by matrix; 0 for a matrix that is not here."""
        self.observed_at_join: dict[str, int] = {}
        """The highest minimum clocks when the worker joined, by matrix: some shard may have yet to reach them."""
        self._outstanding = Outstanding(max_calls)
        self.release = self._outstanding.release
        """Releases the room of a call that has begun."""
        self._heartbeats = heartbeats
        self._on_left = on_left
        self._left: str | None = None
        """Why the worker has left; None while it takes part."""
        self._joining: list[dict[str, int] | WaitingReply[dict[str, int]]] | None = None
        """The replies of the shards to the request to join, until all have come."""

    # -- joining and leaving ---------------------------------------------------------------------------

    def begin_to_join(self) -> None:
        """Ask the shards to let this worker join. Shards in this process answer at once."""
        self._joining = [link.send(JoinRequest(self.worker)) for link in self.links]
        joined = [reply for reply in self._joining if not isinstance(reply, WaitingReply)]
        if len(joined) == len(self._joining):
            self._raise_clocks(joined)

    def _raise_clocks(self, joined: Sequence[dict[str, int]]) -> None:
        """Raise the worker's clock on all shards to the highest of their minimum clocks, which may differ."""
        self._joining = None
        self.clocks = clocks = highest_clocks(joined)
        self.observed_at_join = dict(clocks)
        if clocks:
            for link in self.links:
                link.send(RaiseRequest(self.worker, clocks))

    async def join(self) -> None:
        """Return when the worker has joined on all shards. If the wait is cancelled, the next call waits again."""
        if (joining := self._joining) is None:
            return
        for reply in joining:
            if isinstance(reply, WaitingReply):
                await until_settled(reply)
        # Another call may have waited for the same replies, and raised the clocks.
        if self._joining is joining:
            self._raise_clocks([reply.result() if isinstance(reply, WaitingReply) else reply for reply in joining])

    @property
    def has_left(self) -> bool:
        """Whether this worker has left."""
        return self._left is not None

    def check_open(self) -> None:
        """Raise WorkerHasLeft if this worker has left."""
        if self._left is not None:
            raise self._has_left()

    def heartbeat(self) -> None:
        """Say that this worker is alive. Raises WorkerHasLeft."""
        self.check_open()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    async def leave(self, reason: str) -> None:
        """Leave. All shards are told, even if one of them fails."""
        self.left(reason)
        replies, failure = [], None
        for link in self.links:
            try:
                replies.append(link.send(LeaveRequest(self.worker, reason)))
            except Exception as error:
                failure = failure or error
        try:
            for reply in replies:
                if isinstance(reply, WaitingReply):
                    await reply
        finally:  # Also where a shard is lost: the worker's number is free.
            self._on_left(self.worker)
        if failure is not None:
            raise failure

    def left(self, reason: str) -> None:
        """Note that the server has made this worker leave."""
        if self._left is None:
            self._left = reason
            self._outstanding.fail_waiting(self._has_left())

    def _has_left(self) -> WorkerHasLeft:
        return WorkerHasLeft(
            f"worker {self.worker}: expected a client that takes part, given one that does not: {self._left}; "
            "make a new one with client() of a server that is open"
        )

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """The shards went back to a snapshot: take over the worker's clocks in it, by matrix."""
        self._joining = None
        self.clocks = dict(clocks)
        self.observed_at_join.clear()

    # -- requests --------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Begin a call: wait until the worker has joined, and for room. Raises WorkerHasLeft."""
        if self._left is not None:
            raise self._has_left()
        if self._joining is not None:
            await self.join()
        await self._outstanding.acquire()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    async def ask(self, shard: int, request: Request[R]) -> R:
        """Make a call of one request to one shard, from beginning to end: the way of most calls."""
        await self.begin()
        try:
            reply = self.links[shard].send(request)
            if not isinstance(reply, WaitingReply):
                return reply
            self.wait_alive((reply,))
            return await reply
        finally:
            self.release()

    def send(self, requests: Sequence[tuple[int, Request[object]]], finish: Callable[[Replies], T]) -> Call[T]:
        """Send one request to each of several shards; the call keeps its room until all have replied."""
        replies: list[object] = []
        failure: BaseException | None = None
        for shard, request in requests:
            try:
                replies.append(self.links[shard].send(request))
            except BaseException as error:
                failure = failure or error
                if not isinstance(request, ClockRequest):  # The clocks of shards must not differ for ever.
                    break
        if failure is not None:
            for reply in replies:
                if isinstance(reply, WaitingReply):
                    reply.give_up()
            self.release()
            raise failure
        waiting = [reply for reply in replies if isinstance(reply, WaitingReply)]
        self.wait_alive(waiting)
        self._release_when_settled(waiting)
        return Call(replies, finish)

    def wait_alive(self, waiting: Sequence[AnyReply]) -> None:
        """Note that the worker is alive while it waits for these replies."""
        if (heartbeats := self._heartbeats) is not None:
            for one in waiting:
                heartbeats.wait_begins(self.worker)
                one.when_settled(lambda: heartbeats.wait_ends(self.worker))

    def _release_when_settled(self, waiting: Sequence[AnyReply]) -> None:
        rest = len(waiting)
        if not rest:
            self.release()
            return

        def settled() -> None:
            nonlocal rest
            rest -= 1
            if not rest:
                self.release()

        for one in waiting:
            one.when_settled(settled)


def highest_clocks(joined: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the highest of the shards' clocks of a worker, by matrix."""
    clocks: dict[str, int] = {}
    for of_shard in joined:
        for name, clock in of_shard.items():
            clocks[name] = max(clock, clocks.get(name, 0))
    return clocks


# The watch checks again when the next worker may be silent, but not before this part of the timeout has passed. So a
# worker may be noticed that much later, and many workers cost no more than a few.
_LEAST_PART_OF_TIMEOUT: Final = 0.05


@final
class Heartbeats:
    """The time of each worker's last heartbeat: a pure data structure.

    Heartbeats of workers that do not take part, such as a late message of a worker that has left, are ignored.

    A worker that waits for a reply sends nothing meanwhile. Between ``wait_begins`` and ``wait_ends`` it is not silent.

    >>> from streamiter.testing import VirtualClock
    >>> clock = VirtualClock()
    >>> heartbeats = Heartbeats(clock, timeout_s=10.0)
    >>> heartbeats.joined(3)
    >>> heartbeats.silent(clock.monotonic_s() + 9.9), heartbeats.silent(clock.monotonic_s() + 10.0)
    ([], [3])
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.timeout_s = positive("heartbeat timeout, in seconds", timeout_s)
        self._last_s: dict[int, float] = {}
        self._waiting: dict[int, int] = {}

    def joined(self, worker: int) -> None:
        """A worker has joined."""
        self._last_s[worker] = self._clock.monotonic_s()

    def left(self, worker: int) -> None:
        """A worker has left."""
        self._last_s.pop(worker, None)
        self._waiting.pop(worker, None)

    def heard(self, worker: int) -> None:
        """A message of a worker has arrived."""
        if worker in self._last_s:
            self._last_s[worker] = self._clock.monotonic_s()

    def wait_begins(self, worker: int) -> None:
        """A call of a worker begins to wait at the server."""
        if worker in self._last_s:
            self._waiting[worker] = self._waiting.get(worker, 0) + 1

    def wait_ends(self, worker: int) -> None:
        """A waiting call of a worker was answered or given up."""
        waiting = self._waiting.get(worker, 0)
        if waiting > 1:
            self._waiting[worker] = waiting - 1
        else:
            self._waiting.pop(worker, None)
        self.heard(worker)

    def silent(self, now_s: float) -> list[int]:
        """Return the workers without a heartbeat for the timeout that do not wait, in the order they joined."""
        return [
            worker
            for worker, last_s in self._last_s.items()
            if now_s >= last_s + self.timeout_s and worker not in self._waiting
        ]

    def next_check_s(self) -> float:
        """Return the first moment at which a worker may be silent, including a worker that joins now."""
        joins_now_s = self._clock.monotonic_s() + self.timeout_s
        due_s = [last_s + self.timeout_s for worker, last_s in self._last_s.items() if worker not in self._waiting]
        return min(due_s, default=joins_now_s)


@final
class SilenceWatch:
    """Makes silent workers leave, with one timer for all workers. Its owner starts and stops it."""

    def __init__(self, clock: Clock, heartbeats: Heartbeats, leave: Callable[[int, str], None]) -> None:
        """``leave`` is called with the worker and the reason; it must call ``heartbeats.left``, too."""
        self._clock = clock
        self._heartbeats = heartbeats
        self._leave = leave
        self._timer: TimerHandle | None = None
        self._is_running = False

    def start(self) -> None:
        """Begin to watch; nothing happens if the watch runs already."""
        if not self._is_running:
            self._is_running = True
            self._set_timer()

    def stop(self) -> None:
        """Stop watching. May be called from within ``leave``."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        timeout_s = self._heartbeats.timeout_s
        delay_s = self._heartbeats.next_check_s() - self._clock.monotonic_s()
        self._timer = self._clock.call_later(max(delay_s, timeout_s * _LEAST_PART_OF_TIMEOUT), self._check)

    def _check(self) -> None:
        timeout_s = self._heartbeats.timeout_s
        self._timer = None
        try:
            for worker in self._heartbeats.silent(self._clock.monotonic_s()):
                if not self._is_running:
                    break
                self._leave(worker, f"nothing was heard of it for {timeout_s:g} s (its heartbeat timeout)")
        finally:
            if self._is_running:
                self._set_timer()
