"""The ready-made model sees shapes: fields that come late, texts, many columns and classes; its versions and states."""

from random import Random
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen

from streamiter.learn import AdaptiveLinearModel, SparseRows
from streamiter.learn.ready_made.cell_columns import COLUMNS_MAX
from streamiter.models import LinearPredictor

ROWS = 1_500

Record = dict[str, Any]


def records_of(count: int, seed: int = 1) -> list[Record]:
    """Return records whose fields come at different rows, with lists, times, truth values and missing values."""
    draw, found = Random(seed), []
    for row in range(count):
        record: Record = {"a": draw.gauss(0, 1), "is_open": draw.random() < 0.5, "town": f"town {draw.randrange(200)}"}
        if row >= 300:
            record |= {"b": draw.gauss(5, 100), "sky": draw.choice(["sun", "rain", "snow"])}
        if row >= 700:
            record["tags"] = draw.sample("xyz", draw.randrange(3))
        if row >= 200:
            record["at"] = f"2024-03-{draw.randrange(1, 29):02d}T{draw.randrange(24):02d}:30:00"
        if draw.random() < 0.1:
            del record["a"]
        if draw.random() < 0.1 and "b" in record:
            record["b"] = None
        found.append(record)
    return found


def labels_of(records: list[Record], kind: str) -> list[Any]:
    """Return labels that depend on a sine, on a product and on the hour."""
    draw, found = Random(2), []
    for record in records:
        score = 2 * np.sin(3 * record.get("a", 0.0)) + draw.gauss(0, 0.3)
        score += (record.get("b") or 0.0) / 100 * (1 if record["is_open"] else -1)
        score += 2 * ("at" in record and 8 <= int(record["at"][11:13]) < 17)
        found.append(score)
    cut = {"number": list, "binary": lambda s: [each > 0.5 for each in s]}
    return cut.get(kind, lambda s: [["low", "middle", "high"][int(np.digitize(each, [-1, 1]))] for each in s])(found)


@pytest.mark.parametrize("kind", ["binary", "number", "classes"])
def test_fields_may_come_at_any_row_of_any_batch(kind: str) -> None:
    """A column got its tables at the start of a batch, so the model depended on where the stream was cut; after a
    restore it had other bins of texts.
    """
    records, draw = records_of(ROWS), Random(3)
    labels = labels_of(records, kind)
    weights = np.array([draw.choice([0.0, 1.0, 2.0, 30.0]) for _ in records])
    model, cut, at, made = AdaptiveLinearModel(), AdaptiveLinearModel(), 0, []
    expected = model.learn_each(records, labels, weights)
    while at < ROWS:
        stop = min(ROWS, at + draw.choice([1, 5, 64, 200, 500]))
        made += np.atleast_2d(cut.learn_each(records[at:stop], labels[at:stop], weights[at:stop]).T).T.tolist()
        cut, at, state = AdaptiveLinearModel(), stop, cut.state()
        cut.restore(state)
    if kind != "classes":  # The kind of the labels is learned again, and the first rows are predicted again.
        assert np.array_equal(np.array(made)[:, 0], expected)
    assert np.array_equal(cut.predict(records), model.predict(records))
    assert frozen(cut.parameters(state=False)) == frozen(model.parameters(state=False))


@pytest.mark.parametrize("kind", ["binary", "number", "classes"])
def test_a_version_predicts_as_the_learner_and_continues_exactly(kind: str) -> None:
    """The linear member was served, and the mixture was validated."""
    records = records_of(ROWS)
    labels = labels_of(records, kind)
    model = AdaptiveLinearModel(crosses=[("a", "b"), ("sky", "a")])
    model.learn(records, labels)
    parameters, asked = model.parameters(), [*records[-300:], {}, {"a": 1e300, "new": 3.0, "sky": "hail"}]
    predictor = LinearPredictor(parameters)
    assert predictor(asked) == pytest.approx(model.predict(asked), rel=1e-6, abs=1e-6)
    assert [predictor(row) for row in asked[-9:]] == [pytest.approx(each, rel=1e-12) for each in predictor(asked)[-9:]]
    resumed = AdaptiveLinearModel(crosses=[("a", "b"), ("sky", "a")])
    resumed.start_from(parameters)
    without = AdaptiveLinearModel(crosses=[("a", "b"), ("sky", "a")])
    without.start_from(model.parameters(state=False), records=ROWS)
    assert without.predict(asked) == pytest.approx(model.predict(asked), rel=1e-6, abs=1e-6)
    more = records_of(600, seed=7)
    of_more = labels_of(more, kind)
    assert np.array_equal(resumed.learn_each(more, of_more), model.learn_each(more, of_more))
    assert np.isfinite(without.learn_each(more, of_more)).all()


