"""Model updates: a training step emits a ``ModelSnapshot``, a reader gets a ``ModelUpdate``.

An update is a record of a topic. Its headers name the model, the generation and the version (:class:`UpdateHeaders`),
and its parameters are checked (:func:`checked_parameters`). An update that is larger than a record is cut into chunks,
which a :class:`ChunkAssembler` joins again.

All chunks but the last have their own keys (model, generation, version, index), so that compaction keeps each of them.
The last chunk has the model's key, like an update in one record: it closes the update, and compaction drops it when a
newer update is closed. Then the publisher deletes the chunks of the update before by their keys. So in a compacted
topic the last closed update is complete at any time, and a crash while chunks are written harms no earlier update.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from streamiter.clock import Clock
from streamiter.errors import ModelError
from streamiter.records import Array
from streamiter.topics.topic import Headers

Rank = tuple[int, int]
"""Generation and version; updates of one model are ordered by it."""

ChunkSet = tuple[int, int, int]
"""Generation, version and number of chunks of an update that was written in chunks."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """A model with the properties of its training, for a training step to emit; bare parameters may be emitted, too.

    >>> ModelSnapshot({"weights": [0.5]}, records=1000, metrics={"loss": 0.31}).records
    1000
    """

    parameters: Any
    """An array, or a dict of names to arrays, numbers and strings."""
    records: int | None = None
    """The number of examples that the model has learned from so far."""
    metrics: dict[str, float] = {}
    """Numbers by name, such as the loss."""
    epoch: int | None = None
    """The epoch of the model; None: the epoch in which it is published."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelUpdate:
    """One published state of a model, exactly as it was published; its arrays are read-only."""

    model: str
    """The name of the model."""
    generation: int
    """The number of the run that published it; a run that restores no checkpoint begins a new generation."""
    version: int
    """The number of the update within its generation."""
    epoch: int | None
    """The epoch of the model, None if the publisher named none."""
    created_at_ms: int
    """The publisher's clock, in milliseconds since 1970-01-01 UTC."""
    records: int | None
    """The number of examples learned from, None if the publisher named none."""
    metrics: dict[str, float]
    """Numbers by name, such as the loss."""
    parameters: Parameters
    """An array, or a dict of names to arrays, numbers and strings."""

    @property
    def rank(self) -> Rank:
        """``(generation, version)``; of two updates the one with the higher rank is newer."""
        return (self.generation, self.version)

    def age_s(self, clock: Clock) -> float:
        """Return the seconds since the update was made; 0 if the publisher's clock is ahead of this one."""
        return max(0, clock.now_ms() - self.created_at_ms) / 1000


# It separates a model's name from the rest of a chunk's key, so a model's name must not contain it.
_KEY_SEPARATOR: Final = "#"

# Generation and version of up to 64 bits, and the point between them; Python refuses numbers of thousands of digits.
_RANK_BYTES: Final = 2 * 20 + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of an update's value that a record holds."""

    index: int
    """The number of the chunk, from 0."""
    count: int
    """The number of chunks of the update."""
    sha256: str
    """The SHA-256 of the whole value, hexadecimal."""


