"""Flows read from topics and write to topics, with bad values and dead letters."""

import json
from typing import Any

import numpy as np
import pytest
from topics.topic_case import content

from streamiter import Flow, Operator
from streamiter.errors import DecodeError, EncodeError, JobFailed, TopicNotFound
from streamiter.operators import Output
from streamiter.testing import VirtualClock
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, Topic


async def made(broker: MemoryBroker, name: str, *values: bytes | None, partitions: int = 1) -> Topic:
    """Create a topic, write these values to its partitions in turn, and return it."""
    topic = broker.topic(name)
    await topic.create(partitions=partitions)
    writer = await topic.open_writer()
    for number, value in enumerate(values):
        await writer.write(OutgoingBatch([value], keys=[f"key-{number}".encode()], partition=number % partitions))
    await writer.close()
    return topic


class Numbers:
    """Encodes the numbers of the records in their batch, whatever the records are."""

    def encode(self, batch: Any) -> OutgoingBatch:
        return OutgoingBatch([b"%d" % number for number in range(len(batch))])


@pytest.mark.parametrize("parallelism", [1, 2, 5])
async def test_every_partition_is_read_by_one_subtask(parallelism: int) -> None:
    """A partition was read twice or not at all, or subtasks without a partition never ended."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", *(b"%d" % n for n in range(30)), partitions=3)
    flow = Flow("f", parallelism=parallelism)
    read = flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    assert (await job.wait()).state == "finished"
    assert sorted(read.items) == list(range(30))


async def test_results_are_written_with_keys_and_can_be_read() -> None:
    """Results were written without their keys, or could not be read again."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", b'{"user": "ann", "n": 1}', b'{"user": "bo", "n": 2}')
    doubled = await made(broker, "doubled")
    flow = Flow("f")
    flow.source(clicks, stop="latest").map(lambda click: {**click, "n": 2 * click["n"]}).sink(
        doubled, key=lambda click: click["user"]
    )
    await (await flow.start()).wait()
    assert [(record.key, json.loads(record.value or b"")) for record in await content(doubled)] == [
        (b"ann", {"user": "ann", "n": 2}),
        (b"bo", {"user": "bo", "n": 4}),
    ]


class TestBadValues:
    async def test_by_default_the_job_fails_naming_topic_partition_and_offset(self) -> None:
        """The error in the log did not name the place of the bad record."""
        broker = MemoryBroker()
        clicks = await made(broker, "clicks", b"1", b"2", b"3", b"not JSON", partitions=2)
        flow = Flow("f")
        flow.source(clicks, stop="latest", name="read").collect()
        with pytest.raises(JobFailed) as caught:
            await (await flow.start()).wait()
        message = str(caught.value)
        assert message.startswith("flow 'f', step 'read' (test_topics_in_flows.py:")
        assert "at memory://clicks, partition 1, offset 1: " in message
        assert message.endswith("the value begins b'not JSON'")
        assert isinstance(caught.value.__cause__, DecodeError)
        assert caught.value.step == "read"

    async def test_skipped_values_are_counted_and_the_others_are_read(self) -> None:
        """A bad value was skipped, and a good value was lost or doubled with it."""
        broker = MemoryBroker()
        clicks = await made(broker, "clicks", b"1", b"{", b"2", b"]", b"3")
        flow = Flow("f")
        read = flow.source(clicks, stop="latest", name="read", on_error="skip").collect()
        statistics = await (await flow.start()).wait()
        assert read.items == [1, 2, 3]
        assert statistics.step("read").rejected == 2

    async def test_dead_letters_have_the_original_value_and_its_origin(self) -> None:
        """Dead letters could not be repaired and sent again, because they had another value or no origin."""
        broker = MemoryBroker()
        clicks = await made(broker, "clicks", b"1", b"{", b"2")
        dead = await made(broker, "dead")
        flow = Flow("f")
        read = flow.source(clicks, stop="latest", name="read", dead_letter=dead).collect()
        statistics = await (await flow.start()).wait()
        assert read.items == [1, 2]
        [letter] = await content(dead)
        headers = dict(letter.headers)
        assert (letter.key, letter.value) == (b"key-1", b"{")
        assert headers.pop("error").startswith(b"unexpected end")
        assert headers == {"step": b"read", "topic": b"memory://clicks", "partition": b"0", "offset": b"1"}
        assert statistics.step("read").rejected == 1


