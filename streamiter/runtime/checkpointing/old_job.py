"""How far a step has come, and what that means when its subtasks become others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotHeader
from streamiter.deferred import entries_of
from streamiter.errors import CheckpointError
from streamiter.records import Batch, DataBatch, EndOfInput, EpochWatermark
from streamiter.runtime.checkpointing.task_parts import FEEDBACK, STEP, TASK, PartName
from streamiter.runtime.feedback import TopicRange
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS, WatermarkTracker
from streamiter.runtime.output import Broadcast, Forward, Partitioning
from streamiter.runtime.port import PortOrigin

__all__ = [
    "OldJob",
    "OldPort",
    "OldTask",
    "QueueFrames",
    "SubtaskProgress",
    "WaitingBatch",
    "batches_held",
    "batches_queued",
    "behind_all",
    "deal",
    "dealt_to",
    "entry_of",
    "gate_watermark",
    "joined",
    "old_ports",
    "origins",
]


class SubtaskProgress(NamedTuple):
    """What a subtask has passed on of epochs and ends."""

    watermark: int
    data_ended: bool
    ended: bool

    def behind_loop(self, watermark: int) -> SubtaskProgress:
        """Return the progress that a reader outside the subtask's iteration sees: the end only, and no epochs."""
        return SubtaskProgress(watermark, self.ended, self.ended)


NOTHING_YET = SubtaskProgress(BEFORE_ALL_EPOCHS, data_ended=False, ended=False)


def joined(standings: Collection[SubtaskProgress]) -> SubtaskProgress:
    """Where all go on from: none of what was still to come from any of them is left out.

    >>> joined([SubtaskProgress(3, False, False), SubtaskProgress(4, False, False), SubtaskProgress(1, True, True)])
    SubtaskProgress(watermark=3, data_ended=False, ended=False)
    """
    going_on = [standing for standing in standings if not standing.data_ended]
    furthest = max(standing.watermark for standing in standings)
    return SubtaskProgress(
        min((standing.watermark for standing in going_on), default=furthest),
        all(standing.data_ended for standing in standings),
        all(standing.ended for standing in standings),
    )


def behind_all(upstream: Iterable[SubtaskProgress]) -> SubtaskProgress:
    """That of a step that was not there, behind these: what they have passed on is over."""
    standings = list(upstream)
    return joined(standings) if standings else NOTHING_YET


class WaitingBatch(NamedTuple):
    """A batch that waited, as it is or encoded.

    Batches that waited before a task, one by one and as often as needed; none is in memory for longer than its turn.
    """

    level: int
    """The watermark that came before it on its channel: every record of it has a later epoch."""
    epoch: int
    reader: int
    """The subtask before which it waited."""
    size: int
    """Records in it."""
    given: Batch | None
    content: bytes | None

    def records(self, plain_data: PlainData) -> Batch:
        """The batch itself."""
        if self.given is not None:
            return self.given
        assert self.content is not None
        return plain_data.decode_batch(self.content)


def batches_held(items: Iterable[tuple[str, Any, Any]], level: int, reader: int) -> Iterator[WaitingBatch]:
    """Of what a gate held of one port: kind, payload and epoch."""
    for kind, payload, epoch in items:
        if kind == DataBatch.kind:
            yield WaitingBatch(level, epoch, reader, len(payload), payload, None)
        elif kind == EpochWatermark.kind:
            level = epoch


def batches_queued(frames: Iterable[Any], level: int, reader: int) -> Iterator[WaitingBatch]:
    """Of a queue, which may have control records among its batches."""
    for entry in entries_of(frames):
        kind, *rest = entry
        if kind == DataBatch.kind:
            epoch, count, content = rest
            yield WaitingBatch(level, epoch, reader, count, None, content)
        elif kind == EpochWatermark.kind:
            [level] = rest