@dataclass(frozen=True, slots=True)
class UpdateHeaders:
    """The headers of one record of an update.

    >>> headers = UpdateHeaders("ctr", 1, 7, None, 1700000000000, "application/json")
    >>> UpdateHeaders.parse(headers.encoded()) == headers
    True
    """

    model: str
    generation: int
    version: int
    epoch: int | None
    created_at_ms: int
    content_type: str
    chunk: Chunk | None = None

    @property
    def rank(self) -> Rank:
        """Generation and version."""
        return (self.generation, self.version)

    @property
    def is_last(self) -> bool:
        """Whether the record closes its update: it is the only record, or the last chunk."""
        return self.chunk is None or self.chunk.index == self.chunk.count - 1

    def encoded(self) -> Headers:
        """Return the headers as a record carries them: texts and decimal numbers; an ``epoch`` of None is left out."""
        fields: list[tuple[str, str | int]] = [
            ("model", self.model),
            ("generation", self.generation),
            ("version", self.version),
            ("created_at", self.created_at_ms),
            ("content_type", self.content_type),
        ]
        if self.epoch is not None:
            fields.append(("epoch", self.epoch))
        if self.chunk is not None:
            fields += [("chunk_index", self.chunk.index), ("chunk_count", self.chunk.count)]
            fields.append(("sha256", self.chunk.sha256))
        return tuple((name, str(value).encode()) for name, value in fields)

    @staticmethod
    def parse(headers: Headers) -> UpdateHeaders:
        """Return the parsed headers of a record; ``ValueError`` with the reason for headers of no update."""
        fields = {name: value.decode() for name, value in headers}
        try:
            return UpdateHeaders(
                model=fields["model"],
                generation=int(fields["generation"]),
                version=int(fields["version"]),
                epoch=int(fields["epoch"]) if "epoch" in fields else None,
                created_at_ms=int(fields["created_at"]),
                content_type=fields["content_type"],
                chunk=_parse_chunk(fields),
            )
        except KeyError as error:
            raise ValueError(f"header {error} is missing") from error


def _parse_chunk(fields: dict[str, str]) -> Chunk | None:
    if "chunk_index" not in fields:
        return None
    chunk = Chunk(int(fields["chunk_index"]), int(fields["chunk_count"]), fields["sha256"])
    if not 0 <= chunk.index < chunk.count:
        raise ValueError(f"expected 0 <= chunk_index < chunk_count, given {chunk.index} of {chunk.count}")
    return chunk


def model_of(headers: Headers) -> bytes | None:
    """Return the model that a record names, or None; cheap enough for every record of a shared topic."""
    for name, value in headers:
        if name == "model":
            return value
    return None


def update_key(model: str) -> bytes:
    """Return the key of an update; compaction keeps the last update with it."""
    return model.encode()


def chunk_key(model: str, rank: Rank, index: int) -> bytes:
    """Return the key of a chunk. Each chunk has its own key, or compaction would keep only one chunk of many.

    >>> chunk_key("ctr", (2, 17), 0)
    b'ctr#2.17.0'
    """
    return f"{model}{_KEY_SEPARATOR}{rank[0]}.{rank[1]}.{index}".encode()


def deletion_headers(model: str, rank: Rank) -> Headers:
    """Return the headers of a record without a value, which deletes a chunk of the update ``rank``."""
    return (("model", model.encode()), ("deletes", f"{rank[0]}.{rank[1]}".encode()))


def deleted_rank(headers: Headers) -> Rank | None:
    """Return the rank of the update whose chunk a record deletes, or None.

    >>> deleted_rank(deletion_headers("ctr", (2, 17)))
    (2, 17)
    """
    for name, value in headers:
        generation, separator, version = value.partition(b".")
        is_rank = separator and generation.isdigit() and version.isdigit() and len(value) <= _RANK_BYTES
        if name == "deletes" and is_rank:
            return int(generation), int(version)
    return None


def is_key_of(model: str, key: bytes | None) -> bool:
    """Whether a record with this key belongs to ``model``."""
    return key is not None and key.partition(_KEY_SEPARATOR.encode())[0] == model.encode()


def check_model_name(model: str) -> None:
    """Raise ``ModelError`` for a name that cannot be part of a key."""
    if not model or _KEY_SEPARATOR in model or not model.isprintable():
        raise ModelError(
            f"model {model!r}: expected a name of printable characters without {_KEY_SEPARATOR!r}, which"
            " separates it from the rest of a key"
        )


Parameters = Array | dict[str, Any]
"""One array, or a dict of names to arrays, numbers, strings (and lists, tuples and dicts of these)."""

# bool, signed and unsigned integers, floats, text: both JSON and safetensors can hold these exactly.
_KINDS: Final = "biufU"
# JSON has no limit, but its readers have: all of them can read 64 bits.
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
# Wider floats (80 and 128 bits) have neither a JSON number nor a safetensors type.
_FLOAT_BYTES_MAX: Final = 8


