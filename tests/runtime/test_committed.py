"""Jobs without state commit the positions of their sources; jobs that would double their outputs say so."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_S, until
from topics.topic_case import numbered, numbers_of, read_to_end, write

from streamiter import Checkpoints, Flow, Operator, topic
from streamiter.engine.job.job import Job
from streamiter.errors import JobFailed, ProducerFenced
from streamiter.flow.stream import Stream
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, Topic

# No checkpoint is taken but at the end, and when a test says so.
RARE = Checkpoints(interval_s=200)


@pytest.fixture
async def topics() -> tuple[Topic, Topic]:
    """Return an input with the numbers below 10, and an output."""
    broker = MemoryBroker()
    numbers, doubled = broker.topic("numbers"), broker.topic("doubled")
    await numbers.create(partitions=2)
    await doubled.create()
    await write(numbers, numbered(range(10)))
    return numbers, doubled


def doubling(numbers: Topic, doubled: Topic, **source: Any) -> Flow:
    flow = Flow("doubling", parallelism=2)
    read = flow.source(numbers, **{"start": "committed", **source})
    read.map(lambda number: 2 * number).sink(doubled, name="doubled")
    return flow


async def handled(job: Job, count: int) -> None:
    await until(lambda: job.statistics().step("doubled").records_in >= count)


async def outputs_of(doubled: Topic) -> list[int]:
    return sorted(number // 2 for number in numbers_of(await read_to_end(doubled)))


async def test_a_job_resumes_where_the_last_checkpoint_was(topics: tuple[Topic, Topic]) -> None:
    """Outputs between the last commit and a crash were lost, or came twice."""
    numbers, doubled = topics
    job = await doubling(*topics).start(checkpoints=RARE)
    await handled(job, 10)
    assert await outputs_of(doubled) == []
    assert await job.checkpoint() == 1
    assert await outputs_of(doubled) == list(range(10))
    await write(numbers, numbered(range(10, 20)))
    await handled(job, 20)
    await job.stop("abort")
    for count in (20, 30):
        statistics = await (await doubling(*topics, stop="latest").start()).wait()
        assert await outputs_of(doubled) == list(range(count))
        assert statistics.checkpoints is not None
        assert statistics.checkpoints.taken == 1
        await write(numbers, numbered(range(count, count + 10)))


async def test_a_replaced_run_without_input_ends_long_before_its_next_commit(topics: tuple[Topic, Topic]) -> None:
    """With a commit every half hour and no records, the run that was replaced stayed for half an hour."""
    clock = VirtualClock()
    rare = Checkpoints(interval_s=1800, transaction_timeout_s=3600)
    zombie = await doubling(*topics).start(checkpoints=rare, clock=clock)
    await clock.advance(30.0)
    assert zombie.statistics().state == "running"
    job = await doubling(*topics).start(checkpoints=rare, clock=clock)
    await clock.advance(10.0)
    with pytest.raises(JobFailed, match=r"another run of the flow, .*, has taken over") as ended:
        await asyncio.wait_for(zombie.wait(), PATIENCE_S)
    assert type(ended.value.__cause__) is ProducerFenced
    assert job.statistics().state == "running"
    await job.stop("abort")


async def test_a_start_that_commits_nothing_else_commits_where_it_begins(topics: tuple[Topic, Topic]) -> None:
    """A job with ``first_start="latest"`` crashed before its first checkpoint, and skipped the records until its next
    start.
    """
    numbers, doubled = topics
    job = await doubling(*topics, first_start="latest").start(checkpoints=RARE)
    await job.stop("abort")
    await write(numbers, numbered([10, 11]))
    await (await doubling(*topics, first_start="latest", stop="latest").start()).wait()
    assert await outputs_of(doubled) == [10, 11]


async def test_a_run_whose_group_has_no_positions_says_where_it_begins(
    topics: tuple[Topic, Topic], caplog: pytest.LogCaptureFixture
) -> None:
    """The broker forgot the positions of a job that was stopped for a week; its log did not say why records were
    missing.
    """
    caplog.set_level(logging.INFO)
    for _run in range(2):
        await (await doubling(*topics, first_start="latest", stop="latest").start()).wait()
    begun = [line for line in caplog.messages if "has no positions" in line]
    assert begun == [
        f"step 'numbers': group 'streamiter-doubling' has no positions in topic {topics[0].url}, so the source begins "
        "at first_start='latest'"
    ]


@pytest.mark.parametrize("delivery", [None, "at_least_once"])
async def test_positions_of_another_file_than_the_outputs_are_committed_after_them(
    topics: tuple[Topic, Topic], tmp_path: Path, delivery: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The positions were committed and the outputs were not, because they are in different files."""
    numbers, _ = topics
    doubled = topic(f"sqlite:///{tmp_path}/doubled.db?topic=doubled")
    await doubled.create()

    def flow() -> Flow:
        made = Flow("doubling")
        read = made.source(numbers, start="committed", stop="latest")
        read.map(lambda number: 2 * number).sink(doubled, delivery=delivery)
        return made

    for count in (10, 20):
        await (await flow().start()).wait()
        assert await outputs_of(doubled) == list(range(count))
        await write(numbers, numbered(range(count, count + 10)))
    said = "step 'numbers': its positions are committed to memory:"
    assert (said in caplog.text) is (delivery is None)