@pytest.mark.parametrize("kind", ["binary", "number"])
def test_shapes_are_learned_and_the_linear_member_is_unchanged(kind: str) -> None:
    """A linear model predicts the share where labels depend on a sine and on a product."""
    records = records_of(ROWS)
    labels = np.array(labels_of(records, kind), np.float64)
    losses, states = {}, {}
    for shapes in (False, True):
        model = AdaptiveLinearModel(shapes=shapes)
        found = model.learn_each(records, labels if kind == "number" else labels > 0.5)
        losses[shapes] = np.mean((found - labels)[500:] ** 2)
        states[shapes] = model.state()["weights"]
    assert losses[True] < 0.8 * losses[False]
    linear = {name: value for name, value in states[True].items() if name != "shapes"}  # type: ignore[union-attr,attr-defined]
    assert frozen(linear) == frozen(states[False])


def test_a_state_is_for_both_models(caplog: pytest.LogCaptureFixture) -> None:
    """A service whose setting of shapes was changed lost all that its linear model had learned."""
    records = records_of(ROWS)
    labels = labels_of(records, "binary")
    linear, shaped = AdaptiveLinearModel(shapes=False), AdaptiveLinearModel()
    for model in (linear, shaped):
        model.learn(records, labels)
    told = AdaptiveLinearModel(shapes=False)
    assert told.adopt(shaped.state()) is not None  # Waiting questions have scores of other members.
    assert "the earlier model had shapes=, and this one is without" in caplog.text
    assert np.array_equal(told.predict(records), linear.predict(records))
    with_tables = AdaptiveLinearModel()
    assert with_tables.adopt(linear.state()) is not None
    assert with_tables.predict(records) == pytest.approx(linear.predict(records), abs=1e-3)
    found = with_tables.learn_each(records, labels)
    assert LinearPredictor(with_tables.parameters())(records) == pytest.approx(with_tables.predict(records), abs=1e-6)
    assert np.mean((found - np.array(labels))[-300:] ** 2) < np.mean((linear.predict(records) - np.array(labels)) ** 2)


def test_many_columns_and_classes_have_bounded_tables() -> None:
    """A matrix of a thousand columns had half a million pairs, and 300 classes a copy of all tables each."""
    draw = np.random.default_rng(4)
    x = draw.normal(size=(200, 1_000))
    model = AdaptiveLinearModel()
    model.learn(x, x[:, 0] > 0)
    shapes = model.parameters(state=False)["shapes"]
    assert len(shapes["fields"]) == COLUMNS_MAX
    assert [len(member["pairs"]) for member in shapes["members"]] == [0, 64]
    classes = AdaptiveLinearModel()
    sizes = []
    for last in (5, 30, 120):
        names = [f"class {n % last}" for n in range(240)]
        assert np.isfinite(classes.learn_each(draw.normal(size=(240, 10)), names)).all()
        sizes.append(len(classes.parameters(state=False).get("shapes", {}).get("mixture", ())))
    assert sizes == [3, 2, 2]


def test_sparse_rows_and_other_losses_have_the_linear_model_alone() -> None:
    """Sparse rows have no fields, and nothing says how members are mixed by the median."""
    rows = SparseRows.from_rows([([n % 5], [1.0]) for n in range(50)], 5)
    sparse, median = AdaptiveLinearModel(), AdaptiveLinearModel(loss="absolute")
    sparse.learn(rows, [n % 5 > 2 for n in range(50)])
    median.learn([[float(n)] for n in range(50)], [float(n) for n in range(50)])
    assert "shapes" not in sparse.parameters()
    assert "shapes" not in median.parameters()
