"""Networks whose parameters lie on a parameter server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamiter.learn.on_parameter_server.learner import Computed, Learner
from streamiter.learn.rows.checks import holds
from streamiter.networks.diverging import Diverged
from streamiter.networks.layout import Layout, layouts
from streamiter.networks.mini_batches import MiniBatch, TrainingSteps, from_record
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.networks.starting import Start, starting_parameters
from streamiter.networks.versions import version_of
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.psf.optimize import Optimize

if TYPE_CHECKING:
    from streamiter.networks.graph import Graph
    from streamiter.parameter_server.client import Client

__all__ = ["NetworkLearner", "PulledParameters"]

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
    def graph(self) -> Graph:
        """That all workers compute with: between two mini-batches it keeps nothing."""
        return self.network.graph(seed=self.seed)

    @cached_property
    def layouts(self) -> Sequence[Layout]:
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

    def mini_batch(self, record: Any, worker: int) -> MiniBatch | None:
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

    async def pull(self, client: Client, mini_batch: MiniBatch) -> PulledParameters:
        features = self._features_of(mini_batch)
        begun = [
            await client.start_get(layout.matrix, row=_WEIGHTS, columns=layout.columns_of(mini_batch.indices))
            for layout in self.layouts
        ]
        pulled: PulledParameters = {}
        for layout, row in zip(self.layouts, begun, strict=True):
            pulled |= layout.arrays(await row, features)
        return pulled

    def _features_of(self, mini_batch: MiniBatch) -> int:
        if mini_batch.indices is None:
            return self.graph.place_holder.feature_dimension
        return len(mini_batch.indices)

    def compute(self, mini_batch: MiniBatch, pulled: PulledParameters, number: int | None = None) -> Computed:
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

    async def push(self, client: Client, mini_batch: MiniBatch, contribution: Sequence[Array]) -> None:
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


def _first_rows(layout: Layout, start: Mapping[str, Array]) -> Array:
    """The matrix as it begins: the parameters, the optimizer's slots for them, no gradient.

    The slots are those to go on from given weights: FTRL's own beginning would set all of them to 0 at first.
    """
    weights = layout.row_of(start, layout.features)
    slots = layout.optimizer.slots_to_go_on(weights)
    return np.stack([weights, *(slots[name] for name in layout.optimizer.slot_names), np.zeros_like(weights)])
