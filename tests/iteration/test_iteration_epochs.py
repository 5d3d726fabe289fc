"""The epochs of records from records, callbacks, timers and ends."""

import asyncio
from typing import Any

import pytest
from iteration.iteration_support import (
    SMALL,
    CutItems,
    Endless,
    Log,
    WithEpoch,
    Witness,
    callbacks,
    check_listener,
    cut_items,
    ended,
    run,
    tagged,
)
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.errors import JobFailed
from streamiter.iteration import terminate_after
from streamiter.testing import VirtualClock

SIDE = OutputTag("side")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize("says", [False, True], ids=["", "says so"])
@pytest.mark.parametrize("epochs", [3, 1, 0])
def test_the_iteration_ends_after_the_epoch_in_which_the_end_of_its_data_arrives(
    epochs: int, says: bool, ahead: int | None, seed: int
) -> None:
    """The loop ended in the epoch after the last data, and dropped the last gradients, fed back by ``input_ended``.

    The end of data with epochs 0, 1, 2 arrives in epoch 3 at the latest, so that 4 is the first possible last epoch.
    Plain data has epoch 0, and so has its end.
    """
    flow, log = Flow("loop"), Log()

    def on_ended(name: str, out: Any) -> None:
        if name == "data" and says:
            out.emit("over", tag=SIDE)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        met = connect(variable=variables[0], data=data[0]).process(
            lambda: Witness(log, on_record=lambda *_: None, on_ended=on_ended), name="meet", parallelism=1
        )
        return IterationBodyResult([met.side_output(SIDE)], [tagged(variables[0])])

    numbers = cut_items(flow, range(max(1, epochs)), seed=seed)
    given = epochs_every(numbers, records=1) if epochs else numbers
    [seen] = iterate_unbounded_streams(
        [flow.from_items([])], [given], body, IterationConfig(max_epochs_ahead=ahead if epochs else None)
    )
    collected = seen.collect()
    [loop] = run(flow, seed=seed, limits=SMALL).loops
    first_that_may_be_last = epochs + 1
    if says:
        [(record, epoch)] = collected.items
        assert record == "over"
        assert 1 <= epoch <= first_that_may_be_last
        assert loop.ended_in == max(first_that_may_be_last, epoch + 1)
    else:
        assert collected.items == []
        assert loop.ended_in == first_that_may_be_last
    assert callbacks(log["meet", 0]) == list(range(loop.ended_in))


@pytest.mark.parametrize("ahead", [None, 0])
async def test_data_ends_although_the_channel_with_the_last_epoch_ends_first(ahead: int | None) -> None:
    """The last watermark came behind the end of the input, and the loop never ended."""
    flow, log, long_ended = Flow("loop"), Log(), asyncio.Event()

    async def end_long() -> None:
        long_ended.set()

    def stamped(items: range, at_end: Any) -> Stream:
        return epochs_every(flow.from_source(lambda: CutItems(items, 0, at_end=at_end)), records=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0]], [data[0].process(lambda: Witness(log), name="heard")])

    data = stamped(range(5), end_long).union(stamped(range(2), long_ended.wait))
    config = IterationConfig(max_epochs_ahead=ahead)
    iterate_unbounded_streams([flow.from_items([])], [data], body, config)
    await ended(await flow.start())
    check_listener(log["heard", 0])
    assert callbacks(log["heard", 0]) == [0, 1, 2, 3, 4]


def test_a_mini_batch_holds_records_of_one_epoch() -> None:
    """The rest of a mini-batch was sent with the next epoch, after the next operator's callback."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(lambda x: x + 1)
        raised.batch(2).process(lambda: Witness(log), name="batches")
        return IterationBodyResult([raised.filter(lambda x: x % 10 < 2)], [])

    synchronous = IterationConfig(max_epochs_ahead=0)
    iterate_unbounded_streams([cut_items(flow, [0, 10, 20], seed=4)], [], body, synchronous)
    run(flow, limits=SMALL)
    without_end = log["batches", 0][: log["batches", 0].index(("input ended", "input"))]
    assert without_end == [
        ("record", [1, 11], 0),
        ("record", [21], 0),
        ("callback", 0),
        ("record", [2, 12], 1),
        ("record", [22], 1),
        ("callback", 1),
    ]


def test_a_mini_batch_of_stamped_data_holds_records_of_one_epoch_also_before_the_loop() -> None:
    """The rest of one group was filled up with records of the next group, and counted to it."""
    flow, log = Flow("loop"), Log()
    batches = epochs_every(flow.from_items(range(10)), records=5).batch(3)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        data[0].process(lambda: Witness(log), name="batches")
        return IterationBodyResult([variables[0]], [])

    iterate_unbounded_streams([flow.from_items([])], [batches], body)
    run(flow)
    records = [entry for entry in log["batches", 0] if entry[0] in ("record", "callback")]
    assert records == [
        ("record", [0, 1, 2], 0),
        ("record", [3, 4], 0),
        ("callback", 0),
        ("record", [5, 6, 7], 1),
        ("record", [8, 9], 1),
        ("callback", 1),
    ]


class Alarm(Operator, IterationListener):
    """Sets a timer in each callback; the timer emits a record."""

    def process(self, record: Any, out: Any) -> None:
        pass

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        context.set_timer(1.0, payload=epoch_watermark)

    def on_timer(self, payload: Any, out: Any) -> None:
        out.emit(payload)


async def test_a_record_of_a_timer_has_the_epoch_after_the_watermark() -> None:
    """A record of an earlier epoch arrived after its watermark, and was not counted."""
    clock, flow = VirtualClock(), Flow("loop")
    log: list[Any] = []

    class Keep(WithEpoch):
        def process(self, record: Any, out: Any) -> None:
            log.append((record, self._context.epoch))

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        data[0].process(Alarm).process(Keep)
        return IterationBodyResult([variables[0]], [])

    stamped = epochs_every(flow.from_source(Endless([1, 2, 3])), records=1)
    iterate_unbounded_streams([flow.from_items([])], [stamped], body)
    job = await flow.start(clock=clock)
    await until(lambda: any(task.epoch_watermark == 2 for task in job.statistics().tasks))
    await clock.advance(1.0)
    await until(lambda: len(log) == 3)
    assert log == [(0, 3), (1, 3), (2, 3)]
    await job.stop("drain")
    await ended(job)


class Bell(Operator):
    """Sets a timer for each record."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        self._context.set_timer(5.0, record)

    def on_timer(self, payload: Any, out: Any) -> None:
        out.emit(("late", payload))

    def input_ended(self, name: str, out: Any) -> None:
        out.emit(("the rest", name))


class AlarmAfterTheEnd(Bell):
    """Sets a timer when the iteration ends, long after its data has ended."""

    def finish(self, out: Any) -> None:
        self._context.set_timer(1.0, None)


def build(alarm: type[Bell], log: Log) -> Flow:
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
    job = await build(Bell, log).start(clock=clock)
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
