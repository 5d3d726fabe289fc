"""The losses of the experts, by which they learn and are mixed: targets, slopes and likelihoods of one row.

Numbers may have another loss than the squared one. Quantiles and Huber's loss have the scores of numbers, but robust
statistics of targets. Counts (the loss of Poisson) have scores whose exponential is a share of their mean.
``streamiter.learn.ready_made.row_steps`` describes the arrays. The functions are compiled where Numba is installed.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from streamiter.values.helpers.compiled import compiled_for_separate
from streamiter.values.numbers import Floats

Rates = tuple[float, ...]
"""The learning rates of the experts: of up to three with AdaGrad, then of those with a constant rate."""

BINARY: Final = 0
CLASSES: Final = 1
SQUARED: Final = 2
QUANTILE: Final = 3
HUBER: Final = 4
POISSON: Final = 5

ADAPTIVE: Final = 3

# All constants were settled on 27 streams; docs/decisions/019 says how, and what each of them changes.
# A constant rate times the weight of a row is never larger, so that a heavy row does not overshoot its target.
STEP_MAX_OF_CLASSES: Final = 6.0
STEP_MAX_OF_NUMBERS: Final = 1.0
# Statistics follow a column that changes: they never weigh more than this many rows.
MEMORY: Final = 10_000.0
# A single outlier hardly moves statistics, once they have this many rows.
ROWS_BEFORE_OUTLIERS: Final = 30.0
# Without this bound a single label that is a million times too large makes the error of the next 10,000 rows 40 times
# as large. If labels really grow, the range is right again after a few rows.
_OUTLIER_RANGES: Final = 10.0
# From 30 rows on, one label of 1e12 in the sixth row was learned, and no later row made up for it. No stream of
# docs/decisions/073 has another loss with 5 or 10; with 3, some have 10 % more.
_ROWS_BEFORE_WRONG_LABELS: Final = 5.0
_LOSS_MAX_OF_NUMBERS: Final = 16.0
# An expert is judged by squared errors in units of the mixture's mean one; beyond this, all are equally wrong.
_SQUARE_MAX: Final = 100.0
# What labels exceed their range by fades with each row. It was chosen on one half of the streams of
# docs/decisions/073; with .5 losses are .1 % larger.
_KEPT_BEYOND_RANGE: Final = 0.9
PROBABILITY_LEAST: Final = 1e-6
SCORE_MAX: Final = 30.0
SQUARE_MIN: Final = 1e-300
"""Added to squared slopes: the square of a number below 1e-162 is 0, and its root a divisor."""
# docs/decisions/039 has the streams on which the constants of other losses were measured; they are flat there. In
# robust statistics, a distance counts as at most this many times the mean distance.
_REACH: Final = 5.0
# Huber's loss bends at 1.345 deviations of normal errors, where it is 95 % as efficient as the squared loss (Huber,
# 1981). Their mean absolute error is 0.798 deviations.
_BEND: Final = 1.345 / 0.798
_PINBALL_SHARPNESS: Final = 4.0
# The mean of counts includes half a count more, so that it has a logarithm before the first count.
_HALF_A_COUNT: Final = 0.5
EXPONENT_LIMIT: Final = 700.0


@compiled_for_separate
def softmax(scores: Floats, first: int, stop: int, step: int) -> None:
    """Turn the scores from ``first`` to ``stop``, each ``step``-th, into probabilities, in place."""
    largest, total = scores[first], 0.0
    for score in range(first, stop, step):
        largest = max(largest, scores[score])
    for score in range(first, stop, step):
        scores[score] = math.exp(scores[score] - largest)
        total += scores[score]
    for score in range(first, stop, step):
        scores[score] /= total


@compiled_for_separate
def probability_of(score: float) -> float:
    """Return the probability of a score."""
    return float(1.0 / (1.0 + math.exp(-min(max(score, -SCORE_MAX), SCORE_MAX))))


@compiled_for_separate
def offset_of(task: int, totals: Floats) -> float:
    """Return the offset of scores: the mean of numbers, the logarithm of the mean of counts, 0 for classes."""
    if task == POISSON and totals[0] > 0.0:
        return float(math.log((totals[2] * totals[0] + _HALF_A_COUNT) / (totals[0] + 1.0)))
    return float(totals[2]) if task >= SQUARED else 0.0


@compiled_for_separate
def observe_target(totals: Floats, target: float, row_weight: float) -> tuple[float, float]:
    """Add a target to the statistics of the targets; return the target, and their standard deviation.

    An outlier becomes a target ten times as far from the mean as the largest and the smallest are from each other.
    """
    if totals[0] == row_weight:
        totals[4] = totals[5] = target
    difference, reach = target - totals[2], _OUTLIER_RANGES * (totals[5] - totals[4])
    if abs(difference) > reach > 0.0 and totals[0] >= _ROWS_BEFORE_WRONG_LABELS:
        target = totals[2] + min(max(difference, -reach), reach)
        difference = target - totals[2]
    totals[2] += difference * row_weight / totals[0]
    totals[3] += max(row_weight * difference * (target - totals[2]), 0.0)  # As in `observe_value`.
    totals[4], totals[5] = min(totals[4], target), max(totals[5], target)
    return target, float(np.sqrt(totals[3] / totals[0]))


@compiled_for_separate
def observe_number(totals: Floats, target: float, row_weight: float) -> tuple[float, float]:
    """As :func:`observe_target`, and note how far labels have just gone beyond the range of all earlier ones.

    Labels with a trend go beyond it again and again, and so do the right predictions.
    """
    low, high = totals[4], totals[5]
    is_known = totals[0] - row_weight >= ROWS_BEFORE_OUTLIERS
    target, spread = observe_target(totals, target, row_weight)
    if is_known:
        totals[6] = max(low - totals[4], _KEPT_BEYOND_RANGE * totals[6])
        totals[7] = max(totals[5] - high, _KEPT_BEYOND_RANGE * totals[7])
    return target, spread


@compiled_for_separate
def within_range(number: float, totals: Floats) -> float:
    """Return the number, or the end of the range of predictions that it is beyond."""
    return float(min(max(number, totals[4] - totals[6]), totals[5] + totals[7]))


@compiled_for_separate
def observe_error(
    totals: Floats, target: float, row_weight: float, mixture: Floats, scores: Floats, rates: Rates
) -> float:
    """Add the error of the mixture to its mean square; return the unit of errors by which experts are judged.

    In units of the deviation of targets, experts whose errors are a tenth of it are hardly told apart; it is the first
    guess.
    """
    mixed = totals[2]
    for expert in range(len(rates)):
        mixed += mixture[expert] * scores[expert]
    error = within_range(mixed, totals) - target
    totals[8] += (error * error - totals[8]) * min(row_weight / min(totals[0], MEMORY), 1.0)
    is_known = totals[0] - row_weight >= ROWS_BEFORE_OUTLIERS
    return float(np.sqrt(totals[8] if is_known else totals[3] / totals[0]))


@compiled_for_separate
def _loss_of_count(prediction: float, target: float) -> float:
    loss = prediction - target
    if target > 0.0:
        loss += target * math.log(target / prediction)
    return float(loss)


@compiled_for_separate
def slopes_of(
    task: int,
    expert: int,
    scores: Floats,
    size: int,
    target: float,
    unit: float,
    totals: Floats,
    slopes: Floats,
    rates: Rates,
) -> float:
    """Put the derivative of the expert's loss by each score into ``slopes``; return ``exp(−loss)``, for the mixture.

    Errors of numbers are in units of ``unit``; 0 judges no expert.
    """
    if task == BINARY:
        probability = probability_of(scores[expert])
        slopes[expert] = probability - target
        return float(max(probability if target > 0.5 else 1.0 - probability, PROBABILITY_LEAST))
    if task == CLASSES:
        for own in range(expert, size, len(rates)):
            slopes[own] = scores[own]
        softmax(slopes, expert, size, len(rates))
        true_class = len(rates) * int(target) + expert
        likelihood = max(slopes[true_class], PROBABILITY_LEAST)
        slopes[true_class] -= 1.0
        return float(likelihood)
    low, high, centred = totals[4] - totals[2], totals[5] - totals[2], target - totals[2]
    score = scores[expert]
    slopes[expert] = min(max(score, 2.0 * low - high), 2.0 * high - low) - centred
    if unit == 0.0:
        return 1.0
    error = (min(max(score, low - totals[6]), high + totals[7]) - centred) / unit
    return float(math.exp(-min(error * error, _SQUARE_MAX)))


@compiled_for_separate
def _slope_of_other(
    task: int, expert: int, score: float, target: float, target_distance: float, totals: Floats, slopes: Floats
) -> float:
    """Put the derivative of the expert's loss by its score into ``slopes``; return ``exp(−loss)``, for the mixture."""
    if task == POISSON:
        mean = math.exp(offset_of(task, totals))
        # Beyond it, a score would leave a sum of squares from which its rate never recovers.
        ratio = min(math.exp(min(max(score, -SCORE_MAX), SCORE_MAX)), (2.0 * totals[5] + 1.0) / mean)
        slopes[expert] = ratio - target / mean
        if expert >= ADAPTIVE:
            slopes[expert] /= max(ratio, 1.0)  # The curvature grows with the prediction.
        loss = _loss_of_count(mean * ratio, target) / max(totals[8], 1.0)
        return float(math.exp(-min(loss, _LOSS_MAX_OF_NUMBERS)))
    low, high, centred = totals[4] - totals[2], totals[5] - totals[2], target - totals[2]
    error = min(max(score, 2.0 * low - high), 2.0 * high - low) - centred
    bend = _BEND * totals[8]
    if task == HUBER:
        slopes[expert] = min(max(error, -bend), bend)
    elif error == 0.0:
        slopes[expert] = 0.0
    else:
        slopes[expert] = 1.0 - totals[6] if error > 0.0 else -totals[6]
    if target_distance == 0.0:
        return 1.0
    error = (min(max(score, low), high) - centred) / target_distance
    if task == HUBER:
        near = min(abs(error), bend / target_distance)
        loss = near * (2.0 * abs(error) - near)
    else:
        loss = _PINBALL_SHARPNESS * max(error * (1.0 - totals[6]), -error * totals[6])
    return float(math.exp(-min(loss, _LOSS_MAX_OF_NUMBERS)))


