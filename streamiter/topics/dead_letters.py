"""Dead letters: the records that a step refused, encoded for a topic.

A dead letter holds the refused value. Its headers say why the record was refused and where it was read. Encoding a dead
letter never fails: a letter that is too large is cut, and a value without a form in JSON is written as its repr.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, time
from typing import Any, Final

import orjson

from streamiter.errors import ConfigurationError, safe_repr
from streamiter.operators.output import DeadLetter, Origin
from streamiter.records import Batch
from streamiter.topics.formats.json import to_json_type
from streamiter.topics.topic import Headers, OutgoingBatch, SizeLimit

# On Kafka the headers of a letter with cut texts take about 600 bytes; the rest is for the texts.
_LEAST_LIMIT_BYTES: Final = 1024

# On Kafka the lengths of a value and its record take up to so many bytes: two varints of 5 bytes.
_LENGTHS_BYTES: Final = 10


class DeadLetterEncoder:
    """Encodes dead letters: the refused value as it was (bytes) or as JSON, with the reason and the origin in headers.

    Headers: ``error``, ``step`` and, where known, ``topic``, ``partition``, and ``offset`` or ``first_offset`` and
    ``last_offset``. A letter that is too large for its topic is cut. First the value is cut; the headers
    ``value_bytes`` and ``value_sha256`` then describe the whole value. If that is not enough, the error is cut
    (``error_bytes``) and the key is left out (``key_bytes``, ``key_sha256``).
    """

    def __init__(self) -> None:
        self._limit: SizeLimit | None = None

    def cut_to(self, limit: SizeLimit | None, topic: str) -> None:
        """Set the size to which letters are cut; raise ``ConfigurationError`` for a topic that takes no letter."""
        if limit is not None and limit.size_bytes < _LEAST_LIMIT_BYTES:
            raise ConfigurationError(
                f"topic {topic!r}: expected a topic for dead letters to take records of {_LEAST_LIMIT_BYTES} bytes, "
                f"given one that takes {limit.size_bytes}; raise its limit (max.message.bytes, max_record_bytes)"
            )
        self._limit = limit

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the letters of all records: for a value that JSON cannot hold, its repr is written."""
        refused: list[Any] = list(batch)
        letters = [self._fitting(letter) for letter in refused]
        return OutgoingBatch(
            values=[value for value, _, _ in letters],
            keys=[key for _, key, _ in letters],
            headers=[headers for _, _, headers in letters],
        )

    def _fitting(self, letter: DeadLetter) -> tuple[bytes | None, bytes | None, Headers]:
        value, headers = _value(letter.record), _headers(letter)
        if self._limit is None or self._limit.holds(value, letter.key, headers):
            return value, letter.key, headers
        return _cut(value, letter, self._limit)


# -- headers and cuts ----------------------------------------------------------------------------------------


def _headers(letter: DeadLetter) -> Headers:
    return (("error", _utf8(letter.error)), ("step", _utf8(letter.step)), *_origin_headers(letter))


def _origin_headers(letter: DeadLetter) -> Iterator[tuple[str, bytes]]:
    origin = letter.origin
    if origin is None:
        return
    yield "topic", _utf8(origin.topic)
    if origin.partition is None:
        return
    yield "partition", b"%d" % origin.partition
    if isinstance(origin, Origin):
        yield "offset", b"%d" % origin.offset
    elif origin.first_offset is not None and origin.first_offset == origin.last_offset:
        yield "offset", b"%d" % origin.first_offset
    elif origin.first_offset is not None and origin.last_offset is not None:
        yield "first_offset", b"%d" % origin.first_offset
        yield "last_offset", b"%d" % origin.last_offset


