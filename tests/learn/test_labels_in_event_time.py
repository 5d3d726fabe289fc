"""Late labels as a join by time: out of order, with an end of the wait, from two streams."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed
from iteration.iteration_support import cut_items, run
from learn.late_label_support import SmallJoin
from learn.online_support import DELAYED, FEATURES, Record, Result, trips

from streamiter import Flow, Stream
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.learn import DelayedLabels, LinearRegression, SparseRows, train_online
from streamiter.parameter_server.optimizers import SGD
from streamiter.testing import VirtualClock

WITHIN_MS = 200
BOUND_MS = 40


def events_in_disorder(count: int, seed: int = 0) -> list[Record]:
    """Return questions and answers, out of order within the bound; some answers come first, or are too late."""
    random = np.random.default_rng(seed)
    events: list[tuple[float, Record]] = []
    for n, trip in enumerate(trips(count, seed)):
        question = {name: trip[name] for name in FEATURES if name in trip} | {"id": n, "at": 10 * n}
        wait = int(random.choice([random.integers(0, 30), random.integers(100, WITHIN_MS + 100)]))
        for event in (question, {"id": n, "answer": trip["late"], "at": 10 * n + wait})[: 1 + (n % 9 > 0)]:
            events.append((event["at"] + random.uniform(0, BOUND_MS), event))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def by_hand(events: list[Record], within_ms: int = WITHIN_MS) -> tuple[list[Record], list[tuple[Record, Record]]]:
    """Return the events so that an answer follows its question, without those too late; and the pairs in this order."""
    questions = {event["id"]: event for event in events if "answer" not in event}
    early: dict[int, Record] = {}
    asked: set[int] = set()
    ordered: list[Record] = []
    for event in events:
        key = event["id"]
        if "answer" not in event:
            asked.add(key)
            ordered += [event, *([early[key]] if key in early else [])]
        elif event["at"] < questions[key]["at"] + within_ms:
            if key in asked:
                ordered.append(event)
            else:
                early[key] = event
    assert len(early) > 3
    return ordered, [(questions[event["id"]], event) for event in ordered if "answer" in event]


def timed(events: Stream) -> Stream:
    return events.event_time("at", unit="ms", check_unit=False, out_of_orderness_s=BOUND_MS / 1000)


LABELS = replace(DELAYED, waiting_max=10**6)
IN_TIME = replace(LABELS, within_s=WITHIN_MS / 1000)


def trained(
    events: list[Record], labels: DelayedLabels, prepared: Callable[[Stream], Stream], seed: int = 0, **options: Any
) -> tuple[Result, JobStatistics]:
    flow = Flow("f")
    result = Result(
        train_online(
            prepared(cut_items(flow, events, seed=seed)), labels=labels, on_error="skip", report_every=10**6, **options
        )
    )
    return result, run(flow, seed=seed)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_answers_wait_for_their_questions_for_any_cut_of_batches(mode: Any) -> None:
    """Two topics are read at their own speeds, and an answer that was read before its question was refused."""
    events = events_in_disorder(150)
    ordered, pairs = by_hand(events)
    expected, _ = trained(ordered, LABELS, lambda stream: stream, mini_batch=10, workers=1, mode=mode)
    for seed, mini_batch in enumerate([1, 13, 1_000]):
        found, statistics = trained(events, IN_TIME, timed, seed, mini_batch=mini_batch, workers=1, mode=mode)
        assert found.last == expected.last
        assert found.metrics["count"] == expected.metrics["count"]
        assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-9)
        assert found.models[-1].records == len(pairs)
        too_late = sum("answer" in event for event in events) - len(pairs)
        assert statistics.step("learn").rejected == too_late > 3


def km_of(questions: list[Record]) -> SparseRows:
    return SparseRows.from_dense([[event.get("km") or 0.5, event["id"] % 5] for event in questions], keep_zeros=True)


def plain() -> LinearRegression:
    return LinearRegression(2, optimizer=SGD(1e-9))


@pytest.mark.parametrize("is_own", [False, True])
def test_a_question_whose_wait_is_over_is_learned_with_the_other_label(is_own: bool) -> None:
    """Views without a click were no examples, or those of the last minutes never came to the model."""
    events = events_in_disorder(150)
    _, pairs = by_hand(events)
    labels = replace(IN_TIME, otherwise=False, **({"features": km_of} if is_own else {}))
    options: Any = {"model": plain} if is_own else {}
    if is_own:
        labels = replace(labels, target_of=lambda answer: float(answer["answer"]))
    found, _ = trained(events, labels, timed, mini_batch=10, workers=1, **options)
    assert found.models[-1].records == 150
    forgotten, _ = trained(events, replace(labels, otherwise=None), timed, mini_batch=10, workers=1, **options)
    assert forgotten.models[-1].records == len(pairs) < 150


@pytest.mark.parametrize("is_own", [False, True])
async def test_on_a_quiet_stream_a_wait_ends_by_the_clock(is_own: bool) -> None:
    """The last views of an evening got their label for no click in the morning."""
    clock, flow, given = VirtualClock(), Flow("clock"), Fed()
    labels = replace(LABELS, within_s=35.0, otherwise=0.0, **({"features": km_of} if is_own else {}))
    options: Any = {"model": plain, "workers": 1} if is_own else {}
    training = train_online(flow.from_source(lambda: given), labels=labels, mini_batch=1, **options)
    predictions = training.predictions.collect()
    job = await flow.start(clock=clock)
    for event in [{"id": 0, "km": 1.0}, {"id": 0, "answer": 1.0}, {"id": 1, "km": 1.0}, {"id": 2, "km": 1.0}]:
        given.give(event)
        await clock.advance(1.0)
    for seconds, count in [(31.0, 0), (2.9, 1), (0.2, 2), (100.0, 2)]:
        await clock.advance(seconds)
        assert sum(0.0 in rows["targets"] for rows in predictions.items) == count
    await job.stop("abort")


def test_answers_meet_restored_questions_of_a_clock_that_was_ahead() -> None:
    """A job moved to a machine whose clock was two seconds behind, and the answers of the next seconds were lost."""
    before, other, after = (SmallJoin(LABELS, is_timed=False) for _ in range(3))
    after.join.open(SimpleNamespace(name="learn", clock=VirtualClock(), set_timer=lambda *_: None))  # type: ignore[arg-type]
    before.reach(5_000)
    before.ask("a", None, "question")
    other.reach(4_000)
    other.ask("b", None, "question of another worker")
    after.restore(SmallJoin.redistribute([before.state(), other.state()]))
    assert len(after.questions()) == 2
    assert after.reach(3_000) == []
    assert after.answer("a", None, True) == [("question", True)]


def test_restored_questions_that_are_too_many_get_no_label() -> None:
    """Questions learned the label for the end of their wait in their first minute, since fewer workers had room."""
    many, few = (SmallJoin(replace(IN_TIME, otherwise=False, waiting_max=count), is_timed=True) for count in (3, 2))
    for key in range(3):
        many.ask(key, 100 + key, f"question {key}")
    few.restore(many.state())
    assert (few.reach(100), few.join.forgotten) == ([], 1)
    assert few.questions() == ["question 1", "question 2"]


async def test_a_wait_ends_by_the_clock() -> None:
    """Without event time a question waited for ever, or the label for its end came at once."""
    clock, flow, given = VirtualClock(), Flow("clock"), Fed()
    labels = replace(LABELS, within_s=35.0, otherwise=False, schedule="at once")
    training = train_online(
        flow.from_source(lambda: given), labels=labels, mini_batch=1, publish_every=1, on_error="skip"
    )
    models = training.models.collect()
    job = await flow.start(clock=clock)
    answers = [{"id": n, "answer": True} for n in range(4)]
    for seconds, event, learned, refused in [
        (34.9, {"id": 0, "km": 1.0}, 0, 0),
        (0.0, {"id": 1, "km": 1.0}, 0, 0),
        (0.2, answers[1], 1, 0),
        (30.0, answers[0], 2, 1),
        (1.0, {"id": 2, "km": 1.0}, 2, 1),
        (0.0, {"id": 3, "km": 1.0}, 2, 1),
        (0.0, answers[2], 3, 1),
    ]:
        given.give(event)
        await clock.advance(0.0)
        assert (models.items[-1].records if models.items else 0, job.statistics().step("learn").rejected) == (
            learned,
            refused,
        )
        await clock.advance(seconds)
    await job.stop("drain")
    assert models.items[-1].records == 4
