"""Reading model updates from a topic: ``model_updates`` follows a model, ``last_update`` finds its newest update.

:class:`UpdateIntake` turns records into updates: complete, readable, and never older than the update before. Followers
and the search both use it. :class:`TailSearch` reads back from the end of the topic, so its time does not depend on the
length of the history.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Final, Literal, Self

import msgspec

from streamiter.errors import ConfigurationError, DecodeError, ModelError
from streamiter.models.chunks import ChunkAssembler
from streamiter.models.documents import Document, checked_parameters, decode_document, freeze_arrays
from streamiter.models.update import (
    NO_RANK,
    ChunkSet,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    check_model_name,
    deleted_rank,
    is_key_of,
    model_of,
    shown_rank,
)
from streamiter.topics.compacted import READ_RECORDS, BackwardReading
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch, TopicReader, TopicRecord
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after

OnError = Literal["fail", "skip"]
"""For an unreadable update: ``"fail"`` raises an error with topic, partition and offset; ``"skip"`` counts it."""

Wanted = Callable[[UpdateHeaders], bool]
"""Whether a reader wants the update with these headers."""

UpdateStart = Literal["earliest", "latest", "latest_model"] | Mapping[int, int] | datetime
"""Where reading starts: as for any topic, or at the newest complete update (``"latest_model"``)."""


def model_updates(
    topic: Topic,
    model: str,
    *,
    start: UpdateStart = "earliest",
    follow: bool = True,
    on_error: OnError = "fail",
    clock: Clock | None = None,
) -> ModelUpdates:
    """Return an async iterator over the updates of ``model`` in ``topic``; it connects at the first ``anext``.

    ``async with`` connects at once. ``start="latest_model"`` starts with the newest complete update of any age, and
    continues with the updates that follow; the other starts are as for any topic. With ``follow=False`` it ends where
    the topic ended when it was opened.

    Generation and version never decrease: older updates and repetitions are skipped and counted, and so are updates
    with missing chunks. Records of other models are ignored. A record that claims to be of this model and cannot be
    read raises :class:`~streamiter.errors.DecodeError` with topic, partition and offset, after which the iteration can
    continue; with ``on_error="skip"`` it is counted.

    >>> import asyncio, numpy as np
    >>> from streamiter.values.helpers.clock import SystemClock
    >>> from streamiter.models import ModelUpdateEncoder
    >>> from streamiter.topics.memory import MemoryBroker
    >>> async def main():
    ...     topic = MemoryBroker().topic("models")
    ...     await topic.create()
    ...     encoder = ModelUpdateEncoder("ctr", generation=1, clock=SystemClock())
    ...     writer = await topic.open_writer()
    ...     await writer.write(encoder.encode([np.array([0.5]), np.array([0.75])]))
    ...     async for update in model_updates(topic, "ctr", follow=False):
    ...         print(update.generation, update.version, update.parameters)
    >>> asyncio.run(main())
    1 1 [0.5]
    1 2 [0.75]
    """
    check_model_name(model)
    checked_policy(on_error, topic, model)
    return ModelUpdates(topic, model, start, follow, on_error, clock or SystemClock())


class ModelUpdates:
    """An async iterator over the updates of one model; :func:`model_updates` makes it.

    Use it in one task only. Waiting for the next update may be cancelled and continued later; no update is lost. It
    closes the topic at the end of the iteration, with ``aclose()``, at the end of
    ``async with model_updates(...) as updates``, or when it is garbage-collected, for instance after ``break``.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        start: UpdateStart,
        follow: bool,
        on_error: OnError,
        clock: Clock,
        wanted: Wanted | None = None,
    ) -> None:
        if isinstance(start, str) and start not in ("earliest", "latest", "latest_model"):
            raise ConfigurationError(
                f"model {model!r} of {topic.url}: expected start 'earliest', 'latest', 'latest_model', a"
                f" mapping of partition to offset or an aware datetime, given {start!r}"
            )
        self._topic = topic
        self._model = model
        self._start = start
        self._follow = follow
        self._on_error = on_error
        self._clock = clock
        self._wanted = wanted
        self._intake = UpdateIntake(topic, model, wanted)
        self._found: deque[ModelUpdate | DecodeError] = deque()
        self._records: Iterator[TopicRecord] = iter(())
        self._reader: TopicReader | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._is_closed = False

    def statistics(self) -> UpdateStatistics:
        """Return the counts of the records so far."""
        return self._intake.statistics

    @property
    def identities(self) -> Mapping[int, str]:
        """The identities of the open topic's partitions (:meth:`streamiter.topics.TopicReader.identities`)."""
        return {} if self._reader is None else self._reader.identities()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ModelUpdate:
        if self._is_closed:
            raise StopAsyncIteration
        reader = self._reader if self._reader is not None else await self._open()
        while True:
            if (update := self._next_at_hand()) is not None:
                return update
            batch = await reader.read()
            if batch is None:
                await self.aclose()
                raise StopAsyncIteration
            self._records = iter(batch.records())

    async def aclose(self) -> None:
        """Close the topic. May be called more than once."""
        self._is_closed = True
        if self._closer is not None:
            await self._closer.aclose()

    async def __aenter__(self) -> Self:
        if self._reader is None:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> TopicReader:
        self._reader = await self._topic.open_reader(await self._request())
        # After `break` nothing awaits the closing of the reader. A suspended async generator is closed by the event
        # loop: when it is garbage-collected, and at the latest when the loop ends.
        self._closer = _closes(self._reader)
        await anext(self._closer)
        return self._reader

    async def _request(self) -> ReadRequest:
        stop: Literal["latest"] | None = None if self._follow else "latest"
        request = ReadRequest(stop=stop, max_records=READ_RECORDS, clock=self._clock)
        if self._start != "latest_model":
            return replace(request, start=self._start)
        search = TailSearch(self._topic, self._model, self._clock)
        tail = await search.run()
        self._intake = search.intake
        self._intake.restart(self._wanted, tail.update, tail.error)
        if tail.update is not None:
            self._found.append(tail.update)
        if tail.error is not None and self._on_error == "fail":
            self._found.append(tail.error)
        return replace(request, positions=tail.positions, identities=tail.identities)

    def _next_at_hand(self) -> ModelUpdate | None:
        if self._found:
            found = self._found.popleft()
            if isinstance(found, DecodeError):
                raise found
            return found
        for record in self._records:
            try:
                update = self._intake.take(record)
            except DecodeError:
                if self._on_error == "fail":
                    raise
                continue
            if update is not None:
                return update
        return None


