"""The functions that users give to built-in operators.

This module checks a function before the flow starts, calls it for each record of a batch, names the record for which it
fails, and checks the batches that it returns.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import CoroutineType, FunctionType, MethodType
from typing import Any, Final, NoReturn, Protocol, cast

import numpy as np

from streamiter.errors import ConfigurationError, RejectRecords, StreamiterError, shortened
from streamiter.values.numbers import Array
from streamiter.values.object_columns import is_exact
from streamiter.values.origins import BatchOrigin, RowNumbers
from streamiter.values.records import Batch, Columns, rows_of_table, take, untimed
from streamiter.values.subtasks import check_keys

Function = Callable[..., Any]
KeyOf = Callable[[Any], Any]
"""Returns the key of a record."""


class RefusedRecords(Protocol):
    """The part of an ``Output`` that takes records for which a function has failed."""

    @property
    def tolerates_rejections(self) -> bool:
        """Whether the step continues after a refused record."""

    @property
    def batch_origin(self) -> BatchOrigin | None:
        """Where the current batch was read, as far as known."""

    def _origin_at(self, row: int) -> BatchOrigin | None:
        """Return where the record at this place of the current batch was read, as far as known."""

    def _keep_rows(self, rows: RowNumbers) -> None:
        """Say that only the records at ``rows`` remain of the current batch."""

    def reject(self, record: Any, reason: str | Exception, *, origin: BatchOrigin | None = None) -> None:
        """Refuse a record: by the policy of the step this returns or ends the job."""

    def fail(self, reason: str | Exception, record: Any) -> NoReturn:
        """End the job, naming the step and the record."""


class FunctionResultError(StreamiterError, TypeError):
    """A user's function returned a value that its step cannot take."""


def plain_function(argument: str, f: Function) -> Function:
    """Return ``f``; raise ``ConfigurationError`` unless it is a plain function. ``argument`` names it in the error.

    >>> plain_function("Map(f)", 3)
    Traceback (most recent call last):
    streamiter.errors.ConfigurationError: Map(f): expected a function, given 3
    """
    if not callable(f):
        raise ConfigurationError(f"{argument}: expected a function, given {shortened(f)}")
    if kind := asynchronous_kind(f):
        raise ConfigurationError(
            f"{argument}: expected a plain function, given the {kind} {f!r}; "
            "write an Operator whose process method is async and use .process(…)"
        )
    return f


def asynchronous_kind(f: Function) -> str | None:
    """Return the kind of an asynchronous function, as text; None for a plain function.

    >>> async def ask(record): ...
    >>> asynchronous_kind(ask), asynchronous_kind(len)
    ('coroutine function', None)
    """
    # A callable object is asynchronous if its __call__ is; a class is plain, since it makes an object at once.
    called = f if inspect.isroutine(f) or isinstance(f, (type, partial)) else type(f).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine function"
    return "asynchronous generator function" if inspect.isasyncgenfunction(called) else None


def misfit(f: Function, arguments: Sequence[str], *, unbound: bool = False) -> str | None:
    """Return why ``f`` cannot be called with these positional arguments: its signature and Python's message.

    None if it can be called, or if its signature is not known, as for many functions in C. ``unbound``: ``f`` is the
    function of a method, whose first argument is ``self``.

    >>> misfit(lambda a, b=1, *c: a, ["record"]), misfit(max, ["record"])
    (None, None)
    >>> def scaled(record, factor): ...
    >>> misfit(scaled, ["record"])
    "scaled(record, factor): missing a required argument: 'factor'"
    """
    if _takes(f, len(arguments) + unbound):
        return None
    try:
        # The signature of the decorator itself, which may pass on more arguments than it is given.
        signature = inspect.signature(f, follow_wrapped=False)
    except Exception:  # ValueError for functions in C; the attributes of an object may raise any error
        return None
    try:
        signature.bind(*(["self"] if unbound else []), *arguments)
    except TypeError as error:
        name = getattr(f, "__name__", type(f).__name__)
        return f"{name}({', '.join(map(_shown, signature.parameters.values()))}): {error}"
    return None


def _takes(f: Any, count: int) -> bool:
    """Return whether ``f`` is a Python function or class that takes this many arguments; False where that is not sure.

    This avoids most signatures: a signature takes 20 µs, and for a class several times as much: longer than adding a
    step.
    """
    kind: Any = f
    if type(f) is type and kind.__new__ is object.__new__:
        if kind.__init__ is object.__init__:
            return count == 0
        f, count = kind.__init__, count + 1
    elif isinstance(f, MethodType):
        f, count = f.__func__, count + 1
    if not isinstance(f, FunctionType):
        return False
    code = f.__code__
    if len(f.__kwdefaults__ or ()) < code.co_kwonlyargcount:
        return False
    required = code.co_argcount - len(f.__defaults__ or ())
    return required <= count and (count <= code.co_argcount or bool(code.co_flags & inspect.CO_VARARGS))


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    has_default = parameter.default is not parameter.empty
    return f"{parameter.name}=…" if has_default or parameter.kind is parameter.KEYWORD_ONLY else parameter.name


