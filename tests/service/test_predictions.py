"""Rows of JSON become predictions: the answer of each kind of model, wrong values with their paths, explanations."""

import math
from collections.abc import Coroutine
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from models.model_case import ManualClock
from service.service_models import learned, trips, version_of
from support.examples import random_examples

from streamiter.errors import ModelError
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.served import ServedVersion
from streamiter.service.http.answers import Problem
from streamiter.service.http.candidates import RequestedCandidates
from streamiter.service.http.predictions import answer_rows, requested_document, requested_rows

CLOCK = ManualClock()
MODEL = learned()
VERSION = version_of(MODEL.parameters())


def answer(document: Any, version: ServedVersion = VERSION, **options: bool) -> Any:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    given = requested_document(body)
    if (candidates := RequestedCandidates.of(given, 1000)) is not None:
        asked = candidates.answer(version, CLOCK, **options)
    else:
        asked = answer_rows(version, *requested_rows(given, 1000), CLOCK, **options)
    return orjson.loads(orjson.dumps(finished(asked)))


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that only yields to other tasks; an event loop for each call takes longer."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value


def refusal(document: Any, version: ServedVersion = VERSION, **options: bool) -> Problem:
    with pytest.raises(Problem) as refused:
        answer(document, version, **options)
    return refused.value


def test_one_row_and_many_rows_are_predicted_as_by_the_model() -> None:
    """A client compared the predictions of the service with those of the training: they differed."""
    rows = trips(700, seed=2)
    expected = MODEL.predict(rows)
    given = answer({"rows": rows})
    assert (given["model"], given["generation"], given["version"], given["age_s"]) == ("late", 2, 7, 2.5)
    # Tables are published as float32.
    np.testing.assert_allclose([row["probability"] for row in given["predictions"]], expected, rtol=1e-6)
    [alone] = answer(rows[0])["predictions"]
    assert alone == {"probability": pytest.approx(expected[0])}
    assert answer({"rows": []})["predictions"] == []


def test_a_number_and_classes_have_answers_of_their_own() -> None:
    """A model of classes answered with a list, and the client did not know which number is of which label."""
    numbers, classes = learned("numbers"), learned("classes")
    rows = trips(5, seed=3)
    values = answer({"rows": rows}, version_of(numbers.parameters()))["predictions"]
    assert values == [{"value": pytest.approx(value)} for value in numbers.predict(rows)]
    [row] = answer(rows[0], version_of(classes.parameters()))["predictions"]
    assert set(row["probabilities"]) == {f"{sky}{night}" for sky in ("rain", "sun", "snow") for night in (True, False)}
    assert sum(row["probabilities"].values()) + row.get("unseen", 0.0) == pytest.approx(1.0)


def test_the_answer_names_the_label_that_the_probability_is_of() -> None:
    """A client took the probability of "near" for that of "far"; the answer named none of them."""
    rows, two = trips(5, seed=3), learned("two labels")
    given = answer({"rows": rows}, version_of(two.parameters()))
    assert given["positive"] == two.positive == "near"
    assert [row["probability"] for row in given["predictions"]] == pytest.approx(two.predict(rows).tolist())
    assert "positive" not in answer({"rows": rows})


def test_labels_that_are_no_texts_are_written_as_json() -> None:
    """A model of the classes 1, 2 and 3 could not be served, because names of JSON are texts."""
    rows = trips(60)
    model = AdaptiveLinearModel(bits=12, task="classification")
    model.learn(rows, [n % 3 for n in range(60)])
    [row] = answer(rows[0], version_of(model.parameters()))["predictions"]
    assert set(row["probabilities"]) == {"0", "1", "2"}


def test_all_wrong_values_are_told_with_their_paths() -> None:
    """A client mended one field after the other: each answer told only the first wrong value."""
    rows = trips(600)
    rows[3] |= {"km": "far", "sky": 7}
    rows[599] = {"km": [1], "unknown": {"is": "ignored"}}
    refused = refusal({"rows": [*rows, "no row"]})
    assert (refused.status, refused.kind) == (422, "wrong-rows")
    assert "given 3 of 601 that are wrong" in str(refused)
    errors = {error["path"]: error["detail"] for error in refused.errors or []}
    assert list(errors) == ["/rows/3/km", "/rows/3/sky", "/rows/599/km", "/rows/600"]
    assert errors["/rows/3/km"].startswith("expected a number in the field 'km'")
    assert "given 'far'" in errors["/rows/3/km"]
    assert "memory:" not in str(refused.document()), "an address of a topic is no matter of a client"
    [wrong] = refusal({"km": "far"}).errors or []
    assert wrong["path"] == "/km"


def test_partial_answers_have_an_error_in_the_place_of_a_wrong_row() -> None:
    """One wrong row of a thousand refused the whole request of a nightly run."""
    rows: list[Any] = trips(3)
    rows[1]["km"] = "far"
    first, wrong, last = answer({"rows": rows}, partial=True)["predictions"]
    assert set(first) == set(last) == {"probability"}
    assert wrong["error"].startswith("expected a number in the field 'km'")
    assert wrong["errors"] == [{"path": "/rows/1/km", "detail": wrong["error"]}]


