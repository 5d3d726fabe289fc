"""``predict_proba`` and ``explain`` of the default learner and of its predictor, for one row and for tables."""

from typing import Any

import numpy as np
import pandas
import pytest
from learn.row_streams import linear_learner

from streamiter import Columns
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, LinearRegression, LogisticRegression, SparseRows, StandardScaler
from streamiter.models import LinearPredictor
from streamiter.models.explanations import ColumnEffect, Effects, Explanation, PairEffect
from streamiter.values.hashes import place_of_text

DRAW = np.random.default_rng(2)
A, B = DRAW.normal(size=(2, 300))
ROWS: list[dict[str, Any]] = [
    {
        "a": None if n % 7 == 0 else float(a),
        "b": 1000 + float(b),
        "word": ["x", "y", None][n % 3],
        "tags": ["p", "q"][: n % 3],
        "unknown": None if n % 2 else 5.0,
    }
    for n, (a, b) in enumerate(zip(A, B, strict=True))
]
LABELS: dict[str, Any] = {
    "truth values": (A + B > 0).tolist(),
    "numbers": (3 * A + B).tolist(),
    "classes": np.array(["low", "middle", "high"])[np.digitize(A, [-1.0, 1.0])].tolist(),
}


def score_of(prediction: Any, kind: str) -> Any:
    """Return the score of a prediction; of classes the differences to the last one, which the link keeps."""
    if kind == "truth values":
        return np.log(prediction) - np.log1p(-prediction)
    return np.log(prediction) - np.log(prediction[..., -1:]) if kind == "classes" else prediction


def explained_score(explained: Any, kind: str) -> Any:
    """Return the same of a sum of parts; predicted numbers end at the range of the labels."""
    if kind == "numbers":
        return np.clip(explained.score, min(LABELS[kind]), max(LABELS[kind]))
    return explained.score - explained.score[..., -1:] if kind == "classes" else explained.score


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("crosses", [(), (("a", "b"), ("a", "word"), ("word", "tags"))], ids=["", "crosses"])
def test_the_parts_of_the_fields_add_up_to_the_score(kind: str, crosses: Any) -> None:
    """Only one row could be explained, and the learner itself could not be asked."""
    model = linear_learner(crosses=crosses)
    model.learn(ROWS, LABELS[kind])
    rows = [{name: value for name, value in row.items() if name != "unknown"} for row in ROWS[:40]]
    predict = LinearPredictor(model.parameters())
    for explained in (model.explain(rows), predict.explain(rows)):
        expected = score_of(model.predict(rows), kind)
        np.testing.assert_allclose(explained_score(explained, kind), expected, rtol=1e-7, atol=1e-7)
        names = {"a", "b", "word", "tags", *(" × ".join(cross) for cross in crosses)}
        assert set(explained.contributions) == names
    for number, row in enumerate(rows[:10]):
        one = predict.explain(row)
        np.testing.assert_allclose(one.intercept, explained.intercept)
        for name, part in one.contributions.items():
            np.testing.assert_allclose(part, explained.contributions[name][number], rtol=1e-9, atol=1e-12)


def test_a_table_is_explained_as_its_rows_are() -> None:
    """A column of a table, a field of a dict and a number of a vector are the same feature."""
    columns = Columns({"v": np.column_stack([A, B]), "word": np.array(["x", "y", "z"] * 100)})
    model = linear_learner()
    model.learn(columns, LABELS["numbers"])
    of_columns = model.explain(columns)
    assert list(of_columns.contributions) == ["v[0]", "v[1]", "word"]
    np.testing.assert_allclose(of_columns.score, model.predict(columns), rtol=1e-9)
    of_rows = model.explain(
        [{"v": [a, b], "word": word} for (a, b), word in zip(columns["v"], columns["word"], strict=True)]
    )
    table = pandas.DataFrame(model.explain(columns).contributions)
    for name, part in of_rows.contributions.items():
        np.testing.assert_allclose(part, table[name], rtol=1e-9, atol=1e-12)
    frame = pandas.DataFrame({"a": A, "b": B})
    model = linear_learner()
    model.learn(frame, LABELS["numbers"])
    explained = model.explain(frame)
    np.testing.assert_allclose(explained.score, model.predict(frame), rtol=1e-9)
    assert list(explained.contributions) == ["a", "b"]


def test_matrices_and_sparse_rows_are_explained_by_column() -> None:
    """The names of the parts are the numbers of the columns."""
    x = np.column_stack([A, B, A * B])
    sparse = SparseRows.from_dense(np.where(np.abs(x) > 0.5, x, 0.0))
    for features in (x, sparse):
        model = linear_learner()
        model.learn(features, LABELS["truth values"])
        explained = model.explain(features)
        assert set(explained.contributions) == {"0", "1", "2"}
        np.testing.assert_allclose(explained.score, score_of(model.predict(features), "truth values"), rtol=1e-7)
        one = model.explain(x[0] if features is x else (sparse[0]))
        assert one.score == pytest.approx(explained.score[0])


