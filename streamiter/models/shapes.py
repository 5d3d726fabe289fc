"""``Shapes``: the tables that a published model has beside its linear member, and the mixture of all members.

A *column* turns the value of a field into one of 61 *fine bins*: 0 where the value is missing, else 1 to 60. A *coarse
bin* is ``(fine + 3) // 4``, so it is 0 where the value is missing, else 1 to 15. A *member* adds up numbers of tables:
of each column, by its fine bin; of pairs of columns, by their coarse bins; of trees, by the results of comparisons of
fine bins. The prediction is the mean of the predictions of all members, weighted by the ``mixture``; the linear member
is the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, shortened
from streamiter.values.numbers import Array, Floats, Indices

FINE: Final = 61
"""The number of fine bins of a column."""

COARSE: Final = 16
"""The number of coarse bins of a column."""

EDGES: Final = 59
"""The number of edges of a column of numbers: it has a fine bin more for values that are there."""

OF_PAIR: Final = COARSE * COARSE
"""The number of cells of a pair."""

# A comparison is a bit of a tree's cell, and the cell fits into a byte.
DEPTH_MAX: Final = 8

NO_EDGE: Final = 1e100
"""An edge that no value is above, as larger numbers count as missing: a column may have less than 59 edges."""

ColumnKind = Literal["number", "category", "period"]
"""``number``: the fine bin is 1 + the number of edges below the value. ``category``: the bin of a text is in a
dictionary. ``period``: the same as a number, for the value modulo the period, as for the hour of a time."""

COLUMN_KINDS: Final[tuple[ColumnKind, ...]] = get_args(ColumnKind)


@dataclass(frozen=True, slots=True, eq=False)
class TableMember:
    """A member of the mixture that adds up numbers of tables; ``scores`` is 1, or the number of classes."""

    tables: npt.NDArray[np.float32]
    """(cells, scores): 61 cells for each column, then 256 for each pair, then ``2**depth`` for each tree."""
    slopes: Floats
    """(columns, scores): the weight of ``clip(value - center, -limit, limit)`` of each column of numbers."""
    intercept: Floats
    """(scores,): the score of a row before slopes and tables; for a number to predict with the mean of the label."""
    pairs: Indices
    """(pairs, 2): the numbers of two columns. The cell is 16 times the coarse bin of the first, plus the second's."""
    tree_columns: Indices
    """(trees, depth): the numbers of the columns that are compared."""
    tree_bins: Indices
    """(trees, depth): a comparison is true if the fine bin is above; the first is the highest bit of the cell."""

    @staticmethod
    def of_cells(
        cells: Array,
        slopes: Floats,
        *,
        offset: float = 0.0,
        pairs: Array | None = None,
        tree_columns: Array | None = None,
        tree_bins: Array | None = None,
    ) -> TableMember:
        """Return the member of a learner's cells (cells, scores), in which fine and coarse tables are separate.

        Its cells are, for each column, 64 of fine bins and 16 of coarse bins; for each pair, 256 of coarse bins and 16
        of coarse bins // 4; for each tree ``2**depth``; and the intercept, to which ``offset`` is added.
        """
        scores, columns = cells.shape[1], len(slopes)
        pairs = np.empty((0, 2), np.intp) if pairs is None else np.array(pairs, np.intp)
        tree_columns = np.empty((0, 1), np.intp) if tree_columns is None else np.array(tree_columns, np.intp)
        tree_bins = np.empty((0, 1), np.intp) if tree_bins is None else np.array(tree_bins, np.intp)
        at_pairs, fine = columns * (64 + COARSE), np.arange(FINE)
        at_trees = at_pairs + len(pairs) * (OF_PAIR + COARSE)
        of_columns = cells[:at_pairs].reshape(columns, 64 + COARSE, scores).astype(np.float64)
        of_pairs = cells[at_pairs:at_trees].reshape(len(pairs), OF_PAIR + COARSE, scores).astype(np.float64)
        first, second = np.divmod(np.arange(OF_PAIR), COARSE)
        tables = [
            (of_columns[:, fine] + of_columns[:, 64 + coarse_of(fine)]).reshape(-1, scores),
            (of_pairs[:, :OF_PAIR] + of_pairs[:, OF_PAIR + first // 4 * 4 + second // 4]).reshape(-1, scores),
            cells[at_trees:-1],
        ]
        intercept = cells[-1].astype(np.float64) + offset
        return TableMember(np.concatenate(tables).astype(np.float32), slopes, intercept, pairs, tree_columns, tree_bins)


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The columns and members beside the linear member of a published model; all arrays have a row for each column."""

    fields: list[str]
    """The field of each column, a field of the linear member; a field of numbers and texts may have two columns."""
    kinds: list[ColumnKind]
    """What the column does with the values of its field."""
    edges: Floats
    """(columns, 59), ascending: of a column of numbers; :data:`NO_EDGE` behind the last, and for categories."""
    period: Floats
    """(columns,): what is subtracted from a value as often as it fits, down to 0 or more; 0 for other kinds."""
    center: Floats
    """(columns,): see ``TableMember.slopes``; 0 for other columns than numbers."""
    limit: Floats
    """(columns,): see ``TableMember.slopes``; 0 for other columns than numbers."""
    categories: Indices
    """(texts, 3), ascending: column, place of the text, and its fine bin from 1 to 60."""
    other: Indices
    """(columns,): the fine bin of a text that is not among the categories of its column; 0 for columns of numbers."""
    rows: npt.NDArray[np.float32]
    """(columns, 61): the weight of the rows that each fine bin has had, for instance of the last thousand rows."""
    mixture: Floats
    """The weights of the linear member, then of each of the ``members``; their sum is 1."""
    members: Sequence[TableMember]
    """The members that have tables."""

    def published(self) -> dict[str, Any]:
        """Return the parameter ``shapes`` of a published model."""
        return {
            "fields": list(self.fields),
            "kinds": list(self.kinds),
            "edges": np.minimum(self.edges, NO_EDGE),
            "period": self.period,
            "center": self.center,
            "limit": self.limit,
            "categories": self.categories.astype(np.int64),
            "other": self.other.astype(np.int64),
            "rows": self.rows.astype(np.float32),
            "mixture": self.mixture,
            "members": [
                {
                    "tables": each.tables,
                    "slopes": each.slopes,
                    "intercept": each.intercept,
                    "pairs": each.pairs.astype(np.int64),
                    "tree_columns": each.tree_columns.astype(np.int64),
                    "tree_bins": each.tree_bins.astype(np.int64),
                }
                for each in self.members
            ],
        }

    @staticmethod
    def of(given: object, subject: str, scores: int) -> Shapes:
        """Return the shapes of a published model with this number of scores; ``subject`` begins messages."""
        return _Reading(subject, given, scores).shapes()


def coarse_of(fine: Array) -> Array:
    """Return the coarse bin of each fine bin.

    >>> coarse_of(np.array([0, 1, 4, 5, 60])).tolist()
    [0, 1, 1, 2, 15]
    """
    coarse: Array = (fine + 3) // 4
    return coarse


class _Reading:
    """Reads the parameter ``shapes``, and refuses what no release has published."""

    def __init__(self, subject: str, given: object, scores: int) -> None:
        self._subject = subject
        self._given: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        self._scores = scores

    def shapes(self) -> Shapes:
        fields, kinds = (self._names(name) for name in ("fields", "kinds"))
        if unknown := sorted(set(kinds).difference(COLUMN_KINDS)):
            raise ModelError(
                f"{self._subject}: shapes: the column of {fields[kinds.index(unknown[0])]!r} has the kind "
                f"{unknown[0]!r}; the model is of a newer version of streamiter, or damaged"
            )
        columns = len(fields)
        given = self._given.get("members")
        if not isinstance(given, list) or not given:
            raise self._wrong("members", "a list of members", given)
        members = [self._member(each, columns) for each in given]
        shapes = Shapes(
            fields=fields,
            kinds=kinds,  # type: ignore[arg-type]
            edges=self._floats("edges", (columns, EDGES)),
            period=self._floats("period", (columns,)),
            center=self._floats("center", (columns,)),
            limit=self._floats("limit", (columns,)),
            categories=self._indices("categories", (None, 3), (columns, None, FINE)),
            other=self._indices("other", (columns,), (FINE,)),
            rows=self._floats("rows", (columns, FINE)).astype(np.float32),
            mixture=self._floats("mixture", (1 + len(members),)),
            members=members,
        )
        if len(kinds) != columns:
            raise self._wrong("kinds", "one for each column", kinds)
        key = shapes.categories[:, 0] << 32 | shapes.categories[:, 1]
        if (key[1:] <= key[:-1]).any() or (shapes.edges[:, 1:] < shapes.edges[:, :-1]).any():
            raise self._wrong("categories and edges", "in ascending order", None)
        return shapes

    def _member(self, given: object, columns: int) -> TableMember:
        inner = _Reading(self._subject, given, self._scores)
        pairs = inner._indices("pairs", (None, 2), (columns,))
        tree_columns = inner._indices("tree_columns", (None, None), (columns,))
        trees, depth = tree_columns.shape
        if depth > DEPTH_MAX:
            raise self._wrong("tree_columns", f"at most {DEPTH_MAX} columns of a tree", depth)
        cells = columns * FINE + len(pairs) * OF_PAIR + trees * 2**depth
        return TableMember(
            inner._floats("tables", (cells, self._scores)).astype(np.float32),
            inner._floats("slopes", (columns, self._scores)),
            inner._floats("intercept", (self._scores,)),
            pairs,
            tree_columns,
            inner._indices("tree_bins", (trees, depth), (FINE,)),
        )

    def _names(self, name: str) -> list[str]:
        value = self._given.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts", value)
        return value

    def _floats(self, name: str, shape: tuple[int | None, ...]) -> Floats:
        array = np.asarray(self._given.get(name))
        lengths = zip(shape, array.shape, strict=False)
        if array.dtype.kind not in "iuf" or array.ndim != len(shape) or any(a not in (None, b) for a, b in lengths):
            raise self._wrong(name, f"numbers of shape {shape}", f"shape {array.shape} of {array.dtype}")
        return array.astype(np.float64)

    def _indices(self, name: str, shape: tuple[int | None, ...], stops: tuple[int | None, ...]) -> Indices:
        """Return whole numbers from 0; the last axis has a bound for each of its numbers, or one bound for all."""
        found = self._floats(name, shape)
        below = np.array([np.inf if stop is None else stop for stop in stops])
        if found.size and ((found < 0) | (found >= below)).any():
            raise self._wrong(name, f"whole numbers from 0 to below {stops}", shortened(found.tolist()))
        return found.astype(np.intp)

    def _wrong(self, name: str, expected: str, given: object) -> ModelError:
        return ModelError(
            f"{self._subject}: shapes: expected {name!r} as {expected}, given {shortened(given)}; publish the "
            "parameters of a learner as they are"
        )
