"""Mini-batches as arrays, and the refusal of rows that a model cannot learn from.

The features of a mini-batch are a matrix, a row for each record, or ``SparseRows``; :class:`Examples` adds a target and
a weight for each row. A check that finds bad rows raises :class:`BadRows`, which names them, so that an operator
refuses just these records and learns from the others. Offline training keeps its examples in :class:`ExampleBlocks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, described, raising_line, shortened
from streamiter.operators.declared_state import DeclaredState, again, declared
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.known_fields import BadKind
from streamiter.values.numbers import Floats, Indices
from streamiter.values.records import Batch, Columns, take
from streamiter.values.sparse_rows import SparseRows, sparse_if_scipy
from streamiter.values.tables import as_floats

# The number of rows that a message names; more would hide the reason. All bad rows are in ``BadRows.rows``.
_ROWS_NAMED: Final = 5


class BadRows(ModelError):
    """Single rows of a mini-batch are at fault, not the model; the model has learned from no row of the mini-batch.

    ``rows`` are the positions of these rows in the mini-batch. ``reason`` is the message without the positions;
    ``reasons`` are the reasons of single rows, where they differ. So an operator can refuse these records and learn
    from the others.

    >>> print(BadRows([3], "LogisticRegression: expected targets 0 or 1, given 7.0"))
    LogisticRegression: expected targets 0 or 1, given 7.0 (row 3 of the batch)
    """

    def __init__(self, rows: Iterable[int], reason: str, reasons: Mapping[int, str] = MappingProxyType({})) -> None:
        self.rows = tuple(int(row) for row in rows)
        self.reason = reason
        self.reasons = reasons
        named = ", ".join(map(str, self.rows[:_ROWS_NAMED]))
        more = f" and {len(self.rows) - _ROWS_NAMED} more" if len(self.rows) > _ROWS_NAMED else ""
        noun = "row" if len(self.rows) == 1 else "rows"
        super().__init__(f"{reason} ({noun} {named}{more} of the batch)")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows, self.reason, dict(self.reasons))

    def of_row(self, row: int) -> BadRows:
        """Return the error of one of the rows."""
        return BadRows([row], self.reasons[row]) if row in self.reasons else self


class Refusals(TypedDict):
    """What happens to records that a step of a training refuses: the options of the step."""

    on_error: RejectionPolicy
    dead_letter: Topic | None


def rows_of_wrong_kind(bad: BadKind, record_of: Callable[[int], Any] | None) -> BadRows:
    """Return the error for values of a wrong kind; it shows them if the records of the rows are known."""
    rows = np.flatnonzero(bad.rows).tolist()
    if record_of is None:
        return BadRows(rows, bad.reason())
    reasons = {row: bad.reason(record_of(row)) for row in rows}
    return BadRows(rows, reasons[rows[0]], reasons)


def holds(good: npt.NDArray[np.bool_]) -> bool:
    """Whether all elements are true; several times quicker than ``good.all()`` for short arrays."""
    return int(np.count_nonzero(good)) == good.size


def refuse_rows_unless(good: npt.NDArray[np.bool_], owner: str, expected: str, given: Floats, advice: str = "") -> None:
    """Raise ``BadRows`` for the rows that are not ``good``; it shows the value of the first one, and the advice."""
    if not holds(good):
        bad = np.flatnonzero(~good)
        raise BadRows(bad, f"{owner}: expected {expected}, given {given[bad[0]]}" + (f"; {advice}" if advice else ""))


def row_vector(owner: str, what: str, given: npt.ArrayLike, length: int) -> Floats:
    """Return ``given`` as ``length`` numbers, one for each row. The caller checks for NaN and infinity."""
    vector = as_floats(owner, what, given)
    if vector.shape != (length,):
        raise ModelError(
            f"{owner}: expected {length} {what}, one for each row, given shape {vector.shape}; "
            f"give one number for each row of the batch"
        )
    return vector


def row_weights(owner: str, given: npt.ArrayLike, length: int) -> Floats:
    """Return sample weights, one for each row; refuse weights that are negative or not finite."""
    weights = row_vector(owner, "sample weights", given, length)
    refuse_rows_unless((weights >= 0) & (weights < np.inf), owner, "finite sample weights of 0 or more", weights)
    return weights


# Squares of coordinates are added up; the square of 1e150 is still finite.
_COORDINATE_LIMIT: Final = 1e150


def as_points(owner: str, given: object, width: int | None = None, *, what: str = "points") -> Floats:
    """Return points, dense rows of finite numbers, as a matrix; refuse rows of any other kind.

    k-means and scalers learn from points. ``what`` is the word for them in messages.
    """
    if isinstance(given, Columns):
        raise ModelError(
            f"{owner}: expected {what} as arrays of numbers, given {given}; choose and join its columns first: "
            f"{what}.map_batch(lambda batch: np.column_stack([batch[…], batch[…]]))"
        )
    points = as_floats(owner, what, given)
    if points.ndim != 2 or points.shape[1] == 0 or width not in (None, points.shape[1]):
        wanted = "numbers" if width is None else f"{width} numbers"
        if points.ndim == 2 and points.shape[1]:
            raise ModelError(
                f"{owner}: expected {what} as arrays of {wanted}, given some of {points.shape[1]}; give all of "
                "them the same columns"
            )
        raise ModelError(
            f"{owner}: expected {what} as arrays of {wanted}, given {shortened(given)} (shape {points.shape}); "
            "give each of them as an array or list"
        )
    good = np.abs(points) <= _COORDINATE_LIMIT
    if not good.all():
        bad = np.flatnonzero(~good.all(axis=1))
        given_value = points[bad[0]][~good[bad[0]]][0]
        raise BadRows(bad, f"{owner}: expected {what} of numbers of at most {_COORDINATE_LIMIT:g}, given {given_value}")
    return points


Result = TypeVar("Result")


def row_hashes(rows: Floats, start: int | np.uint64 = 0) -> npt.NDArray[np.uint64]:
    """Return a hash of each row, by SplitMix64 after each column; equal numbers have equal hashes (0 and −0, too)."""
    hashes = np.full(len(rows), start, dtype=np.uint64)
    for column in np.ascontiguousarray((rows + 0.0).T).view(np.uint64):  # Adding 0 turns −0 into 0.
        hashes ^= column
        hashes += np.uint64(0x9E3779B97F4A7C15)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def of_good_rows(function: Callable[[Any], Result], mini_batch: Batch, out: Output) -> Result | None:
    """Return ``function(mini_batch)`` of the good rows: if the call raises ``BadRows``, call again without these rows.

    The bad rows follow the policy of the step that ``out`` belongs to. Returns None if no row is left.
    """
    return of_numbered_rows(lambda rows, _: function(rows), mini_batch, 0, out)


def of_numbered_rows(
    function: Callable[[Any, Indices], Result], mini_batch: Batch, first: int, out: Output
) -> Result | None:
    """Do as :func:`of_good_rows`, with a function that also takes the numbers of the rows, from ``first`` on."""
    numbers = np.arange(first, first + len(mini_batch))
    while len(mini_batch):
        try:
            return function(mini_batch, numbers)
        except BadRows as bad:
            mini_batch = without(mini_batch, bad, out)
            numbers = np.delete(numbers, list(bad.rows))
    return None


def blaming_rows(
    function: Callable[[Any], Result], mini_batch: Batch, check: Callable[[Any], object], of_user: str = ""
) -> Result:
    """Return ``function(mini_batch)``; if the function fails as a whole, find the rows at fault.

    ``check`` is called for each row alone, and ``BadRows`` names the rows for which it fails. A ConfigurationError is
    passed on: no row is at fault. ``of_user`` is the option with which the user gave the function.
    """
    try:
        return function(mini_batch)
    except (BadRows, ConfigurationError):
        raise
    except Exception as error:
        alone = ((row, _reason(check, take(mini_batch, [row]), of_user)) for row in range(len(mini_batch)))
        if reasons := {row: reason for row, reason in alone if reason is not None}:
            raise BadRows(reasons, next(iter(reasons.values())), reasons) from error
        raise


def _reason(check: Callable[[Any], object], row: Batch, of_user: str) -> str | None:
    """Return why the check of a row fails."""
    try:
        check(row)
    except BadRows as bad:
        return bad.reason
    except Exception as error:
        failed = failed_function(of_user, error)
        return described(error) if failed is error else str(failed)
    return None


def failed_function(of_user: str, error: Exception) -> Exception:
    """Return the error of a record on which the function of an option has failed: it names the option and the line.

    An error that begins with what was expected is returned as it is, such as those of a service about its labels.

    >>> print(failed_function("DelayedLabels(key_of=)", KeyError("id")))
    DelayedLabels(key_of=) failed in a function: KeyError: 'id'; let it take such a record, or choose what happens to \
