"""Deferred state: large state that is frozen at a checkpoint's barrier and encoded after it.

Encoding a large state takes long, and no record can be processed meanwhile. So an operator's ``snapshot`` may put
:class:`Deferred` pieces into its state. The engine encodes them when the barrier has passed: in *frames* of about a
megabyte, with other work between two frames. Here are the base class, the two kinds that the engine itself needs, and
:func:`release_all`, which releases the pieces of a state that will not be stored.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

import msgspec

from streamiter.errors import InternalError

PlainValue: TypeAlias = Any
"""A value of plain data, such as a state or an entry of a frame; ``values/plain_data.py`` lists the types."""


class Encode(Protocol):
    """A function that encodes plain data; modules below the encoding are given one."""

    def __call__(self, value: PlainValue, /, *, name: str = ...) -> bytes:
        """Return the bytes of ``value``. Raises ``PlainDataError``, whose message calls the value ``name``."""
        ...


class Deferred(abc.ABC):
    """A large piece of state, frozen at the barrier and encoded later, a frame at a time.

    ``snapshot`` of an operator may return one anywhere in its state. Until ``release``, its content must not change,
    whatever the operator does. On restore, ``restore`` is given an iterable of the decoded frames in its place; the
    iterable can be read once.
    """

    name: str = "deferred state"
    """The name of the step that the state belongs to, for error messages."""

    @abc.abstractmethod
    def frames(self) -> Iterator[bytes]:
        """Return the state in order, in pieces that :class:`~streamiter.values.plain_data.PlainData` decodes.

        The frames are read once, in the event loop, which does other work between two of them. A frame should take
        some milliseconds of work and about a megabyte. Raises ``PlainDataError`` for a value that is not plain data;
        then the checkpoint fails.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Free the state: it is written, or will not be. May be called more than once, and at any time."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine that belongs to a piece of state, and never changes."""

    name: str
    """Its name, unique in the state of a step over all its snapshots in one run."""
    path: Path
    """Where it is until the piece is released."""


FRAME_FILE: Final = ".frame"
"""The suffix of the files of a piece whose frames are ``rest`` and then the contents of its files, in order."""


class DeferredFiles(Deferred):
    """A large piece of state that is files, most of which earlier snapshots of the same state have, too.

    A store keeps such files once (:class:`~streamiter.engine.storage.snapshot.SharedFile`). ``frames`` gives the same
    state without files, for a snapshot that is kept elsewhere. On restore, ``restore`` is given a database of RocksDB,
    or :class:`FramesInFiles` if the names of the files end with ``FRAME_FILE``.
    """

    stored: dict[str, object]
    """Where a store keeps each file, by name, which the store notes here; all snapshots of the state share it."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the files are there. Raises the error of their making, such as ``StorageFull``."""

    @abc.abstractmethod
    def files(self) -> Sequence[LocalFile]:
        """Return the files, in a fixed order; called after ``wait``."""

    @abc.abstractmethod
    def rest(self) -> bytes:
        """Return the state besides the files, as one small frame; called after ``files``."""


class NamedFile(Protocol):
    """What a store tells of a file of an earlier snapshot; ``DeferredFiles.stored`` may return it."""

    @property
    def name(self) -> str:
        """The name that its owner gave it."""


class FramesInFiles(Protocol):
    """The decoded frames of a restored piece of files: first of ``rest``, then of each file in order."""

    files: Sequence[NamedFile]

    def __iter__(self) -> Iterator[PlainValue]: ...

    def fetch(self, folder: Path) -> None:
        """Make files of these names in a folder, which nobody may change. It blocks."""


# The limits of one frame. Each frame costs its writer a checksum and a turn of the event loop; encoding a megabyte,
# or 256 entries of one record each, takes one or two milliseconds.
_FRAME_BYTES: Final = 1 << 20
_FRAME_ENTRIES: Final = 256


@final
class DeferredEntries(Deferred):
    """State that is a sequence of entries: plain data, mostly tuples that contain the bytes of a batch.

    ``entries`` is a generator that makes each entry when its frame is written. It must forget an entry as soon as
    it is given; what it reads, such as files, is freed with the generator. ``encode`` is ``PlainData.encode``. A second
    reading, or one after the release, is an error: the state would be incomplete.
    """

    def __init__(self, name: str, encode: Encode, entries: Generator[tuple[PlainValue, ...], None, None]) -> None:
        self.name = name
        self._encode = encode
        self._entries = entries
        self._is_released = False
        self._was_read = False

    def frames(self) -> Iterator[bytes]:
        self._check(not self._was_read)
        self._was_read = True
        return self._frames()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._entries.close()

    def _frames(self) -> Iterator[bytes]:
        gathered: list[tuple[PlainValue, ...]] = []
        size_bytes = 0
        try:
            for entry in self._entries:
                entry_bytes = sum(len(part) for part in entry if type(part) is bytes)
                if gathered and size_bytes + entry_bytes > _FRAME_BYTES:
                    yield self._frame(gathered)
                    size_bytes = 0
                gathered.append(entry)
                size_bytes += entry_bytes
                if len(gathered) == _FRAME_ENTRIES:
                    yield self._frame(gathered)
                    size_bytes = 0
                self._check(not self._is_released)
            self._check(not self._is_released)
            if gathered:
                yield self._frame(gathered)
        finally:
            self.release()

    def _frame(self, gathered: list[tuple[PlainValue, ...]]) -> bytes:
        frame = self._encode(gathered, name=f"deferred state of {self.name}")
        gathered.clear()
        return frame

    def _check(self, is_readable: bool) -> None:
        if self._is_released or not is_readable:
            raise InternalError(f"{self.name}: deferred state is read that was read before, or was released")


def entries_of(frames: Iterable[PlainValue]) -> Iterator[PlainValue]:
    """Give the entries of decoded frames in order. A frame that is no list is given itself: its reader refuses it."""
    for frame in frames:
        yield from frame if type(frame) is list else (frame,)


def release_all(state: Any, structs: Container[type[Any]] = ()) -> None:
    """Release every ``Deferred`` in ``state``; ``state`` may contain itself, and values that are not plain data.

    ``structs`` are the classes of structs whose fields are searched too.
    """
    waiting, seen = [state], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Deferred):
            part.release()
        elif id(part) not in seen:
            inside = _parts(part, structs)
            if inside:
                seen.add(id(part))
                waiting += inside


def _parts(part: Any, structs: Container[type[Any]]) -> list[Any]:
    if isinstance(part, dict):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(part)
    return list(msgspec.structs.astuple(part)) if type(part) in structs else []
