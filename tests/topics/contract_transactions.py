"""Checks of transactions: records become visible together, and only the present owner may write."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from support.processes import async_process
from topics.topic_case import (
    TopicCase,
    numbered,
    numbers_of,
    patiently,
    read_to_end,
    values_of,
    write,
    write_and_commit,
    write_transaction,
)

from streamiter.errors import ProducerFenced, TopicError, TransactionExpired
from streamiter.topics import GroupPositions, OutgoingBatch, ReadRequest, Topic, Transactions
from streamiter.topics.compacted import commit_positions, committed_positions
from streamiter.values.helpers.clock import SystemClock

ZOMBIE = Path(__file__).with_name("zombie_child.py")


async def write_for_ever(transactions: Transactions, topic: Topic) -> None:
    while True:
        await transactions.write(topic, OutgoingBatch([b"late"]))
        await asyncio.sleep(0.02)  # servers end a transaction by real time


class TransactionsContract:
    """The part of `TopicContract` on transactions."""

    async def test_records_of_a_transaction_are_seen_when_it_is_committed(self, case: TopicCase) -> None:
        """Outputs were visible before the commit, so they were not exactly once."""
        topic = await case.make_topic(partitions=2)
        transactions = await topic.open_transactions(case.prefix + "t")
        await patiently(transactions.begin())
        for partition in (0, 1):
            batch = OutgoingBatch(numbered([partition]), partition=partition)
            await patiently(transactions.write(topic, batch))
        assert await read_to_end(topic) == []
        await patiently(transactions.commit())
        assert sorted(numbers_of(await read_to_end(topic))) == [0, 1]
        await patiently(transactions.close())

    async def test_every_field_of_a_record_survives_a_transaction(self, case: TopicCase) -> None:
        """A model update lost its headers, which have the version, or its key, which is the model's name."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        await patiently(transactions.begin())
        batch = OutgoingBatch(
            [b"v", None], keys=[b"k", None], headers=[(("h", b"1"),), ()], timestamps_ms=[5_000, 6_000]
        )
        await patiently(transactions.write(topic, batch))
        await patiently(transactions.commit())
        await patiently(transactions.close())
        seen = [(record.value, record.key, record.headers, record.timestamp_ms) for record in await read_to_end(topic)]
        assert seen == [(b"v", b"k", (("h", b"1"),), 5_000), (None, None, (), 6_000)]

    async def test_aborted_records_are_never_seen(self, case: TopicCase) -> None:
        """A run failed between two checkpoints, and its outputs became visible."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        for number in range(6):
            await write_transaction(transactions, topic, numbered([number] * 3), commit=number % 2 == 1)
        await patiently(transactions.close())
        assert numbers_of(await read_to_end(topic)) == [1, 1, 1, 3, 3, 3, 5, 5, 5]

    async def test_closing_aborts_an_open_transaction(self, case: TopicCase) -> None:
        """A closing committed records whose snapshot was never written."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        await patiently(transactions.begin())
        await patiently(transactions.write(topic, OutgoingBatch([b"a"])))
        await patiently(transactions.close())
        assert await read_to_end(topic) == []

    async def test_one_transaction_covers_several_topics(self, case: TopicCase) -> None:
        """The outputs and the commit record were not in one transaction, because they are in different topics."""
        outputs = await case.make_topic("outputs", partitions=2)
        commits = await case.make_topic("commits")
        assert outputs.commit_domain == commits.commit_domain
        transactions = await outputs.open_transactions(case.prefix + "t")
        for number, commit in enumerate([True, False, True]):
            await patiently(transactions.begin())
            await patiently(transactions.write(outputs, OutgoingBatch(numbered([number, number]))))
            await patiently(transactions.write(commits, OutgoingBatch(numbered([number]), keys=[b"flow"])))
            await patiently(transactions.commit() if commit else transactions.abort())
        await patiently(transactions.close())
        assert sorted(numbers_of(await read_to_end(outputs))) == [0, 0, 2, 2]
        assert numbers_of(await read_to_end(commits)) == [0, 2]

    async def test_a_reader_meets_an_open_transaction_and_continues_after_it(self, case: TopicCase) -> None:
        """Records behind an open transaction were skipped, or were read twice after its end."""
        for committed in (True, False):
            topic = await case.make_topic(f"met-{committed}")
            transactions = await topic.open_transactions(f"{case.prefix}t-{committed}")
            reader = await topic.open_reader(ReadRequest())
            await write(topic, [b"before"])
            await patiently(transactions.begin())
            await patiently(transactions.write(topic, OutgoingBatch([b"inside"])))
            await write(topic, [b"behind"])
            values = values_of((await patiently(reader.read())).records())
            assert values[0] == b"before"
            assert b"inside" not in values
            waiting = asyncio.ensure_future(reader.read())
            await patiently(transactions.commit() if committed else transactions.abort())
            await write(topic, [b"last"])
            while b"last" not in values:
                batch = await patiently(waiting)
                assert batch is not None
                values += values_of(batch.records())
                waiting = asyncio.ensure_future(reader.read())
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            expected = [b"before", b"behind", *([b"inside"] if committed else []), b"last"]
            assert sorted(value or b"" for value in values) == expected
            await patiently(reader.close())
            await patiently(transactions.close())

    async def test_a_newer_owner_of_the_id_fences_the_older(self, case: TopicCase) -> None:
        """A replaced run continued and wrote at the same time as its successor."""
        topic = await case.make_topic()
        older = await topic.open_transactions(case.prefix + "t")
        await write_transaction(older, topic, [b"committed before"], commit=True)
        await patiently(older.begin())
        await patiently(older.write(topic, OutgoingBatch([b"open when fenced"])))
        newer = await case.topic().open_transactions(case.prefix + "t")
        await write_transaction(newer, topic, [b"newer"], commit=True)
        with pytest.raises(ProducerFenced):
            await patiently(older.commit())
        await patiently(older.close())
        await write_transaction(newer, topic, [b"newer again"], commit=True)
        await patiently(newer.close())
        expected = [b"committed before", b"newer", b"newer again"]
        assert values_of(await read_to_end(topic)) == expected

    async def test_a_fenced_owner_cannot_write_or_begin_again(self, case: TopicCase) -> None:
        """A replaced run wrote or began again, and its late records became visible."""
        topic = await case.make_topic()
        older = await topic.open_transactions(case.prefix + "t")
        await patiently(older.begin())
        newer = await case.topic().open_transactions(case.prefix + "t")
        with pytest.raises(ProducerFenced):
            await write_and_commit(older, topic, [b"late"])
        with pytest.raises(ProducerFenced):
            await write_transaction(older, topic, [b"later"], commit=True)
        await patiently(older.close())
        await patiently(newer.close())
        assert await read_to_end(topic) == []

    async def test_a_transaction_open_for_too_long_is_distinguished_from_a_fence(self, case: TopicCase) -> None:
        """A slow run that was not replaced ended for ever, instead of resuming from its checkpoint."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t", timeout_s=0.3)
        await patiently(transactions.begin())
        with pytest.raises(TransactionExpired, match=r"0\.3 s"):
            await patiently(write_for_ever(transactions, topic))
        for call in (transactions.commit, transactions.begin):
            with pytest.raises(TransactionExpired):
                await patiently(call())
        await patiently(transactions.close())
        again = await topic.open_transactions(case.prefix + "t")
        await write_transaction(again, topic, [b"again"], commit=True)
        await patiently(again.close())
        assert values_of(await read_to_end(topic)) == [b"again"]

    async def test_a_process_that_wakes_up_after_it_was_replaced_writes_nothing(self, case: TopicCase) -> None:
        """A machine was suspended or lost its connection, and its run continued after it was replaced."""
        if not case.url_is_global:
            pytest.skip("another process sees other topics at the URL of this case")
        topic = await case.make_topic()
        command = [sys.executable, str(ZOMBIE), topic.url, case.prefix + "t"]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        async with async_process(command, **pipes) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert await patiently(child.stdout.readline()) == b"open\n"
            child.send_signal(signal.SIGSTOP)
            newer = await patiently(topic.open_transactions(case.prefix + "t"))
            await write_transaction(newer, topic, [b"first"], commit=True)
            child.send_signal(signal.SIGCONT)
            child.stdin.write(b"\n")
            child.stdin.close()
            *early, commit, begin = (await patiently(child.stdout.read())).split()
            assert await patiently(child.wait()) == 0
        assert early in ([b"nothing"], [b"ProducerFenced"])  # a connector may collect the records first
        assert (commit, begin) == (b"ProducerFenced", b"ProducerFenced")
        await write_transaction(newer, topic, [b"second"], commit=True)
        await patiently(newer.close())
        assert values_of(await read_to_end(topic)) == [b"first", b"second"]

    async def test_a_newer_owner_is_not_taken_for_a_timeout_before_the_time_is_up(self, case: TopicCase) -> None:
        """Both runs resumed automatically and fenced each other for ever, or the check itself harmed the newer run."""
        topic = await case.make_topic()
        older = await topic.open_transactions(case.prefix + "t")
        await patiently(older.begin())
        await patiently(older.write(topic, OutgoingBatch([b"older"])))
        newer = await case.topic().open_transactions(case.prefix + "t")
        await patiently(newer.begin())
        await patiently(newer.write(topic, OutgoingBatch([b"newer"])))
        with pytest.raises(ProducerFenced) as caught:
            await patiently(older.commit())
        assert not isinstance(caught.value, TransactionExpired)
        with pytest.raises(ProducerFenced) as caught:
            await patiently(older.begin())
        assert not isinstance(caught.value, TransactionExpired)
        await patiently(older.close())
        await patiently(newer.commit())
        await patiently(newer.close())
        assert values_of(await read_to_end(topic)) == [b"newer"]

    async def test_several_tasks_write_into_one_transaction(self, case: TopicCase) -> None:
        """The sinks of a job wrote at once into one transaction, and records were lost."""
        topics = [await case.make_topic(f"output-{number}", partitions=3) for number in range(3)]
        transactions = await topics[0].open_transactions(case.prefix + "t")
        lock = asyncio.Lock()

        async def write_all(topic: Topic) -> None:
            for number in range(30):
                async with lock:
                    batch = OutgoingBatch(numbered([number]), keys=[b"%d" % (number % 7)])
                    await patiently(transactions.write(topic, batch))

        for committed in (True, False, True):
            await patiently(transactions.begin())
            await asyncio.gather(*map(write_all, topics))
            await patiently(transactions.commit() if committed else transactions.abort())
        await patiently(transactions.close())
        for topic in topics:
            records = await read_to_end(topic)
            assert sorted(numbers_of(records)) == sorted([*range(30), *range(30)])
            for key in range(7):
                of_key = [record for record in records if record.key == b"%d" % key]
                assert numbers_of(of_key) == [*range(key, 30, 7), *range(key, 30, 7)]

    async def test_other_ids_are_not_fenced(self, case: TopicCase) -> None:
        """One flow fenced another flow on the same server."""
        topic = await case.make_topic()
        first = await topic.open_transactions(case.prefix + "first")
        second = await topic.open_transactions(case.prefix + "second")
        await patiently(first.begin())
        await patiently(second.begin())
        await patiently(first.write(topic, OutgoingBatch([b"first"])))
        await patiently(second.write(topic, OutgoingBatch([b"second"])))
        await patiently(second.abort())
        await patiently(first.commit())
        assert values_of(await read_to_end(topic)) == [b"first"]
        await patiently(first.close())
        await patiently(second.close())

    async def test_an_empty_transaction_commits(self, case: TopicCase) -> None:
        """A checkpoint without outputs could not be committed."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        for _ in range(2):
            await patiently(transactions.begin())
            await patiently(transactions.commit())
        await write_transaction(transactions, topic, [b"a"], commit=True)
        await patiently(transactions.close())
        assert values_of(await read_to_end(topic)) == [b"a"]

    async def test_calls_out_of_order_are_errors(self, case: TopicCase) -> None:
        """A write outside of a transaction became visible at once, or never."""
        topic = await case.make_topic()
        transactions = await topic.open_transactions(case.prefix + "t")
        with pytest.raises(TopicError, match="begin"):
            await patiently(transactions.commit())
        with pytest.raises(TopicError, match="begin"):
            await patiently(transactions.write(topic, OutgoingBatch([b"a"])))
        await patiently(transactions.begin())
        with pytest.raises(TopicError, match="begin"):
            await patiently(transactions.begin())
        await patiently(transactions.close())
        assert await read_to_end(topic) == []

    async def test_positions_of_a_group_are_committed_with_the_records(self, case: TopicCase) -> None:
        """A job without state committed its positions before or after its outputs: some were lost, or came twice."""
        topic, outputs = await case.make_topic(partitions=2), await case.make_topic("outputs")
        group, clock = f"{case.prefix}readers", SystemClock()
        assert await patiently(committed_positions(topic, group, clock=clock)) is None
        transactions = await topic.open_transactions(case.prefix + "t")
        for commit, offset in ((True, 5), (False, 6), (True, 7)):
            await patiently(transactions.begin())
            await patiently(transactions.write(outputs, OutgoingBatch(numbered([offset]))))
            await patiently(commit_positions(transactions, topic, group, GroupPositions({0: 1, 1: 2}, "older")))
            await patiently(commit_positions(transactions, topic, group, GroupPositions({0: offset, 1: 2}, "run")))
            await patiently(transactions.commit() if commit else transactions.abort())
            found = await patiently(committed_positions(topic, group, clock=clock))
            expected = numbers_of(await read_to_end(outputs))[-1]
            assert found == GroupPositions({0: expected, 1: 2}, "run"), offset
        await patiently(transactions.close())
        assert await patiently(committed_positions(topic, f"{case.prefix}others", clock=clock)) is None
        assert await patiently(committed_positions(outputs, group, clock=clock)) is None

    async def test_a_replaced_owner_does_not_commit_positions(self, case: TopicCase) -> None:
        """A run that had been replaced moved the group backwards or forwards: outputs came twice, or were lost."""
        topic, group = await case.make_topic(), f"{case.prefix}readers"
        assert await patiently(committed_positions(topic, group, clock=SystemClock())) is None
        older = await topic.open_transactions(case.prefix + "t")
        await patiently(older.begin())
        await patiently(commit_positions(older, topic, group, GroupPositions({0: 9}, "older")))
        newer = await topic.open_transactions(case.prefix + "t")
        assert await patiently(committed_positions(topic, group, clock=SystemClock())) is None
        with pytest.raises(ProducerFenced):
            await patiently(older.commit())
        await patiently(newer.begin())
        await patiently(commit_positions(newer, topic, group, GroupPositions({0: 3}, "newer")))
        await patiently(newer.commit())
        found = await patiently(committed_positions(topic, group, clock=SystemClock()))
        assert found == GroupPositions({0: 3}, "newer")
        for each in (older, newer):
            await patiently(each.close())
