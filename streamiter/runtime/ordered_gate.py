"""The gate of a synchronous loop, which hands over records in an order that does not depend on the speed of tasks.

An :class:`OrderedGate` hands over the records with the lowest (epoch, port) first, and sets others aside. Ports have
the order of inputs, edges and upstream subtasks. :class:`OrderedEpochs` knows which port is next. Decision 024 explains
why a loop with such gates does not stand still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from streamiter.deferred import PlainValue
from streamiter.operators.source import SourceBatch
from streamiter.records import Control, DataBatch, EndOfInput
from streamiter.runtime.gate import FEEDBACK, Gate
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS, EpochsAside, GateEpochs
from streamiter.runtime.port import BLOCKED, Port

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import SpillQueue


@final
class OrderedEpochs(GateEpochs):
    """Follows the epochs of all ports, and knows which port is next.

    The *place* of a port is the last epoch that it has brought and that the task has handled, then its number. The port
    with the lowest place is next. The end of data waits for its turn like a record.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        aside: EpochsAside,
        *,
        on_held: Callable[[Port], None],
        on_data_ended: Callable[[], None],
    ) -> None:
        super().__init__(ports, aside, on_held=on_held, on_data_ended=on_data_ended)
        # The gate reads these attributes for each batch, and a call takes as long as five such reads.
        self.waiting_ends: set[int] = set()
        """The ports whose end of data waits for its turn, by index."""
        self.ports_aside: set[int] = set()
        """The ports of which records were set aside, by index."""

    def next_port(self, wanted: frozenset[str] | None) -> Port | None:
        """Return the port whose record, or the end of whose data, comes next; None if all data has ended.

        Wanted inputs come first: a record that waits at a port whose input is not wanted has no turn. Such a port
        without a record may bring a watermark. If that may be of an earlier epoch, the port is next, so that the
        callback of that epoch has a fixed place. If no input is wanted, a record that waits keeps its turn.
        """
        if wanted is None:
            slowest = self.frontier.slowest
            return None if slowest is None else self._ports[slowest]
        following, lowest = None, (math.inf, True, 0)
        for port in self._ports:
            if self.data_has_ended(port):
                continue
            reached = self.frontier.reached(port.index)
            is_wanted = port.input_name in wanted
            place = reached, not is_wanted, port.index
            if place < lowest and (is_wanted or not wanted or self.lowest_pending(port) != reached + 1):
                following, lowest = port, place
        return following

    def turn_of(self, port: Port) -> int:
        """Return the epoch of the records of this port that have their turn when the port is next."""
        return self.frontier.reached(port.index) + 1 if self._last_turn is None else self._last_turn

    def set_aside(self, port: Port, batch: DataBatch) -> None:
        super().set_aside(port, batch)
        self.ports_aside.add(port.index)

    def hold_due(self, port: Port) -> None:
        super().hold_due(port)
        assert self._aside is not None
        if self._aside.lowest_epoch(port.index) is None:
            self.ports_aside.discard(port.index)

    def report_due(self) -> None:
        """Do nothing: the gate looks at the next port in each turn."""

    def lowest_pending(self, port: Port) -> int | None:
        return super().lowest_pending(port) if port.held or port.index in self.ports_aside else None

    def is_withheld(self, port: Port) -> bool:
        return port.index in self.waiting_ends or self._withheld[port.index] is not None

    def is_complete(self, port: Port, epoch: int) -> bool:
        """Return whether all records of this port up to this epoch have been handled; an end must have had its turn."""
        lowest = self.lowest_pending(port)
        has_come = self.data_has_ended(port) or self.frontier.reached(port.index) >= epoch
        return has_come and (lowest is None or lowest > epoch)

    # -- control records of ports --------------------------------------------------------------------------

    def settle(self, port: Port) -> list[Control]:
        """Count what waits until the records of a port have been handled; the end of data still waits for its turn."""
        if port.index not in self.waiting_ends:
            return super().settle(port)
        reached, withheld = self.frontier.reached(port.index), self._withheld[port.index]
        if (lowest := self.lowest_pending(port)) is not None:
            reached = lowest - 1
        elif withheld is not None:
            self._withheld[port.index] = None
            reached = max(reached, int(withheld))
        return self._reach(port.index, reached)

    def bring_end_of_data(self, port: Port, epoch: int | None = None) -> list[Control]:
        if epoch is not None:
            self._data_epochs[port.index] = epoch
        if not self.data_has_ended(port):
            self.waiting_ends.add(port.index)
        events = self.settle(port)
        self._on_data_ended()  # The current epoch may have ended for an input.
        return events

    def finish_data(self, port: Port) -> list[Control]:
        self.waiting_ends.discard(port.index)
        return super().finish_data(port)

    def ends_with_input(self, port: Port) -> bool:
        """Return whether the port has brought no end of data. The end of input may have arrived before its turn."""
        return self._data_epochs[port.index] == BEFORE_ALL_EPOCHS

    # -- state ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, PlainValue]:
        return super().snapshot() | {"waiting ends": sorted(self.waiting_ends)}

    def restore(self, state: dict[str, PlainValue]) -> None:
        super().restore(state)
        self.waiting_ends = set(state.get("waiting ends", ()))
        self.ports_aside = {port for port, *_ in state["aside"]}


