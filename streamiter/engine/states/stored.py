"""States in snapshots: the databases of earlier subtasks, and the share that a subtask of a new job has of them.

A backend that can use files takes the files of a :class:`StoredDatabase`. Other backends read its frames, as they read
a snapshot of states in memory. :class:`StoredFrames` are the states of operators that keep files of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from streamiter.engine.storage.snapshot import SharedFile
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.errors import CheckpointError
from streamiter.operators.keyed_state import StateFrame, select_keys
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.importing import need_package
from streamiter.values.plain_data import PlainData
from streamiter.values.subtasks import decode_keys, key_groups

# ---- rows

# No frame of plain data begins with this byte.
_TIMED: Final = b"\x00"
_TIME: Final = Struct("<cd")

END: Final = b"\x80"
"""The end of the rows of states: the first byte of such a row's key is its key group, below 128.

The row with this key has what follows from the states besides due items, and the rows behind it are due items."""

ZERO: Final = 2**63
"""Added to a number in the key of a row, so that the bytes of negative ones come first."""

ALL_END: Final = b"\xff"
"""The end of the range of all rows."""


def due_prefix(number: int) -> bytes:
    """Return the first byte of the rows of due items."""
    return bytes((END[0] + 1 + number,))


ENTRY: Final = Struct(">BQQ")
"""The end of the key of the row of an entry of a list: which list, time and number."""

FRAME_KEYS: Final = 1024
"""The rows of one frame: some milliseconds of decoding."""


def timed(frame: bytes, used_at_s: float) -> bytes:
    """Return the value of a row with the time of last use.

    >>> time_of(timed(b"frame", 2.5)), frame_in(timed(b"frame", 2.5)), time_of(b"frame")
    (2.5, b'frame', -inf)
    """
    return _TIME.pack(_TIMED, used_at_s) + frame


def frame_in(value: bytes) -> bytes:
    """Return the frame of the state in the value of a row."""
    return value if value[0] else value[_TIME.size :]


def time_of(value: bytes) -> float:
    """Return the time of last use in the value of a row; −∞ if it has none."""
    if value[0]:
        return -float("inf")
    used_at_s: float = _TIME.unpack_from(value)[1]
    return used_at_s


class StatesClock(msgspec.Struct, frozen=True):
    """The clock of the times of last use in a database. It stands still while no job runs."""

    now_s: float
    """What it shows at the barrier."""
    since_s: float
    """A row without a time, or with an earlier one, was used then: when its step got its time to live."""
    is_timed: bool
    """Whether the step has a time to live."""


# ---- files of a snapshot


class _StoredFiles:
    """A piece of state that is files, and a few frames besides."""

    def __init__(
        self, stored: StoredSnapshot, part: str, number: int, files: Sequence[SharedFile], plain_data: PlainData
    ) -> None:
        """``number`` is the number of the deferred piece in its part; the piece has these ``files``."""
        self._stored = stored
        self._part = part
        self._number = number
        self.files = files
        """The files in the store."""
        self._plain_data = plain_data

    def _frames_besides(self) -> Iterator[PlainValue]:
        return map(self._plain_data.decode, self._stored.frames(self._part, self._number))

    def _fetch_files(self, folder: Path) -> None:
        for file in self.files:
            self._stored.fetch(file, folder / file.name)


class StoredFrames(_StoredFiles, Iterable[PlainValue]):
    """The frames of a piece of state that is files, each of them a frame (``FramesInFiles``)."""

    def fetch(self, folder: Path) -> None:
        self._fetch_files(folder)

    def __iter__(self) -> Iterator[PlainValue]:
        yield from self._frames_besides()
        with tempfile.TemporaryDirectory(prefix="streamiter-") as name:
            for file in self.files:
                path = Path(name) / file.name
                self._stored.fetch(file, path)
                yield self._plain_data.decode(path.read_bytes())
                path.unlink()


# ---- databases of a snapshot


class StoredDatabase(_StoredFiles, Iterable[StateFrame]):
    """The states of one subtask in a snapshot: a database. It is also an iterable of frames, by key group."""

    def __init__(
        self, stored: StoredSnapshot, part: str, number: int, files: Sequence[SharedFile], plain_data: PlainData
    ) -> None:
        super().__init__(stored, part, number, files, plain_data)
        clock, self._small = self._rest()
        self.clock: StatesClock = clock
        """The clock of its times of last use."""

    def _rest(self) -> tuple[StatesClock, dict[str, bytes]]:
        try:
            [[clock, small]] = self._frames_besides()
            return StatesClock(*clock), dict(small)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._part}: expected the state of a database, given something else ({error}); start from another "
                "checkpoint"
            ) from error

    async def fetch(self, folder: Path) -> None:
        """Make ``folder`` this database."""
        await self._stored.run_call(self._fetch, folder)

    def _fetch(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._fetch_files(folder)
        for name, content in self._small.items():
            (folder / name).write_bytes(content)

    def __iter__(self) -> Iterator[StateFrame]:
        need_package(self._part, "rocksdict", "rocks")
        from streamiter.engine.states.database import opened

        with tempfile.TemporaryDirectory(prefix="streamiter-") as name:
            folder = Path(name)
            self._fetch(folder)
            with opened(folder, owner=self._part) as database:
                yield from frames_of(database, self.clock, self._plain_data)


def whole_states(
    rows: Iterable[tuple[bytes, bytes]], plain_data: PlainData
) -> Iterator[tuple[list[tuple[bytes, bytes]], list[Any]]]:
    """Give the rows of keys and their whole states, some at once; for lists, see ``list_rows``."""
    of_keys: list[tuple[bytes, bytes]] = []
    entries: list[tuple[int, int, bytes]] = []
    for row, value in rows:
        if of_keys and row.startswith(of_keys[-1][0]):
            entries.append((len(of_keys) - 1, row[-ENTRY.size], value))
            continue
        if len(of_keys) + len(entries) >= FRAME_KEYS:
            yield of_keys, states_with([frame_in(value) for _, value in of_keys], entries, plain_data)
            of_keys, entries = [], []
        of_keys.append((row, value))
    if of_keys:
        yield of_keys, states_with([frame_in(value) for _, value in of_keys], entries, plain_data)


def states_with(values: list[bytes], entries: list[tuple[int, int, bytes]], plain_data: PlainData) -> list[Any]:
    """Return the states in the rows of keys, with further entries: the place of the key, the list, and the frame."""
    states: list[Any] = plain_data.decode_each(values)
    if entries:
        decoded = plain_data.decode_each([frame for _, _, frame in entries])
        for (at, place, _), entry in zip(entries, decoded, strict=True):
            states[at][place].append(entry)
    return states


def frames_of(database: Any, clock: StatesClock, plain_data: PlainData) -> Iterator[StateFrame]:
    """Give the rows of an open database as the frames that states in memory have."""
    from streamiter.engine.states.database import rows_in

    for rows, states in whole_states(rows_in(database, b"", END), plain_data):
        frame: StateFrame = [decode_keys([key[1:] for key, _ in rows]), states]
        if clock.is_timed:
            frame.append([clock.now_s - max(time_of(value), clock.since_s) for _, value in rows])
        yield frame


class KeyShare(Iterable[StateFrame]):
    """The states of some key groups, out of the states of all earlier subtasks. It may be read more than once."""

    def __init__(self, states: Sequence[Iterable[StateFrame]], groups: range) -> None:
        """``states`` are in the order of the earlier subtasks."""
        self.states = states
        self.groups = groups

    def __iter__(self) -> Iterator[StateFrame]:
        for frames in self.states:
            yield from (frame for frame in select_keys(frames, self._owned) if frame[0])

    def _owned(self, keys: list[Any]) -> list[bool]:
        groups = key_groups(keys)
        chosen: list[bool] = ((groups >= self.groups.start) & (groups < self.groups.stop)).tolist()
        return chosen

    def databases(self) -> Sequence[StoredDatabase] | None:
        """Return the states as databases; None if some are not."""
        found = [state for state in self.states if isinstance(state, StoredDatabase)]
        return found if found and len(found) == len(self.states) else None
