"""The messages in docs/loop-problems.md are the messages of the engine."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamiter import (
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import StreamiterError
from streamiter.iteration import all_reduce, map_with, terminate_after
from streamiter.operators import Source, SourceBatch
from streamiter.testing import VirtualClock

PAGE = Path(__file__).parents[2] / "docs" / "loop-problems.md"


class Endless(Source):
    """A source that emits one record and never ends."""

    bounded = False

    def open(self, context: Any, positions: Any) -> None:
        self.records = [1]

    async def read(self) -> Any:
        if not self.records:
            await asyncio.Event().wait()
        return SourceBatch([self.records.pop()], {})


def learning(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    """Return a loop in which the sum of each epoch's data makes the next model."""
    sums = all_reduce(map_with(data[0], variables[0], lambda model, numbers: [model + sum(numbers)]))
    models = map_with(sums, variables[0], lambda model, sums: [sums[0]])
    return IterationBodyResult([models], [models], terminate_after(models, rounds=30))


def doubling(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    """Return a loop that feeds each record back twice."""
    return IterationBodyResult([variables[0].flat_map(lambda x: [x, x])], [])


LIMITS = IterationConfig(replay_memory_bytes=1000, feedback_limits=FeedbackLimits(memory_bytes=1000, disk_bytes=10_000))


def epochs_of_endless_data(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [map_with(data[0], variables[0], lambda value, batch: batch)])

    iterate_unbounded_streams([flow.from_items([0])], [flow.from_source(Endless)], body)


def limit_without_epochs(flow: Flow) -> None:
    iterate_unbounded_streams(
        [flow.from_items([0])],
        [flow.from_source(Endless)],
        lambda variables, data: IterationBodyResult(variables, data),
        IterationConfig(max_epochs_ahead=0),
    )


def no_initial_value(flow: Flow) -> None:
    data = replayed(flow.from_items([1, 2]))
    iterate_bounded_streams_until_termination([flow.from_items([])], [data], learning)


def two_initial_values(flow: Flow) -> None:
    data = replayed(flow.from_items([1, 2]))
    iterate_bounded_streams_until_termination([flow.from_items([0, 1])], [data], learning)


def too_much_replayed(flow: Flow) -> None:
    data = replayed(flow.from_items(np.ones(100_000)))
    iterate_bounded_streams_until_termination([flow.from_items([0])], [data], learning, LIMITS)


def too_much_fed_back(flow: Flow) -> None:
    iterate_bounded_streams_until_termination([flow.from_items([0])], [], doubling, LIMITS)


def sink_inside(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        variables[0].collect()
        return IterationBodyResult(variables, variables)

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


def stream_from_outside(flow: Flow) -> None:
    outside = flow.from_items([1])

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [outside.map(lambda x: x)])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


def waiting_for_the_end(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        sums = data[0].reduce_all(lambda a, b: a + b)
        return IterationBodyResult([sums], [sums])

    data = replayed(flow.from_items([1, 2]))
    iterate_bounded_streams_until_termination([flow.from_items([0])], [data], body)


def wants_the_end_first(flow: Flow) -> None:
    class AfterTotal(Operator):
        def wanted_inputs(self) -> tuple[str, ...]:
            return ("total",)

        def process_total(self, record: Any, out: Any) -> None: ...

        def process_numbers(self, record: Any, out: Any) -> None: ...

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        total = variables[0].reduce_all(lambda a, b: a + b)
        return IterationBodyResult([connect(total=total, numbers=variables[0]).process(AfterTotal)], [])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


def runs_inside(flow: Flow) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        flow.run()
        return IterationBodyResult(variables, variables)

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


def keeps_a_stream(flow: Flow) -> None:
    kept: list[Stream] = []

    def part(streams: list[Stream]) -> list[Stream]:
        kept.append(streams[0].map(lambda x: x))
        return 1 / 0  # type: ignore[return-value]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        with contextlib.suppress(ZeroDivisionError):
            for_each_round(variables, part)
        return IterationBodyResult(kept, kept)

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


def maps_two(flow: Flow) -> None:
    flow.from_items([1]).map(lambda model, row: model)


def wants_no_input(flow: Flow) -> None:
    class Misspelt(Train):
        def wanted_inputs(self) -> tuple[str, ...]:
            return ("modle",)

    connect(model=flow.from_items([1]), examples=flow.from_items([1])).process(Misspelt)


def listens_outside(flow: Flow) -> None:
    class Listening(Operator, IterationListener):
        def process(self, record: Any, out: Any) -> None: ...

    flow.from_items([1]).process(Listening)


MESSAGES: list[tuple[Callable[[Flow], None], str]] = [
    (
        epochs_of_endless_data,
        "epochs_in_order expected data with epochs, given endless data without epochs, which stays in epoch 0 for ever",
    ),
    (limit_without_epochs, "max_epochs_ahead=0 expected data with epochs, given data stream 0"),
    (
        no_initial_value,
        "map_with: expected a value of the variable in epoch 0, given none; begin with one initial value",
    ),
    (
        two_initial_values,
        "map_with: expected one value of the variable in an epoch, given a second in epoch 0; bring them together "
        "first, for instance with all_reduce (one array is [array]: the rows of an array are records)",
    ),
    (too_much_replayed, "expected at most 10000 bytes of replayed data on disk"),
    (too_much_fed_back, "expected at most 10000 bytes of batches waiting on disk"),
    (
        sink_inside,
        "expected no collect inside an iteration body, given one; return the stream in output_streams and put the "
        "sink behind the iteration",
    ),
    (stream_from_outside, "expected streams that come in through the body's arguments"),
    (waiting_for_the_end, "whose records arrive only when it has ended; for a result of each epoch write"),
    (wants_the_end_first, "whose records arrive only when it has ended; for a result of each epoch write"),
    (runs_inside, "expected a flow whose iterations are built, given one inside the body of an iteration"),
    (listens_outside, "where no epoch ends and no callback comes"),
    (keeps_a_stream, "which was taken out again when the call that added it failed"),
    (maps_two, "expected a function that is called as f(record)"),
    (wants_no_input, "wanted_inputs(): expected names of inputs (model, examples), given 'modle'"),
]


def build_and_run(build: Callable[[Flow], None]) -> None:
    flow = Flow("job")
    build(flow)
    flow.run()


@pytest.mark.parametrize(("build", "message"), MESSAGES, ids=[build.__name__ for build, _ in MESSAGES])
def test_messages_on_the_page_are_those_of_the_engine(build: Callable[[Flow], None], message: str) -> None:
    """A reader searched the page for the text of a message, and did not find it."""
    assert f"`{message}`" in PAGE.read_text(encoding="utf-8")
    with pytest.raises(StreamiterError) as raised:
        build_and_run(build)
    assert message in str(raised.value)


def test_a_loop_that_ends_too_early_ends_where_the_page_says(caplog: pytest.LogCaptureFixture) -> None:
    """The page described another symptom than the engine shows."""
    caplog.set_level(logging.WARNING, logger="streamiter.job")
    flow = Flow("job")
    [models] = iterate_bounded_streams_until_termination([flow.from_items([0])], [flow.from_items([1, 2])], learning)
    collected = models.collect()
    [loop] = flow.run().loops
    assert (loop.ended_in, len(collected.items)) == (2, 1)
    reason = "nothing was fed back, though the termination criteria asked to continue"
    assert loop.end_reason == reason
    assert reason in caplog.text
    assert f"`{reason}`" in PAGE.read_text(encoding="utf-8")


class Train(Operator):
    """An operator that waits for a second model, which never arrives."""

    has_model = False

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("examples",) if self.has_model else ("model",)

    def process_model(self, model: Any, out: Any) -> None:
        self.has_model = True

    def process_examples(self, example: Any, out: Any) -> None:
        self.has_model = False


async def test_the_log_names_the_held_step(caplog: pytest.LogCaptureFixture) -> None:
    """The page quoted a line of the log that was never written."""
    caplog.set_level(logging.WARNING, logger="streamiter.job")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        trained = connect(model=variables[0], examples=data[0]).process(Train, name="train")
        return IterationBodyResult([trained], [trained])

    flow, clock = Flow("job"), VirtualClock()
    data = epochs_every(flow.from_source(Endless), records=1)
    iterate_unbounded_streams([flow.from_items([])], [data], body)
    job = await flow.start(clock=clock)
    await clock.advance(700)
    await job.stop("suspend")
    line = "although there is input: train[0] is held: it has input that it does not want now"
    assert f"`{line}`" in PAGE.read_text(encoding="utf-8")
    assert line in caplog.text


async def test_the_log_names_the_channel_that_records_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    """A synchronous loop waited for a silent partition, and no line of the log said so."""
    caplog.set_level(logging.WARNING, logger="streamiter.job")

    class SecondOnly(Endless):
        def open(self, context: Any, positions: Any) -> None:
            self.records = [1] * context.subtask_index

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        train = data[0].rebalance().map(lambda x: x, name="train", parallelism=1)
        return IterationBodyResult([variables[0]], [train])

    flow, clock = Flow("job"), VirtualClock()
    data = epochs_every(flow.from_source(SecondOnly, parallelism=2), records=1)
    config = IterationConfig(max_epochs_ahead=0)
    iterate_unbounded_streams([flow.from_items([])], [data], body, config)
    job = await flow.start(clock=clock)
    await clock.advance(700)
    await job.stop("abort")
    line = "train[0] is held: its records come after those of data 0[0] → train[0]"
    assert f"`{line}`" in PAGE.read_text(encoding="utf-8")
    assert line in caplog.text
