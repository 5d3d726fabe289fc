"""PageRank is compared with power iteration, and random walks with the theory and with themselves."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, ended, run
from support.processes import forked_run
from support.waiting import PATIENCE_S, until

from streamiter import Columns, Flow, Stream
from streamiter.operators.source import Collected

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    """Load an example, and return its module."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def printed_by(name: str) -> list[str]:
    """Run the example as a user does, and return the lines that it prints."""
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py")], limit_s=PATIENCE_S, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


async def interrupted_and_restored(make: Callable[[], tuple[Flow, Collected]]) -> list[Any]:
    """Stop a flow's job after some rounds, resume it from a snapshot, and return its result."""
    first, _ = make()
    job = await first.start()
    await until(lambda: job.statistics().loops[0].epoch_complete >= 3)
    snapshot = await job.snapshot()
    await job.stop("abort")
    second, collected = make()
    await ended(await second.start(snapshot=snapshot))
    return collected.items


def links(pairs: Any) -> Columns:
    """Return columns of pairs (from, to)."""
    array = np.array(pairs, dtype=int).reshape(-1, 2)
    return Columns({"from": array[:, 0], "to": array[:, 1]})


def stream_of(flow: Flow, columns: Columns, schedule: int | None) -> Stream:
    """Return a stream of the records; with a schedule, in a random order, in random pieces and in two subtasks."""
    if schedule is None:
        return flow.from_items(columns)
    order = np.random.default_rng(schedule).permutation(len(columns))
    pieces = [columns[part] for part in np.array_split(order, min(len(order), 7))]
    return flow.from_items(pieces, parallelism=2).flat_map(list).map_batch(as_columns)


def as_columns(records: Any) -> Columns:
    """Return the rows as columns."""
    return Columns({name: np.array([record[name] for record in records]) for name in records[0]})


PROGRAM = loaded("page_rank")

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
STAR_WITHOUT_A_WAY_BACK = [(0, 9), (1, 9), (2, 9)]
SEVERAL_LINKS_AND_ONE_TO_ITSELF = [(0, 1), (0, 1), (0, 2), (2, 2), (1, 0), (2, 0)]
TWO_DEAD_ENDS = [(5, 8), (6, 8), (7, 8), (5, 11)]
TWO_ISLANDS = [(1, 2), (2, 1), (10, 20), (20, 30), (30, 10), (30, 20)]


def ranks_of(graph: Columns, *, subtasks: int = 2, schedule: int | None = None, **options: Any) -> dict[int, float]:
    flow = Flow("page rank")
    ranks = PROGRAM.page_rank(stream_of(flow, graph, schedule), subtasks=subtasks, **options).collect()
    run(flow, seed=schedule or 0, limits=None if schedule is None else SMALL)
    result = {int(page["page"]): float(page["rank"]) for page in ranks.items}
    assert len(result) == len(ranks.items), "a page came twice"
    return result


def power_iteration(graph: Columns, damping: float) -> dict[int, float]:
    """Return the ranks by the textbook's matrix, in which a page without links has links to all pages."""
    pages = np.unique(np.concatenate([graph["from"], graph["to"]]))
    count = len(pages)
    chances = np.zeros((count, count))
    for origin, to in zip(graph["from"], graph["to"], strict=True):
        chances[np.searchsorted(pages, to), np.searchsorted(pages, origin)] += 1
    sums = chances.sum(axis=0)
    chances = np.where(sums > 0, chances / np.where(sums > 0, sums, 1), 1 / count)
    ranks = np.full(count, 1 / count)
    for _ in range(2_000):
        ranks = (1 - damping) / count + damping * chances @ ranks
    return dict(zip(pages.tolist(), ranks.tolist(), strict=True))