def field_or_function(argument: str, field_or_f: str | Function) -> Function:
    """Return the function; for the name of a field, return a function that reads the field by key or by attribute.

    >>> age_of = field_or_function("Sort(key)", "age")
    >>> age_of({"age": 41})
    41
    """
    if not isinstance(field_or_f, str):
        return plain_function(argument, field_or_f)
    name = field_or_f

    def field(record: Any) -> Any:
        try:
            return record[name] if isinstance(record, (dict, np.void)) else getattr(record, name)
        except (KeyError, AttributeError, ValueError) as error:
            raise no_field(argument, name, record) from error

    def of_dicts(records: Batch) -> list[Any]:
        if type(records) is not list or set(map(type, records)) != {dict}:
            raise TypeError
        return list(map(itemgetter(name), records))

    field.__qualname__ = f"field {name!r}"
    return with_batches(field, of_dicts)


def field_read_by(function: Any) -> str | None:
    """Return the name of the field that an ``itemgetter`` reads; None for any other function."""
    if type(function) is not itemgetter:
        return None
    fields = function.__reduce__()[1]
    return fields[0] if len(fields) == 1 and isinstance(fields[0], str) else None


def field_column(function: Function, records: Batch, kinds: str) -> Array | None:
    """Return the column of ``Columns`` that an ``itemgetter`` reads, if it has one axis and a type of these kinds."""
    field = field_read_by(function) if isinstance(records, Columns) else None
    is_there = isinstance(records, Columns) and field is not None and is_exact(records.arrays, field)
    column = cast(Columns, records)[cast(str, field)] if is_there else None
    return column if column is not None and column.ndim == 1 and column.dtype.kind in kinds else None


def field_values(function: Function, records: Batch) -> list[Any]:
    """Return what the function returns for each record; a field of ``Columns`` is read as a whole.

    >>> field_values(itemgetter("x"), Columns({"x": [1, 2], "y": [0, 0]}))
    [1, 2]
    """
    field = field_read_by(function)
    if isinstance(records, Columns) and field is not None and is_exact(records.arrays, field):
        values: list[Any] = records[field].tolist()
        return values
    found = values_at_once(function, records)
    return list(map(function, records)) if found is None else found


def with_batches(function: Function, of_batch: Callable[[Batch], list[Any]]) -> Function:
    """Return the function with a quicker way to call it for all records of a batch.

    ``of_batch`` may raise any error: then the function is called for each record, and says which one is at fault.
    """
    # With the function: a decorator copies the attributes of what it wraps.
    function.of_batch = function, of_batch  # type: ignore[attr-defined]
    return function


def values_at_once(function: Function, records: Batch) -> list[Any] | None:
    """Return what the function returns for each record, if :func:`with_batches` gave it a way that succeeds."""
    # Objects of users may have any attribute.
    given = function.__dict__.get("of_batch") if type(function) is FunctionType else None
    if given is not None and given[0] is function:
        with suppress(Exception):
            values: list[Any] = given[1](records)
            return values
    return None


def no_field(argument: str, name: str, record: Any) -> ValueError:
    """Return the error for a record without a field: it has the fields that are there.

    >>> no_field("key_by", "user", {"usr": 1})
    ValueError("key_by: expected a record with the field 'user', given one with 'usr'; write a field that each record \
has, or a function")
    """
    known: Any = record
    if isinstance(record, np.void):
        known = record.dtype.names or ()
    elif not isinstance(record, dict):
        # Those of msgspec's structs, of named tuples, and of other objects.
        attributes = (getattr(record, each, None) for each in ("__struct_fields__", "_fields", "__dict__"))
        known = next(filter(None, attributes), ())
    names = ", ".join(map(repr, [*known][:_FIELDS_SHOWN])) + ", …" * (len(known) > _FIELDS_SHOWN)
    given = f"one with {names}" if names else f"{shortened(record)}, which has no fields"
    return ValueError(
        f"{argument}: expected a record with the field {name!r}, given {given}; write a field that each record has, or "
        "a function"
    )


_FIELDS_SHOWN: Final = 20
"""A message with more names would not be read."""


def rows_if_table(function: str, result: Any) -> Any:
    """Return the rows of a table of pandas, polars or Arrow, and any other result as it is.

    Raises ``FunctionResultError`` for any other kind of table, because iterating over most tables gives column names.
    """
    rows = rows_of_table(function, result, FunctionResultError)
    return result if rows is None else rows


def checked_batch(function: str, result: object) -> Batch:
    """Return ``result`` if it is a batch, and the rows of a table; raise ``FunctionResultError`` otherwise."""
    if not isinstance(result, (list, Columns, np.ndarray)):
        result = rows_if_table(function, result)
    if isinstance(result, (list, Columns)) or (isinstance(result, np.ndarray) and result.ndim > 0):
        return result
    given = "an array without axes" if isinstance(result, np.ndarray) else type(result).__name__
    raise FunctionResultError(
        f"{function}: expected the function to return a list, a numpy array whose first axis is the record, "
        f"or Columns, given {given}: {shortened(result)}; for one record return [record]"
    )


