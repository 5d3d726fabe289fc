"""What labels are is decided from many of them, for any cut of a stream, and the same for labels of any type."""

import functools
import logging
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen, learned
from learn.online_support import delayed, trained

import streamiter.learn.labels as labels_module
from streamiter import Flow
from streamiter.errors import GraphError, JobFailed, ModelError
from streamiter.learn import ADWIN, AdaptiveLinearModel, BadRows, compare_online, train_online
from streamiter.models import LinearPredictor


def rows_and_truths(count: int = 120, share: float = 0.3) -> tuple[list[dict[str, Any]], list[bool]]:
    draw = Random(3)
    rows = [{"x": draw.gauss(0, 1), "sky": draw.choice(["sun", "rain"])} for _ in range(count)]
    return rows, [row["x"] + draw.gauss(0, 0.5) > 2 * (0.5 - share) for row in rows]


ROWS, TRUTHS = rows_and_truths()


def run(labels: list[Any], **options: Any) -> tuple[list[dict[str, float]], list[Any], list[Any]]:
    """Train on rows with these labels; return metrics, predictions and models."""
    flow = Flow("labels")
    records = [row | {"y": label} for row, label in zip(ROWS, labels, strict=False)]
    training = train_online(flow.from_items(records), label="y", mode="synchronous", publish_every=50, **options)
    found = training.validation.collect(), training.predictions.collect(), training.models.collect()
    flow.run()
    return found[0].items, found[1].items, found[2].items


# ---- two labels are truth values

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "yes and no": ("no", "yes", {}),
    "the positive one comes first": ("ham", "spam", {}),
    "signs": ("-", "+", {}),
    "digits as texts": ("0", "1", {}),
    "capitals": ("no", "Yes", {}),
    "a choice": ("on time", "late", {"positive": "late"}),
    "minus one and one": (-1, 1, {}),
    "floats": (0.0, 1.0, {}),
    "numbers that are classes": (3, 7, {"task": "classification"}),
    "numbers, and no third one": (3, 7, {"task": "binary"}),
}


@functools.cache
def of_truth_values(truths: tuple[bool, ...]) -> tuple[Any, Any, Any]:
    return run(list(truths), mini_batch=500)


@pytest.mark.parametrize("name", PAIRS)
def test_two_labels_of_any_type_are_learned_as_truth_values(name: str) -> None:
    """Labels "yes" and "no" were learned as three classes, worse than True and False, and without half of the metrics.

    A stream that began with the positive label had other predictions than one that began with the negative one.
    """
    negative, positive, options = PAIRS[name]
    smallest = 1 if name == next(iter(PAIRS)) else 20
    for truths, mini_batch in (
        (TRUTHS, smallest),
        (TRUTHS, 500),
        (sorted(TRUTHS), 7),
        (sorted(TRUTHS, reverse=True), 50),
    ):
        labels = [positive if truth else negative for truth in truths]
        metrics, predictions, models = run(labels, mini_batch=mini_batch, **options)
        expected, of_truths, models_of_truths = of_truth_values(tuple(truths))
        assert metrics[-1] == expected[-1]
        assert {"auc", "f1", "ece", "window_baseline_loss"} <= metrics[-1].keys()
        for column in ("predictions", "targets", "numbers"):
            found = np.concatenate([rows[column] for rows in predictions])
            assert found.tolist() == np.concatenate([rows[column] for rows in of_truths]).tolist()
        assert {rows["task"] for rows in predictions} == {"classification"}
        parameters, as_truths = models[-1].parameters, models_of_truths[-1].parameters
        assert parameters.get("classes") == (None if labels[0] in (0.0, 1.0) and not negative else [negative, positive])
        assert frozen({name: parameters[name] for name in as_truths}) == frozen(as_truths)
        assert LinearPredictor(parameters).positive == (positive if "classes" in parameters else None)


def test_columns_of_labels_are_learned_as_lists_are() -> None:
    """An array of texts, whose elements are of a type of their own, was another label than the text itself."""
    texts = ["late" if truth else "on time" for truth in TRUTHS]
    model, expected = AdaptiveLinearModel(positive="late"), AdaptiveLinearModel()
    found = model.learn_each(ROWS, np.array(texts))
    assert found.tolist() == expected.learn_each(ROWS, np.array(TRUTHS)).tolist()
    assert (model.positive, model.classes, model.task) == ("late", ["on time", "late"], "classification")
    assert (expected.positive, expected.classes) == (True, None)


