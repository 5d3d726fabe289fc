"""Labels that come later than their questions: what the default model learns from them, wherever batches are cut."""

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from learn.frozen_states import frozen
from learn.late_label_support import kept
from learn.online_support import (
    BINARY,
    DELAYED,
    FEATURES,
    LABELS,
    Record,
    chosen,
    delayed,
    letters_of,
    trained,
    trips,
    without,
)
from support.processes import forked_run

from streamiter.errors import JobFailed
from streamiter.learn import AdaptiveLinearModel, DelayedLabels, LogisticRegression, ProgressiveValidation, SparseRows
from streamiter.learn.asked_questions import AskedScores
from streamiter.learn.late_labels import key_places, label_join
from streamiter.learn.late_labels.event_reading import TimedEvents, answers_and_keys
from streamiter.learn.ready_made.model_rows import RowSteps
from streamiter.learn.rows import BadRows
from streamiter.operators.timed.in_order import BEFORE_FIELD, TIME_FIELD
from streamiter.values.helpers.compiled import is_compiling

COIN = delayed(["sky", "km"], "label")


def groups(count: int, size: int) -> list[dict[str, Any]]:
    """Return groups of questions, each followed by its answers; all answers of a group are one flip of a coin."""
    random = Random(1)
    events: list[dict[str, Any]] = []
    for group in range(count):
        ids = range(group * size, (group + 1) * size)
        label = random.random() < 0.5
        events += [{"id": n, "sky": random.choice("ab"), "km": random.random()} for n in ids]
        events += [{"id": n, "label": label} for n in ids]
    return events


def test_experts_are_judged_by_the_predictions_that_were_made() -> None:
    """The expert that learns the label of a group from its first answers had the best loss; it predicted no group."""
    result = trained(groups(400, 10), labels=COIN, mini_batch=1_000, mode="synchronous")
    # That of a coin is 0.69; judged when the answers come, it is above 2.
    assert result.metrics["loss"] < 0.9


# What is compiled before and behind a run, and behind a run that resumes: the number of forms of each function.
_COMPILES = """
import gc
from learn.late_label_support import LABELS, SmallJoin
from streamiter import Flow
from streamiter.learn import train_online
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.values.helpers.numba_code import CompiledFunction

def forms():
    found = [each for each in gc.get_objects() if isinstance(each, CompiledFunction)]
    return {each.__name__: len(each.overloads) for each in found if "late_labels" in each.__module__ and each.overloads}

LabelJoin.compile(also_to_resume=True)
before = forms()
flow = Flow("late")
asked = [{"id": f"n{n}", "at": n, "kind": "a", "x": 0.5} for n in range(3_000)]
told = [{"id": f"n{n}", "at": n + 2, "label": True} for n in range(0, 3_000, 3)]
ask, tell = (flow.from_items(each).event_time("at", unit="s", check_unit=False) for each in (asked, told))
train_online(ask.union(tell), labels=LABELS).models.collect()
flow.run()
first, resumed = (SmallJoin(LABELS, is_timed=True) for _ in range(2))
list(first.ask(1, 1_000, "question"))
resumed.restore(first.state())
list(resumed.answer(1, 2_000, True))
print(before and {name: count for name, count in forms().items() if before.get(name) != count and name in sys.argv})
"""


def test_all_functions_of_a_join_are_compiled_before_its_first_event() -> None:
    """They were compiled in the event loop, without a line in the log: it was blocked for 13 s at the first start of a
    service, so that a broker gave it up, and for 15 s more at the next start.
    """
    if not is_compiling():
        pytest.skip("Numba is not here")
    called = re.findall(r"_compiled\.(\w+)\(", "".join(inspect.getsource(each) for each in (label_join, key_places)))
    program = [sys.executable, "-c", "import sys\n" + _COMPILES, *called, "are_known"]
    assert forked_run(program, cwd=Path(__file__).parents[1], check=True).stdout == "{}\n"


# ---- functions that fail


