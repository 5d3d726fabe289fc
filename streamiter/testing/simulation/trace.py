"""What happened in a simulation: a hash of all of it, and the last of it in words."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final

__all__ = ["Trace"]

# FNV-1a, 64 bits (Fowler, Noll, Vo), over whole numbers instead of bytes: a difference in one changes all that follow.
_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_64_BITS: Final = (1 << 64) - 1

# Enough to see what led to a failure, and still to be read.
_EVENTS_KEPT: Final = 60


class Trace:
    """The rolling hash of every decision, and the last events.

    Two runs with equal hashes have taken the same turns in the same order.

    >>> one, other = Trace(), Trace()
    >>> one.turn(3), one.event(0.5, "crash"), other.turn(4), other.event(0.5, "crash")
    (None, None, None, None)
    >>> one.hash == other.hash, one.events
    (False, ['     0.500 s  crash'])
    """

    def __init__(self) -> None:
        self._hash = _FNV_BASIS
        self.turns = 0
        """Turns of tasks so far."""
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)

    @property
    def hash(self) -> str:
        """Of all so far, 16 hexadecimal digits."""
        return f"{self._hash:016x}"

    @property
    def events(self) -> list[str]:
        """The last ones, in order."""
        return list(self._events)

    def turn(self, task: int) -> None:
        """A task has its turn."""
        self.turns += 1
        self._hash = ((self._hash ^ task) * _FNV_PRIME) & _64_BITS

    def event(self, now_s: float, what: str) -> None:
        """Something else that follows from the seed: a fault, a crash, a commit."""
        line = f"{now_s:10.3f} s  {what}"
        self._hash = ((self._hash ^ zlib.crc32(line.encode())) * _FNV_PRIME) & _64_BITS
        self._events.append(line)
