"""Online training is a flow that learns, publishes, and handles bad rows."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import run
from learn.online_support import Result, trained
from support.waiting import until

from streamiter import Checkpoints, Columns, Flow
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed
from streamiter.learn import (
    FTRL,
    SGD,
    DelayedLabels,
    Examples,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    ProgressiveValidation,
    SparseRows,
    train_online,
)
from streamiter.learn.gradients.gradient import Gradient
from streamiter.learn.gradients.training import BroadcastSteps, GradientSum
from streamiter.models import ModelSnapshot
from streamiter.operators.source import Source, SourceBatch

TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])


def table(count: int, seed: int = 0) -> Columns:
    features = np.random.default_rng(seed).normal(size=(count, 3))
    return Columns({"x": features, "y": features @ TRUE_WEIGHTS + 3.0})


def clicks(count: int, seed: int = 0) -> Columns:
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(count, 3))
    chance = 1 / (1 + np.exp(-(features @ TRUE_WEIGHTS)))
    return Columns({"x": features, "y": (generator.random(count) < chance).astype(float)})


def as_records(rows: Columns) -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in zip(rows["x"].tolist(), rows["y"].tolist(), strict=True)]


def extract(rows: Any) -> Examples:
    if isinstance(rows, Columns):
        return Examples(rows["x"], rows["y"])
    return Examples(np.array([row["x"] for row in rows]), [row["y"] for row in rows])


def regression() -> LinearModel:
    return LinearRegression(3, optimizer=SGD(0.1))


REGRESSION: dict[str, Any] = {"model": regression, "extract": extract}


def weights_of(models: Sequence[ModelSnapshot]) -> list[list[float]]:
    return [model.parameters["weights"].tolist() for model in models]


def question(number: int) -> dict[str, Any]:
    return {"question": number, "x": float(number % 5)}


def answer(number: int) -> dict[str, Any]:
    return {"answer": number, "y": float(number % 5 > 2)}


LABELS = DelayedLabels(
    key_of=lambda event: event.get("question", event.get("answer")),
    is_answer=lambda event: "answer" in event,
    features=lambda questions: SparseRows.from_rows([([0], [event["x"]]) for event in questions], 1),
    target_of=lambda event: event["y"],
)
DELAYED: dict[str, Any] = {"model": lambda: LogisticRegression(1), "labels": LABELS}


def delayed_events(count: int, delay: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for number in range(count + delay):
        if number < count:
            events.append(question(number))
        if number >= delay:
            events.append(answer(number - delay))
    return events


@pytest.mark.parametrize("optimizer", [SGD(0.1), FTRL(0.5)], ids=["SGD", "FTRL"])
@pytest.mark.parametrize("seed", range(3))
def test_in_step_with_one_worker_training_equals_a_plain_loop(optimizer: Any, seed: int) -> None:
    """The engine must neither add nor omit a step, for any cut of batches: every version is equal to the bit."""
    rows = clicks(500)
    options: Any = {"extract": extract, "mini_batch": 30, "mode": "synchronous", "report_every": 500}
    result = trained(as_records(rows), seed=seed, model=lambda: LogisticRegression(3, optimizer=optimizer), **options)

    model, validation = LogisticRegression(3, optimizer=optimizer), ProgressiveValidation(window=10_000)
    versions = []
    for start in range(0, 500, 30):
        features, targets = rows["x"][start : start + 30], rows["y"][start : start + 30]
        validation.update(model.predict(features), targets)
        model.learn(features, targets)
        versions.append(model.weights.tolist())
    assert weights_of(result.models) == versions
    assert result.records == [*range(30, 500, 30), 500]
    for name in ("auc", "loss"):
        assert result.metrics[name] == pytest.approx(validation.metrics()[name])


def test_in_step_the_result_does_not_depend_on_the_schedule() -> None:
    """A training must be repeatable: the order in which gradients arrive must not change the last bit."""
    results = []
    for seed in range(4):
        options: Any = {"mini_batch": 25, "mode": "synchronous", "workers": 3, "parallelism": 3}
        limits = ChannelLimits(records=7 + 40 * seed)
        results.append(weights_of(trained(table(2_000), seed=seed, limits=limits, **REGRESSION, **options).models))
    assert results[1:] == results[:-1]
    assert len(results[0]) >= 2_000 / (3 * 25)


def test_asynchronous_workers_make_a_version_of_each_mini_batch() -> None:
    """A gradient that arrives while the owner is busy must make a step like any other."""
    result = trained(table(1_000), mini_batch=10, workers=2, **REGRESSION)
    assert result.records == list(range(10, 1_001, 10))


def test_every_nth_version_is_published_and_the_last_in_any_case() -> None:
    """A restart continues from the published model, so the last version must not be lost."""
    assert trained(table(250), mini_batch=10, publish_every=10, **REGRESSION).records == [100, 200, 250]


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_training_begins_with_the_given_parameters(mode: Any) -> None:
    """A restarted service must not begin at zero, and must use no example before the model has arrived."""
    start = {"weights": TRUE_WEIGHTS, "intercept": 3.0, "link": "identity"}
    result = trained(table(100), mini_batch=10, mode=mode, initial=[start], **REGRESSION)
    assert weights_of(result.models)[0] == pytest.approx(TRUE_WEIGHTS, abs=1e-12)


def test_no_examples_give_no_model_and_an_end() -> None:
    """In an empty topic all steps reached the end and waited for each other."""
    for mode in ("asynchronous", "synchronous"):
        assert trained([], seed=0, mode=mode, workers=2, **REGRESSION).models == []


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_rows_that_are_no_examples_are_left_out_and_the_rest_is_learned(mode: Any) -> None:
    """One broken event an hour cost its whole mini-batch, or ended the service."""
    records = as_records(table(100))
    bad: list[Any] = [
        dict(records[3], y=float("nan")),
        dict(records[4], x=[1.0, float("inf"), 0.0]),
        None,
        {"x": records[5]["x"]},
        dict(records[6], x=[1.0, 2.0]),
        dict(records[7], x="abc"),
    ]
    dirty = [*records[:50], *bad[:3], *records[50:90], *bad[3:], *records[90:]]
    result = trained(dirty, mini_batch=17, mode=mode, on_error="skip", **REGRESSION)
    assert result.records[-1] == 100
    assert result.statistics.step("train").rejected == len(bad)


@pytest.mark.parametrize(
    "bad",
    [
        question(3) | {"x": float("nan")},
        question(3) | {"x": "abc"},
        {"question": 3},
        answer(3) | {"y": "abc"},
        answer(3) | {"y": float("nan")},
    ],
    ids=str,
)
def test_a_bad_question_or_answer_is_left_out_and_the_rest_is_learned(bad: dict[str, Any]) -> None:
    """With delayed labels, one unreadable event ended the training in spite of the error policy."""
    kind = "question" if "question" in bad else "answer"
    events = [event for event in delayed_events(30, 5) if event.get(kind) != 3]
    place = 3 if kind == "question" else 11
    result = trained([*events[:place], bad, *events[place:]], mini_batch=7, on_error="skip", **DELAYED)
    assert result.records[-1] == 29
    assert result.statistics.step("train").rejected >= 1


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_the_initial_stream_has_exactly_one_record(mode: Any, count: int) -> None:
    """Without an initial record the job waited for ever; with two, owner and workers used different ones."""
    with pytest.raises(JobFailed, match=r"train_online\(initial=\): expected a stream of one record, given"):
        trained(table(100), seed=0, mini_batch=10, mode=mode, initial=[np.ones(3)] * count, **REGRESSION)


def test_an_initial_model_works_in_a_flow_with_parallel_steps() -> None:
    """The initial model got the parallelism of the flow, so the loop was refused."""
    flow = Flow("f", parallelism=2)
    training = train_online(
        flow.from_items(table(100)), regression, extract=extract, mini_batch=10, initial=flow.from_items([None])
    )
    models = training.models.collect()
    run(flow)
    assert models.items[-1].records == 100


def test_workers_of_a_wide_model_are_not_flooded_with_its_versions() -> None:
    """Every worker received an answer to every gradient. With three workers, thousands of models waited on disk, and
    gradients were a thousand steps old.
    """
    width = 1 << 17
    peaks: dict[int, int] = {}
    for steps in (60, 240):
        flow = Flow("f")
        generator = np.random.default_rng(1)
        rows = [([int(i)], [1.0]) for i in generator.integers(0, width, steps)]
        training = train_online(
            flow.from_items(range(steps), parallelism=1).rebalance().map(lambda x: x, parallelism=3),
            lambda: LogisticRegression(width, optimizer=SGD(0.1)),
            extract=lambda batch, rows=rows: Examples(  # type: ignore[misc]
                SparseRows.from_rows([rows[i] for i in batch], width), [float(i % 2) for i in batch]
            ),
            mini_batch=1,
            workers=3,
            publish_every=1_000,
        )
        training.models.collect()
        statistics = run(flow)
        peaks[steps] = max(channel.peak_records for task in statistics.tasks for channel in task.feedback)
    assert peaks[240] <= max(12, peaks[60])  # At most twelve gradients are under way.


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": [1.0, 2.0], "y": 1.0}, r"step 'train' .*expected .*3 features.*given .*2"),
        ({"x": [1.0, float("nan"), 2.0], "y": 1.0}, r"step 'train' .*given nan for feature 1"),
        ({"x": [1.0, 2.0, 3.0], "y": float("inf")}, r"step 'train' .*targets.*given inf"),
        ({"x": [1e200, 2.0, 3.0], "y": 1.0}, r"step 'train' .*too large to compute with"),
    ],
)
def test_an_invalid_row_ends_the_job_with_its_reason(mode: Any, bad: dict[str, Any], message: str) -> None:
    """NaN in a gradient makes every weight, and every later prediction, NaN."""
    flow = Flow("f")
    result = Result(train_online(flow.from_items([bad], parallelism=1), mini_batch=1, mode=mode, **REGRESSION))
    with pytest.raises(JobFailed, match=message):
        run(flow)
    assert result.models == []


def test_a_learning_rate_that_is_too_high_ends_the_job_before_the_model_is_lost() -> None:
    """Weights that doubled with each step were published up to infinity."""
    flow = Flow("f")
    training = train_online(
        flow.from_items(table(20_000)), lambda: LinearRegression(3, optimizer=SGD(3.0)), extract=extract, mini_batch=10
    )
    models = training.models.collect()
    with pytest.raises(JobFailed, match=r"weights diverge|extreme feature values or too high a learning rate"):
        run(flow)
    assert np.isfinite([model.parameters["weights"] for model in models.items]).all()


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("gradients_late", [0, 5, 24, 100])
def test_late_gradients_do_not_make_the_model_oscillate(rate: float, gradients_late: int) -> None:
    """With 24 gradients under way, each in full, the loss of a regression grew until the job ended."""
    rule = BroadcastSteps()
    weights = [1.0]
    for step in range(20_000):
        known = max(0, step - gradients_late)
        gradient = Gradient(total=np.array([weights[known]]), intercept=0.0, weight=1.0, records=1, width=1)
        added = rule.add({"worker": 0, "steps": known, **GradientSum(gradient).to_record()}, 0)
        assert added.gradient is not None
        weights.append(weights[-1] - rate * float(added.gradient.total[0]))
    assert abs(weights[-1]) < 1e-6


async def test_suspending_does_not_spoil_an_asynchronous_model() -> None:
    """New parameters waited behind the barrier, so the model learned from eighty mini-batches with the same old
    parameters, and the last published version predicted 100 % or 0 %.
    """
    reached = asyncio.Event()
    published: list[ModelSnapshot] = []

    def count(model: ModelSnapshot) -> None:
        published.append(model)
        if len(published) == 20:
            reached.set()

    flow = Flow("f")
    training = train_online(flow.from_items(table(8_000)), regression, extract=extract, mini_batch=10)
    training.models.map(count)
    job = await flow.start()
    await reached.wait()
    statistics = await job.stop("suspend")
    assert statistics.state == "suspended"
    assert 20 <= len(published) <= 20 + 2 * 8


def test_with_late_labels_the_first_prediction_is_validated() -> None:
    """A prediction after learning from other answers would make the model look better than it was."""
    rate = SGD(0.3)
    options: Any = {"labels": LABELS, "mini_batch": 10, "mode": "synchronous", "report_every": 400}
    result = trained(delayed_events(400, 50), model=lambda: LogisticRegression(1, optimizer=rate), **options)

    model, validation = LogisticRegression(1, optimizer=rate), ProgressiveValidation()
    asked: dict[int, tuple[float, float]] = {}
    events = delayed_events(400, 50)
    for start in range(0, len(events), 10):
        answered = []
        for event in events[start : start + 10]:
            if "question" in event:
                asked[event["question"]] = (event["x"], float(model.predict([[event["x"]]])[0]))
            else:
                answered.append((*asked.pop(event["answer"]), event["y"]))
        if answered:
            features, predictions, targets = map(np.array, zip(*answered, strict=True))
            validation.update(predictions, targets)
            model.learn(features[:, None], targets)
    assert result.models[-1].parameters["weights"] == pytest.approx(model.weights, rel=1e-9)
    assert result.metrics["loss"] == pytest.approx(validation.metrics()["loss"], rel=1e-9)
    assert result.records[-1] == 400


def test_the_answers_to_a_question_find_it_whichever_worker_has_it() -> None:
    """Answers were distributed to workers in turn, so half of them reached a worker that did not know the question."""
    assert trained(delayed_events(300, 20), mini_batch=10, workers=3, **DELAYED).records[-1] == 300


def test_an_answer_without_a_question_follows_the_policy() -> None:
    """After a restart, the first answers belong to questions that the previous run read."""
    events = [answer(1_000), *delayed_events(30, 5), answer(2_000)]
    options: Any = {**DELAYED, "labels": replace(LABELS, unknown="refuse"), "mini_batch": 10}
    result = trained(events, on_error="skip", **options)
    assert (result.statistics.step("train").rejected, result.records[-1]) == (2, 30)
    with pytest.raises(JobFailed, match=r"step 'train' .*an answer without a question that waits for it"):
        trained(events, on_error="fail", **options)


async def test_checkpoints_of_a_learner_slower_than_its_topic_do_not_grow_for_ever() -> None:
    """Each checkpoint added all records of the channels to the previous one, until the memory was full."""

    class Endless(Source):
        bounded = False
        rows = as_records(table(100))

        async def read(self) -> SourceBatch:
            return SourceBatch(list(self.rows), {})

    flow = Flow("learning")
    rows = flow.from_source(Endless, name="rows")
    training = train_online(rows, regression, extract=extract, mini_batch=10, window=100)
    training.models.map(lambda model: None)
    checkpoints = Checkpoints(MemoryStore(), interval_s=0.01)
    job = await flow.start(checkpoints=checkpoints, channel_limits=ChannelLimits(records=500, size_bytes=10_000))
    sizes: list[int] = []
    trained: list[int] = []
    for number in range(1, 41):
        await until(lambda number=number: taken(job).taken >= number)  # type: ignore[misc]
        sizes.append(taken(job).last_size_bytes)
        trained.append(job.statistics().step("train").records_in)
    await job.stop("abort")
    assert trained == sorted(set(trained)), "the job learned nothing between two checkpoints"
    assert max(sizes[20:]) <= 1.2 * max(sizes[:20]), f"{sizes}"


def taken(job: Job) -> Any:
    return job.statistics().checkpoints
