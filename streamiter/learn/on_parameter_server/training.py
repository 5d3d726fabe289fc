"""Training on a parameter server: ``train_on_parameter_server`` for linear models, and the steps for any model.

The flow is: mini-batches, a :class:`Repeater` for several passes over bounded data, the workers, and :class:`Versions`,
which turns the reports of the workers into versions of the model. :func:`trained` adds these steps for any
:class:`~streamiter.learn.on_parameter_server.worker.Learner`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

from streamiter.errors import ConfigurationError, GraphError, ModelError, shortened
from streamiter.flow.building import add_next_step
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import FlowWithSources, Stream
from streamiter.learn.estimators import labelled
from streamiter.learn.linear import LogLoss, SquaredLoss
from streamiter.learn.on_parameter_server.worker import (
    Labels,
    Learner,
    LinearLearner,
    ParameterServerWorker,
    PrepareExamples,
    ServerWorkerOptions,
)
from streamiter.learn.rows import CheckedExamples, Extract, as_examples
from streamiter.models.update import ModelSnapshot
from streamiter.numbers import whole_number
from streamiter.operators.operator import BoundaryOutput, Context, Operator
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.optimizers import FTRL, Optimizer, checked_optimizer
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import DTYPES, DType
from streamiter.parameter_server.server import ParameterServer
from streamiter.records import Batch, Control, EndOfInput, OutputTag, slice_batch
from streamiter.runtime.feedback import AttachedBoundary, Surroundings
from streamiter.runtime.gate_epochs import InputEnded
from streamiter.runtime.graph import SINGLE_INPUT
from streamiter.runtime.instance import DrainInput
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.checkpoints.disk_queue import ReplayCache


def count_of(owner: str, option: str, given: object) -> int:
    """Return an option that is a whole number of at least 1."""
    return whole_number(f"{owner}({option}=)", given, 1, error=GraphError)


def check_server(owner: str, server: object, flow: FlowWithSources) -> None:
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
            f"{owner}: expected a server of its own, given {server.name!r}, which step {others[0]!r} works with; make "
            "another one: ParameterServer(name=…)"
        )


def check_consistency(owner: str, consistency: object) -> None:
    """Raise GraphError unless a consistency is given, such as ``BSP()``."""
    if not isinstance(consistency, Consistency) or type(consistency) is Consistency:
        raise GraphError(
            f"{owner}(consistency=): expected BSP(), ASP() or SSP(staleness=…), given {shortened(consistency)}; "
            "take one of streamiter.parameter_server"
        )


def check_dtype(owner: str, dtype: object) -> None:
    """Raise GraphError for a dtype that cannot hold fractions."""
    floats = [name for name in DTYPES if name.startswith("float")]
    if dtype not in floats:
        raise GraphError(f"{owner}(dtype=): expected {' or '.join(map(repr, floats))}, given {dtype!r}")


def check_worker(owner: str, worker: object) -> None:
    """Raise GraphError unless a class of workers is given."""
    if not (isinstance(worker, type) and issubclass(worker, ParameterServerWorker)):
        raise GraphError(
            f"{owner}(worker=): expected a class derived from ParameterServerWorker, given {shortened(worker)}; "
            "write class MyWorker(ParameterServerWorker)"
        )


def check_bounded(owner: str, stream: Stream, epochs: int) -> None:
    """Raise GraphError for a stream that never ends if there is more than one epoch."""
    if epochs > 1 and not stream.is_bounded:
        raise GraphError(
            f"{owner}(epochs=): expected 1 for {stream.name!r}, which never ends, given {epochs}; read the topic with "
            'stop="latest", or go through it once'
        )


def repeated(stream: Stream, passes: int, *, memory_bytes: int, name: str) -> Stream:
    """Add a step that gives the records of each subtask ``passes`` times, in the same order.

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
    )
    return Stream(stream.flow, output)


@final
class _RepeatNext(Control):
    """A repeater posts it to itself to emit its next record, when the channels have room and others had their turn."""

    __slots__ = ()


