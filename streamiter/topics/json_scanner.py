"""Scan JSON objects of a schema straight into columns, with compiled code and without a Python object for a record.

The scanner reads the plain form of JSON that programs write: any order of the keys, white space, further fields that
are skipped, texts without pairs of surrogates, integers of 63 bits, and numbers whose nearest float is certain. A
record in any other form is *odd*: the scanner reports its index, and the caller decodes it in another way. So each
record that is not odd is valid JSON of the schema, and its columns have the same bits as the columns of a complete
decoder.

Scanning needs no checks of the end of the bytes. Each record ends with a line feed, and no function reads beyond a line
feed, because no plain record contains one.

This module is only for installations with Numba (``streamiter.values.helpers.compiled``), and is imported when a
decoder has enough records to scan.

Source of the rounding: Lemire, "Number Parsing at a Gigabyte per Second" (2021), and Clinger, "How to Read Floating
Point Numbers Accurately" (1990).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.numbers import Bytes, Floats

pointer_to = pointer_function()

FieldSlots = npt.NDArray[np.int64]
"""The numbers of a batch, eight bytes each: field by field and, within a field, record by record."""

Fields = Sequence[tuple[str, np.dtype[Any], int | None]]
"""The names, types, and widths of lists of a schema; no name contains a quote, backslash or control character."""

ODD: Final = -1
"""Instead of an index: the record is odd."""

# The schema is an array with this many numbers for each field, and as many for the start of an object.
_KIND: Final = 0
_ITEMS: Final = 1  # the values of a record
_IS_LIST: Final = 2
_SLOTS: Final = 3  # the slots of a record
FIRST_SLOT: Final = 4
LOWEST: Final = 5
HIGHEST: Final = 6
_KEY_START: Final = 7
_KEY_SIZE: Final = 8
# A scan changes these numbers.
_LAST_RECORD: Final = 9  # the last record that has this field
_NEXT_FIELD: Final = 10  # the field that followed this field the last time
_ATTRIBUTES: Final = 11

_FLOAT: Final = 0
_INTEGER: Final = 1
_TRUTH: Final = 2
_TEXT: Final = 3
_KINDS: Final = {"f": _FLOAT, "i": _INTEGER, "u": _INTEGER, "b": _TRUTH, "U": _TEXT}

_LINE_FEED: Final = 10
_SPACE: Final = 32
_QUOTE: Final = 34
_PLUS: Final = 43
_COMMA: Final = 44
_MINUS: Final = 45
_DOT: Final = 46
_ZERO: Final = 48
_COLON: Final = 58
_BACKSLASH: Final = 92

# Fields that are skipped may contain this many levels of lists and objects; deeper ones are odd.
_LEVELS_MAX: Final = 32

# Numbers of this many digits that do not fit 63 bits become negative, and smaller ones do not.
_DIGITS_MAX: Final = 19
_EXACT_INTEGER_MAX: Final = 1 << 53
_EXACT_POWERS: Final = np.array([float(10**power) for power in range(23)])
# Numbers with a larger power of ten are odd.
_POWER_MAX: Final = 64


def _bits_of_power(power: int) -> tuple[int, int]:
    """Return the first 128 bits of ``5**power`` in two halves: rounded down, from -27 to -1 up."""
    size = (5 ** abs(power)).bit_length()
    if power >= 0:
        bits = 5**power << 128 >> size
    elif power >= -27:
        bits = (1 << (size + 127)) // 5**-power + 1
    else:
        bits = (1 << (size + 127)) // 5**-power
    return bits >> 64, bits & ((1 << 64) - 1)


_POWERS_OF_FIVE: Final = np.array(
    [_bits_of_power(power) for power in range(-_POWER_MAX, _POWER_MAX + 1)], dtype=np.uint64
)
_POWER_OF_TWO_MAX: Final = 300
_POWERS_OF_TWO: Final = np.array([2.0**power for power in range(-_POWER_OF_TWO_MAX, _POWER_OF_TWO_MAX + 1)])
_LOW_HALF: Final = np.uint64((1 << 32) - 1)
_HALF: Final = np.uint64(32)
_HIGHEST_BIT: Final = np.uint64(1 << 63)
# The product has 64 bits, a float has 53, and one more decides about rounding.
_BITS_TO_SPARE: Final = np.uint64(9)
_SPARE_BITS: Final = np.uint64((1 << 9) - 1)
_ONE: Final = np.uint64(1)
_THREE: Final = np.uint64(3)
_SIXTY_THREE: Final = np.uint64(63)


# -- Numbers ---------------------------------------------------------------------------------------------------


@compiled
def _multiplied(first: np.uint64, second: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the high and the low 64 bits of the product."""
    first_low, first_high = first & _LOW_HALF, first >> _HALF
    second_low, second_high = second & _LOW_HALF, second >> _HALF
    low = first_low * second_low
    middle = first_high * second_low + (low >> _HALF)
    other = first_low * second_high + (middle & _LOW_HALF)
    return first_high * second_high + (middle >> _HALF) + (other >> _HALF), first * second


