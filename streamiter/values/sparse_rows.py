"""Sparse rows: rows that name only some of their features, such as rows of hashed features. All other features are 0.

>>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([], []), ([5, 5], [1.0, 1.0])], width=8)
>>> rows
SparseRows(3 rows of width 8, 3 values)
>>> rows.to_dense()[2].tolist()
[0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
>>> rows.dot(np.arange(8.0)).tolist()
[13.0, 0.0, 10.0]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NoReturn, final, overload

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.values.numbers import Floats, Indices
from streamiter.values.tables import as_floats

SparseRow = tuple[Indices, Floats]
"""The indices of the features that a row names, and their values: two arrays of equal length."""


@final
class SparseRows:
    """A batch of sparse rows of one width (compressed sparse rows); it is never changed in place.

    Row r names the columns ``indices[indptr[r]:indptr[r+1]]``, with ``values`` at the same places; columns that it does
    not name are 0. Within a row the columns ascend, and none occurs twice: rows given in another order are sorted, and
    values of one column are added. A column that is named with the value 0 stays named.

    ``rows[3]`` is the fourth row, the tuple ``(indices, values)``, and iterating yields such a tuple for each row.
    ``rows[2:5]``, ``rows[[3, 1]]`` and ``rows[mask]`` are ``SparseRows``. A choice of rows by positions or mask is a
    copy, the others are views. Predictors take ``SparseRows`` or these tuples.

    >>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([], []), ([5], [2.0])], width=8)
    >>> rows[0], rows[-1]
    ((array([2, 7]), array([3., 1.])), (array([5]), array([2.])))
    >>> rows[np.array([True, False, True])]
    SparseRows(2 rows of width 8, 3 values)
    >>> [float(values.sum()) for indices, values in rows]
    [4.0, 0.0, 2.0]

    Raises :class:`~streamiter.errors.ModelError` for arrays that do not fit together, or do not fit the width.
    """

    __slots__ = ("_row_of_value", "indices", "indptr", "values", "width")

    def __init__(self, indptr: npt.ArrayLike, indices: npt.ArrayLike, values: npt.ArrayLike, width: int) -> None:
        self.width = width
        self.indptr = _as_indices("indptr", indptr)
        self.indices = _as_indices("indices", indices)
        self.values = as_floats("SparseRows", "values", values)
        self._row_of_value: Indices | None = None
        self._check_indptr()
        self._check_indices()
        if not self._is_canonical():
            self._make_canonical()

    @classmethod
    def _trusted(cls, indptr: Indices, indices: Indices, values: Floats, width: int) -> SparseRows:
        rows = cls.__new__(cls)
        rows.indptr, rows.indices, rows.values, rows.width = indptr, indices, values, width
        rows._row_of_value = None
        return rows

    @classmethod
    def from_rows(
        cls, rows: Iterable[tuple[Sequence[int] | Indices, Sequence[float] | Floats]], width: int
    ) -> SparseRows:
        """Return sparse rows made of a pair (indices, values) for each row."""
        indices: list[Any] = []
        values: list[Any] = []
        indptr = [0]
        for row, (row_indices, row_values) in enumerate(rows):
            if len(row_indices) != len(row_values):
                raise ModelError(
                    f"SparseRows: expected as many values as indices in row {row}, "
                    f"given {len(row_values)} for {len(row_indices)}"
                )
            indices.append(row_indices)
            values.append(row_values)
            indptr.append(indptr[-1] + len(row_indices))
        as_array = _as_indices("indices", _joined(indices))
        made = cls._trusted(
            np.array(indptr, dtype=np.intp), as_array, as_floats("SparseRows", "values", _joined(values)), width
        )
        made._check_indices()
        if not made._is_canonical():
            made._make_canonical()
        return made

    @classmethod
    def from_scipy(cls, matrix: Any) -> SparseRows:
        """Return the rows of a sparse matrix or array of scipy; numbers that it stores stay named, zeros too.

        Learners, predictors and ``from_items`` take such a matrix as it is.

        >>> from scipy.sparse import csr_array
        >>> SparseRows.from_scipy(csr_array([[0.0, 2.0], [0.0, 0.0]]))
        SparseRows(2 rows of width 2, 1 values)
        """
        if not is_scipy_sparse(matrix) or len(matrix.shape) != 2 or matrix.dtype.kind not in "biuf":
            given = f"{matrix.dtype} of shape {matrix.shape}" if is_scipy_sparse(matrix) else type(matrix).__name__
            raise ModelError(f"SparseRows: expected a sparse matrix of numbers of scipy, given {given}")
        rows = matrix.tocsr()
        return cls(rows.indptr, rows.indices, rows.data, rows.shape[1])

    @classmethod
    def from_dense(cls, rows: npt.ArrayLike, *, keep_zeros: bool = False) -> SparseRows:
        """Return the rows of a matrix (n, width): the numbers that are not 0, or all numbers with ``keep_zeros``."""
        matrix = as_floats("SparseRows", "rows", rows)
        if matrix.ndim != 2:
            raise ModelError(f"SparseRows: expected a matrix (rows, features), given shape {matrix.shape}")
        there = np.ones(matrix.shape, dtype=np.bool_) if keep_zeros else matrix != 0.0
        _, indices = np.nonzero(there)
        indptr = _starts_of(np.count_nonzero(there, axis=1))
        return cls._trusted(indptr, indices, matrix[there], matrix.shape[1])

    @classmethod
    def concatenate(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """Return all parts, at least one, as one batch; all have one width."""
        widths = {part.width for part in parts}
        if len(widths) != 1:
            raise ModelError(f"SparseRows: expected parts of one width, given {sorted(widths)}; make the widths equal")
        lengths = np.concatenate([np.diff(part.indptr) for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        values = np.concatenate([part.values for part in parts])
        return cls._trusted(_starts_of(lengths), indices, values, parts[0].width)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @overload
    def __getitem__(self, which: int) -> SparseRow: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any]) -> SparseRows: ...
    def __getitem__(
        self, which: int | slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any]
    ) -> SparseRow | SparseRows:
        if isinstance(which, (int, np.integer)) and not isinstance(which, bool):
            return self._row(int(which))
        if isinstance(which, slice):
            return self._cut(which) if which.step in (None, 1) else self._take(np.arange(len(self))[which])
        return self._take(_as_choice(which))

    def __iter__(self) -> Iterator[SparseRow]:
        for start, stop in pairwise(self.indptr.tolist()):
            yield self.indices[start:stop], self.values[start:stop]

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(
            f"{self!r}: expected to be used as sparse rows, given to a function that makes an array of them; write "
            ".to_dense() for the matrix (rows, width)"
        )

    def _row(self, number: int) -> SparseRow:
        if not -len(self) <= number < len(self):
            raise IndexError(f"SparseRows: expected a row from {-len(self)} to {len(self) - 1}, given {number}")
        start, stop = self.indptr[number % len(self)], self.indptr[number % len(self) + 1]
        return self.indices[start:stop], self.values[start:stop]

    def _cut(self, which: slice) -> SparseRows:
        start, stop, _ = which.indices(len(self))
        indptr = self.indptr[start : max(start, stop) + 1]
        first, last = indptr[0], indptr[-1]
        return self._trusted(indptr - first, self.indices[first:last], self.values[first:last], self.width)

    def _take(self, chosen: npt.NDArray[Any]) -> SparseRows:
        starts, stops = self.indptr[:-1][chosen], self.indptr[1:][chosen]
        lengths = stops - starts
        indptr = _starts_of(lengths)
        if len(starts) and (starts[1:] == stops[:-1]).all():  # neighbours are copied in one piece
            first, last = starts[0], stops[-1]
            indices, values = self.indices[first:last].copy(), self.values[first:last].copy()
        else:
            source = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
            indices, values = self.indices[source], self.values[source]
        return self._trusted(indptr, indices, values, self.width)

    def dot(self, weights: Floats) -> Floats:
        """Return Σ values·weights of each row. The result of a row does not depend on the other rows."""
        products = self.values * weights[self.indices]
        return sums_by(self.row_of_value, products, len(self))

    def transposed_dot(self, by_row: Floats) -> tuple[Indices, Floats]:
        """Return the columns that any row names, ascending, and their sums Σ over rows of ``by_row``·values."""
        if len(self) == 1:
            return self.indices, self.values * by_row[0]
        products = self.values * by_row[self.row_of_value]
        order = _stable_order(self.indices, self.width)
        ordered = self.indices[order]
        first_of_column = np.flatnonzero(np.diff(ordered, prepend=-1))
        if not len(first_of_column):
            return ordered, products
        return ordered[first_of_column], np.add.reduceat(products[order], first_of_column)

    def transposed_dot_dense(self, by_row: Floats) -> Floats:
        """Return these sums for all columns; quicker if most columns are named, as in all rows of a training."""
        return sums_by(self.indices, self.values * by_row[self.row_of_value], self.width)

    def rows(self) -> Iterable[tuple[list[int], list[float]]]:
        """Yield indices and values of each row as lists, for arithmetic in plain Python."""
        bounds, indices, values = self.indptr.tolist(), self.indices.tolist(), self.values.tolist()
        for start, stop in pairwise(bounds):
            yield indices[start:stop], values[start:stop]

    def to_dense(self) -> Floats:
        """Return the rows as a matrix (n, width); meant for small matrices."""
        matrix = np.zeros((len(self), self.width))
        matrix[self.row_of_value, self.indices] = self.values
        return matrix

    @property
    def row_of_value(self) -> Indices:
        """The number of the row of each value."""
        if self._row_of_value is None:
            self._row_of_value = np.repeat(np.arange(len(self)), self.indptr[1:] - self.indptr[:-1])
        return self._row_of_value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseRows):
            return NotImplemented
        return (
            self.width == other.width
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
            and np.array_equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SparseRows({len(self)} rows of width {self.width}, {len(self.values)} values)"

    def _check_indptr(self) -> None:
        indptr, indices = self.indptr, self.indices
        if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
            raise ModelError(
                f"SparseRows: expected indptr to ascend from 0 to the number of values, {len(indices)}, "
                f"given {indptr[:8].tolist()}…"
            )

    def _check_indices(self) -> None:
        indptr, indices = self.indptr, self.indices
        if self.values.shape != indices.shape:
            raise ModelError(f"SparseRows: given {len(indices)} indices but values of shape {self.values.shape}")
        if len(indices) and (indices.min() < 0 or indices.max() >= self.width):
            at = int(np.flatnonzero((indices < 0) | (indices >= self.width))[0])
            raise ModelError(
                f"SparseRows: expected indices from 0 to {self.width - 1} (width {self.width}), given "
                f"{indices[at]} in row {int(np.searchsorted(indptr, at, side='right')) - 1}; "
                f"give a larger width to the rows and to the model"
            )

    def _is_canonical(self) -> bool:
        ascends = self.indices[1:] > self.indices[:-1]
        if len(self) == 1:
            return bool(ascends.all())
        boundaries = self.indptr[1:-1]
        ascends[boundaries[(boundaries > 0) & (boundaries < len(self.indices))] - 1] = True
        return bool(ascends.all())

    def _make_canonical(self) -> None:
        rows = self.row_of_value
        order = np.lexsort((self.indices, rows))
        rows, indices, values = rows[order], self.indices[order], self.values[order]
        first = np.ones(len(indices), dtype=np.bool_)
        first[1:] = (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
        self.indptr = _starts_of(np.bincount(rows[first], minlength=len(self)))
        self.indices = indices[first]
        self.values = np.add.reduceat(values, np.flatnonzero(first))
        self._row_of_value = None


def is_scipy_sparse(given: object) -> bool:
    """Return whether it is a sparse matrix or array of scipy, which this module does not import."""
    scipy_sparse = sys.modules.get("scipy.sparse")
    return scipy_sparse is not None and scipy_sparse.issparse(given)


def sparse_if_scipy(given: Any) -> Any:
    """Return a sparse matrix of scipy as `SparseRows`, and other objects unchanged."""
    return SparseRows.from_scipy(given) if is_scipy_sparse(given) else given


def sums_by(groups: Indices, values: Floats, count: int) -> Floats:
    """Return the sum of the values of each of ``count`` groups; values are added in their order."""
    return np.asarray(np.bincount(groups, weights=values, minlength=count), dtype=np.float64)


def _as_choice(which: object) -> npt.NDArray[Any]:
    given = np.asarray(which)
    if given.ndim != 1 or (given.dtype.kind not in "biu" and given.size):
        raise IndexError(
            "SparseRows: expected the number of a row, a slice, a list of numbers of rows or a mask, given "
            f"{str(which)[:80]}"
        )
    return given if given.dtype.kind == "b" else given.astype(np.intp, copy=False)


def _as_indices(what: str, given: Any) -> Indices:
    array = np.asarray(given)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ModelError(
            f"SparseRows: expected {what} as a list of integers, given shape {array.shape} of {array.dtype}"
        )
    return array.astype(np.intp, copy=False)


def _joined(parts: list[Any]) -> npt.NDArray[Any]:
    """Return one array of all parts. Empty lists are left out: their dtype would become the dtype of the result."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return np.zeros(0, dtype=np.intp)
    if len(filled) == 1 or any(isinstance(part, np.ndarray) for part in filled):
        return np.concatenate(filled) if len(filled) > 1 else np.asarray(filled[0])
    return np.array(list(chain.from_iterable(filled)))


