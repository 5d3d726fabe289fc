"""The main job reads events from a topic, learns, and publishes updates, with which a consumer predicts."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from support.waiting import PATIENCE_S, until

from streamiter import Columns, Flow, IterationBodyResult, Operator, Stream, connect, iterate_unbounded_streams
from streamiter.errors import JobFailed
from streamiter.learn import SGD, Examples, LinearRegression, train_online
from streamiter.models import ModelUpdate, ServedModel, initial_model, model_updates
from streamiter.topics import Json, JsonColumns, OutgoingBatch, ReadRequest, Topic

MakeTopic = Callable[[str], Topic]
TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])
DECODE = JsonColumns({"x": ("float64", 3), "y": "float64"})


def events(count: int, seed: int = 0) -> list[bytes]:
    features = np.random.default_rng(seed).normal(size=(count, 3))
    targets = features @ TRUE_WEIGHTS
    return [orjson.dumps({"x": x, "y": y}) for x, y in zip(features.tolist(), targets.tolist(), strict=True)]


async def write(topic: Topic, values: list[bytes], partition: int | None = None) -> None:
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch(values, partition=partition))
    await writer.close()


async def read_all(topic: Topic) -> list[Any]:
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    records = []
    while (batch := await reader.read()) is not None:
        records += batch.records()
    await reader.close()
    return records


def training_flow(source: Topic, updates: Topic, *, stop: Any = "latest", **options: Any) -> Flow:
    flow = Flow("regression")
    examples = flow.source(source, decode=DECODE, stop=stop, name="events", **options)
    training = train_online(
        examples,
        lambda: LinearRegression(3, optimizer=SGD(0.2)),
        extract=lambda rows: Examples(rows["x"], rows["y"]),
        mini_batch=50,
        initial=flow.from_source(initial_model(updates, model="regression", default=None), parallelism=1),
    )
    training.models.publish_model(updates, model="regression")
    return flow


async def updates_of(topic: Topic) -> list[ModelUpdate]:
    return [update async for update in model_updates(topic, "regression", follow=False)]


async def test_a_consumer_predicts_with_the_model_that_a_flow_learns_from_a_topic(any_topic: MakeTopic) -> None:
    """Each part worked alone, but the parts did not work together."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create(partitions=2)
    await target.create()
    for partition in range(2):
        await write(source, events(1_000, seed=partition), partition)
    job = await training_flow(source, target).start()
    statistics = await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert statistics.state == "finished"
    assert statistics.step("events").records_in == 2_000
    updates = await updates_of(target)
    assert [update.version for update in updates] == list(range(1, 41))
    assert updates[-1].records == 2_000
    async with ServedModel(target, model="regression") as served:
        await asyncio.wait_for(served.ready(), PATIENCE_S)
        prediction = served.predict(np.array([1.0, 1.0, 1.0]))
    assert prediction.version == 40
    assert prediction.value == pytest.approx(TRUE_WEIGHTS.sum(), abs=0.02)


async def test_a_model_follows_events_that_arrive_while_the_job_runs(any_topic: MakeTopic) -> None:
    """A source read only the records that existed at its start, and tests with complete topics did not notice it."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    job = await training_flow(source, target, stop=None).start()
    async with asyncio.timeout(PATIENCE_S), ServedModel(target, model="regression") as served:
        await write(source, events(50))
        await served.ready()
        assert served.predict(np.zeros(3)).version == 1
        await write(source, events(100, seed=1))
        await until(lambda: served.predict(np.zeros(3)).version >= 3)
    statistics = await job.stop("suspend")
    assert statistics.state == "suspended"
    assert [update.version for update in await updates_of(target)] == [1, 2, 3]


async def test_a_second_run_starts_from_the_published_model_as_the_next_generation(any_topic: MakeTopic) -> None:
    """A service that was restarted every night published version 1 of generation 1 again, and readers ignored it."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, events(2_000))
    for _ in range(2):
        job = await training_flow(source, target).start()
        await asyncio.wait_for(job.wait(), PATIENCE_S)
    updates = await updates_of(target)
    assert [(update.generation, update.version) for update in updates] == [
        (generation, version) for generation in (1, 2) for version in range(1, 41)
    ]
    first_of_second = updates[40].parameters
    assert isinstance(first_of_second, dict)
    np.testing.assert_allclose(first_of_second["weights"], TRUE_WEIGHTS, atol=0.02)


