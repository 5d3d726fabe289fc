"""Jobs whose topics are deleted, created again or truncated fail with one error that names the loss and the choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from job_faults.service import Serve, Service, checkpoints_in, nothing_unheard, one_line
from job_faults.sums import KEYS, Topics, check_committed, expected, feeding, sums_flow, until_committed, write
from support.kafka_retention import delete_records
from support.kafka_server import KafkaServer
from support.waiting import PATIENCE_S
from topics.topic_case import missing_soon, read_to_end

from streamiter import Flow
from streamiter.errors import JobFailed, OffsetOutOfRange, StreamiterError, TopicNotFound
from streamiter.topics import Topic, topic

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


@pytest.mark.parametrize("records_then", [0, 1035])
@pytest.mark.parametrize("created_at_once", [False, True])
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