class TestBadRecords:
    async def test_a_step_s_dead_letters_name_the_step_and_the_error(self) -> None:
        """The letter of a record in the middle of a flow did not have the reason."""
        broker = MemoryBroker()
        dead = await made(broker, "dead")
        flow = Flow("f", parallelism=2)
        kept = flow.from_items([1, 0, 2]).map(lambda x: 10 / x, name="divide", dead_letter=dead).collect()
        await (await flow.start()).wait()
        assert sorted(kept.items) == [5, 10]
        [letter] = await content(dead)
        assert letter.value == b"0"
        assert dict(letter.headers) == {"step": b"divide", "error": b"ZeroDivisionError: division by zero"}

    async def test_a_record_that_cannot_be_encoded_follows_the_sink_s_policy(self) -> None:
        """A set in one record kept the other records from the topic."""
        broker = MemoryBroker()
        out, dead = await made(broker, "out"), await made(broker, "dead")
        flow = Flow("f")
        flow.from_items([1, {2}, 3]).sink(out, dead_letter=dead, name="write")
        statistics = await (await flow.start()).wait()
        assert [record.value for record in await content(out)] == [b"1", b"3"]
        assert [record.value for record in await content(dead)] == [b'"{2}"']
        assert statistics.step("write").rejected == 1

    async def test_by_default_a_record_that_cannot_be_encoded_fails_the_job(self) -> None:
        """A record that cannot be encoded was lost without an error, or the error did not have the record."""
        broker = MemoryBroker()
        out = await made(broker, "out")
        flow = Flow("f")
        flow.from_items([1, {2}, 3]).sink(out, name="write")
        with pytest.raises(
            JobFailed, match=r"step 'write' \(.*\) on record \{2\}: .*JSON has no form for set"
        ) as caught:
            await (await flow.start()).wait()
        assert isinstance(caught.value.__cause__, (EncodeError, ValueError))

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            (lambda record: record["user"], "KeyError: 'user'"),
            (
                lambda record: record.get("user", 7),
                "key: expected the function to return bytes, str or None, given 7 (int); return str(…) or its bytes",
            ),
        ],
    )
    async def test_a_record_without_a_good_key_follows_the_sink_s_policy(self, key: Any, message: str) -> None:
        """The error about a bad key named no record, came from a connector, and ended the job with any policy."""
        broker = MemoryBroker()
        out, dead = await made(broker, "out"), await made(broker, "dead")
        items = [{"user": "ann"}, {"n": 1}, {"user": b"bo"}, {"user": np.bytes_(b"cy")}, {"user": None}]
        flow = Flow("f")
        flow.from_items(items).sink(out, encode=Numbers(), key=key, dead_letter=dead, name="write")
        statistics = await (await flow.start()).wait()
        assert [record.key for record in await content(out)] == [b"ann", b"bo", b"cy", None]
        [letter] = await content(dead)
        assert letter.value == b'{"n":1}'
        assert dict(letter.headers)["error"].decode().endswith(message)
        assert statistics.step("write").rejected == 1
        failing = Flow("g")
        failing.from_items(items).sink(out, encode=Numbers(), key=key, name="write")
        with pytest.raises(JobFailed) as caught:
            await (await failing.start()).wait()
        assert caught.value.step == "write"
        assert f" on record {{'n': 1}}: {message}" in str(caught.value)

    async def test_keys_stay_with_their_records_if_some_cannot_be_encoded(self) -> None:
        """Bad records were removed from the values only, and their neighbours got their keys."""
        broker = MemoryBroker()
        out = await made(broker, "out")
        flow = Flow("f")
        items = [0, {1}, 2, {3}, 4]
        flow.from_items(items).sink(out, key=lambda record: str(record), on_error="skip")
        await (await flow.start()).wait()
        assert [(record.key, record.value) for record in await content(out)] == [
            (b"0", b"0"),
            (b"2", b"2"),
            (b"4", b"4"),
        ]

    async def test_a_step_that_fails_on_a_batch_names_its_offsets(self) -> None:
        """A step failed on a batch, and the error had no offsets to look for."""
        broker = MemoryBroker()
        clicks = await made(broker, "clicks", *(b"%d" % n for n in range(6)))

        class Fails(Operator):
            def process_batch(self, batch: Any, out: Output) -> None:
                raise ValueError("no")

        flow = Flow("f")
        flow.source(clicks, start={0: 2}, stop="latest").process(Fails, name="train")
        with pytest.raises(JobFailed) as caught:
            await (await flow.start()).wait()
        assert "in the batch of partition 0, offsets 2 to 5: ValueError: no" in str(caught.value)


