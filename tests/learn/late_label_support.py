"""Events with late labels, an oracle that handles them one by one, and a plain loop around the model in that order."""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import orjson
from iteration.iteration_support import run
from learn.frozen_states import frozen
from learn.online_support import Record, delayed
from support.waiting import until
from topics.topic_case import write

from streamiter import Checkpoints, Flow, Stream
from streamiter.learn import AdaptiveLinearModel, DelayedLabels, train_online
from streamiter.learn.asked_questions import AskedScores, JoinEvents, QuestionPredictions
from streamiter.learn.late_labels.label_join import LabelJoin, objects
from streamiter.learn.late_labels.label_join_arrays import TO_ASSUME, TO_LEARN
from streamiter.learn.ready_made.model_rows import ASSUMED, CONFIRMED, CORRECTED, ModelRows, RowSteps
from streamiter.operators import Source, SourceBatch
from streamiter.topics import MemoryBroker
from streamiter.values.times import MIN_TIME

WITHIN_S = 4.0
FEATURES = ["kind", "x"]
SCHEDULES = ["expected", "end", "weighted", "at once"]

LABELS = delayed(FEATURES, "label", within_s=WITHIN_S, otherwise=False)


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
    """One event of the oracle: a question, the label of a question, or an answer that is late.

    Or "assumed": a question that waits is learned as False.
    """

    kind: str
    key: int
    label: bool | None = None
    is_answered: bool = False


class Expected:
    """When questions count as ones without an answer, by all answers and ends of waits so far."""

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.ended = 0
        self.share = 0.5
        self.ahead = 0.0

    def count(self, *, is_unanswered: bool) -> None:
        self.ended += 1
        self.share += (is_unanswered - self.share) / (min(self.ended, 10_000) + 1)

    def learns_now(self, *, is_answer: bool) -> bool:
        """Return whether True and False stay in balance if it is learned before the end of the wait."""
        step = self.share if is_answer else self.share - 1.0
        ahead = self.ahead * (1.0 - 0.05 * abs(step)) + step
        self.ahead = ahead if -5.0 <= ahead <= 5.0 else self.ahead
        return -5.0 <= ahead <= 5.0

    def age(self, number: int) -> float:
        """Return at which age the probability to be taken, added up, reaches the number that is drawn."""
        drawn, share = (number * 2_654_435_769 % 2**32) / 2**32, self.share
        delays = sorted(self.delays[-1_000:])
        for place, delay in enumerate(delays):
            left = 1.0 - (place + 1) / len(delays)
            if drawn < share * math.log(1.0 / (share + (1.0 - share) * left)) / (1.0 - share):
                return delay + 1
        return math.inf


def one_by_one(given: Sequence[Record], within_ms: int, bound_ms: int, schedule: str) -> Iterator[Handled]:
    """Yield what happens, event by event. With "end" answered questions wait to the end, too."""
    waiting: dict[int, int] = {}
    early: dict[int, Record] = {}
    answered: dict[int, bool] = {}
    due: list[tuple[float, int, int]] = []
    ages: list[tuple[float, int, int]] = []
    with_age: set[int] = set()
    learned: set[int] = set()
    expected, asked, latest, reached = Expected(), 0, -math.inf, -math.inf

    def over(watermark: float) -> Iterator[Handled]:
        is_end = watermark == math.inf
        while (ages and ages[0][0] <= watermark) or (due and due[0][0] <= watermark):
            if ages and ages[0] < due[0]:
                when, _, key = heapq.heappop(ages)
                if key in waiting and not (is_end and when > reached) and expected.learns_now(is_answer=False):
                    yield Handled("assumed", key)
                continue
            limit, _, key = heapq.heappop(due)
            if not (is_end and limit > reached) and (key in learned or key in answered or key in waiting):
                expected.count(is_unanswered=key in waiting)
            if key in answered:
                yield Handled("label", key, answered.pop(key), is_answered=True)
            elif waiting.pop(key, None) is not None:
                yield Handled("label", key, None)
        for key in [key for key, answer in early.items() if answer["at"] < watermark]:
            del early[key]
            yield Handled("late", key)

    def settle(key: int, label: bool, at: float) -> Iterator[Handled]:
        expected.delays.append(int(at) - waiting.pop(key))
        if schedule == "end" or (
            schedule == "expected" and not (key in with_age and expected.learns_now(is_answer=True))
        ):
            answered[key] = label
        else:
            learned.add(key)
            yield Handled("label", key, label, is_answered=True)

    for arrival, event in enumerate(given):
        watermark = latest - bound_ms
        yield from over(watermark)
        key, at = event["id"], max(event["at"], watermark)
        reached = max(reached, at)
        if "label" not in event:
            yield Handled("question", key)
            waiting[key], asked = int(at), asked + 1
            heapq.heappush(due, (int(at) + within_ms, arrival, key))
            if schedule == "expected" and len(expected.delays) >= 100 and expected.ended >= 1_000:
                with_age.add(key)
                if (age := expected.age(asked)) < within_ms:
                    heapq.heappush(ages, (at + age, arrival, key))
            if key in early:
                answer = early.pop(key)
                yield from settle(key, answer["label"], answer["at"])
        elif key in waiting and waiting[key] <= at < waiting[key] + within_ms:
            yield from settle(key, event["label"], at)
        else:
            first = early.get(key)
            if first is None or first["at"] <= event["at"]:
                early[key] = event
            if first is not None:
                yield Handled("late", key)
        latest = max(latest, event["at"])
    yield from over(math.inf)


