"""Compiled functions: plain Python on numbers and arrays, as fast as C where Numba is installed.

Numba is optional (``pip install "streamiter[fast]"``). Without it the same functions run uncompiled, with the same
results, some hundred times slower. The compiled code is stored on disk beside the module, or in Numba's own directory
for the user where the module's directory cannot be written; only the first process of all compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar, cast

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Whether Numba is installed, so that compiled functions are fast."""
    return find_spec("numba") is not None


def compiled(function: AnyFunction) -> AnyFunction:
    """Compile a function when it is first called; return it as it is where Numba is missing.

    A module of compiled functions is imported by the function that needs it, because importing Numba takes most of a
    second. The functions may use numbers, arrays and each other, and no objects.

    >>> @compiled
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half(3.0)
    1.5
    """
    if not is_compiling():
        return function
    from numba import njit

    # A function of an interactive session has no file to store the compiled code beside.
    is_stored = not function.__code__.co_filename.startswith("<")
    return cast(AnyFunction, njit(cache=is_stored)(function))
