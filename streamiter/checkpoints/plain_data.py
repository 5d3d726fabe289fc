"""Plain data: what state and records are made of wherever they are stored or leave the process.

===================  ==================================================================================
type                 kept exactly
===================  ==================================================================================
None, bool, int,     ints of any size; NaN, −0.0 and infinities; lone surrogates
float, str, bytes
tuple, list, dict    tuples stay tuples; any hashable plain data is a key; the order of a dict is kept
numpy arrays         any dtype but objects: structured, datetimes, text, big-endian; any shape. Contiguous
                     in C order afterwards, whatever the strides were
numpy scalars        the exact class
``Columns``          names, order, dtypes
``msgspec.Struct``   of registered classes, by class name and field names; the class is called with the
                     fields, so a field added later needs a default
===================  ==================================================================================

Nothing else, and no subclass of these (``IntEnum``, ``OrderedDict``, named tuples): it would come back as
something other than what was given. No pickle: reading bytes runs no code but that of registered structs.
How it lies in bytes: :mod:`streamiter.checkpoints.extensions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from streamiter.checkpoints.data_types import StructRegistry
from streamiter.checkpoints.decoding import Resolve, decode_frame
from streamiter.checkpoints.encoding import PLAIN_TYPES, encode_frame, find_refusal, hint_for, type_name
from streamiter.deferred import Deferred, release_all
from streamiter.errors import InternalError, PlainDataError
from streamiter.records import (
    Batch,
    CheckpointBarrier,
    Columns,
    Control,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
)

__all__ = [
    "PlainData",
    "control_from_plain",
    "control_to_plain",
]


class PlainData:
    """The encoding of plain data; ``structs`` are the classes it knows beside the built-in types.

    Keeps nothing between two calls but the structs, so it may be used from several threads.

    >>> plain = PlainData()
    >>> plain.decode(plain.encode({"weights": np.zeros(2, ">f4"), (1, "a"): {"seen": 3}}))
    {'weights': array([0., 0.], dtype='>f4'), (1, 'a'): {'seen': 3}}
    """

    __slots__ = ("_structs",)

    def __init__(self, structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._structs = StructRegistry()
        for struct in structs:
            self.register(struct)

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Let instances of ``struct`` be plain data; again the same class has no effect.

        Raises ``ConfigurationError`` for another class of a known name, or what is no struct.
        """
        self._structs.register(struct)

    @property
    def struct_count(self) -> int:
        """How many structs are registered."""
        return len(self._structs.classes)

    def forget_structs(self, count: int) -> None:
        """Know only the first ``count`` classes that were registered."""
        self._structs.forget_after(count)

    def encode(self, value: Any, *, name: str = "record") -> bytes:
        """The bytes of ``value``; ``name`` is what errors call it.

        Raises :class:`~streamiter.errors.PlainDataError` with the path to what is not plain data.
        """
        try:
            return encode_frame(value, self._structs)
        except MemoryError:
            raise
        except Exception as error:
            raise self._refused(value, name, error) from error

    def decode(self, data: bytes | memoryview) -> Any:
        """The value that ``data`` is the encoding of.

        Arrays are writable and own their memory (one copy out of ``data``).
        Raises :class:`~streamiter.errors.PlainDataError` for bytes that are damaged, cut off or something
        else, and for a struct that is not registered. Damage that leaves valid bytes goes unseen: whoever
        stores them adds a checksum. Bytes never lead to more memory than a small multiple of their size.
        """
        return self._decoded(data if type(data) is bytes else bytes(memoryview(data)))

    def encode_state(self, state: Any, *, name: str = "state") -> tuple[bytes, list[Deferred]]:
        """:meth:`encode` for state that may hold ``Deferred`` pieces: the bytes, and those pieces in order.

        The bytes refer to the pieces by number. Raises as ``encode`` does; then all of them are released.

        >>> from streamiter.deferred import DeferredFrames
        >>> plain = PlainData()
        >>> data, deferred = plain.encode_state({"seen": DeferredFrames([plain.encode(3), plain.encode(4)])})
        >>> restored = plain.decode_state(data, lambda number: map(plain.decode, deferred[number].frames()))
        >>> list(restored["seen"])
        [3, 4]
        """
        deferred: list[Deferred] = []
        try:
            data = encode_frame(state, self._structs, deferred)
        except BaseException as error:
            release_all(state, self._structs.openings)
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                raise
            raise self._refused(state, name, error, may_be_deferred=True) from error
        return data, deferred

    def decode_state(self, data: bytes | memoryview, resolve: Resolve) -> Any:
        """The state that ``data`` is the encoding of; ``resolve(n)`` gives what takes the n-th deferred piece's place.

        It is called once for each, in order. Raises as :meth:`decode` does, and what ``resolve`` raises.
        """
        raised: list[Exception] = []

        def resolve_or_note(number: int) -> Iterable[Any]:
            try:
                return resolve(number)
            except Exception as error:
                raised.append(error)
                raise

        try:
            return self._decoded(data if type(data) is bytes else bytes(memoryview(data)), resolve_or_note)
        except PlainDataError:
            if raised:
                raise raised[0] from None
            raise

    def encode_batch(self, batch: Batch) -> bytes:
        """The bytes of a batch; arrays and ``Columns`` lie in them as raw buffers.

        A sequence other than a list becomes a list of its records. Errors as in :meth:`encode`, with the
        index of the record.
        """
        if isinstance(batch, (np.ndarray, Columns)):
            return self._encode_arrays(batch)
        records = batch if type(batch) is list else _listed(batch)
        try:
            return encode_frame(records, self._structs)
        except MemoryError:
            raise
        except Exception as error:
            raise self._refused_record(records, error) from error

    def decode_batch(self, data: bytes | memoryview) -> Batch:
        """The batch that ``data`` is the encoding of: a list, an array or ``Columns``, as :meth:`decode`."""
        return self._checked_batch(self.decode(data))

    def decode_batch_in(self, room: memoryview) -> Batch:
        """:meth:`decode_batch` without copies: large arrays stay in ``room``, writable memory given up to them.

        Where ``room`` begins at a multiple of 16, as memory of numpy's does; otherwise they are copied.
        """
        return self._checked_batch(self._decoded(room))

    def _decoded(self, frame: bytes | memoryview, resolve: Resolve | None = None) -> Any:
        try:
            return decode_frame(frame, self._structs, resolve)
        except MemoryError:
            raise
        except Exception as error:
            raise PlainDataError(
                f"expected the encoding of plain data, given {len(frame)} bytes that are damaged, or of "
                f"something else: {error}"
            ) from error

    def _checked_batch(self, batch: Any) -> Batch:
        if type(batch) is list or type(batch) is Columns or (type(batch) is np.ndarray and batch.ndim):
            return batch
        raise PlainDataError(
            f"expected the encoding of a batch (a list, an array or Columns), given that of "
            f"{type_name(type(batch))}; it is of a single value: use decode"
        )

    def _encode_arrays(self, batch: Batch) -> bytes:
        if isinstance(batch, np.ndarray) and batch.ndim == 0:
            raise PlainDataError(
                "batch: expected an array whose first axis is the record, given one without axes; "
                "wrap it: array[numpy.newaxis]"
            )
        return self.encode(batch, name="batch")

    def _refused(
        self, value: Any, name: str, error: Exception, *, may_be_deferred: bool = False
    ) -> PlainDataError:
        refusal = find_refusal(value, self._structs.openings, may_be_deferred=may_be_deferred)
        if refusal is not None:
            return PlainDataError(f"{name}{refusal.path}: {refusal.problem}")
        return PlainDataError(f"{name}: expected plain data that its encoding can hold, given more: {error}")

    def _refused_record(self, records: list[Any], error: Exception) -> PlainDataError:
        for index, record in enumerate(records):
            refusal = find_refusal(record, self._structs.openings)
            if refusal is not None:
                return PlainDataError(f"record {index} of the batch: record{refusal.path}: {refusal.problem}")
        return self._refused(records, "batch", error)


