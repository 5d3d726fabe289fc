"""A training that starts from a published version continues exactly as the training that published it would have."""

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from learn.online_support import FEATURES, delayed, trips
from learn.test_rollbacks import MEAN, started, until_resumed
from learn.test_rollbacks import newest as awaited

from streamiter import Checkpoints, Flow
from streamiter.errors import ModelError
from streamiter.learn import (
    ADWIN,
    FTRL,
    AdaGrad,
    Adam,
    AdaptiveLinearModel,
    Examples,
    FeatureHasher,
    InverseSquareRoot,
    LinearRegression,
    LogisticRegression,
    Momentum,
    PageHinkley,
    StandardScaler,
    train_online,
)
from streamiter.models import (
    ModelUpdate,
    Rollbacks,
    ServedModel,
    exported,
    import_model,
    initial_model,
    last_update,
    read_model,
    roll_back,
)
from streamiter.topics import MemoryBroker, Topic

BATCH = 10
SYNCHRONOUS: dict[str, Any] = {"mode": "synchronous", "mini_batch": BATCH}
# Texts that are numbers, times, and a field whose texts look like numbers only at first.
ROWS: list[Any] = [
    row
    | {
        "size": f"{row['km']:.1f}",
        "when": f"2024-03-{1 + n % 28:02}T{n % 24:02}:00",
        "code": str(n % 9) if n < 12 or n % 2 else f"x{n % 5}",
    }
    for n, row in enumerate(trips(240))
]
FIELDS = [*FEATURES, "size", "when", "code"]
HASHER = FeatureHasher(["town"], numeric={"km": 1e-3, "wind": 1.0}, bits=8)


def matrix(rows: Any) -> Examples:
    x = np.array([[row["km"] / 1000 - 5, row["wind"] or 0.0] for row in rows])
    return Examples(x, np.array([float(row["late"]) for row in rows]), np.array([row["weight"] for row in rows]))


