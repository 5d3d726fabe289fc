"""The operator: one step of a flow, with one instance for each parallel subtask.

To write an operator, read :class:`Operator` and :class:`Context` here, then
:class:`~streamiter.operators.output.Output`, which takes the results. The built-in operators in `steps` are short
examples. The rest of this module is for the engine: the progress of a task, operators at the border of an iteration,
and the redistribution of state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar, cast

from streamiter.errors import ConfigurationError
from streamiter.operators.definitions import Definition
from streamiter.operators.event_timers import StepTimes, checked_time
from streamiter.operators.keyed_state import KeyedState, KeyedStates
from streamiter.operators.services import ServiceWorker
from streamiter.values.deferred import Encode
from streamiter.values.helpers.clock import Clock
from streamiter.values.origins import BatchAtHand, BatchOrigin
from streamiter.values.records import Batch, Control, EventTimeWatermark
from streamiter.values.times import MIN_TIME, Seconds, in_seconds

if TYPE_CHECKING:
    from streamiter.operators.output import Output

MaybeAwaitable = Awaitable[None] | None
"""The result of a method that may be a plain or a coroutine function."""


class Operator:
    """Base class of all operators.

    An operator defines one of these methods to handle records:

    - ``process(record, out)``: the engine calls it for each record.
    - ``process_batch(batch, out)``: the engine calls it for each transport batch: a list, a numpy array or ``Columns``,
      which must not be changed in place. The size of a transport batch has no meaning.
    - ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)`` for each named input, as in
      ``connect(model=…, examples=…)``.

    It may define further methods:

    - ``wanted_inputs() -> names``: returns the inputs to read next. The engine calls it again after each record, or
      after each batch of an input that is handled by batches. If all named inputs have ended, it reads every input.
    - ``input_ended(name, out)``: the input has ended at this instance.
    - ``on_timer(payload, out)``: a timer that was set with ``context.set_timer`` is due.
    - ``on_event_timer(payload, out)``: a timer of ``context.set_event_timer`` is due: the event time has reached it.
    - ``on_event_time_watermark(watermark, out) -> watermark``: the event time has grown, or a batch was handled while
      the operator holds back a watermark. It emits what is complete and returns the watermark to pass on: at most the
      least timestamp that it keeps. It is a plain method.
    - ``redistribute(states, parallelism) -> states``: distributes the snapshots of all old subtasks over another number
      of subtasks. The engine calls it on a new, unopened instance when a job resumes from a checkpoint with another
      parallelism. Without it, only a step without state, or with state by key, can change its parallelism. The state
      of a subtask that has ended is its state after ``finish``. Timers without a key go to the new subtasks in turn.
    - ``definition() -> dict``: returns the settings on which the meaning of the state depends, as JSON has them. A job
      does not resume with state of another definition. The default is the name of the class.

    Every method may be a coroutine function. An operator that handles records in a coroutine function, or sets
    ``runs_in_thread``, runs in a task of its own. The step before calls every other operator directly.

    >>> class Square(Operator):
    ...     def process(self, record, out):
    ...         out.emit(record * record)
    """

    runs_in_thread: bool = False
    """Handle batches in a worker thread, for slow steps that release the GIL. Only one call at a time uses the
    state."""

    epochs_in_order: bool = False
    """In an iteration, set records of later epochs aside until the epoch's turn comes. For ``wanted_inputs``, an input
    has then ended when it has no more records of the current epoch. Records of an input that is not wanted are set
    aside, too, so their source is not blocked."""

    any_order: bool = False
    """In a synchronous loop, receive the records of an epoch as they arrive from several subtasks, and not in the order
    of inputs and subtasks. The order must not change what the operator emits: it counts, or sorts for itself."""

    if TYPE_CHECKING:
        # An operator defines some of these; the engine looks which ones.

        def process(self, record: Any, out: Output, /) -> MaybeAwaitable:
            """Handle a record."""

        def process_batch(self, batch: Any, out: Output, /) -> MaybeAwaitable:
            """Handle a transport batch."""

        def on_timer(self, payload: Any, out: Output, /) -> MaybeAwaitable:
            """A timer that was set with ``context.set_timer`` is due."""

        def input_ended(self, name: str, out: Output, /) -> MaybeAwaitable:
            """An input has ended at this instance."""

    def open(self, context: Context) -> MaybeAwaitable:
        """Prepare the instance. Called once, before all other methods. Keep ``context`` if it is needed later."""

    def finish(self, out: Output) -> MaybeAwaitable:
        """Emit the remaining results: the input has ended. Not called when the job is suspended or fails."""

    def close(self) -> MaybeAwaitable:
        """Release resources. Called once in every case: right after ``finish``, and not only at the job's end."""

    def snapshot(self) -> Any:
        """Return the state as plain data, which must not change afterwards. Called between two batches.

        While other steps still run, it is also called after ``close``.
        """
        return None

    def restore(self, state: Any) -> MaybeAwaitable:
        """Take over a state that ``snapshot`` returned. Called after ``open`` and before the first record."""

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends: see :mod:`~streamiter.operators.definitions`.

        Called on an unopened instance.
        """
        return {"kind": type(self).__name__}

    def without_end(self, state: Any) -> Any:
        """Return a state of ``snapshot`` without the sign that the input has ended: a finished job reads on.

        Called on an unopened instance. The input of the operator continues, and its timers by the clock are gone. In a
        loop, epochs count from 0 again. A CheckpointError says why the operator cannot go on.
        """
        return state


class EngineOperator(Operator):
    """Base of the operators that tell the engine more of themselves. All others have the values of this class."""

    is_stateless: bool = False
    """The operator keeps nothing from one batch to the next."""

    emits_at_once: bool = False
    """The operator has state, but the records that it emits for a batch were made from this batch."""

    takes_timed_batches: bool = False
    """In a stream with event time, the operator handles ``TimedBatch`` itself."""

    is_behind: bool = False
    """The operator has emitted a part of what is due by an event-time watermark. The engine calls
    ``on_event_time_watermark`` again when there is room for more."""

    one_by_one: Literal["never", "if tolerant", "always"] = "never"
    """In a stream with event time, the operator gets batches of one record, so that the records that it emits or
    refuses have the record's timestamp: always, or only if the step tolerates refused records. Otherwise the operator
    emits a batch as long as the batch that it was given."""

    keeps: str = "its state"
    """The state in words, for a message about its loss."""

    starts_alone: bool = True
    """The step may start without its state when the steps around it have theirs, as ``changed_steps=``
    says. Steps of loops may not."""

    assigns_event_time: bool = False
    """The operator sends event-time watermarks of its own, and ignores the watermarks of its input."""

    def adopt(self, definition: Definition) -> None:
        """Take the definition of the state that ``restore`` is given next; it fits. Called before ``restore``."""


_OTHERS: Final = EngineOperator()


def known_of(operator: Operator) -> EngineOperator:
    """Return what the engine knows of an operator."""
    return operator if isinstance(operator, EngineOperator) else _OTHERS


OperatorFactory = Callable[[], Operator]
"""An operator class, or a callable without arguments that returns an operator. Called once for each subtask."""


Notice: TypeAlias = Callable[["BoundaryOutput"], MaybeAwaitable]
"""What is posted to a task: the task calls it between two batches, with the output of its boundary operator."""


class Context:
    """Tells an operator where it runs. It is passed to ``Operator.open`` and valid until ``close``.

    Only the operator's own task may use it.
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
        post: Callable[[Notice], None],
        set_timer: Callable[[float, Any, Any], None],
        in_iteration: bool,
        keyed: KeyedStates | None,
        encode: Encode,
        times: StepTimes | None = None,
        takes_event_timers: bool = False,
        make_states: MakeStates | None = None,
        noted: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
    ) -> None:
        self.name = name
        self.subtask_index = subtask_index
        self.parallelism = parallelism
        self.clock = clock
        self.scope = scope
        self.post = post
        self.encode = encode
        """Encodes plain data for this flow; for state that is ``Deferred``."""
        self._progress = progress
        self._statistics = statistics
        self._set_timer = set_timer
        self._in_iteration = in_iteration
        self._keyed = keyed
        self._noted = noted
        self._make_states = make_states
        self._times = times
        self._takes_event_timers = takes_event_timers
        self._service_worker: ServiceWorker | None = None
        self.key: Any = None

    @property
    def epoch(self) -> int | None:
        """The epoch of the record, the batch or the callback that is handled now.

        None outside an iteration, unless the stream was stamped with ``epochs_every``.
        """
        return self._progress.epoch if self._in_iteration else None

    @property
    def is_ending(self) -> bool:
        """Whether the iteration is known to have ended: on termination, in ``finish`` and for the last records.

        Most records of the last epoch arrive before the end is known.
        """
        return self._progress.is_ending

    @property
    def statistics(self) -> OperatorStatistics:
        """The counts of this instance so far."""
        return self._statistics()

    @property
    def state(self) -> Any:
        """The state of the current ``key``: initially an empty dict. Change it in place, or assign any plain data.

        It exists only after ``key_by``. Change it only until the current call returns: a checkpoint is written while
        further records are handled, and copies the state of a key when the key is used the next time.
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
        """The client of this subtask, in a step with ``parameter_server=``.

        It is a :class:`~streamiter.parameter_server.Client`: a registered worker from before ``open`` until the input
        ends.
        """
        if self._service_worker is None:
            raise ConfigurationError(
                f"context.parameter_server: expected a step with a parameter server, given step {self.name!r} without; "
                "write .process(…, parameter_server=server)"
            )
        return self._service_worker

    def set_timer(self, delay_s: Seconds, payload: Any = None) -> None:
        """Call ``on_timer(payload, out)`` in ``delay_s`` seconds, with the same ``context.key``.

        ``payload`` is plain data, because timers are part of a snapshot. A timer that is not due when the input ends is
        dropped: emit in ``finish`` what must not be lost. In an iteration, which continues after the data of a step has
        ended, emit it in ``input_ended``.
        """
        self._set_timer(in_seconds(delay_s), self.key, payload)

    # -- event time ----------------------------------------------------------------------------------------

    @property
    def event_time(self) -> int | None:
        """The watermark of the step, in milliseconds: no record with a timestamp below it is expected any more.

        In ``on_event_timer`` it is the time at which the timer was due. None before the first watermark, and in a
        stream without event time. At the end of the input it is ``MAX_TIME``.
        """
        return None if self._times is None else self._times.event_time(self.key)

    @property
    def event_time_is_idle(self) -> bool:
        """Whether the inputs of the step bring nothing for now, so that event time stops."""
        return self._times is not None and self._times.is_idle

    @property
    def timestamp(self) -> int | None:
        """The timestamp of the record or event timer at hand, in milliseconds; None if it has none.

        For a whole batch it is the greatest of its timestamps.
        """
        if self._times is None or self._times.timestamp == MIN_TIME:
            return None
        return self._times.timestamp

    def set_event_timer(self, at: int, payload: Any = None) -> None:
        """Call ``on_event_timer(payload, out)`` when the event time has reached ``at``, with the same ``context.key``.

        ``at`` is in milliseconds. Timers fire in the order of their times, then in the order in which they were set;
        equal timers (key, ``at``, payload) are one timer. A timer whose time has been reached fires when the current
        call returns. At the end of the input all fire; a timer that is set from then on fires only if it is not later
        than the timers that were pending. ``payload`` is plain data, because timers are part of a snapshot. What the
        operator emits at the timer has the timestamp ``at``.
        """
        times = self._event_times("set_event_timer")
        if not self._takes_event_timers:
            raise ConfigurationError(
                "context.set_event_timer: expected an operator that defines on_event_timer(payload, out), given one "
                "that does not; define it, since only on_event_timer is told of the timer"
            )
        times.set_timer(checked_time("context.set_event_timer(at)", at), self.key, payload)

    def delete_event_timer(self, at: int, payload: Any = None) -> None:
        """Delete the event timer with the same ``context.key``, time and payload; no effect if there is none."""
        self._event_times("delete_event_timer").delete_timer(
            checked_time("context.delete_event_timer(at)", at), self.key, payload
        )

    def _event_times(self, method: str) -> StepTimes:
        if self._times is None:
            raise ConfigurationError(
                f"context.{method}: expected a stream with event time, given step {self.name!r} without; put "
                ".event_time(…) before the step"
            )
        return self._times

    def _keyed_state(self) -> KeyedStates:
        if self._keyed is None:
            raise ConfigurationError(
                "context.state: expected a step behind .key_by(f), of which all inputs have keys, given one without; "
                "write stream.key_by(f).process(…), or keep a dict of your own and return it from snapshot"
            )
        return self._keyed


# -- what the engine and its operators do with a context --------------------------------------------------


def serve_with(context: Context, worker: ServiceWorker) -> None:
    """Set the worker of the step's service, before ``open``."""
    context._service_worker = worker