@pytest.mark.parametrize("model", [None, lambda: LogisticRegression(1)], ids=["by row", "by gradients"])
@pytest.mark.parametrize(
    ("option", "function", "record"),
    [
        ("key_of", lambda event: event["key"] if event["n"] == 3 else event["id"], {"n": 3, "id": 1, "label": False}),
        ("is_answer", lambda event: event["n"] > 1 and event["key"], {"n": 2, "id": 0, "label": True}),
        ("target_of", lambda event: event["key"], {"n": 2, "id": 0, "label": True}),
        (
            "features",
            lambda questions: [[event["key" if event["n"] else "n"]] for event in questions],
            {"n": 1, "id": 1},
        ),
    ],
)
def test_an_error_of_a_function_names_option_record_and_line(
    option: str, function: Any, record: Record, model: Any
) -> None:
    """A field was misspelt in one of four functions, and the error was KeyError: 'key', without saying which."""
    given = [{"n": 0, "id": 0}, {"n": 1, "id": 1}, {"n": 2, "id": 0, "label": True}, {"n": 3, "id": 1, "label": False}]
    labels = replace(delayed(lambda rows: [[row["n"]] for row in rows], "label"), **{option: function})
    for workers in (1, 2):
        with pytest.raises(JobFailed) as failed:
            trained(given, labels=labels, model=model, workers=workers)
        assert f"on record {record}: DelayedLabels({option}=) failed in test_late_labels.py:" in str(failed.value)
        assert "KeyError: 'key'; let it take such a record, or choose what happens to it: on_error=\"skip\" or" in str(
            failed.value
        )
        skipped = trained(given, labels=labels, model=model, workers=workers, on_error="skip")
        assert skipped.statistics.state == "finished"


# ---- compared with a plain loop


def matrix_km(rows: Any) -> Any:
    return [[row["km"], row["id"] % 5] for row in rows]


def sparse_km(rows: Any) -> SparseRows:
    return SparseRows.from_dense(matrix_km(rows), keep_zeros=True)


def delayed_events(count: int, label: str, seed: int = 0) -> list[Record]:
    """Return questions and answers: some asked again, never answered, answered with None, or without a question."""
    random = np.random.default_rng(seed)
    events: list[tuple[float, Record]] = []
    for n, record in enumerate(trips(count, seed)):
        question = without(record, *LABELS, "weight")
        events.append((n, question))
        answered = n + random.exponential(15)
        if n % 3 == 1:
            events.append((n + random.exponential(10), question | {"km": 1.0}))
        if n % 13:
            answer = None if n % 17 == 5 else record[label]
            events.append((answered, {"id": n, "answer": answer}))
        if n % 4 == 3:
            events.append((answered + random.exponential(5), {"id": n, "answer": record[label]}))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def delayed_by_a_loop(
    events: list[Record], labels_of: DelayedLabels = DELAYED, read: Any = lambda rows: chosen(rows, *FEATURES)
) -> tuple[AdaptiveLinearModel, list[Any], list[Any], int]:
    """Return the model, the first predictions with their labels, and the number of answers without a question."""
    model, waiting, unknown = AdaptiveLinearModel(), {}, 0
    predictions, labels = [], []
    ask, learn = (
        RowSteps(np.zeros(1, np.intp), np.array([predicts]), np.array([not predicts]), np.ones(1), np.zeros(1, np.intp))
        for predicts in (True, False)
    )
    for event in events:
        if "answer" not in event:
            rows, scores = model.rows(read([event])), AskedScores.none()
            waiting.pop(event["id"], None)
            prediction = model.step(rows, ask, [None], scores)[0]
            waiting[event["id"]] = rows, prediction, kept(scores)
            if len(waiting) > labels_of.waiting_max:
                del waiting[next(iter(waiting))]
        elif event["id"] not in waiting:
            unknown += 1
        else:
            rows, prediction, scores = waiting.pop(event["id"])
            if event["answer"] is not None:
                model.step(rows, learn, [event["answer"]], scores)
                if np.isnan(prediction).any():  # Nothing was known.
                    if model.task == "regression":
                        continue
                    prediction = 0.5
                predictions.append(prediction)
                labels.append(event["answer"])
    return model, predictions, labels, unknown


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_late_labels_give_the_model_of_a_plain_loop_for_any_mini_batch(mode: Any, label: str) -> None:
    """The mini-batch decided which questions were forgotten, whether a question before the first label counted, and
    which of two questions with one key was answered.
    """
    events = delayed_events(120, label)
    model, predictions, labels, unknown = delayed_by_a_loop(events)
    assert unknown > 5
    for seed, (mini_batch, workers) in enumerate([(1, 1), (1_000, 1), (20, 3)]):
        if mode == "asynchronous" and workers > 1:
            continue
        options: Any = {"mini_batch": mini_batch, "workers": workers, "mode": mode, "publish_every": 10}
        result = trained(events, seed=seed, labels=DELAYED, on_error="skip", **options)
        assert result.statistics.step("learn").rejected == unknown, mini_batch
        assert result.models[-1].records == model.records
        assert result.last == frozen(model.parameters(state=False)), mini_batch
        assert result.metrics["count"] == len(labels)
        if label != "kind":
            kind: Any = "classification" if label == "late" else "regression"
            validation = ProgressiveValidation(kind=kind)
            validation.update(predictions, labels)
            assert result.metrics["loss"] == pytest.approx(validation.metrics()["loss"], rel=1e-12)


