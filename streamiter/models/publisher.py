"""Publishing models: a sink that writes each model of a stream as an update, and a source that reads the last one.

``Stream.publish_model`` adds a :class:`ModelPublisher`, :func:`initial_model` is the source. The publisher's
:class:`ModelUpdateEncoder` numbers the updates, encodes them, and cuts an update that is larger than a record of the
topic into chunks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from msgspec.structs import replace

from streamiter.errors import ConfigurationError, ModelError
from streamiter.models.changes import applied, changes_between
from streamiter.models.chunks import cut
from streamiter.models.documents import (
    JSON_CONTENT_TYPE,
    Document,
    Parameters,
    UpdateFormat,
    checked_parameters,
    encode_document,
    own_copy,
    without_state,
)
from streamiter.models.reader import TailSearch, last_update
from streamiter.models.update import (
    FORMAT_OF_CHANGES,
    NO_RANK,
    UPDATE_BYTES_MAX,
    ChainLink,
    Chunk,
    ChunkSet,
    ModelSnapshot,
    Rank,
    UpdateHeaders,
    chain_checksum,
    check_model_name,
    chunk_key,
    deletion_headers,
    format_of,
    learner_in,
    shown_rank,
    update_key,
)
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.topics.connecting import RECORD_BYTES_MAX, record_limit
from streamiter.topics.source_and_sink import TopicSink
from streamiter.topics.topic import Headers, OutgoingBatch, Topic
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.numbers import one_of, plain_float
from streamiter.values.records import Batch

__all__ = ["EncoderState", "InitialModel", "ModelPublisher", "ModelUpdateEncoder", "initial_model"]


_log = logging.getLogger("streamiter.models")


class ModelPublisher(TopicSink):
    """Writes one update for each record: an array, a dict of parameters or a ``ModelSnapshot``.

    A run without a checkpoint begins a new generation: the topic's last generation + 1. A restored run continues its
    generation with the next version. But if the topic has later updates than the checkpoint, the restored run begins a
    new generation, too: readers would skip its updates as old ones until its versions had caught up. This happens
    with an older checkpoint, and with ``at_least_once`` after a crash.

    With ``changes`` an update is a change of the one before it where that is smaller, see
    :class:`~streamiter.models.ModelUpdateEncoder`. The first update of a run, restored or not, is whole.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        format: UpdateFormat = "auto",  # noqa: A002
        *,
        changes: bool = False,
        at_least_once: bool = False,
    ) -> None:
        super().__init__(topic, _NotOpenYet(), at_least_once=at_least_once)
        self._model = model
        self._format: UpdateFormat = format
        self._changes = changes

        self._rollback: Rank = NO_RANK
        """A rollback that the restored state does not know yet."""

    async def open(self, context: Context) -> None:
        run = self._fresh = await next_run(self.topic, self._model)
        self._updates = ModelUpdateEncoder(
            self._model,
            run.generation,
            clock=context.clock,
            format=self._format,
            record_bytes_max=record_limit(await self.topic.describe()),
            leftovers=run.leftovers,
            changes=self._changes,
        )
        self._encoder = self._updates
        await super().open(context)

    async def process_batch(self, batch: Batch, out: Output) -> None:
        """Publish models, but no model from before a rollback in the topic: it would replace the rollback."""
        if self._rollback != NO_RANK:
            batch = [model for model in batch if not self._is_rolled_back(model)]
        await super().process_batch(batch, out)

    def _is_rolled_back(self, model: object) -> bool:
        since = model.since_rollback if isinstance(model, ModelSnapshot) else None
        return since is not None and tuple(since) < self._rollback

    async def snapshot(self) -> EncoderState:
        await super().snapshot()
        return self._updates.snapshot()

    def restore(self, state: EncoderState) -> None:
        restored = (state["generation"], state["next_version"] - 1)
        self._rollback = self._fresh.rollback if self._fresh.rollback > restored else NO_RANK
        if self._fresh.last_rank > restored:
            _log.info(
                "model %r: %s has update %s, later than the restored %s; continuing with generation %d",
                self._model,
                self.topic.url,
                shown_rank(self._fresh.last_rank),
                shown_rank(restored),
                self._fresh.generation,
            )
            return  # Keep the encoder of ``open``, with the chunks to delete that are in the topic now.
        self._updates.restore(state)


class _NotOpenYet:
    """The placeholder for the encoder until the topic's last generation is known."""

    def encode(self, batch: Batch) -> OutgoingBatch:
        raise NotImplementedError


