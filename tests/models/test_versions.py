"""Versions of published models are listed, found, compared, and rolled back to."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from models.embedding_cases import embedded
from models.model_case import MakeTopic, ManualClock, all_records, compacted, encoder, large_update, update_of, write
from models.shape_cases import shaped
from support.waiting import until

from streamiter.learn import AdaptiveLinearModel
from streamiter.models import ModelSnapshot, ModelUpdate, import_model, last_update, model_updates
from streamiter.models.differences import model_comparison, model_difference
from streamiter.models.versions import NoSuchVersion, find_update, model_versions, roll_back
from streamiter.topics import MemoryBroker
from streamiter.topics.topic import Topic


def update(version: int, parameters: Any, **metrics: float) -> ModelUpdate:
    """Return an update as a consumer gets it."""
    return ModelUpdate("ctr", 1, version, None, 0, 100 * version, metrics, parameters)


async def history(make_topic: MakeTopic, generations: int = 3, each: int = 4) -> Topic:
    """Return a topic with versions of some generations, and of another model."""
    topic = await make_topic()
    ranks = itertools.product(range(1, generations + 1), range(1, each + 1))
    await write(topic, *(update_of(rank, model=model) for rank in ranks for model in ("ctr", "other")))
    return topic


# ---- finding


async def test_the_last_versions_are_listed_in_order(make_topic: MakeTopic) -> None:
    """The list of versions ended with the versions of another model."""
    topic = await history(make_topic)
    assert [each.name for each in await model_versions(topic, "ctr", 5)] == ["2.4", "3.1", "3.2", "3.3", "3.4"]
    assert len(await model_versions(topic, "ctr")) == 12
    assert await model_versions(topic, "none") == []


async def test_a_version_is_found_by_its_name(make_topic: MakeTopic) -> None:
    """To look at the model before an incident, one had to read the whole topic with a program of one's own."""
    topic = await history(make_topic, generations=40)
    assert (await find_update(topic, "ctr", "1.3")).rank == (1, 3)
    assert (await find_update(topic, "ctr", "2")).rank == (2, 4)
    assert (await find_update(topic, "ctr")).rank == (40, 4)


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [
        ("ctr", "7.1", "expected version 7.1 of model 'ctr', given those from 1.1 to 3.4; older ones are dropped"),
        ("ctr", "one", "expected a version such as 2.17, or a generation such as 2, given 'one'"),
        ("ctr", "1.", "expected a version such as 2.17"),
        ("ctr", "1.\u0661", "expected a version such as 2.17"),
        ("crt", "1.1", "expected updates of model 'crt', given only of ctr, other"),
        ("crt", None, "expected updates of model 'crt', given only of ctr, other"),
    ],
)
async def test_a_version_that_is_not_there_is_named(
    make_topic: MakeTopic, model: str, version: str | None, message: str
) -> None:
    """A misspelt version was answered with the newest one."""
    topic = await history(make_topic)
    with pytest.raises(NoSuchVersion) as caught:
        await find_update(topic, model, version)
    assert message in str(caught.value)


# ---- rolling back


async def test_a_rollback_is_later_than_all_versions_of_the_trainer(make_topic: MakeTopic) -> None:
    """The trainer's next version, of the model that was rolled back, replaced the good one a second later."""
    topic = await history(make_topic)
    written = await roll_back(topic, "ctr", "2.1")
    assert (written.rank, written.rollback_to, written.since_rollback) == ((4, 1), (2, 1), (4, 1))
    await write(topic, update_of((3, 5)))
    newest = await last_update(topic, "ctr")
    assert newest is not None
    assert (newest.rank, newest.parameters.tolist()) == ((4, 1), [1.0])


async def test_a_large_version_is_rolled_back_to_as_a_whole(make_topic: MakeTopic) -> None:
    """A rollback left chunks of the version that it replaced in the compacted topic."""
    topic = await make_topic()
    for version in (1, 2):
        await write(topic, large_update((1, version)))
    written = await roll_back(topic, "ctr", "1.1")
    assert written.parameters[0] == 1.0
    kept = await all_records(await compacted(topic))
    assert [record.key for record in kept if record.value is not None and b"#1.2" in (record.key or b"")] == []


