"""The log of a port: everything that one input channel of a task has brought and the task has not handled, in order.

A :class:`Port` stands for one channel. What waits there stays in its log: what was *set aside*, then the items in the
channel. Items that were set aside have left the channel before their turn. They stay in memory in the order of their
arrival; or, if the task handles epochs in order, :class:`LaterEpochs` keeps the records by epoch, on disk where they
are many, and :class:`~streamiter.engine.inbox.order.Marks` keeps the control records behind them. A port also joins
small batches, and cuts large ones. :class:`ReadyPorts` keeps the order in which an inbox reads its ports, and
:class:`FeedbackAside` the feedback in their logs that is not admitted yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, final

from streamiter.engine.graph.channels import LIMIT_BYTES, Channel
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.order import BEFORE_ALL_EPOCHS, Marks
from streamiter.engine.inbox.turn import TurnSize
from streamiter.operators.source import SourceBatch
from streamiter.values.deferred import Deferred, PlainValue, entries_of
from streamiter.values.records import (
    BATCH_RECORDS,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfInput,
    ReadToEnd,
    can_concatenate,
    concatenate,
    control_from_plain,
    control_to_plain,
    estimated_bytes,
)

if TYPE_CHECKING:
    from streamiter.engine.storage.disk_queue import SpillQueue, SpillStatistics
    from streamiter.values.plain_data import PlainData

Item: TypeAlias = DataBatch | SourceBatch | Control


class PortOrigin(NamedTuple):
    """The origin of the records of a port. A restored snapshot uses it to find the port again."""

    input_name: str
    """The input that the port belongs to."""
    upstream: str
    """The name of the step that emits the records."""
    tag: str | None
    """The name of the side output of that step, or None for its main output."""
    edge: int
    """The number of the edge, if several edges connect the same output with the same input."""
    subtask: int
    """The subtask of the upstream step."""


@final
class Port:
    """One input channel of a task, and the log of what waits there. Only its inbox uses it."""

    def __init__(
        self,
        index: int,
        input_name: str,
        channel: Channel | FeedbackChannel,
        *,
        one_at_a_time: bool = False,
        origin: PortOrigin | None = None,
    ) -> None:
        """``one_at_a_time``: hand over single records; feedback then arrives between two records of a mini-batch."""
        self.index = index
        self.origin = origin
        """None if the port belongs to a source."""
        self.one_at_a_time = one_at_a_time
        self.input_name = input_name
        self.channel = channel
        self.feedback = channel if isinstance(channel, FeedbackChannel) else None
        self.is_feedback = self.feedback is not None
        self.is_own = False
        """Whether the task itself feeds these records back. The task sets it."""
        self.is_blocked = False
        """Whether the channel has brought a barrier, and nothing more is read from it until the barrier has passed."""
        self.end: EndOfInput | None = None
        """The end of the input, if it has left the log."""
        self.held: deque[Item] = deque()
        """Items that were set aside, or given back, in order. They come before those in ``later`` and the channel."""
        self._held_bytes: deque[int] = deque()
        """The estimated size of each held item, if held items count toward the limits of the channel."""
        self.in_hand: tuple[int, int] | None = None
        """The number and the estimated size of held records that the task handles now, and which still take room."""
        self._bounded = channel if isinstance(channel, Channel) else None
        self.later: LaterEpochs | None = None
        """Records that were set aside, by epoch; None if they are handled as they arrive."""
        self.marks = Marks()
        self.arrived = BEFORE_ALL_EPOCHS
        """The last epoch watermark that has arrived."""
        self.turn_size: TurnSize | None = None
        """The number of records for one turn, if batches are cut."""
        self.is_queued = False
        """Whether the inbox reads it soon; see :class:`ReadyPorts`."""

    @property
    def has_ended(self) -> bool:
        return self.end is not None

    # -- settings ------------------------------------------------------------------------------------

    def set_aside_by_epoch(self, make_queue: Callable[[], SpillQueue]) -> None:
        """Set records aside by epoch, in a queue on disk.

        They then do not count toward the limits of the channel. If they filled it, the end of their epoch could not
        arrive.
        """
        self._bounded = None
        self.later = LaterEpochs(make_queue())

    def make_way(self, makes_way: bool) -> None:
        """Choose whether the channel admits items however much is held, because a barrier is behind them."""
        if self._bounded is not None:
            self._bounded.make_way(makes_way)

    # -- what comes next -----------------------------------------------------------------------------

    def peek(self) -> Item | None:
        """Return the next item without taking it, or None."""
        return self.held[0] if self.held else self.channel.peek()

    def take(self) -> Item:
        """Take the next item."""
        return self._take_held() if self.held else self.channel.take()

    def set_aside(self, item: DataBatch | Control) -> None:
        """Put an item that was taken from the channel behind all that was set aside before."""
        if self.later is not None and isinstance(item, DataBatch):
            self.later.put(item)
            return
        self.held.append(item)
        if self._bounded is not None:
            self._held_bytes.append(self._take_room(item))

    def hold_up_to_barrier(self) -> Control | None:
        """Set aside all that the channel brings before its barrier; return the barrier, or the end of the input.

        An input that is not wanted would otherwise delay its barrier without end, while the wanted input is blocked
        behind its own barrier. What is set aside takes room in the channel once the barrier has arrived.

        This alone would not bound it: the channels upstream fill again after each barrier, and admit everything before
        the next one. So if more is set aside than fits into all channels between the port and the sources, these
        sources stop reading (``Channel.shut_intakes``). At most as many records still follow, for any number of
        barriers: they were in these channels, in the lanes before them, or had been read. A source that would read on
        without barriers is not stopped: with so many unhandled records, it would wait for room in its first channel.
        """
        self.make_way(True)
        while self.channel.peek() is not None:
            taken = self.channel.take()
            assert not isinstance(taken, SourceBatch)
            if isinstance(taken, CheckpointBarrier):
                return taken
            self.set_aside(taken)
            if isinstance(taken, EndOfInput):
                return taken
        return None

    def put_back(self, item: DataBatch | SourceBatch) -> None:
        """Give back the rest of a batch that was taken; it comes before all other items."""
        self.held.appendleft(item)
        if self._bounded is not None:
            self._held_bytes.appendleft(self._take_room(item))

    def load(self, epoch: int) -> None:
        """Hold the next records of this epoch that were set aside: as many as a channel holds."""
        if self.held or self.later is None or not self.later.counts:
            return
        size_bytes = 0
        while size_bytes < LIMIT_BYTES and (batches := self.later.take_next(epoch)):
            self.held += batches
            if epoch in self.later.counts:
                size_bytes += sum(estimated_bytes(batch.records) for batch in batches)

    @property
    def lowest(self) -> int | None:
        """The lowest epoch of the records that were set aside, and that control records wait for; None without any.

        No control record waits for feedback: a loop counts the feedback that it has received before it continues.
        """
        later = self.later
        return None if later is None or self.is_feedback or not (self.held or later.counts) else self.first_epoch

    @property
    def first_epoch(self) -> int | None:
        """The lowest epoch of the records that were set aside by epoch; None without any."""
        return min(self._waiting_epochs(), default=None)

    @property
    def highest(self) -> int:
        """The highest epoch of the records that were set aside by epoch; ``BEFORE_ALL_EPOCHS`` without any."""
        return max(self._waiting_epochs(), default=BEFORE_ALL_EPOCHS)

    def _waiting_epochs(self) -> Collection[int]:
        if self.later is None or not self.held:
            return () if self.later is None else self.later.counts
        return {*self.later.counts, *(item.epoch for item in self.held if isinstance(item, DataBatch))}

    # -- room in the channel ---------------------------------------------------------------------------

    def release(self) -> None:
        """Free the room in the channel of the held records that are handled now."""
        if self.in_hand is not None:
            assert self._bounded is not None
            self._bounded.release(*self.in_hand)
            self.in_hand = None

    def _take_held(self) -> Item:
        # The room stays taken until the records are handled. Otherwise a slow step that has taken all held records
        # would seem to hold none.
        item = self.held.popleft()
        if self._bounded is not None:
            size_bytes = self._held_bytes.popleft()
            if not isinstance(item, Control):
                records, before_bytes = self.in_hand or (0, 0)
                self.in_hand = records + len(item.records), before_bytes + size_bytes
        return item

    def _take_room(self, item: Item) -> int:
        """Count an item toward the limits of the channel; return the estimated size of its records."""
        if self._bounded is None or isinstance(item, Control):
            return 0
        size_bytes = estimated_bytes(item.records)
        self._bounded.set_aside(len(item.records), size_bytes)
        return size_bytes

    @property
    def held_records(self) -> int:
        held = sum(len(item.records) for item in self.held if not isinstance(item, Control))
        return held if self.later is None else held + self.later.statistics().records

    # -- batches -----------------------------------------------------------------------------------------

    def take_batch(self) -> DataBatch | SourceBatch:
        """Take the next batch, joined with small batches that follow it, or cut."""
        # Held records are not joined with records in the channel: each turn would empty the channel, and its limits
        # would have no effect.
        from_held = bool(self.held)
        first = self._take_held() if from_held else self.channel.take()
        if type(first) is not DataBatch:
            assert isinstance(first, SourceBatch)
            return self._cut_source(first)
        if self.one_at_a_time:
            return self._first_record(first)
        # An operator that falls behind gets batches as large as the largest of a topic reader, which take less time for
        # each record.
        at_most = BATCH_RECORDS if self.turn_size is None else self.turn_size.records
        if len(first.records) >= at_most:
            return first if self.turn_size is None else self._cut(first, at_most)
        following = self.held[0] if self.held else self.channel.peek()
        return self._joined(first, following, from_held, at_most) if isinstance(following, DataBatch) else first

    def _cut_source(self, batch: SourceBatch) -> SourceBatch:
        """Return as much of the batch as fits into a turn, and give back the rest."""
        if self.turn_size is None or batch.positions_after is None or len(batch.records) <= self.turn_size.records:
            return batch
        first, rest = batch.cut(self.turn_size.records)
        self.put_back(rest)
        return first

    def _cut(self, batch: DataBatch, at_most: int) -> DataBatch:
        length = len(batch.records)
        if length == at_most:
            return batch
        self.put_back(batch[at_most:length])
        return batch[:at_most]

    def _joined(self, first: DataBatch, following: Item | None, from_held: bool, at_most: int) -> DataBatch:
        joined, length, origin = [first.records], len(first.records), first.origin
        # Feedback may be larger than its memory limit and wait on disk, so the joined batch is limited in bytes, too.
        room_bytes = LIMIT_BYTES - estimated_bytes(first.records) if self.is_feedback else None
        while (
            isinstance(following, DataBatch)
            and bool(self.held) == from_held
            and following.epoch == first.epoch
            and length + len(following.records) <= at_most
            and can_concatenate(first.records, following.records)
        ):
            if room_bytes is not None and (room_bytes := room_bytes - estimated_bytes(following.records)) < 0:
                break
            self.take()
            joined.append(following.records)
            if origin is not None:
                origin = origin.joined(following.origin)
            length += len(following.records)
            following = self.peek()
        return DataBatch(concatenate(joined), first.epoch, origin)

    def _first_record(self, batch: DataBatch) -> DataBatch:
        """Return the first record. The others are held one by one, so that each is cut out only once."""
        for index in range(len(batch.records) - 1, 0, -1):
            self.put_back(batch[index : index + 1])
        return batch if len(batch.records) == 1 else batch[:1]

    # -- state -------------------------------------------------------------------------------------------

    def snapshot(self, *, end_waits: bool) -> dict[str, PlainValue]:
        """Return the items of the log in order, without those in the channel, as plain data.

        ``end_waits``: the end of the input has arrived and is behind them.
        """
        behind = [*self.marks.snapshot(), *([self.end] if self.end is not None and end_waits else [])]
        return {
            "origin": None if self.origin is None else tuple(self.origin),
            # A restored source reads the rest of its batch again, because its positions are before that rest.
            "held": [_plain(item) for item in self.held if not isinstance(item, (SourceBatch, ReadToEnd))],
            "later": None if self.later is None else self.later.snapshot(),
            "behind": [control_to_plain(control) for control in behind],
            "ended": self.has_ended and not end_waits,
        }

    def restore(self, state: dict[str, PlainValue], plain_data: PlainData) -> None:
        """Set aside all items of a state. Control records among them act, or wait as marks, when they are read."""
        self.end = EndOfInput() if state["ended"] else None
        for plain in chain(state["held"], entries_of(state["later"] or ()), state["behind"]):
            if self.later is not None and plain[0] == DataBatch.kind:
                self.later.put_plain(plain)
            else:
                self.set_aside(_item_of(plain, plain_data))

    def close(self) -> None:
        if self.later is not None:
            self.later.close()


def _plain(item: Item) -> tuple[PlainValue, ...]:
    if isinstance(item, DataBatch):
        return item.kind, item.epoch, len(item.records), item.records
    assert isinstance(item, Control)
    return control_to_plain(item)


def _item_of(plain: Sequence[PlainValue], plain_data: PlainData) -> DataBatch | Control:
    """Return the item of a log that a snapshot has as plain data; the records of a batch may be encoded."""
    if plain[0] == DataBatch.kind:
        _, epoch, _, records = plain
        return DataBatch(plain_data.decode_batch(records) if isinstance(records, bytes) else records, epoch)
    return control_from_plain(plain)


@final
class LaterEpochs:
    """Batches whose epoch's turn has not come, in a queue that continues on disk.

    They wait in the order of their arrival. If that is the order of their epochs, as it mostly is, they are taken one
    by one. Otherwise the whole queue is read once, and all batches of the epoch are in memory. A batch that waits alone
    is in memory in any case, so the queue need not measure it.
    """

    def __init__(self, queue: SpillQueue) -> None:
        self._spilling = queue
        self._alone: DataBatch | None = None
        """The only batch; None if there may be several, or none."""
        self.counts: dict[int, int] = {}
        """The number of waiting batches of each epoch. Others only read it."""

    def __bool__(self) -> bool:
        return bool(self.counts)

    @property
    def _queue(self) -> SpillQueue:
        """The queue, with all batches that wait: one that waits alone joins it now."""
        alone, self._alone = self._alone, None
        if alone is not None:
            self._spilling.put(alone)
        return self._spilling

    def put(self, batch: DataBatch) -> None:
        if self.counts:
            self._queue.put(batch)
        else:
            self._alone = batch
        self.counts[batch.epoch] = self.counts.get(batch.epoch, 0) + 1

    def put_plain(self, entry: Sequence[PlainValue]) -> None:
        """Put a batch as a snapshot has it; an encoded one is not decoded if it goes to disk."""
        self._queue.put_plain(entry)
        self.counts[entry[1]] = self.counts.get(entry[1], 0) + 1

    def take_alone(self) -> DataBatch | None:
        """Take the only batch, which has not been in the queue; return None if there may be several."""
        taken, self._alone = self._alone, None
        if taken is not None:
            self.counts.clear()
        return taken

    def take_next(self, epoch: int) -> list[DataBatch]:
        """Take the next batches of this epoch; return an empty list if there are none.

        Mostly it is one batch, so that the others stay on disk. If batches of other epochs are in front of it, all
        batches of the epoch are taken.
        """
        if not (count := self.counts.pop(epoch, 0)):
            return []
        queue = self._queue
        first = queue.memory[0][0] if queue.memory else queue.peek()
        assert isinstance(first, DataBatch)
        if first.epoch != epoch:
            return self._take_from_between(epoch, count)
        queue.take()
        if count > 1:
            self.counts[epoch] = count - 1
        return [first]

    def _take_from_between(self, epoch: int, count: int) -> list[DataBatch]:
        """Take the batches of one epoch. The queue is read once as a whole, so the others keep their order."""
        queue, taken = self._queue, list[DataBatch]()
        for _ in range(len(queue)):
            batch = queue.take()
            assert isinstance(batch, DataBatch)
            if batch.epoch == epoch:
                taken.append(batch)
            else:
                queue.put(batch)
        assert len(taken) == count
        return taken

    def snapshot(self) -> Deferred | None:
        return self._queue.snapshot() if self.counts else None

    def statistics(self) -> SpillStatistics:
        return self._queue.statistics()

    def close(self) -> None:
        self.counts, self._alone = {}, None
        self._spilling.close()


@final
class ReadyPorts:
    """The ports that an inbox reads next, each of them once, and the parked ports.

    A port is parked while it has something, but its input is not wanted. It may also be in the queue, until the inbox
    sees that its input still is not wanted.
    """

    def __init__(self) -> None:
        self.queue: deque[Port] = deque()
        """The ports in their order. The inbox takes them, and notes that they are not queued any more."""
        self.parked: dict[Port, None] = {}
        """In the order in which they were parked. Only this class changes it."""
        self.waiter: asyncio.Future[None] | None = None
        """The future that ``news`` has returned, if it is not done. Only this class changes it."""

    def add(self, port: Port) -> None:
        """Put a port behind the others and wake the inbox, unless the port is blocked or in the queue already."""
        if port.is_queued or port.is_blocked:
            return
        port.is_queued = True
        self.queue.append(port)
        if self.waiter is not None:
            self.wake()

    def news(self) -> asyncio.Future[None]:
        """Return a future that is done when a port is added, or ``wake`` is called."""
        self.waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def park(self, port: Port) -> None:
        self.parked[port] = None

    def unpark(self) -> None:
        """Read the parked ports again."""
        parked, self.parked = self.parked, {}
        for port in parked:
            self.add(port)


class InputCounts(Protocol):
    """The numbers of the records and batches that an operator was given."""

    records_in: int
    batches_in: int


@final
class FeedbackAside:
    """Feedback that a head has received and does not admit yet: it is set aside, in the logs of its ports, by epoch."""

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        """``ports`` bring feedback. ``make_queue`` makes a queue for what one of them sets aside."""
        self._ports = ports
        self._make_queue = make_queue
        self._received: Callable[[int, int], bool | None] | None = None
        self.counts: InputCounts | None = None
        """Gets the numbers of what is set aside, as input of the operator. The task sets it."""

    def begin(self, received: Callable[[int, int], bool | None]) -> None:
        """Set feedback aside that is not admitted.

        ``received`` gets the epoch and the number of records of each batch that arrives, and returns whether it is
        kept. Control records of feedback pass it: the loop must know that an epoch was received before it is admitted.
        """
        self._received = received
        for port in self._ports:
            assert self._make_queue is not None
            port.set_aside_by_epoch(self._make_queue)

    def put(self, port: Port, batch: DataBatch) -> None:
        """Set aside feedback that has arrived at this port, or drop it."""
        if self._received is None:
            return
        length = len(batch.records)
        if self.counts is not None:
            self.counts.records_in += length
            self.counts.batches_in += 1
        if self._received(batch.epoch, length):
            assert port.later is not None
            port.later.put(batch)

    def drop(self) -> None:
        """Keep nothing more, and count nothing more."""
        self._received = None

    def take(self, up_to_epoch: int) -> tuple[DataBatch | None, bool]:
        """Take the next feedback of these epochs that was set aside, by (epoch, port); say whether more waits."""
        first, lowest, waiting = None, up_to_epoch + 1, 0
        for port in self._ports:
            later = port.later
            if later is not None and (later.counts or port.held):
                epoch = port.first_epoch if port.held else min(later.counts)
                if epoch is not None and epoch <= up_to_epoch:
                    waiting += 1
                    if epoch < lowest:
                        first, lowest = port, epoch
        if first is None or (later := first.later) is None:
            return None, False
        if not first.held and (alone := later.take_alone()) is not None:
            return alone, waiting > 1
        first.load(lowest)
        batch, following = first.held.popleft(), first.first_epoch
        assert isinstance(batch, DataBatch)
        return batch, waiting > 1 or (following is not None and following <= up_to_epoch)

    def statistics(self) -> list[SpillStatistics]:
        """Return the numbers of the queues."""
        return [port.later.statistics() for port in self._ports if port.later is not None]