@pytest.mark.parametrize("crosses", [(), [("km", "night"), ("sky", "night"), ("sky", "km")]])
@pytest.mark.parametrize("labels", ["truth values", "numbers", "classes"])
def test_contributions_add_up_to_the_score_the_greatest_first(labels: str, crosses: Any) -> None:
    """The contributions on a page did not add up: the crosses of fields were left out. And they had no order."""
    version = version_of(learned(labels, crosses).parameters())
    row = trips(1, seed=4)[0] | {"wind": None, "unknown": 3}
    [shown] = answer({"rows": [row]}, version, explain=True)["predictions"]
    assert "unknown" not in shown["contributions"]
    assert {" × ".join(cross) for cross in crosses} <= set(shown["contributions"])
    sizes = [
        np.abs(list(part.values()) if labels == "classes" else part).mean() for part in shown["contributions"].values()
    ]
    assert sizes == sorted(sizes, reverse=True)
    names = list(shown["score"]) if labels == "classes" else [None]
    for name in names:
        parts = [shown["intercept"], *shown["contributions"].values()]
        assert sum(part if name is None else part[name] for part in parts) == pytest.approx(
            shown["score"] if name is None else shown["score"][name]
        )
    if labels == "truth values":
        assert shown["probability"] == pytest.approx(1.0 / (1.0 + math.exp(-shown["score"])))
    elif labels == "numbers":
        assert shown["value"] == pytest.approx(shown["score"])
    else:
        odds = math.log(shown["probabilities"][names[0]] / shown["probabilities"][names[1]])
        assert odds == pytest.approx(shown["score"][names[0]] - shown["score"][names[1]])


def test_rows_of_numbers_are_for_models_of_a_matrix() -> None:
    """A model that had learned from a matrix could not be asked over HTTP."""
    plain = version_of({"weights": np.array([1.0, -2.0]), "intercept": 0.5, "link": "identity"})
    assert answer({"rows": [[2, 1.0], [0, 0]]}, plain)["predictions"] == [{"value": 0.5}, {"value": 0.5}]
    [explained] = answer({"rows": [[2, 1.0]]}, plain, explain=True)["predictions"]
    assert explained == {"value": 0.5, "score": 0.5, "intercept": 0.5, "contributions": {"0": 2.0, "1": -2.0}}
    refused = refusal({"rows": [[1, 2], [1], {"km": 3}, ["1", "2"], [[1, 2], [3, 4]], [None, 1], 3, {}]}, plain)
    assert [error["path"] for error in refused.errors or []] == [f"/rows/{at}" for at in range(1, 8)]


def test_a_predictor_of_ones_own_is_served() -> None:
    """A forest behind ``predict=`` is no linear model: it predicts, and explains nothing."""

    def stars(rows: Any) -> Any:
        given = rows if isinstance(rows, list) else [rows]
        if any("stars" not in row for row in given):
            raise ModelError("model 'late' of memory:models, update 2.7: expected the field 'stars'")
        values = [row["stars"] for row in given]
        return values if isinstance(rows, list) else values[0]

    version = version_of({}, predict=stars)
    assert answer({"rows": [{"stars": 3}, {"stars": 4}]}, version)["predictions"] == [{"value": 3}, {"value": 4}]
    assert refusal({"stars": 3}, version, explain=True).kind == "not-explainable"
    assert refusal({"rows": [{"stars": 1}, {}]}, version).errors == [
        {"path": "/rows/1", "detail": "expected the field 'stars'"}
    ]


@pytest.mark.parametrize(
    ("document", "status", "kind", "path"),
    [
        (b"", 400, "not-json", None),
        (b"{", 400, "not-json", None),
        (b"\xff", 400, "not-json", None),
        (b"[" * 100_000, 400, "not-json", None),
        (b'{"km": NaN}', 400, "not-json", None),
        ([], 422, "wrong-rows", ""),
        (3, 422, "wrong-rows", ""),
        ({"rows": {"km": 3}}, 422, "wrong-rows", "/rows"),
        ({"rows": 3}, 422, "wrong-rows", "/rows"),
        ({"rows": [], "partial": True}, 422, "wrong-rows", ""),
        ({"rows": [{}] * 1_001}, 413, "too-many-rows", None),
        ({f"name{n}": None for n in range(500)}, 422, "wrong-rows", ""),
        ({"rows": [{f"name{n}": None} for n in range(500)]}, 422, "wrong-rows", "/rows"),
    ],
)
def test_other_documents_are_refused(document: Any, status: int, kind: str, path: str | None) -> None:
    """A document that was no list of rows got an internal error."""
    refused = refusal(document)
    assert (refused.status, refused.kind) == (status, kind)
    assert (refused.errors is None) == (path is None)
    assert path is None or [error["path"] for error in refused.errors or []] == [path]


