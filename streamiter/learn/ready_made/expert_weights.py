"""The state of the adaptive linear model's arithmetic: columns, experts, and the one model that they make together.

``streamiter.learn.ready_made.row_steps`` has the arithmetic itself. It is imported when the first state is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, OtherModel
from streamiter.learn.labels import LabelKind
from streamiter.learn.losses import PlainLoss
from streamiter.learn.ready_made.model_rows import CONFIRMED, ModelRows, RowSteps
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.values.crossed_rows import Cross, crossed_fields
from streamiter.values.helpers.compiled import compiled_code_begins, saying_that_it_compiles
from streamiter.values.numbers import ROUNDING, Floats, Indices, is_number

# From 0.01 to 0.1 the best on 5 streams with drift, with one rate: 10% less loss, and 5% less on 8 other streams.
# With 0 single rows have much influence: the loss of the flights grows by 43%.
SQUARES_KEPT: Final = 0.03

_PROBABILITY_MIN: Final = 1e-300

SHARES_OF_CLASSES: Final = (-0.5, 0.5, 0.0)
"""Of the score of two labels, the shares that their classes have, and a class that has not come."""

# A published model does not say how many rows it has learned from; it counts as this many, and is soon corrected.
ROWS_OF_A_START: Final = 30.0

# The first columns have room without a copy of the state.
_SPARE_SLOTS: Final = 16
# More numeric columns than this are rare, and make a copy of the slots of all hashed columns.
_SPARE_NUMERIC: Final = 4_096


def checked_rates(given: object) -> tuple[float, ...]:
    """Return learning rates for :class:`ExpertWeights`. Raises ConfigurationError unless there are one to three."""
    rates = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not (0 < len(rates) <= 3 and all(is_number(rate) and 0.0 < rate < 1e6 for rate in rates)):
        raise ConfigurationError(
            f"AdaptiveLinearModel(rates=): expected one to three numbers above 0, such as (0.5,), given {given!r}"
        )
    return tuple(map(float, rates))


def check_task(owner: str, kind: LabelKind | None, task: str | None) -> None:
    """Raise OtherModel if labels of this kind do not fit the task; a kind of None is not known yet."""
    if kind is not None and task not in (None, known := "regression" if kind == "number" else "classification"):
        raise OtherModel(f"{owner}: expected a model of a {task}, given one of a {known}; learn it with its own task")


def check_published(owner: str, published: Mapping[str, Any], hashed: int) -> None:
    """Raise ModelError for arrays that no model with this many hashed columns has published."""
    LinearPredictor(dict(published), owner)  # Refuses arrays of other shapes.
    stop, places = published.get("width") or hashed, published["places"]
    if len(places) and not 0 <= places[0] <= places[-1] < stop:
        raise ModelError(
            f"{owner}: expected 'places' from 0 to {stop - 1}, given {places[0]} to {places[-1]}; give the parameters "
            "of a published model as they are"
        )


def fitted(
    given: Mapping[str, Any], state: Mapping[str, Any] | None, crosses: Sequence[Cross], bits: int
) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Return parameters and state of a version for a model with other crosses or bits, and what is lost.

    Columns of fields are kept, and the columns of crosses that are still made. Places of texts mean nothing with other
    bits.
    """
    from streamiter.learn.ready_made.row_steps import CLIP, STATISTICS

    before, places = [(first, second) for first, second in given.get("crosses", ())], np.asarray(given["places"])
    has_places = "width" in given or given["bits"] == bits
    gone = [" × ".join(cross) for cross in before if cross not in crosses]
    of_places = np.full(len(places), has_places)

    def stays(fields: Sequence[str]) -> tuple[list[str], npt.NDArray[np.bool_]]:
        return [name for name in fields if name not in gone], np.array([name not in gone for name in fields], np.bool_)

    def of_crosses(earlier: Floats, fields: Sequence[str], of_fields: Floats) -> Floats:
        """Return the statistics of the crossed fields: as they were, or the statistics of their columns."""
        known = dict(zip(fields, of_fields, strict=True)) | dict(zip(crossed_fields(before), earlier, strict=True))
        none = np.zeros(of_fields.shape[1])
        return np.array([known.get(field, none) for field in crossed_fields(crosses)]).reshape(-1, len(none))

    fields, kept = stays(given["fields"])
    columns = np.concatenate([kept, of_places])
    made = {name: value for name, value in given.items() if name not in ("crosses", "cross_mean", "cross_deviation")}
    made |= {name: np.asarray(given[name])[columns] for name in ("weights", "center", "limit")}
    made |= {"fields": fields, "places": places[of_places], "bits": bits}
    if (shapes := given.get("shapes")) is not None:
        members = [member | {"slopes": np.asarray(member["slopes"])[kept]} for member in shapes["members"]]
        names = [
            _before_other_bits(name) if kind == "category" and not has_places else name
            for name, kind in zip(shapes["fields"], shapes["kinds"], strict=True)
        ]
        categories = np.asarray(shapes["categories"])[of_places]
        made["shapes"] = {**shapes, "members": members, "fields": names, "categories": categories}
    if crosses:
        earlier = np.column_stack([given["cross_mean"], given["cross_deviation"]] if before else [[], []])
        scales = np.column_stack([given["center"], np.asarray(given["limit"]) / CLIP])[: len(kept)]
        mean, deviation = of_crosses(earlier, given["fields"], scales).T
        made |= {"crosses": [list(cross) for cross in crosses], "cross_mean": mean, "cross_deviation": deviation}
    if state is not None:
        weights, fields_before = state["weights"], state["fields"]["fields"]
        all_fields, all_kept = stays(fields_before)
        numeric = weights["columns"][len(places) + 1 :, :STATISTICS]
        statistics = of_crosses(np.asarray(state["crosses"]["columns"]), fields_before, numeric)
        weights = weights | {
            "hashed": given.get("width", 2**bits),
            "numeric": len(all_fields),
            "places": places[of_places],
            "columns": weights["columns"][np.concatenate([of_places, [True], all_kept])],
        }
        if (shapes := weights.get("shapes")) is not None:
            weights["shapes"] = _of_kept_numbers(shapes, all_kept, has_places=has_places)
        made_crosses = {"crosses": [list(cross) for cross in crosses], "columns": statistics}
        known = {**state["fields"], "fields": all_fields}
        state = {**state, "fields": known, "bits": bits, "crosses": made_crosses, "weights": weights}
        state["first rows"] = None  # They have the earlier columns.
        if not has_places:
            names = list(map(_before_other_bits, state["categories"]["fields"]))
            nothing = {"counts": [0] * len(names), "hashed": 0, "places": [], "bins": []}
            state["categories"] = {**state["categories"], "fields": names, **nothing}
    told = f"kept {len(fields):,} fields and {np.count_nonzero(of_places):,} of {len(places):,} weights of texts"
    lost = [f"the weights of the crosses {', '.join(gone)}"] if gone else []
    if not has_places:
        lost += [f"the weights of texts, which are hashed to {bits} bits now, and were to {given['bits']}"]
    return made, state, f"{told}; lost {' and '.join(lost) or 'nothing'}"


