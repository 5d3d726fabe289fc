"""Tables of pandas, polars and Arrow as rows, whose columns become numpy arrays, and rows as tables of Arrow.

To read tables, this module imports none of these libraries: a program that uses one of their tables has imported the
library. `arrow_table` imports pyarrow.

=======================================  ==================================================================
a column of                              becomes
=======================================  ==================================================================
integers, floats, truth values           an array of its dtype
times, dates, durations                  ``datetime64`` or ``timedelta64``; with a time zone: in UTC
texts, categories of texts               an array of texts
categories of numbers                    an array of these numbers
arrays of one length                     a matrix
bytes, lists, dicts; values of           Python objects, so the rows become a list of dicts, which takes
several types                            more time and memory than ``Columns``
=======================================  ==================================================================

Missing integers and floats become NaN. So a column of integers with missing values becomes floats, and is refused if an
integer is above 2**53, which a float cannot hold. Missing times become NaT. All other missing values become None in a
column of Python objects. Other values (decimals, times of a day, objects of your own) are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, StreamiterError
from streamiter.values.numbers import Array, Floats

# Floats hold all integers up to this one exactly.
_EXACT_IN_FLOATS: Final = 2**53

# An array of texts has room for the longest text in each row. The array is used if it takes at most this many times the
# room of a list: in a list a text takes 49 bytes and its reference 8, which is the room of 14 characters in an array.
_CHARACTERS_AT_LEAST: Final = 64
_TIMES_THE_TEXTS: Final = 8

_PLAIN_VALUES: Final = frozenset({type(None), bool, int, float, str, bytes})


class _Column(NamedTuple):
    """A column of one of the libraries."""

    present: Any
    """The values that are not missing, in order, as an array."""
    missing: npt.NDArray[np.bool_]
    """For each row whether its value is missing."""


def arrays_of_table(owner: str, given: object, error: type[StreamiterError]) -> dict[str, Array] | None:
    """Return the columns of a table of pandas, polars or Arrow, also columns of objects; None for other objects.

    Raises ``error`` for any other kind of table, since iterating over most tables yields column names and not rows.
    Raises it also for columns that are not plain data, and for columns without distinct names.
    """
    if (tables := _loaded("pandas", "DataFrame")) and isinstance(given, tables):
        names = list(given.columns)
        columns: Iterable[Any] = (given.iloc[:, place] for place in range(len(names)))
    elif (tables := _loaded("polars", "DataFrame")) and isinstance(given, tables):
        names, columns = given.columns, given.get_columns()
    elif (tables := _loaded("pyarrow", "Table", "RecordBatch")) and isinstance(given, tables):
        names, columns = given.schema.names, given.columns
    else:
        _refuse_other_tables(owner, given, error)
        return None
    _check_names(owner, names, error)
    return {
        name: _array(f"{owner}: column {name!r}", column, error) for name, column in zip(names, columns, strict=True)
    }


def values_of_column(owner: str, given: object, error: type[StreamiterError]) -> Array | None:
    """Return the values of a ``Series`` or an Arrow array; None for other objects."""
    return _array(owner, given, error) if isinstance(given, _column_types()) else None


def _refuse_other_tables(owner: str, given: object, error: type[StreamiterError]) -> None:
    kind = type(given)
    if isinstance(given, _column_types()):
        return
    name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    if (lazy := _loaded("polars", "LazyFrame")) and isinstance(given, lazy):
        raise error(f"{owner}: expected rows, given a query of them, a polars.LazyFrame; write ….collect()")
    if hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__"):
        raise error(f"{owner}: expected rows, given a {name}; write pyarrow.table(…) to make a table of it")
    if hasattr(kind, "__dataframe__") or _has_columns(kind):
        raise error(
            f"{owner}: expected rows, given a {name}, which is a table of columns; make it a table of pandas, polars "
            "or Arrow, or Columns(…)"
        )


def as_floats(owner: str, what: str, given: Any) -> Floats:
    """Return ``given`` as an array of float64, without a copy if it is one; for a table, its columns side by side.

    Raises ``ModelError`` for values that are not numbers; the message names the column of a table.
    """
    try:
        return np.asarray(_numbers(f"{owner}: {what}", given), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{owner}: expected {what} as numbers, given {type(given).__name__}: {error}") from None


def array_of(owner: str, given: Any) -> Array:
    """Return ``given`` as an array; a column of texts becomes an array of texts, where numpy would make objects."""
    column = values_of_column(owner, given, ModelError)
    return np.asarray(given) if column is None else column


def _numbers(where: str, given: Any) -> Any:
    """Return a table as a matrix of numbers, a column as a vector of numbers, and other objects unchanged."""
    if isinstance(given, (np.ndarray, list, tuple)):
        return given
    columns = arrays_of_table(where, given, ModelError)
    if columns is not None:
        for name, array in columns.items():
            _check_numbers(f"{where}: column {name!r}", array)
        return np.column_stack(list(columns.values()))
    column = values_of_column(where, given, ModelError)
    if column is None:
        return given
    _check_numbers(where, column)
    return column


def _loaded(library: str, *names: str) -> tuple[type[Any], ...]:
    """Return these classes of a library, or none where the library is not, or not completely, imported."""
    module = sys.modules.get(library)
    return tuple(found for name in names if (found := getattr(module, name, None)) is not None)


def _column_types() -> tuple[type[Any], ...]:
    return (*_loaded("pandas", "Series"), *_loaded("polars", "Series"), *_loaded("pyarrow", "ChunkedArray", "Array"))


def _has_columns(kind: type[Any]) -> bool:
    return hasattr(kind, "columns") and any(hasattr(kind, name) for name in ("dtypes", "schema", "types"))


def _check_names(owner: str, names: Sequence[Any], error: type[StreamiterError]) -> None:
    if not names:
        raise error(f"{owner}: expected a table with columns, given one without; give it at least one")
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise error(f"{owner}: expected columns with texts as names, given {name!r} for column {place}; rename it")
        if name in names[:place]:
            raise error(f"{owner}: expected each column once, given two named {name!r}; rename one of them")


# -- rows as a table ---------------------------------------------------------------------------------------


def arrow_table(
    owner: str, rows: Any, error: type[StreamiterError], schema: Any = None, *, is_mixed: bool = False
) -> Any:
    """Return rows as a ``pyarrow.Table``: arrays by name, a table, or records with fields (dicts, structs, …).

    All records must have the fields of the first one. With ``is_mixed``, a field that a record does not have is null,
    and a record without fields is the field ``value``. ``schema`` says the types, and the order of the columns.

    Raises ``TypeError`` or ``ValueError`` for records that make no table, and ``error`` for other tables.
    """
    import pyarrow

    if (tables := _loaded("pandas", "DataFrame")) and isinstance(rows, tables):
        table = pyarrow.Table.from_pandas(rows, preserve_index=False)
    elif (tables := _loaded("polars", "DataFrame")) and isinstance(rows, tables):
        table = rows.to_arrow()
    elif isinstance(rows, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([rows])
    elif isinstance(rows, pyarrow.Table):
        table = rows
    else:
        _refuse_other_tables(owner, rows, error)
        columns = rows if isinstance(rows, dict) else _columns_of(rows, is_mixed)
        types = {} if schema is None else {field.name: field.type for field in schema}
        arrays = {name: _arrow_array(name, values, types.get(name)) for name, values in columns.items()}
        table = pyarrow.table(arrays)
    if schema is None:
        return table
    if set(table.column_names) != set(schema.names):
        raise TypeError(f"expected the fields {', '.join(schema.names)}, given {', '.join(table.column_names)}")
    return table.select(schema.names).cast(schema)


def _columns_of(records: Sequence[Any], is_mixed: bool) -> dict[str, list[Any]]:
    """Return the values of each field of the records."""
    rows = [_fields_of(record) for record in records]
    if is_mixed:
        wide = [{"value": record} if row is None else row for record, row in zip(records, rows, strict=True)]
        return {name: [row.get(name) for row in wide] for name in dict.fromkeys(name for row in wide for name in row)}
    names = next((row.keys() for row in rows if row is not None), {}.keys())
    for record, row in zip(records, rows, strict=True):
        if row is None or row.keys() != names:
            given = type(record).__name__ if row is None else ", ".join(map(str, row))
            raise TypeError(
                f"expected a record with the fields {', '.join(map(str, names)) or 'of a table'}, given {given}"
            )
    return {name: [row[name] for row in rows if row is not None] for name in names}


def _fields_of(record: Any) -> Mapping[str, Any] | None:
    """Return the fields of a record by name; None for a record without."""
    if isinstance(record, dict):
        return record
    names = getattr(record, "__struct_fields__", None) or getattr(record, "_fields", None)
    if names is None and is_dataclass(record) and not isinstance(record, type):
        names = [field.name for field in fields(record)]
    return None if names is None else {name: getattr(record, name) for name in names}


def _arrow_array(name: str, values: Any, wanted: Any) -> Any:
    """Return a column as an array of Arrow; the type is ``wanted``, if it is not None."""
    import pyarrow

    given = values
    if isinstance(values, np.ndarray):
        kind = values.dtype.kind
        if kind in "mM" and np.datetime_data(values.dtype)[0] not in ("s", "ms", "us", "ns", "D"):
            values = values.astype(f"{kind}8[s]")
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        if values.ndim > 1 or kind in "USO":  # texts of numpy are no texts of Arrow
            values = values.tolist()
    try:
        return pyarrow.array(values, wanted)
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        first = next((each for each in given if each is not None), None)
        raise TypeError(
            f"field {name!r}: {str(error).splitlines()[0]} (the first value is {str(first)[:80]!r})"
        ) from None


# -- one column --------------------------------------------------------------------------------------------


def _array(where: str, column: Any, error: type[StreamiterError]) -> Array:
    if (types := _loaded("pandas", "Series")) and isinstance(column, types):
        found = _of_pandas(column)
    elif (types := _loaded("polars", "Series")) and isinstance(column, types):
        found = _of_polars(column)
    else:
        found = _of_arrow(column)
    present, missing = found
    if present.dtype.hasobject:
        present = _without_objects(where, present, missing, error)
    return _with_missing(where, present, missing, error) if missing.any() else present


def _of_pandas(column: Any) -> _Column:
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biufcmM":
        return _Column(column.to_numpy(), np.zeros(0, dtype=np.bool_))  # The array contains NaN and NaT.
    missing = np.asarray(column.isna(), dtype=np.bool_)
    present = column[~missing]
    if getattr(getattr(present, "dt", None), "tz", None) is not None:
        present = present.dt.tz_convert("UTC").dt.tz_localize(None)
    return _Column(present.to_numpy(), missing)


def _of_polars(column: Any) -> _Column:
    missing = column.is_null().to_numpy()
    present = column.drop_nulls()
    if (column.dtype.is_nested() and not _is_matrix(column)) or column.dtype in _loaded("polars", "Null"):
        return _Column(_objects(present.to_list()), missing)
    return _Column(present.to_numpy(), missing)


def _is_matrix(column: Any) -> bool:
    """Return whether the column has arrays of one length, without missing numbers."""
    shape = getattr(column.dtype, "shape", None)
    return (
        shape is not None
        and len(shape) == 1
        and column.dtype.inner.is_numeric()
        and not column.null_count()
        and not column.explode().null_count()
    )


def _of_arrow(column: Any) -> _Column:
    missing = np.asarray(column.is_null(), dtype=np.bool_)
    present = column.drop_null()
    if hasattr(column.type, "index_type"):
        # A dictionary, which as an array has values in place of missing ones.
        present = present.cast(column.type.value_type)
    if present.type.num_fields:
        return _Column(_objects(present.to_pylist()), missing)
    return _Column(np.asarray(present), missing)


def _objects(values: Sequence[Any]) -> Array:
    """Return an array of these objects; a list among them stays one object."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def _without_objects(where: str, present: Array, missing: npt.NDArray[np.bool_], error: type[StreamiterError]) -> Array:
    """Return an array of numbers, truth values or texts if all values are of one such type, else the objects."""
    values = present.tolist()
    kinds = set(map(type, values))
    if kinds == {str}:
        return np.array(values, dtype=np.str_) if _fit_an_array(values) else present
    if kinds in ({bool}, {float}):
        return np.array(values)
    if kinds == {int}:
        numbers = np.array(values)
        return numbers if numbers.dtype.kind in "iu" else present
    if not kinds <= _PLAIN_VALUES:
        _check_plain(where, present, missing, error)
    return present


