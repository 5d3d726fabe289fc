"""A network on a parameter server: its learner, the worker that trains it, and the versions that are published.

A published version holds the parameters by name and the network as canonical JSON; so a program that follows a model
needs nothing else to predict. ``Start`` is what the parameters are before the first step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamiter.errors import ModelError, shortened
from streamiter.learn.on_parameter_server.worker import Computed, Learner, ParameterServerWorker
from streamiter.learn.rows import holds
from streamiter.models.reader import last_update
from streamiter.models.update import Parameters
from streamiter.networks.losses import Diverged
from streamiter.networks.mini_batches import FeatureMiniBatch, TrainingSteps, from_record
from streamiter.networks.network import LayerGraph, Network
from streamiter.networks.parameters import Array, ParameterLayout, layouts
from streamiter.operators.output import Output
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.psf.optimize import Optimize
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

NETWORK: Final = "network"
"""The name of the JSON among the arrays of a version. Each name of an array has a dot, this one has none."""


def version_of(network: Network, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return the parameters to publish: the arrays, and the network as JSON."""
    return {NETWORK: json.dumps(network.to_json()), **arrays}


def network_of_version(parameters: Parameters, subject: str) -> tuple[Network, dict[str, Array]]:
    """Return network and arrays of a version. Raises ModelError, beginning with ``subject``, for other parameters."""
    text = parameters.get(NETWORK) if isinstance(parameters, dict) else None
    if not isinstance(text, str):
        given = ", ".join(map(repr, parameters)) if isinstance(parameters, dict) else "an array"
        raise ModelError(f"{subject}: expected {NETWORK!r} with the arrays of a network, given {given}")
    assert isinstance(parameters, dict)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):  # A text would be read as the path of a file.
        raise ModelError(f"{subject}: expected {NETWORK!r} as a JSON object, given {text!r:.100}")
    network = Network.from_json(document)
    return network, checked_arrays(network, parameters, subject)


def checked_arrays(network: Network, given: Mapping[str, Any], subject: str) -> dict[str, Array]:
    """Return the parameters of the network from ``given``, in its dtype.

    Raises ModelError if an array is missing, has another shape or a number that is not finite, or if the network has no
    parameter of that name: then the arrays were trained in another network.
    """
    arrays: dict[str, Array] = {}
    parameters = network.graph().parameters
    others = given.keys() - {parameter.name for parameter in parameters} - {NETWORK}
    if others:
        raise ModelError(
            f"{subject}: expected no arrays but those of the network, given {', '.join(sorted(map(repr, others)))}; "
            "load it with the network that it was trained as, or leave them out"
        )
    for parameter in parameters:
        array = given.get(parameter.name)
        if getattr(array, "shape", None) != parameter.shape:
            shape = "none" if array is None else f"shape {getattr(array, 'shape', None)}"
            raise ModelError(
                f"{subject}: expected {parameter.name!r} of shape {parameter.shape}, given {shape}; "
                "load it with the network that it was trained as"
            )
        arrays[parameter.name] = _finite(parameter.name, array, network, subject)
    return arrays


def _finite(name: str, array: Any, network: Network, subject: str) -> Array:
    """Convert an array to the dtype of the network, in which a number of float64 may be too large."""
    with np.errstate(over="ignore"):
        numbers: Array | None = (
            array.astype(network.dtype, copy=False) if array.dtype.kind in "biuf" else None
        )
    if numbers is None or not holds(np.isfinite(numbers)):
        given = f"an array of {array.dtype}" if numbers is None else numbers[~np.isfinite(numbers)][0]
        raise ModelError(
            f"{subject}: expected {name!r} of finite numbers in {network.dtype}, given {given}; "
            "take another version of the model"
        )
    return numbers


_GIVEN: Final = "parameters to begin with"


@dataclass(frozen=True)
class Published:
    """Start training with the parameters last published in a topic, or with new ones if there are none yet.

    >>> from streamiter import topic
    >>> start = Published(topic("memory://models"), "census")
    """

    topic: Topic
    model: str


Start = Mapping[str, Any] | Published | None
"""The parameters before the first step: arrays by name, the last published ones, or None for new ones."""


def check_start(start: Start, network: Network) -> None:
    """Raise ModelError for arrays that are not those of the network; published ones are checked when they are read."""
    if start is None or isinstance(start, Published):
        return
    if not isinstance(start, Mapping):
        raise ModelError(
            f"{_GIVEN}: expected arrays by name, or Published(topic, model), given {shortened(start)}; "
            "those of a saved network are its parameters"
        )
    checked_arrays(network, start, _GIVEN)


