"""Streams with a mark for their loop: data that is replayed in every epoch, and feedback that goes through a topic.

The entrance of a replayed stream is a ``Replayer``: it keeps the records of epoch 0, in memory and on disk, and sends
them again whenever an epoch is complete. ``FeedbackRecords`` decodes the topic of feedback for a flow that watches the
loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NoReturn, final

import msgspec

from streamiter.engine.graph.feedback import AttachedBoundary
from streamiter.engine.graph.graph import Edge, Step
from streamiter.engine.tasks.topic_outgoing import DATA, Message
from streamiter.errors import CheckpointError, DecodeError, GraphError, PlainDataError
from streamiter.flow.stream import Stream
from streamiter.iteration.border import Entrance, JoinLoop
from streamiter.operators.declared_state import FIRST, GREATEST, Form, SharedOperator, again, declared
from streamiter.operators.operator import BoundaryOutput, Context
from streamiter.topics.topic import Headers, Topic, TopicBatch
from streamiter.values.deferred import entries_of
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, EpochWatermark, untimed

if TYPE_CHECKING:
    from streamiter.engine.storage.replay_cache import ReplayCache


class MarkedStream:
    """A stream with a mark, which only an iteration takes: it has none of the methods of a stream."""

    __slots__ = ("stream",)
    _use = ""
    """Where the user may pass it, for the error of any other use."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    if not TYPE_CHECKING:  # Type checkers know that it has no other attributes.

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            mark, _, _ = repr(self).partition("(")
            raise GraphError(
                f"{mark}: expected {self!r} to be one of the {self._use}, given .{name} of it; "
                f"use .{name} of the stream first, then {mark}(…)"
            )


def stream_of(given: Stream | MarkedStream) -> Stream:
    """Return the stream itself, without a mark."""
    return given.stream if isinstance(given, MarkedStream) else given


# -- replayed data -----------------------------------------------------------------------------------------


class Replayed(MarkedStream):
    """The result of :func:`replayed`: it can only be one of the ``data_streams`` of a bounded iteration."""

    __slots__ = ()
    _use = "data_streams of a bounded iteration"

    def __repr__(self) -> str:
        return f"replayed({self.stream.name!r})"


def replayed(stream: Stream) -> Replayed:
    """Send a data stream of a bounded iteration again in every epoch; source: FLIP-176's ``replay``.

    The entrance of the iteration keeps the records, in memory and above ``IterationConfig(replay_memory_bytes=…)`` on
    disk. In every epoch they arrive in the same order at the same subtask.

    Raises GraphError for a stream that never ends or that ``epochs_every`` has stamped.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("three times")
    >>> def body(variables, data):
    ...     rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
    ...     return IterationBodyResult([rounds], data)
    >>> [seen] = iterate_bounded_streams_until_termination(
    ...     [flow.from_items([0])], [replayed(flow.from_items([10, 20]))], body
    ... )
    >>> collected = seen.collect()
    >>> flow.run().state, collected.items
    ('finished', [10, 20, 10, 20, 10, 20])
    """
    if not isinstance(stream, Stream):
        raise GraphError(f"replayed: expected a stream, given {stream!r}; write replayed(stream)")
    if not stream.is_bounded:
        raise GraphError(
            f"replayed: expected a bounded stream, given {stream.name!r}, which never ends; read the topic with "
            'stop="latest", or pass it to an unbounded iteration without replayed(…)'
        )
    if any(step.stamped for step in stream.steps):
        raise GraphError(
            f"replayed: expected a stream without epochs, given {stream.name!r} of epochs_every; leave epochs_every "
            "out: replayed data has the epochs of the iteration"
        )
    return Replayed(stream)


class Replaying(SharedOperator, AttachedBoundary):
    """Base of the operators that keep records, in memory and on disk, and send them again batch by batch.

    Between two batches other tasks have a turn, and a checkpoint barrier can pass.
    """

    memory_bytes: int
    """The most bytes of records that are kept in memory."""
    cache: ReplayCache = declared(form=Form(methodcaller("snapshot")), share=again(()))
    position = declared(0, share=again(0))
    """The number of the kept batch that is sent next."""

    def open(self, context: Context) -> None:
        super().open(context)
        self._post = context.post
        self.cache = self.surroundings.make_replay_cache(self.memory_bytes)

    async def send_next(self, out: BoundaryOutput) -> None:
        """Send the next batch."""
        raise NotImplementedError

    def send_next_soon(self) -> None:
        """Send the next batch after a turn of the other tasks."""
        self._post(self.send_next)

    def close(self) -> None:
        self.cache.close()


