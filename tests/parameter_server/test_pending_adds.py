"""Adds that wait for a clock, and barriers of workers by number."""

import tracemalloc
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from support.examples import random_examples

from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, matrix_shard, psf, requests
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    ClockRequest,
    CreateRequest,
    GetPart,
    GetRequest,
    JoinRequest,
    LeaveRequest,
    PassBarrier,
    RaiseRequest,
    copied_add,
    size_of_adds,
)
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import thawed
from streamiter.values.plain_data import PlainData

COLUMNS = 1_000


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum up pending adds above 4 KiB instead of 64 MiB."""
    monkeypatch.setattr(matrix_shard, "_PENDING_BYTES", 4 << 10)


async def test_many_small_adds_of_one_iteration_are_summed_up() -> None:
    """A worker filled the memory with adds of one key, because each counted as its 16 bytes of numbers only."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=BSP())
        client = server.client(worker=0)
        for number in range(1_000):
            await client.add("w", row=0, columns=[number % 3], values=[1.0])
            assert server.statistics().matrix("w").buffered_adds <= 10
        await client.clock("w")
        assert (await client.get("w", row=0, columns=[0, 1, 2, 3])).tolist() == [334.0, 333.0, 333.0, 0.0]


async def test_a_large_add_is_not_summed_up_again_with_each_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each add of a few keys after an add of 10 M keys took 40 ms."""
    summed: list[int] = []
    sum_up = requests.summed_adds
    monkeypatch.setattr(requests, "summed_adds", lambda parts: (summed.append(1), sum_up(parts))[1])
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=BSP())
        client = server.client(worker=0)
        for _ in range(2):
            await client.add("w", row=0, values=1.0)
            for number in range(100):
                await client.add("w", row=0, columns=[number], values=[1.0])
            await client.clock("w")
        assert 2 <= len(summed) <= 20
        assert (await client.get("w", row=0)).tolist() == [4.0] * 100 + [2.0] * (COLUMNS - 100)


def test_the_size_of_an_add_of_one_key_is_its_memory() -> None:
    """The bound counted numbers instead of memory."""
    request = AddRequest("w", 0, -1, (AddPart(0, 0, np.array([3]), np.array([1.0])),))
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        kept = [copied_add(request) for _ in range(1_000)]
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said_bytes = sum(size_of_adds(one.parts) for one in kept)
    assert 0.7 < said_bytes / (after_bytes - before_bytes) < 1.4


async def test_a_read_after_a_barrier_searches_few_of_the_workers_own_adds() -> None:
    """Under ASP, each read of a fast worker that waited for a slow worker's barrier took 170 ms."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=2, columns=COLUMNS)
        quick, slow = (server.client(worker=number) for number in range(2))
        server.checkpoint_begins(1)
        quick.pass_barrier(1)
        [shard] = server._here
        await quick.add("w", row=1, values=1.0)
        for number in range(1_000):
            await quick.add("w", row=0, columns=[number % 3, 999], values=1.0)
            assert len(shard._holding._own_adds(GetRequest("w", 0, -1, ()))) <= 70
            if number % 100 == 7:
                assert (await quick.get("w", row=0, columns=[999])).tolist() == [number + 1.0]
        assert shard._holding.held > 0
        assert (await slow.get("w", row=0)).sum() == 0.0
        slow.pass_barrier(1)
        await server.take_state(1)
        rows = await slow.get("w", rows=[0, 1])
        assert (rows[0, [0, 1, 2, 999]].tolist(), rows[1].sum()) == ([334.0, 333.0, 333.0, 1000.0], COLUMNS)


EVERY = 2


