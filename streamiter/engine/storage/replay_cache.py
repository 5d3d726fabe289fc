"""The batches of a stream, to be read again in each round: in memory up to a limit, and on disk above it.

:class:`ReplayCache` brings batches to a useful size first: small neighbours are joined and large batches are cut. A cut
between two batches has no meaning, but each batch costs some objects and calls whenever it is read, and a batch that is
read from disk takes as much memory as it has bytes. The pieces are in a
:class:`~streamiter.engine.storage.disk_queue.SpillLog`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.engine.storage.disk_queue import BATCH_PLACE_BYTES, QueuedItem, SpillLog, memory_bytes
from streamiter.errors import PlainDataError
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.records import (
    Batch,
    Columns,
    Control,
    DataBatch,
    TimedBatch,
    can_concatenate,
    concatenate,
    estimated_bytes,
    slice_batch,
    untimed,
)


@final
class ReplayCache(SpillLog):
    """Batches in the order of their arrival, read by number; ``append`` adds one at the end.

    Records keep their order and their types, but batches may differ from those that were appended: small
    neighbours are joined if that changes no record, up to some thousand records or 1 MiB; batches above 4 MiB are
    cut; empty batches are not kept. The batch of a number is the same each time it is read, and the same in a
    restored cache.

    From the first batch that does not fit into ``memory_limit_bytes``, batches are written to one file, and decoded
    each time they are read. So memory holds at most the limit, 1 MiB of small batches that wait to be written, and
    the batches that readers keep. If ``append`` raises, the cache is unchanged.

    >>> from tempfile import gettempdir
    >>> limits = {"memory_limit_bytes": 100_000, "disk_limit_bytes": 10**9}
    >>> cache = ReplayCache(name="examples", directory=gettempdir(), **limits)
    >>> for number in range(5):
    ...     cache.append(np.full(5_000, float(number)))
    >>> cache.bytes_in_memory, cache.bytes_on_disk
    (80256, 120168)
    >>> for _epoch in range(2):
    ...     sum(cache.batch(index).sum() for index in range(len(cache)))
    np.float64(50000.0)
    np.float64(50000.0)
    >>> cache.close()
    """

    contents = "replayed data"
    is_cut = True

    def _clear(self) -> None:
        super()._clear()
        self._open: _OpenPiece | None = None
        """Small batches behind all others that are not yet joined."""
        self._bytes_to_write = 0
        """The most bytes that the open piece takes on disk, if it is to be written."""

    def __len__(self) -> int:
        """Return the number of batches that can be read."""
        return super().__len__() + (self._open is not None)

    @property
    def bytes_in_memory(self) -> int:
        return self._bytes_in_memory + (self._open.size_bytes if self._open else 0)

    def append(self, records: Batch) -> None:
        """Add a batch.

        Raises ``LoopOverflow`` above the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for a batch that must be written and is not plain data.
        """
        if self._is_closed:
            raise self._closed("a batch")
        if not len(records):
            return
        batch = _to_keep(records)
        if self._disk.count or self._bytes_to_write or not self._keep_in_memory(batch):
            self._keep_on_disk(batch)
        self._records += len(batch)

    def batch(self, index: int) -> Batch:
        """Return the batch of a number; the caller must not change it. Raises ``IndexError`` if there is none.

        A batch on disk is read each time.
        """
        on_disk = index - len(self.memory)
        if 0 <= index < len(self.memory):
            batch, _ = self.memory[index]
            assert isinstance(batch, DataBatch)
            return batch.records
        if 0 <= on_disk < self._disk.count:
            return self._disk.decode(self._disk.read(on_disk))
        if self._open is not None and on_disk == self._disk.count:
            return self._open.join()
        raise IndexError(f"{self._name}: there is no batch {index} among the {len(self)} kept for replay")

    def restore(self, frames: Iterable[PlainValue]) -> None:
        """Replace all batches by the batches of a snapshot, under the same numbers. Raises as :meth:`refill` does."""
        if self._is_closed:
            raise self._closed("a snapshot")
        self._clear()
        self.refill(frames)

    def _last(self) -> deque[tuple[QueuedItem, int]]:
        if self._open is None:
            return deque()
        batch = DataBatch(self._open.join())
        return deque([(batch, self._open.size_bytes)])

    def _add_control(self, control: Control) -> None:
        raise PlainDataError(
            f"{self._name}: expected the snapshot of a replay cache, given {control!r}; it is the state of another "
            "step, or damaged"
        )

    def _keep_in_memory(self, batch: Batch) -> bool:
        """Keep a batch in memory and return True; return False if it does not fit."""
        is_small = _is_small(batch)
        if is_small and self._open is not None:
            bytes_max = self.memory_limit_bytes - self._bytes_in_memory
            if self._open.add(batch, bytes_max=bytes_max):
                return True
        # Before the check of the limit: joined, the open piece takes less memory.
        self._move_open_to_memory()
        pieces = [(piece, memory_bytes(piece)) for piece in _pieces_of(batch)]
        if not self._fits(sum(each for _, each in pieces)):
            return False
        if is_small:
            self._open = _OpenPiece(batch)
        else:
            for piece, size_bytes in pieces:
                self._keep(DataBatch(piece), size_bytes)
        return True

    def _move_open_to_memory(self) -> None:
        if self._open is not None:
            batch = DataBatch(self._open.join())
            self._keep(batch, self._open.size_bytes)
            self._open = None

    def _keep_on_disk(self, batch: Batch) -> None:
        if _is_small(batch):
            self._add_to_open(batch)
            return
        self._write_open()
        count = self._disk.count
        with undone_on_failure(lambda: self._disk.cut(count)):
            for piece in _pieces_of(batch):
                self._spill(self._disk.encode(piece))

    def _add_to_open(self, batch: Batch) -> None:
        # Encoded already now, so that a batch that cannot be encoded is refused itself, not a later one.
        size_bytes = self._disk.encode(batch).disk_bytes
        self._disk.check_room(self._bytes_to_write + size_bytes)
        if self._open is None or not self._open.add(batch):
            self._write_open()
            self._open = _OpenPiece(batch)
        self._bytes_to_write += size_bytes

    def _write_open(self) -> None:
        if self._open is not None:
            self._spill(self._disk.encode(self._open.join()))
            self._open = None
            self._bytes_to_write = 0

    def _explain_overflow(self) -> str:
        return (
            f"({self.bytes_in_memory} of {self.memory_limit_bytes} bytes in memory); replay less (filter it, take "
            "narrower types) or raise a limit: "
            "IterationConfig(replay_memory_bytes=…, feedback_limits=FeedbackLimits(disk_bytes=…))"
        )


def _to_keep(batch: Batch) -> Batch:
    """Return the batch as a list, an array or Columns; copy arrays that would keep a much larger array in memory."""
    if isinstance(batch, np.ndarray):
        return _without_gaps(batch)
    if isinstance(batch, Columns):
        arrays = batch.arrays
        kept = {name: _without_gaps(each) for name, each in arrays.items()}
        return batch if all(kept[name] is arrays[name] for name in arrays) else Columns(kept)
    if isinstance(batch, TimedBatch):
        order = None if batch.order is None else batch.order.copy()
        return TimedBatch(untimed(_to_keep(batch.records)), batch.times.copy(), order)
    return batch if isinstance(batch, list) else list(batch)


def _without_gaps(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or a copy if it is a view of some columns, or of every n-th row, of a larger array."""
    base = values.base
    if not isinstance(base, np.ndarray) or base.nbytes <= 2 * values.nbytes:
        return values
    return values if values.flags.contiguous or values.flags.f_contiguous else values.copy()


