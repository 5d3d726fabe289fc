"""Counts by epoch, compared with a plain dict."""

import tracemalloc
from collections import Counter
from random import Random

import pytest
from support.examples import random_examples

from streamiter.iteration import progress as epoch_counts
from streamiter.iteration.progress import EpochCounts

Adds = list[tuple[int, int]]


def some_adds(random: Random) -> Adds:
    """Return epochs and counts, of few epochs or of many, so that runs are joined and split."""
    epochs, counts = random.choice((3, 13, 40)), random.choice((1, 3))
    return [(random.randrange(epochs), random.randint(1, counts)) for _ in range(random.randrange(61))]


def adds_and_takes(random: Random) -> tuple[Adds, list[int]]:
    return some_adds(random), [random.randrange(42) for _ in range(random.randrange(10))]


@random_examples(adds_and_takes)
def test_counts_are_those_of_a_dict(given: tuple[Adds, list[int]]) -> None:
    """A lost count ended a loop with records still in transit."""
    adds, taken = given
    counts, expected = EpochCounts(), Counter[int]()
    for epoch, count in adds:
        counts.add(epoch, count)
        expected[epoch] += count
    assert counts.last_epoch == max(expected, default=None)
    below = -1
    for epoch in sorted(set(taken)):
        assert counts.take(epoch) == expected[epoch]
        below = epoch
    left = {epoch: count for first, last, count in counts.runs for epoch in range(first, last + 1)}
    assert left == {epoch: count for epoch, count in expected.items() if epoch > below}
    assert counts.last_epoch == max(left, default=None)


@random_examples(some_adds)
def test_runs_are_in_order_and_as_few_as_possible(adds: Adds) -> None:
    """Equal counts of neighbouring epochs were stored one by one instead of as one run."""
    counts = EpochCounts()
    for epoch, count in adds:
        counts.add(epoch, count)
    for (_, last, count), (first, _, following) in zip(counts.runs, counts.runs[1:], strict=False):
        assert first > last
        assert first > last + 1 or count != following


@random_examples(some_adds)
def test_a_restored_copy_counts_on_in_the_same_way(adds: Adds) -> None:
    """The restored counts of a loop differed after more records."""
    counts, restored = EpochCounts(), EpochCounts()
    half = len(adds) // 2
    for epoch, count in adds[:half]:
        counts.add(epoch, count)
    restored.restore(counts.state())
    for epoch, count in adds[half:]:
        counts.add(epoch, count)
        restored.add(epoch, count)
    assert restored.runs == counts.runs


@random_examples(some_adds)
def test_above_the_limit_old_counts_are_lower_bounds_and_gaps_are_kept(
    adds: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch with records had the count 0, or a count that was too high: the loop ended too early or never."""
    monkeypatch.setattr(epoch_counts, "_RUNS_MAX", 4)
    counts, expected = EpochCounts(), Counter[int]()
    for epoch, count in adds:
        counts.add(epoch, count)
        expected[epoch] += count
        told = {each: number for first, last, number in counts.runs for each in range(first, last + 1)}
        assert told.keys() == expected.keys()
        assert all(1 <= told[each] <= expected[each] for each in told)
        if len(expected) <= 2:
            assert told == expected


@pytest.mark.parametrize(
    ("brought", "runs"),
    [
        ([1, 2, 3, 4, 5], [(0, 1, 1), (2, 2, 3), (3, 3, 4), (4, 4, 5)]),
        ([1, 2, 1, 4, 5], [(0, 2, 1), (3, 3, 4), (4, 4, 5)]),
        ([1, 2, 2, 3, 4, 5], [(0, 2, 1), (3, 3, 3), (4, 4, 4), (5, 5, 5)]),
        ([1, 0, 2, 3, 4, 5], [(0, 0, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5)]),
    ],
)
def test_above_the_limit_neighbours_in_the_older_half_are_joined_to_the_lower_count(
    brought: list[int], runs: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of the newer half, which decide the end of a loop, became inexact."""
    monkeypatch.setattr(epoch_counts, "_RUNS_MAX", 4)
    counts = EpochCounts()
    for epoch, count in enumerate(brought):
        if count:
            counts.add(epoch, count)
    assert counts.runs == [list(run) for run in runs]


def test_all_but_the_last_runs_are_forgotten() -> None:
    """Old runs stayed in the statistics, which show the last thousand."""
    counts = EpochCounts()
    for epoch, count in enumerate([1, 2, 3, 4, 5]):
        counts.add(epoch, count)
    counts.forget_older(2)
    assert counts.runs == [[3, 3, 4], [4, 4, 5]]


@random_examples(some_adds)
def test_above_the_limit_of_gaps_the_older_ones_are_filled(adds: Adds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled gaps changed the newer half of the counts, in a loop whose tokens visited two heads in turn for months."""
    monkeypatch.setattr(epoch_counts, "_RUNS_MAX", 4)
    monkeypatch.setattr(epoch_counts, "_RUNS_WITH_GAPS_MAX", 6)
    counts, expected = EpochCounts(), Counter[int]()
    for epoch, count in adds:
        counts.add(epoch, count)
        expected[epoch] += count
        told = {each: number for first, last, number in counts.runs for each in range(first, last + 1)}
        assert told.keys() >= expected.keys()
        assert all(told[each] >= 1 for each in expected)
        assert len(counts.runs) <= 7
        assert counts.last_epoch == max(expected)


def test_memory_does_not_grow_with_epochs_of_changing_counts() -> None:
    """A loop with epochs of alternately one and two records stored every count for months."""
    counts, generator, brought = EpochCounts(), Random(1), {}
    tracemalloc.start()
    for epoch in range(1, 30_001):
        brought[epoch % 10_000] = count = generator.randint(1, 9)
        counts.add(epoch, count)
        if epoch == 15_000:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(counts.runs) <= 1100
    assert grown < 200_000
    assert counts.runs[0][0] == 1
    assert counts.runs[-1][1] == 30_000
    assert all(later[0] == earlier[1] + 1 for earlier, later in zip(counts.runs, counts.runs[1:], strict=False))
    assert all(1 <= counts.take(epoch) <= 9 for epoch in (1, 2, 777, 15_000))
    assert counts.take(30_000) == brought[0]


def test_memory_does_not_grow_with_gaps() -> None:
    """A token that visited two heads in turn took some 100 bytes at each head in every round, for months."""
    counts = EpochCounts()
    for epoch in range(0, 400_000, 2):
        counts.add(epoch, 1)
    assert len(counts.runs) < 100_000
    assert counts.last_epoch == 399_998
    assert all(counts.take(epoch) == 1 for epoch in (0, 2, 200_000, 399_998))


def test_a_few_thousand_gaps_are_not_filled() -> None:
    """An epoch without records counted as one with records, and the loop ended too late."""
    counts = EpochCounts()
    for epoch in range(0, 5_000, 2):
        counts.add(epoch, 1)
    assert [counts.take(epoch) for epoch in range(100)] == [1, 0] * 50
