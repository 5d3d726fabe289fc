"""The alignment of control records at a gate: a barrier, or ``ReadToEnd``, passes when every channel has brought it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamiter.records import CheckpointBarrier
from streamiter.runtime.port import Port


class BarrierAlignment:
    """Waits until every channel has brought the barrier of a checkpoint; only then the task passes the barrier on.

    Feedback ports take no part: their barrier returns later.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = [port for port in ports if not port.is_feedback]
        self._barrier: CheckpointBarrier | None = None
        self._announced: CheckpointBarrier | None = None
        self._last = 0
        """The last barrier that a port brought, or that started here."""
        self._triggered: CheckpointBarrier | None = None

    @property
    def is_due(self) -> bool:
        """Whether a port has brought a barrier, or will bring one."""
        return self._barrier is not None or self._announced is not None

    def awaited(self) -> list[str]:
        if self._barrier is None:
            return []
        return [port.channel.name for port in self._ports if not port.is_aligned]

    def announce(self, barrier: CheckpointBarrier) -> None:
        # A channel from another process may have brought it before.
        if barrier.checkpoint > self._last:
            self._announced = barrier

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Note a barrier that the ports will bring, and that starts here if no port can bring it."""
        if barrier.checkpoint > self._last:
            self._triggered = self._announced = barrier

    def bring(self, port: Port, barrier: CheckpointBarrier) -> bool:
        """Note that a port has brought the barrier; return whether it is the first port."""
        is_first = self._barrier is None
        if is_first:
            self._barrier = barrier
            self._last = barrier.checkpoint
            self._announced = self._triggered = None
        port.block()
        return is_first

    def complete(self) -> CheckpointBarrier | None:
        """Return the barrier if no port delays it any more, and end the alignment; otherwise return None.

        A barrier that starts here is complete when no port can bring it. The ends of the inputs may still be held
        behind data that is not wanted, because the wanted input may wait for this barrier.
        """
        if self._triggered is not None and all(port.brings_no_barrier for port in self._ports):
            return self.inputs_ended()
        barrier = self._barrier
        if barrier is None or not all(port.is_aligned for port in self._ports):
            return None
        self._barrier = None
        return barrier

    def inputs_ended(self) -> CheckpointBarrier | None:
        """Note that no port can bring a barrier; return the barrier that starts here instead, if there is one."""
        triggered = self._triggered
        self._last = self._last if triggered is None else triggered.checkpoint
        self._announced = self._triggered = None
        return triggered


# A message names so many channels at most.
_SHOWN_CHANNELS: Final = 3


class EndAlignment:
    """Waits until every channel has brought ``ReadToEnd``, or has ended. It begins anew at each start of a job.

    The other inputs of a step with an ``awaited_input`` are not read until all channels of that input have.
    """

    def __init__(self, ports: Sequence[Port], awaited_input: str | None) -> None:
        self._ports = list(ports)
        self._awaited_input = awaited_input
        self._read: set[int] = set()
        """The ports that have brought it, by index."""
        self._has_passed = False

    def bring(self, port: Port) -> None:
        """Note that a port has brought ``ReadToEnd``."""
        self._read.add(port.index)

    def is_over_for(self, port: Port) -> bool:
        """Return whether a port of the awaited input has brought it."""
        return port.index in self._read and port.input_name == self._awaited_input

    def complete(self) -> bool:
        """Return, once, whether the task must pass it on now. If all channels have ended, their end says enough."""
        if self._has_passed or not self._read or not all(map(self._has_come, self._ports)):
            return False
        self._has_passed = True
        return True

    def waits_for(self) -> str | None:
        """Return in words what the other inputs wait for; None if they do not wait."""
        missing = [
            port.channel.name
            for port in self._ports
            if port.input_name == self._awaited_input and not self._has_come(port)
        ]
        if not missing:
            return None
        more = f" and {len(missing) - _SHOWN_CHANNELS} more" if len(missing) > _SHOWN_CHANNELS else ""
        return (
            f"its input {self._awaited_input!r} must first be read to the end that was found at the start: "
            f"{', '.join(missing[:_SHOWN_CHANNELS])}{more}"
        )

    def _has_come(self, port: Port) -> bool:
        return port.index in self._read or port.has_ended
