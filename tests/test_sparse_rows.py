"""Sparse rows are compared with equal dense matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from streamiter import Flow
from streamiter.errors import ModelError
from streamiter.learn import LogisticRegression
from streamiter.values.sparse_rows import SparseRows

WIDTH = 7

values = st.integers(-8, 8).map(float)
sparse_rows = st.lists(st.lists(st.tuples(st.integers(0, WIDTH - 1), values), max_size=9), max_size=6)


def built(rows):
    return SparseRows.from_rows([([i for i, _ in row], [v for _, v in row]) for row in rows], WIDTH)


def dense(rows):
    matrix = np.zeros((len(rows), WIDTH))
    for number, row in enumerate(rows):
        for index, value in row:
            matrix[number, index] += value
    return matrix


@given(sparse_rows)
def test_rows_have_the_same_meaning_in_any_order(rows):
    """Hashed features arrived in another order, or two of a row had one place, and the row had another value."""
    built_rows = built(rows)
    assert len(built_rows) == len(rows)
    assert built_rows.to_dense().tolist() == dense(rows).tolist()
    for indices, _ in built_rows.rows():
        assert indices == sorted(set(indices))


@given(sparse_rows, st.data())
def test_parts_of_rows_are_parts_of_the_matrix(rows, data):
    """A batch was cut, or bad rows were removed from it, and the other rows changed."""
    built_rows, matrix = built(rows), dense(rows)
    start, stop = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    assert built_rows[start:stop].to_dense().tolist() == matrix[start:stop].tolist()
    assert built_rows[::2].to_dense().tolist() == matrix[::2].tolist()
    if rows:
        some = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
        assert built_rows[some].to_dense().tolist() == matrix[some].tolist()
        mask = np.array([number % 2 == 0 for number in range(len(rows))])
        assert built_rows[mask].to_dense().tolist() == matrix[mask].tolist()
        parts = [built_rows[:start], built_rows[start:]]
        assert SparseRows.concatenate(parts) == built_rows


@given(sparse_rows)
def test_a_row_is_its_indices_and_values(rows):
    """A loop over rows raised an error of numpy, or a row's number from the end gave another row."""
    built_rows, matrix = built(rows), dense(rows)
    each = list(built_rows)
    assert len(each) == len(built_rows)
    for number, (indices, values) in enumerate(each):
        row = np.zeros(WIDTH)
        row[indices] = values
        assert row.tolist() == matrix[number].tolist()
        for same in (built_rows[number], built_rows[np.int32(number)], built_rows[number - len(rows)]):
            assert [part.tolist() for part in same] == [indices.tolist(), values.tolist()]
    assert SparseRows.from_rows(each, WIDTH) == built_rows


@given(sparse_rows, st.slices(6))
def test_a_slice_is_that_of_a_list(rows, part):
    """A slice with a step gave other rows than a slice of a list."""
    assert built(rows)[part] == built(rows[part])


@pytest.mark.parametrize(
    "which", [[], np.array([], dtype=bool)[:0], [2, 0, 2], [-1], [0, 1, 2], [1, 2], [1, 1], [True, False, True]]
)
def test_rows_are_chosen_by_positions_or_by_a_mask(which):
    """Positions or a mask chose other rows than they choose in a matrix."""
    rows = built([[(0, 1.0)], [(1, 2.0), (2, 3.0)], [(6, 4.0)]])
    chosen = np.asarray(which, dtype=None if len(which) else int)
    assert rows[which if len(which) else []].to_dense().tolist() == rows.to_dense()[chosen].tolist()
    assert rows[chosen].to_dense().tolist() == rows.to_dense()[chosen].tolist()
    assert not np.shares_memory(rows[chosen].values, rows.values)  # no few rows keep all of them alive


