"""All the batches of a stream, to be read again and again: in memory up to a limit, and on disk from there."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.checkpoints.pieces import (
    DeferredEntries,
    HeldPieces,
    OpenPiece,
    PieceFile,
    entries_of,
    is_small,
    piece_bytes,
    pieces_of,
)
from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred
from streamiter.errors import ConfigurationError, InternalError, LoopOverflow, PlainDataError
from streamiter.records import Batch, Columns

__all__ = [
    "ReplayCache",
]


_INT64: Final = range(2**63)


class ReplayCache:
    """Batches in the order they came, to be read by number; ``append`` adds one at the end.

    Records come back in order and with their types; batches need not be those that were given. Small
    neighbours are joined where that changes no record, up to some thousand records or 1 MiB; what is above
    4 MiB is cut; an empty batch is nothing to keep. The batch at a number is the same from the first time it is
    read on, and the same in a cache that was restored.

    Up to ``memory_limit_bytes`` batches are kept as the objects they are. From the first one that does not fit
    they are encoded as plain data and written to one temporary file in ``directory`` (made when first
    needed), and decoded each time they are read. So memory holds at most the limit, 1 MiB of small batches on
    their way to disk, and what readers hold on to.

    ``name`` (the step) begins the message of every error. An ``append`` that raises has changed nothing. For one
    task; never waits but for the disk. To be closed by its owner.

    >>> from tempfile import gettempdir
    >>> limits = {"memory_limit_bytes": 100_000, "disk_limit_bytes": 10**9}
    >>> cache = ReplayCache(name="examples", directory=gettempdir(), **limits)
    >>> for number in range(5):
    ...     cache.append(np.full(5_000, float(number)))
    >>> cache.bytes_in_memory, cache.bytes_on_disk
    (80256, 120096)
    >>> for _epoch in range(2):
    ...     sum(cache.batch(index).sum() for index in range(len(cache)))
    np.float64(50000.0)
    np.float64(50000.0)
    >>> cache.close()
    """

    def __init__(
        self,
        *,
        name: str,
        directory: str | os.PathLike[str],
        memory_limit_bytes: int,
        disk_limit_bytes: int,
        plain_data: PlainData | None = None,
    ) -> None:
        if memory_limit_bytes < 0 or disk_limit_bytes < 0:
            raise ConfigurationError(
                f"{name}: expected limits of 0 bytes or more, given memory_limit_bytes={memory_limit_bytes} "
                f"and disk_limit_bytes={disk_limit_bytes}; with 0 on disk nothing is ever written there"
            )
        self._name = name
        self._memory_limit_bytes = memory_limit_bytes
        self._disk_limit_bytes = disk_limit_bytes
        self._plain_data = plain_data if plain_data is not None else PlainData()
        # In this order: what is kept in memory, each with the bytes counted for it; what is on disk; and the
        # last, small batches, which are yet to become a piece of the one or the other.
        self._memory: list[tuple[Batch, int]] = []
        self._disk = PieceFile(directory, name=name)
        self._open: OpenPiece | None = None
        # From the first batch that did not fit everything goes to disk, so that the order is kept.
        self._memory_is_full = False
        self._bytes_in_memory = 0
        self._records = 0
        # Records in each piece on disk.
        self._records_on_disk = array("q")
        # What the open piece takes on disk at most, where that is where it goes.
        self._bytes_to_write = 0
        self._is_closed = False

    def __len__(self) -> int:
        """Batches that can be read."""
        return len(self._memory) + len(self._disk) + (self._open is not None)

    @property
    def records(self) -> int:
        """Records in all batches."""
        return self._records

    @property
    def bytes_in_memory(self) -> int:
        """Estimated bytes of the batches that are in memory."""
        return self._bytes_in_memory + (self._open.size_bytes if self._open else 0)

    @property
    def bytes_on_disk(self) -> int:
        """Size of the file; never above the disk limit."""
        return self._disk.size_bytes

    def append(self, records: Batch) -> None:
        """Keep one batch more.

        Raises ``LoopOverflow`` past the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for a batch that has to be written and is not plain data.
        """
        self._check_not_closed()
        if not len(records):
            return
        batch = _to_keep(records)
        if self._memory_is_full or not self._keep_in_memory(batch):
            self._keep_on_disk(batch)
            self._memory_is_full = True
        self._records += len(batch)

    def batch(self, index: int) -> Batch:
        """The batch at that place, never to be changed; ``IndexError`` where there is none.

        One that is on disk is read anew each time.
        """
        on_disk = index - len(self._memory)
        if 0 <= index < len(self._memory):
            return self._memory[index][0]
        if 0 <= on_disk < len(self._disk):
            return self._read(on_disk)
        if self._open is not None and on_disk == len(self._disk):
            return self._open.joined()
        raise IndexError(f"{self._name}: there is no batch {index} among the {len(self)} kept for replay")

    def snapshot(self) -> Deferred:
        """All batches in order, for a checkpoint, whatever becomes of the cache. :meth:`restore` takes it back.

        Batches in memory are encoded as its frames are asked for, and what is on disk is copied without being
        decoded, one at a time. Until it is released it keeps both where they are.
        """
        last = None
        if self._open is not None:
            batch = self._open.joined()
            last = batch, None if self._memory_is_full else self._open.size_bytes
        return ReplaySnapshot(
            self._name,
            self._plain_data,
            encode=self._encode,
            memory=[*self._memory],
            disk=self._disk.hold(),
            records_on_disk=self._records_on_disk,
            last=last,
        )

    def restore(self, frames: Iterable[Any]) -> None:
        """Keep what a snapshot holds, in place of what is kept now. Raises as :meth:`append` does.

        ``frames``: those of the snapshot, decoded; one of them is in memory at a time. Batches have the same
        numbers as where the snapshot was taken. The snapshot of a cache fits into another one with the same
        limits.
        """
        self._check_not_closed()
        self._forget()
        for entry in entries_of(frames):
            match entry:
                case [int() as records, int() | None as size_bytes, bytes() as content] if (
                    records in _INT64 and (size_bytes is None or size_bytes in _INT64)
                ):
                    self._restore_piece(content, records, size_bytes)
                case _:
                    raise PlainDataError(
                        f"{self._name}: expected the snapshot of a replay cache, given an entry that is none "
                        f"({type(entry).__name__}); it is the state of another step, or damaged"
                    )

    def close(self) -> None:
        """Drop all batches and remove the file. May be called more than once."""
        self._is_closed = True
        self._forget()

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise InternalError(f"{self._name}: a batch was given to a replay cache that is closed")

    def _forget(self) -> None:
        self._disk.close()
        self._memory.clear()
        self._open = None
        self._memory_is_full = False
        self._records_on_disk = array("q")
        self._bytes_in_memory = self._records = self._bytes_to_write = 0

    def _keep_in_memory(self, batch: Batch) -> bool:
        """Whether there was room for it."""
        is_open = is_small(batch)
        if is_open and self._open is not None:
            bytes_max = self._memory_limit_bytes - self._bytes_in_memory
            if self._open.add(batch, bytes_max=bytes_max):
                return True
        # Joined it takes less, so this comes before the question whether there is room.
        self._close_open_in_memory()
        pieces = [(piece, piece_bytes(piece)) for piece in pieces_of(batch)]
        size_bytes = sum(each for _, each in pieces)
        if self._bytes_in_memory + size_bytes > self._memory_limit_bytes:
            return False
        if is_open:
            self._open = OpenPiece(batch)
        else:
            self._memory += pieces
            self._bytes_in_memory += size_bytes
        return True

    def _close_open_in_memory(self) -> None:
        if self._open is not None:
            batch = self._open.joined()
            self._memory.append((batch, self._open.size_bytes))
            self._bytes_in_memory += self._open.size_bytes
            self._open = None

    def _keep_on_disk(self, batch: Batch) -> None:
        if is_small(batch):
            self._join_before_writing(batch)
            return
        self._write_open()
        count = len(self._disk)
        try:
            for piece in pieces_of(batch):
                self._write(self._encode(piece), len(piece))
        except BaseException:
            self._disk.cut(count)
            del self._records_on_disk[count:]
            raise

    def _join_before_writing(self, batch: Batch) -> None:
        # Encoded now, too: what cannot be written is to be refused itself, not what comes after it.
        size_bytes = len(self._encode(batch))
        self._check_room(self._bytes_to_write + size_bytes)
        if self._open is None or not self._open.add(batch):
            self._write_open()
            self._open = OpenPiece(batch)
        self._bytes_to_write += size_bytes

    def _write_open(self) -> None:
        if self._open is not None:
            batch = self._open.joined()
            self._write(self._encode(batch), len(batch))
            self._open = None
            self._bytes_to_write = 0

    def _write(self, content: bytes, records: int) -> None:
        self._check_room(len(content))
        self._disk.append(content)
        self._records_on_disk.append(records)

    def _read(self, index: int) -> Batch:
        return self._decode(self._disk.read_to_own(index), self._records_on_disk[index])

    def _restore_piece(self, content: bytes, records: int, size_bytes: int | None) -> None:
        """``size_bytes``: what was counted for it in memory, where that is where it was."""
        if not self._memory_is_full:
            batch = self._decode(memoryview(bytearray(content)), records)
            size_bytes = piece_bytes(batch) if size_bytes is None else size_bytes
            self._memory_is_full = self._bytes_in_memory + size_bytes > self._memory_limit_bytes
            if not self._memory_is_full:
                self._memory.append((batch, size_bytes))
                self._bytes_in_memory += size_bytes
        if self._memory_is_full:
            self._write(content, records)
        self._records += records

    def _encode(self, batch: Batch) -> bytes:
        with self._named_errors():
            return self._plain_data.encode_batch(batch)

    def _decode(self, room: memoryview, records: int) -> Batch:
        with self._named_errors():
            batch = self._plain_data.decode_batch_in(room)
            if len(batch) != records:
                raise PlainDataError(
                    f"expected a batch of {records} records, given one of {len(batch)}; what was written is damaged"
                )
        return batch

    def _check_room(self, size_bytes: int) -> None:
        wanted_bytes = self._disk.size_bytes + size_bytes
        if wanted_bytes > self._disk_limit_bytes:
            raise LoopOverflow(
                f"{self._name}: expected at most {self._disk_limit_bytes} bytes of replayed data on disk, given "
                f"{wanted_bytes} with the next batch ({self.bytes_in_memory} of {self._memory_limit_bytes} "
                f"bytes in memory); replay less (filter it, take narrower types) or raise a limit: "
                "IterationConfig(replay_memory_bytes=…, feedback_limits=FeedbackLimits(disk_bytes=…))"
            )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except PlainDataError as error:
            raise PlainDataError(f"{self._name}: {error}") from error


def _to_keep(batch: Batch) -> Batch:
    """The batch in one of its three kinds; what is taken out of something larger by itself."""
    if isinstance(batch, np.ndarray):
        return _without_gaps(batch)
    if isinstance(batch, Columns):
        arrays = batch.arrays
        kept = {name: _without_gaps(each) for name, each in arrays.items()}
        return batch if all(kept[name] is arrays[name] for name in arrays) else Columns(kept)
    return batch if isinstance(batch, list) else list(batch)


def _without_gaps(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy where the array is some columns, or every n-th row, of one that would be kept alive with it."""
    base = values.base
    if not isinstance(base, np.ndarray) or base.nbytes <= 2 * values.nbytes:
        return values
    return values if values.flags.contiguous or values.flags.f_contiguous else values.copy()


