"""Training on a parameter server, for any model: workers share the parameters in step, or each at its own pace.

The flow is: mini-batches, a :class:`Repeater` for several passes over bounded data, the workers, and :class:`Versions`,
which turns the reports of the workers into versions of the model. For each mini-batch a :class:`ParameterServerWorker`
pulls parameters from the server, computes, pushes the result, and *clocks*: it reports that its mini-batch is over. The
consistency of the matrix decides which workers wait. A :class:`Learner` is the model: it pulls, computes and pushes.
:class:`ServerTraining` checks the options that all trainings share, and adds these steps.
"""

from __future__ import annotations

import abc
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypedDict, TypeVar, final

from streamiter.engine.graph.graph import SINGLE_INPUT
from streamiter.engine.inbox.port_progress import InputEnded
from streamiter.errors import CheckpointError, GraphError, ModelError, shortened
from streamiter.flow.building import add_next_step
from streamiter.flow.flow import Flow, step_names
from streamiter.flow.stream import Stream
from streamiter.iteration.marked_streams import Replaying
from streamiter.learn.rows import Refusals, blaming_rows, of_good_rows
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import COPIED, DeclaredOperator, SharedOperator, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import BoundaryOutput, Context, Operator
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.parameter_server.calls import Call
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import BSP, Consistency
from streamiter.parameter_server.matrix import DTYPES, DType
from streamiter.parameter_server.server import ParameterServer
from streamiter.topics.topic import Topic
from streamiter.values.numbers import whole_number
from streamiter.values.records import Batch, Control, EndOfInput, OutputTag, slice_batch

# The same limit as for replayed streams: about ten million small rows. For a few workers this is a small part of a
# machine's memory.
REPEAT_MEMORY_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class ParameterServerTraining:
    """The streams that a training on a parameter server returns."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and with ``publish_every=n`` each n-th before it; for ``publish_model``."""
    losses: Stream
    """A dict for each mini-batch: the ``worker``, its ``clock``, the mean ``loss`` before the step, the number of its
    ``records``, and the seconds ``waited_s`` that the worker waited for the parameters."""


class OnlineServerOptions(TypedDict, total=False):
    """The options that trainings on a parameter server share."""

    workers: int | None
    """The number of workers; None, the default: as many as the stream has subtasks."""
    publish_every: int | None
    """After this many of its clocks the first worker sends a version of the model. The last version is made when all
    workers have left; None, the default: only the last version."""
    on_error: RejectionPolicy
    """What happens to records that are no rows; "fail" by default."""
    dead_letter: Topic | None
    """The topic that such records go to."""
    name: str | None
    """Put in front of the names of the steps."""


class ServerOptions(OnlineServerOptions, total=False):
    """More options of trainings in epochs."""

    dtype: DType
    """The dtype of the matrix, "float64" by default, or "float32"."""
    worker: type[ParameterServerWorker]
    """A class derived from ``ParameterServerWorker``, to do more for each mini-batch."""
    memory_bytes: int
    """The memory of each worker for mini-batches that it reads again, 512 MiB by default; others are on disk."""


