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
from streamiter.models.documents import are_names, array_of_numbers, parameter_of
from streamiter.values.numbers import Array, Floats, Indices

FINE_BINS: Final = 61
"""The number of fine bins of a column."""

COARSE_BINS: Final = 16
"""The number of coarse bins of a column."""

EDGES_OF_COLUMN: Final = 59
"""The number of edges of a column of numbers: it has a fine bin more for values that are there."""

CELLS_OF_PAIR: Final = COARSE_BINS * COARSE_BINS
"""The number of cells of a pair."""

# A comparison is a bit of a tree's cell, and the cell fits into a byte.
TREE_DEPTH_MAX: Final = 8

NO_EDGE: Final = 1e100
"""An edge that no value is above, as larger numbers count as missing: a column may have less than 59 edges."""

ColumnKind = Literal["number", "category"]
"""``number``: the fine bin is 1 + the number of edges below the value. ``category``: each text has its bin."""

COLUMN_KINDS: Final[tuple[ColumnKind, ...]] = get_args(ColumnKind)


@dataclass(frozen=True, slots=True, eq=False)
class TableMember:
    """A member of the mixture that adds up numbers of tables; ``scores`` is 1, or the number of classes."""

    tables: npt.NDArray[np.float32]
    """(cells, scores): 61 cells for each column, then 256 for each pair, then ``2**depth`` for each tree."""
    slopes: Floats
    """(fields, scores): of the linear member's numeric fields, as its weights, with its centers and limits."""
    intercept: Floats
    """(scores,): the score of a row before slopes and tables; for a number to predict with the mean of the label."""
    pairs: Indices
    """(pairs, 2): the numbers of two columns. The cell is 16 times the coarse bin of the first, plus the second's."""
    tree_columns: Indices
    """(trees, depth): the numbers of the columns that are compared."""
    tree_bins: Indices
    """(trees, depth): a comparison is true if the fine bin is above; the first is the highest bit of the cell."""

    @staticmethod
    def of(given: Mapping[str, Any], subject: str, columns: int, fields: int, scores: int) -> TableMember:
        """Return a published member of a model with this number of columns, numeric fields and scores."""
        pairs = _indices(given, "pairs", subject, (None, 2), columns)
        tree_columns = _indices(given, "tree_columns", subject, (None, None), columns)
        trees, depth = tree_columns.shape
        cells = columns * FINE_BINS + len(pairs) * CELLS_OF_PAIR + trees * 2 ** min(depth, TREE_DEPTH_MAX)
        return TableMember(
            array_of_numbers(given, "tables", subject, (cells, scores)).astype(np.float32),
            array_of_numbers(given, "slopes", subject, (fields, scores)),
            array_of_numbers(given, "intercept", subject, (scores,)),
            pairs,
            tree_columns,
            _indices(given, "tree_bins", subject, (trees, depth), FINE_BINS),
        )

    @staticmethod
    def of_tables(
        of_columns: Floats,
        of_pairs: Floats,
        of_trees: Floats,
        *,
        slopes: Floats,
        intercept: Floats,
        pairs: Array,
        tree_columns: Array,
        tree_bins: Array,
    ) -> TableMember:
        """Return the member of a learner's tables (tables, cells, scores), in which fine and coarse ones are separate.

        A column has 64 cells of fine bins, then 16 of coarse bins; a pair 256 of coarse bins, then 16 of coarse bins //
        4; a tree ``2**depth``.
        """
        scores, fine = len(intercept), np.arange(FINE_BINS)
        first, second = np.divmod(np.arange(CELLS_OF_PAIR), COARSE_BINS)
        tables = (
            of_columns[:, fine] + of_columns[:, 64 + coarse_of(fine)],
            of_pairs[:, :CELLS_OF_PAIR] + of_pairs[:, CELLS_OF_PAIR + first // 4 * 4 + second // 4],
            of_trees,
        )
        return TableMember(
            np.concatenate([each.reshape(-1, scores) for each in tables]).astype(np.float32),
            slopes,
            intercept,
            pairs.astype(np.intp),
            tree_columns.astype(np.intp),
            tree_bins.astype(np.intp),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The columns and members beside the linear member of a published model."""

    fields: list[str]
    """The field of each column; a field of numbers and texts may have two columns."""
    kinds: list[ColumnKind]
    """What each column does with the values of its field."""
    edges: Floats
    """(columns, 59), ascending: of a column of numbers; :data:`NO_EDGE` or more behind the last, and for categories."""
    categories: Indices
    """(places,): for each place of the linear member ``61 * column + fine bin``, or 0 if the place has no bin."""
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
            "categories": self.categories.astype(np.int64),
            "rows": self.rows.astype(np.float32),
            "mixture": self.mixture,
            "members": [
                {
                    "tables": each.tables,
                    "slopes": each.slopes,
                    "intercept": each.intercept,
                    "pairs": each.pairs.astype(np.int32),
                    "tree_columns": each.tree_columns.astype(np.int32),
                    "tree_bins": each.tree_bins.astype(np.int32),
                }
                for each in self.members
            ],
        }

    @staticmethod
    def of(given: Mapping[str, Any], subject: str, *, fields: int, places: int, scores: int) -> Shapes:
        """Return the shapes of a published model, whose linear member has this number of fields, places and scores."""
        subject = f"{subject}: shapes"
        names: list[str] = parameter_of(given, "fields", subject, "a list of names", are_names)
        columns = len(names)
        kinds = parameter_of(given, "kinds", subject, "a kind for each column", are_names)
        if unknown := [(name, kind) for name, kind in zip(names, kinds, strict=False) if kind not in COLUMN_KINDS]:
            raise ModelError(
                f"{subject}: the column of {unknown[0][0]!r} has the kind {unknown[0][1]!r}; the model is of a newer "
                "version of streamiter, or damaged"
            )
        members = parameter_of(given, "members", subject, "a list of members", lambda value: isinstance(value, list))
        if len(kinds) != columns:
            raise ModelError(f"{subject}: expected a kind for each of {columns} columns, given {len(kinds)} kinds")
        edges = array_of_numbers(given, "edges", subject, (columns, EDGES_OF_COLUMN))
        if (edges[:, 1:] < edges[:, :-1]).any():
            raise ModelError(f"{subject}: expected 'edges' in ascending order, given others; the model is damaged")
        return Shapes(
            fields=names,
            kinds=kinds,
            edges=edges,
            categories=_indices(given, "categories", subject, (places,), max(1, columns * FINE_BINS)),
            rows=array_of_numbers(given, "rows", subject, (columns, FINE_BINS)).astype(np.float32),
            mixture=array_of_numbers(given, "mixture", subject, (1 + len(members),)),
            members=[TableMember.of(each, subject, columns, fields, scores) for each in members],
        )


def _indices(given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...], stop: int) -> Indices:
    found = array_of_numbers(given, name, subject, shape)
    if ((found < 0) | (found >= stop)).any():
        raise ModelError(
            f"{subject}: expected {name!r} as whole numbers from 0 to {stop - 1}, given {shortened(found.tolist())}; "
            "the model is damaged"
        )
    return found.astype(np.intp)


def coarse_of(fine: Array) -> Array:
    """Return the coarse bin of each fine bin.

    >>> coarse_of(np.array([0, 1, 4, 5, 60])).tolist()
    [0, 1, 1, 2, 15]
    """
    coarse: Array = (fine + 3) // 4
    return coarse