def checked_parameters(given: object, subject: str) -> Parameters:
    """Return the parameters as they are stored; they are checked before they are written and after they are read.

    A bare number becomes an array without axes, numpy scalars of 64 bits become Python numbers, and arrays get the
    machine's byte order; nothing else changes. Raises :class:`~streamiter.errors.ModelError`, whose message begins with
    ``subject``, for a value that is NaN or infinite or cannot be stored exactly.

    >>> checked_parameters({"weights": np.zeros(2), "intercept": np.float64(0.5)}, "model 'ctr'")
    {'weights': array([0., 0.]), 'intercept': 0.5}
    """
    if isinstance(given, Mapping):
        return _checked_dict(given, "", subject)
    if isinstance(given, (np.ndarray, np.generic, int, float)):
        return _checked_array(np.asarray(given), "", subject)
    raise ModelError(
        f"{subject}: expected a numpy array, a dict of them or a ModelSnapshot, given {type(given).__name__}"
    )


def freeze_arrays(value: Any) -> None:
    """Make every array in ``value`` read-only, for all readers of a model share its update."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, dict):
        for part in value.values():
            freeze_arrays(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            freeze_arrays(part)


def _checked(value: object, path: str, subject: str) -> Any:
    if isinstance(value, np.ndarray):
        return _checked_array(value, path, subject)
    if isinstance(value, np.generic):
        return _checked_scalar(value, path, subject)
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, (int, float)):
        return _checked_number(value, path, subject)
    if isinstance(value, (list, tuple)):
        parts = [_checked(part, f"{path}[{index}]", subject) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        return _checked_dict(value, path, subject)
    raise ModelError(
        f"{subject}: {_named(path)}: expected an array, a number, a string or a list, tuple or dict of these,"
        f" given {type(value).__name__}"
    )


def _checked_dict(given: Mapping[Any, object], path: str, subject: str) -> dict[str, Any]:
    for name in given:
        if not isinstance(name, str):
            raise ModelError(f"{subject}: {_named(path)}: expected names that are str, given {name!r}")
    return {
        name: _checked(value, f"{path}.{name}" if path else name, subject) for name, value in given.items()
    }


def _checked_number(value: float, path: str, subject: str) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        raise _not_finite(path, subject, f"is {value}")
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        raise ModelError(f"{subject}: {_named(path)}: expected an integer of 64 bits, given {value}")
    return value


def _checked_scalar(value: np.generic, path: str, subject: str) -> Any:
    _checked_array(np.asarray(value), path, subject)
    is_plain = value.dtype.kind in "bU" or value.dtype in (np.dtype(np.int64), np.dtype(np.float64))
    return value.item() if is_plain else value


def _checked_array(array: Array, path: str, subject: str) -> Array:
    if array.dtype.kind not in _KINDS or (array.dtype.kind == "f" and array.itemsize > _FLOAT_BYTES_MAX):
        raise ModelError(
            f"{subject}: {_named(path)}: expected an array of bool, integers, floats of up to 64 bits or text"
            f", given dtype {array.dtype}"
        )
    if array.dtype.kind == "f":
        _refuse_not_finite(array, path, subject)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="))


def _refuse_not_finite(array: Array, path: str, subject: str) -> None:
    bad = ~np.isfinite(array)
    if not bad.any():
        return
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    where = f" (the first at {list(first)})" if first else ""
    raise _not_finite(
        path, subject, f"holds {int(bad.sum())} of {array.size} values as NaN or infinity{where}"
    )


def _not_finite(path: str, subject: str, what: str) -> ModelError:
    return ModelError(
        f"{subject}: {_named(path)} {what}; expected finite numbers, for a broken model must not be served:"
        " look at the learning rate and at the examples before this update"
    )


def _named(path: str) -> str:
    return f"parameter {path!r}" if path else "the parameters"


# Larger updates are refused. A topic is the wrong place for them, and a reader that holds an update, its joined bytes
# and the update before needs three times as much memory.
UPDATE_BYTES_MAX: Final = 512 * 1024 * 1024

# A reader keeps so many bytes of incomplete updates: two of the largest, because a superseded writer may still write
# its update while the new writer writes another one.
_PENDING_BYTES_MAX: Final = 2 * UPDATE_BYTES_MAX
# Only crashes and superseded writers leave updates that are never completed: a few for each model.
_PENDING_UPDATES_MAX: Final = 256


def cut(value: bytes, chunk_bytes: int) -> list[tuple[Chunk, bytes]]:
    """Return the chunks of ``value`` in order, none longer than ``chunk_bytes``.

    >>> [(chunk.index, chunk.count, part) for chunk, part in cut(b"abcde", 2)]
    [(0, 3, b'ab'), (1, 3, b'cd'), (2, 3, b'e')]
    """
    sha256 = hashlib.sha256(value).hexdigest()
    parts = [value[start : start + chunk_bytes] for start in range(0, len(value), chunk_bytes)]
    return [(Chunk(index, len(parts), sha256), part) for index, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class _UpdateIdentity:
    """Identifies an update of a model, also if two writers wrote updates of one rank: their chunks never mix."""

    rank: Rank
    sha256: str


class _Partial:
    """The chunks of one update that have arrived so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.size_bytes = 0
        self._parts: dict[int, bytes] = {}

    def put(self, index: int, part: bytes) -> None:
        self.size_bytes += len(part) - len(self._parts.get(index, b""))
        self._parts[index] = part

    @property
    def missing(self) -> int:
        return self.count - len(self._parts)

    @property
    def is_closed(self) -> bool:
        return self.count - 1 in self._parts

    def joined(self) -> bytes:
        return b"".join(self._parts[index] for index in range(self.count))


