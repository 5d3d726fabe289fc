"""msgpack as it is used here, and nowhere else: types exact, lengths checked, lone surrogates kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]

__all__ = ["PACKED_UNASKED", "UNICODE_ERRORS", "Extension", "extension", "pack", "pack_each", "unpack"]

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
    """An extension object."""
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
