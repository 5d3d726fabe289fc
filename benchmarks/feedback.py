"""Measure loops without Kafka: many records once around a loop, and one token many times around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import uvloop

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow, IterationBodyResult, Operator, OutputTag, Stream, connect, iterate_unbounded_streams
from streamiter.operators.source import Source

__all__ = ["feedback_latency", "feedback_throughput", "token_in_futures"]

BACK = OutputTag("back")
RECORDS = "records/s"
HOPS = "hops/s"

# streamiter puts as many items into a batch.
_BATCH_RECORDS = 8192


# -- many records, once around the loop ----------------------------------------------------------------------


def feedback_throughput(session: Session) -> Iterator[Figure]:
    """Two million records are fed back once each, through an unbounded iteration."""
    count = session.size(2_000_000, 20_000)
    series = alternate(
        {
            "asyncio.Queue, lists": _measured(count, _round_queues),
            "streamiter, lists": _measured(count, lambda n, watch: _once_around(list(range(n)), watch)),
            "streamiter, numpy": _measured(count, lambda n, watch: _once_around(np.arange(n), watch)),
        },
        repeat=session.repeat,
    )
    queues = "asyncio.Queue, lists"
    yield series.figure(queues, RECORDS)
    for name in ("streamiter, lists", "streamiter, numpy"):
        yield series.figure(name, RECORDS, compared_with=queues, target=Target("figure", at_least=3e6))


def _measured(count: int, work: Callable[[int, Stopwatch], tuple[int, int]]) -> Contender:
    def run() -> Trial:
        watch = Stopwatch()
        arrived = work(count, watch)
        return Trial(watch.rates(count, "records"), arrived)

    return run


class _Once(Operator):
    """Feeds fresh records back, and emits records that come back."""

    def process_fresh_batch(self, batch: Any, out: Any) -> None:
        out.emit_batch(batch)

    def process_back_batch(self, batch: Any, out: Any) -> None:
        out.emit_batch(batch, tag=BACK)


class _Tally(Operator):
    """Counts and sums the records that arrive."""

    def __init__(self) -> None:
        self.count = self.total = 0

    def process_batch(self, batch: Any, out: Any) -> None:
        self.count += len(batch)
        self.total += int(np.sum(batch)) if isinstance(batch, np.ndarray) else sum(batch)


def _once_around(items: Any, watch: Stopwatch) -> tuple[int, int]:
    flow = Flow("once around")
    tally = _Tally()

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        once = connect(back=variables[0], fresh=data[0]).process(_Once)
        return IterationBodyResult([once], [once.side_output(BACK)])

    [arrived] = iterate_unbounded_streams([flow.from_items([])], [flow.from_items(items)], body)
    arrived.process(lambda: tally)
    with watch:
        run_to_end(flow)
    return tally.count, tally.total


def _round_queues(count: int, watch: Stopwatch) -> tuple[int, int]:
    """Pass batches through queues: a source, a task that feeds back, a task that forwards the feedback, and a count."""

    async def loop(batches: list[list[int]]) -> tuple[int, int]:
        fresh: asyncio.Queue[list[int]] = asyncio.Queue(2)
        back: asyncio.Queue[list[int]] = asyncio.Queue()
        arrived: asyncio.Queue[list[int]] = asyncio.Queue(2)
        tally = _Tally()

        async def source() -> None:
            for batch in batches:
                await fresh.put(batch)

        async def feed_back() -> None:
            for _ in batches:
                await back.put(await fresh.get())

        async def bring() -> None:
            for _ in batches:
                await arrived.put(await back.get())

        async with asyncio.TaskGroup() as group:
            for work in (source(), feed_back(), bring()):
                group.create_task(work)
            for _ in batches:
                tally.process_batch(await arrived.get(), None)
        return tally.count, tally.total

    numbers = list(range(count))
    with watch:
        return _run(loop([numbers[at : at + _BATCH_RECORDS] for at in range(0, count, _BATCH_RECORDS)]))


# -- one token, many times around the loop -------------------------------------------------------------------


def feedback_latency(session: Session) -> Iterator[Figure]:
    """One record goes around an otherwise idle loop; a hop is its way from one task to the next."""
    rounds = session.size(50_000, 1_000)
    series = alternate(
        {
            "three asyncio tasks, bare futures": lambda: token_in_futures(rounds, "hops"),
            "streamiter, a loop of two tasks": lambda: _token_in_loop(rounds),
        },
        repeat=session.repeat,
    )
    futures = "three asyncio tasks, bare futures"
    yield series.figure(futures, HOPS)
    yield series.figure(
        "streamiter, a loop of two tasks", HOPS, compared_with=futures, target=Target("ratio", at_least=0.3)
    )


class _Silence(Source):
    """A source that never ends and never gives a record."""

    bounded = False

    async def read(self) -> Any:
        await asyncio.get_running_loop().create_future()


class _Referee(Operator):
    """Sends the token into the next round until all rounds are made."""

    def __init__(self, rounds: int, done: asyncio.Event) -> None:
        self._rounds = rounds
        self._done = done

    def process_token(self, rounds_made: int, out: Any) -> None:
        if rounds_made == self._rounds:
            self._done.set()
        else:
            out.emit(rounds_made + 1)

    def process_data(self, record: Any, out: Any) -> None:
        raise AssertionError("expected no record from the silent source, given one")


def _token_in_loop(rounds: int) -> Trial:
    async def play() -> int:
        done = asyncio.Event()
        flow = Flow("token")

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            token = connect(token=variables[0], data=data[0]).process(lambda: _Referee(rounds, done))
            return IterationBodyResult([token], [])

        iterate_unbounded_streams([flow.from_items([0])], [flow.from_source(_Silence)], body)
        job = await flow.start()
        await done.wait()
        statistics = await job.stop("abort")
        [channel] = [each for task in statistics.tasks for each in task.feedback]
        return channel.total_records

    with Stopwatch() as watch:
        rounds_made = _run(play())
    return Trial(watch.rates(2 * rounds_made, "hops"), rounds_made)


def token_in_futures(rounds: int, unit: str) -> Trial:
    """Send one token through three tasks, each of which waits for a future; ``unit`` is the name of a hop."""
    tasks = 3

    async def play() -> int:
        loop = asyncio.get_running_loop()
        inboxes = [loop.create_future() for _ in range(tasks)]
        rounds_made = 0

        async def pass_on(number: int) -> None:
            nonlocal rounds_made
            following = (number + 1) % tasks
            for _ in range(rounds):
                await inboxes[number]
                inboxes[number] = loop.create_future()
                rounds_made += number == tasks - 1
                if not inboxes[following].done():
                    inboxes[following].set_result(None)

        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(pass_on(number))
            inboxes[0].set_result(None)
        return rounds_made

    with Stopwatch() as watch:
        rounds_made = _run(play())
    return Trial(watch.rates(tasks * rounds_made, unit), rounds_made)


def _run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
