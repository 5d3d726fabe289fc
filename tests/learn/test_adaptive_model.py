"""The adaptive linear model: the same result for any cut of a stream, any scale and any kind of record."""

import copy
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from learn.frozen_states import frozen, learned
from learn.row_streams import hyperplane
from support.examples import random_examples
from support.waiting import PATIENCE_S

import streamiter.learn.labels as labels_module
import streamiter.learn.ready_made.adaptive as adaptive_module
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, BadRows, Embeddings, SparseRows
from streamiter.learn.asked_questions import QuestionPredictions
from streamiter.learn.ready_made.model_rows import RowSteps
from streamiter.models import LinearPredictor
from streamiter.values.named_rows import ABSENT, FieldReader

BITS = 5
"""Few places, so that texts share places, too."""


# ---- any cut of a stream


class Stream(NamedTuple):
    """Records with labels (None: the row is only predicted), and where to cut them."""

    task: str
    records: list[dict[str, Any]]
    labels: list[Any]
    weights: list[float]
    cuts: list[int]
    crosses: list[tuple[str, str]]
    rates: list[float] | None
    first: int
    """The number of labels that the kind is decided from."""


def a_value(random: Random, field: str) -> Any:
    if random.random() < 0.2:
        return random.choice([None, math.nan, math.inf, "Rome", 7, True, np.float32(2.5), [1]])
    return random.choice(["Rome", "Kyiv", "x"]) if field.startswith("t") else random.gauss(3, 50)


def a_stream(random: Random) -> Stream:
    task = random.choice(["binary", "classes", "counts", "regression"])
    count = random.randint(2, 10)
    records, labels = [], []
    for _ in range(count):
        fields = random.sample(["a", "b", "ab", "t", "tt"], random.randint(1, 5))
        records.append({field: a_value(random, field) for field in fields})
        good = {
            "binary": random.choice([0, 1, True]),
            "classes": random.choice(["x", "y", "x", "z", np.str_("y")]),
            "counts": random.choice([0, 1, 1.0, -1, np.int64(1), 2]),
            "regression": random.gauss(1_000, 5),
        }[task]
        labels.append(random.choice([good] * 9 + [None] * 4 + [math.nan, [2], 10**400]))
    weights = [random.choice([1.0, 1.0, 0.5, 3.0, 0.0, 1e31]) for _ in range(count)]
    cuts = [0, *sorted(random.sample(range(1, count), random.randrange(count))), count]
    crosses = random.choice([[], [("a", "b"), ("t", "tt")], [("t", "a"), ("b", "b"), ("ab", "tt")]])
    rates, first = random.choice([None, None, None, [0.5]]), random.choice([1, 2, 4, 1_000])
    return Stream(task, records, labels, weights, cuts, crosses, rates, first)


def new_model(stream: Stream) -> AdaptiveLinearModel:
    task: Any = "regression" if stream.task == "regression" else None
    return AdaptiveLinearModel(task=task, bits=BITS, crosses=stream.crosses, rates=stream.rates)


@contextmanager
def deciding_from(labels: int) -> Iterator[None]:
    """Decide the kind of labels from so many: all of them, and what comes after them, are in a short stream."""
    with patch.multiple(labels_module, FIRST_LABELS=labels), patch.multiple(adaptive_module, FIRST_LABELS=labels):
        yield