@pytest.mark.parametrize("imports", [False, True])
async def test_a_rollback_that_another_writer_overtook_is_written_again(
    imports: bool, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer restarted at the same moment and took the same generation, so that no consumer read the rollback.

    An import took the trainer's version for its own, and said that it was published.
    """
    topic = await history(make_topic, generations=1)
    kind, open_writer = type(topic), type(topic).open_writer
    overtaken: list[int] = []

    async def slow(self: Topic) -> Any:
        if not overtaken:
            overtaken.append(1)
            restarted = await open_writer(self)  # type: ignore[arg-type]
            await restarted.write(update_of((2, 1)))
            await restarted.close()
        return await open_writer(self)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "open_writer", slow)
    given = update(7, np.array([7.0]))
    written = await (import_model(topic, "ctr", given) if imports else roll_back(topic, "ctr", "1.2"))
    assert (written.rank, written.rollback_to) == ((3, 1), None if imports else (1, 2))
    ranks = [update.rank async for update in model_updates(topic, "ctr", follow=False)]
    assert ranks[-2:] == [(2, 1), (3, 1)]


async def test_versions_after_a_rollback_are_later_than_it(make_topic: MakeTopic) -> None:
    """The trainer resumed from the rollback, and consumers skipped everything that it published since."""
    topic = await make_topic()
    publishing = encoder(1, 7)
    for since in (None, (0, 0), (3, 1), (3, 1)):
        await write(topic, publishing.encode([ModelSnapshot(np.zeros(1), since_rollback=since)]))
    updates = [update async for update in model_updates(topic, "ctr", follow=False)]
    assert [(each.rank, each.since_rollback) for each in updates] == [
        ((1, 7), None),
        ((1, 8), None),
        ((3, 2), (3, 1)),
        ((3, 3), (3, 1)),
    ]
    assert (publishing.snapshot()["generation"], publishing.snapshot()["next_version"]) == (3, 4)


# ---- comparing


def learned(labels: list[Any], **fields: list[Any]) -> dict[str, Any]:
    """Return the parameters of the default model after some rows."""
    model = AdaptiveLinearModel()
    names = list(fields)
    model.learn([dict(zip(names, row, strict=True)) for row in zip(*fields.values(), strict=True)], labels)
    return model.parameters()


def test_weights_that_moved_have_the_names_of_their_fields() -> None:
    """The largest weight was that of a field in seconds, and its number in the list did not tell which field it was."""
    km, sky = [9.0 * (n % 7) for n in range(50)], ["sun" if n % 3 else "rain" for n in range(50)]
    labels = [n % 7 > 3 for n in range(50)]
    old = update(1, learned(labels, km=km), loss=0.5)
    new = update(2, learned(labels, km=km, sky=sky), loss=0.25, auc=0.75)
    changed = model_difference(old, new)
    assert changed.metrics == {"loss": (0.5, 0.25), "auc": (None, 0.75)}
    by_name = {each.name: each for each in changed.weights}
    assert by_name["km"].old == old.parameters["weights"][0]
    assert by_name["km"].new == new.parameters["weights"][0]
    places = [each for name, each in by_name.items() if name.startswith("place ")]
    assert len(places) == 2
    assert all(each.old is None and each.new is not None for each in places)
    assert [abs(each.moved) for each in changed.weights] == sorted(
        (abs(each.moved) for each in changed.weights), reverse=True
    )
    assert changed.other == ["shapes", "text_fields"]
    same = model_difference(old, old)
    assert (same.weights, same.scales, same.other) == ([], [], [])


def test_tables_of_two_versions_are_one_name() -> None:
    """A list of the arrays of all tables hid which weights had changed."""
    old, new = (update(seed, shaped("logit", seed)) for seed in (1, 2))
    assert model_difference(old, new).other == ["shapes"]


def test_embeddings_of_two_versions_are_one_name() -> None:
    """The page listed the arrays of all layers, and no weight."""
    old, new = (update(seed, embedded(seed=seed)) for seed in (1, 3))
    found = model_difference(old, new)
    assert found.other == ["embeddings"]
    assert model_difference(old, old).other == []


def test_weights_of_classes_have_their_labels() -> None:
    """With a class that had come since, each weight was compared with that of another class."""
    km = [float(n % 6) for n in range(60)]
    old = update(1, learned([("late", "on time", "early")[n % 3] for n in range(60)], km=km))
    new = update(2, learned([("late", "on time", "early", "gone")[n % 4] for n in range(60)], km=km))
    weights = {each.label: each for each in model_difference(old, new).weights}
    assert weights["gone"].old is None
    for label, column in (("late", 0), ("on time", 1)):
        assert (weights[label].old, weights[label].new) == (
            old.parameters["weights"][0, column],
            new.parameters["weights"][0, column],
        )


def test_elements_of_other_arrays_are_compared() -> None:
    """A network was reported as not comparable."""
    old = {"layers": [{"weights": np.zeros((2, 3))}], "width": 3, "gone": 1}
    new = {"layers": [{"weights": np.zeros((2, 3))}], "width": 4}
    new["layers"][0]["weights"][1, 2] = 0.5  # type: ignore[index]
    changed = model_difference(update(1, old), update(2, new))
    assert [(each.name, each.old, each.new) for each in changed.weights] == [("layers.0.weights[1, 2]", 0.0, 0.5)]
    assert changed.other == ["gone", "width"]


def test_centroids_are_compared_by_their_elements() -> None:
    """The weights of clusters counted as those of a linear model: an intercept was shown, and no centroid."""
    old = {"centroids": np.zeros((2, 2)), "weights": np.ones(2)}
    new = {"centroids": np.array([[0.0, 3.0], [0.0, 0.0]]), "weights": np.array([1.0, 2.0])}
    changed = model_difference(update(1, old), update(2, new))
    assert [(each.name, each.old, each.new) for each in changed.weights] == [
        ("centroids[0, 1]", 0.0, 3.0),
        ("weights[1]", 1.0, 2.0),
    ]
    assert (changed.intercepts, changed.other) == ([], [])


@pytest.mark.parametrize("own", [{"center": np.zeros(2)}, {"intercept": {"a": 1.0}}, {"deviation": 0.5}])
def test_parameters_that_only_look_linear_are_compared_by_their_elements(own: dict[str, Any]) -> None:
    """A parameter of the user's had the name of one of a linear model, and the comparison ended with a KeyError."""
    old, new = ({"weights": np.array([1.0, moved])} | own for moved in (1.0, 2.0))
    changed = model_difference(update(1, old), update(2, new))
    assert [(each.name, each.old, each.new) for each in changed.weights] == [("weights[1]", 1.0, 2.0)]


def test_scales_that_changed_are_compared_with_the_scale() -> None:
    """A field of large numbers hid the field whose unit had changed."""
    fields = {"weights": np.ones(2), "mean": np.array([0.0, 1e6]), "deviation": np.array([1.0, 1e6])}
    shifted = fields | {"mean": np.array([5.0, 1.1e6])}
    first = model_difference(update(1, fields), update(2, shifted), count=1).scales[0]
    assert (first.name, first.old_center, first.new_center) == ("weights[0]", 0.0, 5.0)


def test_models_are_compared_by_their_metrics() -> None:
    """A challenger without a metric shifted the figures of the champion."""
    assert model_comparison([update(1, np.zeros(1), loss=0.5), update(2, np.zeros(1), auc=0.75)]) == {
        "records": [100, 200],
        "loss": [0.5, None],
        "auc": [None, 0.75],
    }


async def test_a_rollback_waits_until_consumers_can_read_it(caplog: pytest.LogCaptureFixture) -> None:
    """The command said that the old model was served, while a dead trainer's open transaction held it back."""
    broker, clock = MemoryBroker(), ManualClock()
    topic = broker.topic("models")
    await topic.create()
    await write(topic, update_of((1, 1)), update_of((1, 2)))
    transactions = await topic.open_transactions("trainer")
    async with asyncio.TaskGroup() as group:
        await transactions.begin()
        await transactions.write(topic, update_of((1, 3)))
        rolling = group.create_task(roll_back(topic, "ctr", "1.1", clock=clock))
        await until(lambda: clock.timers > 0)
        clock.advance(5.0)
        assert "the rollback of model 'ctr' is written, and consumers can read it when" in caplog.text
        assert not rolling.done()
        await transactions.abort()
    assert rolling.result().rank == (2, 1)
    assert clock.timers == 0
