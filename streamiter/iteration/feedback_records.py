"""Watching a loop from outside: what goes through its topic, as records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import DecodeError, PlainDataError
from streamiter.runtime.topic_feedback.message import DATA, Message
from streamiter.topics.topic import Headers, TopicBatch

__all__ = ["FeedbackRecords"]


@final
class FeedbackRecords:
    """A decoder for the topic of ``feedback_through``: ``flow.source(topic, decode=FeedbackRecords())``.

    Each record is a dict: ``run`` (that of the job), ``producer`` (the number of the subtask that feeds back),
    ``kind``, ``epoch`` (None for barriers and starts), ``is_copy`` (whether this control record is there only for who
    watches this partition) and ``records``: the batch that is fed back, empty for control records. A ``kind`` is
    ``"data"``, ``"watermark"`` (nothing more of this epoch comes from this producer), ``"end of data"``,
    ``"barrier"``, ``"suspend"`` or ``"start"``; that of a start has ``step``, the subtask by its name.

    ``structs``: the classes of ``msgspec.Struct`` that may be among the records.

    >>> import asyncio
    >>> from streamiter import Flow, IterationBodyResult, feedback_through, iterate_unbounded_streams
    >>> from streamiter.topics import MemoryBroker
    >>> topic = MemoryBroker().topic("loop")
    >>> asyncio.run(topic.create())
    >>> loop, watch = Flow("loop"), Flow("watch")
    >>> def body(variables, data):
    ...     back = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([feedback_through(back, topic)], [])
    >>> _ = iterate_unbounded_streams([loop.from_items([0])], [], body)
    >>> _ = loop.run()
    >>> fed_back = watch.source(topic, decode=FeedbackRecords(), stop="latest").collect()
    >>> _ = watch.run()
    >>> [(each["epoch"], each["records"]) for each in fed_back.items if each["kind"] == "data"]
    [(1, [1]), (2, [2])]
    """

    def __init__(self, structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._plain_data = PlainData(structs)

    def decode(self, batch: TopicBatch) -> list[dict[str, Any]]:
        """One dict for each record of the topic."""
        decoded: list[dict[str, Any]] = []
        failures: dict[int, str] = {}
        for index, (value, headers) in enumerate(zip(batch.values, batch.headers, strict=True)):
            try:
                decoded.append(self._record(batch.partition, value or b"", headers))
            except (ValueError, PlainDataError) as error:
                failures[index] = f"not what a loop feeds back: {error}"
        if failures:
            raise DecodeError(failures)
        return decoded

    def _record(self, partition: int, value: bytes, headers: Headers) -> dict[str, Any]:
        message = Message.of(headers)
        record = {
            "run": message.run,
            "producer": message.producer,
            "kind": message.kind,
            "epoch": message.epoch,
            "is_copy": message.kind != DATA and message.home != partition,
            "records": self._plain_data.decode_batch(value) if message.kind == DATA else [],
        }
        return {**record, "step": message.step} if message.step else record