async def test_a_missing_topic_fails_the_start_and_the_error_names_the_step() -> None:
    """The URL of a topic was misspelt, and the topic looked like an empty one."""
    broker = MemoryBroker()
    flow = Flow("f")
    flow.source(broker.topic("nowhere"), name="read").collect()
    with pytest.raises(JobFailed, match=r"step 'read' \(.*\): no topic 'nowhere' in memory") as caught:
        await flow.start()
    assert isinstance(caught.value.__cause__, TopicNotFound)


async def test_a_topic_that_is_deleted_fails_the_job_while_it_waits() -> None:
    """A consumer waited for ever on a deleted topic, without an error."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", b"1")
    flow = Flow("f")
    read = flow.source(clicks, name="read").collect()
    clock = VirtualClock()
    job = await flow.start(clock=clock)
    await clock.advance(0)
    assert read.items == [1]
    await clicks.delete()
    with pytest.raises(JobFailed, match="'clicks' was deleted while it was read"):
        await job.wait()


async def test_statistics_have_the_lag_during_and_after_the_run() -> None:
    """The lag, which operators of a service watch, was wrong or missing."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", *(b"%d" % n for n in range(10)), partitions=2)
    flow = Flow("f")
    flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    assert job.statistics().tasks[0].lag == {"0": 5, "1": 5}
    statistics = await job.wait()
    assert statistics.tasks[0].lag == {"0": 0, "1": 0}


async def test_statistics_are_of_one_moment() -> None:
    """One reader changed the mapping in the statistics, and another reader saw the change."""
    clicks = await made(MemoryBroker(), "clicks", b"1")
    flow = Flow("f")
    flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    before = job.statistics()
    after = await job.wait()
    after.tasks[0].lag["0"] = 5
    assert (before.tasks[0].lag, job.statistics().tasks[0].lag) == ({"0": 1}, {"0": 0})


async def test_a_sink_flushes_within_a_second_although_nothing_follows() -> None:
    """A write failed in the background, and the error came only with the next record of the night."""
    flushed: list[float] = []
    broker, clock = MemoryBroker(), VirtualClock()
    out = await made(broker, "out")
    original = out.open_writer

    async def watched() -> Any:
        writer = await original()
        flush = writer.flush

        async def note() -> None:
            flushed.append(clock.monotonic_s())
            await flush()

        writer.flush = note  # type: ignore[method-assign]
        return writer

    out.open_writer = watched  # type: ignore[method-assign]
    flow = Flow("f")
    source = await made(broker, "in", b"1")
    flow.source(source).sink(out)
    job = await flow.start(clock=clock)
    await clock.advance(0.9)
    assert flushed == []
    await clock.advance(0.2)
    assert flushed == [1.0]
    await job.stop("abort")
