"""The output of an operator: where it emits records, and where it refuses them.

A step has a policy for refused records: the job fails, the record is skipped, or it becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal, NoReturn, TypeVar, final

import numpy as np

from streamiter.errors import ConfigurationError, described, shortened
from streamiter.operators.event_timers import StepTimes, checked_time
from streamiter.operators.functions import FunctionResultError, rows_if_table
from streamiter.values.origins import BatchAtHand, BatchOrigin, Originals, Passes, RowNumbers, place_of
from streamiter.values.records import Batch, Columns, EventTimeWatermark, Order, OutputTag, TimedBatch, take, untimed
from streamiter.values.times import MIN_TIME, Times

T = TypeVar("T")

Receiver = Callable[[Batch], object]
"""Receives a batch: the next operator of the chain, or the writer of a channel."""

# Single emitted records are gathered into batches of at most this many: large enough that the cost of a hop (about 2
# µs) is small, small enough that the output of one call stays in the CPU cache.
_GATHER_RECORDS: Final = 1024

_BATCHES: Final = frozenset({list, np.ndarray, Columns, TimedBatch})


class Output:
    """Takes the records that an operator emits or refuses. Every method that may emit receives it.

    ``emit(record)`` gathers records; the engine sends them when the call returns, or earlier when many have gathered.
    ``emit_batch(batch)`` sends a list, a numpy array or ``Columns`` as it is, in order with the records that were
    emitted before. With ``tag=`` both emit to that side output. Do not change a record or batch after emitting it.

    Only one task uses an output. Records of an output that no step reads are dropped.
    """

    def __init__(self, step: str = "operator", policy: RejectionPolicy = "fail") -> None:
        self._step = step
        self._policy = policy
        self._is_plain = policy == "fail"
        """Whether a refused record ends the job, and no dead letter asks for the places of records."""
        self.rejected = 0
        self._at_hand: BatchAtHand | None = None
        self._passes: Passes = "no origin"
        self._row: int | None = None
        """The place of the record at hand in the batch at hand, where it is known and a dead letter may need it."""
        self._rows_of_next: RowNumbers | None = None
        """For each record of the batch that is emitted next, the place of the record from which it was made."""
        self._gathered_rows: list[int] = []
        """The same for the gathered records, where it is known."""
        self._on_rejected: Callable[[DeadLetter], None] | None = None
        self._receivers: list[Receiver] = []
        self._tagged_receivers: dict[OutputTag, list[Receiver]] = {}
        self._gathered: list[Any] = []
        self._tagged_gathered: dict[OutputTag, list[Any]] = {}
        self.records_emitted = 0
        self.passed: EventTimeWatermark | None = None
        """The last event-time watermark that has passed."""
        self._followers: list[Callable[[EventTimeWatermark], object]] = []

    def connect(self, receiver: Receiver, tag: OutputTag | None) -> None:
        """Send the emitted records, or those with ``tag``, to ``receiver``. The engine has done so in a running job."""
        if tag is None:
            self._receivers.append(receiver)
        else:
            self._tagged_receivers.setdefault(tag, []).append(receiver)

    @property
    def batch_origin(self) -> BatchOrigin | None:
        """Where the current batch, or the current record, was read, as far as known; pass it to ``reject``."""
        row = self._row_at_hand()
        if row is not None:
            return self._origin_at(row)
        return None if self._at_hand is None else self._at_hand.origin

    def _row_at_hand(self) -> int | None:
        return self._row

    def _origin_at(self, row: int) -> BatchOrigin | None:
        origin = None if self._at_hand is None else self._at_hand.origin
        return origin if origin is None else origin.taken(range(row, row + 1))

    @property
    def _knows_originals(self) -> bool:
        at_hand = self._at_hand
        return at_hand is not None and at_hand.origin is not None and at_hand.origin.originals is not None

    def _begin_row(self, row: int | None) -> None:
        if self._row is not None:
            self._gathered_rows += [self._row] * (len(self._gathered) - len(self._gathered_rows))
        self._row = row

    def _keep_rows(self, rows: RowNumbers) -> None:
        if self._knows_originals:
            assert self._at_hand is not None
            assert self._at_hand.origin is not None
            self._at_hand.origin = self._at_hand.origin.taken(rows)
            self._at_hand.records = take(self._at_hand.records, rows)

    def _send(self, receivers: Sequence[Receiver], batch: Batch, rows: RowNumbers | None, *, by_place: bool) -> None:
        """Give a batch to its receivers, as the batch at hand. ``rows`` are the places of its original records."""
        at_hand = self._at_hand
        if self._passes == "no origin" or at_hand is None or at_hand.origin is None or at_hand.origin.originals is None:
            for receiver in receivers:
                receiver(batch)
            return
        given = at_hand.origin, at_hand.records
        originals = None if self._passes == "ranges" else given[0].originals
        if originals is not None and rows is not None:
            originals = originals.taken(rows)
        elif originals is not None:
            originals = originals.same_objects(untimed(batch), untimed(given[1]), by_place=by_place)
        made = given[0].with_originals(originals)
        for receiver in receivers:
            at_hand.origin, at_hand.records = made, batch
            receiver(batch)
        at_hand.origin, at_hand.records = given

    def emit(self, record: Any, tag: OutputTag | None = None, *, event_time: int | None = None) -> None:
        """Emit one record.

        In a stream with event time it has the timestamp of the record or timer at hand, or ``event_time``, in
        milliseconds.
        """
        if event_time is not None:
            raise _no_event_time(self._step)
        if tag is not None:
            self._tagged_gathered.setdefault(tag, []).append(record)
            return
        self._gathered.append(record)
        if len(self._gathered) >= _GATHER_RECORDS:
            self._send_gathered()

    def emit_batch(
        self, batch: Batch, tag: OutputTag | None = None, *, event_time: int | Times | Sequence[int] | None = None
    ) -> None:
        """Emit the records of a batch. The records of a table of pandas, polars or Arrow are its rows.

        In a stream with event time they have the timestamps of the records at hand, by position, if there are as many;
        otherwise the greatest of these; or ``event_time``: one timestamp for each record, or one for all.
        """
        if event_time is not None:
            raise _no_event_time(self._step)
        if type(batch) not in _BATCHES:
            batch = batch_of(f"step {self._step!r}, emit_batch", batch)
        if tag is not None:
            self._send_tagged(tag)
            self._deliver(self._tagged_receivers.get(tag, ()), batch)
            return
        if self._gathered:
            self._send_gathered()
        count = len(batch)
        self.records_emitted += count
        if not count:
            return
        if self._passes == "no origin" or (at_hand := self._at_hand) is None or at_hand.origin is None:
            for receiver in self._receivers:
                receiver(batch)
        else:
            self._send(self._receivers, batch, self._rows_of_next, by_place=True)

    @property
    def step(self) -> str:
        """The name of the step."""
        return self._step

    @property
    def tolerates_rejections(self) -> bool:
        """Whether the step continues after a refused record (policy ``skip`` or ``dead_letter``)."""
        return self._policy != "fail"

    def reject(self, record: Any, reason: str | Exception, *, origin: Origin | BatchOrigin | None = None) -> None:
        """Refuse a record: by the step's policy it is skipped, becomes a dead letter, or ends the job.

        ``origin`` is where the record was read: ``out.batch_origin`` for a record of the current batch, None for a
        record that the operator has kept from an earlier batch.
        """
        if self._policy == "fail":
            self.fail(reason, record, origin=origin if isinstance(origin, Origin) else None)
        if self._policy == "skip" and self._on_rejected is None:
            self.rejected += 1
            return
        at_hand = self._at_hand
        if at_hand is not None and at_hand.origin is origin and isinstance(origin, BatchOrigin) and origin.originals:
            place = place_of(record, untimed(at_hand.records))
            origin = origin if place is None else self._origin_at(place)
        reject_letter(self, DeadLetter.of(record, self._step, described(reason), origin))

    def skip(self, record: Any, reason: str | Exception, *, origin: Origin | BatchOrigin | None = None) -> None:
        """Refuse a record as by the policy ``skip``, whatever the step's policy is: it is counted, and left out."""
        self.rejected += 1
        if self._on_rejected is not None:
            self._on_rejected(DeadLetter.of(record, self._step, described(reason), origin))

    def fail(self, reason: str | Exception, record: Any, *, origin: Origin | None = None) -> NoReturn:
        """End the job, naming the step and the record."""
        cause = reason if isinstance(reason, Exception) else ValueError(reason)
        raise RecordFailure(self._step, record, has_record=True, origin=origin) from cause

    def flush(self) -> None:
        """Send the gathered records, as the engine does after each call of the operator."""
        if self._gathered:
            self._send_gathered()
        if self._tagged_gathered:
            for tag in list(self._tagged_gathered):
                self._send_tagged(tag)

    def _send_gathered(self) -> None:
        if self._row is not None:
            self._begin_row(self._row)
        batch, self._gathered = self._gathered, []
        self.records_emitted += len(batch)
        if self._passes == "no origin" or (at_hand := self._at_hand) is None or at_hand.origin is None:
            if self._gathered_rows:
                self._gathered_rows = []
            for receiver in self._receivers:
                receiver(batch)
            return
        rows, self._gathered_rows = self._gathered_rows, []
        self._send(self._receivers, batch, rows if len(rows) == len(batch) else None, by_place=False)

    def _send_tagged(self, tag: OutputTag) -> None:
        batch = self._tagged_gathered.pop(tag, None)
        if batch:
            self._deliver(self._tagged_receivers.get(tag, ()), batch)

    def _deliver(self, receivers: list[Receiver] | tuple[()], batch: Batch) -> None:
        self.records_emitted += len(batch)
        if len(batch):
            self._send(receivers, batch, None, by_place=False)


