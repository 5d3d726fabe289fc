"""Random walks as a flow are the same for a seed, and visit places as often as theory says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from examples.graph_support import interrupted_and_restored, links, loaded, printed_by, stream_of
from iteration.iteration_support import SMALL, ended, run

from streamiter import Columns, Flow

PROGRAM = loaded("random_walk")

Visit = tuple[int, int, int]
"""A visit: walker, step and place."""


def visits_of(
    graph: Columns, walkers: Columns, *, subtasks: int = 2, schedule: int | None = None, **options: Any
) -> list[Visit]:
    flow = Flow("random walk")
    edges, start = stream_of(flow, graph, schedule), stream_of(flow, walkers, schedule)
    visits = PROGRAM.random_walk(edges, start, subtasks=subtasks, **options).collect()
    run(flow, seed=schedule or 0, limits=None if schedule is None else SMALL)
    return as_tuples(visits.items)


def as_tuples(visits: Any) -> list[Visit]:
    return sorted((int(visit["walker"]), int(visit["step"]), int(visit["place"])) for visit in visits)


def test_the_same_seed_gives_the_same_walks_at_any_parallelism() -> None:
    """The walks changed with the number of subtasks, or did not change with the seed."""
    graph, walkers = PROGRAM.made_up_edges(20, 60), PROGRAM.new_walkers(50, 20)
    expected = visits_of(graph, walkers, steps=30, subtasks=1)
    for subtasks in (2, 3, 7):
        assert visits_of(graph, walkers, steps=30, subtasks=subtasks) == expected
    assert visits_of(graph, walkers, steps=30, seed=PROGRAM.SEED + 1) != expected


def test_neither_the_schedule_nor_the_order_of_edges_changes_a_walk() -> None:
    """All walkers shared a random generator, so the walks depended on the order of the walkers."""
    graph, walkers = PROGRAM.made_up_edges(12, 30), PROGRAM.new_walkers(20, 12)
    expected = visits_of(graph, walkers, steps=10)
    for schedule in range(5):
        assert visits_of(graph, walkers, steps=10, schedule=schedule) == expected


async def test_a_job_restored_continues_with_the_same_walks() -> None:
    """A restored job lost or doubled walkers, or gave them other walks."""
    graph, walkers = PROGRAM.made_up_edges(12, 30), PROGRAM.new_walkers(20, 12)

    def make() -> tuple[Flow, Any]:
        flow = Flow("random walk")
        visits = PROGRAM.random_walk(flow.from_items(graph), flow.from_items(walkers), steps=200)
        return flow, visits.collect()

    uninterrupted, expected = make()
    await ended(await uninterrupted.start())
    visits = await interrupted_and_restored(make)
    assert as_tuples(visits) == as_tuples(expected.items)


def test_a_walk_follows_edges_for_all_its_steps() -> None:
    """A walk jumped to a place without an edge, or ended before its last step."""
    graph, walkers = PROGRAM.made_up_edges(20, 20), PROGRAM.new_walkers(30, 20)
    edges = set(zip(graph["from"].tolist(), graph["to"].tolist(), strict=True))
    visits = visits_of(graph, walkers, steps=15)
    assert [visit[:2] for visit in visits] == [(walker, step) for walker in range(30) for step in range(16)]
    assert [place for _, step, place in visits if step == 0] == walkers["place"].tolist()
    hops = itertools.pairwise(visits)
    assert all((a[2], b[2]) in edges for a, b in hops if a[0] == b[0])


def test_a_walk_ends_at_a_place_without_edges() -> None:
    """A walk failed at a place without edges, or in a graph without places."""
    walkers = PROGRAM.new_walkers(4, 4)
    visits = visits_of(links([(0, 1), (1, 2), (3, 3)]), walkers, steps=3)
    assert [place for walker, _, place in visits if walker == 0] == [0, 1, 2]
    assert [place for walker, _, place in visits if walker == 2] == [2]
    assert [place for walker, _, place in visits if walker == 3] == [3, 3, 3, 3]
    assert len(visits_of(links([]), walkers, steps=3)) == 4
    assert len(visits_of(links([(0, 1)]), walkers, steps=0)) == 4


def test_in_the_long_run_places_are_visited_as_often_as_theory_says() -> None:
    """Places were not visited as often as their degrees say, which is the theory for edges in both directions."""
    graph = PROGRAM.made_up_edges(20, 40)
    visits = np.array(visits_of(graph, PROGRAM.new_walkers(400, 20), steps=100))
    late = visits[visits[:, 1] > 20][:, 2]
    frequencies = np.bincount(late, minlength=20) / len(late)
    expected = np.bincount(graph["from"], minlength=20) / len(graph)
    # With 32,000 visits, a frequency near 0.05 deviates by about 0.002, because visits of a walk are not independent.
    assert frequencies == pytest.approx(expected, abs=0.008)


def test_each_walker_has_its_own_random_numbers() -> None:
    """The numbers of one walker or step predicted the next ones, or were not evenly distributed."""
    walkers, steps = (each.ravel() for each in np.meshgrid(np.arange(300), np.arange(300)))
    drawn = PROGRAM.drawn_numbers(1, walkers, steps).reshape(300, 300)
    assert len(np.unique(drawn)) == drawn.size
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    counts = np.bincount((drawn * 20).astype(int).ravel(), minlength=20)
    assert counts == pytest.approx(np.full(20, 4_500), abs=5 * np.sqrt(4_500))
    for one, other in [(drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


def test_it_runs_without_arguments() -> None:
    """The example failed when a user ran it without arguments."""
    lines = printed_by("random_walk")
    assert lines[0] == "101000 visits of 50 places; the most visited:"
    assert len(lines) == 6