def states_of(context: Context) -> KeyedStates | None:
    """Return the states behind ``context.state``; None in a step without keys."""
    return context._keyed


def states_by_own_keys(context: Context) -> KeyedStates:
    """Return the states of an operator that finds the keys itself; called once, in ``open``."""
    if context._make_states is None:
        return KeyedState(context.clock, name=context.name, encode=context.encode)
    return context._make_states()


def keys_are_further(context: Context) -> bool:
    """Return whether some keys have a higher watermark than the step, because its parallelism has changed."""
    return context._times is not None and context._times.has_floors


def noting_of(context: Context) -> Callable[[Awaitable[Any]], Awaitable[Any]] | None:
    """Return the function that awaits the step's code in another task; None if no process asks which step runs."""
    return context._noted


MakeStates = Callable[[], KeyedStates]
"""Makes the states of one subtask of a step."""


@dataclass(frozen=True, slots=True)
class OperatorStatistics:
    """Counts of one operator instance since it was opened."""

    records_in: int
    """The number of records that it has handled."""
    batches_in: int
    """The number of transport batches that held these records."""
    records_out: int
    """The number of records that it has emitted, side outputs included."""
    rejected: int
    """The number of refused records: skipped, or sent to the dead-letter topic."""


class KeepsRecords:
    """A base of operators that keep records until something happens: statistics have their number."""

    @property
    def kept(self) -> int:
        """The number of records, windows or questions that are kept now."""
        raise NotImplementedError


