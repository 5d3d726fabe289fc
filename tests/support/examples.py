"""Property tests of pure data check thousands of random examples in every run of the tests.

If one example in a thousand shows a fault, 5,000 examples nearly always find the fault, and 40 examples nearly
never. That many examples must be cheap: tests of pure data (no tasks, files or processes) use
``@random_examples(make)``, where ``make`` builds an example from a ``random.Random``. The cost is a small part of the
cost of a ``hypothesis`` strategy. A test of expensive examples ends after .05 s, but not before 50 examples;
each run has other examples, and ``make soak`` runs all (``STREAMITER_EXAMPLES`` replaces the 5,000).

All other property tests use the few examples of the profile in ``tests/conftest.py``.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from random import Random, SystemRandom
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import hypothesis
import pytest

__all__ = ["EXAMPLES", "random_examples"]

EXAMPLES: Final = 5_000
# After this processor time, a test of expensive examples ends, once it has run so many examples.
_ENOUGH_S: Final = 0.05
_FEWEST: Final = 50
# The time limit for the search for a smaller failing example.
_SHRINKING_S: Final = 5.0
# An example that raises no error where its test expects one fails with ``pytest.fail``, which raises no ``Exception``.
_FAILURES: Final = (Exception, pytest.fail.Exception)
_SEED_VARIABLE: Final = "STREAMITER_EXAMPLES_SEED"
_NUMBER_VARIABLE: Final = "STREAMITER_EXAMPLES"

Given = ParamSpec("Given")
Example = TypeVar("Example")


def random_examples(
    make: Callable[[Random], Example], *, examples: int = EXAMPLES, fewest: int = _FEWEST
) -> Callable[[Callable[Concatenate[Example, Given], object]], Callable[Given, None]]:
    """Call a test with many examples, as its first argument; a failure names its seed and a smaller example.

    A test of expensive examples ends early, but not before the ``fewest`` have run. Each run of the tests uses other
    seeds, unless the environment sets the first seed: with the seed of a failure, the failing example is the first
    example. ``make`` must take all its choices from the given generator, because it makes the smaller example from
    fewer and lower random numbers.
    """

    def decorate(test: Callable[Concatenate[Example, Given], object]) -> Callable[Given, None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
            first = int(os.environ.get(_SEED_VARIABLE) or SystemRandom().getrandbits(40))
            told = os.environ.get(_NUMBER_VARIABLE)
            generator, enough_s = Random(), time.thread_time() + _ENOUGH_S
            count = max(examples * int(told or EXAMPLES) // EXAMPLES, min(examples, fewest))
            for number in range(count):
                if number >= fewest and not told and time.thread_time() > enough_s:
                    break
                seed = first + number
                generator.seed(seed)
                try:
                    test(make(generator), *args, **kwargs)
                except _FAILURES as error:
                    if hypothesis.Phase.shrink not in hypothesis.settings().phases:
                        raise
                    _raise_smaller(error, seed, make, lambda example: test(example, *args, **kwargs))

        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return pytest.mark.random_examples(run)

    return decorate


class _Recorded(Random):
    """Generates the numbers in ``given`` and then zeros, or the numbers of its seed; ``taken`` has all numbers."""

    given: Iterator[int]
    only_given: bool

    def __new__(cls, *_: Any) -> _Recorded:
        return super().__new__(cls)

    def __init__(self, seed: int, given: list[int] | None = None) -> None:
        super().__init__(seed)
        self.given, self.only_given = iter(given or ()), given is not None
        self.taken: list[int] = []

    def _next(self, fresh: Callable[[], int]) -> int:
        number = next(self.given, 0) if self.only_given else fresh()
        self.taken.append(number)
        return number

    def getrandbits(self, k: int, /) -> int:
        return self._next(lambda: super(_Recorded, self).getrandbits(k)) & ((1 << k) - 1)

    def random(self) -> float:
        return (self._next(lambda: int(super(_Recorded, self).random() * 2**53)) % 2**53) / 2**53


def _raise_smaller(
    error: BaseException, seed: int, make: Callable[[Random], Example], check: Callable[[Example], object]
) -> None:
    """Raise the error of the smallest example that fails in the same way, or ``error`` itself."""
    note = f"seed {seed}; again: {_SEED_VARIABLE}={seed}"
    numbers = _failing(_Recorded(seed), make, check, type(error))
    if numbers is None:
        error.add_note(f"{note} (without a smaller example: a second run with this seed does not fail)")
        raise error
    numbers = _smallest(numbers, lambda fewer: _failing(_Recorded(0, fewer), make, check, type(error)))
    example = make(_Recorded(0, numbers))
    try:
        check(example)
    except _FAILURES as smaller:
        smaller.add_note(f"{note}\nsmaller example: {make(_Recorded(0, numbers))!r}")
        raise smaller from None
    raise error


def _failing(
    generator: _Recorded,
    make: Callable[[Random], Example],
    check: Callable[[Example], object],
    kind: type[BaseException],
) -> list[int] | None:
    """Return the numbers that the generator gave if their example fails in this way; otherwise None."""
    try:
        check(make(generator))
    except _FAILURES as error:
        return generator.taken if type(error) is kind else None
    return None


def _smallest(numbers: list[int], failing: Callable[[list[int]], list[int] | None]) -> list[int]:
    """Remove and lower numbers while the example still fails, within the time limit."""
    until = time.monotonic() + _SHRINKING_S
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for candidate in _candidates(numbers):
            taken = failing(candidate)
            if taken is not None and (len(taken), taken) < (len(numbers), numbers):
                numbers, progress = taken, True
                break
            if time.monotonic() > until:
                break
    return numbers


def _candidates(numbers: list[int]) -> Iterator[list[int]]:
    """Return lists of random numbers that make simpler examples, the simplest first."""
    size = len(numbers)
    while size:
        for start in range(0, len(numbers), size):
            yield numbers[:start] + numbers[start + size :]
        size //= 2
    for index, number in enumerate(numbers):
        for lower in dict.fromkeys((0, number // 2, number - 1)):
            if 0 <= lower < number:
                yield [*numbers[:index], lower, *numbers[index + 1 :]]
                yield [*numbers[:index], lower, *numbers[index + 2 :]]
