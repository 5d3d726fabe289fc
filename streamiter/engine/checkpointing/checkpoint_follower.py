"""The part of each process in the checkpoints of a job: it restores its tasks, and takes their state at each barrier.

A *barrier* is a control record that divides a stream: a checkpoint has the effect of all records before it and of none
behind it. The coordinator, which is in process 0, decides; in each process a :class:`CheckpointFollower` does what it
says. They send these messages, with the number of the checkpoint:

=============  ====================================================================================================
``barrier``    to the followers: send it into the tasks that bring input (whether it suspends, whether state is kept)
``abandoned``  to the followers: drop the state; the barrier still passes the tasks (whether because it is late)
``committed``  to the followers: the positions before the barrier are committed
``passed``     to the coordinator: the barrier has passed all tasks of the process (whether any of them still runs)
``taken``      to the coordinator: their state (the file that has it, the positions of sources, an error or None)
=============  ====================================================================================================

A file has the state of each process but 0. The follower of process 0 answers with the state itself, since the
coordinator writes it into the file that names the others. What is decided once, at the start, goes by way of a
:class:`~streamiter.engine.plan.messages.Meeting`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import msgspec

from streamiter.engine.checkpointing.committed import PositionsByStep, id_of
from streamiter.engine.checkpointing.reading_on import RECORDS, read_on
from streamiter.engine.checkpointing.restore import states_of_tasks
from streamiter.engine.checkpointing.services import JobServices
from streamiter.engine.plan.messages import Exchange, Meeting
from streamiter.engine.storage.snapshot import CheckpointId, PartsFile, SnapshotHeader, SnapshotPart
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.engine.storage.store import Checkpoints, CheckpointStore, store_at
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import TakenParts, TaskStates, release_parts, release_taken
from streamiter.errors import ConfigurationError, StorageFull, StoreUnavailable, StreamiterError
from streamiter.operators.source import Positions
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_all, close_now
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier

_log = logging.getLogger("streamiter.job")

# A follower answers with these errors: the job continues without the checkpoint.
GIVEN_UP: Final = (StorageFull, StoreUnavailable)

CHOSEN: Final = "a checkpoint is chosen"
"""At this point of the meeting, followers learn the run, the checkpoint that it starts from, and what is dropped."""

ALL_OPEN: Final = "all steps are open"
BEGUN: Final = "the run has begun"
ALL_ENDED: Final = "all tasks have ended"
OVER: Final = "the run is over"
"""The later points of a run. The coordinator opens the second and the last one."""


@dataclass
class _Pending:
    checkpoint: int
    waiting_for: dict[str, None]
    """The names of the tasks that run and that the barrier has not passed."""
    keeps_state: bool
    """Whether the state of services belongs to the checkpoint."""
    parts: TakenParts = field(default_factory=dict)
    is_abandoned: bool = False
    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all tasks have passed the barrier on, also if the checkpoint was abandoned."""


