"""A worker's part in a server: it joins, sends requests, and leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

from streamiter.errors import RolledBack, WorkerHasLeft
from streamiter.parameter_server.call import Call
from streamiter.parameter_server.heartbeats import Heartbeats
from streamiter.parameter_server.outstanding import Outstanding
from streamiter.parameter_server.requests import Clock, Join, Leave, Raise
from streamiter.parameter_server.transport.link import ShardLink
from streamiter.parameter_server.waiting import Waiting, until_settled

__all__ = ["Participation"]

T = TypeVar("T")


@final
class Participation:
    """Where a worker stands, and its ways to all shards, on which so many calls may be under way at a time.

    A call to several shards is ``begin``, then ``send``, which gives its room back when all have replied.
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
        self._joining = [link.send(Join(self.worker)) for link in self.links]
        if not any(isinstance(reply, Waiting) for reply in self._joining):
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
                link.send(Raise(self.worker, clocks))

    async def join(self) -> None:
        """Return when the shards know of this worker. Whoever stops waiting for that leaves it to the next call."""
        if (joining := self._joining) is None:
            return
        for reply in joining:
            if isinstance(reply, Waiting):
                await until_settled(reply)
        if self._joining is joining:  # Somebody else may have waited for the same.
            self._stand_together(
                [reply.result() if isinstance(reply, Waiting) else reply for reply in joining]
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
                replies.append(link.send(Leave(self.worker, reason)))
            except Exception as error:
                failure = failure or error
        try:
            for reply in replies:
                if isinstance(reply, Waiting):
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
            if not isinstance(reply, Waiting):
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
                if not isinstance(request, Clock):  # Shards whose clocks differ would do so for ever.
                    break
        if failure is not None:
            for reply in replies:
                if isinstance(reply, Waiting):
                    reply.give_up()
            self.release()
            raise failure
        waiting = [reply for reply in replies if isinstance(reply, Waiting)]
        self.wait_alive(waiting)
        self._release_when_settled(waiting)
        return Call(replies, finish)

    def wait_alive(self, waiting: Sequence[Waiting[Any]]) -> None:
        """A worker that waits for a reply sends nothing, and is not silent for that."""
        if (heartbeats := self._heartbeats) is not None:
            for one in waiting:
                heartbeats.waits(self.worker)
                one.when_settled(lambda: heartbeats.goes_on(self.worker))

    def _release_when_settled(self, waiting: Sequence[Waiting[Any]]) -> None:
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
