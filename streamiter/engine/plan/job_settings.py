"""What a job is given: its options, and its process, which is one of several or the only one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from streamiter.engine.graph.channels import LIMIT_BYTES, LIMIT_RECORDS, Channel, Intake
from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackDeparture
from streamiter.engine.graph.graph import Step
from streamiter.engine.plan.messages import Messages
from streamiter.engine.plan.placement import Placement
from streamiter.engine.states.backends import StateBackend
from streamiter.engine.storage.store import Checkpoints
from streamiter.engine.tasks.failures import StepNote
from streamiter.engine.tasks.watchdog import STALL_AFTER_S
from streamiter.operators.operator import Operator
from streamiter.operators.output import DeadLetter
from streamiter.values.helpers.clock import Clock, SystemClock

if TYPE_CHECKING:
    from streamiter.engine.storage.disk_queue import SpillQueue

Restore = Literal["last"] | int | None
"""The last committed checkpoint (none in the first run), a checkpoint by its number, or None for no checkpoint."""


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """The limits of each channel of a job."""

    records: int = LIMIT_RECORDS
    """The most records in a channel."""
    size_bytes: int = LIMIT_BYTES
    """The most estimated bytes in a channel."""


def _random_id() -> str:
    import uuid  # for checkpoints and feedback through topics only

    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job."""

    clock: Clock = field(default_factory=SystemClock)
    """The clock of all steps."""
    channel_limits: ChannelLimits = field(default_factory=ChannelLimits)
    """The limits of each channel between tasks."""
    stall_after_s: float = STALL_AFTER_S
    """Seconds without progress after which a warning is logged."""
    new_id: Callable[[], str] = _random_id
    """Returns a new id for a run, for checkpoints and feedback through topics."""
    checkpoints: Checkpoints | None = None
    """The settings of its checkpoints; None: no checkpoints."""
    restore: Restore = "last"
    """The checkpoint that the job starts from."""
    changed_steps: Collection[str] = ()
    """Steps that may have state in only one of the flow and the checkpoint."""
    earlier_runs: str | None = None
    """How the ids of earlier attempts of the same run begin: ``changed_steps`` is done in their checkpoints."""
    on_rejected: Callable[[DeadLetter], None] | None = None
    """Called with each record that a step refuses and survives, also in a thread of the step."""
    on_restore: Callable[[int], None] | None = None
    """Called with the number of the checkpoint that the job starts from, before its state is read."""
    state: StateBackend | None = None
    """Where keyed states are kept; None: in memory."""


class RemoteChannels(Protocol):
    """Makes the halves of the channels to and from another process."""

    def departing(self, number: int, name: str, limits: ChannelLimits, *, neighbours: int) -> Channel:
        """Return the producer's half of the channel with this number; the other process has the other half.

        ``neighbours`` channels from other processes lead to its reader, this one included; they share its memory.
        """

    def arriving(self, number: int, name: str, limits: ChannelLimits) -> tuple[Channel, Intake]:
        """Return the consumer's half of the channel with this number, and an intake that stands for its sources.

        The intake shuts the intakes that ``shut_intakes`` of the producer's half names.
        """

    def departing_feedback(self, number: int, name: str, queue: SpillQueue) -> FeedbackDeparture:
        """Return the producer's half of a feedback channel; feedback that the other half has no room for is queued."""

    def arriving_feedback(self, number: int, name: str, queue: SpillQueue) -> FeedbackChannel:
        """Return the head's half of a feedback channel. It spills while feedback waits on disk in any process."""


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """The process of a job, if several processes share the subtasks of the flow; otherwise the only one."""

    placement: Placement
    """The tasks of all processes."""
    number: int = 0
    """The number of the process."""
    others: Mapping[int, RemoteChannels] = field(default_factory=dict)
    """The channels of each other process, by its number."""
    operators: Mapping[Step, Operator] = field(default_factory=dict)
    """The operator of the first subtask of each step, in process 0: their traits have led to the placement."""
    messages: Messages | None = None
    """What carries messages to the other processes; None if there are none."""
    note: StepNote | None = None
    """Where this process says which step runs; None if there are no other processes."""
