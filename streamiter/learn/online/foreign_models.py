"""Models of other libraries in a flow: river, scikit-learn, PyTorch, or functions of your own.

A :class:`ForeignModel` says how to make, teach, ask, save and load such a model. ``train_online`` then trains it like
its own models. The model is in one subtask, the owner, which predicts each row or mini-batch before the model learns
from it, publishes versions, and puts the model into checkpoints. The engine never pickles: ``save`` and ``load`` are
functions of the other library, or your choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Generic, Literal, TypeVar

import numpy as np

from streamiter.errors import ConfigurationError, ModelError, did_you_mean, shortened
from streamiter.learn.labels import Label, is_truth
from streamiter.learn.model_owner import ModelOwner, OwnerOptions
from streamiter.learn.quality.validation import PredictedRows, ValidationKind
from streamiter.learn.ready_made.label_fields import FieldsBefore, LabelFields
from streamiter.learn.ready_made.row_reading import UnnamedFields, values_of
from streamiter.learn.rows import BadRows, blaming_rows, of_numbered_rows, row_weights
from streamiter.models.documents import Parameters, state_in
from streamiter.operators.declared_state import NESTED, DeclaredState, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.numbers import Floats, Indices, plain_scalar
from streamiter.values.records import Batch, Columns

Model = TypeVar("Model")

_NAME: Final = "ForeignModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel(Generic[Model]):
    """How to make, teach, ask, save and load a model of another library.

    With ``by="row"`` the functions are called for one row after the other, and quality does not depend on mini-batches:
    ``predict(model, features)``, then ``learn(model, features, label)``. With ``by="mini-batch"`` they are called with
    the features and labels of a whole mini-batch. Where ``train_online`` has a ``weight``, ``learn`` has the weight, or
    the weights, as a fourth argument; a single row of weight 0 is predicted only.

    ``predict`` returns for each row a probability of True, a mapping from labels to probabilities, or a label
    (``task="classification"``), or a number (``task="regression"``). It is not called before the model has learned
    once, since many libraries refuse that.

    ``save(model)`` returns bytes that ``load`` turns into an equal model; they are in each checkpoint and in each
    published version. Load only bytes that you trust if they are a pickle. For river, :meth:`of_river` has the other
    functions.

    >>> from streamiter import Flow
    >>> mean = ForeignModel(
    ...     make=lambda: [0.0, 0],
    ...     learn=lambda model, features, label: model.__setitem__(slice(None), [model[0] + label, model[1] + 1]),
    ...     predict=lambda model, features: model[0] / model[1],
    ...     save=lambda model: repr(model).encode(),
    ...     load=lambda data: [float(number) for number in data.decode()[1:-1].split(",")],
    ...     task="regression",
    ... )
    >>> from streamiter.learn import train_online
    >>> flow = Flow("mean")
    >>> rows = flow.from_items([{"x": 1.0, "y": 2.0}, {"x": 2.0, "y": 4.0}, {"x": 3.0, "y": 3.0}])
    >>> training = train_online(rows, mean, label="y")
    >>> models, quality = training.models.collect(), training.validation.collect()
    >>> flow.run().state, quality.items[-1]["squared_error"], mean.predictor(models.items[-1].parameters)({"x": 4.0})
    ('finished', 2.0, 3.0)
    """

    make: Callable[[], Model]
    learn: Callable[..., object]
    predict: Callable[[Model, Any], Any]
    save: Callable[[Model], bytes]
    load: Callable[[bytes], Model]
    task: Literal["classification", "regression"]
    by: Literal["row", "mini-batch"] = "row"

    @staticmethod
    def of_river(
        make: Callable[[], Any], *, save: Callable[[Any], bytes], load: Callable[[bytes], Any]
    ) -> ForeignModel[Any]:
        """Return a classifier or regressor of river, or a pipeline that ends in one, as ``make()`` makes it.

        It learns row by row. Missing values, which are None or NaN, are left out of its rows. A classifier predicts a
        probability for each label. A weight is the argument ``w`` of ``learn_one``, which forests of river ignore.
        River has no format of its own to save models in: ``save=pickle.dumps, load=pickle.loads`` is a choice for
        bytes that you trust.

        Raises ModelError if ``make()`` is none of these.
        """
        made = make()
        last = list(made.steps.values())[-1] if hasattr(made, "steps") else made
        if not (hasattr(last, "learn_one") and hasattr(last, "predict_one")):
            raise ModelError(
                f"{_NAME}.of_river(make=): expected a function that makes a classifier or a regressor of river, given "
                f"one that makes {shortened(last)}; for other models give the functions to {_NAME}"
            )
        is_classifier = hasattr(last, "predict_proba_one")

        return ForeignModel(
            make=make,
            learn=_learn_in_river,
            predict=_classify_in_river if is_classifier else _predict_in_river,
            save=save,
            load=load,
            task="classification" if is_classifier else "regression",
        )

    def predictor(self, parameters: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Return the function that predicts with a published version: ``ServedModel(…, load=model.predictor)``.

        Like ``predict`` it takes the features of a row, or of a mini-batch.
        """
        return partial(self.predict, self.load(_bytes_of(parameters)))


