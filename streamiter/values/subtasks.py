"""Which subtask: of a key, and of a partition of a topic.

Partition p is read by subtask p modulo their number; the state that belongs to the partition is there, too. A key
belongs to a *key group*, and each subtask has a range of groups: the records of a key, its state and its timers are
at :func:`subtask_of_key`.

A key is an int, str, bytes or a tuple of keys. Its *encoding* is msgpack with the shortest form of integers, so
equal keys have equal bytes, and different keys (1, "1", b"1", (1,)) have different bytes. A *key group* is a set of
keys whose state moves together when a job restarts with another parallelism. The group of a key is ``hash % groups``
with a 64-bit hash:

- an int from −2⁶³ to 2⁶⁴−1: the finalizer of splitmix64, applied to the int modulo 2⁶⁴;
- any other key: the same, applied to the CRC-32 of its encoding.

State is stored by group, in this process and in checkpoints: neither encoding nor hash may ever change.

splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants
are David Stafford's Mix13.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import PlainDataError
from streamiter.values.plain_format import BIG_INT, Extension, extension, joined, pack, pack_each, unpack

Key = int | str | bytes | tuple[Any, ...]
"""An int, str, bytes or a tuple of keys."""

KEY_GROUPS: Final = 128
"""Number of key groups of a flow, and so the largest parallelism of a keyed step."""

Groups = TypeVar("Groups", int, npt.NDArray[np.int64])


def subtask_of_group(group: Groups, subtasks: int) -> Groups:
    """Return the subtask that owns a key group, or the subtasks that own an array of key groups."""
    return group * subtasks // KEY_GROUPS


def subtask_of_key(key: object, subtasks: int) -> int:
    """Return the subtask that gets the records of a key, and has its state and its timers.

    >>> [subtask_of_key(key, 4) for key in ("user-17", 17, np.int32(17))]
    [0, 1, 1]
    """
    return subtask_of_group(key_group(key), subtasks)


def subtask_of_partition(partition: int, subtasks: int) -> int:
    """Return the subtask that reads a partition, and has the state that belongs to it."""
    return partition % subtasks


def partitions_of_subtask(subtask: int, subtasks: int, partitions: int) -> range:
    """Return the partitions that a subtask reads.

    >>> list(partitions_of_subtask(1, 3, partitions=8))
    [1, 4, 7]
    """
    return range(subtask, partitions, subtasks)


_EXACT: Final = frozenset({int, str, bytes})
_NUMPY_INTS: Final = frozenset(np.dtype(c).type for c in "bBhHiIlLqQ")  # np.integer includes timedeltas
_MASK: Final = 2**64 - 1


def normalize_key(key: object) -> Key:
    """Return ``key`` with numpy's ints, texts and bytes replaced by Python's own, also within tuples.

    Raises :class:`~streamiter.errors.PlainDataError` for a value that is no key.

    >>> normalize_key((np.int64(7), np.str_("a")))
    (7, 'a')
    """
    try:
        return _normalized(key)
    except RecursionError:
        raise _too_large("RecursionError") from None


def _normalized(key: Any) -> Key:
    kind = type(key)
    if kind in _EXACT:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        return tuple(map(_normalized, key))
    if kind in _NUMPY_INTS:
        return int(key)
    if kind is np.str_:
        return str.__str__(key)  # str(key) loses NULs at the end
    if kind is np.bytes_:
        return bytes(key)
    from streamiter.values.plain_data import shown_key, type_name  # For the message: it takes a while to import.

    expected = "expected an int, str, bytes or a tuple of such"
    raise PlainDataError(f"key {shown_key(key)}: {expected}, given {type_name(kind)}; {_advice(key)}")


def _advice(key: object) -> str:
    if isinstance(key, (bool, np.bool_)):
        return "True equals 1 and would share its state; use int(key) or a str"
    if isinstance(key, (float, np.floating)):
        return "NaN never equals itself and 0.1 + 0.2 is not 0.3; use an int (scaled, rounded) or a str"
    if isinstance(key, (int, str, bytes)):
        return "it would come back as another class; use the plain value (.value of an enum)"
    if isinstance(key, (np.datetime64, np.timedelta64)):
        return "use an int: .astype(numpy.int64)"
    if isinstance(key, list):
        return "use tuple(key)"
    return "make an int, a str or a tuple of such from it"


def check_keys(keys: list[Any]) -> list[Key]:
    """Return all keys, normalized: the list itself if nothing changes, which only takes a look at their types.

    Raises :class:`~streamiter.errors.PlainDataError` that shows the first value that is no key.
    """
    kinds = set(map(type, keys))
    if kinds <= _EXACT:
        return keys
    if kinds == {tuple} and _EXACT.issuperset(map(type, chain.from_iterable(keys))):
        return keys
    return list(map(normalize_key, keys))


def encode_key(key: object) -> bytes:
    """Return the bytes of a key: the same for equal keys, and different for different keys.

    >>> [encode_key(key).hex(" ") for key in (1, np.uint8(1), "1", b"1", (1,))]
    ['01', '01', 'a1 31', 'c4 01 31', '91 01']
    """
    return _encode(normalize_key(key))


def encode_each_key(keys: Sequence[Key]) -> list[bytes]:
    """Return the bytes of each of these keys, which ``check_keys`` has returned."""
    try:
        return list(pack_each(keys, _pack_instead))
    except ValueError as error:
        raise _too_large(str(error)) from error


def decode_keys(encoded: Sequence[bytes]) -> list[Key]:
    """Return the keys of these bytes.

    >>> decode_keys(encode_each_key([1, "a", (2, b"b"), 2**70]))
    [1, 'a', (2, b'b'), 1180591620717411303424]
    """
    keys: list[Key] = unpack(joined(encoded), _unpack_big, tuple)
    return list(keys)


def _unpack_big(code: int, content: bytes) -> int:
    if code != BIG_INT:
        raise ValueError(f"a key holds extension {code}")
    return int.from_bytes(content, "big", signed=True)


def _encode(key: Key) -> bytes:
    try:
        return pack(key, _pack_instead)
    except ValueError as error:
        raise _too_large(str(error)) from error


def _too_large(reason: str) -> PlainDataError:
    expected = "key: expected one that its encoding can hold"
    return PlainDataError(f"{expected}, given one too deep or too long ({reason}); use a flat and shorter one")


def _pack_instead(part: Any) -> list[Any] | Extension:
    """Return a tuple as a list (keys contain no lists), and an int of more than 64 bits as its bytes."""
    if type(part) is tuple:
        return list(part)
    content = part.to_bytes(part.bit_length() // 8 + 1, "big", signed=True)
    return extension(BIG_INT, content)


def key_group(key: object, groups: int = KEY_GROUPS) -> int:
    """Return the group of a key, 0 to ``groups`` − 1: the same in every process, version and run.

    >>> key_group("user-17"), key_group(17), key_group(np.int32(17))
    (1, 62, 62)
    """
    normalized = normalize_key(key)
    if type(normalized) is int and -(2**63) <= normalized < 2**64:
        return mixed(normalized) % groups
    return mixed(zlib.crc32(_encode(normalized))) % groups


def mixed(number: int) -> int:
    """Return the finalizer of splitmix64: each of the 64 bits of the result depends on all bits of the number.

    >>> hex(mixed(1))
    '0x5692161d100b05e5'
    """
    number &= _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


def key_groups(keys: Sequence[object] | npt.NDArray[Any], groups: int = KEY_GROUPS) -> npt.NDArray[np.int64]:
    """Return the group of each key, as :func:`key_group` does; for ints it is computed with arrays.

    ``keys`` is a list of keys, or an array of ints, texts or bytes with one axis.

    >>> key_groups([17, 18, "user-17"]), key_groups(np.array([17, 18], np.int32))
    (array([ 62, 113,   1]), array([ 62, 113]))
    """
    if isinstance(keys, np.ndarray):
        return _groups_of_array(keys, groups)
    if set(map(type, keys)) == {int}:
        return _groups_of_ints(keys, groups)
    normalized = check_keys(list(keys))
    kinds = set(map(type, normalized))
    if kinds == {int}:  # They were ints of numpy.
        return _groups_of_ints(normalized, groups)
    if int not in kinds:
        checksums = map(zlib.crc32, pack_each(normalized, _pack_instead))
        return _groups_of_numbers(np.fromiter(checksums, np.uint64, len(normalized)), groups)
    return np.array([key_group(key, groups) for key in normalized], np.int64)


def _groups_of_ints(keys: Sequence[object], groups: int) -> npt.NDArray[np.int64]:
    try:
        return _groups_of_numbers(np.array(keys, np.int64).view(np.uint64), groups)
    except OverflowError:
        return np.array([key_group(key, groups) for key in keys], np.int64)


def _groups_of_array(keys: npt.NDArray[Any], groups: int) -> npt.NDArray[np.int64]:
    if keys.ndim != 1:
        given = f"one of shape {keys.shape}; choose one column, or make tuples"
        raise PlainDataError(f"keys: expected an array with one axis, given {given}")
    if keys.dtype.kind == "i" or keys.dtype.kind == "u":
        wide = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64)
        return _groups_of_numbers(wide.view(np.uint64), groups)
    # Not tolist(), which would turn datetimes into ints.
    return key_groups(list(keys), groups)


def _groups_of_numbers(numbers: npt.NDArray[np.uint64], groups: int) -> npt.NDArray[np.int64]:
    """Apply :func:`mixed` to all numbers; unsigned arithmetic wraps, as the masks there do."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    numbers = numbers ^ numbers >> np.uint64(31)
    return (numbers % np.uint64(groups)).astype(np.int64)