async def starting_parameters(start: Start, network: Network, seed: int) -> dict[str, Array]:
    """Return all parameters by name. Raises ModelError for arrays that are not those of the network."""
    if isinstance(start, Published):
        update = await last_update(start.topic, start.model)
        if update is None:
            return network.initial_parameters(seed)
        subject = f"model {start.model!r} of {start.topic.url}, update {update.generation}.{update.version}"
        given = update.parameters if isinstance(update.parameters, dict) else {}
        return checked_arrays(network, given, subject)
    if start is not None:
        return checked_arrays(network, start, _GIVEN)
    return network.initial_parameters(seed)


_WEIGHTS: Final = 0
"""The row of the matrix that holds the parameters; the optimizer's slots and the gradient follow."""

PulledParameters = dict[str, Array]
"""Arrays by name; a parameter by feature has one row for each feature of the mini-batch."""


@dataclass(frozen=True, eq=False)
class NetworkLearner(Learner):
    """A network whose parameters are on a parameter server.

    Each optimizer has one matrix, and a second one for its parameters by feature. Their rows are the parameters, the
    slots of the optimizer, and the gradient. Under BSP the server sums the gradients of all workers, and the optimizers
    make a step when the clock ticks; otherwise each pushed mini-batch is a step. An optimizer of parameters by feature
    changes only parameters whose gradient is not 0.
    """

    network: Network
    consistency: Consistency
    start: Start
    seed: int
    steps: TrainingSteps | None = None
    """The steps over bounded data; None on a stream, whose records are prepared rows."""
    name: str = "network"
    """The beginning of the names of the matrices."""

    metric = "loss"

    @cached_property
    def graph(self) -> LayerGraph:
        """Return the graph that all workers compute with; it keeps nothing between two mini-batches."""
        return self.network.graph(seed=self.seed)

    @cached_property
    def layouts(self) -> Sequence[ParameterLayout]:
        """Return the place of the parameters in the matrices."""
        return layouts(self.graph.parameters, self.name)

    @property
    def matrix(self) -> str:  # type: ignore[override]
        """Return the name of the first matrix; all matrices share its clock."""
        return self.layouts[0].matrix

    @cached_property
    def _optimizes(self) -> list[Optimize]:
        return [
            Optimize(layout.matrix, layout.optimizer, sparse=layout.by_feature) for layout in self.layouts
        ]

    def mini_batch(self, record: Any, worker: int) -> FeatureMiniBatch | None:
        """Return the mini-batch of a record, which is the number of a step or prepared rows."""
        return from_record(record) if self.steps is None else self.steps.mini_batch(record, worker)

    async def create(self, client: Client) -> None:
        start = await starting_parameters(self.start, self.network, self.seed)
        for layout, optimize in zip(self.layouts, self._optimizes, strict=True):
            await client.create_matrix(
                layout.matrix,
                rows=optimize.rows_needed(layout.optimizer),
                columns=layout.columns,
                dtype=self.network.dtype.name,
                consistency=self.consistency,
                init=_first_rows(layout, start),
                on_clock=optimize if self.is_in_step else None,
            )

    async def pull(self, client: Client, mini_batch: FeatureMiniBatch) -> PulledParameters:
        features = self._features_of(mini_batch)
        begun = [
            await client.start_get(layout.matrix, row=_WEIGHTS, columns=layout.columns_of(mini_batch.indices))
            for layout in self.layouts
        ]
        pulled: PulledParameters = {}
        for layout, row in zip(self.layouts, begun, strict=True):
            pulled |= layout.arrays(await row, features)
        return pulled

    def _features_of(self, mini_batch: FeatureMiniBatch) -> int:
        if mini_batch.indices is None:
            return self.graph.place_holder.feature_dimension
        return len(mini_batch.indices)

    def compute(
        self, mini_batch: FeatureMiniBatch, pulled: PulledParameters, number: int | None = None
    ) -> Computed:
        """Return loss and gradients; dropout depends on ``number`` (None: the graph counts mini-batches)."""
        graph, count = self.graph, len(mini_batch)
        graph.feed_data(
            mini_batch.rows, mini_batch.labels, indices=mini_batch.indices, training=True, number=number
        )
        for parameter in graph.parameters:
            parameter.values = pulled[parameter.name]
        loss = graph.loss()
        graph.backward()
        gradients = {parameter.name: _gradient_of(parameter) for parameter in graph.gradients()}
        graph.update()
        features = self._features_of(mini_batch)
        contribution = [layout.row_of(gradients, features) for layout in self.layouts]
        for vector in contribution:
            if not holds(np.isfinite(vector)):
                raise _diverged("gradient of", gradients)
        if self.is_in_step and count != mini_batch.rows_in_step:
            for vector in contribution:
                vector *= count / mini_batch.rows_in_step
        return Computed(contribution, loss * count, count)

    async def push(self, client: Client, mini_batch: FeatureMiniBatch, contribution: Sequence[Array]) -> None:
        for layout, optimize, vector in zip(self.layouts, self._optimizes, contribution, strict=True):
            if not len(vector):
                continue
            await client.add(
                layout.matrix,
                row=optimize.gradient_row(),
                columns=layout.columns_of(mini_batch.indices),
                values=vector,
                update=None if self.is_in_step else optimize,
            )

    async def clock(self, client: Client) -> None:
        for layout in self.layouts:
            await client.clock(layout.matrix)

    async def settle(self, client: Client) -> None:
        for layout in self.layouts:
            await client.get(layout.matrix, row=_WEIGHTS, columns=[0])

    async def parameters(self, client: Client) -> dict[str, Any]:
        rows = await asyncio.gather(*(client.get(layout.matrix, row=_WEIGHTS) for layout in self.layouts))
        arrays: dict[str, Array] = {}
        for layout, row in zip(self.layouts, rows, strict=True):
            if not holds(np.isfinite(row)):
                raise _diverged("parameter", layout.arrays(row, layout.features))
            arrays |= layout.arrays(row, layout.features)
        return version_of(
            self.network, {parameter.name: arrays[parameter.name] for parameter in self.graph.parameters}
        )


