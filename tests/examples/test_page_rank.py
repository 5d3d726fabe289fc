"""PageRank as a flow is compared with power iteration on a dense matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from examples.graph_support import interrupted_and_restored, links, loaded, printed_by, stream_of
from iteration.iteration_support import SMALL, run

from streamiter import Columns, Flow

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


@pytest.mark.parametrize("subtasks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "pairs", [RING, STAR_WITHOUT_A_WAY_BACK, SEVERAL_LINKS_AND_ONE_TO_ITSELF, TWO_DEAD_ENDS, TWO_ISLANDS, [(3, 3)]]
)
@pytest.mark.parametrize("damping", [0.5, 0.85])
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


def test_it_runs_without_arguments() -> None:
    """The example failed when a user ran it without arguments."""
    lines = printed_by("page_rank")
    assert lines[0] == "999 pages, of ranks that sum to 1.000000"
    assert len(lines) == 6
