"""Calls to shards: waiting for answers, and what is on its way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, final

from streamiter.errors import OutOfTurn, StreamiterError
from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker

__all__ = [
    "Arrivals",
    "Call",
    "Outstanding",
    "OutstandingStatistics",
    "ShardLink",
    "WaitingReply",
    "until_settled",
]


T = TypeVar("T")


class WaitingReply(Generic[T]):
    """The reply to a request that has to wait; settled once, by whoever brings about its condition.

    It belongs to no event loop until it is awaited. Whoever stops awaiting it ``gives_up``.

    A reply that is not there yet.
    """

    __slots__ = ("_callbacks", "_error", "_result", "is_settled", "on_given_up")

    def __init__(self, on_given_up: Callable[[], None] | None = None) -> None:
        self.is_settled = False
        self.on_given_up = on_given_up
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def succeed(self, result: T) -> None:
        """The reply is there. Nothing happens if it was settled before."""
        if not self.is_settled:
            self._result = result
            self._settle()

    def fail(self, error: BaseException) -> None:
        """There will be no reply."""
        if not self.is_settled:
            self._error = error
            self._settle()

    def give_up(self) -> None:
        """Nobody wants the reply any more."""
        if not self.is_settled:
            self.fail(asyncio.CancelledError())
            if self.on_given_up is not None:
                self.on_given_up()

    def follow(self, reply: T | WaitingReply[T]) -> None:
        """Be settled with a reply, which may itself have to wait; giving this one up gives that one up."""
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
        """The reply; raises what it failed with. Only once it is settled."""
        assert self.is_settled
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once it is settled, at once if it is."""
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
    """Return once it is settled; whoever is cancelled meanwhile does not give it up, for others want it, too."""
    if waiting.is_settled:
        return
    settled = asyncio.Event()
    waiting.when_settled(settled.set)
    await settled.wait()


@final
class Arrivals:
    """Barrier ``t`` opens when every worker has arrived at it. On one shard only; a pure data structure.

    Workers that wait for each other: ``client.barrier``.
    """

    def __init__(self) -> None:
        self._tracker = ProgressTracker()
        self._tracker.init(())
        self._waiting: dict[int, tuple[int, WaitingReply[None]]] = {}
        """By worker: the barrier it waits at."""

    def arrive(self, worker: int, number: int) -> WaitingReply[None] | None:
        """A worker is at a barrier: 0, 1, 2, …; below 0: the next one. None if it is open."""
        self._tracker.check_worker_valid(worker)
        expected = self._tracker.get_progress(worker)
        if worker in self._waiting:
            raise _out_of_turn(worker, f"the end of its wait at barrier {expected - 1}", number)
        if number not in (expected, -1):
            raise _out_of_turn(worker, f"barrier {expected}", number)
        self._tracker.advance_and_get_changed_min_clock(worker)
        self._open()
        if self._tracker.get_min_clock() > expected:
            return None
        waiting: WaitingReply[None] = WaitingReply(lambda: self._give_up(worker))
        self._waiting[worker] = (expected, waiting)
        return waiting

    def _give_up(self, worker: int) -> None:
        """Its wait was cancelled: it may come again, and counts as arrived all the same."""
        self._waiting.pop(worker, None)

    def join(self, worker: int) -> None:
        """A worker takes part: the first barrier it meets is the one that others are before, or wait at."""
        self._tracker.join(worker)

    def leave(self, worker: int, error: StreamiterError) -> None:
        """A worker takes part no more: its own wait fails, those of others may end."""
        if (waits := self._waiting.pop(worker, None)) is not None:
            waits[1].fail(error)
        self._tracker.leave(worker)
        self._open()

    def reset(self, workers: Iterable[int], error: StreamiterError) -> None:
        """Start over with these workers; all waits fail."""
        self.fail(error)
        self._tracker.init(workers)

    def fail(self, error: StreamiterError) -> None:
        """No wait will end."""
        waiting, self._waiting = self._waiting, {}
        for _, one in waiting.values():
            one.fail(error)

    def _open(self) -> None:
        lowest = self._tracker.get_min_clock()
        for worker, (number, waiting) in list(self._waiting.items()):
            if number < lowest:
                del self._waiting[worker]
                waiting.succeed(None)

    def snapshot(self) -> dict[str, Any]:
        """Plain data: how many barriers each worker has passed. A worker that waits will arrive again."""
        return {
            "passed": [
                [worker, self._tracker.get_progress(worker) - (worker in self._waiting)]
                for worker in self._tracker.workers
            ]
        }

    def restore(self, state: Mapping[str, Any], workers: Iterable[int], error: StreamiterError) -> None:
        """Take over what ``snapshot`` gave; all waits fail.

        A worker that was not there is before the first closed barrier.
        """
        self.fail(error)
        passed = dict(state["passed"])
        lowest = min(passed.values(), default=0)
        self._tracker.init(())
        for worker in workers:
            self._tracker.join(worker, passed.get(worker, lowest))