# -- what the engine and its operators do with an output ---------------------------------------------------


def follow_watermarks(out: Output, follower: Callable[[EventTimeWatermark], object]) -> None:
    """Give event-time watermarks to ``follower``, behind all records that were emitted before."""
    out._followers.append(follower)


def pass_watermark(out: Output, watermark: EventTimeWatermark) -> None:
    """Pass an event-time watermark on."""
    out.flush()
    out.passed = watermark
    for follower in out._followers:
        follower(watermark)


def trace_origins(out: Output, at_hand: BatchAtHand, passes: Passes) -> None:
    """Set where the batch at hand was read, and which origins the batches made from it have."""
    out._at_hand, out._passes = at_hand, passes
    out._is_plain = out._policy == "fail" and passes != "originals"


def report_rejected(out: Output, on_rejected: Callable[[DeadLetter], None] | None) -> None:
    """Set the function that is called with each refused record, unless the job fails by it."""
    out._on_rejected = on_rejected


def reject_letter(out: Output, letter: DeadLetter) -> None:
    """Refuse the record of a letter."""
    out.rejected += 1
    if out._on_rejected is not None:
        out._on_rejected(letter)
    if out._policy == "dead_letter":
        out.emit(letter, tag=DEAD_LETTERS)


def origin_at(out: Output, row: int) -> BatchOrigin | None:
    """Return where the record at this place of the batch at hand was read."""
    return out._origin_at(row)


