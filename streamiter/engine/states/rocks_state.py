"""States in RocksDB: the settings, the folder of a job, the states of one subtask, and their snapshots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import numpy as np

from streamiter.engine.states.due_rows import DueRows
from streamiter.engine.states.list_rows import ListRows
from streamiter.engine.states.stored import (
    ALL_END,
    END,
    KeyShare,
    StatesClock,
    StoredDatabase,
    frame_in,
    frames_of,
    time_of,
    timed,
    whole_states,
)
from streamiter.engine.storage.flow_record import shortened_name
from streamiter.errors import ConfigurationError, InternalError, shortened
from streamiter.operators.due import Prefetch
from streamiter.operators.keyed_state import KeyedState, KeyedStates, StateFrame
from streamiter.values.deferred import DeferredFiles, LocalFile, PlainValue
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_now
from streamiter.values.helpers.importing import need_package
from streamiter.values.numbers import Array, whole_number
from streamiter.values.plain_data import PlainData
from streamiter.values.records import BATCH_RECORDS
from streamiter.values.subtasks import decode_keys, encode_each_key, key_groups

if TYPE_CHECKING:
    from streamiter.engine.states.database import Database, DatabaseHome, RowChange

# States that are read and held at once. The more keys are read in their order, the nearer is the next one: a key costs
# half of what it costs with 1,024 at once. Large states must not take more memory than the database itself.
_KEYS_AT_ONCE: Final = BATCH_RECORDS
_BYTES_AT_ONCE: Final = 8 << 20

# A sweep reads 0.3 µs a row; so the records wait some milliseconds for it.
_SWEPT_AT_ONCE: Final = 10_000
_SWEEP_MIN_S: Final = 0.02

# Memtables of one database and some blocks.
_MEMORY_BYTES_MIN: Final = 16 << 20

_GROUP: Final = [bytes((group,)) for group in range(END[0])]


@dataclass(frozen=True, slots=True)
class RocksState:
    """Keeps the states of keys in RocksDB, on a local disk: more of them than there is memory for.

    ``Flow(…, state=RocksState("folder"))``; the extra ``[rocks]`` is needed. Results are the same as with states in
    memory, to the bit. Checkpoints store only the files that have changed since the last one.

    The guide: https://streamiter.github.io/streamiter/newest/checkpoints.html#state-on-disk

    >>> import tempfile
    >>> from streamiter import Flow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     flow = Flow("count", state=RocksState(folder))
    ...     letters = flow.from_items(["a", "b", "a"]).key_by(str.upper)
    ...     counts = letters.stateful_map(lambda count, letter: (count + 1, (letter, count + 1)), 0).collect()
    ...     flow.run().state, counts.items
    ('finished', [('a', 1), ('b', 1), ('a', 2)])
    """

    folder: str | os.PathLike[str]
    """A folder on a local disk. Each run has a folder of its own in it, and deletes it at its end; nothing in it is
    needed after that."""
    memory_bytes: int = 256 << 20
    """The memory of RocksDB in each process of the flow. Fast reads need 1.5 bytes for each key in it."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ConfigurationError(
                f'RocksState: expected a folder, given {shortened(self.folder)}; write RocksState("/var/lib/…")'
            )
        whole_number("RocksState: memory_bytes", self.memory_bytes, _MEMORY_BYTES_MIN)

    def _of_job(self, flow: str, plain_data: PlainData) -> RocksJobStates:
        """Return the states of one job. Raises ``ConfigurationError`` without rocksdict."""
        need_package(f"flow {flow!r}, RocksState", "rocksdict", "rocks")
        from streamiter.engine.states.database import DatabaseHome

        home = DatabaseHome(Path(self.folder) / shortened_name(flow), self.memory_bytes, flow=flow)
        return RocksJobStates(home, plain_data)


@final
class RocksJobStates:
    """The databases of one job in one process."""

    def __init__(self, home: DatabaseHome, plain_data: PlainData) -> None:
        self._home = home
        self._plain_data = plain_data
        self._databases: list[Database] = []

    def of_subtask(
        self, step: str, *, clock: Clock, time_to_live_s: float | None = None, in_thread: bool = False
    ) -> KeyedStates:
        from streamiter.engine.states.database import Database

        database = Database(self._home, len(self._databases), owner=f"step {step!r}")
        self._databases.append(database)
        return RocksStates(database, self._plain_data, clock, time_to_live_s, step=step)

    def close(self) -> None:
        close_now([*(database.close for database in self._databases), self._home.close])


