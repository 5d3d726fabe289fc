"""Bounded iterations of all kinds of streams and operators: variables, empty inputs, threads, and fairness."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from iteration.bounded_support import AHEAD, CRITERIA, SEEDS, iterate, nothing
from iteration.iteration_support import (
    SMALL,
    CutItems,
    Dawdle,
    Log,
    Witness,
    callbacks,
    check_listener,
    cut_items,
    ended,
    kinds,
    run,
    tagged,
    with_coroutines,
)
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import JobFailed
from streamiter.iteration import map_with
from streamiter.runtime.plan import ChannelLimits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_several_variables_of_different_parallelism_are_aligned_together(seed: int, ahead: int | None) -> None:
    """One variable without feedback delayed the others, or ended the loop."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        steps = [
            stream.process(
                lambda: Witness(log, on_record=lambda x, context, out: out.emit(x - 1) if x else None),
                name=f"step {number}",
            )
            for number, stream in enumerate(variables)
        ]
        return IterationBodyResult(steps, [tagged(stream) for stream in variables])

    starts = [[5, 1], [0, 2, 2], []]
    initial = [
        cut_items(flow, items, seed=seed, parallelism=parallelism)
        for items, parallelism in zip(starts, (2, 3, 1), strict=True)
    ]
    outputs = [output.collect() for output in iterate(initial, [], body, ahead)]
    run(flow, seed=seed, limits=SMALL)
    for items, seen in zip(starts, outputs, strict=True):
        assert sorted(seen.items) == sorted((k - epoch, epoch) for k in items for epoch in range(k + 1))
    assert len(log) == 6
    for entries in log.values():
        check_listener(entries)
        assert callbacks(entries) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_may_be_a_union_and_repartitioned(seed: int) -> None:
    """A head did not align the channels of all steps that fed back to it."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        stepped = variables[0].rebalance().map(lambda x: x - 1, parallelism=3).filter(lambda x: x > 0)
        even = stepped.filter(lambda x: x % 2 == 0).process(lambda: Dawdle(seed)).partition_by(lambda x: x)
        odd = stepped.filter(lambda x: x % 2 == 1).key_by(lambda x: x).process(WithoutState, parallelism=1)
        return IterationBodyResult([even.union(odd.rebalance())], [tagged(stepped)])

    [output] = iterate([cut_items(flow, [6, 3, 1], seed=seed, parallelism=2)], [], body)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    assert sorted(seen.items) == sorted((left, start - 1 - left) for start in (6, 3, 1) for left in range(1, start))


class WithoutState(Operator):
    """Passes each record on."""

    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_empty_inputs_everywhere(parallelism: int, ahead: int | None) -> None:
    """A loop with empty inputs did not end, or an instance received more than one callback."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = connect(variable=variables[0], left=data[0], right=data[1]).process(lambda: Witness(log), name="step")
        return IterationBodyResult([step], [step], step.filter(lambda x: True))

    data = [nothing(flow, parallelism), replayed(nothing(flow, parallelism))]
    [output] = iterate([nothing(flow, parallelism)], data, body, ahead)
    seen = output.collect()
    run(flow)
    assert seen.items == []
    for subtask in range(parallelism):
        check_listener(log["step", subtask])
        assert callbacks(log["step", subtask]) == [0]
        assert kinds(log["step", subtask], "terminated") == [("terminated", 1)]


def test_a_body_that_returns_its_arguments_ends_with_empty_variables() -> None:
    """Arguments of the body were refused as feedback or output."""
    flow = Flow("loop")
    outputs = iterate(
        [nothing(flow)],
        [flow.from_items([1, 2]), replayed(flow.from_items([3]))],
        lambda variables, data: IterationBodyResult(variables, {"plain": data[0], "again": data[1]}, data[0]),
    )
    seen = {name: stream.collect() for name, stream in outputs.items()}
    run(flow)
    assert {name: collected.items for name, collected in seen.items()} == {"plain": [1, 2], "again": [3]}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("following", [iterate_bounded_streams_until_termination, iterate_unbounded_streams])
def test_outputs_are_read_downstream_and_by_a_following_iteration(seed: int, following: Any) -> None:
    """Outputs kept the epochs of the first iteration, or ended before it."""
    flow, log = Flow("loop"), Log()

    def first(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        stepped = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([stepped.filter(lambda x: x < 4)], {"numbers": stepped})

    def second(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        halved = variables[0].process(lambda: Witness(log), name="second").map(lambda x: x // 2)
        return IterationBodyResult([halved.filter(lambda x: x > 0)], [tagged(variables[0]), tagged(data[0])])

    numbers = iterate([flow.from_items([0])], [], first)["numbers"]
    assert numbers.is_bounded
    total = numbers.map(lambda x: x * 10).reduce_all(lambda a, b: a + b).collect()
    variables, data = following([numbers], [numbers.map(str)], second)
    seen, seen_data = variables.collect(), data.collect()
    run(flow, seed=seed, limits=SMALL)
    assert total.items == [100]
    assert sorted(seen.items) == sorted([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (1, 1), (2, 1), (1, 2)])
    assert sorted(seen_data.items) == [("1", 0), ("2", 0), ("3", 0), ("4", 0)]
    check_listener(log["second", 0])
    assert callbacks(log["second", 0]) == [0, 1, 2]


AsyncWitness = with_coroutines(Witness)


class ThreadWitness(Witness):
    """Handles its records in a thread."""

    runs_in_thread = True


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [AsyncWitness, ThreadWitness])
@pytest.mark.parametrize("ahead", AHEAD)
def test_coroutines_and_threads_have_the_same_calls(kind: type[Witness], ahead: int | None, seed: int) -> None:
    """Records emitted in one epoch were sent with the next epoch."""
    flow, log = Flow("loop"), Log()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        step = variables[0].process(
            lambda: kind(
                log,
                on_record=lambda x, context, out: out.emit(("record", x)),
                on_callback=lambda epoch, context, out: out.emit(("callback", epoch)),
                on_terminated=lambda context, out: out.emit(("terminated", None)),
            ),
            name="step",
        )
        numbers = step.filter(lambda x: x[0] == "record").map(lambda x: x[1] + 1).filter(lambda x: x < 3)
        return IterationBodyResult([numbers], [tagged(step)])

    [output] = iterate([flow.from_items([0])], [], body, ahead)
    seen = output.collect()
    run(flow, seed=seed, limits=SMALL)
    check_listener(log["step", 0])
    expected = [((what, epoch), epoch) for epoch in range(3) for what in ("record", "callback")]
    assert sorted(seen.items, key=repr) == sorted([*expected, (("terminated", None), 3)], key=repr)


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
@pytest.mark.parametrize("ahead", AHEAD)
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

    iterate([nothing(flow)], [replayed(flow.from_items(range(100)))], body)
    with pytest.raises(JobFailed, match="map_with: expected a value of the variable in epoch 0, given none"):
        run(flow, limits=SMALL)