def initial_model(
    topic: Topic, *, model: str, default: object, state: bool = True, learner: str | None = None
) -> InitialModel:
    """Return a source of one record for a warm start: the last published parameters, or ``default`` if there are none.

    If the version carries the state of its learner, a training continues exactly; with ``state=False`` it starts from
    the weights alone, with new learning rates. The log ``streamiter.models`` says which version it is. Where several
    learners publish under the name, the last version counts if it is of this ``learner`` (see ``Rollbacks``).

    >>> from streamiter import Flow
    >>> from streamiter.models import initial_model
    >>> from streamiter.topics import MemoryBroker
    >>> flow = Flow("warm start")
    >>> updates = MemoryBroker().topic("model-updates")
    >>> initial = flow.from_source(initial_model(updates, model="ctr", default=[0.0]), parallelism=1)
    """
    return InitialModel(topic, model, default, state, learner)


class InitialModel:
    """Makes the source of :func:`initial_model`, for ``flow.from_source``."""

    bounded = True

    def __init__(
        self, topic: Topic, model: str, default: object, state: bool = True, learner: str | None = None
    ) -> None:
        self._given = topic, model, default, state, learner
        self.__name__ = f"initial {model}"

    def __call__(self) -> Source:
        return _InitialModelSource(*self._given)


class _InitialModelSource(Source):
    def __init__(self, topic: Topic, model: str, default: object, state: bool, learner: str | None) -> None:
        self._learner = learner
        self._topic = topic
        self._model = model
        self._default = default
        self._state = state
        self._given = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self._given = context.subtask_index > 0 or bool(positions)

    async def read(self) -> SourceBatch | None:
        if self._given:
            return None
        self._given = True
        update = await last_update(self._topic, self._model)
        if update is None or self._learner not in (None, learner_in(update.parameters)):
            if update is not None:
                given = learner_in(update.parameters) or "the service itself"
                rank, own = shown_rank(update.rank), self._learner or "the service itself"
                _log.warning(
                    "model %r: the last version, %s, is of %s: %s starts without", self._model, rank, given, own
                )
            return SourceBatch([self._default], {"given": True})
        parameters = update.parameters if self._state else without_state(update.parameters)
        _log.info(
            "model %r of %s: starting from update %s of %s records, %s",
            self._model,
            self._topic.url,
            shown_rank(update.rank),
            update.records,
            "which carries no state"
            if not update.has_state
            else "with its state"
            if self._state
            else "without its state",
        )
        return SourceBatch([parameters], {"given": True})


# The bytes that a topic adds to a record: Kafka's batch header (61 bytes) and its fields (up to 21), rounded up; and
# the two lengths in front of each header.
_FRAMING_BYTES: Final = 128

_HEADER_FRAMING_BYTES: Final = 10


_Record = tuple[bytes, bytes | None, Headers]


class EncoderState(TypedDict):
    """The state of an encoder, plain data for a snapshot."""

    generation: int
    """The generation of its updates."""
    next_version: int
    """The version of the next update."""
    leftovers: list[ChunkSet]
    """The chunks and changes that the next whole update deletes."""


CHANGES_MAX: Final = 1000
"""The number of changes after which an update is whole again. So whole updates add .1 % of a model to each version, a
reader that starts late reads at most this many records, and a new run can delete all of them."""

# Where a topic's retention drops the base, readers that start late have no model until the next one. The shortest
# retention that is usual is some hours.
_CHAIN_MS_MAX: Final = 3_600_000


class _Chain:
    """The chain that an encoder continues: the parameters that were published last, and when the chain ends."""

    def __init__(self, headers: UpdateHeaders, value: bytes, parameters: Parameters) -> None:
        """Begin with a whole update."""
        assert headers.chain is not None
        self._base = headers
        self._parameters = own_copy(parameters)
        """What followers have after the last update: what the operations give, and not what they were made of."""
        self._rank = headers.rank
        self._checksum = headers.chain
        self._form: UpdateFormat = "json" if headers.content_type == JSON_CONTENT_TYPE else "safetensors"
        self._room_bytes = len(value)
        """The bytes that the next changes may have. All have those of the base, so readers read two models at most."""
        self._changes = 0

    def next_change(self, document: Document, headers: UpdateHeaders) -> tuple[UpdateHeaders, bytes] | None:
        """Return headers and value of a change that has the parameters of ``document``; None if the chain ends."""
        base = self._base
        is_next = headers.rank == (self._rank[0], self._rank[1] + 1) and headers.rollback_to is None
        is_alike = (headers.format, headers.since_rollback) == (base.format, base.since_rollback)
        is_late = headers.created_at_ms - base.created_at_ms > _CHAIN_MS_MAX or self._changes == CHANGES_MAX
        if is_late or not is_next or not is_alike:
            return None
        changes = changes_between(self._parameters, document.parameters)
        content_type, value = encode_document(replace(document, parameters=None, changes=changes), self._form)
        if len(value) > self._room_bytes:
            return None
        self._parameters = applied(self._parameters, own_copy(changes))
        self._checksum = chain_checksum(self._checksum, value)
        link, self._rank = ChainLink(base.rank, self._rank), headers.rank
        self._room_bytes, self._changes = self._room_bytes - len(value), self._changes + 1
        form = FORMAT_OF_CHANGES
        return replace(headers, content_type=content_type, format=form, link=link, chain=self._checksum), value