@compiled
def nearest_float(digits: int, power: int) -> float:
    """Return the float nearest to ``digits * 10**power``, for positive digits of 63 bits and a power up to 64."""
    shifted, shifts = np.uint64(digits), 0
    while shifted < _HIGHEST_BIT:
        shifted <<= _ONE
        shifts += 1
    high, low = _multiplied(shifted, _POWERS_OF_FIVE[power + _POWER_MAX, 0])
    if high & _SPARE_BITS == _SPARE_BITS:  # the second half may carry into the bits of the float
        carry, _ = _multiplied(shifted, _POWERS_OF_FIVE[power + _POWER_MAX, 1])
        low += carry
        if low < carry:
            high += _ONE
    upper = high >> _SIXTY_THREE
    spare = upper + _BITS_TO_SPARE
    bits = high >> spare
    # Halfway between two floats, which only these powers can be: round to the even one.
    if low <= _ONE and -4 <= power <= 23 and bits & _THREE == _ONE and bits << spare == high:
        bits -= _ONE
    bits = (bits + (bits & _ONE)) >> _ONE
    if upper == _ONE:
        shifts -= 1
    return float(float(bits) * _POWERS_OF_TWO[_POWER_OF_TWO_MAX + ((217706 * power) >> 16) + 11 - shifts])


@compiled
def _scan_digits(data: Bytes, at: int, number: int) -> tuple[int, int]:
    """Return the index after the digits, and the number with these digits appended."""
    while _ZERO <= data[at] < _COLON:
        number = number * 10 + (data[at] - _ZERO)
        at += 1
    return at, number


@compiled
def _leading_zeros(data: Bytes, at: int) -> int:
    zeros = 0
    while data[at] == _ZERO or data[at] == _DOT:
        if data[at] == _ZERO:
            zeros += 1
        at += 1
    return zeros


@compiled
def _scan_exponent(data: Bytes, at: int) -> tuple[int, int]:
    """Return the index after an exponent, and the exponent; ``at`` is the index after the letter e."""
    is_negative = data[at] == _MINUS
    start = at + 1 if is_negative or data[at] == _PLUS else at
    end, exponent = _scan_digits(data, start, 0)
    if not 1 <= end - start <= 3:
        return ODD, 0
    return end, -exponent if is_negative else exponent


