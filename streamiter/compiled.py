"""Compiled functions: plain Python on numbers and arrays, as fast as C where Numba is installed.

Numba is optional (``pip install "streamiter[fast]"``). Without it the same functions run uncompiled, with the same
results, some hundred times slower. The compiled code is stored on disk beside the module, or in Numba's own directory
for the user where the module's directory cannot be written; only the first process of all compiles.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar, cast

_log = logging.getLogger("streamiter.learn")

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

    try:
        return cast(AnyFunction, njit(cache=True)(function))
    except (
        RuntimeError
    ):  # No directory can be written, or the function has no file, as in an interactive session.
        return cast(AnyFunction, njit(function))


@contextmanager
def saying_that_it_compiles(functions: str) -> Iterator[None]:
    """Log one line before functions are compiled in this block, which takes ten seconds; none if they are stored.

    Where Numba is missing, a warning says how to install it, once in a process.
    """
    if not is_compiling():
        _warn_of_slowness(functions)
        yield
        return
    from numba.core.event import Event, Listener, install_listener

    class _Says(Listener):
        is_said = False

        def on_start(self, event: Event) -> None:
            if not self.is_said:
                self.is_said = True
                _log.info(
                    "compiling %s; this takes about 10 s, once if a directory can be written",
                    functions,
                )

        def on_end(self, event: Event) -> None:
            """Say nothing."""

    with install_listener("numba:compile", _Says()):
        yield


@functools.cache
def _warn_of_slowness(functions: str) -> None:
    _log.warning(
        "%s is not compiled, and some hundred times slower, because Numba is not installed; install it with: "
        'pip install "streamiter[fast]"',
        functions,
    )