# Functions of a module, so that a ForeignModel can be pickled.


def _learn_in_river(model: Any, features: Mapping[str, Any], label: Any, *weight: float) -> None:
    named = {"w": weight[0]} if weight else {}
    model.learn_one(_without_missing(features), label, **named)


def _classify_in_river(model: Any, features: Mapping[str, Any]) -> Any:
    return model.predict_proba_one(_without_missing(features))


def _predict_in_river(model: Any, features: Mapping[str, Any]) -> Any:
    return model.predict_one(_without_missing(features))


def _without_missing(features: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in features.items() if value is not None and value == value}


def _bytes_of(parameters: Parameters | Mapping[str, Any]) -> bytes:
    saved = parameters.get("saved") if isinstance(parameters, Mapping) else None
    if not isinstance(saved, np.ndarray) or saved.dtype != np.uint8:
        raise ModelError(
            f"{_NAME}: expected the parameters of a published {_NAME}, given {shortened(parameters)}; follow the model "
            "that train_online published"
        )
    return saved.tobytes()


# ---- reading rows

ReadForeign = Callable[[Batch], tuple[Sequence[Any], list[Any], Floats | None]]
"""Returns features, labels and weights of a mini-batch; raises ``BadRows`` for records that are no rows."""


def fields_of(mini_batch: Batch, fields: Sequence[str] | None, without: Sequence[str]) -> list[dict[str, Any]]:
    """Return the features of each record as a dict of plain values, as river reads them.

    Raises ``BadRows`` for records without named fields, and ConfigurationError for ``Columns`` without the ``fields``.
    """
    if isinstance(mini_batch, Columns) and (absent := [name for name in fields or () if name not in mini_batch]):
        raise ConfigurationError(
            f"{_NAME}: expected the fields {', '.join(map(repr, fields or ()))}, given Columns without "
            f"{', '.join(map(repr, absent))}; they have {', '.join(map(repr, mini_batch.names))}"
            f"{did_you_mean(absent[0], mini_batch.names)}"
        )
    left_out = frozenset(without)
    features: list[dict[str, Any]] = []
    for row, record in enumerate(mini_batch):
        if not isinstance(record, Mapping):
            raise BadRows([row], f"{_NAME}: expected records with named fields, given {shortened(record)}")
        names = record if fields is None else fields
        features.append({name: plain_scalar(record[name]) for name in names if name in record and name not in left_out})
    return features


def checked_labels(labels: list[Any]) -> list[Any]:
    """Return the labels as plain values. Raises ``BadRows`` for rows without one."""
    bad = [
        row
        for row, label in enumerate(labels)
        if label is None or (isinstance(label, (float, np.floating)) and not np.isfinite(label))
    ]
    if bad:
        raise BadRows(bad, f"{_NAME}: expected a label, given {labels[bad[0]]}")
    return [plain_scalar(label) for label in labels]


