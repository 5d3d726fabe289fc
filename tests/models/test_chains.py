"""Versions as changes: a follower has each version to the last bit, wherever it starts, and never a mixture of two."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from models.model_case import (
    MakeTopic,
    ManualClock,
    all_records,
    compacted,
    encoder,
    memory_topic,
    outgoing,
    same,
    update_of,
    write,
)
from models.shape_cases import shaped
from support.waiting import until

from streamiter.errors import DecodeError
from streamiter.learn import AdaptiveLinearModel, LogisticRegression
from streamiter.models import (
    ModelSnapshot,
    ModelUpdateEncoder,
    ServedModel,
    UpdateStatistics,
    find_update,
    import_model,
    last_update,
    model_updates,
    model_versions,
    next_run,
    roll_back,
)
from streamiter.models.documents import own_copy, without_state
from streamiter.models.publisher import CHANGES_MAX
from streamiter.models.update import UpdateHeaders, chain_checksum
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, Topic, TopicRecord
from streamiter.topics.urls import topic as topic_of

History = list[Any]


# ---- histories of all kinds of models


def of_a_network(random: Random) -> Iterator[Any]:
    """Yield versions of a network whose features come and go."""
    rng = np.random.default_rng(random.randrange(1000))
    keys = np.unique(rng.integers(0, 10**6, 300))
    wide, embedding, dense = rng.random((len(keys), 1)), rng.random((len(keys), 8), np.float32), rng.random((9, 4))
    while True:
        yield own_copy({"network": "{}", "features": keys, "wide.w": wide, "embedding.w": embedding, "fc.w": dense})
        gone = rng.choice(len(keys), rng.integers(0, 3), replace=False)
        keys, wide, embedding = (np.delete(each, gone, axis=0) for each in (keys, wide, embedding))
        new = np.setdiff1d(rng.integers(0, 10**6, rng.integers(0, 3)), keys)
        at = keys.searchsorted(new)
        keys = np.insert(keys, at, new)
        wide, embedding = (np.insert(each, at, each[: len(new)], axis=0) for each in (wide, embedding))
        embedding[rng.integers(0, len(keys), 3)] += np.float32(0.5)
        if rng.random() < 0.5:
            dense = dense + 1


def of_the_default_learner(random: Random) -> Iterator[Any]:
    """Yield versions of a learner, with its state, that learns texts and numbers, and new ones of both."""
    model = AdaptiveLinearModel()
    for number in range(10**6):
        names = [f"km{n}" for n in range(number // 5 + 1)]
        rows = [{name: random.random() for name in names} | {"id": f"u{random.randrange(500)}"} for _ in range(5)]
        model.learn(rows, [random.random() < 0.5 for _ in rows])
        yield model.parameters()


def of_a_linear_model(random: Random) -> Iterator[Any]:
    """Yield versions of an array alone, of which a few numbers change."""
    weights = LogisticRegression(400).parameters()["weights"]
    while True:
        yield weights.copy()
        weights[random.randrange(400)] += random.choice([1.0, 0.0, -0.0])


def of_tables(_: Random) -> Iterator[Any]:
    """Yield versions of a model with tables, one of which changes."""
    parameters = shaped("logit")
    while True:
        yield own_copy(parameters)
        parameters["shapes"]["members"][0]["tables"][3] += 1


def of_any_parts(random: Random) -> Iterator[Any]:
    """Yield versions whose parts come, go, and have other types."""
    parts: list[Any] = [np.zeros((3, 2)), np.arange(9), "text", 1, None, b"\x00", [np.ones(2), (1, 2.5)], {"list": 1}]
    while True:
        yield {name: random.choice(parts) for name in random.sample("abcdef", random.randrange(1, 6))}


KINDS = [of_a_network, of_the_default_learner, of_a_linear_model, of_tables, of_any_parts]


def history(kind: Any, count: int, seed: int = 1) -> History:
    versions = kind(Random(seed))
    return [next(versions) for _ in range(count)]


def changing(generation: int = 1, **options: Any) -> ModelUpdateEncoder:
    return encoder(generation, changes=True, **options)


def ranks_of(batch: OutgoingBatch) -> list[str]:
    """Return for each update of a batch whether it is whole or a change."""
    parsed = [UpdateHeaders.parse(h) for h, value in zip(batch.headers or (), batch.values, strict=True) if value]
    return ["whole" if headers.link is None else "change" for headers in parsed if headers.is_last]


OPTIONS: list[dict[str, Any]] = [{"record_bytes_max": 1500}, {"format": "json"}, {"format": "safetensors"}]


@pytest.mark.parametrize(
    ("kind", "options"), [*((KINDS[0], each) for each in OPTIONS), *zip(KINDS[1:], OPTIONS[::-1] * 2, strict=False)]
)
async def test_a_follower_has_each_version_to_the_last_bit(make_topic: MakeTopic, kind: Any, options: Any) -> None:
    """A follower that was a bit away from its trainer was further away with each change, and nobody knew."""
    topic = await make_topic()
    versions = history(kind, 25)
    one = changing(**options)
    await write(topic, *(one.encode([ModelSnapshot(model, records=number)]) for number, model in enumerate(versions)))
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert [update.records for update in updates] == list(range(25))
    assert all(same(update.parameters, model) for update, model in zip(updates, versions, strict=True))
    last = await last_update(topic, "ctr")
    assert last is not None
    assert same(last.parameters, versions[-1])
    assert (last.rank, last.records) == ((1, 25), 24)


async def test_the_parameters_of_an_update_stay_as_they_are() -> None:
    """An answer was computed by arrays of two versions: a change was written into the arrays of the one before."""
    one = changing()
    topic = await memory_topic(*(one.encode([model]) for model in history(of_a_network, 5)))
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert all(same(update.parameters, model) for update, model in zip(updates, history(of_a_network, 5), strict=True))
    with pytest.raises(ValueError, match="read-only"):
        updates[-1].parameters["embedding.w"][0] = 1  # type: ignore[call-overload]


async def test_a_trainer_that_changes_its_arrays_in_place_publishes_each_change() -> None:
    """The encoder compared an array with itself, and followers kept the first version."""
    weights, one = np.zeros(500), changing()
    topic = await memory_topic()
    for number in range(4):
        weights[number] = 1.0
        await write(topic, one.encode([{"weights": weights, "other": [weights]}]))
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert [float(update.parameters["weights"].sum()) for update in updates] == [1, 2, 3, 4]  # type: ignore[call-overload]


# ---- compaction, starts


async def after_compaction(records: list[TopicRecord], cleaned: int) -> Topic:
    """Return a topic whose first records were compacted, as a broker does it: up to some offset."""
    head = await memory_topic(*(outgoing(record) for record in records[:cleaned]))
    topic = await compacted(head)
    await write(topic, *(outgoing(record) for record in records[cleaned:]))
    return topic


async def test_compaction_up_to_any_record_keeps_the_last_version() -> None:
    """The broker had dropped a change between the base and the last version, and a new consumer had no model."""
    versions = history(of_a_network, 40)
    one = changing(record_bytes_max=3000)
    batches = [one.encode([model]) for model in versions]
    assert [name for batch in batches for name in ranks_of(batch)].count("whole") == 2
    random = Random(2)
    records = await all_records(await memory_topic(*batches))
    for _ in range(30):
        end = random.randrange(1, len(records) + 1)
        topic = await after_compaction(records[:end], random.randrange(end + 1))
        closed = [UpdateHeaders.parse(each.headers) for each in records[:end] if each.value is not None]
        newest = max((headers.version for headers in closed if headers.is_last), default=0)
        given = [update async for update in model_updates(topic, "ctr", follow=False)]
        for update in [*given, await last_update(topic, "ctr")]:
            assert (update is None) == (newest == 0)
            assert update is None or same(update.parameters, versions[update.version - 1])
        assert [update.version for update in given][-1:] == [newest] * (newest > 0)


async def test_a_compacted_topic_has_one_chain() -> None:
    """Each base left the changes before it, and the topic grew without end."""
    one = changing(record_bytes_max=3000)
    topic = await memory_topic(*(one.encode([model]) for model in history(of_a_network, 60)))
    left = await all_records(await compacted(topic))
    chain = [UpdateHeaders.parse(record.headers) for record in left]
    assert len({headers.link.base if headers.link else headers.rank for headers in chain}) == 1
    whole = sum(len(record.value or b"") for record, headers in zip(left, chain, strict=True) if not headers.link)
    assert sum(len(record.value or b"") for record in left) <= 2 * whole


async def test_topics_that_compact_themselves_keep_each_chain(tmp_path: Path) -> None:
    """A file of topics drops records at each write."""
    versions = history(of_a_network, 30)
    for made in (MemoryBroker().topic("models"), topic_of(f"sqlite:///{tmp_path}/topics.db?topic=models")):
        await made.create(settings={"compact": "1"})
        one = changing(record_bytes_max=3000)
        for model in versions:
            await write(made, one.encode([model]))
            last = await last_update(made, "ctr")
            assert last is not None
            assert same(last.parameters, model)


async def test_a_reader_that_starts_anywhere_gets_the_versions_from_there(make_topic: MakeTopic) -> None:
    """A reader that began behind a base had to wait an hour for the next one."""
    topic = await make_topic()
    versions = history(of_a_network, 12)
    one = changing(record_bytes_max=3000)
    await write(topic, update_of((1, 1), model="other"), *(one.encode([model]) for model in versions))
    for record in await all_records(topic):
        found = [u async for u in model_updates(topic, "ctr", start={0: record.offset}, follow=False)]
        assert all(same(update.parameters, versions[update.version - 1]) for update in found)
        headers = dict(record.headers)
        if record.value is not None and headers["model"] == b"ctr" and headers.get("chunk_index", b"0") == b"0":
            assert [update.version for update in found] == list(range(int(headers["version"]), 13))
    async with model_updates(topic, "ctr", start="latest") as updates:
        following = next(iter(history(of_a_network, 13)[12:]))
        await write(topic, one.encode([following]))
        assert same((await anext(updates)).parameters, following)


async def test_each_version_is_listed_and_found(make_topic: MakeTopic) -> None:
    """The commands for versions knew the bases alone."""
    topic = await make_topic()
    one = changing(record_bytes_max=3000)
    versions = history(of_a_network, 30)
    await write(topic, *(one.encode([model]) for model in versions))
    assert [each.version for each in await model_versions(topic, "ctr", 7)] == list(range(24, 31))
    for version in range(1, 31):
        assert same((await find_update(topic, "ctr", f"1.{version}")).parameters, versions[version - 1])
    assert (await find_update(topic, "ctr", "1")).version == 30


# ---- when a chain ends


def changed_by(count: int) -> History:
    """Return versions, each of which differs from the one before in so many of 1,000 numbers."""
    weights, versions = np.zeros(1000), []
    for number in range(6):
        weights[:count] += number + 1
        versions.append(weights.copy())
    return versions


@pytest.mark.parametrize(("count", "expected"), [(0, "wccccc"), (10, "wccccc"), (250, "wccwcc"), (1000, "wwwwww")])
def test_the_changes_of_a_chain_have_at_most_the_bytes_of_its_base(count: int, expected: str) -> None:
    """A late reader read ten models, where each version had changed by a third."""
    one = changing(format="safetensors")
    kinds = [name for model in changed_by(count) for name in ranks_of(one.encode([model]))]
    assert "".join(name[0] for name in kinds) == expected


def test_a_chain_ends_after_an_hour_and_after_a_thousand_changes() -> None:
    """The retention of a topic dropped the base of a model that hardly changed."""
    clock = ManualClock()
    one = changing(clock=clock)
    assert ranks_of(one.encode([np.zeros(999)] * 2)) == ["whole", "change"]
    clock.advance(3601)
    assert ranks_of(one.encode([np.zeros(999)] * 2)) == ["whole", "change"]
    model = {"weights": np.zeros(90_000)}
    kinds = ranks_of(changing().encode([model] * (CHANGES_MAX + 3)))
    assert [number for number, kind in enumerate(kinds) if kind == "whole"] == [0, CHANGES_MAX + 1]


def test_a_model_that_is_refused_harms_no_chain() -> None:
    """After a NaN in a batch of models, the next change was one of a version that nobody had."""
    one = changing()
    one.encode([np.zeros(500)])
    with pytest.raises(Exception, match="holds 1 of 500 values as NaN"):
        one.encode([np.ones(500), np.append(np.zeros(499), np.nan)])
    assert ranks_of(one.encode([np.ones(500)])) == ["whole"]


async def test_a_restored_encoder_begins_with_a_whole_update_and_deletes_the_chain() -> None:
    """The parameters of the last version are in no checkpoint, so a restored writer knows no version to change."""
    versions = history(of_a_network, 10)
    one, again = changing(record_bytes_max=3000), changing(record_bytes_max=3000)
    topic = await memory_topic(one.encode(versions[:8]))
    again.restore(one.snapshot())
    batch = again.encode(versions[8:])
    assert ranks_of(batch) == ["whole", "change"]
    await write(topic, batch)
    left = [UpdateHeaders.parse(record.headers).version for record in await all_records(await compacted(topic))]
    assert set(left) == {9, 10}
    assert same((await last_update(topic, "ctr")).parameters, versions[-1])  # type: ignore[union-attr]


async def test_a_new_run_deletes_the_chain_of_the_run_before(make_topic: MakeTopic) -> None:
    """Each start without a checkpoint left a chain in the compacted topic for ever."""
    topic = await make_topic()
    versions = history(of_a_network, 10)
    await write(topic, changing(record_bytes_max=3000).encode(versions))
    run = await next_run(topic, "ctr")
    new = changing(run.generation, record_bytes_max=3000, leftovers=run.leftovers)
    await write(topic, new.encode(versions[:2]))
    left = [UpdateHeaders.parse(record.headers).rank for record in await all_records(await compacted(topic))]
    assert set(left) == {(2, 1), (2, 2)}


# ---- roll backs, other writers


async def test_a_roll_back_to_a_change_is_whole_and_the_trainer_goes_on_with_a_whole_update() -> None:
    """A change that followed the roll back had been made for the model that was rolled back."""
    versions = history(of_a_network, 8)
    one = changing(record_bytes_max=3000)
    topic = await memory_topic(one.encode(versions))
    update = await roll_back(topic, "ctr", "1.4")
    assert same(update.parameters, versions[3])
    await write(topic, one.encode([versions[5]]))  # The trainer has not seen the roll back yet.
    last = await last_update(topic, "ctr")
    assert last is not None
    assert (last.rank, last.rollback_to) == ((2, 1), (1, 4))
    batch = one.encode([ModelSnapshot(model, since_rollback=(2, 1)) for model in versions[4:6]])
    assert ranks_of(batch) == ["whole", "change"]
    await write(topic, batch)
    for source in (topic, await compacted(topic)):
        last = await last_update(source, "ctr")
        assert last is not None
        assert (last.rank, last.since_rollback) == ((2, 3), (2, 1))
        assert same(last.parameters, versions[5])
    assert same((await import_model(topic, "ctr", last)).parameters, versions[5])


@pytest.mark.parametrize("generation", [1, 2])
async def test_changes_of_a_superseded_writer_never_mix_in(make_topic: MakeTopic, generation: int) -> None:
    """Two trainers ran at once, with the same versions: rows of one were written into the model of the other."""
    topic = await make_topic()
    mine, other = history(of_a_network, 12), history(of_a_network, 12, seed=2)
    old, new = changing(1, record_bytes_max=3000), changing(generation, record_bytes_max=3000)
    random = Random(3)
    for number in range(12):
        for batch in random.sample([old.encode([mine[number]]), new.encode([other[number]])], 2):
            await write(topic, batch)
    for update in [u async for u in model_updates(topic, "ctr", follow=False, on_error="skip")]:
        expected = [models[update.version - 1] for models in (mine, other)]
        assert any(same(update.parameters, model) for model in (expected if generation == 1 else expected[1:] + mine))


# ---- gaps, damage


async def broken(versions: History, lost: int, **options: Any) -> tuple[Topic, list[OutgoingBatch]]:
    """Return a topic without the version ``lost``."""
    one = changing(format="safetensors", **options)
    batches = [one.encode([model]) for model in versions]
    return await memory_topic(*(batch for number, batch in enumerate(batches) if number != lost)), batches


async def test_a_gap_is_told_and_the_next_whole_update_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """A lost change went unnoticed, and predictions were of no version at all."""
    versions = changed_by(250)
    topic, batches = await broken(versions, lost=1)
    assert [name for batch in batches for name in ranks_of(batch)] == ["whole", "change", "change"] * 2
    updates = model_updates(topic, "ctr", follow=False)
    with caplog.at_level(logging.WARNING):
        assert [update.version async for update in updates] == [1, 4, 5, 6]
    expected = "update 1.3 of model 'ctr' of memory://models is a change of update 1.2, and the last one read is 1.1;"
    assert expected in caplog.text
    assert len(caplog.records) == 1
    statistics = updates.statistics()
    assert (statistics.updates, statistics.incomplete, statistics.unreadable) == (4, 1, 0)
    assert expected in (statistics.last_error or "")


async def test_a_served_model_answers_with_what_it_has_until_the_gap_ends() -> None:
    """A gap ended the predictions, or they were of a model that was never trained."""
    one = changing(format="safetensors")
    batches = [one.encode([model]) for model in changed_by(250)]
    topic = await memory_topic(batches[0])
    async with ServedModel(topic, "ctr") as served:
        await served.ready()
        await write(topic, batches[2])
        await until(lambda: "a change of update 1.2, and the last one read" in str(served.statistics().last_error))
        assert served.predict(np.ones(1000)).value == 250.0
        served.check()
        await write(topic, *batches[3:5])
        await until(lambda: served.statistics().version == 5)
        assert served.predict(np.ones(1000)).value == 250.0 * (1 + 2 + 3 + 4 + 5)
        assert served.statistics().skipped == 1


async def test_a_served_model_leaves_the_state_of_the_learner_out() -> None:
    """A program that predicts decoded and encoded the state of the trainer with each version."""
    versions = history(of_the_default_learner, 12)
    plain = without_state(versions[3])
    one = changing()
    topic = await memory_topic(one.encode(versions[:2]))
    async with ServedModel(topic, "ctr") as served:
        for model in [*versions[2:6], plain, *versions[6:], plain["weights"]]:
            await write(topic, one.encode([model]))
            await until(lambda: (served.statistics().version or 0) == one.next_version - 1)
            assert served.update is not None
            shown = (
                {name: value for name, value in model.items() if name != "state"} if isinstance(model, dict) else model
            )
            assert same(served.update.parameters, shown)
    assert same((await find_update(topic, "ctr", "1.12")).parameters, versions[10])


async def test_a_reader_without_the_base_says_so_and_waits_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """The base was dropped by the topic's retention: the reader waited without a word."""
    topic, batches = await broken(changed_by(10)[:4], lost=0)
    async with model_updates(topic, "ctr", start="latest_model") as updates:
        await write(topic, encoder(2, 1).encode([np.zeros(2)]))
        assert (await anext(updates)).rank == (2, 1)
    assert "a change of update 1.1, and the last one read is none of its chain" in caplog.text
    assert updates.statistics() == replace(
        UpdateStatistics(updates=1, incomplete=3), last_error=updates.statistics().last_error
    )
    assert len(batches) == 4


