"""Small deferred state, and letting go of all that some state holds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, final

import msgspec

from streamiter.deferred import Deferred

__all__ = ["DeferredFrames", "release_all"]


@final
class DeferredFrames(Deferred):
    """Frames that are in memory, already encoded: for state that is small, or has been read from elsewhere.

    >>> list(DeferredFrames([b"first", b"second"]).frames())
    [b'first', b'second']
    """

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._frames = list(frames)

    def frames(self) -> Iterator[bytes]:
        return iter(self._frames)

    def release(self) -> None:
        self._frames = []


def release_all(state: Any, structs: Container[type[Any]] = ()) -> None:
    """Release what is ``Deferred`` anywhere in ``state``, which may also hold what is not plain data, or itself."""
    waiting, seen = [state], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Deferred):
            part.release()
        elif id(part) not in seen:
            inside = _parts(part, structs)
            if inside:
                seen.add(id(part))
                waiting += inside


def _parts(part: Any, structs: Container[type[Any]]) -> list[Any]:
    if isinstance(part, dict):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(part)
    return list(msgspec.structs.astuple(part)) if type(part) in structs else []
