"""The broker of a job stops, dies or freezes, also during a commit, and the committed outputs are correct."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any, Literal

import pytest
from job_faults.service import Serve, checkpoints_in, nothing_unheard, one_line
from job_faults.sums import Topics, check_committed, feeding, sums_flow, until_committed
from kafka import signalled_processes
from support.fork_server import FORKS_PROCESSES
from support.kafka_server import KafkaServer
from support.processes import process
from support.waiting import PATIENCE_S
from topics.topic_case import missing_soon

from streamiter import Checkpoints, Flow
from streamiter.engine.job import job
from streamiter.errors import CheckpointError, JobFailed, StreamiterError, TopicNotFound, TopicUnavailable
from streamiter.topics import source_and_sink, topic
from streamiter.topics.compacted import COMMIT_TOPIC
from streamiter_kafka import cluster
from streamiter_kafka.transactions import KafkaTransactions

PATIENT = {"give_up_after_s": PATIENCE_S, "request_timeout_s": 1.0}
QUICK = {"give_up_after_s": 1.0, "request_timeout_s": 0.3}
# The broker looks five times a second for transactions that are open for too long.
SHORT_TRANSACTION = {"transaction_timeout_s": 1.0, "alignment_timeout_s": 0.5}


def soak_seed() -> int:
    return int(os.environ.get("STREAMITER_SOAK_SEED", "0"))


def soak_faults() -> int:
    """Return the number of faults of a soak test; each fault takes about ten seconds."""
    return int(os.environ.get("STREAMITER_SOAK_FAULTS", "10"))


MakeTopics = Callable[..., Topics]
Interrupt = Callable[[KafkaServer], Awaitable[None]]


@pytest.fixture
def make_topics(breakable_broker: KafkaServer, topic_prefix: str) -> MakeTopics:
    """Return a maker of topics on the broker that will break, for a job with the given options."""

    def make(**options: object) -> Topics:
        prefix = f"kafka://{breakable_broker.bootstrap}/{topic_prefix}"
        own = [topic(f"{prefix}{name}", **options) for name in ("numbers", "sums")]
        return Topics(*own, *(topic(f"{prefix}{name}", **PATIENT) for name in ("numbers", "sums")))

    return make


@pytest.fixture
def flow_name(topic_prefix: str) -> str:
    """Return a unique name for a flow, because the flows of all tests share the topic of commit records."""
    return f"{topic_prefix}sums"


async def stop_and_start(broker: KafkaServer) -> None:
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(broker.start)


async def kill_and_start(broker: KafkaServer) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)


async def freeze(broker: KafkaServer, *, for_s: float) -> None:
    broker.pause()
    await asyncio.sleep(for_s)  # a frozen broker signals no condition
    broker.resume()


async def check_resumes(serve: Serve, flow: str, topics: Topics, kept: Checkpoints, count: int) -> None:
    """Check that a new run commits the remaining outputs, and that all outputs are then correct."""
    service = serve(sums_flow(flow, topics), kept)
    await until_committed(topics.watched_sums, count)
    await service.suspended()
    await check_committed(topics.watched_sums, count)


# -- gone for good


async def test_a_signal_ends_a_job_whose_brokers_do_not_answer(
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pod took 68 s to end after SIGTERM, since its brokers were gone, and was killed after 30 s."""
    monkeypatch.setattr(job, "_UNANSWERED_S", 0.5)
    monkeypatch.setattr(cluster, "_CLOSING_S", 0.3)
    monkeypatch.setattr(source_and_sink, "_CLOSE_UNFLUSHED_S", 0.3)
    topics = make_topics(give_up_after_s=600, request_timeout_s=0.3)
    await topics.create()
    release = asyncio.Event()

    async def waits(number: int) -> int:
        await release.wait()
        return number

    async def started(delivery: Literal["at_least_once"] | None) -> job.Job:
        name = f"{flow_name}-{delivery}"
        flow = Flow(name)
        numbers = flow.from_items([1], name="items").map_async(waits, name="wait")
        numbers.sink(topics.sums, delivery=delivery, name="out")
        return await flow.start(checkpoints=Checkpoints(tmp_path / name, interval_s=100))

    running = [await started(delivery) for delivery in (None, "at_least_once")]
    try:
        await asyncio.to_thread(breakable_broker.kill)
        release.set()
        for each in running:
            await asyncio.wait_for(each.stop_on_signal("suspend"), 10)
    finally:
        await asyncio.to_thread(breakable_broker.start)
    assert [each.statistics().state for each in running] == ["aborted", "aborted"]
    assert caplog.text.count("the server of an output has not answered") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")
