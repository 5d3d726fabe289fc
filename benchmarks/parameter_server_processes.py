"""Call a shard in another process, compared with a copy in memory; and train a network in two processes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.divided_flows import Settings, of_settings
from benchmarks.measuring import Figure, Target, Trial, alternate
from benchmarks.networks import EPOCHS, OWN, census
from benchmarks.processes import ONE, TWO, environment
from benchmarks.session import Session
from streamiter import Flow, LocalProcesses, Operator
from streamiter.networks.network import Network
from streamiter.networks.training import train_network
from streamiter.operators import Context, Output
from streamiter.operators.source import Collected
from streamiter.parameter_server import ASP, BSP, ParameterServer

__all__ = ["calls", "networks_processes", "parameter_server_processes", "training"]

_KEYS: Final = 100
_MATRIX: Final = "w"
_PUSH, _PULL, _GET = "s to push", "s to pull", "s to get 100 keys"
_COPY: Final = "a copy in memory"


def parameter_server_processes(session: Session) -> Iterator[Figure]:
    """10 M float32 are added to a shard in another process (push), and read from it (pull); then 100 keys are read."""
    columns = session.size(10_000_000, 100_000)

    def copy() -> Trial:
        values = np.ones(columns, np.float32)
        copy_s = _median_s([_copied_s(values) for _ in range(10)])
        return Trial({_PUSH: copy_s, _PULL: copy_s})

    def served() -> Trial:
        with environment(Settings(records=columns).variables()):
            flow, measured = _calls()
            flow.run(on=LocalProcesses(2, flow=f"{__name__}:calls"))
        [figures] = measured.items
        return Trial(figures)

    other = "a shard in another process"
    series = alternate({_COPY: copy, other: served}, repeat=session.repeat)
    for unit, below in ((_PUSH, 3.0), (_PULL, 5.0)):
        yield series.figure(_COPY, unit)
        yield series.figure(other, unit, compared_with=_COPY, target=Target("ratio", below=below))
    yield series.figure(other, _GET, target=Target("figure", below=0.0002))


def _copied_s(values: Any) -> float:
    begin_s = time.perf_counter()
    values.copy()
    return time.perf_counter() - begin_s


def _median_s(seconds: list[float]) -> float:
    return float(np.median(seconds))


def calls() -> Flow:
    """Return a flow whose second worker, in process 1, calls the shard in process 0."""
    return _calls()[0]


def _calls() -> tuple[Flow, Collected]:
    flow, server = Flow("calls", parallelism=2), ParameterServer()
    numbers = flow.from_items([0, 1], name="numbers")
    measured = numbers.process(_Calls, name="calls", parameter_server=server)
    return flow, measured.collect()


class _Calls(Operator):
    """Measures calls in the second subtask."""

    async def open(self, context: Context) -> None:
        self._client: Any = context.parameter_server
        self._columns = of_settings().records
        await self._client.create_matrix(_MATRIX, rows=1, columns=self._columns, dtype="float32", consistency=ASP())

    async def process(self, record: int, out: Output) -> None:
        if record == 0:
            return
        values = np.ones(self._columns, np.float32)
        keys = np.random.default_rng(1).choice(self._columns, _KEYS, replace=False)
        client = self._client
        await client.add(_MATRIX, row=0, values=values)  # allocates the memory before the time is measured
        figures = {
            _PUSH: await _measured_s(10, lambda: client.add(_MATRIX, row=0, values=values)),
            _PULL: await _measured_s(10, lambda: client.get(_MATRIX, row=0)),
            _GET: await _measured_s(2_000, lambda: client.get(_MATRIX, row=0, columns=keys)),
        }
        out.emit(figures)


async def _measured_s(count: int, call: Callable[[], Awaitable[object]]) -> float:
    """Return the median time of a call."""
    seconds = []
    for _ in range(count):
        begin_s = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - begin_s)
    return _median_s(seconds)


def networks_processes(session: Session) -> Iterator[Figure]:
    """DeepFM learns census on a parameter server: one worker in one process, two workers in two processes."""
    epochs = session.size(20, 2)
    if census(_network(steps=1)) is None:
        return

    def run(workers: int, steps: int) -> Trial:
        settings = Settings(records=epochs, parallelism=workers, steps=steps)
        # Threads of numpy's matrix products would compete with the other process.
        with environment({**settings.variables(), "OPENBLAS_NUM_THREADS": "1"}):
            statistics = training().run(on=LocalProcesses(workers, flow=f"{__name__}:training"))
        return Trial({EPOCHS: epochs / statistics.elapsed_s})

    # A step has 10,256 rows, or 2,051: the messages of a step take as long for few rows as for many.
    for steps, target in ((2, Target("ratio", at_least=1.4)), (10, None)):
        one, two = (f"{name}, {steps} steps an epoch" for name in (ONE, TWO))
        series = alternate({one: partial(run, 1, steps), two: partial(run, 2, steps)}, repeat=session.repeat)
        yield series.figure(one, EPOCHS)
        yield series.figure(two, EPOCHS, compared_with=one, target=target)


def _network(steps: int) -> Network:
    document = Network.from_json(OWN / "deepfm.json").to_json()
    return Network.from_json({**document, "train": {**document["train"], "numupdateperepoch": steps}})


def training() -> Flow:
    """Return a flow that trains DeepFM in step, with a shard for each worker."""
    settings = of_settings()
    network = _network(settings.steps)
    data = census(network)
    assert data is not None
    flow, workers = Flow("training"), settings.parallelism
    server = ParameterServer(shards=workers)
    trained = train_network(flow, data, network, server, consistency=BSP(), epochs=settings.records, workers=workers)
    trained.models.map(lambda model: model.metrics, name="metrics")
    return flow
