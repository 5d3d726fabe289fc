"""What an iteration is given beside its streams, and what its body gives back."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.runtime.graph import FeedbackLimits

__all__ = ["AS_THE_ENTRY_POINT_SAYS", "IterationBodyResult", "IterationConfig"]


class _Default(enum.Enum):
    AS_THE_ENTRY_POINT_SAYS = "as the entry point says"


AS_THE_ENTRY_POINT_SAYS: Final = _Default.AS_THE_ENTRY_POINT_SAYS


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """``max_epochs_ahead``: how far feedback may run ahead of the last complete epoch.

    0 is synchronous (BSP), s bounded-stale (SSP), None asynchronous (ASP). In an unbounded iteration it is
    None unless said otherwise, and a number needs stamped data (``epochs_every``). ``feedback_limits``: how
    much may wait in each channel of a feedback edge, and in each queue of records whose epoch's turn has not
    come, at heads and at operators with ``epochs_in_order``.
    """

    max_epochs_ahead: int | _Default | None = AS_THE_ENTRY_POINT_SAYS
    feedback_limits: FeedbackLimits = field(default_factory=FeedbackLimits)

    def __post_init__(self) -> None:
        if not isinstance(self.feedback_limits, FeedbackLimits):
            raise GraphError(
                f"IterationConfig: expected feedback_limits to be FeedbackLimits, given {self.feedback_limits!r}; "
                "write FeedbackLimits(memory_bytes=…, disk_bytes=…)"
            )
        ahead = self.max_epochs_ahead
        if ahead is None or isinstance(ahead, _Default):
            return
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise GraphError(
                f"IterationConfig: expected max_epochs_ahead None or a number of at least 0, given {ahead!r}"
            )


@dataclass(frozen=True, slots=True)
class IterationBodyResult:
    """The streams that an iteration body gives back.

    As many feedback streams as variable streams, in the same order. ``output_streams`` may be a dict: then
    the iteration gives a dict. ``termination_criteria`` belongs to bounded iterations.
    """

    feedback_variable_streams: Sequence[Stream]
    output_streams: Sequence[Stream] | Mapping[str, Stream]
    termination_criteria: Stream | None = None
