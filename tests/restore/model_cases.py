"""Cases of models in the operators of users: linear models, hashed features, scalers, centroids and validations."""

import functools
from typing import Any

import numpy as np
from restore.case import Case, fed
from restore.learner_cases import OPTIMIZERS, table

from streamiter import Columns, Flow, Operator, Stream
from streamiter.learn import (
    FTRL,
    FeatureHasher,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OnlineKMeans,
    ProgressiveValidation,
    SparseRows,
    StandardScaler,
)
from streamiter.learn.quality.score_metrics import Calibration, ScoreHistogram
from streamiter.learn.quality.validation_step import MeanComparison, Validate
from streamiter.operators import Output

# -- models in users' operators --------------------------------------------------------------------------------


class Learns(Operator):
    """Learns from each batch, and emits the model's parameters and its prediction before the batch."""

    def __init__(self, model: LinearModel, *, sparse: bool) -> None:
        self._model = model
        self._sparse = sparse

    def process_batch(self, batch: Columns, out: Output) -> None:
        features = SparseRows.from_dense(batch["x"]) if self._sparse else batch["x"]
        predicted = self._model.predict(features)
        self._model.learn(features, batch["y"], batch["weight"])
        out.emit((self._model.version, self._model.records, predicted, self._model.parameters()))

    def snapshot(self) -> Any:
        return self._model.state()

    def restore(self, state: Any) -> None:
        self._model.restore(state)


def linear_model(kind: str, optimizer: str, rows: str, flow: Flow) -> Stream:
    model = LogisticRegression if kind == "logistic" else LinearRegression
    made = functools.partial(model, 3, optimizer=OPTIMIZERS[optimizer])
    examples = fed(flow, table(9), batch=2)
    return examples.process(lambda: Learns(made(), sparse=rows == "sparse"), name="learn")


class HashesAndLearns(Operator):
    """Hashes the features of each example, and learns from it."""

    def __init__(self) -> None:
        self._hasher = FeatureHasher(["color", "size"], numeric={"price": 0.01}, bits=6)
        self._model = LogisticRegression(64, optimizer=FTRL(0.3, 0.1))

    def process(self, record: dict[str, Any], out: Output) -> None:
        rows = self._hasher.rows([record])
        predicted = self._model.predict_probability(rows)
        self._model.learn_each(rows, [record["bought"]], [1.5])
        out.emit((predicted, self._model.weights.copy()))

    def snapshot(self) -> Any:
        return self._model.state()

    def restore(self, state: Any) -> None:
        self._model.restore(state)


def hashed_features(flow: Flow) -> Stream:
    colors, sizes = ["red", "green", None], [3, "3", 4.5, 1]
    records = [{"color": colors[n % 3], "size": sizes[n % 4], "price": 10.0 * n, "bought": n % 2} for n in range(8)]
    return fed(flow, records).process(HashesAndLearns, name="learn")


class Scales(Operator):
    """Feeds a scaler, and emits its parameters."""

    def __init__(self) -> None:
        self._scaler = StandardScaler()

    def process_batch(self, batch: Any, out: Output) -> None:
        self._scaler.learn(batch)
        out.emit(self._scaler.parameters())

    def snapshot(self) -> Any:
        return self._scaler.state()

    def restore(self, state: Any) -> None:
        self._scaler.restore(state)


def scaler(flow: Flow) -> Stream:
    return fed(flow, table(9)["x"], batch=2).process(Scales, name="scale")


class Clusters(Operator):
    """Feeds online centroids, and emits each update."""

    def __init__(self) -> None:
        self._model = OnlineKMeans(2, decay=0.9, seed=3)

    def process(self, batch: Any, out: Output) -> None:
        self._model.learn(batch)
        out.emit(self._model.to_update())

    def snapshot(self) -> Any:
        return self._model.state()

    def restore(self, state: Any) -> None:
        self._model.restore(state)


def online_centroids(flow: Flow) -> Stream:
    return fed(flow, table(14)["x"]).batch(4).process(Clusters, name="clusters")


def validation(kind: str, flow: Flow) -> Stream:
    return validated(kind, flow, report_every_s=None)


def validation_in_time(kind: str, flow: Flow) -> Stream:
    return validated(kind, flow, report_every_s=0.5)


def validated(kind: str, flow: Flow, *, report_every_s: float | None) -> Stream:
    rows = table(12)
    chance = 1 / (1 + np.exp(-rows["x"][:, 0]))
    records = [
        {
            "task": kind,
            "predictions": chance[n : n + 2],
            "targets": rows["y"][n : n + 2],
            "weights": rows["weight"][n : n + 2],
            "classes": np.array([n % 3, 1]),
        }
        for n in range(0, 12, 2)
    ]
    make = functools.partial(Validate, window=5, report_every=3, report_every_s=report_every_s)
    return fed(flow, records).process(make, name="validate")


_ROWS = (("dense", "sparse"), ("sparse", "dense"))

CASES = [
    # All pairs of a kind of model, an optimizer and a kind of rows; gradient descent takes dense rows only.
    *(
        Case(functools.partial(linear_model, kind, optimizer, rows), (LinearModel,), {"cuts": 3})
        for number, optimizer in enumerate(OPTIMIZERS)
        for kind, rows in zip(
            ("logistic", "linear"),
            ("dense", "dense") if optimizer == "gradient_descent" else _ROWS[number % 2],
            strict=True,
        )
    ),
    Case(hashed_features, (LinearModel,), {"cuts": 4}),
    Case(scaler, (StandardScaler,)),
    Case(online_centroids, (OnlineKMeans,), {"cuts": 6}),
    Case(
        functools.partial(validation, "classification"), (Validate, ProgressiveValidation, ScoreHistogram, Calibration)
    ),
    Case(functools.partial(validation_in_time, "regression"), (Validate, ProgressiveValidation, MeanComparison)),
    Case(functools.partial(validation, "regression"), (Validate, ProgressiveValidation, MeanComparison)),
    Case(functools.partial(validation, "classes"), (Validate, ProgressiveValidation, MeanComparison)),
]
