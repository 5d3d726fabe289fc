"""What an iteration is given beside its streams, and what its body gives back."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import TYPE_CHECKING, Final, Generic

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_name
from streamiter.flow.stream import Stream
from streamiter.iteration.feedback_through import FeedbackThrough
from streamiter.runtime.graph import FeedbackLimits

__all__ = [
    "AS_THE_ENTRY_POINT_SAYS",
    "IterationBodyResult",
    "IterationConfig",
    "OperatorLifeCycle",
    "Outputs",
]

if TYPE_CHECKING:
    # Only type checkers need the default: IterationBodyResult alone is that of a list.
    from typing_extensions import TypeVar

    Outputs = TypeVar(
        "Outputs",
        bound=Sequence[Stream] | Mapping[str, Stream],
        covariant=True,
        default=Sequence[Stream],
    )
else:
    from typing import TypeVar

    Outputs = TypeVar("Outputs", covariant=True)


class _Default(enum.Enum):
    AS_THE_ENTRY_POINT_SAYS = "as the entry point says"


AS_THE_ENTRY_POINT_SAYS: Final = _Default.AS_THE_ENTRY_POINT_SAYS


class OperatorLifeCycle(enum.Enum):
    """How long the operators of an iteration body live; source: FLIP-176."""

    ALL_ROUND = "all round"
    """One instance for the whole iteration."""
    PER_ROUND = "per round"
    """A new instance for each epoch that has records: nothing is kept from one to the next."""


# A replayed stream of some ten million small rows; with a few of them still a small part of a training machine.
_REPLAY_MEMORY_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """``max_epochs_ahead``: how far feedback may run ahead of the last complete epoch.

    0 is synchronous (BSP), s bounded-stale (SSP), None asynchronous (ASP). In a bounded iteration it is 0
    unless said otherwise. In an unbounded one it is None, and a number needs stamped data
    (``epochs_every``). ``operator_life_cycle``: see :class:`OperatorLifeCycle`; ``PER_ROUND`` is for bounded
    iterations. ``feedback_limits``: how much may wait in each channel of a feedback edge, and in each queue of
    records whose epoch's turn has not come, at heads and at operators with ``epochs_in_order``.
    ``replay_memory_bytes``: how much each subtask of a replayed stream keeps in memory; what is beyond lies on
    disk, up to the ``disk_bytes`` of ``feedback_limits`` and in their ``directory``. ``name``: what the names of the
    steps at its border begin with; checkpoints need one where a flow has several iterations.
    """

    max_epochs_ahead: int | _Default | None = AS_THE_ENTRY_POINT_SAYS
    operator_life_cycle: OperatorLifeCycle = OperatorLifeCycle.ALL_ROUND
    feedback_limits: FeedbackLimits = field(default_factory=FeedbackLimits)
    replay_memory_bytes: int = _REPLAY_MEMORY_BYTES
    name: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.operator_life_cycle, OperatorLifeCycle):
            raise GraphError(
                "IterationConfig: expected operator_life_cycle to be an OperatorLifeCycle, given "
                f"{self.operator_life_cycle!r}; write OperatorLifeCycle.ALL_ROUND or OperatorLifeCycle.PER_ROUND"
            )
        if not _is_count(self.replay_memory_bytes):
            raise GraphError(
                "IterationConfig: expected replay_memory_bytes of at least 0, given "
                f"{self.replay_memory_bytes!r}; use a whole number of bytes"
            )
        if not isinstance(self.feedback_limits, FeedbackLimits):
            raise GraphError(
                f"IterationConfig: expected feedback_limits to be FeedbackLimits, given {self.feedback_limits!r}; "
                "write FeedbackLimits(memory_bytes=…, disk_bytes=…)"
            )
        ahead = self.max_epochs_ahead
        if ahead is None or isinstance(ahead, _Default):
            return
        if not _is_count(ahead):
            raise GraphError(
                f"IterationConfig: expected max_epochs_ahead None or a number of at least 0, given {ahead!r}; "
                "0 is synchronous, None asynchronous"
            )


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


@dataclass(frozen=True, slots=True)
class IterationBodyResult(Generic[Outputs]):
    """The streams that an iteration body gives back.

    As many feedback streams as variable streams, in the same order. ``output_streams`` may be a dict: then
    the iteration gives a dict, and for type checkers the body gives an
    ``IterationBodyResult[dict[str, Stream]]``. ``termination_criteria`` belongs to bounded iterations.
    """

    feedback_variable_streams: Sequence[Stream | FeedbackThrough]
    output_streams: Outputs
    termination_criteria: Stream | None = None

    if not TYPE_CHECKING:
        # What Generic gives sets an attribute of each instance, which a frozen class with slots has no room for.
        __class_getitem__ = classmethod(GenericAlias)