class _StatesTime:
    """The clock of the times of last use: the clock of the job, moved so that it stood still while no job ran."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = 0.0

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s() + self._offset_s

    def set(self, now_s: float) -> None:
        self._offset_s = now_s - self._clock.monotonic_s()


@final
class RocksStates:
    """The states of one subtask, in a database; the states of the current batch are objects in a dict.

    A row has the key group and the encoding of the key as its key, and the encoding of the state as its value.
    """

    keys_at_once: int | None = _KEYS_AT_ONCE

    def __init__(
        self, database: Database, plain_data: PlainData, clock: Clock, time_to_live_s: float | None, *, step: str
    ) -> None:
        self.keys_at_once: int | None = _KEYS_AT_ONCE
        self._database = database
        self._plain_data = plain_data
        self._step = step
        self._clock = _StatesTime(clock)
        self._since_s = -float("inf")
        """When rows without a time of last use were used."""
        self._loaded = KeyedState(self._clock, time_to_live_s, name=step, encode=plain_data.encode)
        """The states that were loaded since the last ``store``."""
        self._rows: dict[Any, tuple[bytes, bytes | None]] = {}
        """By the loaded keys: the key and the value of the row, None if there was no row."""
        self._stored: dict[str, object] = {}
        """The files of the database that the store of checkpoints has."""
        self._swept_to = b""
        self._due: dict[int, DueRows] = {}
        """The due items by number."""
        self._lists: ListRows | None = None
        """For states that are lists with a row for each entry."""

    @property
    def time_to_live_s(self) -> float | None:
        return self._loaded.time_to_live_s

    # ---- the states of a batch

    def list_entries(self) -> ListRows:
        if self._lists is None:
            self._lists = ListRows(self._database, self._plain_data, self._loaded.states, self._encoded)
        return self._lists

    def prefetch(self, keys: Sequence[Any]) -> None:
        if self._lists is not None:
            self._limit_keys(*self._lists.load(keys, self._row_keys))
            return
        rows, loaded = self._rows, self._loaded
        missing = [key for key in dict.fromkeys(keys) if key not in rows] if rows else list(dict.fromkeys(keys))
        if not missing:
            return
        # In the order of the rows, also for `store`: then RocksDB finds the next row near the last one.
        ordered = sorted(zip(self._row_keys(missing), missing, strict=True))
        row_keys = [row_key for row_key, _ in ordered]
        keys = [key for _, key in ordered]
        values = self._database.read(row_keys)
        rows.update(zip(keys, zip(row_keys, values, strict=True), strict=True))
        found = [value for value in values if value is not None]
        known = keys
        if len(found) < len(keys):
            known = [key for key, value in zip(keys, values, strict=True) if value is not None]
        self._limit_keys(len(found), sum(map(len, found)))
        loaded.states.update(zip(known, self._plain_data.decode_each([*map(frame_in, found)]), strict=True))
        if self.time_to_live_s is not None:
            times = [max(time_of(value), self._since_s) for value in found]
            loaded.used_at_s.update(zip(known, times, strict=True))

    def _limit_keys(self, found: int, size_bytes: int) -> None:
        """Load fewer keys at once if their states are large."""
        if found:
            self.keys_at_once = max(1, min(_KEYS_AT_ONCE, _BYTES_AT_ONCE * found // size_bytes))

    def load(self, keys: Sequence[Any] | Array) -> dict[Any, Any]:
        self.prefetch(keys.tolist() if isinstance(keys, np.ndarray) else keys)
        return self._loaded.states

    def store(self) -> None:
        self._store()

    def _store(self, *, whole: bool = False) -> None:
        """Write what has changed; with ``whole`` also what may stay in memory for a while."""
        changes = self._changes() if self._rows else []
        for due in self._due.values():
            changes += due.changes(whole=whole)
        if self._lists is not None:
            changes += self._lists.store(whole=whole)
        if changes:
            self._database.write(changes)

    def _changes(self) -> list[RowChange]:
        """Return the changed rows of the loaded states, and forget the states."""
        rows, loaded = self._rows, self._loaded
        states, used_at_s = loaded.states, loaded.used_at_s
        keys = [key for key in rows if key in states]
        frames = self._encoded(keys, [*map(states.__getitem__, keys)])
        if self.time_to_live_s is not None:
            frames = [timed(frame, used_at_s[key]) for key, frame in zip(keys, frames, strict=True)]
        new = dict(zip(keys, frames, strict=True))
        changes: list[RowChange] = [
            (row_key, value) for key, (row_key, before) in rows.items() if (value := new.get(key)) != before
        ]
        self._forget()
        return changes

    def _forget(self) -> None:
        """Forget the loaded states."""
        self._rows = {}
        self._loaded.states.clear()
        self._loaded.used_at_s.clear()

    def _row_keys(self, keys: list[Any]) -> list[bytes]:
        return [
            _GROUP[group] + key for group, key in zip(key_groups(keys).tolist(), encode_each_key(keys), strict=True)
        ]

    def _encoded(self, keys: list[Any], states: list[Any]) -> list[bytes]:
        return self._plain_data.encode_each(
            states, name_of=lambda at: f"state of step {self._step!r}, key {shortened(keys[at])}: state"
        )

    def get(self, key: Any) -> Any:
        if key not in self._rows:
            self.prefetch((key,))
        return self._loaded.get(key)

    def set(self, key: Any, value: Any) -> None:
        if key not in self._rows:
            self.prefetch((key,))
        self._loaded.set(key, value)

    def delete(self, key: Any) -> None:
        if key not in self._rows:
            self.prefetch((key,))
        self._loaded.delete(key)

    def clear(self) -> None:
        self._delete_all()

    def _delete_all(self) -> None:
        self._forget()
        self._due.clear()
        self._lists = None
        self._database.delete_range(b"", ALL_END)

    # ---- due items

    def due(self, number: int, numbers: int, *, of_pairs: bool = False, prefetch: Prefetch | None = None) -> DueRows:
        def load(keys: Sequence[Any]) -> None:
            self.prefetch(keys)
            if prefetch is not None:
                prefetch(keys)

        if number in self._due:
            self._store(whole=True)
        due = self._due[number] = DueRows(
            number, numbers, self._database, of_pairs=of_pairs, load=load, turn=lambda: self.keys_at_once or 1
        )
        return due

    def all_without_due(self) -> Iterator[Mapping[Any, Any]]:
        self._store(whole=True)
        self._database.delete_range(END, ALL_END)
        for rows, states in whole_states(self._database.rows(b"", END), self._plain_data):
            yield dict(zip(decode_keys([key[1:] for key, _ in rows]), states, strict=True))
            self.store()

    @property
    def summary(self) -> PlainValue:
        [value] = self._database.read([END])
        return None if value is None else self._plain_data.decode(value)

    @summary.setter
    def summary(self, summary: PlainValue) -> None:
        self._database.write([(END, self._plain_data.encode(summary))])

    def drop_expired(self) -> float:
        if self.time_to_live_s is None:
            return float("inf")
        if self._database.is_making_checkpoint:
            return _SWEEP_MIN_S
        oldest_s = self._clock.monotonic_s() - self.time_to_live_s
        rows = list(islice(self._database.rows(self._swept_to, END), _SWEPT_AT_ONCE))
        expired: list[RowChange] = [(key, None) for key, value in rows if max(time_of(value), self._since_s) < oldest_s]
        if expired:
            self._database.write(expired)
        if len(rows) < _SWEPT_AT_ONCE:
            self._swept_to = b""
            return self.time_to_live_s
        self._swept_to = rows[-1][0] + b"\x00"
        return max(_SWEEP_MIN_S, self.time_to_live_s * _SWEPT_AT_ONCE / max(self._database.row_count, _SWEPT_AT_ONCE))

    # ---- snapshots

    def snapshot(self) -> FrozenDatabase:
        self._store(whole=True)
        folder, made = self._database.checkpoint()
        clock = StatesClock(self._clock.monotonic_s(), self._since_s, self.time_to_live_s is not None)
        return FrozenDatabase(self._step, folder, made, clock, self._plain_data, self._stored)

    async def restore(self, state: Iterable[StateFrame]) -> None:
        self._forget()
        self._due.clear()
        self._lists = None
        if isinstance(state, StoredDatabase):
            await self._go_on_with(state)
        elif isinstance(state, KeyShare) and (databases := state.databases()) is not None:
            await self._take_share(databases, state.groups)
        else:
            self._delete_all()
            self._take(state)

    async def _go_on_with(self, stored: StoredDatabase) -> None:
        folder = self._database.fetched_folder
        await stored.fetch(folder)
        self._database.replace(folder)
        self._stored.clear()
        self._stored.update((file.name, file) for file in stored.files)
        self._clock.set(stored.clock.now_s)
        is_new = self.time_to_live_s is not None and not stored.clock.is_timed
        self._since_s = stored.clock.now_s if is_new else stored.clock.since_s

    async def _take_share(self, databases: Sequence[StoredDatabase], groups: range) -> None:
        """Go on with the database that has most of these key groups, and copy the others from the other databases."""
        first = [_first(index, len(databases)) for index in range(len(databases) + 1)]
        shares = [range(max(start, groups.start), min(stop, groups.stop)) for start, stop in pairwise(first)]
        largest = max(range(len(shares)), key=lambda index: len(shares[index]))
        await self._go_on_with(databases[largest])
        kept = shares[largest]
        self._database.delete_range(b"", _GROUP[kept.start])
        self._database.delete_range(_border(kept.stop), ALL_END)
        for database, share in zip(databases, shares, strict=True):
            if share and share is not kept:
                await self._copy(database, share)

    async def _copy(self, stored: StoredDatabase, groups: range) -> None:
        from streamiter.engine.states.database import opened, rows_in

        folder = self._database.fetched_folder
        await stored.fetch(folder)
        later_s = self._clock.monotonic_s() - stored.clock.now_s
        since_s = stored.clock.since_s if stored.clock.is_timed else stored.clock.now_s

        def moved(value: bytes) -> bytes:
            if self.time_to_live_s is None:
                return frame_in(value)
            return timed(frame_in(value), max(time_of(value), since_s) + later_s)

        with opened(folder, owner=f"step {self._step!r}") as database:
            rows = rows_in(database, _GROUP[groups.start], _border(groups.stop))
            while some := list(islice(rows, _SWEPT_AT_ONCE)):
                self._database.write([(key, moved(value)) for key, value in some])
        shutil.rmtree(folder)

    def _take(self, frames: Iterable[StateFrame]) -> None:
        """Write the rows of a snapshot of states in memory, or of a share that has one."""
        now_s = self._clock.monotonic_s()
        for keys, states, *idle_s in frames:
            values = self._encoded(keys, states)
            if self.time_to_live_s is not None:
                idle = idle_s[0] if idle_s else [0.0] * len(keys)
                values = [timed(value, now_s - one_s) for value, one_s in zip(values, idle, strict=True)]
            self._database.write([*zip(self._row_keys(keys), values, strict=True)])


def _first(subtask: int, subtasks: int) -> int:
    """Return the first key group of a subtask; the inverse of ``group * subtasks // 128``."""
    return -(-subtask * len(_GROUP) // subtasks)


def _border(group: int) -> bytes:
    return _GROUP[group] if group < len(_GROUP) else END


@final
class FrozenDatabase(DeferredFiles):
    """A checkpoint of a database, in a folder of its own, which ``release`` deletes."""

    def __init__(
        self,
        step: str,
        folder: Path,
        made: Future[None],
        clock: StatesClock,
        plain_data: PlainData,
        stored: dict[str, object],
    ) -> None:
        self.name = step
        self._folder = folder
        self._made = made
        self._clock = clock
        self._plain_data = plain_data
        self.stored = stored
        self._small: Mapping[str, bytes] = {}
        self._is_released = False

    def wait(self) -> None:
        self._made.result()

    def files(self) -> Sequence[LocalFile]:
        from streamiter.engine.states.database import explained, files_of

        try:
            paths, self._small = files_of(self._folder)
        except OSError as error:  # Its disk is lost, and not the one to which the checkpoint is written.
            raise explained(error, f"step {self.name!r}", self._folder) from error
        for name in self.stored.keys() - {path.name for path in paths}:  # RocksDB never uses the name again.
            del self.stored[name]
        return [LocalFile(path.name, path) for path in paths]

    def rest(self) -> bytes:
        return self._plain_data.encode([list(msgspec.structs.astuple(self._clock)), dict(self._small)])

    def frames(self) -> Iterator[bytes]:
        from streamiter.engine.states.database import opened

        self.wait()
        if self._is_released:
            raise InternalError(f"the state of step {self.name!r} was released before all of it was read")
        with opened(self._folder, owner=f"step {self.name!r}") as database:
            yield from map(self._plain_data.encode, frames_of(database, self._clock, self._plain_data))
        self.release()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._made.add_done_callback(lambda made: shutil.rmtree(self._folder, ignore_errors=True))
