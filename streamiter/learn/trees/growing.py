"""The loop in which a tree grows: an owner and its workers in a bounded iteration."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.flow.algorithms import all_or_nothing
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.all_reduce import all_reduce
from streamiter.iteration.bounded import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult
from streamiter.iteration.last_round import last_round
from streamiter.learn.trees.owner import TreeOptions, TreeOwner
from streamiter.learn.trees.summaries import Summary
from streamiter.learn.trees.tree import Tree
from streamiter.learn.trees.worker import SUMMARIES, HistogramWorker

__all__ = ["grow_tree", "grown_tree"]


@all_or_nothing
def grow_tree(rows: Stream, options: TreeOptions) -> dict[str, Stream]:
    """``"tree"``: how the owner left it, for ``grown_tree``; ``"leaves"``: their number by round.

    ``rows`` is a stream of ``Columns``: features (a matrix), label, weight. The workers are as many as it has
    subtasks, and the tree is the same however many.
    """
    no_tree = rows.flow.from_items([], name="no tree", parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        [trees], [rows] = variables, data
        histograms = connect(tree=trees.broadcast(), rows=rows).process(
            lambda: HistogramWorker(options.criterion()), name="histograms", parallelism=rows.parallelism
        )
        everything = connect(
            summary=all_reduce(histograms.side_output(SUMMARIES), _merged, name="merge summaries"),
            histograms=all_reduce(histograms, np.add, name="add histograms"),
        )
        grown = everything.process(lambda: TreeOwner(options), name="split", parallelism=1)
        return IterationBodyResult(
            feedback_variable_streams=[grown],
            output_streams={"tree": last_round(grown, name="last"), "leaves": grown.map(_count_leaves)},
            termination_criteria=grown.filter(lambda growing: len(growing["nodes"]), name="still growing"),
        )

    return iterate_bounded_streams_until_termination([no_tree], [rows], body)


def grown_tree(grown: dict[str, Any], options: TreeOptions) -> Tree:
    """The tree itself, with what its nodes predict."""
    arrays, plan, criterion = grown["tree"], grown["plan"], options.criterion()
    statistics = arrays["statistics"]
    return Tree(
        feature=arrays["feature"],
        threshold=arrays["threshold"],
        child=arrays["child"],
        rows=criterion.rows(statistics).astype(np.intp),
        values=criterion.values(statistics) * plan["scale"] + plan["center"],
    )


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return Summary(**first).merged(Summary(**second)).as_plain_data()


def _count_leaves(growing: dict[str, Any]) -> int:
    return int(np.count_nonzero(growing["tree"]["feature"] < 0))
