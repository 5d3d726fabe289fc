"""Control records that stay inside one task, and control records as plain data.

The control records that travel in channels are in :mod:`streamiter.records`. The records here are posted to one task by
another part of the job, or made by the gate of a task for its operators. They are never put into a channel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from streamiter.deferred import Deferred
from streamiter.records import (
    CheckpointBarrier,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
)

# -- posted to a task ----------------------------------------------------------------------------------


@final
class DrainInput(Control):
    """Stop reading and go to the end of the input. Posted to tasks that bring input into the job."""

    __slots__ = ()


@final
class BarrierTrigger(Control):
    """A checkpoint begins. Posted to tasks where barriers start, and to tasks that may leave input unread."""

    __slots__ = ("barrier",)

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier


@final
class CheckpointAbandoned(Control):
    """Drop the state that was taken for this checkpoint. Posted to all tasks; its barrier is still passed on."""

    __slots__ = ("checkpoint",)

    def __init__(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint


@final
class CheckAlignment(Control):
    """Ask again whether to stop reading until all workers are at the same clock; see ``ClockAlignment``."""

    __slots__ = ()


# -- made by the gate ----------------------------------------------------------------------------------


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


@final
class BarrierReturned(Control):
    """The barrier of a checkpoint has returned on every feedback channel.

    ``logged`` is the feedback that arrived before it: the number of the port, and its log.
    """

    __slots__ = ("checkpoint", "logged")

    def __init__(self, checkpoint: int, logged: list[tuple[int, Deferred]]) -> None:
        self.checkpoint = checkpoint
        self.logged = logged


# -- as plain data -------------------------------------------------------------------------------------


def plain_log(taken: Iterable[tuple[int, DataBatch | Control]]) -> list[tuple[int, str, Any, int | None]]:
    """Return items that ports hold as plain data: the number of the port, the kind, the records and the epoch.

    >>> plain_log([(0, DataBatch([1, 2], 3)), (1, EpochWatermark(2))])
    [(0, 'data', [1, 2], 3), (1, 'watermark', None, 2)]
    """
    return [(port, *_plain(item)) for port, item in taken]


def _plain(item: DataBatch | Control) -> tuple[str, Any, int | None]:
    if isinstance(item, DataBatch):
        return item.kind, item.records, item.epoch
    if isinstance(item, Idle):
        return item.kind, None, None
    assert isinstance(item, (EpochWatermark, EndOfData, EndOfInput)), item
    return item.kind, None, item.epoch


def from_plain(kind: str, records: Any, epoch: Any) -> DataBatch | Control:
    """Return one item of ``plain_log``, without the number of its port."""
    match kind:
        case DataBatch.kind:
            return DataBatch(records, epoch)
        case EpochWatermark.kind:
            return EpochWatermark(epoch)
        case EndOfData.kind:
            return EndOfData(epoch)
        case Idle.kind:
            return Idle()
    return EndOfInput(epoch)