def _diverged(what: str, arrays: Mapping[str, Array]) -> Diverged:
    """Return the error that names the first array with a number that is not finite, and that number."""
    name, array = next((name, array) for name, array in arrays.items() if not np.isfinite(array).all())
    return Diverged(f"{what} {name!r}: expected finite numbers, given {array[~np.isfinite(array)][0]}")


def _gradient_of(parameter: Any) -> Array:
    gradient: Array = parameter.gradient
    return gradient


def _first_rows(layout: ParameterLayout, start: Mapping[str, Array]) -> Array:
    """Return the initial rows of a matrix: the parameters, the slots of the optimizer, and a gradient of zeros.

    The slots fit the given weights; the usual initial slots of FTRL would first set all weights to 0.
    """
    weights = layout.row_of(start, layout.features)
    slots = layout.optimizer.slots_for_warm_start(weights)
    return np.stack([weights, *(slots[name] for name in layout.optimizer.slot_names), np.zeros_like(weights)])


class NetworkWorker(ParameterServerWorker):
    """Trains a network: each record is the number of a step over bounded data, or prepared rows of a stream."""

    learner: NetworkLearner

    async def compute(self, mini_batch: FeatureMiniBatch, pulled: PulledParameters) -> Computed:
        """Compute with a number that identifies the mini-batch, also after a restart: dropout depends on it."""
        number = self._clocks * self.context.parallelism + self.context.subtask_index
        return self.learner.compute(mini_batch, pulled, number)

    async def process(self, record: Any, out: Output) -> None:
        """Learn and clock once; also if the step has no row for this worker, because the others wait for its clock."""
        subtask = self.context.subtask_index
        mini_batch = self.learner.mini_batch(record, subtask)
        if mini_batch is not None:
            try:
                await super().process(mini_batch, out)
            except Diverged as error:
                raise error.within(self._place(record)) from error
            return
        await self.learner.settle(
            self.client
        )  # Wait as a read does, so that no worker runs ahead of the others.
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit({"worker": subtask, "clock": self._clocks, "loss": 0.0, "records": 0, "waited_s": 0.0})

    def _place(self, record: Any) -> str:
        steps = self.learner.steps
        if steps is None:
            return f"mini-batch {self._clocks + 1} of worker {self.context.subtask_index}"
        epoch, step = divmod(record, steps.per_epoch)
        return f"epoch {epoch + 1}, step {step + 1} of {steps.per_epoch}"