def _cut(
    value: bytes | None, letter: DeadLetter, limit: SizeLimit
) -> tuple[bytes | None, bytes | None, Headers]:
    """Return the letter with a shorter value. Headers and key of more than half of the room are cut first."""
    key, headers, of_value = letter.key, _headers(letter), _told_of("value", value)
    if limit.size_of(b"", key, (*headers, *of_value)) > limit.size_bytes // 2:
        key, headers = _shorter_key_and_headers(letter, limit.size_bytes // 8)
        if limit.holds(value, key, headers):
            return value, key, headers
    headers = (*headers, *of_value)
    room_bytes = limit.size_bytes - limit.size_of(b"", key, headers) - _LENGTHS_BYTES
    return None if value is None else value[: max(0, room_bytes)], key, headers


def _shorter_key_and_headers(letter: DeadLetter, text_bytes: int) -> tuple[bytes | None, Headers]:
    """Return the key and the headers, cut. A long origin is left out: half a URL may be that of another topic."""
    told: Headers = ()
    error, step, key = _utf8(letter.error), _utf8(letter.step), letter.key
    if len(error) > text_bytes:
        error, told = _cut_text(error, text_bytes), (("error_bytes", b"%d" % len(error)),)
    if len(step) > text_bytes // 2:
        step = _cut_text(step, text_bytes // 2)
    if key is not None and len(key) > text_bytes:
        key, told = None, (*told, *_told_of("key", key))
    origin = letter.origin
    if origin is not None and len(_utf8(origin.topic)) > text_bytes // 2:
        letter = replace(letter, origin=None)
    return key, (("error", error), ("step", step), *_origin_headers(letter), *told)


def _told_of(name: str, content: bytes | None) -> Headers:
    if content is None:
        return ()
    checksum = hashlib.sha256(content).hexdigest().encode()
    return ((f"{name}_bytes", b"%d" % len(content)), (f"{name}_sha256", checksum))


def _cut_text(text: bytes, size_bytes: int) -> bytes:
    """Return the beginning of a text, in whole characters, and an ellipsis."""
    ellipsis = "…".encode()
    return text[: size_bytes - len(ellipsis)].decode(errors="ignore").encode() + ellipsis


def _utf8(text: str) -> bytes:
    """Return the text in UTF-8. A lone surrogate, which JSON may contain, has no UTF-8 and is escaped."""
    return text.encode(errors="backslashreplace")


# -- values --------------------------------------------------------------------------------------------------


def _value(record: Any) -> bytes | None:
    if record is None:
        return None
    if isinstance(record, (bytes, bytearray)):
        return bytes(record)  # topics take plain bytes only, no subclass
    try:
        return orjson.dumps(record, default=_json_type_or_repr, option=_OPTIONS)
    except Exception:  # too deep, too large, not a text; or user code in it raises
        return _value_by_value(record)


# Dates go through ``default``: a time zone that raises would end the process within orjson.
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME


def _json_type_or_repr(value: Any) -> Any:
    try:
        return value.isoformat() if isinstance(value, (date, time)) else to_json_type(value)
    except Exception:
        return safe_repr(value)


# An object that makes new objects on each access has no end. The limit is 100 times as deep as JSON that can be read.
_LEVELS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Written:
    """A piece of JSON, and the container that ends with it."""

    text: str
    ends: Any = None


def _value_by_value(record: Any) -> bytes:
    """Return JSON for any value, of any depth, with whole numbers of any size, and a repr for values without JSON."""
    written: list[str] = []
    open_now: set[int] = set()
    pending: list[Any] = [record]
    while pending:
        value = pending.pop()
        if type(value) is _Written:
            written.append(value.text)
            open_now.discard(id(value.ends))
        elif id(value) in open_now or len(open_now) > _LEVELS_MAX:
            written.append('"…"')
        elif isinstance(plain := _plain(value), (dict, list, tuple)):
            open_now.add(id(value))
            pending += reversed([*_pieces(plain, value)])
        else:
            written.append(_scalar(plain))
    return "".join(written).encode()


def _pieces(container: dict[Any, Any] | list[Any] | tuple[Any, ...], value: Any) -> Iterator[Any]:
    """Yield the pieces of JSON of a container, and the values between them, in order."""
    is_object = isinstance(container, dict)
    yield _Written("{" if is_object else "[")
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for number, (key, item) in enumerate(items):
        yield _Written(f"{',' if number else ''}{f'{_key(key)}:' if is_object else ''}")
        yield item
    yield _Written("}" if is_object else "]", value)


def _plain(value: Any) -> Any:
    """Return the value as a type of JSON where it has one, otherwise its repr."""
    if not isinstance(value, _JSON_TYPES):
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: getattr(value, field.name, None) for field in fields(value)}
        value = _json_type_or_repr(value)
    return value if isinstance(value, _JSON_TYPES) else safe_repr(value)


_JSON_TYPES: Final = (str, int, float, dict, list, tuple, type(None))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else "null"
    try:
        return int.__repr__(value)
    except ValueError:  # Python writes at most 4,300 decimal digits, and any number of hexadecimal ones
        return _text(hex(value))


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    return _text(_scalar(key).strip('"') if isinstance(key, (int, float, type(None))) else safe_repr(key))


def _text(text: str) -> str:
    return orjson.dumps(_utf8(text).decode()).decode()
