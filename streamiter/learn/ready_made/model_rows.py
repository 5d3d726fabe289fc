"""Rows as the arithmetic of the adaptive linear model reads them, and the steps that are made with each row."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.learn.labels import Label, Labels
from streamiter.models.published_embeddings import FIELDS_MAX, HASH_BITS
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import Floats, Indices, Truths, plain_scalar


class ModelRows(NamedTuple):
    """Rows as the arithmetic reads them: row r has the columns ``indices[indptr[r]:indptr[r + 1]]``.

    The first columns are those of hashed features, the next one is that of the intercept, and those of numbers follow.
    A model with embeddings has a *key* in place of a hashed column, see ``streamiter.models.published_embeddings``.
    There the index of the intercept has the time of the row as its value, in milliseconds.
    """

    indptr: Indices
    indices: Indices
    values: Floats

    @property
    def length(self) -> int:
        """The number of rows."""
        return len(self.indptr) - 1

    @staticmethod
    def none() -> ModelRows:
        """Return no rows."""
        return ModelRows(np.zeros(1, np.intp), np.zeros(0, np.intp), np.zeros(0))

    @classmethod
    def of_named(
        cls,
        named: NamedRows,
        columns: Mapping[str, int],
        texts: Container[str],
        *,
        first: int,
        times_ms: Floats | None = None,
    ) -> ModelRows:
        """Return rows by column, in ascending order; fields that are not known are left out.

        ``first`` is the index of the first numeric column, behind the hashed ones. The order is always the same,
        because sums in another order differ in their last bits. ``times_ms`` are the times of the rows, NaN for none.
        """
        count = len(named)
        known = [place for place, field in enumerate(named.fields) if field in columns]
        known.sort(key=lambda place: columns[named.fields[place]])
        of_fields = [first + columns[named.fields[place]] for place in known]
        numbers = named.numbers if known == list(range(len(named.fields))) else named.numbers[:, known]
        if times_ms is not None:
            of_fields, numbers = [first - 1, *of_fields], np.column_stack([times_ms, numbers])
        unknown = [place for place, field in enumerate(named.text_fields) if field not in texts]
        places = np.delete(named.places, unknown, axis=1) if unknown else named.places
        width = len(of_fields) + places.shape[1]
        indices = np.empty((count, width), dtype=np.intp)
        indices[:, : len(of_fields)] = of_fields
        if width == len(of_fields):
            return ModelRows(np.arange(count + 1) * width, indices.ravel(), numbers.ravel())
        values = np.ones((count, width))
        values[:, : len(of_fields)] = numbers
        indices[:, len(of_fields) :] = np.sort(places, axis=1)
        if named.place_values is not None:
            of_places = np.delete(named.place_values, unknown, axis=1) if unknown else named.place_values
            order = np.lexsort((of_places, places), axis=1)
            values[:, len(of_fields) :] = np.take_along_axis(of_places, order, axis=1)
        if ABSENT not in places:
            return ModelRows(np.arange(count + 1) * width, indices.ravel(), values.ravel())
        is_there = indices != ABSENT
        indptr = np.zeros(count + 1, dtype=np.intp)
        np.cumsum(is_there.sum(axis=1), out=indptr[1:])
        return ModelRows(indptr, indices[is_there], values[is_there])

    def take(self, rows: Indices, *, has_missing: bool = True) -> ModelRows:
        """Return some of the rows, in this order, without missing values: huge ones, if these mean missing here."""
        lengths = np.diff(self.indptr)[rows]
        starts = np.cumsum(lengths) - lengths
        at = np.arange(lengths.sum()) + np.repeat(self.indptr[rows] - starts, lengths)
        is_there = ~is_missing(self.values[at]) | (not has_missing)
        indptr = np.append(0, np.cumsum(is_there))[np.append(starts, len(at))]
        return ModelRows(indptr, self.indices[at][is_there], self.values[at][is_there])

    def with_values(self, is_kept: npt.NDArray[np.bool_]) -> ModelRows:
        """Return the rows with these of their values."""
        if is_kept.all():
            return self
        indptr = np.append(0, np.cumsum(is_kept))[self.indptr]
        return ModelRows(indptr, self.indices[is_kept], self.values[is_kept])

    def followed_by(self, other: ModelRows) -> ModelRows:
        """Return the rows, then the rows of another object."""
        return ModelRows(
            np.concatenate([self.indptr, self.indptr[-1] + other.indptr[1:]]),
            np.concatenate([self.indices, other.indices]),
            np.concatenate([self.values, other.values]),
        )


BEHIND_KEYS: Final = 1 << 62
"""In rows of keys, the index of the time; those of numeric columns follow."""
NO_FIELD: Final = FIELDS_MAX + 1
"""The number of a field without embeddings: of crosses, and of fields for which there is no number."""


class FieldNumbers:
    """The numbers of fields of texts in keys, from 1 on, in the order in which the fields became known.

    >>> from streamiter.values.named_rows import FieldReader
    >>> numbers = FieldNumbers()
    >>> numbers.add(FieldReader(bits=HASH_BITS).rows([{"user": "u7", "km": 3.0}, {"item": "i9"}]))
    2
    >>> numbers.names
    ['user', 'item']
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._number_of = {name: number for number, name in enumerate(names, 1)}

    @property
    def names(self) -> list[str]:
        """The names of the fields, in the order of their numbers."""
        return list(self._number_of)

    def add(self, named: NamedRows) -> int:
        """Give new fields the next numbers, in an order that no cut of batches changes; return how many got one."""
        new: dict[str, int] = {}
        for position, field in enumerate(named.text_fields):
            if field not in self._number_of and (is_there := named.places[:, position] != ABSENT).any():
                new[field] = min(int(is_there.argmax()), new.get(field, len(named)))
        order = sorted(new, key=lambda field: (new[field], len(field), field))[: FIELDS_MAX - len(self._number_of)]
        self._number_of |= {field: number for number, field in enumerate(order, 1 + len(self._number_of))}
        return len(order)

    def of(self, field: str) -> int:
        """Return the number of a field; ``NO_FIELD`` without one."""
        return self._number_of.get(field, NO_FIELD)

    def keyed(self, named: NamedRows, width: int) -> NamedRows:
        """Return rows whose places are keys; places behind the first ``width`` columns are those of crosses."""
        numbers = [self.of(field) for field in named.text_fields]
        numbers += [0] * (width - len(numbers)) + [NO_FIELD] * (named.places.shape[1] - width)
        keys = named.places | (np.array(numbers, np.intp) << HASH_BITS)
        return replace(named, places=np.where(named.places == ABSENT, ABSENT, keys))

    def number_in(self, earlier: FieldNumbers, key: int) -> int:
        """Return the key here of a key with the numbers of another model."""
        number = key >> HASH_BITS
        if 0 < number < NO_FIELD:
            number = self.of(earlier.names[number - 1])
        return number << HASH_BITS | (key & ((1 << HASH_BITS) - 1))


