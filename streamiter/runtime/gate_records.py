"""Control records that a gate makes or is sent, and what it holds as plain data."""

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

__all__ = [
    "AskAgain",
    "BarrierReturned",
    "BarrierTrigger",
    "CheckpointAbandoned",
    "InputEnded",
    "LastOfAll",
    "from_plain",
    "plain_log",
]


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
class AskAgain(Control):
    """Posted to a task that is to ask again whether to stand still; see ``ClockAlignment``."""

    __slots__ = ()


@final
class CheckpointAbandoned(Control):
    """Posted to all tasks: what belongs to this checkpoint is dropped, and its barrier is passed on without meaning."""

    __slots__ = ("checkpoint",)

    def __init__(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint


@final
class BarrierReturned(Control):
    """The barrier of a checkpoint has come back on every feedback channel; ``logged`` came before it, by port."""

    __slots__ = ("checkpoint", "logged")

    def __init__(self, checkpoint: int, logged: list[tuple[int, Deferred]]) -> None:
        self.checkpoint = checkpoint
        self.logged = logged


@final
class LastOfAll(Control):
    """The end of all inputs, kept back until what was set aside has been handled."""

    __slots__ = ("end",)

    def __init__(self, end: EndOfInput) -> None:
        self.end = end


def plain_log(logged: Iterable[tuple[int, DataBatch | Control]]) -> list[tuple[Any, ...]]:
    """What was taken from ports as plain data, in the form that ``Gate.restore`` takes."""
    return [_plain(index, item) for index, item in logged]


def _plain(index: int, item: DataBatch | Control) -> tuple[int, str, Any, int | None]:
    if isinstance(item, DataBatch):
        return index, "data", item.records, item.epoch
    if isinstance(item, EpochWatermark):
        return index, "watermark", None, item.epoch
    if isinstance(item, EndOfInput):
        return index, "end of input", None, item.epoch
    if isinstance(item, Idle):
        return index, "idle", None, None
    assert isinstance(item, EndOfData), item
    return index, "end of data", None, item.epoch


def from_plain(kind: str, payload: Any, epoch: Any) -> DataBatch | Control:
    """One item of ``plain_log``, without the number of its port."""
    if kind == "data":
        return DataBatch(payload, epoch)
    if kind == "watermark":
        return EpochWatermark(epoch)
    if kind == "idle":
        return Idle()
    return EndOfData(epoch) if kind == "end of data" else EndOfInput(epoch)
