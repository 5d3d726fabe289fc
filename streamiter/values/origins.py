"""Where the records of a batch were read: what a dead letter says of its original.

A batch has one :class:`BatchOrigin`, which travels with it. In front of a step that writes dead letters it has
:class:`Originals`, too: for each record, by its place in the batch, the record of a topic that it was made of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal, Protocol, final

import numpy as np
import numpy.typing as npt

RowNumbers = Sequence[int] | npt.NDArray[np.int64]
"""Places of records in a batch."""


Passes = Literal["no origin", "ranges", "originals"]
"""What the output of a step has of the origin of the batch that it was made of."""


class TopicColumns(Protocol):
    """Records of one partition as their topic gave them, in columns."""

    @property
    def partition(self) -> int: ...
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def timestamps_ms(self) -> Sequence[int]: ...
    @property
    def keys(self) -> Sequence[bytes | None]: ...
    @property
    def headers(self) -> Sequence[Sequence[tuple[str, bytes | None]]]: ...


Original = tuple[str, TopicColumns, int]
"""The record of a topic: the URL of the topic, the columns in which the record is, and its row."""


Find = Callable[[int], Original | None]
"""Finds the originals of the records of one batch, by row; other batches are parts of that batch."""


@final
class Originals:
    """The originals of the records of a batch, by place. Nothing is computed for a record until it is looked for.

    >>> read = Originals.read("memory://clicks", columns := object(), 4)
    >>> kept = read.taken([1, 3])
    >>> kept.of(1), len(kept.taken(range(1))), Originals.joined([kept, read]).of(2)[2]
    (('memory://clicks', <object object at ...>, 3), 1, 0)
    """

    __slots__ = ("_find", "_rows")

    def __init__(self, find: Find, rows: RowNumbers) -> None:
        self._find = find
        self._rows = rows

    @classmethod
    def read(cls, topic: str, columns: Any, count: int) -> Originals:
        """Return the originals of records that were decoded from all rows of ``columns``."""
        return cls(_Read(topic, columns), range(count))

    @classmethod
    def joined(cls, parts: Sequence[Originals]) -> Originals:
        """Return the originals of several batches, one behind the other."""
        *starts, length = accumulate(map(len, parts), initial=0)

        def find(row: int) -> Original | None:
            part = bisect_right(starts, row) - 1
            return parts[part].of(row - starts[part])

        return cls(find, range(length))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, row: int) -> Original | None:
        """Return the original of the record at this place; None if it is not known."""
        return self._find(int(self._rows[row]))

    def taken(self, rows: RowNumbers) -> Originals:
        """Return the originals of the records at ``rows``."""
        if isinstance(self._rows, range):
            if self._rows == range(len(self._rows)):
                return Originals(self._find, rows)
            if isinstance(rows, range):
                return Originals(self._find, self._rows[rows.start : rows.stop : rows.step])
        return Originals(self._find, np.asarray(self._rows, np.int64)[np.asarray(rows, np.int64)])

    def same_objects(self, made: Any, of: Any, *, by_place: bool) -> Originals | None:
        """Return the originals of a batch of a function that did not say from which record it made each of its records.

        A record that is an object of the batch ``of`` has the original of this object. With ``by_place``, if there are
        as many records and none is such an object, each has the original of the record at its place. If ``of`` has one
        record, all were made of it; for a step with state, which may have kept other records, no origin is known.
        """
        if len(self) == 1:
            return self.taken(np.zeros(len(made), np.int64))
        if type(made) is list and type(of) is list:
            return Originals(_same_objects(self, made, of, by_place=by_place), range(len(made)))
        return self if by_place and len(made) == len(self) else None

    def plain(self) -> tuple[Any, ...]:
        """Return them as plain data, for another process."""
        if isinstance(self._find, _Read):  # As mostly; the general way below takes several times as long.
            read, topic_rows = self._find.columns, np.asarray(self._rows).tolist()
            of_read = (read.offsets, read.timestamps_ms, read.keys, read.headers)
            picked = [[column[row] for row in topic_rows] for column in of_read]
            return [(self._find.topic, read.partition)], [0] * len(topic_rows), *picked
        known: dict[int, tuple[int, tuple[Sequence[Any], ...]]] = {}
        sources: list[tuple[str, int]] = []
        numbers: list[int] = []
        columns: tuple[list[Any], ...] = ([], [], [], [])
        for place in map(self.of, range(len(self))):
            if place is None:
                numbers.append(-1)
                continue
            topic, read, row = place
            if id(read) not in known:
                known[id(read)] = len(sources), (read.offsets, read.timestamps_ms, read.keys, read.headers)
                sources.append((topic, read.partition))
            number, of_topic = known[id(read)]
            numbers.append(number)
            for column, given in zip(columns, of_topic, strict=True):
                column.append(given[row])
        return sources, numbers, *columns

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Originals:
        """Return the originals that ``plain`` converted."""
        sources, numbers, *columns = plain
        read = [(topic, _Columns(partition, *columns)) for topic, partition in sources]
        # The columns have the known originals only.
        rows = [row - 1 for row in accumulate(number >= 0 for number in numbers)]
        return cls(lambda row: None if numbers[row] < 0 else (*read[numbers[row]], rows[row]), range(len(numbers)))


@dataclass(frozen=True, slots=True)
class _Read:
    """All rows of a batch of a topic."""

    topic: str
    columns: TopicColumns

    def __call__(self, row: int) -> Original | None:
        return self.topic, self.columns, row


def _same_objects(given: Originals, made: list[Any], of: list[Any], *, by_place: bool) -> Find:
    """Find records by their objects. Of an object that another number of records share, nothing is known."""

    @cache
    def found() -> Sequence[int | None]:
        before, after = _places(of), _places(made)
        if by_place and len(made) == len(of) and before.keys().isdisjoint(after):
            return range(len(made))
        rows: list[int | None] = [None] * len(made)
        for each, places in after.items():
            known = before.get(each, [])
            # One record may be emitted several times; several with one object are told apart by their order alone.
            if len(known) == len(places) or len(known) == 1:
                for turn, place in enumerate(places):
                    rows[place] = known[turn % len(known)]
        return rows

    def find(row: int) -> Original | None:
        place = found()[row]
        return None if place is None else given.of(place)

    return find


def _places(records: list[Any]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, record in enumerate(records):
        places.setdefault(id(record), []).append(place)
    return places


def place_of(record: object, records: object) -> int | None:
    """Return the place of an object in a list; None if it is not in it, or more than once."""
    places = [place for place, each in enumerate(records) if each is record] if type(records) is list else []
    return places[0] if len(places) == 1 else None


@dataclass(frozen=True, slots=True)
class _Columns:
    partition: int
    offsets: Sequence[int]
    timestamps_ms: Sequence[int]
    keys: Sequence[bytes | None]
    headers: Sequence[Sequence[tuple[str, bytes | None]]]


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """The place in a topic where all records of a batch were read.

    The partition and the offsets are None if the records were read from several partitions.

    >>> BatchOrigin("memory://clicks", 0, 3, 5).joined(BatchOrigin("memory://clicks", 0, 6, 9))
    BatchOrigin(topic='memory://clicks', partition=0, first_offset=3, last_offset=9)
    >>> BatchOrigin("memory://clicks", 0, 3, 5).joined(BatchOrigin("memory://clicks", 1, 6, 9))
    BatchOrigin(topic='memory://clicks', partition=None, first_offset=None, last_offset=None)
    """

    topic: str | None
    """The URL of the topic; None if the records were read from several topics."""
    partition: int | None = None
    """The number of the partition."""
    first_offset: int | None = None
    """The lowest offset of any record."""
    last_offset: int | None = None
    """The highest offset of any record."""
    originals: Originals | None = field(default=None, repr=False, compare=False)
    """The records as they were read, if a dead letter may need them."""

    def plain(self) -> tuple[Any, ...]:
        """Return it as plain data."""
        place = self.topic, self.partition, self.first_offset, self.last_offset
        return place if self.originals is None else (*place, self.originals.plain())

    @classmethod
    def from_plain(
        cls,
        topic: str | None,
        partition: int | None,
        first_offset: int | None,
        last_offset: int | None,
        originals: Sequence[Any] | None = None,
    ) -> BatchOrigin:
        """Return the origin that ``plain`` converted."""
        known = None if originals is None else Originals.from_plain(originals)
        return cls(topic, partition, first_offset, last_offset, known)

    def with_originals(self, originals: Originals | None) -> BatchOrigin:
        """Return the origin of a batch that was made of records of this one."""
        return self if originals is self.originals else replace(self, originals=originals)

    def taken(self, rows: RowNumbers) -> BatchOrigin:
        """Return the origin of a batch of the records at ``rows``."""
        return self if self.originals is None else replace(self, originals=self.originals.taken(rows))

    def joined(self, other: BatchOrigin | None) -> BatchOrigin | None:
        """Return the origin of two batches together, or None if it is unknown."""
        if other is None:
            return None
        originals = None
        if self.originals is not None and other.originals is not None:
            originals = Originals.joined([self.originals, other.originals])
        if other.topic != self.topic:
            return None if originals is None else BatchOrigin(None, originals=originals)
        first, last = (self.first_offset, other.first_offset), (self.last_offset, other.last_offset)
        if self.partition != other.partition or None in first or None in last:
            return BatchOrigin(self.topic, originals=originals)
        return BatchOrigin(self.topic, self.partition, min(first), max(last), originals)  # type: ignore[type-var]


class BatchAtHand:
    """The batch that an operator handles now. Outputs and tasks write it."""

    origin: BatchOrigin | None = None
    """Where it was read; None where that is not known, and outside batches."""
    records: Any = None
    """The batch, if its origin has originals."""
