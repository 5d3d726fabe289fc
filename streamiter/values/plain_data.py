"""Plain data: the values that state and records consist of wherever they are stored or leave the process.

===================  ==================================================================================
type                 kept exactly
===================  ==================================================================================
None, bool, int,     ints of any size; NaN, −0.0 and infinities; lone surrogates
float, str, bytes
tuple, list, dict    tuples stay tuples; any hashable plain data is a key; the order of a dict is kept
numpy arrays         any dtype but objects: structured, datetimes, text, big-endian; any shape. After
                     decoding they are contiguous in C order, whatever the strides were
numpy scalars        the exact class
``Columns``          names, order, dtypes
``TimedBatch``       the engine's own: a batch, its timestamps, and its order or None
``msgspec.Struct``   of registered classes, by class name and field names; the class is called with the
                     fields, so a field added later needs a default
===================  ==================================================================================

No other type is plain data, and no subclass of these (``IntEnum``, ``OrderedDict``, named tuples): decoding would
return another type. There is no pickle: decoding runs no code but that of registered structs.

:class:`PlainData` encodes and decodes values and batches. Behind it are the conversion of control records to plain
data, and the search that finds the part of a value that is not plain data, for the error message. The format of the
bytes is in :mod:`streamiter.values.plain_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Final

import msgspec
import numpy as np

from streamiter.errors import PlainDataError
from streamiter.values.deferred import Deferred, PlainValue, release_all
from streamiter.values.encoding import (
    Parts,
    Resolve,
    decode_frame,
    decode_frames,
    encode_frame,
    encode_frames,
    encode_parts,
)
from streamiter.values.plain_format import DEPTH_MAX, SCALAR_TYPES, StructRegistry, dtype_refusal
from streamiter.values.records import Batch, Columns, TimedBatch, untimed


class PlainData:
    """The encoding of plain data; ``structs`` are the classes it knows in addition to the built-in types.

    It keeps nothing between two calls but the structs, so several threads may use it.

    >>> plain = PlainData()
    >>> plain.decode(plain.encode({"weights": np.zeros(2, ">f4"), (1, "a"): {"seen": 3}}))
    {'weights': array([0., 0.], dtype='>f4'), (1, 'a'): {'seen': 3}}
    """

    def __init__(self, structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._structs = StructRegistry()
        for struct in structs:
            self.register(struct)

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Let instances of ``struct`` be plain data; registering the same class twice has no effect.

        Raises ``ConfigurationError`` for another class of a known name, and for a class that is no struct.
        """
        self._structs.register(struct)

    @property
    def struct_count(self) -> int:
        """Number of registered structs."""
        return len(self._structs.classes)

    def forget_structs(self, count: int) -> None:
        """Remove all registered classes but the first ``count``."""
        self._structs.forget_after(count)

    def encode(self, value: PlainValue, *, name: str = "record") -> bytes:
        """Return the bytes of ``value``; error messages call it ``name``.

        Raises :class:`~streamiter.errors.PlainDataError` with the path to the part that is not plain data.
        """
        return b"".join(self.parts(value, name=name))

    def parts(self, value: PlainValue, *, name: str = "record") -> Parts:
        """Return the bytes of ``value`` in pieces; large arrays are not copied. Raises as :meth:`encode` does."""
        try:
            return encode_parts(value, self._structs)
        except MemoryError:
            raise
        except Exception as error:
            raise self._refused(value, name, error) from error

    def decode(self, data: bytes | memoryview) -> PlainValue:
        """Return the value of these bytes.

        Arrays are writable and own their memory (they are copied from ``data`` once).
        Raises :class:`~streamiter.errors.PlainDataError` for bytes that are damaged, cut off or of another format,
        and for a struct that is not registered. Damage that leaves a valid encoding is not found: a store adds a
        checksum. Decoding never allocates more memory than a small multiple of the size of ``data``.
        """
        return self._decoded(data if type(data) is bytes else bytes(memoryview(data)))

    def encode_each(self, values: list[PlainValue], *, name_of: Callable[[int], str]) -> list[bytes]:
        """Return what :meth:`encode` returns for each value, faster; an error calls the i-th value ``name_of(i)``.

        >>> plain = PlainData()
        >>> plain.decode_each(plain.encode_each([1, {"seen": [2]}], name_of=str))
        [1, {'seen': [2]}]
        """
        try:
            return encode_frames(values, self._structs)
        except Exception:  # One of them has an array, or is not plain data.
            return [self.encode(value, name=name_of(index)) for index, value in enumerate(values)]

    def decode_each(self, frames: Sequence[bytes]) -> list[PlainValue]:
        """Return what :meth:`decode` returns for each value, faster. Raises as :meth:`decode` does."""
        try:
            return decode_frames(frames, self._structs)
        except Exception:
            return [self.decode(frame) for frame in frames]

    def encode_state(self, state: PlainValue, *, name: str = "state") -> tuple[bytes, list[Deferred]]:
        """Encode state that may contain ``Deferred`` pieces; return its bytes, and the pieces in order.

        The bytes refer to the pieces by number. Raises as :meth:`encode` does; then all pieces are released.

        >>> from streamiter.values.deferred import DeferredEntries
        >>> plain = PlainData()
        >>> seen = DeferredEntries("seen", plain.encode, ((number,) for number in (3, 4)))
        >>> data, deferred = plain.encode_state({"seen": seen})
        >>> restored = plain.decode_state(data, lambda number: map(plain.decode, deferred[number].frames()))
        >>> list(restored["seen"])
        [[(3,), (4,)]]
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

    def decode_state(self, data: bytes | memoryview, resolve: Resolve) -> PlainValue:
        """Return the state of these bytes; ``resolve(n)`` returns the value in place of the n-th deferred piece.

        ``resolve`` is called once for each piece, in order. Raises as :meth:`decode` does, and errors of ``resolve``.
        """
        raised: list[Exception] = []

        def resolve_or_note(number: int) -> Iterable[PlainValue]:
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
        """Return the bytes of a batch; arrays and ``Columns`` are raw buffers in them.

        A sequence other than a list becomes a list of its records. Raises as :meth:`encode` does, with the index of
        the record.
        """
        return b"".join(self.batch_parts(batch))

    def batch_parts(self, batch: Batch) -> Parts:
        """Return the bytes of a batch in pieces; large arrays are not copied. Raises as :meth:`encode_batch` does."""
        if isinstance(batch, np.ndarray) and batch.ndim == 0:
            raise PlainDataError(
                "batch: expected an array whose first axis is the record, given one without axes; "
                "wrap it: array[numpy.newaxis]"
            )
        if isinstance(batch, (np.ndarray, Columns)):
            return self.parts(batch, name="batch")
        records = untimed(batch)
        if type(records) is not list and not isinstance(records, (np.ndarray, Columns)):
            records = _listed(records)
        given = TimedBatch(records, batch.times, batch.order) if isinstance(batch, TimedBatch) else records
        try:
            return encode_parts(given, self._structs)
        except MemoryError:
            raise
        except Exception as error:
            raise self._refused_record(records, error) from error

    def decode_batch(self, data: bytes | memoryview) -> Batch:
        """Return the batch of these bytes: a list, an array or ``Columns``. Raises as :meth:`decode` does."""
        return self._checked_batch(self.decode(data))

    def decode_batch_in(self, room: memoryview) -> Batch:
        """Return the batch of these bytes without copies, as ``decode_in`` does."""
        return self._checked_batch(self.decode_in(room))

    def decode_in(self, room: memoryview) -> PlainValue:
        """Decode a value without copies: large arrays stay in ``room``, writable memory that belongs to them then.

        ``room`` must begin at a multiple of 16, as memory of numpy does; otherwise arrays are copied. Arrays in
        read-only memory are copied, too.
        """
        return self._decoded(room)

    def _decoded(self, frame: bytes | memoryview, resolve: Resolve | None = None) -> PlainValue:
        try:
            return decode_frame(frame, self._structs, resolve)
        except MemoryError:
            raise
        except Exception as error:
            raise PlainDataError(
                f"expected the encoding of plain data, given {len(frame)} bytes that are damaged, or of "
                f"something else: {error}"
            ) from error

    def _checked_batch(self, batch: PlainValue) -> Batch:
        if isinstance(batch, (list, Columns, TimedBatch)) or (isinstance(batch, np.ndarray) and batch.ndim):
            return batch
        raise PlainDataError(
            f"expected the encoding of a batch (a list, an array or Columns), given that of "
            f"{type_name(type(batch))}; it is of a single value: use decode"
        )

    def _refused(
        self, value: PlainValue, name: str, error: Exception, *, may_be_deferred: bool = False
    ) -> PlainDataError:
        refusal = find_refusal(value, self._structs.openings, may_be_deferred=may_be_deferred)
        if refusal is not None:
            return PlainDataError(f"{name}{refusal.path}: {refusal.problem}")
        return PlainDataError(f"{name}: expected plain data that its encoding can hold, given more: {error}")

    def _refused_record(self, records: Iterable[PlainValue], error: Exception) -> PlainDataError:
        for index, record in enumerate(records):
            refusal = find_refusal(record, self._structs.openings)
            if refusal is not None:
                return PlainDataError(f"record {index} of the batch: record{refusal.path}: {refusal.problem}")
        return self._refused(records, "batch", error)


def _listed(batch: PlainValue) -> list[PlainValue]:
    """Return the records of any sequence as a list."""
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes, bytearray, memoryview)):
        raise PlainDataError(
            f"batch: expected a list (or another sequence of records), a numpy array or Columns, given "
            f"{type_name(type(batch))}; {hint_for(type(batch))} (records are {PLAIN_TYPES})"
        )
    return list(batch)


# ---- error messages

PLAIN_TYPES: Final = (
    "None, bool, int, float, str, bytes, tuple, list, dict, numpy arrays and scalars, Columns, "
    "registered msgspec.Structs"
)

# Longer paths and keys are shortened in error messages.
_KEY_CHARACTERS: Final = 40
_PATH_CHARACTERS: Final = 200

_TWICE: Final = "expected each Deferred once, given the same object again; it can be read once: make another"

_ATOMS: Final = frozenset({NoneType, bool, int, float, str, bytes, np.str_, np.bytes_})

# By name, so that no module is imported for them. The first entry that names the class or one of its bases counts.
_HINTS: Final = {
    "datetime.datetime": "convert it, for example to a number of milliseconds",
    "datetime.date": "convert it, for example to text with .isoformat()",
    "datetime.time": "convert it, for example to text with .isoformat()",
    "datetime.timedelta": "convert it, for example to a number of milliseconds",
    "decimal.Decimal": "convert it, for example to str, or to an int of the smallest unit",
    "fractions.Fraction": "convert it, for example to a tuple of two ints",
    "uuid.UUID": "convert it, for example to str",
    "pathlib.PurePath": "convert it to str",
    "pathlib._local.PurePath": "convert it to str",  # its name in Python 3.13
    "enum.Enum": "give its .value",
    "set": "convert it, for example to a sorted list",
    "frozenset": "convert it, for example to a sorted tuple",
    "bytearray": "convert it with bytes(...)",
    "memoryview": "convert it with bytes(...)",
    "complex": "convert it to numpy.complex128 or a tuple of two floats",
    "range": "convert it with list(...)",
    "msgspec.Struct": "register the class: PlainData(structs=[...]) or register(...)",
    "streamiter.values.deferred.Deferred": "only what an operator's snapshot() gives may hold it",
    "numpy.ma.MaskedArray": "fill it (.filled(...)) or give the mask as an array of its own",
    "numpy.ndarray": "convert it with numpy.asarray(...)",
    "dict": "convert it with dict(...)",
    "tuple": "convert it with tuple(...), or to a dict",
    "list": "convert it with list(...)",
    "str": "convert it with str.__str__(...)",
    "bytes": "convert it with bytes(...)",
    "int": "convert it with int(...)",
    "float": "convert it with float(...)",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The part of a value that is not plain data, for an error message."""

    path: str
    """The path from the value to the part, as Python writes it."""
    problem: str
    """Why the part is not plain data, and what to do."""


