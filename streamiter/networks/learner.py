"""A network on a parameter server: its learner, the worker that trains it, and the place of its parameters.

``Start`` is the parameters before the first step, ``ParameterLayout`` their columns in a matrix of the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Final, TypedDict, cast, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, shortened
from streamiter.learn.rows import holds
from streamiter.learn.server_training import Computed, Learner, ParameterServerWorker, ServerWorkerOptions
from streamiter.models.documents import refused_state, state_in, with_state
from streamiter.models.reader import last_update
from streamiter.models.update import shown_rank
from streamiter.networks.data import FeatureMiniBatch, TrainingSteps, from_record
from streamiter.networks.layers.layer import Parameter
from streamiter.networks.network import LayerGraph, Network, check_size
from streamiter.networks.serving import Diverged, checked_arrays, finite_loss, version_of
from streamiter.networks.sparse import FEATURES, FEATURES_MAX, DrawnRows, columns_of, no_features, permuted, seed_of
from streamiter.operators.declared_state import SAME, declared
from streamiter.operators.definitions import Definition, changes
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.parameter_server.admission import BYTES_MIN, Admission
from streamiter.parameter_server.calls import Call
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.optimizers import Optimizer
from streamiter.parameter_server.psf.aggregates import PullSparse
from streamiter.parameter_server.psf.optimize import ContinueUpdates, Optimize, UpdatesMade
from streamiter.parameter_server.psf.rows import Put
from streamiter.parameter_server.rows import Occurrences
from streamiter.parameter_server.storage.cells import distinct
from streamiter.topics.topic import Topic
from streamiter.values.numbers import Array
from streamiter.values.sparse_rows import SparseRows


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

_GIVEN: Final = "initial parameters"


def check_start(start: Start, network: Network) -> None:
    """Raise ModelError for arrays that do not fit the network, and for a network that does not fit into memory.

    Published arrays are checked when they are read.
    """
    check_size(network.graph())
    if start is None or isinstance(start, Published):
        return
    if not isinstance(start, Mapping):
        raise ModelError(
            f"{_GIVEN}: expected arrays by name, or Published(topic, model), given {shortened(start)}; "
            "a saved network has them as its parameters"
        )
    checked_arrays(network, start, _GIVEN)


class NetworkState(TypedDict):
    """The state in a version, from which a training continues exactly."""

    definition: Definition
    slots: dict[str, dict[str, Array]]
    """The slots of the optimizer by their names, for each parameter."""
    steps: int
    """The number of steps that the optimizers have made."""


async def starting_point(start: Start, network: Network, seed: int) -> tuple[dict[str, Array], NetworkState | None]:
    """Return all parameters by name, and the state of the optimizers if the start carries it.

    Raises ModelError for arrays, or a state, that do not fit the network.
    """
    given, subject = start, _GIVEN
    if isinstance(start, Published):
        update = await last_update(start.topic, start.model)
        given = None
        if update is not None:
            subject = f"model {start.model!r} of {start.topic.url}, update {shown_rank(update.rank)}"
            given = update.parameters if isinstance(update.parameters, dict) else {}
    if given is None:
        return network.initial_parameters(seed), None
    assert isinstance(given, Mapping)
    arrays, state = checked_arrays(network, given, subject), state_in(given, _LEARNER, subject)
    if state is not None and (changed := changes(state["definition"], definition_of(network))):
        raise refused_state(subject, ", ".join(changed))
    return arrays, cast("NetworkState | None", state)


def definition_of(network: Network) -> Definition:
    """Return the settings on which the meaning of parameters and slots depends."""
    return {
        "layers": {layer.name: layer.in_words() for layer in network.configuration.layers},
        "indexrange": network.features,
        "modeltype": network.configuration.model.dtype,
    }


_LEARNER: Final = "network"
"""The name of the learner whose state versions carry."""


_WEIGHTS: Final = 0
"""The row of the matrix that holds the parameters; the optimizer's slots and the gradient follow."""


PulledParameters = dict[str, Array]
"""Arrays by name; a parameter by feature has one row for each feature of the mini-batch."""


