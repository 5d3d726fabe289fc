"""Streams of questions whose answers come later: rare and frequent, short and long delays, drift, flights.

:func:`order` tells what happens, event by event, under each schedule of ``DelayedLabels``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.learning_streams import LearningStream, flights_as_events
from streamiter import Columns

__all__ = ["LATE_STREAMS", "SCHEDULES", "Happened", "LateStream", "Schedule", "order"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

Schedule = Literal["end", "weighted", "at once"]
SCHEDULES: Final[tuple[Schedule, ...]] = ("end", "weighted", "at once")
"""The first one is the default, where a question without an answer has a label."""

_SEED: Final = 7


@dataclass(frozen=True)
class LateStream:
    """Questions, and answers that come later."""

    rows: LearningStream
    """The questions, with the labels that they have in the end: False for a question without an answer in time."""
    asked_ms: Array
    """When each question is asked, in ascending order."""
    answered_ms: Array
    """When each question is answered; -1 for never."""
    within_ms: int
    about: str
    chance_max: float = 1.0
    """The largest chance of True of a question, where it is known."""

    @property
    def name(self) -> str:
        return self.rows.name

    def __len__(self) -> int:
        return len(self.rows)

    def events(self) -> tuple[Array, Array]:
        """Return 2n for question n and 2n + 1 for its answer in the order of time, and the times."""
        answered = np.flatnonzero(self.answered_ms >= 0)
        events = np.concatenate([2 * np.arange(len(self)), 2 * answered + 1])
        times = np.concatenate([self.asked_ms, self.answered_ms[answered]])
        in_order = np.lexsort([events % 2, times])
        return events[in_order], times[in_order]

    def is_after_wait(self) -> npt.NDArray[np.bool_]:
        """Return whether each question was asked when the first wait was over."""
        after: npt.NDArray[np.bool_] = self.asked_ms >= self.asked_ms[0] + self.within_ms
        return after


class Happened(NamedTuple):
    """One step of the order: what happened to a row, and the number of the event before or with which it did."""

    kind: Literal["predict", "assume", "learn", "confirm", "late"]
    """``assume``: False is learned at the question. ``learn``: the label is. ``confirm``: the assumed False was right.
    ``late``: an answer without a question that waits."""
    row: int
    event: int


def order(stream: LateStream, schedule: Schedule) -> Iterator[Happened]:
    """Yield what happens, event by event; before an event all waits end that are over by the time of the last one."""
    events, times = (array.tolist() for array in stream.events())
    asked, within = stream.asked_ms.tolist(), stream.within_ms
    labels = stream.rows.labels.tolist()
    waiting: set[int] = set()
    answered: set[int] = set()
    due: deque[int] = deque()  # Questions come by time, and all wait equally long.

    def over(row: int, event: int) -> Iterator[Happened]:
        if row in waiting:
            yield Happened("confirm" if schedule == "weighted" else "learn", row, event)

    reached = -1
    for number, (event, time) in enumerate(zip(events, times, strict=True)):
        while due and asked[due[0]] + within <= reached:
            row = due.popleft()
            yield from over(row, number)
            waiting.discard(row)
        row, is_answer = divmod(event, 2)
        if not is_answer:
            yield Happened("predict", row, number)
            if schedule == "weighted":
                yield Happened("assume", row, number)
            waiting.add(row)
            due.append(row)
        elif row not in waiting or row in answered or time >= asked[row] + within:
            yield Happened("late", row, number)
        elif schedule == "end":
            answered.add(row)
        else:
            waiting.discard(row)
            yield Happened("confirm" if schedule == "weighted" and not labels[row] else "learn", row, number)
        reached = time
    for row in due:
        yield from over(row, len(events))


# ---- the streams

_QUESTIONS: Final = 100_000
# The share of True in a tenth has then a standard error of 3 %.
_RARE_QUESTIONS: Final = 200_000
_SHORT: Final = (1.0, 40.0), 60
_LONG: Final = (500.0, 3_000.0), 4_000


def _in_the_end(
    name: str,
    about: str,
    features: Columns,
    labels: Array,
    delay_s: tuple[float, float],
    within_s: int,
    is_answered: Array | None = None,
    asked: Array | None = None,
    chance_max: float = 1.0,
) -> LateStream:
    """Return a stream, by default of a question each second; ``is_answered``: by default those with the label True."""
    count = len(labels)
    asked = np.arange(count) * 1_000 if asked is None else asked
    delays = np.random.default_rng(_SEED + 1).uniform(*delay_s, size=count)
    answered = np.where(labels if is_answered is None else is_answered, asked + (delays * 1_000).astype(np.int64), -1)
    rows = LearningStream(name, "binary", features, labels)
    return LateStream(rows, asked, answered, within_s * 1_000, about, chance_max)


def _kinds(
    name: str,
    about: str,
    count: int,
    shares: Callable[[Floats, Array], Floats],
    delays: tuple[Any, int],
    pauses: Callable[[Floats], Floats] = np.ones_like,
) -> Callable[[int], LateStream]:
    """Return a stream of two kinds; ``shares(place, is_first)`` has the probability of True, place is from 0 to 1.

    ``pauses(place)`` is in proportion to the time between two questions, which is a second in the mean.
    """

    def make(rows: int) -> LateStream:
        drawn = np.random.default_rng(_SEED)
        is_first = drawn.random(min(rows, count)) < 0.5
        place = np.arange(len(is_first)) / len(is_first)
        chances, between = shares(place, is_first), pauses(place)
        labels, features = drawn.random(len(is_first)) < chances, Columns({"kind": np.where(is_first, "a", "b")})
        asked = (np.cumsum(between) * (1_000 / between.mean())).astype(np.int64)
        return _in_the_end(name, about, features, labels, *delays, asked=asked, chance_max=float(chances.max()))

    return make


def _threshold(
    name: str, about: str, above: int, count: int, delay_s: tuple[float, float], within_s: int, every_ms: int
) -> Callable[[int], LateStream]:
    """Return a stream where one of two numbers decides, by a threshold; three of five questions get an answer."""

    def make(rows: int) -> LateStream:
        drawn = np.random.default_rng(_SEED)
        v, w = drawn.integers(0, 1_000, (2, min(rows, count)))
        answered = drawn.random(len(v)) < 0.6
        labels = answered & (v > above)
        return _in_the_end(
            name, about, Columns({"v": v, "w": w}), labels, delay_s, within_s, answered, np.arange(len(v)) * every_ms
        )

    return make


_DAY_MS: Final = 86_400_000


def _flights(rows: int) -> LateStream:
    """Return the flights: is it more than 15 minutes late at its arrival, within a day?"""
    stream, asked, answered = flights_as_events()
    stream, asked, answered = stream.head(rows), asked[:rows], answered[:rows]
    in_time = (answered >= 0) & (answered < asked + _DAY_MS)
    about = "all flights from New York in 2013, seven fields: more than 15 minutes late at the arrival, within 24 hours"
    kept = LearningStream("flights", "binary", stream.features, stream.labels & in_time)
    return LateStream(kept, asked, answered, _DAY_MS, about)


LATE_STREAMS: Final[Mapping[str, Callable[[int], LateStream]]] = MappingProxyType(
    {
        "frequent, short": _kinds(
            "frequent, short",
            "shares .5 and .2 of two kinds, answers after 1–40 s, wait 60 s",
            _QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.5, 0.2),
            _SHORT,
        ),
        "frequent, long": _kinds(
            "frequent, long",
            "the same shares, answers after 500–3,000 s, wait 4,000 s",
            _QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.5, 0.2),
            _LONG,
        ),
        "rare, short": _kinds(
            "rare, short",
            "shares .1 and .02, answers after 1–40 s, wait 60 s",
            _RARE_QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.1, 0.02),
            _SHORT,
        ),
        "rare, long": _kinds(
            "rare, long",
            "shares .1 and .02, answers after 500–3,000 s, wait 4,000 s",
            _RARE_QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.1, 0.02),
            _LONG,
        ),
        "share drifts": _kinds(
            "share drifts",
            "the shares fall and rise between a half and one and a half of .1 and .02, in two waves; delays as before",
            _RARE_QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.1, 0.02) * (1.0 + 0.5 * np.sin(4.0 * np.pi * place)),
            _LONG,
        ),
        "features drift": _kinds(
            "features drift",
            "the two kinds change places at 35 % and at 70 % of the stream; delays as before",
            _RARE_QUESTIONS,
            lambda place, is_first: np.where(is_first == ((place < 0.35) | (place >= 0.7)), 0.1, 0.02),
            _LONG,
        ),
        "traffic": _kinds(
            "traffic",
            "as *rare, long*, but the number of questions a second rises and falls tenfold, in three waves",
            _RARE_QUESTIONS,
            lambda place, is_first: np.where(is_first, 0.1, 0.02),
            _LONG,
            lambda place: np.exp(0.5 * np.log(10.0) * np.sin(6.0 * np.pi * place)),
        ),
        "threshold, short": _threshold(
            "threshold, short",
            "two numbers, one of which decides by a threshold, so that a linear model does not fit: True above the "
            "middle; 60 % are answered, with True or False, within 6 s; wait 20 s, 50 questions a second",
            500,
            _QUESTIONS,
            (0.0, 6.0),
            20,
            20,
        ),
        "threshold, long": _threshold(
            "threshold, long",
            "the same, True in the upper tenth, answers after 500–3,000 s, wait 4,000 s",
            900,
            _RARE_QUESTIONS,
            *_LONG,
            1_000,
        ),
        "flights": _flights,
    }
)
"""Each stream by its name, of at most so many questions; raises ``MissingStream`` where its data is missing."""
