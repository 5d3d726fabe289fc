"""Training networks on a parameter server: in epochs over bounded data, or on a stream that may be endless.

``train_network`` and ``train_network_online`` add the training to a flow, which publishes or uses the versions of the
network. ``fit_network`` runs such a flow to its end, with a progress bar, and returns the trained network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Unpack, cast, final

import msgspec
import numpy as np

from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import GraphError, JobFailed, ModelError, shortened
from streamiter.flow.flow import Flow, all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.options import check_step_options
from streamiter.flow.stream import Stream
from streamiter.learn.estimators import examples_of, run_offline
from streamiter.learn.quality.validation import PredictedRows
from streamiter.learn.quality.validation_step import MeanComparison, TrainingAdvice, warn_of_loss
from streamiter.learn.rows import BadRows, Extract, refuse_not_finite, refuse_rows_unless
from streamiter.learn.server_training import (
    OnlineServerOptions,
    ParameterServerTraining,
    ServerOptions,
    ServerTraining,
    count_of,
)
from streamiter.models.update import ModelSnapshot
from streamiter.networks.data import (
    LabelledRows,
    TrainingSteps,
    as_labelled_rows,
    prepared,
    to_record,
    translated_labels,
)
from streamiter.networks.learner import NetworkLearner, NetworkWorker, Start, StepsMade, check_start
from streamiter.networks.network import Network
from streamiter.networks.serving import (
    NETWORK,
    Diverged,
    EpochResult,
    Evaluation,
    TrainedNetwork,
    evaluate,
    evaluation_of,
)
from streamiter.networks.sparse import FEATURES_MAX
from streamiter.operators.declared_state import DeclaredOperator, declared
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.parameter_server.admission import Admission
from streamiter.parameter_server.consistency import BSP, Consistency
from streamiter.parameter_server.server import ParameterServer
from streamiter.values.named_rows import FieldReader
from streamiter.values.numbers import Array, Indices, whole_number
from streamiter.values.records import Batch, Columns
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.times import Times


@final
class RowChecks:
    """Checks all rows before the first mini-batch.

    A network needs finite features, labels that its loss knows, and as many features in a row as its embeddings have
    fields.
    """

    def __init__(self, network: Network) -> None:
        graph = network.graph()
        self.features = graph.place_holder.feature_dimension
        self._loss_layer = graph.loss_layer
        self._fields = {
            layer.name: layer.output_dim // layer.num_factors
            for layer in network.configuration.layers
            if layer.num_factors
        }

    def check(self, owner: str, data: LabelledRows) -> None:
        """Raise ``BadRows``, which names the rows that the network cannot learn from."""
        refuse_not_finite(owner, data.rows)
        if self._loss_layer.loss.needs_labels:
            self._loss_layer.loss.check_labels(owner, data.labels, self._loss_layer.output_dim)
        for name, fields in self._fields.items():
            counts = _features_in_rows(data, fields)
            bad = np.flatnonzero(counts != fields)
            if len(bad):
                raise BadRows(
                    bad,
                    f"{owner}: expected {fields} features in each row, as layer {name!r} has fields, given "
                    f"{counts[bad[0]]} in row {bad[0]}; change its outputdim (fields × numfactors), or the rows",
                )


def _features_in_rows(data: LabelledRows, fields: int) -> Indices:
    """Return the number of features in each row, as an embedding with this number of fields counts them."""
    rows = data.rows
    if isinstance(rows, SparseRows):
        return np.diff(rows.indptr)
    if rows.shape[1] == fields:
        return np.full(len(rows), fields)
    counts: Indices = np.count_nonzero(rows, axis=1)
    return counts


_OWNER: Final = "train_network"
_VALIDATION: Final = "validation_"
_ROWS: Final = "validation_rows"


@dataclass(frozen=True)
class NetworkTraining(ParameterServerTraining):
    """The outputs of a training.

    A version has the parameters by name with the network as JSON. Its metrics are the ``loss`` since the version before
    and, with rows for validation, ``validation_loss``, ``_accuracy`` and ``_auc``.
    """

    steps: int = 0
    """The number of steps of all workers together; 0 on a stream, where it is not known."""


@all_or_nothing
def train_network(
    flow: Flow,
    data: LabelledRows,
    network: Network,
    server: ParameterServer,
    *,
    consistency: Consistency,
    validation: LabelledRows | None = None,
    epochs: int | None = None,
    workers: int = 1,
    start: Start = None,
    seed: int = 0,
    publish_state: bool = False,
    name: str | None = None,
) -> NetworkTraining:
    """Train a network on rows in memory; each epoch ends with a version of the network.

    ``epochs`` is the number of epochs; None: the number in the configuration. An epoch has ``numupdateperepoch`` steps.
    With n ``workers``, each has every n-th row of a step. With ``BSP()`` the optimizers make one step for each step of
    all workers, with the mean gradient over its rows, so the number of workers changes only the last digits; with
    ``ASP()`` and ``SSP(staleness=s)`` they make a step for each push.

    ``start`` is arrays by name, or :class:`Published` for the last published version. With ``publish_state`` a version
    carries the state of the optimizers: a training with ``BSP()`` that starts from it, with the same seed, continues
    exactly, also in the order of rows. Without it the state of the optimizers is new. ``seed`` determines initial
    parameters, shuffling, sampling and dropout: with one worker the same seed gives the same model to the last bit.
    ``validation`` is rows that each version is evaluated on.

    Raises GraphError and ModelError for arguments that cannot work. The job fails with :class:`Diverged` if a loss, a
    gradient or a parameter is no longer finite: no version has such numbers. A warning of the logger
    ``streamiter.learn`` tells a loss of the last epoch that is far above the loss of always predicting the mean.

    >>> import numpy as np
    >>> from streamiter.parameter_server import BSP
    >>> flow, rows = Flow("either"), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    >>> network = Network.from_json({
    ...     "data": {"format": "dense", "indexrange": 2}, "train": {"epoch": 9, "lr": 0.5}, "default_optimizer": "Adam",
    ...     "layers": [
    ...         {"name": "score", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
    ...         {"name": "loss", "type": "simplelosslayer", "inputlayer": "score", "lossfunc": "logloss"},
    ...     ],
    ... })
    >>> data = LabelledRows(rows, np.array([1.0, 1.0, 1.0, -1.0]))
    >>> training = train_network(flow, data, network, ParameterServer(), consistency=BSP(), validation=data)
    >>> models = training.models.collect()
    >>> flow.run().state, len(models.items), models.items[-1].metrics["validation_accuracy"]
    ('finished', 9, 1.0)
    """
    network = sized(network, data)
    workers = count_of(_OWNER, "workers", workers)
    seed = whole_number(f"{_OWNER}(seed=)", seed, 0, error=GraphError)
    features = network.graph().place_holder.feature_dimension
    settings = network.configuration
    epochs = settings.train.epoch if epochs is None else count_of(_OWNER, "epochs", epochs)
    steps = TrainingSteps(
        data.widened(features, _OWNER),
        updates=settings.train.num_update_per_epoch,
        epochs=epochs,
        workers=workers,
        settings=settings.data,
        seed=seed,
    )
    check_start(start, network)
    learner = NetworkLearner(network, consistency, start, seed, steps, publishes_state=publish_state)
    numbers = flow.from_source(lambda: _StepNumbers(steps), name=step_names(flow, name)("steps"), parallelism=workers)
    options: ServerOptions = {"worker": NetworkWorker, "publish_every": steps.per_epoch, "name": name}
    shared = ServerTraining(_OWNER, numbers, server, consistency, options, batch=1)
    training = shared.train(numbers, learner)
    checks = RowChecks(network)
    checks.check(_OWNER, data)
    if validation is not None:
        _check_data("(validation=)", validation)
    judged_by = None if validation is None or not len(validation) else validation
    if judged_by is not None:
        judged_by = judged_by.widened(features, _OWNER)
        checks.check(f"{_OWNER}(validation=)", judged_by)
    models = training.models.process(
        lambda: _Judge(network, epochs, data.labels, judged_by), name=shared.label("judge"), parallelism=1
    )
    return NetworkTraining(models, training.losses, steps.in_all * workers)


def sized(network: Network, data: LabelledRows) -> Network:
    """Return the network with the number of features of the data, unless the network sets it.

    Raises GraphError for other data, ModelError if the rows have no features.
    """
    _check_data("", data)
    if network.features is not None:
        return network
    if not data.features:
        raise ModelError(
            "training: expected rows with features, given none in any of them; set indexrange, or look at the rows"
        )
    return network.with_features(data.features)


def _check_data(option: str, data: object) -> None:
    if not isinstance(data, LabelledRows):
        raise GraphError(f"{_OWNER}{option}: expected LabelledRows, given {shortened(data)}; read_rows returns them")


def epoch_result(model: ModelSnapshot) -> EpochResult:
    """Return the result of the epoch that a version belongs to."""
    metrics = model.metrics
    validation: Evaluation | None = evaluation_of(metrics, _VALIDATION, int(metrics.get(_ROWS, 0)))
    return EpochResult(model.epoch or 0, metrics.get("loss"), validation)


class _StepNumbers(Source):
    """Emits 0, 1, 2, … to each subtask.

    With another number of subtasks it starts at 0 again: workers skip the steps that they have made.
    """

    def __init__(self, steps: TrainingSteps) -> None:
        self._steps = steps

    def open(self, context: Context, positions: Positions | None) -> None:
        self._made = StepsMade.of(context, self._steps)
        self._next = (positions or {}).get("step", 0)

    def close(self) -> None:
        self._made.are_drained = self._next < self._steps.in_all

    async def read(self) -> SourceBatch | None:
        if self._next >= self._steps.in_all:
            return None
        await self._made.near(self._next)
        self._next += 1
        return SourceBatch([self._next - 1], {"step": self._next})

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        return [{"step": 0} for _ in range(parallelism)]


class _Judge(DeclaredOperator):
    """Numbers versions, adds their evaluation to their metrics, and warns of a bad loss of the last one."""

    _epoch = declared(0)

    def __init__(self, network: Network, epochs: int, labels: Array, data: LabelledRows | None) -> None:
        self._graph = network.graph()
        self._epochs = epochs
        self._labels = labels
        self._data = data

    def open(self, context: Context) -> None:
        self._name = context.name

    def process(self, model: ModelSnapshot, out: Output) -> None:
        """Emit the version with its number and its evaluation."""
        self._epoch += 1
        metrics = model.metrics
        if self._data is not None:
            try:
                found = evaluate(self._graph, model.parameters, self._data)
            except Diverged as error:
                raise error.within(f"epoch {self._epoch}, rows for validation") from error
            metrics = {**metrics, **found.metrics(_VALIDATION), _ROWS: found.rows}
        if self._epoch == self._epochs:
            # Networks learn from few mini-batches, so in the first epochs, and in all of one epoch, they are young.
            if self._epoch > 1:
                self._compare(self._labels, metrics.get("loss"))
            elif self._data is not None:
                self._compare(self._data.labels, metrics[f"{_VALIDATION}loss"])
        out.emit(msgspec.structs.replace(model, metrics=metrics, epoch=self._epoch))

    def _compare(self, labels: Array, loss: float | None) -> None:
        """Warn of a mean loss that is far above the loss of the mean of the labels."""
        if (kind := self._graph.loss_layer.loss.of_mean) is None or loss is None:
            return
        targets = labels.astype(np.float64) if kind == "regression" else (labels > 0.0).astype(np.float64)
        rows: PredictedRows = {
            "task": kind,
            "predictions": targets,
            "targets": targets,
            "weights": np.ones(len(labels)),
        }
        if kind == "classes":
            rows["classes"] = labels.astype(np.intp)
        comparison, total = MeanComparison(), loss * len(labels)
        for _ in range(2):  # The first rows only tell the mean.
            if (found := comparison.far_above(rows, total, together=1)) is not None:
                warn_of_loss(self._name, found, _ADVICE)


_ADVICE: Final = TrainingAdvice(
    rows="look at the labels, and at translabel", rate="lower lr, scale features and labels, or take another seed"
)


# After Ctrl-C the steps in the channels are still made: with short channels these are few.
_LIMITS: Final = ChannelLimits(records=1)


def fit_network(
    network: Network,
    data: LabelledRows,
    validation: LabelledRows | None = None,
    *,
    epochs: int | None = None,
    workers: int = 1,
    consistency: Consistency | None = None,
    shards: int = 1,
    start: Start = None,
    seed: int = 0,
    progress: bool | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
) -> TrainedNetwork:
    """Train a network on rows in memory and wait for the end; each epoch ends with an evaluation on ``validation``.

    The options are as for :func:`~streamiter.networks.train_network`; ``consistency`` is ``BSP()`` by default, and
    the parameter server has this number of ``shards`` in this process. A progress bar shows the epochs on a terminal
    (``progress``: True always, False never). ``on_epoch`` is called with the result of each epoch.

    Ctrl-C ends the training after the current mini-batches and keeps the result so far; a second Ctrl-C raises
    KeyboardInterrupt.

    Raises :class:`Diverged` if a loss, a gradient or a parameter is no longer finite; its ``trained`` is the network
    after the last epoch with finite numbers (None in the first epoch). Raises JobFailed if a step fails for another
    reason, ModelError for data that does not fit.
    """
    network = sized(network, data)
    epochs = network.configuration.train.epoch if epochs is None else epochs
    flow = Flow("training")
    server = ParameterServer(shards=shards)
    training = train_network(
        flow,
        data,
        network,
        server,
        consistency=consistency or BSP(),
        validation=validation,
        epochs=epochs,
        workers=workers,
        start=start,
        seed=seed,
    )
    last: list[ModelSnapshot] = []
    results: list[EpochResult] = []

    def keep(model: ModelSnapshot) -> list[ModelSnapshot]:
        last[:] = [model]
        results.append(epoch_result(model))
        if on_epoch is not None:
            on_epoch(results[-1])
        return []

    def trained(ended_by: Literal["epochs", "interruption", "divergence"]) -> TrainedNetwork:
        [model] = last
        arrays = {name: array for name, array in model.parameters.items() if name != NETWORK}
        return TrainedNetwork(network, arrays, results, ended_by)

    training.models.flat_map(keep, name="keep").collect()
    try:
        statistics = run_offline(
            flow,
            title="training",
            rounds=epochs,
            progress=progress,
            describe=lambda: results[-1].describe() if results else "",
            noun="epoch",
            done=lambda: len(results),
            channel_limits=_LIMITS,
        )
    except JobFailed as failed:
        if not isinstance(failed.__cause__, Diverged):
            raise
        failed.__cause__.trained = trained("divergence") if last else None
        raise failed.__cause__ from None
    if not last:
        raise ModelError("fit_network: expected a training to its end, given one that ended before it began")
    made = statistics.step("steps").records_out
    return trained("epochs" if made >= training.steps else "interruption")


_ONLINE_OWNER: Final = "train_network_online"


@all_or_nothing
def train_network_online(
    examples: Stream,
    network: Network,
    server: ParameterServer,
    *,
    consistency: Consistency,
    batch: int = 100,
    extract: Extract | None = None,
    start: Start = None,
    seed: int = 0,
    publish_state: bool = False,
    admission: Admission | None = None,
    **options: Unpack[OnlineServerOptions],
) -> NetworkTraining:
    """Train a network once on each record of a stream, which may be endless.

    Each worker learns from mini-batches of ``batch`` records. Records of libsvm and dummy files need nothing more; from
    others ``extract(records)`` makes :class:`~streamiter.learn.Examples`. Labels are translated as ``translabel`` of
    the network says. ``start=Published(topic, model)`` resumes from the last published version. ``consistency``,
    ``seed``, ``start`` and ``publish_state`` are those of :func:`~streamiter.networks.train_network`, the other
    ``options`` are :class:`~streamiter.learn.server_training.OnlineServerOptions`. The network must set the number of
    features (``indexrange``).

    With ``admission`` of a network with a ``…_SPARSE`` type, features come and go: a feature gets parameters of its own
    when it is admitted, and has drawn ones before. Features are numbers below 2⁵², such as hashes, and the network
    needs no ``indexrange``.

    Raises GraphError and ModelError for arguments that cannot work. A job without examples fails, and one that
    diverges.

    >>> from streamiter import Flow, topic
    >>> from streamiter.networks.serving import ServedNetwork
    >>> from streamiter.parameter_server import SSP
    >>> flow = Flow("clicks")
    >>> network = Network.from_json({
    ...     "data": {"indexrange": 3}, "default_optimizer": {"type": "FTRL"},
    ...     "layers": [
    ...         {"name": "score", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
    ...         {"name": "loss", "type": "simplelosslayer", "inputlayer": "score", "lossfunc": "logloss"},
    ...     ],
    ... })
    >>> rows = flow.source(topic("memory://clicks"), stop="latest")
    >>> training = train_network_online(
    ...     rows, network, ParameterServer(), consistency=SSP(staleness=2), batch=50, publish_every=10
    ... )
    >>> training.models.publish_model(topic("memory://models"), model="clicks")
    """
    check_stream(_ONLINE_OWNER, examples, "examples")
    check_step_options(_ONLINE_OWNER, options, OnlineServerOptions)
    given = cast(ServerOptions, {**options, "worker": NetworkWorker})
    shared = ServerTraining(_ONLINE_OWNER, examples, server, consistency, given, batch=batch)
    seed = whole_number(f"{_ONLINE_OWNER}(seed=)", seed, 0, error=GraphError)
    if admission is not None:
        network = _with_admission(network, admission)
    if network.features is None:
        raise GraphError(
            f"{_ONLINE_OWNER}: expected the number of features, given indexrange -1, which a stream cannot tell; set "
            "indexrange, or take network.with_features(…)"
        )
    if extract is not None:
        check_user_function(extract, f"{_ONLINE_OWNER}(extract=)", ["records"])
    check_start(start, network)
    learner = NetworkLearner(network, consistency, start, seed, publishes_state=publish_state, admission=admission)
    rows_in_step = shared.batch * shared.workers
    checks = RowChecks(network)

    def mini_batch(records: Batch) -> dict[str, object] | None:
        examples = examples_of(_ONLINE_OWNER, records, extract, checks.features)
        data = as_labelled_rows(_ONLINE_OWNER, examples.features, examples.targets, checks.features)
        data = LabelledRows(data.rows, translated_labels(data.labels, network.configuration.data.trans_label))
        checks.check(_ONLINE_OWNER, data)
        times = None if admission is None or admission.time is None else _times_of(admission.time, records)
        return to_record(prepared(data, rows_in_step, times)) if len(data) else None

    training = shared.steps(learner, mini_batch)
    return NetworkTraining(training.models, training.losses)


def _with_admission(network: Network, admission: Admission) -> Network:
    """Return the network with room for all features. Raises GraphError if its features cannot come and go."""
    if not isinstance(admission, Admission) or (admission.expire_ms and admission.time is None):
        raise GraphError(
            f"{_ONLINE_OWNER}(admission=): expected Admission(…), with the field time= of records if features expire, "
            f"given {shortened(admission)}; give Admission(expire=…, time=…)"
        )
    made = network if network.features is not None else network.with_features(FEATURES_MAX)
    widths = [math.prod(each.shape[1:]) for each in made.graph().parameters if each.by_feature]
    if not network.configuration.model.is_sparse or made.features != FEATURES_MAX or not 0 < sum(widths) <= 1024:
        raise GraphError(
            f"{_ONLINE_OWNER}(admission=): expected a network that stores the features that occur, with 1 to 1,024 "
            f"numbers each, given modeltype {network.configuration.model.model_type}, indexrange {network.features} "
            f"and {sum(widths):,} numbers; set modeltype to T_FLOAT_SPARSE, and leave indexrange out"
        )
    return made


def _times_of(field: str, records: Batch) -> Times:
    times = FieldReader(bits=1, refuse=BadRows, owner=_ONLINE_OWNER).times_of_rows(
        field, cast("list[Any] | Columns", records)
    )
    refuse_rows_unless(np.isfinite(times), _ONLINE_OWNER, f"a time in {field!r}", times)
    return times.astype(np.int64)
