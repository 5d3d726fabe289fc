"""Do the work of the parameter server's benchmarks in numpy, on bare arrays."""

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
"""A function that does the work within a stopwatch and returns the resulting numbers."""


def adds_row(start: Numbers, count: int, values: Numbers) -> Work:
    """Return the work ``row += values``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for _ in range(count):
                row += values
        return row

    return work


def gets_row(start: Numbers, count: int) -> Work:
    """Return the work ``row.copy()``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for _ in range(count):
                values = row.copy()
        return values

    return work


def adds_keys(start: Numbers, count: int, keys: list[Keys], values: Numbers) -> Work:
    """Return the work ``row[keys] += values``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for number in range(count):
                row[keys[number % len(keys)]] += values
        return row

    return work


def gets_keys(start: Numbers, count: int, keys: list[Keys]) -> Work:
    """Return the work ``row[keys]``."""

    def work(watch: Stopwatch) -> Numbers:
        row = start.copy()
        with watch:
            for number in range(count):
                values: Numbers = row[keys[number % len(keys)]]
        return values

    return work


def _in_two(start: Numbers) -> list[tuple[Numbers, int]]:
    """Return the two halves of an array, each with the number of its first column."""
    half = len(start) // 2
    return [(start[:half].copy(), 0), (start[half:].copy(), half)]


def _positions_in_two(keys: Keys, half: int) -> list[Keys]:
    """Return the positions of the keys of the first array, and of the keys of the second one."""
    below = keys < half
    return [below.nonzero()[0], (~below).nonzero()[0]]


def adds_keys_to_two(start: Numbers, count: int, keys: list[Keys], values: Numbers) -> Work:
    """Return the work ``row[keys] += values`` for a row that is stored in two arrays."""

    def work(watch: Stopwatch) -> Numbers:
        arrays = _in_two(start)
        with watch:
            for number in range(count):
                some = keys[number % len(keys)]
                positions = _positions_in_two(some, arrays[1][1])
                for (array, first), at in zip(arrays, positions, strict=True):
                    array[some[at] - first] += values[at]
        return np.concatenate([array for array, _ in arrays])

    return work


def gets_keys_of_two(start: Numbers, count: int, keys: list[Keys]) -> Work:
    """Return the work ``row[keys]`` for a row that is stored in two arrays."""

    def work(watch: Stopwatch) -> Numbers:
        arrays = _in_two(start)
        with watch:
            for number in range(count):
                some = keys[number % len(keys)]
                positions = _positions_in_two(some, arrays[1][1])
                found = np.empty(len(some), start.dtype)
                for (array, first), at in zip(arrays, positions, strict=True):
                    found[at] = array[some[at] - first]
        return found

    return work


def adam(weights: Numbers, gradient: Numbers, count: int) -> Work:
    """Return the work of Adam as in its paper, on whole arrays; an update adds one gradient and makes the step."""
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