def _starts_of(lengths: Indices) -> Indices:
    starts = np.zeros(len(lengths) + 1, dtype=np.intp)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _stable_order(indices: Indices, width: int) -> Indices:
    """Return the order that sorts ``indices`` and keeps equal indices in sequence.

    Each index is packed with its position into one integer; sorting these integers is several times quicker than a
    stable argsort. 63 bits are enough for a width of 2**32 and two thousand million values.
    """
    position_bits = len(indices).bit_length()
    if width.bit_length() + position_bits > 63:
        return np.argsort(indices, kind="stable")
    packed = (indices << position_bits) | np.arange(len(indices))
    packed.sort()
    return packed & ((1 << position_bits) - 1)


def rows_to_predict(subject: str, x: object, features: int) -> tuple[SparseRows | Floats, bool]:
    """Return the rows to predict, and whether a single row was given.

    One row is an array of ``features`` numbers or the tuple ``(indices, values)``. Several rows are a matrix, a table
    of as many columns, a list of such tuples or ``SparseRows``. Raises ModelError for rows of any other form.

    >>> rows_to_predict("model", ([1], [2.0]), 3)
    (SparseRows(1 rows of width 3, 1 values), True)
    """
    x = sparse_if_scipy(x)
    if isinstance(x, SparseRows):
        if x.width != features:
            raise ModelError(
                f"{subject}: expected sparse rows of width {features}, given width {x.width}; make them with the "
                "hasher that the model was trained with"
            )
        return x, False
    if isinstance(x, tuple):
        return _sparse_rows(subject, [x], features), True
    if isinstance(x, list) and x and isinstance(x[0], tuple):
        return _sparse_rows(subject, x, features), False
    rows = as_floats(subject, "rows", x)
    if rows.ndim not in (1, 2) or rows.shape[-1] != features:
        raise ModelError(
            f"{subject}: expected rows of {features} features, as ({features},) or (n, {features}), given shape "
            f"{rows.shape}"
        )
    return np.atleast_2d(rows), rows.ndim == 1


def _sparse_rows(subject: str, pairs: list[Any], features: int) -> SparseRows:
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ModelError(
                f"{subject}: expected sparse rows as tuples (indices, values), given {pair!r:.100}; a dense row is a "
                "list or an array"
            )
    try:
        return SparseRows.from_rows(pairs, features)
    except (TypeError, ValueError, ModelError) as error:
        raise ModelError(f"{subject}: expected sparse rows as tuples (indices, values): {error}") from error