def test_a_prediction_that_is_not_finite_is_an_error() -> None:
    """JSON has no infinity: the client got null for a prediction."""
    version = version_of({"weights": np.array([1e308, 1e308])})
    assert "finite number" in str((refusal({"rows": [[10.0, 10.0]]}, version).errors or [{}])[0])


def _value(draw: Random) -> Any:
    kind = draw.randrange(9)
    if kind == 6:
        return [_value(draw) for _ in range(draw.randrange(3))]
    if kind == 7:
        return {draw.choice(("km", "sky", "rows", "")): _value(draw) for _ in range(draw.randrange(3))}
    return (
        None,
        True,
        draw.randrange(-(2**63), 2**64),
        draw.uniform(-1e308, 1e308),
        "rain",
        "\ud7ff\x00",
        ...,
        ...,
        0,
    )[kind]


def _document(draw: Random) -> Any:
    rows = [_value(draw) for _ in range(draw.randrange(4))]
    rows += [
        {name: _value(draw) for name in ("km", "sky", "night", "new") if draw.randrange(2)}
        for _ in range(draw.randrange(4))
    ]
    return draw.choice([{"rows": rows}, rows, _value(draw), *rows[:1]])


CROSSED = version_of(learned("numbers", [("km", "night"), ("sky", "night")]).parameters())
PLAIN = version_of({"weights": np.array([1.0, -1.0]), "link": "log"})


@random_examples(_document, examples=2_000)
def test_any_document_is_answered_or_refused(document: Any) -> None:
    """Any value at any place gets a prediction or a refusal, never an internal error, also together with good rows."""
    body = orjson.dumps(document)
    for version in (VERSION, CROSSED, PLAIN):
        for explain in (False, True):
            try:
                given = answer(body, version, partial=True, explain=explain)
            except Problem as problem:
                refused: Problem | None = problem
            else:
                rows = document.get("rows")
                refused = None
                assert len(given["predictions"]) == (len(rows) if isinstance(rows, list) else 1)
            assert refused is None or (refused.status in (400, 422) and refused.errors)


def test_the_best_candidates_are_those_of_the_whole_rows() -> None:
    """A client sent a thousand rows with the same user, and sorted the answer."""
    skies = [{"sky": sky, "km": float(km)} for sky in ("rain", "sun", "snow", "never seen") for km in range(100)]
    row = {"night": True, "km": 3.0}
    given = answer({"row": row, "candidates": skies, "top": 7})
    expected = LinearPredictor(MODEL.parameters())([row | each for each in skies])
    best = np.argsort(-expected, kind="stable")[:7]
    assert [each["candidate"] for each in given["predictions"]] == best.tolist()
    found = [each["probability"] for each in given["predictions"]]
    np.testing.assert_allclose(found, expected[best], rtol=1e-9)
    assert len(answer({"candidates": skies})["predictions"]) == 10
    assert answer({"row": row, "candidates": []})["predictions"] == []
    assert (given["model"], given["version"]) == ("late", 7)


def test_the_best_candidates_are_explained_as_whole_rows() -> None:
    """The parts of the user were left out, and the parts did not add up."""
    given = answer({"row": {"night": True}, "candidates": [{"sky": "rain"}, {"sky": "sun"}], "top": 1}, explain=True)
    [best] = given["predictions"]
    assert best["score"] == pytest.approx(best["intercept"] + sum(best["contributions"].values()))
    assert {"sky", "night"} <= best["contributions"].keys()


@pytest.mark.parametrize(
    ("document", "status", "paths"),
    [
        ({"row": [], "candidates": [{}]}, 422, ["/row"]),
        ({"row": {}, "candidates": [{}], "top": 0}, 422, ["/top"]),
        ({"row": {}, "candidates": [{}] * 1001}, 413, []),
        ({"row": {"km": "far"}, "candidates": [{"sky": "rain"}]}, 422, ["/row/km"]),
        (
            {"candidates": [{"sky": "rain"}] * 300 + [{"sky": 5}, {"km": "x"}]},
            422,
            ["/candidates/300/sky", "/candidates/301/km"],
        ),
    ],
)
def test_wrong_candidates_are_refused_with_their_paths(document: Any, status: int, paths: list[str]) -> None:
    """An answer said that a row was wrong, and not whether it was that of the user."""
    problem = refusal(document)
    assert problem.status == status
    assert [each["path"] for each in problem.errors or []] == paths


def test_candidates_need_a_model_with_one_score() -> None:
    """The candidates of a model of classes were ranked by their first class."""
    classes = version_of(learned("classes").parameters())
    assert "expected a model with one score" in str(refusal({"candidates": [{}]}, classes))
    assert refusal({"candidates": [{}]}, partial=True).status == 400


def test_a_row_with_a_field_of_candidates_is_a_row() -> None:
    """A model of elections has this field."""
    assert len(answer({"candidates": ["Anne", "Bob"], "km": 3.0})["predictions"]) == 1
    assert len(answer({"candidates": [{}], "row": {}, "km": 3.0})["predictions"]) == 1
