"""Workers that have not been heard of for too long are taken for dead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import RolledBack, WorkerHasLeft
from streamiter.numbers import positive
from streamiter.parameter_server.calls import Call, Outstanding, ShardLink, WaitingReply, until_settled
from streamiter.parameter_server.requests import ClockRequest, JoinRequest, LeaveRequest, RaiseRequest

__all__ = [
    "Heartbeats",
    "Participation",
    "SilenceWatch",
]


# The watch looks again when the next worker would be too late, but not before this part of the timeout has passed: a
# worker may be noticed that much later, and many workers cost no more than a few.
_LEAST_PART_OF_TIMEOUT: Final = 0.05


@final
class Heartbeats:
    """When each worker was last heard of. Every request is a heartbeat. A pure data structure.

    Only workers that take part are known: what is heard of others (a late message of one that has left) does not count.

    A worker that waits for a reply of the server sends nothing meanwhile. ``waits`` and ``goes_on`` keep it from being
    taken for dead, where the server is told if it stops waiting: in the same process a call is given up when its task
    is cancelled. A worker in another process may be gone without a word: leave them out there, and have it send
    heartbeats while it waits. The call of a subscription waits all the time, and says nothing about its worker.

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
        """A worker takes part from now on."""
        self._last_s[worker] = self._clock.monotonic_s()

    def left(self, worker: int) -> None:
        """It takes part no more."""
        self._last_s.pop(worker, None)
        self._waiting.pop(worker, None)

    def heard(self, worker: int) -> None:
        """Something has come from it."""
        if worker in self._last_s:
            self._last_s[worker] = self._clock.monotonic_s()

    def waits(self, worker: int) -> None:
        """A call of it has begun to wait at the server."""
        if worker in self._last_s:
            self._waiting[worker] = self._waiting.get(worker, 0) + 1

    def goes_on(self, worker: int) -> None:
        """Such a call has been answered, or given up."""
        waiting = self._waiting.get(worker, 0)
        if waiting > 1:
            self._waiting[worker] = waiting - 1
        else:
            self._waiting.pop(worker, None)
        self.heard(worker)

    def silent(self, now_s: float) -> list[int]:
        """The workers that have not been heard of for the timeout, and do not wait, in the order they joined."""
        return [
            worker
            for worker, last_s in self._last_s.items()
            if now_s >= last_s + self.timeout_s and worker not in self._waiting
        ]

    def next_check_s(self) -> float:
        """The first moment at which a worker might be silent: of those that there are, or of one that joins now."""
        joins_now_s = self._clock.monotonic_s() + self.timeout_s
        due_s = [
            last_s + self.timeout_s for worker, last_s in self._last_s.items() if worker not in self._waiting
        ]
        return min(due_s, default=joins_now_s)


@final
class SilenceWatch:
    """Has silent workers leave: one timer, whatever the number of workers. Its owner starts and stops it."""

    def __init__(self, clock: Clock, heartbeats: Heartbeats, leave: Callable[[int, str], None]) -> None:
        """``leave`` is called with the worker and the reason; it is to see that ``heartbeats.left`` is called, too."""
        self._clock = clock
        self._heartbeats = heartbeats
        self._leave = leave
        self._timer: TimerHandle | None = None
        self._is_running = False

    def start(self) -> None:
        """Watch from now on; nothing happens if it does already."""
        if not self._is_running:
            self._is_running = True
            self._set_timer()

    def stop(self) -> None:
        """Watch no more; also from within ``leave``."""
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


T = TypeVar("T")