@dataclass(frozen=True, eq=False)
class NetworkLearner(Learner[FeatureMiniBatch, PulledParameters, Sequence[Array]]):
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
    publishes_state: bool = False
    """Whether versions carry the state of the optimizers."""
    admission: Admission | None = None
    """Which features get parameters of their own; None: all that occur."""

    metric = "loss"

    @cached_property
    def graph(self) -> LayerGraph:
        """Return the graph that all workers compute with; it keeps nothing between two mini-batches."""
        return self.network.graph(seed=self.seed)

    @cached_property
    def layouts(self) -> Sequence[ParameterLayout]:
        """Return the place of the parameters in the matrices."""
        return layouts(self.graph.parameters, way=self.graph.drawn_as)

    @property
    def matrix(self) -> str:  # type: ignore[override]
        """Return the name of the first matrix; all matrices share its clock."""
        return self.layouts[0].matrix

    @cached_property
    def _optimizes(self) -> list[Optimize]:
        return [Optimize(layout.matrix, layout.optimizer, sparse=layout.by_feature) for layout in self.layouts]

    def definition(self) -> Definition:
        return {
            "learner": _LEARNER,
            **definition_of(self.network),
            "seed": self.seed,
            "steps of an epoch": None if self.steps is None else self.steps.per_epoch,
            **({} if self.admission is None else {"admission": "yes"}),
        }

    def mini_batch(self, record: Any, worker: int) -> FeatureMiniBatch | None:
        """Return the mini-batch of a record, which is the number of a step or prepared rows."""
        return from_record(record) if self.steps is None else self.steps.mini_batch(record, worker)

    async def create(self, client: Client) -> None:
        start, state = await starting_point(self.start, self.network, self.seed)
        room, matrices = self.admission, sum(layout.by_feature for layout in self.layouts)
        if room is not None:  # Each matrix of features has its share.
            room = replace(room, at_most=max(BYTES_MIN, room.size_bytes // matrices))
        for layout, optimize in zip(self.layouts, self._optimizes, strict=True):
            await client.create_matrix(
                layout.matrix,
                rows=optimize.rows_needed(layout.optimizer),
                columns=layout.columns,
                dtype=self.network.dtype.name,
                consistency=self.consistency,
                on_clock=optimize if self.is_in_step else None,
                **_first_rows(layout, optimize, start, state),
                admission=room if layout.by_feature else None,
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
    ) -> Computed[Sequence[Array]]:
        """Return loss and gradients; dropout depends on ``number`` (None: the graph counts mini-batches)."""
        graph, count = self.graph, len(mini_batch)
        graph.feed_data(mini_batch.rows, mini_batch.labels, indices=mini_batch.indices, training=True, number=number)
        for parameter in graph.parameters:
            parameter.values = pulled[parameter.name]
        loss = finite_loss(graph)
        graph.backward()
        gradients = {made.name: made.gradient for made in graph.gradients() if made.gradient is not None}
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

    async def push(
        self, client: Client, mini_batch: FeatureMiniBatch, contribution: Sequence[Array]
    ) -> Sequence[Call[None]]:
        return [
            await client.start_add(
                layout.matrix,
                row=optimize.gradient_row(),
                columns=layout.columns_of(mini_batch.indices),
                values=vector,
                update=None if self.is_in_step else optimize,
                occurrences=layout.occurrences(mini_batch) if self.admission and layout.by_feature else None,
            )
            for layout, optimize, vector in zip(self.layouts, self._optimizes, contribution, strict=True)
            if len(vector)
        ]

    async def clock(self, client: Client) -> None:
        await asyncio.gather(*(client.clock(layout.matrix) for layout in self.layouts))

    async def settle(self, client: Client) -> None:
        for layout in self.layouts:
            await client.get(layout.matrix, row=_WEIGHTS, columns=[0])

    async def parameters(self, client: Client) -> dict[str, object]:
        stored = await self._stored(client)
        features = stored.get(FEATURES)
        rows = await asyncio.gather(
            *(client.get(layout.matrix, row=_WEIGHTS, columns=layout.columns_of(features)) for layout in self.layouts)
        )
        arrays: dict[str, Array] = {}
        for layout, row in zip(self.layouts, rows, strict=True):
            of_row = layout.arrays(row, layout.features if features is None else len(features))
            if not holds(np.isfinite(row)):
                raise _diverged("parameter", of_row)
            arrays |= of_row
        named = {parameter.name: arrays[parameter.name] for parameter in self.graph.parameters}
        version = version_of(self.network, stored | named)
        return with_state(version, _LEARNER, await self._state(client, features)) if self.publishes_state else version

    async def _state(self, client: Client, features: Array | None) -> NetworkState:
        slots: dict[str, dict[str, Array]] = {parameter.name: {} for parameter in self.graph.parameters}
        for layout, optimize in zip(self.layouts, self._optimizes, strict=True):
            count = layout.features if features is None else len(features)
            for name in layout.optimizer.slot_names:
                row = await client.get(layout.matrix, row=optimize.slot_row(name), columns=layout.columns_of(features))
                for parameter, array in layout.arrays(row, count).items():
                    slots[parameter][name] = array
        steps = await client.aggregate(UpdatesMade(self.matrix))
        return {"definition": definition_of(self.network), "slots": slots, "steps": steps}

    async def _stored(self, client: Client) -> dict[str, Array]:
        """Return which features the matrices store, and the seed of all others; nothing if they store all."""
        drawn = [layout for layout in self.layouts if layout.drawn is not None]
        if not drawn:
            return {}
        rows = [await client.aggregate(PullSparse(layout.matrix, row=_WEIGHTS)) for layout in drawn]
        features = [layout.features_of(row.columns) for row, layout in zip(rows, drawn, strict=True)]
        default = (await client.settings(drawn[0].matrix)).default
        assert isinstance(default, DrawnRows)
        return {**no_features(default.seed), FEATURES: distinct(np.concatenate(features))}


def _diverged(what: str, arrays: Mapping[str, Array]) -> Diverged:
    """Return the error that names the first array with a number that is not finite, and that number."""
    name, array = next((name, array) for name, array in arrays.items() if not np.isfinite(array).all())
    return Diverged(f"{what} {name!r}: expected finite numbers, given {array[~np.isfinite(array)][0]}")


def _first_rows(
    layout: ParameterLayout, optimize: Optimize, start: Mapping[str, Array], state: NetworkState | None
) -> dict[str, Any]:
    """Return the settings of a matrix with its initial rows: parameters, slots of the optimizer, a gradient of zeros.

    Without a state the slots fit the given weights; the usual initial slots of FTRL would first set all weights to 0.
    """
    features = layout.features if layout.drawn is None else len(start[FEATURES])
    weights = layout.row_of(start, features)
    if state is None:
        slots, counted = layout.optimizer.slots_for_warm_start(weights), []
    else:
        given = state["slots"]
        slots = {
            name: layout.row_of({parameter: given[parameter][name] for parameter in layout.names}, features)
            for name in layout.optimizer.slot_names
        }
        counted = [ContinueUpdates(layout.matrix, state["steps"])]
    rows = {_WEIGHTS: weights, **{optimize.slot_row(name): slot for name, slot in slots.items()}}
    if layout.drawn is None:
        return {"init": [*(Put(layout.matrix, row, values) for row, values in rows.items()), *counted]}
    columns = layout.columns_at(start[FEATURES])
    # The default of some slots is drawn, too, so zeros of a state count.
    puts = [Put(layout.matrix, row, each, columns) for row, each in rows.items() if not row or counted or each.any()]
    return {
        "sparse": True,
        "vector": layout.width,
        "default": layout.drawn(seed_of(start)),
        "init": [*(puts if features else ()), *counted] or 0.0,
    }


# At most this many numbers of steps wait before a worker. If all of them waited there, the source would end soon, and a
# restore with another number of workers would have to divide the numbers.
_STEPS_AHEAD: Final = 4


@final
class StepsMade:
    """The link between the source of step numbers and the worker of one subtask: each says how far it has come."""

    def __init__(self) -> None:
        self.are_drained = False
        """Whether the source was stopped before the last step."""
        self._made: int | None = None
        """None if there is no worker in this process."""
        self._has_made = asyncio.Event()

    @classmethod
    def of(cls, context: Context, steps: TrainingSteps) -> StepsMade:
        """Return the object of a subtask, which its source and its worker share."""
        return context.scope.get((steps, context.subtask_index), cls)

    def tell(self, made: int) -> None:
        """Note how many steps the worker has made."""
        self._made = made
        self._has_made.set()

    async def near(self, step: int) -> None:
        """Wait until the worker has made almost all steps before this one."""
        while self._made is not None and step > self._made + _STEPS_AHEAD:
            self._has_made.clear()
            await self._has_made.wait()


# To compute in a thread takes 60 to 100 µs longer.
_IN_THREAD_S: Final = 0.0005


class NetworkWorker(ParameterServerWorker):
    """Trains a network: each record is the number of a step over bounded data, or prepared rows of a stream.

    While a thread computes a long step, the shards of this process answer the workers of other processes.
    """

    learner: NetworkLearner

    _steps_before = declared(0, share=SAME)
    """The steps, in step, that the parameters contained when the training started."""

    def __init__(self, options: ServerWorkerOptions) -> None:
        super().__init__(options)
        self.learner = replace(self.learner)  # Two threads cannot compute with one graph.
        self._last_s = 0.0
        """How long the last step took to compute."""

    async def compute(self, mini_batch: FeatureMiniBatch, pulled: PulledParameters) -> Computed[Sequence[Array]]:
        """Compute with a number that identifies the mini-batch, also after a restart: dropout depends on it."""
        number = (self._steps_before + self._clocks) * self.context.parallelism + self.context.subtask_index
        begin_s = self.context.clock.monotonic_s()
        if self._last_s < _IN_THREAD_S:
            computed = self.learner.compute(mini_batch, pulled, number)
        else:
            computed = await asyncio.to_thread(self.learner.compute, mini_batch, pulled, number)
        self._last_s = self.context.clock.monotonic_s() - begin_s
        return computed

    async def open(self, context: Context) -> None:
        await super().open(context)
        if self.learner.is_in_step:
            # No worker can clock before all of them are open.
            self._steps_before = await self.client.aggregate(UpdatesMade(self.learner.matrix))
        if self.learner.steps is not None:
            StepsMade.of(context, self.learner.steps).tell(0)

    async def process(self, record: Any, out: Output) -> None:
        """Make the steps up to this one, or learn from prepared rows.

        After a restore with another number of workers, a step may come again, or before an earlier one.
        """
        if self.learner.steps is None:
            await self._step(record, out)
            return
        made = StepsMade.of(self.context, self.learner.steps)
        while self._clocks <= record:
            await self._step(self._clocks, out)
        made.tell(self._clocks)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.learner.steps is not None:
            StepsMade.of(self.context, self.learner.steps).tell(self._clocks)

    async def finish(self, out: Output) -> None:
        """Make the steps that are left: the numbers of an old job were divided over another number of workers."""
        steps = self.learner.steps
        if steps is not None and not StepsMade.of(self.context, steps).are_drained:
            await self.process(steps.in_all - 1, out)
        await super().finish(out)

    async def _step(self, record: Any, out: Output) -> None:
        """Learn and clock once; also if the step has no row for this worker, because the others wait for its clock."""
        subtask = self.context.subtask_index
        number = record if self.learner.steps is None else record + self._steps_before
        mini_batch = self.learner.mini_batch(number, subtask)
        if mini_batch is not None:
            try:
                await super().process(mini_batch, out)
            except Diverged as error:
                raise error.within(self._place(record)) from error
            return
        await self.learner.settle(self.client)  # Wait as a read does, so that no worker runs ahead of the others.
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit({"worker": subtask, "clock": self._clocks, "loss": 0.0, "records": 0, "waited_s": 0.0})

    def _place(self, record: Any) -> str:
        steps = self.learner.steps
        if steps is None:
            return f"mini-batch {self._clocks + 1} of worker {self.context.subtask_index}"
        epoch, step = divmod(record, steps.per_epoch)
        return f"epoch {epoch + 1}, step {step + 1} of {steps.per_epoch}"


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The columns of the parameters in a matrix of the parameter server.

    All parameters of one optimizer are in one row of one matrix. Parameters by feature have a matrix of their own,
    where all numbers of a feature are adjacent; so a mini-batch needs a few ranges of columns.

    >>> from streamiter.parameter_server.optimizers import SGD
    >>> from streamiter.networks.layers.layer import Parameter
    >>> weight = Parameter("wide.weight", (3, 1), True, SGD(0.1), "weight", 2, 1)
    >>> factors = Parameter("embedding.weight", (3, 2), True, SGD(0.1), "weight", 2, 4)
    >>> [layout] = layouts([weight, factors])
    >>> layout.matrix, layout.columns, layout.columns_of(np.array([0, 2])).tolist()
    ('network.features.0', 9, [0, 1, 2, 6, 7, 8])
    >>> {name: array.tolist() for name, array in layout.arrays(np.arange(6.0), features=2).items()}
    {'wide.weight': [[0.0], [3.0]], 'embedding.weight': [[1.0, 2.0], [4.0, 5.0]]}
    """

    matrix: str
    optimizer: Optimizer
    by_feature: bool
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each parameter; without the first axis for parameters by feature."""
    features: int
    """The number of features; 1 for parameters that are not by feature."""
    drawn: Callable[[int], DrawnRows] | None = None
    """Returns for a seed how features that were not learned from are drawn; None: the matrix stores all features."""

    @cached_property
    def _ranges(self) -> list[slice]:
        ends = accumulate((math.prod(shape) for shape in self.shapes), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def width(self) -> int:
        """Return the number of columns of one feature; all columns for parameters that are not by feature."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def columns(self) -> int:
        """Return the number of columns of the matrix."""
        return self.width * self.features

    def columns_of(self, indices: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64] | None:
        """Return the columns of some features in ascending order; None: all columns."""
        if not self.by_feature or indices is None or len(indices) == self.features:
            return None
        return self.columns_at(indices)

    def columns_at(self, features: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the columns of features in their order; without a range of features, neighbours are far apart."""
        return columns_of(permuted(features) if self.features == FEATURES_MAX else features, self.width)

    def features_of(self, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the features of all their columns; the inverse of ``columns_at``."""
        numbers = columns[:: self.width] // self.width
        return permuted(numbers, back=True) if self.features == FEATURES_MAX else numbers

    def occurrences(self, mini_batch: FeatureMiniBatch) -> Occurrences:
        """Return the first columns of the features of all rows in order, and the times of their rows."""
        rows, times = cast("SparseRows", mini_batch.rows), mini_batch.times
        firsts = self.columns_at(cast("Array", mini_batch.indices))[:: self.width]
        return firsts[rows.indices], None if times is None else times[rows.row_of_value]

    def arrays(self, row: Array, features: int) -> dict[str, Array]:
        """Return the parameters by name as views of a row; parameters by feature have ``features`` rows."""
        if not self.by_feature:
            shaped = zip(self.names, self._ranges, self.shapes, strict=True)
            return {name: row[part].reshape(shape) for name, part, shape in shaped}
        table = row.reshape(features, self.width)
        if len(self.names) == 1:
            return {self.names[0]: table.reshape(features, *self.shapes[0])}
        return {
            name: np.ascontiguousarray(table[:, part]).reshape(features, *shape)
            for name, part, shape in zip(self.names, self._ranges, self.shapes, strict=True)
        }

    def row_of(self, arrays: Mapping[str, Array], features: int) -> Array:
        """Return the row of the given arrays; the inverse of ``arrays``."""
        if not self.by_feature:
            return np.concatenate([arrays[name].reshape(-1) for name in self.names])
        # With no features numpy cannot compute the number of numbers for each.
        tables = [
            arrays[name].reshape(features, math.prod(shape))
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]
        return np.concatenate(tables, axis=1).reshape(-1)


def layouts(parameters: Iterable[Parameter], *, way: str | None = None) -> list[ParameterLayout]:
    """Return a layout for each optimizer and kind of parameter.

    ``way`` says how values of features are drawn; None: all are stored.
    """
    groups: list[list[Parameter]] = []
    for parameter in parameters:
        group = next((group for group in groups if _are_alike(group[0], parameter)), None)
        if group is None:
            groups.append([parameter])
        else:
            group.append(parameter)
    return [_layout(group, number, way) for number, group in enumerate(groups)]


def _are_alike(one: Parameter, other: Parameter) -> bool:
    return one.by_feature == other.by_feature and one.optimizer == other.optimizer


def _layout(group: Sequence[Parameter], number: int, way: str | None) -> ParameterLayout:
    first = group[0]
    by_feature = first.by_feature
    return ParameterLayout(
        matrix=f"network.{'features' if by_feature else 'layers'}.{number}",
        optimizer=first.optimizer,
        by_feature=by_feature,
        names=tuple(parameter.name for parameter in group),
        shapes=tuple(parameter.shape[1:] if by_feature else parameter.shape for parameter in group),
        features=first.shape[0] if by_feature else 1,
        drawn=partial(DrawnRows.of, group, way) if by_feature and way is not None else None,
    )