def test_which_label_is_positive_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A served probability of "no" was taken for that of "yes"."""
    with caplog.at_level(logging.INFO, "streamiter.learn"):
        run(["late" if truth else "on time" for truth in TRUTHS], mini_batch=50)
    [said] = caplog.messages
    assert "the labels are 'late' and 'on time', and predictions are the probability of 'on time'" in said
    assert "positive= chooses the other" in said


def test_labels_that_are_all_equal_are_told_at_the_end() -> None:
    """The validation of a stream with one label only was silent for ever, or asked for a second label."""
    metrics, predictions, models = run(["a"] * 50, mini_batch=10)
    assert metrics[-1]["count"] == 50
    assert sum(len(rows["targets"]) for rows in predictions) == 50
    assert models[-1].parameters["classes"] == ["a", None]
    model = AdaptiveLinearModel()
    many = ROWS * 5
    model.learn(many, ["a"] * len(many))
    assert not model.labels.is_positive_known
    model.learn(many, ["a"] * len(many))
    assert model.labels.is_positive_known
    # The label that comes after the first thousand is the positive one.
    model.learn(ROWS[:2], ["0", "a"])
    assert model.classes == ["a", "0"]


def test_a_third_label_is_refused_where_two_were_asked_for() -> None:
    """A misspelt label made a new class, and the service answered with other probabilities from then on."""
    for options in ({"task": "binary"}, {"positive": "yes"}, {"classes": ["yes", "no"]}):
        model = AdaptiveLinearModel(**options)  # type: ignore[arg-type]
        with pytest.raises(BadRows, match=r"expected a label that is .*yes.*, given 'maybe'") as caught:
            model.learn(ROWS[:3], ["yes", "no", "maybe"])
        assert caught.value.rows == (2,)
        model.learn(ROWS[:2], ["yes", "no"])
        assert model.classes == ["no", "yes"]
    with pytest.raises(GraphError, match=r"train_online\(positive=\): expected no model=, given one"):
        run(TRUTHS, model=AdaptiveLinearModel, positive=True)


# ---- the kind is decided from many labels


def counts(count: int) -> list[int]:
    return [min(int(abs(row["x"]) * 2), 5) for row in ROWS[:count]]


KINDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "counts": ([0, 1, 0, *counts(100)], {"task": "regression"}),
    "ratings": ([1] * 3 + [1 + each for each in counts(100)], {"task": "regression"}),
    "numbers after minus one and one": ([1, -1, 1, *counts(100)], {"task": "regression"}),
    "a number after one and zero": ([1, 0, 1, 0.5, *counts(100)], {"task": "regression"}),
    "three texts": (["b", "b", "a", *("cab"[each % 3] for each in counts(100))], {"task": "multiclass"}),
    "texts of numbers": (["0.5", "2", "0.5", *(f"{each / 2} " for each in counts(100))], {"task": "regression"}),
    "numbers that are classes": ([2, 0, 2, *counts(100)], {"task": "multiclass"}),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_the_kind_does_not_depend_on_the_label_that_comes_first(name: str, on_error: Any) -> None:
    """Counts that began with 0 became a yes/no model of 200 of 500 rows; the other rows were skipped.

    Prices in a file of CSV became a thousand classes, and ``task="regression"`` refused them as texts.
    """
    labels, asked = KINDS[name]
    found: dict[str, Any] = {"on_error": on_error, "task": "classification" if "are classes" in name else None}
    results = [run(labels, mini_batch=size, **found) for size in ((1, 500) if on_error == "fail" else (7, 500))]
    expected = run(labels, **asked, mini_batch=500)
    first = results[0][0][-1]
    # Nothing is known of a first number, but of what seems to be one of two labels.
    assert first["count"] == len(labels) == expected[0][-1]["count"] + (asked["task"] == "regression")
    for metrics, _, models in results:
        # Predictions until the kind was known count as they were made.
        assert metrics[-1] == pytest.approx(first, rel=1e-12)
        assert metrics[-1]["loss"] == pytest.approx(expected[0][-1]["loss"], abs=0.05)
        assert frozen(models[-1].parameters) == frozen(expected[2][-1].parameters)


def test_a_kind_that_changes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A user read "accuracy" in the reports of a model of numbers, and never learned what it had become."""
    with caplog.at_level(logging.INFO, "streamiter.learn"):
        run(KINDS["counts"][0])
        run(KINDS["three texts"][0])
    numbers, _, classes = caplog.messages
    assert "the labels are not only 0 and 1, so they are numbers to predict; the" in numbers
    assert "rows so far are learned again" in numbers
    assert "task='regression' says it at once" in numbers
    assert "the labels are not only 'a' and 'b', but also 'c', so they are classes" in classes


def test_a_number_after_the_first_thousand_labels_is_refused() -> None:
    """A million rows of a yes/no model cannot be learned again, and a wrong label must not lose them."""
    draw = Random(2)
    model = AdaptiveLinearModel()
    model.learn(ROWS * 10, [draw.randint(0, 1) for _ in ROWS * 10])
    assert learned(model)["first rows"] is None
    with pytest.raises(BadRows, match=r'0, 1 or a truth value, like the first label, given 2; give task="regression"'):
        model.learn(ROWS[:2], [1, 2])