@dataclass(frozen=True, slots=True)
class _ValuePath:
    """A part of the value, and the step to it from its container; the text of a path is made only for the part at
    fault.
    """

    part: PlainValue
    step: str
    outer: _ValuePath | None
    depth: int

    def inside(self, part: PlainValue, step: str) -> _ValuePath:
        return _ValuePath(part, step, self, self.depth + 1)

    def path(self) -> str:
        steps = [self.step]
        place = self.outer
        while place is not None:
            steps.append(place.step)
            place = place.outer
        return _shortened("".join(reversed(steps)), _PATH_CHARACTERS)


def find_refusal(
    value: PlainValue, structs: Container[type[object]], *, may_be_deferred: bool = False
) -> Refusal | None:
    """Return the first part of ``value`` that is not plain data; None if there is none.

    With ``may_be_deferred``, a ``Deferred`` is allowed, each only once.

    >>> find_refusal([1, {"user": {2, 3}}], structs=()).path
    '[1]["user"]'
    """
    waiting = [_ValuePath(value, "", None, 0)]
    deferred: set[int] | None = set() if may_be_deferred else None
    while waiting:
        place = waiting.pop()
        if deferred is not None and isinstance(place.part, Deferred):
            if id(place.part) in deferred:
                return Refusal(place.path(), _TWICE)
            deferred.add(id(place.part))
            continue
        problem = _problem(place, structs)
        if problem is not None:
            return Refusal(place.path(), problem)
        waiting += reversed(list(_parts(place, structs)))
    return None


