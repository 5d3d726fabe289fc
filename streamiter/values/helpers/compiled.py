"""Compiled functions: plain Python on numbers and arrays, as fast as C where Numba is installed.

Numba is optional (``pip install "streamiter[fast]"``). Without it the same functions run uncompiled, with the same
results, some hundred times slower. The compiled code is stored on disk next to the module, or in Numba's own directory
for the user where the module's directory cannot be written; only the first process of all compiles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache
from importlib.util import find_spec
from threading import Event, get_ident
from typing import Any, Final, TypeVar, cast

import numpy.typing as npt

_log = logging.getLogger("streamiter.compiled")

Arrays = TypeVar("Arrays", bound=npt.NDArray[Any] | tuple[npt.NDArray[Any], ...])
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
T = TypeVar("T")

_AWAITED: Final[ContextVar[Event | None]] = ContextVar("compiled code of this thread", default=None)
"""In a thread of :func:`beside_event_loop`: what the event loop waits for."""


@cache
def is_compiling() -> bool:
    """Whether Numba is installed and its compiler is not switched off, so that compiled functions are fast."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0") and find_spec("numba") is not None


def is_loaded() -> bool:
    """Whether another part of the process has imported Numba, which takes a second, and its compiler works."""
    return sys.modules.get("numba") is not None and is_compiling()


def compiled(function: AnyFunction) -> AnyFunction:
    """Compile a function when it is first called; return it as it is where Numba is missing.

    A module of compiled functions is imported by the function that needs it, because importing Numba takes most of a
    second. The functions may use numbers, arrays and each other, and no objects, and make no arrays. Other threads run
    while one of them runs, and must not change its arrays.

    >>> @compiled
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half(3.0)
    1.5
    """
    if not is_compiling():
        return function
    from streamiter.values.helpers.numba_code import CompiledFunction

    return cast(AnyFunction, CompiledFunction(function))


def compiled_for_separate(function: AnyFunction) -> AnyFunction:
    """As :func:`compiled`, for a function of pointers to separate memory that never divides by zero.

    Nothing that is written by one of the pointers is read by another one. So several numbers are computed at once, with
    the same bits. A division by zero would be infinite, and not raise.
    """
    if not is_compiling():
        return function
    from streamiter.values.helpers.numba_code import CompiledFunction

    return cast(AnyFunction, CompiledFunction(function, separate=True))


def pointer_function() -> Callable[[Arrays], Arrays]:
    """Return a function for compiled code that turns an array, or all of a named tuple, into pointers to first entries.

    The pointer to an array of several axes goes through its numbers as they are stored, without gaps. An array that is
    passed to a function costs two atomic counts of references, and an index of any sign a comparison. A pointer costs
    neither, knows no length, and must not be used longer than the array. Where Numba is missing, the function returns
    the array itself, flat.

    >>> import numpy as np
    >>> pointer_to = pointer_function()
    >>> @compiled
    ... def first(array):
    ...     return pointer_to(array)[0]
    >>> float(first(np.array([3.0, 4.0])))
    3.0
    """
    if not is_compiling():
        return cast(Callable[[Arrays], Arrays], lambda arrays: arrays if isinstance(arrays, tuple) else arrays.ravel())
    from streamiter.values.helpers.numba_code import intrinsic, types

    def pointer_to(_context: Any, arrays: Any) -> Any:
        def pointer(context: Any, builder: Any, kind: Any, array: Any) -> Any:
            return context.make_array(kind)(context, builder, array).data

        def of_array(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return pointer(context, builder, signature.args[0], arguments[0])

        def of_tuple(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = enumerate(signature.args[0])
            found = [pointer(context, builder, kind, builder.extract_value(arguments[0], at)) for at, kind in kinds]
            return context.make_tuple(builder, signature.return_type, found)

        if not all(kind.layout == "C" for kind in (arrays if isinstance(arrays, types.NamedTuple) else [arrays])):
            return None
        if not isinstance(arrays, types.NamedTuple):
            return types.CPointer(arrays.dtype)(arrays), of_array  # type: ignore[no-untyped-call]
        pointers = [types.CPointer(kind.dtype) for kind in arrays]  # type: ignore[no-untyped-call]
        return types.NamedTuple(pointers, arrays.instance_class)(arrays), of_tuple  # type: ignore[no-untyped-call]

    return cast(Callable[[Arrays], Arrays], intrinsic(pointer_to))


async def beside_event_loop(work: Callable[[], T]) -> T:
    """Do work in a thread that soon comes to a long compiled function, which calls :func:`compiled_code_begins` before.

    The event loop waits up to there. Otherwise it would go on first: a thread that wants to run Python waits until the
    event loop has nothing to do, or for Python's switch interval of 5 ms, which is longer than most work. So compiled
    code, beside which Python can run, would run after the other work, and the second core would do nothing.

    >>> asyncio.run(beside_event_loop(lambda: 1 + 1))
    2
    """
    awaited = Event()

    def begin() -> T:
        _AWAITED.set(awaited)
        try:
            return work()
        finally:
            awaited.set()

    done = asyncio.get_running_loop().run_in_executor(None, copy_context().run, begin)
    awaited.wait(sys.getswitchinterval())
    return await done


def compiled_code_begins() -> None:
    """Tell the event loop, if it waits, that compiled code follows, beside which it can go on."""
    if (awaited := _AWAITED.get()) is not None:
        awaited.set()


@contextmanager
def saying_that_it_compiles(functions: str) -> Iterator[None]:
    """Log one line before functions are compiled in this block, which takes some seconds; none if they are stored.

    A process says it once. Where Numba is missing, a warning says how to install it, once in a process, too.
    """
    if not is_compiling():
        if find_spec("numba") is None:
            _warn_of_slowness(functions)
        yield
        return
    from streamiter.values.helpers.numba_code import Listener, install_listener

    own_thread = get_ident()

    class _Says(Listener):
        def on_start(self, event: Event) -> None:
            if get_ident() == own_thread:  # Listeners hear of what all threads compile, one thread at a time.
                _say(functions)

        def on_end(self, event: Event) -> None:
            """Say nothing."""

    with install_listener("numba:compile", _Says()):
        yield


@cache
def _say(functions: str) -> None:
    _log.info("compiling %s; this takes about 6 s, once if a directory can be written", functions)


@cache
def _warn_of_slowness(functions: str) -> None:
    _log.warning(
        "%s is not compiled, and some hundred times slower, because Numba is not installed; install it with: "
        'pip install "streamiter[fast]"',
        functions,
    )
