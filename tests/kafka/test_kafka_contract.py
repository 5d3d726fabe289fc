"""Topics on a real broker keep the contract of topics, and flows keep what they keep with topics in memory."""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, PARTITIONS, RARELY_S, write, written
from checkpoints_jobs.test_other_parallelism import Count
from learn.frozen_states import frozen
from learn.late_label_support import LABELS, Loop, distinct, events
from restore.counted_calls import count_calls
from restore.topic_cases import numbered, stored_source
from restore.topic_cases import written as filled
from support.waiting import PATIENCE_S, until
from topics.contract_transactions import TransactionsContract
from topics.topic_contract import TopicCase, TopicContract

from streamiter import Checkpoints, Flow
from streamiter.learn import train_online
from streamiter.testing import check_flow_restore
from streamiter.topics import OutgoingBatch, Topic, topic
from streamiter_kafka.reader import KafkaReader
from streamiter_kafka.wire import FeaturesRequest


@pytest.fixture
def case(kafka_broker, topic_prefix) -> TopicCase:
    return TopicCase(
        handle=lambda name: topic(f"kafka://{kafka_broker.bootstrap}/{name}"),
        prefix=topic_prefix,
        record_limit_settings={"max.message.bytes": "2000"},
        record_limit_bytes=2000,
    )


class TestKafkaTopics(TopicContract):
    """The broker has transactions of version 2."""


class TestKafkaTransactionsOfVersion1(TransactionsContract):
    """The broker seems to be older: it does not tell the features of its cluster."""

    @pytest.fixture(autouse=True)
    def version_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FeaturesRequest, "_CLASSES", ())


def test_a_restored_flow_reads_a_kafka_topic_from_its_position(
    kafka_broker: Any, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored flow lost records, because its positions were those behind the fetched and not the handled records."""
    url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}clicks"
    asyncio.run(filled(topic(url), numbered(partitions=4)))
    calls = count_calls(KafkaReader, monkeypatch)
    check_flow_restore(functools.partial(stored_source, url), cuts=2, ordered=False)
    assert calls


@pytest.mark.parametrize("parallelisms", [(1, 3, 2)])
async def test_partitions_on_a_broker_change_hands(
    kafka_topic: Callable[..., Topic], topic_prefix: str, parallelisms: tuple[int, ...], tmp_path: Path
) -> None:
    """A partition that another subtask had read was read again from its beginning, and its keys were counted twice."""
    source, out = kafka_topic("in"), kafka_topic("out")
    await source.create(partitions=PARTITIONS)
    await out.create()

    def make_flow(parallelism: int) -> Flow:
        flow = Flow(f"{topic_prefix}counts", parallelism=parallelism)
        read = flow.source(source, name="in")
        read.key_by(lambda x: x % 7).process(Count, name="count").sink(out)
        return flow

    for turn, parallelism in enumerate(parallelisms):
        await write(source, range(turn * NUMBERS, (turn + 1) * NUMBERS), partitions=PARTITIONS)
        job = await make_flow(parallelism).start(checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S))
        await until(lambda job=job: job.statistics().step("count").records_in == NUMBERS)  # type: ignore[misc]
        await asyncio.wait_for(job.stop("suspend"), PATIENCE_S)
    expected: Counter[Any] = Counter(
        ("count", number % 7, number // 7 + 1) for number in range(len(parallelisms) * NUMBERS)
    )
    assert Counter(map(tuple, await written(out))) == expected


async def test_a_backlog_is_learned_by_the_timestamps_of_its_topic(kafka_topic: Callable[..., Topic]) -> None:
    """A service that caught up learned all questions of a week as unanswered: its log loss was 6.08, not .45."""
    given = distinct(events(1_500))  # The default begins after 1,000 questions.
    backlog = kafka_topic("backlog")
    await backlog.create(partitions=3)
    writer = await backlog.open_writer()
    for partition in range(3):
        # Questions and answers of a key are in different partitions, and no field has the time.
        part = given[partition::3]
        values = [orjson.dumps({name: field for name, field in event.items() if name != "at"}) for event in part]
        times = [event["at"] + 1_000 for event in part]
        await writer.write(OutgoingBatch(values, timestamps_ms=times, partition=partition))
    await writer.close()
    loop = Loop(given, "expected")
    assert len(loop.assumed) > 100
    flow = Flow("catches up")
    training = train_online(flow.source(backlog, stop="latest"), labels=LABELS)
    models, metrics = training.models.collect(), training.validation.collect()
    statistics = await (await flow.start()).wait()
    assert frozen(models.items[-1].parameters) == frozen(loop.model.parameters(state=False))
    assert (metrics.items[-1]["count"], statistics.step("learn").rejected) == (1_500, loop.late)