@compiled
def _scan_float(data: Bytes, at: int) -> tuple[int, float]:
    """Return the index after a number, and the number."""
    is_negative = data[at] == _MINUS
    first = at + 1 if is_negative else at
    at, digits = _scan_digits(data, first, 0)
    size, power = at - first, 0
    if size == 0 or (size > 1 and data[first] == _ZERO):
        return ODD, 0.0
    if data[at] == _DOT:
        start = at + 1
        at, digits = _scan_digits(data, start, digits)
        power = start - at
        size -= power
        if power == 0:
            return ODD, 0.0
    elif digits == 0 and is_negative:  # decoders differ about -0
        return ODD, 0.0
    if data[at] == 101 or data[at] == 69:  # e, E
        at, exponent = _scan_exponent(data, at + 1)
        power += exponent
    if digits < 0 or (size > _DIGITS_MAX and size - _leading_zeros(data, first) > _DIGITS_MAX):
        return ODD, 0.0
    if digits <= _EXACT_INTEGER_MAX and -22 <= power <= 22:
        number = float(digits)
        number = number / _EXACT_POWERS[-power] if power < 0 else number * _EXACT_POWERS[power]
    elif digits > 0 and -_POWER_MAX <= power <= _POWER_MAX:
        number = nearest_float(digits, power)
    else:
        return ODD, 0.0
    return at, -number if is_negative else number


@compiled
def _after_number(data: Bytes, at: int) -> int:
    """Return the index after a number of any size that a float can hold."""
    start = at + 1 if data[at] == _MINUS else at
    at, _ = _scan_digits(data, start, 0)
    if not 1 <= at - start <= 100 or (at - start > 1 and data[start] == _ZERO):
        return ODD
    if data[at] == _DOT:
        start = at + 1
        at, _ = _scan_digits(data, start, 0)
        if at == start:
            return ODD
    if data[at] == 101 or data[at] == 69:  # e, E
        at, exponent = _scan_exponent(data, at + 1)
        if exponent > 100:
            return ODD
    return at


@compiled
def _scan_integer(data: Bytes, at: int) -> tuple[int, int]:
    """Return the index after an integer, and the integer."""
    is_negative = data[at] == _MINUS
    start = at + 1 if is_negative else at
    at, number = _scan_digits(data, start, 0)
    size, is_zero = at - start, data[start] == _ZERO
    if size == 0 or size > _DIGITS_MAX or number < 0 or (is_zero and (size > 1 or is_negative)):
        return ODD, 0
    return at, -number if is_negative else number


@compiled
def _scan_truth(data: Bytes, at: int) -> tuple[int, int]:
    """Return the index after ``true`` or ``false``, and 1 or 0."""
    if data[at] == 116 and data[at + 1] == 114 and data[at + 2] == 117 and data[at + 3] == 101:
        return at + 4, 1
    if data[at] == 102 and data[at + 1] == 97 and data[at + 2] == 108 and data[at + 3] == 115:
        return (at + 5 if data[at + 4] == 101 else ODD), 0
    return ODD, 0


# -- Texts -----------------------------------------------------------------------------------------------------


@compiled
def _code_of_escape(data: Bytes, at: int) -> int:
    """Return the code of four hexadecimal digits."""
    code = 0
    for index in range(at, at + 4):
        byte = data[index]
        letter = byte | 0x20
        if _ZERO <= byte < _COLON:
            code = code * 16 + (byte - _ZERO)
        elif 97 <= letter <= 102:  # a to f
            code = code * 16 + (letter - 87)
        else:
            return ODD
    return code


@compiled
def _after_escape(data: Bytes, at: int) -> int:
    """Return the index after an escape; pairs of surrogates, and NUL, with which no numpy text may end, are odd."""
    byte = data[at + 1]
    if byte == 117:  # u
        code = _code_of_escape(data, at + 2)
        return at + 6 if 0 < code < 0xD800 or code >= 0xE000 else ODD
    is_known = byte == _QUOTE or byte == _BACKSLASH or byte == 47 or _unescaped(byte) != byte  # /
    return at + 2 if is_known else ODD


@compiled
def _unescaped(letter: int) -> int:
    """Return the control character for b, f, n, r and t, and any other character itself."""
    if letter == 98:
        return 8
    if letter == 102:
        return 12
    if letter == 110:
        return 10
    if letter == 114:
        return 13
    return 9 if letter == 116 else letter


