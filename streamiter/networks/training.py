"""Whether rows can be learned from, said of all of them before the first mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import msgspec
import numpy as np

from streamiter.errors import GraphError, JobFailed, ModelError
from streamiter.flow.flow import Flow, all_or_nothing, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.estimators import run_offline
from streamiter.learn.on_parameter_server.training import (
    REPEAT_MEMORY_BYTES,
    check_consistency,
    check_server,
    count_of,
    trained,
)
from streamiter.learn.rows import BadRows, refuse_not_finite
from streamiter.models.update import ModelSnapshot
from streamiter.networks.data import LabelledRows
from streamiter.networks.learner import NETWORK, NetworkLearner, NetworkWorker, Start, check_start
from streamiter.networks.losses import Diverged
from streamiter.networks.mini_batches import TrainingSteps
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.networks.serving import EpochResult, Evaluation, NetworkPredictor, evaluate, evaluation_of
from streamiter.numbers import Indices, whole_number
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.parameter_server.consistency.models import BSP, Consistency
from streamiter.parameter_server.server import ParameterServer
from streamiter.runtime.plan import ChannelLimits
from streamiter.sparse_rows import SparseRows

__all__ = [
    "NetworkTraining",
    "RowChecks",
    "TrainedNetwork",
    "fit_network",
    "sized",
    "train_network",
]


@final
class RowChecks:
    """What a network asks of rows: finite features, labels that its loss knows, as many fields as embeddings have."""

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
        """``BadRows`` names the rows that cannot be learned from."""
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
    """As an embedding of so many fields counts them."""
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
class NetworkTraining:
    """What the training of a network gives.

    Training a network on a parameter server: over bounded data in epochs, or on a stream that never ends.
    """

    models: Stream
    """A ``ModelSnapshot`` for each version: the parameters by name with the network as JSON; for ``publish_model``.
    Its metrics: ``loss`` of what was learned from since the version before; where there are rows to judge by
    ``validation_loss``, ``_accuracy`` and ``_auc``."""
    losses: Stream
    """For each mini-batch a dict: the ``worker``, its ``clock``, the mean ``loss`` before it, the ``records`` it had,
    and the seconds ``waited_s`` that the worker waited for the parameters."""
    steps: int = 0
    """How many there are to be, those of each worker counted; 0 where nobody knows."""


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
    name: str | None = None,
) -> NetworkTraining:
    """Train a network on rows that are in memory; a version of it comes after every epoch.

    An epoch (``epochs``; None: as many as the configuration says) is ``numupdateperepoch`` steps, and of the rows of
    each step each of the ``workers`` has every n-th: it pulls what they need, computes, pushes the gradients, clocks.

    - ``BSP()``: a step of the optimizers for each step of all workers, with the mean over its rows. How many workers
      there are changes no more than the last digits.
    - ``ASP()``: a step for what each worker pushes, and nobody waits.
    - ``SSP(staleness=s)``: the same, and nobody is more than s steps ahead of the slowest.

    ``start`` are arrays to begin with, by name, or what was :class:`Published` last; optimizers begin anew. ``seed``
    decides initial parameters, shuffling, sampling and dropout: with one worker the same seed gives the same model to
    the last bit. ``validation`` are the rows that each version is judged by.

    Raises GraphError and ModelError for what cannot run. The job fails with :class:`Diverged` where a loss, a gradient
    or a parameter is not finite any more: no version has such numbers.

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
    check_server(_OWNER, server, flow)
    check_consistency(_OWNER, consistency)
    workers = count_of(_OWNER, "workers", workers)
    seed = whole_number(f"{_OWNER}(seed=)", seed, 0, error=GraphError)
    features = network.graph().place_holder.feature_dimension
    settings = network.configuration
    epochs = settings.train.epoch if epochs is None else count_of(_OWNER, "epochs", epochs)
    steps = TrainingSteps(
        data.widened(features, _OWNER),
        updates=settings.train.num_update_per_epoch,
        features=features,
        workers=workers,
        settings=settings.data,
        seed=seed,
    )
    check_start(start, network)
    learner = NetworkLearner(network=network, consistency=consistency, start=start, seed=seed, steps=steps)
    label = step_names(flow, name)
    in_all = epochs * steps.per_epoch
    numbers = flow.from_source(lambda: _StepNumbers(in_all), name=label("steps"), parallelism=workers)
    training = trained(
        numbers,
        learner,
        server,
        owner=_OWNER,
        epochs=1,  # The numbers go through them.
        publish_every=steps.per_epoch,
        worker=NetworkWorker,
        memory_bytes=REPEAT_MEMORY_BYTES,
        label=label,
    )
    checks = RowChecks(network)
    checks.check(_OWNER, data)
    if validation is not None:
        _check_data("(validation=)", validation)
    judged_by = None if validation is None or not len(validation) else validation
    if judged_by is not None:
        judged_by = judged_by.widened(features, _OWNER)
        checks.check(f"{_OWNER}(validation=)", judged_by)
    models = training.models.process(lambda: _Judge(network, judged_by), name=label("judge"), parallelism=1)
    return NetworkTraining(models, training.losses, in_all * workers)


