"""How far each port of an inbox has come: its epochs, its event time, the end of its table, the end of its input.

:class:`PortProgress` lets the control records of the ports act, or wait as marks in the logs, and says what the task is
told of them: the watermark of all ports, the ends of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from streamiter.engine.graph.channels import Intake
from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS, InboxOrder
from streamiter.engine.inbox.port_log import Port
from streamiter.errors import InternalError
from streamiter.operators.frontier import Frontier
from streamiter.values.records import Control, EndOfData, EpochWatermark, EventTimeWatermark, Idle, ReadToEnd
from streamiter.values.times import MAX_TIME, MIN_TIME

NO_EPOCH: Final = EndOfData(BEFORE_ALL_EPOCHS)
"""The end of data that only the end of the input has brought."""

# A message names this many channels at most.
_SHOWN_CHANNELS: Final = 3


@final
class InputEnded(Control):
    """No channel of this input brings data any more."""

    input_name: str


@dataclass(frozen=True, slots=True)
class AwaitedInput:
    """The input that a step reads first."""

    name: str
    others_follow: bool = False
    """Whether the other inputs come behind its end in event time, too, and their sources read nothing before."""
    needs_barrier: bool = False
    """Whether they are read behind the first barrier after that end. Then all that the step has emitted before comes
    first, also in steps that get records of several of its subtasks."""


@final
class PortProgress:
    """Follows the epochs and the event time of the ports, and decides which control records the task gets."""

    def __init__(
        self,
        ports: Sequence[Port],
        timed_ports: Iterable[int],
        *,
        order: InboxOrder,
        on_due: Callable[[Port], None],
        on_data_ended: Callable[[], None],
        awaited: AwaitedInput | None = None,
    ) -> None:
        """If the order of ports is fixed, the end of data takes its turn like a record.

        The inputs other than the ``awaited`` one are not read until all of its channels have brought ``ReadToEnd``, or
        have ended. Without such channels, there is nothing to wait for.

        ``on_due`` is called with a port that has records of the epoch whose turn has come, ``on_data_ended`` when the
        data of a port has ended, or a table is read.
        """
        self.epochs = Frontier(range(len(ports)), BEFORE_ALL_EPOCHS)
        """By port: the last epoch that it has brought and that the task has handled. Others only read it."""
        self._awaited = [port for port in ports if awaited is not None and port.input_name == awaited.name]
        others_follow = awaited is not None and awaited.others_follow
        self._unfinished = {port.index for port in self._awaited} if others_follow else set()
        """While other ports follow: the awaited ports whose event time has not ended."""
        timed = list(timed_ports)
        first = [index for index in timed if index in self._unfinished] or timed
        self._following: dict[int, EventTimeWatermark | None] = dict.fromkeys(
            each for each in timed if each not in first
        )
        """By port that follows: the watermark that it has brought last. It counts when the awaited ports have ended."""
        self._awaits_barrier = awaited is not None and awaited.needs_barrier
        self._held_back: list[Intake] = []
        """The intakes of the sources of these ports."""
        self.times = Frontier(first, MIN_TIME) if first else None
        """The event time of the ports; None if none brings any. Others only read it."""
        self.idle: set[int] = set()
        """The ports that have brought ``Idle`` and no data since, by index."""
        self._read = Frontier(range(len(ports)), 0)
        """By port: 1 if it has brought ``ReadToEnd`` since the start of the job."""
        self._ports = ports
        self._by_port = order.by_port
        self._tells_due = order.sets_aside and not order.by_port
        self._on_due = on_due
        self._on_data_ended = on_data_ended
        self._told_time = MIN_TIME, False

    def is_complete(self, port: Port, epoch: int) -> bool:
        """Return whether all records of a port up to this epoch have been handled; its end must have had its turn."""
        lowest = port.lowest
        has_ended = self.epochs.has_ended(port.index) or (port.has_ended and not self._by_port)
        has_come = has_ended or self.epochs.reached(port.index) >= epoch
        return has_come and (lowest is None or lowest > epoch)

    def bring(self, port: Port, control: Control) -> list[Control]:
        """Let a control record of a port act, or wait as a mark in its log; return what the task is told now.

        A mark acts when the records in front of it are handled. If the order of ports is fixed, the end of the data
        waits for its turn, too.
        """
        if isinstance(control, EpochWatermark):
            if control.epoch < port.arrived:
                raise InternalError(
                    f"{port.channel.name}: expected watermarks that only grow, given {control.epoch} after "
                    f"{port.arrived}"
                )
            port.arrived = control.epoch
            if port.later is None or port.is_feedback or not (port.held or port.later.counts):
                return self._moved(port, control.epoch)
        elif isinstance(control, Idle):
            self.idle.add(port.index)
            return self._all_idle()
        ends_data = isinstance(control, EndOfData)
        if ends_data and self.epochs.has_ended(port.index):
            return []
        if port.lowest is None and not (ends_data and self._by_port):
            return self._act(port, control)
        port.marks.add(control, port.highest)
        return self.settle(port)

    def _act(self, port: Port, mark: Control) -> list[Control]:
        """Let a mark act that has come to the front."""
        if isinstance(mark, EpochWatermark):
            return self._moved(port, mark.epoch)
        if isinstance(mark, EndOfData):
            return self.end_data(port, mark)
        if isinstance(mark, ReadToEnd):
            self._read.reach(port.index, 1)
            self._on_data_ended()
            return self._all_read()
        if not isinstance(mark, EventTimeWatermark):
            raise TypeError(f"inbox: expected a control record of a channel, given {mark!r}")
        times = self.times
        if port.index in self._following:
            self._following[port.index] = mark
            return []
        if times is None or port.index not in times:
            return []
        if mark.time == MAX_TIME:
            self._let_follow(port)
        _note(times, port.index, mark)
        times.settle()
        now = times.value, times.is_idle
        if now == self._told_time:
            return []
        self._told_time = now
        return [EventTimeWatermark(*now)]

    def settle(self, port: Port) -> list[Control]:
        """Let the marks of a port act as far as the records in front of them have been handled.

        If the first record that waits has epoch e, and no earlier records follow, the port has reached epoch e - 1.
        """
        events: list[Control] = []
        lowest = port.lowest
        while (mark := port.marks.take(lowest, but_end=self._by_port)) is not None:
            events += self._act(port, mark)
        if lowest is not None:
            events += self._moved(port, min(port.arrived, lowest - 1) if port.marks.end is None else lowest - 1)
        if port.has_ended:
            events += self.end_reading(port)
        return events

    def _moved(self, port: Port, epoch: int) -> list[Control]:
        """Note that a port has reached an epoch; return the watermark of the task, if it has grown."""
        if not self.epochs.settle(port.index, epoch):
            return []
        if self._tells_due:
            for each in self._ports:
                if each.later is not None and self.epochs.value + 1 in each.later.counts:
                    self._on_due(each)
        return [EpochWatermark(self.epochs.value)]

    def end_time(self, port: Port) -> list[Control]:
        self._let_follow(port)
        return [] if self.times is None else self.bring(port, EventTimeWatermark(MAX_TIME))

    def hold_back(self, intakes: Iterable[Intake]) -> None:
        """Keep these intakes shut until the other ports follow, unless they follow already."""
        if self._unfinished or self._awaits_barrier:
            for intake in intakes:
                intake.shut()
                self._held_back.append(intake)

    def _let_follow(self, ended: Port) -> None:
        """Let the other ports follow, if this is the last of the awaited ports that ends.

        They count before it ends, since the end of all ports is the end of event time.
        """
        self._unfinished.discard(ended.index)
        if self._unfinished:
            return
        following, self._following = self._following, {}
        for index, mark in following.items():
            assert self.times is not None
            self.times.add(index, MIN_TIME)
            if mark is not None:
                _note(self.times, index, mark)
        if not self._awaits_barrier:
            self._open_intakes()

    def barrier_passed(self) -> None:
        """Let the other ports follow, if the awaited ports had ended before a barrier that all ports have brought."""
        if self._awaits_barrier and not self._unfinished:
            self._awaits_barrier = False
            self._open_intakes()
            self._on_data_ended()

    def _open_intakes(self) -> None:
        while self._held_back:
            self._held_back.pop().open()

    def end_reading(self, port: Port) -> list[Control]:
        """Note that a channel has ended, once its records are handled. The ends of all say enough themselves."""
        if port.lowest is not None:
            return []
        self._read.end(port.index)
        return self._all_read()

    def _all_read(self) -> list[Control]:
        """Return ``ReadToEnd``, once, if the task must pass it on now."""
        return [ReadToEnd()] if self._read.settle() else []

    def _is_read(self, port: Port) -> bool:
        """Return whether a port of the awaited input has brought ``ReadToEnd``."""
        return port in self._awaited and self._read.reached(port.index) > 0

    def counts_as_ended(self, port: Port, epoch: int | None) -> bool:
        """Return whether the task waits for nothing of a port: its data has ended, or its table is read.

        With an ``epoch``, also if all its records of that epoch are handled. While others wait for a barrier, the task
        waits for the awaited ports, too.
        """
        if self._awaits_barrier and port in self._awaited:
            return False
        if (self.epochs.has_ended(port.index) and not port.held) or self._is_read(port):
            return True
        return epoch is not None and self.is_complete(port, epoch)

    def unread_table(self) -> str | None:
        """Return in words what the inputs other than the awaited one wait for; None if they do not wait."""
        unread = (port for port in self._awaited if not (self._is_read(port) or self._read.has_ended(port.index)))
        if not (missing := [port.channel.name for port in unread]):
            return None
        more = f" and {len(missing) - _SHOWN_CHANNELS} more" if len(missing) > _SHOWN_CHANNELS else ""
        return (
            f"its input {self._awaited[0].input_name!r} must first be read to its end: "
            f"{', '.join(missing[:_SHOWN_CHANNELS])}{more}"
        )

    def end_data(self, port: Port, end: EndOfData = NO_EPOCH) -> list[Control]:
        """Note that the data of a port has ended: its end, which may have waited, acts; or all inputs have ended."""
        end, port.marks.end, epochs = port.marks.end or end, None, self.epochs
        if epochs.has_ended(port.index):
            return []
        events: list[Control] = []
        others = (each for each in self._ports if each.input_name == port.input_name and each is not port)
        if all(epochs.has_ended(other.index) for other in others):
            events.append(InputEnded(port.input_name))
        epochs.end(port.index, end.epoch)
        moved = self._moved(port, end.epoch)
        # At the end of an iteration the end of input follows. Operators emit at that end, so the data has not ended. In
        # a fixed order of ports, the end of input may have arrived before the turn of the end of data.
        ends_with_input = end.epoch == BEFORE_ALL_EPOCHS if self._by_port else port.has_ended
        events += [EndOfData(epochs.value)] if epochs.all_ended and not ends_with_input else moved
        events += self._all_idle()
        self._on_data_ended()
        return events

    def _all_idle(self) -> list[Control]:
        """Return ``Idle`` if a channel is idle and no other channel brings data."""
        unfinished = {port.index for port in self._ports if not self.epochs.has_ended(port.index)}
        return [Idle()] if unfinished and unfinished <= self.idle else []


def _note(times: Frontier[int], port: int, mark: EventTimeWatermark) -> None:
    if mark.time == MAX_TIME:
        times.end(port, MAX_TIME)
        return
    times.reach(port, mark.time)
    if mark.is_idle:
        times.idle(port)
