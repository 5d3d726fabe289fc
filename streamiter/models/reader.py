"""Reading model updates from a topic: ``model_updates`` follows a model, ``last_update`` finds its newest update.

Followers and the search both use :class:`~streamiter.models.intake.UpdateIntake`. :class:`TailSearch` reads back from
the end of the topic, so its time does not depend on the length of the history.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import msgspec

from streamiter.errors import ConfigurationError, DecodeError, OffsetOutOfRange
from streamiter.models.intake import UpdateIntake, UpdateStatistics, Wanted
from streamiter.models.update import (
    NO_RANK,
    ChunkSet,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    check_model_name,
    deleted_rank,
    is_change,
    is_key_of,
)
from streamiter.topics.compacted import READ_RECORDS, BackwardReading
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch, TopicReader, TopicRecord
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.helpers.files import in_thread
from streamiter.values.numbers import one_of

if TYPE_CHECKING:  # Most followers have the model in memory.
    from streamiter.models.model_folder import ModelFolder

OnError = Literal["fail", "skip"]
"""For an unreadable update: ``"fail"`` raises an error with topic, partition and offset; ``"skip"`` counts it."""

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
        state: bool = True,
        folder: ModelFolder | None = None,
    ) -> None:
        """``state``: whether parameters have the state of the learner, if their version carries it.

        With ``folder``, reading from the newest update starts behind the version there, and each update is kept there.
        """
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
        self._state = state
        self._folder = folder
        self._identities: Mapping[int, str] = {}
        self._positions: dict[int, int] = {}
        """The next offset by partition, behind the records that were taken; only with a folder."""
        self._intake = UpdateIntake(topic, model, wanted, state=state)
        self._found: deque[ModelUpdate | DecodeError] = deque()
        self._records: Iterator[TopicRecord] = iter(())
        self._reader: TopicReader | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._is_closed = False
        self._may_begin_inside_chain = start not in ("earliest", "latest_model")

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
            if (update := await self._next_at_hand()) is not None:
                return update
            batch = await reader.read()
            if batch is None:
                await self.aclose()
                raise StopAsyncIteration
            records = batch.records()
            if self._may_begin_inside_chain:
                await self._look_back(records)
            self._records = iter(records)

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
        if self._folder is not None and (resumed := await self._resumed(request, self._folder)) is not None:
            return resumed
        search = TailSearch(self._topic, self._model, self._clock, state=self._state)
        tail = await search.run()
        self._intake = search.intake
        if self._wanted is not None:
            self._intake.chain.forget(NO_RANK)  # No change of it is wanted.
        self._intake.restart(self._wanted, tail.update, tail.error)
        self._identities, self._positions = tail.identities, tail.positions
        if tail.update is not None:
            self._found.append(await in_thread(self._kept, tail.update) if self._folder else tail.update)
        if tail.error is not None and self._on_error == "fail":
            self._found.append(tail.error)
        return replace(request, positions=tail.positions, identities=tail.identities)

    async def _resumed(self, request: ReadRequest, folder: ModelFolder) -> ReadRequest | None:
        """Read what came after the version in the folder; None if that is not known: records between are missing."""
        if (kept := folder.kept) is None or kept.reading is None:
            return None
        positions, identities = kept.reading
        intake = UpdateIntake(self._topic, self._model, state=self._state, applies=False)
        intake.resume(kept.update, kept.place)
        update: ModelUpdate | None = kept.update
        request = replace(request, positions=positions, identities=identities)
        try:
            reader = await self._topic.open_reader(replace(request, stop="latest"))
            async with closed_after(reader.close):
                while (batch := await reader.read()) is not None:
                    update = await in_thread(_last_of, intake, batch.records()) or update
                self._identities, self._positions = reader.identities(), dict(reader.positions())
            update = await in_thread(intake.caught_up) or update
        except (OffsetOutOfRange, DecodeError):
            return None
        if intake.chain.waits or update is None:
            return None
        self._intake = intake
        intake.restart(self._wanted, update, None)
        self._found.append(update if update is kept.update else await in_thread(self._kept, update))
        return replace(request, positions=self._positions, identities=self._identities)

    def _kept(self, update: ModelUpdate) -> ModelUpdate:
        """Return the update as it is in the folder, which has it then."""
        if self._folder is None:
            return update
        reading = None if self._intake.waits else (dict(self._positions), dict(self._identities))
        return self._folder.keep(update, self._intake.chain, reading)

    async def _look_back(self, records: Sequence[TopicRecord]) -> None:
        """Find the updates before the first record of the model, if that is a change: it applies to them."""
        first = next((record for record in records if self._intake.is_of_model(record)), None)
        if first is None:
            return
        self._may_begin_inside_chain = False
        if is_change(first.headers):
            search = TailSearch(self._topic, self._model, self._clock, before=first, state=self._state)
            await search.run()
            self._intake = search.intake
            self._intake.restart(self._wanted, None, None)

    async def _next_at_hand(self) -> ModelUpdate | None:
        while not self._found:
            if (record := next(self._records, None)) is None:
                return None
            if self._intake.takes_long(record):
                # Other tasks of the event loop predict meanwhile.
                await in_thread(self._take, record)
            else:
                self._take(record)
        found = self._found.popleft()
        if isinstance(found, DecodeError):
            raise found
        return found

    def _take(self, record: TopicRecord) -> None:
        try:
            update = self._intake.take(record)
        except DecodeError as error:
            if self._on_error == "fail":
                self._found.append(error)
            return
        if self._folder is not None:
            self._positions[record.partition] = record.offset + 1
        if update is not None:
            self._found.append(self._kept(update))


def _last_of(intake: UpdateIntake, records: Sequence[TopicRecord]) -> ModelUpdate | None:
    """Take the records; return the last update that is no change."""
    update = None
    for record in records:
        update = intake.take(record) or update
    return update


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
    ``on_error="skip"`` such records are ignored. Changes after that update whose base the topic does not have are
    skipped, and the log ``streamiter.models`` says so.
    """
    check_model_name(model)
    policy = checked_policy(on_error, topic, model)
    search = TailSearch(topic, model, clock or SystemClock())
    tail = await search.run()
    search.intake.tell_gap()
    if tail.error is not None and policy == "fail":
        raise tail.error
    return tail.update


