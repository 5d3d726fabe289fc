"""Large state as a row of entries, some to a frame: each made when it is written, and let go of when it was."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from streamiter.deferred import Deferred
from streamiter.errors import InternalError

if TYPE_CHECKING:
    from streamiter.checkpoints.plain_data import PlainData

__all__ = ["DeferredEntries", "entries_of"]

# Entries go into one frame up to there: a frame costs its writer a checksum and a turn of the event loop, and
# a megabyte, or so many batches of a record each, are one or two milliseconds of work.
_FRAME_BYTES: Final = 1 << 20
_FRAME_ENTRIES: Final = 256


class DeferredEntries(Deferred):
    """Base for state that is a row of entries of plain data, mostly tuples with the bytes of a batch in them.

    Derived classes give the entries as a generator, and let go of everything in ``let_go``.
    """

    def __init__(self, name: str, plain_data: PlainData) -> None:
        self.name = name
        self._plain_data = plain_data
        self._is_released = False
        self._was_read = False

    @abc.abstractmethod
    def entries(self) -> Iterator[tuple[Any, ...]]:
        """The entries in order; gone through once."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Drop what is held; called once."""

    def frames(self) -> Iterator[bytes]:
        self._check(not self._was_read)
        self._was_read = True
        return self._frames()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.let_go()

    def _frames(self) -> Iterator[bytes]:
        gathered: list[tuple[Any, ...]] = []
        size_bytes = 0
        try:
            for entry in self.entries():
                entry_bytes = _bytes_in(entry)
                if gathered and size_bytes + entry_bytes > _FRAME_BYTES:
                    yield self._frame(gathered)
                    size_bytes = 0
                gathered.append(entry)
                size_bytes += entry_bytes
                if len(gathered) == _FRAME_ENTRIES:
                    yield self._frame(gathered)
                    size_bytes = 0
                self._check(not self._is_released)
            if gathered:
                yield self._frame(gathered)
        finally:
            self.release()

    def _frame(self, gathered: list[tuple[Any, ...]]) -> bytes:
        frame = self._plain_data.encode(gathered, name=f"deferred state of {self.name}")
        gathered.clear()
        return frame

    def _check(self, is_there: bool) -> None:
        """What has been released would look like less state, or none."""
        if self._is_released or not is_there:
            raise InternalError(f"{self.name}: deferred state is read that was read before, or was released")


def entries_of(frames: Iterable[Any]) -> Iterator[Any]:
    """The entries of decoded frames, in order; a frame that is none is given as it is, for its reader to refuse."""
    for frame in frames:
        yield from frame if type(frame) is list else (frame,)


def _bytes_in(entry: tuple[Any, ...]) -> int:
    return sum(len(part) for part in entry if type(part) is bytes)