def entry_of(waiting: WaitingBatch, plain_data: PlainData) -> tuple[Any, ...]:
    """A batch as the snapshot of a queue has it."""
    content = waiting.content
    if content is None:
        assert waiting.given is not None
        content = plain_data.encode_batch(waiting.given)
    return (DataBatch.kind, waiting.epoch, waiting.size, content)


@final
class QueueFrames:
    """The decoded frames of a queue, made anew whenever one goes through them."""

    def __init__(self, make_entries: Callable[[], Iterator[tuple[Any, ...]]]) -> None:
        self._make_entries = make_entries

    def __iter__(self) -> Iterator[list[tuple[Any, ...]]]:
        for entry in self._make_entries():
            yield [entry]


def deal(
    batches: Iterable[tuple[int, Batch]], partitioning: Partitioning, subtasks: int
) -> Iterator[tuple[int, Batch]]:
    """Each batch, given with the subtask that had it, or its parts, with the subtask that gets it.

    Where partitioning leaves it open, records are dealt out in turn, from the first subtask on; what went from subtask
    i to subtask i goes to i modulo the new number. What all had, all get, once.

    >>> from streamiter.runtime.output import Rebalance
    >>> list(deal([(0, ["a", "b"]), (1, ["c"])], Rebalance(), 2))
    [(0, ['a']), (1, ['b']), (0, ['c'])]
    >>> list(deal([(0, ["a"]), (2, ["b"])], Forward(), 2))
    [(0, ['a']), (0, ['b'])]
    >>> list(deal([(0, ["a"]), (1, ["a"])], Broadcast(), 3))
    [(0, ['a']), (1, ['a']), (2, ['a'])]

    Who gets what of batches that waited, by the partitioning of the edge they came by.
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


def dealt_to(
    subtask: int,
    waiting: Iterable[WaitingBatch],
    partitioning: Partitioning,
    subtasks: int,
    plain_data: PlainData,
) -> Iterator[WaitingBatch]:
    """What one of the new subtasks gets of batches that waited; nothing is decoded that goes where it is anyway."""
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
                yield WaitingBatch(each.level, each.epoch, each.reader, len(part), part, None)


@dataclass(frozen=True, slots=True)
class OldTask:
    """One task of that job."""

    subtask: int
    state: Mapping[str, Any]
    logged: Iterable[tuple[int, Iterable[Any]]]
    """What came back to it between its barrier and the barrier's return, by port."""

    @property
    def standing(self) -> SubtaskProgress:
        """How far all its steps had come."""
        state = self.state
        return SubtaskProgress(state["watermark"], bool(state["interior input ended"]), bool(state["ended"]))


@dataclass(frozen=True, slots=True)
class OldJob:
    """What is deferred in the states can be gone through more than once.

    A snapshot by the steps and tasks of the job that it was taken of.
    """

    where: str
    """Which checkpoint of which flow it is, for errors."""
    tasks: Mapping[str, list[OldTask]]
    """By the step at their head, in the order of subtasks."""
    instances: Mapping[str, list[Any]]
    """The states of the operators by step, in the order of subtasks."""
    heads: Mapping[str, str]
    """For each step the one at the head of its task."""

    @classmethod
    def of(cls, header: SnapshotHeader, states: Mapping[str, Any]) -> OldJob:
        """``states`` by the names of their parts."""
        kinds: dict[str, dict[str, dict[int, Any]]] = {STEP: {}, TASK: {}, FEEDBACK: {}}
        for name, state in states.items():
            part = PartName.of(name)
            kinds[part.kind].setdefault(part.step, {})[part.subtask] = state
        tasks: dict[str, list[OldTask]] = {}
        heads: dict[str, str] = {}
        for head, by_subtask in kinds[TASK].items():
            logs = kinds[FEEDBACK].get(head, {})
            tasks[head] = [
                OldTask(each, state, logs.get(each, ())) for each, state in sorted(by_subtask.items())
            ]
            heads.update(dict.fromkeys(tasks[head][0].state["steps"], head))
        instances = {
            step: [state for _, state in sorted(by_subtask.items())]
            for step, by_subtask in kinds[STEP].items()
        }
        return cls(f"flow {header.flow!r}, checkpoint {header.id.number}", tasks, instances, heads)

    def standings(self, step: str) -> list[SubtaskProgress] | None:
        """How far each subtask of a step had come; None for a step that was not there."""
        head = self.heads.get(step)
        return None if head is None else [task.standing for task in self.tasks[head]]

    def refused(self, step: str, why: str) -> CheckpointError:
        """The error that says what cannot be shared out anew."""
        return CheckpointError(f"{self.where}, step {step!r}: {why}")

    def not_between(self, step: str, parallelism: int, what: str) -> CheckpointError:
        """The same where another checkpoint would do."""
        return self.refused(
            step,
            f"its {self.parallelism(step)} subtasks cannot become {parallelism} here: {what}; start it with "
            f'parallelism={self.parallelism(step)} as it was, and take another checkpoint, as stop("suspend") does',
        )

    def parallelism(self, step: str) -> int:
        """The number of its subtasks; 0 for a step that was not there."""
        head = self.heads.get(step)
        return len(self.instances.get(step, ())) if head is None else len(self.tasks[head])


