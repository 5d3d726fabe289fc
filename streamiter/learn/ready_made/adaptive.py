"""``AdaptiveLinearModel``: a linear model that needs no tuning, learned row by row.

Its columns may have any scale, and its learning rates are found as the rows come; the arithmetic is in
``streamiter.learn.ready_made.row_steps``. The model also finds the columns themselves, in records with named fields,
and the task, in the first labels (``streamiter.learn.labels``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, OtherModel, shortened
from streamiter.learn.asked_questions import AskedScores
from streamiter.learn.labels import FIRST_LABELS, Label, LabelKind, LabelPart, LabelReader, Labels, LearningTask
from streamiter.learn.losses import LossName, PlainLoss, checked_loss, loss_of_validation
from streamiter.learn.ready_made.cell_columns import Categories
from streamiter.learn.ready_made.embeddings import Embeddings, check_embeddings
from streamiter.learn.ready_made.expert_weights import ExpertWeights, check_published, check_task, checked_rates, fitted
from streamiter.learn.ready_made.mixed_weights import MixedWeights
from streamiter.learn.ready_made.model_rows import ASSUMED, FirstRows, ModelRows, RowSteps
from streamiter.learn.ready_made.row_columns import AnyFeatures, RowColumns
from streamiter.learn.rows import BadRows, row_weights
from streamiter.models.documents import refused_state, state_in, with_state
from streamiter.models.explanations import Effects, Explanation
from streamiter.models.linear_predictor import LinearPredictor, probabilities_of_classes
from streamiter.models.ranking import Candidates, RankedCandidate
from streamiter.models.saved_objects import Savable
from streamiter.operators.declared_state import NESTED, Form, declared
from streamiter.operators.definitions import Definition, changes, or_another
from streamiter.values.field_kinds import Kind
from streamiter.values.helpers.notebooks import html_facts
from streamiter.values.numbers import Floats, one_of

_log = logging.getLogger("streamiter.learn")

_NAME: Final = "AdaptiveLinearModel"

# 262,144 places: among 2,000 different texts about 8 pairs share one.
_BITS: Final = 18

_POISSON: Final[PlainLoss] = ("poisson", ())

_LINKS: Final[Mapping[LabelKind, str]] = MappingProxyType(
    {"number": "clipped", "classes": "softmax", "binary": "logit"}
)

# A slope times a weight is squared.
_WEIGHT_MAX: Final = 1e30


class AdaptiveLinearModel(RowColumns, Savable):
    """A linear model for any stream: standardized columns, six learning rates side by side, mixed into one model.

    It predicts the probability of True, or of one of two labels; a probability for each of several classes; or a
    number. The first labels decide, or ``task`` says it (see :class:`~streamiter.learn.labels.LabelReader`). The kind
    of the first 1,000 labels may change: the model then learns their rows again, and says so in the log
    ``streamiter.learn``; a later label of another kind is refused. Only a third text, or class, makes a model of
    classes at any time.

    ``positive`` is the label whose probability is predicted, if there are two; None: see :attr:`positive`. ``classes``
    are the labels of all classes; None: classes are found as they come, and one more probability, the last, is for a
    class that has not come yet.

    Features are records with named fields (dicts, ``Columns`` or a table), a matrix, or ``SparseRows``.
    Numbers are standardized with the running mean and deviation of their column; texts are hashed to ``2**bits``
    places; columns of ``SparseRows`` are scaled by their root mean square. NaN, infinity and absent numbers are
    missing: they count as the mean. Rows have weights: a row of weight 2 counts about as much as two rows. A number to
    predict that is far beyond all earlier ones is learned as ten times their range, since it may be a mistake.

    ``crosses`` are pairs of fields whose effects are not simply added: of two numbers, the product of both, each
    standardized; of two texts, a feature for each pair of texts; of a text and a number, a slope for each text. The
    numbers of crosses are standardized with the statistics of all rows, whatever their weight.

    A field is what its first rows say: texts that are numbers are read as numbers, and times become hour, weekday,
    month and trend. ``kinds`` decides otherwise: ``{"zip": "category", "title": "words"}``. ``time_zone`` is the time
    zone of the hours (``"Europe/Berlin"``); None: each time has its hour in its own zone.

    ``rates`` are up to three learning rates of AdaGrad; None: three of AdaGrad and three constant ones.

    ``shapes``: the model also has tables, of bins of each column, of pairs of columns, and of random trees, so that it
    learns effects that are not linear and that depend on each other. Its prediction is a mixture of the predictions of
    the linear model and of two models with tables, weighted by their losses so far; it is hardly worse than the best of
    them. Tables have at most 128 columns, the first ones that have values: numbers, truth values, times, and texts that
    are no lists. Their memory is bounded, so with more than 17 classes of 10 columns, or 9 of 128, only columns have
    tables, and with more than 400, or 32, there are none. ``SparseRows``, and other losses than the squared one, have
    the linear model alone, as all models with ``shapes=False``, which are some seven times as fast.

    ``embeddings`` are settings of further members, which have a vector for each text of a field: they learn that this
    user likes this item. Of several classes they have a vector for each class.

    ``loss`` says what is predicted of numbers: the mean ("squared", the default), the median ("absolute"), the number
    that the share ``quantile`` of all labels is below ("quantile"), the mean hardly moved by outliers ("huber"), or the
    mean of counts, as an exponential of the sum of all effects ("poisson", for labels of 0 or more).

    ``other_settings`` says what :meth:`start_from` does with a version of other ``crosses``, ``bits`` or ``kinds``:
    refuse it, or keep what fits, with a warning in the log ``streamiter.learn``. Numbers fit, and with the same bits
    texts; a field that is read as another kind starts anew.

    A model is for one thread at a time: compiled code changes its arrays without a lock. Without Numba (``pip install
    "streamiter[fast]"``) it learns from some hundred rows a second.

    >>> model = AdaptiveLinearModel()
    >>> rows = [{"km": 900.0, "sky": "rain"}, {"km": 250.0, "sky": "sun"}] * 20
    >>> predictions = model.learn_each(rows, [True, False] * 20)
    >>> float(predictions[0]), model.predict([{"km": 800.0, "sky": "rain"}]).round(1).tolist()
    (0.5, [1.0])
    """

    rates: tuple[float, ...] | None = declared(form=Form(list, tuple))
    """The learning rates of AdaGrad; None: six rates side by side."""
    _loss: PlainLoss | None = declared(form=Form(list, lambda loss: (loss[0], tuple(loss[1]))))
    labels: LabelReader = declared(form=NESTED)
    """How labels are read."""
    _first_rows: FirstRows | None = declared(
        made=FirstRows.none, form=Form(methodcaller("state"), FirstRows.from_state)
    )
    """The rows of the first labels; None where the kind of labels is settled."""
    _records = declared(0)
    _version = declared(0)

    def __init__(
        self,
        *,
        task: LearningTask | None = None,
        classes: Sequence[Label] | None = None,
        positive: Label = None,
        crosses: Sequence[tuple[str, str]] = (),
        rates: Sequence[float] | None = None,
        bits: int = _BITS,
        kinds: Mapping[str, Kind] | None = None,
        time_zone: str | None = None,
        other_settings: Literal["refuse", "keep"] = "refuse",
        loss: LossName | None = None,
        quantile: float | None = None,
        shapes: bool = True,
        embeddings: Embeddings | None = None,
    ) -> None:
        one_of(f"{_NAME}(shapes=)", shapes, True, False)
        self.shapes = shapes
        """Whether the model sees shapes, as far as its features and its loss allow."""
        self._loss = checked_loss(_NAME, loss, quantile)
        if loss is not None and (task not in (None, "regression") or classes is not None or positive is not None):
            raise ConfigurationError(
                f"AdaptiveLinearModel(loss=): expected a loss of numbers without classes, given {loss!r}; leave it out"
            )
        least = 0.0 if self._loss == _POISSON else None
        self.labels = LabelReader(_NAME, task if loss is None else "regression", classes, positive, least)
        if embeddings is not None:
            check_embeddings(_NAME, embeddings, None if self._loss is None else loss)
        super().__init__(_NAME, bits, crosses, kinds, time_zone, embeddings, other_settings)
        self.rates = None if rates is None else checked_rates(rates)
        self.predicted_again: Floats | None = None
        """Predictions of the first rows of earlier calls, if the last step has made them again: then it was decided
        that the label of all of them is positive."""
        self._weights: ExpertWeights | None = None
        """None before the first label."""

    @property
    def records(self) -> int:
        """The number of rows learned from so far."""
        return self._records

    @property
    def version(self) -> int:
        """The number of batches learned from so far."""
        return self._version

    @property
    def columns(self) -> int:
        """The number of columns that a published version has."""
        return 0 if self._weights is None else self._weights.used

    @property
    def has_tables(self) -> bool:
        """Whether a published version has tables beside the linear model."""
        return isinstance(self._weights, MixedWeights) and bool(self._weights.members)

    @property
    def scores(self) -> int:
        """The number of probabilities, or numbers, that a prediction has; 0 before the first label."""
        return 0 if self._weights is None else self._weights.scores

    @property
    def task(self) -> LearningTask | None:
        """``"classification"`` or ``"regression"``: what is predicted; None before the first label, if not given."""
        if (reading := self.labels.reading) is not None:
            return "regression" if reading.kind == "number" else "classification"
        return "classification" if self.labels.task in ("binary", "multiclass") else self.labels.task

    @property
    def loss(self) -> PlainLoss | None:
        """The loss by which predictions of numbers are judged, as plain data; None: the squared error."""
        return loss_of_validation(self._loss)

    @property
    def classes(self) -> list[Label] | None:
        """The labels: all classes in the order of their probabilities, or two labels, the positive one last.

        None for truth values (and 0 and 1), and for numbers.
        """
        return self.labels.known

    @property
    def positive(self) -> Label:
        """The label whose probability is predicted, if there are two; None if it has not come yet, and otherwise.

        Of two numbers it is the larger number, of two texts the later text in alphabetical order: "yes" after
        "no".
        """
        reading = self.labels.reading
        return reading.names[1] if reading is not None and reading.kind == "binary" else None

    @property
    def _has_begun(self) -> bool:
        return self._weights is not None

    @property
    def _link(self) -> str:
        return _LINKS["binary" if self.labels.reading is None else self.labels.reading.kind]

    # ---- predicting and learning

    def predict(self, features: AnyFeatures) -> Floats:
        """Return the probability of True, the probabilities of the classes, or the number, for each row.

        Raises ``ModelError`` before the first label.
        """
        if self._weights is None:
            raise ModelError(f"{_NAME}: expected to have learned from a row first, given none so far")
        rows = self._rows_to_predict(features)
        steps = RowSteps.one_each(rows.length, learns=False)
        found = self._weights.step(rows, steps, np.zeros(rows.length))
        return found if self._weights.task == "classes" else found[:, 0]

    def predict_proba(self, features: AnyFeatures) -> Floats:
        """Return the probability of each class for each row, in the order of ``classes``; for truth values False, then
        True.

        If classes are found as they come, the last column is for a class that has not come yet. Raises ``ModelError``
        for a model of numbers.
        """
        return probabilities_of_classes(_NAME, self._link, lambda: self.predict(features))

    @property
    def effects(self) -> Effects | None:
        """What the columns and pairs of a model that sees shapes do to its scores; None for a linear model."""
        return LinearPredictor(self.parameters(state=False), _NAME).effects if self.shapes else None

    def explain(self, features: AnyFeatures) -> Explanation:
        """Return the score of each row as the sum of the parts of its fields, see ``LinearPredictor.explain``."""
        return LinearPredictor(self.parameters(state=False), _NAME).explain(features)

    def top_k(self, row: Mapping[str, Any], candidates: Candidates, k: int = 10) -> list[RankedCandidate]:
        """Return the ``k`` candidates with the largest predictions, see ``LinearPredictor.top_k``."""
        return LinearPredictor(self.parameters(state=False), _NAME).top_k(row, candidates, k)

    def learn(self, features: AnyFeatures, labels: Labels, sample_weights: npt.ArrayLike | None = None) -> None:
        """Learn from each row, in order."""
        self.learn_each(features, labels, sample_weights)

    def learn_each(self, features: AnyFeatures, labels: Labels, sample_weights: npt.ArrayLike | None = None) -> Floats:
        """Learn from each row, in order; return the prediction for each row before it was learned from.

        A row of weight 0 is predicted only, and before the first label numbers are predicted as 0. Raises ``BadRows``
        for labels that do not fit the task, and for values that do not fit their field; then the model has learned from
        no row.
        """
        rows = self.rows(features)
        weights = None if sample_weights is None else row_weights(_NAME, sample_weights, rows.length)
        found = self.step(rows, RowSteps.one_each(rows.length, learns=True, weights=weights), labels)
        return np.nan_to_num(found, copy=False)

    def rows(
        self, features: AnyFeatures, record_of: Callable[[int], Any] | None = None, times_ms: Floats | None = None
    ) -> ModelRows:
        """Return features by the columns of the model, to be learned from now or later; new fields get columns.

        Raises ``BadRows`` for values that do not fit their field; ``record_of`` tells the record of a row. ``times_ms``
        are the times of the rows, for embeddings that expire; those of the field ``Embeddings(time=)`` come first.
        """
        rows, new = self._rows_to_learn(features, record_of, times_ms, with_bins=self._sees_shapes)
        if self._weights is not None and new.columns:
            self._weights.add_numeric(new.columns)
        if isinstance(self._weights, MixedWeights):
            self._weights.left_out = self._numbers_of_crosses()
            self._weights.add_fields(new.fields)
        return rows

    def step(self, rows: ModelRows, steps: RowSteps, labels: Labels, asked: AskedScores | None = None) -> Floats:
        """Make these steps, in order, with a label for each step that learns; return a prediction for each step.

        ``asked`` has the experts' scores of earlier questions; it gets those of the questions of these steps. Before
        the first label predictions are NaN; for numbers that is a label of a weight above 0. Raises ``BadRows``, with
        the positions of steps, for labels that do not fit the task, and for weights above 1e30; then no step was made.
        """
        if (bad := steps.learns & ~(steps.weights <= _WEIGHT_MAX)).any():
            reason = f"expected sample weights of at most {_WEIGHT_MAX:g}, given {steps.weights[bad][0]:g}"
            raise BadRows(np.flatnonzero(bad), f"{_NAME}: {reason}")
        parts = self.labels.read(labels, steps.learns)
        questions = 1 + int(steps.questions.max(initial=-1))
        predictions = np.full(len(steps.rows), np.nan)
        self.predicted_again = None
        by_question: Floats | None = None
        for part in parts:
            before, some = self.labels.reading, steps.part(part.start, part.stop)
            is_new = before is None or not before.goes_on_in(part.reading)
            if is_new:
                predictions = self._read_labels_as(part, predictions, steps.learns)
            self.labels.take_over(part, int(np.count_nonzero(some.learns)))
            if is_new or by_question is None:
                by_question = self._scores_of(asked, questions)
            found = self._step(part, rows, some, by_question)
            if found.ndim > predictions.ndim:
                predictions = np.full((len(predictions), found.shape[1]), np.nan)
            predictions[part.start : part.stop] = found
            learns = some.learns & (some.weights > 0.0)
            if some.assumed is not None:
                learns &= some.assumed <= ASSUMED  # Later steps of a question do not count again.
            self._records += int(np.count_nonzero(learns))
            if self._first_rows is not None:
                more = self._first_rows.followed_by(rows, some, labels[part.start : part.stop], FIRST_LABELS)
                self._first_rows = None if self.labels.is_settled else more
        if by_question is not None and asked is not None:
            asked.made = by_question.reshape(questions, by_question[0].size if questions else 0)
            asked.reading = len(self.labels.earlier)
        self._crosses.keep()
        self.fields.keep()
        self._version += bool((steps.learns & (steps.weights > 0.0)).any())
        return predictions

    def _step(self, part: LabelPart, rows: ModelRows, steps: RowSteps, asked: Floats) -> Floats:
        assert self._weights is not None
        if part.reading.kind == "classes":
            is_open = self.labels.has_open_class
            return self._weights.step_classes(rows, steps, part.targets, asked, is_open=is_open)
        is_unknown = part.reading.kind == "number" and self._weights.totals[0] == 0.0
        found = self._weights.step(rows, steps, part.targets, asked)[:, 0]
        if is_unknown:
            found[steps.judges.cumsum() == steps.judges] = np.nan  # Up to the first label itself.
        return found

    def _scores_of(self, asked: AskedScores | None, questions: int) -> Floats:
        """Return the experts' scores by question; the scores of a model that read labels in another way count as 0."""
        assert self._weights is not None
        assert self.labels.reading is not None
        names, asked = self.labels.reading.names, asked or AskedScores.none()
        classes = len(names) + self.labels.has_open_class if self._weights.task == "classes" else 1
        known = np.flatnonzero((asked.readings == len(self.labels.earlier)) & (asked.counts > 0))
        by_question = self._weights.scores_of_questions(questions, max(classes, self._weights.scores))
        self._weights.fill_in_scores(by_question, asked.questions[known], asked.counts[known], asked.scores[known])
        return by_question

    def _read_labels_as(self, part: LabelPart, predictions: Floats, learns: npt.NDArray[np.bool_]) -> Floats:
        """Learn from labels that are read as in this part; return the earlier predictions in the same form.

        The first rows are learned again. If another label is positive now, they are predicted again, too, so that all
        predictions are as if the model had known it from the start.
        """
        reading, before, first, weights = part.reading, self.labels.given_up, self._first_rows, self._weights
        if before is not None and (first is None or self.labels.count >= FIRST_LABELS):
            assert self._weights is not None
            self._weights = self._weights.as_classes(self._records)
            first = None
        else:
            scores = len(reading.names) if reading.kind == "classes" and not self.labels.has_open_class else 1
            self._weights = self._new_weights(reading.kind, scores)
            self._weights.add_numeric(len(self.fields.columns))
        if before is None:
            return predictions
        predictions = reading.in_terms_of(before, predictions)
        if self.predicted_again is not None:
            self.predicted_again = reading.in_terms_of(before, self.predicted_again)
        if first is not None:
            every = RowSteps.one_each(first.rows.length, learns=True, weights=first.weights)
            targets = reading.targets(first.labels, every.learns)
            assert targets is not None
            classes = len(reading.names) + 1 if reading.kind == "classes" else 1
            asked = self._weights.scores_of_questions(0, classes)
            again = self._step(LabelPart(0, len(targets), reading, targets), first.rows, every, asked)
            assert weights is not None
            self._weights.is_judged = weights.is_judged  # The rows were learned at once only now.
            if reading.kind == "binary":
                own = np.flatnonzero(learns[: part.start])
                earlier = len(again) - len(own)
                predictions[own], self.predicted_again = again[earlier:], again[:earlier]
        return predictions

    def raise_rates(self) -> None:
        """Multiply the learning rates of AdaGrad, which become smaller with each row, by almost 6, after a drift."""
        if self._weights is not None:
            self._weights.raise_rates()

    @property
    def _sees_shapes(self) -> bool:
        """Whether there are tables: rows have named fields, or are a matrix, and numbers have the squared loss."""
        return self.shapes and self._loss is None and self._sparse_width is None

    def _new_weights(self, kind: LabelKind, scores: int, hashed: int | None = None) -> ExpertWeights:
        places = self._places if hashed is None else hashed
        if self._sees_shapes or self.embeddings is not None:
            options: dict[str, Any] = {"shapes": self._sees_shapes, "embeddings": self.embeddings}
            weights = MixedWeights(kind, scores, places, self.rates, self._categories, **options)
            weights.left_out = self._numbers_of_crosses()
            weights.add_fields(len(self._field_numbers.names))
            return weights
        return ExpertWeights(kind, scores, places, self.rates, self._loss)

    def compile(self) -> None:
        """Compile the arithmetic, where that is needed; it takes some seconds."""
        weights = self._new_weights("binary", 1, 1)
        weights.add_numeric(1)
        row = ModelRows(np.array([0, 1]), np.array([2 if self.embeddings is None else self._hashed + 1]), np.ones(1))
        weights.step(row, RowSteps.one_each(1, learns=True), np.zeros(1))

    # ---- publishing and state

    def _repr_html_(self) -> str:
        """Return a table of the model, for notebooks."""
        names = ("task", "classes", "columns", "records", "version")
        return html_facts(type(self).__name__, {name: getattr(self, name) for name in names})

    def parameters(self, *, state: bool = True) -> dict[str, Any]:
        """Return the one linear model that is served: weights by field and place, centers, limits, intercept, link.

        They also have the state that :meth:`start_from` needs to continue exactly. Without ``state`` they have about a
        third of the bytes, which is enough to predict.
        """
        if self._weights is None:
            raise ModelError(f"{_NAME}: expected to have learned from a row first, given none so far")
        published = self._weights.published() | {
            **self._published_columns(),
            "link": "log" if self._loss == _POISSON else self._link,
        }
        dead = self.fields.dead_columns()
        if isinstance(self._weights, MixedWeights):
            shapes = self._weights.shapes(list(self.fields.columns), dead, published["places"])
            published |= {} if shapes is None else {"shapes": shapes.published()}
            vectors = self._weights.vectors(self._field_numbers.names, dead)
            published |= {} if vectors is None else {"embeddings": vectors}
        if dead:
            published |= {name: np.delete(published[name], dead, axis=0) for name in ("weights", "center", "limit")}
        reading = self.labels.reading
        if self._weights.task == "number":
            lowest, highest = self._weights.range_of_predictions()
            if self._loss is not None:
                name, levels = self._loss
                published |= {"loss": name} | ({"quantile": levels[0]} if levels else {})
            published |= {"lowest": float(lowest), "highest": float(highest)}
        elif reading is not None and reading.labels is not None:
            published["classes"] = list(reading.names)
        return with_state(published, _NAME, {"model": self.state()}) if state else published

    def start_from(self, parameters: Mapping[str, Any], *, records: int = 0) -> None:
        """Continue from published parameters: exactly, from the state that they carry.

        Without a state the model learns with new learning rates, and ``records`` rows were learned from already.
        Raises ``ModelError`` if the model has learned already, for parameters that no such model has published, and for
        a state that does not fit: leave the parameter ``state`` out to start without it.
        """
        link = parameters.get("link", "") if isinstance(parameters, Mapping) else ""
        kind = ({link: kind for kind, link in _LINKS.items()} | {"log": "number"}).get(link)
        if kind is None or not {"weights", "center", "limit", "places", "fields", "text_fields"} <= parameters.keys():
            given = sorted(parameters) if isinstance(parameters, Mapping) else shortened(parameters)
            raise OtherModel(f"{_NAME}.start_from: expected the parameters of a published {_NAME}, given {given}")
        if self._weights is not None:
            raise ModelError(f"{_NAME}.start_from: expected a new model, given one that has learned already")
        loss: Any = parameters.get("loss"), parameters.get("quantile")
        if loss != (self._loss and self._loss[0], self._loss and next(iter(self._loss[1]), None)):
            raise OtherModel(
                f"{_NAME}.start_from: expected parameters of a model with the same loss, given {loss}; make the model "
                f"with loss={loss[0]!r}, quantile={loss[1]!r}"
            )
        self._check_bits(parameters["bits"])
        check_published(f"{_NAME}.start_from", parameters, 2 ** parameters["bits"])
        check_task(f"{_NAME}.start_from", kind, self.task)
        carried = state_in(parameters, _NAME, f"{_NAME}.start_from")
        state, crosses = carried and carried["model"], [tuple(cross) for cross in parameters.get("crosses", ())]
        if self._keeps and (parameters["bits"], crosses) != (self.bits, list(self._crosses.crosses)):
            parameters, state, told = fitted(parameters, state, self._crosses.crosses, self.bits)
            _log.warning("%s starts from a version of other settings: %s", _NAME, told)
        if state is not None:
            self._resume(state, parameters)
            return
        self._say_what_is_left(parameters)
        parameters = self._start_columns_from(parameters)
        self._records = records
        scores = np.shape(parameters["weights"])[1] if kind == "classes" else 1
        classes = parameters.get("classes")
        self.labels.start_from(kind, classes, has_open_class=scores > len(classes or ()))
        self._first_rows = None
        self._weights = self._new_weights(kind, scores)
        self._weights.add_numeric(len(self.fields.columns))
        self._weights.start_from(parameters)

    def _resume(self, state: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        """Restore the state of a version, unless it is the state of other weights."""
        try:
            self.restore(state)
            learner = self if self.fields.has_settings_of(state["fields"]) else self._earlier(state)
            own = learner.parameters(state=False)
            other = [
                name for name in ("weights", "intercept", "places") if not np.array_equal(own[name], parameters[name])
            ]
        except (ModelError, LookupError, TypeError, ValueError) as error:
            raise refused_state(f"{_NAME}.start_from", error) from error
        if other:
            raise refused_state(f"{_NAME}.start_from", f"it is the state of other {other[0]}; use another version")

    def _say_what_is_left(self, given: Mapping[str, Any]) -> None:
        """Warn of members of an earlier model that this one is without; ``given`` has an entry for each kind."""
        own = {"shapes": self._sees_shapes, "embeddings": self.embeddings is not None}
        if left := [f"{name}=" for name, has in own.items() if name in given and not has]:
            message = "%s: the earlier model had %s, and this one is without; the other members resume"
            _log.warning(message, _NAME, " and ".join(left))

    def state(self, *, frozen: bool = False) -> dict[str, object]:
        """Return a copy of everything the model has learned, as plain data.

        If it is ``frozen``, for a checkpoint, a large table of embeddings is a ``Deferred`` piece in it.
        """
        if isinstance(self._weights, MixedWeights):
            return self._without_weights() | {"weights": self._weights.state(frozen=frozen)}
        return self._without_weights() | {"weights": None if self._weights is None else self._weights.state()}

    def _without_weights(self) -> dict[str, object]:
        embeddings = None if self.embeddings is None else self.embeddings.definition()
        return super().state() | {"embeddings": embeddings}

    def adopt(self, state: Mapping[str, Any]) -> Callable[[int], int | None] | None:
        """Restore a :meth:`state`; with ``other_settings="keep"`` only the parts that fit the other settings.

        Then return the function :meth:`columns_from` that model.
        """
        crosses = [(first, second) for first, second in state["crosses"]["crosses"]]
        if not self._keeps or (state["bits"], crosses) == (self.bits, list(self._crosses.crosses)):
            self.restore(state)
            weights = state["weights"]
            if (state.get("embeddings") is None) != (self.embeddings is None):
                return self.columns_from(self._earlier(state))
            own = self.embeddings and self.embeddings.definition()
            has_members = ("shapes" in (weights or ())) == self._sees_shapes and state.get("embeddings") == own
            # Questions that wait have scores of other members.
            return None if weights is None or has_members else lambda index: index
        earlier = self._earlier(state)
        if earlier._weights is not None:
            self.start_from(earlier.parameters())
        return self.columns_from(earlier)

    def _earlier(self, state: Mapping[str, Any]) -> AdaptiveLinearModel:
        """Return the model of a state, with its settings."""
        crosses = [(first, second) for first, second in state["crosses"]["crosses"]]
        options = {"kinds": state["fields"]["kinds"], "time_zone": state["fields"]["time zone"]}
        if (loss := state["loss"]) is not None:
            options |= {"loss": loss[0], "quantile": next(iter(loss[1]), None)}
        if (given := state.get("embeddings")) is not None:
            hidden = given["units"] or Embeddings.hidden
            own = self.embeddings or Embeddings()
            options["embeddings"] = replace(own, kind=given["kind"], factors=given["factors"], hidden=hidden)
        earlier = AdaptiveLinearModel(bits=state["bits"], crosses=crosses, rates=state["rates"], **options)
        earlier.restore(state)
        return earlier

    def definition(self) -> Definition:
        """Return the settings on which the state depends; ``other_settings="keep"`` adapts some of them."""
        adapted = ("bits", "crosses", "kinds", "time_zone") if self._keeps else ()
        return {**self.labels.definition(), **self._settings(adapted)}

    def _settings(self, adapted: Sequence[str]) -> Definition:
        settings = _settings_of(self._without_weights())
        return settings | {name: or_another(settings[name]) for name in adapted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state`. Raises ``ModelError`` for the state of a model with other settings."""
        if changed := changes(_settings_of(state), self._settings(("kinds", "time_zone") if self._keeps else ())):
            raise OtherModel(
                f"{_NAME}.restore: expected the state of a model with the same settings, given another one: "
                f"{', '.join(changed)}; make the model with these settings"
            )
        stored, given = state["weights"], state.get("embeddings")
        if self.embeddings is not None and given is not None:
            fits = self.embeddings.fit(f"{_NAME}.restore", given, keeps=self._keeps)
            if not fits and stored is not None:
                stored = {name: value for name, value in stored.items() if name != "embeddings"}
        super().restore({"categories": Categories().state(), "field numbers": [], **state})
        if (given is None) != (self.embeddings is None):
            self._first_rows = None  # They have other columns.
        self._weights = None
        if stored is not None:
            self._say_what_is_left(stored)
            self._weights = self._new_weights(stored["task"], stored["scores"], stored["hashed"])
            self._weights.restore(stored)
        if self._first_rows is None and not self.labels.is_settled:
            self.labels.settle()


def _settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model that a state was taken of."""
    loss, fields = state["loss"], state["fields"]
    return {
        "bits": state["bits"],
        "rates": state["rates"],
        "loss": loss and " ".join(map(str, (loss[0], *loss[1]))),
        "crosses": state["crosses"]["crosses"],
        "kinds": fields["kinds"],
        "time_zone": fields["time zone"],
    }