@given(sparse_rows)
def test_products_are_those_of_the_matrix(rows):
    """A product differed from the product of the matrix. The sums are exact, because all numbers are whole."""
    built_rows, matrix = built(rows), dense(rows)
    assert built_rows.dot(np.arange(WIDTH) - 3.0).tolist() == (matrix @ (np.arange(WIDTH) - 3.0)).tolist()
    by_row = np.arange(len(rows)) - 2.0
    columns, sums = built_rows.transposed_dot(by_row)
    named = sorted({index for row in rows for index, _ in row})
    assert columns.tolist() == named
    assert sums.tolist() == (by_row @ matrix)[named].tolist()


def test_a_row_has_the_same_result_in_any_batch():
    """The cut of a transport batch changed a result in its last bit."""
    random = np.random.default_rng(5)
    rows = SparseRows.from_dense(random.normal(size=(50, 40)) * (random.random((50, 40)) < 0.3))
    weights = random.normal(size=40)
    whole = rows.dot(weights)
    alone = np.concatenate([rows[number : number + 1].dot(weights) for number in range(50)])
    assert whole.tobytes() == alone.tobytes()


def test_wide_rows_have_the_same_sums_with_the_slower_sort():
    """The index and the position of a wide row exceeded 63 bits, and its sums were wrong."""
    narrow = SparseRows.from_rows([([5, 3], [1.0, 2.0]), ([3], [4.0])], width=8)
    wide = SparseRows([0, 2, 3], [3, 5, 3], [2.0, 1.0, 4.0], width=2**62)
    for rows in (narrow, wide):
        columns, sums = rows.transposed_dot(np.array([1.0, 10.0]))
        assert (columns.tolist(), sums.tolist()) == ([3, 5], [42.0, 1.0])


def test_dense_rows_keep_zeros_only_when_asked():
    """Dense SGD shrinks zeros with l2, and the sparse rows to compare with it had no zeros."""
    matrix = [[0.0, 1.0], [0.0, 0.0]]
    assert list(SparseRows.from_dense(matrix).rows()) == [([1], [1.0]), ([], [])]
    assert list(SparseRows.from_dense(matrix, keep_zeros=True).rows())[1] == ([0, 1], [0.0, 0.0])


@pytest.mark.parametrize("kind", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array, sparse.lil_array])
def test_sparse_matrices_of_scipy_are_rows(kind):
    rows = SparseRows.from_dense([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    matrix = kind(rows.to_dense())
    assert SparseRows.from_scipy(matrix) == rows
    flow = Flow("items")
    items = flow.from_items(matrix).collect()
    flow.run()
    assert SparseRows.from_rows(items.items, 3) == rows


def test_scipy_rows_in_another_order_are_sorted():
    matrix = sparse.csr_array((np.array([1, 2, 3]), np.array([2, 0, 0]), np.array([0, 3])), shape=(1, 3))
    assert list(SparseRows.from_scipy(matrix).rows()) == [([0, 2], [5.0, 1.0])]


def test_learners_and_predictors_take_sparse_matrices_of_scipy():
    """Users made a dense matrix of a million hashed features, or copied three arrays by hand."""
    random = np.random.default_rng(7)
    matrix = sparse.random_array((200, 50), density=0.1, rng=random, format="csr")
    labels = (np.asarray(matrix.sum(axis=1)) > 2.5).astype(float)
    learned = []
    for rows in (SparseRows.from_scipy(matrix), matrix):
        model = LogisticRegression(50)
        model.fit(rows, labels, rounds=3)
        learned.append(model.predict(rows))
    np.testing.assert_array_equal(*learned)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.eye(2), "expected a sparse matrix of numbers of scipy, given ndarray"),
        (sparse.csr_array(np.eye(2, dtype=complex)), r"given complex128 of shape \(2, 2\)"),
        (sparse.coo_array(np.ones(3)), r"given float64 of shape \(3,\)"),
    ],
)
def test_other_matrices_are_refused(given, message):
    with pytest.raises(ModelError, match=message):
        SparseRows.from_scipy(given)
