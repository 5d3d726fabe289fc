"""Close several things: each of them, even if others fail to close. The first error is raised.

A failure that comes first stays the error that is raised: what is closed after it adds a note at most.

>>> def fail():
...     raise OSError("the disk is gone")
>>> try:
...     close_now([fail, lambda: print("closed")])
... except OSError as error:
...     print(error)
closed
the disk is gone
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import final

Close = Callable[[], object]
"""Closes something. Its result may be awaitable."""


async def close_each(closing: Iterable[Close]) -> list[Exception]:
    """Close one thing after the other; return the errors. A cancellation is raised at the end."""
    errors: list[Exception] = []
    cancelled: asyncio.CancelledError | None = None
    for close in closing:
        try:
            if inspect.isawaitable(result := close()):
                await result
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception as error:
            errors.append(error)
    if cancelled is not None:
        note_unclosed(cancelled, errors)
        raise cancelled
    return errors


async def close_all(closing: Iterable[Close]) -> None:
    """Close one thing after the other; raise the first error."""
    _raise_first(await close_each(closing))


def close_now(closing: Iterable[Close]) -> None:
    """Do the same with things of which none is awaited."""
    errors: list[Exception] = []
    for close in closing:
        try:
            close()
        except Exception as error:
            errors.append(error)
    _raise_first(errors)


@final
class closed_after(contextlib.AbstractAsyncContextManager[None]):  # noqa: N801 (used like a function)
    """Close all when the body ends; an error of the body is the one that is raised.

    It is no generator: at its end, an event loop closes all asynchronous generators at the same time, also one that
    waits for another.
    """

    def __init__(self, *closing: Close) -> None:
        self._closing = closing

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await close_all(self._closing)
        else:
            note_unclosed(error, await close_each(self._closing))


@contextlib.contextmanager
def undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Where the body fails, undo what was begun before it, and raise the failure."""
    try:
        yield
    except BaseException as error:
        try:
            undo()
        except Exception as other:
            note_unclosed(error, [other])
        raise


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        first, *others = errors
        note_unclosed(first, others)
        raise first


def note_unclosed(error: BaseException, others: Iterable[BaseException]) -> None:
    """Put what failed after a failure, while all that was open was closed, into its notes."""
    for other in others:
        error.add_note(f"then, while closing: {other}")
