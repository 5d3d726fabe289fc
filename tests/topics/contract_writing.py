"""Checks that written records can be read again."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from topics.topic_case import (
    TopicCase,
    by_partition,
    numbered,
    numbers_of,
    patiently,
    read_to_end,
    values_of,
    write,
    write_and_flush,
)

from streamiter import Checkpoints, Flow
from streamiter.errors import RecordTooLarge, TopicError
from streamiter.topics import OutgoingBatch, ReadRequest
from streamiter.values.helpers.clock import SystemClock


class WritingContract:
    """The part of `TopicContract` on writing."""

    async def test_every_field_of_a_record_survives_the_round_trip(self, case: TopicCase) -> None:
        """Headers with repeated names, and records without a key or a value, were lost by other connectors."""
        topic = await case.make_topic()
        headers = [(("a", b"1"), ("a", b"2"), ("ü", b"\x00\xff")), (), (("empty", b""), ("nothing", None)), ()]
        written = OutgoingBatch(
            values=[b"one", None, b"", b"\x00\xff"],
            keys=[b"k1", b"k2", None, b""],
            headers=headers,
            timestamps_ms=[1_000, 2_000, 2_000, 5_000],
        )
        await write(topic, written)
        records = await read_to_end(topic)
        assert values_of(records) == written.values
        assert [record.key for record in records] == written.keys
        assert [record.headers for record in records] == headers
        assert [record.timestamp_ms for record in records] == [1_000, 2_000, 2_000, 5_000]
        assert [record.offset for record in records] == [0, 1, 2, 3]

    async def test_records_without_time_stamps_get_the_time_of_writing(self, case: TopicCase) -> None:
        """A record had the time zero, so a retention by time deleted it at once."""
        topic = await case.make_topic()
        before = SystemClock().now_ms()
        await write(topic, [b"a", b"b"])
        after = SystemClock().now_ms()
        first, second = [record.timestamp_ms for record in await read_to_end(topic)]
        assert before <= first <= second <= after

    async def test_a_batch_without_keys_or_headers_reads_as_having_none(self, case: TopicCase) -> None:
        """A batch without keys had no column of keys, and its reader failed."""
        topic = await case.make_topic()
        await write(topic, [b"a", b"b"])
        reader = await topic.open_reader(ReadRequest(stop="latest"))
        batch = await patiently(reader.read())
        assert batch is not None
        assert (list(batch.keys), list(batch.headers)) == ([None, None], [(), ()])
        await reader.close()

    async def test_an_empty_batch_is_no_record(self, case: TopicCase) -> None:
        """An operator emitted an empty batch, and the write failed or stored a record."""
        topic = await case.make_topic(partitions=2)
        writer = await topic.open_writer()
        await patiently(writer.write(OutgoingBatch([])))
        await patiently(writer.write(OutgoingBatch([], keys=[], headers=[], timestamps_ms=[])))
        await patiently(writer.close())
        assert await read_to_end(topic) == []

    async def test_many_records_come_back_exactly_once(self, case: TopicCase) -> None:
        """A record was lost or repeated between two fetches, blocks or partitions."""
        topic = await case.make_topic(partitions=3)
        writer = await topic.open_writer()
        for start in range(0, 20_000, 2_500):
            await patiently(writer.write(OutgoingBatch(numbered(range(start, start + 2_500)))))
        await patiently(writer.close())
        records = await read_to_end(topic)
        assert sorted(numbers_of(records)) == list(range(20_000))
        for part in by_partition(records).values():
            offsets = [record.offset for record in part]
            assert offsets == sorted(set(offsets))

    async def test_a_key_stays_in_its_partition_and_in_order(self, case: TopicCase) -> None:
        """The records of a key changed their order, on which its state depends."""
        topic = await case.make_topic(partitions=3)
        writer = await topic.open_writer()
        for start in range(0, 600, 40):
            numbers = range(start, start + 40)
            keys = [b"key-%d" % (number % 7) for number in numbers]
            await patiently(writer.write(OutgoingBatch(numbered(numbers), keys=keys)))
        await patiently(writer.close())
        records = await read_to_end(topic)
        assert len(records) == 600
        assert len(by_partition(records)) > 1
        for key in {record.key for record in records}:
            of_key = [record for record in records if record.key == key]
            assert len({record.partition for record in of_key}) == 1
            assert numbers_of(of_key) == sorted(numbers_of(of_key))

    async def test_an_explicit_partition_is_obeyed(self, case: TopicCase) -> None:
        """Feedback was written to another partition than the one that its owner reads."""
        topic = await case.make_topic(partitions=3)
        writer = await topic.open_writer()
        for partition in (2, 0, 2):
            await patiently(writer.write(OutgoingBatch([b"%d" % partition], keys=[b"k"], partition=partition)))
        await patiently(writer.close())
        records = await read_to_end(topic)
        assert sorted((record.partition, record.value) for record in records) == [(0, b"0"), (2, b"2"), (2, b"2")]

    async def test_a_missing_partition_is_refused(self, case: TopicCase) -> None:
        """A record for a missing partition waited for ever, or was written to another partition."""
        topic = await case.make_topic(partitions=2)
        writer = await topic.open_writer()
        with pytest.raises(TopicError, match="partition"):
            await write_and_flush(writer, OutgoingBatch([b"a"], partition=2))
        await patiently(writer.close())
        assert await read_to_end(topic) == []

    async def test_flushed_records_are_readable_by_another_client(self, case: TopicCase) -> None:
        """A flush returned too early, and a kill of the writer after it lost records."""
        topic = await case.make_topic()
        writer = await topic.open_writer()
        for count in (1, 2, 3):
            await patiently(writer.write(OutgoingBatch([b"x"])))
            await patiently(writer.flush())
            assert len(await read_to_end(case.topic())) == count
        await patiently(writer.close())

    async def test_concurrent_writers_lose_nothing_and_keep_their_own_order(self, case: TopicCase) -> None:
        """The subtasks of a sink wrote at once, and records were lost or changed their order."""
        topic = await case.make_topic()

        async def run(name: int) -> None:
            writer = await case.topic().open_writer()
            for number in range(60):
                await patiently(writer.write(OutgoingBatch([b"%d" % (name * 1000 + number)])))
            await patiently(writer.close())

        await asyncio.gather(*(run(name) for name in range(3)))
        numbers = numbers_of(await read_to_end(topic))
        for name in range(3):
            of_writer = [number % 1000 for number in numbers if number // 1000 == name]
            assert of_writer == list(range(60))

    async def test_one_record_above_the_limit_is_an_error_and_the_topic_continues(self, case: TopicCase) -> None:
        """A large record was dropped without an error."""
        if case.record_limit_settings is None:
            pytest.skip("this connector has no limit for a record")
        topic = await case.make_topic(settings=case.record_limit_settings)
        writer = await topic.open_writer()
        with pytest.raises(RecordTooLarge, match=str(case.record_limit_bytes)):
            await write_and_flush(writer, OutgoingBatch([b"x" * (2 * case.record_limit_bytes)]))
        await patiently(writer.write(OutgoingBatch([b"small"])))
        await patiently(writer.close())
        assert values_of(await read_to_end(topic)) == [b"small"]

    async def test_the_size_limit_of_a_topic_is_the_largest_record_that_it_takes(self, case: TopicCase) -> None:
        """A dead letter was one byte larger than the limit that it was cut to, which ended the job."""
        if case.record_limit_settings is None:
            pytest.skip("this connector has no limit for a record")
        topic = await case.make_topic(settings=case.record_limit_settings)
        limit = await patiently(topic.size_limit())
        assert limit is not None
        headers = (("error", b"e" * 100), ("step", b"parse"))
        largest = b"x" * max(size for size in range(2000) if limit.holds(b"x" * size, b"key", headers))
        await write(topic, OutgoingBatch([largest], keys=[b"key"], headers=[headers]))
        writer = await topic.open_writer()
        with pytest.raises(RecordTooLarge):
            await write_and_flush(writer, OutgoingBatch([largest + b"x"], keys=[b"key"], headers=[headers]))
        await patiently(writer.close())
        assert values_of(await read_to_end(topic)) == [largest]

    @pytest.mark.parametrize("has_checkpoints", [False, True])
    async def test_dead_letters_are_cut_to_the_limit_of_the_topic(
        self, case: TopicCase, has_checkpoints: bool, tmp_path: Path
    ) -> None:
        """One large record ended a job that should have continued without it."""
        if case.record_limit_settings is None:
            pytest.skip("this connector has no limit for a record")
        dead = await case.make_topic(settings=case.record_limit_settings)
        limit = await patiently(dead.size_limit())
        assert limit is not None
        headers = (("error", b"ValueError: no"), ("step", b"parse"))
        fits = max(size for size in range(2000) if limit.holds(b"x" * size, None, headers))
        errors = {b"x": "no", b"y": "no", b"z": "no", b"s": "why " * 1_000_000, b"t": "üb" * 1_000_000}
        sizes = {b"x": fits, b"y": fits + 1, b"z": 5_000_000, b"s": 10, b"t": 5_000_000}

        def refuse(record: bytes) -> None:
            raise ValueError(errors[record[:1]])

        flow = Flow(f"{case.prefix}letters")
        values = [name * size for name, size in sizes.items()]
        flow.from_items(values, name="items").map(refuse, name="parse", dead_letter=dead)
        settings = Checkpoints(tmp_path, interval_s=60) if has_checkpoints else None
        await patiently((await flow.start(checkpoints=settings)).wait())
        letters = await read_to_end(dead)
        assert [letter.value for letter in letters][::3] == [values[0], values[3]]
        assert letters[0].headers == headers
        for letter, value in zip(letters[1:], values[1:], strict=True):
            given = dict(letter.headers)
            assert letter.value is not None
            assert limit.holds(letter.value, letter.key, letter.headers)
            assert given["step"] == b"parse"
            if letter.value != value:
                assert value.startswith(letter.value)
                assert len(letter.value) > 500
                assert given["value_bytes"] == b"%d" % len(value)
                assert given["value_sha256"] == hashlib.sha256(value).hexdigest().encode()
            error = f"ValueError: {errors[value[:1]]}"
            if given["error"] != error.encode():
                assert given["error_bytes"] == b"%d" % len(error.encode())
                assert len(given["error"]) > 100
                assert error.startswith(given["error"].decode().removesuffix("…"))
        assert [
            ("value_bytes" in names, "error_bytes" in names) for names in (dict(each.headers) for each in letters)
        ] == [(False, False), (True, False), (True, False), (False, True), (True, True)]
