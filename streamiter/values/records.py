"""Batches of records, and the control records that travel between them.

A *batch* holds the records that one operator gives to the next: a list, a numpy array whose first axis is the record,
or :class:`Columns`. Several operators may read the same batch, so no operator changes a batch in place. In a stream
with event time, a :class:`TimedBatch` carries such a batch together with the timestamps of its records.

Everything that a channel carries has a *kind*. Snapshots, the topics of feedback edges and messages use the same words:

====================  ===========================  =============================================================
kind                  class                        meaning
====================  ===========================  =============================================================
``data``              :class:`DataBatch`           a batch and the epoch of its records
``watermark``         :class:`EpochWatermark`      the channel brings no more records of this epoch
``event time``        :class:`EventTimeWatermark`  no record with an earlier timestamp is expected on the channel
``barrier``           :class:`CheckpointBarrier`   the records before it belong to this checkpoint
``idle``              :class:`Idle`                the channel brings no records for now
``read to end``       :class:`ReadToEnd`           the channel has brought all that was in its topics at the start
``end of data``       :class:`EndOfData`           the channel brings no more records before the iteration ends
``end of input``      :class:`EndOfInput`          the channel brings nothing more
====================  ===========================  =============================================================

All but ``data`` are *control records*. In the topic of a feedback edge a barrier that stops the job is a ``suspend``.
Control records that stay inside one task are next to their makers in ``streamiter.engine``.

>>> batch = Columns({"x": np.array([1.0, 2.0, 3.0]), "y": np.array([0, 1, 0])})
>>> len(batch), batch[1]
(3, {'x': np.float64(2.0), 'y': np.int64(1)})
>>> slice_batch(batch, 1, 3)
Columns(2 records: x float64, y int64)
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, final, overload

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.errors import InternalError, PlainDataError, StreamiterError
from streamiter.values.deferred import PlainValue
from streamiter.values.numbers import Array
from streamiter.values.object_columns import JSON_FIELD, objects_of
from streamiter.values.origins import BatchOrigin
from streamiter.values.tables import arrays_of_table, values_of_column
from streamiter.values.times import MIN_TIME, Times

if TYPE_CHECKING:
    # Only type checkers need the default: a Stream without a parameter has records of any type (decision 031).
    from typing_extensions import TypeVar

    Record = TypeVar("Record", covariant=True, default=Any)
    Key = TypeVar("Key", covariant=True, default=Any)
else:
    from typing import TypeVar

    Record = TypeVar("Record", covariant=True)
    Key = TypeVar("Key", covariant=True)

BATCH_RECORDS: Final = 8192
"""The most records in a batch of a topic reader, and the most records, keys or timers that are handled in one turn.

The fixed cost of a call or a hop is then small for each of them, and the turn takes some milliseconds."""


@final
class Columns:
    """A batch of records with fields: one array for each field, all of the same length.

    ``columns["x"]`` is the array of a field, whose first axis is the record. ``columns[3]`` is the fourth record as a
    dict, ``columns[2:5]`` are three records as ``Columns``. Iterating gives the records as dicts.

    ``arrays`` are arrays by name, or a table of pandas, polars or Arrow (:mod:`streamiter.values.tables` describes each
    type).

    Raises ``ValueError`` if the lengths differ or there is no array, and
    :class:`~streamiter.errors.PlainDataError` for a table that cannot become arrays.
    """

    __slots__ = ("_arrays", "_length")

    def __init__(self, arrays: Mapping[str, npt.ArrayLike] | Any) -> None:
        if not isinstance(arrays, dict) and (table := arrays_of_table("Columns", arrays, PlainDataError)) is not None:
            arrays = table
        converted = {name: np.asarray(values) for name, values in arrays.items()}
        lengths = {name: (len(values) if values.ndim else None) for name, values in converted.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise ValueError(f"Columns: expected one or more arrays of one length, given {lengths}")
        self._arrays = converted
        self._length = len(next(iter(converted.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in the order in which they were given."""
        return tuple(self._arrays)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name. The dict is new, the arrays are shared."""
        return dict(self._arrays)

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum([array.nbytes for array in self._arrays.values()])

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    @overload
    def __getitem__(self, which: str) -> Array: ...
    @overload
    def __getitem__(self, which: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, which: slice | Array) -> Columns: ...
    def __getitem__(self, which: str | int | slice | Array) -> Array | dict[str, Any] | Columns:
        if isinstance(which, str):
            try:
                return self._arrays[which]
            except KeyError:
                raise KeyError(f"no column {which!r}; there are {', '.join(self._arrays)}") from None
        if isinstance(which, (int, np.integer)):
            if JSON_FIELD in self._arrays:
                return next(objects_of({name: array[[which]] for name, array in self._arrays.items()}))
            return {name: array[which] for name, array in self._arrays.items()}
        return Columns({name: array[which] for name, array in self._arrays.items()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if JSON_FIELD in self._arrays:
            yield from objects_of(self._arrays)
            return
        names = tuple(self._arrays)
        for values in zip(*self._arrays.values(), strict=True):
            yield dict(zip(names, values, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return self.names == other.names and all(
            mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
            for mine, theirs in zip(self._arrays.values(), other._arrays.values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name} {array.dtype}{list(array.shape[1:]) if array.ndim > 1 else ''}"
            for name, array in self._arrays.items()
        )
        return f"Columns({self._length} records: {fields})"


Order = npt.NDArray[np.int64]
"""The order in which the records of a batch were read, as if one by one: a row of five numbers for each record.