class Predicted:
    """The predictions of a stream, as a caller keeps them who is told later what the labels mean."""

    def __init__(self) -> None:
        self._rows: list[tuple[list[float], float] | None] = []
        self._learned: list[int] = []

    def learn(self, model: AdaptiveLinearModel, stream: Stream, start: int, stop: int) -> None:
        """Learn from some rows as one batch, without those that are refused."""
        left = list(range(start, stop))
        self._rows += [None] * (stop - start)
        while left:
            try:
                rows = model.rows([stream.records[row] for row in left])
                labels = [stream.labels[row] for row in left]
                learns = np.array([label is not None for label in labels])
                weights = np.array([stream.weights[row] for row in left])
                each = RowSteps.one_each(len(left), learns=True, weights=weights)
                found = model.step(rows, each._replace(learns=learns), labels)
            except BadRows as bad:
                left = [row for place, row in enumerate(left) if place not in bad.rows]
                continue
            if (again := model.predicted_again) is not None:
                for row, prediction in zip(self._learned, again, strict=True):
                    self._rows[row] = np.atleast_1d(prediction).tolist(), float(len(model.labels.earlier))
            for row, prediction in zip(left, found, strict=True):
                self._rows[row] = np.atleast_1d(prediction).tolist(), float(len(model.labels.earlier))
            self._learned += [row for row, learn in zip(left, learns, strict=True) if learn]
            return

    def told(self, model: AdaptiveLinearModel) -> list[list[str]]:
        """Return each prediction exactly, in the terms of now, without the classes that were not known yet."""
        told = []
        for row in self._rows:
            if row is None:
                told.append(["refused"])
            elif math.isnan(row[0][0]):
                told.append(["no label yet"])
            else:
                made, nothing = np.array([row[0]]), np.full((1, 2), np.nan)
                predictions = QuestionPredictions(made, np.array([made.shape[1]]), np.array([int(row[1])]), nothing)
                numbers = np.atleast_1d(model.labels.as_now(predictions)[0])
                told.append([float(number).hex() for number in [*(p for p in numbers[:-1] if p), numbers[-1]]])
        return told


@random_examples(a_stream, examples=2_000, fewest=20)
def test_no_cut_of_a_stream_changes_a_prediction_or_the_state(stream: Stream) -> None:
    """With other transport batches another model was published: sums were taken in another order, a field got its
    kind from a row that was refused, or a question before the first label counted in one batch and not in another.
    """
    single, cut, by_row, by_batch = new_model(stream), new_model(stream), Predicted(), Predicted()
    with deciding_from(stream.first):
        for row in range(len(stream.records)):
            by_row.learn(single, stream, row, row + 1)
        for start, stop in zip(stream.cuts, stream.cuts[1:], strict=False):
            by_batch.learn(cut, stream, start, stop)
    assert by_batch.told(cut) == by_row.told(single)
    assert learned(cut) == learned(single)


def test_a_field_may_come_before_or_after_the_third_class() -> None:
    """Weights of 0 became -0 for a field that was in the batch of the third class already."""
    records: list[Any] = [{"a": None}, {"b": "Rome", "t": math.inf}, {"c": 2.5}, {"t": 2.5, "b": None}, {"a": None}]
    stream = Stream(
        "classes",
        records,
        labels=["x", "y", "z", "x", "x"],
        weights=[1.0] * 5,
        cuts=[0, 5],
        crosses=[],
        rates=None,
        first=1,
    )
    by_row, by_batch = new_model(stream), new_model(stream)
    with deciding_from(1):
        told = Predicted()
        for row in range(5):
            told.learn(by_row, stream, row, row + 1)
        Predicted().learn(by_batch, stream, 0, 5)
    assert learned(by_batch) == learned(by_row)


@random_examples(a_stream, examples=1_000, fewest=20)
def test_learning_resumes_at_any_row_after_a_restore(stream: Stream) -> None:
    """Train, stop, restore, train must equal training without a stop, to the bit, with weights, texts and classes."""
    through, expected = new_model(stream), Predicted()
    with deciding_from(stream.first):
        for row in range(len(stream.records)):
            expected.learn(through, stream, row, row + 1)
        model, found = new_model(stream), Predicted()
        for row in range(len(stream.records)):
            state = copy.deepcopy(model.state())
            kept, before = frozen(state), copy.deepcopy(found)
            found.learn(model, stream, row, row + 1)
            assert frozen(state) == kept, "a state must not change afterwards"
            restored = new_model(stream)
            restored.restore(state)
            before.learn(restored, stream, row, row + 1)
            assert before.told(restored) == found.told(model)
            model = restored
    assert found.told(model) == expected.told(through)
    assert frozen(model.state()) == frozen(through.state())


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf, 1.1e100, -1e300])
def test_a_missing_value_equals_the_row_that_omits_it(missing: float) -> None:
    """A missing value was the number 0, or moved the statistics of its column."""
    random = np.random.default_rng(4)
    dense = random.normal(size=(200, 5)) + 3
    is_there = random.random(dense.shape) < 0.7
    labels = (dense[:, 0] > 3).tolist()
    full = SparseRows.from_dense(np.where(is_there, dense, missing), keep_zeros=True)
    sparse = SparseRows.from_rows(
        [(np.flatnonzero(there), row[there]) for there, row in zip(is_there, dense, strict=True)], 5
    )
    models = [AdaptiveLinearModel(), AdaptiveLinearModel()]
    found = [model.learn_each(rows, labels) for model, rows in zip(models, (full, sparse), strict=True)]
    assert frozen(found[0]) == frozen(found[1])
    assert frozen(models[0].state()) == frozen(models[1].state())


