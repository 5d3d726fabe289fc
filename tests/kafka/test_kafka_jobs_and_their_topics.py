"""Jobs whose topics are deleted, created again or truncated, or whose process is stopped for too long."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import pytest
from crash.places import KAFKA_COMMIT
from crash.programs import Process, Program, running
from job_faults.service import INTERVAL_S, Serve, Service, checkpoints_in, nothing_unheard, one_line
from job_faults.summing import Options
from job_faults.sums import KEYS, Topics, check_committed, expected, feeding, sums_flow, until_committed, write
from support.kafka_retention import delete_records
from support.kafka_server import KafkaServer
from support.soak import in_soak
from support.waiting import PATIENCE_S
from topics.topic_case import ManualClock, missing_soon, patiently, read_to_end

from streamiter import Flow
from streamiter.engine.storage.flow_record import shortened_name
from streamiter.errors import JobFailed, OffsetOutOfRange, StreamiterError, TopicNotFound, TopicUnavailable
from streamiter.topics import Topic, topic
from streamiter_kafka.trouble import BrokerTrouble, RetryLimit

MakeTopic = Callable[..., Topic]
RunAgain = Callable[..., Service]


@pytest.fixture
async def topics(kafka_topic: MakeTopic) -> Topics:
    """Return topics on the broker of all tests."""
    made = Topics.same(*(kafka_topic(name, give_up_after_s=PATIENCE_S) for name in ("numbers", "sums")))
    await made.create()
    return made


@pytest.fixture
def run(serve: Serve, topics: Topics, topic_prefix: str, tmp_path: Path) -> RunAgain:
    """Return a function that runs the same flow again, from the same folder."""

    def run(**options: Any) -> Service:
        return serve(sums_flow(f"{topic_prefix}sums", topics), checkpoints_in(tmp_path), **options)

    return run


def check_cause(error: StreamiterError, kind: type[Exception], *said: str) -> None:
    """Check that the job raised one error with this cause and these texts."""
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, kind)
    for each in said:
        assert each in one_line(error)


async def test_finished_jobs_read_on_over_topics_of_transactions(
    topics: Topics, topic_prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a transaction was taken for a record, or the job read nothing from its second night on."""

    async def night() -> list[int]:
        following = Flow(f"{topic_prefix}following")
        read = following.source(topics.sums, stop="latest", name="sums").key_by(lambda each: each[0] % KEYS)
        counted = read.stateful_map(lambda count, each: (count + 1, count + 1), 0, name="count").collect(name="counted")
        for flow, folder in ((sums_flow(f"{topic_prefix}sums", topics, stop="latest"), "a"), (following, "b")):
            job = await flow.start(checkpoints=checkpoints_in(tmp_path / folder))
            assert (await asyncio.wait_for(job.wait(), PATIENCE_S)).state == "finished"
        return sorted(counted.items)

    by_night = [(6, [1, 1, 1, 2, 2, 2]), (6, [1, 1, 1, 2, 2, 2]), (9, [1, 1, 1, 2, 2, 2, 3, 3, 3])]
    written = 0
    for number, (count, counts) in enumerate(by_night):
        if count > written:
            await write(topics.numbers, written, count)
        written = count
        caplog.clear()
        assert await night() == counts
        assert caplog.text.count("nothing is left to do") == (2 if number == 1 else 0)
    await check_committed(topics.sums, 9)


async def test_an_output_that_is_deleted_ends_the_job_and_once_it_exists_again_the_next_one_resumes(
    topics: Topics, run: RunAgain, caplog: pytest.LogCaptureFixture
) -> None:
    """Results were lost for a week, and after the repair some of them were written twice."""
    with nothing_unheard(caplog):
        service = run()
        async with feeding(topics.numbers) as feed:
            await service.works()
            await topics.sums.delete()
            with missing_soon():
                check_cause(await service.failed(), TopicNotFound, f"no topic {topics.sums.name!r}")
        with missing_soon():
            check_cause(await run().failed(), TopicNotFound, "step 'sums'", f"no topic {topics.sums.name!r}")
        await topics.sums.create()
        service = run()
        await until_committed(topics.sums, last=feed.count - 1)
        await service.suspended()
    outputs = [orjson.loads(record.value or b"")[:2] for record in await read_to_end(topics.sums)]
    # The topic has the outputs after the last checkpoint; earlier outputs were deleted with the topic.
    assert outputs == expected(feed.count)[-len(outputs) :]
    assert len(outputs) > 0