``REACHED`` is the watermark behind the record, in its part alone, and ``BEFORE`` the one before it; ``PART`` is the
partition, or the channel, that it came from, and ``PLACE_IN_PART`` its number there. ``KNOWN`` is the time at which the
record was complete: its timestamp, or for a pair the timestamp of its later record. Of several parts the record with
the least ``REACHED`` comes first.
"""

REACHED: Final = 0
BEFORE: Final = 1
PART: Final = 2
PLACE_IN_PART: Final = 3
KNOWN: Final = 4
ORDER_COLUMNS: Final = 5


def order_of(reached: Times, *, before: Times | int, part: int, place: Times, known: Times) -> Order:
    """Return the order of records from its columns; a single number counts for all records."""
    order = np.empty((len(reached), ORDER_COLUMNS), np.int64)
    for column, values in enumerate((reached, before, part, place, known)):
        order[:, column] = values
    return order


SEVERAL_PARTS: Final = 2**30
"""Added to the ``PART`` of a record if its step reads other partitions, too. More than a topic has partitions."""


@final
class TimedBatch:
    """A batch of a stream with event time: the batch that operators see, and the timestamp of each record.

    ``times`` are int64 milliseconds, ``MIN_TIME`` for a record without a timestamp. Slicing and ``take`` keep them;
    iterating and indexing give the records alone. ``order`` says in which order the records were read, if a later step
    asks for it: :data:`Order`.

    >>> batch = TimedBatch(["a", "b", "c"], np.array([5, 6, 7]))
    >>> batch[1:], batch[0], list(take(batch, [2, 0]))
    (TimedBatch(2 records), 'a', ['c', 'a'])
    """

    __slots__ = ("order", "records", "times")

    def __init__(self, records: Sequence[Any] | Array | Columns, times: Times, order: Order | None = None) -> None:
        if len(records) != len(times):
            raise InternalError(f"expected a timestamp for each of {len(records)} records, given {len(times)}")
        self.records = records
        self.times = times
        self.order = order

    @property
    def nbytes(self) -> int:
        """The estimated size of the records, with their timestamps and order, in bytes."""
        return estimated_bytes(self.records) + self.times.nbytes + (0 if self.order is None else self.order.nbytes)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)

    @overload
    def __getitem__(self, which: int) -> Any: ...
    @overload
    def __getitem__(self, which: slice) -> TimedBatch: ...
    def __getitem__(self, which: int | slice) -> Any:
        if not isinstance(which, slice):
            return self.records[which]
        return TimedBatch(self.records[which], self.times[which], None if self.order is None else self.order[which])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimedBatch):
            return NotImplemented
        same: Callable[[Any, Any], Any] = np.array_equal if isinstance(self.records, np.ndarray) else operator.eq
        has_same_order = (
            self.order is other.order
            if self.order is None or other.order is None
            else np.array_equal(self.order, other.order)
        )
        return bool(same(self.records, other.records)) and np.array_equal(self.times, other.times) and has_same_order

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TimedBatch({len(self.records)} records)"


Batch = Sequence[Any] | Array | Columns | TimedBatch
"""A list or another sequence, a numpy array, or :class:`Columns`; between the steps of a stream with event time, a
:class:`TimedBatch` around one of these. No operator changes a batch in place."""


def untimed(batch: Batch) -> Sequence[Any] | Array | Columns:
    """Return the batch without timestamps, as operators see it."""
    return batch.records if isinstance(batch, TimedBatch) else batch


def rows_of_table(owner: str, given: object, error: type[StreamiterError]) -> Columns | Array | list[Any] | None:
    """Return the rows of a table, or the values of one column (a ``Series``, an Arrow array); None for other objects.

    The rows are ``Columns`` if all columns are arrays without Python objects, which can be stored; otherwise a list of
    dicts. Raises ``error`` for any other kind of table, and for a table that cannot become rows. ``owner`` is the
    beginning of the message.
    """
    columns = columns_of_table(owner, given, error)
    if columns is not None:
        return list(columns) if any(array.dtype.hasobject for array in columns.arrays.values()) else columns
    values = values_of_column(owner, given, error)
    return values.tolist() if values is not None and values.dtype.hasobject else values


def columns_of_table(owner: str, given: object, error: type[StreamiterError]) -> Columns | None:
    """Return the columns of a table, also columns of objects; None for other objects. See `rows_of_table`."""
    arrays = arrays_of_table(owner, given, error)
    return None if arrays is None else Columns(arrays)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return the records from ``start`` to before ``stop``. Arrays are views, not copies."""
    return batch[start:stop]


