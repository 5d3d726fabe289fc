"""Where a run begins: it takes over from older ones, chooses a checkpoint, and says so once all have taken over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, StepState
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, StoredSnapshot
from streamiter.clock import Clock
from streamiter.errors import CheckpointError
from streamiter.runtime.checkpointing.choice import Restore, chosen_checkpoint, numbers_of
from streamiter.runtime.checkpointing.commit_record import CommitRecord
from streamiter.runtime.checkpointing.restoring import check_steps, left_behind, states_of_tasks
from streamiter.runtime.checkpointing.transaction import JobTransaction
from streamiter.runtime.task import Task

__all__ = ["Beginning"]

_log = logging.getLogger("streamiter.job")


@final
class Beginning:
    """Of one run. ``find``, then the tasks take over their states, then ``settle``; ``close`` in any case."""

    def __init__(
        self,
        flow: str,
        store: CheckpointStore,
        transaction: JobTransaction | None,
        *,
        restore: Restore,
        changed_steps: Collection[str],
        steps: Mapping[str, StepState],
        run_id: str,
    ) -> None:
        """``steps`` are those that keep state."""
        self._flow = flow
        self._store = store
        self._transaction = transaction
        self._restore = restore
        self._changed_steps = changed_steps
        self._steps = steps
        self._run_id = run_id
        self._record: CommitRecord | None = None
        self._pointer: CommitPointer | None = None
        self._snapshot: StoredSnapshot | None = None
        self._queues = contextlib.ExitStack()
        """In which that waits which tasks take over."""
        self.checkpoint: CheckpointId | None = None
        """The one to go on from; None to begin anew."""
        self.highest_number = 0
        """Of the checkpoints that are there already."""

    async def find(
        self, tasks: Sequence[Task], plain_data: PlainData, clock: Clock
    ) -> dict[str, dict[str, Any]]:
        """Fence older runs, and load the states of the tasks, by their names; none to begin anew."""
        if self._transaction is not None:
            self._record = await self._last_commit(self._transaction)
        self._pointer = await self._claimed()
        stored = await self._store.list(self._flow)
        self.checkpoint = chosen_checkpoint(
            self._flow,
            self._restore,
            record=self._record,
            pointer=self._pointer,
            stored=stored,
            commits_in=None if self._transaction is None else self._transaction.commits_in,
        )
        numbers = [header.id.number for header in stored]
        if self._record is not None and self._record.checkpoint is not None:
            numbers.append(self._record.checkpoint.number)
        self.highest_number = max(numbers, default=0)
        if self.checkpoint is None:
            return {}
        snapshot = self._snapshot = await self._opened(self.checkpoint, stored)
        check_steps(snapshot.header, self._steps, self._changed_steps)
        dropped = left_behind(snapshot.header, self._steps, self._changed_steps)
        self._tell(snapshot.header, dropped)
        return await states_of_tasks(snapshot, tasks, plain_data, clock, dropped=dropped, queues=self._queues)

    async def _last_commit(self, transaction: JobTransaction) -> CommitRecord | None:
        record = await transaction.open()
        try:
            return None if record is None else CommitRecord.read(record, transaction.commits_in)
        except CheckpointError as error:
            if self._restore == "last":
                raise
            _log.warning("flow %r: %s", self._flow, error)
            return None

    async def _claimed(self) -> CommitPointer | None:
        try:
            return await self._store.claim(self._flow, self._run_id)
        except CheckpointError as error:
            if self._restore is not None:
                raise
            _log.warning("flow %r: %s", self._flow, error)
            return await self._store.claim(self._flow, self._run_id, begin_anew=True)

    async def _opened(self, checkpoint: CheckpointId, stored: Sequence[SnapshotHeader]) -> StoredSnapshot:
        try:
            return await self._store.open(self._flow, checkpoint)
        except CheckpointError as error:
            # Newer ones were never committed: what was written between is nowhere.
            older = [header for header in stored if header.id.number < checkpoint.number]
            another = (
                f"or go on from an older one with restore=<number>, there is {numbers_of(older)} (outputs since then "
                "come twice); "
                if older
                else ""
            )
            raise CheckpointError(
                f"flow {self._flow!r}: checkpoint {checkpoint}, the one to go on from, cannot be read: {error}. "
                f"Give the folder that the last run had; {another}or begin anew with restore=None (outputs that are "
                "committed stay)"
            ) from error

    def _tell(self, header: SnapshotHeader, dropped: Collection[str]) -> None:
        if unknown := [
            name for name in self._changed_steps if name not in header.steps and name not in self._steps
        ]:
            _log.warning(
                "flow %r: changed_steps= names %s, which neither the flow nor checkpoint %d has as a step with state",
                self._flow,
                ", ".join(map(repr, sorted(unknown))),
                header.id.number,
            )
        if dropped:
            _log.warning(
                "flow %r: the state of %s is left behind, as changed_steps= says",
                self._flow,
                ", ".join(map(repr, dropped)),
            )
        if header.job_ended:
            _log.warning(
                "flow %r: checkpoint %d is the last of a job whose inputs have all ended, so nothing is left to do; "
                "start with restore=None to begin anew",
                self._flow,
                header.id.number,
            )

    async def settle(self) -> None:
        """All tasks have taken over: only now it counts for the runs that come.

        Before, a start that failed, or was made with a wrong option, leaves all as it was.
        """
        await self.close()
        chosen, pointer = self.checkpoint, self._pointer
        if self._transaction is not None and (self._record is None or self._record.checkpoint != chosen):
            await self._transaction.begin_with(chosen)
        if chosen is None:
            await self._store.claim(self._flow, self._run_id, begin_anew=True)
        elif pointer is None or pointer.committed != chosen:
            await self._store.commit(self._flow, chosen)
        what = "begins anew" if chosen is None else f"goes on from checkpoint {chosen.number}"
        _log.info("flow %r: %s", self._flow, what)

    async def close(self) -> None:
        """Let go of the snapshot. May be called more than once."""
        self._queues.close()
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            await snapshot.close()
