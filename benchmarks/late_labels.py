"""Learn from questions whose answers come later: ``train_online``, and loops by hand with a heap of questions."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Columns, Flow
from streamiter.learn import DelayedLabels, train_online
from streamiter.learn.late_labels.delayed_labels import Schedule

__all__ = ["late_labels"]

Floats = npt.NDArray[np.float64]

EVENTS: Final = "events/s"
FLOW: Final = "train_online"
DICTS: Final = "train_online, a dict for each record"
SHAPES: Final = "train_online, with shapes"
DEFAULT: Final = 'train_online, schedule="expected"'
NUMPY: Final = "by hand: heapq, gradient descent with numpy"
RIVER: Final = "by hand: heapq, river"

_FIELDS: Final = [f"x{number}" for number in range(10)]
_WITHIN_MS: Final = 1_000_000


class Settled(NamedTuple):
    """A digest of the labels in the order in which they were learned, and the log loss of the predictions before."""

    labels: str
    loss: float

    def agrees_with(self, other: Settled) -> bool:
        """Return whether both learned the same labels in the same order, and about as well."""
        return self.labels == other.labels and self.is_as_good_as(other)

    def is_as_good_as(self, other: Settled) -> bool:
        """Return whether both learned about as well."""
        return abs(self.loss - other.loss) < 0.02


def late_labels(session: Session) -> Iterator[Figure]:
    """A logistic model learns 100,000 questions of 10 numbers; three of ten get an answer, and all wait 1,000 s."""
    records = _records(session.size(100_000, 10_000))
    values = zip(*(array.tolist() for array in records.arrays.values()), strict=True)
    dicts = [dict(zip(records.names, row, strict=True)) for row in values]
    contenders: dict[str, Contender] = {
        FLOW: lambda: _flow(records, records, "end"),
        DICTS: lambda: _flow(records, dicts, "end"),
        SHAPES: lambda: _flow(records, records, "end", shapes=True),
        NUMPY: lambda: _by_hand(records, _Descent),
    }
    if find_spec("river") is not None:
        contenders[RIVER] = lambda: _by_hand(records, _River)
    contenders[FLOW]()  # Compiles what is not compiled yet.
    series = alternate(contenders, repeat=session.repeat, agree=Settled.agrees_with)
    for name in (NUMPY, RIVER):
        if name in contenders:
            yield series.figure(name, EVENTS)
            for flow in (FLOW, DICTS):
                yield series.figure(flow, EVENTS, compared_with=name, target=Target("ratio", at_least=1.0))
            yield series.figure(SHAPES, EVENTS, compared_with=name)
    # The default learns most labels before the end of their wait, so in another order.
    schedules: dict[str, Contender] = {DICTS: contenders[DICTS], DEFAULT: lambda: _flow(records, dicts, "expected")}
    series = alternate(schedules, repeat=session.repeat, agree=Settled.is_as_good_as)
    yield series.figure(DICTS, EVENTS)
    yield series.figure(DEFAULT, EVENTS, compared_with=DICTS)


def _records(count: int) -> Columns:
    """Return questions, one a second, and answers True to some of them, in the order of time."""
    drawn = np.random.default_rng(seed=1)
    features = drawn.normal(size=(count, len(_FIELDS)))
    chances = 1.0 / (1.0 + np.exp(1.0 - features @ np.linspace(-0.5, 0.5, len(_FIELDS))))
    asked = np.arange(count) * 1_000
    answered = np.flatnonzero(drawn.random(count) < chances)
    rows = np.concatenate([np.arange(count), answered])
    times = np.concatenate([asked, asked[answered] + drawn.integers(1, 900_000, len(answered))])
    by_time = np.argsort(times, kind="stable")
    rows = rows[by_time]
    fields = dict(zip(_FIELDS, features[rows].T, strict=True))
    return Columns({**fields, "row": rows, "answer": by_time >= count, "at": times[by_time]})


# ---- by hand


class _Learner(Protocol):
    """Predicts and learns single events, by their number."""

    def predict(self, event: int) -> float: ...

    def learn(self, event: int, *, label: bool) -> None: ...


class _Descent:
    def __init__(self, features: Floats) -> None:
        self._features = np.hstack([features, np.ones((len(features), 1))])
        self._weights = np.zeros(self._features.shape[1])

    def predict(self, event: int) -> float:
        return float(1.0 / (1.0 + np.exp(-(self._features[event] @ self._weights))))

    def learn(self, event: int, *, label: bool) -> None:
        self._weights -= 0.01 * (self.predict(event) - label) * self._features[event]


class _River:
    def __init__(self, features: Floats) -> None:
        from river import linear_model, preprocessing

        self._rows = [dict(enumerate(row)) for row in features.tolist()]
        self._model: Any = preprocessing.StandardScaler() | linear_model.LogisticRegression()

    def predict(self, event: int) -> float:
        return float(self._model.predict_proba_one(self._rows[event])[True])

    def learn(self, event: int, *, label: bool) -> None:
        self._model.learn_one(self._rows[event], label)


def _by_hand(records: Columns, make: Callable[[Floats], _Learner]) -> Trial:
    learner = make(np.stack([records[name] for name in _FIELDS], axis=1))
    events = list(zip(*(records[name].tolist() for name in ("row", "answer", "at")), strict=True))
    waiting: dict[int, tuple[int, float]] = {}  # The event of each question, and its prediction.
    answered: set[int] = set()
    due: list[tuple[int, int]] = []
    settled: list[tuple[float, bool]] = []

    def settle(until: float) -> None:
        while due and due[0][0] <= until:
            row = heapq.heappop(due)[1]
            (event, prediction), label = waiting.pop(row), row in answered
            learner.learn(event, label=label)
            settled.append((prediction, label))

    reached = -1
    with Stopwatch() as watch:
        for event, (row, is_answer, time) in enumerate(events):
            settle(reached)
            if not is_answer:
                waiting[row] = event, learner.predict(event)
                heapq.heappush(due, (time + _WITHIN_MS, row))
            elif row in waiting:
                answered.add(row)
            reached = time
        settle(float("inf"))
    predictions, labels = (np.array(part) for part in zip(*settled, strict=True))
    return _trial(watch, len(records), predictions, labels)


# ---- in a flow


def _flow(records: Columns, given: Sequence[Any], schedule: Schedule, *, shapes: bool = False) -> Trial:
    labels = DelayedLabels(
        key_of=itemgetter("row"),
        is_answer=itemgetter("answer"),
        features=_FIELDS,
        target_of=itemgetter("answer"),
        within_s=_WITHIN_MS / 1_000,
        otherwise=False,
        schedule=schedule,
    )
    flow = Flow("late labels")
    events = flow.from_items(given, parallelism=1).event_time("at", unit="ms", check_unit=False)
    predicted = train_online(events, labels=labels, shapes=shapes).predictions.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    predictions, targets = (np.concatenate([part[name] for part in predicted.items]) for name in _REPORTED)
    return _trial(watch, len(records), predictions, targets == 1.0)


_REPORTED: Final = ("predictions", "targets")


def _trial(watch: Stopwatch, count: int, predictions: Floats, labels: npt.NDArray[np.bool_]) -> Trial:
    loss = -float(np.log(np.where(labels, predictions, 1.0 - predictions)).mean())
    return Trial(watch.rates(count, "events"), Settled(hashlib.sha256(labels.tobytes()).hexdigest(), loss))
