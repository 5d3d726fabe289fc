"""What an operator is, what it is given and where it emits to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from streamiter.clock import Clock
from streamiter.deferred import Encode
from streamiter.errors import ConfigurationError
from streamiter.operators.keyed_state import KeyedState
from streamiter.records import Batch, BatchOrigin, Control

if TYPE_CHECKING:
    from streamiter.operators.output import Output

__all__ = [
    "Boundary",
    "BoundaryOutput",
    "Context",
    "IterationListener",
    "JobScope",
    "Operator",
    "OperatorFactory",
    "OperatorStatistics",
    "Progress",
    "Service",
    "ServiceWorker",
    "Sharing",
]


class Operator:
    """Base class of all operators.

    Define how records are handled, one of:

    - ``process(record, out)``: called for each record;
    - ``process_batch(batch, out)``: called for each transport batch (a list, numpy array or ``Columns``;
      not to be changed in place); where batches are cut carries no meaning;
    - with named inputs (``connect(model=…, examples=…)``): ``process_<input>(record, out)`` or
      ``process_<input>_batch(batch, out)`` for each of them.

    Optionally:

    - ``wanted_inputs() -> names`` of the inputs to read next; asked again after each record (after each batch,
      of an input handled by batches). If only ended inputs are named, all are read;
    - ``input_ended(name, out)``: that input has ended at this instance;
    - ``on_timer(payload, out)``: a timer set with ``context.set_timer`` is due;
    - ``redistribute(states, parallelism) -> states``: what ``snapshot`` gave of each old subtask, shared out for
      another number of them. Asked of a new instance, which is not open, when a job goes on from a checkpoint with
      another parallelism; without it, only steps that keep nothing, or whose state is by key, can change theirs. A
      subtask may have ended already: then its state is that after ``finish``. Timers that no key was set with go to
      the new subtasks in turn.

    Every method may be a coroutine function. An operator whose handling of records is one, or that sets
    ``runs_in_thread``, runs in a task of its own; all others are called directly by the step before them.

    >>> class Square(Operator):
    ...     def process(self, record, out):
    ...         out.emit(record * record)

    The Operator: one step of a flow, one instance for each parallel subtask.
    """

    runs_in_thread: bool = False
    """Handle batches in a worker thread: for slow steps that release the GIL. State is still used by one
    call at a time."""

    epochs_in_order: bool = False
    """In an iteration: set records of later epochs aside until their epoch's turn comes. For
    ``wanted_inputs``, an input has then ended when it brings nothing more of the epoch whose turn it is, and
    what is not wanted yet is set aside too: its source is not held up."""

    is_stateless: bool = False
    """For the engine: nothing is kept from one batch to the next."""

    def open(self, context: Context) -> Any:
        """Called once, before anything else. Keep ``context`` if it is needed later."""

    def finish(self, out: Output) -> Any:
        """The input has ended: emit what is left. Not called when the job is suspended or fails."""

    def close(self) -> Any:
        """Called once, whatever happened: let resources go. After ``finish`` it comes at once, not at the job's end."""

    def snapshot(self) -> Any:
        """The operator's state as plain data, taken between two batches. It must not change afterwards.

        Where a step has ended and others go on, it is asked after ``close``.
        """
        return None

    def restore(self, state: Any) -> Any:
        """Take on a state that ``snapshot`` gave; called after ``open``, before any record."""


class IterationListener:
    """Mixed into an operator of an iteration body, it hears of epochs and of the end.

    Outside an iteration it hears of the epochs of a stream that ``epochs_every`` has stamped, and of no end; a step
    behind any other stream is refused.

    Source: FLIP-176's ``IterationListener``.
    """

    needs_epochs: bool = True
    """Whether it is of no use where no epoch ends. False for an operator that also works without callbacks. Where a
    function makes the operator, ``__init__`` may set it."""

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> Any:
        """Once for each epoch, in order, after all of this instance's records of it. Emits in that epoch."""

    def on_iteration_terminated(self, context: Context, out: Output) -> Any:
        """Once, last, before ``finish``: the iteration has ended."""


OperatorFactory = Callable[[], Operator]
"""An operator class, or a callable without arguments: called once for each subtask."""


class BoundaryOutput:
    """What a :class:`Boundary` emits to: data of any epoch, and control records in-band."""

    def emit_batch(self, records: Batch, epoch: int) -> None:
        """Pass on records with that epoch."""
        raise NotImplementedError

    async def room(self) -> None:
        """Return when what was emitted has found room; for who has much to emit at once."""
        raise NotImplementedError

    async def control(self, control: Control) -> None:
        """Pass a control record on behind all that was emitted; ``EndOfInput`` ends the task."""
        raise NotImplementedError