class ChunkAssembler:
    """Joins the chunks of one model's updates, which may arrive in any order and interleaved with other updates.

    Its memory is bounded: beyond ``pending_bytes_max`` the oldest incomplete update is dropped and counted.
    """

    def __init__(self, pending_bytes_max: int = _PENDING_BYTES_MAX) -> None:
        self._pending_bytes_max = pending_bytes_max
        self._pending: dict[_UpdateIdentity, _Partial] = {}
        self.dropped = 0

    def add(self, headers: UpdateHeaders, part: bytes) -> bytes | None:
        """Return the whole value if this was its last missing chunk, else None.

        Raises ``ValueError`` with the reason for chunks that do not belong together.
        """
        chunk = headers.chunk
        assert chunk is not None
        identity = _UpdateIdentity(headers.rank, chunk.sha256)
        partial = self._pending.setdefault(identity, _Partial(chunk.count))
        if partial.count != chunk.count:
            raise ValueError(
                f"chunk {chunk.index} is one of {chunk.count}, those before were of {partial.count}"
            )
        partial.put(chunk.index, part)
        if partial.missing:
            self._drop_oldest_above_limit()
            return None
        del self._pending[identity]
        return _verified(partial.joined(), chunk.sha256)

    def drop_up_to(self, rank: Rank) -> None:
        """Drop the updates that are not newer than ``rank``: no reader will get them any more."""
        self._drop([one for one in self._pending if one.rank <= rank])

    @property
    def closed_chunks(self) -> int:
        """The number of chunks, present or missing, of updates whose last chunk has arrived."""
        return sum(partial.count for partial in self._pending.values() if partial.is_closed)

    def _drop_oldest_above_limit(self) -> None:
        while self._is_above_limit():
            self._drop([min(self._pending, key=lambda one: one.rank)])

    def _is_above_limit(self) -> bool:
        size_bytes = sum(partial.size_bytes for partial in self._pending.values())
        return size_bytes > self._pending_bytes_max or len(self._pending) > _PENDING_UPDATES_MAX

    def _drop(self, identities: list[_UpdateIdentity]) -> None:
        for identity in identities:
            del self._pending[identity]
        self.dropped += len(identities)


def _verified(value: bytes, sha256: str) -> bytes:
    given = hashlib.sha256(value).hexdigest()
    if given != sha256:
        raise ValueError(f"its chunks are damaged: expected SHA-256 {sha256}, given {given}")
    return value