ASSUMED: Final = 1
CORRECTED: Final = 2
CONFIRMED: Final = 3
WITHDRAWN: Final = 4

# A label counts half in a mixture if this many others have judged since its question was predicted, see
# docs/decisions/078.
_JUDGED_OF_HALF: Final = 30.0
NOTHING_SAID_YET: Final = -1.0
"""The evidence of a label that says nothing of the predictions, as have all labels before it."""


class RowSteps(NamedTuple):
    """The steps that are made with rows, one after the other."""

    rows: Indices
    """The row of each step; a row may have several steps."""
    predicts: npt.NDArray[np.bool_]
    """Whether the step predicts its row."""
    learns: npt.NDArray[np.bool_]
    """Whether the step then learns from its row, if the weight is above 0."""
    weights: Floats
    """The weight of the row."""
    questions: Indices
    """For a question and for its late label, the number of the question; else -1."""
    assumed: npt.NDArray[np.uint8] | None = None
    """By step ``ASSUMED`` for a question that is learned as False before its label is known, then ``CORRECTED`` for its
    late label True, which is learned while the slope of the assumption is taken back, ``CONFIRMED`` for its late label
    False, which only judges the experts, or ``WITHDRAWN`` if it has no label: the slope is taken back; else 0. The
    slopes of a question add up to the slope of its label."""

    @property
    def judges(self) -> Truths:
        """Whether a step has a label that judges its prediction."""
        judges: Truths = self.learns & (self.weights > 0.0)
        return judges if self.assumed is None else judges & (self.assumed != ASSUMED) & (self.assumed != WITHDRAWN)

    def evidence(self, judged: int, marks: Floats, *, is_first: bool) -> Floats:
        """Return how much the label of each step counts in a mixture; ``judged`` labels have judged before the steps.

        It is 1 at once, and the less, the more labels have judged since the question was predicted. Delayed labels of
        neighbouring rows are alike, and a mixture that counts each of them in full turns to the predictions of an hour
        that is over. The rate of Weinberger and Ordentlich, "On Delayed Prediction of Individual Sequences" (2002), is
        divided by the delay. The first label, where ``judged`` begins with 0, says nothing of a prediction that knew
        none; nor does a late label whose question has no scores: 0, or ``NOTHING_SAID_YET`` if that is so for all
        labels so far (``is_first``: for those before these steps).

        ``marks`` has for each question the number of labels that had judged when it was predicted, or 0 without scores;
        it gets those of the questions of these steps.
        """
        judges, is_question = self.judges, self.questions >= 0
        asks, late = np.flatnonzero(self.predicts & is_question), np.flatnonzero(judges & ~self.predicts & is_question)
        before = float(judged) + np.cumsum(judges) - judges
        marks[self.questions[asks]] = before[asks]
        asked = before.copy()
        asked[late] = marks[self.questions[late]]
        evidence: Floats = np.where(asked > 0.0, _JUDGED_OF_HALF / (_JUDGED_OF_HALF + before - asked), 0.0)
        if is_first:
            says = np.flatnonzero(judges & (evidence > 0.0))
            start = late[: np.searchsorted(late, says[0])] if len(says) else late
            evidence[start] = NOTHING_SAID_YET
        return evidence

    def part(self, start: int, stop: int) -> RowSteps:
        """Return the steps from ``start`` up to ``stop``."""
        return RowSteps._make(None if each is None else each[start:stop] for each in self)

    @staticmethod
    def one_each(count: int, *, learns: bool, weights: Floats | None = None) -> RowSteps:
        """Return one step for each row: it predicts the row, and then may learn from it."""
        each = np.ones(count, dtype=np.bool_)
        weights = np.ones(count) if weights is None else weights
        return RowSteps(np.arange(count), each, each & learns, weights, np.full(count, -1))


class FirstRows(NamedTuple):
    """The rows that were learned from while their labels may still turn out to be of another kind."""

    rows: ModelRows
    labels: list[Label]
    weights: Floats

    @staticmethod
    def none() -> FirstRows:
        """Return no rows."""
        return FirstRows(ModelRows.none(), [], np.zeros(0))

    def followed_by(self, rows: ModelRows, steps: RowSteps, labels: Labels, most: int) -> FirstRows:
        """Return these rows and the rows that the steps learn from, up to ``most`` in all."""
        places = np.flatnonzero(steps.learns)[: most - len(self.labels)]
        added = [plain_scalar(labels[place]) for place in places]
        more = self.rows.followed_by(rows.take(steps.rows[places]))
        return FirstRows(more, self.labels + added, np.append(self.weights, steps.weights[places]))

    def state(self) -> dict[str, object]:
        """Return a copy as plain data."""
        return {**self.rows._asdict(), "labels": list(self.labels), "weights": self.weights}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> FirstRows:
        """Return the rows that :meth:`state` was taken of."""
        rows = ModelRows(state["indptr"], state["indices"], state["values"])
        return FirstRows(rows, list(state["labels"]), state["weights"])
