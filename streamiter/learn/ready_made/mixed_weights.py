"""``MixedWeights``: the linear model, embeddings and models of tables, mixed by exponential weights of predictions.

Each member predicts and learns each row by itself. Their predictions, probabilities or numbers, are then mixed step by
step. The logarithmic loss is 1-mixable, so the loss of the mixture exceeds the loss of its best member by at most the
logarithm of their number, and by a little more for each change of the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from streamiter.learn.labels import LabelKind
from streamiter.learn.ready_made.cell_columns import Categories, CellColumns, next_look
from streamiter.learn.ready_made.embedding_weights import EmbeddingWeights, fold_rows
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.learn.ready_made.expert_weights import ExpertWeights, plain
from streamiter.learn.ready_made.model_rows import ASSUMED, ModelRows, RowSteps
from streamiter.learn.ready_made.table_weights import TableWeights
from streamiter.models.shapes import FINE_BINS, Shapes
from streamiter.values.numbers import Floats, Indices, Truths

# The logarithmic loss is 1-mixable. Of squared errors in units of the mixture's mean one, 1/4 was chosen, see
# docs/decisions/058: with 1/8 and 1/2 mean losses differ by at most .3 %, and with 2 some are 4 % larger.
_MIXTURE_RATE: Final = 1.0
_MIXTURE_RATE_OF_NUMBERS: Final = 0.25
# No share of the weight that members get at each row is right for all streams, so these are mixed; the least one first.
_SPREAD: Final = (0.0001, 0.001, 0.01)
# The share that the linear member begins with: more is better for numbers, less for classes.
_FIRST_SHARE_OF_LINEAR: Final = 0.6
# What members together get that are new beside others that have learned.
_SHARE_OF_NEW: Final = 0.001
_LOSS_MAX_OF_NUMBERS: Final = 16.0
_SIZES_OF_TABLES: Final[tuple[Mapping[str, int], ...]] = ({"pairs": 0, "trees": 0}, {})
# Members with more memory leave the mixture: pairs and trees of 18 classes with 10 columns, or 10 with 128, and columns
# alone of 417, or 33.
_BYTES_MAX: Final = 16_000_000
# The cells of this many rows stay in the processor's cache.
_ROWS_AT_ONCE: Final = 512


class MixedWeights(ExpertWeights):
    """The linear model, which this is itself, with members that have embeddings, and two that have tables.

    The tables are of columns, and of pairs and trees. Predictions are mixed. The linear member learns as without the
    others, to the last bit. With embeddings, rows have keys in place of hashed columns (``ModelRows``), and the other
    members fold these to their places.
    """

    def __init__(
        self,
        task: LabelKind,
        scores: int,
        hashed: int,
        rates: tuple[float, ...] | None = None,
        categories: Categories | None = None,
        *,
        shapes: bool = True,
        embeddings: Embeddings | None = None,
    ) -> None:
        """``shapes``: there are members with tables."""
        self.cell_columns = CellColumns(categories or Categories())
        self._tables = _SIZES_OF_TABLES if shapes else ()
        """What the members with tables are made with, whether they have left the mixture or not."""
        self.members = [TableWeights(self.cell_columns, task, scores, rates, **sizes) for sizes in self._tables]
        """The members with tables, the one with least memory first."""
        self.embeddings = embeddings
        """The settings of the members with embeddings; None: rows have no keys."""
        self.embedded = None if embeddings is None else EmbeddingWeights(embeddings, task, scores)
        """The members with embeddings."""
        others = self._vectors + len(self.members)
        first = np.append(_FIRST_SHARE_OF_LINEAR, np.full(others, (1.0 - _FIRST_SHARE_OF_LINEAR) / max(others, 1)))
        self.member_shares: Floats = _for_each_spread(first)
        """By spread, the shares of the linear model, of the members with embeddings and of those with tables."""
        self._member_totals: Floats = np.zeros(6)
        self.left_out: frozenset[int] = frozenset()
        """The numeric columns of crosses, which the members with tables do not have: pairs have tables anyway."""
        super().__init__(task, scores, hashed, rates)

    @property
    def _vectors(self) -> int:
        """The number of members with embeddings."""
        return 0 if self.embedded is None else self.embedded.experts

    @property
    def _first_prediction(self) -> int:
        """The place of the members' predictions of a question, behind the scores of their experts."""
        return len(self.rates) * (1 + len(self._tables))

    def scores_of_questions(self, questions: int, scores: int) -> Floats:
        """Return room for the scores of all members' experts, for the members' predictions, and for marks."""
        members = 1 + self._vectors + len(self._tables)
        return np.zeros((questions, scores, self._first_prediction + members + 1))

    def step(self, rows: ModelRows, steps: RowSteps, targets: Floats, asked: Floats | None = None) -> Floats:
        """Predict and learn, see ``ExpertWeights.step``; predictions are mixed."""
        asked = self.scores_of_questions(0, self.scores) if asked is None else asked
        evidence = self._evidence(steps, asked)
        folded = rows if self.embeddings is None else fold_rows(rows, self.hashed)
        experts, stop = len(self.rates), len(self.rates) * (1 + len(self.members))
        kept = [np.ascontiguousarray(asked[:, :, first : first + experts]) for first in range(0, stop, experts)]
        made = np.zeros((self.member_shares.shape[1], len(steps.rows), self.scores))
        made[0] = self._step(folded, steps, evidence, targets, kept[0])
        if self.embedded is not None:
            own = slice(self._first_prediction + 1, self._first_prediction + 1 + self._vectors)
            of_questions = np.ascontiguousarray(asked[:, : self.scores, own].transpose(0, 2, 1))
            without = self.embedded.without_columns(rows, self.left_out)
            found = self.embedded.step(without, steps, targets, of_questions)
            made[1 : 1 + self._vectors] = found.reshape(len(found), self._vectors, self.scores).transpose(1, 0, 2)
            asked[:, : self.scores, own] = of_questions.transpose(0, 2, 1)
        predictions = np.zeros((len(steps.rows), self.scores))
        of_tables = made[1 + self._vectors :]
        for part in self._step_tables(folded, steps, evidence, targets, kept[1:], of_tables, asked):
            of_part = np.ascontiguousarray(made[: self.member_shares.shape[1], part])
            of_steps = steps.part(part.start, part.stop)
            predictions[part] = self._mix(of_steps, evidence[part], targets[part], of_part, asked)
        for place, scores in enumerate(kept):
            asked[:, :, place * experts : (place + 1) * experts] = scores
        return predictions

    def _mix(self, steps: RowSteps, evidence: Floats, targets: Floats, made: Floats, asked: Floats) -> Floats:
        """Return the mixture of the members' predictions, and judge the members by the labels."""
        predictions = np.zeros((len(steps.rows), self.scores))
        is_number = self.task == "number"
        self.cell_columns.steps.mix_members(
            self.task == "classes",
            is_number,
            _MIXTURE_RATE_OF_NUMBERS if is_number else _MIXTURE_RATE,
            _SPREAD,
            _LOSS_MAX_OF_NUMBERS,
            self._losses.PROBABILITY_LEAST,
            steps.predicts,
            steps.judges,
            made,
            np.require(targets, np.float64),
            np.require(steps.weights, np.float64),
            plain(evidence, np.float64),
            steps.questions,
            asked,
            self._first_prediction,
            self.member_shares,
            self._member_totals,
            np.zeros(len(made) * (2 + self.scores)),
            predictions,
        )
        return predictions

    def _step_tables(
        self,
        rows: ModelRows,
        steps: RowSteps,
        evidence: Floats,
        targets: Floats,
        kept: list[Floats],
        made: Floats,
        asked: Floats,
    ) -> Iterator[slice]:
        """Make the steps of the members with tables, from look to look; columns get tables with their first value.

        The errors of labels with evidence are observed. Yields each part that is made; a member may leave the mixture
        before the next one.
        """
        if not self.members:
            yield slice(0, len(steps.rows))
            return
        observed = steps.learns & (steps.weights > 0.0)
        if steps.assumed is not None:
            observed &= steps.assumed <= ASSUMED  # Later steps of a question do not count again.
        judges = steps.judges & (evidence > 0.0) & (steps.predicts | (steps.questions >= 0))
        columns, start = self.cell_columns, 0
        rows = ModelRows(plain(rows.indptr, np.intp), plain(rows.indices, np.intp), plain(rows.values, np.float64))
        if self.left_out:
            rows = rows.with_values(~np.isin(rows.indices - self.hashed - 1, list(self.left_out)))
        numeric = rows.with_values(rows.indices > self.hashed)
        numeric = numeric._replace(indices=numeric.indices - self.hashed)
        while start < len(steps.rows):
            look = next_look(columns.rows)
            stop = self._end_of_part(rows, steps, observed, start, look - columns.rows)
            part = steps.part(start, stop)
            values = columns.values(rows, part.rows, self.hashed)
            bins = columns.bins(values)
            own, of_own = _rows_of(numeric, part)
            for place, member in enumerate(self.members):
                given = evidence[start:stop], targets[start:stop]
                made[place, start:stop] = member.step_cells(own, of_own, *given, kept[place], bins)
            yield slice(start, stop)
            columns.observe(values[observed[start:stop]])
            judged = np.flatnonzero(judges[start:stop])
            late = ~part.predicts[judged]
            for place, member in enumerate(self.members):
                found = made[place, start:stop][judged]
                if late.any():
                    of_questions = asked[:, : self.scores, self._first_prediction + 1 + self._vectors + place]
                    found[late] = of_questions[part.questions[judged[late]]]
                member.observe(bins[judged], targets[start:stop][judged], found)
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
            self.member_shares = np.ascontiguousarray(self.member_shares[:, :-1] / self.member_shares[:, :-1].sum())

    # ---- columns and scores

    def add_numeric(self, count: int) -> None:
        """Use ``count`` additional numeric columns."""
        super().add_numeric(count)
        self.cell_columns.add_numeric(count)
        for member in self.members:
            member.add_numeric(count)
        if self.embedded is not None:
            self.embedded.add_numeric(count)

    def add_fields(self, count: int) -> None:
        """Add this number of fields of texts; members with embeddings have vectors for them."""
        if self.embedded is not None:
            self.embedded.add_fields(count)

    @property
    def used(self) -> int:
        """The number of columns that rows have had, and of features in the table of embeddings."""
        return super().used + (0 if self.embedded is None else self.embedded.table.counts().features)

    def split_last_score(self) -> None:
        """Add a score that begins with the weights of the last score."""
        super().split_last_score()
        if self.embedded is not None:
            self.embedded = self.embedded.with_scores([*range(self.scores - 1), self.scores - 2])
        for member in self.members:
            member.split_last_score()
        self._keep_within_memory()

    def as_classes(self, rows: int) -> Self:
        """Return the weights of two classes and of a class that has not come, see ``ExpertWeights.as_classes``.

        The second class has the vectors of the two labels, which have no half; those of the others are new.
        """
        classes = super().as_classes(rows)
        classes.cell_columns = self.cell_columns
        classes.members = [member.as_classes(rows) for member in self.members]
        classes.member_shares, classes.left_out = self.member_shares.copy(), self.left_out
        if self.embedded is not None:
            classes.embedded = self.embedded.with_scores([None, 0, None])
            classes.embedded.begin_class(2, float(np.log(2.0 / (rows + 1.0))))  # As that of the linear model.
        return classes

    def _of_classes(self) -> Self:
        options: dict[str, Any] = {"shapes": bool(self._tables), "embeddings": self.embeddings}
        return type(self)("classes", 3, self.hashed, self.rates, self.cell_columns.categories, **options)

    def _other_shares(self) -> Floats:
        """Return by spread the shares of the members without embeddings among themselves."""
        if not self._vectors:
            return self.member_shares.copy()
        others = np.delete(self.member_shares, np.s_[1 : 1 + self._vectors], axis=1)
        return np.asarray(others / others.sum())

    def raise_rates(self) -> None:
        """Reduce the sums of squared gradients, so that rates that have become small are large again."""
        super().raise_rates()
        for member in self.members:
            member.raise_rates()
        if self.embedded is not None:
            self.embedded.raise_rates()

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
            mixture=self._other_shares().sum(axis=0),
            members=[member.as_member(dead) for member in self.members],
        )

    def vectors(self, names: Sequence[str], dead: Sequence[int]) -> dict[str, Any] | None:
        """Return the members with embeddings as they are served; None without any.

        ``names`` are those of the fields with numbers, and ``dead`` the numeric columns that are not published.
        """
        if self.embedded is None:
            return None
        shares = self.member_shares.sum(axis=0)[1 : 1 + self._vectors]
        return self.embedded.published(names, dead, self.left_out, shares)

    def state(self, *, frozen: bool = False) -> dict[str, Any]:
        """Return a copy of the state as plain data, see :meth:`EmbeddingWeights.state`."""
        state, totals = super().state(), self._member_totals.copy()
        if self._tables:
            members = [member.state() for member in self.members]
            columns = self.cell_columns.state()
            state["shapes"] = {"columns": columns, "members": members, "shares": self._other_shares(), "totals": totals}
        if self.embedded is not None:
            own = {"shares": self.member_shares.copy(), "totals": totals}
            state["embeddings"] = {"members": self.embedded.state(frozen=frozen), **own}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state`; members of which it has nothing begin anew."""
        super().restore(state)
        shapes = state.get("shapes") if self._tables else None
        vectors = state.get("embeddings") if self.embedded is not None else None
        if shapes is not None:
            self.cell_columns.restore(shapes["columns"])
            columns, count = self.cell_columns, len(shapes["members"])
            self.members = [
                TableWeights(columns, self.task, self.scores, self.rates, **sizes) for sizes in self._tables[:count]
            ]
            for member, own in zip(self.members, shapes["members"], strict=True):
                member.restore(own)
        if vectors is not None and self.embedded is not None:
            self.embedded.restore(vectors["members"])
        of_vectors = None if vectors is None else np.sum(vectors["shares"], axis=0)[1 : 1 + self._vectors]
        self._begin_with(None if shapes is None else np.sum(shapes["shares"], axis=0), of_vectors)
        if (known := vectors or shapes) is not None:
            if known["shares"].shape == self.member_shares.shape:
                self.member_shares = known["shares"].copy()
            self._member_totals = known["totals"].copy()

    def start_from(self, published: Mapping[str, Any]) -> None:
        """Take on a published model; members that it does not have begin anew."""
        super().start_from(published)
        shapes = vectors = None
        if self._tables and (given := published.get("shapes")) is not None:
            fields, places = published["fields"], np.asarray(published["places"], np.intp)
            shapes = Shapes.of(given, "start_from", fields=len(fields), places=len(places), scores=self.scores)
            self.cell_columns.start_from(shapes, fields, places, self.hashed)
            del self.members[len(shapes.members) :]
            for member, own in zip(self.members, shapes.members, strict=True):
                member.start_from_tables(published, own)
        if self.embedded is not None and (given := published.get("embeddings")) is not None:
            vectors = np.array([head["share"] for head in given["experts"][:: given.get("scores", 1)]])
            self.embedded.start_from(given, self)
        self._begin_with(None if shapes is None else shapes.mixture, vectors)

    def _begin_with(self, of_others: Floats | None, of_vectors: Floats | None) -> None:
        """Begin with these shares: of the linear member and those with tables, and of those with embeddings.

        Where they are not known, the members are new beside a linear model that has learned: others have nearly the
        whole share. They have its statistics, because all are served with one center for each field.
        """
        self._member_totals = self.totals[:6].copy()
        # The mixture has made no error yet: the first guess is the error of the mean.
        self._member_totals[1] = self.totals[3] / max(self.totals[0], 1.0)
        count = self._vectors
        is_new = np.zeros(1 + count + len(self.members), np.bool_)
        if of_others is None:
            of_others = np.append(1.0, np.zeros(len(self.members)))
            is_new[1 + count :] = True
            for member in self.members:
                member.standardize_as(self)
        if of_vectors is None:
            of_vectors = np.zeros(count)
            is_new[1 : 1 + count] = True
            if self.embedded is not None:
                self.embedded.standardize_as(self)
        rest = 1.0 - of_vectors.sum()
        shares = np.concatenate([rest * of_others[:1], of_vectors, rest * of_others[1:]])
        if is_new.any():
            shares[is_new] = _SHARE_OF_NEW / len(shares)
            shares[~is_new] *= 1.0 - shares[is_new].sum()
        self.member_shares = _for_each_spread(shares)


def _for_each_spread(shares: Floats) -> Floats:
    """Return the shares of members as they begin: all spreads are equally probable."""
    return np.tile(shares / len(_SPREAD), (len(_SPREAD), 1))


def _rows_of(rows: ModelRows, steps: RowSteps) -> tuple[ModelRows, RowSteps]:
    """Return the rows from the first to the last that the steps need, and the steps with these rows."""
    first, stop = int(steps.rows.min()), int(steps.rows.max()) + 1
    indptr = rows.indptr[first : stop + 1]
    part = slice(int(indptr[0]), int(indptr[-1]))
    own = ModelRows(indptr - indptr[0], rows.indices[part], rows.values[part])
    return own, steps._replace(rows=steps.rows - first)
