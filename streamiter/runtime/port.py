"""The ports of a gate: the input channels of a task, and which of them is read next.

A :class:`Port` stands for one input channel. It keeps items that were taken from the channel before the task can handle
them, joins small batches, and cuts large ones. Its :class:`PortState` tells whether the gate may read from it.
:class:`ReadyPorts` keeps the order in which a gate reads its ports, and :class:`WantedInputs` which inputs the operator
wants. :class:`TurnSize` measures how many records a slow step can handle in one turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from streamiter.channels import LIMIT_BYTES, Channel
from streamiter.errors import ConfigurationError, InternalError
from streamiter.operators.source import SourceBatch
from streamiter.records import (
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfInput,
    can_concatenate,
    concatenate,
    estimated_bytes,
)

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import SpillQueue

# The limit for joining small batches: the size of the largest batch of a topic reader. An operator that falls behind
# gets larger batches, which take less time for each record.
_JOINED_RECORDS: Final = 8192


class PortLog(Protocol):
    """Logs the items of a feedback port from a snapshot until its barrier returns."""

    def put(self, item: DataBatch | Control) -> None: ...


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


class ReadableChannel(Protocol):
    """A channel, as far as its consumer uses it."""

    name: str

    def attach(self, on_ready: Callable[[], None]) -> None: ...
    def peek(self) -> DataBatch | SourceBatch | Control | None: ...
    def take(self) -> DataBatch | SourceBatch | Control: ...
    def clear(self) -> None: ...


class PortState(Enum):
    """How far the channel of a port has come."""

    OPEN = "open"
    """The channel brings data and control records."""
    BLOCKED = "blocked"
    """The channel has brought a barrier. The gate reads no more from it until the barrier has passed."""
    END_HELD = "about to end"
    """The port holds the end of its input, behind data that the task has not handled."""
    ENDED = "ended"
    """The task has handled the end of the input."""


# The gate compares with it for every batch, and Python is slow to look up a member of an enum.
BLOCKED: Final = PortState.BLOCKED


@final
class Port:
    """One input channel of a task, and the items that were taken from it and not handled. Only its gate uses it."""

    def __init__(
        self,
        index: int,
        input_name: str,
        channel: ReadableChannel,
        *,
        is_feedback: bool,
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
        self.is_feedback = is_feedback
        self.held: deque[DataBatch | SourceBatch | Control] = deque()
        """Items that were taken from the channel. They come before the items in the channel."""
        self._held_bytes: deque[int] = deque()
        """The estimated size of each held item, if held items count toward the limits of the channel."""
        self._in_hand: tuple[int, int] | None = None
        """The number and the estimated size of held records that the task handles now."""
        self._bounded = channel if isinstance(channel, Channel) else None
        self.turn_size: TurnSize | None = None
        """The number of records for one turn, if batches are cut."""
        self.log: PortLog | None = None
        """Logs the items that leave the channel, if a checkpoint needs them."""
        self.restored: SpillQueue | None = None
        """The feedback log of the restored checkpoint. Its items come before the items of the channel."""
        self.state = PortState.OPEN
        """Only the methods of the port change it."""

    # -- state ---------------------------------------------------------------------------------------

    def block(self) -> None:
        if self.state is not PortState.OPEN:
            raise InternalError(
                f"{self.channel.name}: expected a barrier on an open channel only, given one on a channel that is "
                f"{self.state.value}"
            )
        self.state = PortState.BLOCKED

    def unblock(self) -> bool:
        """Let the gate read again after a barrier; return whether the port was blocked."""
        if self.state is not PortState.BLOCKED:
            return False
        self.state = PortState.OPEN
        return True

    def end(self) -> None:
        self.state = PortState.ENDED

    @property
    def has_ended(self) -> bool:
        return self.state is PortState.ENDED

    @property
    def brings_no_barrier(self) -> bool:
        """Whether the channel has brought the end of its input."""
        return self.state is PortState.END_HELD or self.state is PortState.ENDED

    @property
    def is_aligned(self) -> bool:
        """Whether the barrier under way need not wait for it."""
        return self.state is not PortState.OPEN

    def log_to(self, log: PortLog | None) -> None:
        """Log what leaves the channel from now on; None: log no more."""
        self.log = log

    def read_ahead(self) -> None:
        """Do not count held items toward the limits of the channel, because the gate reads the items behind them.

        Held items then come from a queue on disk that has its own limits. If they filled the channel, the end of their
        epoch could not arrive.
        """
        self._bounded = None

    def cut_turns(self) -> None:
        """Cut batches from now on, so that a turn of a slow step stays short."""
        if self.turn_size is None:
            self.turn_size = TurnSize()

    # -- what comes next -----------------------------------------------------------------------------

    def peek(self) -> DataBatch | SourceBatch | Control | None:
        """Return the next item without taking it, or None."""
        if self.held:
            return self.held[0]
        return self.channel.peek() if self.restored is None else self._peek_restored(self.restored)

    def take(self) -> DataBatch | SourceBatch | Control:
        """Take the next item. It is logged when it leaves the channel, and so only once."""
        if self.held:
            return self._take_held()
        item = self.channel.take() if self.restored is None else self.restored.take()
        if self.log is not None and not isinstance(item, CheckpointBarrier):
            assert not isinstance(item, SourceBatch)
            self.log.put(item)
        return item

    def peek_behind_held(self) -> DataBatch | SourceBatch | Control | None:
        """Return the next item that is not held, without taking it, or None."""
        return self.channel.peek() if self.restored is None else self._peek_restored(self.restored)

    def take_behind_held(self) -> DataBatch | SourceBatch | Control:
        """Take the next item that is not held."""
        held, self.held = self.held, deque()
        item = self.take()
        self.held = held
        return item

    def hold(self, item: DataBatch | Control) -> None:
        """Hold an item that was taken from the channel, behind the other held items."""
        self.held.append(item)
        if isinstance(item, EndOfInput) and self.state is PortState.OPEN:
            self.state = PortState.END_HELD
        if self._bounded is not None:
            self._held_bytes.append(self._take_room(self._bounded, item))

    def put_back(self, item: DataBatch | SourceBatch) -> None:
        """Hold the rest of a batch that was taken, before all other items."""
        self.held.appendleft(item)
        if self._bounded is not None:
            self._held_bytes.appendleft(self._take_room(self._bounded, item))

    def make_way(self, makes_way: bool) -> None:
        """Choose whether the channel admits items however much is held, because a barrier is behind them."""
        if self._bounded is not None:
            self._bounded.make_way(makes_way)

    @property
    def has_in_hand(self) -> bool:
        """Whether the task handles held records, which count toward the limits of the channel until then."""
        return self._in_hand is not None

    def release(self) -> None:
        """Free the room in the channel of the held records that are handled now."""
        if self._in_hand is not None:
            assert self._bounded is not None
            self._bounded.release(*self._in_hand)
            self._in_hand = None

    def _take_held(self) -> DataBatch | SourceBatch | Control:
        # The room stays taken until the records are handled. Otherwise a slow step that has taken all held records
        # would seem to hold none.
        item = self.held.popleft()
        if self._bounded is not None:
            size_bytes = self._held_bytes.popleft()
            if not isinstance(item, Control):
                records, before_bytes = self._in_hand or (0, 0)
                self._in_hand = records + len(item.records), before_bytes + size_bytes
        return item

    @staticmethod
    def _take_room(channel: Channel, item: DataBatch | SourceBatch | Control) -> int:
        if isinstance(item, Control):
            return 0
        size_bytes = estimated_bytes(item.records)
        channel.set_aside(len(item.records), size_bytes)
        return size_bytes

    def restore(self, feedback: SpillQueue) -> None:
        """Bring the items of this feedback log before the items of the channel."""
        self.restored = feedback

    @property
    def held_records(self) -> int:
        restored = 0 if self.restored is None else self.restored.statistics().records
        return restored + sum(len(item.records) for item in self.held if not isinstance(item, Control))

    def close(self) -> None:
        if self.restored is not None:
            self.restored.close()
            self.restored = None

    def _peek_restored(self, restored: SpillQueue) -> DataBatch | SourceBatch | Control | None:
        if len(restored):
            return restored.peek()
        self.close()
        return self.channel.peek()

    def take_batch(self) -> DataBatch | SourceBatch:
        """Take the next batch, joined with small batches that follow it, or cut."""
        # Held records are not joined with records in the channel: each turn would empty the channel, and its limits
        # would have no effect.
        from_held = bool(self.held)
        first = self.take()
        if isinstance(first, SourceBatch):
            return self._cut_source(first)
        assert isinstance(first, DataBatch)
        if self.one_at_a_time:
            return self._first_record(first)
        at_most = _JOINED_RECORDS if self.turn_size is None else self.turn_size.records
        if len(first.records) >= at_most:
            return first if self.turn_size is None else self._cut(first, at_most)
        following = self.peek()
        if not isinstance(following, DataBatch):
            return first
        return self._joined(first, following, from_held, at_most)

    def _cut_source(self, batch: SourceBatch) -> SourceBatch:
        """Return as much of the batch as fits into a turn, and hold the rest."""
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

    def _joined(self, first: DataBatch, following: object, from_held: bool, at_most: int) -> DataBatch:
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


@final
class ReadyPorts:
    """The ports that a gate reads next, each of them once, and the parked ports.

    A port is parked while it has something, but its input is not wanted. It may also be in the queue, until the gate
    sees that its input still is not wanted.
    """

    def __init__(self, ports: int) -> None:
        self.queue: deque[Port] = deque()
        """The ports in their order. The gate looks whether there are any; only this class changes it."""
        self._is_queued = [False] * ports
        self.parked: list[Port] = []
        """Only this class changes it."""
        self._is_parked = [False] * ports
        self._waiter: asyncio.Future[None] | None = None

    def add(self, port: Port) -> None:
        """Put a port behind the others and wake the gate, unless the port is blocked or in the queue already."""
        if self._is_queued[port.index] or port.state is BLOCKED:
            return
        self._is_queued[port.index] = True
        self.queue.append(port)
        if self._waiter is not None:
            self.wake()

    async def wait(self) -> None:
        """Wait for a port, or for ``wake``."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> Port:
        """Take the port whose turn it is."""
        port = self.queue.popleft()
        self._is_queued[port.index] = False
        return port

    def park(self, port: Port) -> None:
        if not self._is_parked[port.index]:
            self._is_parked[port.index] = True
            self.parked.append(port)

    def unpark(self) -> list[Port]:
        """Return the parked ports, in the order in which they were parked; no port is parked any more."""
        parked, self.parked = self.parked, []
        for port in parked:
            self._is_parked[port.index] = False
        return parked


