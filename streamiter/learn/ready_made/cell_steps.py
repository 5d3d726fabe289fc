"""The cells of a row: bins of its columns, of pairs of columns, and leaves of random trees; compiled where Numba is.

A *table* has a weight for each of its cells, and each row is in one cell of each table. So the cells of a row are
indicator features of value 1, and an expert that has them is a linear model with more columns. A column has two tables,
of 60 fine bins and of 15 coarse ones; a pair of columns has two, of 15 × 15 and of 4 × 4 bins; bin 0 is for a missing
value. A random tree compares the fine bins of seven columns with seven thresholds, the same for all rows.

================================  ====================================================================================
``weights[cells, scores, 6]``     float32: the experts' weights of each cell, flat
``sums[cells, scores, 3]``        float64: the sums of squared gradients of the AdaGrad experts, flat; in float32 they
                                  would not grow any more after some ten million rows
================================  ====================================================================================

``docs/decisions`` has the reasons and the constants. Sums are made in float64 from weights in float32, one after the
other, so that code without a compiler gives the same bits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.ready_made.row_losses import ADAPTIVE, MEMORY, Rates, observe_target
from streamiter.values.field_kinds import HUGE
from streamiter.values.helpers.compiled import compiled, compiled_for_separate, pointer_function
from streamiter.values.numbers import Floats, Indices

pointer_to = pointer_function()

CellNumbers = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Bins = npt.NDArray[np.uint8]

COARSE: Final = 16
"""The coarse bins of a column: 15, and one for missing values."""
SPLIT: Final = 4
"""The fine bins of a coarse one."""
FINE: Final = COARSE * SPLIT
"""Room for the fine bins of a column: 0 for missing values, then 1 to 60."""
BINS: Final = FINE - SPLIT
"""The fine bins that values have."""
EDGES: Final = BINS - 1
DEPTH: Final = 7
OF_COLUMN: Final = FINE + COARSE
"""The cells of a column, of a pair, of a tree."""
OF_PAIR: Final = COARSE * COARSE + 16
OF_TREE: Final = 1 << DEPTH

EDGES_APART: Final = 2
"""A tree that is grown is tried with each second edge of a column."""
ROWS_OF_A_LEAF: Final = 10.0
"""This many rows without an error are added to each leaf, so that a few rows do not decide where a tree grows."""

# A first step of AdaGrad is as large for each slope. Slopes below 1e-15 are what rounding left of a probability of 1.
SQUARE_OF_CELLS_MIN: Final = 1e-30


@compiled
def values_of_steps(
    indptr: Indices,
    indices: Indices,
    values: Floats,
    rows: Indices,
    hashed: int,
    column_of_number: CellNumbers,
    bin_of_place: CellNumbers,
    column_of_category: CellNumbers,
    found: Floats,
) -> None:
    """Fill in the value of each column, for the row of each step: a number, or the place of a category.

    ``column_of_number`` and ``column_of_category`` have the table's column, or -1; ``bin_of_place`` has for a hashed
    column ``FINE * category + fine bin``, or 0. A missing value stays as it is in ``found``.
    """
    for position in range(len(rows)):
        for at in range(indptr[rows[position]], indptr[rows[position] + 1]):
            index = indices[at]
            if index > hashed:
                column = column_of_number[index - hashed - 1]
                if column >= 0 and abs(values[at]) <= HUGE:
                    found[position, column] = values[at]
            elif index < len(bin_of_place) and bin_of_place[index] > 0:
                column = column_of_category[bin_of_place[index] // FINE]
                if column >= 0:
                    found[position, column] = index


@compiled
def first_new_column(
    indptr: Indices,
    indices: Indices,
    values: Floats,
    rows: Indices,
    is_observed: npt.NDArray[np.bool_],
    hashed: int,
    column_of_number: CellNumbers,
    bin_of_place: CellNumbers,
    column_of_category: CellNumbers,
) -> int:
    """Return the first observed step whose row has a value of a column without tables; their number if none has."""
    for position in range(len(rows)):
        if not is_observed[position]:
            continue
        for at in range(indptr[rows[position]], indptr[rows[position] + 1]):
            index = indices[at]
            if index > hashed:
                if column_of_number[index - hashed - 1] < 0 and abs(values[at]) <= HUGE:
                    return position
            elif index < len(bin_of_place) and column_of_category[max(bin_of_place[index], 0) // FINE] < 0:
                return position
    return len(rows)


@compiled
def fill_in_bins(
    values: Floats, edges: Floats, is_category: npt.NDArray[np.bool_], bin_of_place: CellNumbers, bins: Bins
) -> None:
    """Fill in the fine bin of each value: 0 if it is missing, else 1 + the number of edges below it.

    The value of a category is its place, whose bin is in ``bin_of_place``.
    """
    value_of, bin_of, edge_of, place = pointer_to(values), pointer_to(bins), pointer_to(edges), -1
    for _ in range(values.shape[0]):
        for column in range(values.shape[1]):
            place += 1
            value = value_of[place]
            if not abs(value) <= HUGE:
                bin_of[place] = 0
            elif is_category[column]:
                bin_of[place] = bin_of_place[int(value)] % FINE
            else:
                low, high = 0, EDGES
                while low < high:
                    middle = (low + high) // 2
                    if value > edge_of[column * EDGES + middle]:
                        low = middle + 1
                    else:
                        high = middle
                bin_of[place] = low + 1


@compiled
def fill_in_cells(
    bins: Bins,
    first_of_column: CellNumbers,
    pairs: CellNumbers,
    first_of_pair: CellNumbers,
    tree_columns: CellNumbers,
    tree_bins: CellNumbers,
    first_of_tree: int,
    cells: CellNumbers,
) -> None:
    """Fill in the cells of each row: fine and coarse of each column, of each pair, then of the trees."""
    bin_of, cell_of, column_of = pointer_to(bins), pointer_to(cells), pointer_to(pairs)
    tree_column, tree_bin = pointer_to(tree_columns), pointer_to(tree_bins)
    for row in range(len(bins)):
        at, first_bin = row * cells.shape[1], row * bins.shape[1]
        for column in range(len(first_of_column)):
            fine = int(bin_of[first_bin + column])
            cell_of[at] = first_of_column[column] + fine
            cell_of[at + 1] = first_of_column[column] + FINE + (fine + SPLIT - 1) // SPLIT
            at += 2
        for pair in range(len(first_of_pair)):
            first = (int(bin_of[first_bin + column_of[2 * pair]]) + SPLIT - 1) // SPLIT
            second = (int(bin_of[first_bin + column_of[2 * pair + 1]]) + SPLIT - 1) // SPLIT
            cell_of[at] = first_of_pair[pair] + first * COARSE + second
            cell_of[at + 1] = first_of_pair[pair] + COARSE * COARSE + first // 4 * 4 + second // 4
            at += 2
        for tree in range(len(tree_columns)):
            leaf = 0
            for level in range(tree * DEPTH, (tree + 1) * DEPTH):
                leaf = 2 * leaf + (1 if bin_of[first_bin + tree_column[level]] > tree_bin[level] else 0)
            cell_of[at] = first_of_tree + tree * OF_TREE + leaf
            at += 1


@compiled
def choose_comparisons(
    bins: Bins,
    errors: Floats,
    tried: Indices,
    leaves: Indices,
    room: Floats,
    columns: CellNumbers,
    thresholds: CellNumbers,
) -> int:
    """Choose the comparisons of a tree, level by level: the one that leaves the least squared errors in all leaves.

    ``tried`` has the columns that are tried at each level. ``leaves`` gets the leaf of each row. ``room`` is memory for
    two numbers for each leaf and fine bin. A level at which nothing is gained, and all below, stay as they are. Returns
    the number of levels above, of which the leaves are.
    """
    rows, width = bins.shape
    bin_of, error_of, leaf_of = pointer_to(bins), pointer_to(errors), pointer_to(leaves)
    candidate_of, total_of = pointer_to(tried), pointer_to(room)
    for row in range(rows):
        leaf_of[row] = 0
    for level in range(DEPTH):
        count, most, best, threshold = 1 << level, 0.0, -1, 0
        for place in range(level * tried.shape[1], (level + 1) * tried.shape[1]):
            column, before = candidate_of[place], 0.0
            for at in range(2 * count * FINE):
                total_of[at] = 0.0
            for row in range(rows):
                at = 2 * (leaf_of[row] * FINE + int(bin_of[row * width + column]))
                total_of[at] += error_of[row]
                total_of[at + 1] += 1.0
            for leaf in range(count):
                for at in range(2 * (leaf * FINE + 1), 2 * (leaf * FINE + BINS + 1)):
                    total_of[at] += total_of[at - 2]
                last = 2 * (leaf * FINE + BINS)
                before += total_of[last] * total_of[last] / (total_of[last + 1] + ROWS_OF_A_LEAF)
            for fine in range(EDGES_APART, BINS, EDGES_APART):
                gain = -before
                for leaf in range(count):
                    at, last = 2 * (leaf * FINE + fine), 2 * (leaf * FINE + BINS)
                    other, others = total_of[last] - total_of[at], total_of[last + 1] - total_of[at + 1]
                    gain += total_of[at] * total_of[at] / (total_of[at + 1] + ROWS_OF_A_LEAF)
                    gain += other * other / (others + ROWS_OF_A_LEAF)
                if gain > most:
                    most, best, threshold = gain, column, fine
        if best < 0:
            return level
        columns[level], thresholds[level] = best, threshold
        for row in range(rows):
            leaf_of[row] = 2 * leaf_of[row] + (1 if bin_of[row * width + best] > threshold else 0)
    return DEPTH


@compiled_for_separate
def add_cells(cells: CellNumbers, first: int, stop: int, weights: Weights, scores: Floats, size: int) -> None:
    """Add the weights of the cells from ``first`` to ``stop`` to the experts' scores."""
    if size == 6:
        # In variables, which stay in the processor's registers, it takes half of the time.
        a, b, c, d, e, f = scores[0], scores[1], scores[2], scores[3], scores[4], scores[5]
        for place in range(first, stop):
            at = cells[place] * size
            a += np.float64(weights[at])
            b += np.float64(weights[at + 1])
            c += np.float64(weights[at + 2])
            d += np.float64(weights[at + 3])
            e += np.float64(weights[at + 4])
            f += np.float64(weights[at + 5])
        scores[0], scores[1], scores[2], scores[3], scores[4], scores[5] = a, b, c, d, e, f
        return
    # All scores of a cell are next to each other, so that the processor reads and adds several at once.
    for place in range(first, stop):
        at = cells[place] * size
        for score in range(size):
            scores[score] += np.float64(weights[at + score])