it: on_error="skip" or dead_letter=
    """
    if not of_user or str(error).startswith("expected "):
        return error
    return ModelError(
        f"{of_user} failed in {raising_line(error)}: {described(error)}; let it take such a record, or choose what "
        'happens to it: on_error="skip" or dead_letter='
    )


def without(mini_batch: Batch, bad: BadRows, out: Output) -> Batch:
    """Return the mini-batch without the bad rows, which follow the policy of the step."""
    rows = set(bad.rows)
    for row in bad.rows:
        out.reject(mini_batch[row], bad.of_row(row))
    return take(mini_batch, [row for row in range(len(mini_batch)) if row not in rows])


Features = SparseRows | npt.ArrayLike
"""Sparse rows, or anything that numpy turns into a matrix (rows, features)."""

Rows = SparseRows | Floats
"""Features that are checked: sparse rows or a matrix."""

# A row with at most this many features is quicker in plain Python: an update is about twenty numpy calls, and each call
# costs as much as plain arithmetic for two or three features.
FEW: Final = 32


def checked_rows(owner: str, features: Features, width: int) -> Rows:
    """Return the features as rows of ``width`` features; ModelError for rows of another width."""
    features = sparse_if_scipy(features)
    if isinstance(features, SparseRows):
        if features.width == width:
            return features
        given = f"sparse rows of width {features.width}"
    else:
        matrix = as_floats(owner, "features", features)
        if matrix.ndim == 2 and matrix.shape[1] == width:
            return np.ascontiguousarray(matrix)
        given = f"an array of shape {matrix.shape}"
    raise ModelError(
        f"{owner}: expected rows of {width} features (a matrix of shape (rows, {width}) or sparse rows of "
        f"that width), given {given}; change the features or the model's width"
    )


def dense_features(features: Features) -> npt.ArrayLike:
    """Return sparse rows as a matrix, and other features unchanged."""
    return features.to_dense() if isinstance(features, SparseRows) else features


def concatenated_rows(parts: Sequence[Rows]) -> Rows:
    """Join the rows of all parts, in this order; the result is dense or sparse like the first part."""
    if isinstance(parts[0], SparseRows):
        return SparseRows.concatenate(
            [part if isinstance(part, SparseRows) else SparseRows.from_dense(part) for part in parts]
        )
    return np.concatenate([part.to_dense() if isinstance(part, SparseRows) else part for part in parts])


def independent_dots(rows: Rows, weights: Floats) -> Floats:
    """Return Σ features·weights of each row. The result of a row does not depend on the other rows, to the last bit."""
    if isinstance(rows, SparseRows):
        return rows.dot(weights)
    sums: Floats = np.einsum("ij,j->i", rows, weights)
    return sums


def dots(rows: Rows, weights: Floats) -> Floats:
    """Return Σ features·weights of each row, quicker; the last bit of a row may depend on its place in the batch."""
    return rows.dot(weights) if isinstance(rows, SparseRows) else rows @ weights


def weighted_sum(rows: Rows, by_row: Floats) -> tuple[Indices | None, Floats]:
    """Return the features with sums (None: all features), and the sums Σ over rows of ``by_row``·features."""
    if isinstance(rows, SparseRows):
        return rows.transposed_dot(by_row)
    return None, by_row @ rows


def dense_weighted_sum(rows: Rows, by_row: Floats) -> Floats:
    """Return Σ over rows of ``by_row``·features, for all features."""
    return rows.transposed_dot_dense(by_row) if isinstance(rows, SparseRows) else by_row @ rows


def all_are_few(rows: Rows) -> bool:
    """Whether each row has few enough features for plain Python."""
    if isinstance(rows, SparseRows):
        return len(rows.values) <= FEW or int(np.diff(rows.indptr).max()) <= FEW
    return bool(rows.shape[1] <= FEW)


def rows_as_lists(rows: Rows) -> Iterable[tuple[Sequence[int], list[float]]]:
    """Return indices and values of each row."""
    if isinstance(rows, SparseRows):
        return rows.rows()
    columns = range(rows.shape[1])
    return [(columns, values) for values in rows.tolist()]


def _all_finite(rows: Rows) -> bool:
    if isinstance(rows, SparseRows):
        return holds(np.isfinite(rows.values))
    # Checking the sum of each row costs a third, but the sum of finite features may be infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = rows @ np.ones(rows.shape[1])
    return holds(np.isfinite(sums)) or holds(np.isfinite(rows))


def refuse_not_finite(owner: str, rows: Rows) -> None:
    """Raise :class:`BadRows` if a feature is NaN or infinite."""
    if _all_finite(rows):
        return
    if isinstance(rows, SparseRows):
        at = np.flatnonzero(~np.isfinite(rows.values))
        bad_rows, columns, given = rows.row_of_value[at], rows.indices[at], rows.values[at]
    else:
        bad_rows, columns = np.nonzero(~np.isfinite(rows))
        given = rows[bad_rows, columns]
    raise BadRows(np.unique(bad_rows), f"{owner}: expected finite features, given {given[0]} for feature {columns[0]}")


@dataclass(frozen=True, slots=True)
class Examples:
    """A mini-batch for a learner.

    A row of weight 2 counts as two rows of the mini-batch. A step is the mean over the rows, so weights are shares:
    they change nothing in a mini-batch of one row.
    """

    features: Features
    """A matrix (rows, features) or ``SparseRows``."""
    targets: npt.ArrayLike
    """A number for each row."""
    weights: npt.ArrayLike | None = None
    """A weight of 0 or more for each row; None: each row counts once."""


class RowsRecord(TypedDict):
    """The fields of :class:`CheckedExamples`, as plain data."""

    rows: dict[str, Any] | Floats
    targets: Floats
    weights: Floats | None


@overload
def rows_to_record(rows: SparseRows) -> dict[str, Any]: ...
@overload
def rows_to_record(rows: Rows) -> dict[str, Any] | Floats: ...
def rows_to_record(rows: Rows) -> dict[str, Any] | Floats:
    """Return rows as plain data: a matrix, or the fields of ``SparseRows``."""
    if isinstance(rows, SparseRows):
        return {"indptr": rows.indptr, "indices": rows.indices, "values": rows.values, "width": rows.width}
    return rows


def rows_from_record(record: dict[str, Any] | Floats) -> Rows:
    """Return the rows that :func:`rows_to_record` turned into plain data."""
    return SparseRows(**record) if isinstance(record, dict) else record


# Up to this number of features for each value in the rows, a table of all features is faster than sorting.
_FEATURES_PER_VALUE: Final = 4


def with_named_columns(rows: SparseRows) -> tuple[SparseRows, npt.NDArray[np.int64]]:
    """Return the rows with columns only for the features that occur, and these features in ascending order."""
    indices: npt.NDArray[np.int64]
    places: Indices
    if rows.width <= _FEATURES_PER_VALUE * len(rows.indices):
        there = np.zeros(rows.width, dtype=np.bool_)
        there[rows.indices] = True
        indices = np.flatnonzero(there).astype(np.int64, copy=False)
        if len(indices) == rows.width:
            return rows, indices
        place_of = np.cumsum(there) - 1
        places = place_of[rows.indices]
    else:
        found, places = np.unique(rows.indices, return_inverse=True)
        indices = found.astype(np.int64, copy=False)
    return SparseRows(rows.indptr, places, rows.values, len(indices)), indices


@dataclass(frozen=True, slots=True)
class CheckedExamples:
    """Examples that a model has checked: finite features of its width, targets in the form that its loss expects."""

    rows: Rows
    targets: Floats
    weights: Floats | None = None
    """None: each row counts once."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which: slice) -> CheckedExamples:
        """Return some of the rows; a slice without gaps is a view, not a copy."""
        weights = None if self.weights is None else self.weights[which]
        return CheckedExamples(self.rows[which], self.targets[which], weights)

    @classmethod
    def concatenate(cls, parts: Sequence[CheckedExamples]) -> CheckedExamples:
        """Join all parts, at least one. Rows are dense or sparse like the rows of the first part."""
        if len(parts) == 1:
            return parts[0]
        rows = concatenated_rows([part.rows for part in parts])
        return cls(rows, np.concatenate([part.targets for part in parts]), _joined_weights(parts))

    def to_record(self) -> RowsRecord:
        """Return the examples as plain data."""
        return {"rows": rows_to_record(self.rows), "targets": self.targets, "weights": self.weights}

    @classmethod
    def from_record(cls, record: RowsRecord) -> CheckedExamples:
        """Return the examples of a record that :meth:`to_record` returned."""
        return cls(rows_from_record(record["rows"]), record["targets"], record["weights"])


