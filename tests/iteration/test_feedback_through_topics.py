"""A loop through a topic has the same results as in memory, and can be watched, stopped and restored."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iteration.feedback_support import ended, iterate, run
from iteration.iteration_support import SMALL, Dawdle, Endless
from iteration.topic_loops_support import MakeTopic
from support.waiting import PATIENCE_S, until

from streamiter import (
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    epochs_every,
    feedback_through,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.errors import JobFailed
from streamiter.iteration import FeedbackRecords
from streamiter.topics import MemoryBroker, Topic


@pytest.mark.parametrize(("epochs", "end"), [(0, 1), (3, 3)])
async def test_the_end_of_data_is_written_with_the_epoch_in_which_it_returns(
    make_topic: MakeTopic, epochs: int, end: int
) -> None:
    """The end of data was written with an epoch one below that of the records before it."""
    through = await make_topic()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([feedback_through(data[0], through)], variables)

    flow = Flow("count")
    numbers = flow.from_items([7, 8, 9])
    given = epochs_every(numbers, records=1) if epochs else numbers
    iterate_unbounded_streams([flow.from_items([])], [given], body)
    await run(flow)
    watching = Flow("watch")
    seen = watching.source(through, decode=FeedbackRecords(), stop="latest").collect()
    await run(watching)
    told = [(record["kind"], record["epoch"]) for record in seen.items]
    assert [epoch for kind, epoch in told if kind == "end of data"] == [end]
    assert max(epoch for kind, epoch in told if kind == "data") == end
    assert [epoch for kind, epoch in told if kind == "watermark"] == list(range(1, epochs + 1))


async def test_records_keep_their_order_and_their_types(make_topic: MakeTopic) -> None:
    """Feedback of one subtask was spread over the partitions of a head, and returned in another order."""
    through = await make_topic(partitions=4)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [numbers] = variables
        first = numbers.filter(lambda x: x[0].dtype == np.int64)
        return IterationBodyResult(
            [feedback_through(first.map(lambda x: (x[0].astype(np.float32), x[1])), through)], [numbers]
        )

    flow = Flow("order")
    items = [(np.arange(3), index) for index in range(3_000)]
    [passed] = iterate(flow.from_items(items), [], body, None)
    collected = passed.collect()
    await run(flow)
    back = [(record[0].dtype, record[1]) for record in collected.items if record[0].dtype != np.int64]
    assert back == [(np.dtype(np.float32), index) for index in range(3_000)]


async def test_feedback_of_an_earlier_run_is_skipped(make_topic: MakeTopic) -> None:
    """Feedback of an aborted run was read as feedback of the next run."""
    through = await make_topic(partitions=2)

    def made(flow: Flow, limit: int) -> Any:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            counted = variables[0].map(lambda x: x + 1)
            return IterationBodyResult(
                [feedback_through(counted.filter(lambda x: x < limit).rebalance(), through)], [counted]
            )

        [counted] = iterate(flow.from_items([0], parallelism=2), [], body, None)
        return counted.collect()

    flow = Flow("for ever")
    collected = made(flow, 10**9)
    job = await flow.start()
    await until(lambda: len(collected.items) > 10)
    await job.stop("abort")
    for _ in range(2):
        flow = Flow("short")
        collected = made(flow, 5)
        await run(flow)
        assert sorted(collected.items) == [1, 2, 3, 4, 5]


async def written(through: Topic) -> list[dict[str, Any]]:
    """Return all feedback records in the topic, as an outside reader sees them."""
    flow = Flow("watch")
    watched = flow.source(through, decode=FeedbackRecords(), stop="latest").collect()
    await run(flow)
    return watched.items


async def test_a_loop_can_be_watched_while_it_runs(make_topic: MakeTopic) -> None:
    """A reader of the topic did not see the circulating records, or the control records of every partition."""
    through = await make_topic(partitions=2)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        counted = variables[0].map(lambda x: x + 1, name="counted")
        return IterationBodyResult([feedback_through(counted, through)], [counted])

    flow, watch = Flow("for ever"), Flow("watch")
    [counted] = iterate(flow.from_items([0]), [], body, None)
    counted.collect()
    watched = watch.source(through, decode=FeedbackRecords()).collect()
    watching = await watch.start()
    job = await flow.start()

    def seen(kind: str) -> list[dict[str, Any]]:
        return [record for record in watched.items if record["kind"] == kind]

    await until(lambda: len(seen("data")) >= 3 and len(seen("watermark")) >= 6)
    await asyncio.wait_for(job.snapshot(), PATIENCE_S)
    await until(lambda: len(seen("barrier")) == 2)
    await job.stop("abort")
    await watching.stop("abort")
    assert [record["step"] for record in seen("start")] == ["counted[0]"] * 2
    assert [(record["epoch"], record["records"]) for record in seen("data")[:3]] == [(1, [1]), (2, [2]), (3, [3])]
    assert len({record["run"] for record in watched.items}) == 1
    for kind in ("watermark", "barrier"):
        assert {record["is_copy"] for record in seen(kind)} == {False, True}
    assert [record["epoch"] for record in seen("watermark") if record["is_copy"]][:2] == [1, 2]


@pytest.mark.parametrize("mode", ["suspend", "drain", "abort"])
async def test_a_loop_can_be_stopped(make_topic: MakeTopic, mode: Any) -> None:
    """The pumps stopped before a barrier or an end had returned through the topic."""
    through = await make_topic(partitions=3)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        back = variables[0].union(data[0]).map(lambda x: x + 1, parallelism=2)
        return IterationBodyResult([feedback_through(back.rebalance(), through)], [back])

    flow = Flow("loop")
    items = epochs_every(flow.from_source(Endless([0, 1, 2])), records=2) if mode != "drain" else flow.from_items([1])
    initial = flow.from_items([0, 1], parallelism=2)
    [passed] = iterate(initial, [items], body, None if mode == "drain" else "unbounded")
    collected = passed.collect()
    job = await flow.start()
    await until(lambda: len(collected.items) > 20)
    statistics = await asyncio.wait_for(job.stop(mode), PATIENCE_S)
    assert statistics.state == {"suspend": "suspended", "drain": "finished", "abort": "aborted"}[mode]


async def test_feedback_without_room_in_memory_stays_in_the_topic(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Feedback that was read earlier than the head had memory for was written to disk a second time."""
    through = await make_topic()
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    limit_bytes = 100_000

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        slow = variables[0].process(lambda: Dawdle(1), parallelism=1)
        back = slow.filter(lambda x: x[0] == 0).map(lambda x: x + 1)
        return IterationBodyResult([feedback_through(back, through)], [slow.map(lambda x: float(x[0]))])

    limits = FeedbackLimits(memory_bytes=limit_bytes, directory=str(spilled))
    flow = Flow("large")
    [passed] = iterate_bounded_streams_until_termination(
        [flow.from_items(np.zeros((2_000, 1_000)))],
        [],
        body,
        IterationConfig(max_epochs_ahead=None, feedback_limits=limits),
    )
    collected = passed.collect()
    statistics = await run(flow)
    assert sorted(collected.items) == [0.0] * 2_000 + [1.0] * 2_000
    [feedback] = [channel for task in statistics.tasks for channel in task.feedback]
    assert feedback.total_records == 2_000
    assert feedback.peak_bytes_in_memory <= limit_bytes + 1_000_000  # plus one record of the topic
    assert feedback.peak_bytes_on_disk == 0


