"""Events that arrive in small pieces."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from streamiter.topics import OutgoingBatch, Topic

__all__ = ["Feed"]

_PIECE_S: Final = 0.01


class Feed:
    """Writes pieces to a topic in order, while the program is killed and restarted."""

    def __init__(self, topic: Topic, pieces: Sequence[OutgoingBatch]) -> None:
        self._topic = topic
        self._pieces = list(reversed(pieces))

    async def during(self, is_over: Callable[[], bool], lives_left: int) -> None:
        """Write a share of the remaining events, piece by piece, while the process runs."""
        writer = await self._topic.open_writer()
        for _ in range(len(self._pieces) // (lives_left + 1)):
            if is_over():
                break
            await writer.write(self._pieces.pop())
            await writer.flush()
            await asyncio.sleep(_PIECE_S)
        await writer.close()

    async def rest(self) -> None:
        """Write all remaining events."""
        writer = await self._topic.open_writer()
        while self._pieces:
            await writer.write(self._pieces.pop())
        await writer.close()
