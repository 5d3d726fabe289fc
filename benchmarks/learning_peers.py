"""Learners with their defaults, one pass over a stream: streamiter, trees of river in its flows, river, Vowpal Wabbit.

Each learner predicts a row before it learns from it. What a learner reads is made before its clock starts: ``Columns``
for flows of streamiter, a dict for each row for river, a line of text for each row for Vowpal Wabbit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from numbers import Number
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.learning_streams import LearningStream
from benchmarks.measuring import Stopwatch, run_to_end
from streamiter import Columns, Flow
from streamiter.learn import DelayedLabels, ForeignModel, SparseRows, train_online
from streamiter.learn.losses import PROBABILITY_FLOOR
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.model_rows import RowSteps

__all__ = [
    "AMF",
    "FOREST",
    "LEARNERS",
    "LINEAR",
    "OURS",
    "TREE",
    "VALUES_OF_AMF",
    "VALUES_OF_A_FOREST",
    "Learned",
    "Learner",
    "by_row",
    "installed_learners",
    "loss",
    "losses",
]

Floats = npt.NDArray[np.float64]

OURS: Final = "streamiter"
LINEAR: Final = "streamiter, linear"
TREE: Final = "tree"
FOREST: Final = "forest"
AMF: Final = "AMF"


@dataclass(frozen=True)
class Learned:
    """What a learner made of a stream."""

    predictions: Floats
    """For each row, before it was learned from: the probability of True or of the true class, or the number; ½ before
    the first label."""
    cpu_seconds: float
    """The CPU time of this process, which other processes change less than the time by the clock."""
    accuracy: float | None = None
    """The part of the rows whose label was predicted, if the learner reports it."""


Learner = Callable[[LearningStream], Learned | None]
"""Learns a stream; None for a stream that it does not take."""


def losses(stream: LearningStream, predictions: Floats) -> Floats:
    """Return the log loss or the squared error of each row that is answered."""
    counts = stream.answered
    predicted, labels = predictions[counts], stream.labels[counts]
    if stream.task == "number":
        return np.square(predicted - labels)
    right = np.where(labels, predicted, 1.0 - predicted) if stream.task == "binary" else predicted
    return -np.log(np.clip(right, PROBABILITY_FLOOR, 1.0))


def loss(stream: LearningStream, of_rows: Floats) -> float:
    """Return the mean log loss, or the root of the mean squared error."""
    mean = float(of_rows.mean())
    return mean**0.5 if stream.task == "number" else mean


# ---- streamiter


def ours(stream: LearningStream, *, shapes: bool = True) -> Learned:
    """Learn with ``train_online``, which gets label and features and no other argument but ``shapes``.

    The flow reports mean losses only. The predictions are those of the same model without a flow, and their mean loss
    must be the one that the flow reported.
    """
    records, arguments = _arguments(stream)
    flow = Flow("stream")
    reports = train_online(flow.from_items(records), **arguments, shapes=shapes).validation.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    predictions = without_flow(stream, shapes=shapes)
    if stream.task != "number":  # As the flow counts rows before the first label.
        predictions = np.where(np.isnan(predictions), 0.5, predictions)
    accuracy = None
    for report in reports.items[-1:]:
        _check_reported(stream, report, predictions)
        accuracy = report.get("accuracy")
    # Other learners predict 0 before the first number.
    return Learned(np.nan_to_num(predictions), watch.cpu_seconds, accuracy)


def _check_reported(stream: LearningStream, report: Mapping[str, float], predictions: Floats) -> None:
    """Raise AssertionError unless the flow reports the loss of these predictions; it counts no unknown number."""
    reported = report["rmse" if stream.task == "number" else "loss"]
    of_rows = losses(stream, predictions)
    found = loss(stream, of_rows[~np.isnan(of_rows)])
    if not np.isclose(reported, found, rtol=1e-9):
        raise AssertionError(
            f"{stream.name}: expected the same loss with and without a flow, given {reported} and {found}"
        )


def _arguments(stream: LearningStream) -> tuple[Columns, dict[str, Any]]:
    """Return the records of a flow, and the arguments of ``train_online``."""
    features = stream.features
    if stream.events is not None:
        return _questions_and_answers(stream)
    # A first label of 0 or 1 is taken for a truth value.
    task = {"task": "regression"} if stream.task == "number" and stream.labels[0] in (0, 1) else {}
    if isinstance(features, SparseRows):
        records = Columns({"row": np.arange(len(stream)), "label": stream.labels})
        return records, {"label": "label", "features": lambda mini_batch: features[mini_batch["row"]]}
    return Columns({**features.arrays, "label": stream.labels}), {"label": "label"} | task


def _questions_and_answers(stream: LearningStream) -> tuple[Columns, dict[str, Any]]:
    assert stream.events is not None
    assert isinstance(stream.features, Columns)
    rows, is_answer = stream.events // 2, stream.events % 2 == 1
    records = Columns({**stream.features[rows].arrays, "row": rows, "answer": is_answer, "label": stream.labels[rows]})
    labels = DelayedLabels(
        key_of=itemgetter("row"),
        is_answer=itemgetter("answer"),
        features=stream.features.names,
        target_of=itemgetter("label"),
    )
    return records, {"labels": labels}


def without_flow(stream: LearningStream, *, shapes: bool = True, rates: Sequence[float] | None = None) -> Floats:
    task: Any = "regression" if stream.task == "number" else None
    model = AdaptiveLinearModel(task=task, shapes=shapes, rates=rates)
    rows = model.rows(stream.features)
    if stream.events is None:
        steps = RowSteps.one_each(len(stream), learns=True)
    else:
        is_answer = stream.events % 2 == 1
        rows_of_steps, counted = stream.events // 2, np.ones(len(is_answer))
        steps = RowSteps(rows_of_steps, ~is_answer, is_answer, counted, questions=rows_of_steps)
    found = model.step(rows, steps, stream.labels[steps.rows])
    if stream.task == "classes":
        return _of_true_classes(found, model.labels.targets(stream.labels))
    predictions = np.full(len(stream), np.nan)
    predictions[steps.rows[steps.predicts]] = found[steps.predicts]
    return predictions


def _of_true_classes(probabilities: Floats, targets: Floats) -> Floats:
    """Return the probability of each row's class; a class that had not come yet has the one of the last column."""
    if probabilities.ndim == 1:
        return np.where(targets == 1.0, probabilities, 1.0 - probabilities)
    found: Floats = probabilities[np.arange(len(targets)), targets.astype(np.intp)]
    return np.where(found > 0.0, found, probabilities[:, -1])


