"""The output side of a task: which subtask a record goes to, and how it gets there.

An edge of the graph has a :class:`Partitioning`. It makes a *splitter*, a function that divides a batch among the
subtasks of the next step; the result does not depend on how the records were divided into batches. A :class:`Writer`
puts the parts into channels: :class:`EdgeWriter` into bounded channels, through one :class:`ChannelOutput` (a *lane*)
each, and :class:`FeedbackWriter` into the channels of a feedback edge.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt

from streamiter.engine.graph.channels import Channel
from streamiter.engine.graph.feedback import WritableFeedback
from streamiter.errors import ConfigurationError, OutputOverflow, StreamiterError, shortened
from streamiter.operators.operator import Progress
from streamiter.operators.output import RecordFailure
from streamiter.values.helpers.clock import Clock
from streamiter.values.origins import BatchOrigin, Passes
from streamiter.values.records import (
    Batch,
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    EventTimeWatermark,
    TimedBatch,
    estimated_bytes,
    slice_batch,
    take,
    untimed,
)
from streamiter.values.subtasks import key_groups, subtask_of_group, subtask_of_key

Splitter = Callable[[Batch], Iterable[tuple[int, Batch]]]
"""Splits a batch into parts, each with the index of its subtask. It may keep state between calls."""


class Partitioning(Protocol):
    """How an edge distributes records over the subtasks of the next step."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        """Return a new splitter for one upstream subtask."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Sends all records of subtask i to subtask i."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        return lambda batch: ((subtask, batch),)


@dataclass(frozen=True, slots=True)
class InStep:
    """Sends all records of subtask i to subtask i modulo their number, and control records to every subtask.

    So what follows the end of the edge begins in no subtask before all of them have ended.
    """

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        return lambda batch: ((subtask % subtasks_downstream, batch),)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Sends every record to every subtask."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        everyone = range(subtasks_downstream)
        return lambda batch: [(downstream, batch) for downstream in everyone]


class Turns:
    """A splitter that gives a record to each subtask in turn. The next subtask is part of the job's state."""

    def __init__(self, following: int, subtasks: int) -> None:
        self.following = following
        """The subtask that gets the next record."""
        self._subtasks = subtasks

    def __call__(self, batch: Batch) -> Iterable[tuple[int, Batch]]:
        first, length, subtasks = self.following, len(batch), self._subtasks
        self.following = (first + length) % subtasks
        if length == 1:
            return ((first, batch),)
        return [((first + turn) % subtasks, batch[turn::subtasks]) for turn in range(min(length, subtasks))]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Sends each record to the next subtask in turn. Upstream subtask i starts with downstream subtask i."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        return Turns(subtask % subtasks_downstream, subtasks_downstream)


@dataclass(frozen=True, slots=True)
class ByKey:
    """Sends all records with the same key to the same subtask.

    ``key_of`` takes a record, or a batch with ``whole_batches``. With ``tolerant``, records without a valid key go to
    the first subtask; the step there asks for their key again, and rejects them by its policy.
    """

    key_of: Callable[[Any], Any]
    whole_batches: bool = False
    tolerant: bool = False

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        split = self._splitter(subtasks_downstream)
        return self._tolerant_splitter(split, subtasks_downstream) if self.tolerant else split

    def _tolerant_splitter(self, split: Splitter, subtasks_downstream: int) -> Splitter:
        def owner(record: Any) -> int:
            try:
                return subtask_of_key(self.key_of(record), subtasks_downstream)
            except Exception:
                return 0

        def split_tolerantly(batch: Batch) -> Iterable[tuple[int, Batch]]:
            try:
                return split(batch)
            except Exception:
                return _parts_of_owners(batch, np.array([owner(record) for record in batch]), subtasks_downstream)

        return split_tolerantly

    def _splitter(self, subtasks_downstream: int) -> Splitter:
        key_of, whole_batches = self.key_of, self.whole_batches

        def split(batch: Batch) -> Iterable[tuple[int, Batch]]:
            keys = key_of(untimed(batch)) if whole_batches else [key_of(record) for record in batch]
            if len(keys) != len(batch):
                raise ConfigurationError(
                    f"key_by_batch: expected the function to give a key for each of {len(batch)} records, "
                    f"given {len(keys)}; return an array as long as the batch"
                )
            return _parts_of_owners(batch, subtask_of_group(key_groups(keys), subtasks_downstream), subtasks_downstream)

        return split


