"""The place holder has the features of the current mini-batch, and refuses input that is no mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter.errors import ModelError
from streamiter.networks.data import PlaceHolder
from streamiter.values.sparse_rows import SparseRows

ROWS = st.lists(
    st.dictionaries(st.integers(0, 19), st.floats(-5, 5, allow_subnormal=False), max_size=6), min_size=1, max_size=6
)


def _sparse(rows: list[dict[int, float]], width: int) -> SparseRows:
    return SparseRows.from_rows([(sorted(row), [row[at] for at in sorted(row)]) for row in rows], width)


@given(ROWS, st.sampled_from([20, 1_000_000]))
def test_rows_count_the_features_that_are_there(rows, width):
    """Positions are found by sorting if the features are many, and by a table if they are few; both must agree."""
    place_holder = PlaceHolder(width, "float64")
    sparse = _sparse(rows, width)
    place_holder.feed_data(sparse)
    assert place_holder.indices.tolist() == sorted({at for row in rows for at in row})
    assert place_holder.indices.dtype == np.int64
    held = place_holder.rows
    assert place_holder.indices[held.indices].tolist() == sparse.indices.tolist()
    assert held.values.tolist() == sparse.values.tolist()
    assert held.indptr.tolist() == sparse.indptr.tolist()
    assert place_holder.batch_size == len(rows)


@given(ROWS)
def test_sparse_rows_have_the_values_of_the_current_mini_batch(rows):
    """The place holder returned the values and the features per row of the previous mini-batch."""
    place_holder = PlaceHolder(20, "float32")
    place_holder.feed_data(_sparse([{1: 1.0, 2: 1.0}], 20))
    assert place_holder.values is None
    assert place_holder.features_per_row == 2
    place_holder.feed_data(_sparse(rows, 20))
    numbers = [row[at] for row in rows for at in sorted(row)]
    assert (place_holder.values is None) == all(number == 1.0 for number in numbers)
    if place_holder.values is not None:
        assert place_holder.values.dtype == "float32"
        np.testing.assert_array_equal(place_holder.values, np.array(numbers, dtype="float32"))
    lengths = {len(row) for row in rows}
    assert place_holder.features_per_row == (lengths.pop() if len(lengths) == 1 else None)


def test_prepared_rows_are_taken_as_they_are():
    """A mini-batch that returns in every epoch was searched for its features in every epoch."""
    first, again = PlaceHolder(100, "float32"), PlaceHolder(100, "float32")
    first.feed_data(_sparse([{3: 1.0, 50: 2.0}, {50: 1.0}], 100))
    again.feed_data(first.rows, indices=first.indices)
    assert again.rows is first.rows
    assert again.indices is first.indices


def test_dense_rows_have_all_features():
    """Dense rows pull all parameters."""
    place_holder = PlaceHolder(3, "float32")
    place_holder.feed_data([[1, 0, 2]], [1])
    assert place_holder.indices.tolist() == [0, 1, 2]
    assert place_holder.rows.dtype == place_holder.labels.dtype == "float32"
    assert (place_holder.is_sparse, place_holder.feature_dimension, place_holder.training) == (False, 3, False)


def test_without_a_mini_batch_there_are_no_rows():
    """A layer read the rows before any data had arrived."""
    with pytest.raises(ModelError, match="expected a mini-batch, given none yet; call feed_data first"):
        _ = PlaceHolder(4, "float64").rows