async def test_statistics_count_feedback_in_the_topic() -> None:
    """A loop that had been stalled for long showed no waiting feedback."""
    through = MemoryBroker().topic("loop")
    await through.create(settings={"max_record_bytes": "1100"})
    may_continue = asyncio.Event()

    class Held(Operator):
        async def process(self, record: int, out: Any) -> None:
            if record == 1:
                await may_continue.wait()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [number] = variables
        number.process(Held)
        many = number.flat_map(lambda x: [1] * 10_000 if x == 0 else [])
        return IterationBodyResult([feedback_through(many, through)], [])

    flow = Flow("held")
    config = IterationConfig(max_epochs_ahead=None, feedback_limits=FeedbackLimits(memory_bytes=0))
    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body, config)
    job = await flow.start(channel_limits=SMALL)
    await until(lambda: job.statistics().loops[0].fed_back_records == 10_000)
    assert job.statistics().loops[0].waiting_records > 5_000
    may_continue.set()
    statistics = await ended(job)
    assert (statistics.loops[0].fed_back_records, statistics.loops[0].waiting_records) == (10_000, 0)


async def test_batches_are_cut_below_the_limit_of_the_topic() -> None:
    """A batch above the limit of the topic ended the job, although each of its records was below the limit."""
    through = MemoryBroker().topic("loop")
    await through.create(settings={"max_record_bytes": "2000"})

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        back = variables[0].filter(lambda x: x[0] != "z").map(lambda x: "z" + x)
        return IterationBodyResult([feedback_through(back, through)], variables)

    def made(items: list[str]) -> tuple[Flow, Any]:
        flow = Flow("loop")
        [passed] = iterate(flow.from_items(items), [], body, 0)
        return flow, passed.collect()

    items = [str(number) * (number % 17 + 1) for number in range(100, 1_000)]
    flow, collected = made(items)
    await run(flow)
    assert collected.items == [*items, *("z" + item for item in items)]
    data = [record for record in await written(through) if record["kind"] == "data"]
    assert len(data) > 10

    flow, _ = made(["a" * 3_000])
    with pytest.raises(JobFailed, match=r"'variable 0'.*expected records of at most 1488 bytes, given one of 30\d\d"):
        await run(flow)