def passes_originals(out: Output) -> bool:
    """Return whether a dead letter of a later step is to know the original of what is emitted."""
    return out._passes == "originals" and out._knows_originals


def each_with_its_row(out: Output, records: Iterable[T], rows: Iterable[int] | None = None) -> Iterable[T]:
    """Yield the records of the batch at hand, and note the place of each, by ``rows``."""
    if (at_hand := out._at_hand) is None or at_hand.origin is None or at_hand.origin.originals is None:
        return records
    return _each(out, records, rows)


def _each(out: Output, records: Iterable[T], rows: Iterable[int] | None) -> Iterator[T]:
    # The rows come last: zip takes none of them for a record that is not there.
    for record, row in zip(records, count() if rows is None else rows, strict=False):
        out._begin_row(row)
        yield record
    out._begin_row(None)


def keep_rows(out: Output, rows: RowNumbers) -> None:
    """Keep only the records at ``rows`` of the batch at hand; the others are refused."""
    out._keep_rows(rows)


def as_list(out: Output, batch: Batch) -> list[Any]:
    """Return the records of the batch at hand as objects, by which refused ones are found."""
    records = batch if isinstance(batch, list) else list(batch)
    at_hand = out._at_hand
    if at_hand is not None and len(records) == len(at_hand.records or ()):
        at_hand.records = records
    return records


def emit_made(out: Output, batch: Batch, rows: RowNumbers | None = None) -> None:
    """Emit records, each made from the record at the same place of the batch at hand, or at its place in ``rows``."""
    if out._passes != "originals":
        out.emit_batch(batch)
        return
    out._rows_of_next = range(len(batch)) if rows is None else rows
    out.emit_batch(batch)
    out._rows_of_next = None


def emit_read(out: Output, batch: Batch, topic: str, columns: Any) -> None:
    """Emit records that were decoded from the rows of ``columns``, of this topic."""
    at_hand = out._at_hand
    if out._passes == "originals" and at_hand is not None and at_hand.origin is not None:
        read = at_hand.origin
        at_hand.origin, at_hand.records = read.with_originals(Originals.read(topic, columns, len(batch))), batch
        emit_made(out, batch)
        at_hand.origin, at_hand.records = read, None
    else:
        out.emit_batch(batch)


