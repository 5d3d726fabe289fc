"""Kinds of rows and labels that the default model takes, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen, learned
from learn.row_streams import hyperplane

from streamiter import Columns
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, BadRows
from streamiter.learn.ready_made.model_rows import RowSteps
from streamiter.values.named_rows import FieldReader

BITS = 5


def test_dicts_columns_tables_and_a_matrix_give_the_same_model() -> None:
    """A batch of dicts and a batch of columns of the same stream gave different models."""
    pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    x, labels = hyperplane(60)
    named = {"0": x[:, 0], "1": x[:, 1]}
    given: list[Any] = [
        x[:, :2],
        x[:, :2].tolist(),
        [dict(zip(named, row, strict=True)) for row in x[:, :2].tolist()],
        [dict(zip(["1", "0"], row[::-1], strict=True)) for row in x[:, :2].tolist()],
        Columns(named),
        pandas.DataFrame(named),
        polars.DataFrame(named),
        pyarrow.table(named),
    ]
    models = [AdaptiveLinearModel() for _ in given]
    found = [frozen(model.learn_each(rows, labels)) for model, rows in zip(models, given, strict=True)]
    assert found == [found[0]] * len(found)
    states = [frozen(model.state()) for model in models]
    assert states == [states[0]] * len(states)


def test_tables_have_the_fields_of_their_columns() -> None:
    """A table was read as a matrix: its columns had numbers for names, and a column of texts was refused."""
    pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    named = {"km": [1.0, 2.0, None], "town": ["Rome", None, "Oslo"]}
    records = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    expected = AdaptiveLinearModel()
    expected.learn(records, [1, 0, 1])
    for table in (pandas.DataFrame(named), polars.DataFrame(named), pyarrow.table(named)):
        model = AdaptiveLinearModel()
        model.learn(table, [1, 0, 1])
        assert frozen(model.state()) == frozen(expected.state())
        assert model.predict(table).tolist() == expected.predict(records).tolist()
    assert expected.predict([]).shape == (0,)


@pytest.mark.parametrize(
    ("labels", "link", "classes"),
    [
        ([True, False], "logit", None),
        ([0, 1.0], "logit", None),
        (np.array([0, 1], dtype=np.uint8), "logit", None),
        (["b", np.str_("a")], "logit", ["a", "b"]),
        (["b", np.str_("a"), "c"], "softmax", ["b", "a", "c"]),
        ([1, -1], "logit", [-1, 1]),
        ([0, 1, 2], "clipped", None),
        ([0, -1.0], "clipped", None),
        ([0.5, 10**25], "clipped", None),
        ([np.float32(2), True], "clipped", None),
    ],
)
def test_the_first_labels_say_what_is_predicted(labels: Any, link: str, classes: Any) -> None:
    """Labels 0 and 1 were numbers to predict, or an integer above 2**64 ended the job with a Python error."""
    model = AdaptiveLinearModel()
    model.learn([[1.0], [2.0], [3.0]][: len(labels)], labels)
    assert model.parameters()["link"] == link
    assert model.classes == classes


def test_classes_are_given_or_found() -> None:
    """Equal labels of numpy and Python were two classes; class 2 was refused, because class 0 had come first."""
    model = AdaptiveLinearModel(task="multiclass")
    labels = [0, np.int64(0), 0.0, np.float32(9.0), 9]
    found = model.learn_each([[0.0]] * 5, labels)
    assert model.classes == [0, 9]
    assert found.shape == (5, 3)
    assert found.sum(axis=1) == pytest.approx(np.ones(5))
    given = AdaptiveLinearModel(classes=["x", "y", "w"])
    assert given.learn_each([[0.0]], ["y"]).tolist() == [[1 / 3] * 3]
    with pytest.raises(BadRows, match="expected a label that is one of the classes 'x', 'y', 'w', given 'z'") as caught:
        given.learn_each([[0.0]] * 3, ["x", "z", "y"])
    assert caught.value.rows == (1,)


def test_only_rows_of_too_many_classes_are_refused() -> None:
    """One class too many refused all rows of its batch, those of known classes too."""
    model = AdaptiveLinearModel(task="classification", bits=1)
    model.learn([{}] * 999, [f"class {n}" for n in range(999)])
    with pytest.raises(BadRows, match=r"one of at most 1000 classes, given 'two'; give task=\"regression\"") as caught:
        model.learn([{}] * 4, ["class 3", "one", "two", "class 4"])
    assert caught.value.rows == (2,)
    model.learn([{}] * 3, ["class 3", "one", "class 4"])
    assert model.classes is not None
    assert len(model.classes) == 1_000


@pytest.mark.parametrize(
    ("first", "records", "labels", "weights", "rows", "message"),
    [
        ([], [{"a": 1}, {"a": "x"}], [1, 0], None, (1,), "expected numbers in the field 'a', as in the first row that"),
        ([], [{"a": "x"}, {"a": 1}], [1, 0], None, (1,), "expected texts in the field 'a', .*given 1, a number"),
        ([{"a": 1}], [{"a": "x"}, {"a": 2}], [1, 0], None, (0,), "expected numbers in the field 'a'"),
        ([{"a": "x"}], [{"a": "x"}, {"a": 2}], [1, 0], None, (1,), "expected texts in the field 'a'"),
        ([], [{"a": 1}, {"a": [2]}], [1, 0], None, (1,), r"expected a number, a text or None in .*'a', given \[2\]"),
        ([], [{"a": 1}, 5], [1, 0], None, (1,), "expected records with named fields, given 5"),
        ([{}], [{}, {}], [True, 2], None, (1,), 'label that is 0, 1 or a truth value, .*task="regression"'),
        ([{}], [{}, {}], [1, "x"], None, (1,), "label that is 0, 1 or a truth value, like the first label, given 'x'"),
        ([{}], [{}, {}], [1, None], None, (1,), "expected a label that is 0, 1 or a truth value, .* given None"),
        ([], [{}, {}], [None, math.nan], None, (0, 1), "label that is a number, a truth value or a text, given None"),
        ([], [{}, {}], [3.5, 1e101], None, (1,), r"label that is a number of at most 1e\+100 in size, given 1e\+101"),
        ([], [{}, {}], ["x", None], None, (1,), "label that is a text, a number or a truth value, given None"),
        ([], [{}, {}], [1, 0], [1, -1], (1,), "expected finite sample weights of 0 or more, given -1.0"),
        ([], [{}, {}], [1, 0], [1e31, 1], (0,), r"expected sample weights of at most 1e\+30, given 1e\+31"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_rows_are_named_and_nothing_is_learned(
    first: Any, records: Any, labels: Any, weights: Any, rows: Any, message: str
) -> None:
    """One bad record must not change the model, and must not refuse the good records of its batch later."""
    model, other = AdaptiveLinearModel(bits=BITS), AdaptiveLinearModel(bits=BITS)
    for learner in (model, other):
        if first:
            learner.learn(first, [any(label is True for label in labels) or 1])
    with pytest.raises(BadRows, match=message) as caught:
        model.learn(records, labels, weights)
    assert caught.value.rows == rows
    assert model.records == len(first)
    good = [row for row in range(len(records)) if row not in rows]
    for learner in (model, other):
        if good:
            learner.learn([records[row] for row in good], [labels[row] for row in good])
    assert learned(model) == learned(other)


def test_a_refused_row_does_not_change_what_its_field_is() -> None:
    """A text in a field of numbers was refused, and then all numbers of the field were refused, for ever."""
    model = AdaptiveLinearModel(bits=BITS)
    rows = FieldReader(bits=BITS, refuse=BadRows).rows([{"a": 1.0}, {"a": "x"}, {"a": 3.0}])
    with pytest.raises(BadRows) as caught:
        model.learn(rows, [1, 0, 1])
    assert caught.value.rows == (1,)
    good = AdaptiveLinearModel(bits=BITS)
    for records, learner in ((rows[[0, 2]], model), ([{"a": 1.0}, {"a": 3.0}], good)):
        learner.learn(records, [1, 1])
        learner.learn([{"a": 5.0}], [0])
    assert learned(model) == learned(good)
    other = AdaptiveLinearModel(bits=BITS)
    other.learn([{"t": math.nan}, {"t": "Rome"}], [1, 0])
    other.learn([{"t": "Rome"}], [1])
    assert other.parameters()["fields"] == []


def test_a_column_that_the_model_does_not_have_is_refused() -> None:
    """Compiled code checks no bounds: a wider row read and wrote the memory of other objects."""
    model = AdaptiveLinearModel(bits=BITS)
    rows = model.rows([{"a": 1.0}])
    with pytest.raises(ModelError, match=r"expected rows of .* hashed and .* numeric columns, given column 4000"):
        model.step(rows._replace(indices=rows.indices + 4_000_000), RowSteps.one_each(1, learns=True), [1])


def test_fields_of_a_refused_batch_can_be_predicted() -> None:
    """A new field of a batch that was refused had no column, and its prediction read foreign memory."""
    model = AdaptiveLinearModel(bits=1)
    model.learn([{"a": 1.0}], [1])
    with pytest.raises(BadRows):
        model.learn([{f"new {n}": 1.0 for n in range(1_000)}], ["no label"])
    assert model.predict([{"a": 1.0, "new 999": 3.0}]).tolist() == model.predict([{"a": 1.0}]).tolist()
    restored = AdaptiveLinearModel(bits=1)
    restored.restore(model.state())
    assert len(restored.parameters()["fields"]) == len(restored.parameters()["center"]) == 1_001
