"""The default predictor handles scores, links, dense and sparse rows, and refuses invalid input."""

from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from streamiter.models import LinearPredictor
from streamiter.values.sparse_rows import SparseRows


def test_a_row_gives_a_float_and_rows_an_array() -> None:
    """One call must serve a single request or a whole batch."""
    predict = LinearPredictor({"weights": np.array([1.0, 2.0]), "intercept": 1.0, "link": "identity"})
    assert isinstance(predict(np.array([1.0, 1.0])), float)
    many = predict(np.array([[1.0, 1.0], [0.0, 0.0], [2.0, -1.0]]))
    assert many.tolist() == [4.0, 1.0, 1.0]
    assert predict(np.zeros((0, 2))).shape == (0,)


def test_logit_gives_probabilities_without_overflow() -> None:
    """exp(1000) is infinite, but a confident model must answer 1 without a warning or NaN."""
    predict = LinearPredictor({"weights": np.array([1.0]), "link": "logit"})
    assert predict([[0.0], [1000.0], [-1000.0]]).tolist() == [0.5, 1.0, 0.0]
    assert predict([np.log(3)]) == pytest.approx(0.75)


def test_weights_of_other_types_are_computed_with_64_bits() -> None:
    """A float32 or integer model must not overflow or truncate in the sum."""
    assert LinearPredictor(np.array([100, 100], dtype=np.int8))([100.0, 100.0]) == 20_000.0
    assert LinearPredictor(np.array([0.5], dtype=np.float32))([0.1]) == 0.05


@given(npst.arrays(np.int64, (3, 5), elements=st.integers(-1000, 1000)), st.sampled_from(["identity", "logit"]))
def test_sparse_rows_give_the_same_predictions_as_dense_rows(rows: Any, link: str) -> None:
    """A consumer may send sparse or dense rows."""
    predict = LinearPredictor({"weights": np.array([1.0, -2.0, 0.5, 0.0, 4.0]), "intercept": -0.5, "link": link})
    sparse = [(np.flatnonzero(row), row[row != 0]) for row in rows]
    assert predict(sparse).tolist() == predict(rows).tolist()
    assert [predict(row) for row in sparse] == [predict(row) for row in rows]


@given(npst.arrays(np.int64, (3, 5), elements=st.integers(-1000, 1000)))
def test_rows_of_a_hasher_give_the_same_predictions_as_single_rows(matrix: Any) -> None:
    """Such rows were refused, and a list of tuples took a hundred times as long."""
    predict = LinearPredictor({"weights": np.array([0.1, -0.2, 0.3, 0.0, 0.7]), "intercept": -0.5, "link": "logit"})
    rows = SparseRows.from_dense(matrix)
    assert predict(rows).tolist() == predict(list(rows)).tolist()
    assert predict(rows).tolist() == [predict(row) for row in rows]
    assert predict(rows).tolist() == pytest.approx(predict(matrix).tolist())


@pytest.mark.parametrize("table", [pandas.DataFrame, polars.DataFrame, pyarrow.table])
def test_a_table_of_numbers_is_a_matrix(table: Any) -> None:
    """Columns of any numeric types must become one matrix."""
    predict = LinearPredictor(np.array([1.0, 10.0]))
    assert predict(table({"x": [1, 2], "y": [0.5, -1.0]})).tolist() == [6.0, -8.0]