@dataclass(frozen=True, slots=True)
class ByFunction:
    """Sends each record to subtask ``function(record)``, modulo the number of subtasks."""

    function: Callable[[Any], int]

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        function = self.function

        def split(batch: Batch) -> Iterable[tuple[int, Batch]]:
            chosen = [_whole_number(function(record)) % subtasks_downstream for record in batch]
            return _parts_of_owners(batch, np.array(chosen, np.int64), subtasks_downstream)

        return split


def _whole_number(chosen: Any) -> int:
    try:
        return operator.index(chosen)
    except TypeError:
        raise ConfigurationError(
            f"partition_by: expected the function to give a whole number, given {shortened(chosen)}; "
            "use int(…), or key_by for keys of other types"
        ) from None


def _parts_of_owners(batch: Batch, owners: npt.NDArray[np.int64], subtasks: int) -> Iterable[tuple[int, Batch]]:
    parts = []
    for subtask in range(subtasks):
        indices = np.flatnonzero(owners == subtask)
        if len(indices) == len(batch) > 0:
            parts.append((subtask, slice_batch(batch, 0, len(batch))))
        elif len(indices):
            parts.append((subtask, take(batch, indices.tolist() if isinstance(batch, list) else indices)))
    return parts


# The limit for records that one call emits into a full channel. It is large for any batch, small compared with the
# memory of a machine, and an operator that never stops emitting reaches it in a second or two.
LANE_LIMIT_BYTES: Final = 1 << 30


