"""The arrays of embeddings, and the steps of the network on the vectors of the first expert.

A model of several classes has a score for each, and each expert a *head* for each score: weights, vectors, a network
and an intercept. The heads of the first expert come first.

============================  ========================================================================================
``commons``                   by field: the vectors of all heads that features without their own have; not learned
``numbers``                   by column: of each head the weight and the vector, then the sums of squares
``statistics``                by column: weight, mean and sum of squares
``weights_of_fields``         of the first layer: for each field, score and factor, a number for each unit;
                              ``…_of_numbers`` the same for each column and score
``layers``                    by score: the biases of the first layer; of each further layer the weights, for each input
                              a number for each unit, then the biases; the weights of the output, which has the
                              intercept
``squares_of_…``              the sums of squared gradients of these
``intercepts``                of all heads, then the sums of their squared gradients
``totals``                    of the targets, as in ``row_steps``; of numbers, scores are in units of their deviation
============================  ========================================================================================

Weights are stored by input: what an input adds to all units of a layer, and the steps of its weights, are loops that
fill the registers of the processor. Sums over units have eight parts, which fill one register.
``streamiter.learn.ready_made.embedding_steps`` has the steps of rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from streamiter.parameter_server.admission import UNKNOWN_TIME
from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Float32s, Floats, Integers

NO_TIME: Final = -UNKNOWN_TIME
"""The time of a row that has none: it is before all times."""

EXPERTS: Final = 2

# ---- the constants of learning
RATE_OF_VECTORS: Final = np.float32(0.05)
"""The rate of the first expert, good for clicks with ten fields."""
RATE_OF_VECTORS_2: Final = np.float32(0.2)
"""The rate of the second expert, good for users and items."""
RATE_OF_WEIGHTS: Final = np.float32(0.1)
RATE_OF_LAYERS: Final = np.float32(0.03)
SQUARES_AT_FIRST: Final = 1e-2
"""A sum of squared gradients begins with it, so that the first step is no larger than those behind it."""
DEVIATION_OF_VECTORS: Final = 0.02
"""The deviation of the first numbers of all vectors; with .1 the loss of clicks of ten fields is 1 % larger."""
DEVIATION_OF_OUTPUT: Final = 0.1
"""The deviation of the first weights of the network's output."""

# ---- the facts
FACTOR_COUNT: Final = 0
FIELD_COUNT: Final = 1
COLUMN_COUNT: Final = 2
LAYER_COUNT: Final = 3
HAS_PRODUCTS: Final = 4
LOSS_KIND: Final = 5
EXPIRES: Final = 6
TIME_MS: Final = 7
"""The time of the last learned row that had one."""
HEAD_COUNT: Final = 8
"""The number of heads: one of each expert for each score."""
UNIT_COUNT: Final = 9
"""The number of units of all layers, and of numbers in ``layers``, for each score."""
LAYER_SIZE: Final = 10
FACTS_OF_EMBEDDINGS: Final = 11


class EmbeddingArrays(NamedTuple):
    """The arrays of a model; in compiled code, pointers to their first numbers."""

    commons: Float32s
    numbers: Float32s
    statistics: Floats
    weights_of_fields: Float32s
    squares_of_fields: Float32s
    weights_of_numbers: Float32s
    squares_of_numbers: Float32s
    layers: Float32s
    squares_of_layers: Float32s
    intercepts: Floats
    totals: Floats
    units: Integers
    """The number of units of each layer."""
    facts: Integers


class RowRoom(NamedTuple):
    """Memory to work in: what the scores of a row are made of, for the step that learns from it."""

    counts: Integers
    """The number of fields, and of numeric columns, that the row has."""
    fields: Integers
    """The numbers of these fields."""
    starts: Integers
    """For each field the position of its first key, and the one behind its last key."""
    stops: Integers
    columns: Integers
    """The numbers of the numeric columns that are not at their mean."""
    standardized: Float32s
    """Their values."""
    weights: Float32s
    """By head, the mean weight of a field."""
    vectors: Float32s
    """The mean vectors of each field, of all heads."""
    sums: Float32s
    """By factor of all heads, the sum of all vectors, then the sum of their squares."""
    slopes: Float32s
    """By factor of all heads, the slope of the loss by the vector of a field."""
    outputs: Float32s
    """By score, the outputs of all units of the layers."""
    slopes_of_outputs: Float32s
    scores: Floats
    """The scores of all heads, then the slopes of the loss by them."""


# ---- layers


@compiled
def _add_input(weights: Float32s, at: int, value: np.float32, outputs: Float32s, first: int, units: int) -> None:
    """Add what an input adds to the units of a layer."""
    for unit in range(units):
        outputs[first + unit] += value * weights[at + unit]


