"""The gate: the input side of a task, which decides what the task handles next.

A :class:`Gate` reads its ports in turn, and skips an input while the operator does not want it. Helpers decide
what control records mean: :class:`~streamiter.runtime.barrier_alignment.BarrierAlignment` for barriers,
:class:`~streamiter.runtime.gate_epochs.GateEpochs` for watermarks and ends of data,
:class:`~streamiter.runtime.feedback.FeedbackLog` for barriers on feedback ports. With event time,
:class:`~streamiter.runtime.gate_times.GateTimes` does so for event-time watermarks.
:class:`~streamiter.runtime.port.WantedInputs` keeps which inputs the operator wants.

A port is *parked* while its input is not wanted. Records are *set aside* after they were taken from the channel and
before the task handles them: a port *holds* the records before a barrier in its own buffer, and if the gate handles
epochs in order, records of later epochs wait in a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from streamiter.closing import close_now
from streamiter.deferred import PlainValue
from streamiter.operators.source import SourceBatch
from streamiter.origins import BatchOrigin
from streamiter.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    EventTimeWatermark,
    Idle,
    ReadToEnd,
    control_from_plain,
    control_to_plain,
)
from streamiter.runtime.barrier_alignment import BarrierAlignment, EndAlignment
from streamiter.runtime.feedback import BarrierReturned, FeedbackLog
from streamiter.runtime.gate_epochs import EpochsAside, GateEpochs, InputEnded, RestHandled
from streamiter.runtime.gate_times import GateTimes
from streamiter.runtime.port import BLOCKED, Port, ReadyPorts, WantedInputs
from streamiter.times import MAX_TIME

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import SpillQueue


class Reads(Enum):
    """What a gate reads."""

    ALL = "all"
    """All items of the inputs that the operator wants."""
    BARRIERS = "barriers"
    """Barriers: a barrier passes before the records in the channels, which are held or stay there."""
    FEEDBACK = "feedback"
    """Feedback, which is logged: the job stops at a barrier, and the task waits for its return."""


# The gate compares with them for every batch or record, and Python is slow to look up a member of an enum.
_ALL: Final = Reads.ALL
_BARRIERS: Final = Reads.BARRIERS
FEEDBACK: Final = Reads.FEEDBACK


class Gate:
    """The input side of one task. Only that task uses it."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        epochs_aside: EpochsAside | None = None,
        make_feedback_queue: Callable[[], SpillQueue] | None = None,
        timed_ports: Sequence[int] = (),
        ends: EndAlignment | None = None,
    ) -> None:
        """``epochs_aside``: the task handles epochs in order, and records of later epochs wait there.

        ``make_feedback_queue`` makes a queue with the limits of the feedback, if any port brings feedback.
        ``timed_ports`` bring event-time watermarks, by index. ``ends``: the task waits for ``ReadToEnd``, or passes it
        on.
        """
        self.ports = list(ports)
        self._ready = ReadyPorts(len(self.ports))
        self._posted: deque[Control] = deque()
        self._wanted = WantedInputs(self.ports, self._has_ended)
        self._alignment = BarrierAlignment(self.ports)
        self._feedback = FeedbackLog(self.ports, make_feedback_queue)
        self._epochs = self._make_epochs(epochs_aside)
        self.times = GateTimes(timed_ports) if timed_ports else None
        """The event time of the ports; None if none brings any. Others only read it."""
        self._ends = ends
        self.sets_aside = epochs_aside is not None
        self._in_order = self.sets_aside
        self._reads = Reads.ALL
        self._served: Port | None = None
        """The port of the data that the task handles now, if a watermark waits for that data."""
        self._in_hand: Port | None = None
        """The port of the data that the task handles now, if the port held it."""
        self._ending: tuple[Port, EndOfInput] | None = None
        """The end of all inputs. It waits for the records that were set aside, and for a barrier that starts here."""
        for port in self.ports:
            if self.sets_aside:
                port.read_ahead()
            port.channel.attach(partial(self._ready.add, port))
            if port.channel.peek() is not None:
                self._ready.add(port)

    def _make_epochs(self, aside: EpochsAside | None) -> GateEpochs:
        return GateEpochs(self.ports, aside, on_held=self._ready.add, on_data_ended=self.reconsider_wanted)

    # -- taking --------------------------------------------------------------------------------------

    def poll(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        """Return what the task handles next, and its port (None for a posted control record), or None."""
        if self._in_hand is not None:
            self._in_hand.release()
            self._in_hand = None
        if self._served is not None:
            self._settle_served()
        if self._posted:
            return None, self._posted.popleft()
        if self._ending is not None:
            return self._poll_rest(*self._ending)
        stands_still = False
        if self._reads is not _ALL:
            if self._reads is FEEDBACK:
                return self._poll_feedback()
            stands_still = True
        ready = self._ready
        while ready.queue:
            port = ready.take()
            if self._in_order:
                self._epochs.hold_due(port)
            message = port.peek()
            if message is None or port.state is BLOCKED:
                continue
            if stands_still and not isinstance(message, CheckpointBarrier) and not port.is_feedback:
                if (polled := self._leave(port)) is not None:
                    return polled
                continue
            if isinstance(message, Control):
                port.take()
                self._ready.add(port)
                return port, message
            if isinstance(message, SourceBatch):  # A source has one input, and wants it always.
                return port, self._take_batch(port)
            if self._in_order and self._epochs.is_early(message):
                port.take()
                self._epochs.set_aside(port, message)
                self._ready.add(port)
                continue
            wanted = self._wanted.names
            if wanted is not None and port.input_name not in wanted:
                if (polled := self._poll_unwanted(port)) is not None:
                    return polled
                continue
            return port, self._take_batch(port)
        return None

    def _settle_served(self) -> None:
        """Post what waited until the records of a port were handled."""
        assert self._served is not None
        served, self._served = self._served, None
        settled: list[Control] = []
        if self.times is not None and self.times.waits(served.index) and not self.times.is_behind_epoch(served.index):
            settled += self.times.settle(served.index, self._epochs.lowest_pending(served))
        settled += self._epochs.settle(served)
        if self.times is not None and self.times.waits(served.index):
            settled += self.times.settle(served.index, self._epochs.lowest_pending(served))
        # They come first: a snapshot at a barrier that is posted already has the watermark that they bring.
        self._posted.extendleft(reversed(settled))
        self.reconsider_wanted()

    def _poll_feedback(self) -> tuple[Port, CheckpointBarrier | EndOfInput] | None:
        """Log the feedback, and return the barrier when it is back, or an end. The job stops at this barrier."""
        ready = self._ready
        while ready.queue:
            port = ready.take()
            if port.is_feedback and port.state is not BLOCKED and port.peek() is not None:
                message = port.take()
                self._ready.add(port)
                if isinstance(message, (CheckpointBarrier, EndOfInput)):
                    return port, message
        return None

    def _poll_rest(self, port: Port, end: EndOfInput) -> tuple[Port, DataBatch | SourceBatch | Control]:
        """Return the records that are set aside after all inputs have ended: by epoch, wanted inputs first."""
        lowest = {other: epoch for other in self.ports if (epoch := self._epochs.lowest_pending(other)) is not None}
        if not lowest:
            self._ending = None
            return port, RestHandled(end)
        turn = min(lowest.values())
        self._epochs.start_last_turn(turn)
        self.reconsider_wanted()
        due = [other for other, epoch in lowest.items() if epoch == turn]
        following = next((other for other in due if self.is_wanted(other.input_name)), due[0])
        self._epochs.hold_due(following)
        return following, self._take_batch(following)

    def _take_batch(self, port: Port) -> DataBatch | SourceBatch:
        epochs, times = self._epochs, self.times
        withheld = self.sets_aside and (epochs.is_withheld(port) or (times is not None and times.waits(port.index)))
        self._served = port if withheld else None
        if self._epochs.idle:
            self._epochs.end_idleness(port)
        batch = port.take_batch()
        self._in_hand = port if port.has_in_hand else None
        self._ready.add(port)
        return batch

    async def wait(self) -> None:
        """Wait until ``poll`` may return something."""
        if self._posted or self._ready.queue or self._ending is not None:
            return
        await self._ready.wait()

    def put_back(self, port: Port, records: Batch, epoch: int, origin: BatchOrigin | None = None) -> None:
        """Give back the end of a batch that ``poll`` returned. It is the next item of its port."""
        port.put_back(DataBatch(records, epoch, origin))
        self._ready.add(port)

    def cut_turns(self, input_names: Iterable[str]) -> None:
        """Let ``poll`` return only as many records of these inputs as their port's ``turn_size`` allows.

        A task that handles epochs in order gets whole batches. Such steps add numbers up batch by batch; cutting by
        time would change the last bits of their results from run to run.
        """
        names = set(input_names)
        for port in self.ports:
            if port.input_name in names and not self.sets_aside:
                port.cut_turns()

    def post(self, control: Control) -> None:
        """Let ``poll`` return this control record next. Any part of the job may call it."""
        self._posted.append(control)
        self._ready.wake()

    def want(self, input_names: Iterable[str] | None) -> None:
        """Read only these inputs from now on, or all of them (None). If these inputs have all ended, read all.

        Raises ConfigurationError if the value is not a collection of names, or no input has one of the names.
        """
        if self._wanted.ask(input_names):
            self._unpark()

    @property
    def wanted_names(self) -> frozenset[str] | None:
        return self._wanted.names

    def is_wanted(self, input_name: str) -> bool:
        """Return whether the gate reads this input now."""
        wanted = self._wanted.names
        return self._reads is not _BARRIERS and (wanted is None or input_name in wanted)

    def may_continue(self, port: Port) -> bool:
        """Return whether the rest of a batch of this port may follow, or other records come first now."""
        return self.is_wanted(port.input_name)

    @property
    def stands_still(self) -> bool:
        return self._reads is _BARRIERS

    def stand_still(self, stands_still: bool) -> None:
        """Read only barriers from now on, and hold the records before them; or read everything again."""
        if self._reads is FEEDBACK or stands_still is (self._reads is _BARRIERS):
            return
        self._reads = _BARRIERS if stands_still else _ALL
        if not stands_still:
            self._unpark()

    def reconsider_wanted(self) -> None:
        """Decide again what to read after an input has ended: if only ended inputs are wanted, read all."""
        if self._wanted.reconsider():
            self._unpark()

    def inputs_complete(self, epoch: int) -> list[str]:
        """Return the inputs that bring no more records of this epoch, or of an epoch before it."""
        names = dict.fromkeys(port.input_name for port in self.ports)
        for port in self.ports:
            if not self._epochs.is_complete(port, epoch):
                names.pop(port.input_name, None)
        return list(names)

    # -- for statistics and the watchdog -------------------------------------------------------------

    @property
    def has_parked(self) -> bool:
        """Whether it has input that the task does not get now."""
        return bool(self._ready.parked)

    def waits_for(self) -> str | None:
        """Return in words what the records that are not read wait for; None if they only are not wanted."""
        return self.waits_for_end()

    def waits_for_end(self) -> str | None:
        """Return in words which channels must first be read to their end; None if none must."""
        return None if self._ends is None else self._ends.waits_for()

    @property
    def held_records(self) -> int:
        return self._epochs.records_aside + sum(port.held_records for port in self.ports)

    def awaited_barriers(self) -> list[str]:
        """Return the channels that delay a barrier; none while no channel has brought one."""
        return self._alignment.awaited()

    # -- control records -----------------------------------------------------------------------------

    def accept(self, port: Port, control: Control) -> list[Control]:
        """Note a control record that was taken from a port; return what the task must handle now, in order."""
        if isinstance(control, EpochWatermark):
            events = self._epochs.bring_watermark(port, control.epoch)
            if self._in_order:
                self.reconsider_wanted()
            return events
        if isinstance(control, EventTimeWatermark):
            return self._bring_time(port, control)
        if isinstance(control, CheckpointBarrier):
            if not port.is_feedback:
                return self._align(port, control)
            self._feedback.barrier_returned(port, control)
            return self._returned()
        if isinstance(control, EndOfData):
            return [*self._end_time(port), *self._epochs.bring_end_of_data(port, control.epoch)]
        if isinstance(control, EndOfInput):
            events = [*self._end_time(port), *self._input_ended(port, control)]
            if port.is_feedback:  # A task before it was told of the iteration's end earlier than this one.
                self._feedback.ended(port)
                events += self._returned()
            return [*self._pass_read_to_end(), *events]
        if isinstance(control, Idle):
            return self._epochs.bring_idle(port)
        if isinstance(control, ReadToEnd):
            if self._ends is not None:
                self._ends.bring(port)
                self.reconsider_wanted()
            return self._pass_read_to_end()
        if isinstance(control, RestHandled):
            ended = [event for other in self.ports for event in self._epochs.finish_data(other)]
            times = [] if self.times is None else self.times.settle_all()
            return [*times, *(event for event in ended if isinstance(event, InputEnded)), control.end]
        raise TypeError(f"gate: expected a control record of a channel, given {control!r}")

    def accept_trigger(self, barrier: CheckpointBarrier) -> list[Control]:
        """Note a barrier that was posted to the task; return it if no channel can bring it any more."""
        self._alignment.trigger(barrier)
        self._unpark()
        return self._aligned()

    def announce(self, barrier: CheckpointBarrier) -> None:
        """Note that channels will bring this barrier. Inputs that are not wanted must not delay it."""
        if not self._all_ended():
            self._alignment.announce(barrier)
            self._unpark()

    def only_feedback(self) -> None:
        """Read and log feedback only from now on. The job stops at a barrier."""
        self._reads = Reads.FEEDBACK
        for port in self.ports:
            self._ready.add(port)

    @property
    def has_feedback(self) -> bool:
        return bool(self._feedback.ports)

    def start_feedback_log(self, barrier: CheckpointBarrier) -> BarrierReturned | None:
        """Log what feedback ports bring, until each has brought this barrier back; return the log if all have."""
        self._feedback.start(barrier)
        self._unblock(self._feedback.ports)
        return self._feedback.complete()

    def drop_feedback_log(self) -> None:
        """Log no more, because the checkpoint is abandoned. Its barrier is still expected."""
        self._feedback.drop()

    def close(self) -> None:
        close_now([self._epochs.close, self._feedback.close])

    # -- state ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, PlainValue]:
        """Return plain data: the watermarks, and the items that were taken from channels and not handled."""
        return {
            **self._epochs.snapshot(),
            # A restored source reads the rest of its batch again, because its positions are before that rest.
            "held": [
                (port.index, *_plain(item))
                for port in self.ports
                for item in port.held
                if not isinstance(item, (SourceBatch, ReadToEnd))
            ],
            "ended": [int(port.has_ended) for port in self.ports],
            "ending": self._ending and (self._ending[0].index, *_plain(self._ending[1])),
            "ports": [None if port.origin is None else tuple(port.origin) for port in self.ports],
        }

    def takes(self, state: dict[str, PlainValue]) -> bool:
        """Return whether ``restore`` takes this state: that of a gate of the same class. The engine converts others."""
        return not state.get("merges in order")

    def restore(self, state: dict[str, PlainValue], logged: Iterable[tuple[int, Iterable[PlainValue]]] = ()) -> None:
        """Restore what ``snapshot`` returned. ``logged``: the feedback log of each port, as decoded frames."""
        self._epochs.restore(state)
        for port, ended in zip(self.ports, state["ended"], strict=True):
            if ended:
                port.end()
        if (ending := state.get("ending")) is not None:
            index, *plain = ending
            end = _from_plain(plain)
            assert isinstance(end, EndOfInput)
            self._ending = self.ports[index], end
        for index, *plain in state["held"]:
            port = self.ports[index]
            port.hold(_from_plain(plain))
            self._ready.add(port)
        self._feedback.restore(logged)
        for port in self._feedback.ports:
            self._ready.add(port)
        self._epochs.report_due()
        for port in self.ports:
            if port.has_ended:  # The other ports are told of event time again.
                self._posted.extend(self._end_time(port))

    # -- inside --------------------------------------------------------------------------------------

    def _poll_unwanted(self, port: Port) -> tuple[Port | None, Control] | None:
        """Return what the task handles next instead of the records of this port, if there is something."""
        if not self._in_order:
            return self._leave(port)
        control = self._read_ahead(port)
        return None if control is None else (port, control)

    def _leave(self, port: Port) -> tuple[Port | None, Control] | None:
        """Park a port, unless a barrier is due and the port could hold all before it; return the barrier if aligned."""
        if port.is_feedback or not self._alignment.is_due or not self._hold_up_to_barrier(port):
            self._ready.park(port)
        # If the barrier is aligned now, no record behind it may come first.
        return (None, self._posted.popleft()) if self._posted else None

    def _read_ahead(self, port: Port) -> Control | None:
        """Set aside the records of a port whose input is not wanted, up to a control record; return that record.

        The end of the wanted input's epoch may be behind these records: in a head that brings both inputs, or because
        all initial variables and data must end before any head continues.
        """
        while isinstance(item := port.channel.peek(), DataBatch):
            port.channel.take()
            self._epochs.set_aside(port, item)
        self._ready.park(port)
        if item is None:
            return None
        assert isinstance(item, Control)
        port.channel.take()
        self._ready.add(port)
        return item

    def _bring_time(self, port: Port, watermark: EventTimeWatermark) -> list[Control]:
        """Note an event-time watermark; it waits for the records of its port that are set aside."""
        if self.times is None:
            return []
        pending = self._epochs.highest_pending(port) if self.sets_aside else None
        behind = self._epochs.is_withheld(port)
        return [*self.times.bring(port.index, watermark, pending=pending, is_behind_epoch=behind)]

    def _end_time(self, port: Port) -> list[Control]:
        return self._bring_time(port, EventTimeWatermark(MAX_TIME))

    def _pass_read_to_end(self) -> list[Control]:
        return [ReadToEnd()] if self._ends is not None and self._ends.complete() else []

    def _unpark(self) -> None:
        for port in self._ready.unpark():
            self._ready.add(port)

    def _has_ended(self, port: Port) -> bool:
        """Return whether a port brings nothing more, or nothing more of the current epoch if epochs are in order."""
        if self._epochs.data_has_ended(port) and not port.held:
            return True
        if self._ends is not None and self._ends.is_over_for(port):
            return True
        if not self._in_order:
            return False
        return self._epochs.is_complete(port, self._epochs.turn)

    def _hold_up_to_barrier(self, port: Port) -> bool:
        """Hold all items that a port brings before its barrier; return whether the barrier was there.

        An input that is not wanted would otherwise delay its barrier without end, while the wanted input is blocked
        behind its own barrier. Held records count toward the limits of the channel only after the barrier has arrived.

        This alone would not bound the held records: the channels upstream fill again after each barrier, and admit
        everything before the next one. So if a port holds more than all channels between it and the sources, these
        sources stop reading (``Channel.shut_intakes``). The records that still follow were in these channels, in the
        lanes before them, or had been read: at most as many again, for any number of barriers. This stops no source
        that would read on without barriers: with so many unhandled records, it would wait for room in its first
        channel. Feedback is bounded by the records in its loop.
        """
        port.make_way(True)
        while port.channel.peek() is not None:
            taken = port.channel.take()
            assert not isinstance(taken, SourceBatch)
            if isinstance(taken, CheckpointBarrier):
                self._posted.extend(self._align(port, taken))
                return True
            port.hold(taken)
            if isinstance(taken, EndOfInput):
                self._posted.extend(self._aligned())
        return False

    def _returned(self) -> list[Control]:
        returned = self._feedback.complete()
        return [] if returned is None else [returned]

    def _align(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        port.make_way(False)
        if self._alignment.bring(port, barrier):
            self._unpark()
        return self._aligned()

    def _aligned(self) -> list[Control]:
        barrier = self._alignment.complete()
        if barrier is None:
            return []
        for port in self.ports:
            port.make_way(False)  # Also if the barrier starts at this task, or an end has arrived instead.
        self._unblock(port for port in self.ports if not port.is_feedback)
        return [barrier]

    def _unblock(self, ports: Iterable[Port]) -> None:
        for port in ports:
            if port.unblock():
                self._ready.add(port)

    def _input_ended(self, port: Port, end: EndOfInput) -> list[Control]:
        port.end()
        events: list[Control] = []
        # Epochs after the end of an iteration have no callback. Records that remain wait for the end.
        if end.epoch is None or self._epochs.lowest_pending(port) is None:
            events = self._epochs.bring_end_of_data(port)
        if self._all_ended():
            if (triggered := self._alignment.inputs_ended()) is not None:
                events.append(triggered)
            # Heads read feedback after the end of their inputs, and need no end.
            follows_barrier = triggered is not None and not self.has_feedback
            if follows_barrier or any(self._epochs.lowest_pending(other) is not None for other in self.ports):
                self._ending = port, end
            else:
                events.append(end)
        return events + self._aligned()

    def _all_ended(self) -> bool:
        return all(port.has_ended for port in self.ports if not port.is_feedback)


def _plain(item: DataBatch | Control) -> tuple[PlainValue, ...]:
    if isinstance(item, DataBatch):
        return item.kind, item.epoch, len(item.records), item.records
    return control_to_plain(item)


def _from_plain(plain: Sequence[PlainValue]) -> DataBatch | Control:
    if plain[0] == DataBatch.kind:
        _, epoch, _, records = plain
        return DataBatch(records, epoch)
    return control_from_plain(plain)
