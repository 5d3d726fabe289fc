"""Epochs at a gate: the watermark, the ends of data, and records of later epochs.

:class:`GateEpochs` turns what the ports bring into control records for the task. If an operator handles epochs in
order, :class:`EpochsAside` keeps records of later epochs until the turn of their epoch comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from streamiter.channels import LIMIT_BYTES
from streamiter.checkpoints.disk_queue import SpillQueue, SpillStatistics
from streamiter.deferred import Deferred, PlainValue
from streamiter.errors import InternalError
from streamiter.operators.frontier import Frontier
from streamiter.records import Control, DataBatch, EndOfData, EndOfInput, EpochWatermark, Idle, estimated_bytes
from streamiter.runtime.port import Port


@final
class InputEnded(Control):
    """No channel of this input brings data any more."""

    __slots__ = ("input_name",)

    def __init__(self, input_name: str) -> None:
        self.input_name = input_name


@final
class RestHandled(Control):
    """All inputs have ended, and all records that were set aside have been handled. ``end`` follows now."""

    __slots__ = ("end",)

    def __init__(self, end: EndOfInput) -> None:
        self.end = end


BEFORE_ALL_EPOCHS: Final = -1
"""The watermark of a channel that has brought none."""


class GateEpochs:
    """Follows the epochs of all ports, and decides which control records the task gets.

    If the operator has ``epochs_in_order``, records of later epochs are set aside. A watermark then counts only after
    the task has handled the records of its epochs; until then it is withheld.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        aside: EpochsAside | None,
        *,
        on_held: Callable[[Port], None],
        on_data_ended: Callable[[], None],
    ) -> None:
        """``on_held`` is called with a port that has records to handle again, ``on_data_ended`` when data has ended."""
        self.frontier = Frontier(range(len(ports)), BEFORE_ALL_EPOCHS)
        self._ports = ports
        self._aside = aside
        self._on_held = on_held
        self._on_data_ended = on_data_ended
        self.idle: set[int] = set()
        """The ports that have brought ``Idle`` and no data since, by index. Others only read it."""
        self._withheld: list[float | None] = [None] * len(ports)
        """By port: the withheld watermark; infinity stands for the end of data."""
        self._data_epochs = [BEFORE_ALL_EPOCHS] * len(ports)
        """By port: the epoch that the end of its data completes."""
        self._last_turn: int | None = None
        """After the end of all inputs: the epoch of the records that are handled now. It has no watermark."""

    # -- records -------------------------------------------------------------------------------------------

    def is_early(self, batch: DataBatch) -> bool:
        """Return whether the turn of the batch's epoch has not come."""
        return self._aside is not None and batch.epoch > self.frontier.value + 1

    def set_aside(self, port: Port, batch: DataBatch) -> None:
        assert self._aside is not None
        self.idle.discard(port.index)
        self._aside.put(port.index, batch)

    def end_idleness(self, port: Port) -> None:
        """Note that the task takes data of this port, so that the port is not idle any more."""
        self.idle.discard(port.index)

    def is_withheld(self, port: Port) -> bool:
        """Return whether a watermark of this port waits until its records have been handled."""
        return self._withheld[port.index] is not None

    @property
    def turn(self) -> int:
        """The epoch whose turn it is, if epochs are handled in order."""
        return self.frontier.value + 1 if self._last_turn is None else self._last_turn

    def start_last_turn(self, epoch: int) -> None:
        self._last_turn = epoch

    def turn_of(self, port: Port) -> int:
        """Return the epoch of the records of this port that have their turn now."""
        return self.turn

    def hold_due(self, port: Port) -> None:
        """Let a port hold the next records of this epoch that were set aside: as many as a channel holds."""
        if self._aside is None or port.held:
            return
        size_bytes, epoch = 0, self.turn_of(port)
        while size_bytes < LIMIT_BYTES and (batches := self._aside.take_next(port.index, epoch)):
            for batch in batches:
                port.hold(batch)
            size_bytes += sum(estimated_bytes(batch.records) for batch in batches)

    def report_due(self) -> None:
        """Report the ports of which records were set aside for the current epoch."""
        if self._aside is not None:
            for port in self._ports:
                if self._aside.has(port.index, self.turn):
                    self._on_held(port)

    def lowest_pending(self, port: Port) -> int | None:
        """Return the lowest epoch of the records of this port that are held or set aside, or None."""
        if self._aside is None:
            return None
        aside = self._aside.lowest_epoch(port.index)
        if not port.held:
            return aside
        epochs = [item.epoch for item in port.held if isinstance(item, DataBatch)]
        return min(epochs if aside is None else [*epochs, aside], default=None)

    def highest_pending(self, port: Port) -> int | None:
        """Return the highest epoch of the records of this port that are held or set aside, or None."""
        if self.lowest_pending(port) is None:
            return None
        assert self._aside is not None
        held = [item.epoch for item in port.held if isinstance(item, DataBatch)]
        return max([*held, *self._aside.epochs(port.index)])

    def is_complete(self, port: Port, epoch: int) -> bool:
        """Return whether all records of this port up to this epoch have been handled."""
        lowest = self.lowest_pending(port)
        has_come = self.data_has_ended(port) or port.has_ended or self.frontier.reached(port.index) >= epoch
        return has_come and (lowest is None or lowest > epoch)

    def data_has_ended(self, port: Port) -> bool:
        return self.frontier.has_ended(port.index)

    @property
    def records_aside(self) -> int:
        return 0 if self._aside is None else sum(queue.records for queue in self._aside.statistics())

    # -- control records of ports ------------------------------------------------------------------------------------

    def bring_watermark(self, port: Port, epoch: int) -> list[Control]:
        if self.lowest_pending(port) is not None:
            self._withheld[port.index] = epoch
            return self.settle(port)
        return self._reach(port.index, epoch)

    def settle(self, port: Port) -> list[Control]:
        """Count the withheld watermark of a port as far as its records have been handled."""
        withheld = self._withheld[port.index]
        if withheld is None:
            return []
        lowest = self.lowest_pending(port)
        if lowest is None:
            self._withheld[port.index] = None
            if withheld == math.inf:
                return self.finish_data(port)
            return self._reach(port.index, int(withheld))
        reached = int(min(withheld, lowest - 1))
        return self._reach(port.index, reached)

    def bring_end_of_data(self, port: Port, epoch: int | None = None) -> list[Control]:
        """Note that a port has brought the end of its data, which completes ``epoch``."""
        if epoch is not None:
            self._data_epochs[port.index] = epoch
        if self.lowest_pending(port) is None:
            return self.finish_data(port)
        self._withheld[port.index] = math.inf
        return self.settle(port)

    def finish_data(self, port: Port) -> list[Control]:
        """Note that the data of a port has ended and been handled."""
        if self.data_has_ended(port):
            return []
        others = (each for each in self._ports if each.input_name == port.input_name and each is not port)
        events: list[Control] = []
        if all(map(self.data_has_ended, others)):
            events.append(InputEnded(port.input_name))
        self.frontier.end(port.index, self._data_epochs[port.index])
        moved = self._moved()
        # At the end of an iteration the end of input follows. Operators emit at that end, so the data has not ended.
        only_data = self.frontier.all_ended and not self.ends_with_input(port)
        events += [EndOfData(self.frontier.value)] if only_data else moved
        events += self._all_idle()
        self._on_data_ended()
        return events

    def ends_with_input(self, port: Port) -> bool:
        """Return whether the data of a port, which has ended, ends with the input."""
        return port.has_ended

    def bring_idle(self, port: Port) -> list[Control]:
        self.idle.add(port.index)
        return self._all_idle()

    def _all_idle(self) -> list[Control]:
        """Return ``Idle`` if a channel is idle and no other channel brings data."""
        unfinished = {port.index for port in self._ports if not self.data_has_ended(port)}
        return [Idle()] if unfinished and unfinished <= self.idle else []

    def _reach(self, port: int, epoch: int) -> list[Control]:
        if epoch < (before := self.frontier.reached(port)):
            name = self._ports[port].channel.name
            raise InternalError(f"{name}: expected watermarks that only grow, given {epoch} after {before}")
        self.frontier.reach(port, epoch)
        return self._moved()

    def _moved(self) -> list[Control]:
        if not self.frontier.settle():
            return []
        self.report_due()
        return [EpochWatermark(self.frontier.value)]

    # -- state ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, PlainValue]:
        return {
            "watermarks": [self.frontier.reached(port.index) for port in self._ports],
            "aside": [] if self._aside is None else self._aside.snapshot(),
            "data_ended": [int(self.data_has_ended(port)) for port in self._ports],
            "data_epochs": list(self._data_epochs),
            "deferred": list(self._withheld),
        }

    def restore(self, state: dict[str, PlainValue]) -> None:
        for port, (reached, ended) in enumerate(zip(state["watermarks"], state["data_ended"], strict=True)):
            self.frontier.reach(port, reached)
            if ended:
                self.frontier.end(port)
        self.frontier.settle()
        self._data_epochs = list(state["data_epochs"])
        self._withheld = list(state["deferred"])
        if self._aside is not None:
            self._aside.restore(state["aside"])

    def close(self) -> None:
        if self._aside is not None:
            self._aside.close()


