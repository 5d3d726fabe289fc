"""What an operator had kept of its inputs, dealt out by the edges that these come by."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import CheckpointError
from streamiter.records import Batch
from streamiter.runtime.checkpointing.redistribution.dealing import deal, dealt_to
from streamiter.runtime.checkpointing.redistribution.waiting import (
    Frames,
    Waiting,
    batches_queued,
    entry_of,
)
from streamiter.runtime.graph import SINGLE_INPUT, Step
from streamiter.runtime.partitioning import Broadcast, Partitioning
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS

__all__ = ["EdgeSharing", "Queue", "all_alike", "queue_of"]

Queue = tuple[int, Frames, list[tuple[int, int]]]
"""What is set aside at a port: its number, the batches, and how many there are of which epochs."""


@final
class EdgeSharing:
    """For one step; see :class:`~streamiter.operators.sharing.Sharing`."""

    def __init__(self, step: Step, plain_data: PlainData) -> None:
        self._step = step
        self._plain_data = plain_data

    @property
    def parallelism(self) -> int:
        """The new number of subtasks."""
        return self._step.parallelism

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """See :class:`~streamiter.operators.sharing.Sharing`."""
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
        """See :class:`~streamiter.operators.sharing.Sharing`."""
        partitioning = self._partitioning(input_name)

        def batches() -> Iterator[Waiting]:
            for reader, queues in enumerate(waiting):
                for _, frames, _ in queues:
                    yield from batches_queued(frames, BEFORE_ALL_EPOCHS, reader)

        if isinstance(partitioning, Broadcast) and not all_alike(batches(), range(len(waiting))):
            raise _differing(input_name)

        def dealt(subtask: int) -> Iterator[Waiting]:
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


def all_alike(waiting: Iterable[Waiting], readers: Iterable[int]) -> bool:
    """Whether as many records of each epoch wait before all readers: of what all get, then it is the same ones."""
    counts: dict[int, Counter[int]] = {reader: Counter() for reader in readers}
    for each in waiting:
        counts[each.reader][each.epoch] += each.size
    first, *others = counts.values()
    return all(other == first for other in others)


def queue_of(port: int, make: Callable[[], Iterable[Waiting]], plain_data: PlainData) -> Queue | None:
    """What is set aside at a port; None where that is nothing. ``make()`` gives the batches."""
    counts: Counter[int] = Counter()
    for each in make():
        counts[each.epoch] += 1
    if not counts:
        return None
    return port, Frames(lambda: (entry_of(each, plain_data) for each in make())), sorted(counts.items())


def _differing(input_name: str) -> CheckpointError:
    return CheckpointError(f"each of them had kept another part of what all get of its input {input_name!r}")
