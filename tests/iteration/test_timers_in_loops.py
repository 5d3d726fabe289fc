"""Timers of steps whose data has ended before the loop."""

from __future__ import annotations

from typing import Any

import pytest
from iteration.iteration_support import Log, Witness, check_listener, run
from support.waiting import until

from streamiter import Flow, IterationBodyResult, Operator, Stream, connect, iterate_bounded_streams_until_termination
from streamiter.errors import JobFailed
from streamiter.iteration import terminate_after
from streamiter.testing import VirtualClock


class Alarm(Operator):
    """Sets a timer for each record."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        self._context.set_timer(5.0, record)

    def on_timer(self, payload: Any, out: Any) -> None:
        out.emit(("late", payload))

    def input_ended(self, name: str, out: Any) -> None:
        out.emit(("the rest", name))


class AlarmAfterTheEnd(Alarm):
    """Sets a timer when the iteration ends, long after its data has ended."""

    def finish(self, out: Any) -> None:
        self._context.set_timer(1.0, None)


def build(alarm: type[Alarm], log: Log) -> Flow:
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(variable=variables[0], data=data[0].process(alarm, name="alarm"))
        seen = both.process(
            lambda: Witness(
                log, on_record=lambda record, context, out: out.emit(record) if isinstance(record, int) else None
            ),
            name="seen",
        )
        return IterationBodyResult([seen], [seen], terminate_after(seen, rounds=200))

    [out] = iterate_bounded_streams_until_termination([flow.from_items([0])], [flow.from_items([7])], body)
    out.collect()
    return flow


async def test_a_timer_does_not_fire_when_the_data_of_its_step_has_ended() -> None:
    """The timer's record had an epoch that was complete at the other steps, and came after its callback."""
    clock, log = VirtualClock(), Log()
    job = await build(Alarm, log).start(clock=clock)
    await until(lambda: any(entry[0] == "callback" for entry in log["seen", 0]))
    await clock.advance(10)
    await job.wait()
    check_listener(log["seen", 0])
    records = [entry[1] for entry in log["seen", 0] if entry[0] == "record"]
    assert ("the rest", "input") in records
    assert ("late", 7) not in records


def test_a_timer_that_is_set_when_the_data_has_ended_is_refused() -> None:
    """The timer was silently never called."""
    with pytest.raises(JobFailed, match=r"context\.set_timer: expected a step whose data has not ended, given one"):
        run(build(AlarmAfterTheEnd, Log()))