# ---- any scale


def loss(x: Any, labels: Any, **options: Any) -> float:
    """Return the progressive loss: log loss, or the root of the mean squared error."""
    found = AdaptiveLinearModel(**options).learn_each(x, labels)
    if options.get("task") == "regression":
        return float(np.sqrt(np.mean((found - labels) ** 2)))
    chances = np.where(labels, found, 1 - found)
    return float(-np.log(np.maximum(chances, 1e-15)).mean())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "1000v + 50000": lambda v: 1000 * v + 50_000,
    "epoch seconds": lambda v: v + 1.7e9,
    "tiny": lambda v: v * 1e-12,
    "huge": lambda v: v * 1e50,
    "negative": lambda v: -v,
}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_scale_and_offset_of_columns_leave_the_loss_the_same(task: Any) -> None:
    """Epoch seconds as a feature silenced the column, or made the loss infinite; users had to scale columns first."""
    x, labels = hyperplane(5_000)
    if task == "regression":
        labels = x @ np.arange(10.0) + 1e6
    clean = loss(x, labels, task=task)
    for name, change in CHANGES.items():
        assert loss(change(x), labels, task=task) == pytest.approx(clean, rel=1e-3), name


def test_outliers_hardly_raise_the_loss() -> None:
    """One value in 10,000 that is a million times too large made all later values of its column zero."""
    x, labels = hyperplane(20_000)
    dirty = x.copy()
    dirty[np.random.default_rng(2).random(x.shape) < 1e-4] *= 1e6
    assert loss(dirty, labels) < 1.05 * loss(x, labels)


@pytest.mark.parametrize("row", [5, 40, 2_000])
def test_one_wrong_label_leaves_the_model_as_it_is(row: int) -> None:
    """After one label that was a million times too large, the error of the next 10,000 rows was 40 times as large."""
    x, _ = hyperplane(6_000)
    labels = x @ np.arange(10.0) + np.random.default_rng(3).normal(size=6_000)
    errors = []
    for wrong in (1.0, 1e6):
        given = labels.copy()
        given[row] *= wrong
        found = AdaptiveLinearModel().learn_each(x, given)
        errors.append(float(np.sqrt(np.mean((found - labels)[3_000:] ** 2))))
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("factor", [100.0, 1e6])
def test_labels_that_grow_are_followed(factor: float) -> None:
    """Labels that were a million times larger were taken for wrong ones, and the model predicted the old ones."""
    x, _ = hyperplane(2_000)
    labels = (x @ np.arange(10.0)) * np.repeat([1.0, factor], 1_000)
    found = AdaptiveLinearModel().learn_each(x, labels)
    assert np.sqrt(np.mean((found - labels)[1_500:] ** 2)) < 0.5 * labels[1_500:].std()