def take(batch: Batch, indices: Sequence[int] | Array) -> Batch:
    """Return the records at ``indices``, in that order."""
    if isinstance(batch, np.ndarray):
        return batch[np.asarray(indices, dtype=np.intp)]
    if isinstance(batch, Columns):
        return batch[np.asarray(indices, dtype=np.intp)]
    if isinstance(batch, TimedBatch):
        places = np.asarray(indices, dtype=np.intp)
        order = None if batch.order is None else batch.order[places]
        return TimedBatch(untimed(take(batch.records, indices)), batch.times[places], order)
    # Numbers of Python are the quicker ones.
    return list(map(batch.__getitem__, indices.tolist() if isinstance(indices, np.ndarray) else indices))


WIDE_TEXTS_BYTES: Final = 64 << 20
"""An array of texts that are far shorter than its longest one, which each has room for, takes at most so many bytes."""

# What a step has gathered is a list only if its arrays could hardly be made: functions may expect ``Columns``.
_GATHERED_TEXTS_BYTES: Final = 1 << 30

# Texts are far shorter from here on: the arrays that are joined are as many times narrower.
_TIMES_NARROWER: Final = 8


def can_concatenate(first: Batch, second: Batch, text_bytes: int = WIDE_TEXTS_BYTES // BATCH_RECORDS) -> bool:
    """Return whether two batches can become one without a change to the type of any record.

    Nor may the texts of a record take more than ``text_bytes`` only because one among the others is so long.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        return first.shape[1:] == second.shape[1:] and _same_records(first, second, text_bytes)
    if isinstance(first, Columns):
        assert isinstance(second, Columns)
        return first.names == second.names and all(
            can_concatenate(array, second[name], text_bytes) for name, array in first.arrays.items()
        )
    if isinstance(first, TimedBatch):
        assert isinstance(second, TimedBatch)
        is_possible = can_concatenate(first.records, second.records, text_bytes)
        return is_possible and (first.order is None) is (second.order is None)
    return isinstance(first, list)


def _same_records(array: Array, other: Array, text_bytes: int) -> bool:
    """Return whether records of these arrays are alike. Texts are, whatever width numpy has given the array."""
    first, second = array.dtype, other.dtype
    if first is second:
        return True
    if first == second:
        return first.char == second.char  # numpy's long and long long are equal, but not their scalars
    if first.kind != second.kind or first.kind not in "US":
        return False
    narrow, wide = sorted((first.itemsize, second.itemsize))
    return wide <= _TIMES_NARROWER * narrow or math.prod(array.shape[1:]) * wide <= text_bytes


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the records of all. Each pair must satisfy :func:`can_concatenate`."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, np.ndarray):
        return _concatenated([np.asarray(batch) for batch in batches])
    if isinstance(first, Columns):
        parts = [batch for batch in batches if isinstance(batch, Columns)]
        return Columns({name: _concatenated([part[name] for part in parts]) for name in first.names})
    if isinstance(first, TimedBatch):
        timed = [batch for batch in batches if isinstance(batch, TimedBatch)]
        records = concatenate([batch.records for batch in timed])
        orders = [batch.order for batch in timed if batch.order is not None]
        return TimedBatch(
            untimed(records),
            np.concatenate([batch.times for batch in timed]),
            np.concatenate(orders) if orders else None,
        )
    merged: list[Any] = []
    for batch in batches:
        merged.extend(batch)
    return merged


def one_batch(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the records of all, of any kinds: a list, unless all batches can be concatenated.

    If one of them has timestamps, so has the result.
    """
    text_bytes = _GATHERED_TEXTS_BYTES // max(sum(map(len, batches)), 1)
    if all(can_concatenate(batches[0], batch, text_bytes) for batch in batches[1:]):
        return concatenate(batches)
    records = [record for batch in batches for record in batch]
    timed = [batch for batch in batches if isinstance(batch, TimedBatch)]
    if not timed:
        return records
    times = [batch.times if isinstance(batch, TimedBatch) else np.full(len(batch), MIN_TIME) for batch in batches]
    orders = [batch.order for batch in timed if batch.order is not None]
    order = np.concatenate(orders) if len(orders) == len(batches) else None
    return TimedBatch(records, np.concatenate(times), order)


def _concatenated(arrays: Sequence[Array]) -> Array:
    dtype = arrays[0].dtype
    if dtype.isnative and dtype.names is None:
        return np.concatenate(arrays)
    # np.concatenate alone would change the byte order to that of the machine, and close the gaps between fields. The
    # gaps are not copied, so they are filled with zeros.
    widest = max((array.dtype for array in arrays), key=lambda each: each.itemsize)
    room = np.zeros((sum(map(len, arrays)), *arrays[0].shape[1:]), widest)
    return np.concatenate(arrays, out=room)


# The estimate for a list looks at up to this many records: enough that one unusual record does not decide alone, and
# few enough to be cheap.
_SAMPLES: Final = 4


def estimated_bytes(batch: Batch) -> int:
    """Return the bytes of memory that a batch holds: exact for arrays, estimated from a few records for lists."""
    length = len(batch)
    if type(batch) is list:
        if length == 1:  # In a loop, a batch often has one record.
            return sys.getsizeof(batch[0]) if type(batch[0]) in _FLAT else _record_bytes(batch[0])
    elif (size_bytes := getattr(batch, "nbytes", None)) is not None:
        return int(size_bytes)
    if length == 0:
        return 0
    looked_at = batch[:: -(-length // _SAMPLES)]
    return sum(map(_record_bytes, looked_at)) * length // len(looked_at)


_FLAT: Final = frozenset({int, float, str, bytes, bool, type(None)})
"""Types of records that hold no others."""

# The estimate looks into lists in lists only to this depth: JSON may nest a thousand lists, and a list may contain
# itself.
_LEVELS: Final = 32
# A mini-batch is a dict with the list of its records and the arrays of its features, and these are dicts again.
_LEVELS_OF_DICTS: Final = 3


def _record_bytes(record: Any, levels: int = _LEVELS) -> int:
    if type(record) is dict:  # The most common type of records.
        values, size = record.values(), sys.getsizeof(record)
        if not levels or _FLAT.issuperset(map(type, values)):
            return sum(map(sys.getsizeof, values), size)
        fewer = min(levels - 1, _LEVELS_OF_DICTS)
        return size + sum(
            [sys.getsizeof(value) if type(value) in _FLAT else _record_bytes(value, fewer) for value in values]
        )
    if isinstance(record, (np.ndarray, Columns)):
        return record.nbytes
    size = sys.getsizeof(record)
    if isinstance(record, dict):
        size += sum(map(sys.getsizeof, record.values()))
    elif isinstance(record, (list, tuple)) and record and levels:
        first, *others = record[:: -(-len(record) // _SAMPLES)]
        # Only the first part is looked into at all levels: with all parts, the time would grow with each level.
        parts = _record_bytes(first, levels - 1) + sum(_record_bytes(part, min(levels - 1, 1)) for part in others)
        size += parts * len(record) // (1 + len(others))
    return size


@final
class DataBatch(msgspec.Struct, eq=False):
    """A batch in a channel, with the epoch that all its records share. Outside of iterations the epoch is 0.

    ``origin`` is the place where all records were read, if it is known; dead letters report it. It is not part of any
    state: a batch that is read back from disk has none.
    """

    kind: ClassVar[Literal["data"]] = "data"
    records: Batch
    epoch: int = 0
    origin: BatchOrigin | None = None

    def __getitem__(self, which: slice) -> DataBatch:
        """Return a part of it. ``which`` is without a step."""
        start, stop, _ = which.indices(len(self.records))
        origin = None if self.origin is None else self.origin.taken(range(start, stop))
        return DataBatch(slice_batch(self.records, start, stop), self.epoch, origin)

    def __repr__(self) -> str:
        return f"DataBatch({len(self.records)} records, epoch {self.epoch})"


class Control(msgspec.Struct, eq=False):
    """A record that the engine makes. It keeps its place among the data of its channel."""

    def __repr__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (
            name.removeprefix("is_") if value is True else repr(value)
            for name, value in given
            if value is not None and value is not False
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@final
class EpochWatermark(Control):
    """All records that follow on this channel have an epoch above ``epoch``."""

    kind: ClassVar = "watermark"
    epoch: int


@final
class EventTimeWatermark(Control):
    """No record with a timestamp below ``time`` is expected on this channel any more; such records may still come late.

    ``is_idle``: no other record is expected for now, either, so the channel does not hold back the watermark of its
    reader. The next event-time watermark ends the idleness, and comes before the next record.
    """

    kind: ClassVar = "event time"
    time: int
    is_idle: bool = False


WATERMARKS: Final = (EpochWatermark, EventTimeWatermark)
"""Control records that replace each other: if several of one class follow one another, the last one is enough."""


@final
class CheckpointBarrier(Control):
    """The records before it belong to the checkpoint with the number ``checkpoint``, the records behind it do not.

    With ``suspend`` the job stops at this barrier, and nothing follows it.
    """

    kind: ClassVar = "barrier"
    checkpoint: int
    suspend: bool = False


@final
class EndOfData(Control):
    """The data of this channel has ended, but the iteration has not. The channel delays no epoch any more.

    It is a watermark of ``epoch``, too: operators are told of the end before the last epoch is complete. If the data is
    stamped, ``epoch`` is the last epoch of the data; operators are told of the end in the next epoch at the latest. At
    the end of the iteration the operators upstream may emit more records, before ``EndOfInput``.
    """

    kind: ClassVar = "end of data"
    epoch: int = 0


@final
class Idle(Control):
    """The channel brings no data for now, because its source has no partition. The next data ends the idleness."""

    kind: ClassVar = "idle"


@final
class ReadToEnd(Control):
    """The records that the topics had when the job was started, or restored, are before it; others follow.

    Only a source whose end a step waits for sends it. No snapshot has it: the source of a restored job sends it again.
    """

    kind: ClassVar = "read to end"


@final
class EndOfInput(Control):
    """Nothing follows on this channel. In an iteration ``epoch`` is the epoch in which the iteration has ended."""

    kind: ClassVar = "end of input"
    epoch: int | None = None


CHANNEL_CONTROLS: Final = (
    EpochWatermark,
    EventTimeWatermark,
    CheckpointBarrier,
    EndOfData,
    EndOfInput,
    Idle,
    ReadToEnd,
)
"""The control records that travel in channels, at their place among the records."""


def control_to_plain(control: Control) -> tuple[PlainValue, ...]:
    """Return a control record as plain data: its kind, then its fields.

    >>> control_to_plain(EpochWatermark(3)), control_from_plain(("watermark", 3))
    (('watermark', 3), EpochWatermark(3))
    """
    kind: Any = type(control)
    if kind not in CHANNEL_CONTROLS:
        raise InternalError(f"{control!r} has no form as plain data")
    return (kind.kind, *(getattr(control, name) for name in kind.__struct_fields__))


def control_from_plain(plain: PlainValue) -> Control:
    """Return the control record that :func:`control_to_plain` converted. Raises ``PlainDataError`` for other data."""
    match plain:
        case [name, *values]:
            for kind in CHANNEL_CONTROLS:
                if kind.kind == name and len(values) == len(kind.__struct_fields__):
                    with contextlib.suppress(msgspec.ValidationError):
                        return msgspec.convert(dict(zip(kind.__struct_fields__, values, strict=True)), kind)
    raise PlainDataError(
        f"expected the plain data of a control record, given {plain!r:.100}; it is other data, or of a newer version"
    )


@final
@dataclass(frozen=True, slots=True)
class OutputTag:
    """The name of a side output: ``out.emit(record, tag=TAG)`` writes it, ``stream.side_output(TAG)`` reads it.

    Two tags with the same name are the same side output.
    """

    name: str

    def __repr__(self) -> str:
        return f"OutputTag({self.name!r})"