@compiled_for_separate
def step_cells(
    cells: CellNumbers,
    first: int,
    stop: int,
    weights: Weights,
    sums: Floats,
    slopes: Floats,
    size: int,
    factors: Floats,
    rates: Rates,
    room: Floats,
) -> None:
    """Make the steps of all experts in the cells from ``first`` to ``stop``, whose value is 1.

    ``room`` has place for four numbers for each of the ``size`` scores.
    """
    if len(rates) == 6 and size == 6:
        # As in `add_cells`: in variables it takes two thirds of the time.
        slope, other, third = slopes[0], slopes[1], slopes[2]
        more, more_of_other = max(slope * slope, SQUARE_OF_CELLS_MIN), max(other * other, SQUARE_OF_CELLS_MIN)
        more_of_third = max(third * third, SQUARE_OF_CELLS_MIN)
        slope, other, third = factors[0] * slope, factors[1] * other, factors[2] * third
        d, e, f = factors[3] * slopes[3], factors[4] * slopes[4], factors[5] * slopes[5]
        for place in range(first, stop):
            at, at_sum = cells[place] * size, cells[place] * 3
            a, b, c = sums[at_sum] + more, sums[at_sum + 1] + more_of_other, sums[at_sum + 2] + more_of_third
            sums[at_sum], sums[at_sum + 1], sums[at_sum + 2] = a, b, c
            weights[at] = np.float32(np.float64(weights[at]) - slope / np.sqrt(a))
            weights[at + 1] = np.float32(np.float64(weights[at + 1]) - other / np.sqrt(b))
            weights[at + 2] = np.float32(np.float64(weights[at + 2]) - third / np.sqrt(c))
            weights[at + 3] = np.float32(np.float64(weights[at + 3]) - d)
            weights[at + 4] = np.float32(np.float64(weights[at + 4]) - e)
            weights[at + 5] = np.float32(np.float64(weights[at + 5]) - f)
        return
    # Loops without branches over numbers that are next to each other: for eleven classes they take half of the time.
    experts, adaptive = len(rates), min(len(rates), ADAPTIVE)
    own = size // experts * adaptive
    squares, numerators, changes = size, size + own, size + 2 * own
    for score in range(size // experts):
        for expert in range(experts):
            slope = slopes[score * experts + expert]
            if expert < adaptive:
                room[squares + score * adaptive + expert] = max(slope * slope, SQUARE_OF_CELLS_MIN)
                room[numerators + score * adaptive + expert] = factors[expert] * slope
            else:
                room[score * experts + expert] = factors[expert] * slope
    for place in range(first, stop):
        at, at_sum = cells[place] * size, cells[place] * own
        for each in range(own):
            total = sums[at_sum + each] + room[squares + each]
            sums[at_sum + each] = total
            # A division by `/` looks for a zero, one by one.
            room[changes + each] = np.divide(room[numerators + each], np.sqrt(total))
        for score in range(size // experts):
            for expert in range(adaptive):
                room[score * experts + expert] = room[changes + score * adaptive + expert]
        for each in range(size):
            weights[at + each] = np.float32(np.float64(weights[at + each]) - room[each])


@compiled
def mix_members(
    is_of_classes: bool,
    is_of_numbers: bool,
    rate: float,
    spread: Rates,
    loss_max: float,
    floor: float,
    predicts: npt.NDArray[np.bool_],
    judges: npt.NDArray[np.bool_],
    made: Floats,
    targets: Floats,
    row_weights: Floats,
    evidence: Floats,
    questions: Indices,
    asked: Floats,
    first: int,
    shares: Floats,
    totals: Floats,
    room: Floats,
    mixed: Floats,
) -> None:
    """Mix the predictions of the members, ``made[member, step, score]``, step by step, and judge them by the labels.

    Exponential weights of probabilities, or of numbers, with fixed share. How much of the weight is shared at each row,
    is one of ``spread``, and ``shares[choice, member]`` are exponential weights of these choices, too: the choices are
    mixed by the losses of their mixtures, with the least of ``spread`` as their own fixed share. A question is judged
    by its predictions when it was asked, which are kept in ``asked[question, score, first:]``; the less the
    ``evidence`` of a late label is, the less rate and spread are. ``totals`` has the weight, the mean squared error of
    the mixture, and the mean of the targets; squared errors are in units of the mean one. ``room`` is memory to work
    in: to make an array, or to copy one as a whole, would double the time of the first compilation.
    """
    choices, members, scores, target_totals = len(spread), shares.shape[1], made.shape[2], pointer_to(totals)
    losses, mixture, own = pointer_to(room), pointer_to(room[members:]), pointer_to(room[2 * members :])
    share_of, made_of, mixed_of, asked_of = pointer_to(shares), pointer_to(made), pointer_to(mixed), pointer_to(asked)
    for position in range(len(predicts)):
        question = questions[position]
        at_asked = question * asked.shape[1] * asked.shape[2] + first
        for member in range(members):
            mixture[member] = 0.0
            for choice in range(choices):
                mixture[member] += share_of[choice * members + member]
            for score in range(scores):
                own[member * scores + score] = made_of[(member * len(predicts) + position) * scores + score]
        if predicts[position]:
            for score in range(scores):
                total = 0.0
                for member in range(members):
                    total += mixture[member] * own[member * scores + score]
                    if question >= 0:
                        asked_of[at_asked + score * asked.shape[2] + member] = own[member * scores + score]
                mixed_of[position * scores + score] = total
        elif question >= 0:
            for member in range(members):
                for score in range(scores):
                    own[member * scores + score] = asked_of[at_asked + score * asked.shape[2] + member]
        if not judges[position] or evidence[position] <= 0.0 or not (predicts[position] or question >= 0):
            continue
        target, row_weight, least = targets[position], row_weights[position], np.inf
        strength = rate * evidence[position] * row_weight
        if is_of_numbers:
            target_totals[0] += row_weight
            target, _ = observe_target(target_totals, target, row_weight)
            error = -target
            for member in range(members):
                error += mixture[member] * own[member]
            change = min(row_weight / min(target_totals[0], MEMORY), 1.0)
            target_totals[1] += (error * error - target_totals[1]) * change
        for member in range(members):
            at = member * scores
            if is_of_numbers:
                losses[member] = (own[at] - target) * (own[at] - target)
            else:
                probability = own[at + int(target)] if is_of_classes else own[at]
                if not is_of_classes and target <= 0.5:
                    probability = 1.0 - probability
                losses[member] = -math.log(max(probability, floor))
            least = min(least, losses[member])
        total = 0.0
        for member in range(members):
            loss = losses[member]
            if is_of_numbers:
                loss = min((loss - least) / target_totals[1], loss_max) if target_totals[1] > 0.0 else 0.0
            elif row_weight != 1.0:
                loss -= least  # A heavy row would leave no share above zero.
            likelihood = math.exp(-strength * loss)
            for choice in range(choices):
                share_of[choice * members + member] *= likelihood
                total += share_of[choice * members + member]
        for choice in range(choices):
            of_choice = 0.0
            for member in range(members):
                of_choice += share_of[choice * members + member]
            of_others, of_members = spread[0] * evidence[position], spread[choice] * evidence[position]
            whole = of_choice / total * (1.0 - of_others) + of_others / choices
            for member in range(members):
                kept = share_of[choice * members + member] / of_choice * (1.0 - of_members)
                share_of[choice * members + member] = whole * (kept + of_members / members)
