"""Epochs, wanted inputs, timers, batches and keyed state in steps that use a parameter server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from parameter_server.flows.counting import (
    MATRIX,
    Counts,
    Dealt,
    checkpoints,
    count_of_each,
    counting_flow,
    cut_off_again_and_again,
    ended,
    handled,
)

from streamiter import Flow, IterationListener, Operator, connect, epochs_every
from streamiter.engine.storage.store import MemoryStore
from streamiter.operators import Context, Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.testing import VirtualClock

RECORDS = 48
KINDS = [ASP(), BSP(), SSP(staleness=1)]


async def counted_once(make: Callable[[], tuple[Flow, ParameterServer]], turns: int) -> None:
    """Check that each record counts once, however the flow is cut off."""
    server = await cut_off_again_and_again([make] * 4, turns=turns)
    assert await count_of_each(server) == [1.0] * RECORDS


class ClocksByEpoch(Counts, IterationListener):
    """Adds with each record, clocks at the end of an epoch, then reads the adds of all workers in it."""

    async def process(self, record: int, out: Output) -> None:
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])

    async def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        await self.client.clock(MATRIX)
        row = await self.client.get(MATRIX, row=0)
        out.emit((self.client.worker, epoch_watermark, float(row.sum())))


def _by_epoch(
    consistency: Consistency, collected: Callable[[Any], Any] = lambda results: None
) -> tuple[Flow, ParameterServer]:
    server, flow = ParameterServer(shards=2), Flow("by epoch")
    numbers = flow.from_source(lambda: Dealt(RECORDS), name="numbers", parallelism=2)
    stamped = epochs_every(numbers, records=6, name="epochs")
    results = stamped.process(
        lambda: ClocksByEpoch(consistency, columns=RECORDS), name="count", parallelism=2, parameter_server=server
    )
    collected(results.collect(name="results"))
    return flow, server


@pytest.mark.parametrize("turns", [2, 9, 20])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_a_clock_may_be_the_end_of_an_epoch(consistency: Consistency, turns: int) -> None:
    """A callback that clocked at the end of an epoch waited for other workers, and records were lost or repeated."""
    await counted_once(lambda: _by_epoch(consistency), turns)


async def test_under_bsp_all_workers_read_the_same_after_each_epoch() -> None:
    """After an epoch, workers read different sums, because some read before all had added."""
    results: list[Any] = []
    flow, _ = _by_epoch(BSP(), results.append)
    await ended(await flow.start())
    read: dict[int, dict[int, float]] = {0: {}, 1: {}}
    for worker, epoch, total in results[0].items:
        read[worker][epoch] = total
    assert len(read[0]) == RECORDS // 2 // 6
    assert read[0] == read[1]
    assert list(read[0].values()) == [12.0 * (epoch + 1) for epoch in read[0]]


class InTurn(Counts):
    """Takes a record of one input, then a record of the other."""

    _turn = 0

    def wanted_inputs(self) -> tuple[str, ...]:
        return (("left",), ("right",))[self._turn % 2]

    async def process_left(self, record: int, out: Output) -> None:
        self._turn += 1
        await self.process(record, out)

    process_right = process_left

    def snapshot(self) -> int:
        return self._turn

    def restore(self, state: int) -> None:
        self._turn = state


class Half(Dealt):
    """Gives each subtask every n-th record of one half."""

    def __init__(self, first: int) -> None:
        super().__init__(first + RECORDS // 2)
        self._first = first

    def open(self, context: Context, positions: Any) -> None:
        super().open(context, positions)
        if not positions:
            self._next += self._first


def _in_turn(consistency: Consistency) -> tuple[Flow, ParameterServer]:
    server, flow = ParameterServer(shards=2), Flow("in turn")
    left = flow.from_source(lambda: Half(0), name="left", parallelism=2)
    right = flow.from_source(lambda: Half(RECORDS // 2), name="right", parallelism=2)
    both = connect(left=left, right=right)
    counted = both.process(
        lambda: InTurn(consistency, columns=RECORDS), name="count", parallelism=2, parameter_server=server
    )
    counted.collect(name="results")
    return flow, server


@pytest.mark.parametrize("turns", [2, 9, 20])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_a_step_that_wants_one_input_after_the_other_counts_each_record_once(
    consistency: Consistency, turns: int
) -> None:
    """Records that the step left waiting before its barrier were lost, or blocked the barrier."""
    await counted_once(lambda: _in_turn(consistency), turns)


class AddsByTimer(Operator):
    """Adds the collected records when its timer fires."""

    def __init__(self, consistency: Consistency) -> None:
        self._consistency = consistency
        self._came: list[int] = []

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        self._context = context
        await self._client.create_matrix(MATRIX, rows=1, columns=RECORDS, consistency=self._consistency)
        context.set_timer(1.0)

    async def process(self, record: int, out: Output) -> None:
        self._came.append(record)

    async def on_timer(self, payload: Any, out: Output) -> None:
        await self._add()
        self._context.set_timer(1.0)

    async def finish(self, out: Output) -> None:
        await self._add()

    async def _add(self) -> None:
        came, self._came = self._came, []
        await self._client.add(MATRIX, row=0, columns=came, values=[1.0] * len(came))

    def snapshot(self) -> list[int]:
        return list(self._came)

    def restore(self, state: list[int]) -> None:
        self._came = list(state)


@pytest.mark.parametrize("consistency", [ASP(), SSP(staleness=1)], ids=repr)
async def test_a_timer_may_add(consistency: Consistency) -> None:
    """A timer fired while its step had stopped for a barrier, and its add was lost or counted twice."""
    clock, store = VirtualClock(), MemoryStore()
    flow, server = counting_flow(lambda: AddsByTimer(consistency), records=RECORDS)
    job = await flow.start(clock=clock, checkpoints=checkpoints(store))
    await handled(job, 4)
    taking = asyncio.create_task(job.checkpoint())
    await clock.advance(1.0)
    await taking
    await clock.advance(2.5)
    await job.stop("abort")
    flow, server = counting_flow(lambda: AddsByTimer(consistency), records=RECORDS)
    await ended(await flow.start(clock=clock, checkpoints=checkpoints(store)))
    assert await count_of_each(server) == [1.0] * RECORDS


class CountsByKey(Counts):
    """Keeps state for each key in addition to the shared counts."""

    async def open(self, context: Context) -> None:
        await super().open(context)
        self._context = context

    async def process(self, record: int, out: Output) -> None:
        self._context.state["seen"] = self._context.state.get("seen", 0) + 1
        await super().process(record, out)


@pytest.mark.parametrize("turns", [3, 8, 13])
async def test_a_keyed_step_counts_each_record_once(turns: int) -> None:
    """Keyed state and parameters were restored from different checkpoints."""

    def make() -> tuple[Flow, ParameterServer]:
        server, flow = ParameterServer(shards=2), Flow("keyed")
        numbers = flow.from_source(lambda: Dealt(RECORDS), name="numbers", parallelism=2)
        keyed = numbers.key_by(lambda number: number % 5)
        counted = keyed.process(
            lambda: CountsByKey(ASP(), columns=RECORDS), name="count", parallelism=2, parameter_server=server
        )
        counted.collect(name="results")
        return flow, server

    await counted_once(make, turns)


class HandlesBatches(Counts):
    """Counts a whole batch and then clocks once."""

    async def process_batch(self, batch: Any, out: Output) -> None:
        await self.client.get(MATRIX, row=0)
        await self.client.add(MATRIX, row=0, columns=list(batch), values=[1.0] * len(batch))
        await self.client.clock(MATRIX)


@pytest.mark.parametrize("turns", [1, 3, 8])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_many_small_batches_count_each_record_once(consistency: Consistency, turns: int) -> None:
    """A step that handles whole batches was stopped between two of them, and records were lost or repeated."""
    await counted_once(
        lambda: counting_flow(lambda: HandlesBatches(consistency, columns=RECORDS), records=RECORDS), turns
    )


async def test_a_step_after_another_of_the_same_server_counts_each_record_once() -> None:
    """The barrier reached the second step through the first, and workers of both steps waited for each other."""

    def make() -> tuple[Flow, ParameterServer]:
        server, flow = ParameterServer(shards=2), Flow("one behind the other")
        numbers = flow.from_source(lambda: Dealt(RECORDS), name="numbers", parallelism=2)
        first = numbers.process(
            lambda: _Passes(SSP(staleness=30), columns=RECORDS), name="first", parallelism=2, parameter_server=server
        )
        second = first.process(
            lambda: _Passes(SSP(staleness=30), columns=RECORDS), name="second", parallelism=2, parameter_server=server
        )
        second.collect(name="results")
        return flow, server

    for turns in (3, 8, 13, 21):
        server = await cut_off_again_and_again([make] * 4, turns=turns)
        assert await count_of_each(server) == [2.0] * RECORDS


class _Passes(Counts):
    async def process(self, record: int, out: Output) -> None:
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])
        await self.client.clock(MATRIX)
        out.emit(record)