async def _closes(reader: TopicReader) -> AsyncGenerator[None, None]:
    async with closed_after(reader.close):
        yield


async def last_update(
    topic: Topic, model: str, *, on_error: OnError = "fail", clock: Clock | None = None
) -> ModelUpdate | None:
    """Return the last complete update of ``model``, or None if the topic has no update of it.

    It reads back from the topic's end, so its time does not depend on the length of the history, unless the model was
    not published for a long time while others were. If a record *after* that update claims to be an update of the model
    and cannot be read, it raises :class:`~streamiter.errors.DecodeError` with topic, partition and offset; with
    ``on_error="skip"`` such records are ignored.
    """
    check_model_name(model)
    policy = checked_policy(on_error, topic, model)
    tail = await TailSearch(topic, model, clock or SystemClock()).run()
    if tail.error is not None and policy == "fail":
        raise tail.error
    return tail.update


def checked_policy(given: OnError, topic: Topic, model: str) -> OnError:
    """Return ``given``; ``ConfigurationError`` for a policy that does not exist."""
    if given not in ("fail", "skip"):
        raise ConfigurationError(f"model {model!r} of {topic.url}: expected on_error 'fail' or 'skip', given {given!r}")
    return given


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """Counts of the records of a model."""

    updates: int = 0
    """Updates that were given to the reader."""
    older: int = 0
    """Skipped updates that were not newer: updates of a superseded writer, and repetitions after a restart."""
    incomplete: int = 0
    """Updates that were skipped, because chunks were missing when a newer update arrived."""
    unreadable: int = 0
    """Records that claim to be of the model and cannot be read."""
    last_error: str | None = None
    """Why the last unreadable record could not be read."""

    def plus(self, later: UpdateStatistics) -> UpdateStatistics:
        """Return the sums of both counts."""
        return UpdateStatistics(
            updates=self.updates + later.updates,
            older=self.older + later.older,
            incomplete=self.incomplete + later.incomplete,
            unreadable=self.unreadable + later.unreadable,
            last_error=later.last_error if later.last_error is not None else self.last_error,
        )


