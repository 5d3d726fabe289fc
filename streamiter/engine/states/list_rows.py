"""States that are two lists of entries: in long lists, each entry is a row of its own behind the row of its key.

The row of a key has its state, or two empty lists: then its entries are the rows behind it. The key of an entry's row
is that of the row of the key, the list (0 or 1), and time and number of the entry with 8 bytes each: so the rows of a
list are in its order. No encoded key is the beginning of another one, so what begins with the row of a key belongs to
it. Lists that have rows keep them until they are empty.

The lists of recent keys stay in memory as objects, and what has changed is encoded when it is written: most entries of
a join leave before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.engine.states.stored import ENTRY, ZERO, states_with
from streamiter.errors import PlainDataError
from streamiter.operators.keyed_state import ListEntry
from streamiter.values.plain_data import PlainData
from streamiter.values.records import estimated_bytes

if TYPE_CHECKING:
    from streamiter.engine.states.database import Database, RowChange

# What is kept in memory of the lists of keys, estimated: the lists of 100,000 keys with a record each.
_BYTES_MAX: Final = 32 << 20
# Keys and rows that change before they are written, in a tenth of a second. A checkpoint writes them first.
_CHANGES_MAX: Final = 32_768
# More entries of a key become rows.
_ENTRIES_IN_ONE_ROW: Final = 8
# Of an entry that was read, besides its bytes.
_ENTRY_BYTES: Final = 200


@final
class _Lists:
    """The lists of a key that are in memory."""

    __slots__ = ("changed", "is_touched", "is_written", "key", "new", "row_key")

    def __init__(self, key: Any, row_key: bytes) -> None:
        self.key = key
        self.row_key = row_key
        self.is_written = False
        """Whether the key has a row."""
        self.is_touched = False
        """Whether something has changed since the row was written."""
        self.new: dict[int, tuple[int, ListEntry]] | None = None
        """If each entry has a row: entries without one yet, by number, each with its list. None if the state is one."""
        self.changed: dict[int, tuple[int, ListEntry, bool]] | None = None
        """If each entry has a row: entries whose rows must change, each with its list and whether it still exists."""

    def row(self, place: int, entry: ListEntry) -> bytes:
        return self.row_key + ENTRY.pack(place, entry[0] + ZERO, entry[1])


@final
class ListRows:
    """The lists of one subtask; the lists of recent keys are in ``states``."""

    def __init__(
        self,
        database: Database,
        plain_data: PlainData,
        states: dict[Any, Any],
        encoded: Callable[[list[Any], list[Any]], list[bytes]],
    ) -> None:
        """``encoded`` encodes the states of some keys, with an error that tells the key."""
        self._database = database
        self._plain_data = plain_data
        self._states = states
        self._encoded = encoded
        self._empty = plain_data.encode([[], []])
        self._lists: dict[Any, _Lists] = {}
        """By the keys whose lists are in memory."""
        self._touched: list[_Lists] = []
        """The lists that have changed since they were written."""
        self._changes = 0
        """The number of changes since then."""
        self._came: list[ListEntry] = []
        """The entries that came since the last ``store``, to estimate their size."""
        self._bytes = 0

    # -- what the step does

    def came(self, key: Any, place: int, entry: ListEntry) -> None:
        self._came.append(entry)
        lists = self._lists[key]
        if not lists.is_touched:
            self._touch(lists)
        if lists.new is not None:
            lists.new[entry[1]] = place, entry
            self._changes += 1

    def changed(self, key: Any, place: int, entry: ListEntry) -> None:
        self._change(key, place, entry, is_there=True)

    def left(self, key: Any, place: int, entry: ListEntry) -> None:
        lists = self._lists[key]
        if lists.new is None or lists.new.pop(entry[1], None) is None:
            self._change(key, place, entry, is_there=False)

    def _change(self, key: Any, place: int, entry: ListEntry, *, is_there: bool) -> None:
        lists = self._lists[key]
        if not lists.is_touched:
            self._touch(lists)
        if lists.new is not None and entry[1] not in lists.new:
            if lists.changed is None:
                lists.changed = {}
            lists.changed[entry[1]] = place, entry, is_there
            self._changes += 1

    def _touch(self, lists: _Lists) -> None:
        lists.is_touched = True
        self._touched.append(lists)
        self._changes += 1

    # -- the database

    def load(self, keys: Iterable[Any], row_keys_of: Callable[[list[Any]], list[bytes]]) -> tuple[int, int]:
        """Have the lists of these keys in ``states``; return the number of states that were read, and of bytes."""
        known = self._lists
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        if not missing:
            return 0, 0
        ordered = sorted(zip(row_keys_of(missing), missing, strict=True))
        values = self._database.read([row_key for row_key, _ in ordered])
        found: list[_Lists] = []
        for (row_key, key), value in zip(ordered, values, strict=True):
            lists = known[key] = _Lists(key, row_key)
            if value is not None:
                lists.is_written = True
                found.append(lists)
        frames = [value for value in values if value is not None]
        in_rows = [at for at, frame in enumerate(frames) if frame == self._empty]
        entries: list[tuple[int, int, bytes]] = []
        for at, rows in zip(in_rows, self._database.rows_behind([found[at].row_key for at in in_rows]), strict=True):
            found[at].new = {}
            entries += [(at, row[-ENTRY.size], value) for row, value in rows]
        states = states_with(frames, entries, self._plain_data)
        self._states.update(zip([lists.key for lists in found], states, strict=True))
        size_bytes = sum(map(len, frames)) + sum(len(frame) for *_, frame in entries)
        self._bytes += size_bytes + _ENTRY_BYTES * (len(missing) + len(entries))
        return len(found), size_bytes

    def store(self, *, whole: bool = False) -> list[RowChange]:
        """Return the rows to write, if they are many, or for ``whole``; forget the lists that take too much memory."""
        self._bytes += estimated_bytes(self._came)
        self._came.clear()
        is_full = self._bytes > _BYTES_MAX
        if not (whole or is_full or self._changes > _CHANGES_MAX):
            return []
        changes = self._changed_rows()
        if is_full:
            self._states.clear()
            self._lists, self._bytes = {}, 0
        return changes

    def _changed_rows(self) -> list[RowChange]:
        touched, self._touched, self._changes = self._touched, [], 0
        changes: list[RowChange] = []
        whole: list[_Lists] = []
        entries: list[tuple[_Lists, int, ListEntry]] = []
        for lists in touched:
            state, lists.is_touched = self._states.get(lists.key), False
            if state is not None and lists.new is None and len(state[0]) + len(state[1]) <= _ENTRIES_IN_ONE_ROW:
                lists.is_written = True
                whole.append(lists)
                continue
            for place, entry, is_there in () if lists.changed is None else lists.changed.values():
                if is_there:
                    entries.append((lists, place, entry))
                else:
                    changes.append((lists.row(place, entry), None))
            lists.changed = None
            if state is None:
                if lists.is_written:
                    changes.append((lists.row_key, None))
                lists.is_written, lists.new = False, None
                continue
            if lists.new is None:
                changes.append((lists.row_key, self._empty))
                entries += [(lists, place, entry) for place in (0, 1) for entry in state[place]]
                lists.is_written = True
            else:
                entries += [(lists, place, entry) for place, entry in lists.new.values()]
            lists.new = {}
        frames = self._encoded([lists.key for lists in whole], [self._states[lists.key] for lists in whole])
        changes += zip([lists.row_key for lists in whole], frames, strict=True)
        rows = [lists.row(place, entry) for lists, place, entry in entries]
        return [*changes, *zip(rows, self._frames(entries), strict=True)]

    def _frames(self, entries: Sequence[tuple[_Lists, int, ListEntry]]) -> list[bytes]:
        try:
            return self._plain_data.encode_each([entry for *_, entry in entries], name_of=str)
        except PlainDataError:
            # The error tells the place of what is at fault in the state of its key.
            keys = list(dict.fromkeys(lists.key for lists, *_ in entries))
            self._encoded(keys, [self._states[key] for key in keys])
            raise
