"""A step that calls a service for each record: order, limits, failures, checkpoints, epochs."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, PAIRS, numbers, outputs
from iteration.iteration_support import cut_items, run
from support.waiting import PATIENCE_S, until
from topics.topic_case import read_to_end

from streamiter import (
    Checkpoints,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed, RejectRecords
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker


class Service:
    """A service that answers when the test says so, in any order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.open: dict[Any, asyncio.Future[Any]] = {}
        self.most = 0
        self.cancelled: list[Any] = []

    async def __call__(self, record: Any) -> Any:
        self.calls.append(record)
        answer = self.open[record] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.open))
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(record)
            raise
        finally:
            del self.open[record]

    def answer(self, *records: Any) -> None:
        for record in records:
            self.open[record].set_result(f"answer {record}")


async def dawdle(record: Any) -> Any:
    """Return the record after a few turns of the event loop, which depend on the record."""
    for _ in range(hash(record) % 7):
        await asyncio.sleep(0)
    return record


async def started(f: Callable[[Any], Any], records: Any, **options: Any) -> tuple[Job, list[Any], VirtualClock]:
    """Start a flow; return its job, the list that results go to, and its clock."""
    clock, flow, results = VirtualClock(), Flow("calls"), []
    flow.from_items(records).map_async(f, **options).map(results.append)
    return await flow.start(clock=clock), results, clock


async def finished(job: Job) -> None:
    await asyncio.wait_for(job.wait(), PATIENCE_S)


# ---- order and limits


@pytest.mark.parametrize(
    ("ordered", "after_two", "after_three"),
    [
        (True, [], ["answer 0", "answer 1", "answer 2"]),
        (False, ["answer 2", "answer 1"], ["answer 2", "answer 1", "answer 0"]),
    ],
)
async def test_results_leave_in_order_or_as_they_come(
    ordered: bool, after_two: list[str], after_three: list[str]
) -> None:
    """A slow call at the front delayed all others although nobody had asked for their order."""
    service = Service()
    job, results, clock = await started(service, range(4), ordered=ordered)
    await until(lambda: len(service.open) == 4)
    service.answer(2)
    await clock.advance(0)
    service.answer(1)
    await clock.advance(0)
    assert results == after_two
    service.answer(0)
    await clock.advance(0)
    assert results == after_three
    service.answer(3)
    await finished(job)
    assert len(results) == 4


@pytest.mark.parametrize("ordered", [True, False])
async def test_no_more_calls_than_asked_for_are_in_flight(ordered: bool) -> None:
    """A service was flooded by all records of a batch at once."""
    service = Service()
    job, results, clock = await started(service, range(50), concurrency=3, ordered=ordered)
    for _ in range(50):
        await until(lambda: bool(service.open))
        await clock.advance(0)
        service.answer(max(service.open))
    await finished(job)
    assert service.most == 3
    assert sorted(service.calls) == list(range(50))
    assert Counter(results) == Counter(f"answer {number}" for number in range(50))
    assert not ordered or results == [f"answer {number}" for number in range(50)]


async def test_results_behind_a_slow_call_are_bounded() -> None:
    """Behind one call that never returned, the results of a whole topic were kept in memory."""
    calls = 0

    async def ask(number: int) -> int:
        nonlocal calls
        calls += 1
        if number == 0:
            await asyncio.Event().wait()
        return number

    job, results, clock = await started(ask, range(100_000), concurrency=2)
    await until(lambda: calls >= 1024)
    await clock.advance(0)
    assert (calls, results) == (1024, [])
    await job.stop("abort")