class Boundary(Operator):
    """For the engine: an operator at the border of an iteration, which sees control records itself.

    It stands at the head of its task; nothing is passed on but what it says. Checkpoint barriers pass by,
    it is only told of them.
    """

    outlives_inputs: bool = False
    """Whether it goes on when its inputs have ended: then checkpoint barriers begin with it."""

    brings_input: bool = False
    """Whether it emits what has not come in just now, and is to be told when the job is drained."""

    gives_epochs: bool = False
    """Whether epochs begin with it: its subtasks may have come to different ones, and leave out what lies between."""

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        """Handle records of one epoch."""
        raise NotImplementedError

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        """Handle a control record: one that all channels have brought, or one posted to this task."""
        raise NotImplementedError

    def wanted_inputs(self) -> Iterable[str] | None:
        """Inputs to read next; None means all."""
        return None

    def held_for(self) -> str | None:
        """Why it takes no input now, for the log; None if there is no better reason than that it wants none."""
        return None

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A barrier is here; ``snapshot`` comes next, unless the checkpoint was given up."""

    def checkpoint_ends(self, checkpoint: int) -> None:
        """Its part of the checkpoint is complete: at once, or when the barrier has come back to it."""


T = TypeVar("T")


class Progress:
    """Where a task stands: shared by its operators, written by the task alone."""

    __slots__ = ("epoch", "handled", "is_ending", "origin", "watermark")

    def __init__(self) -> None:
        self.handled = 0
        """Grows with all that is handled: batches and control records, and single records where each is
        awaited or asked about. What does not grow here stands still."""
        self.epoch = 0
        self.watermark = -1
        self.is_ending = False
        self.origin: BatchOrigin | None = None
        """Where the batch that is being handled was read; None where that is not known, and outside batches."""


class JobScope:
    """Objects that the tasks of one job (in one process) share, made by whoever asks first."""

    def __init__(self) -> None:
        self._shared: dict[object, Any] = {}

    def get(self, key: object, create: Callable[[], T]) -> T:
        """The object under ``key``."""
        if key not in self._shared:
            self._shared[key] = create()
        shared: T = self._shared[key]
        return shared

    def put(self, key: object, shared: object) -> None:
        """Have everybody who asks for ``key`` from now on get this object."""
        self._shared[key] = shared


class Context:
    """Given to ``Operator.open``; valid until ``close``. Used by the operator's own task only.

    What an operator knows of where it runs.
    """

    def __init__(
        self,
        *,
        name: str,
        subtask_index: int,
        parallelism: int,
        clock: Clock,
        progress: Progress,
        statistics: Callable[[], OperatorStatistics],
        scope: JobScope,
        post: Callable[[Control], None],
        set_timer: Callable[[float, Any, Any], None],
        in_iteration: bool,
        keyed: KeyedState | None,
        encode: Encode,
    ) -> None:
        self.name = name
        self.subtask_index = subtask_index
        self.parallelism = parallelism
        self.clock = clock
        self.scope = scope
        self.post = post
        self.encode = encode
        """The flow's encoding of plain data, for state that is ``Deferred``."""
        self._progress = progress
        self._statistics = statistics
        self._set_timer = set_timer
        self._in_iteration = in_iteration
        self._keyed = keyed
        self._service_worker: ServiceWorker | None = None
        self.key: Any = None

    @property
    def epoch(self) -> int | None:
        """Epoch of the record (batch) or callback being handled.

        None outside an iteration, unless the stream was stamped with ``epochs_every``.
        """
        return self._progress.epoch if self._in_iteration else None

    @property
    def is_ending(self) -> bool:
        """Whether the iteration is known to have ended: on termination, in ``finish`` and while a rest is handled.

        Records of the last epoch mostly come before that is known.
        """
        return self._progress.is_ending

    @property
    def statistics(self) -> OperatorStatistics:
        """What this instance has handled so far."""
        return self._statistics()

    @property
    def state(self) -> Any:
        """State of the current ``key``: an empty dict at first; change it, or assign any plain data.

        Only after ``key_by``. What was handed out is to be changed only until the call at hand returns: a
        checkpoint is written while records flow on, and keeps a state as it was when it is next asked for.
        """
        return self._keyed_state().get(self.key)

    @state.setter
    def state(self, value: Any) -> None:
        self._keyed_state().set(self.key, value)

    @state.deleter
    def state(self) -> None:
        self._keyed_state().delete(self.key)

    @property
    def parameter_server(self) -> Any:
        """The client of this subtask, where the step was given ``parameter_server=``.

        A :class:`~streamiter.parameter_server.Client`, a registered worker from before ``open`` until the input ends.
        """
        if self._service_worker is None:
            raise ConfigurationError(
                f"context.parameter_server: expected a step with a parameter server, given step {self.name!r} without; "
                "write .process(…, parameter_server=server)"
            )
        return self._service_worker

    def serve_with(self, worker: ServiceWorker) -> None:
        """Be told of the step's service, before ``open``."""
        self._service_worker = worker

    def set_timer(self, delay_s: float, payload: Any = None) -> None:
        """Call ``on_timer(payload, out)`` in ``delay_s`` seconds, with the same ``context.key``.

        ``payload`` is plain data: timers are part of a snapshot. One that is still to come when the input has
        ended does not come any more: emit in ``finish`` what must not be lost, or in an iteration, which goes on
        when the data of a step has ended, in ``input_ended``.
        """
        self._set_timer(delay_s, self.key, payload)

    def _keyed_state(self) -> KeyedState:
        if self._keyed is None:
            raise ConfigurationError(
                "context.state: expected a step behind .key_by(f), given one without keys or with several inputs; "
                "write stream.key_by(f).process(…), or keep a dict of your own and give it in snapshot"
            )
        return self._keyed