@final
class Participation:
    """Where a worker stands, and its ways to all shards, on which so many calls may be under way at a time.

    A call to several shards is ``begin``, then ``send``, which gives its room back when all have replied.

    A worker's part in a server: it joins, sends requests, and leaves.
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
        """Where this worker stands, by matrix; 0 where nothing is said."""
        self.observed_at_join: dict[str, int] = {}
        """The highest minimum clocks then, by matrix: some shard may have yet to reach them."""
        self.release = (outstanding := Outstanding(max_calls)).release
        """A call that has begun is over."""
        self._outstanding = outstanding
        self._heartbeats = heartbeats
        self._on_left = on_left
        self._left: str | None = None
        self._joining: list[Any] | None = None

    # -- joining and leaving ---------------------------------------------------------------------------

    def begin_to_join(self) -> None:
        """Tell the shards of this worker; in this process that is all there is to it."""
        self._joining = [link.send(JoinRequest(self.worker)) for link in self.links]
        if not any(isinstance(reply, WaitingReply) for reply in self._joining):
            self._stand_together(self._joining)

    def _stand_together(self, joined: Sequence[dict[str, int]]) -> None:
        """Shards may have moved on at different moments: stand at the highest minimum everywhere."""
        self._joining = None
        clocks: dict[str, int] = {}
        for of_shard in joined:
            for name, clock in of_shard.items():
                clocks[name] = max(clock, clocks.get(name, 0))
        self.clocks = clocks
        self.observed_at_join = dict(clocks)
        if clocks:
            for link in self.links:
                link.send(RaiseRequest(self.worker, clocks))

    async def join(self) -> None:
        """Return when the shards know of this worker. Whoever stops waiting for that leaves it to the next call."""
        if (joining := self._joining) is None:
            return
        for reply in joining:
            if isinstance(reply, WaitingReply):
                await until_settled(reply)
        if self._joining is joining:  # Somebody else may have waited for the same.
            self._stand_together(
                [reply.result() if isinstance(reply, WaitingReply) else reply for reply in joining]
            )

    @property
    def has_left(self) -> bool:
        """Whether this worker takes part no more."""
        return self._left is not None

    def check_open(self) -> None:
        """Raise WorkerHasLeft for a worker that has."""
        if self._left is not None:
            raise self._has_left()

    def heartbeat(self) -> None:
        """Say that this worker is alive. Raises WorkerHasLeft."""
        self.check_open()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    async def leave(self, reason: str) -> None:
        """Take part no more. All shards are told, whatever one of them says to it.

        With RolledBack the worker still takes part, as in the snapshot: what it did since then is to be done again.
        """
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
        except RolledBack:
            self._left = None
            raise
        finally:
            if self._left is not None:  # Also where a shard is lost: its number is free.
                self._on_left(self.worker)
        if failure is not None:
            raise failure

    def left(self, reason: str) -> None:
        """The server has let this worker leave."""
        if self._left is None:
            self._left = reason
            self._outstanding.fail_waiting(self._has_left())

    def _has_left(self) -> WorkerHasLeft:
        return WorkerHasLeft(
            f"worker {self.worker}: expected a client that takes part, given one that does not: {self._left}; "
            "make a new one with client() of a server that is open"
        )

    def go_back(self, clocks: Mapping[str, int]) -> None:
        """The shards went back to a snapshot: stand where it says, by matrix."""
        self._joining = None
        self.clocks = dict(clocks)
        self.observed_at_join.clear()

    # -- requests --------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """A call begins: wait for room for it. Raises WorkerHasLeft."""
        if self._left is not None:
            raise self._has_left()
        if self._joining is not None:
            await self.join()
        await self._outstanding.acquire()
        if self._heartbeats is not None:
            self._heartbeats.heard(self.worker)

    async def ask(self, shard: int, request: Any) -> Any:
        """A whole call of one request to one shard: most calls are that."""
        await self.begin()
        try:
            reply = self.links[shard].send(request)
            if not isinstance(reply, WaitingReply):
                return reply
            self.wait_alive((reply,))
            return await reply
        finally:
            self.release()

    def send(self, requests: Sequence[tuple[int, Any]], finish: Callable[[Sequence[Any]], T]) -> Call[T]:
        """Send one request to each shard; the call is under way until all have replied."""
        replies: list[Any] = []
        failure: BaseException | None = None
        for shard, request in requests:
            try:
                replies.append(self.links[shard].send(request))
            except BaseException as error:
                failure = failure or error
                if not isinstance(request, ClockRequest):  # Shards whose clocks differ would do so for ever.
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

    def wait_alive(self, waiting: Sequence[WaitingReply[Any]]) -> None:
        """A worker that waits for a reply sends nothing, and is not silent for that."""
        if (heartbeats := self._heartbeats) is not None:
            for one in waiting:
                heartbeats.waits(self.worker)
                one.when_settled(lambda: heartbeats.goes_on(self.worker))

    def _release_when_settled(self, waiting: Sequence[WaitingReply[Any]]) -> None:
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
