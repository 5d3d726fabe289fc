"""The clocks of workers and their minimum."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.examples import random_examples

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ParameterServerError, UnknownWorker
from streamiter.parameter_server.consistency import ProgressTracker


def advance(tracker: ProgressTracker, *workers: int) -> list[int]:
    return [tracker.advance_and_get_changed_min_clock(worker) for worker in workers]


def test_the_minimum_moves_only_with_the_last_of_the_slowest() -> None:
    """Each of the slowest workers moved the minimum, and gets were released before the others had added."""
    tracker = ProgressTracker([2, 7])
    assert advance(tracker, 2, 7, 7, 7, 2) == [-1, 1, -1, -1, 2]
    assert (tracker.get_progress(2), tracker.get_progress(7), tracker.get_min_clock()) == (2, 3, 2)


def test_all_workers_start_at_zero_and_no_worker_is_the_unique_minimum() -> None:
    """One of two workers at the same clock counted as the slowest, and the minimum became one too high."""
    tracker = ProgressTracker()
    tracker.init([3, 1, 2])
    assert tracker.workers == (3, 1, 2)
    assert tracker.num_workers == 3
    assert [tracker.get_progress(worker) for worker in (1, 2, 3)] == [0, 0, 0]
    assert tracker.get_min_clock() == 0
    assert not any(tracker.is_unique_min(worker) for worker in (1, 2, 3))


def test_the_unique_minimum_is_the_only_worker_at_the_lowest_clock() -> None:
    """A worker alone at a higher clock was taken for the slowest worker."""
    tracker = ProgressTracker([1, 2, 3])
    advance(tracker, 1, 3, 3)
    assert [tracker.is_unique_min(worker) for worker in (1, 2, 3)] == [False, True, False]


def test_each_clock_of_a_single_worker_moves_the_minimum() -> None:
    """A run with a single worker waited for other workers."""
    assert advance(ProgressTracker([0]), 0, 0, 0) == [1, 2, 3]


def test_a_second_init_starts_over() -> None:
    """Clocks of an earlier run held back the workers of the next run, or let them run ahead."""
    tracker = ProgressTracker([1, 2])
    advance(tracker, 1, 2, 2)
    tracker.init([2, 5])
    assert tracker.workers == (2, 5)
    assert (tracker.get_progress(2), tracker.get_progress(5), tracker.get_min_clock()) == (0, 0, 0)
    assert advance(tracker, 2, 5) == [-1, 1]


@pytest.mark.parametrize(
    "call",
    [
        ProgressTracker.check_worker_valid,
        ProgressTracker.get_progress,
        ProgressTracker.is_unique_min,
        ProgressTracker.advance_and_get_changed_min_clock,
        ProgressTracker.leave,
        lambda tracker, worker: tracker.raise_to(worker, 3),
    ],
    ids=["check_worker_valid", "get_progress", "is_unique_min", "advance", "leave", "raise_to"],
)
def test_an_unknown_worker_is_an_error_that_names_the_known_ones(
    call: Callable[[ProgressTracker, int], object],
) -> None:
    """The first call of an unregistered worker registered it, and it held all others at clock 0."""
    tracker = ProgressTracker([2, 7], name="matrix 'w'")
    advance(tracker, 2)
    before = tracker.state()
    with pytest.raises(UnknownWorker) as error:
        call(tracker, 9)
    assert str(error.value) == ("matrix 'w': worker 9 takes no part: expected one of 2, 7; make a client for it first")
    assert tracker.state() == before


def test_an_error_names_only_the_first_of_many_workers() -> None:
    """An error message listed ten thousand worker numbers."""
    with pytest.raises(UnknownWorker, match=r"^worker -1 takes no part: expected one of 0, 1, 2, 3, 4 and 995 more;"):
        ProgressTracker(range(1000)).get_progress(-1)


@pytest.mark.parametrize(("workers", "named"), [(5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4 and 1 more")])
def test_an_error_counts_the_workers_that_it_does_not_name(workers: int, named: str) -> None:
    """The message said "and 0 more", or left out a worker that it did not count."""
    with pytest.raises(UnknownWorker, match=f"expected one of {named}; make"):
        ProgressTracker(range(workers)).get_progress(-1)


def test_without_workers_an_error_says_that_no_worker_has_joined() -> None:
    """The message listed no expected workers and looked broken."""
    with pytest.raises(
        UnknownWorker, match="worker 0 takes no part: expected none, as no worker has joined; make a client"
    ):
        ProgressTracker().get_progress(0)


def test_a_worker_joins_at_the_minimum_clock() -> None:
    """A new worker joined at clock 0 and lowered the minimum, or at the highest clock and was not waited for."""
    tracker = ProgressTracker([1, 2])
    advance(tracker, 1, 2, 1, 1)
    assert tracker.join(5) == 1
    assert tracker.get_progress(5) == tracker.get_min_clock() == 1
    assert advance(tracker, 2, 5) == [-1, 2]


def test_a_worker_may_join_above_the_minimum() -> None:
    """A worker that had already joined another shard at a higher clock had to repeat its iterations."""
    tracker = ProgressTracker([1])
    assert tracker.join(2, at=3) == 3
    assert advance(tracker, 1, 1, 1, 1) == [1, 2, 3, -1]
    assert tracker.get_min_clock() == 3


def test_a_worker_that_joins_below_the_minimum_is_refused() -> None:
    """The minimum fell, and calls that it had released were released again."""
    tracker = ProgressTracker([1])
    advance(tracker, 1, 1)
    with pytest.raises(
        ParameterServerError, match="worker 2 joins: expected the minimum clock, 2, or a higher one, given 1"
    ):
        tracker.join(2, at=1)
    assert tracker.workers == (1,)


def test_a_worker_that_takes_part_already_cannot_join() -> None:
    """Two clients shared one worker number, and each moved the clock of the other."""
    tracker = ProgressTracker([1, 2], name="matrix 'w'")
    advance(tracker, 1)
    with pytest.raises(ParameterServerError) as error:
        tracker.join(1)
    assert str(error.value) == (
        "matrix 'w': expected a worker that takes no part yet, given 1, which does, at clock 1; give every worker a "
        "number of its own, or let it leave first"
    )
    assert tracker.get_progress(1) == 1


def test_leaving_raises_the_minimum_by_all_clocks_that_the_worker_was_behind() -> None:
    """A crashed worker still counted, and all others waited for it forever."""
    tracker = ProgressTracker([1, 2, 3])
    advance(tracker, 1, 1, 1, 2, 2, 2, 2)
    assert tracker.leave(3) == 3
    assert tracker.leave(2) == -1
    assert tracker.workers == (1,)


def test_leaving_does_not_move_the_minimum_while_another_worker_is_at_the_same_clock() -> None:
    """When one of the two slowest workers left, the minimum moved before the other had finished its iteration."""
    tracker = ProgressTracker([1, 2, 3])
    advance(tracker, 3)
    assert tracker.leave(1) == -1
    assert tracker.get_min_clock() == 0


def test_the_minimum_stays_when_the_last_worker_leaves_and_another_joins() -> None:
    """After all workers had been restarted, the minimum fell to 0, and the new workers trained from the start."""
    tracker = ProgressTracker([1, 2])
    advance(tracker, 1, 2, 1, 2)
    assert [tracker.leave(1), tracker.leave(2)] == [-1, -1]
    assert tracker.get_min_clock() == 2
    assert tracker.join(1) == 2
    assert advance(tracker, 1) == [3]


def test_the_first_worker_that_joins_at_a_higher_clock_raises_the_minimum() -> None:
    """The minimum stayed at a clock that no worker could move."""
    tracker = ProgressTracker()
    assert tracker.join(1, at=4) == 4
    assert tracker.get_min_clock() == 4


def test_raising_a_worker_can_raise_the_minimum() -> None:
    """A joining worker held this shard's minimum after all shards had registered it."""
    tracker = ProgressTracker([1])
    advance(tracker, 1, 1)
    tracker.join(2)
    advance(tracker, 1, 1, 1)
    assert tracker.raise_to(2, 4) == 4
    assert tracker.get_progress(2) == 4


