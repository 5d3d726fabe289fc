"""A call that is due later, on a clock that does not pass by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

__all__ = ["Timer"]


@final
class Timer:
    """Run once, when its clock says so, unless it was called off before."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def is_cancelled(self) -> bool:
        """Whether it was called off, or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Call it off; without effect once it has run."""
        self._callback = None

    def fire(self) -> None:
        """Run it."""
        callback, self._callback = self._callback, None
        assert callback is not None
        callback()
