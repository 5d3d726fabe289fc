"""The steps of embeddings, one for each row: two factorization machines, and a network on the vectors of the first.

A row is the keys of its features, in ascending order, and its numeric columns. A *key* has the number of its field
(10 bits), then 52 bits of the hash of field and text; all features of one field count as their mean. A feature has a
weight w, and when it is admitted a vector v in the table (``parameter_server.storage.feature_steps``); before that it
has the *common* vector of its field, which is not learned, and one step with the sum of its gradients, which is kept in
4 bits for each number. This step is the first one of its own vector, too. The score of an expert is

    intercept + sum of w_f + sum of z_c · w_c + products + network

over fields f and numeric columns c, whose values z_c are standardized and clipped as in
``streamiter.learn.ready_made.row_steps``. The products are those of all pairs of the vectors v_f and z_c · v_c. The
network has the v_f and z_c as inputs. The two experts have weights and vectors of their own, and differ in the learning
rate of vectors. Of several classes each expert has a *head* for each, with all of this, and the softmax of their scores
is its prediction.

``streamiter.learn.ready_made.embedding_layers`` describes the arrays, and has the network.

All numbers learn with AdaGrad. Vectors and layers are float32, added up one after the other, so code without a compiler
gives the same bits.

Sources: factorization machines are Rendle (2010), DeepFM is Guo et al. (2017), wide and deep is Cheng et al. (2016).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.ready_made.embedding_layers import (
    COLUMN_COUNT,
    DEVIATION_OF_VECTORS,
    EXPERTS,
    EXPIRES,
    FACTOR_COUNT,
    FIELD_COUNT,
    HAS_PRODUCTS,
    HEAD_COUNT,
    LAYER_COUNT,
    LOSS_KIND,
    NO_TIME,
    RATE_OF_VECTORS,
    RATE_OF_VECTORS_2,
    RATE_OF_WEIGHTS,
    SQUARES_AT_FIRST,
    TIME_MS,
    UNIT_COUNT,
    EmbeddingArrays,
    RowRoom,
    learn_layers,
    product_with_units,
    score_of_network,
    step_number,
    step_units,
)
from streamiter.learn.ready_made.model_rows import BEHIND_KEYS
from streamiter.learn.ready_made.row_losses import (
    BINARY,
    CLASSES,
    SQUARED,
    observe_number,
    probability_of,
    softmax,
    within_range,
)
from streamiter.learn.ready_made.row_steps import (
    CORRECT,
    LEARN,
    PREDICT,
    STATISTICS,
    WITHDRAW,
    observe_value,
    standardized_value,
)
from streamiter.models.published_embeddings import HASH_BITS
from streamiter.parameter_server.admission import UNKNOWN_TIME
from streamiter.parameter_server.storage.feature_steps import (
    NEW_ROW,
    FeatureArrays,
    find_feature,
    renew_feature,
    touch_feature,
)
from streamiter.values.field_kinds import HUGE
from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.numbers import Float32s, Floats, Indices

pointer_to = pointer_function()

# The modulus of Lehmer's generator, with the factor 48,271 (Park, Miller and Stockmeyer, 1993).
_LEHMER: Final = 2**31 - 1
# The sum of four numbers between 0 and 1 has the variance 1/3.
_SPREAD: Final = DEVIATION_OF_VECTORS * 3.0**0.5
# A row of weight 1,000 is learned as one of this weight: a square of its slope would end the learning of its features.
_SLOPE_MAX: Final = 100.0
# With 8 bits losses were the same. The step of a sum of 1 is .995 times the rate, so larger ones need no room.
_EARLY_MAX: Final = 7.0**2
_EARLY_UNIT: Final = 1.0 / _EARLY_MAX
# An error of numbers counts as at most this many deviations of the targets.
_ERROR_MAX: Final = 10.0


# ---- features without vectors


@compiled
def _early_root(byte: int, expert: int) -> int:
    """Return a sum of gradients of a feature without vectors: its root, from 0 to 7, with the sign of the sum.

    A byte has the roots of a factor of both experts, 4 bits each.
    """
    return (((byte >> 4 * expert) & 15) ^ 8) - 8


@compiled
def _early_gradient(root: int) -> np.float32:
    return np.float32(_EARLY_UNIT * (root * abs(root)))


@compiled
def _early_step(root: int, expert: int) -> np.float32:
    """Return the step of AdaGrad of a sum of gradients: where the number of a vector is, beside its beginning."""
    gradient = _early_gradient(root)
    rate = RATE_OF_VECTORS if expert == 0 else RATE_OF_VECTORS_2
    return np.float32(-np.divide(rate * gradient, np.sqrt(np.float32(SQUARES_AT_FIRST) + gradient * gradient)))


def early_steps(expert: int) -> Float32s:
    """Return the step for each 4 bits of an early byte."""
    return np.array([_early_step(_early_root(bits << 4 * expert, expert), expert) for bits in range(16)], np.float32)


@compiled
def _add_early_steps(table: FeatureArrays, entry: int, vectors: Float32s, first: int, factors: int) -> None:
    """Add what a feature without vectors has learned to the common vectors of its field."""
    for factor in range(factors):
        byte = int(table.early[entry * factors + factor])
        if byte != 0:
            for expert in range(EXPERTS):
                vectors[first + expert * factors + factor] += _early_step(_early_root(byte, expert), expert)


@compiled
def _add_early_gradients(table: FeatureArrays, entry: int, slopes: Float32s, share: np.float32, factors: int) -> None:
    """Add the gradients of a row to the sums of a feature without vectors."""
    for factor in range(factors):
        at = entry * factors + factor
        byte, after = int(table.early[at]), 0
        for expert in range(EXPERTS):
            total = np.float64(_early_gradient(_early_root(byte, expert)))
            total += np.float64(share * slopes[expert * factors + factor])
            root = int(np.floor(np.sqrt(min(abs(total) / _EARLY_UNIT, _EARLY_MAX)) + 0.5))
            root = root if total > 0.0 else -root
            after += 16 * root if expert else root & 15
        table.early[at] = after


@compiled
def _begin_from_early(table: FeatureArrays, entry: int, at: int, factors: int) -> None:
    """Begin the vectors of a feature that is admitted with what it has learned before, and the sums of squares."""
    count = EXPERTS * factors
    _add_early_steps(table, entry, table.rows, at, factors)
    for factor in range(factors):
        byte = int(table.early[entry * factors + factor])
        for expert in range(EXPERTS):
            gradient = _early_gradient(_early_root(byte, expert))
            table.rows[at + count + expert * factors + factor] += gradient * gradient


# ---- a row


@compiled
def _time_of(indices: Indices, values: Floats, first: int, stop: int) -> int:
    """Return the time of a row, which is the value of the index of no feature."""
    for at in range(first, stop):
        if indices[at] == BEHIND_KEYS and abs(values[at]) <= HUGE:
            return int(values[at])
    return NO_TIME


@compiled
def _has_products(own: EmbeddingArrays, head: int) -> bool:
    return bool(head >= own.facts[HEAD_COUNT] // EXPERTS or own.facts[HAS_PRODUCTS] != 0)


@compiled
def _add_vectors(numbers: Float32s, at: int, vectors: Float32s, first: int, count: int) -> None:
    for number in range(count):
        vectors[first + number] += numbers[at + number]


@compiled
def _add_to_sums(vectors: Float32s, first: int, sums: Float32s, count: int) -> None:
    for number in range(count):
        value = vectors[first + number]
        sums[number] += value
        sums[count + number] += value * value


@compiled
def _add_column(own: EmbeddingArrays, room: RowRoom, column: int, value: np.float32) -> None:
    """Add a standardized value to the scores and the sums."""
    factors, heads = own.facts[FACTOR_COUNT], own.facts[HEAD_COUNT]
    width, sums = factors + 1, room.sums
    for head in range(heads):
        at = (2 * column * heads + head) * width
        room.scores[head] += np.float64(value * own.numbers[at])
        for factor in range(factors):
            number = value * own.numbers[at + 1 + factor]
            sums[head * factors + factor] += number
            sums[(heads + head) * factors + factor] += number * number


@compiled
def _add_field(
    table: FeatureArrays, own: EmbeddingArrays, room: RowRoom, indices: Indices, field: int, now_ms: int
) -> None:
    """Add the features of the last field of the room to the scores and the sums."""
    each, heads = room.counts[0], own.facts[HEAD_COUNT]
    count = heads * own.facts[FACTOR_COUNT]
    start, stop, first, vectors = room.starts[each], room.stops[each], each * count, room.vectors
    for head in range(heads):
        room.weights[head] = np.float32(0.0)
    for number in range(count):
        vectors[first + number] = np.float32(0.0)
    for place in range(start, stop):
        entry = find_feature(table, indices[place], now_ms)
        if entry != 0:
            _add_vectors(table.weights, entry * 2 * heads, room.weights, 0, heads)
        row = table.row_of[entry]
        if row != 0:
            _add_vectors(table.rows, row * 2 * count, vectors, first, count)
        else:
            _add_vectors(own.commons, field * count, vectors, first, count)
            if entry != 0:
                _add_early_steps(table, entry, vectors, first, count // EXPERTS)
    if stop - start > 1:
        share = np.float32(1.0 / (stop - start))
        for head in range(heads):
            room.weights[head] *= share
        for number in range(count):
            vectors[first + number] *= share
    _add_to_sums(vectors, first, room.sums, count)
    for head in range(heads):
        room.scores[head] += np.float64(room.weights[head])


@compiled
def _score(
    table: FeatureArrays,
    own: EmbeddingArrays,
    room: RowRoom,
    indices: Indices,
    values: Floats,
    first: int,
    stop: int,
    now_ms: int,
) -> None:
    """Fill in the scores of a row, and keep what they are made of."""
    factors, heads, sums, scores = own.facts[FACTOR_COUNT], own.facts[HEAD_COUNT], room.sums, room.scores
    for number in range(2 * heads * factors):
        sums[number] = np.float32(0.0)
    for head in range(heads):
        scores[head] = own.intercepts[head]
    room.counts[0] = room.counts[1] = 0
    at = first
    while at < stop:
        start, field = at, indices[at] >> HASH_BITS
        at += 1
        if indices[start] >= BEHIND_KEYS:
            column = indices[start] - BEHIND_KEYS - 1
            if 0 <= column < own.facts[COLUMN_COUNT]:
                value = np.float32(standardized_value(own.statistics, column * STATISTICS, values[start]))
                if value != np.float32(0.0):
                    room.columns[room.counts[1]], room.standardized[room.counts[1]] = column, value
                    room.counts[1] += 1
                    _add_column(own, room, column, value)
            continue
        while at < stop and indices[at] >> HASH_BITS == field:
            at += 1
        if field < own.facts[FIELD_COUNT]:
            each = room.counts[0]
            room.fields[each], room.starts[each], room.stops[each] = field, start, at
            _add_field(table, own, room, indices, field, now_ms)
            room.counts[0] += 1
    for head in range(heads):
        if _has_products(own, head):
            for number in range(head * factors, (head + 1) * factors):
                total = np.float64(sums[number])
                scores[head] += 0.5 * (total * total - np.float64(sums[heads * factors + number]))
    if own.facts[LAYER_COUNT] != 0:
        for score in range(heads // EXPERTS):
            scores[score] += score_of_network(own, room, score)


@compiled
def _learn_numbers(own: EmbeddingArrays, room: RowRoom) -> None:
    """Make the steps of the numeric columns of a row."""
    factors, heads, numbers, sums = own.facts[FACTOR_COUNT], own.facts[HEAD_COUNT], own.numbers, room.sums
    width, units, scores = factors + 1, own.units[0], heads // EXPERTS
    for each in range(room.counts[1]):
        column, value = room.columns[each], room.standardized[each]
        for head in range(heads):
            gradient = np.float32(room.scores[heads + head]) * value
            rate = RATE_OF_VECTORS if head < scores else RATE_OF_VECTORS_2
            at = (2 * column * heads + head) * width
            if _has_products(own, head):
                for factor in range(factors):
                    others = sums[head * factors + factor] - value * numbers[at + 1 + factor]
                    step_number(numbers, at + 1 + factor, at + heads * width + 1 + factor, gradient * others, rate)
            step_number(numbers, at, at + heads * width, gradient, RATE_OF_WEIGHTS)
        if own.facts[LAYER_COUNT] != 0:
            weights, squares = own.weights_of_numbers, own.squares_of_numbers
            for score in range(scores):
                first = score * own.facts[UNIT_COUNT]
                row = column * scores + score
                step_units(weights, squares, row * units, value, room.slopes_of_outputs, first, units)


@compiled
def _slopes_of_field(own: EmbeddingArrays, room: RowRoom, each: int) -> None:
    """Fill in the slopes by the vectors of a field, and make the steps of the first layer's weights of its factors."""
    factors, heads, sums, vectors = own.facts[FACTOR_COUNT], own.facts[HEAD_COUNT], room.sums, room.vectors
    first, field, units = each * heads * factors, room.fields[each], own.units[0]
    for head in range(heads):
        slope = np.float32(room.scores[heads + head]) if _has_products(own, head) else np.float32(0.0)
        for number in range(head * factors, (head + 1) * factors):
            room.slopes[number] = slope * (sums[number] - vectors[first + number])
    if own.facts[LAYER_COUNT] == 0:
        return
    weights, squares, slopes = own.weights_of_fields, own.squares_of_fields, room.slopes_of_outputs
    scores = heads // EXPERTS
    for score in range(scores):
        of_units = score * own.facts[UNIT_COUNT]
        for number in range(score * factors, (score + 1) * factors):
            row = (field * scores * factors + number) * units
            room.slopes[number] += product_with_units(weights, row, slopes, of_units, units)
            step_units(weights, squares, row, vectors[first + number], slopes, of_units, units)


