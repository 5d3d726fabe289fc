"""``ShapeScores``: bins and scores of the members that have tables, for one row and for many.

A row is a loop of Python over lists, as it is in other languages; many rows are gathered by numpy. Both add the same
numbers in the same order, in float64: the tables from 0, then the slopes, then the intercept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.models.shapes import CELLS_OF_PAIR, COARSE_BINS, FINE_BINS, Shapes, TableMember, coarse_of
from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import NamedRows, is_missing
from streamiter.values.numbers import NUMBERS, Floats, Indices

Score = Any
"""A float, or an array with a number for each class: both can be added and multiplied."""


@dataclass(frozen=True, slots=True)
class BinnedRows:
    """Rows as members see them."""

    fine: Indices
    """(columns, rows): the fine bin of each column."""
    distances: Floats
    """(fields, rows): ``clip(value - center, -limit, limit)`` of the numeric fields; 0 where the value is missing."""

    def shares_bins_with(self, row: BinnedRows) -> bool:
        """Whether a column has a bin in these rows and in another row: a place may be of two texts."""
        return bool((self.fine.any(axis=1) & row.fine.any(axis=1)).any())


class ShapeScores:
    """Computes the scores of the members of ``shapes``.

    ``fields`` are the numeric fields of the linear member, with their ``centers`` and ``limits``; ``places`` are those
    of its texts.
    """

    def __init__(self, shapes: Shapes, fields: list[str], centers: Floats, limits: Floats, places: Indices) -> None:
        self.shapes = shapes
        self.fields = fields
        self.places = places
        self._centers = centers
        self._limits = limits
        self.members = [MemberScores(member, len(shapes.fields)) for member in shapes.members]
        numbers = [column for column, kind in enumerate(shapes.kinds) if kind == "number"]
        self._column_of = {shapes.fields[column]: column for column in numbers}
        self._mixture: list[float] = shapes.mixture.tolist()
        self.has_categories = bool(shapes.categories.any())

    def mixed(self, values: Iterable[Any]) -> Any:
        """Return the mixture of the predictions of all members, of which the linear one is the first."""
        return reduce(add, (weight * value for weight, value in zip(self._mixture, values, strict=True)))

    def binned(self, rows: NamedRows, places: Indices) -> BinnedRows:
        """Return the bins of rows, whose values are prepared by the kinds of their fields.

        ``places`` (rows, texts) are positions in the linear member's places, or behind these. Of two with the same
        column the later one counts.
        """
        fine = np.zeros((len(self.shapes.fields), len(rows)), np.intp)
        distances = np.zeros((len(self.fields), len(rows)))
        for field, name in enumerate(self.fields):
            if name not in rows.fields:
                continue
            values = rows.numbers[:, rows.fields.index(name)]
            missing = is_missing(values)
            distances[field] = np.where(missing, 0.0, self.distance(field, values))
            if (column := self._column_of.get(name)) is not None:
                bins = 1 + np.searchsorted(self.shapes.edges[column], values)
                fine[column] = np.where(missing, 0, bins)
        categories = np.append(self.shapes.categories, 0)
        for of_text in np.sort(places, axis=1).T:
            cells = categories[of_text]
            known = np.flatnonzero(cells)
            fine[cells[known] // FINE_BINS, known] = cells[known] % FINE_BINS
        return BinnedRows(fine, distances)

    def distance(self, field: int, values: Floats) -> Floats:
        """Return the distances of values from the center of a field, within its limit."""
        limit = self._limits[field]
        clipped: Floats = np.minimum(np.maximum(values - self._centers[field], -limit), limit)
        return clipped

    def scores_beside(self, row: BinnedRows, others: BinnedRows) -> list[Floats]:
        """Return the scores (others, scores) of each member for a row together with others, of other columns."""
        # Candidates differ in few bins, so few of them are different.
        own = np.vstack([others.fine, others.distances])
        differs = own.any(axis=1)
        _, first, which = np.unique(own[differs], axis=1, return_index=True, return_inverse=True)
        rows = BinnedRows(others.fine[:, first] + row.fine, others.distances[:, first] + row.distances)
        return [member.scores(rows)[which.ravel()] for member in self.members]

    @cached_property
    def _numbers(self) -> list[tuple[str, float, float, int | None, list[float]]]:
        """For each numeric field its name, center and limit, and the column with its edges, if it has one."""
        found: list[tuple[str, float, float, int | None, list[float]]] = []
        scales = zip(self.fields, self._centers.tolist(), self._limits.tolist(), strict=True)
        for name, center, limit in scales:
            column = self._column_of.get(name)
            found.append((name, center, limit, column, [] if column is None else self.shapes.edges[column].tolist()))
        return found

    def scores_of_row(self, row: Mapping[str, Any], places: list[int]) -> list[Score]:
        """Return the score of a row by each member, see :meth:`binned`; its values are of the types of their fields."""
        fine = [0] * len(self.shapes.fields)
        distances = []
        for name, center, limit, column, edges in self._numbers:
            value: Any = row.get(name)
            if isinstance(value, NUMBERS) and abs(value) <= HUGE:
                number = float(value)
                distances.append(min(max(number - center, -limit), limit))
                if column is not None:
                    fine[column] = 1 + bisect_left(edges, number)
            else:
                distances.append(0.0)
        for place in sorted(places):
            if place < len(self.shapes.categories) and (cell := int(self.shapes.categories[place])):
                fine[cell // FINE_BINS] = cell % FINE_BINS
        coarse = [(each + 3) // 4 for each in fine]
        return [member.of_row(fine, coarse, distances) for member in self.members]


class MemberScores:
    """Computes the scores of one member."""

    def __init__(self, member: TableMember, columns: int) -> None:
        self.member = member
        self._columns = columns
        trees, depth = member.tree_columns.shape
        self.at_pairs = columns * FINE_BINS
        self.at_trees = self.at_pairs + len(member.pairs) * CELLS_OF_PAIR
        self.tree_starts = self.at_trees + np.arange(trees) * 2**depth
        self.tables: Floats = member.tables.astype(np.float64)

    @cached_property
    def bits_of_trees(self) -> npt.NDArray[np.uint8]:
        """(columns, fine bins, trees): the bits of a tree's cell that a column in this bin has set."""
        trees, depth = self.member.tree_columns.shape
        bits = np.zeros((self._columns, FINE_BINS, trees), np.uint8)
        for level in range(depth):
            is_above = np.arange(FINE_BINS)[:, None] > self.member.tree_bins[:, level]
            for column in range(self._columns):
                is_compared = self.member.tree_columns[:, level] == column
                bits[column] |= (is_above & is_compared).astype(np.uint8) << (depth - 1 - level)
        return bits

    def cells_of_trees(self, fine: Indices) -> Indices:
        """Return the cells (trees, rows) of the trees."""
        cells = np.zeros((fine.shape[1], len(self.tree_starts)), np.uint8)
        for bits, bins in zip(self.bits_of_trees, fine, strict=True):
            cells |= bits[bins]
        found: Indices = cells.T + self.tree_starts[:, None]
        return found

    def scores(self, rows: BinnedRows) -> Floats:
        """Return the scores (rows, scores)."""
        total = np.zeros((rows.fine.shape[1], self.tables.shape[1]))
        for cells in self._cells(rows):
            total += self.tables[cells]
        for distance, slope in zip(rows.distances, self.member.slopes, strict=True):
            total += distance[:, None] * slope
        return total + self.member.intercept

    def _cells(self, rows: BinnedRows) -> Iterator[Indices]:
        """Yield the cells of all rows in each table."""
        yield from rows.fine + np.arange(0, self.at_pairs, FINE_BINS)[:, None]
        coarse = coarse_of(rows.fine)
        for start, (first, second) in zip(
            range(self.at_pairs, self.at_trees, CELLS_OF_PAIR), self.member.pairs, strict=True
        ):
            yield start + COARSE_BINS * coarse[first] + coarse[second]
        yield from self.cells_of_trees(rows.fine)

    # ---- one row

    @cached_property
    def _row_tables(self) -> _RowTables:
        return _RowTables.of(self)

    def of_row(self, fine: list[int], coarse: list[int], distances: list[float]) -> Score:
        """Return the score of one row."""
        of = self._row_tables
        cells = [start + each for start, each in zip(range(0, self.at_pairs, FINE_BINS), fine, strict=True)]
        cells += [start + COARSE_BINS * coarse[first] + coarse[second] for start, first, second in of.pairs]
        if of.tree_starts:
            bits = 0
            for by_bin, each in zip(of.bits_of_trees, fine, strict=True):
                bits |= by_bin[each]
            cells += map(add, of.tree_starts, bits.to_bytes(len(of.tree_starts), "big"))
        if of.cells is None:
            total = self.tables[cells].sum(axis=0)
        else:
            total = reduce(add, map(of.cells.__getitem__, cells), 0.0)
        for distance, slope in zip(distances, of.slopes, strict=True):
            total = total + distance * slope
        return total + of.intercept


@dataclass(frozen=True, slots=True)
class _RowTables:
    """The tables of a member as lists, which Python reads faster than arrays."""

    cells: list[float] | None
    """The numbers of all cells; None where a cell has a number for each class."""
    pairs: list[tuple[int, int, int]]
    """The first cell of each pair, and its columns."""
    tree_starts: list[int]
    bits_of_trees: list[list[int]]
    """For each column and bin, a byte for each tree, as one number."""
    slopes: list[Score]
    intercept: Score

    @staticmethod
    def of(scores: MemberScores) -> _RowTables:
        member, is_one = scores.member, scores.tables.shape[1] == 1
        starts = range(scores.at_pairs, scores.at_trees, CELLS_OF_PAIR)
        return _RowTables(
            scores.tables[:, 0].tolist() if is_one else None,
            [(start, *pair) for start, pair in zip(starts, member.pairs.tolist(), strict=True)],
            scores.tree_starts.tolist(),
            [[int.from_bytes(of_bin.tobytes(), "big") for of_bin in of_column] for of_column in scores.bits_of_trees],
            member.slopes[:, 0].tolist() if is_one else list(member.slopes),
            float(member.intercept[0]) if is_one else member.intercept,
        )
