"""Windows and joins do what each case of ``cases.txt`` says: as pure data, from their state, and as a running flow.

After each action of a case the job comes to rest, in virtual time. So the results have the place that the case gives
them, and their order is that of the flow.
"""

import json
from typing import Any

import pytest
from event_time.cases import Action, Case, Record, read_cases
from event_time.operators import Countdown
from event_time.pure_runs import Run, shown

from streamiter import Flow, Operator, OutputTag, Stream, calendar, hopping, session, sliding, tumbling
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Context, Output
from streamiter.operators.keyed_state import KeyedStates
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.values.times import MAX_TIME

# The other cases are about watermarks and timers of the engine.
CASES = [case for case in read_cases() if case.number not in (16, 17, 25)]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.kind}")
def test_each_action_causes_what_the_case_says(case: Case, restarts: bool, backend: KeyedStates | None) -> None:
    run = Run(case, backend)
    for action in case.actions:
        assert run.act(action) == list(action.expected), action
        if restarts:
            run.kept.restart()
    if case.kind != "asof":  # A table keeps the last version of each key.
        assert not run.kept.states()


LATE = OutputTag("late")
IDLE_AFTER_S, TICK_S, LOOK_S, NEW_PARTITIONS_AFTER_S = 100.0, 1.0, 1.0, 60.0
NOTHING = "nothing"
"""The key of a record that only keeps its partition from falling idle; it is dropped behind ``event_time``."""