class Train(Operator):
    """The worker of the README."""

    model: Any = None

    def wanted_inputs(self) -> list[str]:
        return ["examples"] if self.model is not None else ["model"]

    def process_model(self, model: Any, out: Any) -> None:
        self.model = model

    def process_examples(self, examples: Columns, out: Any) -> None:
        error = examples["x"] @ self.model - examples["y"]
        out.emit(self.model - 0.2 * examples["x"].T @ error / len(error))
        self.model = None


async def test_a_loop_written_by_hand_publishes_each_round(any_topic: MakeTopic) -> None:
    """A loop that a user had written learned or published less than the built-in learner."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, events(1_000))
    flow = Flow("by hand")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        updates = connect(model=variables[0], examples=data[0].batch(50)).process(Train)
        return IterationBodyResult([updates], [updates])

    examples = flow.source(source, decode=DECODE, stop="latest")
    [updates] = iterate_unbounded_streams([flow.from_items([np.zeros(3)])], [examples], body)
    updates.publish_model(target, model="regression")
    await asyncio.wait_for((await flow.start()).wait(), PATIENCE_S)
    published = await updates_of(target)
    assert len(published) == 20
    np.testing.assert_allclose(published[-1].parameters, TRUE_WEIGHTS, atol=0.05)


async def test_undecodable_bytes_end_the_job_with_their_place(any_topic: MakeTopic) -> None:
    """One bad record among millions ended the job, and the error did not have its offset."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, [*events(3), b'{"x": [1, 2', *events(3)])
    job = await training_flow(source, target).start()
    with pytest.raises(JobFailed, match=r"step 'events'.* partition 0, offset 3: .*\[1, 2"):
        await asyncio.wait_for(job.wait(), PATIENCE_S)


async def test_undecodable_bytes_go_to_the_dead_letter_topic_with_their_origin(any_topic: MakeTopic) -> None:
    """A bad record stopped the service, or was lost."""
    source, target, dead = any_topic("events"), any_topic("updates"), any_topic("dead")
    for topic in (source, target, dead):
        await topic.create()
    await write(source, [*events(50), b"not json", *events(50, seed=1)])
    job = await training_flow(source, target, dead_letter=dead).start()
    statistics = await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert statistics.step("events").rejected == 1
    assert len(await updates_of(target)) == 2
    [letter] = await read_all(dead)
    headers = dict(letter.headers)
    assert letter.value == b"not json"
    assert (headers["partition"], headers["offset"], headers["step"]) == (b"0", b"50", b"events")
    assert headers["error"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([b'{"x": [1.0, 2.0], "y": 0.0}'], r"step 'events'.*offset 0: .*x"),
        ([orjson.dumps({"x": [1e200, 0, 0], "y": 1e200})] * 50, r"step 'train'.*gradient"),
    ],
    ids=["wrong number of features", "a gradient that is no number"],
)
async def test_a_model_does_not_learn_unsuitable_examples(
    any_topic: MakeTopic, values: list[bytes], message: str
) -> None:
    """One absurd event turned all weights into NaN, and also the predictions of all consumers."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, values)
    job = await training_flow(source, target).start()
    with pytest.raises(JobFailed, match=message):
        await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await updates_of(target) == []


async def test_an_error_about_the_number_of_features_has_both_numbers(any_topic: MakeTopic) -> None:
    """Examples without a schema had too many features, and numpy's error named neither the step nor the model."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, [b'{"x": [1.0, 2.0, 3.0, 4.0], "y": 0.0}'] * 50)
    flow = Flow("regression")
    training = train_online(
        flow.source(source, decode=Json(), stop="latest"),
        lambda: LinearRegression(3),
        extract=lambda rows: Examples(np.array([row["x"] for row in rows]), [row["y"] for row in rows]),
        mini_batch=50,
    )
    training.models.publish_model(target, model="regression")
    with pytest.raises(JobFailed, match=r"step 'train'.* expected rows of 3 features .* given .*\(50, 4\)") as caught:
        await asyncio.wait_for((await flow.start()).wait(), PATIENCE_S)
    assert caught.value.step == "train"
    assert await updates_of(target) == []


