"""The types of plain data: dtypes, packed values, registered structs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np

from streamiter.checkpoints import extensions
from streamiter.errors import ConfigurationError

__all__ = [
    "PACKED_UNASKED",
    "UNICODE_ERRORS",
    "Extension",
    "StructRegistry",
    "dtype_refusal",
    "extension",
    "pack",
    "pack_dtype",
    "pack_each",
    "unpack",
    "unpack_dtype",
]


Dtype = np.dtype[Any]

# Only what this matches reaches np.dtype() when bytes are read: np.dtype() also takes comma lists, field
# specifications and "O", and an object array over foreign bytes is a crash of the interpreter.
_TEXT: Final = re.compile(r"[<>|](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,10}[A-Za-zμ]{1,7}(?:/\d{1,10})?\])?)")

# C types whose text names another one: on 64-bit Linux "q" (long long) and "l" (long) are both <i8,
# yet their scalars are of different classes.
_AMBIGUOUS: Final = frozenset(
    char for char in "bBhHiIlLqQefdgFDG" if np.dtype(np.dtype(char).str).char != char
)

# numpy's own types end at NPY_HALF = 23; above are other packages' and strings of variable width.
_LAST_BUILTIN: Final = 23


def dtype_refusal(dtype: Dtype) -> str | None:
    """Why arrays of this dtype are not plain data and what to do instead; None where they are.

    numpy dtypes as plain data: exact, without pickle, and safe to read from damaged bytes.

    The text of a dtype (``<f8``, ``>i4``, ``<U5``, ``<M8[25s]``) tells most of them. The rest is a list:

    =======================================================  ===============================================
    ``["char", text, char]``                                 two C types of one layout (``long``, ``long long``)
    ``["array", element, shape]``                            a field that is an array itself
    ``["fields", names, formats, offsets, titles, itemsize,  a structured dtype, with gaps, overlaps and
    aligned]``                                               alignment as they are
    =======================================================  ===============================================

    A dtype's ``metadata`` is not kept: numpy itself counts it as no part of the type.
    """
    if dtype.kind == "O":
        return "which holds arbitrary objects; give the array a numeric or text dtype, or make it a list"
    if dtype.num > _LAST_BUILTIN:
        return "which is no fixed-size type of numpy's own; convert it, for example with .astype('U')"
    if dtype.subdtype is not None:
        return dtype_refusal(dtype.subdtype[0])
    if dtype.names is None:
        return None
    if dtype.type is not np.void:
        return f"whose records are {dtype.type.__name__}s; use a plain structured dtype: .astype(dtype.descr)"
    if not all(title is None or type(title) is str for title in _titles(dtype)):
        return "with a field title that is not a str; name fields by str alone"
    refusals = (dtype_refusal(_field(dtype, name)[0]) for name in dtype.names)
    return next((refusal for refusal in refusals if refusal), None)


def pack_dtype(dtype: Dtype) -> bytes:
    """The bytes of a dtype for which :func:`dtype_refusal` has no objection.

    >>> pack_dtype(np.dtype(">f4")), unpack_dtype(b">f4")
    (b'>f4', dtype('>f4'))
    """
    plain = _to_plain(dtype)
    if isinstance(plain, str):
        return plain.encode("ascii")
    return pack(plain)


def unpack_dtype(data: bytes) -> Dtype:
    """The dtype of these bytes; ``ValueError`` (or numpy's own error) for bytes that are none."""
    # Text is ASCII; a msgpack list begins with a byte from 0x90 up.
    is_text = data[:1] < b"\x80"
    dtype = _from_plain(data.decode("ascii") if is_text else unpack(data, _no_extension))
    # Texts are checked one by one, too; but objects made of foreign bytes crash the interpreter.
    if dtype.hasobject or dtype_refusal(dtype):
        raise ValueError(f"{dtype} is none of plain data")
    return dtype


def _to_plain(dtype: Dtype) -> str | list[Any]:
    if dtype.subdtype is not None:
        element, shape = dtype.subdtype
        return ["array", _to_plain(element), list(shape)]
    if dtype.names is not None:
        return _fields_to_plain(dtype, dtype.names)
    if dtype.char in _AMBIGUOUS:
        return ["char", dtype.str, dtype.char]
    return dtype.str


def _fields_to_plain(dtype: Dtype, names: tuple[str, ...]) -> list[Any]:
    formats = [_to_plain(_field(dtype, name)[0]) for name in names]
    offsets = [_field(dtype, name)[1] for name in names]
    return ["fields", list(names), formats, offsets, _titles(dtype), dtype.itemsize, dtype.isalignedstruct]


def _field(dtype: Dtype, name: str) -> tuple[Any, ...]:
    assert dtype.fields is not None
    return dtype.fields[name]


def _titles(dtype: Dtype) -> list[Any]:
    fields = [_field(dtype, name) for name in dtype.names or ()]
    return [field[2] if len(field) > 2 else None for field in fields]


def _from_plain(plain: Any) -> Dtype:
    match plain:
        case str():
            return _from_text(plain)
        case ["char", str() as text, str() as char]:
            return _from_char(_from_text(text), char)
        case ["array", element, [*shape]]:
            return np.dtype((_from_plain(element), tuple(shape)))
        case ["fields", [*names], [*formats], [*offsets], [*titles], int() as itemsize, bool() as aligned]:
            layout = {"names": names, "formats": [_from_plain(one) for one in formats], "offsets": offsets}
            if any(title is not None for title in titles):
                layout["titles"] = titles
            return np.dtype(layout | {"itemsize": itemsize}, align=aligned)  # type: ignore[call-overload,no-any-return]
    raise ValueError(f"{plain!r} does not describe a dtype")


def _from_text(text: str) -> Dtype:
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r} is not a dtype")
    return np.dtype(text)


