"""The part of a process other than 0 in the checkpoints of a run: it restores its tasks, and stores their parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import CheckpointId, PartsFile, SnapshotHeader
from streamiter.checkpoints.snapshot_file import StoredSnapshot
from streamiter.checkpoints.store import Checkpoints, CheckpointStore, store_at
from streamiter.clock import Clock
from streamiter.closing import close_all, close_now
from streamiter.deferred import PlainValue
from streamiter.errors import ConfigurationError
from streamiter.operators.source import Positions
from streamiter.records import CheckpointBarrier
from streamiter.runtime.checkpointing.barriers import Barriers, TakenParts
from streamiter.runtime.checkpointing.checkpoint_messages import GIVEN_UP, AllProgress, PositionsByStep
from streamiter.runtime.checkpointing.checkpointer import LagReports
from streamiter.runtime.checkpointing.reading_on import read_on
from streamiter.runtime.checkpointing.restore import states_of_tasks
from streamiter.runtime.checkpointing.shares import SubtaskProgress
from streamiter.runtime.checkpointing.task_barriers import TaskStates, release_parts
from streamiter.runtime.messages import Messages
from streamiter.runtime.task import Task

_log = logging.getLogger("streamiter.job")

# What process 0 says at a restore, while this process has read nothing of it: restore, unchanged, progress, reads on.
_SAID_AT_START: Final = 4


@final
class FollowingCheckpointer:
    """Follows the checkpoints of process 0; ``run`` is an asyncio task of the job's supervisor."""

    def __init__(
        self,
        flow: str,
        settings: Checkpoints | None,
        process: int,
        messages: Messages,
        *,
        tasks: Sequence[Task],
        tasks_of_all: int,
        barriers: Barriers,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``process`` is the number of this process; ``tasks_of_all`` the number of tasks of all processes."""
        self._flow = flow
        self._settings = settings
        self._process = process
        self._messages = messages
        self._tasks = tasks
        self._tasks_of_all = tasks_of_all
        self._barriers = barriers
        self._plain_data = plain_data
        self._clock = clock
        self._run_id: str | None = None
        self._store: CheckpointStore | None = None
        self._snapshot: StoredSnapshot | None = None
        self._queues = contextlib.ExitStack()
        self._said: asyncio.Queue[list[PlainValue]] = asyncio.Queue(_SAID_AT_START)
        self._taking: set[asyncio.Task[None]] = set()
        """Collect and store the parts of a checkpoint; more than one only while those that are given up end."""
        self._is_closed = False
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue(1)
        """The first error of state that cannot be taken or stored; it ends the job."""
        self._lag = LagReports(flow, tasks)
        for kind in ("restore", "unchanged", "progress", "reads on"):
            messages.handle(f"checkpoint {kind}", lambda process, *contents: self._said.put_nowait(list(contents)))
        messages.handle("checkpoint barrier", self._begin)
        messages.handle("checkpoint abandoned", self._abandon)
        messages.handle("checkpoint committed", lambda process, number: self._lag.committed(self._lag.positions()))

    # -- start -----------------------------------------------------------------------------------------

    async def open(self) -> TaskStates:
        """Wait until process 0 has shut out older runs and chosen a checkpoint; return the states of the tasks."""
        run, chosen, dropped = await self._said.get()
        if run is None:
            return {}
        if self._settings is None or self._settings.store is None:
            raise ConfigurationError(
                f"flow {self._flow!r}: expected checkpoints= in process {self._process} as in process 0, given none; "
                "start all processes with the same options"
            )
        self._run_id = run
        self._barriers.keep_services()
        self._store = store_at(self._settings.store)
        await self._store.follow(self._flow, run, self._process)
        if chosen is None:
            return {}
        self._snapshot = await self._store.open(self._flow, CheckpointId(*chosen))
        states = await states_of_tasks(
            self._snapshot,
            self._tasks,
            self._plain_data,
            self._clock,
            dropped=dropped,
            queues=self._queues,
            agreement=self,
            tasks_of_all=self._tasks_of_all,
        )
        if self._snapshot.header.job_ended:
            await read_on(self._snapshot.header, states, self._tasks, self)
        return states

    async def is_unchanged(self, found: bool) -> bool:
        """Return whether the tasks of all processes are as in the snapshot; ``found``: those of this process."""
        self._answer("found", 0, found)
        [unchanged] = await self._said.get()
        return bool(unchanged)

    async def progress(self, find: Callable[[], AllProgress]) -> AllProgress:
        """Return the progress that process 0 has found: this process does not have a subtask of each step."""
        [found] = await self._said.get()
        return {step: [SubtaskProgress(*each) for each in of_step] for step, of_step in found.items()}

    async def to_read(self, found: int) -> int:
        """Return the most that a finished job has to read in any process, as process 0 has found."""
        self._answer("more", 0, found)
        [to_read] = await self._said.get()
        assert isinstance(to_read, int)
        return to_read

    async def restored(self) -> None:
        """All tasks have restored their states."""
        self._close_snapshot()
        self._answer("restored", 0, self._positions(lambda task: task.positions))

    # -- while the job runs ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Report lag until cancelled. Raises the error of state that cannot be taken or stored."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lag.run(), name=f"lag of {self._flow}")
            group.create_task(self._raise_failure(), name=f"failure of {self._flow}")

    async def _raise_failure(self) -> None:
        raise await self._failed.get()

    def _begin(self, process: int, checkpoint: int, suspend: bool) -> None:
        if self._is_closed:  # Process 0 has not heard yet that this job is aborted.
            return
        self._cancel()  # Process 0 does not wait for an earlier checkpoint any more.
        self._barriers.start(CheckpointBarrier(checkpoint, suspend=suspend))
        taking = asyncio.create_task(self._take(checkpoint), name=f"checkpoint {checkpoint} of {self._flow}")
        self._taking.add(taking)
        taking.add_done_callback(self._has_taken)

    def _cancel(self) -> None:
        for taking in self._taking:
            taking.cancel()

    def _has_taken(self, taking: asyncio.Task[None]) -> None:
        self._taking.discard(taking)
        if not taking.cancelled() and (error := taking.exception()) is not None and not self._failed.full():
            self._failed.put_nowait(error)

    async def _take(self, checkpoint: int) -> None:
        taken = await self._barriers.collect()
        positions = self._positions(lambda task: task.barriers.positions)
        file = error = None
        try:
            file = await self._save(checkpoint, taken)
        except GIVEN_UP as failure:
            error = [[isinstance(failure, kind) for kind in GIVEN_UP].index(True), str(failure)]
        finally:
            release_parts(part for of_task in taken.values() for part in of_task)
        self._answer("stored", checkpoint, None if file is None else msgspec.to_builtins(file), positions, error)

    async def _save(self, checkpoint: int, taken: TakenParts) -> PartsFile | None:
        if self._store is None or self._run_id is None:
            return None
        header = SnapshotHeader(self._flow, CheckpointId(checkpoint, self._run_id), self._clock.now_ms(), steps={})
        return await self._store.save_parts(header, [part for parts in taken.values() for part in parts], self._process)

    def _abandon(self, process: int, checkpoint: int, is_late: bool) -> None:
        if is_late and (late := self._barriers.delayed_by(checkpoint)):
            _log.warning(
                "flow %r: checkpoint %d is given up; in process %d its barrier has not passed %s",
                self._flow,
                checkpoint,
                self._process,
                late,
            )
        self._barriers.abandon(checkpoint)
        self._cancel()

    def _positions(self, of_task: Callable[[Task], Positions]) -> PositionsByStep:
        positions: PositionsByStep = {}
        for task in self._tasks:
            if task.feeder is not None:
                positions.setdefault(task.first.step.name, []).append(dict(of_task(task)))
        return positions

    def _answer(self, question: str, checkpoint: int, *contents: PlainValue) -> None:
        self._messages.send(0, f"checkpoint {question}", checkpoint, *contents)

    # -- end -------------------------------------------------------------------------------------------

    async def finish(self, *, suspended: bool) -> None:
        """Do nothing: process 0 takes the last checkpoint."""

    async def close(self) -> None:
        """Store nothing more. May be called more than once."""
        self._is_closed = True
        self._cancel()
        store, self._store = self._store, None
        await close_all([self._close_snapshot, self._have_ended, *([] if store is None else [store.close])])

    async def _have_ended(self) -> None:
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _close_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        close_now([self._queues.close, *([] if snapshot is None else [snapshot.close])])
