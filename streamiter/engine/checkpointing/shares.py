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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

from streamiter.engine.graph.feedback import TopicRange
from streamiter.engine.graph.graph import SINGLE_INPUT, Edge, Step, edge_key, leaves_loop
from streamiter.engine.graph.output import Broadcast, Forward, InStep, Partitioning
from streamiter.engine.inbox.alignment import Logged
from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS
from streamiter.engine.inbox.port_log import Port, PortOrigin
from streamiter.engine.storage.snapshot import SnapshotHeader
from streamiter.engine.tasks.task_barriers import FEEDBACK, STEP, TASK, PartName
from streamiter.errors import CheckpointError
from streamiter.operators.operator import Boundary, Operator
from streamiter.values.deferred import PlainValue, entries_of
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, Control, DataBatch, EndOfData, EndOfInput, EpochWatermark, control_to_plain


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
    """Give the batches among the items of a log; ``level`` is the watermark before them."""
    for kind, *rest in entries:
        if kind == DataBatch.kind:
            epoch, size, content = rest
            yield WaitingBatch(level, epoch, reader, size, content)
        elif kind == EpochWatermark.kind:
            [level] = rest


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

    >>> from streamiter.engine.graph.output import Rebalance
    >>> def dealt(partitioning: Partitioning, *batches: list[str]) -> list[tuple[int, str]]:
    ...     waiting = [WaitingBatch(0, 0, reader, len(batch), batch) for reader, batch in enumerate(batches)]
    ...     return [(owner, "".join(each.content)) for owner, each in deal(waiting, partitioning, 2, PlainData())]
    >>> dealt(Rebalance(), ["a", "b"], ["c"]), dealt(Forward(), ["a"], [], ["b"]), dealt(Broadcast(), ["a"], ["a"])
    ([(0, 'a'), (1, 'b'), (0, 'c')], [(0, 'a'), (1, ''), (0, 'b')], [(0, 'a'), (1, 'a')])
    """
    split = None if isinstance(partitioning, (Forward, InStep, Broadcast)) else partitioning.splitter(0, subtasks)
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
    logged: Logged
    """The feedback between its barrier and the return of the barrier."""

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
    """The tasks by their first step, in the order of subtasks."""
    instances: Mapping[str, list[PlainValue]]
    """The states of the operators by step, in the order of subtasks."""
    first_steps: Mapping[str, str]
    """For each step, the first step of its task."""

    @classmethod
    def from_states(cls, header: SnapshotHeader, states: Mapping[str, PlainValue]) -> OldJob:
        """Return the job of a snapshot; ``states`` are by the names of their parts."""
        kinds: dict[str, dict[str, dict[int, PlainValue]]] = {STEP: {}, TASK: {}, FEEDBACK: {}}
        for name, state in states.items():
            part = PartName.of(name)
            kinds[part.kind].setdefault(part.step, {})[part.subtask] = state
        tasks: dict[str, list[OldTask]] = {}
        first_steps: dict[str, str] = {}
        for first, by_subtask in kinds[TASK].items():
            logs = kinds[FEEDBACK].get(first, {})
            tasks[first] = [OldTask(each, state, logs.get(each, [])) for each, state in sorted(by_subtask.items())]
            first_steps.update(dict.fromkeys(tasks[first][0].state["steps"], first))
        instances = {
            step: [state for _, state in sorted(by_subtask.items())] for step, by_subtask in kinds[STEP].items()
        }
        return cls(f"flow {header.flow!r}, checkpoint {header.id.number}", tasks, instances, first_steps)

    def progress_of(self, step: str) -> list[SubtaskProgress] | None:
        """Return the progress of each subtask of a step; None for a new step."""
        first = self.first_steps.get(step)
        return None if first is None else [task.progress for task in self.tasks[first]]

    def refusal(self, step: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}, step {step!r}: {why}")

    def check_same(self, step: Step, of_subtasks: Iterable[Hashable], what: str) -> None:
        """Raise CheckpointError if old subtasks differ in what they have heard or handled.

        Then the state cannot be redistributed in this checkpoint, but could be in another.
        """
        if len(set(of_subtasks)) > 1:
            before = self.parallelism(step.name)
            raise self.refusal(
                step.name,
                f"its {before} subtasks cannot become {step.parallelism} here: {what}; start it with "
                f'parallelism={before} as it was, and take another checkpoint, as stop("suspend") does',
            )

    def parallelism(self, step: str) -> int:
        first = self.first_steps.get(step)
        return len(self.instances.get(step, ())) if first is None else len(self.tasks[first])


@dataclass(frozen=True, slots=True)
class OldPort:
    """A port of an old task: one of its inputs, with the items that waited there."""

    reader: int
    """The subtask that the port belongs to."""
    state: Mapping[str, PlainValue]
    """Its state in the snapshot: its items, and how far it had come."""
    logged: Iterable[PlainValue]
    """The frames of the feedback before the return of the barrier."""
    ranges: Sequence[PlainValue]
    """The ranges of a topic that has the other feedback before that."""

    @property
    def origin(self) -> PortOrigin:
        """The step and the subtask that its records come from."""
        return PortOrigin(*self.state["origin"])

    def batches(self) -> Iterator[WaitingBatch]:
        """Give all waiting batches, in order."""
        return chain(self.received(), self.unread())

    def received(self) -> Iterator[WaitingBatch]:
        """Give the batches that waited for the turn of their epoch; a head has counted them."""
        return waiting_batches(entries_of(self.state["later"] or ()), self.state["reached"], self.reader)

    def unread(self) -> Iterator[WaitingBatch]:
        """Give the others."""
        return waiting_batches(chain(self.state["held"], entries_of(self.logged)), self.state["reached"], self.reader)

    @property
    def end_epoch(self) -> int | None:
        """The epoch of its end, if that waited; None otherwise."""
        items = chain(self.state["held"], self.state["behind"])
        return next((rest[0] for kind, *rest in items if kind == EndOfInput.kind), None)


def old_ports(task: OldTask) -> list[OldPort]:
    """Return the ports of a task; a source has none."""
    logged = {index: (frames or (), ranges) for index, frames, ranges in task.logged}
    return [
        OldPort(task.subtask, port, *logged.get(index, ((), ())))
        for index, port in enumerate(task.state["inbox"])
        if port["origin"] is not None
    ]


def origins(task: OldTask) -> list[PortOrigin | None]:
    return [None if port["origin"] is None else PortOrigin(*port["origin"]) for port in task.state["inbox"]]


def inbox_watermark(task: OldTask) -> int:
    ports = task.state["inbox"]
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
            raise CheckpointError(
                f"each of them had kept other records at the input {input_name!r}, although all get the same"
            )
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
    ) -> None:
        self._old = old
        self._step = step
        self._operator = operator
        self._progress = all_progress
        self._plain_data = plain_data
        self._tasks = old.tasks.get(step.name, [])
        self._ports = [port for task in self._tasks for port in old_ports(task)]
        self._is_same = len(self._tasks) == step.parallelism
        self._edges = {edge_key(step, edge): edge for edge in step.inputs}
        self._check()

    # -- checks ------------------------------------------------------------------------------------

    def _check(self) -> None:
        for port in self._ports:
            edge = self._edges.get(port.origin[:4])
            if edge is None and next(port.batches(), None) is not None:
                raise self._old.refusal(
                    self._step.name,
                    f"records from {port.origin.upstream!r} wait before it, which it does not read any more; restore "
                    "the flow as it was, and stop it where less waits",
                )
            reads_topic = edge is not None and edge.feedback_topic is not None and self._keeps(edge.upstream)
            if not (reads_topic and self._is_same) and port.ranges:
                topic = TopicRange.from_plain(port.ranges[0]).topic
                raise self._old.refusal(
                    self._step.name,
                    f"its feedback is in topic {topic!r}, dealt out for {len(self._tasks)} subtasks; keep "
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
            readers = range(len(self._tasks))
            self._old.check_same(
                self._step,
                [self._have_all(self._of_input(name, [reader]), "data ended") for reader in readers],
                f"some of them have heard that the input {name!r} has ended and others have not",
            )

    def _check_broadcasts(self) -> None:
        for edge in self._edges.values():
            if isinstance(edge.partitioning, Broadcast):
                waiting: list[Counter[int]] = [Counter() for _ in self._tasks]
                for port in self._ports_of(edge):
                    for each in port.batches():
                        waiting[port.reader][each.epoch] += each.size
                self._old.check_same(
                    self._step,
                    (frozenset((+of_reader).items()) for of_reader in waiting),
                    f"each of them has handled other records from {edge.upstream.name!r}, although all get the same",
                )

    # -- one inbox ------------------------------------------------------------------------------------------

    def state_of(self, subtask: int, ports: Sequence[Port]) -> tuple[list[dict[str, PlainValue]], Logged]:
        """Return the state of the inbox of one subtask, and the feedback that its feedback ports start with."""
        tasks, logged = [self._tasks[subtask]] if self._is_same else self._tasks, Logged()
        begin = min(map(inbox_watermark, tasks), default=self._progress[self._step.name][subtask].watermark)
        return [self._port_state(port, subtask, begin, logged) for port in ports], logged

    def _port_state(self, port: Port, subtask: int, begin: int, logged: Logged) -> dict[str, PlainValue]:
        state: dict[str, PlainValue] = {
            "origin": None,
            "held": (),
            "later": None,
            "behind": (),
            "reached": begin,
            "data ended": False,
            "ended": False,
        }
        if (origin := port.origin) is None:
            return state
        edge, state["origin"] = self._edges[origin[:4]], tuple(origin)
        readers = [subtask] if self._is_same else range(len(self._tasks))
        before = [
            each
            for each in self._ports_of(edge)
            if each.reader in readers and (not self._keeps(edge.upstream) or each.origin.subtask == origin.subtask)
        ]
        if before and before[0].ranges:  # The feedback stays there: it goes to the same subtasks.
            logged.append((port.index, before[0].logged, before[0].ranges))
            return dict(before[0].state)
        said = self._said(edge, origin.subtask, begin)
        data_ended = said.data_ended and self._have_all(
            before or self._of_input(edge.input_name, readers), "data ended"
        )
        ended = said.ended and data_ended and self._have_all(before, "ended")
        if not data_ended and said.watermark < begin and not said.data_ended:
            raise self._old.refusal(
                self._step.name,
                f"it has reached epoch {begin}, but some of the subtasks of {edge.upstream.name!r} only to epoch "
                f"{said.watermark}; start {edge.upstream.name!r} with the parallelism that it had, and take another "
                'checkpoint, as stop("suspend") does',
            )
        state["data ended"], state["ended"] = data_ended, ended
        # The new subtasks upstream continue behind what the old ones have said, so it is told here.
        untold: list[Control] = []
        if said.watermark > begin and not data_ended and not (port.is_feedback and said.data_ended):
            untold.append(EpochWatermark(said.watermark))
        if said.data_ended and not data_ended and not said.ended:
            untold.append(EndOfData(said.watermark))
        if said.ended and not ended:
            end_epochs = (each.end_epoch for each in before)
            untold.append(EndOfInput(next((epoch for epoch in end_epochs if epoch is not None), None)))
        behind = [control_to_plain(control) for control in untold]
        if isinstance(edge.partitioning, Forward) and not self._is_same:
            before = self._ports_of(edge)
        elif not self._keeps(edge.upstream) and origin.subtask != 0:
            before = []
        merged = functools.partial(self._merged, before, edge.partitioning, subtask, begin, said.watermark)
        if port.is_feedback:
            # A watermark between them would be in front of feedback that is not received.
            state["later"] = ([item] for item in merged(OldPort.received) if item[0] == DataBatch.kind)
            logged.append((port.index, ([item] for item in chain(merged(OldPort.unread), behind)), ()))
        else:
            state["held"], state["behind"] = merged(OldPort.batches), behind
        return state

    def _said(self, edge: Edge, upstream_subtask: int, begin: int) -> SubtaskProgress:
        """Return the progress of a subtask upstream, in the epochs of this edge."""
        said = self._progress[edge.upstream.name][upstream_subtask]
        if edge.feedback is not None:
            # Feedback has the epoch of its producer plus one: the first epoch is 1, behind the watermark 0.
            above = said.watermark + 1 if said.watermark > BEFORE_ALL_EPOCHS else BEFORE_ALL_EPOCHS
            return SubtaskProgress(above, said.data_ended, ended=False)
        if leaves_loop(edge, self._step):
            return said.behind_loop(begin)
        return said

    # -- waiting batches ---------------------------------------------------------------------------------------

    def _merged(
        self,
        ports: Iterable[OldPort],
        partitioning: Partitioning,
        subtask: int,
        level: int,
        highest: int,
        of: Callable[[OldPort], Iterator[WaitingBatch]],
    ) -> Iterator[tuple[PlainValue, ...]]:
        """Merge the batches of old ports by the watermarks before them, and give those of a new subtask as plain data.

        ``of`` gives the batches of an old port. ``level`` is the watermark before all, ``highest`` the last of all.
        """
        merged: Iterable[WaitingBatch] = heapq.merge(*map(of, ports), key=lambda waiting: waiting.level)
        if not self._is_same:
            dealt = deal(merged, partitioning, self._step.parallelism, self._plain_data)
            merged = (each for owner, each in dealt if owner == subtask)
        for each in merged:
            if level < each.level <= highest:
                level = each.level
                yield control_to_plain(EpochWatermark(level))
            yield DataBatch.kind, each.epoch, each.size, each.content

    # -- looking up ----------------------------------------------------------------------------------------

    def _ports_of(self, edge: Edge) -> list[OldPort]:
        key = edge_key(self._step, edge)
        return [port for port in self._ports if port.origin[:4] == key]

    def _keeps(self, upstream: Step) -> bool:
        return self._old.parallelism(upstream.name) == upstream.parallelism

    def _of_input(self, name: str, readers: Sequence[int]) -> list[OldPort]:
        return [port for port in self._ports if port.reader in readers and port.origin.input_name == name]

    def _have_all(self, ports: Sequence[OldPort], what: str) -> bool:
        """Return whether all these ports have ended, or the data of all has. A new step, without any, has heard all."""
        return all(port.state[what] for port in ports) if ports else not self._tasks