@final
class Repeater(AttachedBoundary):
    """Passes its records on and keeps them; when its input has ended, it emits them again, pass after pass.

    It is at the border of a task, so that a checkpoint barrier can pass between any two records.
    """

    outlives_inputs = True
    brings_input = True

    def __init__(self, passes: int, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._is_repeating = False
        self._passes_left = passes - 1
        self._batch = self._record = 0
        """The next record to emit: its batch among the kept batches, and its place in that batch."""

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        self._context = context
        self._cache: ReplayCache = self._surroundings.make_replay_cache(self._memory_bytes)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self._cache.append(records)
        for record in range(len(records)):
            out.emit_batch(slice_batch(records, record, record + 1), epoch)
            await out.room()

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._is_repeating = True
            self._context.post(_RepeatNext())
        elif isinstance(control, DrainInput):
            self._passes_left = 0
        elif isinstance(control, _RepeatNext):
            await self._repeat_next(out)

    async def _repeat_next(self, out: BoundaryOutput) -> None:
        if not self._passes_left or not len(self._cache):
            await out.control(EndOfInput())
            return
        records = self._cache.batch(self._batch)
        out.emit_batch(slice_batch(records, self._record, self._record + 1), 0)
        self._record += 1
        if self._record == len(records):
            self._batch, self._record = self._batch + 1, 0
        if self._batch == len(self._cache):
            self._batch = 0
            self._passes_left -= 1
        self._context.post(_RepeatNext())

    def close(self) -> None:
        self._cache.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            "cache": self._cache.snapshot(),
            "is repeating": self._is_repeating,
            "passes left": self._passes_left,
            "batch": self._batch,
            "record": self._record,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._cache.restore(state["cache"])
        self._is_repeating = state["is repeating"]
        self._passes_left = state["passes left"]
        self._batch, self._record = state["batch"], state["record"]
        if self._is_repeating:
            self._context.post(_RepeatNext())


REPORTS: Final = OutputTag("losses")
"""The side output of :class:`Versions`: for each mini-batch its mean loss, and the worker that learned from it."""


class Versions(Operator):
    """Makes a ``ModelSnapshot`` of all parameters that workers send, and one of the server's parameters at the end.

    At the end every worker has left, so no worker adds anything any more; a worker whose own data has ended cannot
    know what the others still add. Parallelism 1.

    With BSP the parameters are those after a clock of all workers. They wait here until each worker has reported its
    mini-batches up to that clock, so that the counts do not depend on the order of arrival. Otherwise a version counts
    the reports that have arrived so far.
    """

    def __init__(self, learner: Learner, server: ParameterServer, workers: int, owner: str) -> None:
        self._learner = learner
        self._server = server
        self._workers = workers
        self._owner = owner
        self._records = 0
        self._told: dict[int, tuple[int, float]] = {}
        """What was learned from since the last version: the number of records and the sum of their losses, by clock."""
        self._clocks: dict[int, int] = {}
        """The last clock that each worker has reported."""
        self._ended = 0
        """The number of workers that have ended."""
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        """Clocks and parameters of the versions to make; with BSP workers differ by one clock at most."""

    def process(self, told: dict[str, Any], out: Output) -> None:
        """Count the report of a worker, then make the versions that are due."""
        if "parameters" in told:
            self._waiting.append((told["clock"], told["parameters"]))
        elif "ended" in told:
            self._ended += 1
            self._clocks.pop(told["worker"], None)
        else:
            self._count(told, out)
        while self._waiting and self._is_due(self._waiting[0][0]):
            clock, parameters = self._waiting.pop(0)
            out.emit(self._version(parameters, clock if self._learner.is_in_step else None))

    def _count(self, told: dict[str, Any], out: Output) -> None:
        self._clocks[told["worker"]] = told["clock"]
        records, loss = self._told.get(told["clock"], (0, 0.0))
        self._told[told["clock"]] = records + told["records"], loss + told["loss"]
        if told["records"]:
            out.emit({**told, "loss": told["loss"] / told["records"]}, tag=REPORTS)

    def _is_due(self, clock: int) -> bool:
        if not self._learner.is_in_step:
            return True
        return self._ended + sum(reached >= clock for reached in self._clocks.values()) == self._workers

    def _version(self, parameters: dict[str, Any], up_to: int | None) -> ModelSnapshot:
        clocks = [clock for clock in self._told if up_to is None or clock <= up_to]
        told = [self._told.pop(clock) for clock in clocks]
        records = sum(records for records, _ in told)
        self._records += records
        metrics = {self._learner.metric: sum(loss for _, loss in told) / records} if records else {}
        return ModelSnapshot(parameters, self._records, metrics)

    async def finish(self, out: Output) -> None:
        if not self._records and not any(records for records, _ in self._told.values()):
            raise ModelError(
                f"{self._owner}: expected examples to learn from, given none; look at what was read"
            )
        reader = self._server.client(worker=max(self._server.workers, default=-1) + 1)
        parameters = await self._learner.parameters(reader)
        await reader.leave()
        out.emit(self._version(parameters, None))

    def snapshot(self) -> dict[str, Any]:
        return {
            "records": self._records,
            "told": [(clock, *told) for clock, told in self._told.items()],
            "clocks": list(self._clocks.items()),
            "ended": self._ended,
            "waiting": self._waiting.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._records, self._ended = state["records"], state["ended"]
        self._told = {clock: (records, loss) for clock, records, loss in state["told"]}
        self._clocks = dict(state["clocks"])
        self._waiting = [(clock, parameters) for clock, parameters in state["waiting"]]


# As for replayed streams: some ten million small rows. For a few workers this is a small part of a machine's memory.
REPEAT_MEMORY_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class ParameterServerTraining:
    """The streams that a training on a parameter server returns."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and with ``publish_every=n`` each n-th before it; for ``publish_model``."""
    losses: Stream
    """A dict for each mini-batch: the ``worker``, its ``clock``, the mean ``loss`` before the step, the number of its
    ``records``, and the seconds ``waited_s`` that the worker waited for the parameters."""


def trained(
    mini_batches: Stream,
    learner: Learner,
    server: ParameterServer,
    *,
    owner: str,
    epochs: int,
    publish_every: int | None,
    worker: type[ParameterServerWorker],
    memory_bytes: int,
    label: Callable[[str], str],
) -> ParameterServerTraining:
    """Add the workers, one for each subtask of the mini-batches, and the versions of the model behind them."""
    workers = mini_batches.parallelism
    options = ServerWorkerOptions(learner, sys.maxsize if publish_every is None else publish_every)
    if epochs > 1:
        mini_batches = repeated(mini_batches, epochs, memory_bytes=memory_bytes, name=label("epochs"))
    told = mini_batches.process(
        lambda: worker(options), name=label("train"), parallelism=workers, parameter_server=server
    )
    models = told.process(
        lambda: Versions(learner, server, workers, owner), name=label("versions"), parallelism=1
    )
    return ParameterServerTraining(models, models.side_output(REPORTS))


_OWNER: Final = "train_on_parameter_server"

_LOSSES: Final = ("log", "squared")


@all_or_nothing
def train_on_parameter_server(
    examples: Stream,
    server: ParameterServer,
    *,
    features: int,
    consistency: Consistency,
    matrix: str = "w",
    optimizer: Optimizer | None = None,
    loss: Literal["log", "squared"] = "log",
    labels: Labels = "0/1",
    intercept: bool = True,
    extract: Extract | None = None,
    batch: int = 100,
    epochs: int = 1,
    workers: int | None = None,
    publish_every: int | None = None,
    dtype: DType = "float64",
    worker: type[ParameterServerWorker] = ParameterServerWorker,
    memory_bytes: int = REPEAT_MEMORY_BYTES,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> ParameterServerTraining:
    """Train a linear model whose weights are on a parameter server: logistic, or with ``"squared"`` linear regression.

    Each of the ``workers`` (unless given, as many as ``examples`` has subtasks) has a part of the examples, and reads
    it ``epochs`` times in mini-batches of ``batch`` rows. For each mini-batch it pulls the weights of the features that
    occur, pushes the gradient, and clocks; after the last one it leaves. ``consistency`` says which workers wait:

    - ``BSP()``: one step for one mini-batch of each worker, with the mean of their gradients (a mini-batch that is
      shorter or missing counts less). Timing and the number of shards change at most the last digits of the result.
    - ``ASP()``: a step for every mini-batch, with the mean of its rows' gradients; no worker waits.
    - ``SSP(staleness=s)``: the same, but no worker is more than s mini-batches ahead of the slowest one.

    ``matrix`` is created with ``features`` columns and one for the intercept (l1 and l2 of the ``optimizer`` act on the
    intercept, too). The optimizer runs on the server, and changes only weights whose features occur; it is
    ``FTRL(alpha=0.3, beta=0.1)`` unless given. ``extract(records)`` returns the :class:`Examples` of a list of records;
    the records of libsvm and dummy files need no ``extract``. ``labels`` says which targets are given: ``"0/1"`` or
    ``"-1/1"``.

    While the flow runs, no other step may use the server. The matrix stays on the server when the flow ends: another
    flow with the same settings continues from it.

    The first worker sends a version of the model after every ``publish_every`` of its clocks, and the last version is
    made when all workers have left. Each worker keeps its mini-batches for later epochs, up to ``memory_bytes`` in
    memory, then on disk. With one epoch the stream may be endless. ``worker`` is a class derived from
    :class:`ParameterServerWorker`, to do more for each mini-batch. Rows that are no examples follow ``on_error`` or go
    to ``dead_letter``. ``name`` is put in front of the names of the steps.

    Raises GraphError for options that cannot be used. A job without examples fails.

    >>> import numpy as np
    >>> from streamiter import Flow
    >>> from streamiter.learn import Examples
    >>> from streamiter.parameter_server import BSP, ParameterServer
    >>> flow = Flow("parity")
    >>> rows = flow.from_items(np.array([[0.0, 1.0], [1.0, 0.0]] * 4))
    >>> training = train_on_parameter_server(
    ...     rows, ParameterServer(shards=2), features=2, consistency=BSP(), workers=2, batch=2, epochs=20,
    ...     extract=lambda records: Examples(np.array(records), np.array(records)[:, 0]),
    ... )
    >>> models = training.models.collect()
    >>> flow.run().state, [model.parameters["weights"].round().tolist() for model in models.items]
    ('finished', [[2.0, -2.0]])
    """
    check_stream(_OWNER, examples, "examples")
    check_server(_OWNER, server, examples.flow)
    check_consistency(_OWNER, consistency)
    check_dtype(_OWNER, dtype)
    check_worker(_OWNER, worker)
    _check_kinds(loss, labels, extract)
    epochs = count_of(_OWNER, "epochs", epochs)
    batch = count_of(_OWNER, "batch", batch)
    workers = examples.parallelism if workers is None else count_of(_OWNER, "workers", workers)
    memory_bytes = count_of(_OWNER, "memory_bytes", memory_bytes)
    if publish_every is not None:
        publish_every = count_of(_OWNER, "publish_every", publish_every)
    check_bounded(_OWNER, examples, epochs)
    learner = LinearLearner(
        matrix=matrix,
        features=count_of(_OWNER, "features", features),
        intercept=bool(intercept),
        loss=LogLoss() if loss == "log" else SquaredLoss(),
        labels=labels,
        optimizer=_optimizer(optimizer),
        consistency=consistency,
        dtype=dtype,
        rows_in_step=batch * workers,
    )

    def checked(records: Batch) -> CheckedExamples:
        if extract is None:
            return learner.checked(_OWNER, labelled(_OWNER, records, learner.features))
        return learner.checked(_OWNER, as_examples(f"{_OWNER}(extract=)", extract(records)))

    label = step_names(examples.flow, name)
    mini_batches = examples.batch(batch, parallelism=workers, name=label("mini-batches")).process(
        lambda: PrepareExamples(checked, intercept=learner.intercept),
        name=label("prepare"),
        on_error=on_error,
        dead_letter=dead_letter,
    )
    return trained(
        mini_batches,
        learner,
        server,
        owner=_OWNER,
        epochs=epochs,
        publish_every=publish_every,
        worker=worker,
        memory_bytes=memory_bytes,
        label=label,
    )


def _optimizer(given: Optimizer | None) -> Optimizer:
    if given is None:
        return FTRL(alpha=0.3, beta=0.1)  # As LogisticRegression has it.
    try:
        return checked_optimizer(_OWNER, given)
    except ConfigurationError as error:
        raise GraphError(str(error)) from None


def _check_kinds(loss: object, labels: object, extract: object) -> None:
    if loss not in _LOSSES:
        raise GraphError(f'{_OWNER}(loss=): expected "log" or "squared", given {loss!r}; choose one of them')
    if labels not in ("0/1", "-1/1"):
        raise GraphError(f'{_OWNER}(labels=): expected "0/1" or "-1/1", given {labels!r}; choose one of them')
    if extract is not None:
        expected = "a function that makes Examples of records"
        check_function(extract, f"{_OWNER}(extract=)", ["records"], expected=expected)