def detach(out: Output) -> Callable[[], None]:
    """Gather the emitted batches, and return a function that sends them and ends the gathering.

    So an operator can run in another thread than the receivers of its output.
    """
    receivers, tagged_receivers = out._receivers, out._tagged_receivers
    gathered: list[tuple[Receiver, Batch, BatchOrigin | None]] = []
    at_hand = out._at_hand or BatchAtHand()

    def gathering(receiver: Receiver) -> Receiver:
        return lambda batch: gathered.append((receiver, batch, at_hand.origin))

    def attach() -> None:
        out._receivers, out._tagged_receivers = receivers, tagged_receivers
        for receiver, batch, at_hand.origin in gathered:
            at_hand.records = batch
            receiver(batch)

    out._receivers = [gathering(receiver) for receiver in receivers]
    out._tagged_receivers = {
        tag: [gathering(receiver) for receiver in several] for tag, several in tagged_receivers.items()
    }
    return attach


def _no_event_time(step: str) -> ConfigurationError:
    return ConfigurationError(
        f"step {step!r}: expected event_time= only in a stream with event time, given it without; put .event_time(…) "
        "before the step, or leave event_time= out"
    )


@final
class TimedOutput(Output):
    """The output of a step of a stream with event time: it sends :class:`TimedBatch` es."""

    def __init__(self, step: str, policy: RejectionPolicy, times: StepTimes) -> None:
        """``times.timestamp`` is the timestamp of the record or timer at hand."""
        super().__init__(step, policy)
        self._step_times = times
        self._times: Times | None = None
        """The timestamps of the batch at hand, if the operator handles a batch."""
        self._order: Order | None = None
        """The order of the records of the batch at hand, if a later step asks for it."""
        self._gathered_times: list[int] = []
        self._first_row = 0
        """The place in the batch at hand of the record that is the first of ``_order``."""
        self._tagged_times: dict[OutputTag, list[int]] = {}
        self.gathers = False
        """Whether batches are gathered as records are, because they have one record each."""

    def begin_batch(self, batch: Batch) -> None:
        """The operator handles this batch now."""
        if isinstance(batch, TimedBatch):
            self._times = batch.times
            self.begin_records(batch)
            self._step_times.timestamp = int(batch.times.max(initial=MIN_TIME))
        else:
            self.end_batch()

    def begin_records(self, batch: Batch, first_row: int = 0) -> None:
        """The operator handles the records of this batch now; ``row`` is the row of the record at hand.

        ``first_row`` is the place of the first one in the batch at hand.
        """
        order = batch.order if isinstance(batch, TimedBatch) else None
        if order is not self._order or first_row != self._first_row:
            self.flush()
            self._order, self._first_row = order, first_row
        self._step_times.row = -1

    def _row_at_hand(self) -> int | None:
        row = self._step_times.row
        return self._row if row < 0 else self._first_row + row

    def _origin_at(self, row: int) -> BatchOrigin | None:
        return super()._origin_at(self._step_times.row if self.gathers else row)

    def _keep_rows(self, rows: RowNumbers) -> None:
        if not self.gathers:  # Otherwise the operator handles a part of the batch at hand.
            super()._keep_rows(rows)

    def end_batch(self) -> None:
        """The operator handles no batch."""
        self._times = None
        if self._order is not None:
            self.flush()
            self._order = None
        self._step_times.timestamp = MIN_TIME

    def emit(self, record: Any, tag: OutputTag | None = None, *, event_time: int | None = None) -> None:
        time = self._step_times.timestamp if event_time is None else checked_time("emit(event_time)", event_time)
        if tag is not None:
            self._tagged_times.setdefault(tag, []).append(time)
            self._tagged_gathered.setdefault(tag, []).append(record)
            return
        self._gathered_times.append(time)
        if self._order is not None or self._passes == "originals":
            self._gathered_rows.append(self._step_times.row)
        self._gathered.append(record)
        if len(self._gathered) >= _GATHER_RECORDS:
            self._send_gathered()

    def emit_batch(
        self, batch: Batch, tag: OutputTag | None = None, *, event_time: int | Times | Sequence[int] | None = None
    ) -> None:
        if self.gathers and event_time is None:
            for record in batch:
                self.emit(record, tag)
            return
        if type(batch) not in _BATCHES:
            batch = batch_of(f"step {self._step!r}, emit_batch", batch)
        if type(batch) is not TimedBatch:
            times = self._times_for(len(batch), event_time)
            batch = TimedBatch(untimed(batch), times, self._order if times is self._times else None)
        super().emit_batch(batch, tag)

    def _times_for(self, count: int, given: int | Times | Sequence[int] | None) -> Times:
        if given is None:
            if self._times is not None and len(self._times) == count:
                return self._times
            return np.full(count, self._step_times.timestamp, np.int64)
        if isinstance(given, (int, np.integer)):
            return np.full(count, checked_time("emit_batch(event_time)", given), np.int64)
        times = np.asarray(given)
        if times.shape != (count,) or (times.dtype.kind not in "iu" and count):
            raise ConfigurationError(
                f"emit_batch(event_time): expected one timestamp in whole milliseconds for each of {count} records, "
                f"given {shortened(given)}; give an array as long as the batch, or one int"
            )
        for outermost in (times.min(), times.max()) if count else ():
            checked_time("emit_batch(event_time)", outermost)
        return times.astype(np.int64)

    def _send_gathered(self) -> None:
        records, self._gathered = self._gathered, []
        times, self._gathered_times = self._gathered_times, []
        self.records_emitted += len(records)
        rows, self._gathered_rows = self._gathered_rows, []
        known = bool(rows) and min(rows) >= 0
        order = self._order[rows] if known and self._order is not None else None
        batch = TimedBatch(records, np.array(times, np.int64), order)
        places = np.array(rows, np.int64) + self._first_row if known else None
        self._send(self._receivers, batch, places, by_place=False)

    def _send_tagged(self, tag: OutputTag) -> None:
        records = self._tagged_gathered.pop(tag, None)
        if records:
            batch = TimedBatch(records, np.array(self._tagged_times.pop(tag), np.int64))
            self._deliver(self._tagged_receivers.get(tag, ()), batch)


