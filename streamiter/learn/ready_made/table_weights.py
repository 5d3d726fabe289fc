"""``TableWeights``: experts with a weight for each cell of their tables, of columns, of pairs and of random trees.

The tables come and go: at each look the weakest quarter of the trees, and of the pairs where not all have room, gives
way to new ones, which are chosen by the errors of the predictions since the last look.
``streamiter.learn.ready_made.cell_steps`` describes the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamiter.learn.labels import LabelKind
from streamiter.learn.ready_made.cell_columns import LOOKS, CellColumns, Moved
from streamiter.learn.ready_made.expert_weights import ROWS_OF_A_START, SHARES_OF_CLASSES, SQUARES_KEPT, ExpertWeights
from streamiter.learn.ready_made.model_rows import ModelRows, RowSteps
from streamiter.models.shapes import CELLS_OF_PAIR, FINE_BINS, TableMember
from streamiter.values.numbers import Floats, Indices

PAIRS: Final = 64
TREES: Final = 48
# The share of the trees, and of the pairs, that is replaced at a look; with 1/8 and 1/2 losses are .3 % and .1 %
# larger, see docs/decisions/077.
_REPLACED: Final = 0.25
# The share of their columns that is drawn without regard to use.
_EXPLORED: Final = 0.2
_DRAWN: Final = 1 << 30
_SEED: Final = 1
_USE_MIN: Final = 1e-12
# The constants of growing were guesses; docs/decisions/077 says what other ones change: hardly anything, but that with
# 1,024 rows of errors the mean loss of the weak streams is 6 % larger.
ROWS_OF_ERRORS: Final = 4096
ROWS_TO_GROW: Final = 128
_TRIED: Final = 0.7
_TRIED_MAX: Final = 16
_EXPLAINED: Final = 0.5
# The cells of a grown tree begin with this part of what it explains, and with at most one score of classes. With 0
# the mean loss of the streams that chose is 1.0 % larger, with .2 .1 %; the other two constants are guesses.
_BEGUN: Final = 0.1
_BEGUN_MAX: Final = 1.0
_SQUARE_OF_CLASSES_MIN: Final = 0.01
_DEVIATIONS_MAX: Final = 3.0
# Larger ones would overflow in float32, and their squares in float64.
_ERROR_MAX: Final = 1e30
# Errors are whole numbers of this part of a deviation, so that their sums are exact on each processor.
_UNITS_OF_A_DEVIATION: Final = 256
# Candidates of pairs are compared by this many values at most, which takes a few milliseconds.
_VALUES_OF_PAIRS: Final = 1 << 17


class TableWeights(ExpertWeights):
    """Experts on the numeric columns, which are standardized, and on the cells of all columns with tables.

    Without ``pairs`` and ``trees`` it is a model of columns alone. ``columns`` may be shared by several models.
    """

    def __init__(
        self,
        columns: CellColumns,
        task: LabelKind,
        scores: int,
        rates: tuple[float, ...] | None = None,
        *,
        pairs: int = PAIRS,
        trees: int = TREES,
    ) -> None:
        self._cell_columns = columns
        self._pairs_max = pairs
        self.cells = 0
        """The number of cells of all tables."""
        self._first_of_column: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.pairs: npt.NDArray[np.int32] = np.zeros((0, 2), np.int32)
        self._first_of_pair: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.tree_columns: npt.NDArray[np.int32] = np.zeros((trees, columns.steps.DEPTH), np.int32)
        self.tree_bins: npt.NDArray[np.int32] = np.ones_like(self.tree_columns)
        self._drawn: Indices = np.zeros(self.tree_columns.shape, np.intp)
        self._draw = np.random.default_rng(_SEED)
        self._observed = 0
        """The number of rows since the last look whose errors are known; the last ones are kept, with their bins."""
        self._errors: npt.NDArray[np.float32] = np.zeros((ROWS_OF_ERRORS if trees else 0, scores), np.float32)
        self._bins_of_errors: npt.NDArray[np.uint8] = np.zeros((len(self._errors), 0), np.uint8)
        self._tables = columns.steps
        super().__init__(task, scores, 0, rates)

    @property
    def cells_in_use(self) -> int:
        """The number of cells in each row."""
        if not len(self._first_of_column):
            return 0
        return 2 * len(self._first_of_column) + 2 * len(self.pairs) + len(self.tree_columns)

    def bytes_with(self, more_columns: int) -> int:
        """Return the memory that the cells take with this many more columns."""
        tables, columns = self._tables, len(self._first_of_column) + more_columns
        pairs = min(columns * (columns - 1) // 2, self._pairs_max)
        cells = columns * tables.OF_COLUMN + pairs * tables.OF_PAIR + len(self.tree_columns) * tables.OF_TREE
        return int(cells * self.scores * (4 * len(self.rates) + 8 * self._adaptive))

    def cells_of(self, bins: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the cells of each row, from the bins of its columns."""
        cells = np.empty((len(bins), self.cells_in_use), np.int32)
        if not cells.size:
            return cells
        self._tables.fill_in_cells(
            bins, self._first_of_column, self.pairs, self._first_of_pair, self.tree_columns, self.tree_bins, 0, cells
        )
        return cells

    def step_cells(
        self,
        rows: ModelRows,
        steps: RowSteps,
        evidence: Floats,
        targets: Floats,
        asked: Floats,
        bins: npt.NDArray[np.uint8],
    ) -> Floats:
        """As :meth:`step`, of rows in these bins, a row for each step."""
        return self._step(rows, steps, evidence, targets, asked, self.cells_of(bins))

    def observe(self, bins: npt.NDArray[np.uint8], targets: Floats, predictions: Floats) -> None:
        """Keep the errors of these predictions, a row for each label: they say which tables are missing."""
        if not len(self._errors):
            return
        expected = np.eye(self.scores)[targets.astype(np.intp)] if self.task == "classes" else targets[:, None]
        places = np.arange(self._observed, self._observed + len(bins)) % ROWS_OF_ERRORS
        errors = np.clip(expected - predictions, -_ERROR_MAX, _ERROR_MAX)
        self._errors[places], self._bins_of_errors[places] = errors, bins
        self._observed += len(bins)

    # ---- tables that come

    def _add_cells(self, count: int) -> int:
        """Have ``count`` more cells; return the number of the first one."""
        first, self.cells = self.cells, self.cells + count
        own = np.zeros(count * self.scores * len(self.rates), np.float32)
        self._cell_weights = np.append(self._cell_weights, own)
        self._cell_sums = np.append(self._cell_sums, np.zeros(count * self.scores * self._adaptive))
        return first

    def add_columns(self, count: int) -> None:
        """Make tables of the last ``count`` columns, which are new, and of their pairs, as there is room."""
        before, columns = len(self._first_of_column), len(self._first_of_column) + count
        if not before:
            self._add_cells(len(self.tree_columns) * self._tables.OF_TREE)
        for _ in range(count):
            self._first_of_column = np.append(self._first_of_column, np.int32(self._add_cells(self._tables.OF_COLUMN)))
        self._bins_of_errors = np.pad(self._bins_of_errors, ((0, 0), (0, count)))
        every = [(i, j) for i in range(columns) for j in range(max(i + 1, before), columns)]
        room = self._pairs_max - len(self.pairs)
        if len(every) > room:
            every = [every[place] for place in np.sort(self._draw.choice(len(every), room, replace=False))]
        for pair in every:
            self._first_of_pair = np.append(self._first_of_pair, np.int32(self._add_cells(self._tables.OF_PAIR)))
            self.pairs = np.vstack([self.pairs, np.array(pair, np.int32)])
        if self._cell_columns.rows < LOOKS[0]:
            # No edges are placed yet, so the trees have learned hardly anything.
            self.tree_columns = self._draw.integers(0, columns, self.tree_columns.shape).astype(np.int32)
            self._drawn = self._draw.integers(0, _DRAWN, self.tree_columns.shape)
            self._place_trees(slice(None))
            self._reset(0, len(self.tree_columns) * self._tables.OF_TREE)

    def _by_cell(self) -> tuple[npt.NDArray[np.float32], Floats]:
        """Return weights and sums of squared gradients by cell, score and expert; they share the memory."""
        shape = self.cells, self.scores
        return self._cell_weights.reshape(*shape, len(self.rates)), self._cell_sums.reshape(*shape, self._adaptive)

    def _place_trees(self, which: slice | Indices) -> None:
        used = self._tables.SPLIT * np.maximum(self._cell_columns.used[self.tree_columns[which]] - 1, 1)
        self.tree_bins[which] = 1 + self._drawn[which] % used

    def _reset(self, first: int, count: int) -> None:
        own = self.scores * len(self.rates), self.scores * self._adaptive
        self._cell_weights[first * own[0] : (first + count) * own[0]] = 0.0
        self._cell_sums[first * own[1] : (first + count) * own[1]] = 0.0

    # ---- looks

    def look(self, moved: list[Moved]) -> None:
        """Follow edges that have moved, and replace weak tables."""
        by_column = {column: (fine, coarse) for column, fine, coarse in moved}
        if moved:
            self._move_cells(by_column)
        if not len(self._first_of_column):
            return
        if self._cell_columns.rows <= LOOKS[-2]:
            self._place_trees(slice(None))
        if self._cell_columns.rows > LOOKS[0]:
            self._replace_weak_tables(by_column)
        self._observed = 0

    def _move_cells(self, moved: Mapping[int, tuple[Indices, Indices]]) -> None:
        """Begin each new bin with the weights of the old bin that held its middle."""
        tables = self._tables
        same = np.arange(tables.FINE), np.arange(tables.COARSE)
        source = np.arange(self.cells)
        for column, (fine, coarse) in moved.items():
            first = self._first_of_column[column]
            source[first : first + tables.OF_COLUMN] = first + np.append(fine, tables.FINE + coarse)
        for (one, other), first in zip(self.pairs.tolist(), self._first_of_pair.tolist(), strict=True):
            rows, columns = moved.get(one, same)[1], moved.get(other, same)[1]
            cells = rows[:, None] * tables.COARSE + columns
            source[first : first + tables.COARSE * tables.COARSE] = first + cells.ravel()
        weights, sums = self._by_cell()
        self._cell_weights, self._cell_sums = weights[source].ravel(), sums[source].ravel()

    def published_cells(self, firsts: npt.NDArray[np.int32], count: int) -> Floats:
        """Return the weights of tables of ``count`` cells, as the experts make them together: by table, cell, score."""
        cells = firsts[:, None].astype(np.intp) + np.arange(count)
        of_experts = self._by_cell()[0][cells].astype(np.float64)
        mixed: Floats = of_experts @ self.mixture
        return mixed

    def _first_of_tree(self) -> npt.NDArray[np.int32]:
        return np.arange(0, len(self.tree_columns) * self._tables.OF_TREE, self._tables.OF_TREE, dtype=np.int32)

    def _use(self, firsts: npt.NDArray[np.int32], count: int) -> Floats:
        """Return how much each table moves the scores: the variance of its weights, by what its cells have learned."""
        weights = self.published_cells(firsts, count)
        cells = firsts[:, None].astype(np.intp) + np.arange(count)
        middle = min(1, self._adaptive - 1)
        learned = self._by_cell()[1][cells][..., middle]
        shares = learned / np.maximum(learned.sum(axis=1, keepdims=True), 1e-300)
        mean = (shares * weights).sum(axis=1, keepdims=True)
        use: Floats = (shares * (weights - mean) ** 2).sum(axis=(1, 2))
        return use

    def _replace_weak_tables(self, moved: Mapping[int, tuple[Indices, Indices]]) -> None:
        tables, columns = self._tables, len(self._first_of_column)
        of_columns = self._use(self._first_of_column, tables.OF_COLUMN)
        of_pairs = self._use(self._first_of_pair, tables.OF_PAIR)
        np.add.at(of_columns, self.pairs.ravel(), np.repeat(of_pairs, 2))
        chance = np.sqrt(of_columns) + _USE_MIN
        chance = (1 - _EXPLORED) * chance / chance.sum() + _EXPLORED / columns
        of_trees = self._use(self._first_of_tree(), tables.OF_TREE)
        count = int(len(self.tree_columns) * _REPLACED)
        weak = np.sort(np.argsort(of_trees, kind="stable")[:count])
        rows = min(self._observed, ROWS_OF_ERRORS)
        bins, errors = self._bins_of_errors[:rows], self._errors[:rows].astype(np.float64)
        if len(weak):
            self._draw_trees(weak, chance)
        if rows < ROWS_TO_GROW:
            return
        if self.task == "number":  # As slopes of cells are: a label of 1e12 would be a part of a tree.
            reach = self._steps.OUTLIER_DEVIATIONS * math.sqrt(self.totals[3] / self.totals[0])
            errors = np.clip(errors, -reach, reach)
        if len(self.pairs) < columns * (columns - 1) // 2:
            weak_pairs = np.argsort(of_pairs, kind="stable")[: int(len(of_pairs) * _REPLACED)]
            self._replace_pairs(weak_pairs, bins, errors)
        for tree in weak.tolist():
            errors -= self._grow_tree(tree, chance, bins, errors)
            for level, column in enumerate(self.tree_columns[tree].tolist()):
                if column in moved and not self._cell_columns.is_category[column]:
                    # The edge is where it was, or next to it; its number is another one.
                    fine = moved[column][0][1 : tables.BINS + 1]
                    at = np.searchsorted(fine, self.tree_bins[tree, level], side="right")
                    self.tree_bins[tree, level] = min(max(int(at), 1), tables.EDGES)

    def _draw_trees(self, weak: Indices, chance: Floats) -> None:
        depth = self._tables.DEPTH
        self.tree_columns[weak] = self._draw.choice(len(chance), (len(weak), depth), p=chance)
        self._drawn[weak] = self._draw.integers(0, _DRAWN, (len(weak), depth))
        self._place_trees(weak)
        for tree in weak.tolist():
            self._reset(tree * self._tables.OF_TREE, self._tables.OF_TREE)

    def _grow_tree(self, tree: int, chance: Floats, bins: npt.NDArray[np.uint8], errors: Floats) -> Floats:
        """Grow a tree that explains errors; return the part of them that counts as explained for the next tree."""
        tables, columns = self._tables, len(chance)
        # The columns of a level are drawn by their chance, each once: the largest of these keys (Efraimidis, Spirakis).
        keys = np.log(1.0 - self._draw.random((tables.DEPTH, columns))) / chance
        tried = np.argsort(keys, axis=1, kind="stable")[:, -min(math.ceil(_TRIED * columns), _TRIED_MAX) :]
        signs = self._draw.choice([-1.0, 1.0], self.scores) if self.scores > 1 else np.ones(1)
        leaves = np.zeros(len(bins), np.intp)
        levels = tables.choose_comparisons(
            bins,
            _in_units((errors * signs).sum(axis=1)),
            np.ascontiguousarray(tried),
            leaves,
            np.empty(tables.OF_TREE * tables.FINE),
            self.tree_columns[tree],
            self.tree_bins[tree],
        )
        rows = np.bincount(leaves, minlength=tables.OF_TREE)[:, None] + tables.ROWS_OF_A_LEAF
        sums, squares = (
            np.stack([np.bincount(leaves, score, tables.OF_TREE) for score in each.T], axis=1)
            for each in (errors, errors**2)
        )
        mean, begun = sums / rows, _BEGUN * sums / rows
        if self.task != "number":  # A step of Newton's method: the squared errors of a leaf are about its curvature.
            least = np.maximum(squares.sum(axis=0) / len(bins), _SQUARE_OF_CLASSES_MIN)
            begun = np.clip(_BEGUN * sums / (squares + tables.ROWS_OF_A_LEAF * least), -_BEGUN_MAX, _BEGUN_MAX)
        of_tree = self._by_cell()[0][tree * tables.OF_TREE : (tree + 1) * tables.OF_TREE]
        of_tree.reshape(1 << levels, -1, *of_tree.shape[1:])[:] = begun[: 1 << levels, None, :, None]
        explained: Floats = _EXPLAINED * mean[leaves]
        return explained

    def _replace_pairs(self, weak: Indices, bins: npt.NDArray[np.uint8], errors: Floats) -> None:
        """Let weak pairs give way to those whose products of two effects, rising or of the middle, explain errors."""
        columns = bins.shape[1]
        last = slice(-max(_VALUES_OF_PAIRS // columns, 1), None)
        rising = np.where(bins[last] > 0, 2.0 * bins[last] - (self._tables.BINS + 1), 0.0)
        middle = np.where(bins[last] > 0, np.abs(rising) - self._tables.BINS / 2, 0.0)
        effects = np.concatenate([rising, middle], axis=1)
        squares, gains = (effects**2).sum(axis=0) + 1.0, np.zeros((columns, columns))
        for score in errors[last].T:
            products = effects.T @ (effects * _in_units(score)[:, None])
            parts = products**2 / squares[:, None] / squares
            gains += parts.reshape(2, columns, 2, columns).sum(axis=(0, 2))
        gains[tuple(self.pairs.T)] = -1.0
        one, other = np.triu_indices(columns, 1)
        best = np.argsort(-gains[one, other], kind="stable")[: len(weak)]
        for pair, place in zip(weak.tolist(), best.tolist(), strict=False):
            if gains[one[place], other[place]] >= 0.0:
                self.pairs[pair] = one[place], other[place]
                self._reset(self._first_of_pair[pair], self._tables.OF_PAIR)

    # ---- scores

    def split_last_score(self) -> None:
        """Add a score that begins with the weights of the last score."""
        of_weights, of_sums = self._by_cell()
        super().split_last_score()
        self._errors = np.append(self._errors, self._errors[:, -1:], axis=1)
        self._cell_weights = np.concatenate([of_weights, of_weights[:, -1:]], axis=1).ravel()
        self._cell_sums = np.concatenate([of_sums, of_sums[:, -1:]], axis=1).ravel()

    def as_classes(self, rows: int) -> Self:
        """Return the weights of two classes and of a class that has not come, see ``ExpertWeights.as_classes``."""
        classes = super().as_classes(rows)
        classes._restore_tables(self._tables_state())
        weights, sums = self._by_cell()
        shares = np.array(SHARES_OF_CLASSES, np.float32)[:, None]
        classes._cell_weights = (weights * shares + np.float32(0.0)).ravel()
        classes._cell_sums = np.repeat(sums, len(shares), axis=1).ravel()
        return classes

    def _of_classes(self) -> Self:
        pairs, trees = self._pairs_max, len(self.tree_columns)
        return type(self)(self._cell_columns, "classes", 3, self.rates, pairs=pairs, trees=trees)

    def raise_rates(self) -> None:
        """Reduce the sums of squared gradients, so that rates that have become small are large again."""
        super().raise_rates()
        self._cell_sums *= SQUARES_KEPT

    # ---- publishing and state

    def as_member(self, dead: Sequence[int]) -> TableMember:
        """Return the tables as they are served, without slopes of ``dead`` numeric columns."""
        tables, published = self._tables, self.published()
        trees = len(self.tree_columns) if len(self._first_of_column) else 0
        slopes = np.reshape(published["weights"], (-1, self.scores))
        return TableMember.of_tables(
            self.published_cells(self._first_of_column, tables.OF_COLUMN),
            self.published_cells(self._first_of_pair, tables.OF_PAIR),
            self.published_cells(self._first_of_tree()[:trees], tables.OF_TREE),
            slopes=np.delete(slopes, dead, axis=0) if len(dead) else slopes,
            intercept=np.atleast_1d(published["intercept"]),
            pairs=self.pairs,
            tree_columns=self.tree_columns[:trees],
            tree_bins=self.tree_bins[:trees],
        )

    def start_from_tables(self, published: Mapping[str, Any], member: TableMember) -> None:
        """Take on the tables of a published model: each expert begins with their weights."""
        numeric, none = len(published["fields"]), np.zeros(0, np.intp)
        one = self.task != "classes"
        own = {name: np.asarray(published[name])[:numeric] for name in ("center", "limit")}
        own |= {"weights": member.slopes[:, 0] if one else member.slopes, "places": none}
        own["intercept"] = member.intercept[0] if one else member.intercept
        super().start_from({**published, **own})
        tables, columns = self._tables, len(self._cell_columns.sources)
        self._add_cells(len(self.tree_columns) * tables.OF_TREE)
        self._first_of_column = np.array([self._add_cells(tables.OF_COLUMN) for _ in range(columns)], np.int32)
        self._bins_of_errors = np.zeros((len(self._errors), columns), np.uint8)
        self.pairs = member.pairs.astype(np.int32)
        self._first_of_pair = np.array([self._add_cells(tables.OF_PAIR) for _ in self.pairs], np.int32)
        groups = [(self._first_of_column, FINE_BINS), (self._first_of_pair, CELLS_OF_PAIR)]
        if member.tree_columns.shape == self.tree_columns.shape:
            self.tree_columns[:], self.tree_bins[:] = member.tree_columns, member.tree_bins
            groups.append((self._first_of_tree(), tables.OF_TREE))
        weights, sums = self._by_cell()
        at = 0
        for firsts, count in groups:
            cells = (firsts[:, None] + np.arange(count)).ravel()
            weights[cells] = member.tables[at : at + len(cells), :, None]
            sums[cells] = ROWS_OF_A_START / 4
            at += len(cells)

    def standardize_as(self, linear: ExpertWeights) -> None:
        """Take over the statistics of the numeric columns of another model."""
        self._columns[self._used()[1:], : self._steps.STATISTICS] = linear.statistics_of_numbers()

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data."""
        cells = {"cell weights": self._cell_weights.copy(), "cell sums": self._cell_sums.copy()}
        rows = min(self._observed, ROWS_OF_ERRORS)
        of_errors = {"errors": self._errors[:rows].copy(), "bins of errors": self._bins_of_errors[:rows].copy()}
        return super().state() | self._tables_state() | cells | of_errors | {"observed": self._observed}

    def _tables_state(self) -> dict[str, Any]:
        return {
            "first of columns": self._first_of_column.copy(),
            "pairs": self.pairs.copy(),
            "first of pairs": self._first_of_pair.copy(),
            "tree columns": self.tree_columns.copy(),
            "tree bins": self.tree_bins.copy(),
            "drawn": self._drawn.copy(),
            "draw": json.dumps(self._draw.bit_generator.state),
            "cells": self.cells,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state` of the same task and scores."""
        super().restore(state)
        self._restore_tables(state)
        self._cell_weights, self._cell_sums = state["cell weights"].copy(), state["cell sums"].copy()
        rows, self._observed = len(state["errors"]), state["observed"]
        self._errors[:rows], self._bins_of_errors[:rows] = state["errors"], state["bins of errors"]

    def _restore_tables(self, state: Mapping[str, Any]) -> None:
        self._first_of_column, self._first_of_pair = state["first of columns"].copy(), state["first of pairs"].copy()
        self.pairs, self.cells = state["pairs"].copy(), state["cells"]
        self.tree_columns, self.tree_bins = state["tree columns"].copy(), state["tree bins"].copy()
        self._drawn = state["drawn"].copy()
        self._bins_of_errors = np.zeros((len(self._errors), len(self._first_of_column)), np.uint8)
        self._draw.bit_generator.state = json.loads(state["draw"])


def _in_units(errors: Floats) -> Floats:
    """Return errors as whole numbers, in parts of their deviation; outliers count as three deviations."""
    deviation = math.sqrt(float(np.mean(errors**2))) or 1.0
    scaled = np.clip(errors / deviation, -_DEVIATIONS_MAX, _DEVIATIONS_MAX)
    return np.asarray(np.rint(scaled * _UNITS_OF_A_DEVIATION))