class Replayer(Replaying, Entrance):
    """The entrance of a replayed stream: it keeps the records of epoch 0 and sends them again in every later epoch.

    If further epochs are requested during a replay, they are replayed after it one by one, and the end of the iteration
    follows them.
    """

    _replayed = declared(0, share=again(0))
    """The last epoch that was sent completely; initially epoch 0, when the data has ended."""
    _requested = declared(0, share=GREATEST)
    _terminate_in: int | None = declared(None, share=FIRST)
    """The epoch in which the iteration ends, while replays are left."""

    def __init__(self, join: JoinLoop, memory_bytes: int) -> None:
        super().__init__(join, stamped=False, max_epochs_ahead=None)
        self.memory_bytes = memory_bytes
        self._untaken: int | None = None
        """The last complete epoch that it was told and has not handled, while it waits for room."""

    def statistics(self) -> Mapping[str, int]:
        return {
            "replayed_records": self.cache.records,
            "replayed_bytes_in_memory": self.cache.bytes_in_memory,
            "replayed_bytes_on_disk": self.cache.bytes_on_disk,
        }

    def advance(self, epoch: int) -> None:
        if self._untaken is None:
            self._post(self._replay_up_to)
        self._untaken = epoch

    def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self.cache.append(records)
        super().on_batch(input_name, records, epoch, out)

    async def _replay_up_to(self, out: BoundaryOutput) -> None:
        assert self._untaken is not None
        self.last_complete = self.known_complete = self._untaken
        self._untaken = None
        has_finished = self._requested == self._replayed
        self._requested = max(self._requested, self.last_complete)
        if has_finished:
            await self.send_next(out)

    async def _terminate(self, epoch: int, out: BoundaryOutput) -> None:
        if self._requested > self._replayed:
            self._terminate_in = epoch
        else:
            await super()._terminate(epoch, out)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Tell the body that epoch 0 is over; its data does not end, because other epochs follow."""
        await out.control(EpochWatermark(0))

    async def send_next(self, out: BoundaryOutput) -> None:
        if self._requested > self._replayed:
            epoch = self._replayed + 1
            if self.position < len(self.cache):
                out.emit_batch(self.cache.batch(self.position), epoch)
                self.position += 1
            if self.position == len(self.cache):
                await out.control(EpochWatermark(epoch))
                self._replayed = epoch
                self.position = 0
        if self._requested > self._replayed:
            self.send_next_soon()
        elif self._terminate_in is not None:
            await self._terminate(self._terminate_in, out)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self._requested > self._replayed:
            self.send_next_soon()

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Distribute the batches in turn: first the batches that the current replay has sent, then the others."""
        shared = super().redistribute(states, parallelism)
        with_data = [state for state in states if any(True for _ in state["cache"])] or states
        replayed = min(state["replayed"] for state in with_data)
        terminates = {state["terminate in"] for state in states}
        # A share can state how many of its batches were sent of one epoch, but not of two.
        further = [state for state in with_data if (state["replayed"], state["position"]) > (replayed + 1, 0)]
        if shared[0]["ended in"] is None and (len(terminates) > 1 or further):
            raise CheckpointError("some of them have sent more of the replayed data than others")
        sent = [state["position"] if state["replayed"] == replayed else None for state in states]
        caches = [state["cache"] for state in states]
        return [
            {
                **state,
                "cache": (share := _ReplayShare(caches, sent, subtask, parallelism)),
                "replayed": replayed,
                "position": share.count_sent() if state["requested"] > replayed else 0,
            }
            for subtask, state in enumerate(shared)
        ]


@final
class _ReplayShare:
    """The batches of one new subtask, as frames of the snapshot of a cache."""

    def __init__(
        self, caches: Sequence[Iterable[Any]], sent: Sequence[int | None], subtask: int, subtasks: int
    ) -> None:
        """``sent`` is the number of batches of each cache that were sent; None for all."""
        self.caches = caches
        self._sent = sent
        self._subtask = subtask
        self._subtasks = subtasks

    def __iter__(self) -> Iterator[list[Any]]:
        for entry in chain(self._dealt(are_sent=True), self._dealt(are_sent=False)):
            yield [entry]

    def count_sent(self) -> int:
        """Return how many of its batches were sent; they are the first ones."""
        return sum(1 for _ in self._dealt(are_sent=True))

    def _dealt(self, *, are_sent: bool) -> Iterator[Any]:
        return islice(self._batches(are_sent=are_sent), self._subtask, None, self._subtasks)

    def _batches(self, *, are_sent: bool) -> Iterator[Any]:
        for frames, sent in zip(self.caches, self._sent, strict=True):
            if are_sent:
                yield from islice(entries_of(frames), sent)
            elif sent is not None:
                yield from islice(entries_of(frames), sent, None)


# -- feedback through a topic --------------------------------------------------------------------------------