@pytest.mark.parametrize("delivery", ["at_least_once", pytest.param("", marks=pytest.mark.soak)])
async def test_a_signal_ends_a_flow_in_several_processes_whose_brokers_do_not_answer(
    breakable_broker: KafkaServer, make_topics: MakeTopics, flow_name: str, tmp_path: Path, delivery: str
) -> None:
    """Process 0 looked at its own outputs alone, and waited for one that another process could not write."""
    topics = make_topics()
    await topics.create()
    own = {"TOPIC": topics.sums.url, "FLOW": flow_name, "DELIVERY": delivery, "WAITS_S": "0.5"}
    program = Path(signalled_processes.__file__)
    pipes = {"stdout": PIPE, "stderr": PIPE}
    command, env = [sys.executable, program, tmp_path], os.environ | own | FORKS_PROCESSES
    with process(command, is_forked=True, env=env, **pipes) as started:
        try:
            await until_committed(topics.watched_sums, 1)
            breakable_broker.pause()
            await asyncio.sleep(0.3)  # until a number is read, which cannot be written
            started.send_signal(signal.SIGTERM)
            out, errors = await asyncio.to_thread(started.communicate, timeout=PATIENCE_S)
        finally:
            breakable_broker.resume()
    assert (out, started.returncode) == ("aborted\n", 0), errors
    assert "the server of an output has not answered" in errors


# -- stopped for a while


@pytest.mark.parametrize(
    ("interrupt", "transactions"),
    [
        (kill_and_start, SHORT_TRANSACTION),
        pytest.param(stop_and_start, {}, marks=pytest.mark.soak),
        pytest.param(stop_and_start, SHORT_TRANSACTION, marks=pytest.mark.soak),
        pytest.param(kill_and_start, {}, marks=pytest.mark.soak),
    ],
    ids=["kill for longer than a transaction", "stop", "stop for longer than a transaction", "kill"],
)
async def test_a_job_survives_a_restart_of_its_broker(
    serve: Serve,
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    interrupt: Interrupt,
    transactions: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rolling update of the cluster ended all jobs, lost their last seconds, or made one job blame another."""
    topics = make_topics(**PATIENT)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), checkpoints_in(tmp_path, **transactions))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await interrupt(breakable_broker)
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        statistics = await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert statistics.state == "suspended"
    if not transactions:
        assert len(service.jobs) == 1


class Reached:
    """Stops jobs at a method of their transactions until the test lets them continue."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str, *, skip: int) -> None:
        self.is_reached = asyncio.Event()
        self.may_continue = asyncio.Event()
        original: Any = getattr(KafkaTransactions, method)
        calls = iter(range(skip))

        async def reached(transactions: KafkaTransactions) -> Any:
            if next(calls, None) is None:
                self.is_reached.set()
                await self.may_continue.wait()
            return await original(transactions)

        patch.setattr(KafkaTransactions, method, reached)


@pytest.mark.parametrize("method", ["commit", pytest.param("begin", marks=pytest.mark.soak)])
async def test_a_broker_that_dies_right_before_a_commit_or_after_it_changes_nothing(
    serve: Serve,
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer to a commit was lost, and the outputs of its checkpoint were written a second time."""
    topics = make_topics(**PATIENT)
    await topics.create()
    reached = Reached(monkeypatch, method, skip=4)
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), checkpoints_in(tmp_path))
        async with feeding(topics.watched_numbers) as feed:
            await service.until(reached.is_reached.is_set)
            restarting = asyncio.create_task(kill_and_start(breakable_broker))
            reached.may_continue.set()
            await restarting
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert len(service.jobs) == 1


@pytest.mark.parametrize("how", ["pause", *(pytest.param(how, marks=pytest.mark.soak) for how in ("stop", "kill"))])
async def test_a_broker_that_stays_away_ends_the_job_with_one_error_and_the_next_run_resumes(
    serve: Serve,
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Jobs hung for days, or reported a dozen errors that followed from the first one."""
    monkeypatch.setattr(cluster, "_CLOSING_S", 0.3)
    topics = make_topics(**QUICK)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), checkpoints_in(tmp_path))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await asyncio.to_thread(getattr(breakable_broker, how))
            error = await service.failed()
            await asyncio.to_thread(breakable_broker.start)
            breakable_broker.resume()
        patient = make_topics(**PATIENT)
        await check_resumes(serve, flow_name, patient, checkpoints_in(tmp_path), feed.count)
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, TopicUnavailable)
    assert "Is the broker running, and is the address right?" in one_line(error)


