"""One operator at work in one subtask.

A step of a flow runs as several subtasks. In each of them an :class:`OperatorInstance` holds one operator with its
context, output, timers, event time and keyed state.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, Final, TypeVar, final

import msgspec

from streamiter.engine.graph.graph import Step
from streamiter.engine.states.backends import JobStates
from streamiter.engine.tasks.entries import AsyncEntry, Entry, EntryCounts, check_result
from streamiter.engine.tasks.failures import FailuresOf, StepNote, noted, unless_cancelled
from streamiter.engine.tasks.making import handler_of, is_awaited
from streamiter.engine.tasks.timed_entries import Timing, called_directly, make_async_entry, make_entry
from streamiter.errors import ConfigurationError, shortened
from streamiter.operators.definitions import Definition, function_in_words
from streamiter.operators.event_time import AssignEventTime
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.operator import (
    Boundary,
    BoundaryOutput,
    Context,
    IterationListener,
    JobScope,
    Notice,
    Operator,
    OperatorStatistics,
    Progress,
    known_of,
)
from streamiter.operators.output import Output, TimedOutput, pass_watermark
from streamiter.values.deferred import Encode, PlainValue
from streamiter.values.helpers.clock import Clock, TimerHandle, is_in_event_loop
from streamiter.values.records import BATCH_RECORDS, Batch, EventTimeWatermark, untimed
from streamiter.values.subtasks import key_group, subtask_of_key
from streamiter.values.times import MIN_TIME

T = TypeVar("T")


@final
class OperatorInstance(EntryCounts):
    """An operator at work in one subtask. Only its task uses it."""

    def __init__(
        self,
        step: Step,
        operator: Operator,
        subtask: int,
        *,
        clock: Clock,
        progress: Progress,
        scope: JobScope,
        post: Callable[[Notice], None],
        encode: Encode,
        states: JobStates,
        note: StepNote | None = None,
    ) -> None:
        """``note`` is where a process says which step runs."""
        self.step = step
        self.operator = operator
        self.subtask = subtask
        self.times: StepTimes | None = None
        """The event time of a step whose records have timestamps, or come with them."""
        if (step.timed or step.reads_times) and not isinstance(operator, Boundary):
            self.times = StepTimes(encode)
        self.out = Output(step.name, step.policy)
        if self.times is not None and step.timed:
            self.out = TimedOutput(step.name, step.policy, self.times)
        self._holds_back: Callable[[int, Output], int | None] | None = None
        """Asks an operator that keeps records which watermark may pass."""
        self._bind_event_time()
        self.progress = progress
        self._clock = clock
        self.note = note
        self._failures = FailuresOf(step.name, note)
        self._post = post
        self._timers: dict[int, tuple[int, Any, Any, TimerHandle]] = {}
        """By number: when the timer is due in milliseconds, its key, its payload and its handle."""
        self._timers_set = 0
        self._takes_timers = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self.is_listener = isinstance(operator, IterationListener)
        self._keys: Mapping[str, Callable[[Any], Any]] = {} if step.keys is None else step.keys.by_input
        self._states = states
        self._adopted: Definition | None = None
        self._operator_states: KeyedStates | None = None
        self.keyed: KeyedStates | None = None
        if step.keys is not None:
            self.keyed = self._make_states(step.keys.time_to_live_s)
        self.context = Context(
            name=step.name,
            subtask_index=subtask,
            parallelism=step.parallelism,
            clock=clock,
            progress=progress,
            statistics=self.statistics,
            scope=scope,
            post=post,
            set_timer=self._set_timer,
            in_iteration=step.loop is not None or step.stamped,
            keyed=self.keyed,
            encode=encode,
            times=self.times,
            takes_event_timers=hasattr(operator, "on_event_timer"),
            make_states=self._states_of_operator,
            noted=None if note is None else lambda code: noted(code, step.name, note),
        )

    def _make_states(self, time_to_live_s: float | None) -> KeyedStates:
        return self._states.of_subtask(
            self.step.name, clock=self._clock, time_to_live_s=time_to_live_s, in_thread=self.operator.runs_in_thread
        )

    def _states_of_operator(self) -> KeyedStates:
        """Return the states of an operator that finds the keys itself. In a new round they are empty."""
        if self._operator_states is None:
            self._operator_states = self._make_states(None)
        else:
            self._operator_states.clear()
        return self._operator_states

    def _bind_event_time(self) -> None:
        self._known = known_of(self.operator)
        self._holds_back = getattr(self.operator, "on_event_time_watermark", None)

    def renew(self, operator: Operator) -> None:
        """Replace the operator, which has been closed, by a new one without state."""
        self.operator = operator
        self.is_listener = isinstance(operator, IterationListener)
        self._takes_timers = True
        self._bind_event_time()
        if self._adopted is not None:
            self._known.adopt(self._adopted)
        if self.times is not None:
            self.times.clear()
        if self.keyed is not None:
            self.keyed.clear()

    def definition(self) -> Definition:
        """Return on what the meaning of its state depends, as a snapshot returns it."""
        given = {**self.operator.definition()}
        if self._keys:
            given["keys"] = {name: function_in_words(key_of) for name, key_of in self._keys.items()}
        if self.step.per_round:
            given["operator_life_cycle"] = "per round"
        try:
            plain: Definition = msgspec.json.decode(msgspec.json.encode(given))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"step {self.step.name!r}: expected {type(self.operator).__name__}.definition() to return a dict of "
                f"texts, numbers and lists, given {shortened(given)}: {error}; it is stored as JSON"
            ) from error
        return plain

    def adopt(self, definition: Definition) -> None:
        """Let the operator, and the operators of later rounds, take a state of this definition."""
        self._adopted = definition
        self._known.adopt(definition)

    def entry(self, input_name: str) -> Entry:
        """Return the function that the step before calls with a batch."""
        is_plain = self.times is None and (input_name not in self._keys or self.takes_batches(input_name))
        counts = self if is_plain else EntryCounts()
        entry = make_entry(*self._given_to(input_name), self._timing(), counts)
        return self._noting(entry if is_plain else self._counted(self._without_times(entry)))

    def async_entry(self, input_name: str) -> AsyncEntry:
        """Return the same function for an operator whose calls are awaited: the first of its task, which notes it."""
        entry = make_async_entry(*self._given_to(input_name), self._timing(), self.progress)
        return self._counted(self._without_times(entry))

    def _given_to(self, input_name: str) -> tuple[Operator, str, Output, Context, Callable[[Any], Any] | None]:
        return self.operator, input_name, self.out, self.context, self._keys.get(input_name)

    def _timing(self) -> Timing | None:
        if self.times is None or not isinstance(self.out, TimedOutput):
            return None
        return Timing(self.out, self.times, self._fire, self._after_batch)

    def _without_times(self, entry: Callable[[Batch], T]) -> Callable[[Batch], T]:
        """Return an entry that takes batches with timestamps, if the output of the step has none."""
        if self.times is None or isinstance(self.out, TimedOutput):
            return entry
        return lambda batch: entry(untimed(batch))

    def takes_batches(self, input_name: str) -> bool:
        """Return whether the operator handles whole batches of this input, not single records."""
        return handler_of(self.operator, input_name, step=self.step.name, keyed=self.keyed is not None)[1]

    def is_awaited(self, input_names: Sequence[str]) -> bool:
        """Return whether the operator handles any of these inputs in a coroutine or in a thread."""
        return is_awaited(self.operator, input_names, step=self.step.name, keyed=self.keyed is not None)

    def count(self, batch: Batch) -> None:
        self.records_in += len(batch)
        self.batches_in += 1

    def _counted(self, handle: Callable[[Batch], T]) -> Callable[[Batch], T]:
        is_timed = self.times is not None

        def entry(batch: Batch) -> T:
            if is_timed and self.is_behind:
                self._catch_up_now()
            self.records_in += len(batch)
            self.batches_in += 1
            return handle(batch)

        return entry

    def _noting(self, entry: Entry) -> Entry:
        """Let an entry say which step runs, where others ask for it."""
        note = self.note
        if note is None:
            return entry

        running, number = note.running, note.number(self.step.name)

        def noting(batch: Batch) -> None:
            before = running[0]
            running[0] = number
            with self._failures:
                entry(batch)
            running[0] = before

        return noting

    def statistics(self) -> OperatorStatistics:
        out = self.out
        return OperatorStatistics(self.records_in, self.batches_in, out.records_emitted, out.rejected)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the operator, and await it if it is a coroutine. A failure names the step."""
        self.progress.handled += 1
        with self._failures:
            if self.note is not None:
                before = self.note.running[0]
                self.note.running[0] = self.note.number(self.step.name)
            result = getattr(self.operator, method)(*arguments)
            if self.note is not None:
                self.note.running[0] = before
            if result is not None and inspect.isawaitable(result):
                result = await unless_cancelled(noted(result, self.step.name, self.note), self.step.name)
            # All methods that may emit get the output.
            if result is not None and arguments and arguments[-1] is self.out:
                check_result(result)
        self.out.flush()
        if self.keyed is not None:
            self._store_states()
        if self._holds_back is not None:
            self._after_batch()
        return result

    def _store_states(self) -> None:
        """Keep the changes of states by key: a call of the operator has returned."""
        if self.keyed is not None:
            with self._failures:
                self.keyed.store()
                if self.times is not None:
                    self.times.store()

    async def input_ended(self, input_name: str) -> None:
        """Tell the operator that one of its inputs has ended."""
        if hasattr(self.operator, "input_ended"):
            await self.call("input_ended", input_name, self.out)

    async def open(self) -> None:
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        if self.times is not None and self.keyed is not None and hasattr(self.operator, "on_event_timer"):
            self.times.keep_timers_in(lambda: self._make_states(None), self._no_key(), self._prefetch)
        await self.call("open", self.context)
        if self.keyed is not None and self.keyed.time_to_live_s is not None:
            self._sweep_later(self.keyed.time_to_live_s)

    def _prefetch(self, keys: Sequence[Any]) -> None:
        """Read the states of the next timers that fire."""
        if self.keyed is not None:
            self.keyed.prefetch(keys[: self._timers_at_once])

    @property
    def _timers_at_once(self) -> int:
        """How many timers fire in one turn; then the emitted records wait for room, and the states are stored."""
        return (None if self.keyed is None else self.keyed.keys_at_once) or BATCH_RECORDS

    def _no_key(self) -> Any:
        """Return what stands for the key of event timers that are set without one: a key of this subtask."""
        index, parallelism = self.context.subtask_index, self.context.parallelism
        keys = (((), number) for number in count())
        return next(key for key in keys if subtask_of_key(key, parallelism) == index)

    async def close(self) -> None:
        """Cancel all timers and close the operator."""
        self._cancel_timers()
        if self._is_open:
            self._is_open = False
            await self.call("close")

    # -- event time ------------------------------------------------------------------------------------

    def advance(self, control: EventTimeWatermark) -> None:
        """Do as ``advance_awaited`` with an operator that is never awaited."""
        called_directly(self.advance_awaited(control))

    async def advance_awaited(self, control: EventTimeWatermark) -> None:
        """Handle an event-time watermark of the input: let timers fire, then pass it on."""
        if not self._known.assigns_event_time:
            self._reach(control)
            await self._take_turn()

    @property
    def is_behind(self) -> bool:
        """Whether some records that are due by the watermark are not emitted yet: they may exceed the memory."""
        return self._known.is_behind or self._has_due_timers

    async def catch_up(self, room: Callable[[], Awaitable[None]]) -> None:
        """Let the operator emit all that is due. ``room`` waits until there is room for more records."""
        while self.is_behind:
            await room()
            await self._take_turn()

    def _catch_up_now(self) -> None:
        while self.is_behind:
            called_directly(self._take_turn())

    def end_event_time(self) -> None:
        """Send the last watermark, if event time begins at this step: its input has ended."""
        if isinstance(self.operator, AssignEventTime):
            self.operator.end()

    @property
    def event_time(self) -> int | None:
        """The event-time watermark that the step has passed on; if it passes on none, the last that arrived."""
        passed = MIN_TIME if self.out.passed is None else self.out.passed.time
        if self.times is not None and not self._known.assigns_event_time:
            passed = max(self.times.passed, passed)
        return None if passed == MIN_TIME else passed

    def repeat_watermark(self) -> None:
        """Tell the readers the watermark that they were told before the job was restored."""
        if self.times is not None and self.times.passed != MIN_TIME and self.step.watermarked:
            pass_watermark(self.out, EventTimeWatermark(self.times.passed))

    def _reach(self, control: EventTimeWatermark) -> None:
        """Note a watermark."""
        times = self.times
        assert times is not None
        times.is_idle = control.is_idle
        if control.time > times.watermark:
            with self._failures:
                times.reach(control.time)

    @property
    def _has_due_timers(self) -> bool:
        return self.times is not None and self.times.next_at <= self.times.watermark

    async def _take_turn(self) -> None:
        """Let some of the timers fire that are due; after the last one, pass on the watermark."""
        if self._has_due_timers:
            await self._fire(self._timers_at_once)
            self._store_states()
        if not self._has_due_timers:
            self._pass_turn()

    async def _fire(self, count: int | None = None) -> None:
        """Call the operator for each timer that is due, or for this many of them."""
        for payload in islice(self._due(), count):
            self.progress.handled += 1
            with self._failures:
                result = self.operator.on_event_timer(payload, self.out)  # type: ignore[attr-defined]
                if result is not None and inspect.isawaitable(result):
                    result = await unless_cancelled(noted(result, self.step.name, self.note), self.step.name)
                if result is not None:
                    check_result(result)
        self.out.flush()

    def _due(self) -> Iterator[Any]:
        """Give the payload of each timer that is due, while its time and its key are at hand."""
        times = self.times
        assert times is not None
        if times.next_at > times.watermark:
            return
        if isinstance(self.out, TimedOutput):
            self.out.end_batch()
        while (timer := times.take_due()) is not None:
            times.due = times.timestamp = timer.at
            self.context.key = timer.key
            try:
                yield timer.payload
            finally:
                times.due = None
                times.timestamp = MIN_TIME

    def _after_batch(self) -> None:
        """Keep the timers, and pass on a watermark that the operator has held back, as far as it lets it pass now."""
        if self.times is None:
            return
        with self._failures:
            self.times.store()
        if self._holds_back is not None and self.times.passed < self.times.watermark:
            self._pass_turn()
            while self._known.is_behind:
                self._pass_turn()

    def _pass_turn(self) -> None:
        """Pass on the watermark as far as the operator lets it. It may have more to do before: then it is behind."""
        times = self.times
        assert times is not None
        watermark = times.watermark
        if self._holds_back is not None:
            with self._failures:
                held_back = self._holds_back(watermark, self.out)
            self.out.flush()
            self._store_states()
            watermark = watermark if held_back is None else min(watermark, held_back)
        times.passed = max(times.passed, watermark)
        # A step that keeps records is not idle: they would be late for a reader that did not wait for them.
        now = EventTimeWatermark(times.passed, times.is_idle and times.passed == times.watermark)
        told = self.out.passed
        is_new = told is None or (told.time, told.is_idle) != (now.time, now.is_idle)
        if is_new and self.step.watermarked:
            pass_watermark(self.out, now)

    # -- timers ---------------------------------------------------------------------------------------

    def _set_timer(self, delay_s: float, key: Any, payload: Any) -> None:
        if payload is not _SWEEP and not hasattr(self.operator, "on_timer"):
            raise ConfigurationError(
                f"context.set_timer: expected {type(self.operator).__name__} to define on_timer(payload, out), "
                "given none; define it, since only on_timer is told of the timer"
            )
        if not self._takes_timers and payload is not _SWEEP:
            raise ConfigurationError(
                "context.set_timer: expected a step whose data has not ended, given one whose data has; records that "
                "the timer emits would have no epoch; emit them in input_ended"
            )
        self._timers_set += 1
        if is_in_event_loop():
            self._schedule(self._timers_set, delay_s, key, payload)
        else:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._schedule, self._timers_set, delay_s, key, payload)

    def no_more_timers(self) -> None:
        """Cancel all timers and refuse new ones: the data of the step has ended, so its readers expect no epoch."""
        self._cancel_timers()
        self._takes_timers = False

    def _cancel_timers(self) -> None:
        for *_, handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def _schedule(self, number: int, delay_s: float, key: Any, payload: Any) -> None:
        due_ms, due = self._clock.now_ms() + round(delay_s * 1000), partial(self._timer_due, number)
        handle = self._clock.call_later(max(0.0, delay_s), lambda: self._post(due))
        self._timers[number] = due_ms, key, payload, handle

    async def _timer_due(self, number: int, _out: BoundaryOutput) -> None:
        """Call ``on_timer`` with the key and the payload of a timer, unless it was cancelled."""
        self.progress.epoch = self.progress.watermark + 1
        timer = self._timers.pop(number, None)
        if timer is None:
            return
        _, key, payload, _ = timer
        if self.keyed is not None and payload is _SWEEP:
            self._sweep_later(self.keyed.drop_expired())
            return
        self.context.key = key
        await self.call("on_timer", payload, self.out)

    def _sweep_later(self, delay_s: float) -> None:
        self._set_timer(delay_s, None, _SWEEP)

    # -- state ----------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, PlainValue]:
        """Return the whole state as plain data, which may contain ``Deferred`` pieces."""
        return {
            "operator": await self.call("snapshot"),
            "keyed": None if self.keyed is None else self.keyed.snapshot(),
            "timers": [timer[:3] for timer in self._timers.values() if timer[2] is not _SWEEP],
            "takes timers": self._takes_timers,
            "event time": None if self.times is None else self.times.snapshot(),
        }

    async def restore(self, state: dict[str, PlainValue]) -> None:
        """Restore what ``snapshot`` returned. Its timers replace the timers that were set in ``open``."""
        self._cancel_timers()
        await self.call("restore", state["operator"])
        if self.keyed is not None and state["keyed"] is not None:
            with self._failures:
                if (restoring := self.keyed.restore(state["keyed"])) is not None:
                    await restoring
            if self.keyed.time_to_live_s is not None:
                self._sweep_later(self.keyed.time_to_live_s)
        now_ms = self._clock.now_ms()
        for due_ms, key, payload in state["timers"]:
            self._set_timer((due_ms - now_ms) / 1000, key, payload)
        self._takes_timers = state["takes timers"]
        if self.times is not None and state.get("event time") is not None:
            with self._failures:
                if (resuming := self.times.restore(state["event time"], key_group)) is not None:
                    await resuming


_SWEEP: Final = object()
"""The payload of the timer that drops expired keyed state."""
