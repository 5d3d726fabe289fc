"""What windows and joins have in common: a state of plain data for each key, and an event-time watermark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from streamiter.operators.due import DueHeap, MakeDue
from streamiter.operators.keyed_state import KeyedStates
from streamiter.values.times import MIN_TIME

Result = TypeVar("Result")
"""The type of what is emitted."""


class TimedStates(Generic[Result]):
    """Base class: the states of the keys of one subtask. All else that a subclass keeps follows from these states.

    The owner loads the state of a key before it adds a record of the key. The states of keys that change by the
    event-time watermark or by the clock are loaded by :class:`~streamiter.operators.due.DueItems`.
    """

    keeps_all_at_end: bool = False
    """Whether the end of the input brings no result, so that all is kept for a job that reads on."""

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        """The state of each key that is loaded."""
        self.watermark = MIN_TIME
        """No record with a lower time is expected."""
        self.results: list[Result] = []
        """What was emitted since the last call of ``take_results``."""
        self.kept = 0
        """The number of open windows, or of records that wait or may be needed."""
        self.numbered = 0
        """Windows or records are numbered in the order in which they come: the next number."""
        self.floor_of: Callable[[Any], int] | None = None
        """Returns the watermark that a key had before the parallelism of the step changed; None if it was not higher.
        """
        self._make_due(DueHeap)

    def take_results(self) -> list[Result]:
        """Return what was emitted since the last call."""
        taken, self.results = self.results, []
        return taken

    def reached(self, key: Any) -> int:
        """Return the watermark by which records of a key are late."""
        return self.watermark if self.floor_of is None else max(self.watermark, self.floor_of(key))

    def advance(self, watermark: int) -> bool:
        """No record below ``watermark`` is expected any more. A watermark that is not higher has no effect.

        Returns whether all is done that is due. Otherwise take the results, store the states, and call it again.
        """
        raise NotImplementedError

    def next_due(self) -> int | None:
        """Return the watermark at which something is complete, at the earliest; None if nothing waits for that."""
        raise NotImplementedError

    def restore(self, states: Mapping[Any, Any]) -> None:
        """Resume from the states of all keys. Set ``watermark`` before that."""
        self.states.clear()
        self.states.update(states)
        self._make_due(DueHeap)
        self._count([self.states])

    # -- states in a backend -----------------------------------------------------------------------------

    def keep_in(self, states: KeyedStates) -> None:
        """Keep the states in this backend, and resume from the states that it has already."""
        self.states = states.load(())
        self._make_due(states.due)
        match states.summary:
            case [settings, numbered, kept] if settings == self._settings():
                self.numbered, self.kept = numbered, kept
            case _:
                self._count(states.all_without_due())

    def summary(self) -> list[Any]:
        """Return what follows from all states besides the due items: plain data, for ``KeyedStates.summary``."""
        return [self._settings(), self.numbered, self.kept]

    def _count(self, states: Iterable[Mapping[Any, Any]]) -> None:
        self.numbered = self.kept = 0
        for some in states:
            for key, state in some.items():
                self._note(key, state)

    # -- what a subclass defines -------------------------------------------------------------------------

    def _make_due(self, make: MakeDue) -> None:
        """Make the empty due items."""
        raise NotImplementedError

    def _note(self, key: Any, state: Any) -> None:
        """Count what a state keeps, and push its due items."""
        raise NotImplementedError

    def _settings(self) -> list[Any]:
        """Return everything besides the states on which the due items depend, as plain data."""
        return [type(self).__name__]