def _problem(place: _ValuePath, structs: Container[type[object]]) -> str | None:
    if place.depth > DEPTH_MAX:
        return f"expected at most {DEPTH_MAX} levels of nesting, given more; does it contain itself?"
    return _part_problem(place.part, structs)


def _part_problem(part: PlainValue, structs: Container[type[object]]) -> str | None:
    kind = type(part)
    if kind in _ATOMS or kind in (list, tuple, dict):
        return None
    if kind in structs:
        return _field_problem(part)
    if kind is np.ndarray or kind in SCALAR_TYPES:
        return _dtype_problem(part)
    if kind is Columns:
        return _names_problem(part)
    if kind is TimedBatch:
        return None
    return f"expected plain data ({PLAIN_TYPES}), given {type_name(kind)}; {hint_for(kind)}"


def _dtype_problem(value: PlainValue) -> str | None:
    refusal = dtype_refusal(value.dtype)
    if refusal is None:
        return None
    given = f"{type_name(type(value))} of dtype {value.dtype}"
    return f"expected plain data ({PLAIN_TYPES}), given {given}, {refusal}"


def _field_problem(struct: msgspec.Struct) -> str | None:
    missing = [name for name in struct.__struct_fields__ if not hasattr(struct, name)]
    if not missing:
        return None
    return f"expected every field of {type_name(type(struct))} to be set, given none for {missing[0]}; set it"