class UpdateIntake:
    """Turns the records of a topic, one by one, into the updates of a model; keeps the chunks of incomplete updates.

    Use it in one task only.
    """

    def __init__(self, topic: Topic, model: str, wanted: Wanted | None = None) -> None:
        self._wanted = wanted
        """Which updates to read; the values of others are not decoded. None: all updates."""
        self._topic = topic
        self._model = model
        self._model_header = model.encode()
        self._assembler = ChunkAssembler()
        self._dropped_before = 0
        self._rank = NO_RANK
        self._updates = 0
        self._older = 0
        self._unreadable = 0
        self._last_error: str | None = None

    def take(
        self, record: TopicRecord, on_headers: Callable[[UpdateHeaders], None] | None = None
    ) -> ModelUpdate | None:
        """Return the update that ``record`` completes, if it is newer than all updates returned before; else None.

        ``on_headers`` is called with the headers of every record of the model, if they are readable.
        Raises :class:`~streamiter.errors.DecodeError` with topic, partition and offset for a record that claims to be
        of the model and cannot be read; the next record can be taken after it.
        """
        named = model_of(record.headers)
        is_of_model = is_key_of(self._model, record.key) if named is None else named == self._model_header
        if record.value is None or not is_of_model:
            return None
        try:
            headers = UpdateHeaders.parse(record.headers)
            if on_headers is not None:
                on_headers(headers)
            return self._newer(headers, record.value)
        except (ValueError, ModelError) as error:
            self._unreadable += 1
            self._last_error = (
                f"{self._topic.url}, partition {record.partition}, offset {record.offset}: expected an update of"
                f" model {self._model!r}: {error}"
            )
            raise DecodeError({0: self._last_error}) from error

    def restart(self, wanted: Wanted | None, update: ModelUpdate | None, error: DecodeError | None) -> None:
        """Take only wanted updates from now on, and restart the counts with this update and this unreadable record."""
        self._wanted = wanted
        self._updates, self._older, self._unreadable = int(update is not None), 0, int(error is not None)
        self._last_error = None if error is None else str(error)
        self._dropped_before = self._assembler.dropped

    @property
    def closed_chunks(self) -> int:
        """The number of chunks of incomplete updates whose last chunk has arrived."""
        return self._assembler.closed_chunks

    @property
    def statistics(self) -> UpdateStatistics:
        """The counts so far."""
        dropped = self._assembler.dropped - self._dropped_before
        return UpdateStatistics(self._updates, self._older, dropped, self._unreadable, self._last_error)

    def _newer(self, headers: UpdateHeaders, part: bytes) -> ModelUpdate | None:
        if headers.rank <= self._rank:
            self._older += headers.is_last
            return None
        if self._wanted is not None and not self._wanted(headers):
            self._rank = headers.rank if headers.is_last else self._rank
            return None
        value = part if headers.chunk is None else self._assembler.add(headers, part)
        if value is None:
            return None
        update = _decoded(headers, value)
        self._rank = headers.rank
        self._assembler.drop_up_to(headers.rank)
        self._updates += 1
        return update


def _decoded(headers: UpdateHeaders, value: bytes) -> ModelUpdate:
    document = decode_document(headers.content_type, value)
    if (document.model, document.rank) != (headers.model, headers.rank):
        raise ValueError(
            f"headers say update {shown_rank(headers.rank)} of {headers.model!r}, the value"
            f" {shown_rank(document.rank)} of {document.model!r}"
        )
    return update_of(document, headers.created_at_ms, headers.since_rollback, headers.rollback_to)


def update_of(
    document: Document, created_at_ms: int, since_rollback: Rank | None = None, rollback_to: Rank | None = None
) -> ModelUpdate:
    """Return the update of a document; its parameters are checked and read-only."""
    parameters = checked_parameters(document.parameters, "value")
    freeze_arrays(parameters)
    return ModelUpdate(
        document.model,
        *document.rank,
        document.epoch,
        created_at_ms,
        document.records,
        document.metrics,
        parameters,
        since_rollback,
        rollback_to,
    )


# A superseded writer may have written this many records after the newest update. At ten updates a second, 1,024 records
# are over a minute; a superseded writer that is fenced writes no records. 64 MiB are read in under a second.
_RECORDS: Final = 1024
_BYTES: Final = 64 * 1024 * 1024

# The number of writers whose records may be mixed with the chunks of an update; a writer writes all chunks at once.
_INTERLEAVED_WRITERS: Final = 4

# A new run deletes the chunks of at most this many updates: of the last update, and of earlier updates that crashes
# left. Chunks of more updates stay in the topic, and only take space.
_LEFTOVERS_MAX: Final = 1024

_Place = tuple[int, int]
"""Time stamp and offset: the place of a record, comparable also between partitions."""


class FoundUpdates(msgspec.Struct, frozen=True):
    """The result of a search from the end of a topic."""

    update: ModelUpdate | None
    """The last complete update."""
    error: DecodeError | None
    """Why a record after that update could not be read."""
    rank: Rank
    """The highest rank in any record of the model, also of an incomplete update; zeros without such records."""
    rollback: Rank
    """The rank of the last rollback that a record of the model names; zeros without one."""
    leftovers: list[ChunkSet]
    """The chunks that a new run deletes."""
    positions: dict[int, int]
    """The offset to continue reading at, by partition."""
    identities: Mapping[int, str]
    """The identities of the partitions that these offsets belong to."""


class _SeenChunks(msgspec.Struct):
    """An update in chunks, as far as the search has seen it."""

    count: int
    """The number of its chunks."""
    last_place: _Place
    """The latest place of a chunk that was read."""