def foreign_reader(
    label: str | Callable[[Any], Label],
    features: Sequence[str] | Callable[[Any], Any] | None,
    weight: str | Callable[[Any], float] | None,
    before: FieldsBefore | None,
) -> ReadForeign:
    """Return the function that reads the rows of a model of another library."""
    without = [field for field in (label, weight) if isinstance(field, str)]

    def read(mini_batch: Batch) -> tuple[Any, list[Any], Floats | None]:
        labels = checked_labels(list(values_of(mini_batch, label, "label")))
        weights = None
        if weight is not None:
            weights = row_weights("train_online", values_of(mini_batch, weight, "weight"), len(mini_batch))
        if callable(features):
            return features(mini_batch), labels, weights
        made_of = label.left_out if isinstance(label, LabelFields) else ()
        rows = fields_of(mini_batch, features, [*without, *made_of])
        if before is not None:
            before.look_at(chain.from_iterable(rows[:1]))
        return rows, labels, weights

    return read


# ---- the owner


class _Learned(DeclaredState):
    """What is known of a model besides the model, as versions carry it."""

    records = declared(0)
    may_predict = declared(False)
    """Whether the model has learned: many libraries refuse to predict before."""
    classes: dict[Any, int] = declared(
        made=dict, form=Form(list, lambda labels: {label: number for number, label in enumerate(labels)})
    )
    """The number of each class."""
    made_of: LabelFields | None = declared(None, form=NESTED)


class ForeignOwner(ModelOwner, Generic[Model]):
    """Has the model of another library: predicts and learns.

    Mini-batches are learned as they arrive: in the order of the stream, if the stream has one subtask.
    """

    learner = _NAME
    needs_epochs = False

    _read_records = declared(0)
    """The number of records, refused ones included."""
    _learned = declared(made=_Learned, form=NESTED)

    def __init__(
        self,
        model: ForeignModel[Model],
        read: ReadForeign,
        options: OwnerOptions,
        features: object = None,
        made_of: LabelFields | None = None,
    ) -> None:
        super().__init__(options)
        self._functions = model
        self._model = model.make()
        self._read = read
        self._features = features
        self._learned.made_of = made_of

    def definition(self) -> Definition:
        kind = type(self._model)
        return {**super().definition(), "model": f"{kind.__module__}.{kind.__qualname__}"}

    async def open(self, context: Context) -> None:
        self._unnamed = UnnamedFields(context.name, {"features": self._features})
        await super().open(context)

    def start_from(self, parameters: Any, records: int) -> None:
        self._model = self._functions.load(_bytes_of(parameters))
        self._learned.may_predict, self._learned.records = True, records
        if (state := state_in(parameters, _NAME, f"{_NAME}.start_from")) is not None:
            self._learned.restore(state)

    def records(self) -> int:
        return self._learned.records

    def parameters(self) -> object:
        return {"saved": np.frombuffer(self._saved(), dtype=np.uint8)}

    def state(self) -> dict[str, object]:
        return self._learned.state()

    def process_rows(self, mini_batch: Batch, out: Output) -> None:
        """Predict and learn; records that are no rows follow the policy of the step."""
        self.take_over_rollback()
        self._unnamed.look_at(mini_batch)

        def learn(records: Batch, numbers: Indices) -> None:
            features, labels, weights = blaming_rows(self._read, records, self._read)
            predictions = self._learn_rows(features, labels, weights)
            known = len(labels) - len(predictions)
            self._emit(predictions, labels[known:], None if weights is None else weights[known:], numbers[known:], out)
            self.count_step(out)

        of_numbered_rows(learn, mini_batch, self._read_records, out)
        self._read_records += len(mini_batch)

    def _learn_rows(self, features: Sequence[Any], labels: list[Any], weights: Floats | None) -> list[Any]:
        """Learn; return the predictions made before. Rows before the first learning have no predictions."""
        predict, learn = self._functions.predict, self._functions.learn
        predictions: list[Any] = []
        if self._functions.by == "mini-batch":
            if self._learned.may_predict:
                predictions = list(predict(self._model, features))
            learn(self._model, features, labels, *([] if weights is None else [weights]))
            self._learned.records += len(labels)
            self._learned.may_predict = True
            return predictions
        for row, (one, label) in enumerate(zip(features, labels, strict=True)):
            if self._learned.may_predict:
                predictions.append(predict(self._model, one))
            if weights is None:
                learn(self._model, one, label)
            elif weights[row] > 0.0:
                learn(self._model, one, label, float(weights[row]))
            else:
                continue
            self._learned.records += 1
            self._learned.may_predict = True
        return predictions

    def _emit(
        self, predictions: list[Any], labels: list[Any], weights: Floats | None, numbers: Indices, out: Output
    ) -> None:
        if not predictions:
            return
        if any(prediction is None for prediction in predictions):
            wanted = "a number" if self._functions.task == "regression" else "a probability, a mapping or a label"
            raise ConfigurationError(
                f"{_NAME}(predict=): expected {wanted} for each row, given None; return one for a row that the model "
                "does not know, too"
            )
        kind: ValidationKind = "regression"
        if self._functions.task == "regression":
            found, targets = np.array(predictions, dtype=np.float64), np.array(labels, dtype=np.float64)
        else:
            kind, found, targets = _probabilities(predictions, labels)
        given = np.ones(len(labels)) if weights is None else weights
        rows = PredictedRows(task=kind, predictions=found, targets=targets, weights=given, numbers=numbers)
        if kind == "classes":
            classes = np.array([self._number_of(label) for label in labels], dtype=np.intp)
            by_label = [_by_label(prediction) for prediction in predictions]
            by_number = [{self._number_of(label): each[label] for label in each} for each in by_label]
            probabilities = np.zeros((len(labels), len(self._learned.classes)))
            for row, each in enumerate(by_number):
                probabilities[row, list(each)] = list(each.values())
            rows |= {"classes": classes, "labels": list(self._learned.classes), "probabilities": probabilities}
        self.emit_predictions(rows, out)

    def _number_of(self, label: Any) -> int:
        """Return the number of a class; a new one gets the next."""
        return self._learned.classes.setdefault(label, len(self._learned.classes))

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"model": self._saved()}

    def _saved(self) -> bytes:
        saved = self._functions.save(self._model)
        if not isinstance(saved, bytes):
            raise ConfigurationError(
                f"{_NAME}(save=): expected bytes, given {shortened(saved)}; of a text return text.encode()"
            )
        return saved

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._model = self._functions.load(state["model"])