@final
class OrderedGate(Gate):
    """A gate that hands over the records with the lowest (epoch, port) first."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        epochs_aside: EpochsAside,
        epochs_in_order: bool,
        make_feedback_queue: Callable[[], SpillQueue] | None = None,
        timed_ports: Sequence[int] = (),
    ) -> None:
        """``epochs_in_order``: a wanted input has ended when it has no more records of the current epoch.

        Records before their turn wait in ``epochs_aside``.
        """
        super().__init__(
            ports, epochs_aside=epochs_aside, make_feedback_queue=make_feedback_queue, timed_ports=timed_ports
        )
        self._in_order = epochs_in_order

    def _make_epochs(self, aside: EpochsAside | None) -> GateEpochs:
        assert aside is not None
        self._ordered = OrderedEpochs(self.ports, aside, on_held=self._ready.add, on_data_ended=self.reconsider_wanted)
        return self._ordered

    # -- taking --------------------------------------------------------------------------------------------

    def poll(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        if self._served is not None:
            self._settle_served()
        if self._posted:
            return None, self._posted.popleft()
        if self._reads is FEEDBACK:
            return self._poll_feedback()
        return self._poll_next() or self._poll_others()

    def _poll_others(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        """Set records aside while the next port has none; return a control record, if one is behind them."""
        ready = self._ready
        while ready.queue:
            port = ready.take()
            message = port.peek()
            if message is None or port.state is BLOCKED:
                continue
            if isinstance(message, Control):
                port.take()
                ready.add(port)
                return port, message
            if self._wanted.names == frozenset() and not self._alignment.is_due:
                ready.park(port)
            elif (control := self._set_aside_up_to_control(port)) is not None:
                return port, control
        # If only some inputs are wanted, records that were set aside now may change which port is next.
        if self._wanted.names is not None and (polled := self._poll_next()) is not None:
            return polled
        if self._ending is not None and self._ordered.frontier.all_ended:
            return self._poll_rest(*self._ending)
        return None

    def _poll_next(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        """Return the next item of the port that is next, or an event of the end of its data."""
        epochs, wanted = self._ordered, self._wanted.names
        while (port := epochs.next_port(wanted)) is not None:
            index = port.index
            if index in epochs.ports_aside:
                epochs.hold_due(port)
            if index in epochs.waiting_ends and epochs.lowest_pending(port) is None:
                self._posted.extend(epochs.finish_data(port))
                self._ready.add(port)  # Records of the end of the iteration may follow.
                if self._posted:
                    return None, self._posted.popleft()
                wanted = self._wanted.names
                continue
            if not port.held and port.state is BLOCKED:
                return None
            message = port.peek()
            if isinstance(message, DataBatch):
                is_wanted = wanted is None or port.input_name in wanted
                has_turn = is_wanted and message.epoch == epochs.frontier.reached(index) + 1
                return (port, self._take_batch(port)) if has_turn else None
            if message is None:
                return None
            assert isinstance(message, Control)
            port.take()
            self._ready.add(port)
            return port, message
        return None

    def _set_aside_up_to_control(self, port: Port) -> Control | None:
        """Set aside the records of a port up to a control record; take that record and return it.

        Behind the end of data are records of the end of the iteration. They stay in the channel until the end of data
        has had its turn, and come after all other records.
        """
        epochs = self._ordered
        while isinstance(item := port.peek_behind_held(), DataBatch) and port.index not in epochs.waiting_ends:
            port.take_behind_held()
            epochs.set_aside(port, item)
        if not isinstance(item, Control):
            return None
        port.take_behind_held()
        self._ready.add(port)
        return item

    async def wait(self) -> None:
        # Inputs that have ended may have records that are not wanted now.
        if not self._posted and not self._ready.queue:
            await self._ready.wait()

    def may_continue(self, port: Port) -> bool:
        return super().may_continue(port) and self._ordered.next_port(self._wanted.names) in (port, None)

    def inputs_complete(self, epoch: int) -> list[str]:
        """Return the inputs that bring no more records of this epoch, or of an epoch before it.

        An input is not complete before the ports that come before its ports.
        """
        names = dict.fromkeys(port.input_name for port in self.ports)
        is_open = False
        for port in sorted(self.ports, key=lambda port: not self.is_wanted(port.input_name)):
            is_open = is_open or not self._epochs.is_complete(port, epoch)
            if is_open:
                names.pop(port.input_name, None)
        return list(names)

    # -- for statistics and the watchdog -------------------------------------------------------------------

    @property
    def has_parked(self) -> bool:
        return bool(self._ready.parked or self._ordered.ports_aside)

    def waits_for(self) -> str | None:
        port = None if self._ready.parked else self._ordered.next_port(self._wanted.names)
        return None if port is None else f"its records come after those of {port.channel.name}"

    # -- control records and state -------------------------------------------------------------------------

    def _input_ended(self, port: Port, end: EndOfInput) -> list[Control]:
        port.end()
        events = self._epochs.bring_end_of_data(port)
        if self._all_ended():
            if (triggered := self._alignment.inputs_ended()) is not None:
                events.append(triggered)
            self._ending = port, end
        return events + self._aligned()

    def snapshot(self) -> dict[str, PlainValue]:
        return super().snapshot() | {"merges in order": 1}

    def takes(self, state: dict[str, PlainValue]) -> bool:
        # An earlier version has made a snapshot without this entry. Its held records may be before and behind others.
        return bool(state.get("merges in order", not state["held"]))
