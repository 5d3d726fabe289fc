"""What an operator had kept of its inputs, dealt out by the edges that these come by."""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from streamiter.checkpoints.plain_data import PlainData, control_to_plain
from streamiter.errors import CheckpointError
from streamiter.operators.operator import Boundary, Operator
from streamiter.records import Batch, DataBatch, EndOfData, EndOfInput, EpochWatermark
from streamiter.runtime.checkpointing.old_job import (
    OldJob,
    OldPort,
    QueueFrames,
    SubtaskProgress,
    WaitingBatch,
    batches_queued,
    deal,
    dealt_to,
    entry_of,
    gate_watermark,
    old_ports,
)
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS
from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step, edge_number, leaves_loop
from streamiter.runtime.output import Broadcast, Forward, Partitioning
from streamiter.runtime.port import Port, PortOrigin

__all__ = [
    "EdgeSharing",
    "GateShares",
]


Queue = tuple[int, QueueFrames, list[tuple[int, int]]]
"""What is set aside at a port: its number, the batches, and how many there are of which epochs."""


@final
class EdgeSharing:
    """For one step; see :class:`~streamiter.operators.operator.Sharing`."""

    def __init__(self, step: Step, plain_data: PlainData) -> None:
        self._step = step
        self._plain_data = plain_data

    @property
    def parallelism(self) -> int:
        """The new number of subtasks."""
        return self._step.parallelism

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """See :class:`~streamiter.operators.operator.Sharing`."""
        dealt: list[list[Batch]] = [[] for _ in range(self.parallelism)]
        kept = [(subtask, batch) for subtask, of_subtask in enumerate(batches) for batch in of_subtask]
        partitioning = self._partitioning(input_name)
        if isinstance(partitioning, Broadcast):
            counts = [sum(map(len, of_subtask)) for of_subtask in batches]
            if len(set(counts)) > 1:
                raise _differing(input_name)
        for subtask, batch in deal(kept, partitioning, self.parallelism):
            if len(batch):
                dealt[subtask].append(batch)
        return dealt

    def queues(self, input_name: str, waiting: Sequence[Any]) -> list[Any]:
        """See :class:`~streamiter.operators.operator.Sharing`."""
        partitioning = self._partitioning(input_name)

        def batches() -> Iterator[WaitingBatch]:
            for reader, queues in enumerate(waiting):
                for _, frames, _ in queues:
                    yield from batches_queued(frames, BEFORE_ALL_EPOCHS, reader)

        if isinstance(partitioning, Broadcast) and not all_alike(batches(), range(len(waiting))):
            raise _differing(input_name)

        def dealt(subtask: int) -> Iterator[WaitingBatch]:
            return dealt_to(subtask, batches(), partitioning, self.parallelism, self._plain_data)

        queues = [
            queue_of(0, functools.partial(dealt, subtask), self._plain_data)
            for subtask in range(self.parallelism)
        ]
        return [[] if queue is None else [queue] for queue in queues]

    def _partitioning(self, input_name: str) -> Partitioning:
        edges = [edge for edge in self._step.inputs if edge.input_name in (input_name, SINGLE_INPUT)]
        first = edges[0].partitioning
        if any(edge.partitioning != first for edge in edges):
            raise CheckpointError(
                f"its input {input_name!r} comes by several edges that share out records in different ways"
            )
        return first


def all_alike(waiting: Iterable[WaitingBatch], readers: Iterable[int]) -> bool:
    """Whether as many records of each epoch wait before all readers: of what all get, then it is the same ones."""
    counts: dict[int, Counter[int]] = {reader: Counter() for reader in readers}
    for each in waiting:
        counts[each.reader][each.epoch] += each.size
    first, *others = counts.values()
    return all(other == first for other in others)


def queue_of(port: int, make: Callable[[], Iterable[WaitingBatch]], plain_data: PlainData) -> Queue | None:
    """What is set aside at a port; None where that is nothing. ``make()`` gives the batches."""
    counts: Counter[int] = Counter()
    for each in make():
        counts[each.epoch] += 1
    if not counts:
        return None
    return port, QueueFrames(lambda: (entry_of(each, plain_data) for each in make())), sorted(counts.items())


def _differing(input_name: str) -> CheckpointError:
    return CheckpointError(f"each of them had kept another part of what all get of its input {input_name!r}")


Logged = list[tuple[int, Iterable[Any]]]


@dataclass(frozen=True, slots=True)
class _PortTail:
    """What comes behind the batches of a port, and what of it was heard before."""

    said: SubtaskProgress
    """How far the step upstream has come, in the epochs of this port."""
    data_end_heard: bool
    end_heard: bool
    end_epoch: int | None


