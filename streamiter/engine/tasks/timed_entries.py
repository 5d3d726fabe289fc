"""The entries of operators in a stream with event time, and of operators that are awaited.

They do what the entries of :mod:`streamiter.engine.tasks.entries` do, and tell the output which timestamp is at hand.
After each call they let event timers fire that are due. Operators that are awaited have one kind of entry, with event
time or without; the entries of the others are several, because a check for each record would slow them down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from streamiter.engine.tasks.entries import (
    AsyncEntry,
    Entry,
    awaitable,
    check_result,
    each_with_its_key,
    handler_of,
    keyed_records,
    keys_in_turns,
    rejection,
    without_rejected,
)
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.functions import KeyOf, refuse
from streamiter.operators.operator import Context, Operator, Progress, known_of
from streamiter.operators.output import Output, RecordFailure, TimedOutput
from streamiter.values.records import Batch, TimedBatch, slice_batch, untimed
from streamiter.values.times import MIN_TIME

Handle = Callable[[Any, Output], object]


def make_timed_entry(
    operator: Operator,
    input_name: str,
    out: TimedOutput,
    context: Context,
    key_of: KeyOf | None,
    times: StepTimes,
    fire: Callable[[], None],
    after_batch: Callable[[], None],
) -> Entry:
    """Return the entry of an operator that the engine calls directly. ``fire`` lets the timers fire that are due.

    ``after_batch`` is called after each batch.
    """
    method, whole_batches = handler_of(operator, input_name, step=context.name, keyed=key_of is not None)
    handle = getattr(operator, method)
    if not whole_batches:
        return _by_record(handle, out, context, key_of, times, fire, after_batch)
    when = known_of(operator).one_by_one
    if when == "always" or (when == "if tolerant" and out.tolerates_rejections):
        return _one_by_one(handle, out, times)
    return _by_batch(handle, out, times, fire, after_batch, whole=known_of(operator).takes_timed_batches)


class Timing(NamedTuple):
    """What an entry needs besides in a stream with event time. ``fire`` lets the timers fire that are due."""

    out: TimedOutput
    times: StepTimes
    fire: Callable[[], Awaitable[None]]
    after_batch: Callable[[], None]


def make_async_entry(
    operator: Operator,
    input_name: str,
    out: Output,
    context: Context,
    key_of: KeyOf | None,
    progress: Progress,
    timing: Timing | None = None,
) -> AsyncEntry:
    """Return the entry of an operator that the engine awaits, in a stream with event time or (``timing`` None) without.

    Each record counts as progress: a batch of thousands of records, each awaited, may take longer than a stall.
    """
    method, whole_batches = handler_of(operator, input_name, step=context.name, keyed=key_of is not None)
    handle = awaitable(getattr(operator, method))
    times = None if timing is None else timing.times

    def moments(batch: Batch) -> Iterator[tuple[Any, Any]]:
        if timing is None:
            return each_with_its_key(batch, context, key_of, out)
        return _moments(batch, context, key_of, timing.times, timing.out)

    def end_batch() -> None:
        if timing is not None:
            timing.out.end_batch()
        out.flush()
        if timing is not None:
            timing.after_batch()

    async def by_batch(batch: Batch) -> None:
        while len(batch):
            if timing is not None:
                timing.out.begin_batch(batch)
            try:
                await handle(untimed(batch), out)
            except Exception as error:
                batch = without_rejected(batch, rejection(error, RecordFailure(out.step)), out, times)
                continue
            break
        if timing is not None and timing.times.next_at <= timing.times.watermark:
            await timing.fire()
        end_batch()

    async def by_record(batch: Batch) -> None:
        for key, record in moments(batch):
            context.key = key
            progress.handled += 1
            try:
                await handle(record, out)
            except Exception as error:
                refuse(out, record, rejection(error, RecordFailure(out.step, record, has_record=True)))
            if times is not None and timing is not None and times.next_at <= times.watermark:
                await timing.fire()
        end_batch()

    return by_batch if whole_batches else by_record


def _by_record(
    handle: Handle,
    out: TimedOutput,
    context: Context,
    key_of: KeyOf | None,
    times: StepTimes,
    fire: Callable[[], None],
    after_batch: Callable[[], None],
) -> Entry:
    def entry(batch: Batch) -> None:
        for key, record in _moments(batch, context, key_of, times, out):
            context.key = key
            try:
                if (result := handle(record, out)) is not None:
                    check_result(result)
            except Exception as error:
                refuse(out, record, rejection(error, RecordFailure(out.step, record, has_record=True)))
            if times.next_at <= times.watermark:
                fire()
        out.end_batch()
        out.flush()
        after_batch()

    return entry


def _by_batch(
    handle: Handle,
    out: TimedOutput,
    times: StepTimes,
    fire: Callable[[], None],
    after_batch: Callable[[], None],
    *,
    whole: bool,
) -> Entry:
    """``whole``: the operator takes the timed batch itself."""

    def entry(batch: Batch) -> None:
        while len(batch):
            out.begin_batch(batch)
            try:
                if (result := handle(batch if whole else untimed(batch), out)) is not None:
                    check_result(result)
            except Exception as error:
                batch = without_rejected(batch, rejection(error, RecordFailure(out.step)), out, times)
                continue
            break
        if times.next_at <= times.watermark:
            fire()
        out.end_batch()
        out.flush()
        after_batch()

    return entry


def _one_by_one(handle: Handle, out: TimedOutput, times: StepTimes) -> Entry:
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
    batch: Batch, context: Context, key_of: KeyOf | None, times: StepTimes, out: TimedOutput
) -> Iterator[tuple[Any, Any]]:
    """Give each key (None without keys) with its record, while the timestamp of the record is at hand."""
    keys: list[Any] = [None] * len(batch)
    if key_of is not None:
        batch, keys = keyed_records(batch, key_of, out, times)
    first_row = 0
    for some, of_some in keys_in_turns(context, keys, batch, times):
        out.begin_records(of_some, first_row)
        first_row += len(some)
        for row, (record, key, timestamp) in enumerate(zip(of_some, some, _timestamps(of_some), strict=True)):
            times.timestamp, times.row = timestamp, row
            yield key, record
        times.row = -1


def _timestamps(batch: Batch) -> Any:
    return batch.times.tolist() if isinstance(batch, TimedBatch) else [MIN_TIME] * len(batch)
