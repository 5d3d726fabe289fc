"""Event time begins here: the step of ``stream.event_time(…)``, which gives timestamps and makes watermarks.

:class:`WatermarkGenerator` follows the timestamps of partitions, and says where a batch must be cut; it is a pure data
structure. :class:`AssignEventTime` is the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Protocol, final

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.operators.declared_state import (
    COPIED,
    LEAST,
    NESTED,
    SUM,
    DeclaredState,
    Form,
    SharedOperator,
    by_partition,
    declared,
    of_nested,
)
from streamiter.operators.definitions import Definition, function_in_words
from streamiter.operators.frontier import Frontier
from streamiter.operators.functions import apply_to_each, field_or_function
from streamiter.operators.operator import BoundaryOutput, Context, EngineOperator
from streamiter.operators.output import Output, emit_made, keep_rows, origin_at, pass_watermark
from streamiter.values.helpers.clock import TimerHandle
from streamiter.values.numbers import Array
from streamiter.values.records import (
    SEVERAL_PARTS,
    Batch,
    Columns,
    EventTimeWatermark,
    Order,
    TimedBatch,
    order_of,
    slice_batch,
    take,
    untimed,
)
from streamiter.values.times import (
    MAX_TIME,
    MIN_TIME,
    TIME_LIMIT,
    UNIT_NAMES,
    Times,
    TimeUnit,
    before_end,
    read_times,
    shown_time,
    unit_of,
)

_log = logging.getLogger("streamiter.operators")


def _no_parts() -> Frontier[int | None]:
    return Frontier((), MIN_TIME)


def _parts_at(watermark: int) -> Frontier[int | None]:
    parts = _no_parts()
    parts.advance_to(watermark)
    return parts


class Piece(NamedTuple):
    """A part of a batch, and the watermark to send behind it, if it has grown."""

    start: int
    stop: int
    watermark: int | None


@final
class WatermarkGenerator(DeclaredState):
    """Makes the watermark of one subtask from the timestamps of its partitions. Pure data, no I/O.

    A partition has reached its greatest timestamp minus the bound. The watermark is as if it were sent after every
    record: it is sent once for a batch, and before each record that is below it.

    >>> generator = WatermarkGenerator(bound_ms=2)
    >>> generator.add(0), generator.add(1)
    (None, None)
    >>> generator.take(0, np.array([10, 4]))
    [Piece(start=0, stop=2, watermark=None)]
    >>> generator.take(1, np.array([5, 12, 6]))
    [Piece(start=0, stop=2, watermark=8), Piece(start=2, stop=3, watermark=None)]
    """

    _greatest: dict[int | None, int] = declared(made=dict, form=COPIED, share=by_partition(min))
    _taken: dict[int | None, int] = declared(made=dict, form=COPIED, share=by_partition(max))
    """By partition: the number of its records for which :meth:`order` was asked."""
    parts = declared(made=_no_parts, form=Form(lambda parts: parts.value, _parts_at), share=LEAST)
    """The parts; only their watermark is in the state, since they are added when they are read."""
    late = declared(0, share=SUM)
    """The number of records below the watermark."""

    def __init__(self, bound_ms: int) -> None:
        self._bound_ms = bound_ms

    def add(self, partition: int | None) -> None:
        """Note a partition that is read now; it is active."""
        greatest = self._greatest.get(partition)
        self.parts.add(partition, MIN_TIME if greatest is None else greatest - self._bound_ms)

    def take(self, partition: int | None, times: Times) -> list[Piece]:
        """Note the timestamps of a batch of one partition; return the pieces into which the batch is cut."""
        parts, before = self.parts, self.parts.value
        greatest = np.maximum(np.maximum.accumulate(times), self._greatest.get(partition, MIN_TIME))
        reached = greatest - self._bound_ms
        running = np.maximum(np.minimum(reached, parts.least_of_others(partition, MAX_TIME)), before)
        below = np.flatnonzero(times[1:] < running[:-1]) + 1
        self.late += len(below) + int(times[0] < before)
        at_cuts = running[below - 1]
        is_new = at_cuts > np.concatenate([[before], at_cuts[:-1]])[: len(at_cuts)]
        pieces, start, sent = [], 0, before
        for stop, watermark in zip(below[is_new].tolist(), at_cuts[is_new].tolist(), strict=True):
            pieces.append(Piece(start, stop, watermark))
            start, sent = stop, watermark
        self._greatest[partition] = int(greatest[-1])
        parts.reach(partition, int(reached[-1]))
        parts.settle()
        pieces.append(Piece(start, len(times), parts.value if parts.value > sent else None))
        return pieces

    def order(self, partition: int | None, times: Times, part: int) -> Order:
        """Return the order of a batch of one partition, whose number is ``part``, before :meth:`take` notes it.

        >>> order = WatermarkGenerator(bound_ms=2).order(0, np.array([10, 4, 11]), part=7)
        >>> order.tolist() == [[8, MIN_TIME, 7, 0, 10], [8, 8, 7, 1, 4], [9, 8, 7, 2, 11]]
        True
        """
        known = self._greatest.get(partition, MIN_TIME)
        first = self._taken.get(partition, 0)
        self._taken[partition] = first + len(times)
        reached = np.maximum(np.maximum.accumulate(times), known) - self._bound_ms
        before = known if known == MIN_TIME else known - self._bound_ms
        places = np.arange(first, first + len(times))
        return order_of(reached, before=np.concatenate([[before], reached[:-1]]), part=part, place=places, known=times)


class PartState(Enum):
    """How far a partition has been read."""

    READING = "reading"
    """More records are known to be there, or have been read and wait."""
    AT_END = "at its end"
    """All records that are known have been handled."""
    ENDED = "ended"
    """The partition brings nothing more."""


class TaskInput(Protocol):
    """What the step knows of the input of its task."""

    def parts(self) -> Mapping[int | None, PartState]:
        """Return the partitions that the task reads now; one without a number (None) if it cannot tell them apart."""

    def timestamps_ms(self) -> Sequence[int]:
        """Return the timestamps that the topic has for the records of the current batch."""


Of = str | Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class EventTimeSettings:
    """The settings of ``stream.event_time``."""

    of: Of = None
    """The name of the field with the time, or a function of the record; None: the timestamp of the topic."""
    unit: TimeUnit | None = None
    """The unit of numbers, or "iso" for texts."""
    time_zone: tzinfo | None = None
    """The time zone of dates without one."""
    bound_ms: int = 0
    """How much earlier than the greatest timestamp of its partition a record may be without being late."""
    idle_after_s: float | None = 60.0
    """After this many seconds without a record, a partition that is read to its end holds back no watermark."""
    when_idle: Literal["wait", "advance"] = "wait"
    """Whether time stops, or advances with the clock, while no partition is active."""
    check_unit: bool = True
    """Whether the first number of a subtask must not be of another unit."""
    max_ahead_ms: int | None = None
    """Timestamps that are further ahead of the clock are refused."""


# More than a topic has partitions, or a step has subtasks.
PARTS_OF_A_STEP: Final = 2**32

# Clocks differ by less, and times of a place that are taken for UTC by 14 hours at most.
_FAR_AHEAD_MS: Final = 86_400_000

# The interval at which partitions are checked: a new or silent partition is noticed soon, and the cost is small.
_LOOK_S: Final = 1.0


class TellsOrder(EngineOperator):
    """Base class of operators that can tell in which order their records were read."""

    order_number: int | None = None
    """Its number among the steps whose records a later step puts in order; None: no later step does so."""


class AssignEventTime(SharedOperator, TellsOrder):
    """Gives each record its timestamp, and sends the watermarks that follow from the timestamps.

    A record without a valid time follows the step's policy. See ``Stream.event_time``.
    """

    assigns_event_time = True
    emits_at_once = True
    keeps = "how far event time has come"

    _generator: WatermarkGenerator = declared(form=NESTED, share=of_nested(WatermarkGenerator.redistribute))

    def __init__(self, settings: EventTimeSettings) -> None:
        self.settings = settings
        self._of = None if settings.of is None else field_or_function("event_time(of)", settings.of)
        self._generator = WatermarkGenerator(settings.bound_ms)
        self._checks_unit = settings.check_unit and settings.unit in UNIT_NAMES
        self._quiet_since_s: dict[int | None, float] = {}
        """By active partition: the last moment with a record, or with records still to read."""
        self._told = MIN_TIME, False
        """The watermark and the idleness that were sent last."""
        self._stopped_at: tuple[int, int] | None = None
        """While no partition is active: the watermark at which time stopped, and the clock at that moment."""
        self._handle: TimerHandle | None = None
        self.records_timed = 0
        """The number of records that were given a timestamp since the start."""
        self._has_warned = False

    def definition(self) -> Definition:
        settings, of = self.settings, self._of
        return {
            "kind": "event_time",
            "of": "the timestamp of the topic" if of is None else function_in_words(of),
            "unit": settings.unit,
            "time_zone": None if settings.time_zone is None else str(settings.time_zone),
        }

    def attach(self, task_input: TaskInput, out: Output) -> None:
        """Set the input of the task, and the output for watermarks, before ``open``."""
        self._input = task_input
        self._out = out

    @property
    def late(self) -> int:
        """The number of records that were below the watermark when they arrived."""
        return self._generator.late

    @property
    def slowest(self) -> int | None:
        """The partition that holds back the watermark."""
        return self._generator.parts.slowest

    def open(self, context: Context) -> None:
        self._clock, self._name = context.clock, context.name
        self._subtask = context.subtask_index
        self._post = context.post
        idle_after_s = self.settings.idle_after_s
        self._look_s = _LOOK_S if idle_after_s is None else min(_LOOK_S, idle_after_s / 4)
        self._post(self._look)

    def close(self) -> None:
        self._told = MAX_TIME, False
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    # -- records -------------------------------------------------------------------------------------------

    def process_batch(self, batch: Batch, out: Output) -> None:
        origin = out.batch_origin
        timed = self._timed(untimed(batch), out)
        if not len(timed):
            return
        parts = self._see_parts()
        partition = None if origin is None or None in parts else origin.partition
        generator = self._generator
        self._quiet_since_s[partition] = self._clock.monotonic_s()
        if not generator.parts.is_active(partition):
            generator.add(partition)
            self._tell()
        if self.order_number is not None:
            timed.order = generator.order(partition, timed.times, self._part_of(partition))
        self.records_timed += len(timed)
        late = generator.late
        for piece in generator.take(partition, timed.times):
            emit_made(out, slice_batch(timed, piece.start, piece.stop), range(piece.start, piece.stop))
            if piece.watermark is not None:
                self._send(piece.watermark, is_idle=False)
        if generator.late > late and not self._has_warned:
            self._warn_of_a_future_record(generator.parts.value)

    def _warn_of_a_future_record(self, watermark: int) -> None:
        """Say once that records are late because a record is far ahead of the clock."""
        ahead_ms = watermark - self._clock.now_ms()
        if ahead_ms > _FAR_AHEAD_MS:
            self._has_warned = True
            _log.warning(
                "step %r: records are late, because one has the time %s, %.1f days ahead of the clock; refuse such "
                "times with event_time(…, max_ahead_s=3600)",
                self._name,
                shown_time(watermark),
                ahead_ms / 86_400_000,
            )

    def _part_of(self, partition: int | None) -> int:
        """Return the number of a partition among the partitions of all steps: any subtask may read a partition."""
        assert self.order_number is not None
        part = PARTS_OF_A_STEP * self.order_number
        part += PARTS_OF_A_STEP // 2 + self._subtask if partition is None else partition
        return part | SEVERAL_PARTS if self._generator.parts.are_several else part

    def _timed(self, batch: Sequence[Any] | Array | Columns, out: Output) -> TimedBatch:
        """Return the batch with timestamps; refuse the records that have none."""
        records, values = self._values(batch, out)
        if self._checks_unit:
            self._check_unit(values)
        times, failures = read_times(values, self.settings.unit, self.settings.time_zone)
        if self._of is None:
            failures |= dict.fromkeys(
                np.flatnonzero(times == -1).tolist(), "expected a timestamp of the topic, given none"
            )
        if (ahead_ms := self.settings.max_ahead_ms) is not None:
            latest = self._clock.now_ms() + ahead_ms
            for index in np.flatnonzero(times > latest).tolist():
                failures[index] = f"expected a time before {shown_time(latest)}, given {shown_time(int(times[index]))}"
        timed = TimedBatch(records, times)
        if not failures:
            return timed
        for index in sorted(failures):
            out.reject(records[index], failures[index], origin=origin_at(out, index))
        keep_rows(out, accepted := np.delete(np.arange(len(records)), sorted(failures)))
        kept = take(timed, accepted)
        assert isinstance(kept, TimedBatch)
        return kept

    def _values(self, batch: Sequence[Any] | Array | Columns, out: Output) -> tuple[Any, Sequence[Any] | Array]:
        """Return the records, and the value with the time of each."""
        if self._of is None:
            return batch, np.asarray(self._input.timestamps_ms(), np.int64)
        name = self.settings.of
        if isinstance(name, str):
            names = batch.dtype.names if isinstance(batch, np.ndarray) else getattr(batch, "names", None)
            if names is not None and name in names:
                return batch, batch[name]  # type: ignore[call-overload]
        accepted, values = apply_to_each(self._of, batch, out)
        return untimed(accepted), values

    def _check_unit(self, values: Sequence[Any] | Array) -> None:
        """Raise ConfigurationError if the first number is of another unit."""
        unit = self.settings.unit
        assert unit is not None
        for value in values:
            if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
                self._checks_unit = False
                if np.isfinite(value) and (other := unit_of(float(value), unit)) is not None:
                    raise ConfigurationError(
                        f'event_time: expected times in {UNIT_NAMES[unit]}, because of unit="{unit}", given '
                        f"{value!r}, which is a time between 2000 and 2099 in {UNIT_NAMES[other]}; write "
                        f'unit="{other}", or check_unit=False if the time is right'
                    )
                return

    # -- watermarks ----------------------------------------------------------------------------------------

    def _look(self, _: BoundaryOutput) -> None:
        """Look for partitions that are new, silent or ended; called now and then, between two batches."""
        if self._told[0] == MAX_TIME:  # The input has ended, or the operator was closed.
            return
        self._see_parts()
        self._tell()
        self._handle = self._clock.call_later(self._look_s, lambda: self._post(self._look))

    def end(self) -> None:
        """Send the last watermark: the input has ended."""
        self._send(MAX_TIME, is_idle=False)
        self.close()

    def _see_parts(self) -> Mapping[int | None, PartState]:
        parts, now_s = self._generator.parts, self._clock.monotonic_s()
        seen, idle_after_s = self._input.parts(), self.settings.idle_after_s
        for partition, state in seen.items():
            if partition not in parts:
                self._generator.add(partition)
                self._quiet_since_s[partition] = now_s
            if state is PartState.ENDED:
                parts.end(partition, MAX_TIME)
            elif state is PartState.READING:
                self._quiet_since_s[partition] = now_s
            elif idle_after_s is not None and now_s - self._quiet_since_s[partition] >= idle_after_s:
                parts.idle(partition)
        return seen

    def _tell(self) -> None:
        """Send the watermark and the idleness, if they have changed."""
        parts = self._generator.parts
        parts.settle()
        if not parts.is_idle:
            self._stopped_at = None
        elif self.settings.when_idle == "advance" and parts.value != MIN_TIME:
            now_ms = self._clock.now_ms()
            stopped, since_ms = self._stopped_at = self._stopped_at or (parts.value, now_ms)
            parts.advance_to(min(stopped + now_ms - since_ms, TIME_LIMIT))
        self._send(parts.value, is_idle=parts.is_idle)

    def _send(self, watermark: int, *, is_idle: bool) -> None:
        if (watermark, is_idle) != self._told and self._told[0] != MAX_TIME:
            self._told = watermark, is_idle
            pass_watermark(self._out, EventTimeWatermark(watermark, is_idle))

    # -- state ---------------------------------------------------------------------------------------------

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Let the watermark follow from the greatest timestamps again."""
        generator = state["generator"]
        return {"generator": {**generator, "parts": before_end(generator["parts"])}}
