"""Several processes share one loop through a topic."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from iteration.iteration_support import Endless
from iteration.shared_loop_worker import HEADS, hopping, owner
from support.processes import async_process
from support.waiting import PATIENCE_S, until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    epochs_every,
    feedback_through,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    topic,
)
from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError, GraphError, JobFailed
from streamiter.runtime.job import Job
from streamiter.runtime.topic_outlets import Message
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic

CHILD = Path(__file__).with_name("shared_loop_worker.py")


RUN = "a run"


async def hops_in(hops: Topic, count: int) -> list[tuple[int, int, int]]:
    """Return the first ``count`` hops in the topic: token, hop, worker."""
    reader = await hops.open_reader(ReadRequest())
    found: list[tuple[int, int, int]] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < count:
                batch = await reader.read()
                assert batch is not None
                records = [orjson.loads(value or b"") for value in batch.values]
                found += [(each["token"], each["hop"], each["worker"]) for each in records]
    finally:
        await reader.close()
    return found


def check_hops(found: list[tuple[int, int, int]], tokens: int, hops: int, workers: int) -> None:
    """Check that each hop of each token happened once, at the worker that owns its key."""
    assert sorted(each[:2] for each in found) == [(token, hop) for token in range(tokens) for hop in range(hops + 1)]
    for token, hop, worker in found:
        # Items are shared out over the subtasks of all workers.
        born = token % (HEADS * workers) // HEADS
        assert worker == (born if hop == 0 else owner(token, hop, workers)), (token, hop)


# -- processes -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def worker(
    index: int, loop: Topic, hops: Topic, *, tokens: int, count: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one of two workers, and end it afterwards."""
    given = [str(index), "2", RUN, loop.url, hops.url, str(tokens), str(count)]
    async with async_process([sys.executable, CHILD, *given], is_forked=True) as child:
        yield child


async def stopped(child: asyncio.subprocess.Process) -> int:
    child.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(child.wait(), PATIENCE_S)


@pytest.fixture(params=["sqlite", "kafka"])
async def topics(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Topic, Topic]:
    """Create the topic of the loop and the topic of the hops."""
    if request.param == "sqlite":
        base = f"sqlite:///{tmp_path}/topics.db?topic="
    else:
        base = f"kafka://{request.getfixturevalue('kafka_broker').bootstrap}/{request.getfixturevalue('topic_prefix')}"
    loop, hops = topic(base + "loop"), topic(base + "hops")
    await loop.create(partitions=2 * HEADS + 1)
    await hops.create()
    return loop, hops


async def test_tokens_hop_between_two_processes(topics: tuple[Topic, Topic]) -> None:
    """Feedback to a worker from before its start was lost, or SIGTERM did not end a worker."""
    loop, hops = topics
    async with worker(0, loop, hops, tokens=20, count=15) as first:
        # The first worker's tokens exist, and some have hopped to the second worker, which has not started.
        await hops_in(hops, 10)
        async with worker(1, loop, hops, tokens=20, count=15) as second:
            check_hops(await hops_in(hops, 20 * 16), 20, 15, 2)
            assert await stopped(second) == 0
            assert await stopped(first) == 0


async def test_a_killed_process_does_not_keep_the_other_running(topics: tuple[Topic, Topic]) -> None:
    """A barrier waited for feedback of a dead worker, so the other worker could not stop."""
    loop, hops = topics
    async with (
        worker(0, loop, hops, tokens=8, count=1_000_000) as first,
        worker(1, loop, hops, tokens=8, count=1_000_000) as second,
    ):
        found = await hops_in(hops, 100)
        assert {each[2] for each in found} == {0, 1}
        second.kill()
        await second.wait()
        assert await stopped(first) == 0


# -- in one process ------------------------------------------------------------------------------------------


async def in_memory(partitions: int = 2 * HEADS, **settings: str) -> tuple[Topic, Topic]:
    broker = MemoryBroker()
    loop, hops = broker.topic("loop"), broker.topic("hops")
    await loop.create(partitions=partitions, settings=settings)
    await hops.create()
    return loop, hops


@contextlib.asynccontextmanager
async def working(flow: Flow, index: int, workers: int = 2, run_id: str = RUN) -> AsyncIterator[Job]:
    """Run a worker in this process, and stop it afterwards unless it has ended."""
    job = await flow.start(worker=(index, workers), run_id=run_id)
    try:
        yield job
    finally:
        with contextlib.suppress(JobFailed):
            await job.stop("abort")