# -- frozen


async def test_a_broker_that_freezes_past_all_timeouts_costs_no_record(
    serve: Serve,
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A frozen broker executed old requests later, in a transaction that had ended."""
    topics = make_topics(**PATIENT)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), checkpoints_in(tmp_path, **SHORT_TRANSACTION))
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await freeze(breakable_broker, for_s=4.0)
            await service.works()
        await until_committed(topics.watched_sums, feed.count)
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    # The job resumes only if the broker ended the transaction before it answered the requests.
    assert len(service.jobs) == 1 + caplog.text.count("resuming from the last checkpoint")


# -- without commit records


async def test_a_deleted_topic_of_commit_records_ends_the_job_and_the_next_one_asks_for_a_choice(
    serve: Serve, make_topics: MakeTopics, flow_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user deleted an unknown topic, or a cluster was restored from a copy without it; all flows started fresh, and
    their outputs were doubled.
    """
    topics = make_topics(**PATIENT)
    await topics.create()
    kept = checkpoints_in(tmp_path)
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), kept)
        async with feeding(topics.watched_numbers) as feed:
            await service.works()
            await topics.watched_sums.beside(COMMIT_TOPIC).delete()
            with missing_soon():
                error = await service.failed()
        statistics = service.jobs[-1].statistics()
        refused = await serve(sums_flow(flow_name, topics), kept).failed()
        assert statistics.checkpoints is not None
        again = serve(sums_flow(flow_name, topics), kept, restore=statistics.checkpoints.committed)
        await until_committed(topics.watched_sums, feed.count)
        await again.suspended()
        service = serve(sums_flow(flow_name, topics), kept)  # resumes from the new commit records
        await service.works()
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert isinstance(error.__cause__, TopicNotFound)
    assert COMMIT_TOPIC in one_line(error)
    assert isinstance(refused, CheckpointError)
    assert "has no commit record of this flow, so it is unknown what was committed" in one_line(refused)
    assert "Resume from one with restore=<number>" in one_line(refused)


# -- soak


async def _any_fault(broker: KafkaServer, random: Random) -> None:
    kind = random.choice(["stop", "kill", "freeze"])
    if kind == "freeze":
        await freeze(broker, for_s=4 * random.random())
    else:
        await asyncio.to_thread(getattr(broker, kind))
        await asyncio.to_thread(broker.start)


@pytest.mark.soak
async def test_a_job_survives_any_faults_of_its_broker(
    serve: Serve,
    breakable_broker: KafkaServer,
    make_topics: MakeTopics,
    flow_name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors appeared only at rare moments of a fault, or a run after a clear error had wrong outputs."""
    topics = make_topics(**PATIENT)
    await topics.create()
    random = Random(soak_seed())
    kept = checkpoints_in(tmp_path, **SHORT_TRANSACTION)
    errors: list[StreamiterError] = []
    with nothing_unheard(caplog):
        service = serve(sums_flow(flow_name, topics), kept)
        async with feeding(topics.watched_numbers) as feed:
            for _ in range(soak_faults()):
                await asyncio.sleep(random.random())
                await _any_fault(breakable_broker, random)
                try:
                    await service.works()
                except (JobFailed, TopicUnavailable) as error:
                    errors.append(error)
                    service = serve(sums_flow(flow_name, topics), kept)
                    await service.works()
        await until_committed(topics.watched_sums, feed.count)
        await service.suspended()
    await check_committed(topics.watched_sums, feed.count)
    assert all(isinstance(error, TopicUnavailable) or isinstance(error.__cause__, TopicUnavailable) for error in errors)