# ---- trees of river in a flow of streamiter

VALUES_OF_A_FOREST: Final = 400_000
VALUES_OF_AMF: Final = 100_000


def tree(stream: LearningStream) -> Learned | None:
    """Learn with the Hoeffding adaptive tree of river in a flow; None where labels come later."""
    from river.tree import HoeffdingAdaptiveTreeClassifier, HoeffdingAdaptiveTreeRegressor

    return _in_flow(stream, HoeffdingAdaptiveTreeClassifier, HoeffdingAdaptiveTreeRegressor)


def forest(stream: LearningStream) -> Learned | None:
    """Learn with the adaptive random forest of river in a flow; None for a long stream, which takes too much time."""
    from river.forest import ARFClassifier, ARFRegressor

    is_long = len(stream) * stream.columns > VALUES_OF_A_FOREST
    return None if is_long else _in_flow(stream, ARFClassifier, ARFRegressor)


def _in_flow(stream: LearningStream, classifier: Callable[..., Any], regressor: Callable[..., Any]) -> Learned | None:
    if stream.events is not None:
        return None
    from river.compose import SelectType
    from river.preprocessing import OneHotEncoder, StandardScaler

    def make() -> Any:
        if stream.task != "number":
            return classifier(seed=1)
        # Regression trees have linear models in their leaves, which refuse texts, and diverge on large numbers.
        encoder = SelectType(str) | OneHotEncoder(drop_zeros=True)
        return (encoder + (SelectType(Number) | StandardScaler())) | regressor(seed=1)

    model = ForeignModel.of_river(make, save=pickle.dumps, load=pickle.loads)
    features = stream.features
    records, arguments = _arguments(stream)
    if isinstance(features, SparseRows):
        # A feature that is absent is missing for a tree, and has no branch of its own.
        arguments["features"] = lambda mini_batch: [
            dict(enumerate(row)) for row in features[mini_batch["row"]].to_dense().tolist()
        ]
    flow = Flow("stream")
    training = train_online(flow.from_items(records), model, **arguments)
    reports, predicted = training.validation.collect(), training.predictions.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    # The first row is not predicted. A class that has not come yet is scored as if all classes were equally probable.
    of_rows = np.concatenate([[0.5], *(rows["predictions"] for rows in predicted.items)])
    if stream.task == "classes":
        classes, firsts = np.unique(stream.labels, return_index=True)
        of_rows[firsts] = 1.0 / len(classes)
    return Learned(of_rows, watch.cpu_seconds, reports.items[-1].get("accuracy"))


