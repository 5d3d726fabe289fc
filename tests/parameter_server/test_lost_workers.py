"""A worker that sends nothing any more counts as dead and leaves, and workers that waited for it continue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_S

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server import BSP, SSP, Client, ParameterServer
from streamiter.parameter_server.calls import Heartbeats
from streamiter.testing import VirtualClock


async def test_a_silent_worker_leaves_and_the_others_continue() -> None:
    """A worker that hung stopped the training of all others forever."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=BSP())
        lively, silent = server.client(0), server.client(1)
        await lively.add("w", row=0, values=1.0)
        await lively.clock("w")
        reading = asyncio.ensure_future(lively.get("w", row=0))
        await clock.advance(9.0)
        assert not reading.done()
        silent.heartbeat()
        await clock.advance(9.0)
        assert not reading.done()
        await clock.advance(2.0)
        assert (await asyncio.wait_for(reading, PATIENCE_S)).tolist() == [1.0, 1.0]
        assert server.workers == [0]
        with pytest.raises(WorkerHasLeft, match=r"worker 1: .* nothing was heard of it for 10 s"):
            await silent.get("w", row=0)


async def test_a_worker_that_waits_for_others_is_not_taken_for_dead() -> None:
    """A fast worker was removed because it sent nothing while it waited for a slow one."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=BSP())
        fast, slow = server.client(0), server.client(1)
        await fast.clock("w")
        reading = asyncio.ensure_future(fast.get("w", row=0))
        for _ in range(5):
            await clock.advance(9.0)
            slow.heartbeat()
        assert server.workers == [0, 1]
        await slow.clock("w")
        await reading
        await clock.advance(9.0)
        assert server.workers == [0, 1]


CALLS_WITHOUT_A_REQUEST: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "a get that the cache answers": lambda client: client.get("w", row=0),
    "a matrix that is there": lambda client: client.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=1)),
}


@pytest.mark.parametrize("call", CALLS_WITHOUT_A_REQUEST)
async def test_a_worker_whose_calls_need_no_shard_is_not_silent(call: str) -> None:
    """A worker that read the same row all the time was taken for dead, because its cache answered."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=1))
        client = server.client(0, cache_bytes=1_000)
        await client.get("w", row=0)
        for _ in range(5):
            await clock.advance(6.0)
            await CALLS_WITHOUT_A_REQUEST[call](client)
        assert server.workers == [0]
        assert server.statistics().matrix("w").gets == 1


def _unwatched(clock: VirtualClock, timeout_s: float) -> Heartbeats:
    """Return heartbeats that make no worker leave."""
    return Heartbeats(clock, timeout_s, leave=lambda worker, reason: None)


async def test_a_late_message_of_a_worker_that_has_left_does_not_bring_it_back() -> None:
    """A late message brought a departed worker back, and it had to be removed again and again."""
    heartbeats = _unwatched(VirtualClock(), 1.0)
    heartbeats.joined(1)
    heartbeats.left(1)
    heartbeats.heard(1)
    heartbeats.wait_begins(1)
    heartbeats.wait_ends(1)
    assert heartbeats.silent(100.0) == []


async def test_a_worker_whose_call_waits_at_the_server_is_not_silent() -> None:
    """A fast worker that waited for the slowest one sent nothing and was taken for dead."""
    clock = VirtualClock()
    heartbeats = _unwatched(clock, 10.0)
    heartbeats.joined(1)
    heartbeats.wait_begins(1)
    heartbeats.wait_begins(1)
    await clock.advance(50.0)
    heartbeats.wait_ends(1)
    assert heartbeats.silent(100.0) == []
    heartbeats.wait_ends(1)
    assert heartbeats.silent(59.0) == []
    assert heartbeats.silent(60.0) == [1]


class _Watched:
    def __init__(self, timeout_s: float = 10.0) -> None:
        self.clock = VirtualClock()
        self.heartbeats = Heartbeats(self.clock, timeout_s, self._leave)
        self.left: list[tuple[int, float]] = []
        self.reasons: list[str] = []

    def _leave(self, worker: int, reason: str) -> None:
        self.heartbeats.left(worker)
        self.left.append((worker, self.clock.monotonic_s()))
        self.reasons.append(reason)


async def test_the_watch_sees_a_worker_that_joins_after_a_time_without_workers() -> None:
    """A timer that ended with the last worker was not set again for the next worker."""
    watched = _Watched()
    await watched.clock.advance(37.0)
    watched.heartbeats.joined(5)
    await watched.clock.advance(11.0)
    [(worker, at_s)] = watched.left
    assert worker == 5
    assert 47.0 <= at_s <= 48.0
    watched.heartbeats.stop()


async def test_a_watch_that_is_stopped_leaves_no_timer_behind() -> None:
    """The timer of a closed server kept the server in memory and removed its workers again."""
    watched = _Watched()
    watched.heartbeats.joined(1)
    assert watched.clock.timers == 1
    watched.heartbeats.stop()
    watched.heartbeats.stop()
    assert watched.clock.timers == 0
    await watched.clock.advance(100.0)
    assert watched.left == []


async def test_the_watch_may_be_stopped_by_its_own_callback() -> None:
    """The last worker left, its server closed and stopped the watch, and the watch set its timer again."""
    clock, left = VirtualClock(), list[int]()

    def leave(worker: int, reason: str) -> None:
        left.append(worker)
        heartbeats.stop()

    heartbeats = Heartbeats(clock, 10.0, leave)
    heartbeats.joined(1)
    heartbeats.joined(2)
    await clock.advance(30.0)
    assert (left, clock.timers) == ([1], 0)


@given(
    heard=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=12), timeout_eighths=st.integers(8, 48)
)
async def test_every_silent_worker_leaves_within_a_twentieth_of_the_timeout(
    heard: list[tuple[int, int]], timeout_eighths: int
) -> None:
    """A check at fixed times noticed a silent worker late by up to a whole timeout."""
    timeout_s = timeout_eighths / 8
    watched = _Watched(timeout_s)
    last_s = dict.fromkeys(range(4), 0.0)
    for worker in last_s:
        watched.heartbeats.joined(worker)
    for worker, pause_eighths in heard:
        await watched.clock.advance(pause_eighths / 8)
        if worker not in {left for left, _ in watched.left}:
            watched.heartbeats.heard(worker)
            last_s[worker] = watched.clock.monotonic_s()
    await watched.clock.advance(8.0)
    assert sorted(worker for worker, _ in watched.left) == [0, 1, 2, 3]
    for worker, at_s in watched.left:
        assert 0 <= at_s - (last_s[worker] + timeout_s) <= timeout_s / 20 + 1e-9
    watched.heartbeats.stop()
