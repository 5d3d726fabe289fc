"""Training row by row in a flow: workers read the rows, and one owner learns.

The owner has the only model, so it predicts each row with everything that was learned before, and the result does not
depend on the mini-batches: these only decide how often a version is published. The workers do what can be done in
parallel: they find fields, hash texts and call the user's functions. *Asynchronous*, the owner takes mini-batches as
they arrive. *Synchronous*, it takes the mini-batches of an epoch in the order of the stream, so the result depends
neither on timing nor on the number of workers. Where labels come later, the owner predicts a question when it arrives,
and learns from its row when the answer arrives.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, OtherModel
from streamiter.learn.asked_questions import JoinEvents, QuestionPredictions
from streamiter.learn.labels import Label, Labels
from streamiter.learn.late_labels.answer_delays import Answers
from streamiter.learn.late_labels.event_reading import EventsToLearn, no_events
from streamiter.learn.late_labels.label_join import WAIT_IS_OVER, LabelJoin, objects
from streamiter.learn.late_labels.question_steps import QuestionSteps
from streamiter.learn.model_owner import ModelOwner, OwnerOptions
from streamiter.learn.quality.field_watch import FIELD_REPORTS, WatchedFields
from streamiter.learn.quality.score_metrics import as_lists, hits, widened
from streamiter.learn.quality.validation import PredictedRows, ValidationKind, loss_of
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.model_rows import ModelRows, RowSteps
from streamiter.learn.ready_made.row_reading import RowsToLearn, features_of_record, missing_values_of
from streamiter.learn.rows import BadRows, of_numbered_rows
from streamiter.models.documents import SHAPES
from streamiter.models.explanations import EFFECT_OF
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.operators.declared_state import COPIED, NESTED, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, KeepsRecords
from streamiter.operators.output import Output, detach
from streamiter.values.helpers.compiled import beside_event_loop, is_compiling
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.times import MIN_TIME

# Columns, and pairs, that are metrics of a version. To find them takes about as long as to learn a twentieth of so
# many rows.
_EFFECTS: Final = 4
_ROWS_FOR_EFFECTS: Final = 10_000
_EFFECTS_EVERY_S: Final = 1.0
# A version costs about as much time as a row for each fifteen columns, so publishing takes a fifth of the time at most.
_ROWS_FOR_A_COLUMN: Final = 0.25
# Measured for 82,078 columns: 4 ms, and 16 ms with the state of the learner.
_TIMES_WITH_STATE: Final = 4
_MANY_COLUMNS: Final = 1_000
# A version with tables costs as much time as 190 to 250 rows with tables, whatever the columns and the classes; with
# the state three to four times as much. So publishing takes at most half of the time of learning, or one version a
# second: to wait longer would make versions of a slow stream older, where there is time enough.
_COLUMNS_OF_TABLES: Final = 1_000
# Compiled steps leave the interpreter to other threads. A thread for a mini-batch costs as much as a hundred rows.
_LEARNED_IN_THREAD: Final = 1_000
_PUBLISHED_AFTER_S: Final = 1.0
# A version of millions of columns takes seconds itself: after it, the owner learns for four times as long.
_TIMES_OF_LEARNING: Final = 4


class _Untold(NamedTuple):
    """A row that was learned from before it was decided which label is positive; its prediction is not emitted yet."""

    prediction: list[float]
    reading: int
    """The number of readings of labels that had been given up."""
    label: Label
    weight: float
    numbers: int | list[int]
    """The number of the record; for a late label, the numbers of the event that settled it, and of its question."""


class RowOwner(ModelOwner, KeepsRecords):
    """Predicts each row, and learns from it.

    Input ``rows`` brings what the workers have read. ``in_epochs``: the mini-batches of an epoch are learned at its
    end, in the order of the stream.
    """

    learner = "AdaptiveLinearModel"

    _model: AdaptiveLinearModel
    _version_published: int = declared()
    _held: list[RowsToLearn | EventsToLearn] = declared(made=list, form=COPIED)
    """The mini-batches of the epoch under way, or the mini-batches that have overtaken others."""
    _next_event: int | None = declared(0)
    """The number of the next event of the stream, where labels come later; None: that of the first to come."""
    _labels: LabelJoin | None = declared(form=NESTED)
    _answers = declared(made=Answers, form=NESTED)
    _forgotten = declared(0)
    """The number of questions that were forgotten before this run."""
    _unpredicted = declared(0)
    """The number of rows whose number was predicted before any was known."""
    _missing = declared(0)
    """The number of missing values since a version was published."""
    _watched: WatchedFields | None = declared(form=NESTED)
    _untold: list[_Untold] = declared(
        made=list, form=Form(lambda rows: list(map(tuple, rows)), lambda rows: list(starmap(_Untold, rows)))
    )

    def __init__(
        self,
        make_model: Callable[[], AdaptiveLinearModel],
        options: OwnerOptions,
        labels: LabelJoin | None = None,
        *,
        joins_later: bool = False,
    ) -> None:
        """``labels`` joins questions with labels that come later.

        ``joins_later``: the numbers of the events do not begin with 0, and one worker has read them.
        """
        super().__init__(options)
        self._make_model = make_model
        self._model = make_model()
        self._positive = self._model.get_params()["positive"]
        self._in_epochs = self.needs_epochs = self.epochs_in_order = self.any_order = options.in_epochs
        self._labels = labels
        if joins_later:
            self._next_event = None
        self._raises_rates = options.raises_rates
        self._watched = None if options.watch is None else WatchedFields(options.watch, self._model.hash_bits)
        self._effects: tuple[float, dict[str, float]] = -math.inf, {}
        """The metrics of effects, and when they were found."""
        self._version_published = self._model.version
        self._watermark = MIN_TIME

    @property
    def kept(self) -> int:
        """The number of questions and answers that wait."""
        return 0 if self._labels is None else self._labels.waiting

    def definition(self) -> Definition:
        come = {"labels": "at once"} if self._labels is None else self._labels.definition()
        return {**super().definition(), **self._model.definition(), **come}

    async def open(self, context: Context) -> None:
        """Compile in a thread, where that is needed: it takes seconds, in which all other tasks continue."""
        if self._labels is not None:
            self._labels.open(context)
            await asyncio.to_thread(self._labels.compile)
        await asyncio.to_thread(self._model.compile)
        await super().open(context)

    def start_from(self, parameters: Any, records: int) -> None:
        """Start from a version; questions that wait keep their rows, but another model has made their predictions."""
        model = self._make_model()
        model.start_from(parameters, records=records)
        is_alike = model.scores <= 1 and (model.task, model.classes) == (self._model.task, self._model.classes)
        self._renumber(model.columns_from(self._model), keeps_predictions=is_alike)
        if self._labels is not None:
            self._labels.forget_assumptions()
        self._model, self._version_published, self._untold = model, model.version, []
        self._effects = -math.inf, {}

    def _renumber(self, column_of: Callable[[int], int | None], *, keeps_predictions: bool = True) -> None:
        """Have the rows of questions by other columns; numbers and other classes are no predictions of this model."""
        if self._labels is not None:
            slots = self._labels.question_slots()
            self._labels.questions.follow_model(slots, column_of, keeps_predictions=keeps_predictions)

    def state(self) -> dict[str, object]:
        return {"model": self._model.state()}

    async def process_rows(self, given: RowsToLearn | EventsToLearn, out: Output) -> None:
        """Learn from a mini-batch, or keep it until its epoch ends, or until earlier mini-batches have arrived."""
        if self._in_epochs:
            self._held.append(given)
        elif "is_answer" not in given:
            if len(given["numbers"]) < _LEARNED_IN_THREAD or not is_compiling():
                self._learn(given, out)
            else:
                self.take_over_rollback()  # in the event loop, where rollbacks arrive
                attach = detach(out)
                try:
                    await beside_event_loop(partial(self._learn_rows, given, out))
                finally:
                    attach()
            self.count_step(out)
        else:
            self._held.append(given)
            while (turn := self._whose_turn()) is not None:
                self._learn(self._held.pop(turn), out)
                self.count_step(out)

    def _whose_turn(self) -> int | None:
        """Return the place of the mini-batch that is next in the stream, if it has arrived: workers differ in speed."""
        places = (place for place, given in enumerate(self._held) if self._next_event in (None, given["position"][1]))
        return next(places, None)

    def on_timer(self, payload: object, out: Output) -> None:
        """Learn from questions whose wait is over, or publish the version that waited."""
        if payload != WAIT_IS_OVER:
            super().on_timer(payload, out)
        elif self._labels is not None:
            self._labels.heard()
            self._end_waits(self._labels.now(), out)
            self._labels.wait()

    def on_event_time_watermark(self, watermark: int, out: Output) -> None:
        """End the waits that are over: all events before the watermark are here, and most have been learned from.

        The events of an epoch under way have their own watermarks, and come first.
        """
        self._watermark = watermark
        if self._labels is not None and self._labels.is_timed and not self._held:
            self._end_waits(watermark, out)

    def _end_waits(self, watermark: int, out: Output) -> None:
        assert self._labels is not None
        if self._labels.is_due(watermark):
            self.take_over_rollback()
            if self._learn_events(no_events(), watermark, out):
                self.count_step(out)
        else:
            self._labels.pass_time(watermark)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._learn_held(out)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        self._learn_held(out)

    def _learn_held(self, out: Output) -> None:
        if self._held:
            held, self._held = sorted(self._held, key=itemgetter("position")), []
            for given in held:
                self._learn(given, out)
            self.count_step(out)
        if self._labels is not None and self._labels.is_timed:
            self._end_waits(self._watermark, out)

    def _learn(self, given: RowsToLearn | EventsToLearn, out: Output) -> None:
        self.take_over_rollback()
        if "is_answer" in given:
            assert self._labels is not None
            self._model.fields.leave_out(given["label_fields"])
            self._next_event = given["position"][1] + given["count"]
            self._learn_events(given, self._labels.now(), out)
            self._labels.wait()
        else:
            self._learn_rows(given, out)

    # ---- rows with their labels

    def _learn_rows(self, given: RowsToLearn, out: Output) -> None:
        self._model.fields.leave_out(given["label_fields"])
        all_features, all_labels = features_of_record(given["features"]), given["labels"]

        def learn(records: Batch, places: Indices) -> None:
            is_whole = len(places) == len(all_labels)
            features = all_features if is_whole else all_features[places.tolist()]
            labels = all_labels if is_whole else [all_labels[place] for place in places.tolist()]
            rows = self._model.rows(features, records.__getitem__)
            weights = None if given["weights"] is None else given["weights"][places]
            steps = RowSteps.one_each(rows.length, learns=True, weights=weights)
            predictions = self._model.step(rows, steps, labels)
            self._count(features, out)
            if (again := self._model.predicted_again) is not None:
                now = len(self._model.labels.earlier)
                told = zip(self._untold, as_lists(again[len(again) - len(self._untold) :]), strict=True)
                self._untold = [row._replace(prediction=made, reading=now) for row, made in told]
            self._tell(predictions, labels, steps.weights, given["numbers"][places], out)

        of_numbered_rows(learn, given["records"], 0, out)

    def _count(self, features: NamedRows | SparseRows, out: Output) -> None:
        """Count the missing values of the rows that the model has read last, and watch their fields."""
        self._missing += missing_values_of(features)
        if self._watched is not None:
            if (rows := self._model.last_rows) is None:
                raise ConfigurationError(
                    "train_online(watch=): expected records with named fields, given sparse rows, whose columns belong "
                    "to no field; leave watch= out"
                )
            for report in self._watched.add(rows, self._model.fields.parts_of_times):
                out.emit(report, tag=FIELD_REPORTS)

    def _tell(self, predictions: Floats, labels: Labels, weights: Floats, numbers: Indices, out: Output) -> None:
        """Emit predictions with their labels, once it is decided which label is positive; until then they are kept."""
        if self._model.labels.is_positive_known and not self._untold:
            self._emit_predictions(predictions, self._model.labels.targets(labels), weights, numbers, out)
            return
        now = len(self._model.labels.earlier)
        rows = zip(as_lists(predictions), labels, weights, numbers, strict=True)
        self._untold += [_Untold(made, now, label, float(weight), at.tolist()) for made, label, weight, at in rows]
        if self._model.labels.is_positive_known:
            self._tell_all(out)

    def _tell_all(self, out: Output) -> None:
        rows, self._untold = self._untold, []
        if rows:
            widths = np.array([len(row.prediction) for row in rows])
            made = np.full((len(rows), int(widths.max())), np.nan)
            for row, width in enumerate(widths.tolist()):
                made[row, :width] = rows[row].prediction
            readings = np.array([row.reading for row in rows])
            nothing = np.full((len(rows), 2), np.nan)
            predictions = self._model.labels.as_now(QuestionPredictions(made, widths, readings, nothing))
            targets = self._model.labels.targets([row.label for row in rows])
            weights = np.array([row.weight for row in rows])
            numbers = np.array([row.numbers for row in rows], dtype=np.intp)
            self._emit_predictions(predictions, targets, weights, numbers, out)

    def _emit_predictions(
        self, predictions: Floats, targets: Floats, weights: Floats, numbers: Indices, out: Output
    ) -> None:
        task: ValidationKind = "regression" if self._model.task == "regression" else "classification"
        if task == "regression" and (is_unknown := np.isnan(predictions)).any():
            self._unpredicted += int(np.count_nonzero(is_unknown))
            predictions, targets, weights = (each[~is_unknown] for each in (predictions, targets, weights))
            numbers = numbers[~is_unknown]
            if not len(predictions):
                return
        classes = probabilities = None
        if predictions.ndim == 2:
            task, classes = "classes", targets.astype(np.intp)
            probabilities = widened(predictions, self._model.scores)
            predictions, targets = hits(probabilities, classes)
        self._weight += float(weights.sum())
        rows = PredictedRows(task=task, predictions=predictions, targets=targets, weights=weights)
        rows["numbers"] = numbers if numbers.ndim == 1 else numbers[:, 0]
        if numbers.ndim == 2:
            rows["questions"] = numbers[:, 1]
        if classes is not None and probabilities is not None:
            rows |= {"classes": classes, "probabilities": probabilities}
        if task == "regression" and (loss := self._model.loss) is not None:
            rows |= {"loss": loss, "is_mean": loss[0] == "poisson"}
        if (names := self._model.classes) is not None:
            rows["labels"] = names
        if (earlier := self._model.labels.earlier_targets) is not None:
            rows["earlier_targets"] = earlier
        self._loss += loss_of(rows)
        if self.emit_predictions(rows, out) and self._raises_rates:
            self._model.raise_rates()

    # ---- questions and answers

    def _learn_events(self, given: EventsToLearn, watermark: int, out: Output) -> bool:
        """Predict the questions, and learn from those whose labels become known, event by event.

        First the waits end that are over by the watermark. Returns whether anything was learned, predicted or refused.
        """
        assert self._labels is not None
        join, events = self._labels, len(given["keys"])
        rows, row_of = self._question_rows(given, out)
        asks, answers = row_of >= 0, np.asarray(given["is_answer"], np.bool_)
        steps = join.handle(
            JoinEvents(
                given["keys"],
                asks,
                answers,
                objects(given["labels"]),
                given["records"],
                given["weights"],
                given["times"],
                given["before"],
            ),
            watermark,
            self._positive,
        )
        late = join.late_answers()
        for record in late:
            join.refuse(record, out)
        if not (events or late or len(steps.kind)):
            join.close()
            return False
        priors = self._priors(asks, answers, given["labels"], rows.length, row_of)
        made = QuestionSteps(join, steps, rows, row_of)
        predictions = self._make_steps(made, out)
        settled, numbers = made.settled(), given["numbers"]
        if len(settled):
            found = self._model.labels.as_now(made.predictions_of(settled, predictions, priors, self._model))
            weights = made.weights_of(settled)
            labels = made.labels[settled].tolist()
            of_events = made.numbers_of(settled, numbers, (self._next_event or 0) - given["count"])
        made.keep_waiting(numbers, predictions, priors)
        if len(settled):
            self._tell(found, labels, weights, of_events, out)
        return True

    def _priors(
        self, asks: npt.NDArray[np.bool_], answers: npt.NDArray[np.bool_], labels: Labels, count: int, row_of: Indices
    ) -> Floats:
        """Return for each row what the answers so far suggest; NaN once the model has learned from a label."""
        assert self._labels is not None
        priors, otherwise = np.full((count, 2), np.nan), self._labels.otherwise
        if not self._model.records:
            for event in np.flatnonzero(asks | answers).tolist():
                if asks[event]:
                    priors[row_of[event]] = self._answers.ask(is_answered=otherwise is None)
                else:
                    self._answers.add(labels[event], otherwise)
        return priors

    def _question_rows(self, given: EventsToLearn, out: Output) -> tuple[ModelRows, Indices]:
        """Return the rows of the questions, and the row of each event, -1 for answers; others are refused."""
        row_of = np.full(len(given["keys"]), -1)
        asked = np.flatnonzero(~np.asarray(given["is_answer"], np.bool_))
        features = features_of_record(given["features"])

        def record_of(row: int) -> Any:
            return given["records"][asked[row]]

        while True:
            times_ms = None if given["times"] is None else given["times"][asked].astype(np.float64)
            try:
                rows = self._model.rows(features, record_of, times_ms)
                break
            except BadRows as bad:
                for row in bad.rows:
                    out.reject(record_of(row), bad.of_row(row))
                kept = np.delete(np.arange(len(asked)), list(bad.rows))
                asked, features = asked[kept], features[kept.tolist()]
        self._count(features, out)
        row_of[asked] = np.arange(len(asked))
        return rows, row_of

    def _make_steps(self, made: QuestionSteps, out: Output) -> Floats:
        """Make the steps, without labels that are refused; return the predictions by step."""
        while True:
            try:
                predictions = self._model.step(made.rows(), made.steps(), made.labels, made.asked)
            except BadRows as bad:
                for step in bad.rows:
                    out.reject(made.skip(step), bad)
            else:
                return predictions if predictions.ndim == 2 else predictions[:, None]

    # ---- publishing, state

    def due_in_s(self) -> float:
        """Return in how many seconds a version is due, and does not cost a large part of the time of learning."""
        due_s = super().due_in_s()
        columns = self._model.columns + (_COLUMNS_OF_TABLES if self._model.has_tables else 0)
        rows = self._model.records - self._records_published
        rows_for_a_column = _ROWS_FOR_A_COLUMN * (_TIMES_WITH_STATE if self._publishes_state else 1)
        is_cheap = not self._has_published or columns < _MANY_COLUMNS or rows >= rows_for_a_column * columns
        is_counted = self._schedule.mini_batches is not None or self._schedule.records is not None
        if is_cheap or self._in_epochs or is_counted:
            return due_s
        return max(due_s, self.seconds_left(max(_PUBLISHED_AFTER_S, _TIMES_OF_LEARNING * self._published_in_s)))

    def metrics(self, parameters: Any) -> dict[str, float]:
        counts = {"missing_values": float(self._missing)}
        if self._labels is not None:
            counts["forgotten_questions"] = float(self._forgotten + self._labels.forgotten)
        if self._model.task == "regression":
            counts["unpredicted_rows"] = float(self._unpredicted)
        return counts | self._effects_in(parameters) | super().metrics(parameters)

    def _effects_in(self, parameters: Any) -> dict[str, float]:
        """Return how much the columns and pairs matter that matter most.

        Versions that are published in time have those of the last second; others none, if they have few rows.
        """
        is_in_time, now_s = self._schedule.every_s is not None, self._context.clock.monotonic_s()
        if is_in_time:
            is_due = now_s - self._effects[0] >= _EFFECTS_EVERY_S
        else:
            is_due = self._model.records - self._records_published >= _ROWS_FOR_EFFECTS
        if SHAPES not in parameters:
            return {}
        if not is_due:
            return self._effects[1] if is_in_time else {}
        effects = LinearPredictor(parameters).effects
        assert effects is not None
        strengths = {each.field: each.strength for each in effects.columns[:_EFFECTS]}
        strengths |= {" × ".join(each.fields): each.strength for each in effects.pairs[:_EFFECTS]}
        self._effects = now_s, {f"{EFFECT_OF}{name}": strength for name, strength in strengths.items()}
        return self._effects[1]

    def begin_version(self) -> None:
        super().begin_version()
        self._missing, self._version_published = 0, self._model.version

    def is_new(self) -> bool:
        """Whether the model has learned since a version was published; corrections are no further records."""
        return self._model.version > self._version_published

    def finish(self, out: Output) -> None:
        self._learn_held(out)
        if self._labels is not None:
            self._learn_events(no_events(), self._labels.at_end(), out)
        self._tell_all(out)
        super().finish(out)

    def snapshot(self) -> dict[str, Any]:
        forgotten = 0 if self._labels is None else self._labels.forgotten
        model = {"model": self._model.state(frozen=True)}
        return super().snapshot() | model | {"forgotten": self._forgotten + forgotten}

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().without_end(state) | {"labels": state["labels"] and LabelJoin.without_end(state["labels"])}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore({"watched": None, "unpredicted": 0, **state})
        column_of = self._model.adopt(state["model"])
        if not self._model.reads_as(state["model"]) and (state["held"] or not state["is started"]):
            raise OtherModel(
                "AdaptiveLinearModel.restore: expected a checkpoint without rows that wait for the model, given rows "
                "with texts hashed to another number of bits; resume it with the earlier bits= and embeddings= first"
            )
        if column_of is not None:
            self._renumber(column_of)
