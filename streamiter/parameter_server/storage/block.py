"""Blocks: a block stores the numbers of a range of rows and of columns of a matrix, on one shard.

``Block`` is what the psfs use, and ``ShardBlock`` what the shard uses: ``DenseBlock`` stores every number, and
:class:`~streamiter.parameter_server.storage.sparse.SparseBlock` stores the numbers that differ from a default.
``GuardedBlock`` is a block as functions of users get it. A block is frozen for a checkpoint at once and encoded later,
in frames of about a megabyte.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias, TypedDict, cast, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import CheckpointError, InternalError, OutOfRange, ParameterServerError
from streamiter.operators.definitions import Definition, changes
from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.values.deferred import Deferred, Encode, PlainValue
from streamiter.values.numbers import check_memory

Numbers: TypeAlias = npt.NDArray[Any]
"""Numbers of the dtype of the matrix."""

DTypeOfNumbers: TypeAlias = np.dtype[Any]

AnyScalar: TypeAlias = np.generic
"""A scalar of numpy, mostly of the dtype of the matrix."""

BlockColumns: TypeAlias = npt.NDArray[np.int64]
"""Global column numbers, in any order; a column may occur twice."""

OCCURRENCES: Final = -1
"""In place of a row of adds: the columns are first ones of vectors that have occurred, and the values are the times."""

FrozenState: TypeAlias = dict[str, PlainValue]
"""The frozen state of a block: plain data, with large arrays as :class:`~streamiter.values.deferred.Deferred`."""


@dataclass(frozen=True, slots=True)
class BlockRow:
    """The columns of one row of one block whose values differ from the default."""

    columns: BlockColumns
    """Ascending; no column occurs twice."""
    values: Numbers
    """The value of each column."""
    default: float
    """The value of all other columns."""


class Block(abc.ABC):
    """The numbers of a range of rows and columns, which are named by their global numbers.

    A block checks nothing: the client has checked the arguments of its caller, and cut them to this block. A block does
    not keep arrays that it is given. Arrays that it returns belong to the caller, except the views of ``dense_row`` and
    the result of ``sparse_row``.
    """

    is_sparse: bool
    rows: range
    columns: range
    dtype: DTypeOfNumbers
    updates: int
    """The count of updates by an optimizer; part of the state."""
    _name: str
    """The name of the matrix, for errors."""

    @abc.abstractmethod
    def get(self, row: int, columns: BlockColumns | None, out: Numbers | None = None) -> Numbers:
        """Return the values of some columns (None: of all), in ``out`` if that is given."""

    @abc.abstractmethod
    def add(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        """Add values to some columns (None: to all); a column that is named twice gets both."""

    @abc.abstractmethod
    def put(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        """Overwrite the values of some columns (None: of all); a column that is named twice gets the last value."""

    def dense_row(self, row: int) -> Numbers:
        """Return the row of a dense block itself, which the caller may change."""
        raise self._other_kind(row)

    def sparse_row(self, row: int) -> BlockRow:
        """Return the content of a row of a sparse block, which the caller must not change."""
        raise self._other_kind(row)

    def replace_row(self, row: int, content: BlockRow) -> None:
        """Replace the content of a row of a sparse block."""
        raise self._other_kind(row)

    def _other_kind(self, row: int) -> InternalError:
        own, other = ("sparse", "dense") if self.is_sparse else ("dense", "sparse")
        return InternalError(f"{self._name}: expected a {other} block, given row {row} of a {own} block")


class ShardBlock(Block):
    """A block as a shard stores it."""

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        self.rows = block.rows
        self.columns = block.columns
        self.dtype = matrix.numpy_dtype
        self.updates = 0
        self._name = f"matrix {matrix.name!r}"

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Return the memory of the block."""

    @abc.abstractmethod
    def freeze(self, encode: Encode) -> FrozenState:
        """Return the state as it is now, for ``restore``.

        The state does not contain later changes. Dense arrays are copied at once (some ms for 10 M numbers); a sparse
        row is copied when it changes. Both are encoded later, in pieces.
        """

    @abc.abstractmethod
    def restore(self, state: FrozenState) -> None:
        """Restore a decoded state of ``freeze``, in which each Deferred is an iterable of its decoded frames."""

    @abc.abstractmethod
    def take_over(self, other: Self, rows: range, columns: range) -> None:
        """Take over the numbers of another block of the matrix, in rows and columns that both have.

        In a sparse block these numbers must be new.
        """


