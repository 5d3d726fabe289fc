"""Following a model: ``async for update in model_updates(topic(...), model="ctr")``."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Literal, Self

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, DecodeError
from streamiter.models.last import OnError, TailSearch, UpdateIntake, UpdateStatistics, checked_policy
from streamiter.models.update import ModelUpdate, check_model_name
from streamiter.topics.compacted import READ_RECORDS
from streamiter.topics.topic import ReadRequest, StartPosition, Topic, TopicReader, TopicRecord

__all__ = ["ModelUpdates", "UpdateStart", "model_updates"]

UpdateStart = Literal["earliest", "latest", "latest_model"] | Mapping[int, int] | datetime
"""Where following begins: as for any topic, or with the newest complete update (``"latest_model"``)."""


def model_updates(
    topic: Topic,
    model: str,
    *,
    start: UpdateStart = "earliest",
    follow: bool = True,
    on_error: OnError = "fail",
    clock: Clock | None = None,
) -> ModelUpdates:
    """The updates of ``model`` in ``topic``, an async iterator that connects when it is first asked
    (or entered by ``async with``).

    ``start="latest_model"`` begins with the newest complete update, whatever its age, and goes on with
    what comes; the other starts are those of any topic. With ``follow=False`` it ends at the end that the
    topic has when it is opened.

    Generation and version never go back: older updates and repetitions are skipped and counted, as are
    updates whose chunks are not all there. Records of other models are passed over. A record that claims
    to be of this model and cannot be read raises :class:`~streamiter.errors.DecodeError` with topic,
    partition and offset, after which the iteration can go on; with ``on_error="skip"`` it is counted.

    >>> import asyncio, numpy as np
    >>> from streamiter.clock import SystemClock
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
    """An iterator over the updates of one model; made by :func:`model_updates`.

    Used by one task. Waiting for the next update may be cancelled and taken up again; nothing is lost.
    It lets go of the topic at the end of the iteration, with ``aclose()``, at the end of
    ``async with model_updates(...) as updates``, or when it is dropped, as after ``break``.
    """

    def __init__(
        self, topic: Topic, model: str, start: UpdateStart, follow: bool, on_error: OnError, clock: Clock
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
        self._intake = UpdateIntake(topic, model)
        self._found: deque[ModelUpdate | DecodeError] = deque()
        self._records: Iterator[TopicRecord] = iter(())
        self._reader: TopicReader | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._is_closed = False

    def statistics(self) -> UpdateStatistics:
        """What became of the records so far."""
        return self._intake.statistics

    @property
    def identities(self) -> Mapping[int, str]:
        """Of the topic that is open, as :meth:`streamiter.topics.TopicReader.identities`; empty while none is."""
        return {} if self._reader is None else self._reader.identities()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ModelUpdate:
        if self._is_closed:
            raise StopAsyncIteration
        reader = self._reader if self._reader is not None else await self._open()
        while True:
            update = self._next_at_hand()
            if update is not None:
                return update
            batch = await reader.read()
            if batch is None:
                await self.aclose()
                raise StopAsyncIteration
            self._records = iter(batch.records())

    async def aclose(self) -> None:
        """Let go of the topic. May be called more than once."""
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
        request = await self._request()
        self._reader = await self._topic.open_reader(request)
        # An iterator that is dropped by `break` cannot wait for its reader to close. A suspended async
        # generator can: the event loop closes it when it is collected, and at the latest at its own end.
        self._closer = _closes(self._reader)
        await anext(self._closer)
        return self._reader

    async def _request(self) -> ReadRequest:
        stop: Literal["latest"] | None = None if self._follow else "latest"
        if self._start != "latest_model":
            return self._request_from(self._start, stop)
        search = TailSearch(self._topic, self._model, self._clock)
        tail = await search.run()
        error = tail.error
        search.intake.restart_counts(
            updates=int(tail.update is not None),
            unreadable=int(error is not None),
            last_error=str(error) if error is not None else None,
        )
        self._intake = search.intake
        if tail.update is not None:
            self._found.append(tail.update)
        if error is not None and self._on_error == "fail":
            self._found.append(error)
        return replace(
            self._request_from("earliest", stop), positions=tail.positions, identities=tail.identities
        )

    def _request_from(self, start: StartPosition, stop: Literal["latest"] | None) -> ReadRequest:
        return ReadRequest(start=start, stop=stop, max_records=READ_RECORDS, clock=self._clock)

    def _next_at_hand(self) -> ModelUpdate | None:
        if self._found:
            found = self._found.popleft()
            if isinstance(found, DecodeError):
                raise found
            return found
        for record in self._records:
            update = self._taken(record)
            if update is not None:
                return update
        return None

    def _taken(self, record: TopicRecord) -> ModelUpdate | None:
        try:
            return self._intake.take(record)
        except DecodeError:
            if self._on_error == "fail":
                raise
            return None


async def _closes(reader: TopicReader) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await reader.close()
