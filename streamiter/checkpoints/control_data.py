"""Control records as plain data, for snapshots of queues that hold some.

>>> control_to_plain(EpochWatermark(3)), control_from_plain(("epoch_watermark", 3))
(('epoch_watermark', 3), EpochWatermark(3))
"""

from __future__ import annotations

from typing import Any

from streamiter.errors import InternalError, PlainDataError
from streamiter.records import CheckpointBarrier, Control, EndOfData, EndOfInput, EpochWatermark, Idle

__all__ = ["control_from_plain", "control_to_plain"]


def control_to_plain(control: Control) -> tuple[Any, ...]:
    """The name of the kind, then what it carries."""
    match control:
        case EpochWatermark():
            return ("epoch_watermark", control.epoch)
        case CheckpointBarrier():
            return ("checkpoint_barrier", control.checkpoint, control.suspend)
        case EndOfData():
            return ("end_of_data", control.epoch)
        case EndOfInput():
            return ("end_of_input", control.epoch)
        case Idle():
            return ("idle",)
    raise InternalError(f"{control!r} has no form as plain data")


def control_from_plain(plain: Any) -> Control:
    """The control record; ``PlainDataError`` for what is none."""
    match plain:
        case ["epoch_watermark", int() as epoch]:
            return EpochWatermark(epoch)
        case ["checkpoint_barrier", int() as checkpoint, bool() as suspend]:
            return CheckpointBarrier(checkpoint, suspend=suspend)
        case ["end_of_data", int() as epoch]:
            return EndOfData(epoch)
        case ["end_of_input", int() | None as epoch]:
            return EndOfInput(epoch)
        case ["idle"]:
            return Idle()
    raise PlainDataError(
        f"expected the plain data of a control record, given {plain!r:.100}; it is of something else, or of "
        "a newer version"
    )
