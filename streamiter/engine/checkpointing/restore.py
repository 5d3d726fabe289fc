"""The restore of a job: the choice of a checkpoint, and the states of the tasks from its snapshot.

:class:`JobRestore` is the start of one run: it shuts out older runs, chooses a checkpoint (:func:`choose_checkpoint`),
and compares the steps of its snapshot with those of the flow. Then each process turns the parts of the snapshot into
states of its tasks (:func:`states_of_tasks`). If the parallelism or the chains have changed, the states are
redistributed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, final

from streamiter.engine.checkpointing.commit import CommitRecord, JobTransaction
from streamiter.engine.checkpointing.reading_on import NOTHING
from streamiter.engine.checkpointing.redistribute import fetch_topic_batches, has_same_tasks, redistribute_states
from streamiter.engine.checkpointing.shares import OldJob, RepeatedFrames
from streamiter.engine.graph.graph import Step
from streamiter.engine.plan.job_settings import JobOptions, Restore
from streamiter.engine.plan.messages import Meeting
from streamiter.engine.states.stored import StoredDatabase, StoredFrames
from streamiter.engine.storage.flow_record import CommitPointer
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, StepState
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.engine.storage.store import CheckpointStore
from streamiter.engine.tasks.failures import reason_in
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import SERVICE, STEP, TASK, PartName, TaskStates, task_state
from streamiter.errors import CheckpointError, ConfigurationError, GraphError, did_you_mean
from streamiter.operators.definitions import changes
from streamiter.operators.operator import Operator, known_of
from streamiter.topics.source_and_sink import TopicSink
from streamiter.values.deferred import FRAME_FILE, PlainValue
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.plain_data import PlainData


def check_restore_option(flow: str, restore: object) -> None:
    if restore in ("last", None) or (isinstance(restore, int) and not isinstance(restore, bool)):
        return
    raise ConfigurationError(
        f'flow {flow!r}: expected restore="last", None or the number of a checkpoint, given {restore!r}; '
        "None starts without state"
    )


def choose_checkpoint(
    flow: str,
    restore: Restore,
    *,
    record: CommitRecord | None,
    pointer: CommitPointer | None,
    stored: Sequence[SnapshotHeader],
    commits_in: str | None,
) -> CheckpointId | None:
    """Return the checkpoint that the run starts from; None for no checkpoint.

    With transactional outputs, ``record``, the last commit record in the topic ``commits_in``, says what is committed;
    otherwise the store's ``pointer`` does. ``stored`` are the snapshots of the flow in the store.
    """
    if restore is None:
        return None
    if isinstance(restore, int):
        return _by_number(flow, restore, record, pointer, stored)
    if commits_in is None:
        if pointer is None and stored:
            raise CheckpointError(
                f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but does not say which one is "
                "committed; choose one with restore=<number>, or start without state with restore=None"
            )
        return None if pointer is None else pointer.committed
    if record is not None:
        return record.checkpoint
    if stored:
        raise CheckpointError(
            f"flow {flow!r}: the store has checkpoints ({numbers_of(stored)}), but {commits_in} has no commit record "
            "of this flow, so it is unknown what was committed: is it another server, or was the topic deleted? Resume "
            "from one with restore=<number> (later outputs are written twice), or start without state with restore=None"
        )
    return None


def _by_number(
    flow: str, number: int, record: CommitRecord | None, pointer: CommitPointer | None, stored: Sequence[SnapshotHeader]
) -> CheckpointId:
    found = [header.id for header in stored if header.id.number == number]
    if not found:
        raise CheckpointError(
            f"flow {flow!r}: expected a checkpoint {number} in the store, given {numbers_of(stored)}; choose "
            "one of these"
        )
    last = record.checkpoint if record is not None else None
    # Two runs may have used the same number; then one of them was never committed.
    committed = [each for each in found if _was_committed(each, last, pointer)]
    if not committed:
        raise CheckpointError(
            f"flow {flow!r}: checkpoint {number} was never committed: its run ended before, and its outputs "
            'were aborted, so outputs would be missing; resume with restore="last", or from one that was committed'
        )
    return committed[-1]


def _was_committed(checkpoint: CheckpointId, last: CheckpointId | None, pointer: CommitPointer | None) -> bool:
    """Return whether a checkpoint was committed, or may be; ``last`` is the checkpoint of the last commit record."""
    if last is not None and checkpoint.run == last.run and checkpoint.number <= last.number:
        return True
    return pointer is None or checkpoint == pointer.committed or pointer.has_led_to_commit(checkpoint)


def numbers_of(stored: Sequence[SnapshotHeader]) -> str:
    return ", ".join(str(header.id.number) for header in stored) or "none"


def stateful_steps(tasks: Sequence[Task]) -> dict[str, StepState]:
    """Return the steps with state by name.

    Raises GraphError for such a step without ``name=``: after an edit of the flow, another step could get its name.
    """
    steps: dict[str, StepState] = {}
    unnamed: dict[str, Step] = {}
    for task in tasks:
        for instance in task.instances:
            step = instance.step
            if not _keeps_state(instance):
                continue
            source = None if step.source is None or task.feeder is None else task.feeder.source
            steps[step.name] = StepState(
                step.parallelism,
                type(instance.operator).__name__,
                is_source=source is not None,
                definition=instance.definition() if source is None else {"kind": type(source).__name__},
                keeps=known_of(instance.operator).keeps if source is None else "where it has read to",
            )
            if not step.has_lasting_name:
                unnamed[step.name] = step
    _check_names(list(unnamed.values()))
    return steps


def _check_names(unnamed: Sequence[Step]) -> None:
    if not unnamed:
        return
    first, *others = unnamed
    also = f" (nor have {', '.join(f'{step.name!r} at {step.where}' for step in others)})" if others else ""
    raise GraphError(
        f"step {first.name!r}: expected a name= for a step that keeps state, given none{also}; checkpoints find state "
        "by the name of its step, and this one may go to another step when the flow is edited",
        where=first.where,
    )


def _keeps_state(instance: OperatorInstance) -> bool:
    step, operator = instance.step, instance.operator
    if step.source is not None or step.keys is not None or hasattr(operator, "on_event_timer"):
        return True
    if known_of(operator).is_stateless or type(operator) is TopicSink:
        return False
    return type(operator).snapshot is not Operator.snapshot


def check_steps(
    header: SnapshotHeader,
    steps: Mapping[str, StepState],
    changed_steps: Collection[str],
    *,
    tied: Mapping[str, object],
) -> None:
    """Raise CheckpointError unless the snapshot and the flow have the same steps with state, of fitting definitions.

    The steps in ``changed_steps`` may be in only one of them, or have another definition if they are not ``tied``:
    without state, a step of a loop would wait for what the steps around it have had already. ``tied`` has the loop of
    such a step, which is new as a whole if the snapshot has none of its steps.
    """
    old_loops = {id(loop) for name, loop in tied.items() if name in header.steps and loop is not None}
    bound = {name for name, loop in tied.items() if name in header.steps or id(loop) in old_loops}
    changed = {name: found for name in {**header.steps, **steps} if (found := _changes_of(name, header, steps))}
    if not (unconfirmed := [name for name in changed if name not in changed_steps or name in bound]):
        return
    gone, new = ([name for name in unconfirmed if changed[name] == [what]] for what in (_GONE, _NEW))
    told = [f"no {_names(gone)}, whose state it has"] if gone else []
    told += [f"{'a ' if len(new) == 1 else ''}new {_names(new)}, without state in it"] if new else []
    told += [
        f"a changed step {name!r} ({', '.join(changed[name])})" for name in unconfirmed if name not in (*gone, *new)
    ]
    is_all = not bound.isdisjoint(unconfirmed)
    remedy = "restore=None" if is_all else f"changed_steps={sorted({*unconfirmed, *changed_steps})}"
    of_steps = [header.steps[name].keeps for name in unconfirmed if name in header.steps]
    lost = "all state" if is_all else ", ".join(dict.fromkeys(of_steps)) or "nothing"
    error = CheckpointError(
        f"flow {header.flow!r}, checkpoint {header.id.number}: expected steps as they were when it was taken, given "
        f"{'; '.join(told)}: with the state of the checkpoint results would be wrong. "
        f"Write {'it' if len(unconfirmed) == 1 else 'them'} as before, under the same name, or start without that "
        f"state: {remedy}, which loses {lost}"
    )
    error.changes = {name: changed[name] for name in unconfirmed}
    raise error


def _changes_of(name: str, header: SnapshotHeader, steps: Mapping[str, StepState]) -> list[str]:
    if name in steps and name in header.steps:
        return changes(header.steps[name].definition, steps[name].definition)
    return [_NEW if name in steps else _GONE]


_GONE: Final = "it is gone"
_NEW: Final = "it is new"


def _names(steps: Sequence[str]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(repr, steps))}"


def steps_left_behind(
    header: SnapshotHeader, steps: Mapping[str, StepState], changed_steps: Collection[str]
) -> dict[str, bool]:
    """Return the steps of the snapshot whose state is dropped, and whether the state of their tasks is dropped, too.

    These are steps that are gone, sources, which start again, and steps with another definition: their tasks keep the
    records that wait. Other steps in ``changed_steps`` keep their state, so the option may stay in a program.
    """
    return {
        name: is_whole
        for name, step in header.steps.items()
        if name in changed_steps
        and ((is_whole := name not in steps or step.is_source) or _changes_of(name, header, steps))
    }


async def states_of_tasks(
    stored: StoredSnapshot,
    tasks: Sequence[Task],
    plain_data: PlainData,
    clock: Clock,
    *,
    dropped: Mapping[str, bool],
    queues: ExitStack,
    meeting: Meeting,
    tasks_of_all: int,
) -> TaskStates:
    """Return the state of each task and service of this process by its name. Deferred pieces are read when needed.

    ``dropped`` has the steps without their state, and whether the state of their tasks is dropped, too.
    If the parallelism or the chains of steps have changed in any process, the state is redistributed: each process
    reads the whole snapshot, and takes the shares of its own tasks. Then feedback that was in topics may wait in
    ``queues``, which the caller closes when the tasks have restored their states.
    """
    states: dict[str, PlainValue] = {}

    async def read(parts: Iterable[PartName]) -> None:
        for name in map(str, parts):
            content = await stored.content(name)
            states[name] = plain_data.decode_state(content, _frames_of(stored, name, plain_data))
            await asyncio.sleep(0)

    names = [
        name
        for name in map(PartName.of, stored.part_names())
        if name.step not in dropped or (name.kind != STEP and not dropped[name.step])
    ]
    for task in tasks:
        for instance in task.instances:
            if (before := stored.header.steps.get(instance.step.name)) and instance.step.name not in dropped:
                instance.adopt(before.definition)
    own = {(instance.step.name, task.first.subtask) for task in tasks for instance in task.instances}
    await read(name for name in names if name.kind == SERVICE or (name.step, name.subtask) in own)
    services: dict[str, Any] = {}
    # Each process of the old run has given a part; the numbers of the processes make the order the same for all.
    for part in sorted(name for name in names if name.kind == SERVICE):
        services.setdefault(f"{part.kind} {part.step}", []).append(states.pop(str(part)))
    is_same = has_same_tasks(OldJob.from_states(stored.header, states), tasks) and tasks_of_all == sum(
        name.kind == TASK for name in names
    )
    if not all(await meeting.reach("the tasks are compared", is_same)):
        await read(name for name in names if str(name) not in states and name.kind != SERVICE)
        old = OldJob.from_states(stored.header, states)
        first_steps = dict.fromkeys(task.first.step for task in tasks)
        shared_out = await redistribute_states(
            await fetch_topic_batches(old, first_steps, plain_data, clock, queues), tasks, plain_data, meeting
        )
        return {**shared_out, **services}
    found: TaskStates = dict(services)
    for task in tasks:
        steps = [instance.step.name for instance in task.instances]
        state = task_state(task.first.step.name, task.first.subtask, steps, states)
        assert state is not None
        found[task.name] = state
    return found


def _frames_of(stored: StoredSnapshot, part: str, plain_data: PlainData) -> Callable[[int], Iterable[PlainValue]]:
    def resolve(number: int) -> Iterable[PlainValue]:
        if (files := stored.files(part, number)) is not None:
            is_frames = any(file.name.endswith(FRAME_FILE) for file in files)
            return (StoredFrames if is_frames else StoredDatabase)(stored, part, number, files, plain_data)
        return RepeatedFrames(lambda: map(plain_data.decode, stored.frames(part, number)))

    return resolve


_log = logging.getLogger("streamiter.job")


@final
class JobRestore:
    """The start of one run: ``choose``; the tasks of all processes restore their states; ``confirm``."""

    def __init__(
        self,
        flow: str,
        store: CheckpointStore,
        transaction: JobTransaction | None,
        *,
        options: JobOptions,
        steps: Mapping[str, StepState],
        run_id: str,
    ) -> None:
        """``steps`` are the steps with state."""
        self._flow = flow
        self._store = store
        self._transaction = transaction
        self._options = options
        self._changed_steps = options.changed_steps
        self._steps = steps
        self._run_id = run_id
        self._record: CommitRecord | None = None
        self._pointer: CommitPointer | None = None
        self.checkpoint: CheckpointId | None = None
        """The checkpoint that the run starts from; None for no checkpoint."""
        self.highest_number = 0
        """The highest number of the existing checkpoints."""

    async def choose(self, tasks: Sequence[Task]) -> tuple[StoredSnapshot | None, dict[str, bool]]:
        """Shut out older runs; return the snapshot that the run starts from, which the caller closes, if there is one.

        The second result has the steps that start without their state, and whether the state of their tasks is
        dropped, too.
        """
        if self._transaction is not None:
            self._record = await self._last_commit(self._transaction)
        self._pointer = await self._claimed()
        stored = await self._store.list(self._flow)
        self.checkpoint = choose_checkpoint(
            self._flow,
            self._options.restore,
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
            return None, {}
        earlier_runs, on_restore = self._options.earlier_runs, self._options.on_restore
        if earlier_runs is not None and self.checkpoint.run.startswith(earlier_runs):
            self._changed_steps = ()
        if on_restore is not None:
            on_restore(self.checkpoint.number)
        snapshot = await self._opened(self.checkpoint, stored)
        with undone_on_failure(snapshot.close):
            return snapshot, self._dropped(snapshot.header, tasks)

    def _dropped(self, header: SnapshotHeader, tasks: Sequence[Task]) -> dict[str, bool]:
        tied = {
            each.step.name: each.step.loop
            for task in tasks
            for each in task.instances
            if each.step.loop is not None or not known_of(each.operator).starts_alone
        }
        check_steps(header, self._steps, self._changed_steps, tied=tied)
        dropped = steps_left_behind(header, self._steps, self._changed_steps)
        users = [
            (step.service.name, step.name)
            for step in (each.step for task in tasks for each in task.instances)
            if step.service is not None and step.service.name in header.steps
        ]
        # The numbers on a parameter server are the state of the steps that use it.
        kept = {service for service, step in users if step not in dropped}
        dropped |= {service: True for service, _ in users if service not in kept}
        self._warn(header, dropped)
        return dropped

    async def _last_commit(self, transaction: JobTransaction) -> CommitRecord | None:
        record = await transaction.open()
        try:
            return None if record is None else CommitRecord.read(record, transaction.commits_in)
        except CheckpointError as error:
            if self._options.restore == "last":
                raise
            _log.warning("flow %r: %s", self._flow, reason_in(self._flow, error))
            return None

    async def _claimed(self) -> CommitPointer | None:
        try:
            return await self._store.claim(self._flow, self._run_id)
        except CheckpointError as error:
            if self._options.restore is not None:
                raise
            _log.warning("flow %r: %s", self._flow, reason_in(self._flow, error))
            return await self._store.claim(self._flow, self._run_id, forget_committed=True)

    async def _opened(self, checkpoint: CheckpointId, stored: Sequence[SnapshotHeader]) -> StoredSnapshot:
        try:
            return await self._store.open(self._flow, checkpoint)
        except CheckpointError as error:
            # Newer checkpoints were never committed, so outputs between them and this one would be missing.
            older = [header for header in stored if header.id.number < checkpoint.number]
            another = (
                f"or resume from an older one with restore=<number>, there is {numbers_of(older)} (later outputs are "
                "written twice); "
                if older
                else ""
            )
            raise CheckpointError(
                f"flow {self._flow!r}: checkpoint {checkpoint}, from which the run should resume, cannot be read: "
                f"{reason_in(self._flow, error)}. Give the store that the last run had; {another}or start without "
                "state with restore=None (outputs that are committed stay)"
            ) from error

    def _warn(self, header: SnapshotHeader, dropped: Collection[str]) -> None:
        known = {*header.steps, *self._steps}
        for name in sorted(set(self._changed_steps) - known):
            _log.warning(
                "flow %r: changed_steps= names %r, which neither the flow nor checkpoint %d has as a step with state%s",
                self._flow,
                name,
                header.id.number,
                did_you_mean(name, sorted(known)),
            )
        if dropped:
            _log.warning(
                "flow %r: the state of %s is left behind, as changed_steps= says",
                self._flow,
                ", ".join(map(repr, dropped)),
            )

    async def confirm(self, to_read: int) -> None:
        """Make the chosen checkpoint the committed one, when all tasks have restored their states.

        A start that fails before, for example because of a wrong option, changes nothing. ``to_read`` is what a job
        has to read whose inputs had ended.
        """
        chosen, pointer = self.checkpoint, self._pointer
        if self._transaction is not None and (self._record is None or self._record.checkpoint != chosen):
            await self._transaction.begin_with(chosen)
        if chosen is None:
            await self._store.claim(self._flow, self._run_id, forget_committed=True)
        elif pointer is None or pointer.committed != chosen:
            await self._store.commit(self._flow, chosen)
        what = "starts without state" if chosen is None else f"resumes from checkpoint {chosen.number}"
        _log.info("flow %r: %s", self._flow, what)
        if chosen is not None and to_read == NOTHING:
            _log.warning(
                "flow %r: checkpoint %d is the last of a job whose inputs have all ended, so nothing is left to do; "
                "start without state with restore=None",
                self._flow,
                chosen.number,
            )
