"""The base classes of psfs, and what their implementations share.

A psf (parameter server function) runs on the shards, where the parameters are stored: :class:`UpdateFunction` changes
parameters, :class:`GetFunction` computes a result from them. The functions behind them check settings where a psf is
written, check settings against a matrix, and compute with the rows of sparse blocks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, reduce
from itertools import count
from types import new_class
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, TypeVar, cast, get_type_hints

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage.block import Block, BlockColumns, BlockRow, DTypeOfNumbers, Numbers
from streamiter.values.helpers.importing import importable_name
from streamiter.values.numbers import is_number, not_negative, plain_float, positive, whole_number

Part: TypeAlias = Any
"""A block's part of a function's arguments, from ``split``: plain data."""

Result: TypeAlias = Any
"""The result of a function, for one block (plain data) or for all blocks."""

Check: TypeAlias = Callable[[str, Any], object]
"""Takes the option's name and value, and returns the value as plain data or raises ConfigurationError or OutOfRange."""


class PartitionFunction(abc.ABC):
    """A function on a matrix that runs on each block, on the shard that stores the block.

    Derived classes are frozen dataclasses of plain settings, so that they can be compared, printed and sent.

    A function that changes parameters derives from :class:`UpdateFunction`. Its first setting is the name of the
    matrix; it names the rows that it needs, and changes one block at a time. ``get`` and ``put`` work on blocks of
    dense and of sparse matrices:

    >>> import asyncio
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from streamiter.parameter_server import ParameterServer
    >>> @dataclass(frozen=True)
    ... class Clip(UpdateFunction):
    ...     matrix: str
    ...     row: int
    ...     limit: float
    ...
    ...     def rows(self, matrix):
    ...         return (self.row,)
    ...
    ...     def partition_update(self, block, part):
    ...         block.put(self.row, None, block.get(self.row, None).clip(-self.limit, self.limit))

    A function that computes a result derives from :class:`GetFunction`: each block returns plain data (numbers,
    strings, arrays, tuples and lists of them), and ``merge`` computes the result in the caller's process:

    >>> @dataclass(frozen=True)
    ... class Mean(GetFunction):
    ...     matrix: str
    ...     row: int
    ...
    ...     def rows(self, matrix):
    ...         return (self.row,)
    ...
    ...     def partition_get(self, block, part):
    ...         values = block.get(self.row, None)
    ...         return values.sum().item(), len(values)
    ...
    ...     def merge(self, parts):
    ...         return sum(total for total, _ in parts) / sum(count for _, count in parts)

    >>> async def use():
    ...     async with ParameterServer(shards=2) as server:
    ...         await server.create_matrix("w", rows=1, columns=4, init=[[-9.0, 1.0, 2.0, 9.0]])
    ...         client = server.client(worker=0)
    ...         await client.update(Clip("w", row=0, limit=3.0))
    ...         print(await client.get("w", row=0), await client.aggregate(Mean("w", row=0)))
    >>> asyncio.run(use())
    [-3.  1.  2.  3.] 0.75

    Override ``split`` to run on some blocks only, or to send each block its part of an array (``part`` above). The
    result should not depend on how the matrix is cut into blocks. If shards run in other processes, the class must be
    at the top level of a module that they can import.
    """

    matrix: str

    only_stored: ClassVar[bool] = False
    """True: it needs no columns that a sparse row does not store, so the default of the row may be drawn."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # That of a dataclass fails for arrays, and since Python 3.13 no NaN is equal to itself there.
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(PartitionFunction, name))

    def __eq__(self, other: object) -> bool:
        """Whether both are of one class, and all their settings, arrays included, are equal."""
        if type(other) is not type(self):
            return NotImplemented
        names = [each.name for each in fields(self)] if is_dataclass(self) else vars(self)
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((type(self), self.matrix))

    @property
    def name(self) -> str:
        """The name in errors and statistics."""
        return type(self).__name__

    def rows(self, matrix: Matrix) -> Sequence[int]:
        """Return the rows it reads or changes: they must exist, in one row block. Empty: no rows in particular."""
        return ()

    def check(self, matrix: Matrix) -> None:
        """Raise ParameterServerError if the settings do not fit the matrix; called before any block is touched."""
        del matrix

    def require_importable(self) -> Self:
        """Return an equal function that another process can import; raise ConfigurationError if it cannot."""
        importable_name(type(self), f"psf.{self.name}", "its class")
        return self

    def without_arrays(self) -> Self:
        """Return the function as it is sent with the parts of ``split``: for these parts only."""
        return self

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        """Return the blocks it runs on, each with its part.

        Unless overridden: all blocks of the row block of its rows, or of the matrix if it names no rows.
        """
        rows = self.rows(matrix)
        blocks = partitioning.blocks_of_row(rows[0]) if rows else partitioning.blocks
        return [(block, None) for block in blocks]


def _are_equal(mine: object, others: object) -> bool:
    first, second = np.asarray(mine), np.asarray(others)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f")


class UpdateFunction(PartitionFunction):
    """A psf that changes parameters: override ``rows`` and ``partition_update`` (example: ``PartitionFunction``)."""

    checks_blocks: ClassVar[bool] = False
    """True: ``partition_check`` runs on all blocks before any block is changed."""

    checks_when_run: ClassVar[bool] = False
    """True: ``partition_update`` calls ``partition_check`` itself; an add with such an update takes one message."""

    def partition_check(self, block: Block, part: Part) -> Result:
        """Raise ParameterServerError if this block cannot be updated; change nothing.

        The result is plain data for ``check_together``.
        """

    def check_together(self, checks: Sequence[Result]) -> None:
        """Raise ParameterServerError if the results of ``partition_check`` of all blocks do not fit together."""

    @abc.abstractmethod
    def partition_update(self, block: Block, part: Part) -> None:
        """Change one block; ``part`` comes from ``split``."""


class GetFunction(PartitionFunction):
    """A psf that computes a result from parameters: override ``rows``, ``partition_get`` and ``merge``."""

    @abc.abstractmethod
    def partition_get(self, block: Block, part: Part) -> Result:
        """Return the contribution of one block: plain data."""

    @abc.abstractmethod
    def merge(self, parts: Sequence[Result]) -> Result:
        """Return the result, from the contributions of the blocks in their order."""


def check_function(function: PartitionFunction, matrix: Matrix, partitioning: MatrixPartitioning) -> None:
    """Raise an error if a function does not fit a matrix; called before any block is touched."""
    if function.matrix != matrix.name:
        raise ParameterServerError(
            f"{function.name}: expected matrix {matrix.name!r}, given {function.matrix!r}; name that one"
        )
    rows = function.rows(matrix)
    for row in rows:
        partitioning.checked_row(row)
    partitioning.check_same_row_block(rows, function.name)
    if not function.only_stored:
        drawn = next((row for row in rows or range(matrix.rows) if matrix.admission or matrix.draws(row)), None)
        if drawn is not None:
            why = "which has admission" if matrix.admission else "whose default is drawn"
            raise ParameterServerError(
                f"{where(function, matrix)}: expected rows whose default is a number, given row {drawn}, {why}; use "
                "get and add with columns=, psf.Optimize, psf.PullSparse, or psf.Put with columns="
            )
    function.check(matrix)


# -- settings: made plain and checked where the psf is written -----------------------------------------------

ROW: Final = "row"
SOURCE: Final = "source"
TARGET: Final = "target"
COLUMNS: Final = "columns"
NUMBER: Final = "number"
"""Marks of settings in their annotations: a row; a row that is read or overwritten; columns; numbers for the matrix."""

_LARGEST_SEED: Final = 2**64 - 1
"""The largest number of 64 bits: a seed is one word of the generator's key."""


