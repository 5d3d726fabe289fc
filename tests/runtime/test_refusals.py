"""Flows that do not start, and jobs that fail, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/runtime/test_refusals.py`` writes the texts as they are now.
"""

import asyncio
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from processes.linked_jobs import joined_jobs
from runtime.checkpointed_sums import broker_of_sums, settings, summing
from runtime.probe import failure_of
from runtime.test_placement import Awaited, Pass, looped_through_topic, small, too_many
from support.refusals import Call, refusals_test, write

import streamiter
from streamiter import Flow, IterationBodyResult, Operator, connect, iterate_unbounded_streams, topic
from streamiter.engine.checkpointing.restore import check_restore_option
from streamiter.engine.graph.output import ByFunction, ByKey, Partitioning
from streamiter.engine.plan.plan import first_process
from streamiter.errors import GraphError, RejectRecords
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Source
from streamiter.topics import MemoryBroker

FILE = Path(__file__).with_name("refusals.txt")


def made(kind: type[Any] = Operator, **methods: Callable[..., Any]) -> Callable[[], Any]:
    """Return a factory of an operator or a source with these methods."""
    return lambda: type("Made", (kind,), methods)()


def rejects(*indices: int) -> Callable[..., Any]:
    def reject(*arguments: Any) -> Any:
        raise RejectRecords(list(indices), "too old")

    return reject


def fails(*arguments: Any) -> Any:
    raise ValueError("no")


async def cancelled(*arguments: Any) -> Any:
    raise asyncio.CancelledError


def returns(self: Any, record: Any, out: Output) -> Any:
    return record


def yields(self: Any, record: Any, out: Output) -> Any:
    yield record


async def returns_later(self: Any, record: Any, out: Output) -> Any:
    return record


async def yields_later(self: Any, record: Any, out: Output) -> Any:
    yield record


class Hidden(Operator):
    """Hides from the engine that its method is a coroutine function, as a decorator does."""

    def process(self, record: Any, out: Output) -> Any:
        async def later() -> None:
            out.emit(record)

        return later()


class Timed(Operator):
    """Has timers, and gives something back behind them, or at its end."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: int, out: Output) -> None:
        self.context.set_event_timer(record)

    def on_event_timer(self, payload: Any, out: Output) -> Any:
        return []


class TimedToTheEnd(Timed):
    def on_event_timer(self, payload: Any, out: Output) -> Any: ...

    def finish(self, out: Output) -> Any:
        yield 7


class Model(Operator):
    def process_model(self, record: Any, out: Output) -> None: ...


class Scalar:
    """A number of another library, which has no item()."""

    shape = ()

    def __repr__(self) -> str:
        return "Scalar()"


class Waiting(Pass):
    def on_timer(self, payload: Any, out: Output) -> None: ...


SHARED = Pass()
NAMES: dict[str, Any] = {name: getattr(streamiter, name) for name in streamiter.__all__} | {**globals()}
NAMES |= {"Source": Source, "joined_jobs": joined_jobs, "first_process": first_process, "topic": topic, "small": small}
NAMES |= {"check_restore_option": check_restore_option, "ByKey": ByKey, "ByFunction": ByFunction, "np": np}
NAMES |= {"too_many": too_many, "looped_through_topic": looped_through_topic, "Awaited": Awaited, "connect": connect}


def evaluated(code: str, **names: Any) -> Any:
    return eval(compile(code, "call.py", "eval"), {**NAMES, "split": split, **names})


async def of_a_job(code: str) -> object:
    """Run a flow to the error of its job, behind which nothing is left."""
    one, three = Flow("f"), Flow("f", parallelism=3)
    evaluated(code, one=one, three=three)
    raise await failure_of(one if one.steps else three)


async def of_a_start(code: str) -> object:
    """Start a flow, with topics of which none has transactions but those in memory."""
    broker = MemoryBroker()
    for name in ("numbers", "doubled"):
        await broker.topic(name).create(partitions=2)

    def doubling(**source: Any) -> Flow:
        flow = Flow("doubling", parallelism=2)
        read = flow.source(numbers, **{"start": "committed", **source})
        read.map(lambda number: 2 * number).sink(doubled, name="doubled")
        return flow

    def looped(read: Any) -> Any:
        def body(variables: Any, data: Any) -> IterationBodyResult:
            return IterationBodyResult([variables[0].filter(lambda n: False)], [variables[0]])

        return iterate_unbounded_streams([read], [], body)[0]

    numbers, doubled = broker.topic("numbers"), broker.topic("doubled")
    flow = Flow("f")
    given = evaluated(code, flow=flow, numbers=numbers, doubled=doubled, doubling=doubling, looped=looped)
    started = await (given if asyncio.iscoroutine(given) else flow.start())
    await started.stop("abort")
    return started


async def of_sums(code: str) -> object:
    """Start a flow with checkpoints."""
    broker = await broker_of_sums()
    with tempfile.TemporaryDirectory() as folder:

        def sums(checkpoints: Any = "settings", interval_s: float = 200.0, **options: Any) -> Any:
            given = settings(Path(folder), interval_s=interval_s) if checkpoints == "settings" else checkpoints
            return summing(broker).start(**({} if given is None else {"checkpoints": given}), **options)

        def unnamed() -> Any:
            flow = Flow("unnamed")
            sums = flow.source(broker.topic("numbers")).key_by(lambda n: n).reduce(lambda a, b: a + b)
            sums.sink(broker.topic("sums"))
            return flow.start(checkpoints=settings(Path(folder)))

        job = await evaluated(code, sums=sums, unnamed=unnamed)
        await job.stop("abort")
        return job


def split(partitioning: Partitioning) -> object:
    return partitioning.splitter(0, 2)([1, 2, 3])


async def where_written(code: str) -> object:
    return evaluated(code)


def without_lines(call: Call) -> Call:
    """Return the call with an error that names no line of this file, since these change with each edit."""

    async def calling(code: str) -> object:
        try:
            return await call(code)
        except GraphError as error:
            error.where = re.sub(r":\d+$", "", error.where or "")
            raise

    return calling


CALLS = {
    "jobs that fail": of_a_job,
    "flows that do not start": without_lines(of_a_start),
    "flows with checkpoints that do not start": without_lines(of_sums),
    "stores of checkpoints": where_written,
    "keys and partitions": where_written,
    "flows that cannot be divided among processes": without_lines(where_written),
}

test_jobs_fail_and_flows_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
