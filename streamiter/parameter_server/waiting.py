"""A reply that is not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

__all__ = ["Waiting", "until_settled"]

T = TypeVar("T")


class Waiting(Generic[T]):
    """The reply to a request that has to wait; settled once, by whoever brings about its condition.

    It belongs to no event loop until it is awaited. Whoever stops awaiting it ``gives_up``.
    """

    __slots__ = ("_callbacks", "_error", "_result", "is_settled", "on_given_up")

    def __init__(self, on_given_up: Callable[[], None] | None = None) -> None:
        self.is_settled = False
        self.on_given_up = on_given_up
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def succeed(self, result: T) -> None:
        """The reply is there. Nothing happens if it was settled before."""
        if not self.is_settled:
            self._result = result
            self._settle()

    def fail(self, error: BaseException) -> None:
        """There will be no reply."""
        if not self.is_settled:
            self._error = error
            self._settle()

    def give_up(self) -> None:
        """Nobody wants the reply any more."""
        if not self.is_settled:
            self.fail(asyncio.CancelledError())
            if self.on_given_up is not None:
                self.on_given_up()

    def result(self) -> T:
        """The reply; raises what it failed with. Only once it is settled."""
        assert self.is_settled
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once it is settled, at once if it is."""
        if self.is_settled:
            callback()
        else:
            self._callbacks.append(callback)

    def _settle(self) -> None:
        self.is_settled = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.is_settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            self.when_settled(wake)
            try:
                yield from future
            except asyncio.CancelledError:
                self.give_up()
                raise
        return self.result()


async def until_settled(waiting: Waiting[Any]) -> None:
    """Return once it is settled; whoever is cancelled meanwhile does not give it up, for others want it, too."""
    if waiting.is_settled:
        return
    settled = asyncio.Event()
    waiting.when_settled(settled.set)
    await settled.wait()