class Watermarks(Operator):
    """Emits each event-time watermark that it reaches."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None: ...

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        out.emit(f"w={'MAX' if watermark == MAX_TIME else watermark}")
        return watermark


class FlowRun:
    """A case at work: ``act`` returns what an action causes, with late records last."""

    def __init__(self, case: Case, parallelism: int) -> None:
        self.case = case
        self.clock = VirtualClock()
        self.broker = MemoryBroker()
        self.flow = Flow("case", parallelism=parallelism)
        sides = sorted({action.record.side for action in case.actions if action.record is not None})
        self.sides = {side or "records": int(case.options.get("parts", 1)) for side in sides}

    async def start(self) -> None:
        for side, partitions in self.sides.items():
            await self.broker.topic(side).create(partitions=partitions)
        results = self._step()
        self.results = results.collect()
        has_late = self.case.kind not in ("wm", "timers")
        self.late = (results.side_output(LATE) if has_late else results.filter(lambda result: False)).collect()
        self.job = await self.flow.start(clock=self.clock)
        await self.clock.advance(0)

    async def act(self, action: Action) -> list[str]:
        before, late_before = len(self.results), len(self.late)
        if action.record is not None:
            await self.write(action.record)
        elif action.name == "tick":
            await self.clock.advance(TICK_S)
        elif action.name == "idle":
            await self.fall_idle(action.partition)
        elif action.name == "new":
            assert action.partition is not None
            await self.broker.topic("records").create(partitions=action.partition + 1)
            await self.clock.advance(NEW_PARTITIONS_AFTER_S)
        elif action.name == "end":  # The partition ends behind the record before; the step looks now and then.
            await self.clock.advance(LOOK_S)
        else:
            assert action.name == "END"
            await self.job.stop("drain")
        await self.clock.advance(0)
        late = [record["at"] for record in self.late.items[late_before:]]
        assert late in ([], [action.record and action.record.time]), "a late record leaves as it came"
        return [*self.results.items[before:], *["late"] * len(late)]

    async def write(self, record: Record) -> None:
        at, later = record.timer or (None, None)
        value = {"key": record.key, "at": record.time, "value": record.value, "timer": at, "again": later}
        writer = await self.broker.topic(record.side or "records").open_writer()
        await writer.write(OutgoingBatch([json.dumps(value).encode()], partition=record.partition))
        await writer.close()

    async def fall_idle(self, partition: int | None) -> None:
        """Let so much time pass that this partition is idle, while each other one has a record."""
        await self.clock.advance(IDLE_AFTER_S * 0.75)
        for other in range(self.sides["records"]):
            if other != partition:
                await self.write(Record(NOTHING, -1_000_000, partition=other))
        await self.clock.advance(IDLE_AFTER_S * 0.5)

    # -- the flow ----------------------------------------------------------------------------------------

    def _timed(self, side: str) -> Stream:
        # A partition ends behind its last record if the case says so.
        ends = [action.partition for action in self.case.actions if action.name == "end"]
        counts = [
            sum(action.record is not None and action.record.partition == n for action in self.case.actions)
            for n in range(2)
        ]
        stop = {n: counts[n] + (n not in ends) for n in range(2)} if ends else None
        source = self.flow.source(self.broker.topic(side), stop=stop, name=side, parallelism=1)
        timed = source.event_time(
            "at",
            unit="ms",
            check_unit=False,
            out_of_orderness_s=int(self.case.options.get("bound", 0)) / 1000,
            idle_after_s=IDLE_AFTER_S,
            name=f"times of {side}",
        )
        return timed.filter(lambda record: record["key"] != NOTHING)

    def _keyed(self, side: str) -> KeyedStream:
        return self._timed(side).key_by(lambda record: str(record["key"]))

    def _step(self) -> Stream[str]:
        kind, options = self.case.kind, self.case.options
        numbers = [int(argument) / 1000 for argument in self.case.arguments if argument.lstrip("-").isdigit()]
        if kind == "wm":
            return self._timed("records").process(Watermarks)
        if kind == "timers":
            fired = self._keyed("records").process(Countdown)
            return fired.map(lambda pair: f"{pair[0]}!{pair[1]}")
        if kind == "dedup":
            return self._keyed("records").deduplicate("value", within_s=numbers[0], late=LATE)
        if kind == "asof":
            stream, table = self._keyed("S"), self._keyed("T")
            return stream.join_table(table, value="value", time="event", strict="strict" in options, late=LATE)
        if kind in ("inner", "left"):
            left, right = self._keyed("L"), self._keyed("R")
            return left.interval_join(right, lower_s=numbers[0], upper_s=numbers[1], how=kind, late=LATE)
        makers: Any = {"tumbling": tumbling, "hopping": hopping, "sliding": sliding, "session": session}
        return (
            self._keyed("records")
            .window(
                calendar("day", *self.case.arguments) if kind == "day" else makers[kind](*numbers),
                allowed_lateness_s=int(options.get("late", 0)) / 1000,
                early_every_s=TICK_S if any(action.name == "tick" for action in self.case.actions) else None,
                results="retracting" if "retract" in options else "accumulating",
                late=LATE,
            )
            .aggregate(("sum", "value"))
        )


def shown_as_in_cases(case: Case, result: Any) -> str:
    """Return a result of the flow as the case has it."""
    if case.kind in ("wm", "timers"):
        return str(result)
    if case.kind == "dedup":
        return f"{result['key']}@{result['at']}={result['value']}"
    if case.kind == "asof":
        record, version = result
        return f"{record['key']}@{record['at']}={version}"
    if case.kind in ("inner", "left"):
        times = ["-" if side is None else side["at"] for side in result]
        return f"{(result[0] or result[1])['key']}({times[0]},{times[1]})"
    return shown(result)


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("case", list(read_cases()), ids=lambda case: f"{case.number}-{case.kind}")
async def test_each_action_causes_in_a_flow_what_the_case_says(case: Case, parallelism: int) -> None:
    run = FlowRun(case, parallelism)
    await run.start()
    for action in case.actions:
        caused = [each if each == "late" else shown_as_in_cases(case, each) for each in await run.act(action)]
        # The order of the subtasks is not given.
        order = list if parallelism == 1 else sorted
        assert order(caused) == order(action.expected), action
    assert run.job.statistics().state == "finished"