async def test_calls_that_answer_at_once_need_no_task_each() -> None:
    """A task for each record made a cached answer as slow as a turn of the event loop."""
    tasks: set[str] = set()

    async def known(number: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(str(id(task)))
        return number

    job, results, _ = await started(known, range(1000))
    await finished(job)
    assert results == list(range(1000))
    assert len(tasks) <= 3


# ---- failures


async def test_a_failed_call_is_made_again_after_growing_delays() -> None:
    """A service that was overloaded got all calls again at once, from all clients at the same time."""
    times: dict[int, list[float]] = {}
    clock = VirtualClock()

    async def ask(number: int) -> int:
        times.setdefault(number, []).append(clock.monotonic_s())
        if len(times[number]) < 5:
            raise OSError("overloaded")
        return number

    async def delays(seed: int) -> list[list[float]]:
        times.clear()
        flow = Flow("calls")
        answers = flow.from_items([0, 1]).map_async(ask, retries=4, backoff_s=1, backoff_max_s=5, seed=seed).collect()
        job = await flow.start(clock=clock)
        await clock.advance(20)
        await finished(job)
        assert answers.items == [0, 1]
        return [[round(b - a, 6) for a, b in pairwise(each)] for each in times.values()]

    first = await delays(1)
    for of_call in first:
        assert all(most / 2 <= delay <= most for delay, most in zip(of_call, [1, 2, 4, 5], strict=True))
    assert first[0] != first[1]
    assert await delays(1) == first
    assert await delays(2) != first


async def test_a_call_that_takes_too_long_is_cancelled_and_made_again() -> None:
    """A connection that was dead held a place for ever."""
    service = Service()
    job, results, clock = await started(service, ["x"], timeout_s=2, retries=1, backoff_s=1)
    await clock.advance(1.9)
    assert service.cancelled == []
    await clock.advance(1.2)
    assert (service.cancelled, service.calls) == (["x"], ["x", "x"])
    service.answer("x")
    await finished(job)
    assert results == ["answer x"]
    assert clock.timers == 0


async def test_the_error_of_the_last_call_ends_the_job_and_names_the_record() -> None:
    """The error named a task of asyncio and not the step."""
    job, results, clock = await started(Service(), ["seven"], timeout_s=2, name="ask")
    await clock.advance(3)
    with pytest.raises(
        JobFailed, match=r"(?s)step 'ask'.*'seven'.*TimeoutError: the call did not return within timeout_s=2"
    ):
        await finished(job)
    assert results == []


async def cancels_itself(record: int) -> int:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
    return record


async def test_a_call_that_is_cancelled_by_itself_fails() -> None:
    """A worker ended silently with its call, and the job stood still."""
    job, _, _ = await started(cancels_itself, [1])
    with pytest.raises(JobFailed, match="the call was cancelled, although the job was not stopped"):
        await finished(job)


async def test_refused_records_follow_the_policy_in_order() -> None:
    """The first bad record ended a job that should have skipped it; a rejected record was tried again."""
    calls: Counter[int] = Counter()

    async def ask(number: int) -> int:
        calls[number] += 1
        if number == 1:
            raise RejectRecords([0], "no such user")
        if number == 3:
            raise OSError("down")
        return number

    dead = MemoryBroker().topic("dead")
    await dead.create()
    clock, flow = VirtualClock(), Flow("calls")
    asked = flow.from_items(range(5)).map_async(ask, retries=2, dead_letter=dead, name="ask")
    answers = asked.collect()
    job = await flow.start(clock=clock)
    await clock.advance(10)
    await finished(job)
    assert answers.items == [0, 2, 4]
    assert calls == {0: 1, 1: 1, 2: 1, 3: 3, 4: 1}
    assert job.statistics().step("ask").rejected == 2
    errors = [dict(record.headers)["error"] for record in await read_to_end(dead)]
    assert [b"no such user" in error or b"OSError: down" in error for error in errors] == [True, True]


# ---- stops and checkpoints


async def test_all_calls_end_with_the_job() -> None:
    """Calls of a job that was stopped wrote to the service of the next one."""
    service = Service()
    job, _, _ = await started(service, range(10), concurrency=4)
    await until(lambda: len(service.open) == 4)
    await job.stop("abort")
    assert sorted(service.cancelled) == [0, 1, 2, 3]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("calls of")]


async def test_a_barrier_waits_for_no_call_and_a_restart_makes_the_calls_in_flight_again() -> None:
    """A checkpoint took as long as the slowest call, or lost what was in flight."""
    store, broker = MemoryStore(), MemoryBroker()
    for name in ("in", "out"):
        await broker.topic(name).create()

    def flow(service: Service) -> Flow:
        flow = Flow("calls")
        flow.from_items(range(6), name="in").map_async(service, concurrency=3, name="ask").sink(broker.topic("out"))
        return flow

    first = Service()
    job = await flow(first).start(checkpoints=Checkpoints(store.another(), interval_s=100))
    await until(lambda: len(first.open) == 3)
    first.answer(0, 2)  # the second waits for its turn
    await until(lambda: {1, 3, 4} == set(first.open))
    await asyncio.wait_for(job.stop("suspend"), PATIENCE_S)
    second = Service()
    job = await flow(second).start(checkpoints=Checkpoints(store.another(), interval_s=100))
    for _ in range(4):
        await until(lambda: bool(second.open))
        second.answer(max(second.open))
        await asyncio.sleep(0)
    await finished(job)
    assert sorted(second.calls) == [1, 3, 4, 5]
    values = [record.value for record in await read_to_end(broker.topic("out"))]
    assert values == [f'"answer {number}"'.encode() for number in range(6)]