def kept(asked: AskedScores) -> AskedScores:
    """Return the scores of the only question of some steps, for later steps."""
    if not asked.made.size:
        return AskedScores.none()
    return AskedScores(np.zeros(1, np.intp), np.array([asked.reading]), np.array([asked.made.shape[1]]), asked.made)


class Loop:
    """A plain loop around the model that learns row by row, in the order of the oracle."""

    def __init__(
        self,
        given: Sequence[Record],
        schedule: str,
        *,
        bound_ms: int = 0,
        within_s: float = WITHIN_S,
        make_model: Callable[[], AdaptiveLinearModel] = AdaptiveLinearModel,
    ) -> None:
        rows = {event["id"]: {name: event[name] for name in FEATURES} for event in given if "label" not in event}
        self.model = make_model()
        self.predictions: list[float] = []
        self.labels: list[bool] = []
        self.late = 0
        times = {event["id"]: np.array([event["at"]], np.float64) for event in given if "label" not in event}
        asked: dict[int, Any] = {}
        is_weighted = schedule == "weighted"
        self.assumed = {event["id"] for event in given} if is_weighted else set()
        for kind, key, label, _ in one_by_one(given, round(within_s * 1000), bound_ms, schedule):
            if kind == "late":
                self.late += 1
            elif kind == "assumed":
                row, scores, _ = asked[key]
                self.assumed.add(key)
                self.model.step(row, self._steps(asks=True, learns=True, assumed=ASSUMED), [False], scores)
                asked[key] = row, kept(scores), asked[key][2]
            elif kind == "question":
                row, scores = self.model.rows([rows[key]], None, times[key]), AskedScores.none()
                steps = self._steps(asks=True, learns=is_weighted, assumed=ASSUMED if is_weighted else None)
                prediction = self.model.step(row, steps, [False if is_weighted else None], scores)[0]
                asked[key] = row, kept(scores), prediction
            else:
                row, scores, prediction = asked.pop(key)
                label = bool(label)
                assumed = (CORRECTED if label else CONFIRMED) if key in self.assumed else None
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


