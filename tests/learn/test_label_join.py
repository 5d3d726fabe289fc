"""The join of questions with labels that come later, given one event at a time: when each question is learned."""

from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learn.late_label_support import LABELS, SCHEDULES, SmallJoin

from streamiter.learn.asked_questions import JoinEvents
from streamiter.learn.late_labels.answer_delays import AnswerDelays
from streamiter.learn.late_labels.key_places import KeyPlaces
from streamiter.learn.late_labels.label_join import LabelJoin, objects
from streamiter.learn.late_labels.label_join_arrays import TO_ASK, TO_LEARN
from streamiter.testing import VirtualClock
from streamiter.values.times import MAX_TIME


def test_the_end_of_a_stream_says_nothing_of_questions_that_wait() -> None:
    """A stream that ended each night, and was read on, took all questions of its last wait for unanswered ones."""
    labels = replace(LABELS, schedule="expected", within_s=1_000.0)
    join, draw = SmallJoin(labels, is_timed=True), Random(1)
    shares = []
    for night in range(2):
        given = []
        for n in range(1_500):
            at = 1_000 * (1_500 * night + n)
            given.append((at, 0, n))
            if draw.random() < 0.9:
                given.append((at + draw.randrange(1, 600_000), 1, n))
        for at, is_answer, n in sorted(given):
            if at < 1_500_000 * (night + 1):
                join.reach(at - 1)
                (join.answer if is_answer else join.ask)((night, n), at, True)
        join.end()
        state = LabelJoin.without_end(join.state())
        join = SmallJoin(labels, is_timed=True)
        join.restore(state)
        shares.append(state["delays"]["unanswered"])
    assert all(abs(share - 0.1) < 0.03 for share in shares)


def test_workers_that_become_one_keep_what_is_known_of_delays() -> None:
    """Of two workers only the delays of the second one were known afterwards."""
    states = []
    for delay in (10, 1_000):
        delays = AnswerDelays()
        delays.restore({"delays": [delay] * 1_000, "ended": 0, "unanswered": 0.5, "ahead": 0.0})
        states.append(delays.state())
    assert Counter(AnswerDelays.merged(states)["delays"]) == {10: 500, 1_000: 500}
    joins = []
    for at in (500, 0):
        join = SmallJoin(LABELS, is_timed=True)
        assert [*join.ask(at, at, "question"), *join.answer(at, at + 1, True)] == []
        joins.append(join.state())
    assert SmallJoin.redistribute(joins)["settled"] == [[0, 500], [0, 500]]


def test_an_answered_question_leaves_its_row_at_once() -> None:
    """Answered questions stayed in memory with their rows until they would have been learned as False."""
    labels, clock, due = replace(LABELS, schedule="expected"), VirtualClock(), []
    small = SmallJoin(labels, is_timed=False)
    small.join.open(SimpleNamespace(name="learn", clock=clock, set_timer=lambda delay_s, _: due.append(delay_s)))
    for n in range(2_400):
        small.reach(10 * n)
        small.ask(n, None, "question")
        small.answer(n, None, True)
        if n == 1_799:
            waiting, slots = small.join.waiting, len(small.join._slots)
    assert small.join.delays.are_known()
    assert (small.join.waiting, len(small.join._slots)) == (waiting, slots)
    small.reach(10**9)
    small.join.wait()
    assert (small.join.waiting, due) == (0, [])  # No timer for the last one, which is answered.


@pytest.mark.parametrize("schedule", ["end", "at once"])
def test_a_question_that_is_delivered_again_after_its_answer_is_learned_once(schedule: Any) -> None:
    """A producer sent its last records again: a view that was clicked was learned once more, as one without a click.

    So it is in each schedule, across a checkpoint, and for as long as the first one would have waited. A question with
    another time is another one.
    """
    labels, first = replace(LABELS, schedule=schedule), [("a", 0, "first"), ("b", 10, "first of b")]
    join = SmallJoin(labels, is_timed=True)
    outcomes = [*join.ask(*first[0]), *join.ask(*first[1]), *join.answer("a", 1_000, True)]
    assert outcomes == ([] if schedule == "end" else [("first", True)])
    again = SmallJoin(labels, is_timed=True)
    again.restore(SmallJoin.redistribute([join.state()]))
    for each in (join, again):
        forgotten = each.join.forgotten
        assert each.ask("a", 0, "again") == []
        assert each.join.forgotten == forgotten + 1
        assert each.ask("a", 1_000, "another") == []
        assert each.answer("a", 1_001, True) == ([] if schedule == "end" else [("another", True)])
        assert "again" not in dict(each.reach(20_000))
        assert each.ask("a", 1_000, "after its wait") == []
        assert each.questions() == ["after its wait"]