# ---- the peers, row by row


class RowLearner(Protocol):
    """Predicts and learns single rows, by their number in the stream."""

    def predict(self, row: int) -> float:
        """Return the probability of True or of the true class, or the number."""
        ...

    def learn(self, row: int) -> None:
        """Learn from the row."""
        ...

    def predict_and_learn(self, row: int) -> float:
        """Return the prediction for the row from before it is learned from."""
        ...


def by_row(stream: LearningStream, learner: RowLearner) -> Learned:
    """Predict and learn in the order of the stream."""
    predictions = np.full(len(stream), np.nan)
    with Stopwatch() as watch:
        if stream.events is None:
            for row in range(len(stream)):
                predictions[row] = learner.predict_and_learn(row)
        else:
            for event in stream.events.tolist():
                row, is_answer = divmod(event, 2)
                if is_answer:
                    learner.learn(row)
                else:
                    predictions[row] = learner.predict(row)
    return Learned(predictions, watch.cpu_seconds)


def river(stream: LearningStream) -> Learned:
    """Learn with the linear model of river for the task, behind its ``StandardScaler`` and ``OneHotEncoder``."""
    return by_row(stream, River(stream))


def aggregated_mondrian_forest(stream: LearningStream) -> Learned | None:
    """Learn with the aggregated Mondrian forest of river, behind the same encoders; None for a long stream.

    Each row adds nodes to its trees for ever.
    """
    from river.forest import AMFClassifier, AMFRegressor

    if len(stream) * stream.columns > VALUES_OF_AMF:
        return None
    return by_row(stream, River(stream, AMFRegressor(seed=1) if stream.task == "number" else AMFClassifier(seed=1)))


class River:
    """A model of river behind its encoders; None: the linear model for the task."""

    def __init__(self, stream: LearningStream, model: Any = None) -> None:
        from river import compose, linear_model, preprocessing

        self._rows, texts = _dicts(stream)
        self._labels = stream.labels.tolist()
        self._classes = len(set(self._labels))
        self._task = stream.task
        linear = {
            "binary": linear_model.LogisticRegression,
            "classes": linear_model.SoftmaxRegression,
            "number": linear_model.LinearRegression,
        }[stream.task]
        learner = linear() if model is None else model
        scaler = preprocessing.StandardScaler()
        # Zeros left out change no number of a linear model: a zero moves no weight. A forest splits at them.
        encoder = compose.Select(*texts) | preprocessing.OneHotEncoder(drop_zeros=model is None)
        if isinstance(stream.features, SparseRows):
            if model is not None:
                self._rows = [dict(enumerate(row)) for row in stream.features.to_dense().tolist()]
            self._model: Any = learner
        elif not texts:
            self._model = scaler | learner
        elif len(texts) == stream.columns:
            self._model = encoder | learner
        else:
            self._model = ((compose.Discard(*texts) | scaler) + encoder) | learner

    def predict(self, row: int) -> float:
        if self._task == "number":
            return float(self._model.predict_one(self._rows[row]) or 0.0)
        probabilities = self._model.predict_proba_one(self._rows[row])
        if self._task == "binary":
            # A forest knows no class before the first row, and one after it.
            return float(probabilities.get(True, 0.0 if probabilities else 0.5))
        # A class that has not come yet is scored as if all classes were equally probable.
        return float(probabilities.get(self._labels[row], 1.0 / self._classes))

    def learn(self, row: int) -> None:
        self._model.learn_one(self._rows[row], self._labels[row])

    def learn_weighted(self, row: int, *, label: bool, weight: float, is_new: bool) -> None:
        """Learn the label of a row with a weight; the scaler counts a row only if it is new."""
        if is_new:
            self._model.learn_one(self._rows[row], label, w=weight)
        else:
            self._model[-1].learn_one(self._model.transform_one(self._rows[row]), label, w=weight)

    def predict_and_learn(self, row: int) -> float:
        prediction = self.predict(row)
        self.learn(row)
        return prediction


