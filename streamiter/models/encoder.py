"""From what a training operator emits to the records of a topic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypedDict

import numpy as np

from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, ModelError
from streamiter.models.formats import Document, UpdateFormat, encode_document
from streamiter.models.update import (
    UPDATE_BYTES_MAX,
    Chunk,
    ModelSnapshot,
    UpdateHeaders,
    check_model_name,
    checked_parameters,
    chunk_key,
    cut,
    deletion_headers,
    update_key,
)
from streamiter.records import Batch
from streamiter.topics.topic import RECORD_BYTES_MAX, Headers, OutgoingBatch, record_limit

__all__ = [
    "JSON_BYTES_MAX",
    "RECORD_BYTES_MAX",
    "ChunkSet",
    "EncoderState",
    "ModelUpdateEncoder",
    "record_limit",
]

# Arrays above it go into safetensors: 8,192 float64 are about 160 KB of JSON, which takes a reader more
# than a millisecond; beyond that nobody reads the numbers with the eye.
JSON_BYTES_MAX: Final = 64 * 1024

# What a topic adds around a record: Kafka's batch header (61 bytes) and its fields (up to 21), rounded up,
# and the two lengths in front of each header.
_FRAMING_BYTES: Final = 128
_HEADER_FRAMING_BYTES: Final = 10

ChunkSet = tuple[int, int, int]
"""Generation, version and number of chunks of an update that was written in chunks."""

_Record = tuple[bytes, bytes | None, Headers]


class EncoderState(TypedDict):
    """The state of an encoder, plain data for a snapshot."""

    generation: int
    next_version: int
    leftovers: list[ChunkSet]


class ModelUpdateEncoder:
    """Turns models into update records of consecutive versions.

    A model is an array, a dict of names to arrays, numbers and strings, or a
    :class:`~streamiter.models.ModelSnapshot`. All records go to one ``partition``, in order.
    ``format`` is ``"json"``, ``"safetensors"`` or ``"auto"``: safetensors for arrays of more than
    ``json_bytes_max`` bytes in all. An update whose record would be above ``record_bytes_max`` is written
    in chunks, and deletes the chunks of the one before it (``leftovers`` names those of an earlier run).

    >>> from streamiter.clock import SystemClock
    >>> encoder = ModelUpdateEncoder("ctr", generation=1, clock=SystemClock())
    >>> encoder.encode([np.zeros(2)]).values
    [b'{"model":"ctr","generation":1,"version":1,"epoch":null,"records":null,"metrics":{},"parameters":[0.0,0.0]}']
    >>> encoder.next_version
    2
    """

    def __init__(
        self,
        model: str,
        generation: int,
        next_version: int = 1,
        *,
        clock: Clock,
        format: UpdateFormat = "auto",  # noqa: A002 (the word for it)
        json_bytes_max: int = JSON_BYTES_MAX,
        record_bytes_max: int = RECORD_BYTES_MAX,
        partition: int = 0,
        leftovers: Sequence[ChunkSet] = (),
    ) -> None:
        check_model_name(model)
        if format not in ("auto", "json", "safetensors"):
            raise ConfigurationError(
                f"model {model!r}: expected format 'auto', 'json' or 'safetensors', given {format!r}"
            )
        self.model = model
        self.generation = generation
        self.next_version = next_version
        self._clock = clock
        self._format = format
        self._json_bytes_max = json_bytes_max
        self._record_bytes_max = record_bytes_max
        self._partition = partition
        self._leftovers = list(leftovers)

    def encode(self, models: Batch, *, epoch: int | None = None) -> OutgoingBatch:
        """The records of one update for each model, in order; ``epoch`` is for models that name none.

        They are to be written as one batch, or in one transaction. Raises
        :class:`~streamiter.errors.ModelError` for a model that cannot be published, such as one with
        NaN; then no version is used up.
        """
        version, leftovers = self.next_version, list(self._leftovers)
        records: list[_Record] = []
        for model in models:
            chunk_sets = leftovers
            update = _UpdateRecords(self._document(model, version, epoch), self._clock.now_ms())
            written, leftovers = self._records_of(update)
            records += written
            records += [record for chunk_set in chunk_sets for record in update.deletions(chunk_set)]
            version += 1
        self.next_version, self._leftovers = version, leftovers
        keys, values, headers = zip(*records, strict=True) if records else ((), (), ())
        return OutgoingBatch(
            values=list(values), keys=list(keys), headers=list(headers), partition=self._partition
        )

    def snapshot(self) -> EncoderState:
        """What a run that is restored goes on from."""
        return {
            "generation": self.generation,
            "next_version": self.next_version,
            "leftovers": list(self._leftovers),
        }

    def restore(self, state: EncoderState) -> None:
        """Go on from a snapshot: the same generation, the version after the last one."""
        self.generation = state["generation"]
        self.next_version = state["next_version"]
        self._leftovers = [(generation, version, count) for generation, version, count in state["leftovers"]]

    def _document(self, model: object, version: int, epoch: int | None) -> Document:
        subject = f"model {self.model!r}, update {self.generation}.{version}"
        snapshot = model if isinstance(model, ModelSnapshot) else ModelSnapshot(model)
        return Document(
            model=self.model,
            generation=self.generation,
            version=version,
            epoch=snapshot.epoch if snapshot.epoch is not None else epoch,
            records=snapshot.records,
            metrics=_checked_metrics(snapshot.metrics, subject),
            parameters=checked_parameters(snapshot.parameters, subject),
        )

    def _records_of(self, update: _UpdateRecords) -> tuple[list[_Record], list[ChunkSet]]:
        content_type, value = encode_document(update.document, self._format, self._json_bytes_max)
        room_bytes = self._record_bytes_max - update.overhead_bytes(content_type)
        if len(value) <= room_bytes:
            return [update.whole(content_type, value)], []
        _check_size(update, len(value), room_bytes, self._record_bytes_max)
        records = list(update.in_chunks(content_type, value, room_bytes))
        document = update.document
        return records, [(document.generation, document.version, len(records))]


class _UpdateRecords:
    """The records of one update."""

    def __init__(self, document: Document, created_at_ms: int) -> None:
        self.document = document
        self._created_at_ms = created_at_ms
        self._key = update_key(document.model)

    def whole(self, content_type: str, value: bytes) -> _Record:
        return self._key, value, self._headers(content_type).encoded()

    def in_chunks(self, content_type: str, value: bytes, room_bytes: int) -> Iterator[_Record]:
        rank = (self.document.generation, self.document.version)
        for chunk, part in cut(value, room_bytes):
            is_last = chunk.index == chunk.count - 1
            key = self._key if is_last else chunk_key(self.document.model, rank, chunk.index)
            yield key, part, self._headers(content_type, chunk).encoded()

    def deletions(self, chunk_set: ChunkSet) -> Iterator[_Record]:
        """What makes compaction drop the chunks of an earlier update: their keys without a value."""
        generation, version, count = chunk_set
        rank = (generation, version)
        headers = deletion_headers(self.document.model, rank)
        for index in range(count - 1):  # the last one has the model's own key
            yield chunk_key(self.document.model, rank, index), None, headers

    def overhead_bytes(self, content_type: str) -> int:
        """The most that a record of this update has besides its value."""
        widest = Chunk(UPDATE_BYTES_MAX - 1, UPDATE_BYTES_MAX, "0" * 64)
        rank = (self.document.generation, self.document.version)
        headers = self._headers(content_type, widest).encoded()
        named = sum(len(name) + len(value) + _HEADER_FRAMING_BYTES for name, value in headers)
        return _FRAMING_BYTES + named + len(chunk_key(self.document.model, rank, widest.index))

    def _headers(self, content_type: str, chunk: Chunk | None = None) -> UpdateHeaders:
        document = self.document
        return UpdateHeaders(
            model=document.model,
            generation=document.generation,
            version=document.version,
            epoch=document.epoch,
            created_at_ms=self._created_at_ms,
            content_type=content_type,
            chunk=chunk,
        )


def _check_size(update: _UpdateRecords, size_bytes: int, room_bytes: int, record_bytes_max: int) -> None:
    subject = (
        f"model {update.document.model!r}, update {update.document.generation}.{update.document.version}"
    )
    if room_bytes < 1:
        raise ConfigurationError(
            f"{subject}: expected a topic that takes records of more than"
            f" {record_bytes_max - room_bytes} bytes, which key and headers need, given {record_bytes_max}"
        )
    if size_bytes > UPDATE_BYTES_MAX:
        raise ModelError(
            f"{subject}: expected at most {UPDATE_BYTES_MAX} bytes, given {size_bytes}; store a model of"
            " this size as a file and publish where it lies"
        )


def _checked_metrics(metrics: Mapping[str, Any], subject: str) -> dict[str, float]:
    for name, value in metrics.items():
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (isinstance(name, str) and is_number and math.isfinite(value)):
            raise ModelError(
                f"{subject}: metric {name!r}: expected a finite number, given {value!r}; leave a metric out"
                " where it is not defined"
            )
    return {name: float(value) for name, value in metrics.items()}
