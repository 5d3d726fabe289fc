"""The steps of the adaptive linear model, one for each row: six linear experts on standardized columns.

A row is its columns' indices and values. Each value is standardized with the running statistics of its column. Each
expert is a linear model with its own learning rate: three with AdaGrad, three with a constant rate. The experts are
mixed by exponential weights before the link, so all six together are one linear model.

All state is in three arrays; a row has one score, or one for each class:

================================  ====================================================================================
``columns[:, 3 + 9 * scores]``    for each column, at its slot, its weight, mean and sum of squares; then for each
                                  score six experts' weights and three sums of squared gradients
``mixture[6]``                    the experts' shares
``totals[6]``                     the weight of all rows, their mean squared norm, and the targets' mean, sum of squared
                                  deviations, smallest and largest
``totals[6:9]``                   for the squared loss: how far predictions may be below and above the range of the
                                  targets, and the mean squared error of the mixture; for other losses of numbers: the
                                  quantile, the mean distance of targets to their middle, the mean error of the mixture
================================  ====================================================================================

A row may also have *cells* (``streamiter.learn.ready_made.cell_steps``): indicators whose weights are in arrays of
their own. The losses by which experts learn are in ``streamiter.learn.ready_made.row_losses``.

The first ``hashed`` columns, hashed features and other indicators, are only scaled, so that an indicator of value 1
stays 1. The next column is the intercept, which has no statistics. The columns behind it are numeric: centred and
scaled. A value that is absent, NaN, infinite or huge counts as the mean.

``rates`` has the learning rate of each expert. Its length is a part of its type, so the functions are compiled for the
number of experts: six, or one to three with AdaGrad.

The functions read and write flat arrays, as pointers: ``columns[at]`` is the first number of a column, and
``scores[len(rates) * score + expert]`` one score of one expert, of which there are ``size`` in all. A call with arrays
counts references, which takes as long as the arithmetic itself.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``, and is imported when the first model is
made.

Sources: AdaGrad is Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (2011); the normalized steps follow Ross,
Mineiro and Langford, "Normalized Online Learning" (2013); fixed share is Herbster and Warmuth, "Tracking the Best
Expert" (1998); running variances are Welford (1962) with weights (West, 1979).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.ready_made.cell_steps import SQUARE_OF_CELLS_MIN, CellNumbers, Weights, add_cells, step_cells
from streamiter.learn.ready_made.model_rows import NOTHING_SAID_YET
from streamiter.learn.ready_made.row_losses import (
    ADAPTIVE,
    BINARY,
    EXPONENT_LIMIT,
    MEMORY,
    POISSON,
    ROWS_BEFORE_OUTLIERS,
    SQUARE_MIN,
    SQUARED,
    STEP_MAX_OF_CLASSES,
    STEP_MAX_OF_NUMBERS,
    Rates,
    observe_error,
    observe_number,
    offset_of,
    other_loss,
    probability_of,
    slopes_of,
    softmax,
    within_range,
)
from streamiter.values.field_kinds import HUGE
from streamiter.values.helpers.compiled import compiled, compiled_for_separate, pointer_function
from streamiter.values.numbers import ROUNDING, Floats, Indices

pointer_to = pointer_function()

PREDICT: Final = 1
LEARN: Final = 2
ASSUME: Final = 4
CORRECT: Final = 8
JUDGE: Final = 16
WITHDRAW: Final = 32

STATISTICS: Final = 3

# All constants were settled on 27 streams; docs/decisions/019 says how, and what each of them changes.
RATES_OF_CLASSES: Final = (0.1, 0.5, 2.0, 0.3, 1.6, 6.0)
RATES_OF_NUMBERS: Final = (0.1, 0.5, 2.0, 0.02, 0.15, 0.8)
CLIP: Final = 10.0
# A single row has at most a hundredth of it in the statistics: rows of weight 50,000 would leave the weight of one row,
# and a column with the statistics of one row is constant.
_STATISTICS_WEIGHT_MAX: Final = 100.0
# A single outlier hardly moves the statistics of a column, once they have this many rows.
OUTLIER_DEVIATIONS: Final = 10.0
_MIXTURE_RATE: Final = 0.25
_SHARE: Final = 0.001
# With all labels late, experts that nothing has judged have about the shares of `_start_late` after as many labels.
_PULL: Final = 1.0 / 30.0
# A single row takes no more from an expert, so that an outlier does not decide. Classes are never so unlikely.
_LIKELIHOOD_LEAST: Final = math.exp(-16.0)


@compiled_for_separate
def deviation(weight: float, mean: float, squares: float) -> float:
    """Return the standard deviation of a column; 0 for a constant column and one without rows."""
    if weight <= 0.0:
        return 0.0
    root = float(np.sqrt(squares / weight))
    return root if root > ROUNDING * abs(mean) else 0.0


@compiled_for_separate
def observe_value(columns: Floats, at: int, value: float, row_weight: float, is_numeric: bool) -> None:
    """Add a value to the statistics of its column."""
    weight, mean, squares = columns[at], columns[at + 1], columns[at + 2]
    row_weight = min(row_weight, _STATISTICS_WEIGHT_MAX)
    if weight + row_weight > MEMORY:
        squares *= (MEMORY - row_weight) / weight
        weight = MEMORY - row_weight
    distance = value - mean
    if weight >= ROWS_BEFORE_OUTLIERS and distance * distance * weight > OUTLIER_DEVIATIONS**2 * squares:
        reach = OUTLIER_DEVIATIONS * deviation(weight, mean, squares)
        if reach > 0.0:
            value = min(max(value, mean - reach), mean + reach)
    if is_numeric:
        difference = value - mean
        mean += difference * (row_weight / (weight + row_weight))
        columns[at + 1] = mean
        # Rounding may move the mean beyond the value; the root of a negative sum would be NaN.
        columns[at + 2] = squares + max(row_weight * difference * (value - mean), 0.0)
    else:
        columns[at + 2] = squares + row_weight * value * value
    columns[at] = weight + row_weight


@compiled_for_separate
def standardized_value(columns: Floats, at: int, value: float) -> float:
    if not abs(value) <= HUGE:
        return 0.0
    mean = columns[at + 1]
    scale = deviation(columns[at], mean, columns[at + 2])
    if scale == 0.0:
        return 0.0
    return float(min(max((value - mean) / scale, -CLIP), CLIP))


@compiled_for_separate
def _add_scores(columns: Floats, at: int, value: float, scores: Floats, size: int, rates: Rates) -> None:
    at += STATISTICS
    for first in range(0, size, len(rates)):
        for expert in range(len(rates)):
            scores[first + expert] += columns[at + expert] * value
        at += len(rates) + min(len(rates), ADAPTIVE)


@compiled_for_separate
def _link(
    task: int, scores: Floats, size: int, mixture: Floats, totals: Floats, predictions: Floats, first: int, rates: Rates
) -> None:
    """Mix the experts' scores, and turn them into a probability, probabilities or a number, from ``first`` on."""
    for score in range(size // len(rates)):
        mixed = 0.0
        for expert in range(len(rates)):
            mixed += mixture[expert] * scores[len(rates) * score + expert]
        predictions[first + score] = mixed
    if task == SQUARED:
        predictions[first] = within_range(predictions[first] + totals[2], totals)
    elif task == BINARY:
        predictions[first] = probability_of(predictions[first])
    elif task == POISSON:
        count = math.exp(min(predictions[first] + offset_of(task, totals), EXPONENT_LIMIT))
        predictions[first] = min(count, totals[5] + 1.0)
    elif task > SQUARED:
        predictions[first] = min(max(predictions[first] + totals[2], totals[4]), totals[5])
    else:
        softmax(predictions, first, first + size // len(rates), 1)


@compiled_for_separate
def _start_late(mixture: Floats, rates: Rates) -> None:
    """Move the shares towards those that are the smaller, the larger the rate is.

    While labels come whose questions were asked before the first label, experts learn, and nothing judges them. Fast
    ones may be far off, and would be a part of all predictions until the first labels of later questions come.
    """
    total = 0.0
    for expert in range(len(rates)):
        total += 1.0 / rates[expert]
    for expert in range(len(rates)):
        mixture[expert] += (1.0 / (rates[expert] * total) - mixture[expert]) * _PULL


@compiled_for_separate
def _mix(mixture: Floats, likelihoods: Floats, row_weight: float, evidence: float, rates: Rates) -> None:
    """Multiply each share by ``likelihood ** (rate · weight · evidence)``; each expert keeps a share, to come back.

    The rate is smaller for late labels, see ``RowSteps.evidence``; without evidence the label says nothing.
    """
    if evidence <= 0.0:
        if evidence == NOTHING_SAID_YET:
            _start_late(mixture, rates)
        return
    best, total, kept = likelihoods[0], 0.0, _SHARE * evidence
    for expert in range(len(rates)):
        best = max(best, likelihoods[expert])
    least = _LIKELIHOOD_LEAST * best
    for expert in range(len(rates)):
        if row_weight == 1.0 and evidence == 1.0:
            # The rate is 1/4, and two square roots take a fifth of the time of a power.
            mixture[expert] *= np.sqrt(np.sqrt(max(likelihoods[expert], least)))
        else:
            # A heavy row may leave no share above zero, so the best expert is the unit.
            mixture[expert] *= (max(likelihoods[expert], least) / best) ** (_MIXTURE_RATE * row_weight * evidence)
        total += mixture[expert]
    for expert in range(len(rates)):
        mixture[expert] = mixture[expert] / total * (1.0 - kept) + kept / len(rates)


@compiled_for_separate
def _step(
    columns: Floats, at: int, value: float, least: float, slopes: Floats, size: int, factors: Floats, rates: Rates
) -> None:
    """Make the steps of all experts in one column; smaller squares of slopes count as ``least``."""
    least *= value * value
    at += STATISTICS
    for first in range(0, size, len(rates)):
        for expert in range(min(len(rates), ADAPTIVE)):
            gradient = slopes[first + expert] * value
            # The square of a number below 1e-162 is 0, and a divisor.
            squares = columns[at + len(rates) + expert] + max(gradient * gradient + SQUARE_MIN, least)
            columns[at + len(rates) + expert] = squares
            columns[at + expert] -= factors[expert] * gradient / np.sqrt(squares)
        for expert in range(min(len(rates), ADAPTIVE), len(rates)):
            columns[at + expert] -= factors[expert] * (slopes[first + expert] * value)
        at += len(rates) + min(len(rates), ADAPTIVE)


@compiled_for_separate
def _learn(
    task: int,
    intercept: int,
    first: int,
    stop: int,
    indices: Indices,
    values: Floats,
    target: float,
    row_weight: float,
    evidence: float,
    slot_of: npt.NDArray[np.int32],
    columns: Floats,
    width: int,
    mixture: Floats,
    totals: Floats,
    x: Floats,
    begun: Floats,
    scores: Floats,
    size: int,
    asked: Floats,
    is_late: bool,
    action: int,
    slopes: Floats,
    likelihoods: Floats,
    factors: Floats,
    cells: CellNumbers,
    first_cell: int,
    stop_cell: int,
    weights: Weights,
    sums: Floats,
    others: bool | None,
    rates: Rates,
    room: Floats,
) -> None:
    """Learn from one row, whose intercept and cells have made the scores ``begun``.

    The scores of its columns are computed again with the statistics that include the row.

    If the label is late, ``asked`` are the experts' scores when the row was a question. ``action`` may ``ASSUME`` that
    the target is 0, and judge no expert. Later its slope is taken back: by ``CORRECT`` together with the step for the
    target 1, by ``WITHDRAW`` alone.
    """
    for score in range(size):
        scores[score] = begun[score]
    norm = 1.0 + (stop_cell - first_cell)
    for position in range(first, stop):
        at, value = slot_of[indices[position]] * width, values[position]
        if abs(value) <= HUGE and not action & (CORRECT | WITHDRAW):
            observe_value(columns, at, value, row_weight, indices[position] > intercept)
        standardized = standardized_value(columns, at, value)
        x[position - first] = standardized
        if standardized != 0.0:
            norm += standardized * standardized
            _add_scores(columns, at, standardized, scores, size, rates)
    if not action & (CORRECT | WITHDRAW):
        totals[0] += row_weight
        totals[1] += (norm - totals[1]) * row_weight / totals[0]
    norm = max(totals[1], norm)
    if others is not None:  # Numba compiles this call only if it is not None.
        other_loss(
            task, target, row_weight, norm, mixture, totals, scores, asked, is_late, slopes, likelihoods, factors, rates
        )
    else:
        spread, unit, step_max, steepest = 1.0, 1.0, STEP_MAX_OF_CLASSES, np.inf
        if task == SQUARED:
            rows_before = totals[0] - row_weight
            if stop_cell > first_cell and rows_before >= ROWS_BEFORE_OUTLIERS and totals[3] > 0.0:
                steepest = OUTLIER_DEVIATIONS * np.sqrt(totals[3] / rows_before)
            target, spread = observe_number(totals, target, row_weight)
            step_max = STEP_MAX_OF_NUMBERS
            if is_late:
                for expert in range(len(rates)):
                    asked[expert] -= totals[2]
            if evidence > 0.0:
                unit = observe_error(totals, target, row_weight, mixture, asked if is_late else scores, rates)
            elif evidence == NOTHING_SAID_YET:
                totals[8] = spread * spread  # There was no prediction; the error of the mean is the first guess.
        for expert in range(len(rates)):
            likelihoods[expert] = slopes_of(task, expert, scores, size, target, unit, totals, slopes, rates)
            if is_late:
                # The mixture counts predictions as they were made. Scores of this moment profit from the labels that
                # came since the question, and the experts that follow their last labels most closely would prevail.
                likelihoods[expert] = slopes_of(task, expert, asked, size, target, unit, totals, slopes, rates)
                slopes_of(task, expert, scores, size, target, unit, totals, slopes, rates)
            slopes[expert] = min(max(slopes[expert], -steepest), steepest)
            if action & WITHDRAW:
                slopes[expert] = 0.0
            if action & (CORRECT | WITHDRAW):
                slopes[expert] -= probability_of(asked[expert])
            if expert < min(len(rates), ADAPTIVE):
                factors[expert] = rates[expert] * spread / np.sqrt(totals[1])
            else:
                factors[expert] = min(rates[expert], step_max / row_weight) / norm
    if row_weight != 1.0:
        for score in range(size):
            slopes[score] *= row_weight
    least = SQUARE_OF_CELLS_MIN if stop_cell > first_cell else 0.0
    for position in range(first, stop):
        if x[position - first] != 0.0:
            at = slot_of[indices[position]] * width
            _step(columns, at, x[position - first], least, slopes, size, factors, rates)
    _step(columns, slot_of[intercept] * width, 1.0, least, slopes, size, factors, rates)
    step_cells(cells, first_cell, stop_cell, weights, sums, slopes, size, factors, rates, room)
    if not action & (ASSUME | WITHDRAW):
        _mix(mixture, likelihoods, row_weight, evidence, rates)


@compiled
def take_slots(
    indptr: Indices,
    indices: Indices,
    rows: Indices,
    actions: npt.NDArray[np.uint8],
    slot_of: npt.NDArray[np.int32],
    slots: int,
) -> int:
    """Give the next slots to columns without one that rows are learned from; return the number of slots in use."""
    column_of, used = pointer_to(indices), pointer_to(slot_of)
    for position in range(len(rows)):
        if actions[position] & LEARN:
            for at in range(indptr[rows[position]], indptr[rows[position] + 1]):
                if used[column_of[at]] == 0:
                    used[column_of[at]] = slots
                    slots += 1
    return slots


@compiled_for_separate
def step_rows(
    task: int,
    hashed: int,
    indptr: Indices,
    indices: Indices,
    values: Floats,
    rows: Indices,
    actions: npt.NDArray[np.uint8],
    targets: Floats,
    row_weights: Floats,
    evidence: Floats,
    slot_of: npt.NDArray[np.int32],
    columns: Floats,
    mixture: Floats,
    totals: Floats,
    predictions: Floats,
    questions: Indices,
    asked: Floats,
    room: Floats,
    cells: CellNumbers,
    cell_weights: Weights,
    cell_sums: Floats,
    others: bool | None,
    rates: Rates,
) -> None:
    """Predict and learn from the rows ``rows``, one after the other, as ``actions`` says for each of them.

    Row r has the columns ``indices[indptr[r]:indptr[r + 1]]``. Targets, weights, evidence and predictions are by
    position in ``rows``. A prediction is made before the row is learned from, and changes nothing. Where ``questions``
    is not -1, a prediction puts the experts' scores of its row into ``asked`` there, and learning takes them from it. A
    row with ``JUDGE`` is not learned from again: only the experts are judged. Column c has the row ``slot_of[c]`` of
    ``columns``. ``room`` is memory to work in, of the caller, because a pointer does not keep its array. ``cells`` has
    a row for each step, without columns for a model without cells. ``others`` is None but for losses after ``SQUARED``:
    their code would take a fifteenth of the first compilation of all models.
    """
    steps, width, size = len(rows), columns.shape[1], predictions.shape[1] * len(rates)
    scores, slopes, scores_asked = pointer_to(room), pointer_to(room[size:]), pointer_to(room[2 * size :])
    begun, of_steps, of_experts = pointer_to(room[3 * size :]), pointer_to(room[4 * size :]), room[8 * size :]
    likelihoods, factors = pointer_to(of_experts), pointer_to(of_experts[len(rates) :])
    x = pointer_to(of_experts[2 * len(rates) :])
    state, shares, sums = pointer_to(columns), pointer_to(mixture), pointer_to(totals)
    predicted, kept = pointer_to(predictions), pointer_to(asked)
    column_of, value_of, slots = pointer_to(indices), pointer_to(values), pointer_to(slot_of)
    cell_of, of_cells, sums_of_cells = pointer_to(cells), pointer_to(cell_weights), pointer_to(cell_sums)
    for position in range(steps):
        first, stop = indptr[rows[position]], indptr[rows[position] + 1]
        first_cell, stop_cell = position * cells.shape[1], (position + 1) * cells.shape[1]
        question = questions[position] * asked.shape[1] * len(rates)  # It has room for classes that come later.
        if actions[position] & (PREDICT | LEARN):
            for score in range(size):
                begun[score] = 0.0
            _add_scores(state, slots[hashed] * width, 1.0, begun, size, rates)
            add_cells(cell_of, first_cell, stop_cell, of_cells, begun, size)
        if actions[position] & PREDICT:
            for score in range(size):
                scores[score] = begun[score]
            for place in range(first, stop):
                at = slots[column_of[place]] * width
                value = standardized_value(state, at, value_of[place])
                if value != 0.0:
                    _add_scores(state, at, value, scores, size, rates)
            _link(task, scores, size, shares, sums, predicted, position * (size // len(rates)), rates)
            if question >= 0:
                # Scores of numbers are kept with the mean of the targets, which moves.
                offset = offset_of(task, sums)
                for score in range(size):
                    kept[question + score] = scores[score] + offset
        if actions[position] & (LEARN | JUDGE) and question >= 0:
            for score in range(size):
                scores_asked[score] = kept[question + score]
        if actions[position] & JUDGE:
            target = targets[position]
            for expert in range(len(rates)):  # It changes the experts' shares only.
                likelihood = slopes_of(BINARY, expert, scores_asked, size, target, 1.0, sums, slopes, rates)
                likelihoods[expert] = likelihood
            _mix(shares, likelihoods, row_weights[position], evidence[position], rates)
        elif actions[position] & LEARN:
            _learn(
                task,
                hashed,
                first,
                stop,
                column_of,
                value_of,
                targets[position],
                row_weights[position],
                evidence[position],
                slots,
                state,
                width,
                shares,
                sums,
                x,
                begun,
                scores,
                size,
                scores_asked,
                question >= 0,
                int(actions[position]),
                slopes,
                likelihoods,
                factors,
                cell_of,
                first_cell,
                stop_cell,
                of_cells,
                sums_of_cells,
                others,
                rates,
                of_steps,
            )


@compiled
def standardize_rows(values: Floats, columns: Floats, result: Floats) -> None:
    """Fill in each row of a matrix standardized with the statistics of the rows before it, and add it to them.

    Values that are absent or huge stay as they are in ``result``.
    """
    state = pointer_to(columns)
    for row in range(len(values)):
        for column in range(len(columns)):
            value, at = values[row, column], column * STATISTICS
            if abs(value) <= HUGE:
                scale = deviation(state[at], state[at + 1], state[at + 2])
                result[row, column] = (value - state[at + 1]) / scale if scale > 0.0 else 0.0
                observe_value(state, at, value, 1.0, True)