def _names_problem(columns: Columns) -> str | None:
    strange = [name for name in columns.names if type(name) is not str]
    if not strange:
        return None
    return f"expected columns named by str, given the name {shown_key(strange[0])}; convert it with str(...)"


def _parts(place: _ValuePath, structs: Container[type[object]]) -> Iterator[_ValuePath]:
    part = place.part
    kind = type(part)
    if kind is list or kind is tuple:
        yield from (place.inside(item, f"[{index}]") for index, item in enumerate(part))
    elif kind is dict:
        for key, item in part.items():
            yield place.inside(key, f".key({shown_key(key)})")
            yield place.inside(item, f"[{shown_key(key)}]")
    elif kind is Columns:
        yield from (place.inside(array, f"[{shown_key(name)}]") for name, array in part.arrays.items())
    elif kind is TimedBatch:
        yield place.inside(part.records, "")
    elif kind in structs:
        fields = zip(part.__struct_fields__, msgspec.structs.astuple(part), strict=True)
        yield from (place.inside(item, f".{name}") for name, item in fields)


def shown_key(key: PlainValue) -> str:
    """Return a dict key for a path: shortened, strings with double quotes. Never raises."""
    try:
        text = repr(key)
    except Exception:  # of a user's own __repr__, or for an int of thousands of digits
        return f"<{type_name(type(key))}>"
    if type(key) is str and text.startswith("'") and '"' not in text:
        text = f'"{text[1:-1]}"'
    return _shortened(text, _KEY_CHARACTERS)


def _shortened(text: str, characters: int) -> str:
    """Return the start and the end of a text, at most ``characters`` of each."""
    return text if len(text) <= 2 * characters else f"{text[:characters]}…{text[-characters:]}"


def type_name(kind: type[object]) -> str:
    """Return the name of a class as a user imports it.

    >>> type_name(int), type_name(Columns)
    ('int', 'streamiter.values.records.Columns')
    """
    if kind is NoneType:
        return "None"
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def hint_for(kind: type[object]) -> str:
    """Return advice for a value of a class that is not plain data."""
    names = {type_name(base) for base in kind.__mro__}
    return next((hint for name, hint in _HINTS.items() if name in names), "convert it to one of these types")