@pytest.mark.parametrize(("subtasks", "damping"), [(1, 0.5), (2, 0.85), (3, 0.5), (8, 0.85)])
@pytest.mark.parametrize(
    "pairs", [RING, STAR_WITHOUT_A_WAY_BACK, SEVERAL_LINKS_AND_ONE_TO_ITSELF, TWO_DEAD_ENDS, TWO_ISLANDS, [(3, 3)]]
)
def test_the_ranks_are_those_of_power_iteration(pairs: Any, subtasks: int, damping: float) -> None:
    """The rank of pages without links did not reach all pages, or more subtasks than pages failed."""
    graph = links(pairs)
    ranks = ranks_of(graph, subtasks=subtasks, damping=damping)
    assert ranks == pytest.approx(power_iteration(graph, damping), abs=1e-9)
    assert sum(ranks.values()) == pytest.approx(1.0, abs=1e-12)


def test_the_ranks_of_a_larger_graph_are_those_of_power_iteration() -> None:
    """The ranks were right on small graphs only."""
    graph = PROGRAM.made_up_links(300, 1_500)
    expected = power_iteration(graph, PROGRAM.DAMPING)
    assert ranks_of(graph) == pytest.approx(expected, abs=1e-9)
    assert ranks_of(graph, subtasks=3) == pytest.approx(expected, abs=1e-9)


def test_neither_the_schedule_nor_the_order_of_links_changes_a_bit() -> None:
    """The ranks of two runs differed in the last bits, because sums of floats depend on the order of their parts."""
    graph = PROGRAM.made_up_links(40, 200)
    results = [ranks_of(graph, subtasks=3, schedule=seed, rounds_max=20) for seed in range(5)]
    assert all(sorted(result.items()) == sorted(results[0].items()) for result in results)


async def test_a_restored_job_has_the_same_ranks() -> None:
    """A restored job lost or doubled parts of ranks, or a page."""
    graph = PROGRAM.made_up_links(40, 200)

    def make() -> tuple[Flow, Any]:
        flow = Flow("page rank")
        return flow, PROGRAM.page_rank(flow.from_items(graph)).collect()

    pages = await interrupted_and_restored(make)
    ranks = {int(page["page"]): float(page["rank"]) for page in pages}
    assert ranks == pytest.approx(power_iteration(graph, PROGRAM.DAMPING), abs=1e-9)
    assert len(pages) == len(ranks)


def test_it_ends_after_the_rounds_it_is_allowed() -> None:
    """The ranks changed after the last allowed round, or the loop ended one round too early."""
    assert ranks_of(links(RING), tolerance=0.0) == dict.fromkeys(range(4), 0.25)
    one_round = ranks_of(links([(0, 1)]), rounds_max=1, damping=0.5)
    assert one_round == pytest.approx({0: 0.25 + 0.125, 1: 0.25 + 0.125 + 0.25})


def test_without_links_there_are_no_pages() -> None:
    """A graph without links failed, because each rank is divided by the number of pages."""
    assert ranks_of(links([])) == {}


def test_ranks_are_printed_without_arguments() -> None:
    """The example failed when a user ran it without arguments."""
    lines = printed_by("page_rank")
    assert lines[0] == "999 pages, of ranks that sum to 1.000000"
    assert len(lines) == 6


WALKS = loaded("random_walk")

Visit = tuple[int, int, int]
"""A visit: walker, step and place."""


def visits_of(
    graph: Columns, walkers: Columns, *, subtasks: int = 2, schedule: int | None = None, **options: Any
) -> list[Visit]:
    flow = Flow("random walk")
    edges, start = stream_of(flow, graph, schedule), stream_of(flow, walkers, schedule)
    visits = WALKS.random_walk(edges, start, subtasks=subtasks, **options).collect()
    run(flow, seed=schedule or 0, limits=None if schedule is None else SMALL)
    return as_tuples(visits.items)


def as_tuples(visits: Any) -> list[Visit]:
    return sorted((int(visit["walker"]), int(visit["step"]), int(visit["place"])) for visit in visits)


def test_the_same_seed_gives_the_same_walks_at_any_parallelism() -> None:
    """The walks changed with the number of subtasks, or did not change with the seed."""
    graph, walkers = WALKS.made_up_edges(20, 60), WALKS.new_walkers(50, 20)
    expected = visits_of(graph, walkers, steps=30, subtasks=1)
    for subtasks in (2, 3, 7):
        assert visits_of(graph, walkers, steps=30, subtasks=subtasks) == expected
    assert visits_of(graph, walkers, steps=30, seed=WALKS.SEED + 1) != expected