async def test_a_job_with_a_folder_begins_at_the_committed_positions(
    topics: tuple[Topic, Topic], tmp_path: Path
) -> None:
    """A flow got state and a folder of checkpoints, and read everything again."""
    await (await doubling(*topics, stop="latest").start()).wait()
    await write(topics[0], numbered(range(10, 20)))
    flow = Flow("doubling")
    sums = flow.source(topics[0], start="committed", stop="latest").key_by(lambda number: 0)
    seen = sums.stateful_map(lambda total, number: (total + 1, number), 0, name="sum").collect(name="seen")
    await (await flow.start(checkpoints=Checkpoints(tmp_path))).wait()
    assert sorted(seen.items) == list(range(10, 20))


@pytest.mark.parametrize(("options", "first"), [({"changed_steps": ["numbers"]}, 0), ({"restore": None}, 0)])
async def test_a_source_may_begin_again(topics: tuple[Topic, Topic], options: dict[str, Any], first: int) -> None:
    """Records could not be written again after a mistake in the flow."""
    for given in ({}, options, {}):
        await (await doubling(*topics, stop="latest").start(**given)).wait()
    assert await outputs_of(topics[1]) == sorted([*range(10), *range(10)])


@pytest.mark.parametrize("starts", [("latest", "committed"), ("committed", "latest")])
async def test_a_source_of_new_records_may_read_the_topic_of_another_source(
    topics: tuple[Topic, Topic], starts: tuple[str, str]
) -> None:
    """Whether the flow was refused depended on the order of its sources."""
    flow = Flow("doubling")
    first, second = (flow.source(topics[0], name=start, start=start, stop="latest") for start in starts)
    first.union(second).map(lambda number: 2 * number).sink(topics[1])
    await (await flow.start()).wait()
    assert await outputs_of(topics[1]) == list(range(10))


# -- refused -------------------------------------------------------------------------------------------------


class Waiting(Operator):
    """Sets a timer, which is state."""

    def process(self, record: object, out: Any) -> None:
        out.emit(record)

    def on_timer(self, payload: object, out: Any) -> None:
        pass


# -- outputs that double ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "is_warned"),
    [
        ({"start": None}, {}, True),
        ({"start": None, "stop": "latest"}, {}, True),
        ({"start": None, "stop": {0: 3}}, {}, False),
        ({"start": "earliest"}, {}, False),
        ({"start": "latest"}, {}, False),
        ({"start": "committed"}, {}, False),
        ({"start": None}, {"checkpoints": Checkpoints}, False),
    ],
    ids=str,
)
async def test_a_job_that_doubles_its_outputs_at_the_next_start_says_so_once(
    topics: tuple[Topic, Topic],
    source: dict[str, Any],
    options: dict[str, Any],
    is_warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second copy of a job wrote 2,000 outputs of 1,000 records, and nothing was said."""
    given = {name: make(tmp_path) for name, make in options.items()}
    job = await doubling(*topics, **source).start(**given)
    await job.stop()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == is_warned, warnings
    if is_warned:
        assert (
            "reads step 'numbers' from the first record and writes all outputs of step 'doubled' again" in warnings[0]
        )


@pytest.mark.parametrize(
    "build",
    [
        lambda read, doubled: read(stop=None).collect(),
        lambda read, doubled: read().key_by(lambda n: n % 2).reduce(lambda a, b: a + b).sink(doubled),
        lambda read, doubled: read(file=True).sink(doubled),
    ],
    ids=["collected", "a result", "a file"],
)
async def test_what_is_computed_again_on_purpose_is_no_warning(
    topics: tuple[Topic, Topic], build: Callable[..., object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look at a topic in a notebook, and each training, was answered with a warning."""
    (tmp_path / "numbers.jsonl").write_text("1\n")
    flow = Flow("look")

    def read(*, stop: Any = "latest", file: bool = False) -> Stream:
        return flow.source(topic(f"file:{tmp_path}/numbers.jsonl") if file else topics[0], stop=stop)

    build(read, topics[1])
    await (await flow.start()).stop()
    assert caplog.text == ""