def _before_other_bits(field: str) -> str:
    """Return another name for a category whose texts have other places now: its tables stay, and its bins end."""
    return f"{field} before other bits"


def _of_kept_numbers(shapes: Mapping[str, Any], kept: npt.NDArray[np.bool_], *, has_places: bool) -> dict[str, Any]:
    """Return a state of shapes without some numeric columns, which have no tables, and without places of texts."""
    numbers = np.cumsum(kept) - 1
    sources = [int(numbers[source]) if source >= 0 else source for source in shapes["columns"]["sources"]]
    rows = np.append(True, kept)  # The first one is of the intercept.
    members = [
        {**member, "numeric": int(kept.sum()), "columns": member["columns"][rows]} for member in shapes["members"]
    ]
    columns = {**shapes["columns"], "sources": sources, "sample": shapes["columns"]["sample"].copy()}
    if not has_places:
        columns["sample"][:, np.array(sources, np.intp) < 0] = np.nan
    return {**shapes, "columns": columns, "members": members}


class ExpertWeights:
    """The state of the arithmetic: statistics and weights of all columns, and the mixture of the experts.

    ``streamiter.learn.ready_made.row_steps`` describes the arrays and the numbers of the columns. A hashed column gets
    its slot in memory when the first row that has it is learned from; others are neither stored nor published.
    """

    def __init__(
        self,
        task: LabelKind,
        scores: int,
        hashed: int,
        rates: tuple[float, ...] | None = None,
        loss: PlainLoss | None = None,
    ) -> None:
        """``loss`` is a loss of numbers other than the squared one; None otherwise."""
        # Imported here: it imports Numba, which takes most of a second.
        from streamiter.learn.ready_made import row_losses, row_steps

        self._steps, self._losses = row_steps, row_losses
        self.task = task
        self.scores = scores
        """The number of scores of a row."""
        kinds = {"binary": row_losses.BINARY, "classes": row_losses.CLASSES, "number": row_losses.SQUARED}
        losses = {"quantile": row_losses.QUANTILE, "huber": row_losses.HUBER, "poisson": row_losses.POISSON}
        self._kind = kinds[task] if loss is None else losses[loss[0]]
        self.rates = rates or (row_steps.RATES_OF_NUMBERS if task == "number" else row_steps.RATES_OF_CLASSES)
        """The learning rates of the experts."""
        self._adaptive = min(len(self.rates), row_losses.ADAPTIVE)
        self._numbers_a_score = len(self.rates) + self._adaptive
        self.hashed = hashed
        self.numeric = 0
        """The number of numeric columns in use."""
        self.mixture: Floats = np.full(len(self.rates), 1.0 / len(self.rates))
        self.totals: Floats = np.zeros(9)
        self._judged = int(task != "number")
        """The number of labels that have judged predictions. It begins with 1 where there are predictions before the
        first label: equal probabilities. A number that is predicted then says nothing."""
        self.is_judged = False
        """Whether a label has said anything of the experts."""
        if loss is not None and loss[0] == "quantile":
            [self.totals[6]] = loss[1]
        self._cell_weights: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        """The weights and sums of squared gradients of cells, see ``streamiter.learn.ready_made.cell_steps``; none
        without tables."""
        self._cell_sums: Floats = np.zeros(0)
        self._columns = self._room(_SPARE_SLOTS, scores)
        self._slot_of: npt.NDArray[np.int32] = np.zeros(hashed + 1 + _SPARE_NUMERIC, np.int32)
        """For each column its row of ``_columns``; 0, a row of zeros, for a column that has no row."""
        self._slots = 1
        """The number of rows of ``_columns`` in use."""
        self._known = 0, np.zeros(0, np.intp)
        """A number of slots, and the hashed columns that had one when this many were in use."""
        self._take_slots(np.array([hashed]))
        with saying_that_it_compiles("the arithmetic of AdaptiveLinearModel"):
            # A prediction, which changes nothing.
            row = ModelRows(np.array([0, 1]), np.zeros(1, np.intp), np.zeros(1))
            self.step(row, RowSteps.one_each(1, learns=False), np.zeros(1))

    def _room(self, slots: int, scores: int) -> Floats:
        return np.zeros((slots, self._steps.STATISTICS + self._numbers_a_score * scores))

    def _take_slots(self, columns: Indices) -> None:
        """Give each of these columns a row of ``_columns``."""
        stop = self._slots + len(columns)
        self._slot_of[columns] = np.arange(self._slots, stop)
        self._use_slots(stop)

    def _use_slots(self, count: int) -> None:
        if count > len(self._columns):
            # Doubled, so that columns that come one by one do not copy the state each time.
            self._move(self._room(2 * count, self._room_of_scores()))
        self._slots = count

    def _room_of_scores(self) -> int:
        return int((self._columns.shape[1] - self._steps.STATISTICS) // self._numbers_a_score)

    def _move(self, room: Floats) -> None:
        room[: self._slots, : self._columns.shape[1]] = self._columns[: self._slots]
        self._columns = room

    def _used(self) -> Indices:
        """Return the stored slots: of the hashed columns by number, of the intercept, then of the numeric columns."""
        of_numeric = self._slot_of[self.hashed : self.hashed + 1 + self.numeric]
        return np.concatenate([self._slot_of[self.places()], of_numeric])

    @property
    def used(self) -> int:
        """The number of columns that rows have had."""
        return self._slots - 2

    def places(self) -> Indices:
        """Return the hashed columns that rows have had."""
        if self._known[0] != self._slots:  # The scan of 2**18 columns takes half a millisecond.
            self._known = self._slots, np.flatnonzero(self._slot_of[: self.hashed])
        return self._known[1].copy()

    def add_numeric(self, count: int) -> None:
        """Use ``more`` additional numeric columns."""
        first, self.numeric = self.hashed + 1 + self.numeric, self.numeric + count
        if first + count > len(self._slot_of):
            self._slot_of = np.pad(self._slot_of, (0, first + count))
        self._take_slots(np.arange(first, first + count))

    def statistics_of_numbers(self) -> Floats:
        """Return weight, mean and sum of squares of each numeric column."""
        slots = self._slot_of[self.hashed + 1 : self.hashed + 1 + self.numeric]
        return self._columns[slots, : self._steps.STATISTICS]

    def split_last_score(self) -> None:
        """Add a score that begins with the weights of the last score."""
        if self.scores == self._room_of_scores():
            self._move(self._room(len(self._columns), 2 * self.scores))
        self.scores += 1
        own = self._numbers_a_score
        stop = self._steps.STATISTICS + own * self.scores
        self._columns[: self._slots, stop - own : stop] = self._columns[: self._slots, stop - 2 * own : stop - own]

    def as_classes(self, rows: int) -> Self:
        """Return the weights of two classes, and of a third class that has not come in ``rows`` rows.

        The score of two labels is the difference of the scores of their classes.
        """
        classes = self._of_classes()
        classes.numeric, classes._slots, classes._slot_of = self.numeric, self._slots, self._slot_of
        classes.mixture, classes.totals = self.mixture, self.totals
        classes._judged, classes.is_judged = self._judged, self.is_judged
        first, own, experts = self._steps.STATISTICS, self._numbers_a_score, len(self.rates)
        classes._columns = classes._room(len(self._columns), 3)
        classes._columns[:, : first + own] = self._columns[:, : first + own]
        of_score = classes._columns[:, first:].reshape(-1, 3, own)
        of_score[:, 1:] = of_score[:, :1]
        for score, share in enumerate(SHARES_OF_CLASSES):
            # Of a column without rows, + 0 makes 0 of -0: the column may come after the class in another batch.
            of_score[:, score, :experts] = of_score[:, score, :experts] * share + 0.0
        # By the rule of Laplace, a new class comes with probability 1 / (rows + 2).
        of_score[self._slot_of[self.hashed], 2, :experts] = np.log(2.0 / (rows + 1.0))
        return classes

    def _of_classes(self) -> Self:
        """Return new weights of three classes."""
        return type(self)("classes", 3, self.hashed, self.rates)

    def raise_rates(self) -> None:
        """Reduce the sums of squared gradients, so that rates that have become small are large again."""
        own, experts = self._numbers_a_score, len(self.rates)
        for first in range(self._steps.STATISTICS, self._columns.shape[1], own):
            self._columns[:, first + experts : first + own] *= SQUARES_KEPT

    def step(self, rows: ModelRows, steps: RowSteps, targets: Floats, asked: Floats | None = None) -> Floats:
        """Predict and learn; return a prediction, with a number for each score, for each step.

        ``asked`` has the scores of the experts by question, and marks of when it was asked, see
        ``RowSteps.evidence``. A step that predicts a question writes its scores there.
        """
        asked = self.scores_of_questions(0, self.scores) if asked is None else asked
        experts = len(self.rates)
        evidence, of_experts = self._evidence(steps, asked), np.ascontiguousarray(asked[:, :, :experts])
        predictions = self._step(rows, steps, evidence, targets, of_experts)
        asked[:, :, :experts] = of_experts
        return predictions

    def _evidence(self, steps: RowSteps, asked: Floats) -> Floats:
        """Return the evidence of the labels of the steps, and count the labels that judge."""
        evidence, judges = steps.evidence(self._judged, asked[:, 0, -1], is_first=not self.is_judged), steps.judges
        self._judged += int(np.count_nonzero(judges))
        self.is_judged |= bool((judges & (evidence > 0.0)).any())
        return evidence

    def _step(
        self,
        rows: ModelRows,
        steps: RowSteps,
        evidence: Floats,
        targets: Floats,
        asked: Floats,
        cells: npt.NDArray[np.int32] | None = None,
    ) -> Floats:
        """As :meth:`step`, with evidence, for rows with these cells, a row for each step; ``asked`` has only scores."""
        cells = np.zeros((len(steps.rows), 0), np.int32) if cells is None else cells
        predictions = np.zeros((len(steps.rows), self.scores))
        actions = actions_of(steps, self.task)
        indices = plain(rows.indices, np.intp)
        indptr = plain(rows.indptr, np.intp)
        lowest, highest = int(indices.min(initial=self.hashed)), int(indices.max(initial=0))
        # Compiled code checks no bounds.
        if lowest < 0 or highest > self.hashed + self.numeric:
            raise ModelError(
                f"AdaptiveLinearModel: expected rows of {self.hashed} hashed and {self.numeric} numeric columns, given "
                f"column {lowest if lowest < 0 else highest}"
            )
        if self.task == "classes" and np.max(targets, initial=0.0, where=steps.learns) >= self.scores:
            raise ModelError(f"AdaptiveLinearModel: expected classes below {self.scores}, given {np.max(targets)}")
        order = plain(steps.rows, np.intp)
        if lowest < self.hashed:
            slots = self._steps.take_slots(indptr, indices, order, actions, self._slot_of, self._slots)
            try:
                self._use_slots(slots)
            except BaseException:  # There is no memory, or Ctrl-C.
                self._slot_of[self._slot_of >= self._slots] = 0
                raise
        compiled_code_begins()
        self._steps.step_rows(
            self._kind,
            self.hashed,
            indptr,
            indices,
            plain(rows.values, np.float64),
            order,
            actions,
            plain(targets, np.float64),
            plain(steps.weights, np.float64),
            plain(evidence, np.float64),
            self._slot_of,
            self._columns,
            self.mixture,
            self.totals,
            predictions,
            plain(steps.questions, np.intp),
            asked,
            np.empty((8 * self.scores + 2) * len(self.rates) + int(np.diff(indptr).max(initial=0))),
            cells,
            self._cell_weights,
            self._cell_sums,
            True if self._kind > self._losses.SQUARED else None,
            self.rates,
        )
        return predictions

    def step_classes(
        self, rows: ModelRows, steps: RowSteps, targets: Floats, asked: Floats, *, is_open: bool
    ) -> Floats:
        """Predict and learn; a class is added right before the first step that learns it, wherever batches are cut.

        ``is_open``: the last score is for the classes that have not come. Predictions have as many columns as ``asked``
        has scores: 0 is the probability of classes that were not known.
        """
        known = self.scores - is_open
        predictions = np.zeros((len(targets), asked.shape[1]))
        numbers = np.where(steps.learns, targets, -1)
        start = 0
        while start < len(targets):
            new = np.flatnonzero(numbers[start:] >= known)
            stop = start + int(new[0]) if len(new) else len(targets)
            if stop == start:
                # The prediction is made before the class is known, and the step after it.
                stop += 1
                one = steps.part(start, stop)
                found = self.step(rows, one._replace(learns=one.learns & False), targets[start:stop], asked)
                _fill(predictions[start:stop], found, is_open=is_open)
                while known <= numbers[start]:
                    self.split_last_score()
                    asked[:, known + 1] = asked[:, known]
                    known += 1
                self.step(rows, one._replace(predicts=one.predicts & False), targets[start:stop], asked)
            else:
                found = self.step(rows, steps.part(start, stop), targets[start:stop], asked)
                _fill(predictions[start:stop], found, is_open=is_open)
            start = stop
        return predictions

    def scores_of_questions(self, questions: int, scores: int) -> Floats:
        """Return room for the experts' scores of questions, and for marks of when they were asked."""
        return np.zeros((questions, scores, len(self.rates) + 1))

    @staticmethod
    def fill_in_scores(by_question: Floats, questions: Indices, counts: Indices, scores: Floats) -> None:
        """Fill in the experts' scores of earlier questions, a row for each, of which ``counts`` are known.

        The last scores of a question are the scores of the open class. Each class that has come since has the same
        scores.
        """
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            known = scores[rows, :count].reshape(len(rows), -1, by_question.shape[2])
            by_question[questions[rows], : known.shape[1]] = known
            by_question[questions[rows], known.shape[1] :] = known[:, -1:]

    def published(self) -> dict[str, Any]:
        """Return the one linear model that the experts make together.

        Its columns are the numeric ones, then the hashed ones that rows have had. The score of a row is ``intercept +
        sum of weights · clip(value − center, −limit, limit)``, where missing values are left out.
        """
        steps, places = self._steps, self.places()
        used = self._columns[self._published_slots(places)]
        weight, mean, squares = used[:, 0], used[:, 1], used[:, 2]
        scale = np.sqrt(np.divide(squares, weight, out=np.zeros(len(used)), where=weight > 0))
        scale[scale <= ROUNDING * np.abs(mean)] = 0.0
        inverse = np.divide(1.0, scale, out=np.zeros(len(used)), where=scale > 0)
        mixed = self._experts(used) @ self.mixture * inverse[:, None]
        intercept = self._experts(self._columns[self._slot_of[self.hashed], None])[0] @ self.mixture
        if self.task == "number":
            intercept = intercept + self._losses.offset_of(self._kind, self.totals)
        is_one = self.task != "classes"
        return {
            "weights": mixed[:, 0] if is_one else mixed,
            "intercept": float(intercept[0]) if is_one else intercept,
            "center": mean.copy(),
            "limit": steps.CLIP * scale,
            "places": places,
        }

    def range_of_predictions(self) -> tuple[float, float]:
        """Return the least and the largest number that is predicted."""
        lowest, highest, below, above = self.totals[4:8].tolist()
        if self._kind == self._losses.POISSON:
            return 0.0, highest + 1.0
        return (lowest - below, highest + above) if self._kind == self._losses.SQUARED else (lowest, highest)

    def _published_slots(self, places: Indices) -> Indices:
        """Return the slots of the columns of a published model: the numeric ones, then the hashed ones."""
        return np.take(self._slot_of, np.concatenate([self.hashed + 1 + np.arange(self.numeric), places]))

    def _experts(self, columns: Floats) -> Floats:
        """Return the experts' weights: for each column and score."""
        steps = self._steps
        stop = steps.STATISTICS + self._numbers_a_score * self.scores
        by_score = columns[:, steps.STATISTICS : stop].reshape(len(columns), self.scores, self._numbers_a_score)
        return by_score[:, :, : len(self.rates)]

    def start_from(self, published: Mapping[str, Any]) -> None:
        """Take on a published model: each expert begins with its weights, each column with its mean and deviation."""
        steps, places = self._steps, np.asarray(published["places"], dtype=np.intp)
        self._take_slots(places)
        used, of_intercept = self._published_slots(places), self._slot_of[self.hashed]
        scale = np.asarray(published["limit"]) / steps.CLIP
        weights = np.asarray(published["weights"], dtype=np.float64).reshape(len(used), self.scores)
        weights = weights * scale[:, None]
        self._judged, self.is_judged = 1, True  # There were predictions before.
        intercept = np.atleast_1d(np.asarray(published["intercept"], dtype=np.float64))
        self._columns[used, 0] = ROWS_OF_A_START
        self._columns[used, 1] = published["center"]
        self._columns[used, 2] = ROWS_OF_A_START * scale**2
        if self.task == "number":
            lowest, highest = published["lowest"], published["highest"]
            middle, deviation = (lowest + highest) / 2, (highest - lowest) / 4
            if self._kind == self._losses.POISSON:
                middle, highest = float(np.exp(min(intercept[0], 700.0))), highest - 1.0
            squares = ROWS_OF_A_START * deviation**2
            norm = 1.0 + np.count_nonzero(scale)
            self.totals[:6] = [ROWS_OF_A_START, norm, middle, squares, lowest, highest]
            if self._kind == self._losses.SQUARED:
                self.totals[8] = deviation**2
            else:
                self.totals[7:] = deviation if self._kind != self._losses.POISSON else 1.0
            intercept = intercept - self._losses.offset_of(self._kind, self.totals)
        for score in range(self.scores):
            first = steps.STATISTICS + self._numbers_a_score * score
            experts, sums = (
                slice(first, first + len(self.rates)),
                slice(first + len(self.rates), first + self._numbers_a_score),
            )
            self._columns[used, experts] = weights[:, score, None]
            self._columns[of_intercept, experts] = intercept[score]
            # The adaptive rates are as small as after these rows: the square of a slope is about 1/4.
            self._columns[used, sums] = self._columns[of_intercept, sums] = ROWS_OF_A_START / 4

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data, with the columns in use."""
        return {
            "task": self.task,
            "scores": self.scores,
            "hashed": self.hashed,
            "numeric": self.numeric,
            "places": self.places(),
            "columns": self._columns[self._used(), : self._steps.STATISTICS + self._numbers_a_score * self.scores],
            "mixture": self.mixture.copy(),
            "judged": self._judged,
            "is judged": self.is_judged,
            "totals": self.totals.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state` of the same task and scores; these are new weights, without columns."""
        self.add_numeric(state["numeric"])
        self._take_slots(state["places"])
        self._columns[self._used()] = state["columns"]
        self.mixture[:], self.totals[:] = state["mixture"], state["totals"]
        self._judged, self.is_judged = state["judged"], state["is judged"]


def actions_of(steps: RowSteps, task: LabelKind) -> npt.NDArray[np.uint8]:
    """Return the steps as the arithmetic reads them, see ``streamiter.learn.ready_made.row_steps``."""
    from streamiter.learn.ready_made import row_steps

    actions = steps.predicts * row_steps.PREDICT + (steps.learns & (steps.weights > 0)) * row_steps.LEARN
    if steps.assumed is not None:
        if task != "binary" and steps.assumed.any():
            raise ModelError("AdaptiveLinearModel: expected labels that are True or False if False is assumed")
        flags = [0, row_steps.ASSUME, row_steps.CORRECT, row_steps.JUDGE, row_steps.WITHDRAW]
        actions += np.array(flags, dtype=np.uint8)[steps.assumed]
        actions[steps.assumed == CONFIRMED] -= row_steps.LEARN
    return actions.astype(np.uint8)


def _fill(predictions: Floats, found: Floats, *, is_open: bool) -> None:
    """Put the probabilities of the known classes into the columns of all classes; the open class stays last."""
    found = np.maximum(found, _PROBABILITY_MIN)
    if not is_open:
        predictions[:] = found
        return
    predictions[:, : found.shape[1] - 1] = found[:, :-1]
    predictions[:, -1] = found[:, -1]


def plain(array: npt.NDArray[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Return the array in the one form that the arithmetic is compiled for; another form takes seconds more."""
    return np.require(array, kind, ["C_CONTIGUOUS", "WRITEABLE"])
