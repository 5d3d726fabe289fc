"""The workers of online training by gradients: they predict mini-batches, and compute gradients for the owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError
from streamiter.learn.asked_questions import JoinEvents
from streamiter.learn.gradients.training import GradientSum, GradientWorker, MakeModel, gradients_under_way
from streamiter.learn.late_labels.delayed_labels import DelayedLabels
from streamiter.learn.late_labels.event_reading import Keys, TimedEvents, answers_and_keys
from streamiter.learn.late_labels.label_join import LabelJoin, objects
from streamiter.learn.late_labels.question_steps import QuestionSteps
from streamiter.learn.losses import PlainLoss, plain_loss
from streamiter.learn.quality.validation import PREDICTIONS, PredictedRows
from streamiter.learn.ready_made.model_rows import ASSUMED, CORRECTED, WITHDRAWN, ModelRows
from streamiter.learn.rows import (
    BadRows,
    Examples,
    Extract,
    as_examples,
    blaming_rows,
    checked_rows,
    failed_function,
    of_numbered_rows,
    row_vector,
    row_weights,
)
from streamiter.operators.declared_state import GREATEST, LEAST, NESTED, OF_SAME_NUMBER, declared, of_nested
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, KeepsRecords
from streamiter.operators.output import Output
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch, take
from streamiter.values.sparse_rows import SparseRows


def function_of_features(owner: str, features: Sequence[str] | Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return the function; raise GraphError for names of fields, which a model of a fixed width does not know."""
    if callable(features):
        return features
    raise GraphError(
        f"{owner}(features=): expected a function that returns a matrix or SparseRows, because model= has a fixed "
        f"number of features, given {features!r}; leave out model= for a model that finds its columns"
    )


class OnlineWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    make_model: MakeModel
    extract: Extract | None
    """None for workers that do not read examples."""
    synchronous: bool


