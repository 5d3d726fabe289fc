"""The job of a snapshot: its tasks, the progress of its steps, and the batches that waited in it.

When a job restarts with another parallelism, or with other chains, its state is *redistributed*: each new task gets its
share of the old tasks' state. This module reads the old state. :class:`OldJob` has the snapshot by steps and tasks,
:class:`SubtaskProgress` the epochs and ends that a subtask had passed on, :class:`OldPort` the batches that waited at
an input of a task. :func:`deal` and :func:`batches_for` share out such batches as their edge shares out records.
:mod:`~streamiter.runtime.checkpointing.gate_shares` and :mod:`~streamiter.runtime.checkpointing.redistribute` make the
new state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotHeader
from streamiter.deferred import PlainValue, entries_of
from streamiter.errors import CheckpointError
from streamiter.records import Batch, DataBatch, EndOfInput, EpochWatermark
from streamiter.runtime.checkpointing.task_barriers import FEEDBACK, STEP, TASK, PartName
from streamiter.runtime.feedback import TopicRange
from streamiter.runtime.order import BEFORE_ALL_EPOCHS
from streamiter.runtime.output import Broadcast, Forward, Partitioning
from streamiter.runtime.port_log import PortOrigin


class SubtaskProgress(NamedTuple):
    """The epochs and ends that a subtask has passed on."""

    watermark: int
    """The last epoch watermark."""
    data_ended: bool
    """Whether it has passed on the end of the data."""
    ended: bool
    """Whether it has ended."""

    def behind_loop(self, watermark: int) -> SubtaskProgress:
        """Return the progress that a reader outside the subtask's iteration sees: the end only, and no epochs."""
        return SubtaskProgress(watermark, self.ended, self.ended)


NO_PROGRESS = SubtaskProgress(BEFORE_ALL_EPOCHS, data_ended=False, ended=False)


def join_progress(all_progress: Collection[SubtaskProgress]) -> SubtaskProgress:
    """Return the progress that all new subtasks start with; it omits nothing that an old subtask had yet to pass on.

    >>> ended = SubtaskProgress(1, data_ended=True, ended=True)
    >>> join_progress([SubtaskProgress(3, False, False), SubtaskProgress(4, False, False), ended])
    SubtaskProgress(watermark=3, data_ended=False, ended=False)
    """
    unfinished = [progress for progress in all_progress if not progress.data_ended]
    furthest = max(progress.watermark for progress in all_progress)
    return SubtaskProgress(
        min((progress.watermark for progress in unfinished), default=furthest),
        all(progress.data_ended for progress in all_progress),
        all(progress.ended for progress in all_progress),
    )


class WaitingBatch(NamedTuple):
    """A batch that waited before a task."""

    level: int
    """The watermark before it on its channel: all its records have a later epoch."""
    epoch: int
    """Its epoch."""
    reader: int
    """The subtask before which it waited."""
    size: int
    """Records in it."""
    content: Batch | bytes
    """The batch itself, or its encoding."""

    def records(self, plain_data: PlainData) -> Batch:
        """Return the batch, decoded if necessary."""
        return plain_data.decode_batch(self.content) if isinstance(self.content, bytes) else self.content


def waiting_batches(entries: Iterable[PlainValue], level: int, reader: int) -> Iterator[WaitingBatch]:
    """Give the batches that an inbox held of one port, or those of a queue; control records may be between them."""
    for kind, *rest in entries:
        if kind == DataBatch.kind:
            epoch, size, content = rest
            yield WaitingBatch(level, epoch, reader, size, content)
        elif kind == EpochWatermark.kind:
            [level] = rest


def entry_of(waiting: WaitingBatch, plain_data: PlainData) -> tuple[PlainValue, ...]:
    """Return a batch as an entry of a queue's snapshot."""
    content = waiting.content
    if not isinstance(content, bytes):
        content = plain_data.encode_batch(content)
    return (DataBatch.kind, waiting.epoch, waiting.size, content)


