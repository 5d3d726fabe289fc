"""The operators of joins by time: two keyed streams, or a keyed stream and a table. Pairs are tuples.

Each has its inputs' names: ``left`` and ``right``, or ``stream`` and ``table`` (or ``events``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.operators.definitions import Definition, at_most, function_in_words
from streamiter.operators.event_time import PARTS_OF_A_STEP, TellsOrder
from streamiter.operators.functions import KeyOf, accepted_keys, refuse
from streamiter.operators.keyed import KeyedOperator
from streamiter.operators.keyed_state import in_turns
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.operators.timed.as_of import AsOfJoin, AsOfWindow, Deduplication, TableHow
from streamiter.operators.timed.joining import IntervalJoin, Side, TimedRecord, WindowJoin
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.steps import ByClock, TimedOperator
from streamiter.values.records import Batch, OutputTag, TimedBatch, order_of, untimed
from streamiter.values.subtasks import check_keys
from streamiter.values.times import MAX_TIME, MIN_TIME


class JoinOperator(TimedOperator):
    """Base class of the joins in event time: their watermark is the step's watermark minus the allowed lateness."""

    keeps = "the records that wait or may be needed"

    def __init__(
        self,
        join: IntervalJoin | WindowJoin | AsOfJoin | AsOfWindow,
        key_of: KeyOf,
        other_key_of: KeyOf,
        *,
        lateness_ms: int = 0,
        late: OutputTag | None = None,
    ) -> None:
        """``key_of`` is for the first input, ``other_key_of`` for the second one."""
        super().__init__(join, key_of, late)
        self._join = join
        self._other_key_of = other_key_of
        self._lateness_ms = lateness_ms

    def definition(self) -> Definition:
        return {
            **super().definition(),
            "other key": function_in_words(self._other_key_of),
            # Partners of a later record have gone already.
            "allowed_lateness_ms": at_most(self._lateness_ms),
            **self._join.definition(),
        }

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        """Emit what is complete; hold back the watermark for what may still come."""
        if watermark == MAX_TIME and self._join.keeps_all_at_end:
            return watermark
        is_done = self._advance(self._own(watermark), out)
        return self._passed_on(self._own(watermark)) if is_done else MIN_TIME

    def _own(self, watermark: int) -> int:
        return watermark if watermark in (MIN_TIME, MAX_TIME) else watermark - self._lateness_ms

    def _passed_on(self, watermark: int) -> int:
        return watermark

    def _emit_results(self, out: Output) -> None:
        if self._join.results:
            emit_timed(out, self._join.take_results())


def emit_timed(out: Output, results: list[TimedRecord]) -> None:
    """Emit records with their timestamps."""
    out.emit_batch([record for _, record in results], event_time=[time for time, _ in results])


class JoinSides(JoinOperator, TellsOrder):
    """Joins the inputs ``left`` and ``right`` by an interval between their times, or by windows.

    State: for each key the records that wait for partners.
    """

    _join: IntervalJoin | WindowJoin

    def open(self, context: Context) -> None:
        super().open(context)
        if self.order_number is not None and isinstance(self._join, IntervalJoin):
            self._join.spans = []

    def process_left_batch(self, batch: Batch, out: Output) -> None:
        self._process("left", batch, out, self._key_of)

    def process_right_batch(self, batch: Batch, out: Output) -> None:
        self._process("right", batch, out, self._other_key_of)

    def _process(self, side: Side, batch: Batch, out: Output, key_of: KeyOf) -> None:
        self._reach_watermark(out)
        for record, key, time in self._moments(batch, out, key_of):
            if not self._join.add(side, key, time, record):
                self._emit_late(out, record, time)
        self._emit_results(out)

    def _emit_results(self, out: Output) -> None:
        join = self._join
        if not isinstance(join, IntervalJoin) or not join.spans:
            super()._emit_results(out)
            return
        assert self.order_number is not None
        spans, join.spans = np.array(join.spans, np.int64), []
        times, pairs = zip(*join.take_results(), strict=True)
        part = PARTS_OF_A_STEP * self.order_number + self._context.subtask_index
        order = order_of(spans[:, 0], before=MIN_TIME, part=part, place=spans[:, 1], known=spans[:, 1])
        out.emit_batch(TimedBatch(list(pairs), np.array(times, np.int64), order))

    def _passed_on(self, watermark: int) -> int:
        if isinstance(self._join, WindowJoin) or watermark in (MIN_TIME, MAX_TIME):
            return watermark
        return max(MIN_TIME, watermark - self._join.held_back_ms())


