"""``ShapeScores``: bins and scores of the members that have tables, for one row and for many.

A row is a loop of Python over lists, as it is in other languages; many rows are gathered by numpy. Both add the same
numbers in the same order, in float64: the tables from 0, then the slopes, then the intercept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from math import floor
from operator import add
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.models.shapes import FINE, OF_PAIR, Shapes, TableMember, coarse_of
from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing, place_of_text
from streamiter.values.numbers import Floats, Indices

_NUMBERS: Final[tuple[type[Any], ...]] = (int, float, np.integer, np.floating, np.bool_)

# Bins of recent texts, for each column: a text that comes again is not hashed again.
_CACHED_TEXTS: Final = 65_536

Score = Any
"""A float, or an array with a number for each class: both can be added and multiplied."""


@dataclass(frozen=True, slots=True)
class BinnedRows:
    """Rows as tables see them."""

    fine: Indices
    """(columns, rows): the fine bin of each column."""
    distance: Floats
    """(columns, rows): ``clip(value - center, -limit, limit)``; 0 where the value is missing."""


class ShapeScores:
    """Computes the scores of the members of ``shapes``, whose texts have ``2**bits`` places.

    ``numbers`` and ``texts`` are the fields that rows can have; other columns are always missing.
    """

    def __init__(self, shapes: Shapes, bits: int, numbers: Collection[str], texts: Collection[str]) -> None:
        self.shapes = shapes
        self.members = [MemberScores(member, len(shapes.fields)) for member in shapes.members]
        self._bits = bits
        self._fields = [
            field if field in (texts if kind == "category" else numbers) else None
            for field, kind in zip(shapes.fields, shapes.kinds, strict=True)
        ]
        starts = np.searchsorted(shapes.categories[:, 0], np.arange(len(shapes.fields) + 1))
        self._categories = [shapes.categories[a:b, 1:] for a, b in pairwise(starts)]

    def mixed(self, values: Sequence[Any]) -> Any:
        """Return the mixture of the predictions of all members, of which the linear one is the first."""
        return reduce(add, (weight * value for weight, value in zip(self._mixture, values, strict=True)))

    @cached_property
    def _mixture(self) -> list[float]:
        mixture: list[float] = self.shapes.mixture.tolist()
        return mixture

    # ---- many rows

    def binned(self, rows: NamedRows) -> BinnedRows:
        """Return the bins of rows, whose values are prepared by the kinds of their fields."""
        fine = np.zeros((len(self._fields), len(rows)), np.intp)
        distance = np.zeros(fine.shape)
        for column, (field, kind) in enumerate(zip(self._fields, self.shapes.kinds, strict=True)):
            if kind == "category" and field in rows.text_fields:
                fine[column] = self._bins_of_places(column, rows.places[:, rows.text_fields.index(field)])
            elif kind != "category" and field in rows.fields:
                values = rows.numbers[:, rows.fields.index(field)]
                fine[column], distance[column] = self._bins_of_numbers(column, values)
        return BinnedRows(fine, distance)

    def _bins_of_numbers(self, column: int, values: Floats) -> tuple[Indices, Floats]:
        shapes, missing = self.shapes, is_missing(values)
        values = np.where(missing, 0.0, values)
        if period := shapes.period[column]:
            values = values - period * np.floor(values / period)
        limit = shapes.limit[column]
        distance = np.minimum(np.maximum(values - shapes.center[column], -limit), limit)
        fine = 1 + np.searchsorted(shapes.edges[column], values)
        return np.where(missing, 0, fine), np.where(missing, 0.0, distance)

    def _bins_of_places(self, column: int, places: Indices) -> Indices:
        known, other = self._categories[column], int(self.shapes.other[column])
        bins = np.append(known[:, 1], other)
        at = np.searchsorted(known[:, 0], places)
        is_known = np.append(known[:, 0], ABSENT)[at] == places
        return np.where(places == ABSENT, 0, bins[np.where(is_known, at, len(known))])

    # ---- one row

    @cached_property
    def _columns(self) -> list[tuple[str | None, Callable[[Any], int] | None, list[float], float, float, float]]:
        """For each column its field, the function from a text to its bin, edges, period, center and limit."""
        shapes = self.shapes
        arrays = (shapes.edges, shapes.period, shapes.center, shapes.limit)
        of_texts = [
            _TextBins(field, dict(known.tolist()), int(other), self._bits).of if kind == "category" else None
            for field, kind, known, other in zip(
                shapes.fields, shapes.kinds, self._categories, shapes.other, strict=True
            )
        ]
        return list(zip(self._fields, of_texts, *(array.tolist() for array in arrays), strict=True))

    def scores_of_row(self, row: Mapping[str, Any]) -> list[Score]:
        """Return the score of a row, by each member; its values are prepared, and of the types of their fields."""
        fine: list[int] = []
        distance: list[float] = []
        for field, of_text, edges, period, center, limit in self._columns:
            value: Any = None if field is None else row.get(field)
            if of_text is not None:
                fine.append(of_text(value))
                distance.append(0.0)
            elif isinstance(value, _NUMBERS) and abs(value) <= HUGE:
                number = float(value)
                if period:
                    number -= period * floor(number / period)
                fine.append(1 + bisect_left(edges, number))
                distance.append(min(max(number - center, -limit), limit))
            else:
                fine.append(0)
                distance.append(0.0)
        coarse = [(each + 3) // 4 for each in fine]
        return [member.of_row(fine, coarse, distance) for member in self.members]


class _TextBins:
    """The fine bins of the texts of a column."""

    def __init__(self, field: str, bins: dict[int, int], other: int, bits: int) -> None:
        self._field = field
        self._bins = bins
        self._other = other
        self._bits = bits
        self._recent: dict[str, int] = {}

    def of(self, value: Any) -> int:
        """Return the bin of a text, or of the first text of a list; 0 for other values."""
        if isinstance(value, list):
            value = value[0] if value else None
        if not isinstance(value, str):
            return 0
        if (found := self._recent.get(value)) is None:
            if len(self._recent) >= _CACHED_TEXTS:
                self._recent.clear()
            found = self._bins.get(place_of_text(self._field, value, self._bits), self._other)
            self._recent[value] = found
        return found


class MemberScores:
    """Computes the scores of one member."""

    def __init__(self, member: TableMember, columns: int) -> None:
        self.member = member
        self._columns = columns
        trees, depth = member.tree_columns.shape
        self.at_pairs = columns * FINE
        self.at_trees = self.at_pairs + len(member.pairs) * OF_PAIR
        self.tree_starts = self.at_trees + np.arange(trees) * 2**depth
        self.tables: Floats = member.tables.astype(np.float64)

    @cached_property
    def bits_of_trees(self) -> npt.NDArray[np.uint8]:
        """(columns, fine bins, trees): the bits of a tree's cell that a column in this bin has set."""
        trees, depth = self.member.tree_columns.shape
        bits = np.zeros((self._columns, FINE, trees), np.uint8)
        for level in range(depth):
            is_above = np.arange(FINE)[:, None] > self.member.tree_bins[:, level]
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
        for distance, slope in zip(rows.distance, self.member.slopes, strict=True):
            if slope.any():
                total += distance[:, None] * slope
        return total + self.member.intercept

    def _cells(self, rows: BinnedRows) -> Iterator[Indices]:
        """Yield the cells of all rows in each table."""
        yield from rows.fine + np.arange(0, self.at_pairs, FINE)[:, None]
        coarse = coarse_of(rows.fine)
        for start, (first, second) in zip(range(self.at_pairs, self.at_trees, OF_PAIR), self.member.pairs, strict=True):
            yield start + 16 * coarse[first] + coarse[second]
        yield from self.cells_of_trees(rows.fine)

    # ---- one row

    @cached_property
    def _row_tables(self) -> _RowTables:
        return _RowTables.of(self)

    def of_row(self, fine: list[int], coarse: list[int], distance: list[float]) -> Score:
        """Return the score of one row."""
        of = self._row_tables
        cells = [start + each for start, each in zip(range(0, self.at_pairs, FINE), fine, strict=True)]
        cells += [start + 16 * coarse[first] + coarse[second] for start, first, second in of.pairs]
        if of.tree_starts:
            bits = 0
            for by_bin, each in zip(of.bits_of_trees, fine, strict=True):
                bits |= by_bin[each]
            cells += map(add, of.tree_starts, bits.to_bytes(len(of.tree_starts), "big"))
        if of.cells is None:
            total = self.tables[cells].sum(axis=0)
        else:
            total = reduce(add, map(of.cells.__getitem__, cells), 0.0)
        for column, slope in of.slopes:
            total = total + distance[column] * slope
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
    slopes: list[tuple[int, Score]]
    """The columns that have slopes, with these."""
    intercept: Score

    @staticmethod
    def of(scores: MemberScores) -> _RowTables:
        member, is_one = scores.member, scores.tables.shape[1] == 1
        starts = range(scores.at_pairs, scores.at_trees, OF_PAIR)
        slopes = member.slopes[:, 0].tolist() if is_one else member.slopes
        return _RowTables(
            scores.tables[:, 0].tolist() if is_one else None,
            [(start, *pair) for start, pair in zip(starts, member.pairs.tolist(), strict=True)],
            scores.tree_starts.tolist(),
            [[int.from_bytes(of_bin.tobytes(), "big") for of_bin in of_column] for of_column in scores.bits_of_trees],
            [(int(column), slopes[column]) for column in np.flatnonzero(member.slopes.any(axis=1))],
            float(member.intercept[0]) if is_one else member.intercept,
        )
