"""Measure drift detectors on generated streams: drifts that are found, delays, false alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Figure
from benchmarks.session import Session
from streamiter.learn import ADWIN, DriftWatch, PageHinkley
from streamiter.learn.quality.drift import DriftDetector
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel

__all__ = ["drift"]

Floats = npt.NDArray[np.float64]
Generator = np.random.Generator

# A drift that is found later counts as missed, and as a false alarm.
_DELAY_MAX: Final = 1_500


class LabelledStream(NamedTuple):
    """Rows, and the numbers of the rows at which the rule of the targets changes."""

    features: Floats
    targets: Floats
    drifts: list[int]
    task: Literal["classification", "regression"] = "classification"


def drift(session: Session) -> Iterator[Figure]:
    """ADWIN and PageHinkley watch the progressive loss of `AdaptiveLinearModel` on 20 streams of each kind."""
    seeds = range(session.size(20, 2))
    detectors: Mapping[str, DriftDetector] = {
        "ADWIN()": ADWIN(),
        "ADWIN(confidence=0.05)": ADWIN(confidence=0.05),
        "PageHinkley()": PageHinkley(),
    }
    for name, detector in detectors.items():
        for kind, make in _STREAMS.items():
            delays: list[float] = []
            drifts = alarms = 0
            for seed in seeds:
                stream = make(np.random.default_rng(seed))
                found = _found(stream, detector)
                first = [[row - at for row in found if at <= row < at + _DELAY_MAX][:1] for at in stream.drifts]
                in_time = [row for row in found if any(0 <= row - at < _DELAY_MAX for at in stream.drifts)]
                drifts, alarms = drifts + len(stream.drifts), alarms + len(found) - len(in_time)
                delays += [delay for hit in first for delay in hit]
            if drifts:
                yield Figure(f"{name}, {kind}: found, of {drifts}", "drifts", (len(delays),))
            if delays:
                yield Figure(f"{name}, {kind}: delay", "rows", tuple(delays))
            yield Figure(f"{name}, {kind}: false alarms", "alarms", (alarms,))


def _found(stream: LabelledStream, detector: DriftDetector) -> list[int]:
    predictions = AdaptiveLinearModel(task=stream.task).learn_each(stream.features, stream.targets)
    found = DriftWatch(detector).add(
        {
            "task": stream.task,
            "predictions": predictions,
            "targets": stream.targets,
            "weights": np.ones(len(predictions)),
        }
    )
    return [each["row"] - 1 for each in found]


def _sea(generator: Generator, bounds: tuple[float, ...], rows: int) -> LabelledStream:
    """SEA (Street and Kim 2001): the bound of a sum of two columns changes; a tenth of the targets is wrong."""
    x = generator.uniform(0.0, 10.0, (rows * len(bounds), 3))
    targets = (x[:, 0] + x[:, 1] <= np.repeat(bounds, rows)) ^ (generator.random(len(x)) < 0.1)
    return LabelledStream(x, targets * 1.0, [rows * n for n in range(1, len(bounds))])


def _stagger(generator: Generator, concepts: tuple[int, ...], rows: int, noise: float) -> LabelledStream:
    """STAGGER (Schlimmer and Granger 1986): three texts as indicators, and three rules."""
    size, color, shape = (generator.integers(0, 3, rows * len(concepts)) for _ in range(3))
    rules = np.stack([(size == 0) & (color == 0), (color == 1) | (shape == 1), size > 0])
    targets = rules[np.repeat(concepts, rows), np.arange(len(size))] ^ (generator.random(len(size)) < noise)
    x = np.column_stack([field == value for field in (size, color, shape) for value in range(3)])
    return LabelledStream(x * 1.0, targets * 1.0, [rows * n for n in range(1, len(concepts))])


def _linear(generator: Generator, parts: int, rows: int, scale: float | None) -> LabelledStream:
    """Five columns and a new linear rule for each part: classes, or numbers if ``scale`` is None."""
    x = generator.normal(size=(parts * rows, 5))
    scores = np.concatenate([x[n * rows : (n + 1) * rows] @ generator.normal(size=5) for n in range(parts)])
    drifts = [rows * n for n in range(1, parts)]
    if scale is None:
        return LabelledStream(x, scores + generator.normal(size=len(x)), drifts, "regression")
    return LabelledStream(x, (scale * scores + generator.logistic(size=len(x)) > 0.0) * 1.0, drifts)


def _noise(generator: Generator, deviations: tuple[float, ...], rows: int) -> LabelledStream:
    """Four columns, one linear rule, and noise whose deviation changes."""
    x = generator.normal(size=(rows * len(deviations), 4))
    noise = np.repeat(deviations, rows) * generator.normal(size=len(x))
    return LabelledStream(x, x @ [1.0, 1.0, -1.0, 0.5] + noise, [rows], "regression")


def _heavy(generator: Generator) -> LabelledStream:
    x = generator.normal(size=(20_000, 5))
    return LabelledStream(x, x.sum(axis=1) + generator.standard_t(3, size=len(x)), [], "regression")


def _rare(generator: Generator) -> LabelledStream:
    x = generator.normal(size=(20_000, 5))
    return LabelledStream(x, (generator.random(len(x)) < 1 / (1 + np.exp(6 - 2 * x[:, 0]))) * 1.0, [])


_STREAMS: Final[Mapping[str, Callable[[Generator], LabelledStream]]] = MappingProxyType(
    {
        "STAGGER": lambda generator: _stagger(generator, (0, 1, 2, 0), 3_000, 0.0),
        "SEA": lambda generator: _sea(generator, (8.0, 9.0, 7.0, 9.5), 5_000),
        "new rules of classes": lambda generator: _linear(generator, 3, 5_000, 1.0),
        "new rules of clear classes": lambda generator: _linear(generator, 3, 5_000, 2.0),
        "new rules of numbers": lambda generator: _linear(generator, 3, 5_000, None),
        "more noise": lambda generator: _noise(generator, (1.0, 2.0), 10_000),
        "STAGGER without drift": lambda generator: _stagger(generator, (1,), 20_000, 0.1),
        "SEA without drift": lambda generator: _sea(generator, (8.0,), 20_000),
        "classes without drift": lambda generator: _linear(generator, 1, 20_000, 1.0),
        "numbers without drift": lambda generator: _linear(generator, 1, 20_000, None),
        "heavy tails without drift": _heavy,
        "rare targets without drift": _rare,
    }
)