def as_row(option: str, value: object) -> int:
    """Return a row number; whether the matrix has this row is checked when the psf is used."""
    return whole_number(option, value, 0, error=OutOfRange)


def as_number(option: str, value: object) -> float:
    """Return a number as a plain int or float; NaN and infinities are allowed."""
    if not is_number(value) or isinstance(value, bool):
        raise ConfigurationError(f"{option}: expected a number, given {value!r}")
    is_whole = isinstance(value, (int, np.integer))
    if is_whole and math.isinf(plain_float(value)):
        raise ConfigurationError(
            f"{option}: expected a number up to 1.8e308, as a float64 holds, given one of "
            f"{int(value).bit_length():,} bits"
        )
    return int(value) if is_whole else float(value)


def _as_finite(option: str, value: object) -> float:
    number = plain_float(value)
    if not math.isfinite(number):
        raise ConfigurationError(f"{option}: expected a finite number, given {value!r}")
    return number


def as_values(option: str, value: npt.ArrayLike) -> Numbers:
    """Return a read-only copy of an array of numbers."""
    try:
        values = np.array(value)
    except ValueError:
        values = np.array(value, dtype=object)
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ConfigurationError(f"{option}: expected a one-dimensional array of numbers, given {_shape(values)}")
    values.setflags(write=False)
    return values


