"""Events with late labels, an oracle that handles them one by one, and a plain loop around the model in that order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
from iteration.iteration_support import run
from learn.frozen_states import frozen
from learn.online_support import Record

from streamiter import Flow, Stream
from streamiter.learn import AdaptiveLinearModel, DelayedLabels, train_online
from streamiter.learn.model_rows import ASSUMED, CONFIRMED, CORRECTED, RowSteps
from streamiter.operators import Source, SourceBatch

WITHIN_S = 4.0
FEATURES = ["kind", "x"]

LABELS = DelayedLabels(
    key_of=lambda event: event["id"],
    is_answer=lambda event: "label" in event,
    features=FEATURES,
    target_of=lambda answer: answer["label"],
    within_s=WITHIN_S,
    otherwise=False,
)


def events(count: int, seed: int = 1, *, disorder_ms: int = 0, every_ms: int = 50) -> list[Record]:
    """Return questions and answers, out of order by at most so much; some answers are late, unknown or come twice."""
    draw, found = Random(seed), []
    for n in range(count):
        at, kind, x = n * every_ms, draw.choice("ab"), draw.random()
        found.append({"id": n, "at": at, "kind": kind, "x": x})
        if draw.random() < (0.7 if kind == "a" else 0.2):
            wait = draw.choice([draw.randrange(3_000), draw.randrange(3_000, 6_000)])
            found.append({"id": n, "at": at + wait, "label": x > 0.3})
            if n % 7 == 0:
                found.append({"id": n, "at": at + wait + draw.randrange(2_000), "label": False})
        if n % 11 == 0:
            found.append({"id": -n - 1, "at": at, "label": True})
    return sorted(found, key=lambda event: (event["at"] + draw.randrange(disorder_ms + 1), event["id"]))


class Handled(NamedTuple):
    """One event of the oracle: a question, the label of a question, or an answer that is late."""

    kind: str
    key: int
    label: bool | None = None
    is_answered: bool = False


def one_by_one(given: Sequence[Record], within_ms: int, bound_ms: int, *, waits_for_all: bool) -> Iterator[Handled]:
    """Yield what happens, event by event. ``waits_for_all``: answered questions wait to the end, too."""
    waiting: dict[int, int] = {}
    early: dict[int, Record] = {}
    answered: dict[int, bool] = {}
    due: list[tuple[int, int, int]] = []
    latest = -math.inf

    def over(watermark: float) -> Iterator[Handled]:
        while due and due[0][0] <= watermark:
            _, _, key = heapq.heappop(due)
            if key in answered:
                yield Handled("label", key, answered.pop(key), is_answered=True)
            elif waiting.pop(key, None) is not None:
                yield Handled("label", key, None)
        for key in [key for key, answer in early.items() if answer["at"] < watermark]:
            del early[key]
            yield Handled("late", key)

    def settle(key: int, label: bool) -> Iterator[Handled]:
        del waiting[key]
        if waits_for_all:
            answered[key] = label
        else:
            yield Handled("label", key, label, is_answered=True)

    for arrival, event in enumerate(given):
        watermark = latest - bound_ms
        yield from over(watermark)
        key, at = event["id"], max(event["at"], watermark)
        if "label" not in event:
            yield Handled("question", key)
            waiting[key] = int(at)
            heapq.heappush(due, (int(at) + within_ms, arrival, key))
            if key in early:
                yield from settle(key, early.pop(key)["label"])
        elif key in waiting and waiting[key] <= at < waiting[key] + within_ms:
            yield from settle(key, event["label"])
        else:
            first = early.get(key)
            if first is None or first["at"] <= event["at"]:
                early[key] = event
            if first is not None:
                yield Handled("late", key)
        latest = max(latest, event["at"])
    yield from over(math.inf)


class Loop:
    """A plain loop around the model that learns row by row, in the order of the oracle."""

    def __init__(
        self, given: Sequence[Record], schedule: str, *, bound_ms: int = 0, within_s: float = WITHIN_S
    ) -> None:
        rows = {event["id"]: {name: event[name] for name in FEATURES} for event in given if "label" not in event}
        self.model = AdaptiveLinearModel()
        self.predictions: list[float] = []
        self.labels: list[bool] = []
        self.late = 0
        asked: dict[int, Any] = {}
        is_weighted = schedule == "weighted"
        handled = one_by_one(given, round(within_s * 1000), bound_ms, waits_for_all=schedule == "end")
        for kind, key, label, _ in handled:
            if kind == "late":
                self.late += 1
            elif kind == "question":
                row, scores = self.model.rows([rows[key]]), {}
                steps = self._steps(asks=True, learns=is_weighted, assumed=ASSUMED if is_weighted else None)
                prediction = self.model.step(row, steps, [False if is_weighted else None], scores)[0]
                asked[key] = row, scores, prediction
            else:
                row, scores, prediction = asked.pop(key)
                label = bool(label)
                assumed = (CORRECTED if label else CONFIRMED) if is_weighted else None
                self.model.step(row, self._steps(asks=False, learns=True, assumed=assumed), [label], scores)
                self.predictions.append(float(prediction))
                self.labels.append(label)

    @staticmethod
    def _steps(*, asks: bool, learns: bool, assumed: int | None) -> RowSteps:
        return RowSteps(
            np.zeros(1, np.intp),
            np.array([asks]),
            np.array([learns]),
            np.ones(1),
            np.zeros(1, np.intp),
            None if assumed is None else np.array([assumed], np.uint8),
        )


def source_of(items: Sequence[Any], rows: int) -> type[Source]:
    """Return a source that reads so many records at a time."""

    class Blocks(Source):
        def open(self, context: Any, positions: Mapping[str, Any]) -> None:
            self.at = 0

        def read(self) -> SourceBatch | None:
            block = list(items[self.at : self.at + rows])
            self.at += rows
            return SourceBatch(block, {"at": self.at}) if block else None

    return Blocks


class Trained:
    """What a flow learned from events in event time."""

    def __init__(
        self, labels: DelayedLabels, make: Callable[[Flow], Stream], *, seed: int | None = None, **options: Any
    ) -> None:
        flow = Flow("f")
        training = train_online(make(flow), labels=labels, report_every=10**6, **options)
        models, predictions, metrics = (
            stream.collect() for stream in (training.models, training.predictions, training.validation)
        )
        statistics = flow.run() if seed is None else run(flow, seed=seed)
        self.parameters = models.items[-1].parameters
        self.bits = frozen(self.parameters)
        self.records = models.items[-1].records
        self.predictions = np.concatenate([rows["predictions"] for rows in predictions.items])
        self.targets = np.concatenate([rows["targets"] for rows in predictions.items])
        self.metrics: dict[str, float] = metrics.items[-1]
        self.late = statistics.step("learn" if options.get("model") is None else "train").rejected


def timed(stream: Stream, bound_ms: int = 0, *, name: str | None = None) -> Stream:
    return stream.event_time("at", unit="ms", check_unit=False, out_of_orderness_s=bound_ms / 1000, name=name)


def distinct(given: list[Record]) -> list[Record]:
    """Return the events with a millisecond of its own each."""
    found: list[Record] = []
    for event in given:
        found.append(event | {"at": max(event["at"], found[-1]["at"] + 1) if found else event["at"]})
    return found