def test_keys_that_nobody_waits_for_are_forgotten() -> None:
    """The keys of refused questions, and of settled ones while time passed without events, stayed in memory for ever.

    Where only answered questions were restored, compiled code wrote to an array of keys without room.
    """
    labels, nobody = replace(LABELS, schedule="at once", otherwise=None), np.array([False])
    for key in range(3):
        join = SmallJoin(labels, is_timed=True)
        join.join.handle(JoinEvents([key], nobody, nobody, objects([None]), [{}], None, [key], [key]), 0)
        join.join.close()
        assert not join.join._places
        join.ask(key, 10, "question")
        join.answer(key, 20, True)
        again = SmallJoin(labels, is_timed=True)
        again.restore(join.state())
        assert not again.join.is_due(100_000)
        again.join.pass_time(100_000)
        assert not again.join._places
        assert not again.ask("other", 200_000, "question")
        assert list(again.join._places) == ["other"]
    by_clock, again = (SmallJoin(replace(LABELS, schedule="end"), is_timed=False) for _ in range(2))
    for join in (by_clock, again):
        join.join.open(SimpleNamespace(name="learn", clock=VirtualClock(), set_timer=print))
    assert not [*by_clock.reach(10), *by_clock.ask("a", None, "question"), *by_clock.answer("a", None, True)]
    again.restore(by_clock.state())
    assert len(again.join._arrays(0).keys)
    assert again.end() == [("question", True)]


def test_an_answer_that_is_no_label_takes_its_question_along() -> None:
    """A label that is an array ended the job: it was compared with labels before anybody asked whether it is one."""
    join = SmallJoin(replace(LABELS, schedule="expected"), is_timed=True)
    assert not join.ask("a", 0, "question")
    assert not join.answer("a", 1, np.array([1, 2]))
    assert [name for name, _ in join.reach(10_000)] == ["question"]  # The model refuses the label.


def test_waits_that_end_before_a_label_do_not_know_it() -> None:
    """The label of an event changed the prior of questions that had left before it, in the same mini-batch only."""
    join = LabelJoin(replace(LABELS, otherwise="no"), is_timed=True)
    asks, times = np.array([True, True, False]), [0, 8_000, 10_000]
    labels = objects([None, None, "a label before no"])
    steps = join.handle(JoinEvents([1, 2, 2], asks, ~asks, labels, [{}] * 3, None, times, [-1, -1, 9_999]), -1)
    assert steps.kind.tolist() == [TO_ASK, TO_ASK, TO_LEARN]
    assert (steps.at_event[2], steps.has_share[2]) == (2, True)


EDGES: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], list[Any]]] = {
    # Questions have a name, answers a label; a number alone is a watermark.
    "an answer of the same millisecond": ({}, [("a", 5, True), ("a", 5, "q")], ["q"]),
    "at the watermark": ({}, [("a", 5, True), (5,), ("a", 5, "q")], ["q"]),
    "at the end of the wait": ({}, [("a", 0, "q"), ("a", 4_000, True)], []),
    "before its question, at the end": ({}, [("a", 4_000, True), ("a", 0, "q")], []),
    "the last of two questions": ({}, [("a", 0, "one"), ("a", 0, "two"), ("a", 1, True)], ["two"]),
    "the later of two answers": ({}, [("a", 10, True), ("a", 5, False), ("a", 0, "q")], ["q"]),
    "a late question": ({}, [(1_000,), ("a", 0, "q"), ("a", 4_500, True)], ["q"]),
    "room for one, a question": ({"waiting_max": 1}, [("a", 0, "q"), ("b", 3_999, True), ("b", 3_999, "b")], ["b"]),
    "room for one, two answers": ({"waiting_max": 1}, [("a", 5, True), ("b", 5, True), ("b", 5, "b")], ["b"]),
    "room for an answered one": ({"waiting_max": 1, "schedule": "end"}, [("a", 0, "q"), ("a", 1, True)], []),
    "settled no longer": ({}, [("a", 0, "q"), ("a", 1, True), (4_000,), ("a", 0, "r"), ("a", 4_001, True)], ["q", "r"]),
    "settled twice": ({}, [("a", 0, "q"), ("a", 1, True), ("a", 2, "r"), ("a", 3, True), (9_000,)], ["q", "r"]),
    "by the clock, an answer first": ({}, [(10,), ("a", None, True), ("a", None, "q")], []),
    "by the clock, no time": ({"within_s": 0.001}, [(10,), ("a", None, "q"), ("a", None, True)], []),
}


