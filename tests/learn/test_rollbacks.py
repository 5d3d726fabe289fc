"""A trainer takes over rollbacks of its model, whichever way it learns."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn.online_support import delayed
from models.model_case import all_records
from models.test_published_after_a_restart import Kept
from support.waiting import turn

from streamiter import Checkpoints, Flow
from streamiter.engine.job.job import Job
from streamiter.errors import JobFailed
from streamiter.learn import (
    SGD,
    AdaptiveLinearModel,
    Embeddings,
    Examples,
    ForeignModel,
    LinearRegression,
    PublishSchedule,
)
from streamiter.learn import train_online as online
from streamiter.models import ModelSnapshot, ModelUpdate, ModelUpdateEncoder, Rollbacks, last_update, roll_back
from streamiter.models.update import UpdateHeaders
from streamiter.topics import MemoryBroker, Topic
from streamiter.values.helpers.clock import SystemClock

Learner = dict[str, Any]
RARELY_S = 100.0


class Mean:
    """A model of another library: the mean of the labels."""

    def __init__(self, total: float = 0.0, rows: int = 0) -> None:
        self.total, self.rows = total, rows

    def learn(self, features: Any, label: float) -> None:
        self.total, self.rows = self.total + label, self.rows + 1


MEAN = ForeignModel(
    make=Mean,
    learn=Mean.learn,
    predict=lambda model, features: model.total / model.rows,
    save=lambda model: json.dumps([model.total, model.rows]).encode(),
    load=lambda saved: Mean(*json.loads(saved)),
    task="regression",
)


def examples(records: list[dict[str, float]]) -> Examples:
    return Examples(np.array([[record["x"]] for record in records]), np.array([record["y"] for record in records]))


EMBEDDINGS = Embeddings(at_most="1 MB")
LEARNERS: dict[str, Learner] = {
    "rows": {"label": "y", "task": "regression"},
    "rows with embeddings": {"label": "y", "task": "regression", "embeddings": EMBEDDINGS},
    "gradients": {"model": lambda: LinearRegression(1, optimizer=SGD(0.1)), "extract": examples, "mini_batch": 10},
    "another library": {"model": MEAN, "label": "y"},
}


async def started(topic: Topic, folder: Path, learner: Learner, **options: Any) -> tuple[Job, Kept]:
    source, flow = Kept(), Flow("training")
    how = {name: options.pop(name) for name in ("delivery", "changes") if name in options}
    rows = flow.from_source(lambda: source, name="in", parallelism=1)
    training = online(rows, rollbacks=Rollbacks(topic, "m"), workers=1, **learner)
    training.models.publish_model(topic, model="m", **how)
    return await flow.start(checkpoints=Checkpoints(folder, interval_s=RARELY_S), **options), source


async def newest(topic: Topic, is_it: Callable[[ModelUpdate], bool], job: Job) -> ModelUpdate:
    """Return the newest committed update when it is the awaited one."""
    while True:
        await job.checkpoint()
        update = await last_update(topic, "m")
        if update is not None and is_it(update):
            return update


async def until_resumed(job: Job, give: Callable[[], None], log: pytest.LogCaptureFixture) -> None:
    """Give mini-batches until the trainer has taken the rollback over; it hears of it a moment later."""
    with log.at_level("INFO", "streamiter.models"):
        while "training resumes from update" not in log.text:
            give()
            await job.checkpoint()


def lines(count: int, slope: float) -> list[dict[str, float]]:
    return [{"x": x, "y": slope * x} for x in np.random.default_rng(3).normal(size=count).tolist()]


def prediction(update: ModelUpdate, learner: Learner) -> float:
    """Return the prediction for x = 1."""
    if learner is LEARNERS["another library"]:
        return float(MEAN.predictor(update.parameters)({}))  # type: ignore[arg-type]
    if "task" in learner:
        model = AdaptiveLinearModel(task="regression", embeddings=learner.get("embeddings"))
        model.start_from(update.parameters)  # type: ignore[arg-type]
        return float(model.predict([{"x": 1.0}])[0])
    return float(update.parameters["weights"][0] + update.parameters["intercept"])  # type: ignore[index, call-overload]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("kind", list(LEARNERS))
async def test_training_resumes_from_a_rollback(
    kind: str, changes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a rollback the trainer continued with the bad model, and its versions were never served again."""
    topic, learner = MemoryBroker().topic("models"), LEARNERS[kind]
    await topic.create()
    job, source = await started(topic, tmp_path, learner, changes=changes)
    source.give(*lines(200, 1.0))
    good = await newest(topic, lambda update: update.records == 200, job)
    source.give(*lines(2_000, 100.0))
    bad = await newest(topic, lambda update: update.records == 2_200, job)
    rolled_back = await roll_back(topic, "m", f"1.{good.version}")
    assert rolled_back.rank == (2, 1)
    await until_resumed(job, lambda: source.give(*lines(10, 1.0)), caplog)
    source.give(*lines(40, 1.0))  # Gradients of the bad model are left out.
    resumed = await newest(topic, lambda update: update.rank > (2, 1), job)
    assert (resumed.generation, resumed.since_rollback) == (2, (2, 1))
    near, far = prediction(good, learner), prediction(bad, learner)
    assert abs(prediction(resumed, learner) - near) < 0.1 * abs(far - near)
    await job.stop("abort")


