"""A call to several shards, under way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, final

from streamiter.parameter_server.waiting import Waiting

__all__ = ["Call"]

T = TypeVar("T")


@final
class Call(Generic[T]):
    """A handle: awaiting it gives the result. What was sent happens whether or not anybody awaits it.

    >>> import asyncio
    >>> asyncio.run(_sum_of(Call([1, 2], sum)))
    3
    """

    __slots__ = ("_finish", "_replies", "_result")

    def __init__(self, replies: Sequence[Any | Waiting[Any]], finish: Callable[[Sequence[Any]], T]) -> None:
        self._replies = replies
        self._finish = finish
        self._result: list[T] = []

    @property
    def is_done(self) -> bool:
        """Whether awaiting it would not wait."""
        return all(reply.is_settled for reply in self._replies if isinstance(reply, Waiting))

    def __await__(self) -> Generator[Any, None, T]:
        if self._result:
            return self._result[0]
        replies = list(self._replies)
        try:
            for number, reply in enumerate(replies):
                if isinstance(reply, Waiting):
                    replies[number] = yield from reply.__await__()
        except BaseException:
            self.give_up()
            raise
        self._result.append(self._finish(replies))
        return self._result[0]

    def give_up(self) -> None:
        """Nobody wants the result any more."""
        for reply in self._replies:
            if isinstance(reply, Waiting):
                reply.give_up()


async def _sum_of(call: Call[int]) -> int:
    return await call