def asked(broker: MemoryBroker, parallelism: int, *, ordered: bool, keyed: bool) -> Flow:
    flow = Flow("asked", parallelism=parallelism)
    read = numbers(flow, broker)
    read = read.key_by(lambda x: x % 7) if keyed else read.rebalance()
    read.map_async(dawdle, concurrency=3, ordered=ordered, name="ask").sink(broker.topic("out"))
    return flow


@pytest.mark.parametrize(("ordered", "keyed"), [(True, True), (False, False)])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_calls_in_flight_move_to_other_subtasks(before: int, after: int, ordered: bool, keyed: bool) -> None:
    """Records in flight at a subtask that no longer existed were lost."""

    def make(broker: MemoryBroker, parallelism: int) -> Flow:
        return asked(broker, parallelism, ordered=ordered, keyed=keyed)

    got = outputs(make, [before, after, before], turns=60, seed=before * 10 + after)
    assert Counter(got) == Counter(range(NUMBERS))


# ---- epochs and loops


class Epochs(Operator, IterationListener):
    """Emits the records of each epoch at its watermark."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def process(self, record: Any, out: Any) -> None:
        self.records.append(record)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit((epoch_watermark, sorted(self.records)))
        self.records = []

    def finish(self, out: Any) -> None:
        assert not self.records


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_watermark_overtakes_a_record_in_flight(seed: int, ordered: bool) -> None:
    """The callback of an epoch came while answers to its records were still under way."""
    flow = Flow("epochs")
    stamped = epochs_every(cut_items(flow, range(30), seed=seed), records=5)
    seen = stamped.map_async(dawdle, concurrency=4, ordered=ordered).process(Epochs).collect()
    run(flow, seed=seed)
    assert seen.items == [(epoch, list(range(5 * epoch, 5 * epoch + 5))) for epoch in range(6)]


async def one_less(number: int) -> int:
    return await dawdle(number) - 1


@pytest.mark.parametrize("ahead", [0, 2, None])
@pytest.mark.parametrize("seed", range(4))
def test_a_loop_with_calls_ends_with_the_same_result(seed: int, ahead: int | None) -> None:
    """The loop ended while a call that would have fed it was under way."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        less = variables[0].map_async(one_less, concurrency=2, parallelism=2)
        return IterationBodyResult([less.filter(lambda number: number > 0, parallelism=1)], [less])

    flow = Flow("loop")
    numbers_left = cut_items(flow, [3, 5, 1, 4], seed=seed)
    [less] = iterate_unbounded_streams([numbers_left], [], body, IterationConfig(max_epochs_ahead=ahead))
    seen = less.collect()
    run(flow, seed=seed)
    assert Counter(seen.items) == Counter(n for start in (3, 5, 1, 4) for n in range(start))


def test_each_round_waits_for_its_calls() -> None:
    """The operators of a round were ended while its records were in flight."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [total] = for_each_round(
            [variables[0]],
            lambda streams: [streams[0].map_async(one_less, concurrency=2).reduce_all(lambda a, b: a + b)],
        )
        fed_back = variables[0].map(lambda number: number - 1).filter(lambda number: number > 0)
        return IterationBodyResult([fed_back], [total], termination_criteria=fed_back)

    flow = Flow("rounds")
    [totals] = iterate_bounded_streams_until_termination([flow.from_items([3, 2, 3])], [], body)
    seen = totals.collect()
    run(flow, seed=0)
    assert seen.items == [5, 2, 0]


async def test_a_call_that_does_not_return_is_reported() -> None:
    """A job stood still without a word while its last call was under way."""
    service = Service()
    clock, flow = VirtualClock(), Flow("calls")
    flow.from_items(range(2)).map_async(service, name="ask").collect()
    job = await flow.start(clock=clock, stall_after_s=10)
    await clock.advance(60)
    [stalled] = job.statistics().stalled
    assert (stalled.name, stalled.cause) == ("ask[0]", "held")
    assert "2 calls have not returned" in stalled.reason
    with contextlib.suppress(JobFailed):
        await job.stop("abort")