def joined_examples(owner: str, parts: Sequence[Examples]) -> Examples:
    """Join all examples; sparse rows become as wide as the widest. Raises ModelError for examples of several shapes."""
    if not parts:
        return Examples(np.zeros(0), np.zeros(0))
    width = max((part.features.width for part in parts if isinstance(part.features, SparseRows)), default=0)
    rows = [_widened(owner, part.features, width) for part in parts]
    try:
        targets = np.concatenate([np.asarray(part.targets) for part in parts])
        return Examples(concatenated_rows(rows), targets, _joined_weights(parts))
    except ValueError as error:
        raise ModelError(
            f"{owner}: expected examples of one shape in all batches of the topic, given others: {error}; check "
            "the function extract="
        ) from None


def _widened(owner: str, features: Features, width: int) -> Rows:
    if isinstance(features, SparseRows):
        return SparseRows(features.indptr, features.indices, features.values, width)
    return as_floats(owner, "features", features)


def _joined_weights(parts: Sequence[Examples] | Sequence[CheckedExamples]) -> Floats | None:
    if all(part.weights is None for part in parts):
        return None
    return np.concatenate(
        [np.ones(len(np.asarray(part.targets))) if part.weights is None else np.asarray(part.weights) for part in parts]
    )


def as_examples(owner: str, given: object) -> Examples:
    """Return the result of an :data:`Extract`. Raises ConfigurationError if it is not ``Examples``."""
    if isinstance(given, Examples):
        return given
    raise ConfigurationError(
        f"{owner}: expected a function that returns Examples, given one that returned {shortened(given)}; "
        "return Examples(features, targets)"
    )


