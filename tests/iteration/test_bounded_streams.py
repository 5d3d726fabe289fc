"""Bounded iterations that are watched while they run, starve no input, and name the step of an error."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from iteration.iteration_support import (
    SMALL,
    CutItems,
    Dawdle,
    Log,
    Witness,
    callbacks,
    check_listener,
    ended,
    kinds,
    run,
    run_shuffled,
    with_coroutines,
)
from iteration.loop_cases import BOUNDED, CRITERIA
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed
from streamiter.iteration import map_with

SEEDS = range(3)


def iterate(initial: Sequence[Stream], data: Sequence[Any], body: Any, ahead: int | None = 0) -> Any:
    return iterate_bounded_streams_until_termination(initial, data, body, IterationConfig(max_epochs_ahead=ahead))


AsyncWitness = with_coroutines(Witness)


PLACES = ["on_epoch_watermark_incremented", "on_iteration_terminated", "input_ended", "finish", "close"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("base", [Witness, AsyncWitness])
def test_an_exception_in_any_callback_names_the_step(place: str, base: type[Witness]) -> None:
    """An exception outside of ``process`` has no record, and its message named only the engine."""
    flow, log = Flow("loop"), Log()

    def fails(self: Any, *_: Any) -> None:
        raise ValueError(f"{place} went wrong")

    failing = type("Failing", (base,), {place: fails})

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = variables[0].map(lambda x: x + 1).process(lambda: failing(log), name="step")
        return IterationBodyResult([step.filter(lambda x: x < 3)], [])

    iterate([flow.from_items([0])], [], body)
    with pytest.raises(
        JobFailed, match=rf"^flow 'loop', step 'step' \(test_bounded_streams.py:\d+\): ValueError: {place} went"
    ):
        run(flow)


class CountTimes(Operator, IterationListener):
    """Counts how often each record arrives; asks for twenty rounds."""

    def __init__(self, times: Counter[int]) -> None:
        self._times = times

    def process_batch(self, batch: Any, out: Any) -> None:
        self._times.update(batch)
        out.emit_batch(batch)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if epoch_watermark + 1 < 20:
            out.emit("go on", tag=CRITERIA)


@pytest.mark.parametrize("ahead", [0, 1, None])
@pytest.mark.parametrize("limits", [None, ChannelLimits(records=100)])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_feedback_does_not_starve_input(ahead: int | None, limits: ChannelLimits | None, parallelism: int) -> None:
    """30,000 records in a loop kept their source from ending: epoch 0 never completed, and the job never ended."""
    flow, times = Flow("loop"), Counter[int]()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        counted_ = variables[0].process(lambda: CountTimes(times), name="map")
        return IterationBodyResult([counted_], [], counted_.side_output(CRITERIA))

    iterate([flow.from_items(range(30_000), parallelism=parallelism)], [], body, ahead)
    run(flow, limits=limits)
    assert len(times) == 30_000
    if ahead == 0:
        assert set(times.values()) == {21}
    else:
        assert min(times.values()) >= 21


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", BOUNDED)
async def test_feedback_from_data_that_ends_before_the_variables(seed: int, ahead: int | None) -> None:
    """The head had ended, received one more epoch, and reported it as a bug in the engine."""
    flow, may_end = Flow("loop"), asyncio.Event()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([data[0].filter(lambda x: False)], [variables[0]])

    late = flow.from_source(lambda: CutItems([1, 2], seed, at_end=may_end.wait))
    [output] = iterate([late], [flow.from_items([3])], body, ahead)
    seen = output.collect()
    job = await flow.start()
    await until(lambda: job.statistics().step("data 0").records_in == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    may_end.set()
    await ended(job)
    assert seen.items == [1, 2]


def test_a_step_that_wants_an_empty_variable_does_not_stall() -> None:
    """The data filled its channel and never ended, the variable's epoch never completed, and the job stalled."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [map_with(data[0], variables[0], lambda value, batch: batch)])

    iterate([flow.from_items([])], [replayed(flow.from_items(range(100)))], body)
    with pytest.raises(JobFailed, match="map_with: expected a value of the variable in epoch 0, given none"):
        run(flow, limits=SMALL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_no_record_is_further_ahead_of_the_last_complete_epoch_than_the_limit(seed: int, ahead: int) -> None:
    """Feedback ran further ahead than the limit while data of epoch 0 was still arriving."""
    flow, log, too_far = Flow("loop"), Log(), list[tuple[int, int]]()

    async def main() -> None:
        data_may_end = asyncio.Event()

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            def on_record(record: int, context: Any, out: Any) -> None:
                complete = max((loop.epoch_complete for loop in job.statistics().loops), default=-1)
                if context.epoch > max(0, complete + ahead):
                    too_far.append((context.epoch, complete))
                out.emit(record + 1)

            token = variables[0].process(lambda: Witness(log, on_record=on_record), name="token")
            slow = variables[0].process(lambda: Dawdle(seed)).filter(lambda x: False)
            return IterationBodyResult([token.filter(lambda x: x < 12).union(slow)], [data[0]])

        late = flow.from_source(lambda: CutItems([7], seed, at_end=data_may_end.wait))
        [output] = iterate([flow.from_items([0])], [late], body, ahead)
        output.collect()
        job = await flow.start(channel_limits=SMALL)
        await until(lambda: len(log.get(("token", 0), ())) > 0)
        for _ in range(200):
            await asyncio.sleep(0)
        data_may_end.set()
        await ended(job)

    run_shuffled(main(), seed)
    assert too_far == []
    assert callbacks(log["token", 0]) == list(range(12))


async def test_the_end_of_plain_data_is_reported_while_other_data_of_epoch_0_arrives() -> None:
    """A step received the end of its data only when the epoch was complete."""
    flow, log, may_end = Flow("loop"), Log(), asyncio.Event()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=data[0], right=data[1]).process(lambda: Witness(log), name="both")
        return IterationBodyResult(variables, [both])

    late = flow.from_source(lambda: CutItems([3], 0, at_end=may_end.wait))
    [output] = iterate([flow.from_items([])], [flow.from_items([1, 2]), late], body)
    output.collect()
    job = await flow.start()
    await until(lambda: ("input ended", "left") in log["both", 0])
    assert kinds(log["both", 0], "callback", "terminated") == []
    may_end.set()
    await ended(job)
    check_listener(log["both", 0])