class ModelUpdateEncoder:
    """Turns models into update records of consecutive versions.

    A model is an array, a dict of names to arrays, numbers and strings, or a :class:`~streamiter.models.ModelSnapshot`.
    All records go to one ``partition``, in order. ``format`` is ``"json"``, ``"safetensors"`` or ``"auto"``:
    safetensors for arrays of more than 64 KiB in total. An update whose record would be larger than
    ``record_bytes_max`` is written in chunks. Each update deletes the chunks of the previous update; ``leftovers``
    names the chunks of an earlier run.

    With ``changes`` an update has only the difference to the update before it: rows of arrays, and values. When the
    changes have as many bytes as the last whole update, or are 1,000, or after an hour, an update is whole again, and
    the records before it are deleted. The encoder keeps a copy of the last parameters.

    >>> import numpy as np
    >>> from streamiter.values.helpers.clock import SystemClock
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
        record_bytes_max: int = RECORD_BYTES_MAX,
        partition: int = 0,
        leftovers: Sequence[ChunkSet] = (),
        changes: bool = False,
    ) -> None:
        check_model_name(model)
        one_of(f"model {model!r}, format=", format, "auto", "json", "safetensors")
        self.model = model
        self.generation = generation
        self.next_version = next_version
        self._clock = clock
        self._format = format
        self._record_bytes_max = record_bytes_max
        self._partition = partition
        self._leftovers = list(leftovers)
        self._publishes_changes = changes
        self._chain: _Chain | None = None

    def encode(
        self, models: Batch, *, epoch: int | None = None, rollback_to: Rank | None = None, replaces: bool = False
    ) -> OutgoingBatch:
        """Return the records of one update for each model, in order; ``epoch`` is the epoch of models that name none.

        A model that was trained since a rollback gets a later version than the rollback. With ``replaces`` there is one
        model, and trainers start from it; ``rollback_to`` is the rank of the update that it publishes again. Write the
        records as one batch, or in one transaction. Raises :class:`~streamiter.errors.ModelError` for a model that
        cannot be published, such as one with NaN; then no version is used.
        """
        rank, leftovers = (self.generation, self.next_version), list(self._leftovers)
        records: list[_Record] = []
        chain, self._chain = self._chain, None  # If a model of the batch is refused, the next update is whole.
        for model in models:
            snapshot = model if isinstance(model, ModelSnapshot) else ModelSnapshot(model)
            since = snapshot.since_rollback or NO_RANK
            rank = max(rank, (since[0], since[1] + 1))
            since = rank if replaces else since
            document = self._document(snapshot, rank, epoch)
            headers = UpdateHeaders(
                self.model,
                *rank,
                document.epoch,
                self._clock.now_ms(),
                content_type="",
                format=format_of(document.parameters),
                since_rollback=None if since == NO_RANK else since,
                rollback_to=rollback_to,
            )
            change = chain.next_change(document, headers) if chain is not None else None
            if change is None:
                headers, value = self._whole(document, headers)
                chain = _Chain(headers, value, document.parameters) if self._publishes_changes else None
                deleted, leftovers = leftovers, []
            else:
                (headers, value), deleted = change, []
            written = self._records_of(headers, value)
            if own_keys := len(written) - (change is None):
                leftovers.append((*rank, own_keys))
            records += written
            records += [record for chunk_set in deleted for record in self._deletions(chunk_set)]
            rank = (rank[0], rank[1] + 1)
        (self.generation, self.next_version), self._leftovers, self._chain = rank, leftovers, chain
        keys, values, all_headers = zip(*records, strict=True) if records else ((), (), ())
        return OutgoingBatch(values=list(values), keys=list(keys), headers=list(all_headers), partition=self._partition)

    def snapshot(self) -> EncoderState:
        """Return the state for a run that is restored."""
        return {"generation": self.generation, "next_version": self.next_version, "leftovers": list(self._leftovers)}

    def restore(self, state: EncoderState) -> None:
        """Restore a snapshot: continue its generation with the next version, which is whole."""
        self.generation = state["generation"]
        self.next_version = state["next_version"]
        self._leftovers = [(generation, version, count) for generation, version, count in state["leftovers"]]
        self._chain = None

    def _document(self, snapshot: ModelSnapshot, rank: Rank, epoch: int | None) -> Document:
        subject = f"model {self.model!r}, update {shown_rank(rank)}"
        return Document(
            model=self.model,
            generation=rank[0],
            version=rank[1],
            epoch=snapshot.epoch if snapshot.epoch is not None else epoch,
            records=snapshot.records,
            metrics=_checked_metrics(snapshot.metrics, subject),
            parameters=checked_parameters(snapshot.parameters, subject),
        )

    def _whole(self, document: Document, headers: UpdateHeaders) -> tuple[UpdateHeaders, bytes]:
        content_type, value = encode_document(document, self._format)
        chain = chain_checksum(None, value) if self._publishes_changes else None
        return replace(headers, content_type=content_type, chain=chain), value

    def _records_of(self, headers: UpdateHeaders, value: bytes) -> list[_Record]:
        """Return the records of an update. The last of a whole one has the model's key, others have their own."""
        encoded = headers.encoded()
        widest_key = chunk_key(self.model, headers.rank, _WIDEST.index)
        overhead_bytes = _FRAMING_BYTES + _bytes_of(encoded) + _CHUNK_HEADERS_BYTES + len(widest_key)
        room_bytes = self._record_bytes_max - overhead_bytes
        if len(value) <= room_bytes:
            return [(self._key(headers, 0), value, encoded)]
        _check_size(headers, len(value), room_bytes, self._record_bytes_max)
        parts = [(replace(headers, chunk=chunk), part) for chunk, part in cut(value, room_bytes)]
        return [(self._key(own, own.chunk.index if own.chunk else 0), part, own.encoded()) for own, part in parts]

    def _key(self, headers: UpdateHeaders, index: int) -> bytes:
        is_closing = headers.is_last and headers.link is None
        return update_key(self.model) if is_closing else chunk_key(self.model, headers.rank, index)

    def _deletions(self, chunk_set: ChunkSet) -> Iterator[_Record]:
        """Yield the records that delete the records of an earlier update: their keys without a value."""
        generation, version, count = chunk_set
        rank = (generation, version)
        for index in range(count):
            yield chunk_key(self.model, rank, index), None, deletion_headers(self.model, rank)


