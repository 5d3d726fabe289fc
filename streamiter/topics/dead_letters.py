"""Dead letters: the records that a step has refused, as a topic stores them, with the reason and the origin."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import date, time
from typing import Any, Final

import orjson

from streamiter.errors import ConfigurationError, safe_repr
from streamiter.operators.output import DeadLetter, Origin
from streamiter.topics.formats import to_json_type
from streamiter.topics.topic import Headers, OutgoingBatch, SizeLimit
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.records import Batch

# On Kafka the headers of a letter with cut texts take about 600 bytes; the rest is for the texts.
_LEAST_LIMIT_BYTES: Final = 1024

# On Kafka the lengths of a value and its record take up to this many bytes: two varints of 5 bytes.
_LENGTHS_BYTES: Final = 10


class DeadLetterEncoder:
    """Encodes dead letters: the refused value as it was (bytes) or as JSON, with the reason and the origin in headers.

    Headers: the headers of the original, then ``error``, ``step`` and, where known, ``topic``, ``partition``, and
    ``offset`` or ``first_offset`` and ``last_offset``. A letter that is too large for its topic is cut. First the value
    is cut; the headers ``value_bytes`` and ``value_sha256`` then describe the whole value. If that is not enough, the
    error is cut (``error_bytes``), and the key (``key_bytes``, ``key_sha256``) and the original's headers are left out.
    Encoding never fails: a value without a form in JSON is written as its repr.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._limit: SizeLimit | None = None
        self.clock: Clock = clock or SystemClock()
        """The time of a letter without an original."""

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
            timestamps_ms=self._timestamps_ms(refused),
        )

    def _timestamps_ms(self, letters: list[DeadLetter]) -> list[int] | None:
        if all(letter.timestamp_ms is None for letter in letters):
            return None
        now_ms = self.clock.now_ms()
        # Kafka gives a record without a time stamp, of a very old client, the time -1.
        return [now_ms if each.timestamp_ms is None or each.timestamp_ms < 0 else each.timestamp_ms for each in letters]

    def _fitting(self, letter: DeadLetter) -> tuple[bytes | None, bytes | None, Headers]:
        value, headers = dead_letter_value(letter.record), _headers(letter)
        if self._limit is None or self._limit.holds(value, letter.key, headers):
            return value, letter.key, headers
        return _cut(value, letter, self._limit)


# -- headers and cuts ----------------------------------------------------------------------------------------


def _headers(letter: DeadLetter) -> Headers:
    told = (("error", _utf8(letter.error)), ("step", _utf8(letter.step)), *_origin_headers(letter))
    return (*letter.headers, *told)


def _origin_headers(letter: DeadLetter) -> Iterator[tuple[str, bytes]]:
    origin = letter.origin
    if origin is None or origin.topic is None:
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


def _cut(value: bytes | None, letter: DeadLetter, limit: SizeLimit) -> tuple[bytes | None, bytes | None, Headers]:
    """Return the letter with a shorter value. Headers and key of more than half of the room are cut first."""
    of_value = _told_of("value", value)
    key, headers = letter.key, _headers(letter)
    if limit.size_of(b"", key, (*headers, *of_value)) > limit.size_bytes // 2:
        key, headers = _shorter_key_and_headers(letter, limit.size_bytes // 8)
        if limit.holds(value, key, headers):
            return value, key, headers
    headers = (*headers, *of_value)
    room_bytes = limit.size_bytes - limit.size_of(b"", key, headers) - _LENGTHS_BYTES
    return None if value is None else value[: max(0, room_bytes)], key, headers


def _shorter_key_and_headers(letter: DeadLetter, text_bytes: int) -> tuple[bytes | None, Headers]:
    """Return the key and the headers, cut. A long origin is left out: half a URL may be the URL of another topic."""
    told: Headers = ()
    error, step, key = _utf8(letter.error), _utf8(letter.step), letter.key
    if len(error) > text_bytes:
        error, told = _cut_text(error, text_bytes), (("error_bytes", b"%d" % len(error)),)
    if len(step) > text_bytes // 2:
        step = _cut_text(step, text_bytes // 2)
    if key is not None and len(key) > text_bytes:
        key, told = None, (*told, *_told_of("key", key))
    origin = letter.origin
    if origin is not None and len(_utf8(origin.topic or "")) > text_bytes // 2:
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


def dead_letter_value(record: object) -> bytes | None:
    """Return the value of the dead letter of a record; for bytes, the bytes themselves. Never raises."""
    if record is None:
        return None
    if isinstance(record, (bytes, bytearray)):
        return bytes(record)  # topics take plain bytes only, no subclass
    try:
        return orjson.dumps(record, default=_json_type_or_repr, option=_OPTIONS)
    except Exception:  # too deep, too large, not a text; or user code in it raises
        return json.dumps(_plain(record, ()), ensure_ascii=False, separators=(",", ":")).encode()


# Dates go through ``default``: a time zone that raises would end the process within orjson.
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME


def _json_type_or_repr(value: object) -> object:
    try:
        return value.isoformat() if isinstance(value, (date, time)) else to_json_type(value)
    except Exception:
        return safe_repr(value)


# Each level takes two of the 1,000 calls that Python allows within one another.
_LEVELS_MAX: Final = 100


def _plain(value: object, within: tuple[int, ...]) -> object:
    """Return a value that ``json`` can write, with a repr for values without JSON, and "…" for the deepest ones.

    ``within`` are the ids of the containers that it is in.
    """
    if id(value) in within or len(within) > _LEVELS_MAX:
        return "…"
    inside = (*within, id(value))
    if not isinstance(value, _JSON_TYPES):
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name, None) for field in fields(value)}
        else:
            value = _json_type_or_repr(value)
    if isinstance(value, dict):
        return {_key(key): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, inside) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:  # Python writes at most 4,300 decimal digits, and any number of hexadecimal ones
            return hex(value)
        return value
    return value if value is None else _utf8(value if isinstance(value, str) else safe_repr(value)).decode()


_JSON_TYPES: Final = (str, int, float, dict, list, tuple, type(None))


def _key(key: object) -> str:
    if isinstance(key, (int, float, type(None))):
        return json.dumps(_plain(key, ())).strip('"')
    return _utf8(key if isinstance(key, str) else safe_repr(key)).decode()
