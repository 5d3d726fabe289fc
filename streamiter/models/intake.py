"""From the records of a topic to the updates of a model: whole, readable, and never going back.

The reader and the search for the last update share it, so that both mean the same by *an update*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamiter.errors import DecodeError, ModelError
from streamiter.models.chunks import ChunkAssembler
from streamiter.models.formats import decode_document
from streamiter.models.headers import UpdateHeaders, is_key_of, model_of
from streamiter.models.parameters import checked_parameters, freeze_arrays
from streamiter.models.update import ModelUpdate, Rank
from streamiter.topics.topic import Topic, TopicRecord

__all__ = ["UpdateIntake", "UpdateStatistics"]

_NO_RANK: Final[Rank] = (0, 0)


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """What became of the records of a model.

    ``updates``: given out. ``older``: skipped, because a newer one (or the same) had been given out: a
    superseded writer's, or a repetition after a restart. ``incomplete``: skipped, because chunks were
    missing when a newer one came. ``unreadable``: records that claim to be of the model and cannot be
    read; ``last_error`` says why the last of them could not.
    """

    updates: int = 0
    older: int = 0
    incomplete: int = 0
    unreadable: int = 0
    last_error: str | None = None

    def plus(self, later: UpdateStatistics) -> UpdateStatistics:
        """The counts of both together."""
        return UpdateStatistics(
            updates=self.updates + later.updates,
            older=self.older + later.older,
            incomplete=self.incomplete + later.incomplete,
            unreadable=self.unreadable + later.unreadable,
            last_error=later.last_error if later.last_error is not None else self.last_error,
        )


class UpdateIntake:
    """Takes records one by one. Used by one task; holds no more than the chunks of unfinished updates."""

    def __init__(self, topic: Topic, model: str) -> None:
        self._topic = topic
        self._model = model
        self._model_header = model.encode()
        self._assembler = ChunkAssembler()
        self._rank = _NO_RANK
        self._updates = 0
        self._older = 0
        self._unreadable = 0
        self._last_error: str | None = None

    def take(
        self, record: TopicRecord, on_headers: Callable[[UpdateHeaders], None] | None = None
    ) -> ModelUpdate | None:
        """The update that ``record`` completes, if it does and is newer than all given out before.

        ``on_headers`` is told of every record of the model that has readable headers.
        Raises :class:`~streamiter.errors.DecodeError` with topic, partition and offset for a record
        that claims to be of the model and cannot be read; the next one can be taken after it.
        """
        if record.value is None or not self._is_of_model(record):
            return None
        try:
            headers = UpdateHeaders.parse(record.headers)
            if on_headers is not None:
                on_headers(headers)
            return self._newer(headers, record.value)
        except (ValueError, ModelError) as error:
            raise self._unreadable_record(record, error) from error

    def restart_counts(self, *, updates: int, unreadable: int, last_error: str | None) -> None:
        """Count from here on, beginning with these numbers."""
        self._updates, self._older, self._unreadable = updates, 0, unreadable
        self._last_error = last_error
        self._assembler.dropped = 0

    @property
    def closed_chunks(self) -> int:
        """How many chunks there are of updates whose last one has come and another has not."""
        return self._assembler.closed_chunks

    @property
    def statistics(self) -> UpdateStatistics:
        """The counts so far."""
        return UpdateStatistics(
            self._updates, self._older, self._assembler.dropped, self._unreadable, self._last_error
        )

    def _is_of_model(self, record: TopicRecord) -> bool:
        named = model_of(record.headers)
        return named == self._model_header or (named is None and is_key_of(self._model, record.key))

    def _newer(self, headers: UpdateHeaders, part: bytes) -> ModelUpdate | None:
        if headers.rank <= self._rank:
            self._older += headers.is_last
            return None
        value = part if headers.chunk is None else self._assembler.add(headers, part)
        if value is None:
            return None
        update = _decoded(headers, value)
        self._rank = headers.rank
        self._assembler.drop_up_to(headers.rank)
        self._updates += 1
        return update

    def _unreadable_record(self, record: TopicRecord, error: Exception) -> DecodeError:
        self._unreadable += 1
        self._last_error = (
            f"{self._topic.url}, partition {record.partition}, offset {record.offset}: expected an update of"
            f" model {self._model!r}: {error}"
        )
        return DecodeError({0: self._last_error})


def _decoded(headers: UpdateHeaders, value: bytes) -> ModelUpdate:
    document = decode_document(headers.content_type, value)
    if (document.model, document.generation, document.version) != (headers.model, *headers.rank):
        raise ValueError(
            f"headers say update {headers.generation}.{headers.version} of {headers.model!r}, the value"
            f" {document.generation}.{document.version} of {document.model!r}"
        )
    parameters = checked_parameters(document.parameters, "value")
    freeze_arrays(parameters)
    return ModelUpdate(
        model=headers.model,
        generation=headers.generation,
        version=headers.version,
        epoch=document.epoch,
        created_at_ms=headers.created_at_ms,
        records=document.records,
        metrics=document.metrics,
        parameters=parameters,
    )