def _fit_an_array(texts: Sequence[str]) -> bool:
    """Return whether an array can hold these texts in little more room. An array loses NULs at the end of a text."""
    longest = max(map(len, texts))
    room = max(_CHARACTERS_AT_LEAST * len(texts), _TIMES_THE_TEXTS * sum(map(len, texts)))
    return longest * len(texts) <= room and not any(text.endswith("\0") for text in texts)


def _check_plain(where: str, present: Array, missing: npt.NDArray[np.bool_], error: type[StreamiterError]) -> None:
    for place, value in enumerate(present):
        if not _is_plain(value):
            row = int(np.flatnonzero(~missing)[place]) if missing.any() else place
            raise error(
                f"{where}: expected numbers, texts, bytes, truth values, times or lists and dicts of these, given "
                f"{type(value).__name__} {str(value)[:80]} in row {row}; make it one of them before, such as a float "
                "or a text, or leave the column out"
            )


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (np.ndarray, np.generic)):
        return not value.dtype.hasobject
    return type(value) in _PLAIN_VALUES


def _with_missing(where: str, present: Array, missing: npt.NDArray[np.bool_], error: type[StreamiterError]) -> Array:
    kind = present.dtype.kind
    if kind in "iu":
        if len(present) and max(-int(present.min()), int(present.max())) > _EXACT_IN_FLOATS:
            raise error(
                f"{where}: expected integers of at most 2**53 where some are missing, because these become NaN and "
                "the others floats, given larger ones; fill the missing ones, or convert the column to texts"
            )
        present, kind = present.astype(np.float64), "f"
    if kind in "fcmM":
        filled = np.full((len(missing), *present.shape[1:]), "NaT" if kind in "mM" else np.nan, present.dtype)
    else:
        filled = np.full(len(missing), None, dtype=np.object_)
        present = _objects(present.tolist())
    filled[~missing] = present
    return filled


def _check_numbers(where: str, array: Array) -> None:
    if array.dtype.kind not in "biuf":
        raise ModelError(
            f"{where}: expected numbers, given {array.dtype}; leave the column out, or convert it to numbers"
        )


class ArrowTable(Protocol):
    """A table of polars or Arrow, for type checkers: its iterator does not give its rows."""

    def __arrow_c_stream__(self, requested_schema: object | None = None, /) -> object:
        """Return the table as a stream of Arrow."""
