"""Run a program that sends itself a signal at a place in the engine.

``python mortal.py before|after FUNCTION NUMBER SIGNAL PROGRAM …`` strikes at the NUMBER-th call (from 1) of
FUNCTION, with the names of `places.py`. Everything up to this call is real, also the content of the disk and of
the broker.
"""

import functools
import importlib
import inspect
import itertools
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamiter.errors import TransactionExpired


def main() -> None:
    when, function, number, signal_number, program, *arguments = sys.argv[1:]
    strike_at(when, function, int(number), int(signal_number))
    # The program runs as if a user had started it: it imports from its own folder.
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def strike_at(when: str, function: str, number: int, signal_number: int, marker: Path | None = None) -> None:
    """Make this process send itself a signal at its ``number``-th call (from 1) of ``function``.

    With ``marker``, only the first of several processes does so; it makes this file. Instead of signal 0, the
    transaction expires.
    """
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    calls = itertools.count(1)

    def strike() -> None:
        if next(calls) == number:
            if marker is not None:
                marker.parent.mkdir(parents=True, exist_ok=True)
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    return
            if not signal_number:
                raise TransactionExpired("the transaction was open for too long")
            # The signal goes to this thread, which does not continue, whichever other threads run.
            signal.pthread_kill(threading.get_ident(), signal_number)

    setattr(owner, name, _wrapped(getattr(owner, name), when, strike))


def _wrapped(function: Callable[..., Any], when: str, strike: Callable[[], None]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*arguments: Any, **options: Any) -> Any:
            if when == "before":
                strike()
            result = await function(*arguments, **options)
            if when == "after":
                strike()
            return result

        return asynchronous

    @functools.wraps(function)
    def synchronous(*arguments: Any, **options: Any) -> Any:
        if when == "before":
            strike()
        result = function(*arguments, **options)
        if when == "after":
            strike()
        return result

    return synchronous


if __name__ == "__main__":
    main()
