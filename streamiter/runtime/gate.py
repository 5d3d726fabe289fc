"""The gate: where the channels of a task come together.

It takes turns among the channels that have something and whose input is wanted, aligns barriers, follows
the epoch watermark, and sets aside what must wait. It decides nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, final

from streamiter.errors import ConfigurationError
from streamiter.operators.source import SourceBatch
from streamiter.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    can_concatenate,
    concatenate,
    slice_batch,
)
from streamiter.runtime.epochs_aside import EpochsAside
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS, WatermarkTracker

__all__ = ["BarrierReturned", "BarrierTrigger", "Gate", "InputEnded", "Port", "ReadableChannel", "plain_log"]

# Small batches that wait in a channel are joined up to this many records, so that work comes in larger
# pieces the further an operator has fallen behind. As large as a topic reader's largest batch.
_JOINED_RECORDS: Final = 8192


@final
class InputEnded(Control):
    """No data will come on any channel of this input."""

    __slots__ = ("input_name",)

    def __init__(self, input_name: str) -> None:
        self.input_name = input_name


@final
class BarrierTrigger(Control):
    """Posted by the coordinator to where barriers start, and to tasks that may keep one waiting."""

    __slots__ = ("barrier",)

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier


@final
class BarrierReturned(Control):
    """The barrier of a checkpoint has come back on every feedback channel; ``logged`` came before it."""

    __slots__ = ("checkpoint", "logged")

    def __init__(self, checkpoint: int, logged: list[tuple[int, DataBatch | Control]]) -> None:
        self.checkpoint = checkpoint
        self.logged = logged


@final
class _End(Control):
    """The end of all inputs, kept back until what was set aside has been handled."""

    __slots__ = ("end",)

    def __init__(self, end: EndOfInput) -> None:
        self.end = end


class ReadableChannel(Protocol):
    """The consumer's side of a channel."""

    name: str

    def attach(self, on_ready: Any) -> None: ...
    def peek(self) -> DataBatch | SourceBatch | Control | None: ...
    def take(self) -> DataBatch | SourceBatch | Control: ...
    def clear(self) -> None: ...


@final
class Port:
    """One channel as the gate sees it."""

    __slots__ = (
        "blocked",
        "channel",
        "data_ended",
        "data_epoch",
        "deferred",
        "end_held",
        "ended",
        "held",
        "index",
        "input_name",
        "is_feedback",
        "listed",
        "one_at_a_time",
        "parked",
    )

    def __init__(
        self,
        index: int,
        input_name: str,
        channel: ReadableChannel,
        *,
        is_feedback: bool,
        one_at_a_time: bool = False,
    ) -> None:
        self.index = index
        self.one_at_a_time = one_at_a_time
        """Hand over single records (mini-batches in a loop), so that what is fed back is met in between."""
        self.input_name = input_name
        self.channel = channel
        self.is_feedback = is_feedback
        self.held: deque[DataBatch | Control] = deque()
        """Taken from the channel already, still to be handled, before what is in the channel."""
        self.blocked = False
        """Has brought the barrier that others have not brought yet."""
        self.listed = False
        """Is in the gate's list of ports to look at."""
        self.parked = False
        """Has something, but its input is not wanted now."""
        self.data_ended = False
        self.data_epoch = BEFORE_ALL_EPOCHS
        """The epoch that the end of its data completes."""
        self.ended = False
        self.end_held = False
        """Its end is among what is held: it brings no barrier any more."""
        self.deferred: float | None = None
        """The watermark it has brought (infinity: the end of its data) while records of epochs up to it
        still wait to be handled; it counts once they are."""

    @property
    def is_aligned(self) -> bool:
        """Whether the barrier under way need not wait for it."""
        return self.blocked or self.ended or self.end_held

    def peek(self) -> DataBatch | SourceBatch | Control | None:
        return self.held[0] if self.held else self.channel.peek()


