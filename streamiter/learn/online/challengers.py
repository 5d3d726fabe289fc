"""A challenger beside a training: both are compared row by row, with a bound that holds at any time one looks.

:class:`MeanDifference` is the mean of bounded differences with its confidence sequence. :class:`CompareChallenger` is
the step that pairs the predictions of both learners, and passes on the versions of the learner that is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from streamiter.errors import ModelError
from streamiter.flow.stream import Stream
from streamiter.learn.losses import LogLoss, loss_of_plain
from streamiter.learn.online.comparison import (
    MATRIX_ROWS,
    ROW_NUMBERS,
    WHICH,
    SameRows,
    ToldOfLearner,
    of_learner,
    row_matrix,
)
from streamiter.learn.online.train_online import OnlineTraining
from streamiter.learn.quality.validation import PredictedRows
from streamiter.models.reader import last_update
from streamiter.models.rollbacks import Rollbacks
from streamiter.models.update import LEARNER_ENTRY, NO_RANK, ModelSnapshot, ModelUpdate, Rank, learner_in, shown_rank
from streamiter.operators.declared_state import COPIED, NESTED, DeclaredState, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.helpers.clock import is_due
from streamiter.values.numbers import Floats
from streamiter.values.records import OutputTag

CONFIDENCE: Final = 0.95
"""The probability with which a bound is right at all times at once."""

DIFFERENCE_MAX: Final = 2.0
"""Larger differences of losses count as this one. Of log losses it is a factor of 7 between two probabilities; a larger
limit makes the bound wider in the first thousands of rows, where its width is about 29 / rows for this one."""

# Rates of the supermartingales whose bounds are combined, each half of the one before: they serve sums of squares of up
# to 10¹⁰ · DIFFERENCE_MAX². Each has its share of the error.
_RATES: Final = 0.9 * 0.5 ** np.arange(16)
_PSI: Final = -np.log1p(-_RATES) - _RATES
_NEEDED: Final = math.log(2.0 * len(_RATES) / (1.0 - CONFIDENCE))


class Bound(NamedTuple):
    """The mean of the differences, and what the mean of their expectations is between."""

    mean: float
    least: float
    most: float


class MeanDifference(DeclaredState):
    """The mean of differences from ``-DIFFERENCE_MAX`` to ``DIFFERENCE_MAX``, and a bound that holds at any time.

    With the probability :data:`CONFIDENCE`, :meth:`bound` contains after each row the mean of the expected differences
    of all rows so far, each given the rows before it. So one may look as often as one likes, and stop when one likes;
    rows may depend on each other, and the expectation may change. Source: the empirical-Bernstein confidence sequence
    of Howard, Ramdas, McAuliffe and Sekhon (2021), "Time-uniform, nonparametric, nonasymptotic confidence sequences",
    theorem 4, for two forecasters as in Choe and Ramdas (2023), "Comparing sequential forecasters". For each rate λ,
    exp(λ S/c - ψ(λ) V/c²) with ψ(λ) = -log(1 - λ) - λ is a supermartingale, where S is the sum of the deviations from
    the expectations, V that of the squared deviations from the mean of the rows before, and c the width of the
    differences; the rates share the error.

    >>> difference = MeanDifference()
    >>> difference.add(np.tile([0.25, -0.5], 500))
    >>> [round(number, 3) for number in difference.bound()]
    [-0.125, -0.194, -0.056]
    """

    count = declared(0)
    """The number of differences."""
    _sum = declared(0.0)
    _squares = declared(0.0)
    """The sum of the squared deviations from the mean of the differences before."""

    def add(self, differences: Floats) -> None:
        """Count differences, in their order. The sums do not depend on how many are added at a time."""
        if not len(differences):
            return
        sums = np.cumsum(np.concatenate([[self._sum], differences]))
        counts = np.arange(self.count, self.count + len(differences))
        deviations = differences - sums[:-1] / np.maximum(counts, 1)
        self._squares = float(np.cumsum(np.concatenate([[self._squares], np.square(deviations)]))[-1])
        self._sum, self.count = float(sums[-1]), self.count + len(differences)

    def bound(self) -> Bound:
        """Return the mean and its bound; before the first row everything is possible."""
        if not self.count:
            return Bound(0.0, -DIFFERENCE_MAX, DIFFERENCE_MAX)
        width = 2.0 * DIFFERENCE_MAX
        half = width * float(np.min((_NEEDED + _PSI * (self._squares / width**2)) / _RATES)) / self.count
        mean = self._sum / self.count
        return Bound(mean, max(mean - half, -DIFFERENCE_MAX), min(mean + half, DIFFERENCE_MAX))


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """What a version of a challenger tells about the rows that both learners have predicted, as its metrics."""

    compared_rows: float
    """The number of these rows."""
    challenger_loss: float
    """The mean loss of the challenger."""
    champion_loss: float
    """The mean loss of the champion."""
    loss_difference: float
    """The mean difference, below 0 if the challenger is better. Other losses than log losses are divided by the mean
    loss of the champion so far."""
    loss_difference_least: float
    """The mean of the expected differences is at least this number, and …"""
    loss_difference_most: float
    """… at most this number, at all times with the probability 95 %."""
    cut_differences: float
    """The number of rows whose difference was cut to ±2."""

    @staticmethod
    def of(metrics: dict[str, float]) -> ComparedRows | None:
        """Return what these metrics of a version tell; None if they tell nothing."""
        own = {each.name: metrics[each.name] for each in fields(ComparedRows) if each.name in metrics}
        return ComparedRows(**own) if len(own) == len(fields(ComparedRows)) else None

    @property
    def verdict(self) -> Literal["better", "worse", "not known yet"]:
        """Whether the challenger is better, or worse, beyond chance.

        It is better only if its mean loss with all large differences is smaller, too.
        """
        if self.loss_difference_least > 0.0:
            return "worse"
        is_better = self.loss_difference_most < 0.0 and self.challenger_loss < self.champion_loss
        return "better" if is_better else "not known yet"

    @property
    def in_words(self) -> str:
        """The verdict with its figures."""
        return (
            f"{self.verdict}: over {self.compared_rows:,.0f} rows its loss is {self.challenger_loss:.4g}, that of the "
            f"champion {self.champion_loss:.4g}, and the difference is from {self.loss_difference_least:.4g} to "
            f"{self.loss_difference_most:.4g} with 95 %"
        )


CHALLENGER: Final = OutputTag("challenger")
"""The side output of :class:`CompareChallenger`: the versions of the challenger under its own name."""

CHALLENGER_STOPPED: Final = "challenger_stopped"
"""The metric of versions to serve that are published while the challenger has stopped: 1."""

# Other losses are divided by the mean loss of the champion, which the first rows tell.
_ROWS_OF_SCALE: Final = 100

# At most this many late labels of each learner wait for those of the other: half a megabyte, searched with each batch.
_UNPAIRED_MAX: Final = 10_000

# A version tells of the rows compared so far; where no other version follows, it is told again after this time.
_TOLD_AGAIN_S: Final = 2.0


def challenged(
    champion: OnlineTraining,
    challenger: OnlineTraining,
    rollbacks: Rollbacks,
    *,
    after: int,
    name: str,
    learners: Sequence[str] = (),
    has_stopped: Callable[[], bool] = lambda: False,
) -> tuple[Stream, Stream]:
    """Compare two trainings, the second of which is beside the first; return two streams of versions.

    The first stream has those to publish under the name of the model: of the learner that the last rollback names. The
    second one has those of the challenger, with the fields of :class:`ComparedRows` as metrics. ``rollbacks`` are those
    of the challenger: the name of the model, and its learner. ``learners`` are both in words: where
    these are others than in a checkpoint, the comparison begins anew. ``has_stopped`` says whether the flow runs
    without the training of the challenger; the versions to serve tell it then.
    """
    learner = str(rollbacks.learner)
    told = [
        stream.map(partial(of_learner, of, what), name=f"{name}: {what} of {of or 'the champion'}", parallelism=1)
        for of, training in (("", champion), (learner, challenger))
        for what, stream in (("rows", training.predictions), ("model", training.models))
    ]
    compared = (
        told[0]
        .union(*told[1:])
        .process(
            lambda: CompareChallenger(rollbacks, after, learners, has_stopped=has_stopped()),
            name=f"{name}: compare",
            parallelism=1,
        )
    )
    return compared, compared.side_output(CHALLENGER)


class CompareChallenger(SameRows):
    """Compares a champion and a challenger; emits the versions to serve, and those of the challenger.

    The records are dicts of ``learner``, ``""`` or the name of the challenger, and ``rows`` or ``model``. Served are
    the versions of the learner that the last rollback of the model names, at first of the champion. A version of the
    challenger has the entry ``learner``; as :data:`CHALLENGER`, it has the fields of :class:`ComparedRows` as metrics.
    Until ``after`` records after its first label, the challenger only learns.
    """

    _unpaired: list[Floats] = declared(made=lambda: [np.empty((MATRIX_ROWS, 0))] * 2)
    """Of each learner the late labels that the other one has not settled yet, with the rows of ``row_matrix``."""
    _from: int | None = declared(None)
    """The number of the first record, or question, that counts; None before the first label of the challenger."""
    _losses: list[float] = declared(made=lambda: [0.0, 0.0])
    """The sums of the losses of champion and challenger over the rows that count."""
    _rows = declared(0)
    _cut = declared(0)
    _difference = declared(made=MeanDifference, form=NESTED)
    _served = declared("")
    _since: tuple[int, int] = declared(NO_RANK)
    """The last rollback that the served learner follows."""
    _has_timer = declared(False)
    _compared_learners: list[str] = declared(form=COPIED)
    """Champion and challenger in words."""

    def __init__(
        self, rollbacks: Rollbacks, after: int, learners: Sequence[str] = (), *, has_stopped: bool = False
    ) -> None:
        super().__init__(["", str(rollbacks.learner)])
        self._compared_learners = list(learners)
        self._rollbacks = rollbacks
        self._after = after
        self._has_stopped = has_stopped
        self._untold: ModelUpdate | None = None
        """The version of a promoted challenger that answers, and does not tell yet that the challenger has stopped."""
        self._last: tuple[ModelSnapshot, int, float] | None = None
        """The last version of the challenger since the start, the rows it told of, and when; too large for the state.
        """

    async def open(self, context: Context) -> None:
        """Find the learner that the last rollback names. Raises ModelError if it is none of the two."""
        self._context = context
        newest = await last_update(self._rollbacks.topic, self._rollbacks.model, on_error="skip", clock=context.clock)
        if newest is not None and newest.since_rollback is not None:
            learner = learner_in(newest.parameters)
            if learner not in self._learners:
                raise ModelError(
                    f"model {self._rollbacks.model!r}: expected a last rollback to a version of the service itself or "
                    f"of its challenger {self._rollbacks.learner!r}, given {shown_rank(newest.since_rollback)}, of "
                    f"{learner!r}; name the file of that one in [challenger], or roll back to another version"
                )
            self._follow(newest.since_rollback, learner)
            if self._has_stopped and learner and CHALLENGER_STOPPED not in newest.metrics:
                self._untold = newest

    def _follow(self, since: Rank, learner: str) -> None:
        if since > self._since and learner in self._learners:
            self._since, self._served = since, learner

    def process(self, told: ToldOfLearner, out: Output) -> None:
        """Take over predictions or a version of a learner."""
        if "model" in told:
            self._publish(told["learner"], told["model"], out)
        elif len(told["rows"]["numbers"]):
            self._count(told["learner"], told["rows"])

    def _publish(self, learner: str, model: ModelSnapshot, out: Output) -> None:
        since = model.since_rollback or NO_RANK
        self._follow((since[0], since[1]), learner)
        if learner:
            self._tell(model, out)
            model = replace(model, parameters={**model.parameters, LEARNER_ENTRY: learner})
        if learner == self._served and tuple(since) >= tuple(self._since):
            out.emit(self._told_of_stop(model))
        elif self._untold is not None and self._untold.since_rollback == self._since:
            again = self._untold
            snapshot = ModelSnapshot(again.parameters, again.records, again.metrics, again.epoch, self._since)
            out.emit(self._told_of_stop(snapshot))
            self._untold = None

    def _told_of_stop(self, model: ModelSnapshot) -> ModelSnapshot:
        return replace(model, metrics={**model.metrics, CHALLENGER_STOPPED: 1.0}) if self._has_stopped else model

    def _tell(self, model: ModelSnapshot, out: Output) -> None:
        """Emit a version of the challenger with what is known now."""
        compared = self._compared()
        metrics = {**model.metrics, **({} if compared is None else asdict(compared))}
        # The rollbacks that it follows are those of the other name.
        out.emit(replace(model, metrics=metrics, since_rollback=None), tag=CHALLENGER)
        self._last = model, self._rows, self._context.clock.monotonic_s()

    def on_timer(self, payload: object, out: Output) -> None:
        """Tell of the rows that were compared after the last version, if no other one has come."""
        self._has_timer = False
        if self._last is not None and self._last[1] < self._rows:
            model, _, told_s = self._last
            if is_due(wait_s := told_s + _TOLD_AGAIN_S - self._context.clock.monotonic_s()):
                self._tell(model, out)
            else:
                self._set_timer(wait_s)

    def finish(self, out: Output) -> None:
        """Tell of the rows that were compared after the last version: behind the last record no timer fires."""
        if self._last is not None and self._last[1] < self._rows:
            self._tell(self._last[0], out)

    def _set_timer(self, wait_s: float) -> None:
        if not self._has_timer:
            self._has_timer = True
            self._context.set_timer(wait_s)

    def _compared(self) -> ComparedRows | None:
        if not self._difference.count:
            return None
        champion, challenger = (loss / self._rows for loss in self._losses)
        return ComparedRows(self._rows, challenger, champion, *self._difference.bound(), self._cut)

    def _count(self, learner: str, rows: PredictedRows) -> None:
        columns = row_matrix(rows)
        if not any(self._next.values()):  # Both learners number their rows alike, and not from 0 on.
            self._next = dict.fromkeys(self._learners, int(rows["numbers"][0]))
        if learner and self._from is None:
            self._from = int(columns[ROW_NUMBERS, 0]) + self._after
        self.keep_rows(learner, columns, 0)
        stop = min(self._next.values())
        taken = [self.take_rows(each, stop) for each in self._learners]
        # Questions from before the challenger had learned are never answered by both.
        champion, challenger = (
            both[:, both[WHICH] >= (self._from or 0)]
            for both in map(partial(np.concatenate, axis=1), zip(self._unpaired, taken, strict=True))
        )
        _, first, second = np.intersect1d(champion[WHICH], challenger[WHICH], return_indices=True)
        if "questions" in rows:  # Learners may settle a question at different events, while they learn of its delay.
            self._unpaired = [
                np.delete(champion, first, axis=1)[:, -_UNPAIRED_MAX:],
                np.delete(challenger, second, axis=1)[:, -_UNPAIRED_MAX:],
            ]
        shared = np.stack([champion[:, first], challenger[:, second]])
        shared = shared[:, :, shared[0, 2] > 0.0]
        if shared.size:
            # In the order in which the second of both was settled, whichever learner is ahead.
            order = np.argsort(shared[:, ROW_NUMBERS].max(axis=0), kind="stable")
            self._add(rows, shared[:, :, order])
            self._set_timer(_TOLD_AGAIN_S)

    def _add(self, rows: PredictedRows, shared: Floats) -> None:
        """Count rows of both learners: by learner their predictions and targets."""
        is_plain = rows["task"] == "regression"
        loss = loss_of_plain(rows.get("loss")) if is_plain else LogLoss()
        # A prediction for several classes is the probability of the class that came.
        targets = np.ones_like(shared[:, 1]) if rows["task"] == "classes" else shared[:, 1]
        losses = np.stack([loss.values(shared[place, 0], targets[place]) for place in (0, 1)])
        sums = np.cumsum(np.column_stack([self._losses, losses]), axis=1)
        counts = self._rows + np.arange(losses.shape[1])
        differences = losses[1] - losses[0]
        if is_plain:
            mean = sums[0, :-1] / np.maximum(counts, 1)
            is_known = (counts >= _ROWS_OF_SCALE) & (mean > 0.0)
            differences = differences[is_known] / mean[is_known]
        self._losses, self._rows = sums[:, -1].tolist(), self._rows + losses.shape[1]
        self._cut += int(np.count_nonzero(np.abs(differences) > DIFFERENCE_MAX))
        self._difference.add(np.clip(differences, -DIFFERENCE_MAX, DIFFERENCE_MAX))

    def definition(self) -> Definition:
        return {"kind": "compare challenger", "challenger": self._rollbacks.learner}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state; a rollback since then counts. Rows that other learners have predicted do not."""
        found, learners = (self._since, self._served), self._compared_learners
        super().restore(state)
        self._since = (self._since[0], self._since[1])
        self._follow(*found)
        if learners != self._compared_learners:
            self._compared_learners, self._from = learners, None
            self._losses, self._rows, self._cut, self._difference = [0.0, 0.0], 0, 0, MeanDifference()
