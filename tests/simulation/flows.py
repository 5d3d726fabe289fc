"""The simulated flows are small, and each uses a part of the engine that has state.

Inputs are equal under every seed, so one undisturbed run of each flow is enough for all seeds.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import orjson
from simulation.flows_with_loops import (
    bounded_loop_of_many,
    bounded_loop_with_replay,
    feedback_in_a_topic,
    floats_in_order,
    per_round_operators,
    stale_loop_with_an_idle_subtask,
    unbounded_asynchronous_loop,
    unbounded_synchronous_loop,
)
from simulation.flows_without_loops import (
    another_parallelism,
    calls_of_a_service,
    history_first,
    joined_at_the_end,
    keyed_state_and_timers,
    mini_batches,
    running_totals,
    side_outputs_and_dead_letters,
    wanted_inputs,
)

from streamiter import Flow, Operator, Stream
from streamiter.learn import FTRL, Examples, LogisticRegression, train_online
from streamiter.models.update import UpdateHeaders
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.testing import Simulation
from streamiter.topics.topic import TopicRecord

WORKERS = 3
COLUMNS = 7
RECORDS_OF_A_WORKER = 15


class _AddsToOwnRow(Operator):
    """Adds to its own row, with one clock for each record, and emits the row at the end."""

    def __init__(self, consistency: Consistency) -> None:
        self._consistency = consistency

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        self._row = context.subtask_index
        await self._client.create_matrix("counts", rows=WORKERS, columns=COLUMNS, consistency=self._consistency)

    async def process(self, record: int, out: Output) -> None:
        await self._client.get("counts", rows=range(WORKERS), columns=[record % COLUMNS])
        await self._client.add("counts", row=self._row, columns=[record % COLUMNS, 0], values=[1.0, 0.5])
        await self._client.clock("counts")

    async def finish(self, out: Output) -> None:
        row = await self._client.get("counts", row=self._row)
        out.emit([self._row, *row.tolist()])


class _ReadsWhatAllHaveAdded(Operator):
    """Emits each read: under BSP, a read at a clock contains all adds before this clock, and no other adds."""

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        self._number = context.subtask_index
        await self._client.create_matrix("sums", rows=1, columns=COLUMNS, consistency=BSP())

    async def process(self, record: int, out: Output) -> None:
        read = await self._client.get("sums", row=0)
        out.emit([self._number, record, *read.tolist()])
        await self._client.add("sums", row=0, columns=np.array([record % COLUMNS]), values=float(record))
        await self._client.clock("sums")


def _flow(name: str, simulation: Simulation, operator: Any, *, shards: int) -> Flow:
    flow = Flow(name, parallelism=WORKERS)
    numbers = range(WORKERS * RECORDS_OF_A_WORKER)
    records = flow.source(simulation.input("records", numbers, partitions=WORKERS, over_s=3.0))
    server = ParameterServer(shards=shards)
    worked = records.process(operator, name="work", parameter_server=server)
    worked.sink(simulation.output("results", order="any"))
    return flow


def bulk_synchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers all read the same sums at the same clock, before and after a restart."""
    return _flow("bulk synchronous", simulation, _ReadsWhatAllHaveAdded, shards=2)


def stale_synchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers are at most two clocks apart."""
    return _flow("stale synchronous", simulation, lambda: _AddsToOwnRow(SSP(staleness=2)), shards=3)


def asynchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers never wait for each other, and pass barriers at any time."""
    return _flow("asynchronous", simulation, lambda: _AddsToOwnRow(ASP()), shards=2)


def _example_rows(rows: list[dict[str, Any]]) -> Examples:
    return Examples(np.array([row["x"] for row in rows]), [row["y"] for row in rows])


def version_and_parameters(record: TopicRecord) -> Hashable:
    """Return the fields of a model update that do not depend on time."""
    headers = UpdateHeaders.parse(record.headers)
    assert headers is not None
    return headers.generation, headers.version, headers.epoch, record.value


def version_and_records(record: TopicRecord) -> Hashable:
    """Return the fields of a model update that do not depend on the order in which gradients arrive."""
    headers = UpdateHeaders.parse(record.headers)
    assert headers is not None
    assert record.value is not None
    return headers.generation, headers.version, orjson.loads(record.value)["records"]


def _examples(flow: Flow, simulation: Simulation) -> Stream:
    features = np.random.default_rng(5).normal(size=(48, 3)).round(3)
    rows = [{"x": x.tolist(), "y": float(x.sum() > 0)} for x in features]
    return flow.source(simulation.input("examples", rows, over_s=0.5))


def _model() -> LogisticRegression:
    return LogisticRegression(3, optimizer=FTRL(alpha=0.5))


def online_learner(simulation: Simulation) -> Flow:
    """Return a flow that learns synchronously, with optimizer slots, and publishes every version once."""
    flow = Flow("learner")
    training = train_online(
        _examples(flow, simulation), _model, extract=_example_rows, mini_batch=6, mode="synchronous", report_every=12
    )
    training.models.publish_model(simulation.output("models", compare=version_and_parameters), model="m")
    training.validation.sink(simulation.output("validation"))
    return flow


def asynchronous_learner(simulation: Simulation) -> Flow:
    """Return a flow whose workers do not wait: versions have no gaps, and contain every example once."""
    flow = Flow("asynchronous learner")
    training = train_online(_examples(flow, simulation), _model, extract=_example_rows, mini_batch=4, workers=2)
    training.models.publish_model(simulation.output("models", compare=version_and_records), model="m")
    return flow


MakeFlow = Callable[[Simulation], Flow]

FLOWS: tuple[MakeFlow, ...] = (
    keyed_state_and_timers,
    running_totals,
    another_parallelism,
    calls_of_a_service,
    mini_batches,
    side_outputs_and_dead_letters,
    wanted_inputs,
    joined_at_the_end,
    history_first,
    unbounded_synchronous_loop,
    floats_in_order,
    unbounded_asynchronous_loop,
    stale_loop_with_an_idle_subtask,
    feedback_in_a_topic,
    bounded_loop_of_many,
    bounded_loop_with_replay,
    per_round_operators,
    online_learner,
    asynchronous_learner,
    bulk_synchronous_server,
    stale_synchronous_server,
    asynchronous_server,
)

SETTLE_S = {"keyed_state_and_timers": 5.0, "another_parallelism": 5.0}
"""The seconds for which a flow waits for its timers, by flow."""
