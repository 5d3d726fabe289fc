"""What a published version of a network is: its parameters by name, and the network itself as its canonical JSON.

So whoever follows a model needs nothing else to predict with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.on_parameter_server.worker import Computed, Learner, ParameterServerWorker
from streamiter.learn.rows import holds
from streamiter.models.reader import last_update
from streamiter.models.update import Parameters
from streamiter.networks.losses import Diverged
from streamiter.networks.mini_batches import FeatureMiniBatch, TrainingSteps, from_record
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array, ParameterLayout, layouts
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.parameter_server.consistency.models import Consistency
from streamiter.parameter_server.psf.optimize import Optimize
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.networks.graph import LayerGraph
    from streamiter.parameter_server.client import Client

__all__ = [
    "NETWORK",
    "NetworkLearner",
    "NetworkWorker",
    "Published",
    "Start",
    "check_start",
    "checked_arrays",
    "network_of_version",
    "version_of",
]


NETWORK: Final = "network"
"""Under which the JSON stands beside the arrays, whose names have a dot each."""


def version_of(network: Network, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The parameters of a version."""
    return {NETWORK: json.dumps(network.to_json()), **arrays}


def network_of_version(parameters: Parameters, subject: str) -> tuple[Network, dict[str, Array]]:
    """The network, and its arrays. Raises ModelError, which begins with ``subject``, for what is no version of one."""
    text = parameters.get(NETWORK) if isinstance(parameters, dict) else None
    if not isinstance(text, str):
        given = ", ".join(map(repr, parameters)) if isinstance(parameters, dict) else "an array"
        raise ModelError(f"{subject}: expected {NETWORK!r} beside the arrays of a network, given {given}")
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
    """The parameters that the network has, of their shapes and its dtype.

    Raises ModelError where one is missing, of another shape, or not of finite numbers, and for arrays that the network
    does not have: it would be another network than the one they were trained in.
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
    """In the network's dtype, in which a number of float64 may be too large."""
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
    """The parameters last published in a topic; where there are none yet, new ones.

    >>> from streamiter import topic
    >>> start = Published(topic("memory://models"), "census")

    What the parameters are before the first step.
    """

    topic: Topic
    model: str


Start = Mapping[str, Any] | Published | None
"""Arrays by name, or what was published last; None: new ones, as the network and the seed say."""


def check_start(start: Start, network: Network) -> None:
    """Raise ModelError for arrays that are not those of the network; what was published is looked at later."""
    if start is None or isinstance(start, Published):
        return
    if not isinstance(start, Mapping):
        raise ModelError(
            f"{_GIVEN}: expected arrays by name, or Published(topic, model), given {shortened(start)}; "
            "those of a saved network are its parameters"
        )
    checked_arrays(network, start, _GIVEN)


async def starting_parameters(start: Start, network: Network, seed: int) -> dict[str, Array]:
    """All parameters by name.

    Raises ModelError for arrays that are not those of the network.
    """
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
"""The row of the parameters: the first of those that an optimizer works on."""

PulledParameters = dict[str, Array]
"""By name; those by feature have a row for each feature of the mini-batch."""


@dataclass(frozen=True, eq=False)
class NetworkLearner(Learner):
    """One matrix for each optimizer, and another for its parameters by feature; rows: these, its slots, the gradient.

    In step (BSP) the gradients of all workers are summed up, and the optimizers make a step of them with the clock.
    Otherwise every mini-batch is a step of its own, made as it is pushed. An optimizer of parameters by feature changes
    only those whose gradient is not 0.

    Networks whose parameters lie on a parameter server.
    """

    network: Network
    consistency: Consistency
    start: Start
    seed: int
    steps: TrainingSteps | None = None
    """Of bounded data; without them prepared rows come."""
    name: str = "network"
    """What the names of the matrices begin with."""

    metric = "loss"

    @cached_property
    def graph(self) -> LayerGraph:
        """That all workers compute with: between two mini-batches it keeps nothing."""
        return self.network.graph(seed=self.seed)

    @cached_property
    def layouts(self) -> Sequence[ParameterLayout]:
        """Where the parameters lie."""
        return layouts(self.graph.parameters, self.name)

    @property
    def matrix(self) -> str:  # type: ignore[override]
        """The first of them; all are clocked together."""
        return self.layouts[0].matrix

    @cached_property
    def _optimizes(self) -> list[Optimize]:
        return [
            Optimize(layout.matrix, layout.optimizer, sparse=layout.by_feature) for layout in self.layouts
        ]

    def mini_batch(self, record: Any, worker: int) -> FeatureMiniBatch | None:
        """What a worker learns from when this record comes: the number of a step, or prepared rows."""
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
        """``number``: that of the mini-batch, which dropout goes by; None: the graph counts them."""
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
    """Names the first of them that is not finite, and its first number that is not."""
    name, array = next((name, array) for name, array in arrays.items() if not np.isfinite(array).all())
    return Diverged(f"{what} {name!r}: expected finite numbers, given {array[~np.isfinite(array)][0]}")


def _gradient_of(parameter: Any) -> Array:
    gradient: Array = parameter.gradient
    return gradient


def _first_rows(layout: ParameterLayout, start: Mapping[str, Array]) -> Array:
    """The matrix as it begins: the parameters, the optimizer's slots for them, no gradient.

    The slots are those to go on from given weights: FTRL's own beginning would set all of them to 0 at first.
    """
    weights = layout.row_of(start, layout.features)
    slots = layout.optimizer.slots_to_go_on(weights)
    return np.stack([weights, *(slots[name] for name in layout.optimizer.slot_names), np.zeros_like(weights)])


class NetworkWorker(ParameterServerWorker):
    """Makes its mini-batch of what comes: the number of a step over bounded data, or prepared rows of a stream.

    The worker that trains a network.
    """

    learner: NetworkLearner

    async def compute(self, mini_batch: FeatureMiniBatch, pulled: PulledParameters) -> Computed:
        """With a number that no other mini-batch has, and the same one after a restart: dropout goes by it."""
        number = self._clocks * self.context.parallelism + self.context.subtask_index
        return self.learner.compute(mini_batch, pulled, number)

    async def process(self, record: Any, out: Output) -> None:
        """One clock, also where the step has no row for this worker: the others are in step with it."""
        subtask = self.context.subtask_index
        mini_batch = self.learner.mini_batch(record, subtask)
        if mini_batch is not None:
            try:
                await super().process(mini_batch, out)
            except Diverged as error:
                raise error.within(self._place(record)) from error
            return
        await self.learner.settle(self.client)  # As a read would: nobody runs ahead of the others.
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit({"worker": subtask, "clock": self._clocks, "loss": 0.0, "records": 0, "waited_s": 0.0})

    def _place(self, record: Any) -> str:
        steps = self.learner.steps
        if steps is None:
            return f"mini-batch {self._clocks + 1} of worker {self.context.subtask_index}"
        epoch, step = divmod(record, steps.per_epoch)
        return f"epoch {epoch + 1}, step {step + 1} of {steps.per_epoch}"