@compiled_for_separate
def other_loss(
    task: int,
    target: float,
    row_weight: float,
    norm: float,
    mixture: Floats,
    totals: Floats,
    scores: Floats,
    asked: Floats,
    is_late: bool,
    slopes: Floats,
    likelihoods: Floats,
    factors: Floats,
    rates: Rates,
) -> None:
    """Observe a target, and fill in slopes, likelihoods and factors of all experts, for losses after ``SQUARED``."""
    distance, unit, mixed = 1.0, 1.0, 0.0
    for expert in range(len(rates)):
        mixed += mixture[expert] * scores[expert]
    if task == POISSON:
        target, deviation = observe_target(totals, target, row_weight)
        # Rare counts are large parts of their mean, and so would be the steps of constant rates.
        mean = math.exp(offset_of(task, totals))
        unit = 1.0 / max(deviation / mean, 1.0)
        predicted = min(mean * math.exp(min(max(mixed, -SCORE_MAX), SCORE_MAX)), totals[5] + 1.0)
        error = 2.0 * _loss_of_count(predicted, target)  # It is 1 for counts of Poisson.
    else:
        if totals[0] == row_weight:
            totals[2] = totals[4] = totals[5] = target
        difference, reach = target - totals[2], _REACH * totals[7]
        if totals[0] >= ROWS_BEFORE_OUTLIERS:
            difference = min(max(difference, -reach), reach)
        totals[2] += difference * row_weight / totals[0]
        totals[7] += (abs(difference) - totals[7]) * row_weight / totals[0]
        totals[4], totals[5] = min(totals[4], target), max(totals[5], target)
        distance, error = totals[7], abs(target - totals[2] - mixed)
        unit = distance if task == QUANTILE else 1.0
    if totals[0] >= ROWS_BEFORE_OUTLIERS:
        error = min(error, _REACH * totals[8])
    totals[8] += (error - totals[8]) * min(row_weight / min(totals[0], MEMORY), 1.0)
    for expert in range(len(rates)):
        score = asked[expert] - offset_of(task, totals) if is_late else scores[expert]
        likelihoods[expert] = _slope_of_other(task, expert, score, target, distance, totals, slopes)
        if is_late:  # As in `_learn`.
            _slope_of_other(task, expert, scores[expert], target, distance, totals, slopes)
        if expert < min(len(rates), ADAPTIVE):
            factors[expert] = rates[expert] * distance / np.sqrt(totals[1])
        else:
            factors[expert] = min(rates[expert], STEP_MAX_OF_NUMBERS / row_weight) / norm * unit
