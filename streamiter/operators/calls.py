"""The operator that calls a service for each record, with many calls at a time.

:class:`MapAsync` handles control records itself, as the operators at the border of a loop do: results leave long after
their records have arrived, and a watermark or an end must not overtake them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat, takewhile
from typing import Any, Final, cast, final

import numpy as np

from streamiter.errors import ConfigurationError, RejectRecords, shortened
from streamiter.operators.declared_state import DeclaredOperator, Form, declared
from streamiter.operators.functions import asynchronous_kind
from streamiter.operators.operator import Boundary, BoundaryOutput, Context, Sharing, noting_of
from streamiter.operators.output import RecordFailure
from streamiter.values.origins import BatchOrigin
from streamiter.values.records import (
    CHANNEL_CONTROLS,
    Batch,
    Control,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    EventTimeWatermark,
    ReadToEnd,
    TimedBatch,
    control_from_plain,
    control_to_plain,
    untimed,
)
from streamiter.values.times import MIN_TIME, Seconds, in_seconds

_KINDS: Final = frozenset(kind.kind for kind in CHANNEL_CONTROLS)

# Calls that have started and whose results have not left, with finished ones that wait for their turn. As many records
# as an output gathers: a step whose calls answer at once then costs little more for a record than a batch does.
_STARTED_MAX: Final = 1024

# A caller that begins starts two others while records wait: 100 calls are under way after seven turns of the event
# loop, and calls that answer at once need three callers for a batch.
_STARTS: Final = 2


@final
@dataclass(slots=True, eq=False)
class _Call:
    """A record, and what its call has brought."""

    record: Any
    epoch: int
    origin: BatchOrigin | None
    group: int
    """The number of control records that have arrived before it."""
    time: int | None
    """The timestamp of the record, in a stream with event time."""
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def finish(self, result: Any) -> None:
        self.is_done = True
        self.result = result

    def fail(self, error: Exception) -> None:
        self.is_done = True
        self.error = error

    def plain(self) -> tuple[Any, ...]:
        """Return the call as an entry of the state. A call that has failed is made again."""
        is_kept = self.is_done and self.error is None
        given = self.epoch, self.record, self.time
        return ("result", *given, self.result) if is_kept else ("record", *given)


_CONTROLS: Final = Form(
    lambda controls: list(map(control_to_plain, controls)), lambda plain: list(map(control_from_plain, plain))
)


class MapAsync(DeclaredOperator, Boundary):
    """Emits ``await f(record)`` for each record, with at most ``concurrency`` calls at a time.

    Ordered results leave in the order of their records. Others leave as they come, but none overtakes a watermark or an
    end, or is overtaken by one. A call that takes longer than ``timeout_s`` is cancelled. A call that fails is made
    again, up to ``retries`` times: after ``backoff_s``, then after twice that time and so on, up to ``backoff_max_s``;
    of each delay a random part between half and all is waited. A record whose last call fails, or raises
    ``RejectRecords``, follows the step's policy.

    It owns a few *callers*: asyncio tasks that make one call after the other. So a call needs no task of its own.

    State: the records in flight, in order with the results that wait for their turn and the control records behind
    them. A barrier waits for no call. After a restore the calls are made again.
    """

    outlives_inputs = True
    _watermark = declared(-1)
    """The last epoch watermark that has arrived."""
    _ends: list[Control] = declared(made=list, form=_CONTROLS)
    """The ends that have arrived."""

    def __init__(
        self,
        f: Callable[[Any], Awaitable[Any]],
        concurrency: int = 100,
        *,
        ordered: bool = True,
        timeout_s: Seconds | None = None,
        retries: int = 0,
        backoff_s: Seconds = 0.1,
        backoff_max_s: Seconds = 30.0,
        seed: int = 0,
    ) -> None:
        if not callable(f) or asynchronous_kind(f) != "coroutine function":
            raise ConfigurationError(f"MapAsync(f): expected a coroutine function, given {shortened(f)}")
        self._f = f
        self._concurrency = concurrency
        self._started_max = max(concurrency, _STARTED_MAX)
        self._ordered = ordered
        self._timeout_s = in_seconds(timeout_s)
        self._retries = retries
        self._backoff_s = in_seconds(backoff_s)
        self._backoff_max_s = in_seconds(backoff_max_s)
        self._seed = seed
        self._waiting: deque[_Call | Control] = deque()
        """What has arrived and was not started: one batch at most, except after a restore."""
        self._started: dict[_Call | Control, None] = {}
        """The calls whose results have not left, and the control records among them, in order."""
        self._finished: dict[int, list[_Call]] = {}
        """Results that are not ordered and have not left, by group."""
        self._groups_in = self._groups_out = 0
        """The number of control records that have arrived, and that have left."""
        self._callers: set[asyncio.Task[None]] = set()
        self._beginning = 0
        """The number of callers that have made no call yet."""
        self._is_told = False
        """Whether the task was told that results may leave, or that no record waits, and has not handled that."""
        self._failure: RecordFailure | None = None
        """The error of a call that is no error of its record."""

    def open(self, context: Context) -> None:
        self._context = context
        self._random = random.Random(f"{self._seed} {context.subtask_index}")  # noqa: S311 (it spreads calls in time)

    async def close(self) -> None:
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)

    def wanted_inputs(self) -> Iterable[str] | None:
        return None if not self._waiting and len(self._started) < self._started_max else ()

    def held_for(self) -> str | None:
        calls = sum(isinstance(entry, _Call) and not entry.is_done for entry in self._started)
        return f"{calls:,} calls have not returned" if calls else None

    def has_work(self) -> bool:
        return bool(self._started)

    # -- records and control records ---------------------------------------------------------------------

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        group, origin = self._groups_in, out.origin
        # Each record has the origin of the batch, or its own, where a dead letter may need it.
        self._waiting.extend(
            _Call(record, epoch, origin and origin.taken(range(row, row + 1)), group, time)
            for row, (record, time) in enumerate(_with_times(records))
        )
        await self._continue(out)

    async def on_event_time(self, control: EventTimeWatermark, out: BoundaryOutput) -> None:
        if self._waiting and isinstance(self._waiting[-1], EventTimeWatermark):
            self._waiting[-1] = control
        else:
            await self.on_control(control, out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if not isinstance(control, CHANNEL_CONTROLS):
            return
        if isinstance(control, EpochWatermark):
            self._watermark = control.epoch
        elif isinstance(control, (EndOfData, EndOfInput)):
            self._ends.append(control)
        self._waiting.append(control)
        self._groups_in += 1
        await self._continue(out)

    async def _told(self, out: BoundaryOutput) -> None:
        self._is_told = False
        await self._continue(out)

    async def _continue(self, out: BoundaryOutput) -> None:
        """Emit what may leave, and start calls."""
        if self._failure is not None:
            raise self._failure
        self._start_done()
        while True:
            for (epoch, has_failed), calls in groupby(self._leaving(), lambda call: (call.epoch, bool(call.error))):
                if has_failed:
                    for call in calls:
                        assert call.error is not None
                        out.refuse(call.record, call.error, epoch, call.origin)
                else:
                    out.emit_batch(_results(list(calls)), epoch)
            control = next(iter(self._started), None)
            if not isinstance(control, Control):
                break
            del self._started[control]
            self._groups_out += 1
            await out.control(control)
            self._start_done()
        self._start_caller()

    def _leaving(self) -> list[_Call]:
        """Remove the calls whose results may leave now, and return them."""
        if self._ordered:
            leaving = [entry for entry in takewhile(_is_done, self._started) if isinstance(entry, _Call)]
        else:
            leaving = self._finished.pop(self._groups_out, [])
        for call in leaving:
            del self._started[call]
        return leaving

    # -- calls -------------------------------------------------------------------------------------------

    def _start_done(self) -> None:
        """Take from the front of the waiting entries all that need no call: control records, and restored results."""
        while self._waiting and (isinstance(self._waiting[0], Control) or self._waiting[0].is_done):
            entry = self._waiting.popleft()
            self._started[entry] = None
            if isinstance(entry, _Call) and not self._ordered:
                self._finished.setdefault(entry.group, []).append(entry)

    def _start_caller(self) -> None:
        if len(self._waiting) > self._beginning and len(self._callers) < self._concurrency:
            self._beginning += 1
            work = self._work() if (noting := noting_of(self._context)) is None else self._work_noted(noting)
            caller = asyncio.get_running_loop().create_task(work, name=f"calls of {self._context.name}")
            self._callers.add(caller)

    async def _work(self) -> None:
        """Make one call after the other while records wait."""
        self._beginning -= 1
        call = self._next_call()
        for _ in range(_STARTS):
            self._start_caller()
        while call is not None:
            await self._call(call)
            if not self._ordered:
                self._finished.setdefault(call.group, []).append(call)
            if not self._ordered or next(iter(self._started)) is call:
                self._tell()
            call = self._next_call()
        # Not in a callback, which comes later: the next batch must find room for a caller.
        self._callers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _work_noted(self, noted: Callable[[Awaitable[None]], Awaitable[None]]) -> None:
        """Run `_work` where other processes ask which step runs, and where ``sys.exit`` is an error of the step."""
        try:
            await noted(self._work())
        except RecordFailure as failure:
            self._failure = failure
            self._tell()

    def _next_call(self) -> _Call | None:
        """Start the next record, if there is one and room for its result; its caller must make the call."""
        if len(self._started) >= self._started_max:
            return None
        self._start_done()
        if not self._waiting:
            return None
        call = self._waiting.popleft()
        assert isinstance(call, _Call)
        self._started[call] = None
        if not self._waiting:
            self._tell()
        return call

    def _tell(self) -> None:
        """Let the task emit what may leave, and read again if nothing waits."""
        if not self._is_told:
            self._is_told = True
            self._context.post(self._told)

    async def _call(self, call: _Call) -> None:
        attempt = 0
        while True:
            try:
                call.finish(await self._attempt(call.record))
            except RejectRecords as rejection:  # The record is bad, and would be bad again.
                call.fail(rejection)
            except Exception as error:
                if attempt < self._retries:
                    await self._context.clock.sleep(self._delay_s(attempt))
                    attempt += 1
                    continue
                call.fail(error)
            return

    def _delay_s(self, attempt: int) -> float:
        delay_s = min(self._backoff_s * 2.0 ** min(attempt, 64), self._backoff_max_s)
        return delay_s * self._random.uniform(0.5, 1.0)

    async def _attempt(self, record: Any) -> Any:
        caller = asyncio.current_task()
        assert caller is not None
        try:
            if self._timeout_s is None:
                return await self._f(record)
            async with asyncio.timeout(None) as limit:  # It expires by the clock of the job.
                timer = self._context.clock.call_later(self._timeout_s, lambda: limit.reschedule(0.0))
                try:
                    return await self._f(record)
                finally:
                    timer.cancel()
        except asyncio.CancelledError as error:
            if caller.cancelling():
                raise
            raise RuntimeError("the call was cancelled, although the job was not stopped") from error
        except TimeoutError as error:
            if self._timeout_s is None or not limit.expired():
                raise
            raise TimeoutError(f"the call did not return within timeout_s={self._timeout_s}") from error

    # -- state -------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        entries = [entry for entry in chain(self._started, self._waiting) if not isinstance(entry, ReadToEnd)]
        return super().snapshot() | {"entries": list(map(_plain, entries))}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        for kind, *fields in state["entries"]:
            if kind in _KINDS:
                self._waiting.append(control_from_plain((kind, *fields)))
                self._groups_in += 1
                continue
            epoch, record, time, *result = fields
            call = _Call(record, epoch, None, self._groups_in, time)
            if result:
                call.finish(*result)
            self._waiting.append(call)
        if self._waiting:
            self._tell()

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        records = [entry for entry in state["entries"] if entry[0] not in _KINDS]
        return self.at_start() | {"entries": records}

    def share_out(self, states: Sequence[dict[str, Any]], sharing: Sharing) -> list[dict[str, Any]]:
        """Send the records to the new subtasks as the step's edge would; all calls are made again.

        The inboxes of all new subtasks begin at the lowest watermark that the old ones had received, and bring an end
        again unless each of them had received it.
        """
        records = [[entry for entry in state["entries"] if entry[0] not in _KINDS] for state in states]
        entries: list[list[tuple[Any, ...]]] = [[] for _ in range(sharing.parallelism)]
        for epoch in sorted({entry[1] for of_subtask in records for entry in of_subtask}):
            kept = [[_batch_of([entry for entry in of_subtask if entry[1] == epoch])] for of_subtask in records]
            for subtask, batches in enumerate(sharing.records("input", kept)):
                entries[subtask] += [("record", epoch, *each) for batch in batches for each in _with_times(batch)]
        furthest = max(state["watermark"] for state in states)
        watermark = min((state["watermark"] for state in states if not state["ends"]), default=furthest)
        ends = min((state["ends"] for state in states), key=len)
        controls = [*([_plain(EpochWatermark(watermark))] if watermark >= 0 else []), *ends]
        return [{"entries": [*of_subtask, *controls], "watermark": watermark, "ends": ends} for of_subtask in entries]


def _is_done(entry: _Call | Control) -> bool:
    return isinstance(entry, _Call) and entry.is_done


def _plain(entry: _Call | Control) -> tuple[Any, ...]:
    return entry.plain() if isinstance(entry, _Call) else control_to_plain(entry)


def _results(calls: Sequence[_Call]) -> Batch:
    """Return the results as a batch, with the timestamps of their records if these have any."""
    results = [call.result for call in calls]
    return _timed(results, [call.time for call in calls])


def _timed(records: list[Any], times: list[int | None]) -> Batch:
    if all(time is None for time in times):
        return records
    return TimedBatch(records, np.array([MIN_TIME if time is None else time for time in times], np.int64))


def _batch_of(entries: Sequence[tuple[Any, ...]]) -> Batch:
    return _timed([entry[2] for entry in entries], [entry[3] for entry in entries])


def _with_times(batch: Batch) -> Iterable[tuple[Any, int | None]]:
    times = batch.times.tolist() if isinstance(batch, TimedBatch) else repeat(None)
    return zip(untimed(batch), times, strict=False)
