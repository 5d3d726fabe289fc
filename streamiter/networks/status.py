"""How far a layer is with its mini-batch."""

from __future__ import annotations

import enum

__all__ = ["Status"]


class Status(enum.IntEnum):
    """One after the other; data that is fed sets it back to ``NULL``.

    >>> Status.FORWARD < Status.BACKWARD, str(Status.NULL)
    (True, 'Null')
    """

    NULL = 0
    """Nothing is computed of the mini-batch yet."""
    FORWARD = 1
    """The output is."""
    BACKWARD = 2
    """The gradients of what came in are, those of the parameters are not."""
    GRADIENT = 3
    """The gradients of the parameters are, too."""
    UPDATE = 4
    """The optimizer has made its step of them."""

    def __str__(self) -> str:
        return self.name.capitalize()