async def test_a_suspended_worker_has_written_all_feedback_to_others() -> None:
    """Feedback to the other worker was not yet written when the first worker ended."""
    loop, hops = await in_memory()
    born = {worker: [token for token in range(40) if token % 4 // HEADS == worker] for worker in (0, 1)}
    seen: list[tuple[int, int]] = []
    flow = hopping("hops", loop, hops, 40, 1, 0, seen.append)
    async with working(flow, 0) as first:
        await until(lambda: sum(hop == 0 for _, hop in seen) == len(born[0]))
        statistics = await asyncio.wait_for(first.stop("suspend"), PATIENCE_S)
        assert statistics.state == "suspended"
    early = (await hops.describe()).offsets[0][1]
    expected = [(token, 0, 1) for token in born[1]] + [(token, 1, 1) for token in range(40) if owner(token, 1, 2) == 1]
    async with working(hopping("hops", loop, hops, 40, 1, 1), 1):
        found = await hops_in(hops, early + len(expected))
    assert sorted(each for each in found if each[2] == 1) == sorted(expected)


async def test_a_worker_cannot_be_drained_or_snapshot() -> None:
    """The inputs of a worker end, but its feedback from other workers does not, so the worker waited forever."""
    loop, hops = await in_memory()
    async with working(hopping("hops", loop, hops, 4, 10, 0), 0) as job:
        with pytest.raises(
            ConfigurationError, match=r'stop\("suspend"\) or stop\("abort"\) of a worker, given "drain"'
        ):
            await job.stop("drain")
        with pytest.raises(ConfigurationError, match=r"expected a job of a single process, given one of 2 workers"):
            await job.snapshot()


async def test_a_worker_that_is_started_again_in_the_same_run_is_refused() -> None:
    """The worker's sequence numbers started again at 0, so its feedback was taken for duplicates and dropped."""
    loop, hops = await in_memory()
    async with working(hopping("hops", loop, hops, 4, 10, 0), 0):
        pass
    async with working(hopping("hops", loop, hops, 4, 10, 0), 0) as again:
        with pytest.raises(JobFailed, match=r"expected each worker to be started once in run 'a run', given a second"):
            await asyncio.wait_for(again.wait(), PATIENCE_S)


async def test_a_new_run_ignores_records_of_the_one_before() -> None:
    """Tokens of an earlier run hopped in the new run."""
    loop, hops = await in_memory()
    for run_id in ("first", "second"):
        one, other = (hopping("hops", loop, hops, 6, 3, index) for index in range(2))
        async with working(one, 0, run_id=run_id), working(other, 1, run_id=run_id):
            found = await hops_in(hops, 24 if run_id == "first" else 48)
    assert sorted(each[:2] for each in found) == sorted(2 * [(token, hop) for token in range(6) for hop in range(4)])


async def fed_back(loop: Topic, *given: tuple[Any, int, list[Any]]) -> None:
    """Write kind, sequence number and records of producer 0 to a partition of worker 1."""
    writer = await loop.open_writer()
    for kind, sequence, records in given:
        message = Message(RUN, 0, kind, 1, sequence, home=2, step="map[0]", start="a start")
        value = PlainData().encode_batch(records)
        await writer.write(OutgoingBatch([value], headers=[message.headers()], partition=2))
    await writer.close()


async def test_a_worker_that_starts_too_late_is_refused_with_the_missing_records() -> None:
    """A worker ran with incomplete feedback after the topic had removed the worker's first records."""
    loop, hops = await in_memory()
    await fed_back(loop, ("data", 5, [(7, 1)]))
    async with working(hopping("hops", loop, hops, 0, 1, 1), 1) as late:
        with pytest.raises(JobFailed, match=r"expected record 0 of producer 0, given 5; the topic has lost"):
            await asyncio.wait_for(late.wait(), PATIENCE_S)


async def test_duplicate_records_count_once() -> None:
    """A writer without an answer sent stored records again, and they counted twice."""
    loop, hops = await in_memory()
    first, second = ("data", 1, [(7, 1)]), ("data", 2, [(8, 1)])
    await fed_back(loop, ("start", 0, []), ("start", 0, []), first, first, second, first)
    seen: list[tuple[int, int]] = []
    async with working(hopping("hops", loop, hops, 0, 1, 1, seen.append), 1):
        await fed_back(loop, second, ("data", 3, [(9, 1)]))
        await until(lambda: (9, 1) in seen)
    assert seen == [(7, 1), (8, 1), (9, 1)]


async def test_partitions_are_required_for_the_heads_of_all_workers() -> None:
    """A topic had a partition for each head of one worker, and none for the heads of the others."""
    loop, hops = await in_memory(partitions=3)
    with pytest.raises(JobFailed, match=r"for each of 4 heads \(2 in each of 2 workers\), given 3; create"):
        await hopping("hops", loop, hops, 4, 10, 0).start(worker=(0, 2), run_id=RUN)


async def test_workers_of_different_flows_are_refused() -> None:
    """With another parallelism, the producer numbers of the other worker had another meaning."""
    loop, hops = await in_memory(partitions=8)
    flow = Flow("another")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        wide = variables[0].map(lambda x: x, parallelism=8)
        return IterationBodyResult([feedback_through(wide.broadcast(), loop)], data)

    [passed] = iterate_unbounded_streams([flow.from_items([0])], [flow.from_source(Endless())], body)
    passed.collect()
    async with working(hopping("hops", loop, hops, 4, 10, 0), 0) as first, working(flow, 1):
        with pytest.raises(JobFailed, match=r"expected a producer of this flow, given number \d+; start the same"):
            await asyncio.wait_for(first.wait(), PATIENCE_S)


async def test_a_forward_edge_stays_in_its_own_process() -> None:
    """Feedback that is not repartitioned did not return to head i of the same worker."""
    loop, _ = await in_memory()
    met: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def counting(index: int) -> Flow:
        def note(at: tuple[int, int]) -> tuple[int, int]:
            met[index].append(at)
            return at[0], at[1] + 1

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            counted = variables[0].map(note).filter(lambda at: at[1] < 4)
            return IterationBodyResult([feedback_through(counted, loop)], data)

        flow = Flow("count")
        initial = flow.from_items([(number, 0) for number in range(6)], parallelism=2)
        [passed] = iterate_unbounded_streams([initial], [flow.from_source(Endless())], body)
        passed.collect()
        return flow

    async with working(counting(0), 0), working(counting(1), 1):
        await until(lambda: len(met[0]) + len(met[1]) == 24)
    for index, numbers in ((0, (0, 1, 4, 5)), (1, (2, 3))):
        assert sorted(met[index]) == [(number, time) for number in numbers for time in range(4)]


# -- refused flows and options -------------------------------------------------------------------------------


class Listener(Operator, IterationListener):
    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


class InOrder(Operator):
    epochs_in_order = True

    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


def a_loop(
    step: Callable[[Stream], Stream] = lambda stream: stream,
    back: Callable[[Stream], Any] | None = None,
    data: Callable[[Flow], Stream] = lambda flow: flow.from_source(Endless()),
    iterate: Any = iterate_unbounded_streams,
    **config: Any,
) -> Flow:
    through = MemoryBroker().topic("loop")
    flow = Flow("f")

    def body(variables: list[Stream], entered: list[Stream]) -> IterationBodyResult:
        fed = step(variables[0])
        return IterationBodyResult([(back or (lambda stream: feedback_through(stream, through)))(fed)], entered)

    [passed] = iterate([flow.from_items([0])], [data(flow)], body, IterationConfig(**config))
    passed.collect()
    return flow


def no_loop() -> Flow:
    flow = Flow("f")
    flow.from_items([0]).collect()
    return flow


REFUSED: list[tuple[Callable[[], Flow], str]] = [
    (no_loop, r"flow 'f': expected an iteration that its workers share, given none"),
    (
        lambda: a_loop(back=lambda stream: stream),
        r"expected feedback through a topic that the workers share, given .*fed back in memory",
    ),
    (
        lambda: a_loop(iterate=iterate_bounded_streams_until_termination, data=lambda flow: flow.from_items([0])),
        r"expected an unbounded iteration in a loop that workers share, given a bounded one",
    ),
    (
        lambda: a_loop(max_epochs_ahead=0, data=lambda flow: flow.from_items([0])),
        r"expected max_epochs_ahead=None in a loop that workers share, given max_epochs_ahead=0",
    ),
    (
        lambda: a_loop(data=lambda flow: epochs_every(flow.from_source(Endless()), records=2)),
        r"expected data without epochs in a loop that workers share, given data of epochs_every",
    ),
    (
        lambda: a_loop(lambda stream: stream.process(Listener)),
        r"'Listener': expected no operator that waits for epochs .*an IterationListener",
    ),
    (
        lambda: a_loop(lambda stream: stream.process(InOrder), data=lambda flow: flow.from_items([0])),
        r"'InOrder': expected no operator that waits for epochs .*epochs_in_order",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
async def test_features_that_need_the_epochs_of_all_workers_are_refused(make: Callable[[], Flow], message: str) -> None:
    """An epoch is complete when all heads have received it, but a worker does not know the heads of other workers."""
    with pytest.raises(GraphError, match=message):
        await make().start(worker=(0, 2), run_id=RUN)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"worker": (0, 2)}, r"expected worker and run_id together, given worker=\(0, 2\) and run_id=None"),
    ({"run_id": RUN}, r"expected worker and run_id together"),
    ({"worker": (2, 2), "run_id": RUN}, r"an index below the count, given \(2, 2\)"),
    ({"worker": 1, "run_id": RUN}, r"expected worker=\(index, count\) .*, given 1;"),
    ({"worker": (0, 2), "run_id": ""}, r"expected run_id to be a text of 1 to 64 bytes, given ''"),
    ({"worker": (0, 2), "run_id": RUN, "snapshot": {}}, r"expected no snapshot for a worker"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
async def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Two runs with one name, or a worker without a valid number, mixed up their records."""
    with pytest.raises(ConfigurationError, match=message):
        await a_loop().start(**options)
