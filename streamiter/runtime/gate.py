"""The gate: where the channels of a task come together.

It takes turns among the channels that have something and whose input is wanted. What a barrier, a watermark
or an end means is decided by its parts, one for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from streamiter.errors import ConfigurationError
from streamiter.operators.source import SourceBatch
from streamiter.records import (
    Batch,
    BatchOrigin,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
)
from streamiter.runtime.controls import InputEnded, RestHandled, from_plain, plain_log
from streamiter.runtime.feedback import FeedbackLog
from streamiter.runtime.gate_epochs import EpochsAside, GateEpochs
from streamiter.runtime.port import Port, PortState, ReadyPorts

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import SpillQueue

__all__ = [
    "Gate",
]


class Gate:
    """The input side of one task; used by that task only."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        epochs_aside: EpochsAside | None = None,
        make_feedback_queue: Callable[[], SpillQueue] | None = None,
    ) -> None:
        """``make_feedback_queue``: where ports bring feedback, makes queues with its limits."""
        self.ports = list(ports)
        self._ready = ReadyPorts(len(self.ports))
        self._posted: deque[Control] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = WantedInputs(self.ports, self._has_ended)
        self._alignment = BarrierAlignment(self.ports)
        self._feedback = FeedbackLog(self.ports, make_feedback_queue)
        self._epochs = GateEpochs(
            self.ports, epochs_aside, on_held=self._list, on_data_ended=self.reconsider_wanted
        )
        self._in_order = epochs_aside is not None
        self._feedback_only = False
        self.stands_still = False
        """Whether nothing is read, so that a barrier comes before whatever lies in the channels."""
        self._served: Port | None = None
        """The port that the last data came from, if its watermark waits for it to be handled."""
        self._in_hand: Port | None = None
        """The same, if that data was held and takes room until it is handled."""
        self._ending: tuple[Port, EndOfInput] | None = None
        """The end of all inputs, kept back until what was set aside has been handled."""
        for port in self.ports:
            port.channel.attach(lambda port=port: self._list(port))
            if port.channel.peek() is not None:
                self._list(port)

    # -- taking --------------------------------------------------------------------------------------

    def poll(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        """What is to be handled next and where it came from (None: it was posted); None if nothing is."""
        if self._in_hand is not None:
            self._in_hand.release()
            self._in_hand = None
        if self._served is not None:
            served, self._served = self._served, None
            self._posted.extend(self._epochs.settle(served))
            self.reconsider_wanted()
        if self._posted:
            return None, self._posted.popleft()
        if self._ending is not None:
            return self._poll_rest(*self._ending)
        if self._feedback_only:
            return self._poll_feedback()
        ready = self._ready
        while ready:
            port = ready.take()
            if self._in_order:
                self._epochs.hold_due(port)
            message = port.peek()
            if message is None or port.state is PortState.BLOCKED:
                continue
            if self.stands_still and not isinstance(message, CheckpointBarrier) and not port.is_feedback:
                self._leave(port)
                if self._posted:
                    return None, self._posted.popleft()
                continue
            if isinstance(message, Control):
                port.take()
                self._list(port)
                return port, message
            if isinstance(message, SourceBatch):  # A source has one input, which is always wanted.
                return port, self._take_source(port)
            if self._in_order and self._epochs.is_early(message):
                port.take()
                self._epochs.set_aside(port, message)
                self._list(port)
                continue
            wanted = self._wanted.names
            if wanted is not None and port.input_name not in wanted:
                if self._in_order:
                    if (control := self._read_ahead(port)) is not None:
                        return port, control
                    continue
                self._leave(port)
                if self._posted:  # That completed the alignment: nothing that lies behind may come first.
                    return None, self._posted.popleft()
                continue
            return port, self._take_data(port)
        return None

    def _poll_feedback(self) -> tuple[Port, CheckpointBarrier] | None:
        """The job stops at a barrier: what is fed back is logged only, until the barrier is back."""
        ready = self._ready
        while ready:
            port = ready.take()
            if port.is_feedback and not port.is_blocked and port.peek() is not None:
                message = port.take()
                self._list(port)
                if isinstance(message, CheckpointBarrier):
                    return port, message
        return None

    def _poll_rest(self, port: Port, end: EndOfInput) -> tuple[Port, DataBatch | Control]:
        """All inputs have ended: what was set aside, in epoch order, what is wanted first; then the end."""
        lowest = {
            other: epoch for other in self.ports if (epoch := self._epochs.lowest_pending(other)) is not None
        }
        if not lowest:
            self._ending = None
            return port, RestHandled(end)
        turn = self._epochs.turn_at_end = min(lowest.values())
        self.reconsider_wanted()
        due = [other for other, epoch in lowest.items() if epoch == turn]
        following = next((other for other in due if self.is_wanted(other.input_name)), due[0])
        self._epochs.hold_due(following)
        return following, self._take_data(following)

    def _take_data(self, port: Port) -> DataBatch:
        self._served = port if self._epochs.data_taken(port) else None
        batch = port.take_data()
        self._in_hand = port if port.has_in_hand else None
        self._list(port)
        return batch

    def _take_source(self, port: Port) -> SourceBatch:
        batch = port.take_source()
        self._in_hand = port if port.has_in_hand else None
        self._list(port)
        return batch

    async def wait(self) -> None:
        """Return when ``poll`` may have something."""
        if self._posted or self._ready or self._ending is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def put_back(self, port: Port, records: Batch, epoch: int, origin: BatchOrigin | None = None) -> None:
        """Give back the end of a batch that ``poll`` gave: it comes first on its port."""
        port.put_back(DataBatch(records, epoch, origin))
        self._list(port)

    def cut_turns(self, input_names: Iterable[str]) -> None:
        """Have ``poll`` give of these inputs only what their port's ``turn_size`` takes in a turn.

        Where epochs are in order nothing is cut by time: such steps add numbers up batch by batch, and give the same
        to the last bit in each run.
        """
        names = set(input_names)
        for port in self.ports:
            if port.input_name in names and not self._in_order:
                port.cut_turns()

    def post(self, control: Control) -> None:
        """Have ``poll`` give this control record next (from any part of the job)."""
        self._posted.append(control)
        self._wake()

    def want(self, input_names: Iterable[str] | None) -> None:
        """Read only these inputs from now on, None for all; if all of them have ended, read all.

        Raises ConfigurationError for what is no collection of names, and for a name that no input has.
        """
        if self._wanted.ask(input_names):
            self._unpark()

    @property
    def wanted_names(self) -> frozenset[str] | None:
        """The inputs that the operator wants, None for all."""
        return self._wanted.names

    def is_wanted(self, input_name: str) -> bool:
        """Whether this input is read now."""
        wanted = self._wanted.names
        return not self.stands_still and (wanted is None or input_name in wanted)

    def stand_still(self, stands_still: bool) -> None:
        """Read nothing from now on but a barrier, and what lies before that into the ports' own buffers; or go on."""
        if self.stands_still and not stands_still:
            self._unpark()
        self.stands_still = stands_still

    def reconsider_wanted(self) -> None:
        """Some input has ended: where only ended ones are wanted, all are read."""
        if self._wanted.reconsider():
            self._unpark()

    def inputs_complete(self, epoch: int) -> list[str]:
        """The inputs that bring no record of this epoch any more."""
        names = dict.fromkeys(port.input_name for port in self.ports)
        for port in self.ports:
            if not self._epochs.covers(port, epoch):
                names.pop(port.input_name, None)
        return list(names)

    # -- for statistics and the watchdog -------------------------------------------------------------

    @property
    def has_parked(self) -> bool:
        """Whether there is input that is not wanted now."""
        return self._ready.has_parked

    @property
    def held_records(self) -> int:
        """Records taken from channels and not handled yet."""
        return self._epochs.records_aside + sum(port.held_records for port in self.ports)

    def awaited_barriers(self) -> list[str]:
        """The channels whose barrier others wait for; empty while no barrier is on its way."""
        return self._alignment.awaited()

    # -- control records -----------------------------------------------------------------------------

    def accept(self, port: Port, control: Control) -> list[Control]:
        """What a control record taken from a port means for the task, in order."""
        if isinstance(control, EpochWatermark):
            events = self._epochs.watermark(port, control.epoch)
            if self._in_order:
                self.reconsider_wanted()
            return events
        if isinstance(control, CheckpointBarrier):
            return self._barrier_returned(port, control) if port.is_feedback else self._align(port, control)
        if isinstance(control, EndOfData):
            return self._epochs.end_of_data(port, control.epoch)
        if isinstance(control, EndOfInput):
            return self._input_ended(port, control)
        if isinstance(control, Idle):
            return self._epochs.is_idle(port)
        if isinstance(control, RestHandled):
            ended = [event for other in self.ports for event in self._epochs.data_ended(other)]
            return [*(event for event in ended if isinstance(event, InputEnded)), control.end]
        raise TypeError(f"no control record of a channel: {control!r}")

    def accept_trigger(self, barrier: CheckpointBarrier) -> list[Control]:
        """A barrier given to a boundary itself: it counts where no channel is left that could bring it."""
        self._alignment.trigger(barrier)
        self._unpark()
        return self._aligned()

    def announce(self, barrier: CheckpointBarrier) -> None:
        """Be told that this barrier is on its way: inputs that are not wanted must not keep it waiting."""
        if not self._all_ended():
            self._alignment.announce(barrier)
            self._unpark()

    def only_feedback(self) -> None:
        """From now on take feedback only, and only to log it: the job stops at this barrier."""
        self._feedback_only = True
        for port in self.ports:
            self._list(port)

    @property
    def has_feedback(self) -> bool:
        """Whether a loop comes back to this task."""
        return bool(self._feedback.ports)

    def start_feedback_log(self, barrier: CheckpointBarrier) -> list[Control]:
        """From now on log what feedback ports bring, until each has brought this barrier back."""
        self._feedback.start(barrier)
        self._unblock(self._feedback.ports)
        return [*self._feedback.complete()]

    def drop_feedback_log(self) -> None:
        """The checkpoint is given up: log no more; its barrier is still waited for."""
        self._feedback.drop()

    def close(self) -> None:
        """Let go of files."""
        self._epochs.close()
        self._feedback.close()

    # -- state ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Plain data: the watermarks, and what was taken from the channels but not handled."""
        return {
            **self._epochs.snapshot(),
            # The rest of a source's batch is read again: the positions are those before it.
            "held": plain_log(
                (port.index, item)
                for port in self.ports
                for item in port.held
                if not isinstance(item, SourceBatch)
            ),
            "ended": [int(port.has_ended) for port in self.ports],
            "ports": [None if port.origin is None else tuple(port.origin) for port in self.ports],
        }

    def restore(self, state: dict[str, Any], logged: Iterable[tuple[int, Iterable[Any]]] = ()) -> None:
        """Take over what ``snapshot`` gave, and feedback that was logged after it, by port, as decoded frames."""
        self._epochs.restore(state)
        for port, ended in zip(self.ports, state["ended"], strict=True):
            if ended:
                port.end()
        for index, kind, payload, epoch in state["held"]:
            port, item = self.ports[index], from_plain(kind, payload, epoch)
            port.hold(item)
            self._list(port)
        self._feedback.restore(logged)
        for port in self._feedback.ports:
            self._list(port)
        self._epochs.tell_of_due()

    # -- inside --------------------------------------------------------------------------------------

    def _list(self, port: Port) -> None:
        if port.state is not PortState.BLOCKED and self._ready.add(port):
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self, port: Port) -> None:
        """Its input is not wanted: park it, unless all before its barrier could be taken into its buffer."""
        if not port.is_feedback and self._alignment.is_due and self._hold_up_to_barrier(port):
            return
        self._ready.park(port)

    def _read_ahead(self, port: Port) -> Control | None:
        """Its input is not wanted: set aside what it brings up to the next control record, and give that.

        The end of the wanted input's epoch may lie behind records of this one: in the head that brings both, or
        because all initial variables and data have to end before any head goes on.
        """
        while isinstance(item := port.channel.peek(), DataBatch):
            port.channel.take()
            self._epochs.set_aside(port, item)
        self._ready.park(port)
        if item is None:
            return None
        assert isinstance(item, Control)
        port.channel.take()
        self._list(port)
        return item

    def _unpark(self) -> None:
        for port in self._ready.unpark():
            self._list(port)

    def _has_ended(self, port: Port) -> bool:
        """Whether nothing more comes from a port: at all, or in the epoch whose turn it is, where epochs take turns."""
        if self._epochs.data_has_ended(port) and not port.held:
            return True
        if not self._in_order:
            return False
        return self._epochs.covers(port, self._epochs.turn)

    def _hold_up_to_barrier(self, port: Port) -> bool:
        """Take what lies before the barrier into the port's own buffer; says whether the port is done with.

        An input that is not wanted would otherwise keep its barrier back for ever, while the wanted one
        is blocked by having brought its own.

        So until the barrier is there, what is held takes no room in the channel, and afterwards it does. That alone
        would not bound it: the channels further up fill again after each barrier, and make way for the next one. So
        once more is held than the channels on the way hold together, the sources at their other end read no more
        (``Channel.shut_intakes``). What is added after that moment was in these channels, in the lanes before them, or
        read already: at most as much again, however many barriers come and whether or not anything is handled
        between them. Nor can that stop what would go on without barriers: with so much unhandled, the source would
        wait for room in the first of these channels. What is fed back is bounded by what its loop has under way.
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
            port.make_way(False)  # Also where it began here, or an end has come instead.
        self._unblock(port for port in self.ports if not port.is_feedback)
        return [barrier]

    def _unblock(self, ports: Iterable[Port]) -> None:
        for port in ports:
            if port.unblock():
                self._list(port)

    def _barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        self._feedback.barrier_returned(port, barrier)
        return [*self._feedback.complete()]

    def _input_ended(self, port: Port, end: EndOfInput) -> list[Control]:
        port.end()
        events: list[Control] = []
        # Where an iteration ends, epochs from there on have no callback: what is left waits for the end.
        if end.epoch is None or self._epochs.lowest_pending(port) is None:
            events = self._epochs.end_of_data(port)
        if self._all_ended():
            if (triggered := self._alignment.inputs_ended()) is not None:
                events.append(triggered)
            if any(self._epochs.lowest_pending(other) is not None for other in self.ports):
                self._ending = port, end
            else:
                events.append(end)
        return events + self._aligned()

    def _all_ended(self) -> bool:
        return all(port.has_ended for port in self.ports if not port.is_feedback)


class BarrierAlignment:
    """Which barrier is on its way to this gate, and who has not brought it. Feedback ports bring none.

    Barriers at a gate: every channel must have brought it before the task passes it on.
    """

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
        port.block()
        return is_first

    def complete(self) -> CheckpointBarrier | None:
        """The barrier once every port is aligned; then the alignment is over.

        One that begins here counts when no port can bring it: also where the ends of all of them are held
        behind data that is not wanted, since what is wanted may wait for this barrier.
        """
        if self._triggered is not None and all(port.brings_no_barrier for port in self._ports):
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


class WantedInputs:
    """What ``wanted_inputs()`` said last. If all inputs that it names have ended, all are wanted.

    Which inputs an operator wants to read next.
    """

    def __init__(self, ports: Sequence[Port], has_ended: Callable[[Port], bool]) -> None:
        self._ports = ports
        self._has_ended = has_ended
        self._asked_for: tuple[str, ...] | None = None
        self.names: frozenset[str] | None = None
        """The inputs to read now; None for all."""

    def ask(self, input_names: Iterable[str] | None) -> bool:
        """Want only these from now on, None for all; says whether that is something new.

        Raises ConfigurationError for what is no collection of names, and for a name that no input has.
        """
        try:
            asked_for = None if input_names is None else tuple(input_names)
        except TypeError:
            raise _no_names(input_names) from None
        if asked_for == self._asked_for:
            return False
        if isinstance(input_names, str):
            raise _no_names(input_names)
        self._check_names(asked_for or ())
        self._asked_for = asked_for
        self._decide()
        return True

    def reconsider(self) -> bool:
        """Some port has ended; says whether that may change what is wanted."""
        if self._asked_for is None:
            return False
        self._decide()
        return True

    def _decide(self) -> None:
        asked_for = self._asked_for
        if not asked_for:
            self.names = None if asked_for is None else frozenset()
            return
        ended = all(self._has_ended(port) for port in self._ports if port.input_name in asked_for)
        self.names = None if ended else frozenset(asked_for)

    def _check_names(self, asked_for: Sequence[str]) -> None:
        known = dict.fromkeys(port.input_name for port in self._ports)
        unknown = [name for name in asked_for if name not in known]
        if unknown:
            raise ConfigurationError(
                f"wanted_inputs(): expected names of inputs ({', '.join(known)}), given {unknown[0]!r}; "
                "return a tuple of them, or None for all"
            )


def _no_names(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"wanted_inputs(): expected a tuple or list of names, given {given!r}; "
        f"{f'return ({given!r},)' if isinstance(given, str) else 'return None for all inputs'}"
    )
