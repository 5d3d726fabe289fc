"""Tests subscriptions to rows of a server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_S

from streamiter.errors import OutOfRange, ParameterServerError, UnknownMatrix, WorkerHasLeft
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import LeaveRequest, RowChange
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.subscriptions import Subscription


async def _next(subscription: Subscription) -> RowChange:
    return await asyncio.wait_for(anext(subscription), PATIENCE_S)


async def _is_waiting(subscription: Subscription) -> bool:
    """Return whether no change is available; asking loses no change."""
    task = asyncio.ensure_future(anext(subscription))
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    task.cancel()
    await asyncio.wait([task])
    return True


async def _with_matrix(server: ParameterServer, consistency: Consistency, rows: int = 3) -> Client:
    await server.create_matrix("w", rows=rows, columns=7, consistency=consistency, block=(2, 3))
    return server.client(worker=0)


async def test_a_subscription_gives_rows_first_and_then_their_changes() -> None:
    """A model that was served from its first change answered with zeros until then."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=3, columns=7, init=1.5, consistency=SSP(staleness=1), block=(2, 3))
        client = server.client(worker=0)
        changes = client.subscribe("w", rows=[2, 0, 2])
        first = [await _next(changes) for _ in range(2)]
        assert sorted(change.row for change in first) == [0, 2]
        for change in first:
            assert (change.matrix, change.clock, change.columns) == ("w", 0, None)
            assert change.values.tolist() == [1.5] * 7
        await client.add("w", row=0, columns=[4, 2], values=[1.0, 2.0])
        await client.add("w", row=1, columns=[4], values=[1.0])
        assert await _is_waiting(changes)
        await client.clock("w")
        change = await _next(changes)
        assert (change.row, change.clock, change.columns) == (0, 1, range(0, 6))
        assert change.values.tolist() == [1.5, 1.5, 3.5, 1.5, 2.5, 1.5, 1.5]
        assert await _is_waiting(changes)


async def test_a_subscriber_may_change_its_copy_of_a_row() -> None:
    """A subscriber normalized its row in place, and after the next change of a block the rest was normalized twice."""
    async with ParameterServer(shards=2) as server:
        client = await _with_matrix(server, ASP())
        changes = client.subscribe("w", rows=[0])
        (await _next(changes)).values[:] = 99.0
        await client.add("w", row=0, columns=[0], values=[1.0])
        assert (await _next(changes)).values.tolist() == [1.0, 0, 0, 0, 0, 0, 0]
        assert (await client.get("w", row=0)).tolist() == [1.0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_slow_subscriber_holds_a_bounded_amount(shards: int) -> None:
    """All changes were kept for a subscriber that never returned, until memory was full."""
    async with ParameterServer(shards=shards) as server:
        client = await _with_matrix(server, ASP())
        changes = client.subscribe("w")
        for _ in range(3):
            await _next(changes)
        assert await _is_waiting(changes)
        for number in range(300):
            await client.add("w", row=number % 3, values=np.ones(7))
        received: list[RowChange] = []
        while not await _is_waiting_or_received(changes, received):
            pass
        # The reply of each shard to the waiting call, and the newest values at the next call.
        assert len(received) <= 3 * (shards + 1)
        last = {change.row: change.values.tolist() for change in received}
        assert last == {row: [100.0] * 7 for row in range(3)}


async def _is_waiting_or_received(subscription: Subscription, received: list[RowChange]) -> bool:
    task = asyncio.ensure_future(anext(subscription))
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        received.append(task.result())
        return False
    task.cancel()
    await asyncio.wait([task])
    return True


_steps = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 6)),
    st.tuples(st.just("clock"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.just(0)),
)


@given(
    consistency=st.sampled_from([ASP(), BSP(), SSP(staleness=1)]),
    shards=st.integers(1, 3),
    block=st.sampled_from([None, (1, 7), (2, 3), (5, 2)]),
    rows=st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=3),
    steps=st.lists(_steps, min_size=5, max_size=30),
)
def test_the_last_change_of_each_row_equals_a_get(
    consistency: Consistency,
    shards: int,
    block: tuple[int, int] | None,
    rows: Sequence[int] | None,
    steps: list[tuple[str, int, int]],
) -> None:
    """A row from several shards kept an old part, or was given before all of its parts had arrived."""
    asyncio.run(_follow(consistency, shards, block, rows, steps))


