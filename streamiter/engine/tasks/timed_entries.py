"""The entries of operators in a stream with event time, of operators that are awaited, and of operators with keys.

They do what the entries of :mod:`streamiter.engine.tasks.entries` do, set the key, and tell the output which timestamp
is at hand. After each call they let event timers fire that are due. All of these entries are coroutines, which wait
only if a method of the operator does. So the engine may also call them directly (:func:`called_directly`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import chain, count
from typing import Any, NamedTuple

from streamiter.engine.tasks.entries import (
    AsyncEntry,
    Entry,
    EntryCounts,
    by_batch,
    by_record,
    check_result,
    for_single,
    keys_in_turns,
    put_time_at_hand,
    rejection,
    without_rejected,
)
from streamiter.engine.tasks.making import handler_of
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.functions import KeyOf, records_with_keys, refuse
from streamiter.operators.operator import Context, Operator, Progress, known_of
from streamiter.operators.output import Output, RecordFailure, TimedOutput, each_with_its_row
from streamiter.operators.steps import Filter, Map
from streamiter.values.records import Batch, TimedBatch, slice_batch, untimed
from streamiter.values.times import MIN_TIME

Handle = Callable[[Any, Output], object]
Waits = Callable[[object], Awaitable[object] | None]
"""Takes what a method of an operator has returned; returns what the entry awaits, or None."""


class Timing(NamedTuple):
    """What an entry needs besides in a stream with event time. ``fire`` lets the timers fire that are due."""

    out: TimedOutput
    times: StepTimes
    fire: Callable[[], Awaitable[None]]
    after_batch: Callable[[], None]


def called_directly(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine of an operator that is never awaited: it ends at its first step."""
    next(coroutine.__await__(), None)


def make_entry(
    operator: Operator,
    input_name: str,
    out: Output,
    context: Context,
    key_of: KeyOf | None,
    timing: Timing | None,
    counts: EntryCounts,
) -> Entry:
    """Return the entry of an operator that the engine calls directly; ``timing`` is None without event time.

    Entries without keys and event time count their records themselves; for all others the caller counts.
    """
    method, whole_batches = handler_of(operator, input_name, step=context.name, keyed=key_of is not None)
    handle, known = getattr(operator, method), known_of(operator)
    if not whole_batches:
        if timing is None and key_of is None:
            return by_record(handle, out, counts)
        return _directly(_by_record(handle, out, context, key_of, timing, check_result))
    if timing is None:  # Of several inputs with keys, those that are handled by batches have none.
        entry = by_batch(handle, out, counts)
        if type(operator) is Map or type(operator) is Filter:
            return for_single(operator, entry, out, counts)
        return entry
    if known.one_by_one == "always" or (known.one_by_one == "if tolerant" and out.tolerates_rejections):
        return _one_by_one(handle, timing.out, timing.times)
    return _directly(_by_batch(handle, out, timing, check_result, takes_timed=known.takes_timed_batches))


def _directly(entry: AsyncEntry) -> Entry:
    return lambda batch: called_directly(entry(batch))


def make_async_entry(
    operator: Operator,
    input_name: str,
    out: Output,
    context: Context,
    key_of: KeyOf | None,
    timing: Timing | None,
    progress: Progress,
) -> AsyncEntry:
    """Return the entry of an operator that the engine awaits. Of several inputs, some may have a plain method.

    Each record that is awaited counts as progress: a batch of thousands of them may take longer than a stall.
    """
    method, whole_batches = handler_of(operator, input_name, step=context.name, keyed=key_of is not None)
    handle = getattr(operator, method)

    def to_await(result: object) -> Awaitable[object] | None:
        if not inspect.isawaitable(result):
            check_result(result)
            return None
        progress.handled += 1
        return result

    if whole_batches:
        return _by_batch(handle, out, timing, to_await)
    return _by_record(handle, out, context, key_of, timing, to_await)


