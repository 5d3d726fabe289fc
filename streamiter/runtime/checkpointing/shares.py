"""The inputs of a job that restarts with another parallelism, or with other chains.

The state of an input is what was not handled, in order, and how far each channel had come. The log of a new port is the
merge of the logs of the old ports, filtered by the partitioning of the edge. :class:`OldJob` has a snapshot by its
steps and tasks, :class:`OldPort` one input of an old task, :class:`SubtaskProgress` the epochs and ends that a subtask
had passed on. :class:`InboxShares` makes the states of the new inboxes of a step, and :class:`EdgeSharing` shares out
what an operator itself had kept of its inputs.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotHeader
from streamiter.deferred import PlainValue, entries_of
from streamiter.errors import CheckpointError
from streamiter.operators.operator import Boundary, Operator
from streamiter.records import Batch, DataBatch, EndOfData, EndOfInput, EpochWatermark, control_to_plain
from streamiter.runtime.checkpointing.task_barriers import FEEDBACK, STEP, TASK, PartName
from streamiter.runtime.feedback import TopicRange
from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step, edge_key, leaves_loop
from streamiter.runtime.order import BEFORE_ALL_EPOCHS
from streamiter.runtime.output import Broadcast, Forward, Partitioning
from streamiter.runtime.port_log import Port, PortOrigin


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
    waiting: Iterable[WaitingBatch], partitioning: Partitioning, subtasks: int, plain_data: PlainData
) -> Iterator[tuple[int, WaitingBatch]]:
    """Give each waiting batch, or its parts, with the new subtask that gets it. A batch is decoded only if it is split.

    Records are shared out by the partitioning of their edge. Without a rule, they go to the subtasks in
    turn, from the first one on. After forward partitioning (from subtask i to subtask i) they go to subtask i modulo
    the new number. After a broadcast, each subtask gets them once.

    >>> from streamiter.runtime.output import Rebalance
    >>> def dealt(partitioning: Partitioning, *batches: list[str]) -> list[tuple[int, str]]:
    ...     waiting = [WaitingBatch(0, 0, reader, len(batch), batch) for reader, batch in enumerate(batches)]
    ...     return [(owner, "".join(each.content)) for owner, each in deal(waiting, partitioning, 2, PlainData())]
    >>> dealt(Rebalance(), ["a", "b"], ["c"]), dealt(Forward(), ["a"], [], ["b"]), dealt(Broadcast(), ["a"], ["a"])
    ([(0, 'a'), (1, 'b'), (0, 'c')], [(0, 'a'), (1, ''), (0, 'b')], [(0, 'a'), (1, 'a')])
    """
    split = None if isinstance(partitioning, (Forward, Broadcast)) else partitioning.splitter(0, subtasks)
    for each in waiting:
        if isinstance(partitioning, Broadcast):
            if each.reader == 0:
                yield from ((subtask, each) for subtask in range(subtasks))
        elif split is None or subtasks == 1:
            yield each.reader % subtasks, each
        else:
            parts: Sequence[tuple[int, Batch]] = list(split(each.records(plain_data)))
            yield from ((owner, each._replace(size=len(part), content=part)) for owner, part in parts)


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


Queue = tuple[Iterable[PlainValue], list[tuple[int, int]]]
"""The batches of later epochs at a port, and their number by epoch: the state of ``LaterEpochs``."""


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
    later: Queue | None
    """The batches that waited for the turn of their epoch."""
    logged: Iterable[PlainValue]
    """The frames of the feedback before the return of the barrier."""

    def batches(self) -> Iterator[WaitingBatch]:
        """Give all waiting batches, in order."""
        return chain(self.arrived_early(), self.others())

    def arrived_early(self) -> Iterator[WaitingBatch]:
        """Give the batches that waited for the turn of their epoch."""
        return waiting_batches(entries_of(self.later[0] if self.later else ()), self.watermark, self.reader)

    def others(self) -> Iterator[WaitingBatch]:
        return waiting_batches(chain(self.held, entries_of(self.logged)), self.watermark, self.reader)

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
            port["later"],
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


@final
class EdgeSharing:
    """Shares out batches that the operators of one step had kept: the engine's ``Sharing``."""

    def __init__(self, step: Step, plain_data: PlainData) -> None:
        self._step = step
        self._plain_data = plain_data

    @property
    def parallelism(self) -> int:
        return self._step.parallelism

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Share out batches; see :class:`~streamiter.operators.operator.Sharing`."""
        partitioning = self._partitioning(input_name)
        if isinstance(partitioning, Broadcast) and len({sum(map(len, of_subtask)) for of_subtask in batches}) > 1:
            raise _different_records(input_name)
        kept = (WaitingBatch(0, 0, reader, len(each), each) for reader, of_one in enumerate(batches) for each in of_one)
        dealt: list[list[Batch]] = [[] for _ in range(self.parallelism)]
        for subtask, waiting in deal(kept, partitioning, self.parallelism, self._plain_data):
            if waiting.size:
                dealt[subtask].append(waiting.records(self._plain_data))
        return dealt

    def _partitioning(self, input_name: str) -> Partitioning:
        edges = [edge for edge in self._step.inputs if edge.input_name in (input_name, SINGLE_INPUT)]
        first = edges[0].partitioning
        if any(edge.partitioning != first for edge in edges):
            raise CheckpointError(
                f"its input {input_name!r} has several edges that share out records in different ways"
            )
        return first


def _of_subtask(
    subtask: int, waiting: Iterable[WaitingBatch], partitioning: Partitioning, subtasks: int, plain_data: PlainData
) -> Iterator[WaitingBatch]:
    return (each for owner, each in deal(waiting, partitioning, subtasks, plain_data) if owner == subtask)


def have_same_records(waiting: Iterable[WaitingBatch], readers: Iterable[int]) -> bool:
    """Return whether all readers of a broadcast have the same waiting records: as many of each epoch."""
    counts: dict[int, Counter[int]] = {reader: Counter() for reader in readers}
    for each in waiting:
        counts[each.reader][each.epoch] += each.size
    first, *others = counts.values()
    return all(other == first for other in others)


def queue_of(make: Callable[[], Iterable[WaitingBatch]], plain_data: PlainData) -> Queue | None:
    """Return the queue of a port's batches of later epochs; None if there are none. ``make()`` gives the batches."""
    counts: Counter[int] = Counter()
    for each in make():
        counts[each.epoch] += 1
    if not counts:
        return None
    frames = RepeatedFrames(lambda: ([entry_of(each, plain_data)] for each in make()))
    return frames, sorted(counts.items())