class ServerTraining:
    """The checked options that the trainings on a parameter server share. Raises GraphError for bad options."""

    def __init__(
        self,
        owner: str,
        stream: Stream,
        server: ParameterServer,
        consistency: Consistency,
        options: ServerOptions,
        *,
        batch: int,
        epochs: int = 1,
    ) -> None:
        check_server(owner, server, stream.flow)
        check_consistency(owner, consistency)
        self.dtype = dtype = options.get("dtype", "float64")
        floats = [known for known in DTYPES if known.startswith("float")]
        if dtype not in floats:
            raise GraphError(f"{owner}(dtype=): expected {' or '.join(map(repr, floats))}, given {dtype!r}")
        worker: object = options.get("worker", ParameterServerWorker)
        if not (isinstance(worker, type) and issubclass(worker, ParameterServerWorker)):
            raise GraphError(
                f"{owner}(worker=): expected a class derived from ParameterServerWorker, given {shortened(worker)}; "
                "write class MyWorker(ParameterServerWorker)"
            )
        self.worker = worker
        self.epochs = count_of(owner, "epochs", epochs)
        self.batch = count_of(owner, "batch", batch)
        workers, publish_every = options.get("workers"), options.get("publish_every")
        self.workers = stream.parallelism if workers is None else count_of(owner, "workers", workers)
        self.memory_bytes = count_of(owner, "memory_bytes", options.get("memory_bytes", REPEAT_MEMORY_BYTES))
        self.publish_every = sys.maxsize if publish_every is None else count_of(owner, "publish_every", publish_every)
        if epochs > 1 and not stream.is_bounded:
            raise GraphError(
                f"{owner}(epochs=): expected 1 for {stream.name!r}, which never ends, given {epochs}; read the topic "
                'with stop="latest", or set epochs=1'
            )
        self.owner, self.stream, self.server = owner, stream, server
        self.label = step_names(stream.flow, options.get("name"))
        self._policy: Refusals = {
            "on_error": options.get("on_error", "fail"),
            "dead_letter": options.get("dead_letter"),
        }

    def steps(self, learner: AnyLearner, mini_batch: Callable[[Batch], object | None]) -> ParameterServerTraining:
        """Add all steps.

        ``mini_batch(records)`` returns a mini-batch for the learner as plain data, None for no rows; records that it
        refuses follow ``on_error`` or go to ``dead_letter``.
        """
        mini_batches = self.stream.batch(self.batch, parallelism=self.workers, name=self.label("mini-batches")).process(
            lambda: Prepare(mini_batch), name=self.label("prepare"), **self._policy
        )
        if self.epochs > 1:
            mini_batches = repeated(
                mini_batches, self.epochs, memory_bytes=self.memory_bytes, name=self.label("epochs")
            )
        return self.train(mini_batches, learner)

    def train(self, mini_batches: Stream, learner: AnyLearner) -> ParameterServerTraining:
        """Add the workers, one for each subtask of the mini-batches, and the step that makes versions of the model."""
        workers, worker, server, owner = mini_batches.parallelism, self.worker, self.server, self.owner
        options = ServerWorkerOptions(learner, self.publish_every)
        reports = mini_batches.process(
            lambda: worker(options), name=self.label("train"), parallelism=workers, parameter_server=server
        )
        models = reports.process(
            lambda: Versions(learner, server, workers, owner), name=self.label("versions"), parallelism=1
        )
        return ParameterServerTraining(models, models.side_output(REPORTS))


def count_of(owner: str, option: str, given: object) -> int:
    """Return an option that is a whole number of at least 1."""
    return whole_number(f"{owner}({option}=)", given, 1, error=GraphError)


def check_server(owner: str, server: object, flow: Flow) -> None:
    """Raise GraphError unless a server is given that no other step uses.

    Every worker of a server takes part in every matrix: the training would wait for the workers of the other step,
    which never clock its matrix.
    """
    if not isinstance(server, ParameterServer):
        raise GraphError(
            f"{owner}: expected a ParameterServer, given {shortened(server)}; make one: ParameterServer(shards=2)"
        )
    others = [step.name for step in flow.steps if step.service is server]
    if others:
        raise GraphError(
            f"{owner}: expected a server of its own, given {server.name!r}, which step {others[0]!r} uses; make "
            "another one: ParameterServer(name=…)"
        )


def check_consistency(owner: str, consistency: object) -> None:
    """Raise GraphError unless a consistency is given, such as ``BSP()``."""
    if not isinstance(consistency, Consistency) or type(consistency) is Consistency:
        raise GraphError(
            f"{owner}(consistency=): expected BSP(), ASP() or SSP(staleness=…), given {shortened(consistency)}; "
            "take one of streamiter.parameter_server"
        )


class Prepare(Operator):
    """Turns lists of records into mini-batches; refused records follow the policy of the step."""

    def __init__(self, mini_batch: Callable[[Batch], object | None]) -> None:
        self._mini_batch = mini_batch

    def process(self, records: Batch, out: Output) -> None:
        mini_batch = of_good_rows(lambda rows: blaming_rows(self._mini_batch, rows, self._mini_batch), records, out)
        if mini_batch is not None:
            out.emit(mini_batch)


