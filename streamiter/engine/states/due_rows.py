"""Due items on disk: rows of the database that has the states of a step, in the order of their times.

A row has no value. Its key is the number of the items behind ``END``, the numbers of its order with 8 bytes each, and
the encoding of the item's key. So the first rows are due first, and a scan reads no row that is not due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.engine.states.stored import due_prefix
from streamiter.operators.due import DueItem
from streamiter.values.subtasks import decode_keys, encode_each_key
from streamiter.values.times import MAX_TIME, MIN_TIME

if TYPE_CHECKING:
    from streamiter.engine.states.database import Database, RowChange

_NUMBERS: Final = [Struct(f">{count}Q") for count in range(4)]
# The number of items that are read at once when one is taken.
_AHEAD: Final = 256
# Added to a number, so that the bytes of negative ones come first.
_ZERO: Final = 2**63


@final
class DueRows:
    """Due items of one subtask. What is pushed and taken is written with the states, at ``store``."""

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
        self._least = MIN_TIME
        """No row has a lower time."""
        self._begin = self._from(MIN_TIME)
        """No row is before it. So a scan does not pass by the rows that were deleted."""
        self._pushed: list[tuple[tuple[int, ...], Any]] = []
        self._changed: dict[bytes, bytes | None] = {}
        """Rows that were taken, and those that were pushed while ``_near`` or ``_ahead`` may need them."""
        self._near: list[DueItem] = []
        """A heap of the items that are taken now, with their rows."""
        self._near_to: tuple[int, bytes] | None = None
        """While items are taken: all up to this time and row are in ``_near``."""
        self._ahead: list[DueItem] = []
        """A heap of the first items, with their rows. A scan for each of them would pass by all that were taken."""
        self._ahead_to: bytes | None = None
        """All up to this row are in ``_ahead``."""

    def push(self, order: tuple[int, ...], key: Any) -> None:
        near_to = self._near_to
        if near_to is not None and order[0] <= near_to[0]:
            [row] = self._rows([(order, key)])
            if row <= near_to[1]:
                self._changed[row] = b""
                heappush(self._near, (*order, row, key))
                return
        if order[0] <= self._least:
            self._least = order[0]
            self._begin = self._from(order[0])
        if self._ahead_to is None:
            self._pushed.append((order, key))
            return
        [row] = self._rows([(order, key)])
        self._changed[row] = b""
        if row <= self._ahead_to:
            heappush(self._ahead, (*order, row, key))

    def changes(self) -> list[RowChange]:
        """Return what was pushed and taken since the last call, to be written now."""
        changed, pushed = self._changed, self._pushed
        self._changed, self._pushed = {}, []
        changed.update(dict.fromkeys(self._rows(pushed), b""))
        return [*changed.items()]

    def until(self, time: int) -> Iterator[DueItem]:
        self.is_more = False
        if time < self._least:
            return
        self._ahead, self._ahead_to = [], None
        self._flush()
        count = self._turn()
        end = self._end if time == MAX_TIME else self._from(time + 1)
        rows = [row for row, _ in islice(self._database.rows(self._begin, end), count)]
        self.is_more = len(rows) == count
        near = self._near = self._items(rows)
        self._load([item[-1][0] if self._of_pairs else item[-1] for item in near])
        self._near_to = (near[-1][0], rows[-1]) if self.is_more else (time, end)
        while near:
            item = heappop(near)
            self._changed[item[-2]] = None
            yield item
        self._least = self._near_to[0] if self.is_more else min(time, MAX_TIME - 1) + 1
        self._begin = rows[-1] if self.is_more else self._from(self._least)
        self._near_to = None

    def first(self) -> int | None:
        self._flush()
        found = next(iter(self._database.rows(self._begin, self._end)), None)
        if found is None:
            return None
        self._begin = found[0]
        self._least = _NUMBERS[1].unpack_from(self._begin, 1)[0] - _ZERO
        return self._least

    def take_first(self) -> DueItem:
        if not self._ahead:
            self._flush()
            rows = [row for row, _ in islice(self._database.rows(self._begin, self._end), _AHEAD)]
            self._ahead, self._ahead_to = self._items(rows), rows[-1]
        item = heappop(self._ahead)
        self._load([item[-1][0] if self._of_pairs else item[-1]])
        self._begin, self._least, self._changed[item[-2]] = item[-2], item[0], None
        return item

    def remove(self, order: tuple[int, ...], key: Any, is_kept: Callable[[DueItem], bool]) -> None:
        self._changed.update(dict.fromkeys(self._rows(self._pushed), b""))
        self._pushed = []
        [row] = self._rows([(order, key)])
        self._changed[row] = None

    def may_keep_removed(self, kept: int) -> bool:
        return False

    def latest(self) -> Iterator[DueItem]:
        self._flush()
        for row in self._database.keys_from_the_end(self._prefix, self._end):
            yield from self._items([row])

    def _flush(self) -> None:
        if self._pushed or self._changed:
            self._database.write(self.changes())

    def _from(self, time: int) -> bytes:
        """Return the beginning of all rows from this time on."""
        return self._prefix + _NUMBERS[1].pack(time + _ZERO)

    def _rows(self, items: list[tuple[tuple[int, ...], Any]]) -> list[bytes]:
        if not items:
            return []
        prefix, pack = self._prefix, self._numbers.pack
        keys = encode_each_key([key for _, key in items])
        return [
            # A time plus two long durations may be later than all times.
            prefix + pack(min(order[0], MAX_TIME) + _ZERO, *[number + _ZERO for number in order[1:]]) + key
            for (order, _), key in zip(items, keys, strict=True)
        ]

    def _items(self, rows: list[bytes]) -> list[DueItem]:
        unpack, begin = self._numbers.unpack_from, len(self._prefix) + self._numbers.size
        keys = decode_keys([row[begin:] for row in rows])
        return [(*[number - _ZERO for number in unpack(row, 1)], row, key) for row, key in zip(rows, keys, strict=True)]
