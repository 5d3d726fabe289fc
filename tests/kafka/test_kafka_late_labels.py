"""A backlog of questions and answers on a real broker is learned as it would have been live."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from learn.frozen_states import frozen
from learn.late_label_support import LABELS, Loop, distinct, events

from streamiter import Flow
from streamiter.learn import train_online
from streamiter.topics import OutgoingBatch, Topic


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
    for mini_batch in (None, 17):
        flow = Flow("catches up")
        training = train_online(flow.source(backlog, stop="latest"), labels=LABELS, mini_batch=mini_batch)
        models, metrics = training.models.collect(), training.validation.collect()
        statistics = await (await flow.start()).wait()
        assert frozen(models.items[-1].parameters) == frozen(loop.model.parameters(state=False))
        assert (metrics.items[-1]["count"], statistics.step("learn").rejected) == (1_500, loop.late)
