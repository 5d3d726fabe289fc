"""The ends of a flow in a task: the feeder that reads a source, and the encoding for a sink in another process.

A :class:`Feeder` reads batches ahead of need into a channel of the source's task. :class:`EventTimeInput` tells the
step of ``event_time`` how far they have been read.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar, final

from streamiter.engine.graph.channels import Channel, Intake
from streamiter.engine.graph.graph import Step
from streamiter.engine.graph.statistics import SourceStatistics
from streamiter.engine.tasks.entries import EntryCounts, by_batch
from streamiter.engine.tasks.failures import FailuresOf, StepNote, call_unless_cancelled, noted
from streamiter.errors import ConfigurationError, shortened
from streamiter.operators.event_time import PartState
from streamiter.operators.functions import rows_if_table
from streamiter.operators.operator import Context
from streamiter.operators.output import DEAD_LETTERS, Output, RecordFailure, trace_origins
from streamiter.operators.source import Positions, Source, SourceBatch, TellsEnd
from streamiter.topics.source_and_sink import DecodeValues, TopicSink
from streamiter.values.helpers.clock import Clock
from streamiter.values.origins import BatchAtHand, BatchOrigin
from streamiter.values.records import Batch, Control, EndOfInput, ReadToEnd

T = TypeVar("T")


# How often the end of a topic is found again. Each time there is as much to read as has arrived since the last time. So
# if the source reads five times as fast as the topic grows, all takes 1.25 times as long; if twice as fast, 1.9 times.
_FURTHER_ENDS_MAX: Final = 4


@final
class Feeder:
    """Reads a source into a channel of the source's task, in an asyncio task of its own.

    The task handles everything that was read. The caller of ``stop`` chooses the control record that follows.
    """

    def __init__(
        self,
        source: Source,
        channel: Channel,
        step: str,
        clock: Clock,
        *,
        is_awaited: bool = False,
        note: StepNote | None = None,
    ) -> None:
        """``is_awaited``: a step waits until the source has read to its end, or to an end that it tells."""
        self.channel = channel
        self._clock = clock
        self.intake = Intake()
        """Shut by a channel downstream while its reader holds too many records."""
        self.source = source
        self._step = step
        self._note = note
        self.is_idle = False
        """Whether the source brings nothing for now. It is known after ``open``."""
        self.is_awaited = is_awaited
        """Whether a step still waits for records that the source has not read yet."""
        self._when_read: list[Callable[[], object]] = []
        self._opened = False
        self._is_reading = False
        self._stopped = False
        self._then: Control = EndOfInput()
        self._running: asyncio.Task[None] | None = None
        self._last_lag: Mapping[int, int] = {}
        self._last_statistics = SourceStatistics(source.topic_name, None, 0.0, {}, None, source.brings_events)
        self._carriers: set[type] = {list}
        """Types of batches that the source has brought and that are no tables."""

    async def open(self, context: Context, positions: Positions | None) -> Positions:
        """Open the source; return the positions where it starts."""
        return await noted(self._open(context, positions), self._step, self._note)

    async def _open(self, context: Context, positions: Positions | None) -> Positions:
        self._opened = True
        with FailuresOf(self._step):
            result = self.source.open(context, positions)
            if inspect.isawaitable(result):
                await result
            self.is_idle = self.source.is_idle()
            return self.source.positions()

    def start(self, group: asyncio.TaskGroup) -> None:
        reading = call_unless_cancelled(lambda: noted(self._run(), self._step, self._note), self._step)
        self._running = group.create_task(reading, name=f"feed {self.channel.name}")

    def stop(self, then: Control) -> None:
        """Read no more; ``then`` follows the records that were read. Only the first call has an effect.

        A job stops all of its sources in the same order. A later ``then`` could replace the first one only at sources
        that have not sent it yet: after a restart, some sources would have ended and others would not.
        """
        if self._stopped:
            return
        self._stopped = True
        self._then = then
        if self._is_reading:
            assert self._running is not None
            self._running.cancel()

    def when_read(self, f: Callable[[], object]) -> None:
        """Call ``f`` when no step waits for this source any more; never if the source is stopped before."""
        self._when_read.append(f)

    async def _run(self) -> None:
        tells_end = isinstance(self.source, TellsEnd) and self.source.tells_end
        await self._read_all()
        if isinstance(self.source, TellsEnd) and tells_end:
            await self._read_changes(self.source)
        self.is_awaited = False
        if not self._stopped:
            for f in self._when_read:
                f()
        if tells_end and not self._stopped:
            self.channel.put_control(ReadToEnd())
            await self._read_all()
        self.channel.put_control(self._then)

    async def _read_changes(self, source: TellsEnd) -> None:
        """Read on to the end that the topic has now, and again while records have arrived meanwhile.

        In a compacted topic such a record may have replaced one that was not read yet, before the end that was found.
        A table that is read to that end would lack the key.
        """
        for _ in range(_FURTHER_ENDS_MAX):
            if self._stopped or await self._unless_stopped(source.read_on):
                return
            await self._unless_stopped(source.find_end)
            await self._read_all()
        if not self._stopped:
            await self._unless_stopped(source.read_on)

    async def _read_all(self) -> None:
        while not self._stopped and (batch := await self._unless_stopped(self._read)) is not None:
            # The channel uses only the records of the batch.
            while not self.channel.try_put(batch):  # type: ignore[arg-type]
                await self.channel.wait_for_room()
            # A source that always has records must give way to other tasks.
            await asyncio.sleep(0)

    async def _read(self) -> SourceBatch | None:
        """Return the next batch, or None at the end of the source."""
        await self.intake.wait()
        batch = self.source.read()
        return self._checked((await batch) if inspect.isawaitable(batch) else batch)

    async def _unless_stopped(self, use: Callable[[], Awaitable[T]]) -> T | None:
        """Use the source; return None if ``stop`` has ended that."""
        self._is_reading = True
        try:
            return await use()
        except asyncio.CancelledError:
            if self._stopped and self._running is not None and self._running.uncancel() == 0:
                return None
            raise
        except Exception as error:
            raise RecordFailure(self._step) from error
        finally:
            self._is_reading = False

    def _checked(self, batch: object) -> SourceBatch | None:
        if batch is None:
            return None
        if isinstance(batch, SourceBatch):
            if type(batch.records) not in self._carriers:
                batch.records = rows_if_table(f"{type(self.source).__name__}.read", batch.records)
                self._carriers.add(type(batch.records))
            return batch
        raise ConfigurationError(
            f"{type(self.source).__name__}.read: expected a SourceBatch, or None at the end, given "
            f"{shortened(batch)}; return SourceBatch(records, positions)"
        )

    async def close(self) -> None:
        """Close the source, if it was opened."""
        if not self._opened:
            return
        self._last_lag, self._last_statistics = self.lag(), self.statistics()
        self._opened = False
        with FailuresOf(self._step):
            result = self.source.close()
            if inspect.isawaitable(result):
                await result

    async def report_positions(self, group: str, positions: Positions) -> None:
        """Report the positions of a checkpoint through the source, for tools that show lag."""
        result = self.source.report_positions(group, positions)
        if inspect.isawaitable(result):
            await result

    def redistribute(self, positions: Sequence[Positions], parallelism: int) -> Sequence[Positions] | None:
        """Return the positions for another number of subtasks, or None if the source cannot give them."""
        redistribute = getattr(self.source, "redistribute", None)
        return None if redistribute is None else redistribute(positions, parallelism)

    def parts(self, handled: Positions) -> Mapping[int | None, PartState]:
        """Return how far each partition has been read; ``handled`` are the positions behind the handled records."""
        parts = self.source.parts(handled)
        if parts is None:
            is_at_end = self._is_reading and self.channel.peek() is None and not any(self.source.lag().values())
            return {None: PartState.AT_END if is_at_end else PartState.READING}
        return parts

    def statistics(self) -> SourceStatistics:
        """Return the state of the source now, or before it was closed."""
        if not self._opened:
            return self._last_statistics
        since_s = self.source.unanswered_since_s()
        unanswered_s = 0.0 if since_s is None else self._clock.monotonic_s() - since_s
        now_ms, read_ms = self._clock.now_ms(), self.source.timestamps_ms()
        return SourceStatistics(
            topic=self.source.topic_name,
            answered_at_ms=now_ms - round(1000 * unanswered_s),
            unanswered_s=unanswered_s,
            lag_s={
                str(part): max(0, now_ms - read_ms[part]) / 1000 if left else 0.0
                for part, left in self.source.lag().items()
                if read_ms.get(part, 0) > 0
            },
            read_records=self.source.read_records(),
            brings_events=self.source.brings_events,
        )

    def lag(self) -> Mapping[int, int]:
        """Return the lag of the source, or its last lag before it was closed."""
        return dict(self.source.lag()) if self._opened else self._last_lag


@final
class EventTimeInput:
    """What a step that assigns event time knows of the input of its task."""

    def __init__(
        self, parts: Callable[[], Mapping[int | None, PartState]], decoder: DecodeValues | None, *, by_partition: bool
    ) -> None:
        """``by_partition``: the partition of a record is known, since all steps before are record by record."""
        self._parts = parts
        self._decoder = decoder
        self._by_partition = by_partition

    def parts(self) -> Mapping[int | None, PartState]:
        parts = self._parts()
        if self._by_partition or not parts:
            return parts
        return {None: PartState.READING if PartState.READING in parts.values() else PartState.AT_END}

    def timestamps_ms(self) -> Sequence[int]:
        assert self._decoder is not None, "the flow checks it"
        assert self._decoder.decoded is not None
        return self._decoder.decoded.timestamps_ms


@final
class SinkEncoding:
    """Encodes the records of this process for a sink in process 0, so that bytes cross the link, and not records.

    A record that cannot be encoded ends the job here, or goes to the sink as a dead letter; the sink then refuses the
    record as the policy of its step says.
    """

    def __init__(self, step: Step, sink: TopicSink) -> None:
        self._sink = sink
        self._out = Output(step.name, "fail" if step.policy == "fail" else "dead_letter")
        self._emitted: list[Batch] = []
        self._out.connect(self._emitted.append, None)
        self._out.connect(self._emitted.append, DEAD_LETTERS)
        self._at_hand = BatchAtHand()
        trace_origins(self._out, self._at_hand, "no origin")
        self._entry = by_batch(sink.encode, self._out, EntryCounts())

    async def open(self) -> None:
        with FailuresOf(self._out.step):
            await self._sink.ask_for_limit(self._out)

    def __call__(self, batch: Batch, origin: BatchOrigin | None) -> Sequence[Batch]:
        """Return the records of ``origin`` as they are written, and the letters of refused records."""
        self._at_hand.origin, self._at_hand.records = origin, batch
        self._entry(batch)
        emitted = tuple(self._emitted)
        self._emitted.clear()
        return emitted
