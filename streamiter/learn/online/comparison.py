"""Champion and challengers: several learners on one stream, compared on the same rows; the best one is published.

:func:`compare_online` starts a training for each learner. Each of them predicts every row before it learns from it, at
its own speed. :class:`Compare` waits until all learners have predicted a block of rows, counts the rows of the block
that each of them has predicted, and decides which learner is the best.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np

from streamiter.errors import GraphError, ModelError, did_you_mean
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.gradients.features import StandardScaler
from streamiter.learn.gradients.training import MakeModel
from streamiter.learn.labels import Label, LearningTask
from streamiter.learn.late_labels.delayed_labels import DelayedLabels, is_in_event_time, tell_of_clock, with_event_time
from streamiter.learn.losses import LossName
from streamiter.learn.model_owner import PublishSchedule
from streamiter.learn.online.foreign_models import ForeignModel
from streamiter.learn.online.train_online import OnlineTraining, train_online
from streamiter.learn.quality.drift import DriftDetector
from streamiter.learn.quality.validation import (
    PredictedRows,
    ProgressiveValidation,
    ValidationKind,
    rows_as,
    validation_of,
)
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.learn.rows import Extract
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import COPIED, LISTS_BY_KEY, NESTED_BY_KEY, DeclaredOperator, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.field_kinds import Kind
from streamiter.values.helpers.notebooks import html_table, text_table
from streamiter.values.numbers import Floats, whole_number
from streamiter.values.records import OutputTag

_log = logging.getLogger("streamiter.learn")

Model = MakeModel | Callable[[], AdaptiveLinearModel] | ForeignModel[Any] | None


class LearnerOptions(TypedDict, total=False):
    """The options of ``train_online`` that a learner may have for itself, or that all learners share."""

    model: Model
    label: str | Callable[[Any], Label] | None
    features: Sequence[str] | Callable[[Any], Any] | None
    weight: str | Callable[[Any], float] | None
    task: LearningTask | None
    loss: LossName | None
    quantile: float | None
    positive: Label
    crosses: Sequence[tuple[str, str]]
    shapes: bool | None
    embeddings: Embeddings | None
    kinds: Mapping[str, Kind] | None
    time_zone: str | None
    scaler: StandardScaler | None
    extract: Extract | None
    labels: DelayedLabels | None
    mini_batch: int | None
    mode: Literal["asynchronous", "synchronous"]
    initial: Stream | None
    drift: DriftDetector | None
    publish_every: int | PublishSchedule | None
    publish_every_s: float | None
    publish_state: bool
    on_error: RejectionPolicy
    dead_letter: Topic | None


class ComparedMetrics(TypedDict):
    """A report of a comparison."""

    best: str
    """The name of the best learner."""
    learners: dict[str, dict[str, float]]
    """For each learner its metrics on the rows that all learners have predicted (see ``ProgressiveValidation``)."""
    baseline: dict[str, float]
    """``loss`` and ``window_loss`` of the best constant prediction for these rows."""


# In this order, as far as a task has them.
_FIGURES: Final = ("loss", "window_loss", "accuracy", "auc", "f1", "ece", "rmse", "mae")


class ComparisonTable:
    """A row of figures for each learner, and one for the baseline; notebooks show it as a table, and ``print`` as text.

    It is made of a report of a comparison. ``rows`` are plain dicts by learner, and ``best`` is a learner's name.

    >>> report = {"best": "b", "learners": {"a": {"loss": 0.5, "window_loss": 0.4}, "b": {"loss": 0.3}},
    ...           "baseline": {"loss": 0.6}}
    >>> print(ComparisonTable(report))
              loss  window_loss
    a        0.500        0.400
    b *      0.300
    baseline 0.600
    >>> ComparisonTable(report).rows["baseline"]
    {'loss': 0.6}
    """

    def __init__(self, report: ComparedMetrics) -> None:
        self.best = report["best"]
        self.rows: dict[str, dict[str, float]] = {
            learner: {figure: metrics[figure] for figure in _FIGURES if figure in metrics}
            for learner, metrics in (*report["learners"].items(), ("baseline", report["baseline"]))
        }

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the figures, and a row of texts for each learner."""
        figures = [figure for figure in _FIGURES if any(figure in row for row in self.rows.values())]
        return figures, [
            [
                f"{learner} *" if learner == self.best else learner,
                *(f"{row[figure]:.3f}" if figure in row else "" for figure in figures),
            ]
            for learner, row in self.rows.items()
        ]

    def __str__(self) -> str:
        figures, rows = self._cells()
        return text_table(["", *figures], rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        figures, rows = self._cells()
        return html_table("learners (* is published)", ["", *figures], rows)


@dataclass(frozen=True)
class OnlineComparison:
    """The streams that :func:`compare_online` returns."""

    trainings: Mapping[str, OnlineTraining]
    """The training of each learner, by name."""
    metrics: Stream
    """:class:`ComparedMetrics` for each block of ``report_every`` records: the learners side by side, as a plain dict;
    ``ComparisonTable(report)`` shows it."""
    best: Stream
    """A ``ModelSnapshot`` for each version of the learner that is the best at that time, and for its last version when
    it becomes the best. Its parameters have one more entry, ``learner``: the name."""


@all_or_nothing
def compare_online(
    examples: Stream,
    learners: Mapping[str, Model | LearnerOptions],
    *,
    margin: float = 0.01,
    window: int = 10_000,
    report_every: int = 10_000,
    name: str | None = None,
    **shared: Unpack[LearnerOptions],
) -> OnlineComparison:
    """Train several learners on one stream, compare their predictions, and publish the best one.

    ``learners`` are models by name, as :func:`~streamiter.learn.train_online` takes them: None for the ready-made
    model, a function that makes a model, or a ``ForeignModel``. All other options of ``train_online`` are shared; a
    dict of options instead of a model has the options of one learner, ``{"model": …, "features": …}``.

    The first learner is the champion. After each block of ``report_every`` records another learner becomes the best if
    its loss over the last ``window`` rows is lower by the share ``margin`` at least. Only rows that all learners have
    predicted count, so the stream goes through one subtask, and each learner has one reader. A learner without
    predictions in a block, because it refuses all rows, is left out of that block; a million records later a warning is
    logged.

    Raises GraphError for options that cannot be used.

    >>> from streamiter import Flow
    >>> flow = Flow("trips")
    >>> trips = flow.from_items([{"km": n % 7, "sky": "ab"[n % 2], "late": n % 7 > 3} for n in range(700)])
    >>> learners = {"sky": {"features": ["sky"]}, "all": None}
    >>> comparison = compare_online(trips, learners, label="late", report_every=350)
    >>> metrics, best = comparison.metrics.collect(), comparison.best.collect()
    >>> flow.run().state, metrics.items[-1]["best"], best.items[-1].parameters["learner"]
    ('finished', 'all', 'all')
    """
    check_stream("compare_online", examples, "examples")
    if not isinstance(learners, Mapping):
        raise GraphError(
            f"compare_online(learners=): expected a dict of learners by name, given {learners!r}; write "
            '{"default": {}, "linear": {"shapes": False}}, for example'
        )
    if len(learners) < 2 or not all(isinstance(learner, str) and learner for learner in learners):
        raise GraphError(
            f"compare_online(learners=): expected two learners or more by name, given {list(learners)}; use "
            "train_online for one"
        )
    if not 0.0 <= margin < 1.0:
        raise GraphError(f"compare_online(margin=): expected a share from 0 to 1, given {margin}")
    window = whole_number("compare_online(window=)", window, 1, error=GraphError)
    report_every = whole_number("compare_online(report_every=)", report_every, 1, error=GraphError)
    named = step_names(examples.flow, name)
    options_of: dict[str, LearnerOptions] = {
        learner: {**shared, **(given if isinstance(given, dict) else {"model": given})}
        for learner, given in learners.items()
    }
    rows = _in_one_order(examples, options_of, named)
    trainings = {}
    told: list[Stream] = []
    for learner, options in options_of.items():
        if unknown := sorted(options.keys() - LearnerOptions.__annotations__):
            raise GraphError(
                f"compare_online: expected {', '.join(LearnerOptions.__annotations__)} as the options of the learner "
                f"{learner!r}, given {', '.join(unknown)}"
                f"{did_you_mean(unknown[0], LearnerOptions.__annotations__) or '; leave them out'}"
            )
        if isinstance(options.get("model"), ForeignModel):
            options["mode"] = "asynchronous"  # Its one owner learns in the order of the stream in any case.
        training = train_online(
            rows,
            **options,
            window=window,
            report_every=report_every,
            workers=1,
            name=learner if name is None else f"{name}: {learner}",
        )
        trainings[learner] = training
        told += [
            training.predictions.map(
                partial(of_learner, learner, "rows"), name=named(f"predictions of {learner}"), parallelism=1
            ),
            training.models.map(
                partial(of_learner, learner, "model"), name=named(f"models of {learner}"), parallelism=1
            ),
        ]
    compared = (
        told[0]
        .union(*told[1:])
        .process(
            lambda: Compare(list(learners), margin=margin, window=window, report_every=report_every),
            name=named("compare"),
            parallelism=1,
        )
    )
    return OnlineComparison(trainings, compared, compared.side_output(BEST))


def _in_one_order(examples: Stream, options_of: Mapping[str, LearnerOptions], named: Callable[[str], str]) -> Stream:
    """Return the stream through one subtask, so that each record has the same number for all learners."""
    late = {learner: labels for learner, options in options_of.items() if (labels := options.get("labels")) is not None}
    for labels in late.values():
        examples = with_event_time(examples, labels, named)
    for learner, labels in late.items():
        if labels.otherwise is not None and not is_in_event_time(examples, labels):
            raise GraphError(
                "compare_online: expected labels= with otherwise= only in event time, since by the clock learners come "
                f"to the end of a wait at different places, given {labels.otherwise!r} for the learner {learner!r}; "
                "put .event_time(…) behind the source, or leave otherwise= out"
            )
        if not is_in_event_time(examples, labels):  # The training need not tell it again.
            options_of[learner]["labels"] = replace(labels, time="processing")
    tell_of_clock(examples, *late.values())
    return examples.map_batch(lambda batch: batch, name=named("one order"), parallelism=1)


BEST: Final = OutputTag("best")
"""The side output of :class:`Compare`: the versions of the best learner."""


class ToldOfLearner(TypedDict, total=False):
    """What a learner sends: predictions, or a version of its model."""

    learner: str
    rows: PredictedRows
    model: ModelSnapshot


def row_matrix(rows: PredictedRows) -> Floats:
    """Return predictions, targets, weights, classes, numbers and, by number, the record or question of each row.

    A record settles several questions where waits end, so its number does not say which row is which.
    """
    numbers = rows["numbers"]
    classes = np.asarray(rows.get("classes", np.zeros(len(numbers))), dtype=np.float64)
    which = rows.get("questions", numbers)
    return np.stack([rows["predictions"], rows["targets"], rows["weights"], classes, numbers, which])


def of_learner(learner: str, what: str, record: Any) -> dict[str, Any]:
    """Return a record of :class:`ToldOfLearner`."""
    return {"learner": learner, what: record}


MATRIX_ROWS: Final = 6
"""The number of rows of :func:`row_matrix`."""
ROW_NUMBERS: Final = 4
"""The row of it with the numbers of the records."""
WHICH: Final = 5
"""The row of it that says which record, or question, each prediction is of."""

# At most this many records of a learner wait: 48 MB of predictions, and a tenth of a gigabyte to find late labels.
_AHEAD_MAX: Final = 1_000_000


class SameRows(DeclaredOperator):
    """The base of operators that compare learners: predictions wait until all learners have passed their record.

    A learner that joins later would number its rows from 0, and never meet the others, unless it learns from the
    mini-batches of another training (``train_online(beside=)``).
    """

    starts_alone = False

    _next: dict[str, int] = declared(form=COPIED)
    """For each learner the number after its last record."""
    _waiting: dict[str, list[Floats]] = declared(form=LISTS_BY_KEY)
    """For each learner matrices of rows that wait, with the rows of ``row_matrix``."""
    _has_warned = declared(False)

    def __init__(self, learners: Sequence[str]) -> None:
        self._learners = list(learners)
        self._next = dict.fromkeys(self._learners, 0)
        self._waiting = {learner: [] for learner in self._learners}

    def keep_rows(self, learner: str, columns: Floats, block: int) -> None:
        """Let rows wait; a learner that is further behind than the memory has room for, and ``block``, is not waited
        for.
        """
        self._waiting[learner].append(columns)
        self._next[learner] = int(columns[ROW_NUMBERS, -1]) + 1
        limit = self._next[learner] - block - _AHEAD_MAX
        for slow, following in self._next.items():
            if following < limit:
                self._next[slow] = limit
                self._warn_once(learner, slow)

    def _warn_once(self, learner: str, slow: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "compare_online: %r is %d records ahead of %r, so these records are not compared; see the records that "
                "the steps of %r reject",
                learner,
                _AHEAD_MAX,
                slow,
                slow,
            )

    def take_rows(self, learner: str, stop: int) -> Floats:
        """Return the rows of a learner before ``stop``; they wait no longer."""
        waiting = self._waiting[learner]
        whole = next((place for place, rows in enumerate(waiting) if rows[ROW_NUMBERS, -1] >= stop), len(waiting))
        taken, self._waiting[learner] = waiting[:whole], waiting[whole:]
        if whole < len(waiting):
            at = int(np.searchsorted(waiting[whole][ROW_NUMBERS], stop))
            taken.append(waiting[whole][:, :at])
            self._waiting[learner][0] = waiting[whole][:, at:]
        return np.concatenate([np.empty((MATRIX_ROWS, 0)), *taken], axis=1)


class UnpairedRows:
    """Rows of one learner that others have not settled yet, with the rows of ``row_matrix``, in their order.

    They are found by their record or question, so a call costs as much as what it names.

    >>> unpaired = UnpairedRows(np.arange(18.0).reshape(6, 3))
    >>> unpaired.remove(np.array([16.0]))
    >>> unpaired.found(np.array([17.0, 16.0])).tolist()
    [[2.0], [5.0], [8.0], [11.0], [14.0], [17.0]]
    """

    def __init__(self, rows: Floats) -> None:
        self._rows = rows
        self._used = rows.shape[1]
        self._places = dict(zip(rows[WHICH].tolist(), range(self._used), strict=True))
        """The column of each row that is left, in order."""

    def __len__(self) -> int:
        return len(self._places)

    def all(self) -> Floats:
        """Return a copy of all rows."""
        return self._rows[:, list(self._places.values())]

    def found(self, which: Floats) -> Floats:
        """Return those of these records or questions that are here, in their order."""
        places = (self._places.get(each) for each in which.tolist())
        return self._rows[:, sorted(place for place in places if place is not None)]

    def remove(self, which: Floats) -> None:
        """Forget rows of these records or questions, if they are here."""
        for each in which.tolist():
            self._places.pop(each, None)

    def add(self, rows: Floats, most: int) -> None:
        """Add rows, which are not here yet; of more than ``most`` the first ones are forgotten."""
        if self._used + rows.shape[1] > self._rows.shape[1]:
            left = self.all()
            self._used = left.shape[1]
            self._places = dict(zip(left[WHICH].tolist(), range(self._used), strict=True))
            self._rows = np.pad(left, ((0, 0), (0, self._used + 2 * rows.shape[1])))
        stop = self._used + rows.shape[1]
        self._rows[:, self._used : stop] = rows
        self._places |= zip(rows[WHICH].tolist(), range(self._used, stop), strict=True)
        self._used = stop
        self.remove(np.array(list(islice(self._places, max(0, len(self) - most)))))


_UNPAIRED: Final = Form(
    lambda unpaired: {learner: rows.all() for learner, rows in unpaired.items()},
    lambda state: {learner: UnpairedRows(rows) for learner, rows in state.items()},
)


class Compare(SameRows):
    """Compares learners on the rows that all of them have predicted: emits metrics, and the best model as :data:`BEST`.

    A block is ``report_every`` records of the stream. It is counted when each learner has predicted its last record, or
    a later one.
    """

    _best: str = declared()
    _models: dict[str, ModelSnapshot] = declared(made=dict, form=COPIED)
    """The last version of each learner."""
    _start = declared(0)
    """The number of the first record of the block."""
    _earlier_targets: tuple[float, float] | None = declared(None)
    """What labels seemed to be before they were numbers (see ``PredictedRows``)."""
    _validations: dict[str, ProgressiveValidation] = declared(made=dict, form=NESTED_BY_KEY)
    _has_late_labels = declared(False)
    _unpaired: dict[str, UnpairedRows] = declared(made=dict, form=_UNPAIRED)
    """For each learner the rows whose late labels others did not know yet."""

    def __init__(self, learners: Sequence[str], *, margin: float, window: int, report_every: int) -> None:
        super().__init__(learners)
        self._margin = margin
        self._window = window
        self._report_every = report_every
        self._best = self._learners[0]

    def process(self, told: ToldOfLearner, out: Output) -> None:
        """Take over predictions or a version of a learner."""
        learner = told["learner"]
        if "model" in told:
            self._models[learner] = told["model"]
            if learner == self._best:
                self._publish(out)
            return
        rows = told["rows"]
        if not len(rows["numbers"]):
            return
        if rows["task"] == "regression":
            self._earlier_targets = rows.get("earlier_targets", self._earlier_targets)
        self._check_kind(learner, rows)
        columns = row_matrix(rows)
        self._has_late_labels = self._has_late_labels or "questions" in rows
        if rows["task"] == "classification" and self._earlier_targets is not None:
            columns = rows_as("regression", columns, self._earlier_targets)
        self.keep_rows(learner, columns, self._report_every)
        while min(self._next.values()) >= self._start + self._report_every:
            self._end_block(out)

    def _check_kind(self, learner: str, rows: PredictedRows) -> None:
        """Make the validation of a learner. Raises ModelError for numbers among probabilities.

        Labels that seemed to be of two kinds may turn out to be numbers, or classes. One learner finds that before the
        others.
        """
        kind = rows["task"]
        if kind == "classification" and self._earlier_targets is not None:
            kind = "regression"
        if learner not in self._validations or self._validations[learner].kind != kind:
            self._add_kind(learner, kind, rows)

    def _add_kind(self, learner: str, kind: ValidationKind, rows: PredictedRows) -> None:
        own = validation_of(kind, rows.get("loss"), self._window)
        self._validations.setdefault(learner, own)
        for other, validation in self._validations.items():
            is_late = self._earlier_targets is not None or other == learner
            if validation.kind == "classification" != kind and is_late:
                given = self._earlier_targets or rows.get("earlier_targets", (0.0, 1.0))
                self._validations[other] = validation.continued_as(kind, given)
                self._waiting[other] = [rows_as(kind, columns, given) for columns in self._waiting[other]]
                if other in self._unpaired:
                    self._unpaired[other] = UnpairedRows(rows_as(kind, self._unpaired[other].all(), given))
            elif (validation.kind == "regression") != (kind == "regression"):
                raise ModelError(
                    f"compare_online: expected learners of one task, given {other!r}, which does {validation.kind}, "
                    f'and {learner!r}, which does {kind}; give task= "classification" or "regression"'
                )
            elif kind == "regression" and own.loss != validation.loss:
                raise ModelError(
                    f"compare_online: expected learners of one loss, given {other!r} with {validation.loss} and "
                    f"{learner!r} with {own.loss}, which cannot be compared; give them the same loss="
                )

    def _end_block(self, out: Output) -> None:
        """Count the rows of the block that all learners have predicted."""
        self._start += self._report_every
        new = {learner: self.take_rows(learner, self._start) for learner in self._learners}
        blocks = self._rows_to_pair(new)
        shared = reduce(np.intersect1d, [block[WHICH] for block in blocks.values()]) if blocks else np.empty(0)
        if self._has_late_labels:
            for learner in blocks:
                unpaired = self._unpaired.setdefault(learner, UnpairedRows(np.empty((MATRIX_ROWS, 0))))
                unpaired.remove(shared)
                rows = new[learner][:, ~np.isin(new[learner][WHICH], shared)]
                if len(unpaired) + rows.shape[1] > _AHEAD_MAX:
                    self._warn_once(learner, next(other for other in self._learners if other != learner))
                unpaired.add(rows, _AHEAD_MAX)
        if not len(shared):
            return
        for learner, (predictions, targets, weights, classes, _, rows) in blocks.items():
            at = np.isin(rows, shared)
            self._validations[learner].update(predictions[at], targets[at], weights[at], classes=classes[at])
        validations = self._validations
        metrics = {learner: validations[learner].metrics() for learner in self._learners if learner in validations}
        losses = {
            learner: metrics[learner].get("window_loss", np.inf) if learner in blocks else np.inf
            for learner in self._learners
        }
        first = min(losses, key=losses.__getitem__)
        if losses[first] < losses[self._best] * (1.0 - self._margin):
            self._best = first
            self._publish(out)
        some = next(iter(metrics.values()))
        names = {"loss": "baseline_loss", "window_loss": "window_baseline_loss"}
        baseline = {name: some[own] for name, own in names.items() if own in some}
        report: ComparedMetrics = {"best": self._best, "learners": metrics, "baseline": baseline}
        out.emit(report)

    def _rows_to_pair(self, new: dict[str, Floats]) -> dict[str, Floats]:
        """Return the rows of the learners that are compared, with late labels of before that the others lacked.

        A learner without rows of the block is left out, unless it has predicted rows that the others bring now. The
        others are then compared on rows that wait for that one, too.
        """
        brought = np.unique(np.concatenate([block[WHICH] for block in new.values()]))
        earlier = {learner: rows.found(brought) for learner, rows in self._unpaired.items()}
        compared = [each for each in new if new[each].shape[1] or (each in earlier and earlier[each].shape[1])]
        if len(compared) < len(new):
            earlier = {learner: rows.all() for learner, rows in self._unpaired.items()}
        return {each: np.concatenate([earlier.get(each, new[each][:, :0]), new[each]], axis=1) for each in compared}

    def _publish(self, out: Output) -> None:
        if (model := self._models.get(self._best)) is not None:
            parameters = {**model.parameters, "learner": self._best}
            out.emit(ModelSnapshot(parameters, model.records, model.metrics, model.epoch), tag=BEST)

    def finish(self, out: Output) -> None:
        while max(self._next.values()) > self._start:
            self._end_block(out)

    def definition(self) -> Definition:
        return {"kind": "compare_online", "learners": sorted(self._learners)}

    def restore(self, state: dict[str, Any]) -> None:
        for learner, stored in state["validations"].items():
            self._validations[learner] = validation_of(stored["kind"], stored["loss"], self._window)
        super().restore(state)