def test_a_third_text_makes_classes_at_any_time(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A class that is rare, and came after three weeks, ended the job; or the model of three weeks was forgotten."""
    draw = Random(4)
    rows = [{"x": draw.gauss(0, 1), "z": draw.gauss(0, 1)} for _ in range(6_000)]
    labels = ["c" if n >= 3_000 and row["z"] > 1 else "a" if row["x"] > 0 else "b" for n, row in enumerate(rows)]
    losses = {}
    for task in ("classification", "multiclass"):
        model = AdaptiveLinearModel(task=task)  # type: ignore[arg-type]
        before = model.learn_each(rows[:3_000], labels[:3_000])
        after = model.learn_each(rows[3_000:], labels[3_000:])
        names = model.classes or []
        of_true = after[np.arange(len(after)), [names.index(label) for label in labels[3_000:]]]
        losses[task] = -np.log(np.where(of_true > 0, of_true, after[:, -1])).mean()
        assert after.sum(axis=1) == pytest.approx(np.ones(len(after)), abs=1e-3)
        if task == "classification":
            assert before.ndim == 1
            # Until the third label comes, the probabilities are as before.
            assert names == ["a", "b", "c"]
    assert losses["classification"] < 1.1 * losses["multiclass"]
    assert "so they are classes; the model keeps its weights" in caplog.text
    metrics, *_ = run(["a", "b"] * 50 + ["c"] * 20, mini_batch=5)
    assert metrics[-1]["count"] == 120


@pytest.mark.parametrize("first", [3, 1_000])
def test_late_labels_may_change_the_kind(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that was predicted before the kind changed was validated as a prediction of the new kind."""
    for module in (labels_module, "streamiter.learn.ready_made.adaptive"):
        monkeypatch.setattr(f"{getattr(module, '__name__', module)}.FIRST_LABELS", first)
    for make in (lambda n: ["b", "a", "b", "c"][n % 4], lambda n: n % 4, lambda n: ["spam", "ham"][n > 9 and n % 2]):
        found = {}
        for mini_batch in (3, 2_000):
            events = []
            for n in range(110):
                events += [{"id": n, "x": float(n % 4)}] if n < 80 else []
                events += [{"id": n - 30, "y": make(n - 30)}] if n >= 30 else []
            labels = delayed(["x"], "y")
            options: Any = {"on_error": "skip"} if first == 3 else {}
            found[mini_batch] = trained(events, labels=labels, mini_batch=mini_batch, mode="synchronous", **options)
        assert found[3].last == found[2_000].last
        assert found[3].metrics == pytest.approx(found[2_000].metrics, rel=1e-9)


def test_learners_that_find_the_kind_at_different_times_are_compared() -> None:
    """The comparison ended with an error, because one learner had seen a count above 1 and the other had not yet."""
    flow = Flow("compared")
    rows = flow.from_items([row | {"y": label} for row, label in zip(ROWS, KINDS["counts"][0], strict=False)])
    learners: dict[str, Any] = {"one": {"mini_batch": 500}, "other": {"mini_batch": 3}}
    metrics = compare_online(rows, learners, label="y", mode="synchronous", report_every=2).metrics.collect()
    flow.run()
    last = metrics.items[-1]["learners"]
    assert last["one"]["count"] == last["other"]["count"] == 103
    assert last["one"]["loss"] == pytest.approx(last["other"]["loss"], rel=1e-12)
    assert "mae" in last["one"]


def test_a_kind_that_changes_is_no_drift() -> None:
    """The unit of the loss changed with the kind, and the detector reported a drift."""
    labels = [0, 1] * 10 + [100 + each for each in counts(100)]
    flow = Flow("drift")
    records = [row | {"y": label} for row, label in zip(ROWS, labels, strict=False)]
    training = train_online(flow.from_items(records), label="y", drift=ADWIN(check_every=1), mini_batch=1)
    drifts, metrics = training.drifts.collect(), training.validation.collect()
    flow.run()
    assert drifts.items == []
    assert metrics.items[-1]["count"] == len(labels)


@pytest.mark.parametrize("options", [{"task": "regression"}, {"task": "multiclass"}, {"positive": "a"}], ids=str)
def test_a_state_of_another_kind_than_the_one_asked_for_is_refused(options: dict[str, Any]) -> None:
    """A model that was restarted with task="regression" remained a model of two classes, without a word."""
    model = AdaptiveLinearModel()
    model.learn(ROWS[:2], ["a", "b"])
    with pytest.raises(ModelError, match=r"expected a model of task=.*make the model with the same options"):
        AdaptiveLinearModel(**options).restore(model.state())
    started: list[Callable[[], AdaptiveLinearModel]] = [AdaptiveLinearModel, lambda: AdaptiveLinearModel(task="binary")]
    for make in started:
        other = make()
        other.start_from(model.parameters())
        assert other.classes == ["a", "b"]


def test_a_label_that_is_none_or_of_another_type_has_its_own_reason() -> None:
    """Each dead letter had the reason of the first one."""
    with pytest.raises(BadRows) as caught:
        AdaptiveLinearModel().learn(ROWS[:5], [1, None, "x", 0, float("nan")])
    assert [caught.value.reasons[row].partition("given ")[2].partition(";")[0] for row in (1, 2, 4)] == [
        "None",
        "'x'",
        "nan",
    ]
    with pytest.raises(JobFailed, match="given 'x'"):
        run([True, "x"])
