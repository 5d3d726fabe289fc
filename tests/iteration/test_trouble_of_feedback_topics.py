"""A loop through a topic loses no record when it is killed, and fails with the topic in its error."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from iteration.feedback_support import ended, endless_loop, iterate, run
from iteration.iteration_support import Endless
from iteration.topic_loop_program import Options
from iteration.topic_loops_support import KINDS, Kind, MakeTopic, check_undisturbed, end_of, logged_in_last, values_in
from support.kafka_server import KafkaServer
from support.processes import async_process
from support.soak import in_soak
from support.waiting import PATIENCE_S, until
from topics.topic_case import missing_soon, write

from streamiter import Flow, IterationBodyResult, Stream, feedback_through, topic
from streamiter.engine.graph.feedback import TopicRange
from streamiter.engine.storage.store import store_at
from streamiter.errors import CheckpointError, JobFailed
from streamiter.topics import MemoryBroker, Topic


async def test_a_foreign_record_is_an_error_that_names_its_place(make_topic: MakeTopic) -> None:
    """Two programs wrote to one topic by mistake, and shared a loop."""
    through = await make_topic()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([feedback_through(variables[0], through)], [data[0]])

    flow = Flow("loop")
    [passed] = iterate(flow.from_items([]), [flow.from_source(Endless())], body, "unbounded")
    passed.collect()
    job = await flow.start()
    await write(through, [b"hello"])
    with pytest.raises(JobFailed) as failed:
        await ended(job)
    assert "'variable 0'" in str(failed.value)
    assert f"{through.url}, partition 0, offset " in str(failed.value)
    assert "expected only feedback of the loop" in str(failed.value)


async def test_a_topic_with_too_few_partitions_is_refused_with_the_numbers(make_topic: MakeTopic) -> None:
    """A head without a partition waited for its feedback forever."""
    through = await make_topic(partitions=2)
    flow = Flow("loop")
    [passed] = iterate(
        flow.from_items([0], parallelism=3),
        [],
        lambda v, d: IterationBodyResult([feedback_through(v[0], through)], v),
        0,
    )
    passed.collect()
    with pytest.raises(JobFailed, match=r"a partition for each of 3 heads, given 2; create it with more"):
        await flow.start()


async def test_a_topic_that_is_not_there_is_named(make_topic: MakeTopic) -> None:
    """A missing topic was created by the way, with one partition where more were needed."""
    through = await make_topic(name="missing")
    await through.delete()
    flow = Flow("loop")
    [passed] = iterate(
        flow.from_items([0]), [], lambda v, d: IterationBodyResult([feedback_through(v[0], through)], v), 0
    )
    passed.collect()
    with missing_soon(), pytest.raises(JobFailed, match=r"missing"):
        await flow.start()


async def test_a_topic_that_disappears_ends_the_job(make_topic: MakeTopic) -> None:
    """The loop stalled silently, because no feedback returned."""
    through = await make_topic()
    job = await endless_loop(through)
    await through.delete()
    with missing_soon(), pytest.raises(JobFailed, match=rf"'variable 0'.*{through.name}"):
        await ended(job)


async def test_a_loop_resumes_after_a_restart_of_its_broker_or_gives_up_before(
    breakable_broker: KafkaServer, topic_prefix: str
) -> None:
    """After a restart of the broker, loops stalled, or counted records that were sent again twice. The loop, or its
    end, waited for a broker forever.
    """
    through, hurried = (
        topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}{name}", **options)
        for name, options in (("loop", {}), ("hurried", {"give_up_after_s": 1.5, "request_timeout_s": 0.5}))
    )
    await through.create(partitions=2)
    await hurried.create()
    tokens, rounds = 50, 40
    reached: list[int] = []

    def count(at: tuple[int, int]) -> tuple[int, int]:
        reached.append(at[1])
        return at[0], at[1] + 1

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        counted = variables[0].map(count)
        back = counted.filter(lambda at: at[1] < rounds).rebalance()
        return IterationBodyResult([feedback_through(back, through)], [counted])

    flow = Flow("loop")
    [counted] = iterate(flow.from_items([(token, 0) for token in range(tokens)], parallelism=2), [], body, None)
    collected = counted.collect()
    ending = await endless_loop(hurried)
    job = await flow.start()
    await until(lambda: max(reached, default=0) >= 10)
    await asyncio.to_thread(breakable_broker.kill)
    with pytest.raises(JobFailed, match=r"'variable 0'.*hurried"):
        await ended(ending)
    await asyncio.to_thread(breakable_broker.start)
    await ended(job)
    expected = [(token, round_number) for token in range(tokens) for round_number in range(1, rounds + 1)]
    assert sorted(collected.items) == expected


async def test_an_abort_does_not_wait_for_a_broker(breakable_broker: KafkaServer, topic_prefix: str) -> None:
    """An aborted job first stored feedback for no reader, and a frozen broker blocked it until the timeout."""
    through = topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}loop", give_up_after_s=100 * PATIENCE_S)
    await through.create()
    job = await endless_loop(through)
    breakable_broker.pause()
    try:
        statistics = await asyncio.wait_for(job.stop("abort"), PATIENCE_S)
    finally:
        breakable_broker.resume()
    assert statistics.state == "aborted"


async def test_a_record_that_is_no_plain_data_is_named() -> None:
    """The error for a record that is no plain data, which a loop in memory accepts, did not name the record."""
    through = MemoryBroker().topic("loop")
    await through.create()
    flow = Flow("loop")
    [passed] = iterate(
        flow.from_items([0]),
        [],
        lambda v, d: IterationBodyResult([feedback_through(v[0].map(lambda x: object()), through)], v),
        0,
    )
    passed.collect()
    with pytest.raises(JobFailed, match=r"'variable 0'.*record 0 of the batch: .*object"):
        await run(flow)


async def test_feedback_that_retention_has_taken_is_an_error() -> None:
    """Feedback that retention had removed before it was read was lost silently, and the loop ended early."""
    through = MemoryBroker().topic("loop")
    await through.create(settings={"retention_records": "1", "max_record_bytes": "2000"})
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        many = variables[0].flat_map(lambda x: [x + 1] * 5_000 if x == 0 else [])
        return IterationBodyResult([feedback_through(many, through)], variables)

    [passed] = iterate(flow.from_items([0]), [], body, None)
    passed.collect()
    with pytest.raises(JobFailed, match=r"'variable 0'.*(out of range|no longer|earliest)"):
        await run(flow)


PROGRAM = Path(__file__).with_name("topic_loop_program.py")
KILLS = 2
TOKENS, MOST = 40, 100
# Without a pause, this process would take a core from the one that it watches.
_LOOK_AGAIN_S = 0.005


@asynccontextmanager
async def running(options: Options) -> AsyncIterator[asyncio.subprocess.Process]:
    tests, root = PROGRAM.parents[1], PROGRAM.parents[2]
    async with async_process(
        [sys.executable, PROGRAM, msgspec.json.encode(options).decode()],
        limit_s=PATIENCE_S,
        is_forked=True,
        env=os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{root}"},
    ) as process:
        yield process


async def caught_circling(options: Options, process: asyncio.subprocess.Process) -> None:
    """Wait until the last checkpoint contains feedback in transit, or the process has ended."""
    store = store_at(options.folder)
    async with asyncio.timeout(PATIENCE_S):
        while process.returncode is None:
            # A newer checkpoint may have replaced the one to be read.
            with contextlib.suppress(CheckpointError):
                if await logged_in_last(store, options.flow):
                    return
            await asyncio.sleep(_LOOK_AGAIN_S)


async def grown_by(loop: Topic, records: int, process: asyncio.subprocess.Process) -> None:
    """Wait until the topic has ``records`` more records, or the process has ended."""
    until = await end_of(loop) + records
    async with asyncio.timeout(PATIENCE_S):
        while process.returncode is None and await end_of(loop) < until:
            await asyncio.sleep(_LOOK_AGAIN_S)


@pytest.mark.parametrize(
    ("make_topic", "kind"),
    # Tests without a kill, which are much faster, cover both topics for each kind.
    [("sqlite", "asynchronous"), ("kafka", "one ahead"), *in_soak(("sqlite", "synchronous"), ("kafka", "unbounded"))],
    indirect=["make_topic"],
)
async def test_a_killed_loop_has_the_results_of_an_undisturbed_one(
    make_topic: MakeTopic, kind: Kind, tmp_path: Path
) -> None:
    """Feedback that was in the topic when the process died was lost or came twice."""
    chance = random.Random(KINDS.index(kind))
    loop, out = await make_topic(partitions=3), await make_topic(name="out")
    options = Options(
        flow=f"tokens {uuid.uuid4().hex}",
        loop=loop.url,
        out=out.url,
        folder=str(tmp_path / "checkpoints"),
        interval_s=0.05,
        tokens=TOKENS,
        most=MOST,
        kind=kind,
    )
    resumed_with: list[object] = []
    for _ in range(KILLS):
        async with running(options) as process:
            await grown_by(loop, chance.randrange(20, 300), process)
            if not resumed_with:
                await caught_circling(options, process)
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() in (0, -signal.SIGKILL)
        resumed_with += await logged_in_last(store_at(options.folder), options.flow)
    async with running(options) as process:
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    check_undisturbed(await values_in(out), tokens=TOKENS, most=MOST)
    assert resumed_with
    assert all(isinstance(each, TopicRange) for each in resumed_with)