def checked_examples(
    owner: str, examples: Examples, width: int, checked_targets: Callable[[npt.ArrayLike, int], Floats]
) -> CheckedExamples:
    """Return checked examples, for repeated learning. Raises ``BadRows`` for rows that are not examples.

    ``checked_targets(targets, length)`` returns the targets in the form that the loss expects.
    """
    rows = checked_rows(owner, examples.features, width)
    refuse_not_finite(owner, rows)
    targets = checked_targets(examples.targets, len(rows))
    weights = None if examples.weights is None else row_weights(owner, examples.weights, len(rows))
    return CheckedExamples(rows, targets, weights)


Extract = Callable[[Any], Examples]
"""Returns the examples of a mini-batch (a list of records, an array or ``Columns``). Raises ``BadRows``, which names
the rows that are not examples."""


# With this many rows the cost of a numpy call does not matter, and BLAS uses all cores. While rows are copied into a
# block, at most this many rows are in memory twice.
_BLOCK_ROWS: Final = 65_536


def share_of(rows: int, subtask: int, subtasks: int) -> slice:
    """Return the rows of one subtask, if each gets a part of equal length.

    >>> [share_of(5, subtask, 3) for subtask in range(3)]
    [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
    """
    return slice(rows * subtask // subtasks, rows * (subtask + 1) // subtasks)


class ExampleBlocks:
    """Examples in the order in which they were added, in blocks.

    Pieces are joined, or cut, to blocks of equal length, so that sums over blocks are the same to the last bit for any
    division of the examples.

    >>> import numpy as np
    >>> blocks = ExampleBlocks()
    >>> for start in (0.0, 2.0, 4.0):
    ...     blocks.add(CheckedExamples(np.ones((2, 1)), np.array([start, start + 1])))
    >>> mini_batches = MiniBatches(4)
    >>> for _ in range(3):
    ...     print([part.targets.tolist() for part in blocks.between(*mini_batches.bounds())])
    ...     mini_batches.advance(len(blocks))
    [[0.0, 1.0, 2.0, 3.0]]
    [[4.0, 5.0]]
    [[0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(self, block_rows: int = _BLOCK_ROWS) -> None:
        self._block_rows = block_rows
        self._blocks: list[CheckedExamples] = []
        self._rows_in_blocks = 0
        self._parts: list[CheckedExamples] = []
        """Pieces that do not fill a block yet."""
        self._rows_in_parts = 0

    def __len__(self) -> int:
        return self._rows_in_blocks + self._rows_in_parts

    def add(self, examples: CheckedExamples) -> None:
        """Append examples; they must not change afterwards."""
        while len(examples):
            part = examples[: self._block_rows - self._rows_in_parts]
            examples = examples[len(part) :]
            self._parts.append(part)
            self._rows_in_parts += len(part)
            if self._rows_in_parts == self._block_rows:
                parts, self._parts, self._rows_in_parts = self._parts, [], 0
                self._blocks.append(CheckedExamples.concatenate(parts))
                self._rows_in_blocks += self._block_rows

    def take_blocks(self) -> list[CheckedExamples]:
        """Return the full blocks, and forget them."""
        blocks, self._blocks, self._rows_in_blocks = self._blocks, [], 0
        return blocks

    def between(self, start: int, stop: int) -> Iterator[CheckedExamples]:
        """Yield the rows from ``start`` to before ``stop``, or to the last row, block by block, without copies."""
        if len(self._parts) > 1:
            self._parts = [CheckedExamples.concatenate(self._parts)]
        first = 0
        for block in (*self._blocks, *self._parts):
            if start < first + len(block) and stop > first:
                whole = start <= first and stop >= first + len(block)
                yield block if whole else block[max(start - first, 0) : stop - first]
            first += len(block)

    def to_records(self) -> list[RowsRecord]:
        """Return all examples as plain data."""
        return [part.to_record() for part in (*self._blocks, *self._parts)]

    def add_records(self, records: list[RowsRecord]) -> None:
        """Add the examples of records that :meth:`to_records` returned."""
        for record in records:
            self.add(CheckedExamples.from_record(record))


class MiniBatches(DeclaredState):
    """The bounds of one mini-batch after the other: ``length`` rows each, fewer at the end, then from the first row.

    Without a length each mini-batch has all rows.
    """

    start = declared(0, share=again(0))
    """The first row of the mini-batch."""

    def __init__(self, length: int | None) -> None:
        self._length = sys.maxsize if length is None else length

    def bounds(self) -> tuple[int, int]:
        """Return the first row, and the row after the last one."""
        return self.start, self.start + self._length

    def advance(self, rows: int) -> None:
        """Move to the next mini-batch; ``rows`` is the number of all rows."""
        self.start += self._length
        if self.start >= rows:
            self.start = 0