def by_gradients(make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    return {"model": make, "extract": matrix, **SYNCHRONOUS, **options}


def by_rows(label: str, **options: Any) -> dict[str, Any]:
    return {"label": label, "features": FIELDS, "weight": "weight", **SYNCHRONOUS, **options}


LEARNERS: dict[str, dict[str, Any]] = {
    "truth values, drift": by_rows("late", drift=ADWIN(check_every=8), on_drift="raise rates"),
    "numbers, crosses": by_rows("minutes", crosses=[("km", "town"), ("km", "wind")], drift=PageHinkley()),
    "classes": by_rows("kind"),
    "sparse rows, own rates": by_rows("late", model=lambda: AdaptiveLinearModel(rates=(0.5,)), features=HASHER.rows),
    "FTRL": by_gradients(lambda: LogisticRegression(2, optimizer=FTRL(0.3, 0.1, l1=0.01, l2=0.1))),
    "Adam, scaler": by_gradients(
        lambda: LinearRegression(2, optimizer=Adam(InverseSquareRoot(0.3))), scaler=StandardScaler(), workers=2
    ),
    "Momentum, no intercept": by_gradients(lambda: LinearRegression(2, optimizer=Momentum(0.1), intercept=False)),
    "another library": {"model": MEAN, "label": "minutes", "mini_batch": BATCH},
    "labels that come later": {"labels": delayed(FIELDS), **SYNCHRONOUS},
}
# Versions in one record, and, also as changes, in many of at most this many bytes.
FORMS = {"json": 1_000_000, "safetensors": 1_000_000, "auto": 6_000}


def run(topic: Topic, rows: list[Any], options: dict[str, Any], form: Any = "auto", **starts: Any) -> None:
    """Train to the end of the rows, from the newest version of the topic or as ``starts`` says."""
    flow = Flow("training")
    if not starts:
        start = initial_model(topic, model="m", default=None)
        starts = {"initial": flow.from_source(start, name="newest", parallelism=1)}
    training = train_online(
        flow.from_items(rows, parallelism=1), **options, **starts, publish_state=True, publish_every=4
    )
    training.models.publish_model(topic, model="m", format=form, changes=form == "auto")
    flow.run()


async def newest(topic: Topic) -> ModelUpdate:
    update = await last_update(topic, "m")
    assert update is not None
    return update


async def made(record_bytes_max: int = 1_000_000) -> Topic:
    topic = MemoryBroker().topic("models")
    await topic.create(settings={"max_record_bytes": str(record_bytes_max)})
    return topic


async def in_thread(work: Callable[..., None], *given: Any, **options: Any) -> None:
    await asyncio.to_thread(functools.partial(work, *given, **options))


@pytest.mark.parametrize("learner", list(LEARNERS))
async def test_a_restart_from_a_version_continues_to_the_last_bit(learner: str) -> None:
    """A restart began with new learning rates and scales: twenty of them cost as much as half of the data."""
    options = LEARNERS[learner]
    rows: list[Any] = ROWS
    if "labels" in options:  # Each question is followed by its answer.
        rows = [event for row in ROWS[: len(ROWS) // 2] for event in (row, {"id": row["id"], "answer": row["late"]})]
    whole = await made()
    await in_thread(run, whole, rows, options)
    uninterrupted = await newest(whole)
    # A training that starts from a version knows all numbers.
    drifts = uninterrupted.metrics.keys() - {"loss", "unpredicted_rows"}
    for form, record_bytes_max in FORMS.items():
        parts = await made(record_bytes_max)
        for part in np.array_split(np.arange(len(ROWS)), 3 if form == "json" else 2):
            await in_thread(run, parts, [rows[row] for row in part], options, form)
        restarted = await newest(parts)
        assert frozen(restarted.parameters) == frozen(uninterrupted.parameters), form
        assert restarted.has_state
        assert restarted.records == uninterrupted.records
        assert [restarted.metrics[name] for name in drifts] == [uninterrupted.metrics[name] for name in drifts], form


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("learner", ["truth values, drift", "FTRL", "another library"])
async def test_a_trainer_without_checkpoints_starts_from_the_rollback(
    learner: str, state: bool, mode: str, tmp_path: Path
) -> None:
    """It began anew, and its first version replaced the one that was rolled back to."""
    options = LEARNERS[learner] | ({} if learner == "another library" else {"mode": mode})
    topic = await made()

    async def train(rows: list[Any], **given: Any) -> None:
        flow = Flow("training")
        publishing = {"publish_state": state, "rollbacks": Rollbacks(topic, "m")}
        initial = flow.from_items(given.pop("initial"), name="told") if "initial" in given else None
        events = flow.from_items(rows, parallelism=1, name="events")
        training = train_online(events, **options, **publishing, initial=initial)
        training.models.publish_model(topic, model="m")
        await (await flow.start(**given)).wait()

    await train(ROWS[:100])
    good = await newest(topic)
    await train(ROWS[100:])  # No rollback yet: it begins anew.
    assert (await newest(topic)).records == len(ROWS) - 100
    rolled_back = await roll_back(topic, "m", "1")
    assert frozen(rolled_back.parameters) == frozen(good.parameters)
    # Neither the parameters that it was told to start from, nor a restart after it has taken over, undo the rollback.
    other = [good.parameters if learner == "another library" else {**good.parameters, "state": None}]  # type: ignore[dict-item]
    first_checkpoint = {"checkpoints": Checkpoints(tmp_path)}
    for expected, given in ((110, {}), (120, {"initial": other}), (130, first_checkpoint)):
        await train(ROWS[100:110], **given)
        update = await newest(topic)
        assert (update.records, update.since_rollback) == (expected, rolled_back.rank)
    if state:
        exact = await made()
        await in_thread(run, exact, ROWS[:100], options)
        for _ in range(3):
            await in_thread(run, exact, ROWS[100:110], options)
        assert frozen((await newest(topic)).parameters) == frozen((await newest(exact)).parameters)


async def test_a_running_trainer_resumes_from_an_imported_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of another cluster was replaced by the next version of the trainer; drift was counted from nothing."""
    options = {"label": "late", "drift": ADWIN(check_every=8), "mini_batch": 1}
    elsewhere, topic = await made(), await made()
    await in_thread(run, elsewhere, ROWS, options)
    given = await newest(elsewhere)
    job, source = await started(topic, tmp_path, options | {"publish_state": True})
    source.give(*ROWS[:20])
    await awaited(topic, lambda update: update.records == 20, job)
    imported = await import_model(topic, "m", given)
    assert (imported.rank, imported.since_rollback, imported.rollback_to) == ((2, 1), (2, 1), None)
    rows = iter(trips(10_000, seed=1))
    taken = []

    def give() -> None:
        taken.append(next(rows))
        source.give(taken[-1])

    await until_resumed(job, give, caplog)
    last = await awaited(topic, lambda update: update.rank > (2, 1) and source.brought == 20 + len(taken), job)
    await job.stop("abort")
    assert last.records is not None
    since = taken[len(taken) + len(ROWS) - last.records :]
    await in_thread(run, elsewhere, since, options)
    expected = await newest(elsewhere)
    assert frozen(last.parameters) == frozen(expected.parameters)
    assert last.metrics["rows_since_drift"] == expected.metrics["rows_since_drift"]


async def test_the_state_of_a_version_is_for_trainings_only(tmp_path: Path) -> None:
    """Consumers held the state of the learner in memory, with each version that they compared."""
    topic = await made()
    await in_thread(run, topic, ROWS, LEARNERS["truth values, drift"])
    update = await newest(topic)
    async with ServedModel(topic, "m") as served:
        await served.ready()
        assert served.update is not None
        assert "state" not in served.update.parameters
        row = {name: ROWS[0][name] for name in ("km", "wind", "town")}
        model = AdaptiveLinearModel()
        model.start_from(update.parameters)  # type: ignore[arg-type]
        assert served.predict(row).value == pytest.approx(model.predict([row])[0], abs=1e-7)
    for form in ("json", "safetensors"):
        path = tmp_path / f"model.{form}"
        path.write_bytes(exported(update, form))  # type: ignore[arg-type]
        assert frozen(read_model(path).parameters) == frozen(update.parameters)
    without = tmp_path / "without.json"
    document = json.loads((tmp_path / "model.json").read_bytes())
    del document["parameters"]["state"]
    without.write_text(json.dumps(document))
    assert not read_model(without).has_state


def linear(optimizer: Any) -> LogisticRegression:
    model = LogisticRegression(1, optimizer=optimizer)
    model.learn([[1.0], [2.0]], [0, 1], [2.0, 0.5])
    return model


def test_without_its_state_a_version_is_a_start_with_new_rates() -> None:
    """There was no way to keep the weights and to learn with another optimizer."""
    given = linear(FTRL(0.3, 0.1)).parameters(state=True)
    del given["state"]
    model = LogisticRegression(1, optimizer=AdaGrad(0.3))
    model.start_from(given)
    assert model.weights.tolist() == given["weights"].tolist()
    assert model.version == 0


TOWNS = [{name: row[name] for name in ("code", "km", "wind", "town")} for row in ROWS]
LATE = [row["late"] for row in ROWS]
CROSSES = [("km", "town"), ("km", "wind")]
# Settings of the version and of the model that starts from it, the fields that are kept, and whether texts are.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], bool]] = {
    "a cross more": ({}, {"crosses": CROSSES}, ["km", "wind"], True),
    "a cross less": ({"crosses": CROSSES}, {"crosses": CROSSES[:1]}, ["km", "wind"], True),
    "other bits": ({"bits": 12}, {"bits": 10}, ["km", "wind"], False),
    "more bits, no crosses": ({"bits": 12, "crosses": CROSSES}, {"bits": 14}, ["km", "wind"], False),
    "both": ({"bits": 12, "crosses": CROSSES}, {"crosses": CROSSES[1:]}, ["km", "wind", "km × wind"], False),
    "nothing": ({"crosses": CROSSES}, {"crosses": CROSSES}, ["km", "wind", "km × wind"], True),
}


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_fits_is_kept_of_a_version_with_other_crosses_or_bits(
    change: str, state: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A service with one more cross had to learn everything again; texts were read at the places of other texts."""
    before, after, fields, has_texts = CHANGES[change]
    old = AdaptiveLinearModel(**before)
    old.learn(TOWNS, LATE, np.arange(len(LATE)) % 3 + 0.5)
    given = old.parameters(state=state)
    if change != "nothing":
        with pytest.raises(ModelError, match=r"parameters with bits|a model with crosses|the state of a model"):
            AdaptiveLinearModel(**after).start_from(given)
    model = AdaptiveLinearModel(**after, other_settings="keep")
    model.start_from(given, records=old.records)
    assert model.records == old.records
    made, mine = old.parameters(), model.parameters()
    assert mine["fields"] == fields
    for name in ("weights", "center", "limit"):
        kept = [made[name][list(made["fields"]).index(field)] for field in fields]
        np.testing.assert_allclose(mine[name][: len(fields)], kept, rtol=1e-12)
    assert mine["places"].tolist() == (made["places"].tolist() if has_texts else [])
    assert ("starts from a version of other settings: kept" in caplog.text) is (change != "nothing")
    if state:
        assert model.state()["weights"]["mixture"].tolist() == old.state()["weights"]["mixture"].tolist()  # type: ignore[index]
    # Rows without texts are predicted as before, unless a cross is gone.
    numbers = [{"km": row["km"]} for row in TOWNS[:20]]
    if not before.get("crosses") or change in ("both", "nothing"):
        np.testing.assert_allclose(model.predict(numbers), old.predict(numbers), rtol=1e-6)
    model.learn(TOWNS, LATE)
    assert set(model.parameters()["text_fields"]) == {"town", "code"}
    # A checkpoint is adopted in the same way, and rows of waiting questions get the new numbers of their columns.
    resumed = AdaptiveLinearModel(**after, other_settings="keep")
    column_of = resumed.adopt(old.state())
    if change == "nothing":
        assert column_of is None
    else:
        assert column_of is not None
        asked = AdaptiveLinearModel(**before)
        asked.restore(old.state())
        row = [{"km": 1.0, "wind": 2.0}]
        numbered = {column_of(index) for index in asked.rows(row).indices.tolist()} - {None}
        assert len(numbered) == len(fields)
        assert numbered <= set(resumed.rows(row).indices.tolist())
        assert (column_of(5) == 5) is has_texts


def test_sparse_rows_have_the_same_columns_whatever_the_bits() -> None:
    """Columns of sparse rows have no hashes of the model, and were lost with the bits."""
    rows = HASHER.rows(ROWS)
    old = AdaptiveLinearModel(bits=12)
    old.learn(rows, LATE)
    model = AdaptiveLinearModel(bits=14, other_settings="keep")
    model.start_from(old.parameters(state=True))
    assert model.predict(rows).tolist() == old.predict(rows).tolist()


@pytest.mark.parametrize("loss", [{"loss": "absolute"}, {"loss": "quantile", "quantile": 0.9}, {"loss": "poisson"}])
def test_a_model_of_another_loss_than_the_squared_one_keeps_what_fits(loss: dict[str, Any]) -> None:
    """With one more cross, the checkpoint of a model of quantiles was refused as one of another loss, its own."""
    old = AdaptiveLinearModel(**loss)
    numbers = [row["km"] for row in TOWNS]
    old.learn(TOWNS, numbers)
    resumed, started = (
        AdaptiveLinearModel(**loss, **more, other_settings="keep")
        for more in ({"crosses": CROSSES}, {"kinds": {"code": "words"}})
    )
    resumed.adopt(old.state())
    started.start_from(old.parameters())
    km = [{"km": row["km"]} for row in TOWNS[:20]]
    for model in (resumed, started):
        assert model.records == old.records
        np.testing.assert_allclose(model.predict(km), old.predict(km), rtol=1e-6)
