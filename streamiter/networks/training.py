"""Training a network on a parameter server: over bounded data in epochs, or on a stream that never ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from streamiter.errors import GraphError, ModelError
from streamiter.flow.algorithms import all_or_nothing, step_names
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.learn.on_parameter_server.flow import REPEAT_MEMORY_BYTES, trained
from streamiter.learn.on_parameter_server.options import check_consistency, check_server, count_of
from streamiter.models.update import ModelSnapshot
from streamiter.networks.data import LabelledRows
from streamiter.networks.diverging import Diverged
from streamiter.networks.learner import NetworkLearner
from streamiter.networks.mini_batches import TrainingSteps
from streamiter.networks.network import Network
from streamiter.networks.results import EpochResult, Evaluation, evaluate, evaluation_of
from streamiter.networks.row_checks import RowChecks
from streamiter.networks.starting import Start, check_start
from streamiter.networks.worker import NetworkWorker
from streamiter.numbers import whole_number
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.server import ParameterServer

__all__ = ["NetworkTraining", "epoch_result", "sized", "train_network"]

_OWNER: Final = "train_network"
_VALIDATION: Final = "validation_"
_ROWS: Final = "validation_rows"


@dataclass(frozen=True)
class NetworkTraining:
    """What the training of a network gives."""

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