@final
class RepeatedFrames:
    """The decoded frames of a deferred piece; they are made again in each iteration."""

    def __init__(self, make: Callable[[], Iterator[PlainValue]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[PlainValue]:
        return self._make()


def deal(
    batches: Iterable[tuple[int, Batch]], partitioning: Partitioning, subtasks: int
) -> Iterator[tuple[int, Batch]]:
    """Give each batch, or its parts, with the new subtask that gets it; ``batches`` have the old subtask that had it.

    Records are shared out by the partitioning of their edge. Without a rule, they go to the subtasks in
    turn, from the first one on. After forward partitioning (from subtask i to subtask i) they go to subtask i modulo
    the new number. After a broadcast, each subtask gets them once.

    >>> from streamiter.runtime.output import Rebalance
    >>> list(deal([(0, ["a", "b"]), (1, ["c"])], Rebalance(), 2))
    [(0, ['a']), (1, ['b']), (0, ['c'])]
    >>> list(deal([(0, ["a"]), (2, ["b"])], Forward(), 2))
    [(0, ['a']), (0, ['b'])]
    >>> list(deal([(0, ["a"]), (1, ["a"])], Broadcast(), 3))
    [(0, ['a']), (1, ['a']), (2, ['a'])]
    """
    if isinstance(partitioning, Forward):
        for owner, batch in batches:
            yield owner % subtasks, batch
    elif isinstance(partitioning, Broadcast):
        for owner, batch in batches:
            if owner == 0:
                yield from ((subtask, batch) for subtask in range(subtasks))
    else:
        split = partitioning.splitter(0, subtasks)
        for _, batch in batches:
            yield from split(batch)


def batches_for(
    subtask: int, waiting: Iterable[WaitingBatch], partitioning: Partitioning, subtasks: int, plain_data: PlainData
) -> Iterator[WaitingBatch]:
    """Give the waiting batches of one new subtask; a batch is decoded only if it must be split."""
    if isinstance(partitioning, (Forward, Broadcast)) or subtasks == 1:
        for each in waiting:
            is_its_own = each.reader % subtasks == subtask
            if isinstance(partitioning, Broadcast):
                is_its_own = each.reader == 0
            if is_its_own:
                yield each
        return
    split = partitioning.splitter(0, subtasks)
    for each in waiting:
        parts: Sequence[tuple[int, Batch]] = list(split(each.records(plain_data)))
        for owner, part in parts:
            if owner == subtask:
                yield WaitingBatch(each.level, each.epoch, each.reader, len(part), part)


@dataclass(frozen=True, slots=True)
class OldTask:
    """One task of the old job."""

    subtask: int
    """Its number among the tasks of its step."""
    state: Mapping[str, PlainValue]
    """Its state in the snapshot."""
    logged: Iterable[tuple[int, Iterable[PlainValue]]]
    """The feedback between its barrier and the return of the barrier, by port."""

    @property
    def progress(self) -> SubtaskProgress:
        """The progress of all its steps."""
        state = self.state
        return SubtaskProgress(state["watermark"], bool(state["interior input ended"]), bool(state["ended"]))


@dataclass(frozen=True, slots=True)
class OldJob:
    """A snapshot by the steps and tasks of its job. Deferred pieces in the states can be read more than once."""

    where: str
    """The flow and the checkpoint, for error messages."""
    tasks: Mapping[str, list[OldTask]]
    """The tasks by the step at their head, in the order of subtasks."""
    instances: Mapping[str, list[PlainValue]]
    """The states of the operators by step, in the order of subtasks."""
    heads: Mapping[str, str]
    """For each step, the step at the head of its task."""

    @classmethod
    def from_states(cls, header: SnapshotHeader, states: Mapping[str, PlainValue]) -> OldJob:
        """Return the job of a snapshot; ``states`` are by the names of their parts."""
        kinds: dict[str, dict[str, dict[int, PlainValue]]] = {STEP: {}, TASK: {}, FEEDBACK: {}}
        for name, state in states.items():
            part = PartName.of(name)
            kinds[part.kind].setdefault(part.step, {})[part.subtask] = state
        tasks: dict[str, list[OldTask]] = {}
        heads: dict[str, str] = {}
        for head, by_subtask in kinds[TASK].items():
            logs = kinds[FEEDBACK].get(head, {})
            tasks[head] = [OldTask(each, state, logs.get(each, ())) for each, state in sorted(by_subtask.items())]
            heads.update(dict.fromkeys(tasks[head][0].state["steps"], head))
        instances = {
            step: [state for _, state in sorted(by_subtask.items())] for step, by_subtask in kinds[STEP].items()
        }
        return cls(f"flow {header.flow!r}, checkpoint {header.id.number}", tasks, instances, heads)

    def progress_of(self, step: str) -> list[SubtaskProgress] | None:
        """Return the progress of each subtask of a step; None for a new step."""
        head = self.heads.get(step)
        return None if head is None else [task.progress for task in self.tasks[head]]

    def refusal(self, step: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}, step {step!r}: {why}")

    def refusal_at_this_point(self, step: str, parallelism: int, what: str) -> CheckpointError:
        """Return the error for state that cannot be redistributed in this checkpoint, but could be in another."""
        return self.refusal(
            step,
            f"its {self.parallelism(step)} subtasks cannot become {parallelism} here: {what}; start it with "
            f'parallelism={self.parallelism(step)} as it was, and take another checkpoint, as stop("suspend") does',
        )

    def parallelism(self, step: str) -> int:
        head = self.heads.get(step)
        return len(self.instances.get(step, ())) if head is None else len(self.tasks[head])


@dataclass(frozen=True, slots=True)
class OldPort:
    """A port of an old task: one of its inputs, with the batches that waited there."""

    reader: int
    """The subtask that the port belongs to."""
    origin: PortOrigin
    """The step and the subtask that its records come from."""
    watermark: int
    """The last epoch watermark before its unhandled records."""
    data_ended: bool
    """Whether the subtask has been told of the end of its data."""
    ended: bool
    """Whether the subtask has been told of its end."""
    data_epoch: int
    """The last epoch of its data, in the state of the inbox."""
    held: list[PlainValue]
    """The items that were taken from the channel."""
    later_epochs: Iterable[PlainValue]
    """The frames of batches that waited for the turn of their epoch."""
    logged: Iterable[PlainValue]
    """The frames of the feedback before the return of the barrier."""

    def batches(self) -> Iterator[WaitingBatch]:
        """Give all waiting batches, in order."""
        entries = chain(self.held, entries_of(self.later_epochs), entries_of(self.logged))
        return waiting_batches(entries, self.watermark, self.reader)

    @property
    def in_topic(self) -> str | None:
        """The name of the topic that has its feedback; None if the snapshot has it."""
        for entry in entries_of(self.logged):
            if (topic_range := TopicRange.from_plain(entry)) is not None:
                return topic_range.topic
        return None

    @property
    def end_epoch(self) -> int | None:
        """The epoch of its end, if that waited; None otherwise."""
        return next((rest[0] for kind, *rest in self.held if kind == EndOfInput.kind), None)


def old_ports(task: OldTask) -> list[OldPort]:
    """Return the ports of a task; a source has none."""
    inbox, logged = task.state["inbox"], dict(task.logged)
    return [
        OldPort(
            task.subtask,
            PortOrigin(*port["origin"]),
            port["reached"],
            bool(port["data ended"]),
            bool(port["ended"] and port["data ended"]) and inbox["end"] is None,
            port["data epoch"],
            [*port["held"], *([inbox["end"]] if port["ended"] and inbox["end"] is not None else [])],
            () if port["later"] is None else port["later"][0],
            logged.get(index, ()),
        )
        for index, port in enumerate(inbox["ports"])
        if port["origin"] is not None
    ]


def origins(task: OldTask) -> list[PortOrigin | None]:
    origins = [port["origin"] for port in task.state["inbox"]["ports"]]
    return [None if origin is None else PortOrigin(*origin) for origin in origins]


def inbox_watermark(task: OldTask) -> int:
    ports = task.state["inbox"]["ports"]
    unfinished = [port["reached"] for port in ports if not port["data ended"]]
    return min(unfinished, default=max((port["reached"] for port in ports), default=BEFORE_ALL_EPOCHS))
