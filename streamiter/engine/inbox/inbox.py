"""The inbox: the input side of a task, which decides what the task handles next.

What must wait stays in the log of its port, at its place (:mod:`~streamiter.engine.inbox.port_log`). The policy of the
inbox says which records come next (:mod:`~streamiter.engine.inbox.order`). For epochs, event time, barriers and tables
that are read to their end, a :class:`~streamiter.operators.frontier.Frontier` says how far all ports have come.

A port is *parked* while it has records, but its input is not wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, final

from streamiter.engine.inbox.alignment import BarrierAlignment, BarrierReturned, FeedbackLog, Logged
from streamiter.engine.inbox.order import ARRIVAL, InboxOrder, WantedInputs, next_port
from streamiter.engine.inbox.port_log import FeedbackAside, Item, Port, ReadyPorts
from streamiter.engine.inbox.port_progress import NO_EPOCH, AwaitedInput, InputEnded, PortProgress
from streamiter.engine.inbox.turn import NO_WAIT, TurnSize
from streamiter.operators.operator import BoundaryOutput, Notice
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.closing import close_now
from streamiter.values.origins import BatchOrigin
from streamiter.values.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
)

if TYPE_CHECKING:
    from streamiter.engine.storage.disk_queue import SpillQueue
    from streamiter.values.plain_data import PlainData


# Feedback has no limit, and is read from disk where it is much. After this many batches the task takes a turn, and
# gives way to other tasks after some turns.
_FEEDBACK_BATCHES: Final = 4


Polled = tuple[Port | None, Item]


@final
class Posted(Control):
    """A notice: the task calls it between two batches."""

    notice: Notice


@final
class Inbox:
    """The input side of one task. Only that task uses it."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        order: InboxOrder = ARRIVAL,
        epochs_in_order: bool = False,
        make_queue: Callable[[], SpillQueue] | None = None,
        make_feedback_queue: Callable[[], SpillQueue] | None = None,
        timed_ports: Sequence[int] = (),
        awaited: AwaitedInput | None = None,
    ) -> None:
        """``epochs_in_order``: a wanted input has ended when it has no more records of the current epoch.

        ``make_queue`` makes a queue for records whose epoch's turn has not come, ``make_feedback_queue`` one for the
        feedback of a checkpoint; both have the limits of the loop. ``timed_ports`` bring event-time watermarks, by
        index; ``awaited`` is the input that is read first.
        """
        self.ports = list(ports)
        self.sets_aside = order.sets_aside
        self._by_port = order.by_port
        self._in_order = epochs_in_order
        self._ready = ReadyPorts()
        self.posted: deque[Control] = deque()
        """What comes before all that the ports bring. The inbox adds to it; the task takes from it, too."""
        self.wanted = WantedInputs(self.ports, self._counts_as_ended)
        """What the operator wants to read now. Only the inbox changes it."""
        self.feedback = FeedbackLog(self.ports, make_feedback_queue)
        self.has_feedback = bool(self.feedback.ports)
        self._progress = PortProgress(
            self.ports,
            timed_ports,
            order=order,
            on_due=self._ready.add,
            on_data_ended=self.reconsider_wanted,
            awaited=awaited,
        )
        self.unread_table = self._progress.unread_table
        self.hold_back = self._progress.hold_back
        self._epochs = self._progress.epochs
        self.times = self._progress.times
        """The event time of the ports; None if none brings any."""
        self._idle = self._progress.idle
        self.barriers = BarrierAlignment(self.ports)
        """Only the inbox changes it."""
        self.stands_still = False
        """Whether it reads only barriers: a barrier passes before the records in the channels, which are set aside or
        stay there. Only the inbox changes it."""
        self.rests = self.is_at_barrier = False
        """Whether the task waits, or gives way to other tasks; and whether its state is being taken. The task changes
        them."""
        self.handle: Callable[[Port, DataBatch], bool] | None = None
        """Handles admitted feedback while the task rests; returns whether it has. The task sets it, if it can."""
        self._admitted: float = math.inf
        """At the border of a loop: the last epoch whose records the operator receives now."""
        self.aside = FeedbackAside(self.feedback.ports, make_queue)
        """Feedback that is not admitted. Only the inbox, its task, and the operator at the border of a loop use it."""
        self.served: Port | None = None
        """The port of the data that the task handles now, if something waits for that data."""
        self._end: EndOfInput | None = None
        """The end of all inputs. It comes after the records in all logs, and after a barrier that starts here."""
        self._rest: int | None = None
        """After the end of all inputs: the epoch of the records that are handled now. It has no watermark."""
        for port in self.ports:
            if self.sets_aside:
                assert make_queue is not None
                port.set_aside_by_epoch(make_queue)
            port.channel.attach(partial(self._ready.add, port))
            if port.channel.waiting:
                self._ready.add(port)

    # -- taking --------------------------------------------------------------------------------------

    def poll(self) -> Polled | None:
        """Return what the task handles next, and its port (None for a posted control record), or None."""
        if self.served is not None:
            self._after_serving(self.served)
        if self.posted:
            return None, self.posted.popleft()
        if self._end is not None and not self._by_port:
            return self._poll_rest(self._end)
        if self._by_port and (polled := self._poll_next()) is not None:
            return polled
        ready = self._ready
        while ready.queue:
            port = ready.queue.popleft()
            port.is_queued = False
            if self.sets_aside and not self._by_port:
                port.load(self._epochs.value + 1)
            item = port.held[0] if port.held else port.channel.peek()
            if item is None or port.is_blocked:
                continue
            if self._has_turn(port, item):
                return port, self._take(port, item)
            if (polled := self._leave(port, item)) is not None:
                return polled
        # If only some inputs are wanted, records that were set aside now may change which port is next.
        if self._by_port and self.wanted.names is not None and (polled := self._poll_next()) is not None:
            return polled
        return self._poll_rest(self._end) if self._end is not None and self._epochs.all_ended else None

    def _has_turn(self, port: Port, item: Item) -> bool:
        """Return whether the task handles this item now; the port is not the next one in a fixed order of ports.

        Records have a turn if their input is wanted and their epoch admitted; and if epochs have an order, all earlier
        epochs are complete. Control records always have one, unless the inbox stands still.
        """
        if self.stands_still and not port.is_feedback:
            return isinstance(item, CheckpointBarrier)
        if not isinstance(item, DataBatch):
            return True
        if self._by_port or item.epoch > self._admitted:
            return False
        wanted = self.wanted.names
        if wanted is not None and port.input_name not in wanted:
            return False
        return not self.sets_aside or item.epoch <= self._epochs.value + 1

    def _stays(self, port: Port, item: Item) -> bool:
        """Return whether an item without a turn stays where it is, so that nothing behind it is read.

        Otherwise it is set aside: before a barrier that is due, since the wanted input may wait behind its own barrier;
        as feedback, since a loop counts all feedback that arrives; and where records have the order of epochs.
        """
        if port.is_feedback or self.barriers.is_due:
            return False
        if self.stands_still or not self.sets_aside:
            return True
        is_ahead = isinstance(item, DataBatch) and item.epoch > self._admitted
        return is_ahead or (self._by_port and self.wanted.names == frozenset())

    def _leave(self, port: Port, item: Item) -> Polled | None:
        """Leave a port whose item has no turn now; return what comes next instead, if there is something."""
        if self._stays(port, item):
            self._ready.park(port)
        elif port.is_feedback or (port.later is not None and not self.stands_still):
            if not self._by_port and not self.is_wanted(port.input_name):
                self._ready.park(port)
            if (polled := self._read_ahead(port)) is not None:
                return polled
        elif not self._hold_up_to_barrier(port):
            self._ready.park(port)
        # If the barrier is aligned now, no record behind it may come first.
        return (None, self.posted.popleft()) if self.posted else None

    def _read_ahead(self, port: Port) -> Polled | None:
        """Set aside the records of a port that have no turn now; take the control record behind them and return it.

        Behind the end of data are records of the end of the iteration. If ports have a fixed order, they stay in the
        channel until the end of data has had its turn, and come after all other records.
        """
        batches, channel = 0, port.channel
        while isinstance(item := channel.peek(), DataBatch):
            if port.marks.end is not None and self._by_port:
                return None
            if port.is_feedback and batches == _FEEDBACK_BATCHES:
                self._ready.add(port)
                return None, Posted(nothing)
            batches += 1
            if self._has_turn(port, item):
                self._ready.add(port)
                return None
            channel.take()
            self._idle.discard(port.index)
            if port.is_feedback:
                self.aside.put(port, item)
            else:
                port.set_aside(item)
        if item is None:
            return None
        assert isinstance(item, Control)
        channel.take()  # Other items may be set aside before it.
        self._ready.add(port)
        return port, item

    def _hold_up_to_barrier(self, port: Port) -> bool:
        """Set aside all that a port brings before its barrier; return whether the barrier was there."""
        last = port.hold_up_to_barrier()
        if isinstance(last, CheckpointBarrier):
            self.posted.extend(self._align(port, last))
        elif isinstance(last, EndOfInput):
            self.barriers.end(port)
            self.posted.extend(self._aligned())
        return isinstance(last, CheckpointBarrier)

    def _poll_next(self) -> Polled | None:
        """Return the next item of the port that is next, or an event of the end of its data."""
        epochs = self._epochs
        while (port := next_port(self.ports, self.wanted.names, epochs)) is not None:
            if port.later is not None and port.later.counts and not port.is_feedback:
                port.load(epochs.reached(port.index) + 1)
            if port.marks.end is not None and port.lowest is None:
                self.posted.extend(self._progress.end_data(port))
                self._ready.add(port)  # Records of the end of the iteration may follow.
                if self.posted:
                    return None, self.posted.popleft()
                continue
            if not port.held and port.is_blocked:
                return None
            item = port.held[0] if port.held else port.channel.peek()
            if isinstance(item, DataBatch):
                may_come = item.epoch <= self._admitted and self.is_wanted(port.input_name) and not port.is_feedback
                if not may_come or item.epoch != epochs.reached(port.index) + 1:
                    return None
            return None if item is None else (port, self._take(port, item))
        return None

    def _poll_rest(self, end: EndOfInput) -> Polled:
        """Return the records in the logs after all inputs have ended: by epoch, wanted inputs first; then the end."""
        lowest = [epoch for port in self.ports if (epoch := port.lowest) is not None]
        if not lowest:
            self._end = None
            ended = [event for port in self.ports for event in self._progress.end_data(port)]
            self.posted += [*(event for event in ended if isinstance(event, InputEnded)), end]
            return None, self.posted.popleft()
        self._rest = epoch = min(lowest)
        self.reconsider_wanted()
        next_ports = (port for port in self.ports if port.lowest == epoch)
        port = min(next_ports, key=lambda port: not self.is_wanted(port.input_name))
        port.load(epoch)
        return port, self._take(port, port.held[0])

    def _take(self, port: Port, first: Item) -> Item:
        """Take the next control record of a port, or its next batch, which begins with the ``first`` item."""
        taken: Item
        if isinstance(first, Control):
            taken, may_follow = port.take(), port.later is not None and bool(port.later.counts)
        else:
            if self._idle:
                self._idle.discard(port.index)
            taken, may_follow = port.take_batch(), self.sets_aside
            if port.in_hand is not None or (self.sets_aside and port.marks):
                self.served = port
        # A channel that is empty now calls when it has something.
        if may_follow or port.held or port.channel.waiting:
            self._ready.add(port)
        return taken

    def _after_serving(self, served: Port) -> None:
        """Free the room of the records that the task has handled, and let what waited behind them act."""
        self.served = None
        served.release()
        if served.marks:
            # They come first: a snapshot at a barrier that is posted already has the watermark that they bring.
            self.posted.extendleft(reversed(self._progress.settle(served)))
            self.reconsider_wanted()

    def wait(self) -> Awaitable[None]:
        """Return what to await until ``poll`` may return something. It is no coroutine: each round comes here."""
        if not self.posted and not self._ready.queue and (self._end is None or self._by_port):
            return self._ready.news()
        return NO_WAIT

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
            if port.input_name in names and not self.sets_aside and port.turn_size is None:
                port.turn_size = TurnSize()

    def post(self, notice: Notice) -> None:
        """Let ``poll`` return this notice next. Any part of the job may call it."""
        self.posted.append(Posted(notice))
        if self._ready.waiter is not None:
            self._ready.wake()

    # -- at the border of a loop -----------------------------------------------------------------------

    def hand_over_feedback(self, complete: Callable[[int], None]) -> None:
        """Let producers of feedback hand it over, so that the task need not read it. ``complete`` gets its epochs.

        The producer's turn then sets feedback aside, and reports that an epoch was received.
        """
        for port in self.feedback.ports:
            if port.feedback is not None and port.feedback.is_at_hand and port.feedback.return_path is None:
                port.feedback.hand_over = partial(self._handed_over, port, complete)

    def _handed_over(self, port: Port, complete: Callable[[int], None], item: DataBatch | Control) -> bool:
        """Handle an item of an empty channel, if the task rests or has made the item itself; return whether."""
        rests = self.rests and not (self._ready.queue or self.posted)
        if self._idle or port.is_blocked or not (rests or (port.is_own and not self.is_at_barrier)):
            return False
        if isinstance(item, DataBatch):
            if item.epoch <= self._admitted:
                return rests and self.handle is not None and self.handle(port, item)
            self.aside.put(port, item)
            return True
        if not isinstance(item, EpochWatermark):
            return False
        for event in self._progress.bring(port, item):
            assert isinstance(event, EpochWatermark)
            complete(event.epoch)
        return True

    def admit_up_to(self, epoch: float) -> None:
        """Let the operator receive data of the epochs up to this one."""
        self._admitted = epoch
        if self._ready.parked:
            self._ready.unpark()

    @property
    def is_ahead(self) -> bool:
        """Whether a port has data next that is not admitted."""
        items = (port.peek() for port in self.ports)
        return any(isinstance(item, DataBatch) and item.epoch > self._admitted for item in items)

    # -- what is wanted --------------------------------------------------------------------------------

    def want(self, input_names: Iterable[str] | None) -> None:
        """Read only these inputs from now on, or all of them (None). If these inputs have all ended, read all.

        Raises ConfigurationError if the value is not a collection of names, or no input has one of the names.
        """
        if self.wanted.ask(input_names):
            self._ready.unpark()

    def is_wanted(self, input_name: str) -> bool:
        """Return whether the task reads this input now."""
        wanted = self.wanted.names
        return not self.stands_still and (wanted is None or input_name in wanted)

    def may_continue(self, port: Port) -> bool:
        """Return whether the rest of a batch of this port may follow, or other records come first now."""
        if not self.is_wanted(port.input_name):
            return False
        return not self._by_port or next_port(self.ports, self.wanted.names, self._epochs) in (port, None)

    def stand_still(self, stands_still: bool) -> None:
        """Read only barriers from now on, and set aside the records before them; or read everything again."""
        if self.stands_still is not stands_still:
            self.stands_still = stands_still
            self._ready.unpark()

    def reconsider_wanted(self) -> None:
        """Decide again what to read after an input has ended: if only ended inputs are wanted, read all."""
        if self.wanted.reconsider():
            self._ready.unpark()

    def inputs_complete(self, epoch: int) -> list[str]:
        """Return the inputs that bring no more records of this epoch, or of an epoch before it.

        If ports have a fixed order, an input is not complete before the ports that come before its ports.
        """
        names, is_open = dict.fromkeys(port.input_name for port in self.ports), False
        ports = sorted(self.ports, key=lambda port: self._by_port and not self.is_wanted(port.input_name))
        for port in ports:
            is_open = (is_open and self._by_port) or not self._progress.is_complete(port, epoch)
            if is_open:
                names.pop(port.input_name, None)
        return list(names)

    def _counts_as_ended(self, port: Port) -> bool:
        """Return whether a port brings nothing more, or nothing more of the current epoch if epochs are in order."""
        current = self._epochs.value + 1 if self._rest is None else self._rest
        return self._progress.counts_as_ended(port, current if self._in_order else None)

    # -- for statistics and the watchdog -------------------------------------------------------------

    @property
    def has_parked(self) -> bool:
        """Whether it has input that the task does not get now."""
        if self._ready.parked or not self._by_port:
            return bool(self._ready.parked)
        for port in self.ports:  # noqa: SIM110 (without a call: each wait of a task comes here)
            if port.later is not None and port.later.counts and not port.is_feedback:
                return True
        return False

    def waits_for(self) -> str | None:
        """Return in words what the records that are not read wait for; None if they only are not wanted."""
        if not self._by_port:
            return self.unread_table()
        port = None if self._ready.parked else next_port(self.ports, self.wanted.names, self._epochs)
        return None if port is None else f"its records come after those of {port.channel.name}"

    @property
    def held_records(self) -> int:
        return sum(port.held_records for port in self.ports)

    # -- control records -----------------------------------------------------------------------------

    def accept(self, port: Port, control: Control) -> list[Control]:
        """Note a control record that was taken from a port; return what the task must handle now, in order."""
        if isinstance(control, CheckpointBarrier):
            return self.feedback.barrier_returned(port, control) if port.is_feedback else self._align(port, control)
        if isinstance(control, EndOfInput):
            events = [*self._end_port(port, control), *self._progress.end_time(port), *self._bring_end(port, control)]
            if port.is_feedback:  # A task before it was told of the iteration's end earlier than this one.
                events += self.feedback.ended(port)
        else:
            events = self._progress.end_time(port) if isinstance(control, EndOfData) else []
            events += self._progress.bring(port, control)
        if self._in_order:
            self.reconsider_wanted()
        return events

    def _bring_end(self, port: Port, end: EndOfInput) -> list[Control]:
        events: list[Control] = []
        # Epochs after the end of an iteration have no callback. Records that remain wait for the end.
        if self._by_port or end.epoch is None or port.lowest is None:
            events = self._progress.bring(port, NO_EPOCH)
        barriers = self._aligned()
        events += barriers
        if self._all_ended():
            # The end is behind a barrier that starts here. Heads read feedback after it, and do not wait for it.
            follows_barrier = bool(barriers) and not self.has_feedback
            if self._by_port or follows_barrier or any(other.lowest is not None for other in self.ports):
                self._end = end
            else:
                events.append(end)
        return events

    def _end_port(self, port: Port, end: EndOfInput) -> list[Control]:
        port.end, port.is_blocked = end, False
        self.barriers.end(port)
        return self._progress.end_reading(port)

    def _all_ended(self) -> bool:
        return all(port.has_ended for port in self.ports if not port.is_feedback)

    # -- barriers ------------------------------------------------------------------------------------

    def expect_barrier(self, barrier: CheckpointBarrier, *, starts_here: bool = False) -> list[Control]:
        """Note that channels will bring this barrier. Inputs that are not wanted must not delay it.

        ``starts_here``: it starts here if no channel can bring it any more, and is returned if that is so now.
        """
        if starts_here or not self._all_ended():
            self.barriers.expect(barrier, starts_here=starts_here)
            self._ready.unpark()
        return self._aligned() if starts_here else []

    def _align(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        port.make_way(False)
        if self.barriers.bring(port, barrier):
            self._ready.unpark()
        return self._aligned()

    def _aligned(self) -> list[Control]:
        barrier = self.barriers.complete()
        if barrier is None:
            return []
        for port in self.ports:
            port.make_way(False)  # Also if the barrier starts at this task, or an end has arrived instead.
        self._unblock(port for port in self.ports if not port.is_feedback)
        self._progress.barrier_passed()
        return [barrier]

    def _unblock(self, ports: Iterable[Port]) -> None:
        for port in ports:
            if port.is_blocked:
                port.is_blocked = False
                self._ready.add(port)

    # -- feedback ------------------------------------------------------------------------------------

    def only_feedback(self) -> None:
        """Read only feedback from now on: log it, then drop it. The job stops when the barrier has returned."""
        self._admitted = -math.inf
        self.aside.drop()
        for port in self.feedback.ports:
            if port.feedback is not None:
                port.feedback.hand_over = None
        for port in self.ports:
            port.is_blocked = not port.is_feedback
            self._ready.add(port)

    def start_feedback_log(self, barrier: CheckpointBarrier) -> BarrierReturned | None:
        """Log what feedback ports bring, until each has brought this barrier back; return the log if all have."""
        self.feedback.start(barrier)
        self._unblock(self.feedback.ports)
        return self.feedback.complete()

    # -- state ---------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, PlainValue]]:
        """Return plain data for each port: what waits in its log outside of the channel, and how far it has come."""
        states: list[dict[str, PlainValue]] = []
        for port in self.ports:
            data_ended = self._epochs.has_ended(port.index)
            end_waits = port.has_ended and (self._end is not None or not data_ended)
            reached = self._epochs.reached(port.index)
            states.append(port.snapshot(end_waits=end_waits) | {"reached": reached, "data ended": data_ended})
        return states

    def restore(
        self, states: Sequence[dict[str, PlainValue]], plain_data: PlainData, logged: Logged | None = None
    ) -> None:
        """Restore what ``snapshot`` returned. ``logged``: the feedback log of each port, with decoded frames."""
        for port, state in zip(self.ports, states, strict=True):
            port.restore(state, plain_data)
            port.arrived = state["reached"]
            self._epochs.reach(port.index, state["reached"])
            if state["data ended"]:
                self._epochs.end(port.index)
        self._epochs.settle()
        self.feedback.restore(logged or [])
        for port in self.ports:
            if port.end is not None:
                self._end_port(port, port.end)
                self.posted.extend(self._progress.end_time(port))  # The other ports are told of event time again.
            elif any(isinstance(item, EndOfInput) for item in port.held):
                self.barriers.end(port)
            if port.later or port.peek() is not None:
                self._ready.add(port)
        self._progress.barrier_passed()
        for port in self.feedback.ports:
            # They act now: a notice may take records that were set aside before the port is read, and these control
            # records have no record in front of them.
            for _ in range(len(port.held)):
                control = port.take()
                assert isinstance(control, Control)
                self.posted.extend(self.accept(port, control))

    def close(self) -> None:
        close_now([self.feedback.close, *(port.close for port in self.ports)])


def nothing(_: BoundaryOutput) -> None:
    """Do nothing. After this notice, as after each batch, a task clears its lanes and gives way to other tasks."""