class JoinByClock(ByClock, JoinSides):
    """Joins ``left`` and ``right`` in processing time; the pairs have no timestamps."""

    def _process(self, side: Side, batch: Batch, out: Output, key_of: KeyOf) -> None:
        super()._process(side, batch, out, key_of)
        self._arm()

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        return watermark

    def finish(self, out: Output) -> None:
        if not self._join.keeps_all_at_end:
            super().finish(out)

    def _emit_results(self, out: Output) -> None:
        out.emit_batch([pair for _, pair in self._join.take_results()])


class JoinStream(JoinOperator):
    """Base class of the joins that emit each record of ``stream`` when its partners are known."""

    _join: AsOfJoin | AsOfWindow

    def process_stream_batch(self, batch: Batch, out: Output) -> None:
        self._reach_watermark(out)
        for record, key, time in self._moments(batch, out):
            if not self._join.add(key, time, record):
                self._emit_late(out, record, time)
        self._emit_results(out)


class JoinTableAsOf(JoinStream):
    """Joins the records of ``stream`` with the version of ``table`` at their time.

    ``value_of`` returns the version in a record of the table; None says that the table has none from then on.

    State: for each key the records that wait, and the versions that may be needed.
    """

    _join: AsOfJoin

    def __init__(self, value_of: KeyOf, join: AsOfJoin, key_of: KeyOf, other_key_of: KeyOf, **options: Any) -> None:
        super().__init__(join, key_of, other_key_of, **options)
        self._value_of = value_of

    def definition(self) -> Definition:
        return {**super().definition(), "kind": "join_table", "value": function_in_words(self._value_of)}

    def process_table_batch(self, batch: Batch, out: Output) -> None:
        self._reach_watermark(out)
        self._add_each(self._moments(batch, out, self._other_key_of), out, self._add_version)

    def _add_version(self, key: Any, time: int, record: Any) -> None:
        self._join.add_version(key, time, self._value_of(record))


class JoinWindowBefore(JoinStream):
    """Joins the records of ``stream`` with the aggregate of the ``events`` in a window that ends just before them.

    State: for each key the records that wait, and the events that may be needed.
    """

    _join: AsOfWindow

    def __init__(
        self, size_ms: int, aggregates: Aggregates, key_of: KeyOf, other_key_of: KeyOf, **options: Any
    ) -> None:
        aggregates = aggregates.copy()
        super().__init__(AsOfWindow(size_ms, aggregates), key_of, other_key_of, **options)
        self._aggregates = aggregates

    def adopt(self, definition: Definition) -> None:
        self._aggregates.adopt(definition["aggregates"])

    def process_events_batch(self, batch: Batch, out: Output) -> None:
        self._reach_watermark(out)
        self._add_each(self._moments(batch, out, self._other_key_of), out, self._add_event)

    def _add_event(self, key: Any, time: int, event: Any) -> bool:
        return self._join.add_event(key, time, self._aggregates.values_of(event))


