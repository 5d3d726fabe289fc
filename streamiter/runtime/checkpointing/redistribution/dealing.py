"""Who gets what of batches that waited, by the partitioning of the edge they came by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from streamiter.checkpoints.plain_data import PlainData
from streamiter.records import Batch
from streamiter.runtime.checkpointing.redistribution.waiting import Waiting
from streamiter.runtime.partitioning import Broadcast, Forward, Partitioning

__all__ = ["deal", "dealt_to"]


def deal(
    batches: Iterable[tuple[int, Batch]], partitioning: Partitioning, subtasks: int
) -> Iterator[tuple[int, Batch]]:
    """Each batch, given with the subtask that had it, or its parts, with the subtask that gets it.

    Where partitioning leaves it open, records are dealt out in turn, from the first subtask on; what went from subtask
    i to subtask i goes to i modulo the new number. What all had, all get, once.

    >>> from streamiter.runtime.partitioning import Rebalance
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


def dealt_to(
    subtask: int, waiting: Iterable[Waiting], partitioning: Partitioning, subtasks: int, plain_data: PlainData
) -> Iterator[Waiting]:
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
                yield Waiting(each.level, each.epoch, each.reader, len(part), part, None)
