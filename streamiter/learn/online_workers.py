"""The workers of online training by gradients: they predict mini-batches, and compute gradients for the owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from streamiter.errors import GraphError
from streamiter.learn.delayed_labels import DelayedLabels
from streamiter.learn.late_labels import LabelJoin, Outcome, TimedEvents, answers_and_keys
from streamiter.learn.losses import plain_loss
from streamiter.learn.rows import (
    BadRows,
    Examples,
    Extract,
    as_examples,
    blaming_rows,
    checked_rows,
    of_numbered_rows,
    row_weights,
    without,
)
from streamiter.learn.training import GradientSum, GradientWorker, MakeModel, gradients_under_way
from streamiter.learn.validation import PREDICTIONS, PredictedRows
from streamiter.operators.declared_state import GREATEST, LEAST, NESTED, OF_SAME_NUMBER, Form, declared, of_nested
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, KeepsRecords
from streamiter.operators.output import Output
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch
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
        targets = self._model.checked_targets(examples.targets, count)
        weights = row_weights("train", np.ones(count) if examples.weights is None else examples.weights, count)
        loss = float((self._model.loss.values(predictions, targets) * weights).sum())
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
        if (plain := plain_loss(self._model.loss)) is not None and plain[0] != "squared":
            rows["loss"] = plain
        out.emit(rows, tag=PREDICTIONS)

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().without_end(state) | {"reported epoch": -1, "gradients under way": 0}


# Indices and values, as lists: numpy arrays of about eight features each would take ten times as long.
_Row = tuple[list[int], list[float]]


@dataclass(slots=True)
class _Question:
    """A question that waits for its label."""

    row: _Row
    prediction: float
    number: int
    """The number of its event in the stream."""
    assumed: float | None = None
    """The prediction with which it was learned as False, before its label was known; None: it was not."""


_QUESTIONS: Final = Form(attrgetter("row", "prediction", "number", "assumed"), lambda record: _Question(*record))


class _Labelled(NamedTuple):
    """A question with a label: to learn from, to validate, or both."""

    record: Any
    """The answer."""
    question: _Question
    target: float
    number: int
    learns: Literal["no", "plain", "corrected", "withdrawn"]
    is_settled: bool = True


_PROBABILITY_MIN: Final = 1e-12


class DelayedLabelsWorker(OnlineWorker, KeepsRecords):
    """Predicts each question when it arrives, and learns from it when its label is known.

    Validation counts that first prediction.
    """

    _join: LabelJoin = declared(form=NESTED, share=of_nested(LabelJoin.redistribute))

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels, *, is_timed: bool = False) -> None:
        super().__init__(options)
        self._labels = labels
        self._features = function_of_features("DelayedLabels", labels.features)
        self._join = LabelJoin(labels, is_timed=is_timed, questions=_QUESTIONS)

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
            for question in self._join.questions():
                question.assumed = None

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions together, then match the events in order; learn from all labels together."""
        labelled: list[_Labelled] = []
        self._settle(self._join.reach(self._join.now()), self._records_read, labelled, out)
        timed, first = TimedEvents.of(mini_batch) if self._join.is_timed else None, self._records_read

        def match(records: Batch, numbers: Indices) -> None:
            events = None if timed is None else timed.taken((numbers - first).tolist())
            self._match(records, numbers.tolist(), events, labelled, out)

        of_numbered_rows(match, mini_batch if timed is None else timed.records, first, out)
        self._learn_from(labelled, out)
        self._records_read += len(mini_batch)
        self._join.wait()

    def on_timer(self, payload: object, out: Output) -> None:
        """Learn from questions whose wait is over."""
        self._join.heard()
        self._end_waits(self._join.reach(self._join.now()), out)
        self._join.wait()

    def _end_waits(self, outcomes: list[Outcome], out: Output) -> None:
        labelled: list[_Labelled] = []
        self._settle(outcomes, self._records_read, labelled, out)
        self._learn_from(labelled, out)

    def _match(
        self, events: Batch, numbers: list[int], times: TimedEvents | None, labelled: list[_Labelled], out: Output
    ) -> None:
        """Predict the questions, and join the events; append the questions whose labels are known to ``labelled``."""
        if times is None or times.keys is None or times.is_answer is None:
            are_answers, keys = answers_and_keys(self._labels, events)
        else:
            are_answers, keys = times.is_answer, times.keys
        asked = [row for row, is_answer in enumerate(are_answers) if not is_answer]
        questions, join = [events[row] for row in asked], self._join
        predicted = self._predict_questions(questions, [numbers[row] for row in asked], out)
        for row, (event, is_answer, key, number) in enumerate(zip(events, are_answers, keys, numbers, strict=True)):
            time = None
            if times is not None:
                time = times.times[row]
                self._settle(join.reach(times.before[row]), number, labelled, out)
            if is_answer:
                self._settle(join.answer(key, time, event), number, labelled, out)
            elif (question := next(predicted)) is not None:
                if join.schedule == "weighted":
                    question.assumed = math.nan  # Predicted with the others.
                    labelled.append(_Labelled(event, question, 0.0, number, "plain", is_settled=False))
                self._settle(join.ask(key, time, question), number, labelled, out)

    def input_ended(self, name: str, out: Output) -> None:
        super().input_ended(name, out)
        if name == "examples":
            self._end_waits(self._join.end(), out)

    def on_event_time_watermark(self, watermark: int, out: Output) -> None:
        """On a quiet stream, end the waits that are over: otherwise they end with the next mini-batch."""
        if self._context.event_time_is_idle and not self._in_epochs:
            self._end_waits(self._join.reach(watermark), out)

    def _settle(self, outcomes: list[Outcome], number: int, labelled: list[_Labelled], out: Output) -> None:
        """Append the questions whose labels are known; refuse the answers without a question."""
        for question, answer, kind in outcomes:
            if question is None:
                self._join.refuse(answer, out)
                continue
            if kind == "assumed":
                question.assumed = math.nan  # Predicted with the others.
                labelled.append(_Labelled(None, question, 0.0, number, "plain", is_settled=False))
                continue
            label = None
            if kind != "forgotten":
                try:
                    label = self._labels.otherwise if answer is None else self._labels.target_of(answer)
                    label = None if label is None else float(label)
                except Exception as error:
                    out.reject(answer, error)
                    label = None
            if label is not None:
                record = {"otherwise": label} if answer is None else answer
                labelled.append(_Labelled(record, question, label, number, self._learns(question, label)))
            elif question.assumed is not None:
                labelled.append(_Labelled(answer, question, 0.0, number, "withdrawn", is_settled=False))

    @staticmethod
    def _learns(question: _Question, target: float) -> Literal["no", "plain", "corrected"]:
        if question.assumed is None:
            return "plain"
        return "corrected" if target else "no"

    def _predict_questions(self, questions: list[Any], numbers: list[int], out: Output) -> Iterator[_Question | None]:
        """Yield features and prediction of each question, None for a question without features."""
        predicted: list[_Question | None] = [None] * len(questions)

        def predict(some: Batch, places: Indices) -> None:
            rows, predictions = blaming_rows(self._predicted, some, self._features)
            for place, row, prediction in zip(places.tolist(), rows.rows(), predictions, strict=True):
                predicted[place] = _Question(row, prediction, numbers[place])

        of_numbered_rows(predict, questions, 0, out)
        return iter(predicted)

    def _predicted(self, questions: Sequence[Any]) -> tuple[SparseRows, list[float]]:
        rows: SparseRows = self._features(questions)
        return rows, self._model.predict(rows).tolist()

    def _learn_from(self, labelled: list[_Labelled], out: Output) -> None:
        """Report the gradient of all rows to learn from, then emit the predictions of all questions with labels."""
        refused: list[_Labelled] = []
        sums = GradientSum()
        if assumed := [each for each in labelled if not each.is_settled and each.learns == "plain"]:
            for each, now in zip(assumed, self._model.predict(self._examples(assumed).features).tolist(), strict=True):
                each.question.assumed = now
        for learns in ("plain", "corrected"):
            group = [each for each in labelled if each.learns == learns]
            refused += self._add_gradient(sums, group, out)
        withdrawn = [each for each in labelled if each.learns == "withdrawn"]
        # A question that was learned as False, and has no label, is taken back.
        withdrawn += [each._replace(learns="withdrawn", target=0.0) for each in refused if each.learns == "corrected"]
        self._add_gradient(sums, withdrawn, out)
        if sums.gradient is not None:
            self.report_sum(sums, out)
        without_label = set(map(id, refused))
        if settled := [each for each in labelled if each.is_settled and id(each) not in without_label]:
            predictions = np.array([each.question.prediction for each in settled])
            numbers = np.array([each.number for each in settled])
            questions = np.array([each.question.number for each in settled])
            targets = self._model.checked_targets([each.target for each in settled], len(settled))
            self.emit_predictions(predictions, targets, np.ones(len(settled)), numbers, out, questions=questions)

    def _add_gradient(self, sums: GradientSum, group: list[_Labelled], out: Output) -> list[_Labelled]:
        """Add the gradient of some questions to the sums; return those whose label is refused."""
        refused: list[_Labelled] = []
        while group:
            examples = self._examples(group)
            predictions = np.array([each.question.prediction for each in group])
            assumed_before = np.array([each.question.assumed or 0.0 for each in group])
            try:
                gradient = self._model.gradient(examples.features, examples.targets)
            except BadRows as bad:
                without([each.record for each in group], bad, out)
                refused += [group[row] for row in bad.rows]
                group = [each for row, each in enumerate(group) if row not in bad.rows]
                continue
            if group[0].learns != "plain":
                # Take back the gradient with which these questions were learned as False.
                now = np.maximum(self._model.predict(examples.features), _PROBABILITY_MIN)
                assumed = self._model.gradient(examples.features, np.zeros(len(now)), assumed_before / now).scaled(-1.0)
                total = assumed if group[0].learns == "withdrawn" else gradient + assumed
                gradient = replace(total, weight=gradient.weight, records=0, moments=None)
            loss = self._model.loss.values(predictions, np.asarray(examples.targets)).sum()
            sums.add(gradient, float(loss))
            break
        return refused

    def _examples(self, labelled: Sequence[_Labelled]) -> Examples:
        rows = SparseRows.from_rows([each.question.row for each in labelled], self._model.width)
        return Examples(rows, np.array([each.target for each in labelled]))

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().without_end(state) | {"join": self._join.without_end(state["join"])}