MiniBatchT = TypeVar("MiniBatchT")
PulledT = TypeVar("PulledT")
ContributionT = TypeVar("ContributionT")


class Computed(NamedTuple, Generic[ContributionT]):
    """The result of one mini-batch."""

    contribution: ContributionT | None
    """The numbers to push; None to push nothing."""
    loss: float
    """The sum of the losses of its records, with the parameters that were pulled."""
    records: int
    """The number of records that were learned from."""


class Learner(abc.ABC, Generic[MiniBatchT, PulledT, ContributionT]):
    """A model whose parameters are in a matrix: for a mini-batch it pulls, computes and pushes numbers.

    A learner has settings only; all workers share one learner.
    """

    matrix: str
    """The name of the matrix; its clock is the clock of the training."""

    metric: str
    """The name of the mean loss among the metrics of a version."""

    consistency: Consistency
    """The consistency of the matrix."""

    @property
    def is_in_step(self) -> bool:
        """Whether pushed numbers are applied together, with the clock of all workers (BSP)."""
        return isinstance(self.consistency, BSP)

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the parameters depends, as plain data."""
        return {"learner": type(self).__name__, "matrix": self.matrix}

    @abc.abstractmethod
    async def create(self, client: Client) -> None:
        """Create the matrix, unless another worker has created it."""

    @abc.abstractmethod
    async def pull(self, client: Client, mini_batch: MiniBatchT) -> PulledT:
        """Return the parameters that this mini-batch needs."""

    @abc.abstractmethod
    def compute(self, mini_batch: MiniBatchT, pulled: PulledT) -> Computed[ContributionT]:
        """Return the numbers to push, and the loss. Raises ModelError if the arithmetic overflows."""

    @abc.abstractmethod
    async def push(self, client: Client, mini_batch: MiniBatchT, contribution: ContributionT) -> Sequence[Call[None]]:
        """Begin to add the contribution to the parameters, at once or with the clock, as the consistency says."""

    async def clock(self, client: Client) -> None:
        """Clock every matrix of the model: this mini-batch is over."""
        await client.clock(self.matrix)

    @abc.abstractmethod
    async def settle(self, client: Client) -> None:
        """Wait until the last push of this worker is applied; with BSP, until all workers have clocked."""

    @abc.abstractmethod
    async def parameters(self, client: Client) -> dict[str, object]:
        """Return all parameters, to publish a version of the model."""


AnyLearner = Learner[Any, Any, Any]


@final
class MiniBatchReport(TypedDict):
    """A mini-batch that a worker has learned from."""

    worker: int
    clock: int
    """The number of its mini-batches so far."""
    loss: float
    """The sum of the losses of its records."""
    records: int
    waited_s: float
    """The seconds that the worker waited for the parameters."""


@final
class ParametersReport(TypedDict):
    """The parameters of a version, after this clock of the first worker."""

    parameters: dict[str, object]
    clock: int


@final
class EndReport(TypedDict):
    """A worker that has left; no version waits for it."""

    worker: int
    clock: int
    """``sys.maxsize``."""


class ServerWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    learner: AnyLearner
    """The model."""
    publish_every: int
    """The number of clocks of the first worker between two versions of the model."""


def _at_one_clock(name: str, clocks: Sequence[int], parallelism: int) -> Sequence[int]:
    """Let the new workers continue at the clock of the old ones: with BSP, all stop for a checkpoint at one clock."""
    if len(set(clocks)) > 1:
        raise CheckpointError(
            "its workers are at different clocks: they do not wait for each other, or some have no rows left"
        )
    return [clocks[0]] * parallelism


class ParameterServerWorker(SharedOperator):
    """Trains on its mini-batches, and leaves the training after the last one, so that no worker waits for it.

    To do more for each mini-batch, derive a class, and give the derived class as ``worker=``.
    """

    keeps = "the model"

    _clocks = declared(0, share=_at_one_clock)

    def __init__(self, options: ServerWorkerOptions) -> None:
        self.learner = options.learner
        self._publish_every = options.publish_every

    async def open(self, context: Context) -> None:
        self.context = context
        self.client: Client = context.parameter_server
        await self.learner.create(self.client)

    def wanted_inputs(self) -> None:
        """Read all inputs. With this method, the engine sends a record's output before it reads the next record."""
        return

    async def compute(self, mini_batch: Any, pulled: Any) -> Computed[Any]:
        """Return the contribution to push for a mini-batch, computed with the parameters that were pulled for it."""
        return self.learner.compute(mini_batch, pulled)

    async def process(self, mini_batch: Any, out: Output) -> None:
        """Pull, compute, push and clock for one mini-batch."""
        clock = self.context.clock
        asked_s = clock.monotonic_s()
        pulled = await self.learner.pull(self.client, mini_batch)
        # Answers of this process to others leave before its event loop computes.
        await asyncio.sleep(0)
        waited_s = clock.monotonic_s() - asked_s
        if self.context.subtask_index == 0 and self._clocks and self._clocks % self._publish_every == 0:
            # Here and not right after the clock: with BSP the pull would wait there for all other workers.
            out.emit({"parameters": await self.learner.parameters(self.client), "clock": self._clocks})
        computed = await self.compute(mini_batch, pulled)
        adds: Sequence[Call[None]] = ()
        if computed.contribution is not None:
            adds = await self.learner.push(self.client, mini_batch, computed.contribution)
        await self.learner.clock(self.client)  # A shard takes it after the adds, whose replies come with its own.
        for add in adds:
            await add
        self._clocks += 1
        out.emit(
            {
                "worker": self.context.subtask_index,
                "clock": self._clocks,
                "loss": computed.loss,
                "records": computed.records,
                "waited_s": waited_s,
            }
        )

    async def finish(self, out: Output) -> None:
        # The worker leaves when this returns. Until then its last push may wait for other workers.
        await self.learner.settle(self.client)
        out.emit({"worker": self.context.subtask_index, "clock": sys.maxsize})

    def definition(self) -> Definition:
        return {"kind": "training", **self.learner.definition()}