class _PartitionTail:
    """The part of a partition that was read, from its end backwards."""

    def __init__(self, reading: BackwardReading) -> None:
        self.reading = reading
        self.records = 0
        self.size_bytes = 0
        self.oldest_ms: int | None = None

    def add(self, batch: TopicBatch) -> None:
        self.records += len(batch)
        self.size_bytes += sum(len(value) for value in batch.values if value is not None)
        first_ms = batch.timestamps_ms[0]
        self.oldest_ms = first_ms if self.oldest_ms is None else min(self.oldest_ms, first_ms)


class TailSearch:
    """Searches for the last update of a model, backwards from the end of its topic, in windows that grow.

    The end of a log is not always its newest update: a superseded writer may have written after the new writer, chunks
    may be in several windows, updates of other models may be between them, and a partition may be silent. So the search
    does not stop at the first update that it finds. It goes back in each partition until

    * it has read enough (``_RECORDS`` records or ``_BYTES`` bytes) and waits for no chunk, and
    * the records it reads are older than the update found,

    or until the partition's beginning. Each record is read once, a small batch at a time. Afterwards ``intake`` takes
    the records that follow: it has the chunks seen so far.
    """

    def __init__(self, topic: Topic, model: str, clock: Clock) -> None:
        self.intake = UpdateIntake(topic, model)
        self._topic = topic
        self._model = model
        self._clock = clock
        self._update: tuple[_Place, ModelUpdate] | None = None
        self._error: tuple[_Place, DecodeError] | None = None
        self._rank = self._rollback = NO_RANK
        self._chunk_sets: dict[Rank, _SeenChunks] = {}
        self._deleted: set[Rank] = set()

    async def run(self) -> FoundUpdates:
        """Search. Raises the errors of the topic, such as :class:`~streamiter.errors.TopicNotFound`."""
        description = await self._topic.describe()
        partitions = [
            _PartitionTail(BackwardReading(self._topic, description, number, self._clock, waits=False))
            for number in sorted(description.offsets)
        ]
        while unfinished := [partition for partition in partitions if not self._is_searched(partition)]:
            for partition in unfinished:
                await partition.reading.read_window(functools.partial(self._take, partition))
        is_before_update = self._error is not None and self._update is not None and self._error[0] < self._update[0]
        return FoundUpdates(
            update=self._update[1] if self._update else None,
            error=None if self._error is None or is_before_update else self._error[1],
            rank=self._rank,
            rollback=self._rollback,
            leftovers=self._leftovers(),
            positions={each.reading.number: each.reading.position for each in partitions},
            identities=description.identities,
        )

    def _is_searched(self, partition: _PartitionTail) -> bool:
        if partition.reading.is_at_beginning:
            return True
        if self._update is None or partition.oldest_ms is None:
            return False
        if partition.oldest_ms >= self._update[0][0]:
            return False
        chunks = self.intake.closed_chunks
        if chunks:  # All chunks are before the last chunk, mixed with records of a few other writers.
            return partition.records >= _RECORDS + _INTERLEAVED_WRITERS * chunks
        return partition.records >= _RECORDS or partition.size_bytes >= _BYTES

    def _take(self, partition: _PartitionTail, batch: TopicBatch) -> None:
        partition.add(batch)
        for record in batch.records():
            self._take_record(record)

    def _take_record(self, record: TopicRecord) -> None:
        place = (record.timestamp_ms, record.offset)
        if record.value is None:
            rank = deleted_rank(record.headers) if is_key_of(self._model, record.key) else None
            if rank is not None and len(self._deleted) < _LEFTOVERS_MAX:
                self._deleted.add(rank)
            return
        try:
            update = self.intake.take(record, functools.partial(self._note_headers, place))
        except DecodeError as error:
            if self._error is None or self._error[0] < place:
                self._error = (place, error)
            return
        if update is not None:
            seen = self._chunk_sets.get(update.rank)
            self._update = (place if seen is None else seen.last_place, update)

    def _note_headers(self, place: _Place, headers: UpdateHeaders) -> None:
        self._rank = max(self._rank, headers.rank)
        self._rollback = max(self._rollback, headers.since_rollback or NO_RANK)
        seen = self._chunk_sets.get(headers.rank)
        if seen is not None:
            seen.last_place = max(seen.last_place, place)
        elif headers.chunk is not None and len(self._chunk_sets) < _LEFTOVERS_MAX:
            self._chunk_sets[headers.rank] = _SeenChunks(headers.chunk.count, place)

    def _leftovers(self) -> list[ChunkSet]:
        ranks = sorted(rank for rank in self._chunk_sets if rank not in self._deleted)
        return [(*rank, self._chunk_sets[rank].count) for rank in ranks]