def test_raising_a_worker_to_its_clock_or_a_lower_one_changes_nothing() -> None:
    """A repeated message set a worker back, and it did iterations twice."""
    tracker = ProgressTracker([1])
    advance(tracker, 1, 1)
    assert [tracker.raise_to(1, 2), tracker.raise_to(1, 0)] == [-1, -1]
    assert tracker.get_progress(1) == 2


def test_a_restored_tracker_continues_from_its_snapshot() -> None:
    """A restored shard had other clocks than its workers, which ran ahead or waited forever."""
    tracker = ProgressTracker([4, 2])
    advance(tracker, 4, 2, 2)
    plain = PlainData()
    state = plain.decode(plain.encode(tracker.state()))
    advance(tracker, 2)
    tracker.leave(4)

    restored = ProgressTracker([9])
    restored.restore(state)

    assert restored.workers == (4, 2)
    assert (restored.get_progress(4), restored.get_progress(2), restored.get_min_clock()) == (1, 2, 1)
    assert advance(restored, 4) == [2]


def test_a_snapshot_without_workers_keeps_the_minimum() -> None:
    """A server saved between two runs started the second run below the clock of the first."""
    tracker = ProgressTracker([1])
    advance(tracker, 1, 1)
    tracker.leave(1)
    restored = ProgressTracker()
    restored.restore(tracker.state())
    assert restored.join(2) == 2


