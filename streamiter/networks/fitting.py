"""Training a network from beginning to end, with its progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from streamiter.errors import JobFailed, ModelError
from streamiter.flow.flow import Flow
from streamiter.learn.estimators.running import run_offline
from streamiter.networks.data import LabelledRows
from streamiter.networks.diverging import Diverged
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.networks.prediction import NetworkPredictor
from streamiter.networks.results import EpochResult, Evaluation, evaluate
from streamiter.networks.starting import Start
from streamiter.networks.training import epoch_result, sized, train_network
from streamiter.networks.versions import NETWORK
from streamiter.parameter_server.consistency.settings import BSP, Consistency
from streamiter.parameter_server.server import ParameterServer
from streamiter.runtime.plan import ChannelLimits

if TYPE_CHECKING:
    from streamiter.models.update import ModelSnapshot

__all__ = ["TrainedNetwork", "fit_network"]

# Steps that are under way when Ctrl-C comes are made; more of them would only be waited for.
_LIMITS: Final = ChannelLimits(records=1)


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network and its parameters by name, as they were after the last epoch."""

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