def _different_records(input_name: str) -> CheckpointError:
    return CheckpointError(f"each of them had kept other records of those that all get at the input {input_name!r}")


Logged = list[tuple[int, Iterable[PlainValue]]]


@dataclass(frozen=True, slots=True)
class _PortEnd:
    """The control records behind the batches of a port, and those that the task has handled before."""

    said: SubtaskProgress
    """The progress of the step upstream, in the epochs of this port."""
    data_end_heard: bool
    """Whether the task has been told of the end of the data."""
    end_heard: bool
    """Whether the task has been told of the end."""
    end_epoch: int | None
    """The epoch of the end, if the end waited."""


class InboxShares:
    """Makes the inboxes of the new tasks whose first step is ``step``.

    All ports start at the last epoch watermark of the step. Batches that were not handled are given again, in the order
    of the watermarks between them; then these watermarks; and last the progress of the step upstream, where its new
    subtasks continue.
    """

    def __init__(
        self,
        old: OldJob,
        step: Step,
        operator: Operator,
        all_progress: Mapping[str, Sequence[SubtaskProgress]],
        plain_data: PlainData,
        *,
        sets_aside: bool,
    ) -> None:
        self._old = old
        self._step = step
        self._operator = operator
        self._progress = all_progress
        self._plain_data = plain_data
        self._sets_aside = sets_aside
        self._tasks = old.tasks.get(step.name, [])
        self._ports = [port for task in self._tasks for port in old_ports(task)]
        self._is_same = len(self._tasks) == step.parallelism
        self._edges = {edge_key(step, edge): edge for edge in step.inputs}
        self._check()

    # -- checks ------------------------------------------------------------------------------------

    def _check(self) -> None:
        for port in self._ports:
            if port.origin[:4] not in self._edges and next(port.batches(), None) is not None:
                raise self._old.refusal(
                    self._step.name,
                    f"records from {port.origin.upstream!r} wait before it, which it does not read any more; restore "
                    "the flow as it was, and stop it where less waits",
                )
        for port in self._ports:
            edge = self._edges.get(port.origin[:4])
            keeps = edge is not None and self._is_same and self._keeps(edge.upstream)
            if (topic_range := port.in_topic) is not None and not (
                keeps and edge is not None and edge.feedback_topic is not None
            ):
                raise self._old.refusal(
                    self._step.name,
                    f"its feedback is in topic {topic_range!r}, dealt out for {len(self._tasks)} subtasks; keep "
                    "the parallelism of the loop, and its topic",
                )
        if not self._is_same:
            self._check_ends()
            self._check_broadcasts()

    def _check_ends(self) -> None:
        """Raise CheckpointError if only some operators were told that an input has ended."""
        if isinstance(self._operator, Boundary) or not (hasattr(self._operator, "input_ended") or self._step.per_round):
            return
        for name in self._step.input_names():
            heard = {self._has_heard_end(name, reader) for reader in range(len(self._tasks))}
            if len(heard) > 1:
                raise self._old.refusal_at_this_point(
                    self._step.name,
                    self._step.parallelism,
                    f"some of them have heard that the input {name!r} has ended and others have not",
                )

    def _check_broadcasts(self) -> None:
        readers = range(len(self._tasks))
        for edge in self._edges.values():
            if len(readers) > 1 and isinstance(edge.partitioning, Broadcast):
                waiting = (each for port in self._ports_of(edge) for each in port.batches())
                if not have_same_records(waiting, readers):
                    raise self._old.refusal_at_this_point(
                        self._step.name,
                        self._step.parallelism,
                        f"each of them has handled other records of those that all get from {edge.upstream.name!r}",
                    )

    # -- one inbox ------------------------------------------------------------------------------------------

    def state_of(self, subtask: int, ports: Sequence[Port]) -> tuple[dict[str, PlainValue], Logged]:
        """Return the state of the inbox of one subtask, and the feedback that its feedback ports start with."""
        begin = self._begin(subtask)
        states: list[dict[str, PlainValue]] = [
            {
                "origin": None if port.origin is None else tuple(port.origin),
                "held": [],
                "later": None,
                "marks": [],
                "arrived": begin,
                "reached": begin,
                "end waits": False,
                "data epoch": BEFORE_ALL_EPOCHS,
                "data ended": False,
                "ended": False,
            }
            for port in ports
        ]
        logged: Logged = []
        for port, state in zip(ports, states, strict=True):
            if port.origin is not None:
                self._fill(state, logged, port, port.origin, subtask, begin)
        return {"ports": states, "end": None}, logged

    def _begin(self, subtask: int) -> int:
        if not self._tasks:
            return self._progress[self._step.name][subtask].watermark
        if self._is_same:
            return inbox_watermark(self._tasks[subtask])
        return min(map(inbox_watermark, self._tasks))

    def _fill(
        self, state: dict[str, PlainValue], logged: Logged, port: Port, origin: PortOrigin, subtask: int, begin: int
    ) -> None:
        edge = self._edges[origin[:4]]
        known = [before for before in self._ports_of(edge) if (before.reader, before.origin) == (subtask, origin)]
        if known and known[0].in_topic is not None:
            self._fill_from_topic(state, logged, port, known[0])
            return
        port_end = self._port_end(edge, origin, subtask, begin)
        state["data ended"], state["ended"] = port_end.data_end_heard, port_end.end_heard
        batches = functools.partial(self._batches, edge, origin.subtask, subtask)
        if port.is_feedback:
            state["later"] = queue_of(functools.partial(batches, OldPort.arrived_early), self._plain_data)
            frames = RepeatedFrames(
                lambda: ([item] for item in self._items(batches(OldPort.others), begin, port_end, is_feedback=True))
            )
            if any(True for _ in frames):
                logged.append((port.index, frames))
            return
        held = batches(OldPort.batches)
        if self._sets_aside:
            state["later"] = queue_of(functools.partial(batches, OldPort.batches), self._plain_data)
            held = iter(())
        state["held"] = list(self._items(held, begin, port_end, is_feedback=False))

    def _fill_from_topic(self, state: dict[str, PlainValue], logged: Logged, port: Port, before: OldPort) -> None:
        """Keep feedback that is in a topic as it was; it goes to the same subtasks."""
        state["reached"] = state["arrived"] = before.watermark
        state["data ended"], state["data epoch"], state["later"] = before.data_ended, before.data_epoch, before.later
        logged.append((port.index, before.logged))

    def _port_end(self, edge: Edge, origin: PortOrigin, subtask: int, begin: int) -> _PortEnd:
        said = self._said(edge, origin.subtask, begin)
        known = [
            port
            for port in self._ports_of(edge)
            if (not self._is_same or port.reader == subtask)
            and (not self._keeps(edge.upstream) or port.origin.subtask == origin.subtask)
        ]
        readers = [subtask] if self._is_same else range(len(self._tasks))
        has_heard = all(self._has_heard_end(edge.input_name, reader) for reader in readers)
        data_end_heard = said.data_ended and (has_heard or (bool(known) and all(port.data_ended for port in known)))
        end_heard = (
            said.ended and data_end_heard and (not self._tasks or (bool(known) and all(port.ended for port in known)))
        )
        if not data_end_heard and said.watermark < begin and not said.data_ended:
            raise self._old.refusal(
                self._step.name,
                f"it has reached epoch {begin}, but some of the subtasks of {edge.upstream.name!r} only to epoch "
                f"{said.watermark}; start {edge.upstream.name!r} with the parallelism that it had, and take another "
                'checkpoint, as stop("suspend") does',
            )
        epochs = (port.end_epoch for port in known)
        return _PortEnd(said, data_end_heard, end_heard, next((each for each in epochs if each is not None), None))

    def _said(self, edge: Edge, upstream_subtask: int, begin: int) -> SubtaskProgress:
        said = self._progress[edge.upstream.name][upstream_subtask]
        if edge.feedback is not None:
            # Feedback has the epoch of its producer plus one: the first epoch is 1, behind the watermark 0.
            above = said.watermark + 1 if said.watermark > BEFORE_ALL_EPOCHS else BEFORE_ALL_EPOCHS
            return SubtaskProgress(above, said.data_ended, ended=False)
        if leaves_loop(edge, self._step):
            return said.behind_loop(begin)
        return said

    # -- waiting batches ---------------------------------------------------------------------------------------

    def _batches(
        self, edge: Edge, upstream_subtask: int, subtask: int, of: Callable[[OldPort], Iterator[WaitingBatch]]
    ) -> Iterator[WaitingBatch]:
        """Give the waiting batches of one channel of a new subtask; ``of`` gives those of an old port."""
        ports = [port for port in self._ports_of(edge) if not self._is_same or port.reader == subtask]
        straight = isinstance(edge.partitioning, Forward) and not self._is_same
        if self._keeps(edge.upstream) and not straight:
            ports = [port for port in ports if port.origin.subtask == upstream_subtask]
        elif not straight and upstream_subtask != 0:
            return
        merged = heapq.merge(*(of(port) for port in ports), key=lambda waiting: waiting.level)
        if self._is_same:
            yield from merged
        else:
            yield from _of_subtask(subtask, merged, edge.partitioning, self._step.parallelism, self._plain_data)

    def _items(
        self, batches: Iterator[WaitingBatch], begin: int, port_end: _PortEnd, *, is_feedback: bool
    ) -> Iterator[tuple[PlainValue, ...]]:
        """Give the items of a port as plain data: the batches, and the control records between and behind them."""
        said, level = port_end.said, begin
        for each in batches:
            if level < each.level <= said.watermark:
                level = each.level
                yield control_to_plain(EpochWatermark(level))
            if is_feedback:
                yield entry_of(each, self._plain_data)
            else:
                yield DataBatch.kind, each.epoch, each.size, each.records(self._plain_data)
        if not port_end.data_end_heard:
            if said.watermark > level and not (is_feedback and said.data_ended):
                yield control_to_plain(EpochWatermark(said.watermark))
            if said.data_ended and not said.ended:
                yield control_to_plain(EndOfData(said.watermark))
        if said.ended and not port_end.end_heard:
            yield control_to_plain(EndOfInput(port_end.end_epoch))

    # -- looking up ----------------------------------------------------------------------------------------

    def _ports_of(self, edge: Edge) -> list[OldPort]:
        key = edge_key(self._step, edge)
        return [port for port in self._ports if port.origin[:4] == key]

    def _keeps(self, upstream: Step) -> bool:
        return self._old.parallelism(upstream.name) == upstream.parallelism

    def _has_heard_end(self, input_name: str, reader: int) -> bool:
        ports = [port for port in self._ports if (port.reader, port.origin.input_name) == (reader, input_name)]
        return all(port.data_ended for port in ports) if ports else not self._tasks