def _probabilities(predictions: list[Any], labels: list[Any]) -> tuple[ValidationKind, Floats, Floats]:
    """Return the kind of the predictions, the probabilities to validate, and the targets.

    Labels that are truth values have the probability of True. Other labels have the probability of the true class, and
    whether it was the most probable one. A plain label counts as a probability of 1.
    """
    if all(isinstance(prediction, (float, np.floating)) for prediction in predictions):
        if others := [label for label in labels if not is_truth(label)]:
            raise ConfigurationError(
                f"{_NAME}(predict=): expected a mapping from labels to probabilities, or a label that is no float, for "
                f"the label {others[0]!r}, given {predictions[0]!r}, which is a probability of True; return "
                "{label: probability, …}"
            )
        return "classification", np.array(predictions, dtype=np.float64), np.array(labels, dtype=np.float64)
    of_label = [_by_label(prediction) for prediction in predictions]
    if all(isinstance(label, (bool, np.bool_)) for label in labels):
        found = [_of_true(probabilities) for probabilities in of_label]
        return "classification", np.array(found), np.array(labels, dtype=np.float64)
    found = [float(probabilities.get(label, 0.0)) for probabilities, label in zip(of_label, labels, strict=True)]
    hits = [
        float(bool(probabilities) and probability >= max(probabilities.values()))
        for probabilities, probability in zip(of_label, found, strict=True)
    ]
    return "classes", np.clip(found, 0.0, 1.0), np.array(hits)


def _by_label(prediction: Any) -> Mapping[Any, float]:
    """Return the probability of each label; a plain label has the probability 1."""
    return prediction if isinstance(prediction, Mapping) else {plain_scalar(prediction): 1.0}


def _of_true(probabilities: Mapping[Any, float]) -> float:
    """Return the probability of True; a model that has seen only one label may name this label, or none."""
    if True in probabilities:
        return float(min(max(probabilities[True], 0.0), 1.0))
    return 1.0 - float(sum(probabilities.values())) if probabilities else 0.5
