"""The sink of a topic, the dead letters of a step, and how both encode and send."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, time
from typing import Any, Final

import orjson

from streamiter.errors import ConfigurationError, EncodeError, RecordTooLarge, TopicError
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import FunctionResultError, Output
from streamiter.operators.rejection import DeadLetter, Origin, safe_repr, shortened
from streamiter.operators.steps import apply_to_each
from streamiter.records import Batch, take
from streamiter.tables import rows_of_table
from streamiter.topics.formats.json import to_json_type
from streamiter.topics.topic import Encoder, Headers, OutgoingBatch, SizeLimit, Topic, TopicWriter

__all__ = [
    "DeadLetterEncoder",
    "Outputs",
    "TopicSink",
    "batch_bytes",
    "check_outgoing",
    "check_record_sizes",
    "partition_for_key",
    "spread",
]


KeyFunction = Callable[[Any], bytes | str | None]

# A write that fails in the background is raised by the next write or flush; where no further record
# comes, a flush this long after the last one finds it. Far below the deadlines of the connectors.
_FLUSH_AFTER_S: Final = 1.0


class TopicSink(Operator):
    """Encodes records and writes them: into the job's transaction where it has one for this topic, else at once.

    What is written at once is stored when it returns from a barrier or from the end.

    Writing a stream into a topic.
    """

    def __init__(
        self, topic: Topic, encoder: Encoder, key: KeyFunction | None = None, *, at_least_once: bool = False
    ) -> None:
        self.topic = topic
        self.at_least_once = at_least_once
        self._encoder = encoder
        self._key_bytes = None if key is None else _bytes_of(key)
        self._writer: TopicWriter | None = None
        self._context: Context | None = None
        self._flush_is_due = False
        self._limit: SizeLimit | None = None
        self._limit_is_known = False

    @property
    def is_for_dead_letters(self) -> bool:
        """Whether it writes what steps have refused, and no results."""
        return isinstance(self._encoder, DeadLetterEncoder)

    async def open(self, context: Context) -> None:
        self._context = context
        self._outputs = context.scope.get(Outputs, Outputs)
        self._writer = await self._outputs.open_writer(
            self.topic, at_least_once=self.at_least_once, step=context.name
        )
        if isinstance(self._encoder, DeadLetterEncoder):
            self._encoder.cut_to(await self.topic.size_limit(), self.topic.name)

    async def process_batch(self, batch: Batch, out: Output) -> None:
        """Write the records of the batch."""
        assert self._writer is not None
        assert self._context is not None
        if out.tolerates_rejections and not self._limit_is_known:
            self._limit, self._limit_is_known = await self.topic.size_limit(), True
        outgoing = self._encode(batch, out)
        if outgoing is None:
            return
        await self._writer.write(outgoing)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._context.set_timer(_FLUSH_AFTER_S)

    async def on_timer(self, payload: object, out: Output) -> None:
        """Flush, so that a failure in the background is not silent."""
        self._flush_is_due = False
        await self._flush()

    async def finish(self, out: Output) -> None:
        await self._flush()

    async def snapshot(self) -> Any:
        if self._writer is not None:
            await self._outputs.barrier_passed(self._writer)

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()

    async def _flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    def _encode(self, batch: Batch, out: Output) -> OutgoingBatch | None:
        """What is to be written; records that have no good key or cannot be encoded are refused."""
        keys: list[bytes | None] | None = None
        if self._key_bytes is not None:
            batch, keys = apply_to_each(self._key_bytes, batch, out)
        while len(batch):
            try:
                outgoing = self._encoder.encode(batch)
                self._check_sizes(outgoing if keys is None else replace(outgoing, keys=keys))
            except EncodeError as error:
                for index, reason in error.failures.items():
                    out.reject(batch[index], reason, origin=out.batch_origin)
                good = [index for index in range(len(batch)) if index not in error.failures]
                batch = take(batch, good)
                keys = None if keys is None else [keys[index] for index in good]
            else:
                return outgoing if keys is None else replace(outgoing, keys=keys)
        return None

    def _check_sizes(self, outgoing: OutgoingBatch) -> None:
        """Where records may be refused, refuse those that the topic would not take; else its own error ends the job."""
        if self._limit is not None and (too_large := self._limit.exceeded_by(outgoing)):
            limit_bytes = self._limit.size_bytes
            raise EncodeError(
                {
                    index: f"it takes {size_bytes} bytes in topic {self.topic.name!r}, which takes {limit_bytes}"
                    for index, size_bytes in too_large.items()
                }
            )


def _bytes_of(key: KeyFunction) -> Callable[[Any], bytes | None]:
    def key_bytes(record: Any) -> bytes | None:
        given = key(record)
        if isinstance(given, str):
            return given.encode()
        if given is None or type(given) is bytes:
            return given
        if isinstance(given, bytes):
            return bytes(given)  # Of numpy, say: topics take nothing but bytes themselves.
        raise FunctionResultError(
            f"key: expected the function to return bytes, str or None, given {shortened(given)} "
            f"({type(given).__name__}); return str(…) or its bytes"
        )

    return key_bytes


_BYTES_OR_NONE: Final = frozenset({bytes, type(None)})


def partition_for_key(key: bytes, partitions: int) -> int:
    """The partition of a key: CRC-32, the same in every process and release, modulo their number.

    >>> partition_for_key(b"user-7", 4)
    1

    What a connector without a server does with records on their way in: check them, spread them out.

    >>> batch = OutgoingBatch([b"a", b"b", b"c"], keys=[b"k1", b"k2", b"k1"])
    >>> {partition: part.values for partition, part in spread(batch, 2, unkeyed=0)}
    {1: [b'a', b'b', b'c']}
    """
    return zlib.crc32(key) % partitions


def spread(batch: OutgoingBatch, partitions: int, *, unkeyed: int) -> list[tuple[int, OutgoingBatch]]:
    """The parts of ``batch`` by partition: keyed records by their key, the rest together in ``unkeyed``."""
    if batch.partition is not None:
        return [(batch.partition, batch)]
    if batch.keys is None:
        return [(unkeyed, batch)]
    if partitions == 1:
        return [(0, batch)]
    return [
        (partition, _part(batch, indices))
        for partition, indices in _indices_by_partition(batch.keys, partitions, unkeyed)
    ]


def _indices_by_partition(
    keys: Sequence[bytes | None], partitions: int, unkeyed: int
) -> Iterable[tuple[int, list[int]]]:
    indices: dict[int, list[int]] = {}
    crc32 = zlib.crc32  # once for each record: the same function as partition_for_key, without the call
    for index, key in enumerate(keys):
        partition = unkeyed if key is None else crc32(key) % partitions
        indices.setdefault(partition, []).append(index)
    return indices.items()


def _part(batch: OutgoingBatch, indices: Sequence[int]) -> OutgoingBatch:
    if len(indices) == len(batch):
        return batch
    return OutgoingBatch(
        values=[batch.values[index] for index in indices],
        keys=_taken(batch.keys, indices),
        headers=_taken(batch.headers, indices),
        timestamps_ms=_taken(batch.timestamps_ms, indices),
    )


def _taken(column: Sequence[Any] | None, indices: Sequence[int]) -> list[Any] | None:
    return None if column is None else [column[index] for index in indices]


def check_outgoing(batch: OutgoingBatch, *, topic: str, partitions: int) -> None:
    """Raise ``TopicError`` unless the columns fit each other and the topic."""
    _check_lengths(batch, topic)
    _check_bytes("value", batch.values, topic)
    if batch.keys is not None:
        _check_bytes("key", batch.keys, topic)
    if batch.partition is not None and not 0 <= batch.partition < partitions:
        raise TopicError(
            f"topic {topic!r}: expected a partition of 0 to {partitions - 1}, given {batch.partition}; "
            f"create(partitions={batch.partition + 1}) adds the missing ones"
        )


def _check_lengths(batch: OutgoingBatch, topic: str) -> None:
    columns = {"keys": batch.keys, "headers": batch.headers, "timestamps_ms": batch.timestamps_ms}
    for name, column in columns.items():
        if column is not None and len(column) != len(batch):
            raise TopicError(
                f"topic {topic!r}: expected {len(batch)} {name}, one for each value, given {len(column)}"
            )


def _check_bytes(noun: str, column: Sequence[bytes | None], topic: str) -> None:
    if (
        not isinstance(column, (list, tuple))
        and rows_of_table(f"topic {topic!r}, {noun}s", column, TopicError) is not None
    ):
        raise TopicError(
            f"topic {topic!r}: expected a list of bytes as {noun}s, given a {type(column).__name__}; encode its rows "
            "first: Json().encode(…)"
        )
    if set(map(type, column)) <= _BYTES_OR_NONE:
        return
    index, entry = next(found for found in enumerate(column) if type(found[1]) not in _BYTES_OR_NONE)
    given = type(entry).__name__
    raise TopicError(f"topic {topic!r}: expected bytes or None as {noun}, given {given} (record {index})")


def check_record_sizes(batch: OutgoingBatch, limit_bytes: int, *, topic: str) -> None:
    """Raise ``RecordTooLarge`` for the first record whose key, value and headers are above the limit."""
    if batch_bytes(batch) <= limit_bytes:
        return
    for index in range(len(batch)):
        size_bytes = _record_bytes(batch, index)
        if size_bytes > limit_bytes:
            raise RecordTooLarge(
                f"topic {topic!r}: record {index} of the batch has {size_bytes} bytes, "
                f"expected at most {limit_bytes} (setting max_record_bytes); nothing of the batch was written"
            )


def batch_bytes(batch: OutgoingBatch) -> int:
    """Bytes of all keys, values and headers.

    >>> batch_bytes(OutgoingBatch([b"abc", None], keys=[b"k", b"k"], headers=[(("h", b"1"),), ()]))
    7
    """
    size_bytes = _column_bytes(batch.values)
    if batch.keys is not None:
        size_bytes += _column_bytes(batch.keys)
    if batch.headers is not None:
        size_bytes += sum(map(_headers_bytes, batch.headers))
    return size_bytes


def _column_bytes(column: Sequence[bytes | None]) -> int:
    return sum(map(len, filter(None, column)))


def _record_bytes(batch: OutgoingBatch, index: int) -> int:
    key = batch.keys[index] if batch.keys is not None else None
    headers = batch.headers[index] if batch.headers is not None else ()
    return len(batch.values[index] or b"") + len(key or b"") + _headers_bytes(headers)


def _headers_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value) for name, value in headers)


class Outputs:
    """What all sinks of a job share; a job that commits its outputs puts another one into its scope.

    How sinks get their writers: at once and at least once, unless the job writes in transactions.
    """

    async def open_writer(self, topic: Topic, *, at_least_once: bool, step: str) -> TopicWriter:
        """A writer for one subtask of the sink ``step``; ``at_least_once`` asks for one that writes at once."""
        return await topic.open_writer()

    async def barrier_passed(self, writer: TopicWriter) -> None:
        """A sink takes its snapshot: all that was written before must count with that checkpoint."""
        await writer.flush()


# The headers of a letter whose texts are all cut take some 600 bytes on Kafka; the rest is for the texts.
_LEAST_LIMIT_BYTES: Final = 1024

# What the lengths of a value and its record add to a record on Kafka as they grow: two varints of 5 bytes.
_LENGTHS_BYTES: Final = 10


class DeadLetterEncoder:
    """The refused value as it was (bytes), or else as JSON; why and from where in the headers.

    Headers: ``error``, ``step``, and where known ``topic``, ``partition``, and ``offset`` or ``first_offset`` and
    ``last_offset``. A letter that is larger than its topic takes is cut: the value (then ``value_bytes`` and
    ``value_sha256`` tell of the whole one), and where that is not enough the error (``error_bytes``) and the key, which
    is left out (``key_bytes``, ``key_sha256``).

    Dead letters: refused records on their way into a topic. None of them ends the job for its own sake.
    """

    def __init__(self) -> None:
        self._limit: SizeLimit | None = None

    def cut_to(self, limit: SizeLimit | None, topic: str) -> None:
        """Cut letters that are larger; raises ``ConfigurationError`` for a topic that takes no letter at all."""
        if limit is not None and limit.size_bytes < _LEAST_LIMIT_BYTES:
            raise ConfigurationError(
                f"topic {topic!r}: expected a topic for dead letters to take records of {_LEAST_LIMIT_BYTES} bytes, "
                f"given one that takes {limit.size_bytes}; raise its limit (max.message.bytes, max_record_bytes)"
            )
        self._limit = limit

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Never refuses: a value that JSON cannot hold is written as JSON with its repr in that place."""
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
    """The letter with a shorter value; where headers and key leave the value less than half, they are cut first."""
    key, headers, of_value = letter.key, _headers(letter), _told_of("value", value)
    if limit.size_of(b"", key, (*headers, *of_value)) > limit.size_bytes // 2:
        key, headers = _shorter_key_and_headers(letter, limit.size_bytes // 8)
        if limit.holds(value, key, headers):
            return value, key, headers
    headers = (*headers, *of_value)
    room_bytes = limit.size_bytes - limit.size_of(b"", key, headers) - _LENGTHS_BYTES
    return None if value is None else value[: max(0, room_bytes)], key, headers


def _shorter_key_and_headers(letter: DeadLetter, text_bytes: int) -> tuple[bytes | None, Headers]:
    """An origin is left out rather than cut: half a URL may be that of another topic."""
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
    """The beginning of a text, whole characters, and an ellipsis."""
    ellipsis = "…".encode()
    return text[: size_bytes - len(ellipsis)].decode(errors="ignore").encode() + ellipsis


def _utf8(text: str) -> bytes:
    """A text with half a character of UTF-16 in it, which JSON may bring, has no UTF-8."""
    return text.encode(errors="backslashreplace")


# -- values --------------------------------------------------------------------------------------------------


def _value(record: Any) -> bytes | None:
    if record is None:
        return None
    if isinstance(record, (bytes, bytearray)):
        return bytes(record)  # Topics take nothing but bytes themselves, no subclass.
    try:
        return orjson.dumps(record, default=_json_type_or_repr, option=_OPTIONS)
    except Exception:  # Too deep, too large, no text; or code of the user's in it raises.
        return _value_by_value(record)


# Dates by way of ``default``: a time zone that raises ends the process where orjson asks it.
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME


def _json_type_or_repr(value: Any) -> Any:
    try:
        return value.isoformat() if isinstance(value, (date, time)) else to_json_type(value)
    except Exception:
        return safe_repr(value)


# Objects that make new objects whenever they are asked have no end; 100 times as deep as JSON that is read.
_LEVELS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Written:
    """A piece of JSON, and the value that ends with it."""

    text: str
    ends: Any = None


def _value_by_value(record: Any) -> bytes:
    """JSON for any value, however deep; whole numbers of any size, and the repr of all that has no form in JSON."""
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
    """What is written for a container, in order: pieces of JSON, and the values between them."""
    is_object = isinstance(container, dict)
    yield _Written("{" if is_object else "[")
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for number, (key, item) in enumerate(items):
        yield _Written(f"{',' if number else ''}{f'{_key(key)}:' if is_object else ''}")
        yield item
    yield _Written("}" if is_object else "]", value)


def _plain(value: Any) -> Any:
    """The same as JSON's types, as far as there are any for it; otherwise its repr."""
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
    except ValueError:  # Python writes at most 4,300 digits, but hexadecimal ones without end.
        return _text(hex(value))


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    return _text(_scalar(key).strip('"') if isinstance(key, (int, float, type(None))) else safe_repr(key))


def _text(text: str) -> str:
    return orjson.dumps(_utf8(text).decode()).decode()
