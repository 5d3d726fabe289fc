"""Records of several partitions and streams in one order, as if they had been read one by one as they happened.

How far each partition has been read, and where batches are cut, depends on load. :class:`RecordOrder` merges the
partitions by the watermark behind each record, as Kafka Streams merges its partitions by timestamp. The records of one
partition keep their order. :class:`InOrder` is the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final, final

import numpy as np
import orjson

from streamiter.operators.declared_state import NESTED, DeclaredOperator, DeclaredState, Form, declared
from streamiter.operators.due import DueHeap, DueItem
from streamiter.operators.operator import Context, KeepsRecords
from streamiter.operators.output import Output
from streamiter.values.object_columns import JSON_FIELD, added_fields
from streamiter.values.records import (
    BEFORE,
    KNOWN,
    PART,
    PLACE_IN_PART,
    REACHED,
    SEVERAL_PARTS,
    Batch,
    Columns,
    Order,
    TimedBatch,
    one_batch,
    order_of,
    slice_batch,
    take,
)
from streamiter.values.times import MAX_TIME, MIN_TIME, Times

_log = logging.getLogger("streamiter.operators")

# As many as the questions that a training keeps. The step does not wait for a partition that is this far behind.
HELD_MAX: Final = 1_000_000

UNKNOWN_PART: Final = -1
"""The part of records whose order is not told: they are sorted by their timestamps."""


def _push_all(heap: DueHeap, items: Iterable[tuple[tuple[int, ...], Any]]) -> None:
    for order, key in items:
        heap.push(order, key)


_DUE: Final = Form(lambda heap: [(item[:-2], item[-1]) for item in sorted(heap)], take_on=_push_all)
"""The form of a ``DueHeap``."""


def _without_columns(batch: TimedBatch) -> Any:
    """Return a batch of columns of JSON objects as their texts alone, which take a fraction of the room."""
    records = batch.records
    if isinstance(records, Columns) and JSON_FIELD in records and not added_fields(records.arrays):
        return records[JSON_FIELD].tolist(), batch.times, batch.order
    return batch


def _with_objects(given: Any) -> TimedBatch:
    if isinstance(given, TimedBatch):
        return given
    texts, times, order = given
    return TimedBatch(list(map(orjson.loads, texts)), times, order)


_DUE_BATCHES: Final = Form(
    lambda heap: [(order, _without_columns(batch)) for order, batch in _DUE.plain(heap)],
    take_on=lambda heap, items: _push_all(heap, ((order, _with_objects(given)) for order, given in items)),
)


@final
class RecordOrder(DeclaredState):
    """Merges the records of all parts. Pure data, no I/O.

    A record is released when no part can bring one that comes before it: when the watermark is above its
    timestamp. If there is only one part, and its records come ``one_way``, in their order, a watermark at its timestamp
    is enough.

    >>> order = RecordOrder()
    >>> order.add(TimedBatch(["a", "c"], np.array([1, 5]), np.array([[1, MIN_TIME, 0, 0, 1], [5, 1, 0, 1, 5]])))
    >>> order.add(TimedBatch(["b"], np.array([3]), np.array([[3, MIN_TIME, 1, 0, 3]])))
    >>> released = order.release(3)
    >>> list(released), list(order.release(6))
    (['a'], ['b', 'c'])
    """

    _waiting = declared(made=lambda: DueHeap(0, 2), form=_DUE_BATCHES)
    """The batches that wait, by the watermark behind the first record and its number of arrival."""
    _arrivals = declared(0)
    _parts: set[int] = declared(made=set, form=Form(sorted, set))
    _has_several = declared(False)
    """Whether records of several parts have come."""
    held = declared(0)
    """The number of records that wait."""
    reached = declared(MIN_TIME)
    """The greatest watermark behind a released record."""
    unsorted = declared(0)
    """The number of records that were released before their turn, because too many waited."""

    def __init__(self, *, one_way: bool = False) -> None:
        self._one_way = one_way

    def add(self, batch: TimedBatch) -> None:
        """Take the records of a batch; without an order they are in the order of their timestamps."""
        if batch.order is None:
            batch = TimedBatch(batch.records, batch.times, self._order_of(batch.times))
        order = batch.order
        assert order is not None
        parts = np.unique(order[:, PART])
        self._parts.update(parts.tolist())
        self._has_several = self._has_several or len(self._parts) > 1 or bool((parts & SEVERAL_PARTS).any())
        if len(order) > 1 and (order[1:, REACHED] < order[:-1, REACHED]).any():
            batch = self._sorted(batch)
        self._push(batch)

    def _order_of(self, times: Times) -> Order:
        places = np.arange(self._arrivals, self._arrivals + len(times))
        return order_of(times, before=MIN_TIME, part=UNKNOWN_PART, place=places, known=times)

    def _push(self, batch: TimedBatch) -> None:
        if not len(batch):
            return
        assert batch.order is not None
        self._waiting.push((int(batch.order[0, REACHED]), self._arrivals), batch)
        self._arrivals += len(batch)
        self.held += len(batch)

    @staticmethod
    def _sorted(batch: TimedBatch) -> TimedBatch:
        order = batch.order
        assert order is not None
        by_turn = take(batch, np.lexsort((order[:, PLACE_IN_PART], order[:, PART], order[:, REACHED])))
        assert isinstance(by_turn, TimedBatch)
        return by_turn

    def release(self, watermark: int, *, is_idle: bool = False) -> TimedBatch | None:
        """Return the records whose turn has come, with their final ``BEFORE``; None if there are none.

        ``is_idle``: no part brings records for now, so records at the watermark have their turn, too.
        """
        is_reached = is_idle or watermark == MAX_TIME or (self._one_way and not self._has_several)
        limit = watermark if is_reached else watermark - 1
        pieces: list[Batch] = []
        for _, arrival, _, batch in self._waiting.until(limit):
            order = batch.order
            assert order is not None
            stop = int(np.searchsorted(order[:, REACHED], limit, side="right"))
            self.held -= len(batch)
            pieces.append(slice_batch(batch, 0, stop))
            if stop < len(batch):
                rest = batch[stop:]
                assert rest.order is not None
                self._waiting.push((int(rest.order[0, REACHED]), arrival + stop), rest)
                self.held += len(rest)
        return self._merged(pieces) if pieces else None

    def release_too_many(self, most: int) -> TimedBatch | None:
        """If more than ``most`` records wait, return the first of them, in order as far as they are known."""
        pieces: list[Batch] = []
        while self.held > most:
            *_, batch = self._waiting.take_first()
            self.held -= len(batch)
            self.unsorted += len(batch)
            pieces.append(batch)
        return self._merged(pieces) if pieces else None

    def _merged(self, pieces: list[Batch]) -> TimedBatch:
        """Return the pieces in order; ``BEFORE`` becomes the watermark behind all records before."""
        merged = one_batch(pieces)
        assert isinstance(merged, TimedBatch)
        if len(pieces) > 1:
            merged = self._sorted(merged)
        assert merged.order is not None
        order = merged.order.copy()
        behind = np.maximum(np.concatenate([[self.reached], order[:-1, REACHED]]), order[:, BEFORE])
        order[:, BEFORE] = np.maximum.accumulate(behind)
        self.reached = max(int(order[-1, BEFORE]), int(order[-1, REACHED]))
        return TimedBatch(merged.records, merged.times, order)


# No field of a user begins like this.
BEFORE_FIELD: Final = "\0before"
TIME_FIELD: Final = "\0time"


class InOrder(DeclaredOperator, KeepsRecords):
    """Emits the records of a stream with event time in one order, as tuples ``(before, time, record)``. Parallelism 1.

    ``before`` is the watermark behind all records before this one: the result is as if each record had a batch and a
    watermark of its own. ``time`` is the record's timestamp. With ``in_columns``, ``Columns`` stay ``Columns``, which
    have them as the fields ``BEFORE_FIELD`` and ``TIME_FIELD``.
    """

    takes_timed_batches = True
    _order: RecordOrder = declared(form=NESTED)

    def __init__(self, *, one_way: bool = False, in_columns: bool = False, held_max: int = HELD_MAX) -> None:
        """``one_way``: all records come from one subtask, through steps with one subtask.

        ``held_max``: if more records wait for a part that is behind, the first ones are emitted without it.
        """
        self._held_max = held_max
        self._in_columns = in_columns
        self._order = RecordOrder(one_way=one_way)

    def open(self, context: Context) -> None:
        self._context = context

    @property
    def kept(self) -> int:
        """The number of records that wait for their turn."""
        return self._order.held

    def process_batch(self, batch: Batch, out: Output) -> None:
        if isinstance(batch, TimedBatch):
            self._order.add(batch)
            self._release(MIN_TIME if self._context.event_time is None else self._context.event_time, out)

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        """Emit the records whose turn has come; while others wait, pass on the watermark of the last emitted one."""
        self._release(watermark, out)
        return min(watermark, self._order.reached) if self._order.held else watermark

    def _release(self, watermark: int, out: Output) -> None:
        released = self._order.release(watermark, is_idle=self._context.event_time_is_idle)
        if released is not None:
            self._emit(released, out)
        if (early := self._order.release_too_many(self._held_max)) is not None:
            if self._order.unsorted == len(early):
                _log.warning(
                    "step %r: expected at most %d records to wait for a partition that is behind; the first records "
                    "are handled before the records of that partition, so their order depends on load",
                    self._context.name,
                    self._held_max,
                )
            self._emit(early, out)

    def _emit(self, released: TimedBatch, out: Output) -> None:
        assert released.order is not None
        before, times, records = released.order[:, BEFORE], released.times, released.records
        if self._in_columns and isinstance(records, Columns):
            given: Columns | list[Any] = Columns({**records.arrays, BEFORE_FIELD: before, TIME_FIELD: times})
        else:
            given = list(zip(before.tolist(), times.tolist(), records, strict=True))
        out.emit_batch(TimedBatch(given, before))


class SpansInOrder(InOrder):
    """Emits the pairs of an interval join in the order of their earlier records, each once more when it was known.

    Emits tuples ``(before, time, record, number, is_known)``: a pair at the time of its earlier record, and with
    ``is_known`` at the time of its later record, or at the end of the wait. ``number`` is the number of the pair.
    """

    _next = declared(0)
    _unknown = declared(made=lambda: DueHeap(1, 2), form=_DUE)
    """The pairs that were emitted once, by the time at which they were known and by number."""

    def __init__(self, *, one_way: bool = False, in_columns: bool = False, held_max: int = HELD_MAX) -> None:
        super().__init__(one_way=one_way, in_columns=in_columns, held_max=held_max)
        self._has_warned = False

    @property
    def kept(self) -> int:
        return super().kept + len(self._unknown)

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        passed = super().on_event_time_watermark(watermark, out)
        self._emit_known(passed, out)
        return passed

    def _emit(self, released: TimedBatch, out: Output) -> None:
        assert released.order is not None
        asked, known = (released.order[:, column].tolist() for column in (REACHED, KNOWN))
        for record, at, known_at in zip(released, asked, known, strict=True):
            self._emit_known(at, out)
            out.emit((MIN_TIME, at, record, self._next, False), event_time=at)
            self._unknown.push((known_at, self._next), record)
            self._next += 1
            if len(self._unknown) > self._held_max:
                self._emit_too_early(at, out)

    def _emit_known(self, before: int, out: Output) -> None:
        """Emit the pairs that were known before a time."""
        for known in self._unknown.until(before if before == MAX_TIME else before - 1):
            self._emit_pair(known, before, out)

    def _emit_pair(self, known: DueItem, before: int, out: Output) -> None:
        at, number, _, record = known
        out.emit((MIN_TIME, at, record, number, True), event_time=min(at, before))

    def _emit_too_early(self, before: int, out: Output) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "step %r: expected at most %d pairs of the join to wait until they are known; the pair that is known "
                "first is learned too early from here on; give the join a shorter within=",
                self._context.name,
                self._held_max,
            )
        self._emit_pair(self._unknown.take_first(), before, out)