@final
class ChannelOutput:
    """One channel and the records that found no room in it: a lane.

    An operator cannot wait for room in the middle of a call. So the lane keeps the records that do not fit, and the
    task handles no more input until the lane is clear. At most the output of one call waits, and it must stay below
    ``LANE_LIMIT_BYTES``.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.waiting: deque[DataBatch | Control] = deque()
        self.blocked_s = 0.0
        self._waiting_bytes = 0

    @property
    def waiting_records(self) -> int:
        return sum(len(item.records) for item in self.waiting if isinstance(item, DataBatch))

    def put(self, batch: DataBatch) -> None:
        if self.waiting or not self.channel.try_put(batch):
            self.keep(batch)

    def keep(self, batch: DataBatch) -> None:
        """Keep a batch that does not fit into the channel."""
        self.waiting.append(batch)
        self._waiting_bytes += estimated_bytes(batch.records)
        if self._waiting_bytes > LANE_LIMIT_BYTES:
            raise OutputOverflow(
                f"{self.channel.name}: expected a call of an operator to emit at most {LANE_LIMIT_BYTES >> 20} MiB, "
                f"given {self._waiting_bytes >> 20} MiB; emit less for each record, or read the records from a source"
            )

    async def clear(self, clock: Clock) -> None:
        """Wait until everything is in the channel."""
        began_s = clock.monotonic_s()
        try:
            while self.waiting:
                item = self.waiting[0]
                if isinstance(item, Control):
                    self.channel.put_control(item)
                elif not self.channel.try_put(item):
                    await self.channel.wait_for_room()
                    continue
                self.waiting.popleft()
            self._waiting_bytes = 0
        finally:
            self.blocked_s += clock.monotonic_s() - began_s


class Writer(Protocol):
    """Takes the records that one output of an operator emits."""

    lanes: Sequence[ChannelOutput]
    split: Splitter | None
    leaves_loop: bool
    """Whether the reader is outside the iteration of the task."""

    def __call__(self, batch: Batch) -> None: ...
    def control(self, control: Control) -> None: ...


@final
class EdgeWriter:
    """Distributes batches over the channels of an edge, with the epoch of the task."""

    def __init__(
        self,
        split: Splitter | None,
        lanes: Sequence[ChannelOutput],
        progress: Progress,
        step: str,
        *,
        leaves_loop: bool = False,
        keeps: Passes = "no origin",
        encode: Callable[[Batch, BatchOrigin | None], Iterable[Batch]] | None = None,
    ) -> None:
        """``split`` is None if there is only one channel; ``step`` is the step that reads the channels.

        With ``leaves_loop`` the reader receives all records in epoch 0, and of the control records only barriers,
        event-time watermarks and the end. ``keeps``: what emitted records have of the origin of the batch that they
        were made of. ``encode`` is given for a sink in another process: the channels get what it returns.
        """
        self._keeps = keeps
        self._encode = encode
        self.leaves_loop = leaves_loop
        self.split = split
        self.lanes = lanes
        self._progress = progress
        self._step = step

    def __call__(self, batch: Batch) -> None:
        epoch = 0 if self.leaves_loop else self._progress.epoch
        origin = None if self._keeps == "no origin" else self._progress.origin
        if origin is not None and origin.originals is not None:
            if self._keeps == "originals" and self.split is not None:
                self._split_with_originals(self.split, batch, epoch, origin)
                return
            if self._keeps == "ranges":
                origin = origin.with_originals(None)
        for subtask, part in ((0, batch),) if self.split is None else _split(self.split, batch, self._step):
            if self._encode is None:  # As _put does, in fewer calls: each round of a loop comes here.
                lane, made = self.lanes[subtask], DataBatch(part, epoch, origin)
                if lane.waiting or not lane.channel.try_put(made):
                    lane.keep(made)
            else:
                self._put(subtask, part, epoch, origin)

    def _put(self, subtask: int, part: Batch, epoch: int, origin: BatchOrigin | None) -> None:
        if self._encode is None:
            self.lanes[subtask].put(DataBatch(part, epoch, origin))
            return
        for records in self._encode(untimed(part), origin):
            self.lanes[subtask].put(DataBatch(records, epoch, None if origin is None else origin.with_originals(None)))

    def _split_with_originals(self, split: Splitter, batch: Batch, epoch: int, origin: BatchOrigin) -> None:
        # Splitters take timestamps along; here the places of the records are in their stead.
        numbered = TimedBatch(untimed(batch), np.arange(len(batch)))
        for subtask, part in _split(split, numbered, self._step):
            assert isinstance(part, TimedBatch)
            records, rows = part.records, part.times
            if isinstance(batch, TimedBatch):
                order = None if batch.order is None else batch.order[rows]
                self._put(subtask, TimedBatch(records, batch.times[rows], order), epoch, origin.taken(rows))
            else:
                self._put(subtask, records, epoch, origin.taken(rows))

    def control(self, control: Control) -> None:
        """Put a control record into every channel, because each of them may bring records."""
        if self.leaves_loop:
            if isinstance(control, EndOfInput):
                control = EndOfInput()  # Without the epoch in which the iteration has ended.
            elif not isinstance(control, (CheckpointBarrier, EventTimeWatermark)):
                return
        for lane in self.lanes:
            if lane.waiting:
                lane.waiting.append(control)
            else:
                lane.channel.put_control(control)


@final
class FeedbackWriter:
    """Distributes batches over the channels of a feedback edge: the epoch grows by one, and nothing blocks."""

    leaves_loop = False

    def __init__(
        self, split: Splitter | None, channels: Sequence[WritableFeedback], progress: Progress, step: str
    ) -> None:
        self.split = split
        self._channels = channels
        self._progress = progress
        self._step = step
        self.lanes: Sequence[ChannelOutput] = ()

    def __call__(self, batch: Batch) -> None:
        epoch = self._progress.epoch + 1
        parts = ((0, batch),) if self.split is None else _split(self.split, batch, self._step)
        try:
            for subtask, part in parts:
                self._channels[subtask].put(DataBatch(part, epoch))
        except StreamiterError as error:  # The feedback exceeds its disk limit, or is not plain data.
            raise RecordFailure(self._step) from error

    def control(self, control: Control) -> None:
        if isinstance(control, (EpochWatermark, EndOfData)):
            control = type(control)(control.epoch + 1)
        elif isinstance(control, EventTimeWatermark):
            return  # Feedback may be late in the body; its records keep their timestamps.
        for channel in self._channels:
            channel.put_control(control)


def turns_of(writers: Iterable[Writer]) -> list[int | None]:
    """Return for a snapshot the next subtask of each writer that gives records in turn."""
    return [writer.split.following if isinstance(writer.split, Turns) else None for writer in writers]


def restore_turns(writers: Iterable[Writer], state: Iterable[int | None]) -> None:
    for writer, following in zip(writers, state, strict=True):
        if isinstance(writer.split, Turns) and following is not None:
            writer.split.following = following


def _split(split: Splitter, batch: Batch, step: str) -> Iterable[tuple[int, Batch]]:
    """Split a batch. A failure names the step that reads the parts, and the record."""
    try:
        return split(batch)
    except Exception as error:
        for index in range(len(batch)):
            try:
                split(slice_batch(batch, index, index + 1))
            except Exception as single:
                raise RecordFailure(step, batch[index], has_record=True) from single
        raise RecordFailure(step) from error