def checked_policy(given: OnError, topic: Topic, model: str) -> OnError:
    """Return ``given``; ``ConfigurationError`` for a policy that does not exist."""
    one_of(f"model {model!r} of {topic.url}, on_error=", given, "fail", "skip")
    return given


# A superseded writer may have written this many records after the newest update. At ten updates a second, 1,024 records
# are over a minute; a superseded writer that is fenced writes no records. 64 MiB are read in under a second.
_RECORDS: Final = 1024
_BYTES: Final = 64 * 1024 * 1024

# The number of writers whose records may be mixed with the chunks of an update; a writer writes all chunks at once.
_INTERLEAVED_WRITERS: Final = 4

# A new run deletes the chunks and changes of at most this many updates: of the last chain, which has 1,000, and of
# earlier updates that crashes left. Records of more updates stay in the topic, and only take space.
_LEFTOVERS_MAX: Final = 4096

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
    """The chunks and changes that a new run deletes."""
    positions: dict[int, int]
    """The offset to continue reading at, by partition."""
    identities: Mapping[int, str]
    """The identities of the partitions that these offsets belong to."""


class _SeenRecords(msgspec.Struct):
    """An update whose records have keys of their own, as far as the search has seen it."""

    count: int
    """The number of these keys."""
    last_place: _Place
    """The latest place of a record that was read."""


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

    def __init__(
        self, topic: Topic, model: str, clock: Clock, *, before: TopicRecord | None = None, state: bool = True
    ) -> None:
        """``before``: search the part of its partition before this record, instead of the topic."""
        self.intake = UpdateIntake(topic, model, state=state, applies=False)
        self._topic = topic
        self._model = model
        self._clock = clock
        self._before = before
        self._update: tuple[_Place, ModelUpdate] | None = None
        self._error: tuple[_Place, DecodeError] | None = None
        self._rank = self._rollback = NO_RANK
        self._chunk_sets: dict[Rank, _SeenRecords] = {}
        self._deleted: set[Rank] = set()

    async def run(self) -> FoundUpdates:
        """Search. Raises the errors of the topic, such as :class:`~streamiter.errors.TopicNotFound`."""
        description = await self._topic.describe()
        if (before := self._before) is not None:
            offsets = {number: (first, first) for number, (first, _) in description.offsets.items()}
            offsets[before.partition] = (offsets[before.partition][0], before.offset)
            description = replace(description, offsets=offsets)
        partitions = [
            _PartitionTail(BackwardReading(self._topic, description, number, self._clock, waits=before is not None))
            for number in sorted(description.offsets)
        ]
        while unfinished := [partition for partition in partitions if not self._is_searched(partition)]:
            for partition in unfinished:
                await partition.reading.read_window(functools.partial(self._take, partition))
        self._apply_changes()
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

    def _apply_changes(self) -> None:
        place = self._update[0] if self._update is not None else (0, 0)
        try:
            update = self.intake.caught_up()
        except DecodeError as error:
            self._error = (max(place, self._error[0] if self._error is not None else place), error)
            return
        if update is not None:
            seen = self._chunk_sets.get(update.rank)
            self._update = (place if seen is None else seen.last_place, update)

    def _is_searched(self, partition: _PartitionTail) -> bool:
        if partition.reading.is_at_beginning:
            return True
        if self.intake.chain.waits_for_base or self._update is None or partition.oldest_ms is None:
            return False
        if partition.oldest_ms >= self._update[0][0]:
            return False
        chunks = self.intake.chunks.closed_chunks
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
        elif headers.own_keys and len(self._chunk_sets) < _LEFTOVERS_MAX:
            self._chunk_sets[headers.rank] = _SeenRecords(headers.own_keys, place)

    def _leftovers(self) -> list[ChunkSet]:
        ranks = sorted(rank for rank in self._chunk_sets if rank not in self._deleted)
        return [(*rank, self._chunk_sets[rank].count) for rank in ranks]
