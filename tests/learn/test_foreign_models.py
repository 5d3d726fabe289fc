"""Models of other libraries are trained, validated, published, served and restored like the engine's own."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from streamiter import Columns, Flow, topic
from streamiter.errors import ConfigurationError, GraphError, JobFailed, ModelError
from streamiter.learn import ForeignModel, train_online
from streamiter.learn.model_owner import OwnerOptions, PublishSchedule
from streamiter.learn.online.foreign_models import ForeignOwner, fields_of
from streamiter.models import ServedModel
from streamiter.testing import RestoreProcess, check_restore


class Mean:
    """A model of a library without names: the weighted mean of the labels."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def learn(self, features: object, label: float, weight: float = 1.0) -> None:
        self.total += label * weight
        self.weight += weight

    def predict(self, features: object) -> float:
        assert self.weight, "asked before it has learned"
        return self.total / self.weight

    def save(self) -> bytes:
        return json.dumps([self.total, self.weight]).encode()

    @staticmethod
    def load(data: bytes) -> Mean:
        return Mean(*json.loads(data))


class MeanOfBatches(Mean):
    """The same model, with functions that take mini-batches."""

    def learn(self, features: Any, labels: Any, weights: Any = None) -> None:
        for row, label in enumerate(labels):
            super().learn(None, label, 1.0 if weights is None else float(weights[row]))

    def predict(self, features: Any) -> Any:
        return [super().predict(None)] * len(features)

    @staticmethod
    def load(data: bytes) -> MeanOfBatches:
        return MeanOfBatches(*json.loads(data))


def mean(kind: type[Mean] = Mean, **options: Any) -> ForeignModel[Any]:
    functions = {"learn": kind.learn, "predict": kind.predict, "save": kind.save, "load": kind.load}
    given: dict[str, Any] = {"make": kind, "task": "regression"} | functions | options
    return ForeignModel(**given)


RECORDS = [{"x": float(n), "town": "ab"[n % 2], "y": float(n % 5), "w": float(n % 3)} for n in range(50)]


def trained(model: ForeignModel[Any], records: Any = RECORDS, **options: Any) -> tuple[Any, Any]:
    """Return the models and metrics of a training."""
    flow = Flow("foreign")
    training = train_online(flow.from_items(records), model, **({"label": "y"} | options))
    models, quality = training.models.collect(), training.validation.collect()
    flow.run()
    return models.items, quality.items


def expected_errors(labels: list[float], weights: list[float] | None = None) -> float:
    """Return the mean squared error of predicting the mean of the labels before."""
    given = [1.0] * len(labels) if weights is None else weights
    total = weight = squares = counted = 0.0
    for label, own in zip(labels, given, strict=True):
        if weight or total:
            squares += own * (label - total / weight) ** 2
            counted += own
        total, weight = total + label * own, weight + own
    return squares / counted


@pytest.mark.parametrize("mini_batch", [1, 7, 50, 1000])
def test_each_row_is_predicted_before_it_is_learned_whatever_the_mini_batch(mini_batch: int) -> None:
    """A mini-batch was learned before its last rows were predicted, so the quality was too good."""
    models, quality = trained(mean(), mini_batch=mini_batch)
    assert quality[-1]["count"] == len(RECORDS) - 1
    assert quality[-1]["squared_error"] == pytest.approx(expected_errors([row["y"] for row in RECORDS]))
    assert models[-1].records == len(RECORDS)


def test_a_mini_batch_is_predicted_before_it_is_learned() -> None:
    """The first mini-batch was predicted by a model that many libraries refuse to ask."""
    _, quality = trained(mean(MeanOfBatches, by="mini-batch"), mini_batch=10)
    assert quality[-1]["count"] == len(RECORDS) - 10


def test_weights_are_the_fourth_argument_of_learn() -> None:
    """Weights were read and thrown away."""
    records = [row | {"w": row["w"] + 1.0} for row in RECORDS]
    models, quality = trained(mean(), records, weight="w")
    labels, weights = [row["y"] for row in records], [row["w"] for row in records]
    assert quality[-1]["squared_error"] == pytest.approx(expected_errors(labels, weights))
    total, weight = json.loads(models[-1].parameters["saved"].tobytes())
    assert (total, weight) == (pytest.approx(np.dot(labels, weights)), pytest.approx(sum(weights)))