@final
class ReplaySnapshot(DeferredEntries):
    """Batches in memory, pieces on disk, and the last, small batches.

    An entry is ``(records, bytes counted in memory or None, encoded batch)``.

    What a replay cache keeps at one moment, for a checkpoint.
    """

    def __init__(
        self,
        name: str,
        plain_data: PlainData,
        *,
        encode: Callable[[Batch], bytes],
        memory: list[tuple[Batch, int]],
        disk: HeldPieces,
        records_on_disk: array[int],
        last: tuple[Batch, int | None] | None,
    ) -> None:
        """``records_on_disk`` may be appended to meanwhile, behind what is looked at here."""
        super().__init__(name, plain_data)
        self._encode = encode
        self._memory = memory
        self._disk = disk
        self._records_on_disk = records_on_disk
        self._last = last

    def entries(self) -> Iterator[tuple[int, int | None, bytes]]:
        for batch, size_bytes in self._memory:
            yield len(batch), size_bytes, self._encode(batch)
        for index, content in enumerate(self._disk):
            yield self._records_on_disk[index], None, content
        if self._last is not None:
            batch, counted_bytes = self._last
            yield len(batch), counted_bytes, self._encode(batch)

    def let_go(self) -> None:
        self._memory, self._last = [], None
        self._disk.release()