def _dicts(stream: LearningStream) -> tuple[list[dict[Any, Any]], list[str]]:
    """Return a dict for each row, and the fields with texts."""
    features = stream.features
    if isinstance(features, SparseRows):
        return [dict(zip(*row, strict=True)) for row in features.rows()], []
    texts = [name for name in features.names if features[name].dtype.kind == "U"]
    columns = [array.tolist() for array in features.arrays.values()]
    return [dict(zip(features.names, row, strict=True)) for row in zip(*columns, strict=True)], texts


def vowpal_wabbit(arguments: str) -> Learner:
    """Return a learner with the arguments of Vowpal Wabbit besides the loss."""
    return lambda stream: by_row(stream, _VowpalWabbit(stream, arguments))


class _VowpalWabbit:
    def __init__(self, stream: LearningStream, arguments: str) -> None:
        from vowpalwabbit import Workspace

        labels = stream.labels.tolist()
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels), start=1)}
        named: Callable[[Any], str]
        if stream.task == "binary":
            task, named = "--loss_function logistic --link logistic", lambda label: "1" if label else "-1"
        elif stream.task == "classes":
            task = f"--loss_function logistic --oaa {len(numbers)} --probabilities"
            named = lambda label: str(numbers[label])  # noqa: E731
        else:
            task, named = "--loss_function squared", repr
        self._workspace = Workspace(f"--quiet {task} {arguments}")
        self._kind = self._workspace.get_prediction_type()
        self._class_of = [numbers[label] - 1 for label in labels] if stream.task == "classes" else None
        self._questions = _lines(stream)
        self._answers = [f"{named(label)} {line}" for label, line in zip(labels, self._questions, strict=True)]

    def predict(self, row: int) -> float:
        return self._of_row(row, self._workspace.predict(self._questions[row]))

    def learn(self, row: int) -> None:
        self._workspace.learn(self._answers[row])

    def predict_and_learn(self, row: int) -> float:
        # The prediction that an example has after it was learned from is the one from before.
        example = self._workspace.example(self._answers[row])
        self._workspace.learn(example)
        prediction = example.get_prediction(self._kind)
        self._workspace.finish_example(example)
        return self._of_row(row, prediction)

    def _of_row(self, row: int, prediction: Any) -> float:
        return float(prediction if self._class_of is None else prediction[self._class_of[row]])


def _lines(stream: LearningStream) -> list[str]:
    """Return each row in the text format of Vowpal Wabbit; a text is a feature of value 1."""
    rows, texts = _dicts(stream)
    names = {name: str(name).translate(_RESERVED) for row in rows[:1] for name in row}
    if isinstance(stream.features, SparseRows):
        return ["| " + " ".join(f"{name}:{value!r}" for name, value in row.items()) for row in rows]
    is_text = set(texts)
    return [
        "| "
        + " ".join(
            f"{names[name]}={value.translate(_RESERVED)}" if name in is_text else f"{names[name]}:{value!r}"
            for name, value in row.items()
        )
        for row in rows
    ]


# Spaces, colons and bars separate features.
_RESERVED: Final = str.maketrans({" ": "_", ":": "_", "|": "_"})

LEARNERS: Final[Mapping[str, Learner]] = MappingProxyType(
    {
        OURS: ours,
        LINEAR: partial(ours, shapes=False),
        "river": river,
        "VW": vowpal_wabbit(""),
        "VW --coin": vowpal_wabbit("--coin"),
        "VW --ftrl": vowpal_wabbit("--ftrl"),
        TREE: tree,
        FOREST: forest,
        AMF: aggregated_mondrian_forest,
    }
)


def installed_learners() -> dict[str, Learner]:
    """Return the learners whose packages are installed."""
    return {
        name: learner
        for name, learner in LEARNERS.items()
        if name in (OURS, LINEAR) or find_spec("vowpalwabbit" if name.startswith("VW") else "river") is not None
    }