@compiled
def _step_vectors(numbers: Float32s, at: int, slopes: Float32s, share: np.float32, factors: int) -> None:
    """Make the steps of the vectors of a feature."""
    count = EXPERTS * factors
    for number in range(factors):
        gradient = share * slopes[number]
        total = numbers[at + count + number] + gradient * gradient
        numbers[at + count + number] = total
        numbers[at + number] -= np.divide(RATE_OF_VECTORS * gradient, np.sqrt(total))
    for number in range(factors, count):
        gradient = share * slopes[number]
        total = numbers[at + count + number] + gradient * gradient
        numbers[at + count + number] = total
        numbers[at + number] -= np.divide(RATE_OF_VECTORS_2 * gradient, np.sqrt(total))


@compiled
def begin_vectors(rows: Float32s, at: int, key: int, count: int) -> None:
    """Begin the vectors of a feature with numbers of its own, nearly normal, drawn from its key, which has a hash.

    The common vectors of its field are no good start: all features would move for long in one direction.
    """
    drawn = (key ^ (key >> 31)) % (_LEHMER - 1) + 1
    for number in range(count):
        total = -2.0
        for _ in range(4):
            drawn = drawn * 48_271 % _LEHMER
            total += drawn / _LEHMER
        rows[at + number] = np.float32(total * _SPREAD)


