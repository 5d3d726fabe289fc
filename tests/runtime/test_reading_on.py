"""A finished job that is started again with new records in its topics reads on, in one process and in several."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from learn.frozen_states import frozen
from processes.linked_jobs import joined_jobs
from runtime.checkpointed_sums import settings, written
from support.soak import in_soak
from support.waiting import PATIENCE_S

from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    epochs_every,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    tumbling,
)
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.errors import CheckpointError
from streamiter.flow.stream import Stream
from streamiter.learn import (
    DelayedLabels,
    Examples,
    LinearRegression,
    OnlineTraining,
    train_on_parameter_server,
    train_online,
)
from streamiter.operators import Output
from streamiter.operators.operator import IterationListener
from streamiter.parameter_server import ASP, BSP, ParameterServer, psf
from streamiter.topics import MemoryBroker, OutgoingBatch


async def write(broker: MemoryBroker, name: str, records: list[Any]) -> None:
    """Write records; those with equal keys are in one partition."""
    writer = await broker.topic(name).open_writer()
    keys = [b"%d" % (record["k"] % 4) for record in records]
    await writer.write(OutgoingBatch([orjson.dumps(record) for record in records], keys=keys))
    await writer.close()


async def night(flows: list[Flow], folder: Path) -> None:
    """Run one flow in one job, or several in as many jobs of a run, to their end."""
    if len(flows) == 1:
        job = await flows[0].start(checkpoints=settings(folder))
        assert (await asyncio.wait_for(job.wait(), PATIENCE_S)).state == "finished"
        return
    joined = joined_jobs(flows, JobOptions(checkpoints=settings(folder, alignment_timeout_s=1.0)))
    await asyncio.wait_for(joined.start(), PATIENCE_S)
    for statistics in await asyncio.wait_for(asyncio.gather(*(job.wait() for job in joined.jobs)), PATIENCE_S):
        assert statistics.state == "finished"


AddSteps = Callable[[Stream[Any], Stream[Any]], Stream[Any]]


def sums(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    keyed = numbers.key_by("k")
    return keyed.stateful_map(lambda total, r: (total + r["v"], [r["k"], total + r["v"]]), 0, name="sum")


def windows(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    keyed = numbers.event_time("t", unit="s", name="time").key_by("k")
    counted = keyed.window(tumbling(10), name="window").aggregate("count")
    return counted.map(lambda window: [window.key, window.start // 1000, window.value])


def timers(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    return numbers.event_time("t", unit="s", name="time").key_by("k").process(Wake, name="wake")


class Wake(Operator):
    """Emits key and time five seconds after each record, by event time."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        self._context.set_event_timer(self._context.timestamp + 5_000, record["v"])

    def on_event_timer(self, payload: Any, out: Output) -> None:
        out.emit([self._context.key, self._context.event_time // 1000])


def deduplicated(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    timed = numbers.event_time("t", unit="s", name="time").key_by("k")
    return timed.deduplicate("v", within_s=10, name="once").map(lambda r: [r["k"], r["v"]])


def joined_by_time(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    left = numbers.event_time("t", unit="s", name="left time").key_by("k")
    right = table.event_time("t", unit="s", name="right time").key_by("k")
    pairs = left.interval_join(right, lower_s=-4, upper_s=0, name="join")
    return pairs.map(lambda pair: [pair[0]["k"], pair[0]["v"], pair[1]["v"]])


def looked_up(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    pairs = numbers.key_by("k").join_table(table.key_by("k"), time="processing", name="look up")
    return pairs.map(lambda pair: [pair[0]["k"], pair[0]["v"], pair[1]["v"]])


async def answered(record: Any) -> Any:
    """Return the record, as a service would."""
    await asyncio.sleep(0)
    return record


def asked(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    return numbers.map_async(answered, name="ask").map(lambda r: [r["k"], r["v"]])


class Counting(Operator, IterationListener):
    """Counts records and callbacks; feeds each count back once."""

    def __init__(self) -> None:
        self._count = 0

    def process(self, record: Any, out: Output) -> None:
        if isinstance(record, dict):
            self._count += 1
            out.emit(["again", record["k"], self._count])
        elif record[0] == "again":
            out.emit(["seen", *record[1:]])

    def on_iteration_terminated(self, context: Any, out: Output) -> None:
        out.emit(["ended", context.subtask_index, self._count])

    def snapshot(self) -> int:
        return self._count

    def restore(self, state: int) -> None:
        self._count = state


def looped(numbers: Stream[Any], table: Stream[Any], *, stamped: bool = False) -> Stream[Any]:
    data = epochs_every(numbers, records=2, name="epochs") if stamped else numbers

    def body(variables: Any, data: Any) -> IterationBodyResult:
        union = variables[0].union(data[0].key_by("k"))
        counted = union.process(Counting, name="count")
        again = counted.filter(lambda record: record[0] == "again")
        return IterationBodyResult([again], [counted.filter(lambda record: record[0] == "seen")])

    none = numbers.flow.from_items([], name="none", parallelism=numbers.parallelism)
    [seen] = iterate_unbounded_streams([none], [data], body)
    return seen.map(lambda record: record[1:])


def looped_in_epochs(numbers: Stream[Any], table: Stream[Any]) -> Stream[Any]:
    return looped(numbers, table, stamped=True)


def records(first: int, stop: int) -> list[dict[str, int]]:
    return [{"k": n % 4, "t": n, "v": n} for n in range(first, stop)]


# By night: what has come out so far. Records of one key are in one partition, so each key has an order.
EXPECTED: list[tuple[AddSteps, list[list[int]], list[list[int]]]] = [
    (
        sums,
        [[n % 4, n if n < 4 else 2 * n - 4] for n in range(8)],
        [[n % 4, sum(range(n % 4, n + 1, 4))] for n in range(8, 16)],
    ),
    (windows, [[k, 0, 2] for k in range(4)], [[0, 0, 1], [1, 0, 1], [0, 10, 1], [1, 10, 1], [2, 10, 2], [3, 10, 2]]),
    (timers, [[n % 4, n + 5] for n in range(8)], [[n % 4, n + 5] for n in range(8, 16)]),
    (deduplicated, [[n % 4, n] for n in range(8)], [[n % 4, n] for n in range(8, 16)]),
    (
        joined_by_time,
        [[n % 4, n, 100 + m] for n in range(8) for m in (n - 4, n) if m >= 0],
        [[n % 4, n, 100 + m] for n in range(8, 16) for m in (n - 4, n)],
    ),
    (looked_up, [[n % 4, n, 104 + n % 4] for n in range(8)], [[n % 4, n, 112 + n % 4] for n in range(8, 16)]),
    (asked, [[n % 4, n] for n in range(8)], [[n % 4, n] for n in range(8, 16)]),
]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("add", "first", "second"), EXPECTED, ids=[each[0].__name__ for each in EXPECTED])
async def test_steps_read_on(
    add: AddSteps, first: list[list[int]], second: list[list[int]], processes: int, tmp_path: Path
) -> None:
    """From its second night on a job read nothing in several processes; or its ids and timers were forgotten."""
    broker = await broker_with("numbers", "table", "out")
    repeated = [{"k": 3, "t": 8, "v": 7}] if add is deduplicated else []

    def make(parallelism: int) -> Flow:
        flow = Flow("nightly", parallelism=parallelism)
        numbers, table = (flow.source(broker.topic(name), stop="latest", name=name) for name in ("numbers", "table"))
        add(numbers, table).sink(broker.topic("out"), name="out")
        return flow

    both = first + second
    nights = ((records(0, 8), first), ([*repeated, *records(8, 16)], both), ([], both))
    for number, (more, expected) in enumerate(nights):
        await write(broker, "numbers", more)
        await write(broker, "table", [{**record, "v": 100 + record["t"]} for record in more if record not in repeated])
        # The state also moves to other subtasks between the nights.
        await night([make(processes + number % 2) for _ in range(processes)], tmp_path)
        assert sorted(await written(broker.topic("out"))) == sorted(expected)


async def broker_with(*names: str) -> MemoryBroker:
    broker = MemoryBroker()
    for name in names:
        await broker.topic(name).create(partitions=1 if name == "out" else 4)
    return broker


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("add", [looped, looped_in_epochs])
async def test_unbounded_iterations_read_on(add: AddSteps, processes: int, tmp_path: Path) -> None:
    """A flow with a loop read nothing from its second night on, and ended well each time."""
    broker = await broker_with("numbers", "out")

    def make() -> Flow:
        flow = Flow("nightly", parallelism=processes)
        numbers = flow.source(broker.topic("numbers"), stop="latest", name="numbers")
        add(numbers, numbers).sink(broker.topic("out"), name="out")
        return flow

    for count in (8, 16, 16, 21):
        before = len(await written(broker.topic("out")))
        await write(broker, "numbers", records(before, count))
        await night([make() for _ in range(processes)], tmp_path)
        seen = await written(broker.topic("out"))
        assert len(seen) == count
        # Each subtask counts on from where it was.
        numbers = Counter(number for _, number in seen)
        assert max(numbers) * processes >= count
        assert max(numbers.values()) <= processes


Train = Callable[[Stream[Any]], OnlineTraining]


def examples_of(batch: Any) -> Examples:
    given = np.array([[row["x"], row["y"]] for row in batch])
    return Examples(given[:, :1], given[:, 1])


TRAININGS: dict[str, Train] = {
    "row by row": lambda rows: train_online(rows, label="y", features=["x"], mini_batch=10, publish_every=3),
    "row by row, in epochs": lambda rows: train_online(
        rows, label="y", features=["x"], mini_batch=10, mode="synchronous", publish_every=3
    ),
    "gradients": lambda rows: train_online(
        rows, lambda: LinearRegression(1), extract=examples_of, mini_batch=10, workers=1, publish_every=3
    ),
    "gradients, in epochs": lambda rows: train_online(
        rows, lambda: LinearRegression(1), extract=examples_of, mini_batch=10, mode="synchronous", publish_every=3
    ),
    "labels that come later": lambda rows: train_online(
        rows.event_time("t", unit="s", name="time"), labels=LATER, mini_batch=10, publish_every=3
    ),
}

LATER = DelayedLabels(
    key_of=lambda event: event["id"],
    is_answer=lambda event: "y" in event,
    features=["x"],
    target_of=lambda event: event["y"],
    within_s=3600,
)


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    if name != "labels that come later":
        return [{"k": 0, "x": n % 7, "y": 2.0 * (n % 7) + n % 3} for n in range(count)]
    # Each label comes at once, so that none waits at the end of a night.
    pairs = [({"x": n // 2 % 7}, {"y": float(n // 2 % 7 + n // 2 % 3)}) for n in range(0, count, 2)]
    events = [event for pair in pairs for event in pair]
    return [{"k": 0, "id": n // 2, "t": n, **event} for n, event in enumerate(events)]


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        *((name, 2 - number % 2) for number, name in enumerate(TRAININGS)),
        *in_soak(*((name, 1 + number % 2) for number, name in enumerate(TRAININGS))),
    ],
)
async def test_a_training_reads_on(name: str, processes: int, tmp_path: Path) -> None:
    """A nightly training learned from the rows of its first night only; or all later labels were late."""
    rows, learned = rows_of(name, 120), []
    for folder, counts in (("at once", [120]), ("nightly", [60, 60])):
        broker, start = MemoryBroker(), 0
        await broker.topic("rows").create()
        for count in counts:
            await write(broker, "rows", rows[start : start + count])
            start += count
            flows = [Flow("nightly") for _ in range(processes)]
            for flow in flows:
                source = flow.source(broker.topic("rows"), stop="latest", name="rows", parallelism=1)
                source.map(lambda row: row, name="beside", parallelism=processes).collect(name="rows beside")
                training = TRAININGS[name](source)
                models = training.models.map(lambda model: (model.records, model.parameters)).collect(name="models")
                if flow is flows[0]:
                    of_first = models
            await night(flows, tmp_path / folder)
        count, parameters = of_first.items[-1]
        learned.append((count, frozen(parameters)))
    assert learned[0][0] == learned[1][0] > 0
    if name != "gradients":  # Asynchronous gradients come in an order of their own.
        assert learned[0] == learned[1]


class Count(Operator):
    """Counts the records of each key on a parameter server."""

    async def open(self, context: Any) -> None:
        self._client = context.parameter_server
        await self._client.create_matrix("counts", rows=1, columns=4, dtype="int64", consistency=ASP())

    async def process(self, record: Any, out: Output) -> None:
        await self._client.add("counts", row=0, columns=[record["k"]], values=[1])
        await self._client.clock("counts")


async def test_workers_of_a_parameter_server_read_on(tmp_path: Path) -> None:
    """The workers had left the server, and nobody joined it in the second night."""
    broker = await broker_with("numbers")
    for first, stop in ((0, 8), (8, 15)):
        await write(broker, "numbers", [{"k": n % 4, "x": 1.0, "y": n % 2} for n in range(first, stop)])
        async with ParameterServer(shards=2) as server:
            flow = Flow("nightly", parallelism=2)
            numbers = flow.source(broker.topic("numbers"), stop="latest", name="numbers")
            numbers.process(Count, name="count", parameter_server=server)
            await night([flow], tmp_path)
            found = await server.aggregate(psf.PullSparse("counts", row=0))
        assert sum(found.values.tolist()) == stop


async def test_a_training_on_a_parameter_server_reads_on(tmp_path: Path) -> None:
    """The step that makes the versions had counted the workers of the first night as ended."""
    broker = await broker_with("numbers")
    for first, stop in ((0, 8), (8, 15)):
        await write(broker, "numbers", [{"k": n % 4, "x": 1.0, "y": n % 2} for n in range(first, stop)])
        async with ParameterServer(shards=2) as server:
            flow = Flow("nightly", parallelism=2)
            numbers = flow.source(broker.topic("numbers"), stop="latest", name="numbers")
            training = train_on_parameter_server(
                numbers,
                server,
                features=1,
                consistency=BSP(),
                batch=2,
                workers=2,
                extract=examples_of,
                publish_every=2,
                name="train",
            )
            models = training.models.map(lambda model: model.records).collect(name="models")
            await night([flow], tmp_path)
        assert models.items[-1] == stop


async def test_a_flow_that_cannot_read_on_says_why(tmp_path: Path) -> None:
    """A bounded training was started again with new records, read none of them, and reported success."""
    broker = await broker_with("numbers", "out")

    def make() -> Flow:
        def body(variables: Any, data: Any) -> IterationBodyResult:
            rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
            return IterationBodyResult([rounds], [data[0]])

        flow = Flow("nightly")
        numbers = flow.source(broker.topic("numbers"), stop="latest", name="numbers")
        [out] = iterate_bounded_streams_until_termination([flow.from_items([0], name="start")], [numbers], body)
        out.sink(broker.topic("out"), name="out")
        return flow

    await write(broker, "numbers", records(0, 3))
    for _ in range(2):  # Without new records there is nothing to refuse.
        await night([make()], tmp_path)
    await write(broker, "numbers", records(3, 5))
    told = r"whose inputs had ended\. There are new records, but step '.*' cannot read on: the rounds of its bounded"
    with pytest.raises(CheckpointError, match=told + r" .*; start without state with restore=None"):
        await make().start(checkpoints=settings(tmp_path))
    assert len(await written(broker.topic("out"))) == 3


def ends_of_a_loop(numbers: Stream[Any], server: ParameterServer) -> Stream[Any]:
    def body(variables: Any, data: Any) -> IterationBodyResult:
        counted = variables[0].union(data[0].key_by("k")).process(Counting, name="count")
        again = counted.filter(lambda record: record[0] == "again")
        return IterationBodyResult([again], [counted.filter(lambda record: record[0] == "ended")])

    none = numbers.flow.from_items([], name="none", parallelism=numbers.parallelism)
    return iterate_unbounded_streams([none], [numbers], body)[0]


def versions_of_a_training(numbers: Stream[Any], server: ParameterServer) -> Stream[Any]:
    return train_online(numbers, label="y", features=["x"], name="train").models.map(lambda model: model.records)


def versions_of_a_server(numbers: Stream[Any], server: ParameterServer) -> Stream[Any]:
    training = train_on_parameter_server(
        numbers, server, features=1, consistency=BSP(), batch=2, workers=2, extract=examples_of, name="train"
    )
    return training.models.map(lambda model: model.records)


def numbers_at_the_end(numbers: Stream[Any], server: ParameterServer) -> Stream[Any]:
    return numbers.map(lambda row: row["v"]).process(EmitAtEnd, name="at the end")


class EmitAtEnd(Operator):
    """Emits how many records there were, at the end of its input."""

    def __init__(self) -> None:
        self._count = 0

    def process(self, record: Any, out: Output) -> None:
        self._count += 1

    def input_ended(self, name: str, out: Output) -> None:
        out.emit(self._count)

    def snapshot(self) -> int:
        return self._count

    def restore(self, state: int) -> None:
        self._count = state


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "add",
    [ends_of_a_loop, versions_of_a_training, versions_of_a_server, numbers_at_the_end],
    ids=lambda add: add.__name__,
)
async def test_an_endless_flow_that_had_ended_waits_for_records(
    add: Callable[[Stream[Any], ParameterServer], Stream[Any]], processes: int, tmp_path: Path
) -> None:
    """A flow with a loop or a parameter server that had ended was told to go on, and ended by itself at once."""
    broker = await broker_with("numbers", "out")
    await write(broker, "numbers", [{**record, "x": 1.0, "y": record["v"] % 2} for record in records(0, 8)])

    async def start(stop: Any) -> Any:
        flows = [Flow("f", parallelism=processes) for _ in range(processes)]
        for flow in flows:
            numbers = flow.source(broker.topic("numbers"), stop=stop, name="numbers")
            server = await servers.enter_async_context(ParameterServer(shards=2))
            add(numbers, server).sink(broker.topic("out"), name="out")
        joined = joined_jobs(flows, JobOptions(checkpoints=settings(tmp_path, alignment_timeout_s=1.0)))
        await asyncio.wait_for(joined.start(), PATIENCE_S)
        return joined.jobs

    async def wait(jobs: Any) -> str:
        first, *_ = await asyncio.wait_for(asyncio.gather(*(job.wait() for job in jobs)), PATIENCE_S)
        return first.state  # type: ignore[no-any-return]

    async with contextlib.AsyncExitStack() as servers:
        assert await wait(await start("latest")) == "finished"
        at_end = await written(broker.topic("out"))
        assert at_end
        for ending in ("drain", "suspend", "abort"):
            jobs = await start(None)
            last = await jobs[0].checkpoint()
            assert [job.statistics().state for job in jobs] == ["running"] * processes
            await asyncio.gather(jobs[0].stop(ending), wait(jobs))
            assert jobs[0].statistics().state == ("aborted" if ending == "abort" else "finished")
            assert jobs[0].statistics().checkpoints.committed == last
            assert await written(broker.topic("out")) == at_end
        assert await wait(await start("latest")) == "finished"  # There is still nothing to do.
        assert await written(broker.topic("out")) == at_end

        jobs = await start(None)
        await write(broker, "numbers", [{**record, "x": 1.0, "y": record["v"] % 2} for record in records(8, 16)])
        while sum(sum(task.lag.values()) for job in jobs for task in job.statistics().tasks):
            await asyncio.sleep(0)
        await asyncio.gather(jobs[0].stop("drain"), wait(jobs))
        assert jobs[0].statistics().state == "finished"
        assert len(await written(broker.topic("out"))) > len(at_end)