def _from_char(dtype: Dtype, char: str) -> Dtype:
    """The C type ``char`` where it has this layout, as it may not on another platform."""
    if char not in _AMBIGUOUS:
        return dtype
    exact = np.dtype(char).newbyteorder(dtype.byteorder)
    return exact if exact.str == dtype.str else dtype


def _no_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension {code} within a dtype")


Extension: TypeAlias = Any
"""A msgpack extension object: a code from 0 to 127 and a payload."""

PACKED_UNASKED: Final[frozenset[type[Any]]] = frozenset(
    {bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp}
)
"""What msgpack packs, also when strict, as if it were something else, or reads without asking."""

UNICODE_ERRORS: Final = "surrogatepass"
"""UTF-8 plus lone surrogates, which Python strings may hold (file names, JSON escapes)."""

# msgpack's packer starts with 256 KiB, which the system hands out and takes back page by page; most
# encodings are one record, and doubling costs a large one little.
_FIRST_BUFFER_BYTES: Final = 4096


def extension(code: int, payload: bytes) -> Extension:
    """An extension object.

    msgpack as it is used here, and nowhere else: types exact, lengths checked, lone surrogates kept.
    """
    # A named tuple whose own constructor checks, in Python, what is known here.
    return tuple.__new__(msgpack.ExtType, (code, payload))


def pack(
    value: Any, default: Callable[[Any], Any] | None = None, *, unicode_errors: str = UNICODE_ERRORS
) -> bytes:
    """The msgpack object of ``value``; ``default`` gives what to pack for what msgpack does not know.

    With ``unicode_errors="strict"`` strings take two thirds of the time, and a lone surrogate is a
    ``UnicodeEncodeError``.
    """
    packed: bytes = _packer(default, unicode_errors).pack(value)
    return packed


def pack_each(values: Iterable[Any], default: Callable[[Any], Any] | None = None) -> Iterator[bytes]:
    """The msgpack object of each value; faster than :func:`pack` for many small ones."""
    return map(_packer(default, UNICODE_ERRORS).pack, values)


def _packer(default: Callable[[Any], Any] | None, unicode_errors: str) -> Any:
    return msgpack.Packer(
        strict_types=True, default=default, unicode_errors=unicode_errors, buf_size=_FIRST_BUFFER_BYTES
    )


def unpack(
    packed: bytes | memoryview,
    ext_hook: Callable[[int, bytes], Any],
    list_hook: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """The value of one msgpack object; ``ValueError`` and what the hooks raise where it is damaged."""
    _check_lengths(packed)
    return msgpack.unpackb(
        packed,
        ext_hook=ext_hook,
        list_hook=list_hook,
        strict_map_key=False,
        unicode_errors=UNICODE_ERRORS,
    )


def _check_lengths(packed: bytes | memoryview) -> None:
    """Make sure that every part is there, so that no list is made room for on the word of a forged length.

    ``unpackb`` itself would take an array's length up to the number of all bytes, once for each level.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(packed)), read_size=1)
    unpacker.feed(packed)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ValueError("it ends early") from None
    if unpacker.tell() != len(packed):
        raise ValueError(f"{len(packed) - unpacker.tell()} bytes follow its end")


class StructRegistry:
    """Struct classes by name, and for each what its encodings begin with.

    The ``msgspec.Struct`` classes that an encoding knows, by name.
    """

    __slots__ = ("classes", "openings")

    def __init__(self) -> None:
        self.classes: dict[str, type[msgspec.Struct]] = {}
        self.openings: dict[type[Any], Extension] = {}

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Add a class; without effect where it is known. Raises ``ConfigurationError``."""
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise ConfigurationError(
                f"structs of plain data: expected subclasses of msgspec.Struct, given {struct!r}; "
                "other classes cannot be stored: make it a Struct, or convert its instances to dicts"
            )
        known = self.classes.setdefault(struct.__name__, struct)
        if known is not struct:
            raise ConfigurationError(
                f"structs of plain data: expected one class of each name, given {_full_name(known)} and "
                f"{_full_name(struct)}; stored data names a struct by its class name alone: rename one"
            )
        self.openings[struct] = _opening(struct)

    def forget_after(self, count: int) -> None:
        """Keep the first ``count`` classes only."""
        while len(self.classes) > count:
            _, struct = self.classes.popitem()
            del self.openings[struct]


def _opening(struct: type[msgspec.Struct]) -> Extension:
    return extension(extensions.STRUCT, pack([struct.__name__, *struct.__struct_fields__]))


def _full_name(struct: type[msgspec.Struct]) -> str:
    return f"{struct.__module__}.{struct.__qualname__}"
