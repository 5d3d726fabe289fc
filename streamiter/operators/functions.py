"""Checks of the functions that users give to built-in operators, and of what these return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, Columns
from streamiter.tables import rows_of_table

__all__ = [
    "FunctionResultError",
    "asynchronous_kind",
    "batch_of",
    "checked_batch",
    "field_or_function",
    "misfit",
    "plain_function",
    "rows_if_table",
]

Function = Callable[..., Any]


class FunctionResultError(StreamiterError, TypeError):
    """A function given to a step returned what the step cannot take."""


def plain_function(argument: str, f: Function) -> Function:
    """``f``, if it can be called once for each record; ``argument`` names it in the error.

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
    """What a function is that cannot be called without being awaited; None for a plain one.

    >>> async def ask(record): ...
    >>> asynchronous_kind(ask), asynchronous_kind(len)
    ('coroutine function', None)
    """
    # An object that can be called is asynchronous if its __call__ is; a class makes an object at once.
    called = f if inspect.isroutine(f) or isinstance(f, (type, partial)) else type(f).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine function"
    return "asynchronous generator function" if inspect.isasyncgenfunction(called) else None


def misfit(f: Function, arguments: Sequence[str], *, unbound: bool = False) -> str | None:
    """Why ``f`` cannot be called with these arguments, by position: its signature, and what Python says.

    None if it can, and where its signature is not known, as of many functions in C. ``unbound``: it is the function of
    a method, which is given ``self`` first.

    >>> misfit(lambda a, b=1, *c: a, ["record"]), misfit(max, ["record"])
    (None, None)
    >>> def scaled(record, factor): ...
    >>> misfit(scaled, ["record"])
    "scaled(record, factor): missing a required argument: 'factor'"
    """
    if _takes(f, len(arguments) + unbound):
        return None
    try:
        # As it is called: a decorator may pass on more arguments than it is given.
        signature = inspect.signature(f, follow_wrapped=False)
    except Exception:  # ValueError for functions in C; what an object says of itself may raise anything.
        return None
    try:
        signature.bind(*(["self"] if unbound else []), *arguments)
    except TypeError as error:
        name = getattr(f, "__name__", type(f).__name__)
        return f"{name}({', '.join(map(_shown, signature.parameters.values()))}): {error}"
    return None


def _takes(f: Any, count: int) -> bool:
    """Whether it is a function or class of Python that takes so many arguments; False where that has to be looked at.

    Most are: a signature takes 20 µs, and that of a class several times as much, which is longer than adding a step.
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
    return (
        f"{parameter.name}=…" if has_default or parameter.kind is parameter.KEYWORD_ONLY else parameter.name
    )


def field_or_function(argument: str, field_or_f: str | Function) -> Function:
    """The function that reads a field, if a name is given: of a dict by key, else by attribute.

    >>> field_or_function("Sort(key)", "age")({"age": 41})
    41
    """
    if not isinstance(field_or_f, str):
        return plain_function(argument, field_or_f)
    name = field_or_f

    def field(record: Any) -> Any:
        return record[name] if isinstance(record, (dict, np.void)) else getattr(record, name)

    return field


def rows_if_table(function: str, result: Any) -> Any:
    """The rows of a table of pandas, polars or Arrow; anything else as it is.

    Raises FunctionResultError for any other table: iterated, most give the names of their columns.
    """
    rows = rows_of_table(function, result, FunctionResultError)
    return result if rows is None else rows


def batch_of(where: str, given: Any) -> Batch:
    """``given``, if it is a sequence of records, or its rows, if it is a table."""
    given = rows_if_table(where, given)
    if isinstance(given, (Mapping, str, bytes)) or not hasattr(given, "__len__"):
        raise FunctionResultError(
            f"{where}: expected a list, a numpy array or Columns, given {type(given).__name__}: {shortened(given)}; "
            "for one record write [record]"
        )
    batch: Batch = given
    return batch


def checked_batch(function: str, result: object) -> Batch:
    """``result``, if it is a batch, or its rows, if it is a table."""
    if not isinstance(result, (list, Columns, np.ndarray)):
        result = rows_if_table(function, result)
    if isinstance(result, (list, Columns)) or (isinstance(result, np.ndarray) and result.ndim > 0):
        return result
    given = "an array without axes" if isinstance(result, np.ndarray) else type(result).__name__
    raise FunctionResultError(
        f"{function}: expected the function to return a list, a numpy array whose first axis is the record, "
        f"or Columns, given {given}: {shortened(result)}; for one record return [record]"
    )