@compiled
def _learn(
    table: FeatureArrays, own: EmbeddingArrays, room: RowRoom, indices: Indices, now_ms: int, counts: bool
) -> None:
    """Make the steps of all that the scores of a row are made of; ``counts``: its features have occurred once more."""
    heads = own.facts[HEAD_COUNT]
    scores = heads // EXPERTS
    factors = scores * own.facts[FACTOR_COUNT]  # Of an expert.
    size = 2 * EXPERTS * factors
    for head in range(heads):
        slope = room.scores[heads + head]
        own.intercepts[heads + head] += slope * slope
        own.intercepts[head] -= np.float64(RATE_OF_WEIGHTS) * slope / np.sqrt(own.intercepts[heads + head])
    if own.facts[LAYER_COUNT] != 0:
        for score in range(scores):
            learn_layers(own, room, score, np.float32(room.scores[heads + score]))
    _learn_numbers(own, room)
    for each in range(room.counts[0]):
        _slopes_of_field(own, room, each)
        start, stop = room.starts[each], room.stops[each]
        share = np.float32(1.0 / (stop - start))
        for place in range(start, stop):
            # The step is made at once: a later feature of the row may take the entry, or its row.
            if counts:
                entry = touch_feature(table, indices[place], now_ms, SQUARES_AT_FIRST)
                if table.facts[NEW_ROW] != 0:
                    begin_vectors(table.rows, table.facts[NEW_ROW] * size, indices[place], EXPERTS * factors)
                    _begin_from_early(table, entry, table.facts[NEW_ROW] * size, factors)
            else:
                entry = find_feature(table, indices[place], now_ms)
                if entry != 0:
                    renew_feature(table, entry)
            if entry != 0:
                at = entry * 2 * heads
                for head in range(heads):
                    gradient = share * np.float32(room.scores[heads + head])
                    step_number(table.weights, at + head, at + heads + head, gradient, RATE_OF_WEIGHTS)
            row = table.row_of[entry]
            if row != 0:
                _step_vectors(table.rows, row * size, room.slopes, share, factors)
            elif entry != 0:
                _add_early_gradients(table, entry, room.slopes, share, factors)


