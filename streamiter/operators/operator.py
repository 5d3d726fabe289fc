"""The Operator: one step of a flow, one instance for each parallel subtask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from streamiter.records import Batch, Control

if TYPE_CHECKING:
    from streamiter.operators.context import Context
    from streamiter.operators.output import Output

__all__ = ["Boundary", "BoundaryOutput", "IterationListener", "Operator", "OperatorFactory"]


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

    hears_of_epochs: bool = True
    """Whether it is told of epoch watermarks and the ends of data; not to be told saves a turn in each epoch."""

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

    def attach(self, surroundings: Any) -> None:
        """Called once, before ``open``, with what only the plan knows (see the runtime's plan)."""