async def _follow(
    consistency: Consistency,
    shards: int,
    block: tuple[int, int] | None,
    rows: Sequence[int] | None,
    steps: list[tuple[str, int, int]],
) -> None:
    async with ParameterServer(shards=shards) as server:
        await server.create_matrix("w", rows=5, columns=7, consistency=consistency, block=block)
        clients = [server.client(worker=worker) for worker in range(2)]
        subscriptions = [client.subscribe("w", rows=rows) for client in clients]
        seen: list[dict[int, RowChange]] = [{}, {}]

        async def follow(worker: int) -> None:
            async for change in subscriptions[worker]:
                earlier = seen[worker].get(change.row)
                assert earlier is None or earlier.clock <= change.clock
                if earlier is not None and change.columns is not None:
                    same = np.setdiff1d(np.arange(7), change.columns)
                    assert change.values[same].tolist() == earlier.values[same].tolist()
                seen[worker][change.row] = change

        def may_continue(worker: int) -> bool:
            lowest = min(client.clock_of("w") for client in clients)
            return not isinstance(consistency, BSP) or clients[worker].clock_of("w") == lowest

        tasks = [asyncio.ensure_future(follow(worker)) for worker in range(2)]
        for kind, first, second in steps:
            if kind == "add" and may_continue(second % 2):
                await clients[second % 2].add("w", row=first, columns=[second, 6], values=[1.0, 2.0])
            elif kind == "clock" and may_continue(first):
                await clients[first].clock("w")
            elif kind == "turn":
                await asyncio.sleep(0)
            elif kind == "cancel":
                tasks[first].cancel()
                await asyncio.wait([tasks[first]])
                tasks[first] = asyncio.ensure_future(follow(first))
        furthest = max(client.clock_of("w") for client in clients) + 1
        for _ in range(furthest):
            for worker, client in enumerate(clients):
                if client.clock_of("w") < furthest and may_continue(worker):
                    await client.clock("w")
        for _ in range(20):
            await asyncio.sleep(0)
        stored = await clients[0].get("w", rows=range(5))
        wanted = set(range(5) if rows is None else rows)
        for of_worker in seen:
            assert set(of_worker) == wanted
            for row, change in of_worker.items():
                assert change.values.tolist() == stored[row].tolist()
        await clients[0].leave()
        await asyncio.wait_for(tasks[0], PATIENCE_S)
    await asyncio.wait_for(tasks[1], PATIENCE_S)


# -- the end -----------------------------------------------------------------------------------------------


async def _on_shards(count: int = 2) -> tuple[list[Shard], Client, Client]:
    shards = [Shard(number) for number in range(count)]
    directory = MatrixDirectory(shards)
    await directory.create(Matrix("w", rows=2, columns=4, consistency=ASP()))
    clients = [Client(worker, shards, directory) for worker in range(2)]
    return shards, clients[0], clients[1]


def _followed(shards: list[Shard]) -> int:
    return sum(shard.matrices["w"].followed is not None for shard in shards)


async def test_a_subscription_that_is_closed_ends_and_costs_the_shards_nothing() -> None:
    """A loop left with ``break`` still cost time in every add of every worker."""
    shards, client, _ = await _on_shards()
    async with client.subscribe("w") as changes:
        async for change in changes:
            assert _followed(shards) == 2
            if change.row == 1:
                break
    assert _followed(shards) == 0
    assert [change async for change in changes] == []
    async with aclosing(client.subscribe("w")) as changes:
        await _next(changes)
    assert _followed(shards) == 0


async def test_closing_ends_the_wait_of_another_task() -> None:
    """A task that served the model waited forever after another task had closed the subscription."""
    _, client, _ = await _on_shards()
    changes = client.subscribe("w", rows=[0])
    await _next(changes)
    waiting = asyncio.ensure_future(anext(changes, None))
    await asyncio.sleep(0)
    changes.close()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None