@dataclass(frozen=True, slots=True)
class OperatorStatistics:
    """What one operator instance has handled since it was opened.

    Counts of what an operator has handled.
    """

    records_in: int
    """Records given to it."""
    batches_in: int
    """Transport batches they came in."""
    records_out: int
    """Records it emitted, side outputs included."""
    rejected: int
    """Records refused: skipped, or sent to the dead-letter topic."""


class ServiceWorker(Protocol):
    """One subtask's access to a service: what ``context.parameter_server`` is."""

    def counted_clocks(self) -> Mapping[str, int]:
        """Where it stands in each thing that makes workers wait for each other, by name: counts that only grow."""

    def call_when_further(self, further: Callable[[], None]) -> None:
        """From now on call this whenever one of these counts has grown, before anything waits for the others."""

    def pass_barrier(self, checkpoint: int) -> None:
        """What it sends from now on comes behind the barrier of this checkpoint."""

    async def leave(self, reason: str) -> None:
        """Its input has ended, or its job: the others do not wait for it any longer. May be called more than once."""


class ServiceStatistics(Protocol):
    """Where a service stands: a frozen object."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a drawing says of it, a line each."""


@runtime_checkable
class Service(Protocol):
    """Serves one job at a time.

    What operators of a flow share beside its channels, with a state of its own: a parameter server.

    The engine knows services by these protocols only.
    """

    name: str
    """Its state is found again by it, as that of a step is by the name of the step."""

    @property
    def drawn_as(self) -> str:
        """What a drawing says of it, below its name."""

    async def begin_job(
        self, flow: str, workers: int, state: Any, *, has_checkpoints: bool
    ) -> list[ServiceWorker]:
        """A job begins, with so many workers; goes on from ``state``, what ``take_state`` gave, unless that is None."""

    def checkpoint_begins(self, checkpoint: int) -> None:
        """Its barrier will come to every worker."""

    async def take_state(self, checkpoint: int) -> Any:
        """The state with all that lay before this barrier, and nothing behind it: plain data, and what is ``Deferred``.

        Returns once every worker has passed the barrier, or has left.
        """

    def checkpoint_abandoned(self, checkpoint: int) -> None:
        """Its state is not needed."""

    async def end_job(self, *, went_well: bool) -> None:
        """The job is over, and was not cut off in the middle of something. May be called more than once."""

    def statistics(self) -> ServiceStatistics:
        """Where it stands."""


class Sharing(Protocol):
    """For the engine's own operators: what waits in them goes where the edge it came by would take it now.

    How the engine helps an operator to share out its state among another number of subtasks.
    """

    @property
    def parallelism(self) -> int:
        """The new number of subtasks."""

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Batches that each old subtask had kept of an input, for each new one; their order is kept."""

    def queues(self, input_name: str, waiting: Sequence[Any]) -> list[Any]:
        """The same for what the old subtasks had set aside for later epochs, as its snapshots."""