@pytest.mark.parametrize("name", EDGES)
def test_what_meets_at_the_edges_of_waits(name: str) -> None:
    """One millisecond, or one event, more or less: each of these faults in the join was planted, and not seen."""
    changes, given, expected = EDGES[name]
    labels = replace(LABELS, **{"schedule": "at once", "otherwise": None} | changes)
    join, learned = SmallJoin(labels, is_timed="clock" not in name), []
    for event in given:
        call = join.reach if len(event) == 1 else join.ask if isinstance(event[2], str) else join.answer
        learned += call(*event)  # type: ignore[operator]
    assert learned == [(question, True) for question in expected]
    assert join.state()["settled"] == [[], []] or given[-1] != (9_000,)


def test_what_is_forgotten_for_want_of_room_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A training lost most of its questions for weeks, and only a metric counted them."""
    join = SmallJoin(replace(LABELS, waiting_max=2), is_timed=True)
    for key in range(5):
        join.ask(key, 100 + key, f"question {key}")
    [told] = [record.getMessage() for record in caplog.records]
    assert "more than 2 questions and answers wait" in told
    assert "a larger waiting_max" in told


def test_longer_waits_bring_together_what_a_checkpoint_kept_apart() -> None:
    """A question and its answer, both waiting, were lost without a count when the wait became long enough for both."""
    for schedule in SCHEDULES:
        labels = replace(LABELS, schedule=schedule, within_s=5.0)
        short, long = SmallJoin(labels, is_timed=True), SmallJoin(replace(labels, within_s=20.0), is_timed=True)
        assert not short.answer("a", 17_000, True)
        assert not short.ask("a", 10_000, "question")
        long.restore(short.state())
        again = SmallJoin(replace(labels, within_s=20.0), is_timed=True)
        again.restore(long.state())
        assert [*again.reach(11_000), *again.reach(MAX_TIME)] == [("question", True)]


def test_waits_that_are_over_by_the_clock_do_not_know_the_labels_that_follow() -> None:
    """The prior of a question depended on whether the label behind it came in the same mini-batch."""
    labels = replace(LABELS, schedule="end", otherwise="no")
    join, clock = LabelJoin(labels, is_timed=False), VirtualClock()
    join.open(SimpleNamespace(name="learn", clock=clock, set_timer=lambda *_: None))  # type: ignore[arg-type]
    known = []
    for now, key, label in [(0, "a", None), (10_000, "b", None), (20_000, "b", "aye")]:  # Then "no" is positive.
        is_answer = np.array([label is not None])
        given = JoinEvents([key], ~is_answer, is_answer, objects([label]), ["record"], None, None, None)
        steps = join.handle(given, now)
        known += steps.has_share[steps.kind == TO_LEARN].tolist()
        join.close()
    assert known == [True, True]


@pytest.mark.parametrize("kind", ["lists", "texts", "whole numbers"])
def test_each_key_has_one_place_however_keys_come(kind: str) -> None:
    """Keys of large mini-batches are in a table of compiled code, which keys of other kinds, and long texts, leave."""
    draw, places, known = Random(kind), KeyPlaces(), dict[Any, int]()
    for step in range(60):
        keys: Any = [f"{draw.randrange(900)}{'-' * draw.choice([0, 1, 20])}" for _ in range(draw.choice([0, 3, 500]))]
        if kind == "whole numbers":
            keys = np.array([draw.randrange(2_000) - 1_000 for _ in keys], np.int32)
        elif kind == "texts" and draw.random() < 0.7:
            keys = np.array(keys, str)
        if step == 45:
            keys = ["7", "7\0", 7.0, ("7",), "7" * 1_000]
        given = keys.tolist() if isinstance(keys, np.ndarray) else keys
        for key, place in zip(given, places.of(keys), strict=True):
            assert known.setdefault(key, int(place)) == place
        assert len(places) == len(set(known.values())) == len(known)
        left = np.array(draw.sample(sorted(known.values()), len(known) // 2), np.int64)
        free = np.array(sorted(set(range(places.room)).difference(known.values()))[:2], np.int64)
        assert [known.pop(key) for key in places.keys(left)] == left.tolist()
        places.forget(np.concatenate([left, free]))
        assert set(places) == set(known)
