"""Drives an inbox as a task does, and records its results: for tests of the inbox against simple rules."""

import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from operators.operator_harness import stored

from streamiter.engine.graph.channels import Channel
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.inbox.order import ARRIVAL, BY_EPOCH, BY_EPOCH_THEN_PORT
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    slice_batch,
)

Item = DataBatch | Control
Wants = Callable[["InboxRun"], tuple[str, ...] | None]


@dataclass(frozen=True)
class Seen:
    """One record as the operator received it."""

    port: int
    epoch: int
    record: int


def spill_queue() -> SpillQueue:
    """Return a queue that keeps all but some small batches on disk."""
    return SpillQueue(name="step", directory=tempfile.gettempdir(), memory_limit_bytes=400, disk_limit_bytes=1 << 20)


@dataclass
class InboxRun:
    """An inbox with its channels, and an operator that records everything in ``trace``.

    ``trace`` has ``Seen`` for records, and the control events; ``snapshots`` has the snapshot at each barrier.
    """

    inputs: Sequence[str]
    in_order: bool = False
    merges_in_order: bool = False
    epochs_in_order: bool = True
    wants: Wants | None = None
    limit_records: int = 1000
    timed_ports: Sequence[int] = ()
    restored: list[dict[str, Any]] | None = None
    trace: list[Seen | Control] = field(default_factory=list)
    batches: list[DataBatch] = field(default_factory=list)
    snapshots: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.channels = [
            Channel(f"{number} → step", limit_records=self.limit_records) for number in range(len(self.inputs))
        ]
        ports = [
            Port(number, name, channel)
            for number, (name, channel) in enumerate(zip(self.inputs, self.channels, strict=True))
        ]
        self.inbox = Inbox(
            ports,
            order=BY_EPOCH_THEN_PORT if self.merges_in_order else BY_EPOCH if self.in_order else ARRIVAL,
            epochs_in_order=self.in_order and (self.epochs_in_order or not self.merges_in_order),
            make_queue=spill_queue,
            timed_ports=self.timed_ports,
        )
        weakref.finalize(self, self.inbox.close)  # The records set aside may be in files.
        if self.restored is not None:
            self.inbox.restore(self.restored, PlainData())
        self._ask()

    # -- the side of the channels ----------------------------------------------------------------------

    def put(self, port: int, item: Item) -> bool:
        """Put an item into a channel; return whether it had room."""
        if isinstance(item, DataBatch):
            return self.channels[port].try_put(item)
        self.channels[port].put_control(item)
        return True

    def put_all(self, port: int, *items: Item) -> None:
        """Put items into a channel that must have room."""
        for item in items:
            assert self.put(port, item)

    # -- the side of the task --------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.wants is not None:
            self.inbox.want(self.wants(self))

    def step(self) -> bool:
        """Handle the next item of the inbox; return whether there was one."""
        polled = self.inbox.poll()
        if polled is None:
            return False
        port, message = polled
        if isinstance(message, Control):
            for event in [message] if port is None else self.inbox.accept(port, message):
                self._handle(event)
        else:
            assert port is not None
            assert isinstance(message, DataBatch)
            self.batches.append(message)
            self._process(port, message)
        self._ask()
        return True

    def _handle(self, event: Control) -> None:
        self.trace.append(event)
        if isinstance(event, CheckpointBarrier):
            self.snapshots[event.checkpoint] = stored(self.inbox.snapshot())()

    def _process(self, port: Port, batch: DataBatch) -> None:
        for index, record in enumerate(batch.records):
            self.trace.append(Seen(port.index, batch.epoch, int(record)))
            self._ask()
            if index + 1 < len(batch.records) and not self.inbox.may_continue(port):
                rest = slice_batch(batch.records, index + 1, len(batch.records))
                self.inbox.put_back(port, rest, batch.epoch)
                return

    def run(self) -> list[Seen | Control]:
        """Handle items until there are no more."""
        while self.step():
            pass
        return self.trace

    # -- the trace -------------------------------------------------------------------------------------

    def records(self, port: int | None = None) -> list[int]:
        """Return the handled records (of one port), in order."""
        return [seen.record for seen in self.trace if isinstance(seen, Seen) and (port is None or seen.port == port)]

    def told(self) -> list[str]:
        """Return the trace in words: records as numbers, events by name."""
        return [word_of(entry) for entry in self.trace]

    @property
    def has_ended(self) -> bool:
        """Return whether the inbox has ended."""
        return bool(self.trace) and isinstance(self.trace[-1], EndOfInput)


def word_of(entry: Seen | Control) -> str:
    if isinstance(entry, Seen):
        return str(entry.record)
    if isinstance(entry, EpochWatermark):
        return f"watermark {entry.epoch}"
    if isinstance(entry, CheckpointBarrier):
        return f"barrier {entry.checkpoint}"
    if isinstance(entry, InputEnded):
        return f"{entry.input_name} ended"
    return "end of data" if isinstance(entry, EndOfData) else "end"


def data(*records: int, epoch: int = 0) -> DataBatch:
    """Return a list of records."""
    return DataBatch(list(records), epoch)


def barrier(checkpoint: int = 1) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint)


def array(*records: int, epoch: int = 0) -> DataBatch:
    """Return the records as an array."""
    return DataBatch(np.array(records, np.int64), epoch)


def held_records(snapshot: list[dict[str, Any]], in_order: bool) -> list[int]:
    """Return the records in an inbox's snapshot, read through a restored inbox."""
    kept: list[DataBatch] = []
    for of_port in snapshot:
        port = Port(0, "input", Channel("0 → step"))
        if in_order:
            port.set_aside_by_epoch(spill_queue)
        port.restore(of_port, PlainData())
        kept += [item for item in port.held if isinstance(item, DataBatch)]
        if port.later is not None:
            while port.later:
                kept += port.later.take_next(min(port.later.counts))
        port.close()
    return [int(record) for batch in kept for record in batch.records]
