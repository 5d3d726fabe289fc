"""State that is written after the barrier has passed, so that records need not wait for it."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["Deferred", "Encode"]


class Encode(Protocol):
    """The encoding of plain data, for those that lie below the one who knows it."""

    def __call__(self, value: Any, /, *, name: str = ...) -> bytes:
        """The bytes of ``value``; raises ``PlainDataError``, which calls it ``name``."""
        ...


class Deferred(abc.ABC):
    """A large piece of state, frozen at the barrier and encoded later, a little at a time.

    ``snapshot`` of an operator may give one anywhere in its state. What it stands for must not change any
    more, whatever becomes of the operator, until ``release``. A ``restore`` is given an iterable of the decoded
    frames in its place, which can be gone through once.
    """

    name: str = "deferred state"
    """Whose state it is, for errors: the name of the step."""

    @abc.abstractmethod
    def frames(self) -> Iterator[bytes]:
        """The state in order, in pieces that :class:`~streamiter.checkpoints.plain_data.PlainData` decodes one by one.

        Gone through once, in the event loop, which does other work between two of them: some
        milliseconds of work and about a megabyte each. Raises ``PlainDataError`` for what is not plain data:
        the checkpoint fails.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Nobody needs it any more: it was written, or will not be. May be called more than once, and at any time."""