class IterationListener:
    """A mixin for operators of an iteration body: callbacks for the epochs and for the end of the iteration.

    Outside an iteration the callbacks follow the epochs of a stream that was stamped with ``epochs_every``; there is no
    callback for the end. A step on any other stream is refused.

    Source: FLIP-176's ``IterationListener``.
    """

    needs_epochs: bool = True
    """Whether the operator needs epochs. False for an operator that also works without callbacks. If a function makes
    the operator, ``__init__`` may set it."""

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> MaybeAwaitable:
        """Called once for each epoch, in order, after this instance's records of the epoch. Emits in that epoch."""

    def on_iteration_terminated(self, context: Context, out: Output) -> MaybeAwaitable:
        """Called once, before ``finish``: the iteration has ended."""


T = TypeVar("T")


class JobScope:
    """Objects that the tasks of one job in one process share. The first task that asks for an object makes it."""

    def __init__(self) -> None:
        self._shared: dict[object, object] = {}

    def get(self, key: object, create: Callable[[], T]) -> T:
        """Return the object under ``key``; make it if it does not exist."""
        if key not in self._shared:
            self._shared[key] = create()
        return cast("T", self._shared[key])

    def put(self, key: object, shared: object) -> None:
        """Set the object under ``key``."""
        self._shared[key] = shared


