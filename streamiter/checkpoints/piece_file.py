"""Encoded pieces of data on disk, to be read by number as often as wanted."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import final

import numpy as np

from streamiter.checkpoints.temporary_file import Content, FileHold, TemporaryFile, errors_of_a_full_disk

__all__ = ["HeldPieces", "PieceFile"]


class PieceFile:
    """Contents in the order they came; nothing is opened before the first is appended.

    ``name`` begins the messages of errors. Memory holds 8 bytes for each content.
    """

    __slots__ = ("_directory", "_ends", "_file", "_name")

    def __init__(self, directory: str | os.PathLike[str], *, name: str) -> None:
        self._directory = directory
        self._name = name
        self._file: TemporaryFile | None = None
        self._ends = array("q", [0])
        """Where content i ends is at i + 1."""

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._ends[-1]

    def append(self, content: Content) -> None:
        """Add one at the end. Raises ``StorageFull``, and ``ConfigurationError`` where no file can be made.

        After an error the contents are the same as before.
        """
        with errors_of_a_full_disk(
            self._name, self._directory, wanted_bytes=len(content), kept_bytes=self.size_bytes
        ):
            if self._file is None:
                self._file = TemporaryFile(self._directory, name=self._name)
            self._file.append(content)
        self._ends.append(self._file.size_bytes)

    def read_to_own(self, index: int) -> memoryview:
        """The content at ``index`` in memory of its own, which begins at a multiple of 16 and may be written to."""
        assert self._file is not None
        start, end = self._ends[index], self._ends[index + 1]
        room = np.empty(end - start, np.uint8).data
        self._file.read_into(start, room)
        return room

    def hold(self) -> HeldPieces:
        """The contents that are there now, to be read whatever is appended, cut behind them, or closed."""
        # No copy of the ends: these ones do not change, and after ``close`` it has others.
        return HeldPieces(None if self._file is None else self._file.hold(), self._ends, len(self))

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` contents, and give the disk's space back."""
        if self._file is not None and count < len(self):
            self._file.cut(self._ends[count])
            del self._ends[count + 1 :]

    def close(self) -> None:
        """Let go of the file and all it holds. May be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._ends = array("q", [0])


@final
class HeldPieces:
    """The contents that a piece file had at one moment, in order."""

    __slots__ = ("_count", "_ends", "_file")

    def __init__(self, file: FileHold | None, ends: array[int], count: int) -> None:
        self._file = file
        self._ends = ends
        self._count = count

    def __iter__(self) -> Iterator[bytes]:
        if self._file is None:
            return
        for index in range(self._count):
            start, end = self._ends[index], self._ends[index + 1]
            yield self._file.read(start, end - start)

    def release(self) -> None:
        """Let go of the file. May be called more than once."""
        if self._file is not None:
            self._file.release()
