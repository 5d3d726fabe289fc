"""Calling what is a coroutine function but does not wait."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from streamiter.errors import InternalError

__all__ = ["at_once"]

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for; no event loop is needed.

    >>> async def two(): return 2
    >>> at_once(two())
    2
    """
    try:
        coroutine.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    coroutine.close()
    raise InternalError("a coroutine was expected to return at once, and waits")
