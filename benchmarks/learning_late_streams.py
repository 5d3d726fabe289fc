"""Streams of questions whose answers come later: rare and frequent, short and long delays, drift, flights.

:func:`order` tells what happens, event by event, under the schedules of ``DelayedLabels`` that need no figures.
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

Schedule = Literal["expected", "end", "weighted", "at once"]
SCHEDULES: Final[tuple[Schedule, ...]] = ("expected", "end", "weighted", "at once")
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
    chances: Floats | None = None
    """The chance of True of each question, where it is known."""

    def __len__(self) -> int:
        return len(self.rows)

    def events(self) -> tuple[Array, Array]:
        """Return 2n for question n and 2n + 1 for its answer in the order of time, and the times."""
        answered = np.flatnonzero(self.answered_ms >= 0)
        events = np.concatenate([2 * np.arange(len(self)), 2 * answered + 1])
        times = np.concatenate([self.asked_ms, self.answered_ms[answered]])
        in_order = np.lexsort([events % 2, times])
        return events[in_order], times[in_order]


class Happened(NamedTuple):
    """One step of the order: what happened to a row, and the number of the event before or with which it did."""

    kind: Literal["predict", "assume", "learn", "confirm", "late"]
    """``assume``: False is learned before the label is known. ``learn``: the label is. ``confirm``: the assumed False
    was right. ``late``: an answer without a question that waits."""
    row: int
    event: int


def order(stream: LateStream, schedule: Literal["end", "weighted", "at once"]) -> Iterator[Happened]:
    """Yield what happens, event by event; before an event all waits end that are over by the time of the last one."""
    events, times = (array.tolist() for array in stream.events())
    asked, within = stream.asked_ms.tolist(), stream.within_ms
    labels = stream.rows.labels.tolist()
    waiting: set[int] = set()
    answered: set[int] = set()
    assumed: set[int] = set()
    due: deque[int] = deque()  # Questions come by time, and all wait equally long.

    def known(row: int, event: int, *, label: bool) -> Iterator[Happened]:
        waiting.discard(row)
        yield Happened("confirm" if row in assumed and not label else "learn", row, event)

    def over(reached: float, event: int) -> Iterator[Happened]:
        while due and asked[due[0]] + within <= reached:
            row = due.popleft()
            if row in waiting:
                yield from known(row, event, label=row in answered and labels[row])

    reached = -1
    for number, (event, time) in enumerate(zip(events, times, strict=True)):
        yield from over(reached, number)
        row, is_answer = divmod(event, 2)
        if not is_answer:
            yield Happened("predict", row, number)
            waiting.add(row)
            due.append(row)
            if schedule == "weighted":
                assumed.add(row)
                yield Happened("assume", row, number)
        elif row not in waiting or row in answered or time >= asked[row] + within:
            yield Happened("late", row, number)
        elif schedule == "end":
            answered.add(row)
        else:
            yield from known(row, number, label=labels[row])
        reached = time
    yield from over(float("inf"), len(events))


# ---- the streams

# A tenth of the rare streams has about 1,200 with the label True: a standard error of 3 % of their share.
_QUESTIONS: Final = 200_000


class _Delays(NamedTuple):
    """How long answers take, and the wait; in seconds."""

    draw: Callable[[np.random.Generator, int], Floats]
    within_s: int
    in_time: float = 1.0
    """The share of answers that come before the end of the wait."""
    every_s: int = 0
    """How often the answers so far come, all at once; 0: each by itself."""


_SHORT: Final = _Delays(lambda drawn, count: drawn.uniform(1.0, 40.0, count), 60)
_SHORTER: Final = _Delays(lambda drawn, count: drawn.uniform(0.0, 6.0, count), 20)
_LONG: Final = _Delays(lambda drawn, count: drawn.uniform(500.0, 3_000.0, count), 4_000)
_IN_BURSTS: Final = _LONG._replace(every_s=900)
_TOO_LATE: Final = _Delays(lambda drawn, count: drawn.exponential(1_000.0, count), 2_000, 1.0 - float(np.exp(-2.0)))


def _made(
    features: Columns, labels: Array, answered: Array, chances: Floats, asked_ms: Array, delays: _Delays, about: str
) -> LateStream:
    """Return a stream with drawn delays; a label whose answer comes after the wait becomes False."""
    delays_ms = (delays.draw(np.random.default_rng(_SEED + 1), len(labels)) * 1_000).astype(np.int64)
    labels = labels & (delays_ms < delays.within_s * 1_000)
    answered_ms = asked_ms + delays_ms
    if every_ms := delays.every_s * 1_000:
        answered_ms = -(-answered_ms // every_ms) * every_ms
    answered_ms = np.where(answered, answered_ms, -1)
    rows = LearningStream("", "binary", features, labels)
    return LateStream(rows, asked_ms, answered_ms, delays.within_s * 1_000, about, chances * delays.in_time)


def _kinds(
    about: str,
    delays: _Delays,
    shares: Callable[[Floats, Array], Floats],
    pauses: Callable[[Floats], Floats] = np.ones_like,
) -> Callable[[int], LateStream]:
    """Return a stream of two kinds; ``shares(place, is_first)`` has the chance of True, place is from 0 to 1.

    ``pauses(place)`` is in proportion to the time between two questions, which is a second in the mean.
    """

    def make(rows: int) -> LateStream:
        drawn = np.random.default_rng(_SEED)
        is_first = drawn.random(min(rows, _QUESTIONS)) < 0.5
        place = np.arange(len(is_first)) / len(is_first)
        chances, between = shares(place, is_first), pauses(place)
        labels, features = drawn.random(len(is_first)) < chances, Columns({"kind": np.where(is_first, "a", "b")})
        asked_ms = (np.cumsum(between) * (1_000 / between.mean())).astype(np.int64)
        return _made(features, labels, labels, chances, asked_ms, delays, about)

    return make


def _threshold(about: str, delays: _Delays, above: int, every_ms: int) -> Callable[[int], LateStream]:
    """Return a stream where one of two numbers decides, by a threshold; three of five questions get an answer."""

    def make(rows: int) -> LateStream:
        drawn = np.random.default_rng(_SEED)
        v, w = drawn.integers(0, 1_000, (2, min(rows, _QUESTIONS)))
        answered, asked_ms = drawn.random(len(v)) < 0.6, np.arange(len(v)) * every_ms
        chances = np.where(v > above, 0.6, 0.0)
        return _made(Columns({"v": v, "w": w}), answered & (v > above), answered, chances, asked_ms, delays, about)

    return make


_DAY_MS: Final = 86_400_000


def _flights(rows: int) -> LateStream:
    """Return the flights: is it more than 15 minutes late at its arrival, within a day?"""
    stream, asked, answered = flights_as_events()
    stream, asked, answered = stream.head(rows), asked[:rows], answered[:rows]
    in_time = (answered >= 0) & (answered < asked + _DAY_MS)
    about = "all flights from New York in 2013, seven fields: more than 15 minutes late at the arrival, within 24 hours"
    kept = LearningStream("", "binary", stream.features, stream.labels & in_time)
    return LateStream(kept, asked, answered, _DAY_MS, about)


def _frequent(place: Floats, is_first: Array) -> Floats:
    return np.where(is_first, 0.5, 0.2)


def _rare(place: Floats, is_first: Array) -> Floats:
    return np.where(is_first, 0.1, 0.02)


LATE_STREAMS: Final[Mapping[str, Callable[[int], LateStream]]] = MappingProxyType(
    {
        "frequent, short": _kinds("shares .5 and .2 of two kinds, answers after 1–40 s, wait 60 s", _SHORT, _frequent),
        "frequent, long": _kinds("the same shares, answers after 500–3,000 s, wait 4,000 s", _LONG, _frequent),
        "rare, short": _kinds("shares .1 and .02, answers after 1–40 s, wait 60 s", _SHORT, _rare),
        "rare, long": _kinds("shares .1 and .02, answers after 500–3,000 s, wait 4,000 s", _LONG, _rare),
        "too late": _kinds(
            "as *rare, long*, but answers after 1,000 s in the mean (exponential), wait 2,000 s: 13.5 % come too late, "
            "and their questions are False",
            _TOO_LATE,
            _rare,
        ),
        "share drifts": _kinds(
            "as *rare, long*, but the shares rise and fall between a half and one and a half of .1 and .02, twice",
            _LONG,
            lambda place, is_first: _rare(place, is_first) * (1.0 + 0.5 * np.sin(4.0 * np.pi * place)),
        ),
        "features drift": _kinds(
            "as *rare, long*, but the two kinds change places at 35 % and at 70 % of the stream",
            _LONG,
            lambda place, is_first: _rare(place, is_first == ((place < 0.35) | (place >= 0.7))),
        ),
        "traffic": _kinds(
            "as *rare, long*, but the number of questions a second falls and rises tenfold, three times",
            _LONG,
            _rare,
            lambda place: np.exp(0.5 * np.log(10.0) * np.sin(6.0 * np.pi * place)),
        ),
        "bursts": _kinds("as *rare, long*, but all answers so far come every 900 s, at once", _IN_BURSTS, _rare),
        "threshold, short": _threshold(
            "two numbers, one of which decides by a threshold, so that a linear model does not fit: True above the "
            "middle; 60 % are answered, with True or False, within 6 s; wait 20 s, 50 questions a second",
            _SHORTER,
            above=500,
            every_ms=20,
        ),
        "threshold, long": _threshold(
            "the same, True in the upper tenth, answers after 500–3,000 s, wait 4,000 s, a question a second",
            _LONG,
            above=900,
            every_ms=1_000,
        ),
        "flights": _flights,
    }
)
"""Each stream by its name, of at most this many questions; raises ``MissingStream`` where its data is missing."""