def _listed(batch: Any) -> list[Any]:
    """The records of a batch that is any sequence."""
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes, bytearray, memoryview)):
        raise PlainDataError(
            f"batch: expected a list (or another sequence of records), a numpy array or Columns, given "
            f"{type_name(type(batch))}; {hint_for(type(batch))} (records are {PLAIN_TYPES})"
        )
    return list(batch)


def control_to_plain(control: Control) -> tuple[Any, ...]:
    """Return a control record as plain data, for snapshots of queues: its kind, then its fields.

    >>> control_to_plain(EpochWatermark(3)), control_from_plain(("watermark", 3))
    (('watermark', 3), EpochWatermark(3))
    """
    match control:
        case EpochWatermark():
            return (control.kind, control.epoch)
        case CheckpointBarrier():
            return (control.kind, control.checkpoint, control.suspend)
        case EndOfData():
            return (control.kind, control.epoch)
        case EndOfInput():
            return (control.kind, control.epoch)
        case Idle():
            return (control.kind,)
    raise InternalError(f"{control!r} has no form as plain data")


def control_from_plain(plain: Any) -> Control:
    """Return the control record that ``control_to_plain`` gave. Raises ``PlainDataError`` for other data."""
    match plain:
        case [EpochWatermark.kind, int() as epoch]:
            return EpochWatermark(epoch)
        case [CheckpointBarrier.kind, int() as checkpoint, bool() as suspend]:
            return CheckpointBarrier(checkpoint, suspend=suspend)
        case [EndOfData.kind, int() as epoch]:
            return EndOfData(epoch)
        case [EndOfInput.kind, int() | None as epoch]:
            return EndOfInput(epoch)
        case [Idle.kind]:
            return Idle()
    raise PlainDataError(
        f"expected the plain data of a control record, given {plain!r:.100}; it is of something else, or of "
        "a newer version"
    )