@dataclass(frozen=True, slots=True)
class OldPort:
    """What had come by one channel, and what of it waited.

    The ports of a task as its snapshot has them.
    """

    reader: int
    """The subtask it was one of."""
    origin: PortOrigin
    watermark: int
    """As far as its records had been handled."""
    data_ended: bool
    """That it has ended was heard."""
    ended: bool
    data_epoch: int
    held: list[tuple[str, Any, Any]]
    """Kind, payload and epoch of what was taken from the channel."""
    aside: Iterable[Any]
    """The frames of what waited for its epoch's turn."""
    logged: Iterable[Any]
    """The frames of what came back in the loop until the barrier did."""

    def batches(self) -> Iterator[WaitingBatch]:
        """All batches that waited, in order."""
        level = self.watermark
        yield from batches_held(self.held, level, self.reader)
        for kind, _, epoch in self.held:
            level = epoch if kind == EpochWatermark.kind else level
        yield from batches_queued(self.aside, level, self.reader)
        yield from batches_queued(self.logged, level, self.reader)

    @property
    def in_topic(self) -> str | None:
        """The name of the topic in which what came back lies; None where it is here."""
        for entry in entries_of(self.logged):
            if (lying := TopicRange.of(entry)) is not None:
                return lying.topic
        return None

    @property
    def end_epoch(self) -> int | None:
        """The epoch of its end, where that waited."""
        return next((epoch for kind, _, epoch in self.held if kind == EndOfInput.kind), None)


def old_ports(task: OldTask) -> list[OldPort]:
    """Those of one task; none of a source."""
    gate = task.state["gate"]
    aside = {port: frames for port, frames, _ in gate["aside"]}
    logged = dict(task.logged)
    held: dict[int, list[tuple[str, Any, Any]]] = {}
    for port, *item in gate["held"]:
        held.setdefault(port, []).append(tuple(item))
    return [
        OldPort(
            task.subtask,
            PortOrigin(*origin),
            gate["watermarks"]["watermarks"][index],
            bool(gate["data_ended"][index]),
            bool(gate["ended"][index]) and bool(gate["data_ended"][index]),
            gate["data_epochs"][index],
            held.get(index, []),
            aside.get(index, ()),
            logged.get(index, ()),
        )
        for index, origin in enumerate(gate["ports"])
        if origin is not None
    ]


def origins(task: OldTask) -> list[PortOrigin | None]:
    """Where each of its ports had its records from."""
    return [None if origin is None else PortOrigin(*origin) for origin in task.state["gate"]["ports"]]


def gate_watermark(task: OldTask) -> int:
    """The watermark that all its ports had brought."""
    state = task.state["gate"]["watermarks"]
    tracker = WatermarkTracker(len(state["watermarks"]))
    tracker.restore(state)
    return tracker.watermark