def _bytes_of(encoded: Headers) -> int:
    return sum(len(name) + len(value or b"") + _HEADER_FRAMING_BYTES for name, value in encoded)


_WIDEST: Final = Chunk(UPDATE_BYTES_MAX - 1, UPDATE_BYTES_MAX, "0" * 64)
_NO_CHUNK: Final = UpdateHeaders("", 0, 0, None, 0, "")
# A record of an update in chunks has these bytes more, and the key of a chunk.
_CHUNK_HEADERS_BYTES: Final = _bytes_of(replace(_NO_CHUNK, chunk=_WIDEST).encoded()) - _bytes_of(_NO_CHUNK.encoded())


def _check_size(headers: UpdateHeaders, size_bytes: int, room_bytes: int, record_bytes_max: int) -> None:
    subject = f"model {headers.model!r}, update {shown_rank(headers.rank)}"
    if room_bytes < 1:
        raise ConfigurationError(
            f"{subject}: expected a topic that takes records of more than"
            f" {record_bytes_max - room_bytes} bytes, which key and headers need, given {record_bytes_max}"
        )
    if size_bytes > UPDATE_BYTES_MAX:
        raise ModelError(
            f"{subject}: expected at most {UPDATE_BYTES_MAX} bytes, given {size_bytes}; store a model of"
            " this size as a file and publish its path"
        )


def _checked_metrics(metrics: Mapping[str, object], subject: str) -> dict[str, float]:
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not math.isfinite(plain_float(value)):
            raise ModelError(
                f"{subject}: metric {name!r}: expected a finite number, given {value!r}; leave a metric out"
                " where it is not defined"
            )
        checked[name] = plain_float(value)
    return checked


@dataclass(frozen=True, slots=True)
class RunStart:
    """The settings of a :class:`~streamiter.models.ModelUpdateEncoder` in a run without a checkpoint.

    A restored run continues from its own state, unless ``last_rank`` is higher than the rank of that state.
    """

    generation: int
    """The generation of the run."""
    leftovers: list[ChunkSet]
    """The chunks and changes that its first update deletes."""
    last_rank: Rank = NO_RANK
    """The highest generation and version in the topic; zeros in an empty topic."""
    rollback: Rank = NO_RANK
    """The rank of the last rollback in the topic; zeros without one."""


async def next_run(topic: Topic, model: str) -> RunStart:
    """Return the generation after the topic's last one (1 in an empty topic), and the records to delete.

    It reads back from the topic's end like :func:`last_update`; incomplete and unreadable updates count, too. Raises
    :class:`~streamiter.errors.TopicNotFound` for a topic that does not exist.
    """
    check_model_name(model)
    tail = await TailSearch(topic, model, SystemClock()).run()
    return RunStart(tail.rank[0] + 1, tail.leftovers, tail.rank, tail.rollback)