@final
class WantedInputs:
    """The inputs that an operator wants to read next, as ``wanted_inputs()`` returned them last.

    If all inputs that it names have ended, all inputs are wanted.
    """

    def __init__(self, ports: Sequence[Port], has_ended: Callable[[Port], bool]) -> None:
        self._ports = ports
        self._has_ended = has_ended
        self._asked_for: tuple[str, ...] | None = None
        self.names: frozenset[str] | None = None
        """The inputs to read now, or None for all."""

    def ask(self, input_names: Iterable[str] | None) -> bool:
        """Want only these inputs from now on, or all (None); return whether this changes the request.

        Raises ConfigurationError if the value is not a collection of names, or no input has one of the names.
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
        """Decide again after a port has ended; return whether the wanted inputs may have changed."""
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


# The time that a turn of a slow step should take. It is short enough that timers, connections and other tasks do not
# wait long, and long enough that the cost of a turn (some ten microseconds) does not matter. Now and then a turn has
# twice as many records; it takes less than 50 ms, which no user notices.
TURN_S: Final = 0.025
_LONG_S: Final = 0.05
# The first turn must be short, too, if a record takes 5 ms (a call of a large model).
_FIRST_RECORDS: Final = 8
# Five turns lead from the first size to the largest batches.
_GROWTH: Final = 4
_TURNS_OF_A_PROBE: Final = 8
# The weight of a turn compared with the next turn. At the next probe, the last probe still has almost half its weight.
_KEPT: Final = 0.9
# The relative variance of the turns up to which they are too alike for a straight line.
_TOO_ALIKE: Final = 1e-3


@final
class TurnSize:
    """The number of records of a port that a slow step gets in one turn, so that other tasks have their turns, too.

    The number is small initially, and grows in each turn up to the limit for joining. Time is ignored until a turn
    takes too long, or would take too long with more records. From then on the number follows the time. The time of a
    turn is estimated as a fixed part and a part for each record, from the last turns; each eighth turn has twice as
    many records, so that the two parts can be separated.

    A step with a large fixed part (one request for each batch) would become slower by cutting. It gets as many records
    as take the same time as the fixed part, so that it has at least half of its possible speed.

    >>> size = TurnSize()
    >>> for _ in range(3):
    ...     size.took(size.records, seconds=0.005 * size.records)
    >>> size.records
    5
    """

    def __init__(self) -> None:
        self.records = _FIRST_RECORDS
        """The largest number of records in the next turn."""
        self._is_slow = False
        self._forget()

    def _forget(self) -> None:
        self._turns = 0
        self._weight = self._weighted = self._weighted_s = self._squares = self._times = 0.0

    def took(self, records: int, seconds: float) -> None:
        """Note how long a turn has taken, which had at least one record."""
        grown = min(_JOINED_RECORDS, _GROWTH * records) if records >= self.records else records
        if not self._is_slow:
            if seconds * grown <= _LONG_S * records:
                self.records = max(self.records, grown)
                return
            self._is_slow = True
            self._forget()
        self._note(records, seconds)
        if records == 1 < self.records:
            return  # The turn could not have been shorter.
        aim = self._aim()
        if aim > self.records:
            aim = min(aim, 2.0 * records) if records >= self.records else self.records
        if self._turns % _TURNS_OF_A_PROBE == 0:
            aim = 2 * max(1.0, aim)
        self.records = max(1, min(_JOINED_RECORDS, int(aim)))
        self._is_slow = self.records < _JOINED_RECORDS or seconds > TURN_S

    def _note(self, records: int, seconds: float) -> None:
        self._turns += 1
        self._weight = _KEPT * self._weight + 1.0
        self._weighted = _KEPT * self._weighted + records
        self._weighted_s = _KEPT * self._weighted_s + seconds
        self._squares = _KEPT * self._squares + records * records
        self._times = _KEPT * self._times + records * seconds

    def _aim(self) -> float:
        """Return how many records fit into a turn, by a line through the last turns; newer turns weigh more."""
        mean, mean_s = self._weighted / self._weight, self._weighted_s / self._weight
        variance = self._squares / self._weight - mean * mean
        each_s = mean_s / mean
        if variance > _TOO_ALIKE * mean * mean:
            slope_s = (self._times / self._weight - mean * mean_s) / variance
            each_s = min(max(slope_s, 0.0), each_s)
        fixed_s = mean_s - each_s * mean
        if each_s * _JOINED_RECORDS <= max(TURN_S - fixed_s, fixed_s):
            return float(_JOINED_RECORDS)
        return max((TURN_S - fixed_s) / each_s, math.ceil(fixed_s / each_s))
