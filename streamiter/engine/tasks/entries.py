"""The calls that the engine makes of a user's operator to handle its records.

An *entry* is a function that handles a batch at one input of one operator instance. Here are the entries that most
operators have: without keys and event time, and called directly. :mod:`~streamiter.engine.tasks.timed_entries` has one
for all other operators.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from types import CoroutineType
from typing import Any

from streamiter.errors import ConfigurationError, RejectRecords, StreamiterError, shortened
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.functions import refuse, refuse_coroutines
from streamiter.operators.keyed_state import in_turns
from streamiter.operators.operator import Context, states_of
from streamiter.operators.output import Output, RecordFailure, detach, each_with_its_row, keep_rows
from streamiter.operators.steps import Filter, Map
from streamiter.values.records import Batch, TimedBatch, take
from streamiter.values.times import MIN_TIME

Entry = Callable[[Batch], None]
AsyncEntry = Callable[[Batch], Coroutine[Any, Any, None]]


class EntryCounts:
    """The number of records and of batches that an operator was given."""

    records_in = batches_in = 0


def by_record(handle: Callable[[Any, Output], object], out: Output, counts: EntryCounts) -> Entry:
    """Return the entry for a method that takes single records, without keys."""

    def entry(batch: Batch) -> None:
        counts.records_in += len(batch)
        counts.batches_in += 1
        record: Any = None
        records = iter(each_with_its_row(out, batch))
        while True:
            try:
                for record in records:
                    if (result := handle(record, out)) is not None:
                        check_result(result)
            except Exception as error:
                refuse(out, record, rejection(error, RecordFailure(out.step, record, has_record=True)))
                continue
            break
        if out._gathered or out._tagged_gathered:
            out.flush()

    return entry


def by_batch(handle: Callable[[Batch, Output], object], out: Output, counts: EntryCounts) -> Entry:
    """Return the entry for a method that takes whole batches."""

    def entry(batch: Batch) -> None:
        counts.records_in += len(batch)
        counts.batches_in += 1
        while len(batch):
            try:
                if (result := handle(batch, out)) is not None:
                    check_result(result)
            except Exception as error:
                batch = without_rejected(batch, rejection(error, RecordFailure(out.step)), out)
                continue
            break
        if out._gathered or out._tagged_gathered:
            out.flush()

    return entry


def for_single(operator: Map | Filter, entry: Entry, out: Output, counts: EntryCounts) -> Entry:
    """Return an entry with a shorter way for a list of one record, as most batches are in a loop of rounds.

    It does the same: a record for which the function raises ends the job, or takes the long way for its letter.
    """
    function, filters = operator._function, isinstance(operator, Filter)

    def for_one(batch: Batch) -> None:
        at_hand = out._at_hand
        is_plain = out._is_plain and not out._gathered and (at_hand is None or at_hand.origin is None)
        if type(batch) is not list or len(batch) != 1 or not is_plain:
            entry(batch)
            return
        counts.records_in += 1
        counts.batches_in += 1
        try:
            made = function(batch[0])
            if not filters:
                if type(made) is CoroutineType:
                    refuse_coroutines([made])
                batch = [made]
            elif not made:
                return
        except Exception as error:
            out.fail(error, batch[0])
        out.records_emitted += 1
        try:
            for receiver in out._receivers:
                receiver(batch)
        except RecordFailure:
            raise
        except Exception as error:
            raise RecordFailure(out.step) from error

    return for_one


def keys_in_turns(
    context: Context, keys: list[Any], records: Batch, times: StepTimes | None = None
) -> Iterator[tuple[list[Any], Batch]]:
    """Give the keys and records of a batch in pieces whose states and timers are loaded, and are stored afterward."""
    if (states := states_of(context)) is None:
        yield keys, records
        return
    try:
        for some, of_some in in_turns(states, keys, records):
            if times is not None:
                times.prefetch(some)
            yield some, of_some
            if times is not None:
                times.store()
    except StreamiterError as error:  # Of the states, and not of the records, whose errors do not pass here.
        raise RecordFailure(context.name) from error


def check_result(result: object) -> None:
    """Raise ConfigurationError for a method that returns something: records, or something to await, would be lost."""
    if result is None:
        return
    if not inspect.isawaitable(result):
        is_generator = inspect.isgenerator(result) or inspect.isasyncgen(result)
        given = "a generator, of a method with yield" if is_generator else shortened(result)
        raise ConfigurationError(
            f"expected a method that handles records to return None, given {given}; write out.emit(record)"
        )
    if inspect.iscoroutine(result):
        result.close()
    raise ConfigurationError(
        "expected a method that handles records to return None, given something to await, though it is not "
        "a coroutine function; write async def"
    )


# -- errors of an operator ---------------------------------------------------------------------------------


def rejection(error: Exception, failure: RecordFailure) -> RejectRecords:
    """Return an error by which an operator rejects records; any other error ends the job as ``failure``."""
    if isinstance(error, RejectRecords):
        return error
    if isinstance(error, RecordFailure):  # A step further down the chain has failed, and is named already.
        raise error
    raise failure from error


def entry_in_thread(entry: Entry, out: Output, executor: Executor | None) -> AsyncEntry:
    """Return an entry that handles batches in a thread, and passes the emitted records on in the event loop."""

    async def handle(batch: Batch) -> None:
        attach = detach(out)
        await asyncio.get_running_loop().run_in_executor(executor, entry, batch)
        attach()

    return handle


def without_rejected(batch: Batch, rejected: RejectRecords, out: Output, times: StepTimes | None = None) -> Batch:
    """Refuse the rejected records of a batch, and return the others. ``times`` are those of a step with event time."""
    refused = set(rejected.indices)
    if not refused or min(refused) < 0 or max(refused) >= len(batch):
        raise RecordFailure(out.step) from ConfigurationError(
            f"RejectRecords: expected indices of a batch of {len(batch)}, given {rejected.indices}; "
            f"the reason was: {rejected.reason}"
        )
    for index in sorted(refused):
        put_time_at_hand(batch, index, times)
        refuse(out, batch[index], rejected, index)
    kept = [index for index in range(len(batch)) if index not in refused]
    keep_rows(out, kept)
    return take(batch, kept)


def put_time_at_hand(batch: Batch, index: int, times: StepTimes | None) -> None:
    """Let the timestamp of a record be at hand: a dead letter has it, too."""
    if times is not None:
        times.timestamp = int(batch.times[index]) if isinstance(batch, TimedBatch) else MIN_TIME