async def test_the_last_update_of_a_topic_without_the_base_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A training started from the model of an earlier run, without a word: the base of the newer one was dropped."""
    one = changing(2, format="safetensors")
    batches = [one.encode([model]) for model in changed_by(10)[:3]]
    topic = await memory_topic(encoder(1).encode([np.zeros(2)]), *batches[1:])
    with caplog.at_level(logging.WARNING):
        last = await last_update(topic, "ctr")
    assert last is not None
    assert last.rank == (1, 1)
    assert (
        "update 2.2 of model 'ctr' of memory://models is a change of update 2.1, and the last one read" in caplog.text
    )
    assert len(caplog.records) == 1


async def test_a_change_in_other_partitions_waits_for_those_before_it() -> None:
    """A tool that copies a topic assigns records to partitions by key, and each change has its own key."""
    versions = history(of_a_network, 10)
    one = changing(record_bytes_max=3000)
    topic = await memory_topic(*(replace(one.encode([model]), partition=None) for model in versions), partitions=4)
    last = await last_update(topic, "ctr")
    assert last is not None
    assert same(last.parameters, versions[-1])
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert updates[-1].version == 10
    assert all(same(update.parameters, versions[update.version - 1]) for update in updates)


@pytest.mark.parametrize("limit", [1500, 10**6])
async def test_a_damaged_change_is_an_error_and_never_applied(limit: int) -> None:
    """One flipped bit in a change gives a model that looks right, for as long as the chain is."""
    versions = changed_by(250)
    one = changing(format="safetensors", record_bytes_max=limit)
    batches = [one.encode([model]) for model in versions]
    value = batches[1].values[0] or b""
    damaged = replace(batches[1], values=[value[:-1] + bytes([value[-1] ^ 1]), *batches[1].values[1:]])
    topic = await memory_topic(batches[0], damaged, *batches[2:])
    updates = model_updates(topic, "ctr", follow=False)
    assert (await anext(updates)).version == 1
    with pytest.raises(DecodeError, match=r"SHA-256|or damaged: expected the checksum"):
        await anext(updates)
    assert [update.version async for update in updates] == [4, 5, 6]
    assert updates.statistics().unreadable == 1
    skipping = model_updates(topic, "ctr", follow=False, on_error="skip")
    assert [update.version async for update in skipping] == [1, 4, 5, 6]
    short = await memory_topic(batches[0], damaged)
    with pytest.raises(DecodeError, match="damaged"):
        await last_update(short, "ctr")
    last = await last_update(short, "ctr", on_error="skip")
    assert last is not None
    assert last.version == 1


async def test_a_damaged_base_begins_no_chain() -> None:
    """A whole update in one record had no checksum, so a damaged one went on with each change."""
    one = changing(format="safetensors")
    base, change = one.encode([np.zeros(500)]), one.encode([np.append(np.zeros(499), 1.0)])
    value = base.values[0] or b""
    topic = await memory_topic(replace(base, values=[value[:-1] + b"\x01"]), change)
    assert [u async for u in model_updates(topic, "ctr", follow=False, on_error="skip")] == []


async def test_a_change_that_does_not_fit_ends_the_chain() -> None:
    """A writer with a fault of its own had the right checksums: the follower ended with an IndexError."""
    one = changing(format="json")
    base, change, later = (one.encode([np.append(np.zeros(200), float(n))]) for n in range(3))
    value = (change.values[0] or b"").replace(b'"values":[200]', b'"values":[900]')
    assert value != change.values[0]
    wrong = chain_checksum(UpdateHeaders.parse((base.headers or [()])[0]).chain, value)
    renamed = tuple((name, wrong.encode() if name == "chain" else given) for name, given in (change.headers or [()])[0])
    topic = await memory_topic(base, replace(change, values=[value], headers=[renamed]), later)
    updates = model_updates(topic, "ctr", follow=False)
    assert (await anext(updates)).version == 1
    with pytest.raises(DecodeError, match="expected ascending numbers of 201 rows"):
        await anext(updates)
    assert [update async for update in updates] == []
    last = await last_update(topic, "ctr", on_error="skip")
    assert last is not None
    assert last.version == 1


def test_a_reader_of_whole_models_refuses_a_change() -> None:
    """An old consumer took the changed rows for the model."""
    one = changing()
    one.encode([np.zeros(500)])
    change = one.encode([np.append(np.zeros(499), 1.0)])
    headers = dict((change.headers or [()])[0])
    assert headers["format"] == b"4"  # unknown to it, and the key is not that of the model
    assert list(change.keys or ()) == [b"ctr#1.2.0"]
    assert b'"parameters"' not in (change.values[0] or b"")