@compiled
def _prediction(task: int, score: float, totals: Floats) -> float:
    """Return the probability, or the number, of a score; of classes the score itself."""
    if task == BINARY:
        return probability_of(score)
    if task == CLASSES:
        return score
    if totals[0] <= 0.0:
        return 0.0
    number = totals[2] + np.sqrt(totals[3] / totals[0]) * score
    return within_range(number, totals)


@compiled
def _fill_in_slopes(
    own: EmbeddingArrays, room: RowRoom, target: float, row_weight: float, action: int, asked: Floats, at: int
) -> None:
    """Fill in the slopes of the loss by all scores; of numbers, the target is added to the statistics of targets.

    ``asked`` has the predictions of the question from ``at`` on, with whose slopes it was assumed to be False.
    """
    task, heads, scores, totals, spread = own.facts[LOSS_KIND], own.facts[HEAD_COUNT], room.scores, own.totals, 1.0
    if task == SQUARED:
        totals[0] += row_weight
        target, spread = observe_number(totals, target, row_weight)
    for head in range(heads):
        score, slope = scores[head], 0.0
        if task == CLASSES:
            slope = score
        elif task == SQUARED:
            if spread > 0.0:
                slope = min(max(score - (target - totals[2]) / spread, -_ERROR_MAX), _ERROR_MAX)
        else:
            if not action & WITHDRAW:
                slope = probability_of(score) - target
            if action & (CORRECT | WITHDRAW):
                slope -= asked[at + head]
        scores[heads + head] = slope
    if task == CLASSES:
        classes = heads // EXPERTS
        for first in range(heads, 2 * heads, classes):
            softmax(scores, first, first + classes, 1)
            scores[first + int(target)] -= 1.0
    for head in range(heads, 2 * heads):
        scores[head] = min(max(scores[head] * row_weight, -_SLOPE_MAX), _SLOPE_MAX)


