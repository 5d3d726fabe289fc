"""State that is written after the barrier has passed, so that records need not wait for it."""

from __future__ import annotations

import abc
from collections.abc import Iterator

__all__ = ["Deferred"]


class Deferred(abc.ABC):
    """A large piece of state, frozen at the barrier and encoded later, a little at a time.

    ``snapshot`` of an operator may give one anywhere in its state. What it stands for must not change any
    more, whatever becomes of the operator, until ``release``. A ``restore`` is given an iterable of the decoded frames in
    its place, which can be gone through once.
    """

    @abc.abstractmethod
    def frames(self) -> Iterator[bytes]:
        """The state in order, in pieces that :class:`~streamiter.checkpoints.plain_data.PlainData` decodes one by one.

        Gone through once, in the event loop, which does other work between two of them: some
        milliseconds of work and about a megabyte each.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Nobody needs it any more: it was written, or will not be. May be called more than once, and at any time."""