def test_neither_the_schedule_nor_the_order_of_edges_changes_a_walk() -> None:
    """All walkers shared a random generator, so the walks depended on the order of the walkers."""
    graph, walkers = WALKS.made_up_edges(12, 30), WALKS.new_walkers(20, 12)
    expected = visits_of(graph, walkers, steps=10)
    for schedule in range(5):
        assert visits_of(graph, walkers, steps=10, schedule=schedule) == expected


async def test_a_job_restored_continues_with_the_same_walks() -> None:
    """A restored job lost or doubled walkers, or gave them other walks."""
    graph, walkers = WALKS.made_up_edges(12, 30), WALKS.new_walkers(20, 12)

    def make() -> tuple[Flow, Any]:
        flow = Flow("random walk")
        visits = WALKS.random_walk(flow.from_items(graph), flow.from_items(walkers), steps=200)
        return flow, visits.collect()

    uninterrupted, expected = make()
    await ended(await uninterrupted.start())
    visits = await interrupted_and_restored(make)
    assert as_tuples(visits) == as_tuples(expected.items)


def test_a_walk_follows_edges_for_all_its_steps() -> None:
    """A walk jumped to a place without an edge, or ended before its last step."""
    graph, walkers = WALKS.made_up_edges(20, 20), WALKS.new_walkers(30, 20)
    edges = set(zip(graph["from"].tolist(), graph["to"].tolist(), strict=True))
    visits = visits_of(graph, walkers, steps=15)
    assert [visit[:2] for visit in visits] == [(walker, step) for walker in range(30) for step in range(16)]
    assert [place for _, step, place in visits if step == 0] == walkers["place"].tolist()
    hops = itertools.pairwise(visits)
    assert all((a[2], b[2]) in edges for a, b in hops if a[0] == b[0])


def test_a_walk_ends_at_a_place_without_edges() -> None:
    """A walk failed at a place without edges, or in a graph without places."""
    walkers = WALKS.new_walkers(4, 4)
    visits = visits_of(links([(0, 1), (1, 2), (3, 3)]), walkers, steps=3)
    assert [place for walker, _, place in visits if walker == 0] == [0, 1, 2]
    assert [place for walker, _, place in visits if walker == 2] == [2]
    assert [place for walker, _, place in visits if walker == 3] == [3, 3, 3, 3]
    assert len(visits_of(links([]), walkers, steps=3)) == 4
    assert len(visits_of(links([(0, 1)]), walkers, steps=0)) == 4


def test_in_the_long_run_places_are_visited_as_often_as_theory_says() -> None:
    """Places were not visited as often as their degrees say, which is the theory for edges in both directions."""
    graph = WALKS.made_up_edges(20, 40)
    visits = np.array(visits_of(graph, WALKS.new_walkers(400, 20), steps=100))
    late = visits[visits[:, 1] > 20][:, 2]
    frequencies = np.bincount(late, minlength=20) / len(late)
    expected = np.bincount(graph["from"], minlength=20) / len(graph)
    # With 32,000 visits, a frequency near 0.05 deviates by about 0.002, because visits of a walk are not independent.
    assert frequencies == pytest.approx(expected, abs=0.008)


def test_each_walker_has_its_own_random_numbers() -> None:
    """The numbers of one walker or step predicted the next ones, or were not evenly distributed."""
    walkers, steps = (each.ravel() for each in np.meshgrid(np.arange(300), np.arange(300)))
    drawn = WALKS.drawn_numbers(1, walkers, steps).reshape(300, 300)
    assert len(np.unique(drawn)) == drawn.size
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    counts = np.bincount((drawn * 20).astype(int).ravel(), minlength=20)
    assert counts == pytest.approx(np.full(20, 4_500), abs=5 * np.sqrt(4_500))
    for one, other in [(drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


def test_walks_run_without_arguments() -> None:
    """The example failed when a user ran it without arguments."""
    lines = printed_by("random_walk")
    assert lines[0] == "101000 visits of 50 places; the most visited:"
    assert len(lines) == 6