@compiled
def step_embeddings(
    features: FeatureArrays,
    arrays: EmbeddingArrays,
    work: RowRoom,
    indptr: Indices,
    indices: Indices,
    values: Floats,
    rows: Indices,
    actions: npt.NDArray[np.uint8],
    targets: Floats,
    row_weights: Floats,
    questions: Indices,
    asked: Floats,
    predictions: Floats,
) -> None:
    """Predict and learn from the rows ``rows``, one after the other, as ``actions`` says for each of them.

    The arguments are those of ``row_steps.step_rows``; ``asked`` and ``predictions`` have a number for each head.
    """
    table, own, room = pointer_to(features), pointer_to(arrays), pointer_to(work)
    index_of, value_of, kept = pointer_to(indices), pointer_to(values), pointer_to(asked.reshape(-1))
    predicted = pointer_to(predictions.reshape(-1))
    task, heads, expires = own.facts[LOSS_KIND], own.facts[HEAD_COUNT], own.facts[EXPIRES] != 0
    for position in range(len(rows)):
        first, stop, action = indptr[rows[position]], indptr[rows[position] + 1], int(actions[position])
        question, now_ms = questions[position], NO_TIME
        if not action & (PREDICT | LEARN):
            continue
        if expires:
            now_ms = _time_of(index_of, value_of, first, stop)
        _score(table, own, room, index_of, value_of, first, stop, now_ms)
        if action & PREDICT:
            begin = position * heads
            for head in range(heads):
                predicted[begin + head] = _prediction(task, room.scores[head], own.totals)
            if task == CLASSES:
                for expert in range(EXPERTS):
                    at = begin + expert * (heads // EXPERTS)
                    softmax(predicted, at, at + heads // EXPERTS, 1)
            if question >= 0:
                for head in range(heads):
                    kept[question * heads + head] = predicted[begin + head]
        if not action & LEARN:
            continue
        counts = not action & (CORRECT | WITHDRAW)
        if expires:
            if now_ms == NO_TIME:
                now_ms = own.facts[TIME_MS]
            elif counts:
                own.facts[TIME_MS] = now_ms
        if now_ms == NO_TIME:
            now_ms = UNKNOWN_TIME  # A run whose embeddings expire may follow.
        target, row_weight = targets[position], row_weights[position]
        _fill_in_slopes(own, room, target, row_weight, action, kept, max(question, 0) * heads)
        _learn(table, own, room, index_of, now_ms, counts)
        if counts:
            for at in range(first, stop):
                column = index_of[at] - BEHIND_KEYS - 1
                if 0 <= column < own.facts[COLUMN_COUNT] and abs(value_of[at]) <= HUGE:
                    observe_value(own.statistics, column * STATISTICS, value_of[at], row_weight, True)


@compiled
def fold_keys(
    indptr: Indices,
    indices: Indices,
    values: Floats,
    places: int,
    indptr_folded: Indices,
    indices_folded: Indices,
    values_folded: Floats,
) -> int:
    """Fill in rows of keys as rows of hashed places, without times; return the number of their values.

    The places of a row have the order of ``ModelRows``: by place, then by value.
    """
    count = 0
    for row in range(len(indptr) - 1):
        begin = count
        for at in range(indptr[row], indptr[row + 1]):
            index, value = indices[at], values[at]
            if index == BEHIND_KEYS:
                continue
            if index > BEHIND_KEYS:
                indices_folded[count], values_folded[count] = index - BEHIND_KEYS + places, value
                count += 1
                begin = count
                continue
            index &= places - 1
            place = count
            while place > begin and (
                indices_folded[place - 1] > index
                or (indices_folded[place - 1] == index and values_folded[place - 1] > value)
            ):
                indices_folded[place], values_folded[place] = indices_folded[place - 1], values_folded[place - 1]
                place -= 1
            indices_folded[place], values_folded[place] = index, value
            count += 1
        indptr_folded[row + 1] = count
    return count
