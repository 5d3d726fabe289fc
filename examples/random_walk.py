"""Random walks on a graph: walkers move along edges, and the program counts the visits of each place.

Places are partitioned by key over several subtasks, and each subtask knows the edges that leave its own places. The
walkers are the variable stream: after a step a walker is fed back to the subtask of its new place, until it has made
all its steps. Each walker has a random generator of its own, so the same seed gives the same walks for any number of
subtasks. With a generated graph::

    python examples/random_walk.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
)

PLACES = 50
WALKERS = 1_000
STEPS = 100
SUBTASKS = 2
SEED = 1

VISITS = OutputTag("visits")
ARRAYS = ("places", "firsts", "degrees", "to")


class Walk(Operator):
    """Moves walkers along the edges that leave the places of this subtask, after it has read all these edges."""

    def __init__(self, steps: int, seed: int) -> None:
        self.steps = steps
        self.seed = seed
        self.edges: list[Columns] = []
        self.has_edges = False
        self.places = self.firsts = self.degrees = self.to = np.zeros(0, dtype=int)

    def wanted_inputs(self) -> Sequence[str] | None:
        return None if self.has_edges else ("edges",)

    def process_edges_batch(self, edges: Columns, out: Any) -> None:
        self.edges.append(edges)

    def input_ended(self, name: str, out: Any) -> None:
        if name == "edges":
            self.arrange_edges()

    def arrange_edges(self) -> None:
        """Sort the edges by place, in a fixed order, whatever the order of arrival."""
        self.has_edges = True
        if not self.edges:
            return
        origins, to = (np.concatenate([edges[name] for edges in self.edges]) for name in ("from", "to"))
        order = np.lexsort((to, origins))
        self.to = to[order]
        self.places, self.firsts, self.degrees = np.unique(origins[order], return_index=True, return_counts=True)
        self.edges = []

    def process_walkers_batch(self, walkers: Columns, out: Any) -> None:
        out.emit_batch(walkers, tag=VISITS)
        walkers = walkers[(walkers["step"] < self.steps) & np.isin(walkers["place"], self.places)]
        if not len(walkers):
            return
        numbers = np.searchsorted(self.places, walkers["place"])
        drawn = drawn_numbers(self.seed, walkers["walker"], walkers["step"])
        edges = self.firsts[numbers] + (drawn * self.degrees[numbers]).astype(int)
        step = walkers["step"] + 1
        out.emit_batch(Columns({"walker": walkers["walker"], "step": step, "place": self.to[edges]}))

    def snapshot(self) -> dict[str, Any]:
        # Arrays are replaced, never changed; the list grows.
        arrays = {name: getattr(self, name) for name in ARRAYS}
        return {**arrays, "edges": list(self.edges), "has_edges": self.has_edges}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def drawn_numbers(seed: int, walkers: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a random number for each walker and its step, from 0 to below 1.

    Each walker has a SplitMix64 generator, whose n-th number depends only on its start and on n.
    """
    begin = mixed(mixed(np.array([seed], dtype=np.uint64)) + walkers.astype(np.uint64))
    numbers = mixed(begin + (steps.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    drawn: np.ndarray[Any, Any] = (numbers >> np.uint64(11)) * 2.0**-53
    return drawn


def mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Apply the mixing function of SplitMix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray[Any, Any] = numbers ^ (numbers >> np.uint64(31))
    return result


def random_walk(
    edges: Stream, walkers: Stream, *, steps: int = STEPS, seed: int = SEED, subtasks: int = SUBTASKS
) -> Stream:
    """Return all visits (fields ``walker``, ``step``, ``place``), in any order; step 0 is the first place of a walker.

    ``edges``: a bounded stream of ``from`` and ``to``, both ints; several edges between two places count several times.
    ``walkers``: fields ``walker``, a unique number, ``step``, 0, and ``place``. A walker at a place that no edge leaves
    stays there and makes no more visits.
    """
    start = walkers.map_batch(lambda walkers: walkers, name="start", parallelism=subtasks)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        walk = connect(
            walkers=variables[0].key_by_batch(lambda walkers: walkers["place"]),
            edges=data[0].key_by_batch(lambda edges: edges["from"]),
        ).process(lambda: Walk(steps, seed), name="walk", parallelism=subtasks)
        return IterationBodyResult([walk], [walk.side_output(VISITS)])

    outputs: list[Stream] = iterate_bounded_streams_until_termination([start], [edges], body)
    return outputs[0]


def made_up_edges(places: int = PLACES, edges: int = 4 * PLACES) -> Columns:
    """Return random edges, each in both directions, and a ring, so that all places can be reached."""
    generator = np.random.default_rng(seed=1)
    ring = np.arange(places)
    one = np.concatenate([ring, generator.integers(places, size=edges)])
    other = np.concatenate([(ring + 1) % places, generator.integers(places, size=edges)])
    return Columns({"from": np.concatenate([one, other]), "to": np.concatenate([other, one])})


def new_walkers(count: int = WALKERS, places: int = PLACES) -> Columns:
    """Return walkers that start at the places in turn."""
    walkers = np.arange(count)
    return Columns({"walker": walkers, "step": np.zeros(count, dtype=int), "place": walkers % places})


class Report(Operator):
    """Counts visits; at the end prints the most visited places, with the share that theory predicts."""

    def __init__(self, edges: Columns) -> None:
        # If edges lead both ways, an endless walk visits each place in proportion to its number of edges.
        self.expected = np.bincount(edges["from"], minlength=PLACES) / len(edges)
        self.visits = np.zeros(PLACES, dtype=int)

    def process_batch(self, visits: Columns, out: Any) -> None:
        self.visits += np.bincount(visits["place"], minlength=PLACES)

    def finish(self, out: Any) -> None:
        count = self.visits.sum()
        print(f"{count} visits of {PLACES} places; the most visited:")
        for place in np.argsort(-self.visits)[:5]:
            frequency, expected = self.visits[place] / count, self.expected[place]
            print(f"place {place}: {frequency:.4f} of all visits, {expected:.4f} expected")


def flow() -> Flow:
    """Return the flow from a generated graph to the report."""
    made, edges = Flow("random walk"), made_up_edges()
    visits = random_walk(made.from_items(edges), made.from_items(new_walkers()))
    visits.process(lambda: Report(edges), name="report", parallelism=1)
    return made


if __name__ == "__main__":
    flow().run(on_interrupt="drain")