@compiled
def product_with_units(weights: Float32s, at: int, slopes: Float32s, first: int, units: int) -> np.float32:
    """Return the sum of the products of weights and slopes."""
    a = b = c = d = e = f = g = h = np.float32(0.0)
    blocks = units // 8
    for block in range(blocks):
        one, other = at + 8 * block, first + 8 * block
        a += weights[one] * slopes[other]
        b += weights[one + 1] * slopes[other + 1]
        c += weights[one + 2] * slopes[other + 2]
        d += weights[one + 3] * slopes[other + 3]
        e += weights[one + 4] * slopes[other + 4]
        f += weights[one + 5] * slopes[other + 5]
        g += weights[one + 6] * slopes[other + 6]
        h += weights[one + 7] * slopes[other + 7]
    total = ((a + e) + (c + g)) + ((b + f) + (d + h))
    for unit in range(8 * blocks, units):
        total += weights[at + unit] * slopes[first + unit]
    return total


@compiled
def step_units(
    weights: Float32s, squares: Float32s, at: int, value: np.float32, slopes: Float32s, first: int, units: int
) -> None:
    """Make the steps of the weights of an input, from the slopes of the score by each unit."""
    for unit in range(units):
        gradient = value * slopes[first + unit]
        total = squares[at + unit] + gradient * gradient
        squares[at + unit] = total
        weights[at + unit] -= np.divide(RATE_OF_LAYERS * gradient, np.sqrt(total))


@compiled
def step_number(numbers: Float32s, at: int, squares_at: int, gradient: np.float32, rate: np.float32) -> None:
    """Make the step of one number."""
    total = numbers[squares_at] + gradient * gradient
    numbers[squares_at] = total
    numbers[at] -= np.divide(rate * gradient, np.sqrt(total))


@compiled
def score_of_network(own: EmbeddingArrays, room: RowRoom, score: int) -> float:
    """Return the output of the network of a score, and keep the outputs of all units."""
    outputs, layers, units = room.outputs, own.layers, own.units[0]
    factors, heads = own.facts[FACTOR_COUNT], own.facts[HEAD_COUNT]
    scores = heads // EXPERTS
    first, at = score * own.facts[UNIT_COUNT], score * own.facts[LAYER_SIZE]
    for unit in range(units):
        outputs[first + unit] = layers[at + unit]
    for each in range(room.counts[0]):
        row = (room.fields[each] * scores + score) * factors
        for factor in range(factors):
            value = room.vectors[(each * heads + score) * factors + factor]
            _add_input(own.weights_of_fields, (row + factor) * units, value, outputs, first, units)
    for each in range(room.counts[1]):
        row = room.columns[each] * scores + score
        _add_input(own.weights_of_numbers, row * units, room.standardized[each], outputs, first, units)
    zero = np.float32(0.0)
    for unit in range(units):
        outputs[first + unit] = max(outputs[first + unit], zero)
    at += units
    for layer in range(1, own.facts[LAYER_COUNT]):
        inputs, units = units, own.units[layer]
        behind, biases = first + inputs, at + inputs * units
        for unit in range(units):
            outputs[behind + unit] = layers[biases + unit]
        for place in range(inputs):
            if outputs[first + place] > zero:
                _add_input(layers, at + place * units, outputs[first + place], outputs, behind, units)
        for unit in range(units):
            outputs[behind + unit] = max(outputs[behind + unit], zero)
        first, at = behind, biases + units
    output = 0.0
    for unit in range(units):
        output += np.float64(outputs[first + unit] * layers[at + unit])
    return output


@compiled
def learn_layers(own: EmbeddingArrays, room: RowRoom, score: int, slope: np.float32) -> None:
    """Make the steps of all layers of a score behind the inputs; the slopes of the first layer's units are left in the
    room.
    """
    outputs, slopes, layers, squares = room.outputs, room.slopes_of_outputs, own.layers, own.squares_of_layers
    one, zero, last = np.float32(1.0), np.float32(0.0), own.facts[LAYER_COUNT] - 1
    begin = score * own.facts[LAYER_SIZE]
    first, at = score * own.facts[UNIT_COUNT], begin + own.units[0]
    for layer in range(last):
        first += own.units[layer]
        at += (own.units[layer] + 1) * own.units[layer + 1]
    units = own.units[last]
    for unit in range(units):
        slopes[first + unit] = slope * layers[at + unit] if outputs[first + unit] > zero else zero
    step_units(layers, squares, at, slope, outputs, first, units)
    for layer in range(last, 0, -1):
        inputs = own.units[layer - 1]
        before = first - inputs
        at -= units
        step_units(layers, squares, at, one, slopes, first, units)
        at -= inputs * units
        for place in range(inputs):
            slopes[before + place] = zero
            if outputs[before + place] > zero:
                row = at + place * units
                slopes[before + place] = product_with_units(layers, row, slopes, first, units)
                step_units(layers, squares, row, outputs[before + place], slopes, first, units)
        first, units = before, inputs
    step_units(layers, squares, begin, one, slopes, first, units)