def test_features_are_the_fields_without_label_and_weight() -> None:
    """The model was given its own label as a feature, and seemed to be perfect."""
    seen: list[Any] = []

    def learn(model: Mean, features: Any, label: float, weight: float) -> None:
        seen.append(features)
        model.learn(features, label, weight)

    trained(
        mean(learn=learn), Columns({name: np.array([row[name] for row in RECORDS]) for name in RECORDS[0]}), weight="w"
    )
    assert seen[0] == {"x": 1.0, "town": "b"}
    assert [type(value) for value in seen[0].values()] == [float, str]
    assert fields_of(RECORDS[:1], ["town", "zip"], []) == [{"town": "a"}]
    with pytest.raises(ConfigurationError, match="the fields 'zip', given Columns without 'zip'; they have 'x'"):
        fields_of(Columns({"x": np.zeros(2)}), ["zip"], [])


@pytest.mark.parametrize(
    ("predictions", "labels", "expected"),
    [
        ([0.25, 0.75], [False, True], {"accuracy": 1.0, "loss": -np.log(0.75)}),
        ([{False: 0.75, True: 0.25}, {True: 0.75}], [False, True], {"accuracy": 1.0, "loss": -np.log(0.75)}),
        ([{}, {False: 1.0}], [True, False], {"accuracy": 1.0, "loss": np.log(2) / 2}),
        ([{"a": 0.5, "b": 0.5}, {"a": 0.2, "b": 0.8}], ["a", "a"], {"accuracy": 0.5, "loss": -np.log(0.1) / 2}),
        (["a", "b"], ["a", "a"], {"accuracy": 0.5}),
        ([True, False], [True, True], {"accuracy": 0.5}),
    ],
)
def test_all_forms_of_predictions_are_validated(predictions: Any, labels: Any, expected: Any) -> None:
    """A library that gives probabilities by label, or labels, could not be validated."""
    answers = iter(predictions)
    model = mean(
        learn=lambda model, features, label: None, predict=lambda model, features: next(answers), task="classification"
    )
    records = [{"x": 1.0, "y": label} for label in [labels[0], *labels]]
    _, quality = trained(model, records)
    assert {name: quality[-1][name] for name in expected} == pytest.approx(expected)


def test_a_probability_alone_is_for_truth_values() -> None:
    """A library that returned the probability of one of two texts ended the job with "could not convert string"."""
    model = mean(learn=lambda model, features, label: None, predict=lambda model, features: 0.5, task="classification")
    with pytest.raises(JobFailed, match=r"expected a mapping from labels to probabilities, .* for the label 'yes'"):
        trained(model, [{"x": 1.0, "y": label} for label in ("no", "yes")])


def test_a_restored_model_continues_as_one_that_was_never_stopped(restore_process: RestoreProcess) -> None:
    """The bytes of two equal models differed, so a check of their bytes failed although nothing was lost."""
    check_restore(
        "learn.test_foreign_models:owner",
        {"start": [None], "rows": [RECORDS[first : first + 10] for first in range(0, 50, 10)]},
        tags=["predictions"],
        compare="outputs",
        process=restore_process,
    )


def owner() -> ForeignOwner[Any]:
    """Return an owner whose model is saved in different bytes each time, as some pickles are."""
    saved = itertools.count()

    def save(model: Mean) -> bytes:
        return model.save() + b" " * next(saved)

    def read(mini_batch: Any) -> Any:
        return mini_batch, [row["y"] for row in mini_batch], None

    return ForeignOwner(mean(save=save), read, OwnerOptions(PublishSchedule(mini_batches=10**6)))


async def test_a_published_model_is_loaded_once_and_served() -> None:
    """The bytes of a forest were read again for each prediction, which took a second."""
    loads: list[bytes] = []

    def load(data: bytes) -> Mean:
        loads.append(data)
        return Mean.load(data)

    model = mean(load=load)
    updates = topic("memory://updates")
    await updates.create()
    flow = Flow("served")
    train_online(flow.from_items(RECORDS), model, label="y").models.publish_model(updates, model="mean")
    job = await flow.start()
    await job.wait()
    async with ServedModel(updates, "mean", load=model.predictor) as served:
        await served.ready()
        assert [served.predict({}).value for _ in range(3)] == [pytest.approx(2.0)] * 3
    assert len(loads) == 1
    with pytest.raises(ConfigurationError, match="expected one of predict= and load=, given both"):
        ServedModel(updates, "mean", load=model.predictor, predict=lambda parameters, x: x)