@final
class CheckpointFollower:
    """Restores the tasks of one process, and takes their state; ``run`` is an asyncio task of the follower."""

    def __init__(
        self,
        flow: str,
        settings: Checkpoints | None,
        exchange: Exchange,
        meeting: Meeting,
        *,
        tasks: Sequence[Task],
        tasks_of_all: int,
        services: JobServices,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``tasks_of_all``: the number of tasks of all processes."""
        self._flow = flow
        self._settings = settings
        self._exchange = exchange
        self._process = exchange.own
        self._meeting = meeting
        self._tasks = tasks
        self._tasks_of_all = tasks_of_all
        self._services = services
        self._plain_data = plain_data
        self._clock = clock
        self._run_id: str | None = None
        self._store: CheckpointStore | None = None
        self.states: TaskStates = {}
        """In process 0, the states that a job without checkpoints starts from."""
        self.snapshot: StoredSnapshot | None = None
        """In process 0, the coordinator has opened it."""
        self._queues = contextlib.ExitStack()
        """Queues that are part of the states of tasks."""
        self._to_read = RECORDS
        self._pending: _Pending | None = None
        self._taking: set[asyncio.Task[None]] = set()
        """Collect and store the parts of a checkpoint; more than one only while those that are given up end."""
        self._is_closed = False
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue(1)
        """The first error of state that cannot be taken or stored; it ends the job."""
        self._lag = LagReports(flow, tasks)
        exchange.handle("checkpoint barrier", self._start)
        exchange.handle("checkpoint abandoned", self._abandon)
        exchange.handle("checkpoint committed", lambda process, number: self._lag.committed())

    # -- start -----------------------------------------------------------------------------------------

    async def open(self) -> TaskStates:
        """Wait until older runs are shut out and a checkpoint is chosen; return the states of the tasks."""
        run, chosen, dropped = await self._meeting.until(CHOSEN)
        if run is None:
            return self.states
        if self._process:
            await self._follow(run, chosen)
        if self.snapshot is None:
            return {}
        states = await states_of_tasks(
            self.snapshot,
            self._tasks,
            self._plain_data,
            self._clock,
            dropped=dropped,
            queues=self._queues,
            meeting=self._meeting,
            tasks_of_all=self._tasks_of_all,
        )
        if self.snapshot.header.job_ended:
            self._to_read = await read_on(self.snapshot.header, states, self._tasks, self._meeting)
        return states

    async def _follow(self, run: str, chosen: tuple[int, str] | None) -> None:
        if self._settings is None or self._settings.store is None:
            raise ConfigurationError(
                f"flow {self._flow!r}: expected checkpoints= in process {self._process} as in process 0, given none; "
                "start all processes with the same options"
            )
        self._run_id = run
        self._store = store_at(self._settings.store)
        await self._store.follow(self._flow, run, self._process)
        if chosen is not None:
            self.snapshot = await self._store.open(self._flow, CheckpointId(*chosen))

    def restored(self) -> tuple[PositionsByStep, int]:
        """All tasks have restored their states: return where the sources begin, and what a finished job has to read."""
        self._close_snapshot()
        self.states = {}
        return self._positions(lambda task: task.positions), self._to_read

    # -- while the job runs ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait until cancelled. Raises the error of state that cannot be taken or stored."""
        raise await self._failed.get()

    def _start(self, process: int, checkpoint: int, suspend: bool, keeps_state: bool) -> None:
        """Send a barrier into the tasks of this process."""
        if self._is_closed:  # The coordinator has not heard yet that this job is aborted.
            return
        self._cancel()  # The coordinator does not wait for an earlier checkpoint any more.
        pending = self._begin(checkpoint, keeps_state)
        barrier = CheckpointBarrier(checkpoint, suspend=suspend)
        for task in self._tasks:
            if not task.ended and (task.feeder is not None or task.may_hold_back_barriers):
                task.expect_barrier(barrier)
        taking = asyncio.create_task(self._take(pending), name=f"checkpoint {checkpoint} of {self._flow}")
        self._taking.add(taking)
        taking.add_done_callback(self._has_taken)
        self._check()

    def _begin(self, checkpoint: int, keeps_state: bool) -> _Pending:
        """Return the pending checkpoint. Its barrier may have passed a task already, from another process."""
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint:
            running = dict.fromkeys(task.name for task in self._tasks if not task.ended)
            pending = self._pending = _Pending(checkpoint, running, keeps_state)
            if keeps_state:
                self._services.begin_checkpoint(checkpoint)
        return pending

    def _cancel(self) -> None:
        for taking in self._taking:
            taking.cancel()

    def _has_taken(self, taking: asyncio.Task[None]) -> None:
        self._taking.discard(taking)
        if not taking.cancelled() and (error := taking.exception()) is not None and not self._failed.full():
            self._failed.put_nowait(error)

    async def _take(self, pending: _Pending) -> None:
        """Collect the state of all tasks when the barrier has passed them; store it, or give it to the coordinator."""
        error = None
        try:
            await self._collect(pending)
            positions = self._positions(lambda task: task.barriers.positions)
            if not self._process:
                state, pending.parts = pending.parts, {}
            else:
                try:
                    state = msgspec.to_builtins(await self._save(pending))
                except GIVEN_UP as failure:
                    state, error = None, [[isinstance(failure, kind) for kind in GIVEN_UP].index(True), str(failure)]
        finally:
            release_taken(pending.parts)
        self._answer("taken", pending.checkpoint, state, positions, error)

    async def _collect(self, pending: _Pending) -> None:
        await pending.passed.wait()
        for task in self._tasks:
            if task.name not in pending.parts:
                pending.parts[task.name] = await task.barriers.parts()
        if pending.keeps_state:
            pending.parts.update(await self._services.parts(pending.checkpoint))
        self._pending = None

    async def _save(self, pending: _Pending) -> PartsFile | None:
        if self._store is None or self._run_id is None:
            return None
        checkpoint = CheckpointId(pending.checkpoint, self._run_id)
        header = SnapshotHeader(self._flow, checkpoint, self._clock.now_ms(), steps={})
        parts = [part for of_task in pending.parts.values() for part in of_task]
        return await self._store.save_parts(header, parts, self._process)

    def acknowledge(self, task: str, checkpoint: int, parts: list[SnapshotPart]) -> None:
        """Take the state of a task that has passed a barrier; it is dropped if the checkpoint was abandoned.

        A barrier may come through a channel before the coordinator has said that it begins.
        """
        pending = self._begin(checkpoint, self._settings is not None)
        if pending.is_abandoned:
            release_parts(parts)
        else:
            pending.parts[task] = parts
        pending.waiting_for.pop(task, None)
        self._check()

    def ended(self, task: Task) -> None:
        """Do not wait for a task that has ended."""
        if self._pending is not None:
            self._pending.waiting_for.pop(task.name, None)
            self._check()

    def _check(self) -> None:
        pending = self._pending
        if pending is not None and not pending.waiting_for and not pending.passed.is_set():
            pending.passed.set()
            runs = any(not task.ended or task.suspended for task in self._tasks)
            self._answer("passed", pending.checkpoint, runs)

    def _abandon(self, process: int, checkpoint: int, is_late: bool) -> None:
        late = self.delayed_by(checkpoint)
        if is_late and late and self._process:
            _log.warning(
                "flow %r: checkpoint %d is given up; in process %d its barrier has not passed %s",
                self._flow,
                checkpoint,
                self._process,
                some(late),
            )
        self._cancel()
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint or pending.is_abandoned:
            return
        pending.is_abandoned = True
        release_taken(pending.parts)
        self._services.abandon_checkpoint(checkpoint)
        if not pending.passed.is_set():
            for task in self._tasks:
                if not task.ended:
                    task.abandon(checkpoint)

    def delayed_by(self, checkpoint: int) -> list[str]:
        """Return the tasks that the barrier of this checkpoint has not passed."""
        pending = self._pending
        return [] if pending is None or pending.checkpoint != checkpoint else [*pending.waiting_for]

    def _positions(self, of_task: Callable[[Task], Positions]) -> PositionsByStep:
        positions: PositionsByStep = {}
        for task in self._tasks:
            if task.feeder is not None:
                positions.setdefault(task.first.step.name, []).append(dict(of_task(task)))
        return positions

    def _answer(self, kind: str, *contents: object) -> None:
        self._exchange.send(0, f"checkpoint {kind}", *contents)

    # -- end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Store nothing more. May be called more than once."""
        self._is_closed = True
        self._cancel()
        store, self._store = self._store, None
        await close_all(
            [self._close_snapshot, self._have_ended, self._lag.close, *([] if store is None else [store.close])]
        )

    async def _have_ended(self) -> None:
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _close_snapshot(self) -> None:
        snapshot, self.snapshot = self.snapshot, None
        close_now([self._queues.close, *([] if snapshot is None else [snapshot.close])])


@final
class LagReports:
    """Reports the committed positions of sources to their servers, for tools that show lag.

    It runs apart from the job: neither records nor checkpoints wait for a report, and a failed report is only logged.
    """

    def __init__(self, flow: str, tasks: Sequence[Task]) -> None:
        self._flow = flow
        self._tasks = [task for task in tasks if task.feeder is not None]
        self._due: list[Positions] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._has_failed = False

    def committed(self) -> None:
        """Report the positions at the last barrier; they replace positions that are not yet reported."""
        self._due = [dict(task.barriers.positions) for task in self._tasks]
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._run(), name=f"lag of {self._flow}")

    async def _run(self) -> None:
        while self._due is not None:
            due, self._due = self._due, None
            for task, positions in zip(self._tasks, due, strict=True):
                await self._report(task, positions)

    async def close(self) -> None:
        """Report nothing more."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)

    async def _report(self, task: Task, positions: Positions) -> None:
        if task.feeder is None or task.ended or not positions:
            return
        try:
            await task.feeder.report_positions(id_of(self._flow), positions)
        except Exception as error:  # An error of a user's own source is no reason to end the job.
            if not self._has_failed:
                what = error if isinstance(error, StreamiterError) else f"{type(error).__name__}: {error}"
                step = task.first.step.name
                _log.warning("flow %r, step %r: its lag cannot be reported: %s", self._flow, step, what)
            self._has_failed = True


def some(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    shown = list(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
