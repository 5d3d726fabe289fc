"""What a flow and a job ask of the backend that keeps their keyed states, and the default backend: memory."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from streamiter.operators.keyed_state import KeyedState, KeyedStates
from streamiter.values.helpers.clock import Clock
from streamiter.values.plain_data import PlainData


class JobStates(Protocol):
    """The keyed states of one job in one process."""

    def of_subtask(
        self, step: str, *, clock: Clock, time_to_live_s: float | None = None, in_thread: bool = False
    ) -> KeyedStates:
        """Make the states of one subtask of a step. ``in_thread``: its operator runs in a thread."""

    def close(self) -> None:
        """Free everything: the job has ended. May be called more than once."""


@runtime_checkable
class StateBackend(Protocol):
    """The choice of a flow where keyed states are kept; it has no connection to a job."""

    def _of_job(self, flow: str, plain_data: PlainData) -> JobStates:
        """Return the states of one job of the flow; this touches no disk. ``plain_data`` is the flow's encoding."""


class MemoryStates:
    """The default: states in dicts."""

    def __init__(self, plain_data: PlainData) -> None:
        self._encode = plain_data.encode

    def of_subtask(
        self, step: str, *, clock: Clock, time_to_live_s: float | None = None, in_thread: bool = False
    ) -> KeyedStates:
        return KeyedState(clock, time_to_live_s, name=step, encode=self._encode, in_thread=in_thread)

    def close(self) -> None:
        """Do nothing: the states are freed with their operators."""