class OnlineWorker(GradientWorker):
    """Predicts the rows of each mini-batch, then computes their gradient.

    A worker begins when the first parameters have arrived. Asynchronous, it waits while its parameters lack too many of
    its own gradients: these are under way. Synchronous, it waits for the parameters of each epoch.
    """

    _reported_epoch = declared(-1, share=LEAST)
    _gradients_under_way = declared(0, share=OF_SAME_NUMBER)
    """The gradients that no received parameters contain."""
    _records_read = declared(0, share=GREATEST)
    """The number of records, or events, refused ones included; no number is given twice."""

    def __init__(self, options: OnlineWorkerOptions) -> None:
        super().__init__(options.make_model, in_epochs=options.synchronous)
        self._extract = options.extract

    @cached_property
    def _told_loss(self) -> PlainLoss | None:
        """The loss that validation is told; None for the squared loss, and for that of the task."""
        plain = plain_loss(self._model.loss)
        return None if plain is None or plain[0] == "squared" else plain

    def wanted_inputs(self) -> tuple[str, ...] | None:
        if not self._in_epochs and self._gradients_under_way >= gradients_under_way(self._context.parallelism):
            return ("model",)
        return super().wanted_inputs()

    def process_model(self, parameters: Any, out: Output) -> None:
        """Continue with these parameters."""
        self.follow(parameters)
        if isinstance(parameters, Mapping) and "contained" in parameters:
            contained = parameters["contained"].get(self._context.subtask_index, 0)
            # An answer from before two changes of the parallelism may contain more than this worker has sent.
            self._gradients_under_way = max(0, self._gradients_under_way - contained)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        """Report an epoch without rows, too, while more examples may arrive.

        All workers wait for the parameters of the next epoch, and the owner sends them when a worker has reported. When
        no worker reports any more, the iteration ends.
        """
        super().on_epoch_watermark_incremented(epoch_watermark, context, out)
        if self._in_epochs and self._reported_epoch < epoch_watermark and not self._examples_ended:
            self.report(GradientSum(), out)

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict the rows of a mini-batch, then report their gradient."""

        def learn(rows: Batch, numbers: Indices) -> None:
            examples = blaming_rows(self._extracted, rows, self._check_alone)
            self.report_examples(examples, self._model.predict(examples.features), numbers, out)

        of_numbered_rows(learn, mini_batch, self._records_read, out)
        self._records_read += len(mini_batch)

    def _extracted(self, rows: Batch) -> Examples:
        assert self._extract is not None
        return as_examples("train_online(extract=)", self._extract(rows))

    def _check_alone(self, row: Batch) -> None:
        checked_rows("train", self._extracted(row).features, self._model.width)

    def report_examples(self, examples: Examples, predictions: Floats, numbers: Indices, out: Output) -> None:
        """Report the gradient of these examples, and emit the earlier predictions for them."""
        gradient = self._model.gradient(examples.features, examples.targets, examples.weights)
        count = len(predictions)
        targets = row_vector("train", "targets", examples.targets, count)  # The model has checked them.
        losses = self._model.loss.values(predictions, targets)
        if examples.weights is None:
            weights = np.ones(count)
        else:
            weights = row_weights("train", examples.weights, count)
            losses = losses * weights
        loss = float(losses.sum())
        self.report_sum(GradientSum(gradient, loss), out)
        self.emit_predictions(predictions, targets, weights, numbers, out)

    def report_sum(self, sums: GradientSum, out: Output) -> None:
        """Report a gradient, which is then under way."""
        self._reported_epoch = self._context.epoch or 0
        self._gradients_under_way += not self._in_epochs
        self.report(sums, out)

    def emit_predictions(
        self,
        predictions: Floats,
        targets: Floats,
        weights: Floats,
        numbers: Indices,
        out: Output,
        *,
        questions: Indices | None = None,
    ) -> None:
        """Emit the earlier predictions for rows with these targets and weights."""
        validated, task = self._model.loss.validated(predictions), self._model.loss.task
        rows = PredictedRows(task=task, predictions=validated, targets=targets, weights=weights, numbers=numbers)
        if questions is not None:
            rows["questions"] = questions
        rows["is_mean"] = self._model.loss.predicts_mean
        if self._told_loss is not None:
            rows["loss"] = self._told_loss
        out.emit(rows, tag=PREDICTIONS)

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().without_end(state) | {"reported epoch": -1, "gradients under way": 0}


_PROBABILITY_MIN: Final = 1e-12


_FEATURES: Final = "DelayedLabels(features=)"


class DelayedLabelsWorker(OnlineWorker, KeepsRecords):
    """Predicts each question when it arrives, and learns from it when its label is known.

    Validation counts that first prediction.
    """

    _join: LabelJoin = declared(form=NESTED, share=of_nested(LabelJoin.redistribute))

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels, *, is_timed: bool = False) -> None:
        super().__init__(options)
        self._labels = labels
        self._features = function_of_features("DelayedLabels", labels.features)
        self._join = LabelJoin(labels, is_timed=is_timed)

    def definition(self) -> Definition:
        return {**super().definition(), **self._join.definition()}

    @property
    def kept(self) -> int:
        """The number of questions and answers that wait."""
        return self._join.waiting

    def open(self, context: Context) -> None:
        super().open(context)
        self._join.open(context)

    def follow(self, given: Any) -> None:
        """Continue with these parameters; the parameters of another model have never learned a question that waits."""
        starts = self._starts
        super().follow(given)
        if self._starts != starts:
            self._join.forget_assumptions()

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions together, then match the events in order; learn from all labels together."""
        timed, first = TimedEvents.of(mini_batch) if self._join.is_timed else None, self._records_read

        def match(records: Batch, numbers: Indices) -> bool:
            events = None if timed is None else timed.taken(numbers - first)
            if events is None or events.keys is None or events.is_answer is None:
                are_answers, keys = answers_and_keys(self._labels, records)
            else:
                are_answers, keys = events.is_answer, events.keys
            self._match(records, are_answers, keys, numbers, events, out)
            return True

        if of_numbered_rows(match, mini_batch if timed is None else timed.records, first, out) is None:
            self._end_waits(self._join.now(), out)
        self._records_read += len(mini_batch)
        self._join.wait()

    def on_timer(self, payload: object, out: Output) -> None:
        """Learn from questions whose wait is over."""
        self._join.heard()
        self._end_waits(self._join.now(), out)
        self._join.wait()

    def input_ended(self, name: str, out: Output) -> None:
        super().input_ended(name, out)
        if name == "examples":
            self._end_waits(self._join.at_end(), out)

    def on_event_time_watermark(self, watermark: int, out: Output) -> None:
        """On a quiet stream, end the waits that are over: otherwise they end with the next mini-batch."""
        if self._context.event_time_is_idle and not self._in_epochs:
            self._end_waits(watermark, out)

    def _end_waits(self, watermark: int, out: Output) -> None:
        if self._join.is_due(watermark):
            steps = self._join.handle(JoinEvents.none(), watermark)
            nothing = np.zeros(0, np.intp)
            self._learn_from(QuestionSteps(self._join, steps, ModelRows.none(), nothing), nothing, np.zeros(0), out)
        else:
            self._join.pass_time(watermark)

    def _match(
        self,
        records: Batch,
        answers: npt.NDArray[np.bool_],
        keys: Keys,
        numbers: Indices,
        timed: TimedEvents | None,
        out: Output,
    ) -> None:
        """Predict the questions, join the events, and learn from the questions whose labels are known."""
        row_of, rows, predictions = self._predict_questions(records, np.flatnonzero(~answers), out)
        labels = [self._label_of(records[event], out) if is_answer else None for event, is_answer in enumerate(answers)]
        times, before = (None, None) if timed is None else (timed.times, timed.before)
        events = JoinEvents(keys, row_of >= 0, answers, objects(labels), records, None, times, before)
        steps = self._join.handle(events, self._join.now())
        made = QuestionSteps(self._join, steps, ModelRows(rows.indptr, rows.indices, rows.values), row_of)
        self._learn_from(made, numbers, predictions, out)

    def _label_of(self, answer: Any, out: Output) -> float | None:
        """Return the label of an answer. If it is refused, its question has no label, and waits no longer."""
        try:
            label = self._labels.target_of(answer)
            return None if label is None else float(label)
        except Exception as error:
            out.reject(answer, failed_function("DelayedLabels(target_of=)", error))
            return None

    def _predict_questions(self, records: Batch, asked: Indices, out: Output) -> tuple[Indices, SparseRows, Floats]:
        """Return the row of each event, -1 for one without features, and features and prediction of each row."""
        row_of = np.full(len(records), -1)

        def predict(questions: Batch, places: Indices) -> tuple[SparseRows, Floats]:
            found = blaming_rows(self._predicted, questions, self._features, _FEATURES)
            row_of[asked[places]] = np.arange(len(places))
            return found

        found = of_numbered_rows(predict, take(records, asked), 0, out)
        return row_of, *(found or (SparseRows.from_rows([], self._model.width), np.zeros(0)))

    def _predicted(self, questions: Batch) -> tuple[SparseRows, Floats]:
        rows = checked_rows(_FEATURES, self._features(questions), self._model.width)
        if not isinstance(rows, SparseRows):
            rows = SparseRows.from_dense(rows)
        return rows, self._model.predict(rows)

    def _learn_from(self, made: QuestionSteps, numbers: Indices, predictions: Floats, out: Output) -> None:
        """Report the gradient of all rows to learn from, then emit the predictions of all questions with labels.

        ``predictions`` are those of the questions of this mini-batch, by row.
        """
        for record in self._join.late_answers():
            self._join.refuse(record, out)
        rows, steps, count = made.rows(), made.steps(), len(made.labels)
        features = SparseRows(rows.indptr, rows.indices, rows.values, self._model.width)
        asked = made.asked_with(predictions)
        # Before they are learned as False, questions that wait are predicted with the others.
        assumed = made.earlier_scores()
        assumes = np.flatnonzero(steps.predicts & steps.learns)
        if len(assumes):
            assumed[steps.questions[assumes]] = self._model.predict(features[steps.rows[assumes].tolist()])
        kinds = np.zeros(count, np.uint8) if steps.assumed is None else steps.assumed
        refused: list[int] = []
        sums = GradientSum()

        def add(group: Indices, targets: Floats) -> None:
            """Add the gradient of some steps to the sums, without those whose label is refused."""
            while len(group):
                some, given = features[steps.rows[group].tolist()], targets[group]
                try:
                    gradient = self._model.gradient(some, given)
                except BadRows as bad:
                    for row in bad.rows:
                        out.reject(made.record_of(int(group[row])), bad.of_row(row))
                    refused.extend(group[list(bad.rows)].tolist())
                    group = np.delete(group, list(bad.rows))
                    continue
                if kinds[group[0]] > ASSUMED:
                    # Without the gradient for False, as it was when these questions were learned as False.
                    now = np.maximum(self._model.predict(some), _PROBABILITY_MIN)
                    before = self._model.gradient(some, np.zeros(len(now)), assumed[steps.questions[group]] / now)
                    total = before.scaled(-1.0) if kinds[group[0]] == WITHDRAWN else gradient + before.scaled(-1.0)
                    gradient = replace(total, weight=gradient.weight, records=0, moments=None)
                sums.add(gradient, float(self._model.loss.values(asked[group], given).sum()))
                return

        targets = made.targets()
        add(np.flatnonzero(steps.learns & (kinds <= ASSUMED)), targets)
        add(np.flatnonzero(kinds == CORRECTED), targets)
        # A question that was learned as False, and has no label, is taken back.
        for step in refused:
            kinds[step] = WITHDRAWN if kinds[step] == CORRECTED else 0
        add(np.flatnonzero(kinds == WITHDRAWN), np.zeros(count))
        if sums.gradient is not None:
            self.report_sum(sums, out)
        if len(settled := np.setdiff1d(made.settled(), refused)):
            numbered = made.numbers_of(settled, numbers, self._records_read)
            given, weights = self._model.checked_targets(targets[settled], len(settled)), np.ones(len(settled))
            self.emit_predictions(asked[settled], given, weights, numbered[:, 0], out, questions=numbered[:, 1])
        made.asked.made, made.asked.reading = assumed[:, None], 0
        made.keep_waiting(numbers, asked[:, None], np.full((len(rows.indptr), 2), np.nan), has_missing=False)

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().without_end(state) | {"join": self._join.without_end(state["join"])}