async def test_a_rollback_of_a_stopped_trainer_is_taken_over_and_an_older_one_is_not(tmp_path: Path) -> None:
    """A run that was told to start from nothing started from the last rollback, which was of another training."""
    topic, learner = MemoryBroker().topic("models"), LEARNERS["another library"]
    await topic.create()
    job, source = await started(topic, tmp_path / "a", learner)
    for _ in range(2):
        source.give({"x": 0.0, "y": 1.0})
        await newest(topic, lambda update: update.records == source.brought, job)
    await job.stop("suspend")
    await roll_back(topic, "m", "1.1")
    job, source = await started(topic, tmp_path / "a", learner)
    source.give({"x": 0.0, "y": 1.0})
    restored = await newest(topic, lambda update: update.rank > (2, 1), job)
    assert (restored.rank, restored.records, restored.since_rollback) == ((3, 1), 2, (2, 1))
    await job.stop("suspend")
    job, source = await started(topic, tmp_path / "a", learner, restore=None)
    source.give({"x": 0.0, "y": 1.0})
    fresh = await newest(topic, lambda update: update.generation > 3, job)
    assert (fresh.rank, fresh.records) == ((4, 1), 1)
    await job.stop("suspend")


async def test_what_a_crash_takes_back_is_not_missed(tmp_path: Path) -> None:
    """At least once, versions since the rollback were published but not in the checkpoint; the bad model came back."""
    topic, learner, delivery = MemoryBroker().topic("models"), LEARNERS["another library"], "at_least_once"
    await topic.create()
    job, source = await started(topic, tmp_path, learner, delivery=delivery)
    for y in (1.0, 1.0, 1e9):
        source.give({"x": 0.0, "y": y})
        await newest(topic, lambda update: update.records == source.brought, job)
    await job.checkpoint()
    await roll_back(topic, "m", "1.2")
    ranks = [(2, 1)]
    while ranks[-1] <= (2, 1):  # The bad model learns the row if the trainer has not heard of the rollback yet.
        count = len(await all_records(topic))
        source.give({"x": 0.0, "y": 4.0})
        while len(records := await all_records(topic)) == count:
            await turn()
        ranks.append(UpdateHeaders.parse(records[-1].headers).rank)
    await job.stop("abort")  # Since the rollback there was no checkpoint.
    job, source = await started(topic, tmp_path, learner, delivery=delivery)
    source.give({"x": 0.0, "y": 2.0})
    update = await newest(topic, lambda update: update.generation == 3, job)
    # It continues from 2.2, the newest state since the rollback.
    assert (update.records, update.since_rollback) == (4, (2, 1))
    assert MEAN.predictor(update.parameters)({}) == 2.0  # type: ignore[arg-type]
    await job.stop("abort")


