"""Topics at both ends of a flow: reading, writing, bad values, dead letters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from streamiter import Flow, Operator
from streamiter.errors import DecodeError, EncodeError, JobFailed, TopicNotFound
from streamiter.operators import Output
from streamiter.testing import VirtualClock
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, ReadRequest, Topic, TopicRecord


async def made(broker: MemoryBroker, name: str, *values: bytes | None, partitions: int = 1) -> Topic:
    """A topic with these values, dealt to its partitions in turn."""
    topic = broker.topic(name)
    await topic.create(partitions=partitions)
    writer = await topic.open_writer()
    for number, value in enumerate(values):
        await writer.write(
            OutgoingBatch([value], keys=[f"key-{number}".encode()], partition=number % partitions)
        )
    await writer.close()
    return topic


async def content(topic: Topic) -> list[TopicRecord]:
    """All records of a topic, partition by partition."""
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    records: list[TopicRecord] = []
    while (batch := await reader.read()) is not None:
        records += batch.records()
    await reader.close()
    return sorted(records, key=lambda record: (record.partition, record.offset))


class Numbers:
    """Encodes nothing of its records."""

    def encode(self, batch: Any) -> OutgoingBatch:
        return OutgoingBatch([b"%d" % number for number in range(len(batch))])


@pytest.mark.parametrize("parallelism", [1, 2, 5])
async def test_every_partition_is_read_by_one_subtask(parallelism: int) -> None:
    """Also with more subtasks than partitions: nothing twice, nothing left, and the idle ones end."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", *(b"%d" % n for n in range(30)), partitions=3)
    flow = Flow("f", parallelism=parallelism)
    read = flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    assert (await job.wait()).state == "finished"
    assert sorted(read.items) == list(range(30))


async def test_results_are_written_with_keys_and_can_be_read() -> None:
    """From topic to topic."""
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
        """The one line in the log from which the record can be found."""
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

    async def test_skipped_ones_are_counted_and_the_others_come(self) -> None:
        """Each good value once, in order."""
        broker = MemoryBroker()
        clicks = await made(broker, "clicks", b"1", b"{", b"2", b"]", b"3")
        flow = Flow("f")
        read = flow.source(clicks, stop="latest", name="read", on_error="skip").collect()
        statistics = await (await flow.start()).wait()
        assert read.items == [1, 2, 3]
        assert statistics.step("read").rejected == 2

    async def test_dead_letters_hold_the_value_as_it_was_and_where_it_came_from(self) -> None:
        """So that they can be repaired and sent again."""
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
        """A record in the middle of a flow: as JSON, with the reason."""
        broker = MemoryBroker()
        dead = await made(broker, "dead")
        flow = Flow("f", parallelism=2)
        kept = flow.from_items([1, 0, 2]).map(lambda x: 10 // x, name="divide", dead_letter=dead).collect()
        await (await flow.start()).wait()
        assert sorted(kept.items) == [5, 10]
        [letter] = await content(dead)
        assert letter.value == b"0"
        assert dict(letter.headers) == {
            "step": b"divide",
            "error": b"ZeroDivisionError: integer division or modulo by zero",
        }

    async def test_what_cannot_be_encoded_follows_the_sink_s_policy(self) -> None:
        """A set in one record must not keep the others from the topic."""
        broker = MemoryBroker()
        out, dead = await made(broker, "out"), await made(broker, "dead")
        flow = Flow("f")
        flow.from_items([1, {2}, 3]).sink(out, dead_letter=dead, name="write")
        statistics = await (await flow.start()).wait()
        assert [record.value for record in await content(out)] == [b"1", b"3"]
        assert [record.value for record in await content(dead)] == [b'"{2}"']
        assert statistics.step("write").rejected == 1

    async def test_by_default_what_cannot_be_encoded_fails_the_job_with_the_record(self) -> None:
        """The same without a policy."""
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
    async def test_a_record_without_a_good_key_follows_the_sink_s_policy(
        self, key: Any, message: str
    ) -> None:
        """It was said of no record, in the words of a connector, and ended the job whatever the policy."""
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

    async def test_keys_stay_with_their_records_where_some_cannot_be_encoded(self) -> None:
        """Taking bad records out of the values only would give their neighbours their keys."""
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
        """Where the record is not known, the range of the batch is."""
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


async def test_a_topic_that_is_not_there_fails_the_start_naming_the_step() -> None:
    """A typo in a URL; it must not look like an empty topic."""
    broker = MemoryBroker()
    flow = Flow("f")
    flow.source(broker.topic("nowhere"), name="read").collect()
    with pytest.raises(JobFailed, match=r"step 'read' \(.*\): no topic 'nowhere' in memory") as caught:
        await flow.start()
    assert isinstance(caught.value.__cause__, TopicNotFound)


async def test_a_topic_that_is_deleted_fails_the_job_while_it_waits() -> None:
    """A consumer that waits for ever on a topic that is gone is the silent stall."""
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


async def test_lag_is_told_while_it_runs_and_after() -> None:
    """The number an operator of the service watches."""
    broker = MemoryBroker()
    clicks = await made(broker, "clicks", *(b"%d" % n for n in range(10)), partitions=2)
    flow = Flow("f")
    flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    assert job.statistics().tasks[0].lag == {"0": 5, "1": 5}
    statistics = await job.wait()
    assert statistics.tasks[0].lag == {"0": 0, "1": 0}


async def test_statistics_are_of_one_moment() -> None:
    """Two who look at them must see the same, whatever one of them does with the mapping in it."""
    clicks = await made(MemoryBroker(), "clicks", b"1")
    flow = Flow("f")
    flow.source(clicks, stop="latest").collect()
    job = await flow.start()
    before = job.statistics()
    after = await job.wait()
    after.tasks[0].lag["0"] = 5
    assert (before.tasks[0].lag, job.statistics().tasks[0].lag) == ({"0": 1}, {"0": 0})


async def test_a_sink_flushes_within_a_second_although_nothing_follows() -> None:
    """A write that failed in the background must not stay silent until the next record of the night."""
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