_PIECE_BYTES_MAX: Final = 4 << 20
"""Larger batches are cut: some of these in memory at once are little compared with a memory limit."""

# The limits of a joined batch. Here the fixed cost of a batch is small already; longer batches only cost more copies.
_JOINED_RECORDS_MAX: Final = 4096
_JOINED_BYTES_MAX: Final = 1 << 20


def _is_small(batch: Batch) -> bool:
    """Return whether a batch is to be joined with its neighbours: it is below half of the limits."""
    return len(batch) < _JOINED_RECORDS_MAX // 2 and estimated_bytes(batch) < _JOINED_BYTES_MAX // 2


def _pieces_of(batch: Batch) -> Iterator[Batch]:
    """Give the batch itself, or its parts if it is above ``_PIECE_BYTES_MAX`` (views of arrays, not copies)."""
    size_bytes = estimated_bytes(batch)
    if size_bytes <= _PIECE_BYTES_MAX:
        yield batch
        return
    records_max = max(1, len(batch) * _PIECE_BYTES_MAX // size_bytes)
    count = -(-len(batch) // records_max)
    step = -(-len(batch) // count)
    for start in range(0, len(batch), step):
        yield slice_batch(batch, start, start + step)


class _OpenPiece:
    """Small neighbouring batches that become one batch; ``first`` is the first of them.

    :meth:`join` joins them once, so each record is copied once. After it, no batch can be added.
    """

    __slots__ = ("_is_joined", "_joined_bytes", "_parts", "_record_bytes", "records")

    def __init__(self, first: Batch) -> None:
        self._parts = [first]
        self._record_bytes = _record_bytes(first)
        self._joined_bytes = estimated_bytes(first)
        self._is_joined = False
        self.records = len(first)

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of memory that the batches take, or will take when joined if that is more."""
        return BATCH_PLACE_BYTES * len(self._parts) + self._joined_bytes

    def add(self, batch: Batch, *, bytes_max: int | None = None) -> bool:
        """Add a batch and return True; return False if it cannot be joined or the piece would be too large.

        ``bytes_max`` limits ``size_bytes``.
        """
        if self._is_joined or self.records + len(batch) > _JOINED_RECORDS_MAX:
            return False
        if not can_concatenate(self._parts[0], batch):
            return False
        record_bytes = tuple(map(max, self._record_bytes, _record_bytes(batch)))
        joined_bytes = self._joined_bytes + estimated_bytes(batch)
        if record_bytes:
            # In an array of texts each one takes the width of the longest.
            joined_bytes = (self.records + len(batch)) * sum(record_bytes)
        if joined_bytes > _JOINED_BYTES_MAX:
            return False
        if bytes_max is not None and BATCH_PLACE_BYTES * (len(self._parts) + 1) + joined_bytes > bytes_max:
            return False
        self._parts.append(batch)
        self._record_bytes = record_bytes
        self._joined_bytes = joined_bytes
        self.records += len(batch)
        return True

    def join(self) -> Batch:
        """Return all records as one batch, the same object each time."""
        if len(self._parts) > 1:
            self._parts = [concatenate(self._parts)]
        self._is_joined = True
        return self._parts[0]


def _record_bytes(batch: Batch) -> tuple[int, ...]:
    """Return the bytes of a record in each array of the batch; an empty tuple for a list."""
    batch = untimed(batch)
    arrays = batch.arrays.values() if isinstance(batch, Columns) else [batch]
    return tuple(each.nbytes // len(each) for each in arrays if isinstance(each, np.ndarray))