async def test_columns_go_through_a_flow_from_topic_to_topic_by_their_schema(any_topic: MakeTopic) -> None:
    """The schema that decodes a topic could not encode one, so the next flow needed another decoder."""
    source, target = any_topic("events"), any_topic("checked")
    await source.create()
    await target.create()
    await write(source, events(100))
    flow = Flow("columns")
    checked = flow.source(source, decode=DECODE, stop="latest").filter_batch(lambda rows: rows["y"] > 0)
    checked.sink(target, encode=DECODE)
    await asyncio.wait_for((await flow.start()).wait(), PATIENCE_S)
    kept = [orjson.loads(value) for value in events(100) if orjson.loads(value)["y"] > 0]
    assert [orjson.loads(record.value) for record in await read_all(target)] == kept


async def test_columns_that_do_not_fit_the_schema_of_a_sink_end_the_job(any_topic: MakeTopic) -> None:
    """Wrong output was written, and its readers noticed it much later."""
    target = any_topic("checked")
    await target.create()
    flow = Flow("columns")
    flow.from_items(Columns({"x": np.ones((5, 2)), "y": np.ones(5)})).sink(target, encode=DECODE, name="out")
    job = await flow.start()
    with pytest.raises(JobFailed, match=r"step 'out'.*field 'x': expected float64\[3\], given float64\[2\]"):
        await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await read_all(target) == []


async def test_a_missing_topic_is_an_error_at_the_start(any_topic: MakeTopic) -> None:
    """The name of a topic was misspelt, and the job ran for days and read no record."""
    source, target = any_topic("events"), any_topic("updates")
    await target.create()
    with pytest.raises(JobFailed, match=r"step 'events'.*no topic '.*events'"):
        await asyncio.wait_for(training_flow(source, target).start(), PATIENCE_S)


async def test_a_topic_deleted_while_it_is_read_ends_the_job(any_topic: MakeTopic) -> None:
    """A job whose topic was deleted looked like a job without new records."""
    source, target = any_topic("events"), any_topic("updates")
    await source.create()
    await target.create()
    await write(source, events(50))
    job = await training_flow(source, target, stop=None).start()
    async with ServedModel(target, model="regression") as served:
        await asyncio.wait_for(served.ready(), PATIENCE_S)
    await source.delete()
    with pytest.raises(JobFailed, match=r"step 'events'.*events"):
        await asyncio.wait_for(job.wait(), PATIENCE_S)


async def test_every_record_goes_through_a_flow_from_topic_to_topic_once(any_topic: MakeTopic) -> None:
    """Records were lost or doubled between a source, a keyed step and a sink of other parallelism."""
    source, target = any_topic("numbers"), any_topic("sums")
    await source.create(partitions=3)
    await target.create(partitions=2)
    for partition in range(3):
        await write(source, [b"%d" % number for number in range(partition, 3_000, 3)], partition)
    flow = Flow("sums", parallelism=2)
    numbers = flow.source(source, stop="latest")
    sums = numbers.key_by(lambda number: number % 7).stateful_map(lambda s, n: (s + n, [n, s + n]), 0)
    sums.sink(target, encode=Json(), key=lambda pair: str(pair[0]))
    statistics = await asyncio.wait_for((await flow.start()).wait(), PATIENCE_S)
    assert statistics.step("stateful_map").records_in == 3_000
    records = await read_all(target)
    pairs = [orjson.loads(record.value) for record in records]
    assert sorted(number for number, _ in pairs) == list(range(3_000))
    assert all(record.key == str(pair[0]).encode() for record, pair in zip(records, pairs, strict=True))
    for key in range(7):
        of_key = [number for number in range(3_000) if number % 7 == key]
        assert max(total for number, total in pairs if number % 7 == key) == sum(of_key)
