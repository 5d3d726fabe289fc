"""numpy dtypes as plain data: exact, without pickle, and safe to read from damaged bytes.

The text of a dtype (``<f8``, ``>i4``, ``<U5``, ``<M8[25s]``) tells most of them. The rest is a list:

=======================================================  ===============================================
``["char", text, char]``                                 two C types of one layout (``long``, ``long long``)
``["array", element, shape]``                            a field that is an array itself
``["fields", names, formats, offsets, titles, itemsize,  a structured dtype, with gaps, overlaps and
aligned]``                                               alignment as they are
=======================================================  ===============================================

A dtype's ``metadata`` is not kept: numpy itself counts it as no part of the type.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from streamiter.checkpoints.packing import pack, unpack

__all__ = ["dtype_refusal", "pack_dtype", "unpack_dtype"]

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
    """Why arrays of this dtype are not plain data and what to do instead; None where they are."""
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
