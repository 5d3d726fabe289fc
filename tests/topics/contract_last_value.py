"""Checks of the last record of a key, which is searched from a topic's end, and of the topic of commit records."""

import asyncio

import pytest
from topics.topic_case import TopicCase, missing_soon, numbered, patiently, read_to_end, write, write_transaction

from streamiter.errors import TopicNotFound
from streamiter.topics import OutgoingBatch, Topic, TopicRecord
from streamiter.topics.compacted import COMMIT_TOPIC, ensure_commit_topic, last_value
from streamiter.values.helpers.clock import SystemClock

FLOW = b"flow"


async def found(topic: Topic, key: bytes = FLOW) -> TopicRecord | None:
    return await patiently(last_value(topic, key, clock=SystemClock()))


async def found_value(topic: Topic, key: bytes = FLOW) -> bytes | None:
    record = await found(topic, key)
    assert record is not None
    return record.value


def keyed(*values: bytes | None, key: bytes = FLOW) -> OutgoingBatch:
    return OutgoingBatch(values, keys=[key] * len(values))


class LastValueContract:
    """The part of `TopicContract` on the last record of a key."""

    async def test_the_last_record_of_a_key_is_found_before_any_other_records(self, case: TopicCase) -> None:
        """Other flows committed into the same topic much more often, and this flow's last commit was not found."""
        topic = await case.make_topic()
        await write(topic, keyed(b"old", b"last"))
        for others in (0, 1, 31, 500):
            await write(topic, OutgoingBatch(numbered(range(others)), keys=[b"other"] * others))
            record = await found(topic)
            assert record is not None
            assert (record.partition, record.offset, record.key, record.value) == (0, 1, FLOW, b"last")

    async def test_a_key_that_was_never_written_has_no_record(self, case: TopicCase) -> None:
        """At its first start, a flow took the commit of another flow whose name begins with its own name."""
        topic = await case.make_topic(partitions=2)
        assert await found(topic) is None
        await write(topic, OutgoingBatch(numbered(range(100)), keys=[None, b"flow-2"] * 50))
        assert await found(topic) is None

    async def test_a_missing_topic_is_not_taken_for_an_empty_one(self, case: TopicCase) -> None:
        """A flow started fresh, although its commits were in another place."""
        with missing_soon(), pytest.raises(TopicNotFound, match="nowhere"):
            await found(case.topic("nowhere"))

    async def test_a_deleted_key_gives_its_tombstone(self, case: TopicCase) -> None:
        """A deleted key still had the value before its tombstone."""
        topic = await case.make_topic()
        await write(topic, keyed(b"value", None))
        assert await found_value(topic) is None

    async def test_each_key_of_several_partitions_is_found(self, case: TopicCase) -> None:
        """A topic that was created by hand had several partitions, and the commit was in another one."""
        topic = await case.make_topic(partitions=3)
        for number in range(3):
            keys = [b"key-%d" % key for key in range(20)]
            await write(topic, OutgoingBatch([b"%d of " % number + key for key in keys], keys=keys))
        for key in range(20):
            assert await found_value(topic, b"key-%d" % key) == b"2 of key-%d" % key

    async def test_aborted_records_are_ignored(self, case: TopicCase) -> None:
        """A flow resumed from the record of a run that had failed at its commit."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        await patiently(transactions.begin())
        await patiently(transactions.write(topic, keyed(b"committed")))
        await patiently(transactions.commit())
        for number in range(40):
            await patiently(transactions.begin())
            await patiently(transactions.write(topic, keyed(b"aborted %d" % number)))
            await patiently(transactions.abort())
        await patiently(transactions.close())
        assert await found_value(topic) == b"committed"

    async def test_records_that_a_fenced_run_left_open_are_ignored(self, case: TopicCase) -> None:
        """A restart took the id over, and then read the uncommitted record of the run before."""
        topic = await case.make_topic()
        older = await topic.open_transactions(case.prefix + "t")
        for value in (b"committed", b"left open"):
            await patiently(older.begin())
            await patiently(older.write(topic, keyed(value)))
            if value == b"committed":
                await patiently(older.commit())
        newer = await case.topic().open_transactions(case.prefix + "t")
        assert await found_value(topic) == b"committed"
        await patiently(older.close())
        await patiently(newer.close())

    async def test_a_commit_behind_another_open_transaction_is_found(self, case: TopicCase) -> None:
        """Another flow died at its commit, and this flow resumed from an older checkpoint."""
        topic = await case.make_topic()
        await write(topic, keyed(b"older"))
        other = await topic.open_transactions(case.prefix + "other")
        await patiently(other.begin())
        await patiently(other.write(topic, keyed(b"x", key=b"other flow")))
        own = await topic.open_transactions(case.prefix + "own")
        await patiently(own.begin())
        await patiently(own.write(topic, keyed(b"newer")))
        await patiently(own.commit())
        looking = asyncio.ensure_future(found_value(topic))
        await asyncio.wait({looking}, timeout=0.2)  # some connectors wait for the other transaction
        await patiently(other.abort())
        assert await patiently(looking) == b"newer"
        await patiently(other.close())
        await patiently(own.close())


class CommitTopicContract:
    """The part of `TopicContract` on the topic of commit records."""

    async def test_a_topic_is_committed_together_with_another(self, case: TopicCase) -> None:
        """Outputs were committed without their commit record, so they were written again."""
        outputs = await case.make_topic("outputs")
        assert outputs.has_transactions
        other = outputs.beside(case.prefix + "other")
        assert other.name == case.prefix + "other"
        assert other.commit_domain == outputs.commit_domain
        assert other.url == case.topic("other").url
        with pytest.raises(TopicNotFound):
            await patiently(other.describe())
        await other.create()
        transactions = await outputs.open_transactions(case.prefix + "t")
        await write_transaction(transactions, other, [b"a"], commit=True)
        await patiently(transactions.close())
        assert [record.value for record in await read_to_end(case.topic("other"))] == [b"a"]

    async def test_the_commit_topic_is_created_once_for_any_first_caller(self, case: TopicCase) -> None:
        """Several flows started at once without a commit topic, and some of them failed to create it."""
        outputs = await case.make_topic("outputs")
        await asyncio.gather(*(patiently(ensure_commit_topic(outputs)) for _ in range(5)))
        commits = await ensure_commit_topic(outputs)
        assert (commits.name, commits.commit_domain) == (COMMIT_TOPIC, outputs.commit_domain)
        description = await patiently(commits.describe())
        assert description.partitions == 1
        wanted = {**commits.compaction_settings, **commits.eager_compaction_settings}
        assert wanted
        assert wanted.items() <= description.settings.items()

    async def test_commits_of_flows_are_distinguished(self, case: TopicCase) -> None:
        """A flow resumed from the commit of another flow on the same server."""
        outputs = await case.make_topic("outputs")
        commits = await ensure_commit_topic(outputs)
        flows = [f"{case.prefix}flow-{number}".encode() for number in range(2)]
        for number, flow in enumerate(flows):
            transactions = await commits.open_transactions(flow.decode())
            for commit in range(3):
                await patiently(transactions.begin())
                await patiently(transactions.write(commits, keyed(b"%d of %d" % (commit, number), key=flow)))
                await patiently(transactions.commit())
            await patiently(transactions.close())
        assert [await found_value(commits, flow) for flow in flows] == [b"2 of 0", b"2 of 1"]

    async def test_reporting_positions_never_fails(self, case: TopicCase) -> None:
        """A connector without tools for the lag failed a job that reported its positions."""
        topic = await case.make_topic(partitions=2)
        for positions in ({}, {0: 1, 1: 7}):
            await patiently(topic.report_positions(case.prefix + "group", positions))