@compiled
def _after_character(data: Bytes, at: int) -> int:
    """Return the index after an escape, or a character of two or more bytes; odd bytes are not UTF-8."""
    if data[at] == _BACKSLASH:
        return _after_escape(data, at)
    first, second = data[at], data[at + 1]
    size, lowest, highest = 2, 0x80, 0xBF
    if first >= 0xE0:
        size = 3
        if first == 0xE0:
            lowest = 0xA0
        elif first == 0xED:
            highest = 0x9F
    if first >= 0xF0:
        size = 4
        if first == 0xF0:
            lowest = 0x90
        elif first == 0xF4:
            highest = 0x8F
    if first < 0xC2 or first > 0xF4 or second < lowest or second > highest:
        return ODD
    for more in range(2, size):
        if data[at + more] & 0xC0 != 0x80:
            return ODD
    return at + size


@compiled
def _scan_text(data: Bytes, at: int) -> tuple[int, int]:
    """Return the index of the closing quote, and the number of characters before it."""
    characters = 0
    while data[at] != _QUOTE:
        byte = data[at]
        if byte < _SPACE:
            return ODD, 0
        at = at + 1 if byte < 0x80 and byte != _BACKSLASH else _after_character(data, at)
        if at == ODD:
            return ODD, 0
        characters += 1
    return at, characters


@compiled
def _character_at(data: Bytes, at: int) -> tuple[int, int]:
    """Return the index after a character of a text that was scanned, and its code."""
    first = int(data[at])
    if first < 0x80 and first != _BACKSLASH:
        return at + 1, first
    if first == _BACKSLASH:
        if data[at + 1] == 117:  # u
            return at + 6, _code_of_escape(data, at + 2)
        return at + 2, _unescaped(int(data[at + 1]))
    size = 2 + (first >= 0xE0) + (first >= 0xF0)
    code = first & (0xFF >> (size + 1))
    for more in range(1, size):
        code = (code << 6) | (data[at + more] & 0x3F)
    return at + size, code


@compiled
def write_texts(data: Bytes, places: FieldSlots, characters: npt.NDArray[np.uint32]) -> None:
    """Write each text, given by the index of its first byte and its characters, into a row."""
    text = pointer_to(data)
    for row in range(len(characters)):
        at = places[2 * row]
        for column in range(places[2 * row + 1]):
            at, characters[row, column] = _character_at(text, at)


@compiled
def write_records(data: Bytes, ends: FieldSlots, records: Bytes) -> None:
    """Write each record, given by the index of the line feed behind it, into a row of bytes."""
    given, written = pointer_to(data), pointer_to(records)
    start = 0
    for row in range(len(ends)):
        first = row * records.shape[1]
        for column in range(ends[row] - start):
            written[first + column] = given[start + column]
        start = ends[row] + 1


# -- Objects ---------------------------------------------------------------------------------------------------


@compiled
def _after_spaces(data: Bytes, at: int) -> int:
    while data[at] <= _SPACE and (data[at] == _SPACE or data[at] == 9 or data[at] == 13):
        at += 1
    return at


@compiled
def _after_scalar(data: Bytes, at: int) -> int:
    """Return the index after a text, a number, a truth value or null."""
    byte = data[at]
    if byte == _QUOTE:
        end, _ = _scan_text(data, at + 1)
        return end + 1 if end != ODD else ODD
    if byte == 116 or byte == 102:  # t, f
        end, _ = _scan_truth(data, at)
        return end
    if byte == 110:  # n
        is_null = data[at + 1] == 117 and data[at + 2] == 108 and data[at + 3] == 108
        return at + 4 if is_null else ODD
    return _after_number(data, at)


@compiled
def _after_colon(data: Bytes, at: int) -> int:
    """Return the index after the colon behind a key, and white space."""
    at = _after_spaces(data, at)
    return _after_spaces(data, at + 1) if data[at] == _COLON else ODD