Calls = list[tuple[str, int, int]]


def some_calls(random: Random) -> Calls:
    """Return calls on a few known and unknown workers, each with a number for calls that need one."""
    kinds = ["clock"] * 6 + ["join", "join at", "leave", "raise", "restore"]
    return [(random.choice(kinds), random.randrange(4), random.randrange(5)) for _ in range(random.randrange(25))]


@random_examples(some_calls)
def test_any_sequence_of_calls_is_counted_as_by_a_scan(calls: Calls) -> None:
    """A count of workers per clock was off by one, which showed only after many calls."""
    tracker, clocks, least, highest = ProgressTracker([0, 1]), {0: 0, 1: 0}, 0, 0
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
        assert [each for each in clocks if tracker.is_unique_min(each)] == [
            each for each in clocks if [other for other in clocks if clocks[other] == least] == [each]
        ]


def test_many_workers_that_join_leave_and_clock_are_counted_as_by_a_scan() -> None:
    """The counts of many workers far apart drifted from a scan of all workers."""
    random = Random(1)
    tracker, clocks, least = ProgressTracker(range(50)), dict.fromkeys(range(50), 0), 0
    for _ in range(5000):
        worker = random.choice(list(clocks)) if random.random() < 0.5 else min(clocks, key=lambda w: clocks[w])
        what = random.random()
        if what < 0.94:
            moved, clocks[worker] = tracker.advance_and_get_changed_min_clock(worker), clocks[worker] + 1
        elif what < 0.96 and len(clocks) > 1:
            moved = tracker.leave(worker)
            del clocks[worker]
        elif what < 0.98:
            to = random.randrange(least, least + 5)
            moved, clocks[worker] = tracker.raise_to(worker, to), max(clocks[worker], to)
        else:
            newcomer, moved = max(clocks) + 1, -1
            clocks[newcomer] = tracker.join(newcomer)
        before, least = least, min(clocks.values())
        assert moved == (least if least > before else -1)
        assert tracker.get_min_clock() == least
    assert least > 5