REPORTS: Final = OutputTag("losses")
"""The side output of :class:`Versions`: for each mini-batch its mean loss, and the worker that learned from it."""


class Versions(DeclaredOperator):
    """Makes a ``ModelSnapshot`` of each set of parameters that workers send, and at the end of the server's parameters.

    At the end every worker has left, so no worker adds anything any more; when the data of a single worker ends, other
    workers may still add. Parallelism 1.

    With BSP the parameters are those after a clock of all workers. Versions wait here until each worker has reported
    its mini-batches up to that clock, so that the counts do not depend on the order of arrival. Otherwise a version
    counts the reports that have arrived so far.
    """

    keeps = "the counts of its versions"

    _records = declared(0)
    _learned: dict[int, tuple[int, float]] = declared(made=dict, form=COPIED)
    """The number of records since the last version and the sum of their losses, by clock."""
    _clocks: dict[int, int] = declared(made=dict, form=COPIED)
    """The last clock that each worker has reported."""
    _waiting: list[tuple[int, dict[str, object]]] = declared(made=list, form=COPIED)
    """Clocks and parameters of the versions to make; with BSP workers differ by one clock at most."""

    _workers: int = declared()

    def __init__(self, learner: AnyLearner, server: ParameterServer, workers: int, owner: str) -> None:
        self._learner = learner
        self._server = server
        self._workers = workers
        self._owner = owner

    def process(self, report: MiniBatchReport | ParametersReport | EndReport, out: Output) -> None:
        """Count the report of a worker, then make the versions that are due."""
        if "loss" in report:
            self._count(report, out)
        elif "parameters" in report:
            self._waiting.append((report["clock"], report["parameters"]))
        else:
            self._clocks[report["worker"]] = report["clock"]
        while self._waiting and self._is_due(self._waiting[0][0]):
            clock, parameters = self._waiting.pop(0)
            out.emit(self._version(parameters, clock if self._learner.is_in_step else None))

    def _count(self, report: MiniBatchReport, out: Output) -> None:
        self._clocks[report["worker"]] = report["clock"]
        records, loss = self._learned.get(report["clock"], (0, 0.0))
        self._learned[report["clock"]] = records + report["records"], loss + report["loss"]
        if report["records"]:
            out.emit({**report, "loss": report["loss"] / report["records"]}, tag=REPORTS)

    def _is_due(self, clock: int) -> bool:
        if not self._learner.is_in_step:
            return True
        return sum(reached >= clock for reached in self._clocks.values()) == self._workers

    def _version(self, parameters: dict[str, object], up_to: int | None) -> ModelSnapshot:
        clocks = [clock for clock in self._learned if up_to is None or clock <= up_to]
        learned = [self._learned.pop(clock) for clock in clocks]
        records = sum(records for records, _ in learned)
        self._records += records
        metrics = {self._learner.metric: sum(loss for _, loss in learned) / records} if records else {}
        return ModelSnapshot(parameters, self._records, metrics)

    async def finish(self, out: Output) -> None:
        if not self._records and not any(records for records, _ in self._learned.values()):
            raise ModelError(f"{self._owner}: expected examples to learn from, given none; check the input")
        reader = self._server.client(worker=self._workers)  # The numbers below are the numbers of the workers.
        parameters = await self._learner.parameters(reader)
        await reader.leave()
        out.emit(self._version(parameters, None))

    def definition(self) -> Definition:
        return {"kind": "versions", **self._learner.definition()}

    def without_end(self, state: dict[str, Any]) -> dict[str, Any]:
        """Wait for all workers again: each joins the server once more."""
        return {**state, "clocks": {}}

    def restore(self, state: dict[str, Any]) -> None:
        if state["workers"] != self._workers:  # All workers were at one clock, and have reported it.
            state = {**state, "clocks": {}, "workers": self._workers}
        super().restore(state)