def sized(network: Network, data: LabelledRows) -> Network:
    """The network with as many features as the data has, unless it says how many there are.

    Raises GraphError for what is no data, ModelError where it has no features.
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
        raise GraphError(
            f"{_OWNER}{option}: expected LabelledRows, given {shortened(data)}; read_rows gives them"
        )


def epoch_result(model: ModelSnapshot) -> EpochResult:
    """What the metrics of a version say."""
    metrics = model.metrics
    validation: Evaluation | None = evaluation_of(metrics, _VALIDATION, int(metrics.get(_ROWS, 0)))
    return EpochResult(model.epoch or 0, metrics.get("loss"), validation)


class _StepNumbers(Source):
    """0, 1, 2, … to every subtask."""

    def __init__(self, count: int) -> None:
        self._count = count

    def open(self, context: Context, positions: Positions | None) -> None:
        self._next = (positions or {}).get("step", 0)

    def read(self) -> SourceBatch | None:
        if self._next >= self._count:
            return None
        self._next += 1
        return SourceBatch([self._next - 1], {"step": self._next})


class _Judge(Operator):
    """Numbers versions, and adds how good they are to their metrics."""

    def __init__(self, network: Network, data: LabelledRows | None) -> None:
        self._graph = network.graph()
        self._data = data
        self._epoch = 0

    def process(self, model: ModelSnapshot, out: Output) -> None:
        """Judge a version."""
        self._epoch += 1
        metrics: Mapping[str, Any] = model.metrics
        if self._data is not None:
            try:
                found = evaluate(self._graph, model.parameters, self._data)
            except Diverged as error:
                raise error.within(f"epoch {self._epoch}, rows for validation") from error
            metrics = {**metrics, **found.metrics(_VALIDATION), _ROWS: found.rows}
        out.emit(msgspec.structs.replace(model, metrics=metrics, epoch=self._epoch))

    def snapshot(self) -> int:
        return self._epoch

    def restore(self, state: int) -> None:
        self._epoch = state


# Steps that are under way when Ctrl-C comes are made; more of them would only be waited for.
_LIMITS: Final = ChannelLimits(records=1)


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network and its parameters by name, as they were after the last epoch.

    Training a network from beginning to end, with its progress on the terminal.
    """

    network: Network
    parameters: dict[str, Array]
    results: list[EpochResult]
    """One for each epoch; the last one is not whole after an ``"interruption"``."""
    ended_by: Literal["epochs", "interruption", "divergence"]

    def evaluate(self, data: LabelledRows) -> Evaluation:
        """How good it is on rows with labels."""
        graph = self.network.graph()
        return evaluate(
            graph, self.parameters, data.widened(graph.place_holder.feature_dimension, "evaluation")
        )

    @property
    def predictor(self) -> NetworkPredictor:
        """Predicts with these parameters."""
        return NetworkPredictor(self.network, self.parameters)


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
    """Train a network on rows in memory and wait for the end; ``validation`` is judged by after each epoch.

    Options are those of :func:`~streamiter.networks.train_network`; ``consistency`` is ``BSP()`` unless given, and the
    parameter server has so many ``shards`` in this process. On a terminal a bar shows the epochs (``progress`` True or
    False: in any case, never); ``on_epoch`` is told of each as it ends.

    Ctrl-C ends the training with the mini-batches under way, and what was learned so far is kept; a second one raises
    KeyboardInterrupt.

    Raises :class:`Diverged` where a loss, a gradient or a parameter is not finite any more: its ``trained`` is the
    network as it was after the last epoch that was finite (None in the first one). Raises JobFailed where a step failed
    for another reason, ModelError for data that does not fit.
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
