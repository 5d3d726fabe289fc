"""The clocks of workers and their minimum, also after a restore with other workers."""

from random import Random

import pytest
from support.examples import random_examples

from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import BSP, SSP, Consistency, ProgressTracker
from streamiter.parameter_server.server import ParameterServer
from streamiter.values.plain_data import PlainData

Calls = list[tuple[str, int, int]]


def some_calls(random: Random) -> Calls:
    """Return calls on a few known and unknown workers, each with a number for calls that need one."""
    kinds = ["clock"] * 6 + ["join", "join at", "leave", "raise", "restore"]
    return [(random.choice(kinds), random.randrange(4), random.randrange(5)) for _ in range(random.randrange(25))]


def check_as_by_a_scan(workers: range, calls: Calls) -> None:
    """Make the calls, and compare the tracker after each with a scan of the clocks of all workers."""
    tracker, clocks, least, highest = ProgressTracker(workers), dict.fromkeys(workers, 0), 0, 0
    for kind, worker, number in calls:
        moved = None
        if kind == "restore":
            state, tracker = tracker.state(), ProgressTracker([9])
            tracker.restore(state)
        elif kind in ("join", "join at") and worker not in clocks:
            at = None if kind == "join" else least + number
            assert tracker.join(worker, at) == (least if at is None else at)
            clocks[worker] = least if at is None else at
        elif kind == "raise" and worker in clocks:
            moved, clocks[worker] = (tracker.raise_to(worker, least + number), max(clocks[worker], least + number))
        elif kind == "clock" and worker in clocks:
            moved, clocks[worker] = tracker.advance_and_get_changed_min_clock(worker), clocks[worker] + 1
        elif kind == "leave" and worker in clocks:
            moved = tracker.leave(worker)
            del clocks[worker]
        highest = max([highest, *clocks.values()])
        before, least = least, min(clocks.values(), default=highest)
        assert moved in (None, least if least > before else -1)
        assert tracker.get_min_clock() == least
        assert [tracker.get_progress(each) for each in tracker.workers] == list(clocks.values())


@random_examples(some_calls)
def test_any_sequence_of_calls_is_counted_as_by_a_scan(calls: Calls) -> None:
    """Clocks were counted wrongly, and gets were released too early or waited forever.

    Each of the slowest workers moved the minimum. A worker alone at a higher clock was taken for the slowest. A worker
    joined below the minimum, or above it and was not waited for. A worker that had left, or that had joined another
    shard at a higher clock, held the minimum. The minimum fell when the last worker left and another joined.
    """
    check_as_by_a_scan(range(2), calls)


def test_many_workers_far_apart_are_counted_as_by_a_scan() -> None:
    """The counts of many workers far apart drifted from a scan of all workers."""
    random = Random(1)
    kinds = ["clock"] * 94 + ["leave"] * 2 + ["raise"] * 2 + ["join"] * 4
    calls = [(random.choice(kinds), int(60 * random.random() ** 2), random.randrange(5)) for _ in range(3000)]
    check_as_by_a_scan(range(50), calls)


async def server_of(consistency: Consistency, *workers: int) -> tuple[ParameterServer, list[Client]]:
    server = ParameterServer(shards=2)
    await server.create_matrix("w", rows=1, columns=2, dtype="int64", consistency=consistency)
    return server, [server.client(worker) for worker in workers]


async def state_in_which_worker_1_is_behind(consistency: Consistency) -> object:
    """Return a state in which both workers have added and only worker 0 has finished its iteration."""
    server, (ahead, behind) = await server_of(consistency, 0, 1)
    async with server:
        await ahead.add("w", row=0, values=[1, 10])
        await behind.add("w", row=0, values=[2, 20])
        await ahead.clock("w")
        plain = PlainData()
        return plain.decode(plain.encode(await server.snapshot()))


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_was_ahead_still_waits_for_the_other(consistency: Consistency) -> None:
    """The buffered add of the worker ahead was refused, or applied in the next iteration."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, (ahead, behind) = await server_of(consistency, 0, 1)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        assert not reading.is_done
        await behind.add("w", row=0, values=[100, 1000])
        assert await behind.clock("w") == 1
        assert (await reading).tolist() == [103, 1030]


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_does_not_return_blocks_no_other(consistency: Consistency) -> None:
    """A worker that did not return after a restore was still waited for, or its adds were lost."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, [ahead] = await server_of(consistency, 0)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        assert reading.is_done
        assert (await reading).tolist() == [3, 30]
        assert await ahead.clock("w") == 2


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_is_new_after_a_restore_joins_at_the_minimum(consistency: Consistency) -> None:
    """After a restore, a new worker did not start at the minimum clock, or the others did not wait for it."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, (ahead, behind, new) = await server_of(consistency, 0, 1, 2)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        await behind.clock("w")
        assert not reading.is_done
        assert new.clock_of("w") == 0
        await new.add("w", row=0, values=[4, 40])
        assert await new.clock("w") == 1
        assert (await reading).tolist() == [7, 70]