class JoinTableNow(KeyedOperator):
    """Joins the records of ``stream`` with the value that ``table`` has for their key when they arrive.

    With ``waits`` it wants the table alone: the inbox reads the stream when the table has been read to its end.
    ``value_of`` returns the value in a record of the table; None deletes the value of the key.

    State: the last value of each key.
    """

    keeps = "what it has of the table"
    takes_timed_batches = True

    def __init__(
        self, value_of: KeyOf, how: TableHow, key_of: KeyOf, table_key_of: KeyOf, *, waits: bool = True
    ) -> None:
        super().__init__(key_of)
        self._table_key_of = table_key_of
        self._value_of = value_of
        self._how: TableHow = how
        self._waits = waits

    def definition(self) -> Definition:
        return {
            **super().definition(),
            "kind": "join_table",
            "time": "processing",
            "table key": function_in_words(self._table_key_of),
            "value": function_in_words(self._value_of),
        }

    def wanted_inputs(self) -> list[str] | None:
        return ["table"] if self._waits else None

    def process_table_batch(self, batch: Batch, out: Output) -> None:
        records = untimed(batch)
        keys: list[Any] = []
        values: list[Any] = []
        for place, key in zip(*accepted_keys(self._table_key_of, records, out), strict=True):
            try:
                values.append(self._value_of(records[place]))
            except Exception as error:
                refuse(out, records[place], error, place)
            else:
                keys.append(key)
        for some, of_some in in_turns(self._states, keys, values):
            for key, value in zip(some, of_some, strict=True):
                if value is None:
                    self._states.delete(key)
                else:
                    self._states.set(key, value)

    def process_stream_batch(self, batch: Batch, out: Output) -> None:
        records = untimed(batch)
        places, keys = accepted_keys(self._key_of, records, out)
        joined: list[Any] = []
        joined_places: list[int] = []
        for some, of_some in in_turns(self._states, keys, places):
            values = self._states.load(some)
            for key, place in zip(some, of_some, strict=True):
                value = values.get(key)
                if value is not None or self._how == "left":
                    joined.append((records[place], value))
                    joined_places.append(place)
        if isinstance(batch, TimedBatch):
            out.emit_batch(joined, event_time=batch.times[joined_places])
        else:
            out.emit_batch(joined)


class Deduplicate(TimedOperator):
    """Emits a record unless a record with the same key and id, less than ``within_ms`` away, has passed.

    State: for each key and id the times of the records that have passed, as long as they count.
    """

    keeps = "the ids that have passed"

    def __init__(self, key_of: KeyOf, id_of: KeyOf, within_ms: int, *, late: OutputTag | None = None) -> None:
        self._passed = Deduplication(within_ms)
        self._within_ms = within_ms
        super().__init__(self._passed, key_of, late)
        self._id_of = id_of

    def definition(self) -> Definition:
        return {
            **super().definition(),
            "kind": "deduplicate",
            "by": function_in_words(self._id_of),
            "within_ms": at_most(self._within_ms),
        }

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._reach_watermark(out)
        for record, key, time in self._moments(batch, out):
            try:
                [identity] = check_keys([self._id_of(record)])
            except Exception as error:
                refuse(out, record, error)
                continue
            passes = self._passed.add(key, time, identity)
            if passes:
                self._emit(record, time, out)
            elif passes is None:
                self._emit_late(out, record, time)

    def _emit(self, record: Any, time: int, out: Output) -> None:
        out.emit(record, event_time=time)

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        """Forget the records that do not count any more. At the end all count, for the job may read on."""
        return watermark if watermark == MAX_TIME or self._advance(watermark, out) else MIN_TIME

    def _emit_results(self, out: Output) -> None:
        """The records that pass have been emitted."""


class DeduplicateByClock(ByClock, Deduplicate):
    """Emits a record unless a record with the same key and id has passed less than ``within_ms`` ago, by the clock."""

    one_by_one = "always"  # So each record keeps its own timestamp, if it has one.

    def _emit(self, record: Any, time: int, out: Output) -> None:
        out.emit(record)

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        return watermark

    def finish(self, out: Output) -> None:
        """Keep all: the ids count when the job reads on."""
