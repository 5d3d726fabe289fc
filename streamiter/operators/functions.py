"""Checks of the functions that users give to built-in operators, and of what these return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, Columns

__all__ = ["FunctionResultError", "asynchronous_kind", "checked_batch", "field_or_function", "plain_function"]

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


def checked_batch(function: str, result: object) -> Batch:
    """``result``, if it is a batch."""
    if isinstance(result, (list, Columns)) or (isinstance(result, np.ndarray) and result.ndim > 0):
        return result
    given = "an array without axes" if isinstance(result, np.ndarray) else type(result).__name__
    raise FunctionResultError(
        f"{function}: expected the function to return a list, a numpy array whose first axis is the record, "
        f"or Columns, given {given}: {shortened(result)}; for one record return [record]"
    )
