"""The operators of windows, on keyed streams: by event time, or by the clock."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np

from streamiter.operators.definitions import Definition, at_most
from streamiter.operators.functions import accepted_keys, refuse
from streamiter.operators.keyed import KeyedOperator, array_of_keys
from streamiter.operators.keyed_state import StateFrame, after_restore, in_turns
from streamiter.operators.operator import Context, KeepsRecords, keys_are_further
from streamiter.operators.output import Output, each_with_its_row
from streamiter.operators.timed.kinds import WindowKind
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import AlignedWindows, OpenWindows, make_windows
from streamiter.operators.timed_states import TimedStates
from streamiter.values.deferred import Deferred
from streamiter.values.helpers.clock import is_due
from streamiter.values.numbers import Array
from streamiter.values.records import Batch, OutputTag, TimedBatch, slice_batch, untimed
from streamiter.values.subtasks import check_keys
from streamiter.values.times import MAX_TIME, MIN_TIME, Times, shown_time

_log = logging.getLogger("streamiter.operators")


class TimedOperator(KeyedOperator, KeepsRecords):
    """Base class of operators whose states are :class:`TimedStates`."""

    takes_timed_batches = True
    time: str = "event"

    def __init__(self, states: TimedStates[Any], key_of: Callable[[Any], Any], late: OutputTag | None = None) -> None:
        """``late`` is the side output of late records; without it they are dropped."""
        super().__init__(key_of)
        self.late = 0
        """The number of late records since the start."""
        self._late_tag = late
        self._timed_states = states
        self._context: Context
        """Set by ``open``."""

    def definition(self) -> Definition:
        return {**super().definition(), "time": self.time}

    def open(self, context: Context) -> None:
        self._context = context
        super().open(context)
        self._timed_states.keep_in(self._states)

    @property
    def kept(self) -> int:
        """The number of open windows, or of records that wait or may be needed."""
        return self._timed_states.kept

    def snapshot(self) -> Deferred:
        self._states.summary = self._timed_states.summary()
        return super().snapshot()

    def restore(self, state: Iterable[StateFrame]) -> Awaitable[None] | None:
        return after_restore(self._states.restore(state), self._resume)

    def _resume(self) -> None:
        """Resume from the states that have been restored."""
        self._timed_states.keep_in(self._states)

    def _turn(self, turn: Callable[[], bool], out: Output) -> bool:
        """Call ``turn``, emit the results and store the states; return whether all is done that is due."""
        is_done = turn()
        self._emit_results(out)
        self._states.store()
        return is_done

    def _advance(self, watermark: int, out: Output) -> bool:
        """Emit what is due by a watermark of the operator, or a part of it; return whether that was all."""
        self.is_behind = not self._turn(lambda: self._timed_states.advance(watermark), out)
        return not self.is_behind

    def _emit_results(self, out: Output) -> None:
        """Emit the results of the states."""
        raise NotImplementedError

    def _reach_watermark(self, out: Output) -> None:
        """Tell the states how far time has come: also after a restore, and for keys with a higher watermark."""
        context, states = self._context, self._timed_states
        if (watermark := context.event_time) is not None:
            states.watermark = max(states.watermark, self._own(watermark))
        states.floor_of = self._floor if keys_are_further(context) else None

    def _floor(self, key: Any) -> int:
        context = self._context
        context.key = key
        watermark, context.key = context.event_time, None
        return MIN_TIME if watermark is None else self._own(watermark)

    def _own(self, watermark: int) -> int:
        """Return the watermark of the operator for a watermark of the step."""
        return watermark

    def _times_of(self, batch: Batch) -> Times:
        """Return the timestamps of a batch; ``MIN_TIME`` for records without one."""
        if isinstance(batch, TimedBatch):
            return batch.times
        # The engine gives the records one by one, so that refused ones keep their timestamps.
        timestamp = self._context.timestamp
        return np.full(len(batch), MIN_TIME if timestamp is None else timestamp, np.int64)

    def _moments(
        self, batch: Batch, out: Output, key_of: Callable[[Any], Any] | None = None, first_row: int = 0
    ) -> Iterator[tuple[Any, Any, int]]:
        """Give each record with its key and its timestamp; its state is loaded. Refuse the records that lack one.

        ``first_row`` is the place of the first record in the batch at hand.
        """
        records, times = untimed(batch), self._times_of(batch).tolist()
        moments: list[tuple[Any, Any, int]] = []
        rows: list[int] = []
        for place, key in zip(*self._accepted_keys(key_of or self._key_of, records, out, first_row), strict=True):
            if times[place] == MIN_TIME:
                refuse(out, records[place], _no_timestamp(), first_row + place)
            else:
                moments.append((records[place], key, times[place]))
                rows.append(first_row + place)
        places = iter(rows)
        for some, of_some in in_turns(self._states, [key for _, key, _ in moments], moments):
            self._states.load(some)
            yield from each_with_its_row(out, cast(list[tuple[Any, Any, int]], of_some), places)

    def _add_each(
        self, moments: Iterable[tuple[Any, Any, int]], out: Output, add: Callable[[Any, int, Any], bool | None]
    ) -> None:
        """Add each record by ``add(key, time, record)``; refuse a record for which it raises.

        ``add`` returns False for a late record.
        """
        for record, key, time in moments:
            try:
                is_in_time = add(key, time, record)
            except Exception as error:
                refuse(out, record, error)
            else:
                if is_in_time is False:
                    self._emit_late(out, record, time)

    def _emit_late(self, out: Output, record: Any, time: int) -> None:
        """Emit a late record as it came, if there is a side output for late records; else tell of the first one."""
        self.late += 1
        if self._late_tag is not None:
            out.emit(record, tag=self._late_tag, event_time=time)
        elif self.late == 1:
            _log.warning(
                "step %r: a record of the time %s is late and dropped, and so is each further one, without a line; "
                "give event_time(…) a larger out_of_orderness_s=, or the step late=OutputTag(…) to read them",
                self._context.name,
                shown_time(time),
            )

    def _accepted_keys(
        self, key_of: Callable[[Any], Any], records: Batch, out: Output, first_row: int
    ) -> tuple[Sequence[int], list[Any]]:
        """Return the places of the records that have a valid key, and these keys; refuse the other records."""
        return accepted_keys(key_of, records, out, first_row=first_row)


def _no_timestamp() -> ValueError:
    return ValueError("expected a record with a timestamp, given one without; put .event_time(…) right before the step")


class WindowStep(TimedOperator):
    """Base class: emits the results of the windows of a keyed stream, as :class:`WindowResult`.

    ``key_of`` takes a record, or a batch with ``whole_batches``; then columns are aggregated by numpy where the
    aggregates allow it.

    State: for each key its windows that are open.
    """

    keeps = "its open windows"

    def __init__(
        self,
        kind: WindowKind,
        aggregates: Aggregates,
        key_of: Callable[[Any], Any],
        *,
        lateness_ms: int = 0,
        early_every_s: float | None = None,
        late: OutputTag | None = None,
        retracting: bool = False,
        whole_batches: bool = False,
    ) -> None:
        aggregates = aggregates.copy()
        self._windows: OpenWindows = make_windows(
            kind, aggregates, lateness_ms=lateness_ms, retracting=retracting, gives_early=early_every_s is not None
        )
        super().__init__(self._windows, key_of, late)
        self._definition = {
            "kind": "window",
            **kind.definition(),
            # A window that has gone would begin again with a later record.
            "allowed_lateness_ms": at_most(lateness_ms),
            "results": "retracting" if retracting else "accumulating",
        }
        self._aggregates = aggregates
        self._whole_batches = whole_batches
        # With few records, a loop is faster than numpy.
        self._records_least = 1 if whole_batches else _RECORDS_LEAST
        self._early_every_s = early_every_s
        self._early_at_s = _AT_ONCE_S
        """By the clock: timers of early results that fire before do not count."""

    def definition(self) -> Definition:
        return {**super().definition(), **self._definition, "aggregates": self._aggregates.definition()}

    def adopt(self, definition: Definition) -> None:
        self._aggregates.adopt(definition["aggregates"])

    def open(self, context: Context) -> None:
        super().open(context)
        self._set_early_timer()

    def _resume(self) -> None:
        super()._resume()
        # The engine restores the timer. But after a change of the parallelism a subtask may have several, or none.
        self._early_at_s = _AT_ONCE_S
        self._set_early_timer()

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._reach_watermark(out)
        size = self._states.keys_at_once or max(1, len(batch))
        for start in range(0, len(batch), size):
            some = batch if size >= len(batch) else slice_batch(batch, start, start + size)
            if not self._process_arrays(some, out):
                self._add_each(self._moments(some, out, first_row=start), out, self._add)
            self._states.store()
        self._emit_results(out)

    def _add(self, key: Any, time: int, record: Any) -> bool:
        return self._windows.add(key, time, self._aggregates.values_of(record))

    def _process_arrays(self, batch: Batch, out: Output) -> bool:
        """Handle a batch by numpy; return False, and do nothing, if that is not possible."""
        windows, records = self._windows, untimed(batch)
        if not isinstance(windows, AlignedWindows) or len(records) < self._records_least:
            return False
        times = self._times_of(batch)
        if int(times.min()) <= MIN_TIME:
            return False
        try:
            columns = self._aggregates.columns_of(records)
            if columns is None:
                return False
            keys = self._keys_of(records)
        except Exception:
            return False  # One by one, the records at fault are refused.
        self._states.load(keys)
        return windows.add_batch(keys, times, columns)

    def _keys_of(self, records: Batch) -> Sequence[Any] | Array:
        if self._whole_batches:
            return array_of_keys("key_by_batch", self._key_of(records), len(records))
        return check_keys(list(map(self._key_of, records)))

    def on_timer(self, payload: Any, out: Output) -> None:
        """Emit early results."""
        now_s = self._context.clock.monotonic_s()
        if self._early_every_s is None or not is_due(self._early_at_s - now_s):
            return
        while not self._turn(self._windows.early, out):
            pass
        self._early_at_s = now_s + self._early_every_s
        self._set_early_timer()

    def _set_early_timer(self) -> None:
        if self._early_every_s is not None:
            self._context.set_timer(self._early_every_s)

    def _accepted_keys(
        self, key_of: Callable[[Any], Any], records: Batch, out: Output, first_row: int
    ) -> tuple[Sequence[int], list[Any]]:
        if not self._whole_batches:
            return super()._accepted_keys(key_of, records, out, first_row)
        return range(len(records)), array_of_keys("key_by_batch", key_of(records), len(records)).tolist()


class EventWindowStep(WindowStep):
    """Emits the results of windows in event time."""

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        """Emit the results of the windows that are complete."""
        return watermark if self._advance(watermark, out) else MIN_TIME

    def _emit_results(self, out: Output) -> None:
        if self._windows.results:
            results = self._windows.take_results()
            out.emit_batch(results, event_time=[result.end - 1 for result in results])


# Below it, the fixed cost of arrays (50 µs a batch) is more than the cost of single records (3 µs each).
_RECORDS_LEAST: Final = 16

_AT_ONCE_S: Final = -1.0
"""Earlier than all times of a clock."""


class ByClock(TimedOperator):
    """Mixed in: a record has the time of the clock when it arrives, and no record is late.

    At the end of the input, all that is not complete is given.
    """

    takes_timed_batches = False
    time = "processing"

    _armed_for: int = MAX_TIME
    """The clock's time of the earliest timer, in milliseconds."""

    def _resume(self) -> None:
        super()._resume()
        self._armed_for = MAX_TIME
        self._arm()

    def _times_of(self, batch: Batch) -> Times:
        return np.full(len(batch), self._timed_states.watermark, np.int64)

    def _reach_watermark(self, out: Output) -> None:
        self._advance_to(self._context.clock.now_ms(), out)

    def _advance_to(self, now_ms: int, out: Output) -> None:
        while not self._advance(now_ms, out):
            pass

    def on_timer(self, payload: Any, out: Output) -> None:
        # Whichever timer is first at a time: a window that is complete has no early result any more.
        self._reach_watermark(out)
        if payload == _DUE:
            self._armed_for = MAX_TIME
            self._arm()
        else:
            super().on_timer(payload, out)

    def finish(self, out: Output) -> None:
        self._advance_to(MAX_TIME, out)

    def _arm(self) -> None:
        """Set a timer for the result that will be complete first, unless there is a timer."""
        due = self._timed_states.next_due()
        if due is not None and due < self._armed_for:
            self._armed_for = due
            self._context.set_timer(max(0, due - self._context.clock.now_ms()) / 1000, _DUE)


class ClockWindowStep(ByClock, WindowStep):
    """Emits the results of the same windows in processing time."""

    def process_batch(self, batch: Batch, out: Output) -> None:
        super().process_batch(batch, out)
        self._arm()

    def _emit_results(self, out: Output) -> None:
        if self._windows.results:
            out.emit_batch(self._windows.take_results())


_DUE: Final = "due"
"""The payload of the timer of windows that are complete; timers of early results have None."""
