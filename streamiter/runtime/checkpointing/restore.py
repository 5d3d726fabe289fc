"""The restore of a job: which snapshot, and its parts as states of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, StepState
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, StoredSnapshot
from streamiter.clock import Clock
from streamiter.errors import CheckpointError, ConfigurationError
from streamiter.runtime.checkpointing.commit import CommitRecord, JobTransaction
from streamiter.runtime.checkpointing.old_job import OldJob
from streamiter.runtime.checkpointing.redistribute import fits, redistributed, with_batches
from streamiter.runtime.checkpointing.task_parts import SERVICE, PartName, task_state
from streamiter.runtime.task import Task

__all__ = [
    "JobRestore",
    "Restore",
    "check_restore_option",
    "chosen_checkpoint",
]


Restore = Literal["last"] | int | None
"""The last checkpoint that was committed (none, if this is the first run), one by its number, or none."""


def check_restore_option(flow: str, restore: object) -> None:
    """Raise ConfigurationError for anything else.

    Which checkpoint a run goes on from.
    """
    if restore in ("last", None) or (isinstance(restore, int) and not isinstance(restore, bool)):
        return
    raise ConfigurationError(
        f'flow {flow!r}: expected restore="last", None or the number of a checkpoint, given {restore!r}; '
        "None begins anew"
    )


def chosen_checkpoint(
    flow: str,
    restore: Restore,
    *,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
    commits_in: str | None,
) -> CheckpointId | None:
    """The checkpoint to go on from, None to begin anew.

    ``record`` is the last commit record of ``commits_in``, the topic that is the truth where there are
    transactional outputs; otherwise it is the store's ``pointer``. ``stored`` is what the store has of the flow.
    """
    if restore is None:
        return None
    if isinstance(restore, int):
        return _by_number(flow, restore, record, pointer, stored)
    return _committed(flow, record, pointer, stored, commits_in)


def _committed(
    flow: str,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
    commits_in: str | None,
) -> CheckpointId | None:
    if commits_in is None:
        if pointer is None and stored:
            raise CheckpointError(
                f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but does not say which one is "
                "committed; choose one with restore=<number>, or begin anew with restore=None"
            )
        return None if pointer is None else pointer.committed
    if record is not None:
        return record.checkpoint
    if stored:
        raise CheckpointError(
            f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but {commits_in} has no commit record "
            "of this flow, so nobody knows what was committed: is it another server, or was the topic deleted? Go on "
            "from one with restore=<number> (outputs since then come twice), or begin anew with restore=None"
        )
    return None


def _by_number(
    flow: str,
    number: int,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
) -> CheckpointId:
    found = [header.id for header in stored if header.id.number == number]
    if not found:
        raise CheckpointError(
            f"flow {flow!r}: expected a checkpoint {number} in the store, given {numbers_of(stored)}; choose "
            "one of these"
        )
    last = record.checkpoint if record is not None else None
    # Two runs may have used a number: one of them was never committed.
    committed = [each for each in found if _was_committed(each, last, pointer)]
    if not committed:
        raise CheckpointError(
            f"flow {flow!r}: checkpoint {number} was never committed: its run ended before, and what it had written "
            'was taken back, so outputs would be missing; go on with restore="last", or from one that was committed'
        )
    return committed[-1]


def _was_committed(
    checkpoint: CheckpointId, last: CheckpointId | None, pointer: CommitPointer | None
) -> bool:
    """``last`` is what the last commit record names; where nobody knows what was committed, all may be."""
    if last is not None and checkpoint.run == last.run and checkpoint.number <= last.number:
        return True
    return pointer is None or checkpoint == pointer.committed or pointer.has_led_to_commit(checkpoint)


def numbers_of(stored: Sequence[SnapshotHeader]) -> str:
    """For messages: which checkpoints there are."""
    return ", ".join(str(header.id.number) for header in stored) or "none"


def check_steps(
    header: SnapshotHeader, steps: Mapping[str, StepState], changed_steps: Collection[str]
) -> None:
    """Raise CheckpointError unless the snapshot is one of the flow that has these steps.

    Of ``changed_steps`` the state may be left behind, or begin anew.

    From a stored snapshot to the states that the tasks of this job take over.
    """
    where = f"flow {header.flow!r}, checkpoint {header.id.number}"
    for name in header.steps:
        if name not in steps and name not in changed_steps:
            raise CheckpointError(
                f"{where}: it has state of step {name!r}, which the flow does not have ({_names(steps)}); give the "
                f"step that name again, or leave its state behind: changed_steps=[{name!r}]"
            )
    for name in steps:
        if name not in header.steps and name not in changed_steps:
            raise CheckpointError(
                f"{where}: it has no state of step {name!r} (it has {_names(header.steps)}); give the step the name "
                f"it had, or let it begin without state: changed_steps=[{name!r}]"
            )


def left_behind(
    header: SnapshotHeader, steps: Mapping[str, StepState], changed_steps: Collection[str]
) -> list[str]:
    """The steps whose state is not taken over: those that are gone, and sources, which begin where they are told to.

    A step that is on both sides keeps its state, so that the option does no harm where it is left in a program.
    """
    return [
        name
        for name, step in header.steps.items()
        if name in changed_steps and (name not in steps or step.is_source)
    ]


def _names(steps: Mapping[str, StepState]) -> str:
    return ", ".join(map(repr, steps)) or "none"


async def states_of_tasks(
    stored: StoredSnapshot,
    tasks: Sequence[Task],
    plain_data: PlainData,
    clock: Clock,
    *,
    dropped: Collection[str],
    queues: ExitStack,
) -> dict[str, dict[str, Any]]:
    """The state of each task and service by its name. What is deferred is read from ``stored`` as they take it over.

    Where the parallelism of steps has changed, or other steps are chained, it is shared out anew; what was fed back
    through topics may wait in ``queues`` then, to be closed when the tasks have taken over.
    """
    states: dict[str, Any] = {}
    for name in stored.part_names():
        if PartName.of(name).step in dropped:
            continue
        content = await stored.content(name)
        states[name] = plain_data.decode_state(content, functools.partial(_Again, stored, name, plain_data))
        await asyncio.sleep(0)
    services = {
        f"{part.kind} {part.step}": states.pop(name)
        for name in list(states)
        if (part := PartName.of(name)).kind == SERVICE
    }
    old = OldJob.of(stored.header, states)
    if not fits(old, tasks):
        heads = dict.fromkeys(task.first.step for task in tasks)
        shared_out = await redistributed(
            await with_batches(old, heads, plain_data, clock, queues), tasks, plain_data
        )
        return {**shared_out, **services}
    found: dict[str, dict[str, Any]] = dict(services)
    for task in tasks:
        steps = [instance.step.name for instance in task.instances]
        state = task_state(task.first.step.name, task.first.subtask, steps, states)
        assert state is not None
        found[task.name] = state
    return found


@final
class _Again:
    """The decoded frames of a deferred piece, read anew whenever one goes through them."""

    def __init__(self, stored: StoredSnapshot, part: str, plain_data: PlainData, number: int) -> None:
        self._stored = stored
        self._part = part
        self._plain_data = plain_data
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return map(self._plain_data.decode, self._stored.frames(self._part, self._number))


_log = logging.getLogger("streamiter.job")


@final
class JobRestore:
    """Of one run. ``find``, then the tasks take over their states, then ``settle``; ``close`` in any case.

    Where a run begins: it takes over from older ones, chooses a checkpoint, and says so once all have taken over.
    """

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