@compiled
def _after_key(data: Bytes, at: int) -> int:
    """Return the index after a key, its colon and white space; an escape could hide a name of the schema."""
    if data[at] != _QUOTE:
        return ODD
    at += 1
    while data[at] != _QUOTE:
        if data[at] < _SPACE or data[at] == _BACKSLASH:
            return ODD
        at = at + 1 if data[at] < 0x80 else _after_character(data, at)
        if at == ODD:
            return ODD
    return _after_colon(data, at + 1)


@compiled
def _after_value(data: Bytes, at: int) -> int:
    """Return the index after a value of any type."""
    # The lowest bit of objects belongs to the innermost level: 1 for an object, 0 for a list.
    levels = objects = 0
    while at != ODD:
        byte = data[at]
        if byte == 123 or byte == 91:  # { [
            at = _after_spaces(data, at + 1)
            if data[at] != byte + 2:  # } ]
                if levels == _LEVELS_MAX:
                    return ODD
                levels += 1
                objects = objects << 1 | (byte == 123)
                if byte == 123:
                    at = _after_key(data, at)
                continue
            at += 1
        else:
            at = _after_scalar(data, at)
        while at != ODD:
            if levels == 0:
                return at
            at = _after_spaces(data, at)
            if data[at] == _COMMA:
                at = _after_spaces(data, at + 1)
                if objects & 1:
                    at = _after_key(data, at)
                break
            if data[at] != (125 if objects & 1 else 93):  # } ]
                return ODD
            at += 1
            levels -= 1
            objects >>= 1
    return ODD


@compiled
def _is_key(data: Bytes, at: int, keys: Bytes, fields: FieldSlots, field: int) -> bool:
    """Return whether the key at this index is the key of the field."""
    first, size = fields[_ATTRIBUTES * field + _KEY_START], fields[_ATTRIBUTES * field + _KEY_SIZE]
    for index in range(size):  # noqa: SIM110 - a generator is not compiled
        if data[at + index] != keys[first + index]:
            return False
    return True


@compiled
def _field_at(data: Bytes, at: int, keys: Bytes, fields: FieldSlots, count: int, guess: int) -> int:
    """Return the field with the key at this index, -1 for a key that is not in the schema."""
    if guess >= 0 and _is_key(data, at, keys, fields, guess):
        return guess
    for field in range(count):
        if _is_key(data, at, keys, fields, field):
            return field
    return -1


@compiled
def _scan_value(data: Bytes, at: int, fields: FieldSlots, row: int, slot: int, ints: FieldSlots, floats: Floats) -> int:
    """Put a value into its slot; return the index after the value."""
    kind = fields[row + _KIND]
    if kind == _FLOAT:
        end, floats[slot] = _scan_float(data, at)
        return end
    if kind == _TEXT:
        if data[at] != _QUOTE:
            return ODD
        end, characters = _scan_text(data, at + 1)
        ints[slot], ints[slot + 1] = at + 1, characters
        return end + 1 if end != ODD else ODD
    end, number = _scan_integer(data, at) if kind == _INTEGER else _scan_truth(data, at)
    ints[slot] = number
    return end if fields[row + LOWEST] <= number <= fields[row + HIGHEST] else ODD


@compiled
def _scan_list(data: Bytes, at: int, fields: FieldSlots, row: int, slot: int, ints: FieldSlots, floats: Floats) -> int:
    """Put the values of a list into their slots; return the index after the list."""
    if data[at] != 91:  # [
        return ODD
    items = fields[row + _ITEMS]
    step = fields[row + _SLOTS] // items
    for item in range(items):
        at = _scan_value(data, _after_spaces(data, at + 1), fields, row, slot + step * item, ints, floats)
        if at == ODD:
            return ODD
        at = _after_spaces(data, at)
        if data[at] != (_COMMA if item < items - 1 else 93):  # ]
            return ODD
    return at + 1