def _as_columns(option: str, value: npt.ArrayLike) -> BlockColumns:
    columns = np.array(value) if np.size(value) else np.empty(0, np.int64)
    if columns.ndim != 1 or columns.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{option}: expected a one-dimensional array of whole numbers, given {_shape(columns)}"
        )
    columns = columns.astype(np.int64, copy=False)
    columns.setflags(write=False)
    return columns


def _shape(values: Numbers) -> str:
    return f"{values.dtype} of shape {values.shape}"


def unless_none(check: Check) -> Check:
    """Return a check that accepts None, too."""
    return lambda option, value: None if value is None else check(option, value)


def _as_function(option: str, value: object) -> object:
    if callable(value) or isinstance(value, str):
        return value
    raise ConfigurationError(f"{option}: expected a function or its name as 'module:function', given {value!r}")


Row = Annotated[int, as_row, ROW, SOURCE]
Target = Annotated[int, as_row, ROW, TARGET]
ChangedRow = Annotated[int, as_row, ROW, SOURCE, TARGET]
RowOrAll = Annotated[int | None, unless_none(as_row), ROW]
Number = Annotated[float, as_number, NUMBER]
Finite = Annotated[float, _as_finite]
NotNegative = Annotated[float, not_negative]
Positive = Annotated[float, positive]
AtLeast1 = Annotated[int, partial(whole_number, least=1)]
AtLeast1OrNone = Annotated[int | None, unless_none(partial(whole_number, least=1))]
Seed = Annotated[int, partial(whole_number, least=0, most=_LARGEST_SEED)]
Values = Annotated[npt.ArrayLike, as_values, NUMBER]
UserFunction = Annotated[Callable[..., Any] | str, _as_function]
ColumnNumbers = Annotated[npt.ArrayLike, _as_columns, COLUMNS]
ColumnsOrAll = Annotated[npt.ArrayLike | None, unless_none(_as_columns), COLUMNS]


@cache
def _settings(function: type[PartitionFunction]) -> dict[str, tuple[object, ...]]:
    """Return the checks and marks of each setting, from the annotations of a psf of this package.

    Annotations of classes that users derive from it are not evaluated.
    """
    ours = next(base for base in function.__mro__ if base.__module__.startswith(__name__.rpartition(".")[0]))
    hints = get_type_hints(ours, include_extras=True)
    names = [field.name for field in fields(cast("Any", function))]
    return {name: getattr(hints.get(name), "__metadata__", ()) for name in names}


@cache
def _checks(function: type[PartitionFunction]) -> tuple[tuple[str, Check], ...]:
    """Return the checks of the settings, by the name of the setting."""
    marked = _settings(function).items()
    return tuple((field, cast("Check", mark)) for field, marks in marked for mark in marks if callable(mark))


@cache
def fields_with(function: type[PartitionFunction], mark: str) -> tuple[str, ...]:
    """Return the names of the settings with this mark."""
    return tuple(field for field, marks in _settings(function).items() if mark in marks)