def _by_record(
    handle: Handle, out: Output, context: Context, key_of: KeyOf | None, timing: Timing | None, waits: Waits
) -> AsyncEntry:
    """Return the entry for a method that takes single records."""
    times = None if timing is None else timing.times

    async def entry(batch: Batch) -> None:
        for key, record in _moments(batch, context, key_of, out, times):
            context.key = key
            try:
                result = handle(record, out)
                if result is not None and (awaited := waits(result)) is not None:
                    check_result(await awaited)
            except Exception as error:
                refuse(out, record, rejection(error, RecordFailure(out.step, record, has_record=True)))
            if times is not None and timing is not None and times.next_at <= times.watermark:
                await timing.fire()
        _end_batch(out, timing)

    return entry


def _by_batch(
    handle: Handle, out: Output, timing: Timing | None, waits: Waits, *, takes_timed: bool = False
) -> AsyncEntry:
    """Return the entry for a method that takes whole batches. ``takes_timed``: it takes the timed batch itself."""
    times = None if timing is None else timing.times

    async def entry(batch: Batch) -> None:
        while len(batch):
            if timing is not None:
                timing.out.begin_batch(batch)
            try:
                result = handle(batch if takes_timed else untimed(batch), out)
                if result is not None and (awaited := waits(result)) is not None:
                    check_result(await awaited)
            except Exception as error:
                batch = without_rejected(batch, rejection(error, RecordFailure(out.step)), out, times)
                continue
            break
        if times is not None and timing is not None and times.next_at <= times.watermark:
            await timing.fire()
        _end_batch(out, timing)

    return entry


def _end_batch(out: Output, timing: Timing | None) -> None:
    if timing is not None:
        timing.out.end_batch()
    out.flush()
    if timing is not None:
        timing.after_batch()


def _one_by_one(handle: Handle, out: TimedOutput, times: StepTimes) -> Entry:
    """Return the entry for a method that takes batches, and is given one record at a time, with its timestamp."""
    out.gathers = True

    def entry(batch: Batch) -> None:
        records = untimed(batch)
        out.begin_records(batch)
        for index, timestamp in enumerate(_timestamps(batch)):
            times.timestamp, times.row = timestamp, index
            try:
                handle(slice_batch(records, index, index + 1), out)
            except Exception as error:
                raise rejection(error, RecordFailure(out.step, records[index], has_record=True)) from error
        out.end_batch()
        out.flush()

    return entry


def _moments(
    batch: Batch, context: Context, key_of: KeyOf | None, out: Output, times: StepTimes | None
) -> Iterator[tuple[Any, Any]]:
    """Give each key (None without keys) with its record, whose place in the batch, or timestamp, is at hand."""
    records, keys = (
        (batch, [None] * len(batch))
        if key_of is None
        else records_with_keys(key_of, batch, out, lambda place: put_time_at_hand(batch, place, times))
    )
    turns = keys_in_turns(context, keys, records, times)
    if times is not None and isinstance(out, TimedOutput):
        return _timed_moments(turns, times, out)
    rows = count()
    # A generator over the records would cost a twelfth of an awaited call.
    return chain.from_iterable(each_with_its_row(out, zip(some, of_some, strict=True), rows) for some, of_some in turns)


def _timed_moments(
    turns: Iterator[tuple[list[Any], Batch]], times: StepTimes, out: TimedOutput
) -> Iterator[tuple[Any, Any]]:
    first_row = 0
    for some, of_some in turns:
        out.begin_records(of_some, first_row)
        first_row += len(some)
        for row, (record, key, timestamp) in enumerate(zip(of_some, some, _timestamps(of_some), strict=True)):
            times.timestamp, times.row = timestamp, row
            yield key, record
        times.row = -1


def _timestamps(batch: Batch) -> Any:
    return batch.times.tolist() if isinstance(batch, TimedBatch) else [MIN_TIME] * len(batch)