def test_explanations_show_the_greatest_parts_and_how_many_others_there_are() -> None:
    """A row of thirty fields was explained by ninety numbers in the order of the fields; notebooks left some out."""
    parts = {f"f{at}": (-1) ** at * float(at % 13) for at in range(15)}
    explained = Explanation(0.5, parts)
    assert list(explained.ranked)[:3] == ["f12", "f11", "f10"]
    assert explained.ranked == parts
    lines = [line.split() for line in repr(explained).splitlines()]
    assert lines[1:3] == [["score", f"{explained.score:.3g}"], ["intercept", "0.5"]]
    assert [name for name, _ in lines[3:-1]] == ["f12", "f11", "f10", "f9", "f8", "f7", "f6", "f5", "f4", "f3"]
    assert lines[-1] == ["5", "others", "together", "2"]
    assert "<td>5 others together</td><td>2</td>" in explained._repr_html_()
    several = Explanation(np.zeros(9), {"small": np.ones(9), "great": np.arange(9) - 4.0})
    assert [line.split()[0] for line in repr(several).splitlines()] == ["part", "score", "intercept", "great", "small"]
    assert all(line.endswith("…") for line in repr(several).splitlines()[1:])


def test_effects_tell_how_many_others_there_are() -> None:
    """A model of forty fields seemed to have 22."""
    columns = [ColumnEffect(f"f{at}", float(at), ()) for at in range(30)]
    assert repr(Effects(None, columns, [])).splitlines()[-1].split() == ["8", "others", "≤", "7.000"]


def test_effects_leave_out_those_of_no_strength() -> None:
    """A notebook showed twenty pairs of a strength of 0.000 below the eight fields that matter."""
    effects = Effects(None, [ColumnEffect("km", 0.5, ())], [PairEffect(("km", "sky"), 0.0004)])
    lines = [line.split() for line in repr(effects).splitlines()]
    assert lines[1:] == [["km", "0.500"], ["1", "others", "≤", "0.000"]]


@pytest.mark.parametrize("given", [list, lambda rows: Columns({"sky": [row["sky"] for row in rows]}), pandas.DataFrame])
def test_effects_are_named_by_the_texts_of_records(given: Any) -> None:
    """The strongest depot of a table was shown as "place 8929"."""
    rows = [{"sky": ("rain", "sun", "snow")[n % 3]} for n in range(300)]
    model = AdaptiveLinearModel(bits=12)
    model.learn(rows, [row["sky"] == "snow" for row in rows])
    assert "place" in repr(model.effects)
    named = model.effects.named(given([*rows[:2], {"sky": "hail"}]))
    snow = f"place {place_of_text('sky', 'snow', 12)}"
    assert {each.name for each in named.columns[0].bins} - {"rain", "sun"} == {snow}


def test_plain_linear_models_explain_tables() -> None:
    """Of a scaled model the parts are those of the scaled columns."""
    x = np.column_stack([A, 100 + B])
    model = LinearRegression(2)
    scaler = StandardScaler()
    scaler.learn(x)
    model.scale(scaler.moments)
    model.apply(model.gradient(x, 3 * A))
    explained = LinearPredictor(model.parameters()).explain(x)
    np.testing.assert_allclose(explained.score, model.predict(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["truth values", "classes"])
def test_probabilities_of_all_classes(kind: str) -> None:
    """A model of yes or no gave one probability, so the choice of a class was another line for each kind of model."""
    model = linear_learner()
    model.learn(ROWS, LABELS[kind])
    predict = LinearPredictor(model.parameters())
    found = model.predict_proba(ROWS[:9])
    assert found.shape == (9, 2 if kind == "truth values" else 4)
    assert found.sum(axis=1) == pytest.approx(1.0)
    predicted = model.predict(ROWS[:9])
    assert (found[:, 1] if kind == "truth values" else found).tolist() == predicted.tolist()
    np.testing.assert_allclose(predict.predict_proba(ROWS[:9]), found, rtol=1e-9)
    np.testing.assert_allclose(predict.predict_proba(ROWS[3]), found[3], rtol=1e-9)


def test_numbers_have_no_probabilities() -> None:
    """Two columns of 1 − prediction and prediction would look like probabilities."""
    model = linear_learner()
    model.learn(ROWS, LABELS["numbers"])
    for asked in (model, LinearPredictor(model.parameters()), LinearPredictor(LinearRegression(2).parameters())):
        with pytest.raises(ModelError, match="expected a model of classes, given one of numbers; use predict"):
            asked.predict_proba([[0.0, 0.0]])
    plain = LinearPredictor(LogisticRegression(2).parameters())
    assert plain.predict_proba([[0.0, 0.0]]).tolist() == [[0.5, 0.5]]