def batch_of(where: str, given: Any) -> Batch:
    """Return ``given`` if it is a sequence of records, and the rows of a table."""
    given = rows_if_table(where, given)
    if isinstance(given, (Mapping, str, bytes)) or not hasattr(given, "__len__"):
        raise FunctionResultError(
            f"{where}: expected a list, a numpy array or Columns, given {type(given).__name__}: {shortened(given)}; "
            "for one record write [record]"
        )
    batch: Batch = given
    return batch


RejectionPolicy = Literal["fail", "skip", "dead_letter"]
"""What happens to a record that cannot be decoded or that an operator refuses."""

DEAD_LETTERS: Final = OutputTag("streamiter.dead-letters")
"""The side output on which a step with the policy ``dead_letter`` emits :class:`DeadLetter`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record was read."""

    topic: str
    """The URL of the topic."""
    partition: int
    """The partition of the record."""
    offset: int
    """The offset of the record in the partition."""

    def __str__(self) -> str:
        return f"{self.topic}, partition {self.partition}, offset {self.offset}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A refused record with the reason."""

    record: Any
    """The record as the step received it."""
    step: str
    """The name of the step."""
    error: str
    """Why the step refused the record."""
    origin: Origin | BatchOrigin | None = None
    """Where the record was read, where that is known: its offset if it came directly from a topic, otherwise the
    range of offsets of its batch."""
    key: bytes | None = None
    """The key of the record of the topic, where that record is known."""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    """The headers of that record."""
    timestamp_ms: int | None = None
    """The time stamp of that record."""

    @classmethod
    def of(cls, record: Any, step: str, error: str, origin: Origin | BatchOrigin | None) -> DeadLetter:
        """Return the letter of a record with what is known of the record of the topic from which it was made."""
        if not isinstance(origin, BatchOrigin) or origin.originals is None:
            return cls(record, step, error, origin)
        original = origin.originals.of(0) if len(origin.originals) == 1 else None
        if original is None:
            return cls(record, step, error, origin.with_originals(None))
        topic, read, row = original
        headers = tuple((name, value) for name, value in read.headers[row])
        place = Origin(topic, read.partition, read.offsets[row])
        return cls(record, step, error, place, read.keys[row], headers, read.timestamps_ms[row])


class RecordFailure(Exception):
    """A step failed, on this record where it is known. ``__cause__`` is the user's error."""

    def __init__(
        self, step: str, record: Any = None, *, has_record: bool = False, origin: Origin | None = None
    ) -> None:
        self.step = step
        self.record = record
        self.has_record = has_record
        self.origin = origin
        self.within: str | None = None
        """The batch that failed, where it came directly from a source."""
        super().__init__(step)