class SmallJoin:
    """A ``LabelJoin`` that is given one event at a time.

    Each call returns what was learned: question and label, with "assumed" in place of a label that is not known yet.
    """

    def __init__(self, labels: DelayedLabels, *, is_timed: bool) -> None:
        self.join = LabelJoin(labels, is_timed=is_timed)
        self.names: dict[int, Any] = {}

    def ask(self, key: Any, time: int | None, question: Any) -> list[tuple[Any, Any]]:
        return self._handle(key, time, question, None)

    def answer(self, key: Any, time: int | None, label: Any) -> list[tuple[Any, Any]]:
        return self._handle(key, time, label, label)

    def reach(self, watermark: int) -> list[tuple[Any, Any]]:
        return self._learned(JoinEvents.none(), watermark)

    def end(self) -> list[tuple[Any, Any]]:
        return self.reach(self.join.at_end())

    def questions(self) -> list[Any]:
        return [self.names[slot] for slot in self.join.question_slots().tolist()]

    def state(self) -> dict[str, Any]:
        return self.join.state() | {"names": self.questions()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.join.restore(state)
        self.names = dict(zip(self.join.question_slots().tolist(), state["names"], strict=True))

    @staticmethod
    def redistribute(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = [name for state in states for name in state["names"]]
        return LabelJoin.redistribute(states, 1)[0] | {"names": names}

    def _handle(self, key: Any, time: int | None, record: Any, label: Any) -> list[tuple[Any, Any]]:
        is_answer = np.array([label is not None])
        times, before = (None, None) if time is None else ([time], [MIN_TIME])
        return self._learned(
            JoinEvents([key], ~is_answer, is_answer, objects([label]), [record], None, times, before), MIN_TIME
        )

    def _learned(self, events: JoinEvents, watermark: int) -> list[tuple[Any, Any]]:
        steps = self.join.handle(events, watermark)
        labels, learned = self.join.labels_of(steps), []
        for kind, slot, event, label in zip(*map(np.ndarray.tolist, steps[:3]), labels, strict=True):
            name = self.names[slot] if event < 0 else events.records[event]
            if kind in (TO_ASSUME, TO_LEARN):
                learned.append((name, label if kind == TO_LEARN else "assumed"))
        waiting = self.join.close()
        new = [slot for slot, event in zip(waiting.slots.tolist(), waiting.events.tolist(), strict=True) if event >= 0]
        self.names.update((slot, events.records[0]) for slot in new)
        questions = np.array(new, np.intp)
        nothing = np.full((len(new), 2), np.nan)
        self.join.questions.keep(
            questions,
            questions,
            ModelRows(np.zeros(len(new) + 1, np.intp), np.zeros(0, np.intp), np.zeros(0)),
            QuestionPredictions(nothing[:, :1], np.ones(len(new), np.intp), np.full(len(new), -1), nothing),
        )
        return learned


def learned_at_random(schedule: Any) -> str:
    """Return a hash of what a join learns of random events, among them repeated, late and unknown ones, and a restore.

    For ``"expected"`` enough waits end before the last third of the events.
    """
    labels = replace(LABELS, schedule=schedule, within_s=0.2, waiting_max=60)
    draw, small, learned = Random(5), SmallJoin(labels, is_timed=True), []
    for n in range(1_700 if schedule == "expected" else 600):
        at, key = 5 * n + draw.randrange(-20, 20), draw.randrange(max(0, n - 20), n + 1)
        learned.append(small.reach(5 * n - 30))
        learned.append(small.ask(n, at, n))
        learned.append(small.answer(key, at, draw.choice([True, True, False])) if draw.random() < 0.6 else [])
        if n % 250 == 249:
            again = SmallJoin(labels, is_timed=True)
            again.restore(small.state())
            small = again
    learned.append(small.end())
    state = repr((learned, small.join.forgotten, small.join.waiting))
    return f"{len(state)} {sum(map(len, learned))} {sha256(state.encode()).hexdigest()}"


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


def start_of(shares: Mapping[str, float], delay_s: tuple[float, float], count: int) -> list[Record]:
    """Return questions a second apart, of kinds with these shares of True answers."""
    draw, found = Random(5), []
    for n in range(count):
        kind = draw.choice(sorted(shares))
        found.append({"id": n, "at": 1_000 * n, "kind": kind, "x": draw.random()})
        if draw.random() < shares[kind]:
            found.append({"id": n, "at": round(1_000 * (n + draw.uniform(*delay_s))), "label": True})
    return sorted(found, key=lambda event: event["at"])


async def in_two_runs(
    given: Sequence[Record], cut: int, labels: tuple[DelayedLabels, DelayedLabels], folder: Path
) -> tuple[list[Any], list[Any], list[Any]]:
    """Train on so many events, and after a restart on the rest, with the second labels.

    Return the models, the predictions and the metrics of both runs.
    """
    source = MemoryBroker().topic("events")
    await source.create()
    collected: list[Any] = []
    for part, stop, own in ((given[:cut], None, labels[0]), (given[cut:], "latest", labels[1])):
        await write(source, [orjson.dumps(event) for event in part])
        flow = Flow("f")
        stream = timed(flow.source(source, stop=stop, name="events"), name="times")  # type: ignore[arg-type]
        training = train_online(stream, labels=own, report_every=10**6, name="late")
        outputs = {"models": training.models, "predictions": training.predictions, "metrics": training.validation}
        collected = [stream.collect(name=name) for name, stream in outputs.items()]
        job = await flow.start(checkpoints=Checkpoints(folder, interval_s=3_600))
        if stop is None:
            await until(lambda job=job: job.statistics().step("late: learn").records_in > 0)
            await until(lambda job=job: job.statistics().step("late: in order").records_in == cut)
            await job.stop("suspend")
        else:
            await job.wait()
    models, predictions, metrics = (each.items for each in collected)
    return models, predictions, metrics


class Trained:
    """What a flow learned from events in event time."""

    def __init__(
        self, labels: DelayedLabels | None, make: Callable[[Flow], Stream], *, seed: int | None = None, **options: Any
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
        self.version_metrics: dict[str, float] = models.items[-1].metrics
        self.predictions = np.concatenate([rows["predictions"] for rows in predictions.items])
        self.targets = np.concatenate([rows["targets"] for rows in predictions.items])
        self.questions = np.concatenate([rows.get("questions", rows["numbers"]) for rows in predictions.items])
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