class GateShares:
    """The gates of the new tasks that one step stands at the head of.

    What a task goes on from at its gate, where its channels, or those who share them, are others than before.

    All ports begin at the watermark the step had heard of. What came by them and was not handled is given again: the
    batches in the order of the watermarks between them, these watermarks, and at last how far the step upstream has
    come, as it will go on from there.
    """

    def __init__(
        self,
        old: OldJob,
        step: Step,
        operator: Operator,
        standings: Mapping[str, Sequence[SubtaskProgress]],
        plain_data: PlainData,
        *,
        in_order: bool,
    ) -> None:
        self._old = old
        self._step = step
        self._operator = operator
        self._standings = standings
        self._plain_data = plain_data
        self._in_order = in_order
        self._tasks = old.tasks.get(step.name, [])
        self._ports = [port for task in self._tasks for port in old_ports(task)]
        self._is_same = len(self._tasks) == step.parallelism
        self._edges = {self._key(edge): edge for edge in step.inputs}
        self._check()

    def _key(self, edge: Edge) -> tuple[Any, ...]:
        tag = None if edge.tag is None else edge.tag.name
        return edge.input_name, edge.upstream.name, tag, edge_number(self._step, edge)

    # -- what cannot be ------------------------------------------------------------------------------------

    def _check(self) -> None:
        for port in self._ports:
            if port.origin[:4] not in self._edges and next(port.batches(), None) is not None:
                raise self._old.refused(
                    self._step.name,
                    f"records from {port.origin.upstream!r} wait before it, which it does not read any more; restore "
                    "the flow as it was, and stop it where less waits",
                )
        for port in self._ports:
            edge = self._edges.get(port.origin[:4])
            keeps = edge is not None and self._is_same and self._keeps(edge.upstream)
            if (lying := port.in_topic) is not None and not (
                keeps and edge is not None and edge.feedback_topic is not None
            ):
                raise self._old.refused(
                    self._step.name,
                    f"what is fed back to it lies in topic {lying!r}, dealt out for {len(self._tasks)} subtasks; keep "
                    "the parallelism of the loop, and its topic",
                )
        if not self._is_same:
            self._check_ends()
            self._check_broadcasts()

    def _check_ends(self) -> None:
        """What an operator has heard of the end of its inputs, all of them must have."""
        if isinstance(self._operator, Boundary) or not (
            hasattr(self._operator, "input_ended") or self._step.per_round
        ):
            return
        for name in self._step.input_names():
            heard = {self._has_heard_end(name, reader) for reader in range(len(self._tasks))}
            if len(heard) > 1:
                raise self._old.not_between(
                    self._step.name,
                    self._step.parallelism,
                    f"some of them have heard that the input {name!r} has ended and others have not",
                )

    def _check_broadcasts(self) -> None:
        readers = range(len(self._tasks))
        for edge in self._edges.values():
            if len(readers) > 1 and isinstance(edge.partitioning, Broadcast):
                waiting = (each for port in self._of(edge) for each in port.batches())
                if not all_alike(waiting, readers):
                    raise self._old.not_between(
                        self._step.name,
                        self._step.parallelism,
                        f"each of them has handled another part of what all get from {edge.upstream.name!r}",
                    )

    # -- one gate ------------------------------------------------------------------------------------------

    def of(self, subtask: int, ports: Sequence[Port]) -> tuple[dict[str, Any], Logged]:
        """The state of the gate of one subtask, and what comes to its feedback ports before all else."""
        begin = self._begin(subtask)
        state: dict[str, Any] = {
            "watermarks": {"watermarks": [begin] * len(ports), "finished": [0] * len(ports)},
            "aside": [],
            "data_ended": [0] * len(ports),
            "data_epochs": [BEFORE_ALL_EPOCHS] * len(ports),
            "deferred": [None] * len(ports),
            "held": [],
            "ended": [0] * len(ports),
        }
        logged: Logged = []
        for port in ports:
            if port.origin is not None:
                self._fill(state, logged, port, port.origin, subtask, begin)
        return state, logged

    def _begin(self, subtask: int) -> int:
        if not self._tasks:
            return self._standings[self._step.name][subtask].watermark
        if self._is_same:
            return gate_watermark(self._tasks[subtask])
        return min(map(gate_watermark, self._tasks))

    def _fill(
        self, state: dict[str, Any], logged: Logged, port: Port, origin: PortOrigin, subtask: int, begin: int
    ) -> None:
        edge = self._edges[origin[:4]]
        known = [before for before in self._of(edge) if (before.reader, before.origin) == (subtask, origin)]
        if known and known[0].in_topic is not None:
            self._fill_from_topic(state, logged, port, known[0])
            return
        tail = self._tail(edge, origin, subtask, begin)
        index = port.index
        state["data_ended"][index] = state["watermarks"]["finished"][index] = int(tail.data_end_heard)
        state["ended"][index] = int(tail.end_heard)
        batches = functools.partial(self._batches, edge, origin.subtask, subtask)
        if port.is_feedback:
            frames = QueueFrames(lambda: self._entries(batches(), begin, tail))
            if any(True for _ in frames):
                logged.append((index, frames))
            return
        held = batches()
        if self._in_order:
            queue = queue_of(index, batches, self._plain_data)
            state["aside"] += [] if queue is None else [queue]
            held = iter(())
        state["held"] += [(index, *item) for item in self._held(held, begin, tail)]

    def _fill_from_topic(self, state: dict[str, Any], logged: Logged, port: Port, before: OldPort) -> None:
        """What comes back through a topic goes on where it was, to the same subtasks."""
        index = port.index
        state["watermarks"]["watermarks"][index] = before.watermark
        state["data_ended"][index] = state["watermarks"]["finished"][index] = int(before.data_ended)
        state["data_epochs"][index] = before.data_epoch
        logged.append((index, before.logged))

    def _tail(self, edge: Edge, origin: PortOrigin, subtask: int, begin: int) -> _PortTail:
        said = self._said(edge, origin.subtask, begin)
        known = [
            port
            for port in self._of(edge)
            if (not self._is_same or port.reader == subtask)
            and (not self._keeps(edge.upstream) or port.origin.subtask == origin.subtask)
        ]
        readers = [subtask] if self._is_same else range(len(self._tasks))
        has_heard = all(self._has_heard_end(edge.input_name, reader) for reader in readers)
        data_end_heard = said.data_ended and (
            has_heard or (bool(known) and all(port.data_ended for port in known))
        )
        end_heard = (
            said.ended
            and data_end_heard
            and (not self._tasks or (bool(known) and all(port.ended for port in known)))
        )
        if not data_end_heard and said.watermark < begin and not said.data_ended:
            raise self._old.refused(
                self._step.name,
                f"it has come to epoch {begin}, but some of the subtasks of {edge.upstream.name!r} only to epoch "
                f"{said.watermark}; start {edge.upstream.name!r} with the parallelism that it had, and take another "
                'checkpoint, as stop("suspend") does',
            )
        epochs = (port.end_epoch for port in known)
        return _PortTail(
            said, data_end_heard, end_heard, next((each for each in epochs if each is not None), None)
        )

    def _said(self, edge: Edge, upstream_subtask: int, begin: int) -> SubtaskProgress:
        said = self._standings[edge.upstream.name][upstream_subtask]
        if edge.feedback is not None:
            # The first epoch that is fed back is 1, behind the watermark 0 of whoever feeds back.
            above = said.watermark + 1 if said.watermark > BEFORE_ALL_EPOCHS else BEFORE_ALL_EPOCHS
            return SubtaskProgress(above, said.data_ended, ended=False)
        if leaves_loop(edge, self._step):
            return said.behind_loop(begin)
        return said

    # -- what waited ---------------------------------------------------------------------------------------

    def _batches(self, edge: Edge, upstream_subtask: int, subtask: int) -> Iterator[WaitingBatch]:
        """What comes to one of the new subtasks by one of its channels."""
        ports = [port for port in self._of(edge) if not self._is_same or port.reader == subtask]
        straight = isinstance(edge.partitioning, Forward) and not self._is_same
        if self._keeps(edge.upstream) and not straight:
            ports = [port for port in ports if port.origin.subtask == upstream_subtask]
        elif not straight and upstream_subtask != 0:
            return
        merged = heapq.merge(*(port.batches() for port in ports), key=lambda waiting: waiting.level)
        if self._is_same:
            yield from merged
        else:
            yield from dealt_to(subtask, merged, edge.partitioning, self._step.parallelism, self._plain_data)

    def _held(
        self, batches: Iterator[WaitingBatch], begin: int, tail: _PortTail
    ) -> Iterator[tuple[str, Any, Any]]:
        level = begin
        for each in batches:
            if level < each.level <= tail.said.watermark:
                level = each.level
                yield EpochWatermark.kind, None, level
            yield DataBatch.kind, each.records(self._plain_data), each.epoch
        if not tail.data_end_heard:
            if tail.said.watermark > level:
                yield EpochWatermark.kind, None, tail.said.watermark
            if tail.said.data_ended and not tail.said.ended:
                yield EndOfData.kind, None, tail.said.watermark
        if tail.said.ended and not tail.end_heard:
            yield EndOfInput.kind, None, tail.end_epoch

    def _entries(
        self, batches: Iterator[WaitingBatch], begin: int, tail: _PortTail
    ) -> Iterator[tuple[Any, ...]]:
        """The same for a feedback port, whose steps upstream have not ended for it."""
        level = begin
        for each in batches:
            if level < each.level <= tail.said.watermark:
                level = each.level
                yield control_to_plain(EpochWatermark(level))
            yield entry_of(each, self._plain_data)
        if tail.data_end_heard:
            return
        if tail.said.data_ended:
            yield control_to_plain(EndOfData(tail.said.watermark))
        elif tail.said.watermark > level:
            yield control_to_plain(EpochWatermark(tail.said.watermark))

    # -- looking up ----------------------------------------------------------------------------------------

    def _of(self, edge: Edge) -> list[OldPort]:
        key = self._key(edge)
        return [port for port in self._ports if port.origin[:4] == key]

    def _keeps(self, upstream: Step) -> bool:
        """Whether a step has as many subtasks as it had."""
        return self._old.parallelism(upstream.name) == upstream.parallelism

    def _has_heard_end(self, input_name: str, reader: int) -> bool:
        ports = [
            port for port in self._ports if (port.reader, port.origin.input_name) == (reader, input_name)
        ]
        return all(port.data_ended for port in ports) if ports else not self._tasks