def repeated(stream: Stream, passes: int, *, memory_bytes: int, name: str) -> Stream:
    """Add a step that emits the records of each subtask ``passes`` times, in the same order.

    Up to ``memory_bytes`` of them are kept in memory, the others on disk. Subtasks share no epochs: unlike with
    :func:`~streamiter.replayed` no subtask waits for the pass of another one.
    """
    output = add_next_step(
        {SINGLE_INPUT: stream},
        name,
        lambda: Repeater(passes, memory_bytes),
        {"name": name, "parallelism": stream.parallelism},
        shape="iteration",
        epochs_seen=f"{passes} passes",
        keeps_event_time=False,
    )
    return Stream(stream.flow, output)


@final
class Repeater(Replaying):
    """Passes its records on and keeps them; when its input has ended, it emits them again, pass after pass.

    A repeater is at the border of a task, so that a checkpoint barrier can pass between any two records.
    """

    outlives_inputs = True
    brings_input = True
    keeps = "the records that it repeats"
    _is_repeating = declared(False)
    _passes_left: int = declared()
    _record = declared(0)
    """The record of the batch that is emitted next."""

    def __init__(self, passes: int, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._passes = passes
        self._passes_left = passes - 1

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self.cache.append(records)
        for record in range(len(records)):
            out.emit_batch(slice_batch(records, record, record + 1), epoch)
            await out.room()

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._is_repeating = True
            self.send_next_soon()

    def drain(self) -> None:
        self._passes_left = 0

    async def send_next(self, out: BoundaryOutput) -> None:
        if not self._passes_left or not len(self.cache):
            await out.control(EndOfInput())
            return
        records = self.cache.batch(self.position)
        out.emit_batch(slice_batch(records, self._record, self._record + 1), 0)
        self._record += 1
        if self._record == len(records):
            self.position, self._record = self.position + 1, 0
        if self.position == len(self.cache):
            self.position = 0
            self._passes_left -= 1
        self.send_next_soon()

    def without_end(self, state: dict[str, Any]) -> NoReturn:
        """Refuse more records: the passes that are over did not have them."""
        raise CheckpointError("its passes over its records are over")

    @staticmethod
    def redistribute(states: Sequence[object], parallelism: int) -> NoReturn:
        """Refuse another number of workers, since each worker is in a pass of its own over its own records."""
        raise CheckpointError("each of its subtasks repeats records of its own, in a pass of its own")

    def definition(self) -> Definition:
        return {**super().definition(), "passes": self._passes}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self._is_repeating:
            self.send_next_soon()