class Case:
    """A shard with one matrix of one number, and the numbers in its snapshots."""

    def __init__(self, workers: int, consistency: Consistency | None = None) -> None:
        self.taken: list[tuple[int, float]] = []
        self.shard = Shard(0)
        self._create = CreateRequest(Matrix("w", rows=1, columns=1, consistency=consistency or ASP()), 1)
        self.shard.handle(self._create)
        self.clocks = dict.fromkeys(range(workers), 0)
        self.replies: list[Any] = []
        for worker in self.clocks:
            self.shard.handle(JoinRequest(worker))
        self._take(1)

    def _take(self, number: int) -> None:
        """Ask for the state at one barrier after the other."""

        def taken() -> None:
            self.taken.append((number, self.value_in(reply.result())))
            self._take(number + 1)

        reply = self.shard.take_state(number)
        reply.when_settled(taken)

    def value_in(self, state: Any) -> float:
        """Return the number in a state of the shard."""
        copy = Shard(0)
        copy.restore(thawed(state, PlainData()))
        copy.handle(self._create)
        return _value(copy)

    def get(self, worker: int) -> Any:
        """Read the number."""
        reply = self.shard.handle(GetRequest("w", worker, -1, [GetPart(0, 0, None)]))
        self.replies.append(reply)
        return reply

    def add(self, worker: int) -> Any:
        """Add 1."""
        return self.shard.handle(AddRequest("w", worker, -1, [AddPart(0, 0, None, np.ones(1))]))

    def iterate(self, worker: int) -> bool:
        """Add 1, clock, and pass a barrier at every second clock; return whether no call waits."""
        replies = [self.add(worker), self.shard.handle(ClockRequest("w", worker, -1))]
        self.clocks[worker] += 1
        if self.clocks[worker] % EVERY == 0:
            replies.append(self.shard.handle(PassBarrier(worker, self.clocks[worker] // EVERY)))
        self.replies.extend(replies)
        return not any(isinstance(reply, WaitingReply) for reply in replies)

    def iterations_before_waiting(self, worker: int, at_most: int) -> int:
        """Return how many times a worker can read, add and clock without waiting."""
        for iteration in range(at_most):
            if isinstance(self.get(worker), WaitingReply) or not self.iterate(worker):
                return iteration
        return at_most


def _value(shard: Shard) -> float:
    [total] = shard.handle(AggregateRequest("w", -1, -1, [(0, None)], psf.Sum("w", row=0)))
    return float(total)


CONSISTENCIES = (ASP(), SSP(staleness=0), SSP(staleness=3), SSP(staleness=10))


def some_clocks(random: Random) -> tuple[list[tuple[int, bool]], Consistency]:
    """Return the order in which workers clock, whether each reads before, and the consistency."""
    order = [(random.randrange(3), random.random() < 0.5) for _ in range(random.randrange(25))]
    return order, random.choice(CONSISTENCIES)


# The test takes a state at each step, which costs as much as a hundred steps.
@random_examples(some_clocks, examples=1_000)
def test_a_snapshot_contains_the_adds_of_each_worker_before_its_barrier(
    given: tuple[list[tuple[int, bool]], Consistency],
) -> None:
    """A fast worker reached its next barrier before the others had passed this one, and its adds were in the snapshot.

    A snapshot taken by hand while another one was under way lacked the adds of the fast worker.
    """
    order, consistency = given
    case = Case(3, consistency)
    for worker, reads in order:
        if reads:
            case.get(worker)
        case.iterate(worker)
        assert case.value_in(case.shard.state_now()) == sum(case.clocks.values())
    complete = min(case.clocks.values()) // EVERY
    assert case.taken == [(number, 3.0 * EVERY * number) for number in range(1, complete + 1)]
    end = (max(case.clocks.values()) // EVERY + 1) * EVERY
    for worker in case.clocks:  # the remaining iterations: no stalled request is lost
        while case.clocks[worker] < end:
            case.iterate(worker)
    assert all(not isinstance(reply, WaitingReply) or reply.is_settled for reply in case.replies)
    assert _value(case.shard) == sum(case.clocks.values())


@random_examples(lambda random: ([random.randrange(3) for _ in range(random.randrange(25))], random.randrange(11)))
def test_reads_after_a_barrier_wait_by_the_staleness_and_show_own_adds(given: tuple[list[int], int]) -> None:
    """A read within the bound waited for the snapshot, or a read beyond it was answered too early."""
    order, staleness = given
    case = Case(3, SSP(staleness=staleness))
    waiting: list[tuple[int, int, Any]] = []  # worker, clock, reply
    for worker in order:
        clock = case.clocks[worker]
        waiting.append((worker, clock, case.get(worker)))
        case.iterate(worker)
        slowest = min(case.clocks.values())
        for _, clock, reply in waiting:
            is_settled = not isinstance(reply, WaitingReply) or reply.is_settled
            assert is_settled == (clock - staleness <= slowest)
            if is_settled:
                [values] = (reply.result() if isinstance(reply, WaitingReply) else reply).values
                assert values[0] >= clock + 2 * max(clock - staleness, 0)


@pytest.mark.parametrize(
    ("consistency", "iterations"),
    [(ASP(), 2 * EVERY), (SSP(staleness=10), 11), (SSP(staleness=3), 4), (SSP(staleness=0), 1)],
    ids=repr,
)
def test_an_idle_worker_stops_others_at_no_barrier_earlier_than_their_consistency_does(
    consistency: Consistency, iterations: int
) -> None:
    """Each snapshot stopped ASP and SSP as if they were BSP: no worker got past the first barrier."""
    case = Case(2, consistency)
    assert case.iterations_before_waiting(0, at_most=100) == iterations
    waiting = next(reply for reply in reversed(case.replies) if isinstance(reply, WaitingReply))
    for _ in count():
        if waiting.is_settled:
            break
        assert case.clocks[1] < EVERY
        case.iterate(1)
    assert waiting.is_settled


def test_a_worker_that_leaves_holds_no_barrier_up() -> None:
    """The first worker that died ended all snapshots."""
    case = Case(2)
    for _ in range(5):
        case.iterate(0)
    assert case.taken == []
    case.shard.handle(LeaveRequest(1))
    assert case.taken == [(1, 2.0), (2, 4.0)]
    assert _value(case.shard) == 5.0


def test_a_read_answered_while_held_requests_are_applied_shows_all_earlier_own_adds() -> None:
    """The clock that a read waited for was taken from the queue before an earlier add of its worker."""
    case = Case(2, SSP(staleness=0))
    case.shard.handle(JoinRequest(2))
    case.shard.handle(RaiseRequest(2, {"w": 2 * EVERY}))
    for worker in (0, 1):
        for _ in range(EVERY + 1):
            case.iterate(worker)
    case.add(0)
    reading = case.get(0)
    assert not reading.is_settled
    for number in (1, 2):
        case.shard.handle(PassBarrier(2, number))
    assert reading.result().values[0][0] == 2 * (EVERY + 1) + 1