class EpochsAside:
    """Batches whose epoch's turn has not come: one queue for each port, which continues on disk.

    Batches wait in the order of their arrival. If that is the order of their epochs, as it mostly is, they are taken
    one by one. Otherwise the whole queue is read once, and all batches of the epoch are in memory.
    """

    def __init__(self, make_queue: Callable[[], SpillQueue]) -> None:
        self._make_queue = make_queue
        self._queues: dict[int, SpillQueue] = {}
        self._batches: dict[int, dict[int, int]] = {}
        """By port: the number of waiting batches of each epoch."""

    def put(self, port: int, batch: DataBatch) -> None:
        self._queue(port).put(batch)
        batches = self._batches[port]
        batches[batch.epoch] = batches.get(batch.epoch, 0) + 1

    def lowest_epoch(self, port: int) -> int | None:
        batches = self._batches.get(port)
        return min(batches) if batches else None

    def epochs(self, port: int) -> Iterable[int]:
        """Return the epochs of the batches of a port."""
        return self._batches.get(port, {})

    def first(self) -> tuple[int, int] | None:
        """Return the lowest epoch of all, and the lowest port that has batches of it; None if there are none."""
        first = None
        for port, batches in self._batches.items():
            if batches and (first is None or (min(batches), port) < first):
                first = min(batches), port
        return first

    def has(self, port: int, epoch: int) -> bool:
        return epoch in self._batches.get(port, ())

    def take_next(self, port: int, epoch: int) -> list[DataBatch]:
        """Take the next batches of this port and this epoch; return an empty list if there are none.

        It is one batch, so that the others stay on disk. If batches of other epochs are before it, it is all batches
        of the epoch.
        """
        if not self.has(port, epoch):
            return []
        queue, batches = self._queues[port], self._batches[port]
        first = queue.peek()
        assert isinstance(first, DataBatch)
        if first.epoch != epoch:
            return self._take_from_between(queue, epoch, batches.pop(epoch))
        queue.take()
        batches[epoch] -= 1
        if not batches[epoch]:
            del batches[epoch]
        return [first]

    def _take_from_between(self, queue: SpillQueue, epoch: int, count: int) -> list[DataBatch]:
        """Take the batches of one epoch. The queue is read once as a whole, so the others keep their order."""
        taken: list[DataBatch] = []
        for _ in range(len(queue)):
            batch = queue.take()
            assert isinstance(batch, DataBatch)
            if batch.epoch == epoch:
                taken.append(batch)
            else:
                queue.put(batch)
        assert len(taken) == count
        return taken

    def snapshot(self) -> list[tuple[int, Deferred, list[tuple[int, int]]]]:
        return [
            (port, queue.snapshot(), sorted(self._batches[port].items()))
            for port, queue in self._queues.items()
            if len(queue)
        ]

    def restore(self, state: Iterable[tuple[int, Iterable[PlainValue], list[tuple[int, int]]]]) -> None:
        for port, frames, batches in state:
            self._queue(port).refill(frames)
            self._batches[port] = dict(batches)

    def statistics(self) -> list[SpillStatistics]:
        return [queue.statistics() for queue in self._queues.values()]

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        self._batches.clear()

    def _queue(self, port: int) -> SpillQueue:
        if port not in self._queues:
            self._queues[port] = self._make_queue()
            self._batches[port] = {}
        return self._queues[port]