def apply_to_each(f: Callable[[Any], Any], batch: Batch, out: RefusedRecords) -> tuple[Batch, list[Any]]:
    """Call ``f`` for each record, in order; return the records that were not refused, and the results.

    A record for which ``f`` raises follows the step's policy. If no record is refused, the batch itself is returned.
    """
    if (found := values_at_once(f, batch)) is not None:
        return batch, found
    if out.tolerates_rejections:
        return _apply_tolerantly(f, batch, out)
    records, progress = records_of(batch)
    try:
        return batch, [f(record) for record in records]
    except Exception as error:
        fail_at(batch, progress, error, out)


def refuse_coroutines(made: Iterable[Any]) -> NoReturn:
    """Close the coroutines that a plain function has made, such as ``lambda order: client.get(order)``, and raise."""
    for each in made:
        if isinstance(each, CoroutineType):
            each.close()
    raise FunctionResultError(
        "expected a function that returns a value, given one that returns a coroutine; write .map_async(f), with an "
        "async def"
    )


def _apply_tolerantly(f: Callable[[Any], Any], batch: Batch, out: RefusedRecords) -> tuple[Batch, list[Any]]:
    accepted: list[int] = []
    results: list[Any] = []
    for index, record in enumerate(batch):
        try:
            result = f(record)
        except Exception as error:
            refuse(out, record, error, index)
        else:
            accepted.append(index)
            results.append(result)
    if len(accepted) == len(batch):
        return batch, results
    out._keep_rows(accepted)
    return take(batch, accepted), results


def accepted_keys(
    key_of: KeyOf,
    records: Batch,
    out: RefusedRecords,
    *,
    first_row: int = 0,
    at_hand: Callable[[int], object] = lambda place: None,
) -> tuple[Sequence[int], list[Any]]:
    """Return the places of the records that have a valid key, and these keys; refuse the other records.

    ``first_row`` is the place of the first record in the batch at hand. ``at_hand`` is called with the place of a
    record before it is refused.
    """
    try:
        return range(len(records)), check_keys([key_of(record) for record in records])
    except Exception:  # The records at fault are found one by one.
        places: list[int] = []
        keys: list[Any] = []
    for place, record in enumerate(records):
        try:
            keys += check_keys([key_of(record)])
        except Exception as error:
            at_hand(place)
            refuse(out, record, error, first_row + place)
        else:
            places.append(place)
    return places, keys


def records_with_keys(
    key_of: KeyOf, records: Batch, out: RefusedRecords, at_hand: Callable[[int], object] = lambda place: None
) -> tuple[Batch, list[Any]]:
    """Return the records that have a valid key, and these keys; refuse the other records of the batch at hand."""
    places, keys = accepted_keys(key_of, records, out, at_hand=at_hand)
    if len(keys) == len(records):
        return records, keys
    out._keep_rows(places)
    return take(records, places), keys


def records_of(batch: Batch) -> tuple[Iterator[Any], Iterator[Any]]:
    """Return an iterator over the records, and an iterator whose length hint tells the progress of the first.

    The second is for :func:`fail_at`; often both are the same object.
    """
    batch = untimed(batch)
    if isinstance(batch, Columns):
        columns = [iter(array) for array in batch.arrays.values()]
        names = batch.names
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        return rows, columns[0]
    # Iterators of sequences other than these need not know their length.
    records = iter(batch if isinstance(batch, (list, np.ndarray)) else list(batch))
    return records, records


def fail_at(batch: Batch, progress: Iterator[Any], error: Exception, out: RefusedRecords) -> NoReturn:
    """End the job with ``error``, naming the record for which it was raised."""
    found, index = record_at_fault(range(len(batch)), progress)
    if not found:
        raise error
    out.fail(error, batch[index])


def refuse(out: RefusedRecords, record: Any, error: Exception, row: int | None = None) -> None:
    """Refuse a record of the current batch because of ``error``; by the step's policy this returns or ends the job.

    ``row`` is its place in the batch, where that is known; a record without one is looked for.
    """
    reason = error.reason if isinstance(error, RejectRecords) and out.tolerates_rejections else error
    out.reject(record, reason, origin=out.batch_origin if row is None else out._origin_at(row))


def record_at_fault(batch: Batch, records: Iterator[Any]) -> tuple[bool, Any]:
    """Return whether the last record of a half-consumed iterator over ``batch`` is known, and that record.

    >>> batch = [3, 0, 5]
    >>> records = iter(batch)
    >>> [next(records), next(records)]
    [3, 0]
    >>> record_at_fault(batch, records)
    (True, 0)
    """
    if isinstance(batch, Columns):
        return False, None
    consumed = len(batch) - operator.length_hint(records)
    return (True, batch[consumed - 1]) if consumed > 0 else (False, None)