async def test_a_client_that_leaves_ends_its_subscriptions_and_no_other() -> None:
    """A subscriber of a departed worker waited forever, or the subscriptions of other workers ended too."""
    shards, client, other = await _on_shards()
    mine, others = client.subscribe("w", rows=[0]), other.subscribe("w", rows=[0])
    await _next(mine)
    await _next(others)
    waiting = asyncio.ensure_future(anext(mine, None))
    await asyncio.sleep(0)
    await client.leave()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None
    assert _followed(shards) == 2
    await other.add("w", row=0, columns=[0], values=[1.0])
    assert (await _next(others)).values.tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(WorkerHasLeft, match="worker 0: expected a client that takes part"):
        client.subscribe("w")


async def test_the_subscription_of_a_removed_worker_raises_an_error() -> None:
    """A subscriber of a worker taken for dead saw an ordinary end and continued to serve an old model."""
    shards, client, _ = await _on_shards()
    changes = client.subscribe("w", rows=[0])
    await _next(changes)
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    for shard in shards:
        shard.send(LeaveRequest(0, "nothing was heard of it for 3 s"))
    with pytest.raises(WorkerHasLeft, match="nothing was heard of it for 3 s"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    with pytest.raises(ParameterServerError):
        await _next(changes)


async def test_a_server_that_closes_ends_all_subscriptions() -> None:
    """The subscription of a subscriber that was busy at that moment stayed open when the server closed."""
    async with ParameterServer(shards=2) as server:
        client = await _with_matrix(server, ASP())
        waits, busy = client.subscribe("w", rows=[0]), client.subscribe("w", rows=[0])
        await _next(waits)
        await _next(busy)
        waiting = asyncio.ensure_future(anext(waits, None))
        await asyncio.sleep(0)
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None
    with pytest.raises(StopAsyncIteration):
        await _next(busy)


async def test_after_a_restore_subscribers_get_all_rows_again() -> None:
    """Rows that a restore had changed were not given to subscribers, because no worker had added to them."""
    async with ParameterServer(shards=2) as server:
        client = await _with_matrix(server, SSP(staleness=0), rows=2)
        state = await server.snapshot()
        changes = client.subscribe("w", rows=[0, 1])
        await client.add("w", row=1, values=np.ones(7))
        await client.clock("w")
        assert sorted([(await _next(changes)).values[0] for _ in range(2)]) == [0.0, 1.0]
        await server.restore(state)
        received = [await _next(changes) for _ in range(2)]
        assert {change.row: change.values.tolist() for change in received} == {0: [0.0] * 7, 1: [0.0] * 7}
        assert {change.clock for change in received} == {0}


# -- errors ------------------------------------------------------------------------------------------------


async def test_a_subscription_to_a_missing_matrix_or_row_is_refused() -> None:
    """A subscription to a missing matrix or row waited for changes that could not come."""
    async with ParameterServer(shards=2) as server:
        client = await _with_matrix(server, ASP())
        with pytest.raises(UnknownMatrix, match="matrix 'v': expected one of 'w', given 'v'"):
            await _next(client.subscribe("v"))
        with pytest.raises(OutOfRange, match="matrix 'w', row: expected a whole number from 0 to 2, given 3"):
            await _next(client.subscribe("w", rows=[1, 3]))
        with pytest.raises(StopAsyncIteration):
            await _next(client.subscribe("w", rows=[]))


async def test_two_tasks_cannot_wait_for_one_subscription() -> None:
    """Two tasks each got half of the changes, and one of them waited forever."""
    async with ParameterServer() as server:
        client = await _with_matrix(server, ASP())
        changes = client.subscribe("w", rows=[0])
        await _next(changes)
        first = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        with pytest.raises(ParameterServerError, match="expected one task that waits for changes, given a second one"):
            await anext(changes)
        await client.add("w", row=0, columns=[0], values=[1.0])
        assert (await asyncio.wait_for(first, PATIENCE_S)).values[0] == 1.0