@compiled
def _scan_record(
    data: Bytes,
    at: int,
    record: int,
    keys: Bytes,
    fields: FieldSlots,
    count: int,
    least: int,
    ints: FieldSlots,
    floats: Floats,
) -> int:
    """Put the fields of an object into their slots; return the index after the object and white space.

    An object with fewer fields of the schema than ``least`` is odd.
    """
    at = _after_spaces(data, at)
    if data[at] != 123:  # {
        return ODD
    found, previous = 0, _ATTRIBUTES * count
    while True:
        at = _after_spaces(data, at + 1)
        if data[at] != _QUOTE:
            return ODD
        field = _field_at(data, at + 1, keys, fields, count, fields[previous + _NEXT_FIELD])
        row = _ATTRIBUTES * field
        at = _after_colon(data, at + 1 + fields[row + _KEY_SIZE]) if field >= 0 else _after_key(data, at)
        if at == ODD:
            return ODD
        if field < 0:
            at = _after_value(data, at)
        elif fields[row + _LAST_RECORD] == record:  # a key that occurs twice
            return ODD
        else:
            fields[row + _LAST_RECORD] = record
            fields[previous + _NEXT_FIELD] = field
            previous = row
            found += 1
            slot = fields[row + FIRST_SLOT] + fields[row + _SLOTS] * record
            if fields[row + _IS_LIST]:
                at = _scan_list(data, at, fields, row, slot, ints, floats)
            else:
                at = _scan_value(data, at, fields, row, slot, ints, floats)
        if at == ODD:
            return ODD
        at = _after_spaces(data, at)
        if data[at] != _COMMA:
            break
    if data[at] != 125 or found < least:  # }
        return ODD
    return _after_spaces(data, at + 1)


@compiled
def scan_records(
    data: Bytes,
    keys: Bytes,
    fields: FieldSlots,
    ints: FieldSlots,
    floats: Floats,
    is_odd: npt.NDArray[np.bool_],
    has: npt.NDArray[np.int64],
) -> int:
    """Put the fields of all records into their slots, and mark the odd records; return the index after them.

    A record need not have all fields if ``has`` has a number for each record: its bits become the fields that it has.
    """
    text, at = pointer_to(data), 0
    count = len(fields) // _ATTRIBUTES - 1
    arguments = (
        pointer_to(keys),
        pointer_to(fields),
        count,
        0 if len(has) else count,
        pointer_to(ints),
        pointer_to(floats),
    )
    for record in range(len(is_odd)):
        end = _scan_record(text, at, record, *arguments)
        if end == ODD or text[end] != _LINE_FEED:
            is_odd[record] = True
            end = at
            while text[end] != _LINE_FEED:
                end += 1
        elif len(has):
            for field in range(count):
                has[record] |= (fields[_ATTRIBUTES * field + _LAST_RECORD] == record) << field
        at = end + 1
    return at


def schema_of(fields: Fields) -> tuple[Bytes, FieldSlots]:
    """Return the keys of the fields, and their schema as :func:`scan_records` takes it, for one record."""
    keys = [f'{name}"'.encode() for name, _dtype, _width in fields]
    schema: FieldSlots = np.zeros((len(fields) + 1, _ATTRIBUTES), np.int64)
    schema[:, [_LAST_RECORD, _NEXT_FIELD]] = -1
    slots = key_start = 0
    for row, (_name, dtype, width), key in zip(schema, fields, keys, strict=False):
        kind, items = _KINDS[dtype.kind], width or 1
        limits = np.iinfo(dtype) if kind == _INTEGER else np.iinfo(np.uint8)
        row[_KIND], row[_ITEMS], row[_IS_LIST] = kind, items, width is not None
        row[_SLOTS], row[FIRST_SLOT] = (2 * items if kind == _TEXT else items), slots
        row[LOWEST], row[HIGHEST] = limits.min, min(limits.max, np.iinfo(np.int64).max)
        row[_KEY_START], row[_KEY_SIZE] = key_start, len(key)
        slots += int(row[_SLOTS])
        key_start += len(key)
    return np.frombuffer(b"".join(keys), np.uint8), schema