class Gate:
    """The input side of one task; used by that task only."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        epochs_aside: EpochsAside | None = None,
    ) -> None:
        self.ports = list(ports)
        self.tracker = WatermarkTracker(len(self.ports))
        self._ready: deque[Port] = deque()
        self._parked: list[Port] = []
        self._posted: deque[Control] = deque()
        self._wanted: frozenset[str] | None = None
        self._asked_for: tuple[str, ...] | None = None
        self._aside = epochs_aside
        self._waiter: asyncio.Future[None] | None = None
        self._barrier: CheckpointBarrier | None = None
        self._announced: CheckpointBarrier | None = None
        self._triggered: CheckpointBarrier | None = None
        self._logging: CheckpointBarrier | None = None
        self._log: list[tuple[int, DataBatch | Control]] = []
        self._log_open: set[int] = set()
        self._feedback_only = False
        self._served: Port | None = None
        """The port that the last data came from, if its watermark waits for it to be handled."""
        self._ending: tuple[Port, EndOfInput] | None = None
        """The end of all inputs, kept back until what was set aside has been handled."""
        self._returned_early: dict[int, set[int]] = {}
        for port in self.ports:
            port.channel.attach(lambda port=port: self._list(port))
            if port.channel.peek() is not None:
                self._list(port)

    # -- taking --------------------------------------------------------------------------------------

    def poll(self) -> tuple[Port | None, DataBatch | SourceBatch | Control] | None:
        """What is to be handled next and where it came from (None: it was posted); None if nothing is."""
        if self._served is not None:
            served, self._served = self._served, None
            self._posted.extend(self._settle(served))
        if self._posted:
            return None, self._posted.popleft()
        if self._ending is not None:
            return self._poll_rest(*self._ending)
        ready = self._ready
        while ready:
            port = ready.popleft()
            port.listed = False
            message = port.peek()
            if message is None or port.blocked:
                continue
            if self._feedback_only:
                if port.is_feedback:
                    self._take(port)
                    self._list(port)
                    if isinstance(message, CheckpointBarrier):
                        return port, message
                continue
            if isinstance(message, Control):
                self._take(port)
                self._list(port)
                return port, message
            if self._aside is not None and self._is_early(message):
                self._take(port)
                assert isinstance(message, DataBatch)
                self._aside.put(port.index, message)
                self._list(port)
                continue
            if not self.is_wanted(port.input_name):
                if port.is_feedback or not self._barrier_is_due or not self._hold_up_to_barrier(port):
                    self._park(port)
                if self._posted:  # That completed the alignment: nothing that lies behind may come first.
                    return None, self._posted.popleft()
                continue
            if type(message) is SourceBatch:
                self._take(port)
                self._list(port)
                return port, message
            return port, self._take_data(port)
        return None

    async def wait(self) -> None:
        """Return when ``poll`` may have something."""
        if self._posted or self._ready or self._ending is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def put_back(self, port: Port, records: Batch, epoch: int) -> None:
        """Give back the end of a batch that ``poll`` gave: it comes first on its port."""
        port.held.appendleft(DataBatch(records, epoch))
        self._list(port)

    def post(self, control: Control) -> None:
        """Have ``poll`` give this control record next (from any part of the job)."""
        self._posted.append(control)
        self._wake()

    def want(self, input_names: Iterable[str] | None) -> None:
        """Read only these inputs from now on, None for all; if all of them have ended, read all.

        Raises ConfigurationError for a name that no input has.
        """
        asked_for = None if input_names is None else tuple(input_names)
        if asked_for == self._asked_for:
            return
        self._check_names(asked_for or ())
        self._asked_for = asked_for
        self._apply_wanted()

    def is_wanted(self, input_name: str) -> bool:
        """Whether this input is read now."""
        return self._wanted is None or input_name in self._wanted

    @property
    def has_parked(self) -> bool:
        """Whether there is input that is not wanted now."""
        return any(port.parked for port in self.ports)

    def awaited_barriers(self) -> list[str]:
        """The channels whose barrier others wait for; empty while no barrier is on its way."""
        if self._barrier is None:
            return []
        return [port.channel.name for port in self.ports if not port.is_feedback and not port.is_aligned]

    # -- control records -----------------------------------------------------------------------------

    def accept(self, port: Port, control: Control) -> list[Control]:
        """What a control record taken from a port means for the task, in order."""
        if isinstance(control, EpochWatermark):
            if self._lowest_pending(port) is not None:
                port.deferred = control.epoch
                return self._settle(port)
            return self._watermark_moved(self.tracker.advance(port.index, control.epoch))
        if isinstance(control, CheckpointBarrier):
            return self._barrier_returned(port, control) if port.is_feedback else self._align(port, control)
        if isinstance(control, EndOfData):
            port.data_epoch = control.epoch
            return self._data_ended_in_turn(port)
        if isinstance(control, EndOfInput):
            return self._input_ended(port, control)
        if isinstance(control, _End):
            ended = [event for other in self.ports for event in self._data_ended(other)]
            return [*(event for event in ended if isinstance(event, InputEnded)), control.end]
        raise TypeError(f"no control record of a channel: {control!r}")

    def accept_trigger(self, barrier: CheckpointBarrier) -> list[Control]:
        """A barrier given to a boundary itself: it counts where no channel is left that could bring it."""
        if self._all_ended():
            return [barrier]
        self._triggered = barrier
        self.announce(barrier)
        return []

    def announce(self, barrier: CheckpointBarrier) -> None:
        """Be told that this barrier is on its way: inputs that are not wanted must not keep it waiting."""
        if not self._all_ended():
            self._announced = barrier
            self._unpark()

    def only_feedback(self) -> None:
        """From now on take feedback only, and only to log it: the job stops at this barrier."""
        self._feedback_only = True
        for port in self.ports:
            self._list(port)

    def close(self) -> None:
        """Let go of files."""
        if self._aside is not None:
            self._aside.close()

    def start_feedback_log(self, barrier: CheckpointBarrier) -> list[Control]:
        """From now on log what feedback ports bring, until each has brought this barrier back."""
        early = self._returned_early.pop(barrier.checkpoint, set())
        self._log = []
        self._log_open = {port.index for port in self.ports if port.is_feedback} - early
        self._logging = barrier
        self._unblock(port for port in self.ports if port.is_feedback)
        return self._log_complete()

    @property
    def has_feedback(self) -> bool:
        """Whether a loop comes back to this task."""
        return any(port.is_feedback for port in self.ports)

    # -- state ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Plain data: the watermarks, and what was taken from the channels but not handled."""
        return {
            "watermarks": self.tracker.snapshot(),
            "held": [_plain(port.index, item) for port in self.ports for item in port.held],
            "aside": [] if self._aside is None else self._aside.snapshot(),
            "data_ended": [int(port.data_ended) for port in self.ports],
            "data_epochs": [port.data_epoch for port in self.ports],
            "ended": [int(port.ended) for port in self.ports],
            "deferred": [port.deferred for port in self.ports],
        }

    def restore(self, state: dict[str, Any], logged: Sequence[tuple[Any, ...]] = ()) -> None:
        """Take over what ``snapshot`` gave, and feedback that was logged after it."""
        self.tracker.restore(state["watermarks"])
        for port, data_ended, ended in zip(self.ports, state["data_ended"], state["ended"], strict=True):
            port.data_ended, port.ended = bool(data_ended), bool(ended)
        for port, deferred, epoch in zip(self.ports, state["deferred"], state["data_epochs"], strict=True):
            port.deferred, port.data_epoch = deferred, epoch
        for index, kind, payload, epoch in [*state["held"], *logged]:
            item = DataBatch(payload, epoch) if kind == "data" else _control(kind, epoch)
            self.ports[index].held.append(item)
            self.ports[index].end_held |= isinstance(item, EndOfInput)
            self._list(self.ports[index])
        if self._aside is not None:
            self._aside.restore(state["aside"])

    # -- inside --------------------------------------------------------------------------------------

    def _list(self, port: Port) -> None:
        if not port.listed and not port.blocked:
            port.listed = True
            self._ready.append(port)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _park(self, port: Port) -> None:
        if not port.parked:
            port.parked = True
            self._parked.append(port)

    def _check_names(self, asked_for: Sequence[str]) -> None:
        known = dict.fromkeys(port.input_name for port in self.ports)
        unknown = [name for name in asked_for if name not in known]
        if unknown:
            raise ConfigurationError(
                f"wanted_inputs(): expected names of inputs ({', '.join(known)}), given {unknown[0]!r}; "
                "return a tuple of them, or None for all"
            )

    def _apply_wanted(self) -> None:
        asked_for = self._asked_for
        if asked_for:
            ended = all(
                port.data_ended and not port.held for port in self.ports if port.input_name in asked_for
            )
            self._wanted = None if ended else frozenset(asked_for)
        else:
            self._wanted = None if asked_for is None else frozenset()
        self._unpark()

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for port in parked:
            port.parked = False
            self._list(port)

    def _take(self, port: Port) -> DataBatch | SourceBatch | Control:
        """Take what comes first on a port; feedback is logged when it leaves the channel, so only once."""
        if port.held:
            return port.held.popleft()
        item = port.channel.take()
        if port.is_feedback and port.index in self._log_open and not isinstance(item, CheckpointBarrier):
            assert not isinstance(item, SourceBatch)
            self._log.append((port.index, item))
        return item

    def _take_data(self, port: Port) -> DataBatch:
        self._served = port if port.deferred is not None else None
        batch = self._take_joined(port)
        self._list(port)
        return batch

    def _take_joined(self, port: Port) -> DataBatch:
        # What was put back is not joined with what is still in the channel: that would empty the channel
        # at every turn, and its limit would bound nothing.
        from_held = bool(port.held)
        first = self._take(port)
        assert isinstance(first, DataBatch)
        if port.one_at_a_time:
            return self._take_one(port, first)
        length = len(first.records)
        following = port.peek()
        if not isinstance(following, DataBatch) or length >= _JOINED_RECORDS:
            return first
        joined = [first.records]
        while (
            isinstance(following, DataBatch)
            and bool(port.held) == from_held
            and following.epoch == first.epoch
            and length + len(following.records) <= _JOINED_RECORDS
            and can_concatenate(first.records, following.records)
        ):
            self._take(port)
            joined.append(following.records)
            length += len(following.records)
            following = port.peek()
        return DataBatch(concatenate(joined), first.epoch)

    def _take_one(self, port: Port, batch: DataBatch) -> DataBatch:
        """The first record; the others are held one by one, so that each is cut out only once."""
        records, epoch = batch.records, batch.epoch
        if len(records) == 1:
            return batch
        singles = [
            DataBatch(slice_batch(records, index, index + 1), epoch) for index in range(1, len(records))
        ]
        port.held.extendleft(reversed(singles))
        return DataBatch(slice_batch(records, 0, 1), epoch)

    def _hold_up_to_barrier(self, port: Port) -> bool:
        """Take what lies before the barrier into the port's own buffer; says whether the port is done with.

        An input that is not wanted would otherwise keep its barrier back for ever, while the wanted one
        is blocked by having brought its own.
        """
        while port.channel.peek() is not None:
            taken = port.channel.take()
            assert not isinstance(taken, SourceBatch)
            if isinstance(taken, CheckpointBarrier):
                self._posted.extend(self._align(port, taken))
                return True
            port.held.append(taken)
            if isinstance(taken, EndOfInput):
                port.end_held = True
                self._posted.extend(self._aligned())
        return False

    @property
    def _barrier_is_due(self) -> bool:
        return self._barrier is not None or self._announced is not None

    def _align(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        if self._barrier is None:
            self._barrier = barrier
            self._announced = self._triggered = None
            self._unpark()
        port.blocked = True
        return self._aligned()

    def _aligned(self) -> list[Control]:
        barrier = self._barrier
        if barrier is None or not all(port.is_aligned for port in self.ports if not port.is_feedback):
            return []
        self._barrier = None
        self._unblock(port for port in self.ports if not port.is_feedback)
        return [barrier]

    def _unblock(self, ports: Iterable[Port]) -> None:
        for port in ports:
            if port.blocked:
                port.blocked = False
                self._list(port)

    def _barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        if self._logging is None or self._logging.checkpoint != barrier.checkpoint:
            # The barrier came round before this head has taken its own snapshot: nothing to log here. What
            # comes behind it would be in that snapshot, and come again from those who have taken theirs.
            self._returned_early.setdefault(barrier.checkpoint, set()).add(port.index)
            port.blocked = True
            return []
        self._log_open.discard(port.index)
        return self._log_complete()

    def _log_complete(self) -> list[Control]:
        if self._logging is None or self._log_open:
            return []
        returned = BarrierReturned(self._logging.checkpoint, self._log)
        self._logging = None
        self._log = []
        return [returned]

    def _is_early(self, message: DataBatch | SourceBatch) -> bool:
        return isinstance(message, DataBatch) and message.epoch > self.tracker.watermark + 1

    def _lowest_pending(self, port: Port) -> int | None:
        """The lowest epoch of which this port has brought records that wait for their epoch's turn."""
        if self._aside is None:
            return None
        epochs = [item.epoch for item in port.held if isinstance(item, DataBatch)]
        aside = self._aside.lowest_epoch(port.index)
        return min(epochs if aside is None else [*epochs, aside], default=None)

    def _settle(self, port: Port) -> list[Control]:
        """Let the watermark that a port has brought count as far as its records have been handled."""
        if port.deferred is None:
            return []
        lowest = self._lowest_pending(port)
        if lowest is None:
            deferred, port.deferred = port.deferred, None
            if deferred == math.inf:
                return self._data_ended(port)
            return self._watermark_moved(self.tracker.advance(port.index, int(deferred)))
        reached = int(min(port.deferred, lowest - 1))
        return self._watermark_moved(self.tracker.advance(port.index, reached))

    def _data_ended_in_turn(self, port: Port) -> list[Control]:
        if self._lowest_pending(port) is None:
            return self._data_ended(port)
        port.deferred = math.inf
        return self._settle(port)

    def _watermark_moved(self, watermark: int | None) -> list[Control]:
        if watermark is None:
            return []
        if self._aside is not None:
            for index, batch in reversed(self._aside.take(watermark + 1)):
                port = self.ports[index]
                port.held.appendleft(batch)
                self._list(port)
        return [EpochWatermark(watermark)]

    def _data_ended(self, port: Port) -> list[Control]:
        events: list[Control] = []
        if not port.data_ended:
            port.data_ended = True
            if all(other.data_ended for other in self.ports if other.input_name == port.input_name):
                events.append(InputEnded(port.input_name))
            moved = self._watermark_moved(self.tracker.finish(port.index, port.data_epoch))
            # At the end of an iteration the end itself follows, and emits before anything has ended.
            events += (
                [EndOfData(self.tracker.watermark)] if self.tracker.all_finished and not port.ended else moved
            )
            if self._asked_for is not None:
                self._apply_wanted()
        return events

    def _input_ended(self, port: Port, end: EndOfInput) -> list[Control]:
        port.ended = True
        events: list[Control] = []
        # Where an iteration ends, epochs from there on have no callback: what is left waits for the end.
        if end.epoch is None or self._lowest_pending(port) is None:
            events = self._data_ended_in_turn(port)
        if self._all_ended():
            if self._triggered is not None:
                events.append(self._triggered)
            self._announced = self._triggered = None
            if any(self._lowest_pending(other) is not None for other in self.ports):
                self._ending = port, end
            else:
                events.append(end)
        return events + self._aligned()

    def _poll_rest(self, port: Port, end: EndOfInput) -> tuple[Port, DataBatch | Control]:
        """All inputs have ended: what was set aside, in epoch order, what is wanted first; then the end."""
        assert self._aside is not None
        for index, batch in self._aside.take_all():
            self.ports[index].held.append(batch)
        waiting = [other for other in self.ports if self._lowest_pending(other) is not None]
        if not waiting:
            self._ending = None
            return port, _End(end)
        preferred = [other for other in waiting if self.is_wanted(other.input_name)] or waiting
        following = min(preferred, key=lambda other: self._lowest_pending(other) or 0)
        return following, self._take_data(following)

    def _all_ended(self) -> bool:
        return all(port.ended for port in self.ports if not port.is_feedback)


def plain_log(logged: Iterable[tuple[int, DataBatch | Control]]) -> list[tuple[Any, ...]]:
    """Logged feedback as plain data, in the form that ``Gate.restore`` takes."""
    return [_plain(index, item) for index, item in logged]


def _plain(index: int, item: DataBatch | Control) -> tuple[int, str, Any, int | None]:
    if isinstance(item, DataBatch):
        return index, "data", item.records, item.epoch
    if isinstance(item, EpochWatermark):
        return index, "watermark", None, item.epoch
    if isinstance(item, EndOfInput):
        return index, "end of input", None, item.epoch
    assert isinstance(item, EndOfData), item
    return index, "end of data", None, item.epoch


def _control(kind: str, epoch: int) -> Control:
    if kind == "watermark":
        return EpochWatermark(epoch)
    return EndOfData(epoch) if kind == "end of data" else EndOfInput(epoch)
