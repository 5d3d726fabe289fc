"""What a parameter server does in benchmarks, in numpy on bare arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Stopwatch

__all__ = [
    "Keys",
    "Numbers",
    "Work",
    "adam",
    "adds_keys",
    "adds_keys_to_two",
    "adds_row",
    "gets_keys",
    "gets_keys_of_two",
    "gets_row",
]

Numbers = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]
Work = Callable[[Stopwatch], Numbers]
"""Does the work, timed, and gives what it came to."""


def adds_row(start: Numbers, count: int, values: Numbers) -> Work:
    """``row += values``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for _ in range(count):
                row += values
        return row

    return work


def gets_row(start: Numbers, count: int) -> Work:
    """``row.copy()``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for _ in range(count):
                values = row.copy()
        return values

    return work


def adds_keys(start: Numbers, count: int, keys: list[Keys], values: Numbers) -> Work:
    """``row[keys] += values``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for number in range(count):
                row[keys[number % len(keys)]] += values
        return row

    return work


def gets_keys(start: Numbers, count: int, keys: list[Keys]) -> Work:
    """``row[keys]``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for number in range(count):
                values: Numbers = row[keys[number % len(keys)]]
        return values

    return work


def _in_two(start: Numbers) -> list[tuple[Numbers, int]]:
    """Two arrays, each with the column that it begins with."""
    half = len(start) // 2
    return [(start[:half].copy(), 0), (start[half:].copy(), half)]


def _sorted_out(keys: Keys, half: int) -> list[Keys]:
    """The positions of the keys in either of two arrays."""
    below = keys < half
    return [below.nonzero()[0], (~below).nonzero()[0]]


def adds_keys_to_two(start: Numbers, count: int, keys: list[Keys], values: Numbers) -> Work:
    """The same where the row lies in two arrays."""

    def work(watch: Stopwatch) -> Numbers:
        arrays = _in_two(start)
        with watch:
            for number in range(count):
                some = keys[number % len(keys)]
                positions = _sorted_out(some, arrays[1][1])
                for (array, first), at in zip(arrays, positions, strict=True):
                    array[some[at] - first] += values[at]
        return np.concatenate([array for array, _ in arrays])

    return work


def gets_keys_of_two(start: Numbers, count: int, keys: list[Keys]) -> Work:
    """The same where the row lies in two arrays."""

    def work(watch: Stopwatch) -> Numbers:
        arrays = _in_two(start)
        with watch:
            for number in range(count):
                some = keys[number % len(keys)]
                positions = _sorted_out(some, arrays[1][1])
                found = np.empty(len(some), start.dtype)
                for (array, first), at in zip(arrays, positions, strict=True):
                    found[at] = array[some[at] - first]
        return found

    return work


def adam(weights: Numbers, gradient: Numbers, count: int) -> Work:
    """As the paper has it, on whole arrays; an update is one gradient added and the step with it."""
    learning_rate, beta, gamma, epsilon = 0.001, 0.9, 0.99, 1e-8

    def work(watch: Stopwatch) -> Numbers:
        w, g = weights.copy(), np.full_like(weights, 0)
        m, v = np.full_like(weights, 0), np.full_like(weights, 0)
        with watch:
            for step in range(1, count + 1):
                g += gradient
                m *= beta
                m += (1 - beta) * g
                v *= gamma
                v += (1 - gamma) * g * g
                w -= learning_rate * (m / (1 - beta**step)) / (np.sqrt(v / (1 - gamma**step)) + epsilon)
                g.fill(0)
        return w

    return work