@pytest.mark.parametrize("features", [sparse_km, matrix_km], ids=["sparse", "matrix"])
def test_late_labels_with_a_function_of_features_equal_a_plain_loop(features: Any) -> None:
    """A mini-batch of answers only has no features, and was taken for records with other fields."""
    events = [event for event in delayed_events(150, "late") if "km" in event]
    rows = {event["id"]: event for event in events}
    answers = [{"id": n, "answer": row["km"] > 5_000} for n, row in rows.items()]
    labels = DelayedLabels(DELAYED.key_of, DELAYED.is_answer, features, DELAYED.target_of)
    model, *_ = delayed_by_a_loop([*events, *answers], labels, features)
    result = trained([*events, *answers], labels=labels, mini_batch=20, workers=1)
    assert result.last == frozen(model.parameters(state=False))


def test_late_labels_reach_their_question_with_many_workers() -> None:
    """An answer overtook its question in another worker, and was refused."""
    events: list[Record] = []
    for n in range(400):
        events.append({"id": n, "km": float(n % 7)})
        if n >= 3:
            events.append({"id": n - 3, "answer": (n - 3) % 7 > 3})
    assert trained(events, labels=DELAYED, mini_batch=5, workers=3, on_error="fail").records[-1] == 397


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("mini_batch", [1, 1_000])
async def test_events_that_are_no_questions_or_answers_become_dead_letters(mode: Any, mini_batch: int) -> None:
    """A question without features, or an answer with a label that is none, ended the job or was lost silently."""
    events: list[Record] = []
    for n in range(40):
        events.append({"id": n, "km": float(n % 7)})
        if n >= 4:
            events.append({"id": n - 4, "answer": (n - 4) % 7 > 3})
    bad: list[tuple[Record, str, str]] = [
        ({"id": 100, "km": [1]}, "read", "expected a number, a text or None in the field 'km'"),
        ({"id": 101, "km": "far"}, "learn", "expected numbers in the field 'km'"),
        ({"km": 1.0}, "read", "KeyError: 'id'"),
        ({"id": [1], "km": 1.0}, "read", "unhashable type: 'list'"),
        ({"id": 100, "answer": True}, "learn", "an answer without a question that waits for it"),
        ({"id": 102, "answer": "maybe"}, "learn", f"{BINARY} 'maybe'"),
    ]
    dirty = list(events)
    dirty.insert(12, {"id": 102, "km": 1.0})
    for number, (record, _, _) in enumerate(bad):
        dirty.insert(15 + 6 * number, record)
    letters, result = await letters_of(dirty, labels=DELAYED, mini_batch=mini_batch, mode=mode)
    assert sorted((step, value) for step, _, value in letters) == sorted(
        (step, orjson.dumps(record)) for record, step, _ in bad
    )
    for record, _, message in bad:
        assert any(message in error for _, error, value in letters), record
    assert result.models[-1].records == 36


@pytest.mark.parametrize("key", [None, float("nan"), np.float32("nan"), np.datetime64("NaT")])
def test_an_event_without_a_key_is_refused(key: Any) -> None:
    """A table has NaN in place of None: each such question waited for an answer that no event could bring."""
    with pytest.raises(BadRows, match="expected a key that a question and its answer share, given") as refused:
        answers_and_keys(COIN, [{"id": 1}, {"id": key}, {"id": key, "label": True}])
    assert refused.value.rows == (1, 2)


def test_two_trainings_read_one_mini_batch_of_columns_and_dicts() -> None:
    """A challenger ended with a KeyError, since the first training had taken the times out of the rows."""
    event = {"key": "a", "x": 1.0}
    mini_batch = [{**event, BEFORE_FIELD: np.int64(3), TIME_FIELD: np.int64(5)}, (5, 7, event)]
    first, second = TimedEvents.of(mini_batch), TimedEvents.of(mini_batch)
    for read in (first, second):
        assert read.records == [event, event]
        assert (read.before.tolist(), read.times.tolist()) == ([3, 5], [5, 7])