def test_models_of_river_need_no_functions_but_those_of_a_writer() -> None:
    """Each user wrote the functions for river, and missing values, weights or classes were wrong in one of them."""
    tree = pytest.importorskip("river.tree")
    preprocessing, linear_model = (
        pytest.importorskip("river.preprocessing"),
        importlib.import_module("river.linear_model"),
    )
    scaled = lambda: preprocessing.StandardScaler() | linear_model.LogisticRegression()  # noqa: E731
    drawn = np.random.default_rng(seed=5)
    rows = [{"x": x, "w": float(n % 3)} for n, x in enumerate(drawn.normal(size=900).tolist())]
    for missing in (None, math.nan):
        records = [
            row | {"sign": "+-"[row["x"] < 0], "is above": row["x"] > 0, "y": 9.0 * row["x"], "gap": missing}
            for row in rows
        ]
        for make, label, metric, best, worst in (
            (tree.HoeffdingAdaptiveTreeClassifier, "sign", "accuracy", 1.0, 0.9),
            (scaled, "is above", "accuracy", 1.0, 0.9),
            (tree.HoeffdingAdaptiveTreeRegressor, "y", "rmse", 0.0, 4.0),
        ):
            model = ForeignModel.of_river(make, save=pickle.dumps, load=pickle.loads)
            models, quality = trained(model, records, label=label, features=["x", "gap"], weight="w")
            assert min(best, worst) <= quality[-1][metric] <= max(best, worst)
            assert models[-1].records == 600  # A row of weight 0 is not learned.
            model.predictor(models[-1].parameters)({"x": 1.0, "gap": missing})
    weighted = ForeignModel.of_river(linear_model.LogisticRegression, save=pickle.dumps, load=pickle.loads)
    once, thrice = weighted.make(), weighted.make()
    weighted.learn(once, {"x": 1.0}, True)
    weighted.learn(thrice, {"x": 1.0}, True, 3.0)
    assert thrice.weights["x"] == pytest.approx(3.0 * once.weights["x"])
    with pytest.raises(ModelError, match="expected a function that makes a classifier or a regressor of river"):
        ForeignModel.of_river(preprocessing.StandardScaler, save=pickle.dumps, load=pickle.loads)


def test_rows_without_a_label_follow_the_policy() -> None:
    """A label that was missing ended the job of a week, or was learned as NaN."""
    records = [*RECORDS[:5], {"x": 1.0}, RECORDS[5] | {"y": None}, RECORDS[6] | {"y": float("nan")}, *RECORDS[5:]]
    models, _ = trained(mean(), records, on_error="skip")
    assert models[-1].records == len(RECORDS)
    with pytest.raises(JobFailed, match="expected a record with the field 'y', given one with 'x'; write"):
        trained(mean(), records)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_no_prediction_for_a_row_is_an_error(task: Any) -> None:
    """None counted as a label of its own, or as NaN, and the quality of the model was reported without a word."""
    records = [{"x": n, "y": n % 2 > 0} for n in range(4)]
    with pytest.raises(JobFailed, match=r"ForeignModel\(predict=\): expected .* for each row, given None; return one"):
        trained(mean(task=task, predict=lambda model, features: None), records)


def test_a_saved_text_is_an_error_that_says_what_to_return() -> None:
    """The error said "a bytes-like object is required", and not which function returned what."""
    with pytest.raises(
        JobFailed, match=r"ForeignModel\(save=\): expected bytes, given 'text'; of a text return text\."
    ):
        trained(mean(save=lambda model: "text"))


class OfOtherLibrary:
    """Learns row by row."""

    def learn_one(self, features: Any, label: Any) -> None:
        """Learn nothing."""

    def __repr__(self) -> str:
        return "OfOtherLibrary()"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (OfOtherLibrary(), r"expected a function, given OfOtherLibrary\(\); .* give a ForeignModel\(…\)"),
        (OfOtherLibrary, r"a LinearModel, given one that makes OfOtherLibrary\(\); .* give a ForeignModel\(…\)"),
        (mean(learn=lambda model, x: None), r"ForeignModel\(learn=\): .* called as f\(model, features, label\), given"),
        (mean(predict=lambda x: 1.0), r"ForeignModel\(predict=\): .* called as f\(model, features\), given"),
    ],
    ids=["an object", "a class", "learn without a label", "predict without a model"],
)
def test_a_model_of_another_library_is_told_what_it_needs(model: Any, expected: str) -> None:
    """The error told the author of a learner to write a LogisticRegression, or to give features."""
    with pytest.raises(GraphError, match=expected):
        trained(model)
