"""What windows and joins have in common: a state of plain data for each key, and an event-time watermark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from streamiter.times import MIN_TIME

Result = TypeVar("Result")
"""The type of what is emitted."""


class TimedStates(Generic[Result]):
    """Base class: the states of the keys of one subtask. Apart from them, a subclass keeps only what follows from them.

    The owner knows before it adds a record that the state of its key changes. ``call_before_changes`` sets a function
    that is called with the keys whose states change for another reason: the event-time watermark or the clock.
    """

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        """The state of each key."""
        self.watermark = MIN_TIME
        """No record with a lower time is expected."""
        self.results: list[Result] = []
        """What was emitted since the last call of ``take_results``."""
        self._before_change: Callable[[list[Any]], object] = lambda keys: None
        self.floor_of: Callable[[Any], int] | None = None
        """Returns the watermark that a key had before the step had another parallelism; None if none was further."""

    def call_before_changes(self, before_change: Callable[[list[Any]], object]) -> None:
        """Set the function that is called with keys whose states are about to change without a record."""
        self._before_change = before_change

    def take_results(self) -> list[Result]:
        """Return what was emitted since the last call."""
        taken, self.results = self.results, []
        return taken

    def reached(self, key: Any) -> int:
        """Return the watermark by which records of a key are late."""
        return self.watermark if self.floor_of is None else max(self.watermark, self.floor_of(key))

    @property
    def kept(self) -> int:
        """The number of open windows, or of records that wait or may be needed."""
        raise NotImplementedError

    def advance(self, watermark: int) -> None:
        """No record below ``watermark`` is expected any more. A watermark that is not higher has no effect."""
        raise NotImplementedError

    def restore(self, states: Mapping[Any, Any]) -> None:
        """Resume from the states of keys. Set ``watermark`` before that."""
        self.states.clear()
        self.states.update(states)