@pytest.mark.parametrize(
    ("created_at_once", "records_then"), [(False, 0), (True, 1035), *in_soak((False, 1035), (True, 0))]
)
async def test_an_input_that_is_deleted_ends_the_job_and_the_next_one_asks_for_a_choice(
    topics: Topics, run: RunAgain, created_at_once: bool, records_then: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic was created again, and the job counted other records from the middle, or started all sums again."""
    said = "partition 0: offset 30 belongs to a topic of this name that was deleted; the topic was created again, with \
other records, and has the offsets 0 to"
    with nothing_unheard(caplog):
        service = run()
        await write(topics.numbers, 0, 30)
        await until_committed(topics.sums, 30)
        await topics.numbers.delete()
        if created_at_once:
            await topics.numbers.create()
            check_cause(await service.failed(), OffsetOutOfRange, said)
        else:
            with missing_soon():
                check_cause(await service.failed(), TopicNotFound, f"no topic {topics.numbers.name!r}")
                check_cause(await run().failed(), TopicNotFound, f"no topic {topics.numbers.name!r}")
            await topics.numbers.create()
        choices = "changed_steps=['numbers'] lets this source begin where its start= says", "restore=None"
        end = 30 + records_then
        await write(topics.numbers, 30, end)
        check_cause(await run().failed(), OffsetOutOfRange, f"{said} {records_then}", *choices)
        service = run(changed_steps=["numbers"])
        await write(topics.numbers, end, end + 30)
        await until_committed(topics.sums, end + 30)
        await service.suspended()
    await check_committed(topics.sums, end + 30)


async def test_a_job_continues_after_a_restart_of_the_broker_and_an_added_partition(
    breakable_broker: KafkaServer, topic_prefix: str, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job took a topic that was never deleted for another topic. Restarts during a run are tested in
    ``test_a_job_survives_a_restart_of_its_broker``.
    """
    prefix = f"kafka://{breakable_broker.bootstrap}/{topic_prefix}"
    made = Topics.same(*(topic(f"{prefix}{name}", give_up_after_s=PATIENCE_S) for name in ("numbers", "sums")))
    await made.create()

    def again() -> Service:
        return serve(sums_flow(f"{topic_prefix}sums", made), checkpoints_in(tmp_path))

    with nothing_unheard(caplog):
        service = again()
        await write(made.numbers, 0, 30)
        await until_committed(made.sums, 30)
        await write(made.numbers, 30, 60)
        await until_committed(made.sums, 60)
        await made.numbers.create(partitions=2)
        await service.works()
        await service.suspended()
        breakable_broker.stop()
        breakable_broker.start()
        service = again()
        await write(made.numbers, 60, 90)
        await service.until(lambda: bool(service.jobs) and service.records_in("sum") >= 30)
        await service.suspended()
        service = again()
        await service.works()
        await service.suspended()
    assert len(await read_to_end(made.sums)) == 90


@pytest.mark.parametrize("choice", [{"changed_steps": ["numbers"]}, {"restore": None}])
async def test_an_offset_that_fell_out_of_retention_between_two_runs_is_an_error_with_the_choices(
    topics: Topics, run: RunAgain, kafka_broker: Any, choice: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A job that was stopped over the holidays resumed without the records of these days, and without an error."""
    with nothing_unheard(caplog):
        service = run()
        await write(topics.numbers, 0, 30)
        await until_committed(topics.sums, 30)
        await service.suspended()
        await write(topics.numbers, 30, 60)
        await delete_records(kafka_broker.bootstrap, topics.numbers, 45)
        numbers = "partition 0: offset 30 fell out of retention; expected 45 to 60"
        check_cause(await run().failed(), OffsetOutOfRange, topics.numbers.name, numbers, *map(_shown, choice))
        service = run(**choice)
        await until_committed(topics.sums, 45)
        await service.suspended()
    totals = [0] * KEYS
    for number in (*(range(30) if "changed_steps" in choice else ()), *range(45, 60)):
        totals[number % KEYS] += number
    outputs = [orjson.loads(record.value or b"")[:2] for record in await read_to_end(topics.sums)]
    assert len(outputs) == 45
    assert outputs[:30] == expected(30)
    assert [total for _, total in outputs[-KEYS:]] == totals


def _shown(option: str) -> str:
    return {"changed_steps": "changed_steps=['numbers']", "restore": "restore=None"}[option]


_TESTS: Final = Path(__file__).parents[1]
_TIMEOUT_S: Final = 1.0
# The broker looks five times a second for transactions that are open for too long.
_LONGER_S: Final = 2.0
# The process is stopped for longer than the broker may be away: the error must not blame the broker.
_PATIENCE: Final = {"give_up_after_s": 1.5, "request_timeout_s": 0.5}
# The number of the commit at which the process stops; the transactions of the first commits may have no records yet.
_COMMIT: Final = 6
_RESTARTED: Final = "resuming from the last checkpoint"


@pytest.fixture
async def frozen_topics(kafka_topic: Callable[..., Topic]) -> Topics:
    """Return topics on the broker of all tests."""
    own = (kafka_topic(name, **_PATIENCE) for name in ("numbers", "sums"))
    made = Topics(*own, kafka_topic("numbers"), kafka_topic("sums"))
    await made.create()
    return made


@pytest.fixture
def program(frozen_topics: Topics, topic_prefix: str, tmp_path: Path) -> Program:
    """Return the program of sums, whose transactions may last one second."""
    options = Options(
        flow=f"{topic_prefix}sums",
        numbers=frozen_topics.numbers.url,
        sums=frozen_topics.sums.url,
        folder=str(tmp_path),
        interval_s=INTERVAL_S,
        alignment_timeout_s=_TIMEOUT_S / 2,
        transaction_timeout_s=_TIMEOUT_S,
    )
    return Program(
        _TESTS / "job_faults" / "summing.py",
        tmp_path / shortened_name(options.flow),
        (msgspec.json.encode(options).decode(),),
        {"PYTHONPATH": str(_TESTS)},
    )


def frozen_at_commit(program: Program) -> AbstractAsyncContextManager[Process]:
    """Run the program until it stops itself right before a commit."""
    return running(program, KAFKA_COMMIT[0], _COMMIT, signal.SIGSTOP)


async def frozen_too_long(process: Process) -> None:
    await process.reaches(process.is_stopped)
    await asyncio.sleep(_LONGER_S)  # the broker measures real time, which no condition signals


async def suspended(process: Process) -> str:
    process.send(signal.SIGTERM)
    code, printed = await process.ends()
    assert code == 0, printed
    assert printed.splitlines()[-1] == "suspended"
    return printed


async def test_a_job_that_was_frozen_for_too_long_resumes_from_its_checkpoint_automatically(
    frozen_topics: Topics, program: Program
) -> None:
    """A frozen machine resumed, and the service stayed down until an operator noticed, or it continued with a gap."""
    async with feeding(frozen_topics.watched_numbers) as feed, frozen_at_commit(program) as process:
        await frozen_too_long(process)
        process.send(signal.SIGCONT)
        await feed.ended()
        await until_committed(frozen_topics.watched_sums, feed.count)
        printed = await suspended(process)
    await check_committed(frozen_topics.watched_sums, feed.count)
    [warning] = [line for line in printed.splitlines() if _RESTARTED in line]
    assert warning.startswith("WARNING streamiter.job flow ")
    assert f"which was open for over {_TIMEOUT_S:g} s" in warning
    assert "transaction_timeout_s" in warning
    assert "Traceback" not in printed


async def test_a_job_that_was_frozen_and_replaced_does_not_continue(frozen_topics: Topics, program: Program) -> None:
    """A frozen job took the end of its transaction for a timeout, and ended the run that had replaced it."""
    async with feeding(frozen_topics.watched_numbers) as feed, frozen_at_commit(program) as zombie:
        await frozen_too_long(zombie)
        async with running(program) as twin:
            await twin.reaches(twin.has_committed)
            zombie.send(signal.SIGCONT)
            code, printed = await zombie.ends()
            await feed.ended()
            await until_committed(frozen_topics.watched_sums, feed.count)
            await suspended(twin)
    await check_committed(frozen_topics.watched_sums, feed.count)
    assert code == 1, printed
    assert _RESTARTED not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("streamiter.errors.JobFailed: flow ")
    assert "another run of the flow has taken over, so this one must end" in last


async def test_one_late_answer_never_uses_up_the_retry_limit() -> None:
    """A machine slept for a night, the first answer was late, and the error said that the broker was down."""
    clock = ManualClock()
    patience = RetryLimit("topic 'clicks'", 60.0, clock)
    begun_s = clock.monotonic_s()
    clock.advance(8 * 3600.0)
    waiting = asyncio.ensure_future(patience.failed(BrokerTrouble("no answer"), begun_s=begun_s))
    await asyncio.sleep(0)
    clock.advance(1.0)
    await patiently(waiting)
    clock.advance(30.0)
    with pytest.raises(TopicUnavailable, match="no answer"):
        await patience.failed(BrokerTrouble("no answer"))
