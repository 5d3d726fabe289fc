"""What a server does for its shards: it notices losses, brings back the last snapshot, and has silent workers leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

from streamiter.clock import Clock
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import Partitioning
from streamiter.parameter_server.recovery import KeptSnapshots, SnapshotEvery, StartingPoint
from streamiter.parameter_server.requests import Create
from streamiter.parameter_server.transport.ray.cluster import imported_ray
from streamiter.parameter_server.transport.ray.connections import ended
from streamiter.parameter_server.transport.ray.protocol import Beginning, HostProcess

__all__ = ["Supervisor"]

# A worker that is silent is noticed later than its timeout by two looks at most.
_LOOKS_IN_TIMEOUT: Final = 4

# As long as Ray takes to start a process again, more or less.
_AGAIN_S: Final = 0.2

_log: Final = logging.getLogger(__name__)


@final
class Supervisor:
    """Begins a new generation on all hosts whenever one of them was started again. In the server's event loop.

    ``on_silent`` is told of workers that were taken for dead, and why. ``workers_here`` gives the workers of this
    process, which are all that is known of workers when all shards are lost at once. Snapshots stay in Ray's object
    store.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[Any],
        clock: Clock,
        *,
        snapshots: SnapshotEvery | None,
        heartbeat_timeout_s: float | None,
        on_silent: Callable[[int, str], None],
        workers_here: Callable[[], tuple[int, ...]],
    ) -> None:
        self._name = name
        self._hosts = hosts
        self._clock = clock
        self._takes_snapshots = snapshots is not None
        self._timeout_s = heartbeat_timeout_s
        self._on_silent = on_silent
        self._workers_here = workers_here
        self._ray = imported_ray()
        self.generation = 0
        self.kept = KeptSnapshots[Any](len(hosts))
        self._beginning = [host.begin.remote(Beginning(0), None) for host in hosts]
        self._processes: list[HostProcess] = []
        """Which process each host is, to notice when it is another."""
        self._unrestorable: str | None = None
        """Why there is nothing to go back to any more, though there was."""
        self._recovering = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._timed: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.created: dict[str, Create] = {}
        """What the server itself has made: all that is known when all shards are lost at once."""

    def start(self) -> None:
        """Begin to watch; nothing happens if it does already. In the event loop."""
        if not self._tasks:
            self._tasks.append(_task(self._watch_all()))
            if self._timeout_s is not None:
                self._timed.append(_task(self._watch_workers(self._timeout_s)))

    async def stop(self) -> None:
        """Watch no more, and have the hosts let everybody go."""
        self._is_stopping = True
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):
                await asyncio.gather(*[host.end.remote() for host in self._hosts])
        for task in self._timed:
            task.cancel()
        await ended({*self._tasks, *self._timed})

    @property
    def _goes_on(self) -> bool:
        # A call after its end would start another Ray.
        return not self._is_stopping and bool(self._ray.is_initialized())

    # -- lost shards -----------------------------------------------------------------------------------

    async def _watch_all(self) -> None:
        self._processes = await asyncio.gather(*self._beginning)
        for shard in range(len(self._hosts)):
            self._tasks.append(_task(self._watch(shard)))
            if self._takes_snapshots:
                self._tasks.append(_task(self._collect(shard)))

    async def _watch(self, shard: int) -> None:
        while self._goes_on:
            instance = self._processes[shard].instance
            await self._hosts[shard].until_replaced.remote(instance)
            async with self._recovering:
                if not self._is_stopping and self._processes[shard].instance == instance:
                    await self._recover_or_refuse(shard)

    async def _recover_or_refuse(self, shard: int) -> None:
        lost = {shard}
        try:
            await self._recover(lost)
        except Exception as error:
            # Nobody may be kept waiting for a snapshot that is not to be had; there is none to go back to next time.
            latest = self.kept.latest
            point = "the initial values" if latest is None else f"snapshot {latest.number}"
            self._unrestorable = f"{point} could not be restored ({_in_short(error)})"
            self.kept.replace(None)
            _log.warning("%s: %s", self._name, self._unrestorable, exc_info=error)
            await self._recover(lost)

    async def _recover(self, lost: set[int]) -> None:
        """Begin a generation; adds to ``lost`` all shards that were started again."""
        generation = self.generation = self.generation + 1
        latest = self.kept.latest
        self.kept.replace(latest)
        found = await asyncio.gather(*[host.present.remote() for host in self._hosts])
        lost.update(number for number, present in enumerate(found) if present is None)
        survivors = [present for present in found if present is not None]
        made = dict(self.created)
        for matrices, _ in survivors:
            made |= {create.matrix.name: create for create in matrices}
        if latest is not None:
            made |= {create.matrix.name: create for create in latest.matrices}
        loss = await self._loss(lost, [create.matrix for create in made.values()])
        creates = tuple(made.values())
        if latest is not None:
            workers = _still_there(latest, [there for _, there in survivors])
            to = f"all shards went back to snapshot {latest.number}"
            beginning = Beginning(generation, creates, workers, latest.number, loss=f"{loss}; {to}")
        elif self._takes_snapshots and self._unrestorable is None:
            workers = _of_any([there for _, there in survivors]) if survivors else self._workers_here()
            to = "there is no snapshot yet, so all shards went back to their initial values"
            beginning = Beginning(generation, creates, workers, loss=f"{loss}; {to}")
        else:
            beginning = Beginning(generation, creates, refusal=f"{loss}; {self._why_all_is_lost()}")
        states = latest.states if latest is not None else (None,) * len(self._hosts)
        self._processes = await asyncio.gather(
            *[host.begin.remote(beginning, state) for host, state in zip(self._hosts, states, strict=True)]
        )

    async def _loss(self, lost: Iterable[int], matrices: Sequence[Matrix]) -> str:
        """Which shards were lost, how, and what they had."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        running = {node["NodeID"] for node in nodes if node["Alive"]}
        ends = []
        for number in sorted(lost):
            process = self._processes[number]
            where = f"node {process.node_address} ({process.node_id[:8]})"
            end = (
                f"process {process.process_id} on {where} has ended"
                if process.node_id in running
                else f"{where} is gone"
            )
            ends.append(f"shard {number} ({end})")
        names = [
            repr(matrix.name)
            for matrix in matrices
            if any(block.shard in lost for block in Partitioning(matrix, len(self._hosts)).blocks)
        ]
        return (
            f"{self._name}: expected all shards to run, given the loss of {' and '.join(ends)} with "
            f"{'blocks of ' + ', '.join(names) if names else 'no matrices'}"
        )

    def _why_all_is_lost(self) -> str:
        if self._unrestorable is not None:
            return f"{self._unrestorable}, so all parameters are lost; make a new server, and start the workers again"
        return (
            "no snapshots are taken, so all parameters are lost; start the flow again, which goes on from its last "
            "checkpoint; without a flow restore a state of your own with server.restore(…), or have snapshots taken: "
            'ParameterServer(snapshots=SnapshotEvery(clocks=10, of="…"))'
        )

    # -- snapshots -------------------------------------------------------------------------------------

    async def _collect(self, shard: int) -> None:
        """Snapshots of one shard, as they are taken."""
        host, after, generation = self._hosts[shard], 0, 0
        # Not to be asked again by Ray: a state that was lost would be "taken again" at another moment.
        once = {"num_returns": 2, "max_task_retries": 0}
        while self._goes_on:
            part, state = host.next_snapshot.options(**once).remote(generation, after)
            try:
                taken = await part
            except self._ray.exceptions.RayActorError:
                await self._clock.sleep(_AGAIN_S)  # Its process has died.
                taken = None
            if generation != self.generation:
                generation = self.generation
                after = self.kept.latest.number if self.kept.latest is not None else 0
            elif taken is not None:
                self.kept.add(shard, replace(taken, state=state))
                after = taken.number

    # -- workers ---------------------------------------------------------------------------------------

    async def _watch_workers(self, timeout_s: float) -> None:
        suspects: set[int] = set()
        while True:
            await self._clock.sleep(timeout_s / _LOOKS_IN_TIMEOUT)
            if not self._goes_on:
                return
            silent_s: dict[int, float] = {}
            for of_shard in await asyncio.gather(*[host.silent_s.remote() for host in self._hosts]):
                for worker, ago_s in of_shard.items():
                    silent_s[worker] = min(ago_s, silent_s.get(worker, ago_s))
            silent = {worker for worker, ago_s in silent_s.items() if ago_s >= timeout_s}
            # A shard, or this process, that was busy for long hears late: what it has yet to hear is heard by the
            # next look.
            for worker in silent & suspects:
                await self._have_leave(
                    worker, f"nothing was heard of it for {timeout_s:g} s (its heartbeat timeout)"
                )
            suspects = silent

    async def _have_leave(self, worker: int, reason: str) -> None:
        await asyncio.gather(*[host.leave.remote(worker, reason) for host in self._hosts])
        self._on_silent(worker, reason)


def _task(watch: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(watch)


def _of_any(present: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """The workers that any shard knows."""
    return tuple(dict.fromkeys(worker for workers in present for worker in workers))


def _in_short(error: Exception) -> str:
    """An error of a shard's process in one line, without its traceback."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _still_there(latest: StartingPoint[Any], present: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """The workers of a snapshot, but those that have left since, if any shard is there that knows."""
    if not present:
        return latest.workers
    there = _of_any(present)
    return tuple(worker for worker in latest.workers if worker in there)
