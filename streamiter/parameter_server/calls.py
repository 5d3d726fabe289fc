"""Calls to shards: replies that have to wait, calls to several shards, and how a worker takes part in a server.

A shard answers a request at once, or with a ``WaitingReply`` that a later request settles. A client makes one ``Call``
of its requests to several shards.

A worker *joins* in two steps, because shards may be at different clocks: on each shard it joins at the shard's minimum
clock; then its clock is raised to the highest of these clocks on all shards. Every request is a *heartbeat*, a sign
that the worker is alive. A worker without a heartbeat for the timeout is *silent*, and is made to leave, so that other
workers do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast, final

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server.requests import ClockRequest, JoinRequest, LeaveRequest, RaiseRequest, Request
from streamiter.values.helpers.clock import Clock, TimerHandle
from streamiter.values.numbers import positive, whole_number

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
        """Settle as another reply once that is settled; to give this up gives up the other."""
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

    >>> async def main() -> int:
    ...     return await Call([1, 2], sum)
    >>> asyncio.run(main())
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


class Participation:
    """One worker's part in a server: its clocks, its links to all shards, and the limit on its calls.

    A call to several shards is ``_begin``, then ``_send``. At most ``max_calls`` calls are under way; further calls
    wait for room, in order. A call has room until all shards have replied.
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
        self._links = links
        self._clocks: dict[str, int] = {}
        """The worker's clocks, by matrix; 0 for a matrix that is not here."""
        self._observed_at_join: dict[str, int] = {}
        """The highest minimum clocks when the worker joined, by matrix: some shard may have yet to reach them."""
        self._room = whole_number("client(max_calls=)", max_calls, 1)
        """How many more calls may begin now."""
        self._queue: deque[asyncio.Future[None]] = deque()
        """The calls that wait for room, in order; some may have been cancelled."""
        self._heartbeats = heartbeats
        self._on_left = on_left
        self._left: str | None = None
        """Why the worker has left; None while it takes part."""
        self._joining: list[dict[str, int] | WaitingReply[dict[str, int]]] | None = None
        """The replies of the shards to the request to join, until all have come."""

    # -- joining and leaving ---------------------------------------------------------------------------

    def _begin_to_join(self) -> None:
        """Ask the shards to let this worker join. Shards in this process answer at once."""
        self._joining = [link.send(JoinRequest(self.worker)) for link in self._links]
        joined = [reply for reply in self._joining if not isinstance(reply, WaitingReply)]
        if len(joined) == len(self._joining):
            self._raise_clocks(joined)

    def _raise_clocks(self, joined: Sequence[dict[str, int]]) -> None:
        """Raise the worker's clock on all shards to the highest of their minimum clocks, which may differ."""
        self._joining = None
        clocks: dict[str, int] = {}
        for of_shard in joined:
            for name, clock in of_shard.items():
                clocks[name] = max(clock, clocks.get(name, 0))
        self._clocks, self._observed_at_join = clocks, dict(clocks)
        if clocks:
            for link in self._links:
                link.send(RaiseRequest(self.worker, clocks))

    async def join(self) -> None:
        """Return when the worker has joined on all shards: at once in this process. Every call joins first."""
        if (joining := self._joining) is None:
            return
        for reply in joining:
            if isinstance(reply, WaitingReply):
                await until_settled(reply)
        # Another call may have waited for the same replies, and raised the clocks.
        if self._joining is joining:
            self._raise_clocks([reply.result() if isinstance(reply, WaitingReply) else reply for reply in joining])

    def clock_of(self, matrix: str) -> int:
        """Return this worker's clock on a matrix: the minimum clock when it joined, plus one for each ``clock``."""
        return self._clocks.get(matrix, 0)

    def heartbeat(self) -> None:
        """Tell the server that this worker is alive; every other call does so, too."""
        self._check_open()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    def _check_open(self) -> None:
        """Raise WorkerHasLeft if this worker has left."""
        if self._left is not None:
            raise WorkerHasLeft(
                f"worker {self.worker}: expected a client that takes part, given one that does not: {self._left}; "
                "make a new one with client() of a server that is open"
            )

    async def leave(self, reason: str = "it has left") -> None:
        """Leave: other workers do not wait for this worker any longer. What it has added stays."""
        if self._left is not None:
            return
        self.left(reason)
        replies, failure = [], None
        for link in self._links:  # All shards are told, even if one of them fails.
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
            for _ in range(len(self._queue)):  # Calls that wait for room fail.
                self._release()

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """The shards went back to a snapshot: take over the worker's clocks in it, by matrix."""
        self._joining = None
        self._clocks = dict(clocks)
        self._observed_at_join.clear()

    # -- requests --------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Begin a call: wait until the worker has joined, and for room. Raises WorkerHasLeft."""
        if self._left is not None:
            self._check_open()
        if self._joining is not None:
            await self.join()
        if self._room:
            self._room -= 1
        else:
            await self._wait_for_room()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    async def _wait_for_room(self) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(room)
        try:
            await room
            self._check_open()
        except BaseException:
            if not room.cancelled():  # It got room, in the turn in which its task was cancelled or the worker left.
                self._release()
            raise

    def _release(self) -> None:
        """A call has ended: the call that has waited longest gets its room."""
        while self._queue:
            room = self._queue.popleft()
            if not room.done():
                room.set_result(None)
                return
        self._room += 1

    async def _ask(self, shard: int, request: Request[R]) -> R:
        """Make a call of one request to one shard, from beginning to end: the way of most calls."""
        await self._begin()
        try:
            reply = self._links[shard].send(request)
            if not isinstance(reply, WaitingReply):
                return reply
            self._wait_alive((reply,))
            return await reply
        finally:
            self._release()

    def _send(self, requests: Sequence[tuple[int, Request[object]]], finish: Callable[[Replies], T]) -> Call[T]:
        """Send one request to each of several shards; the call keeps its room until all have replied."""
        replies: list[object] = []
        failure: BaseException | None = None
        for shard, request in requests:
            try:
                replies.append(self._links[shard].send(request))
            except BaseException as error:
                failure = failure or error
                if not isinstance(request, ClockRequest):  # The clocks of shards must not differ for ever.
                    break
        waiting = [reply for reply in replies if isinstance(reply, WaitingReply)]
        if failure is not None:
            for reply in waiting:
                reply.give_up()
            self._release()
            raise failure
        self._wait_alive(waiting)
        self._release_when_settled(waiting)
        return Call(replies, finish)

    def _wait_alive(self, waiting: Sequence[AnyReply]) -> None:
        """Note that the worker is alive while it waits for these replies."""
        if (heartbeats := self._heartbeats) is not None:
            for one in waiting:
                heartbeats.wait_begins(self.worker)
                one.when_settled(lambda: heartbeats.wait_ends(self.worker))

    def _release_when_settled(self, waiting: Sequence[AnyReply]) -> None:
        rest = len(waiting)
        if not rest:
            self._release()
            return

        def settled() -> None:
            nonlocal rest
            rest -= 1
            if not rest:
                self._release()

        for one in waiting:
            one.when_settled(settled)


