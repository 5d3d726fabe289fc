"""Due items on disk: rows of the database that has the states of a step, in the order of their times.

A row has no value. Its key is the number of the items behind ``END``, the numbers of its order with 8 bytes each, and
the encoding of the item's key. So the first rows are due first, and a scan reads no row that is not due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.engine.states.stored import ZERO, due_prefix
from streamiter.operators.due import DueItem
from streamiter.values.subtasks import decode_keys, encode_each_key
from streamiter.values.times import MAX_TIME, MIN_TIME

if TYPE_CHECKING:
    from streamiter.engine.states.database import Database, RowChange

_NUMBERS: Final = [Struct(f">{count}Q") for count in range(4)]
# Items that are read at once. Up to twice as many are in memory; a checkpoint writes those that are not written. With
# 8,192 a record costs a tenth more, since the garbage collector visits all of them.
_AHEAD: Final = 1_024


@final
class DueRows:
    """Due items of one subtask. The first ones are in memory, and most of them are taken before they are written."""

    def __init__(
        self,
        number: int,
        numbers: int,
        database: Database,
        *,
        of_pairs: bool,
        load: Callable[[Sequence[Any]], object],
        turn: Callable[[], int],
    ) -> None:
        """``turn`` returns the number of items whose states should be loaded at once."""
        self.is_more = False
        self._prefix, self._end = due_prefix(number), due_prefix(number + 1)
        self._numbers = _NUMBERS[numbers]
        self._database = database
        self._of_pairs = of_pairs
        self._load = load
        self._turn = turn
        self._heap: list[DueItem] = []
        """The items in memory, and some that were removed. A number before the key keeps keys from being compared."""
        self._written: dict[int, bytes] = {}
        """By that number: the rows of the items in memory that have one."""
        self._removed: set[tuple[tuple[int, ...], Any]] = set()
        """The items in memory that were removed."""
        self._to, self._to_time = self._prefix, MIN_TIME
        """All items whose rows are before this one are in memory; none with a lower time is after it."""
        self._count = 0
        self._beyond: list[tuple[tuple[int, ...], Any]] = []
        """Items that were pushed, and are not in memory otherwise."""
        self._changed: dict[bytes, bytes | None] = {}
        self._near: list[DueItem] = []
        """A heap of the items that were pushed while others are taken, and are taken with them."""
        self._near_to: tuple[int, ...] | None = None
        """While items are taken: what is pushed before this place is taken, too."""

    def push(self, order: tuple[int, ...], key: Any) -> None:
        if order[0] > MAX_TIME:  # A time plus two long durations may be later than all times.
            order = (MAX_TIME, *order[1:])
        self._count += 1
        if self._near_to is not None and order < self._near_to:
            heappush(self._near, (*order, self._count, key))
        elif order[0] < self._to_time or (order[0] == self._to_time and self._row(order, key) < self._to):
            self._removed.discard((order, key))
            heappush(self._heap, (*order, self._count, key))
            if len(self._heap) > 2 * _AHEAD:
                self._keep_the_first()
        else:
            self._beyond.append((order, key))

    def changes(self, *, whole: bool = False) -> list[RowChange]:
        """Return what is to be written now; with ``whole`` also the items in memory."""
        changed, beyond = self._changed, self._beyond
        self._changed, self._beyond = {}, []
        changed.update(dict.fromkeys(self._rows(beyond), b""))
        if whole:
            unwritten = [item for item in self._in_memory() if item[-2] not in self._written]
            rows = self._rows([*map(_pair, unwritten)])
            self._written.update(zip([item[-2] for item in unwritten], rows, strict=True))
            changed.update(dict.fromkeys(rows, b""))
        return [*changed.items()]

    def until(self, time: int) -> Iterator[DueItem]:
        self.is_more = False
        if not self._is_one(time):
            return
        taken, count = [self._taken()], self._turn()
        while len(taken) < count and self._is_one(time):
            taken.append(self._taken())
        self.is_more = len(taken) == count
        self._load([item[-1][0] if self._of_pairs else item[-1] for item in taken])
        self._near_to = taken[-1][:-2] if self.is_more else (time + 1,)
        near = self._near
        for item in taken:
            while near and near[0] < item:
                yield heappop(near)
            yield item
        while near:
            yield heappop(near)
        self._near_to = None

    def first(self) -> int | None:
        return self._heap[0][0] if self._is_one(MAX_TIME) else None

    def take_first(self) -> DueItem:
        assert self._is_one(MAX_TIME)
        item = self._taken()
        self._load([item[-1][0] if self._of_pairs else item[-1]])
        return item

    def _is_one(self, time: int) -> bool:
        """Whether there is an item up to this time; then the first one is in memory."""
        heap = self._heap
        while self._removed and heap and _pair(heap[0]) in self._removed:
            self._removed.discard(_pair(heap[0]))
            self._written.pop(heappop(heap)[-2], None)
        if not heap and self._to_time <= time and self._to != self._end:
            self._read()
        return bool(heap) and heap[0][0] <= time

    def _taken(self) -> DueItem:
        item = heappop(self._heap)
        if (row := self._written.pop(item[-2], None)) is not None:
            self._changed[row] = None
        return item

    def _read(self) -> None:
        """Read the next items into memory, which has none."""
        self._write(self.changes())
        rows = [row for row, _ in islice(self._database.rows(self._to, self._end), _AHEAD)]
        for row, (order, key) in zip(rows, self._items(rows), strict=True):
            self._count += 1
            self._written[self._count] = row
            self._heap.append((*order, self._count, key))
        if len(rows) < _AHEAD:
            self._to, self._to_time = self._end, MAX_TIME + 1
        else:
            self._to, self._to_time = rows[-1] + b"\x00", self._heap[-1][0]

    def _in_memory(self) -> list[DueItem]:
        """Return the items in memory, without those that were removed."""
        if not self._removed:
            return self._heap
        return [item for item in self._heap if _pair(item) not in self._removed]

    def _keep_the_first(self) -> None:
        """Keep the first half of the items in memory; the others are read again."""
        heap, written = sorted(self._in_memory()), self._written
        if len(heap) > _AHEAD:
            order = heap[_AHEAD][:-2]
            self._to, self._to_time = self._before(order), order[0]
            if order == heap[_AHEAD - 1][:-2]:  # Their order is that of the rows, too.
                by_row = sorted(zip(self._rows([*map(_pair, heap)]), heap, strict=True))
                heap, self._to = [item for _, item in by_row], by_row[_AHEAD][0]
            self._beyond += [_pair(item) for item in heap[_AHEAD:] if item[-2] not in written]
        self._heap = heap[:_AHEAD]
        self._written = {item[-2]: written[item[-2]] for item in self._heap if item[-2] in written}
        self._removed.clear()
        heapify(self._heap)

    def remove(self, order: tuple[int, ...], key: Any, is_kept: Callable[[DueItem], bool]) -> None:
        self._changed.update(dict.fromkeys(self._rows(self._beyond), b""))
        self._beyond = []
        row = self._row(order, key)
        self._changed[row] = None
        if row < self._to:
            self._removed.add((order, key))

    def may_keep_removed(self, kept: int) -> bool:
        return False

    def latest(self) -> Iterator[DueItem]:
        self._write(self.changes(whole=True))
        for row in self._database.keys_from_the_end(self._prefix, self._end):
            [(order, key)] = self._items([row])
            yield (*order, row, key)

    def _write(self, changes: list[RowChange]) -> None:
        if changes:
            self._database.write(changes)

    def _row(self, order: tuple[int, ...], key: Any) -> bytes:
        [row] = self._rows([(order, key)])
        return row

    def _before(self, order: tuple[int, ...]) -> bytes:
        """Return the beginning of the rows of all items of this order."""
        return self._prefix + self._numbers.pack(*[number + ZERO for number in order])

    def _rows(self, items: list[tuple[tuple[int, ...], Any]]) -> list[bytes]:
        if not items:
            return []
        keys = encode_each_key([key for _, key in items])
        return [self._before(order) + key for (order, _), key in zip(items, keys, strict=True)]

    def _items(self, rows: list[bytes]) -> list[tuple[tuple[int, ...], Any]]:
        unpack, begin = self._numbers.unpack_from, len(self._prefix) + self._numbers.size
        keys = decode_keys([row[begin:] for row in rows])
        return [(tuple([number - ZERO for number in unpack(row, 1)]), key) for row, key in zip(rows, keys, strict=True)]


def _pair(item: DueItem) -> tuple[tuple[int, ...], Any]:
    """Return the order and the key of an item."""
    return item[:-2], item[-1]