# -- dense blocks ----------------------------------------------------------------------------------------------

_ROW_VIEWS_MAX: Final = 4096


@final
class DenseBlock(ShardBlock):
    """A block that stores every number, in a C-contiguous array of rows × columns; all are zeros initially."""

    is_sparse = False

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        size_bytes = len(block.rows) * len(block.columns) * self.dtype.itemsize
        remedy = "make it with sparse=True, or on more machines"
        check_memory(self._name, size_bytes, remedy, error=ParameterServerError)
        self._array = np.zeros((len(block.rows), len(block.columns)), self.dtype)
        # Making a view takes 100 ns, a third of the time of reading 100 numbers; keeping it takes 100 bytes.
        self._row_views: Sequence[Numbers] = (
            list(self._array) if len(block.rows) <= _ROW_VIEWS_MAX else cast("Any", self._array)
        )
        self._first_row = block.rows.start
        # An array without axes: converting a Python int takes as long as moving 100 columns.
        self._first_column = np.array(block.columns.start)
        self._begins_at_0 = block.columns.start == 0

    def get(self, row: int, columns: BlockColumns | None, out: Numbers | None = None) -> Numbers:
        numbers = self._row_views[row - self._first_row]
        if columns is not None:
            return gathered(numbers, self._local(columns), out)
        if out is None:
            return numbers.copy()
        np.copyto(out, numbers)
        return out

    def add(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.add(numbers, values, out=numbers)
            return
        # It counts duplicates, and takes half the time of `numbers[local] += values`, which does not: one pass over
        # the row instead of two. Looking for duplicates first takes longer than adding (10,000 keys: 55 and 50 µs).
        np.add.at(numbers, self._local(columns), values)

    def put(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.copyto(numbers, values)
        else:
            numbers[self._local(columns)] = values

    def dense_row(self, row: int) -> Numbers:
        return self._row_views[row - self._first_row]

    def _local(self, columns: BlockColumns) -> BlockColumns:
        return columns if self._begins_at_0 else columns - self._first_column

    def size_bytes(self) -> int:
        return self._array.nbytes

    def freeze(self, encode: Encode) -> FrozenState:
        return {
            "shape": block_shape(self),
            "updates": self.updates,
            "numbers": _frozen_numbers(self._array.reshape(-1), name=self._name, encode=encode),
        }

    def restore(self, state: FrozenState) -> None:
        check_shape(self, state["shape"], self._name)
        _fill_from_frames(self._array.reshape(-1), state["numbers"], name=self._name)
        self.updates = state["updates"]

    def take_over(self, other: DenseBlock, rows: range, columns: range) -> None:
        for row in rows:
            numbers = other.dense_row(row)[columns.start - other.columns.start : columns.stop - other.columns.start]
            self.dense_row(row)[columns.start - self.columns.start : columns.stop - self.columns.start] = numbers


def gathered(numbers: Numbers, at: npt.NDArray[np.integer[Any]], out: Numbers | None) -> Numbers:
    """Return ``numbers[at]``, in ``out`` if that is given; the caller knows that ``at`` is within bounds.

    ``numbers`` may have more axes.
    """
    if out is None:
        result: Numbers = numbers[at]
        return result
    # mode="raise" would gather into a buffer first, and copy that.
    numbers.take(at, axis=0, out=out, mode="clip")
    return out


# -- blocks in checkpoints -------------------------------------------------------------------------------------


def block_shape(block: ShardBlock) -> tuple[str, int, int, int, int]:
    """Return the dtype, the first row, the end of the rows, the first column, and the end of the columns."""
    rows, columns = block.rows, block.columns
    return (str(block.dtype), rows.start, rows.stop, columns.start, columns.stop)


def check_shape(block: ShardBlock, given: object, name: str) -> None:
    """Raise CheckpointError unless ``given`` is the shape of this block."""
    expected = block_shape(block)
    if given != expected:
        raise CheckpointError(
            f"state of {name}: expected a block of (dtype, first row, end of rows, first column, end of columns) "
            f"{expected}, given {given}; make the matrix with the settings it had"
        )


# About a millisecond to encode and to write: what may be done between two turns of the event loop.
_FRAME_BYTES: Final = 1 << 20


@final
class Frozen(Deferred):
    """The state of a block as it was at one moment, encoded later. ``contents`` makes what each frame contains.

    ``contents`` frees the memory of each content once it has given it. ``on_release`` is called once.
    """

    def __init__(
        self, contents: Generator[object, None, None], encode: Encode, *, name: str, on_release: Callable[[], object]
    ) -> None:
        self.name = name
        self._contents = contents
        self._encode = encode
        self._on_release = on_release
        self._is_released = False

    def frames(self) -> Iterator[bytes]:
        self._check()
        for content in self._contents:
            yield self._encode(content, name=f"state of {self.name}")
            self._check()
        self.release()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._contents.close()
            self._on_release()

    def _check(self) -> None:
        if self._is_released:
            raise InternalError(f"the state of {self.name} was released before all of it was read")


def _frozen_numbers(array: Numbers, *, name: str, encode: Encode) -> Frozen:
    """Return a copy of a one-dimensional array in parts, made at once and encoded later."""
    length = max(1, _FRAME_BYTES // array.itemsize)
    parts = [array[begin : begin + length].copy() for begin in range(0, len(array), length)][::-1]

    def contents() -> Generator[Numbers, None, None]:
        while parts:
            yield parts.pop()

    return Frozen(contents(), encode, name=name, on_release=parts.clear)


def _fill_from_frames(array: Numbers, frames: Iterable[object], *, name: str) -> None:
    """Write decoded frames into an array of the frozen array's dtype and length; raise CheckpointError otherwise."""
    remaining = iter(frames)
    filled = 0
    while filled < len(array):
        part = next(remaining, None)
        if (
            not isinstance(part, np.ndarray)
            or part.dtype != array.dtype
            or part.ndim != 1
            or not 0 < len(part) <= len(array) - filled
        ):
            raise CheckpointError(
                f"state of {name}: expected {len(array) - filled} more numbers of {array.dtype}, given "
                f"{_described(part)}; the snapshot is damaged, or of another matrix"
            )
        array[filled : filled + len(part)] = part
        filled += len(part)
    if (part := next(remaining, None)) is not None:
        raise CheckpointError(
            f"state of {name}: expected no more, given {_described(part)}; the snapshot is damaged, or of another "
            f"matrix"
        )


def _described(part: object) -> str:
    if isinstance(part, np.ndarray):
        return f"an array of shape {part.shape} and dtype {part.dtype}"
    return "no more" if part is None else f"{type(part).__name__}"


class BlockState(TypedDict):
    """The state of a block, and its place: the first row and the end of its rows, and the same of its columns."""

    rows: list[int]
    columns: list[int]
    content: FrozenState


class BlocksState(TypedDict):
    """The state of blocks of a matrix."""

    settings: Definition
    """On what the meaning of the numbers depends."""
    blocks: list[BlockState]


def frozen_blocks(matrix: Matrix, blocks: Iterable[ShardBlock], encode: Encode) -> BlocksState:
    """Return the matrix's settings and the state of these of its blocks: plain data, with ``Deferred`` pieces."""
    return {
        "settings": matrix.definition(),
        "blocks": [
            {
                "rows": [block.rows.start, block.rows.stop],
                "columns": [block.columns.start, block.columns.stop],
                "content": block.freeze(encode),
            }
            for block in blocks
        ],
    }


def check_blocks_state(matrix: Matrix, state: BlocksState) -> None:
    """Raise an error if the blocks of a matrix cannot take over a state of all its blocks."""
    before, now = state["settings"], matrix.definition()
    if None in (before["on_clock"], now["on_clock"]):  # Then adds may have named the same function with update=.
        now = {**now, "on_clock": before["on_clock"]}
    if changed := changes(before, now):
        raise ParameterServerError(
            f"matrix {matrix.name!r}: expected the settings that it has in the snapshot, given others "
            f"({', '.join(changed)}), with which its numbers would be wrong; make it with these settings or under "
            "another name, or start without the snapshot: restore=None, which loses all state"
        )


def restore_blocks(matrix: Matrix, blocks: Iterable[ShardBlock], state: BlocksState) -> None:
    """Restore these blocks from a state of all blocks that ``check_blocks_state`` has accepted, also if they were cut
    in another way.
    """
    for block in blocks:
        for saved in state["blocks"]:
            rows, columns = range(*saved["rows"]), range(*saved["columns"])
            if (rows, columns) == (block.rows, block.columns):
                block.restore(saved["content"])
                break
            both = _both(rows, block.rows), _both(columns, block.columns)
            if all(both):
                other = type(block)(matrix, BlockRange(-1, -1, rows, columns))
                other.restore(saved["content"])
                block.take_over(other, *both)
                block.updates = other.updates


def saved_blocks(state: BlocksState) -> list[BlockRange]:
    """Return the places of the blocks of a state, in the order of their numbers."""
    places = sorted((saved["rows"], saved["columns"]) for saved in state["blocks"])
    return [BlockRange(number, -1, range(*rows), range(*columns)) for number, (rows, columns) in enumerate(places)]


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


# -- blocks for functions of users -----------------------------------------------------------------------------


@final
class GuardedBlock(Block):
    """A block that refuses rows and columns of other blocks; functions of users get it.

    A block counts rows and columns from its first ones. Those of other blocks would be numbers below 0, and name other
    numbers of this block. ``who`` names the function in errors.

    >>> from streamiter.parameter_server.matrix import Matrix
    >>> from streamiter.parameter_server.matrix import BlockRange
    >>> block = DenseBlock(Matrix("w", rows=4, columns=3), BlockRange(1, 0, range(2, 4), range(0, 3)))
    >>> GuardedBlock(block, "f").get(0, None)
    Traceback (most recent call last):
        ...
    streamiter.errors.OutOfRange: f: expected a row of the block, 2 to 3, given 0; let its rows() name the rows it needs
    """

    def __init__(self, block: Block, who: str) -> None:
        self.is_sparse = block.is_sparse
        self.rows = block.rows
        self.columns = block.columns
        self.dtype = block.dtype
        self._block = block
        self._who = who

    @property
    def updates(self) -> int:
        """The count of updates by an optimizer."""
        return self._block.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._block.updates = count

    def get(self, row: int, columns: BlockColumns | None, out: Numbers | None = None) -> Numbers:
        return self._block.get(self._checked(row, columns), columns, out)

    def add(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        self._block.add(self._checked(row, columns), columns, values)

    def put(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        self._block.put(self._checked(row, columns), columns, values)

    def dense_row(self, row: int) -> Numbers:
        return self._block.dense_row(self._checked(row))

    def sparse_row(self, row: int) -> BlockRow:
        return self._block.sparse_row(self._checked(row))

    def replace_row(self, row: int, content: BlockRow) -> None:
        self._block.replace_row(self._checked(row, content.columns), content)

    def _checked(self, row: int, columns: BlockColumns | None = None) -> int:
        """Return the row; raise OutOfRange unless the row and the columns are in the block."""
        if row not in self.rows:
            raise OutOfRange(
                f"{self._who}: expected a row of the block, {self.rows.start} to {self.rows.stop - 1}, given {row}; "
                "let its rows() name the rows it needs"
            )
        if columns is not None and np.size(columns):
            for column in (np.min(columns), np.max(columns)):
                if column not in self.columns:
                    raise OutOfRange(
                        f"{self._who}: expected columns of the block, {self.columns.start} to "
                        f"{self.columns.stop - 1}, given {column}; take those in block.columns, or let its split() "
                        "give each block its own"
                    )
        return row
