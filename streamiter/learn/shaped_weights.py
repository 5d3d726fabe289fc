"""``ShapedWeights``: the linear model and models of tables, mixed by exponential weights of their predictions.

Each member predicts and learns each row by itself. Their predictions, probabilities or numbers, are then mixed step by
step. The logarithmic loss is 1-mixable, so the loss of the mixture exceeds the loss of its best member by at most the
logarithm of their number, and by a little more for each change of the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from streamiter.learn.cell_columns import Categories, CellColumns, next_look
from streamiter.learn.expert_weights import ExpertWeights, plain
from streamiter.learn.labels import LabelKind
from streamiter.learn.model_rows import ASSUMED, CONFIRMED, CORRECTED, ModelRows, RowSteps
from streamiter.learn.table_weights import TableWeights
from streamiter.models.shapes import FINE_BINS, Shapes
from streamiter.values.field_states import Truths
from streamiter.values.numbers import Floats, Indices

# The logarithmic loss is 1-mixable. For squared errors in units of the targets' variance, 1/4 is the first guess.
_MIXTURE_RATE: Final = 1.0
_MIXTURE_RATE_OF_NUMBERS: Final = 0.25
_SHARE: Final = 0.001
_LOSS_MAX_OF_NUMBERS: Final = 16.0
# Members with more memory leave the mixture: pairs and trees of 18 classes with 10 columns, or 10 with 128, and columns
# alone of 417, or 33.
_BYTES_MAX: Final = 16_000_000
# The cells of this many rows stay in the processor's cache.
_ROWS_AT_ONCE: Final = 512


class ShapedWeights(ExpertWeights):
    """The linear model, which this is itself, with two members that have tables: of columns, and of pairs and trees.

    Predictions are mixed. The linear member learns as without the others, to the last bit.
    """

    def __init__(
        self,
        task: LabelKind,
        scores: int,
        hashed: int,
        rates: tuple[float, ...] | None = None,
        categories: Categories | None = None,
    ) -> None:
        self.cell_columns = CellColumns(categories or Categories())
        self.members = [
            TableWeights(self.cell_columns, task, scores, rates, pairs=0, trees=0),
            TableWeights(self.cell_columns, task, scores, rates),
        ]
        """The members with tables, the one with least memory first."""
        self.member_shares: Floats = np.full(3, 1.0 / 3.0)
        """The shares of the linear model and of these members."""
        self._member_totals: Floats = np.zeros(6)
        self.left_out: frozenset[int] = frozenset()
        """The numeric columns of crosses, which the members with tables do not have: pairs have tables anyway."""
        super().__init__(task, scores, hashed, rates)

    def scores_of_questions(self, questions: int, scores: int) -> Floats:
        """Return room for the scores of all members' experts, then for the members' predictions."""
        return np.zeros((questions, scores, 3 * len(self.rates) + 3))

    def step(self, rows: ModelRows, steps: RowSteps, targets: Floats, asked: Floats | None = None) -> Floats:
        """Predict and learn, see ``ExpertWeights.step``; predictions are mixed."""
        asked = self.scores_of_questions(0, self.scores) if asked is None else asked
        experts, stop = len(self.rates), len(self.rates) * len(self.member_shares)
        kept = [np.ascontiguousarray(asked[:, :, first : first + experts]) for first in range(0, stop, experts)]
        made = np.zeros((len(kept), len(steps.rows), self.scores))
        made[0] = super().step(rows, steps, targets, kept[0])
        predictions = np.zeros((len(steps.rows), self.scores))
        every = [slice(0, len(steps.rows))]
        for part in self._step_tables(rows, steps, targets, kept[1:], made[1:]) if self.members else every:
            own = np.ascontiguousarray(made[: len(self.member_shares), part])
            predictions[part] = self._mix(steps.part(part.start, part.stop), targets[part], own, asked)
        for place, scores in enumerate(kept):
            asked[:, :, place * experts : (place + 1) * experts] = scores
        return predictions

    def _mix(self, steps: RowSteps, targets: Floats, made: Floats, asked: Floats) -> Floats:
        """Return the mixture of the members' predictions, and judge the members by the labels."""
        judges = steps.learns & (steps.weights > 0.0)
        if steps.assumed is not None:
            judges &= np.isin(steps.assumed, (0, CORRECTED, CONFIRMED))
        predictions = np.zeros((len(steps.rows), self.scores))
        is_number = self.task == "number"
        self.cell_columns.steps.mix_members(
            self.task == "classes",
            is_number,
            _MIXTURE_RATE_OF_NUMBERS if is_number else _MIXTURE_RATE,
            _SHARE,
            _LOSS_MAX_OF_NUMBERS,
            self._losses.PROBABILITY_LEAST,
            steps.predicts,
            judges,
            made,
            np.require(targets, np.float64),
            np.require(steps.weights, np.float64),
            steps.questions,
            asked,
            3 * len(self.rates),
            self.member_shares,
            self._member_totals,
            np.zeros(len(made) * (1 + self.scores)),
            predictions,
        )
        return predictions

    def _step_tables(
        self, rows: ModelRows, steps: RowSteps, targets: Floats, kept: list[Floats], made: Floats
    ) -> Iterator[slice]:
        """Make the steps of the members with tables, from look to look; columns get tables with their first value.

        Yields each part that is made; a member may leave the mixture before the next one.
        """
        observed = steps.learns & (steps.weights > 0.0)
        if steps.assumed is not None:
            observed &= steps.assumed <= ASSUMED  # Later steps of a question do not count again.
        columns, start = self.cell_columns, 0
        rows = ModelRows(plain(rows.indptr, np.intp), plain(rows.indices, np.intp), plain(rows.values, np.float64))
        if self.left_out:
            rows = _some_of(rows, ~np.isin(rows.indices - self.hashed - 1, list(self.left_out)))
        numeric = _some_of(rows, rows.indices > self.hashed)
        numeric = numeric._replace(indices=numeric.indices - self.hashed)
        while start < len(steps.rows):
            look = next_look(columns.rows)
            stop = self._end_of_part(rows, steps, observed, start, look - columns.rows)
            part = steps.part(start, stop)
            values = columns.values(rows, part.rows, self.hashed)
            bins = columns.bins(values)
            own, of_own = _rows_of(numeric, part)
            for place, member in enumerate(self.members):
                made[place, start:stop] = member.step_cells(own, of_own, targets[start:stop], kept[place], bins)
            yield slice(start, stop)
            columns.observe(values[observed[start:stop]])
            if columns.rows == look:
                moved = columns.look()
                for member in self.members:
                    member.look(moved)
            start = stop

    def _end_of_part(self, rows: ModelRows, steps: RowSteps, observed: Truths, start: int, rows_to_look: int) -> int:
        """Return where the steps from ``start`` end that have the same tables; the first one may get tables before."""
        stop, columns = min(len(steps.rows), start + _ROWS_AT_ONCE), self.cell_columns
        while columns.has_new():
            part = steps.rows[start:stop], observed[start:stop]
            if (first := columns.first_new(rows, *part, self.hashed)) > 0:
                stop = min(stop, start + first)
                break
            count = columns.add_columns_of(rows, int(steps.rows[start]), self.hashed)
            self._keep_within_memory(count)
            for member in self.members:
                member.add_columns(count)
        places = np.flatnonzero(observed[start:stop])
        return stop if len(places) < rows_to_look else start + int(places[rows_to_look - 1]) + 1

    def _keep_within_memory(self, more_columns: int = 0) -> None:
        while self.members and self.members[-1].bytes_with(more_columns) > _BYTES_MAX:
            del self.members[-1]
            self.member_shares = self.member_shares[:-1] / self.member_shares[:-1].sum()

    # ---- columns and scores

    def add_numeric(self, count: int) -> None:
        """Use ``count`` additional numeric columns."""
        super().add_numeric(count)
        self.cell_columns.add_numeric(count)
        for member in self.members:
            member.add_numeric(count)

    def split_last_score(self) -> None:
        """Add a score that begins with the weights of the last score."""
        super().split_last_score()
        for member in self.members:
            member.split_last_score()
        self._keep_within_memory()

    def as_classes(self, rows: int) -> Self:
        """Return the weights of two classes and of a class that has not come, see ``ExpertWeights.as_classes``."""
        classes = super().as_classes(rows)
        classes.cell_columns = self.cell_columns
        classes.members = [member.as_classes(rows) for member in self.members]
        classes.member_shares, classes.left_out = self.member_shares, self.left_out
        return classes

    def _of_classes(self) -> Self:
        return type(self)("classes", 3, self.hashed, self.rates, self.cell_columns.categories)

    def raise_rates(self) -> None:
        """Reduce the sums of squared gradients, so that rates that have become small are large again."""
        super().raise_rates()
        for member in self.members:
            member.raise_rates()

    # ---- publishing and state

    def published(self) -> dict[str, Any]:
        """Return the linear model, see ``ExpertWeights.published``, with the places of all texts that have bins.

        A text that no learned row had has a bin already; its weight is 0.
        """
        published = super().published()
        places = published["places"]
        new = np.setdiff1d(np.flatnonzero(self.cell_columns.categories.bin_of_place > 0), places, assume_unique=True)
        at = np.searchsorted(places, new)
        published |= {
            name: np.insert(published[name], self.numeric + at, 0.0, axis=0) for name in ("weights", "center", "limit")
        }
        return published | {"places": np.insert(places, at, new)}

    def shapes(self, fields: Sequence[str], dead: Sequence[int], places: Indices) -> Shapes | None:
        """Return the tables as they are served, with the mixture; None if the linear model is alone.

        ``fields`` are the names of the numeric columns, ``dead`` those that are not published, and ``places`` those of
        the published linear model.
        """
        if not self.members:
            return None
        columns, categories = self.cell_columns, self.cell_columns.categories
        names = {-number: field for field, number in categories.numbers.items()} | dict(enumerate(fields))
        return Shapes(
            fields=[names[source] for source in columns.sources],
            kinds=["category" if source < 0 else "number" for source in columns.sources],
            edges=columns.edges,
            categories=columns.bins_of_places(places, FINE_BINS),
            rows=columns.rows_of_bins(FINE_BINS),
            mixture=self.member_shares.copy(),
            members=[member.as_member(dead) for member in self.members],
        )

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data."""
        shapes = {
            "columns": self.cell_columns.state(),
            "members": [member.state() for member in self.members],
            "shares": self.member_shares.copy(),
            "totals": self._member_totals.copy(),
        }
        return super().state() | {"shapes": shapes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state`; where it has none of shapes, these begin anew."""
        super().restore(state)
        if (shapes := state.get("shapes")) is None:
            self._follow_linear()
            return
        self.cell_columns.restore(shapes["columns"])
        columns, count = self.cell_columns, len(shapes["members"])
        self.members = [
            TableWeights(columns, self.task, self.scores, self.rates, **sizes)
            for sizes in ({"pairs": 0, "trees": 0}, {})[:count]
        ]
        for member, own in zip(self.members, shapes["members"], strict=True):
            member.restore(own)
        self.member_shares, self._member_totals = shapes["shares"].copy(), shapes["totals"].copy()

    def start_from(self, published: Mapping[str, Any]) -> None:
        """Take on a published model; where it has no tables, these begin anew."""
        super().start_from(published)
        if (given := published.get("shapes")) is None:
            self._follow_linear()
            return
        fields, places = published["fields"], np.asarray(published["places"], np.intp)
        shapes = Shapes.of(given, "start_from", fields=len(fields), places=len(places), scores=self.scores)
        self.cell_columns.start_from(shapes, fields, places, self.hashed)
        del self.members[len(shapes.members) :]
        for member, own in zip(self.members, shapes.members, strict=True):
            member.start_from_tables(published, own)
        self.member_shares, self._member_totals = shapes.mixture.copy(), self.totals[:6].copy()

    def _follow_linear(self) -> None:
        """Begin with tables beside a linear model that has learned: it has nearly the whole share.

        The members have its statistics, because all are served with one center for each field.
        """
        for member in self.members:
            member.standardize_as(self)
        self._member_totals = self.totals[:6].copy()
        self.member_shares[1:] = _SHARE / len(self.member_shares)
        self.member_shares[0] = 1.0 - self.member_shares[1:].sum()


def _rows_of(rows: ModelRows, steps: RowSteps) -> tuple[ModelRows, RowSteps]:
    """Return the rows from the first to the last that the steps need, and the steps with these rows."""
    first, stop = int(steps.rows.min()), int(steps.rows.max()) + 1
    indptr = rows.indptr[first : stop + 1]
    part = slice(int(indptr[0]), int(indptr[-1]))
    own = ModelRows(indptr - indptr[0], rows.indices[part], rows.values[part])
    return own, steps._replace(rows=steps.rows - first)


def _some_of(rows: ModelRows, is_kept: Truths) -> ModelRows:
    """Return the rows with these of their values."""
    if is_kept.all():
        return rows
    return ModelRows(np.append(0, np.cumsum(is_kept))[rows.indptr], rows.indices[is_kept], rows.values[is_kept])