@pytest.mark.parametrize("kind", ["rows", "another library"])
async def test_versions_after_a_rollback_do_not_wait_for_the_records_of_the_bad_one(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a rollback nothing was published for as many records as the bad version had learned from."""
    topic = MemoryBroker().topic("models")
    await topic.create()
    job, source = await started(topic, tmp_path, LEARNERS[kind] | {"publish_every": PublishSchedule(records=30)})
    source.give(*lines(10, 1.0))
    await newest(topic, lambda update: update.records == 10, job)
    source.give(*lines(1_000, 100.0))
    await newest(topic, lambda update: update.records == 1_010, job)
    await roll_back(topic, "m", "1.1")
    await until_resumed(job, lambda: source.give(*lines(1, 1.0)), caplog)
    source.give(*lines(40, 1.0))
    resumed = await newest(topic, lambda update: update.rank > (2, 1), job)
    assert resumed.records is not None
    assert 40 <= resumed.records < 1_000
    await job.stop("abort")


async def test_questions_that_wait_are_learned_by_the_columns_of_the_old_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The row of a question had the columns of the bad model, so its answer was learned as that of other fields."""
    topic = MemoryBroker().topic("models")
    await topic.create()
    labels = delayed(["a", "b"], "late", key="n")
    job, source = await started(topic, tmp_path, {"labels": labels})
    source.give({"n": 1, "b": 1.0}, {"n": 1, "late": True}, {"n": 2, "b": 2.0}, {"n": 2, "late": False})
    await newest(topic, lambda update: update.records == 2, job)
    # The bad model knows a field more, and the question that waits has both.
    source.give({"n": 3, "a": 5.0}, {"n": 3, "late": True}, {"n": 4, "a": 7.0, "b": 3.0})
    await newest(topic, lambda update: update.records == 3, job)
    rolled_back = await roll_back(topic, "m", "1.1")
    others = itertools.count(5)
    await until_resumed(job, lambda: source.give({"n": next(others), "b": 1.0}), caplog)
    source.give({"n": 4, "late": True})
    update = await newest(topic, lambda update: update.rank > (2, 1), job)
    expected = AdaptiveLinearModel()
    expected.start_from(rolled_back.parameters, records=2)  # type: ignore[arg-type]
    expected.learn([{"b": 3.0}], [True])
    assert update.records == expected.records == 3
    parameters = expected.parameters(state=False)
    names = [name for name, value in parameters.items() if not isinstance(value, (np.ndarray, dict))]
    assert {name: update.parameters[name] for name in names if name != "intercept"} == {
        name: parameters[name] for name in names if name != "intercept"
    }
    # The experts weigh the same here and there, but for the rounding of a sixth.
    for name in ("weights", "intercept", "center", "limit"):
        np.testing.assert_allclose(update.parameters[name], parameters[name], rtol=1e-12)  # type: ignore[arg-type]
    await job.stop("abort")


async def test_a_rollback_to_before_the_labels_were_of_another_kind_does_not_end_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts seemed to be 0 and 1 at first; after a rollback to that time, the step of the validation failed.

    It had got probabilities instead of numbers, and for a question that waited a probability of 2.
    """
    topic = MemoryBroker().topic("models")
    await topic.create()
    labels = delayed(["x"], "y", key="n")
    job, source = await started(topic, tmp_path, {"labels": labels})

    def give(first: int, labels: int) -> None:
        numbers = range(first, first + 40)
        source.give(*[{"n": n, "x": float(n % labels)} for n in numbers], *[{"n": n, "y": n % labels} for n in numbers])

    give(0, 2)
    await newest(topic, lambda update: update.records == 40, job)
    give(40, 3)
    source.give({"n": 80, "x": 2.0})
    await newest(topic, lambda update: update.records == 80, job)
    await roll_back(topic, "m", "1.1")
    others = itertools.count(100)
    await until_resumed(job, lambda: source.give({"n": next(others), "x": 1.0}), caplog)
    source.give({"n": 80, "y": 1})
    resumed = await newest(topic, lambda update: update.rank > (2, 1), job)
    assert resumed.parameters["link"] == "logit"  # type: ignore[index, call-overload]
    assert "predictions were of the kind regression, and are of the kind classification now" in caplog.text
    await job.stop("abort")


async def test_a_version_that_the_trainer_cannot_start_from_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollback to the version of another kind of model was ignored, and the trainer's versions were not served."""
    topic = MemoryBroker().topic("models")
    await topic.create()
    job, source = await started(topic, tmp_path, LEARNERS["rows"])
    source.give(*lines(10, 1.0))
    await newest(topic, lambda update: True, job)
    encoder, writer = ModelUpdateEncoder("m", 2, clock=SystemClock()), await topic.open_writer()
    await writer.write(encoder.encode([{"weights": np.zeros(1)}]))
    await roll_back(topic, "m", "2.1")
    with pytest.raises(JobFailed) as failed:
        await until_resumed(job, lambda: source.give(*lines(1, 1.0)), caplog)
    assert "cannot resume from update 3.1, which a rollback has published: AdaptiveLinearModel.start_from" in str(
        failed.value
    )


async def test_a_version_that_was_held_since_before_a_rollback_is_not_published(tmp_path: Path) -> None:
    """A step that publishes once a minute held the bad version over a restart, and it replaced the rollback."""
    topic = MemoryBroker().topic("models")
    await topic.create()

    async def publishing() -> tuple[Job, Kept]:
        source, flow = Kept(), Flow("publishing")
        flow.from_source(lambda: source, name="in").publish_model(topic, model="m")
        return await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S)), source

    job, source = await publishing()
    source.give(ModelSnapshot(np.zeros(1), 1, since_rollback=(0, 0)))
    await newest(topic, lambda update: update.version == 1, job)
    await job.stop("suspend")
    await roll_back(topic, "m", "1.1")
    job, source = await publishing()
    for since in ((0, 0), (2, 1)):
        source.give(ModelSnapshot(np.ones(1), 2, since_rollback=since))
    update = await newest(topic, lambda update: update.records == 2, job)
    assert (update.rank, update.since_rollback) == ((3, 1), (2, 1))
    await job.stop("suspend")