def set_checked(function: PartitionFunction, field: str, check: Check) -> None:
    """Replace a setting by the result of its check."""
    value = check(f"psf.{function.name}({field}=)", getattr(function, field))
    object.__setattr__(function, field, value)


@dataclass(frozen=True)
class Checked(PartitionFunction):
    """A psf whose annotations say how its settings are checked, and which of them are rows, columns and numbers.

    Keywords of its class statement become attributes: ``class Scale(…, ufunc=np.multiply)`` sets ``_ufunc``.
    """

    matrix: str

    _int64: ClassVar[Literal["computed", "copied", "refused"]] = "computed"
    """For int64: compute as for floats; copy the row, as the function changes no whole number; or raise an error, as
    the results are fractions."""
    _sentence: ClassVar[str] = "{}"
    """Begins the docstrings of a family: see ``member``."""

    def __init_subclass__(cls, **keywords: Callable[..., Any] | str) -> None:
        super().__init_subclass__()
        for name, given in keywords.items():
            setattr(cls, f"_{name}", staticmethod(given) if callable(given) else given)

    def __post_init__(self) -> None:
        for field, check in _checks(type(self)):
            set_checked(self, field, check)

    @property
    def named_rows(self) -> tuple[int, ...]:
        """The rows among its settings."""
        named = [getattr(self, field) for field in fields_with(type(self), ROW)]
        return tuple([row for row in named if row is not None])

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return self.named_rows

    def check(self, matrix: Matrix) -> None:
        if self._int64 == "refused" and matrix.dtype == "int64":
            raise ParameterServerError(
                f"{where(self, matrix)}: expected a matrix of float32 or float64, because its results are fractions; "
                f"given int64"
            )
        for field in fields_with(type(self), COLUMNS):
            if (columns := getattr(self, field)) is not None:
                _check_columns(self, matrix, columns)
        for field in fields_with(type(self), NUMBER):
            _check_fits_dtype(self, matrix, field)


F = TypeVar("F", bound=Checked)

_ROLES: Final[dict[tuple[str, ...], str]] = {
    (SOURCE,): "a row that is read",
    (TARGET,): "the row that is overwritten",
    (NUMBER,): "a number of the matrix's dtype",
}


def member(family: type[F], name: str, formula: str, **keywords: Callable[..., Any] | str) -> type[F]:
    """Return a psf that differs from the others of its family in class keywords only: a row of the table in ``psf``.

    Its docstring is the family's ``sentence``, in which ``{}`` is the formula, then the arguments and an example.
    """
    package = __name__.rpartition(".")[0]
    function = new_class(name, (family,), keywords, lambda attributes: attributes.update(__module__=package))
    hints, rows = get_type_hints(family), count()
    arguments, example = ["``matrix`` (str): its name."], ['"w"']
    for field, marks in _settings(family).items():
        if role := _ROLES.get(tuple(mark for mark in marks if mark in (SOURCE, TARGET, NUMBER))):
            arguments.append(f"``{field}`` ({hints[field].__name__}): {role}.")
            example.append(f"{field}={2.0 if NUMBER in marks else next(rows)}")
    for_int64 = " Not for int64." if keywords.get("int64") == "refused" else ""
    made, shown = ", ".join(example), ", ".join(["matrix='w'", *example[1:]])
    function.__doc__ = (
        f"{family._sentence.format(formula)}{for_int64}\n\n" + "\n".join(arguments) + "\n\n"
        f">>> from streamiter.parameter_server import psf\n>>> psf.{name}({made})\n{name}({shown})\n"
    )
    return cast("type[F]", function)


class SentInParts:
    """A psf with arrays among its settings, of which ``split`` gives each block its part."""

    def without_arrays(self) -> Self:
        """Return a copy with empty arrays: each block has its part of them already."""
        made = copy(self)
        for field, value in vars(self).items():
            if isinstance(value, np.ndarray):
                object.__setattr__(made, field, value[:0])
        return made


# -- checks of settings against each other and the matrix ----------------------------------------------------


def where(function: PartitionFunction, matrix: Matrix) -> str:
    """Return the beginning of an error: which psf, on which matrix."""
    return f"psf.{function.name} on matrix {matrix.name!r}"