# The next check is when the next worker may be silent, but not before this part of the timeout has passed. So a worker
# may be noticed that much later, and many workers cost no more than a few.
_LEAST_PART_OF_TIMEOUT: Final = 0.05


@final
class Heartbeats:
    """The time of each worker's last heartbeat; makes silent workers leave, with one timer for all workers.

    Heartbeats of workers that do not take part, such as a late message of a worker that has left, are ignored.

    A worker that waits for a reply sends nothing meanwhile. Between ``wait_begins`` and ``wait_ends`` it is not silent.
    ``leave`` is called with a silent worker and the reason; it must call ``left``, too.

    >>> from streamiter.testing import VirtualClock
    >>> async def main() -> None:
    ...     clock = VirtualClock()
    ...     heartbeats = Heartbeats(clock, 10.0, leave=lambda worker, reason: heartbeats.left(worker))
    ...     heartbeats.joined(3)
    ...     print(heartbeats.silent(clock.monotonic_s() + 9.9), heartbeats.silent(clock.monotonic_s() + 10.0))
    >>> asyncio.run(main())
    [] [3]
    """

    def __init__(self, clock: Clock, timeout_s: float, leave: Callable[[int, str], None]) -> None:
        self._clock = clock
        self._timeout_s = positive("heartbeat timeout, in seconds", timeout_s)
        self._leave = leave
        self._last_s: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        self._timer: TimerHandle | None = None
        """The timer of the next check; there is one while any worker takes part."""

    def joined(self, worker: int) -> None:
        """A worker has joined."""
        self._last_s[worker] = self._clock.monotonic_s()
        if self._timer is None:
            self._set_timer()

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
            if now_s >= last_s + self._timeout_s and worker not in self._waiting
        ]

    def stop(self) -> None:
        """All workers have left: no check follows. May be called from within ``leave``."""
        self._last_s.clear()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        due_s = [last_s for worker, last_s in self._last_s.items() if worker not in self._waiting]
        now_s = self._clock.monotonic_s()
        delay_s = min(due_s, default=now_s) + self._timeout_s - now_s
        self._timer = self._clock.call_later(max(delay_s, self._timeout_s * _LEAST_PART_OF_TIMEOUT), self._check)

    def _check(self) -> None:
        try:
            for worker in self.silent(self._clock.monotonic_s()):
                if worker in self._last_s:
                    self._leave(worker, f"nothing was heard of it for {self._timeout_s:g} s (its heartbeat timeout)")
        finally:
            self._timer = None
            if self._last_s:
                self._set_timer()
