"""Measure several ways to do the same work in turn, so that a busy machine slows all of them equally.

>>> series = alternate({"a": lambda: Trial({"records/s": 50.0}, result=7),
...                     "b": lambda: Trial({"records/s": 100.0}, result=7)}, repeat=3)
>>> figure = series.figure("a", "records/s", compared_with="b", target=Target("ratio", at_least=0.9))
>>> figure.median, figure.ratio, figure.verdict
(50.0, 0.5, 'missed')
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Literal, Self

from streamiter import Flow
from streamiter.engine.graph.statistics import JobStatistics

__all__ = [
    "Contender",
    "DifferentResultsError",
    "Figure",
    "Series",
    "Stopwatch",
    "Target",
    "Trial",
    "alternate",
    "run_to_end",
]

_CPU: Final = "CPU-s"


class DifferentResultsError(Exception):
    """Two contenders that do the same work had different results, so their speeds cannot be compared."""


def run_to_end(flow: Flow) -> JobStatistics:
    """Run a flow, and end the program if a signal has stopped the flow before its end.

    A stopped flow returns like one that has finished. A trial would have too high a rate, or seem to have lost results.
    """
    statistics = flow.run()
    if statistics.state != "finished":
        sys.exit(f"flow {flow.name!r}: expected it to run to its end, given a signal that stopped it: no figures")
    return statistics


@dataclass(frozen=True)
class Trial:
    """The outcome of one run of one contender."""

    figures: Mapping[str, float]
    """The figures by unit: ``{"records/s": 5.2e6}``."""
    result: Any = None
    """The result of the work, which must be the same for all contenders."""


Contender = Callable[[], Trial]
"""A function that does the work once. Its preparations outside of the stopwatch do not count."""


class Stopwatch:
    """Measures a ``with`` block, and then has its ``seconds`` and this process's ``cpu_seconds``."""

    seconds: float
    cpu_seconds: float

    def rates(self, count: int, noun: str) -> dict[str, float]:
        """Return the figures of a trial: the rate of ``count`` items by the clock, and by this process's CPU time.

        The rate by CPU time is the better one where other processes use part of the machine.
        """
        return {f"{noun}/s": count / self.seconds, f"{noun}/{_CPU}": count / self.cpu_seconds}

    def __enter__(self) -> Self:
        self._began_cpu_s = time.process_time()
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began_s
        self.cpu_seconds = time.process_time() - self._began_cpu_s


@dataclass(frozen=True)
class Target:
    """The bound to reach, for the median of a figure or for the median of its ratios."""

    of: Literal["figure", "ratio"]
    at_least: float | None = None
    below: float | None = None

    def is_met(self, figure: Figure) -> bool:
        """Return whether a figure is within the bound."""
        value = figure.median if self.of == "figure" else figure.ratio
        assert value is not None
        if self.at_least is not None:
            return value >= self.at_least
        assert self.below is not None
        return value < self.below

    def __str__(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("<", self.below)
        return f"{sign} {bound:g} ×" if self.of == "ratio" else f"{sign} {bound:,g}"


@dataclass(frozen=True)
class Figure:
    """One line of the report: a contender's figures in one unit, compared with those of another contender."""

    name: str
    unit: str
    values: tuple[float, ...]
    compared_with: str = ""
    ratios: tuple[float, ...] = field(default=())
    """This contender's figure divided by the other contender's figure, round by round."""
    target: Target | None = None
    note: str = ""
    cpu: Figure | None = None
    """The same figure by CPU time instead of the clock, if it was measured."""

    @property
    def median(self) -> float:
        """Return the median of the values."""
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        """Return the median of the ratios, if this figure has any."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> str:
        """Return "met" or "missed", or an empty text without a target."""
        if self.target is None:
            return ""
        return "met" if self.target.is_met(self) else "missed"


@dataclass(frozen=True)
class Series:
    """The trials of all contenders, round by round."""

    trials: Mapping[str, list[Trial]]

    def figure(
        self, name: str, unit: str, *, compared_with: str = "", target: Target | None = None, note: str = ""
    ) -> Figure:
        """Return the line of one contender, compared with the contender named ``compared_with``."""
        cpu_unit = unit.removesuffix("s") + _CPU
        cpu = self._figure(name, cpu_unit, compared_with) if cpu_unit in self.trials[name][0].figures else None
        return replace(self._figure(name, unit, compared_with), target=target, note=note, cpu=cpu)

    def _figure(self, name: str, unit: str, compared_with: str) -> Figure:
        values = self._values(name, unit)
        others = self._values(compared_with, unit) if compared_with else ()
        ratios = tuple(value / other for value, other in zip(values, others, strict=False))
        return Figure(name, unit, values, compared_with, ratios)

    def _values(self, name: str, unit: str) -> tuple[float, ...]:
        return tuple(trial.figures[unit] for trial in self.trials[name])


def alternate(
    contenders: Mapping[str, Contender],
    *,
    repeat: int,
    agree: Callable[[Any, Any], bool] = lambda first, other: bool(first == other),
) -> Series:
    """Run all contenders ``repeat`` times in turn; each round begins with another contender.

    Raise DifferentResultsError unless all results agree with the first contender's result.
    """
    names = list(contenders)
    trials: dict[str, list[Trial]] = {name: [] for name in names}
    for round_number in range(repeat):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            trials[name].append(contenders[name]())
            _say(f"  round {round_number + 1}/{repeat}  {name}: {_shown(trials[name][-1])}")
        _check(names, trials, agree)
    return Series(trials)


def _check(names: list[str], trials: Mapping[str, list[Trial]], agree: Callable[[Any, Any], bool]) -> None:
    reference = trials[names[0]][-1].result
    for name in names[1:]:
        result = trials[name][-1].result
        if not agree(reference, result):
            raise DifferentResultsError(
                f"expected equal results, given {reference!r} by {names[0]!r} and {result!r} by {name!r}"
            )


def _shown(trial: Trial) -> str:
    return ", ".join(f"{value:,.5g} {unit}" for unit, value in trial.figures.items())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
