"""State that crosses processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np

from streamiter.deferred import Deferred
from streamiter.errors import InternalError

__all__ = ["FetchedFrames", "fetched", "sendable"]


@final
class FetchedFrames(Deferred):
    """What was ``Deferred`` on a shard, encoded there."""

    def __init__(self, name: str, frames: list[bytes]) -> None:
        self.name = name
        self._frames = frames[::-1]
        """The next one last."""
        self._is_released = False

    def frames(self) -> Iterator[bytes]:
        left = len(self._frames)
        while left:
            if self._is_released:
                raise InternalError(f"the state of {self.name} was released before all of it was read")
            yield self._frames.pop()
            left -= 1
        self.release()

    def release(self) -> None:
        self._is_released = True
        self._frames = []


def fetched(state: Any) -> Any:
    """The same with what is ``Deferred`` encoded, so that it can be sent.

    >>> fetched({"clock": 3})
    {'clock': 3}
    """
    if isinstance(state, Deferred):
        frames = FetchedFrames(state.name, list(state.frames()))
        state.release()
        return frames
    if isinstance(state, Mapping):
        return {key: fetched(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(fetched(value) for value in state)
    return state


def sendable(state: Any) -> Any:
    """The same with what can be gone through once only as a list: several shards are to read it.

    >>> sendable({"content": iter([1, 2])})
    {'content': [1, 2]}
    """
    if isinstance(state, Mapping):
        return {key: sendable(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(sendable(value) for value in state)
    if state is None or isinstance(state, (str, bytes, int, float, np.ndarray, np.generic)):
        return state
    return list(state)