class FeedbackThrough(MarkedStream):
    """The result of :func:`feedback_through`: it can only be one of the ``feedback_variable_streams``."""

    __slots__ = ("topic",)
    _use = "feedback_variable_streams that a body returns"

    def __init__(self, stream: Stream, topic: Topic) -> None:
        super().__init__(stream)
        self.topic = topic

    def __repr__(self) -> str:
        return f"feedback_through({self.stream.name!r}, {self.topic.url})"


def feedback_through(stream: Stream, topic: Topic) -> FeedbackThrough:
    """Send a feedback stream through a topic: other programs can watch the loop.

    The topic must exist, have at least one partition for each subtask of the variable stream, and be used by this
    feedback stream only. Records of earlier runs are skipped, so the topic need not keep records longer than they wait
    to be handled; if the topic drops a record earlier, the job fails. Records are plain data.
    :class:`streamiter.iteration.FeedbackRecords` reads the topic from outside.

    Order, epochs, ends and ``max_epochs_ahead`` are as in memory, and so are snapshots of the job: each contains the
    pending feedback. No step waits for the topic: feedback that is not written waits in memory and then on disk, within
    the ``feedback_limits`` of the iteration. Feedback for which the head has no memory stays in the topic.

    Raises GraphError for an argument that is no stream or no topic.

    >>> from streamiter import Flow, IterationBodyResult, iterate_unbounded_streams
    >>> from streamiter.topics import MemoryBroker
    >>> import asyncio
    >>> topic = MemoryBroker().topic("loop")
    >>> asyncio.run(topic.create())
    >>> flow = Flow("count")
    >>> def body(variables, data):
    ...     counted = variables[0].map(lambda n: n + 1)
    ...     return IterationBodyResult([feedback_through(counted.filter(lambda n: n < 3), topic)], [counted])
    >>> [counted] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    >>> collected = counted.collect()
    >>> flow.run().state, collected.items
    ('finished', [1, 2, 3])
    """
    if not isinstance(stream, Stream):
        raise GraphError(
            f"feedback_through: expected a stream, given {stream!r}; write feedback_through(stream, topic(…))"
        )
    if not isinstance(topic, Topic):
        raise GraphError(
            f'feedback_through: expected a topic, given {topic!r}; write feedback_through(stream, topic("kafka://…"))'
        )
    if getattr(topic, "bounded", False):
        raise GraphError(
            f"feedback_through: expected a topic with partitions and headers, given {topic.url}; use one of Kafka, "
            "of an SQLite file or in memory"
        )
    return FeedbackThrough(stream, topic)


def check_topic_is_free(head: Step, edges: Sequence[Edge], topic: Topic, steps: Sequence[Step]) -> None:
    """Raise GraphError if another feedback stream goes through the same topic."""
    for step in steps:
        for edge in step.inputs:
            other = edge.feedback_topic
            if other is not None and (other.commit_domain, other.name) == (topic.commit_domain, topic.name):
                raise GraphError(
                    f"feedback_through: expected a topic of its own for the feedback to {head.name!r} "
                    f"({edges[0].upstream.name!r}), given {topic.url}, which already has the feedback of "
                    f"{edge.upstream.name!r}; create a topic for each feedback stream"
                )


@final
class FeedbackRecords:
    """A decoder for the topic of ``feedback_through``: ``flow.source(topic, decode=FeedbackRecords())``.

    Each record is a dict with these keys:

    - ``run``: the run of the job.
    - ``producer``: the number of the subtask that feeds back.
    - ``kind``: ``"data"``, ``"watermark"`` (the producer sends no more records of this epoch), ``"end of data"``,
      ``"barrier"``, ``"suspend"`` or ``"start"``. A start also has the key ``step``, the name of the subtask.
    - ``epoch``: None for barriers and starts.
    - ``is_copy``: whether this control record exists only for programs that watch this partition.
    - ``records``: the batch that is fed back, empty for control records.

    ``structs`` are the classes of ``msgspec.Struct`` that may be among the records.

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
        """Return one dict for each record of the topic."""
        decoded: list[dict[str, Any]] = []
        failures: dict[int, str] = {}
        for index, (value, headers) in enumerate(zip(batch.values, batch.headers, strict=True)):
            try:
                decoded.append(self._record(batch.partition, value or b"", headers))
            except (ValueError, PlainDataError) as error:
                failures[index] = f"not a feedback record of a loop: {error}"
        if failures:
            raise DecodeError(failures)
        return decoded

    def _record(self, partition: int, value: bytes, headers: Headers) -> dict[str, Any]:
        message = Message.from_headers(headers)
        record = {
            "run": message.run,
            "producer": message.producer,
            "kind": message.kind,
            "epoch": message.epoch,
            "is_copy": message.kind != DATA and message.home != partition,
            "records": untimed(self._plain_data.decode_batch(value)) if message.kind == DATA else [],
        }
        return {**record, "step": message.step} if message.step else record
