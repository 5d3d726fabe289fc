"""Barriers at a gate: every channel must have brought it before the task passes it on."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.records import CheckpointBarrier
from streamiter.runtime.port import Port

__all__ = ["BarrierAlignment"]


class BarrierAlignment:
    """Which barrier is on its way to this gate, and who has not brought it. Feedback ports bring none."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = [port for port in ports if not port.is_feedback]
        self._barrier: CheckpointBarrier | None = None
        self._announced: CheckpointBarrier | None = None
        self._triggered: CheckpointBarrier | None = None

    @property
    def is_due(self) -> bool:
        """Whether a barrier has come on some port, or will come."""
        return self._barrier is not None or self._announced is not None

    def awaited(self) -> list[str]:
        """The channels whose barrier others wait for; empty while none is on its way."""
        if self._barrier is None:
            return []
        return [port.channel.name for port in self._ports if not port.is_aligned]

    def announce(self, barrier: CheckpointBarrier) -> None:
        """It is on its way."""
        self._announced = barrier

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """It is on its way, and begins here if no port is left that could bring it."""
        self._triggered = self._announced = barrier

    def bring(self, port: Port, barrier: CheckpointBarrier) -> bool:
        """A port has brought it; says whether it is the first to do so."""
        is_first = self._barrier is None
        if is_first:
            self._barrier = barrier
            self._announced = self._triggered = None
        port.blocked = True
        return is_first

    def complete(self) -> CheckpointBarrier | None:
        """The barrier once every port is aligned; then the alignment is over.

        One that begins here counts when no port can bring it: also where the ends of all of them are held
        behind data that is not wanted, since what is wanted may wait for this barrier.
        """
        if self._triggered is not None and all(port.ended or port.end_held for port in self._ports):
            return self.inputs_ended()
        barrier = self._barrier
        if barrier is None or not all(port.is_aligned for port in self._ports):
            return None
        self._barrier = None
        return barrier

    def inputs_ended(self) -> CheckpointBarrier | None:
        """No port can bring a barrier any more; gives the one that begins here instead."""
        triggered = self._triggered
        self._announced = self._triggered = None
        return triggered