def check_as_many(function: PartitionFunction, columns: str, values: str) -> None:
    """Raise ConfigurationError unless two settings, the columns and their values, have the same length."""
    count, expected = len(getattr(function, values)), len(getattr(function, columns))
    if count != expected:
        raise ConfigurationError(
            f"psf.{function.name}: expected as many {values} as {columns}, "
            f"given {count} {values} and {expected} {columns}"
        )


def _check_fits_dtype(function: PartitionFunction, matrix: Matrix, field: str) -> None:
    """Raise ParameterServerError if a matrix of whole numbers cannot store the numbers of a setting."""
    if matrix.dtype != "int64":
        return
    value = getattr(function, field)
    if isinstance(value, np.ndarray):
        given = None if np.can_cast(value.dtype, np.int64) else str(value.dtype)
    else:
        # Python compares exactly: 2.0 ** 63 is one too many.
        numbers = value if isinstance(value, tuple) else (value,)
        others = (
            repr(number)
            for number in numbers
            if not (math.isfinite(number) and number == int(number) and -(2**63) <= number < 2**63)
        )
        given = next(others, None)
    if given is not None:
        raise ParameterServerError(
            f"{where(function, matrix)}, {field}=: expected whole numbers of 64 bits, as in the matrix, given {given}"
        )


def check_width(function: PartitionFunction, matrix: Matrix, field: str) -> None:
    """Raise ParameterServerError unless an array is as long as a row."""
    length = len(getattr(function, field))
    if length != matrix.columns:
        raise ParameterServerError(
            f"{where(function, matrix)}, {field}=: expected {matrix.columns} numbers, one for each column, "
            f"given {length}"
        )


def _check_columns(function: PartitionFunction, matrix: Matrix, columns: BlockColumns) -> None:
    """Raise OutOfRange if the matrix does not have one of these columns."""
    outside = (columns < 0) | (columns >= matrix.columns)
    if outside.any():
        raise OutOfRange(
            f"{where(function, matrix)}: expected columns from 0 to {matrix.columns - 1}, "
            f"given column {columns[outside.argmax()]}"
        )


# -- rows of sparse blocks -----------------------------------------------------------------------------------


def same_numbers(values: Numbers, number: float) -> npt.NDArray[np.bool_]:
    """Return which values equal a number; NaN equals NaN here."""
    return np.isnan(values) if number != number else values == number


def without_default(columns: BlockColumns, values: Numbers, default: float) -> BlockRow:
    """Return a row that stores no column whose value is the default.

    >>> without_default(np.array([3, 5]), np.array([1.0, 0.0]), 0.0).columns.tolist()
    [3]
    """
    differs = ~same_numbers(values, default)
    if differs.all():
        return BlockRow(columns, values, default)
    return BlockRow(columns[differs], values[differs], default)


def aligned(rows: Sequence[BlockRow], dtype: DTypeOfNumbers) -> tuple[BlockColumns, list[Numbers]]:
    """Return the union of the rows' columns, and for each row its values there, followed by its default.

    >>> one = BlockRow(np.array([2]), np.array([1.0]), 0.0)
    >>> two = BlockRow(np.array([4]), np.array([3.0]), 9.0)
    >>> columns, values = aligned([one, two], np.dtype("float64"))
    >>> columns.tolist(), [row.tolist() for row in values]
    ([2, 4], [[1.0, 0.0, 0.0], [9.0, 3.0, 9.0]])
    """
    every = [row.columns for row in rows] or [np.empty(0, np.int64)]
    columns = every[0] if all(other is every[0] for other in every) else reduce(np.union1d, every)
    return columns, [_at(columns, row, dtype) for row in rows]


def _at(columns: BlockColumns, row: BlockRow, dtype: DTypeOfNumbers) -> Numbers:
    values = np.full(len(columns) + 1, row.default, dtype)
    if len(columns) == len(row.columns):
        values[:-1] = row.values
    else:
        values[np.searchsorted(columns, row.columns)] = row.values
    return values