def a_walk(rows: int) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return labels that grow by 1 in the mean, and records with the label before each."""
    walk = np.cumsum(np.random.default_rng(4).normal(1.0, 1.0, size=rows + 1))
    return [{"last": float(last), "name": "a"} for last in walk[:-1]], walk[1:]


@pytest.mark.parametrize("shapes", [False, True])
def test_labels_with_a_trend_are_followed_beyond_their_range(shapes: bool) -> None:
    """Errors were small parts of the labels' deviation, so experts four times as bad as the last label had all shares.

    The predictions of the best of them were cut off at the largest label so far.
    """
    records, labels = a_walk(3_000)
    found = AdaptiveLinearModel(shapes=shapes).learn_each(records, labels)
    of_last = np.array([record["last"] for record in records])
    assert np.mean((found - labels)[1_000:] ** 2) < np.mean((of_last - labels)[1_000:] ** 2)


def test_a_version_predicts_beyond_the_range_of_the_labels_as_the_learner() -> None:
    """Each member has a range of its own, and one range is served."""
    records, labels = a_walk(300)
    model = AdaptiveLinearModel(embeddings=Embeddings(factors=2))
    model.learn(records, labels)
    assert model.parameters()["highest"] > labels.max()
    ahead = [{"last": last, "name": "a"} for last in np.linspace(labels.max() - 9, labels.max() + 99, 40)]
    assert LinearPredictor(model.parameters())(ahead) == pytest.approx(model.predict(ahead), rel=1e-6)


def test_a_constant_column_changes_no_bit() -> None:
    """The deviation of a constant column is 0, or the rounding of its mean; a division by it gave large steps."""
    x, labels = hyperplane(500)
    constant = np.column_stack([np.full(500, 0.1), x, np.full(500, 1e9 + 0.1)])
    plain_model, model = AdaptiveLinearModel(shapes=False), AdaptiveLinearModel(shapes=False)
    assert frozen(model.learn_each(constant, labels)) == frozen(plain_model.learn_each(x, labels))
    assert model.parameters()["weights"][[0, -1]].tolist() == [0.0, 0.0]


def test_rare_labels_need_no_resampling() -> None:
    """With one label in a thousand, a learner stayed far above the loss of the base rate."""
    random = np.random.default_rng(3)
    x = random.normal(size=(40_000, 10))
    score = x @ np.linspace(-1, 1, 10)
    labels = random.random(len(x)) < 1 / (1 + np.exp(8.2 - 1.2 * score))
    rate = labels.mean()
    assert 0.0005 < rate < 0.004
    assert loss(x, labels) < -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def test_a_weight_counts_as_rows_and_large_weights_leave_a_model() -> None:
    """With rows of weight 50,000 the statistics had one row, so all columns were constant and nothing was learned."""
    x, labels = hyperplane(5_000)
    for weight in (1e-3, 50_000.0, 1e9):
        found = AdaptiveLinearModel().learn_each(x, labels, np.full(len(x), weight))
        chances = np.where(labels, found, 1 - found)[1_000:]
        assert -np.log(np.maximum(chances, 1e-15)).mean() < 0.6, weight
    found = AdaptiveLinearModel().learn_each(x, labels, np.zeros(len(x)))
    assert found.tolist() == [0.5] * len(x)


# ---- what is published


def mixed_records(count: int, seed: int = 5) -> tuple[list[dict[str, Any]], Any]:
    random = np.random.default_rng(seed)
    towns = ["Rome", "Kyiv", "Oslo", None]
    records = [
        {"km": km if n % 7 else None, "town": towns[n % 4], "weather": "rain" if wet else "sun"}
        | ({"late": 1e6 * (km - 3)} if n > count // 2 else {})
        for n, (km, wet) in enumerate(
            zip(random.normal(3, 2, count).tolist(), (random.random(count) < 0.4).tolist(), strict=True)
        )
    ]
    score = np.array([(r["km"] or 3) * (2 if r["weather"] == "rain" else 1) for r in records])
    return records, score + random.normal(size=count)


TASKS: dict[str, Callable[[Any], Any]] = {
    "logit": lambda score: score > 4,
    "clipped": lambda score: 100 * score + 1e5,
    "softmax": lambda score: np.array(["low", "middle", "high"])[np.clip(score / 3, 0, 2).astype(int)],
}


def served(parameters: Any, records: Sequence[Any]) -> Any:
    """Predict with the published numbers, as they are documented."""
    rows = FieldReader(bits=parameters["bits"], refuse=BadRows).rows(list(records))
    weights, center, limit = (np.asarray(parameters[name]) for name in ("weights", "center", "limit"))
    columns = {field: number for number, field in enumerate(parameters["fields"])}
    columns |= {int(place): len(columns) + number for number, place in enumerate(parameters["places"])}
    scores = []
    for numbers, places in zip(rows.numbers, rows.places, strict=True):
        score = np.array(parameters["intercept"], dtype=np.float64)
        values = [*zip(rows.fields, numbers, strict=True), *((int(p), 1.0) for p in places if p != ABSENT)]
        for column, value in values:
            if column in columns and abs(value) <= 1e100:
                at = columns[column]
                score = score + weights[at] * np.clip(value - center[at], -limit[at], limit[at])
        scores.append(score)
    score = np.array(scores)
    if parameters["link"] == "clipped":
        return np.clip(score, parameters["lowest"], parameters["highest"])
    if parameters["link"] == "logit":
        return 1 / (1 + np.exp(-np.clip(score, -30, 30)))
    powers = np.exp(score - score.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("link", TASKS)
def test_the_published_linear_model_predicts_as_the_learner(link: str) -> None:
    """The learner was validated, and another model was served."""
    records, score = mixed_records(400)
    model = AdaptiveLinearModel(shapes=False)
    model.learn(records, TASKS[link](score))
    parameters = model.parameters()
    assert parameters["link"] == link
    unknown = [{"km": 4.0, "town": "a new one", "other": 3.0}, {}, {"km": 1e6}]
    asked = [*records, *unknown]
    assert model.predict(asked) == pytest.approx(served(parameters, asked), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("crosses", [[], [("km", "town"), ("km", "km")]], ids=str)
@pytest.mark.parametrize("link", TASKS)
def test_a_model_started_from_a_published_one_predicts_the_same_and_learns_on(link: str, crosses: Any) -> None:
    """After a restart without a checkpoint, training began at zero, or forgot the model within a few rows."""
    records, score = mixed_records(1_200)
    labels = TASKS[link](score)
    model = AdaptiveLinearModel(crosses=crosses)
    model.learn(records[:800], labels[:800])
    started = AdaptiveLinearModel(crosses=crosses)
    started.start_from(model.parameters())
    assert started.predict(records) == pytest.approx(model.predict(records), rel=1e-9, abs=1e-9)
    assert started.task == model.task
    assert started.classes == model.classes
    losses = []
    for learner in (model, started, AdaptiveLinearModel(crosses=crosses)):
        found = learner.learn_each(records[800:], labels[800:])
        if link == "softmax":
            names: Any = learner.classes
            chances = [row[names.index(label)] for row, label in zip(found, labels[800:], strict=True)]
            losses.append(-np.log(np.maximum(chances, 1e-6)).mean())
        elif link == "logit":
            losses.append(-np.log(np.maximum(np.where(labels[800:], found, 1 - found), 1e-15)).mean())
        else:
            losses.append(np.mean((found - labels[800:]) ** 2))
    assert losses[1] < 1.1 * losses[0]
    assert losses[1] < losses[2]


def test_a_start_from_sparse_rows_and_from_a_model_without_columns() -> None:
    """The parameters of a model without a single column could not be read."""
    x, labels = hyperplane(50)
    rows = SparseRows.from_dense(x)
    for given in (rows, [{}] * 50):
        model, started = AdaptiveLinearModel(), AdaptiveLinearModel()
        model.learn(given, labels)
        started.start_from(model.parameters())
        assert started.predict(given) == pytest.approx(model.predict(given), abs=1e-9)


# ---- kinds of records and labels, errors


def test_numba_is_imported_with_the_first_label_only() -> None:
    """``import streamiter.learn`` took a second longer, in programs that make no such model."""
    program = (
        "import sys\nfrom streamiter.learn import AdaptiveLinearModel\nmodel = AdaptiveLinearModel()\n"
        "assert 'numba' not in sys.modules\nassert 'streamiter.learn.ready_made.row_steps' not in sys.modules\n"
        "model.learn([[1.0]], [True])\nassert 'streamiter.learn.ready_made.row_steps' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_many_classes_take_memory_only_for_texts_that_came() -> None:
    """A model of 300 classes took gigabytes for places of texts that no row had, and copied them for each class."""
    rows = [{"city": f"city {n % 50}"} for n in range(300)]
    model = AdaptiveLinearModel()
    model.learn(rows[:2], ["class 0", "class 1"])
    tracemalloc.start()
    try:
        model.learn(rows, [f"class {n}" for n in range(300)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50e6


def test_labels_that_were_not_learned_from_are_no_targets() -> None:
    """Labels that became classes before they were learned from wrote beyond the arrays, and the process crashed."""
    model = AdaptiveLinearModel()
    model.learn([[0.0], [1.0], [2.0]], ["a", "b", "c"])
    with pytest.raises(ModelError, match="expected labels that were learned from, given others"):
        model.labels.targets([f"c{n}" for n in range(90)])
    model.learn([[0.0], [1.0]], ["c89", "a"])
    predictions = model.predict([[0.5]])
    assert predictions.shape == (1, 5)
    assert np.isfinite(predictions).all()
