"""After a restart, publishing continues: a reader never sees a lower generation or version."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed
from models.model_case import MakeTopic, all_records, compacted, large_update, selected, write
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow
from streamiter.engine.job.job import Job
from streamiter.models import ModelSnapshot, model_updates
from streamiter.models.intake import UpdateIntake
from streamiter.models.update import UpdateHeaders
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions
from streamiter.topics.topic import Topic

RARELY_S = 100.0


class Kept(Fed):
    """Resumes at the position of a checkpoint, as the source of a topic does."""

    async def open(self, context: Context, positions: Positions | None) -> None:
        self.brought = (positions or {}).get("brought", 0)


async def started(topic: Topic, folder: Path, **options: Any) -> tuple[Job, Kept]:
    """Start a job that publishes the models of its source."""
    how = {name: options.pop(name) for name in ("delivery", "changes") if name in options}
    source, flow = Kept(), Flow("publishing")
    flow.from_source(lambda: source, name="in").publish_model(topic, model="ctr", **how)
    return await flow.start(checkpoints=Checkpoints(folder, interval_s=RARELY_S), **options), source


async def published(job: Job, source: Kept, *models: Any) -> None:
    """Publish more models as one batch, and wait until the sink has them."""
    [sink] = [each.step for task in job.statistics().tasks for each in task.steps if each.step != "in"]
    awaited = job.statistics().step(sink).records_in + len(models)
    source.give(*models)
    await until(lambda: job.statistics().step(sink).records_in >= awaited)


async def ranks(topic: Topic) -> list[tuple[int, int]]:
    """Return the ranks of all updates in the topic, in order."""
    intake = UpdateIntake(topic, "ctr")
    updates = [intake.take(record) for record in await all_records(topic) if record.value is not None]
    return [update.rank for update in updates if update is not None]


SMALL = np.zeros(2)


async def test_an_older_checkpoint_begins_a_new_generation(make_topic: MakeTopic, tmp_path: Path) -> None:
    """After a restore of an older checkpoint, servers kept the bad model until as many new versions were published."""
    topic = await make_topic()
    job, source = await started(topic, tmp_path)
    for _ in range(3):
        await published(job, source, SMALL)
        await job.checkpoint()
    await job.stop("abort")
    job, source = await started(topic, tmp_path, restore=1)
    await published(job, source, SMALL, SMALL)
    await job.stop("suspend")
    assert await ranks(topic) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    job, source = await started(topic, tmp_path)
    await published(job, source, SMALL)
    await job.stop("suspend")
    assert (await ranks(topic))[-1] == (2, 3)


async def test_a_crash_at_least_once_begins_a_new_generation(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Updates with different weights had the same version, and each server used the update that it had read first."""
    topic = await make_topic()
    job, source = await started(topic, tmp_path, delivery="at_least_once")
    await published(job, source, SMALL)
    await job.checkpoint()
    await published(job, source, SMALL)
    async with asyncio.timeout(PATIENCE_S):
        while len(await ranks(topic)) < 2:
            await asyncio.sleep(0)
    await job.stop("abort")
    job, source = await started(topic, tmp_path, delivery="at_least_once")
    await published(job, source, SMALL)
    await job.stop("suspend")
    assert await ranks(topic) == [(1, 1), (1, 2), (2, 1)]


async def test_exactly_once_continues_with_the_next_version(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Each restart began a new generation, so consumers started from the beginning."""
    topic = await make_topic()
    job, source = await started(topic, tmp_path)
    await published(job, source, SMALL, SMALL)
    await job.checkpoint()
    await published(job, source, SMALL)  # This version is not committed, so no reader sees it.
    await job.stop("abort")
    for _ in range(2):
        job, source = await started(topic, tmp_path)
        await published(job, source, SMALL)
        await job.stop("suspend")
    assert await ranks(topic) == [(1, 1), (1, 2), (1, 3), (1, 4)]


async def test_half_an_update_is_later_than_the_restored_one(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Chunks of two models had the same version, and no server could read the update."""
    topic = await make_topic()
    job, source = await started(topic, tmp_path)
    await published(job, source, SMALL)
    await job.stop("suspend")
    await write(topic, selected(large_update((1, 2)), 0, 1))  # A run with at_least_once crashed here.
    job, source = await started(topic, tmp_path)
    await published(job, source, SMALL)
    await job.stop("suspend")
    assert await ranks(topic) == [(1, 1), (2, 1)]
    assert [record.key for record in await all_records(await compacted(topic))] == [b"ctr"]


@pytest.mark.parametrize("delivery", [None, "at_least_once"])
async def test_no_chunks_are_left_of_updates_that_a_restart_supersedes(
    delivery: str | None, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """Each restore of an older checkpoint left one large model in the compacted topic for ever."""
    topic = await make_topic()
    large = ModelSnapshot(np.random.default_rng(7).normal(size=300_000))  # 2.4 MB: several records.
    job, source = await started(topic, tmp_path, delivery=delivery)
    for _ in range(2):
        await published(job, source, large)
        await job.checkpoint()
    await job.stop("abort")
    job, source = await started(topic, tmp_path, delivery=delivery, restore=1)
    await published(job, source, SMALL)
    await job.stop("suspend")
    assert await ranks(topic) == [(1, 1), (1, 2), (2, 1)]
    assert [record.key for record in await all_records(await compacted(topic))] == [b"ctr"]


def changed(version: int) -> np.ndarray[Any, Any]:
    """Return the parameters of a version: each differs from the one before in one of many numbers."""
    weights = np.zeros(1000)
    weights[:version] = 1.0
    return weights


async def test_changes_go_on_with_a_whole_update_after_a_restart(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Changes of an aborted transaction were part of the chain that the restored run continued."""
    topic = await make_topic()
    job, source = await started(topic, tmp_path, changes=True)
    await published(job, source, changed(1), changed(2))
    await job.checkpoint()
    await published(job, source, changed(3))  # This version is not committed, so no reader sees it.
    await job.stop("abort")
    job, source = await started(topic, tmp_path, changes=True)
    await published(job, source, changed(3), changed(4))
    await job.stop("suspend")
    found = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert [update.rank for update in found] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert all(np.array_equal(update.parameters, changed(update.version)) for update in found)  # type: ignore[arg-type]
    headers = [dict(record.headers) for record in await all_records(topic) if record.value is not None]
    assert [h.get("follows") for h in headers] == [None, b"1.1", None, b"1.3"]
    last = [UpdateHeaders.parse(record.headers).rank for record in await all_records(await compacted(topic))]
    assert last == [(1, 3), (1, 4)]


async def test_a_run_without_changes_deletes_those_of_the_run_before(make_topic: MakeTopic, tmp_path: Path) -> None:
    """With changes for a day and without them afterwards, the topic kept those of that day."""
    topic = await make_topic()
    for changes in (True, False):
        job, source = await started(topic, tmp_path, changes=changes)
        await published(job, source, changed(1), changed(2), changed(3))
        await job.stop("suspend")
    left = [record.key for record in await all_records(await compacted(topic))]
    assert left == [b"ctr"]