def _out_of_turn(worker: int, expected: str, number: int) -> OutOfTurn:
    return OutOfTurn(
        f"barrier of worker {worker}: expected {expected}, given "
        f"{'the next one' if number < 0 else f'barrier {number}'}; "
        "every worker passes every barrier, one after the other"
    )


@dataclass(frozen=True, slots=True)
class OutstandingStatistics:
    """Calls under way."""

    now: int
    peak: int
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
    """At most ``limit`` calls at a time; more wait for room, the first one first.

    Each call that has come in (``take`` gave None, or what it gave has succeeded; ``acquire`` has returned) is followed
    by one ``release``. Room goes straight from who releases it to who has waited longest: nobody gets in between.

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

    The bound on the calls that one client has under way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = whole_number("Outstanding(limit=)", limit, 1)
        self._now = self._peak = self._waited = 0
        self._queue: deque[_Room] = deque()

    def take(self) -> _Room | None:
        """None: there is room, and it is taken. Otherwise settled once there is, and has been taken for the caller.

        The callbacks of the Waiting are called within somebody else's ``release``. Who awaits it directly and is
        cancelled cannot know whether room had been taken already: ``acquire`` sees to that.
        """
        if self._now < self._limit:  # then nobody waits: release would have handed the room on
            self._now += 1
            self._peak = max(self._peak, self._now)
            return None
        self._waited += 1
        room = _Room(on_given_up=lambda: self._queue.remove(room))
        self._queue.append(room)
        return room

    async def acquire(self) -> None:
        """Come in; wait for room if there is none. Raises what ``fail_waiting`` was given."""
        room = self.take()
        if room is None:
            return
        try:
            await room
        except asyncio.CancelledError:
            if room.is_given:  # in the turn in which this task was cancelled
                self.release()
            raise

    def release(self) -> None:
        """A call is over."""
        assert self._now > 0
        if self._queue:
            room = self._queue.popleft()
            room.is_given = True
            room.succeed(None)
        else:
            self._now -= 1

    def fail_waiting(self, error: Exception) -> None:
        """Who waits for room gets this error: the client leaves. Calls under way release as always."""
        while self._queue:
            self._queue.popleft().fail(error)

    def statistics(self) -> OutstandingStatistics:
        """How many calls there are and were."""
        return OutstandingStatistics(self._now, self._peak, len(self._queue), self._waited)


@final
class Call(Generic[T]):
    """A handle: awaiting it gives the result. What was sent happens whether or not anybody awaits it.

    >>> import asyncio
    >>> asyncio.run(_sum_of(Call([1, 2], sum)))
    3

    A call to several shards, under way.
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
        """Whether awaiting it would not wait."""
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
        """Nobody wants the result any more."""
        for reply in self._replies:
            if isinstance(reply, WaitingReply):
                reply.give_up()


async def _sum_of(call: Call[int]) -> int:
    return await call


class ShardLink(Protocol):
    """Takes requests of one client to one shard, which handles them in order, each once.

    The way to a shard.
    """

    def send(self, request: Any) -> Any | WaitingReply[Any]:
        """The reply, or a Waiting for it. Raises what the shard refuses at once."""
