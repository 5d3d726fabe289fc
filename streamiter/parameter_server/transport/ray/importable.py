"""Requests whose functions another process can import."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamiter.parameter_server.first_values import init_functions
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import Add, Aggregate, Create, Update

__all__ = ["importable"]


def importable(request: Any) -> Any:
    """The same request, its functions by name; raises ConfigurationError for one that has none, such as a lambda."""
    if isinstance(request, (Update, Aggregate)):
        function = request.function
        return request if function is None else replace(request, function=_named(function).without_arrays())
    if isinstance(request, Add) and request.update is not None:
        return replace(request, update=importable(request.update))
    if isinstance(request, Create):
        return replace(request, matrix=_matrix(request.matrix))
    return request


def _named(function: Any) -> Any:
    return function.require_importable()


def _matrix(matrix: Matrix) -> Matrix:
    init = matrix.init
    if functions := init_functions(matrix):
        init = [_named(function) for function in functions]
    on_clock = None if matrix.on_clock is None else _named(matrix.on_clock)
    return replace(matrix, init=init, on_clock=on_clock)