class Progress(BatchAtHand):
    """The progress of a task. Its operators read it; only the task and its outputs write it."""

    def __init__(self) -> None:
        self.handled = 0
        """Counts the handled batches and control records, and single records where each is awaited. A task whose count
        does not grow makes no progress."""
        self.epoch = 0
        self.watermark = -1
        self.is_ending = False


class BoundaryOutput:
    """The output of a :class:`Boundary`: records of any epoch, and control records in order with them."""

    port: int = 0
    """The number of the channel of the records that are handled now."""

    origin: BatchOrigin | None = None
    """Where these records were read, if that is known."""

    def emit_batch(self, records: Batch, epoch: int) -> None:
        """Emit records of that epoch."""
        raise NotImplementedError

    def refuse(self, record: Any, error: Exception, epoch: int, origin: BatchOrigin | None) -> None:
        """Refuse a record: by the policy of the step this returns or ends the job."""
        raise NotImplementedError

    async def room(self) -> None:
        """Wait until the emitted records have room; for operators that emit many records at once."""
        raise NotImplementedError

    async def control(self, control: Control) -> None:
        """Emit a control record after all emitted records; ``EndOfInput`` ends the task."""
        raise NotImplementedError


class Boundary(EngineOperator):
    """An operator of the engine that handles control records itself, mostly at the border of an iteration.

    It is the first operator of its task, and the task passes on only what it emits. Checkpoint barriers pass through
    the task; the operator is only told of them.
    """

    outlives_inputs: bool = False
    """Whether it continues after its inputs have ended: then checkpoint barriers start at it."""

    brings_input: bool = False
    """Whether it emits records that are not its current input; ``drain`` ends them."""

    gives_epochs: bool = False
    """Whether epochs start at it: its subtasks may be in different epochs, and may skip epochs."""

    def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> Awaitable[None] | None:
        """Handle records of one epoch; return what to await until they are handled."""
        raise NotImplementedError

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        """Handle a control record that has arrived from all channels."""
        raise NotImplementedError

    async def on_event_time(self, control: EventTimeWatermark, out: BoundaryOutput) -> None:
        """Handle an event-time watermark: pass it on, behind all records that arrived before it."""
        await out.control(control)

    def drain(self) -> None:
        """Emit no more records that are not its current input: the job is drained."""

    def wanted_inputs(self) -> Iterable[str] | None:
        """Return the inputs to read next; None means all."""
        return None

    def held_for(self) -> str | None:
        """Return for the log why it takes no input now; None if it has no special reason."""
        return None

    def has_work(self) -> bool:
        """Return whether it works on records between its calls, so that a long time without results is logged."""
        return False

    def checkpoint_begins(self, checkpoint: int) -> None:
        """A barrier has arrived, and ``snapshot`` was called, unless the checkpoint was abandoned."""

    def checkpoint_ends(self, checkpoint: int) -> None:
        """Its part of the checkpoint is complete: at once, or when the barrier has returned to it."""


class Sharing(Protocol):
    """For operators of the engine: distributes the waiting records of the old subtasks over the new subtasks.

    A record goes to the subtask to which its edge would send it now.
    """

    @property
    def parallelism(self) -> int:
        """The new number of subtasks."""

    def records(self, input_name: str, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Return the batches of an input for each new subtask, given each old subtask's batches; the order is kept."""
