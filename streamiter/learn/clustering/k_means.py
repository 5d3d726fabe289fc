"""k-means on bounded data, as a flow: Lloyd's rounds in a bounded iteration.

The variable stream carries the centroids. Points are cut into blocks at the entrance and replayed in every
round; each subtask adds up those that are nearest to each centroid, and of the sums of all subtasks one step
makes the centroids of the next round.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.iteration.all_reduce import all_reduce
from streamiter.iteration.bounded import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.last_round import last_round
from streamiter.iteration.map_with import map_with
from streamiter.iteration.replayed import replayed
from streamiter.iteration.terminate_after import terminate_after
from streamiter.learn.clustering.clusters import (
    as_columns,
    largest_move,
    moved,
    scoring_of,
    sums_by_cluster,
)
from streamiter.learn.clustering.first_centroids import choose_centroids, sample_of, sample_size
from streamiter.learn.clustering.options import KMeansOptions
from streamiter.learn.clustering.spread import Spread, inertia_of, joined, spread_of
from streamiter.learn.rows.checks import Floats
from streamiter.models.update import ModelSnapshot
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["Clustering", "cluster", "k_means"]

# A block costs some 20 µs a round beside its arithmetic of some 250 µs (10 clusters, 10 coordinates); larger ones
# were measured to be no quicker, and of points with a thousand coordinates this is 64 MiB.
_BLOCK_POINTS: Final = 8192

Value = dict[str, Any]
"""What the variable stream carries: ``centroids``, their ``counts``, how far the furthest ``move`` was, their
``inertia``, the ``spread`` of all points, and ``scoring``, which assigns points to them. ``centroids`` is None until
they are chosen, ``spread`` until all points have been seen."""

Gathered = tuple[str, Any, Spread | None]
"""``("sums", …)`` of some points by cluster, or a ``("sample", …)`` of them to choose the first centroids from; and
their spread, where it is not known yet."""


def k_means(
    points: Stream,
    *,
    clusters: int,
    rounds: int,
    initial: npt.ArrayLike | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> Stream:
    """The centroids of ``points`` after ``rounds`` rounds: one ``ModelSnapshot``, at the end.

    A point is a record: an array or list of its coordinates (or a row of a matrix). In a round each goes to the
    nearest centroid (Euclidean; of several the first), and the centroids become the means of their points. One
    without points stays where it is. With a ``tolerance`` the rounds also end after the first in which no
    centroid moved further than that.

    ``initial`` are the centroids to begin with, a row for each. Without it they are chosen among the points by
    greedy k-means++ (the best of several attempts), from a sample that depends on the ``seed`` and the set of points,
    not on their order or the parallelism; the data is then gone through once more.

    The work is done by as many subtasks as ``points`` has; how many changes the last digits of the result, and
    nothing else does. Points are kept as float64, in memory and then on disk (``config``:
    ``IterationConfig(replay_memory_bytes=…)``). ``name`` stands before the names of the steps.

    The parameters of the snapshot: ``centroids``, an array (clusters, coordinates), and ``counts``, how many
    points were nearest to each before it moved for the last time; ``records``: the points. Its metrics: ``move``, how
    far the furthest centroid moved in the last round, and ``inertia``, the sum of the squared distances between the
    points so counted and their centroid, where that is now. It can go to ``publish_model``.

    Raises GraphError for options that cannot be; the job ends where there are no points, fewer distinct ones than
    clusters, or points that are no rows of finite numbers of one length.

    >>> from streamiter import Flow
    >>> flow = Flow("two clusters")
    >>> points = flow.from_items(np.array([[0, 0], [0, 0.3], [0.3, 0], [9, 0], [9, 0.6], [9.6, 0]]))
    >>> models = k_means(points, clusters=2, rounds=2).collect()
    >>> state, [model] = flow.run().state, models.items
    >>> sorted(model.parameters["centroids"].round(3).tolist()), model.parameters["counts"].tolist()
    ([[0.1, 0.1], [9.2, 0.2]], [3, 3])
    """
    options = KMeansOptions(
        clusters=clusters, rounds=rounds, initial=initial, seed=seed, tolerance=tolerance, config=config
    )
    return cluster(points, options, name=name).model


class Clustering(NamedTuple):
    """What :func:`cluster` gives."""

    model: Stream
    """One ``ModelSnapshot``, at the end."""
    models: Stream
    """One for each round, as it ends."""


@all_or_nothing
def cluster(points: Stream, options: KMeansOptions, *, name: str | None = None) -> Clustering:
    """:func:`k_means` with a model for each round."""
    _check_points(points)
    centroids = options.centroids
    width = None if centroids is None else centroids.shape[1]
    lloyd = _Lloyd(options.clusters, options.seed)
    flow = points.flow
    label = step_names(flow, name)

    blocks = points.batch(_BLOCK_POINTS, name=label("blocks")).map(
        lambda rows: as_columns(rows, width), name=label("points")
    )
    start = flow.from_items([_first_value(centroids, options.clusters)], name=label("start"), parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [values], [blocks] = variables, data
        gathered = map_with(blocks, values, lloyd.gather, name=label("assign"))
        total = all_reduce(gathered, lloyd.add, name=label("sum"))
        if centroids is None:
            total = total.process(_SomePoints, name=label("found"), parallelism=1)
        following = map_with(total, values, lloyd.move, name=label("move"), parallelism=1)
        moves = following.map(lambda value: value["move"])
        return IterationBodyResult(
            feedback_variable_streams=[following],
            output_streams=[last_round(values, name=label("last")), following],
            termination_criteria=terminate_after(
                moves, rounds=options.passes, tolerance=options.tolerance, name=label("end")
            ),
        )

    config = replace(options.config or IterationConfig(), name=name)
    last, every = iterate_bounded_streams_until_termination([start], [replayed(blocks)], body, config)
    return Clustering(
        last.map(_as_model, name=label("model")),
        every.filter(lambda value: math.isfinite(value["move"])).map(_as_model),
    )


class _Lloyd:
    """The functions of the steps."""

    def __init__(self, clusters: int, seed: int) -> None:
        self._clusters = clusters
        self._seed = seed
        self._sample_size = sample_size(clusters)

    def gather(self, value: Value, blocks: Any) -> list[Gathered]:
        """What each block of points contributes to the round."""
        scoring = value["scoring"]
        spreads = [spread_of(block) if value["spread"] is None else None for block in blocks]
        if scoring is None:
            samples = (sample_of(block[:-1].T, self._sample_size, self._seed) for block in blocks)
            return [("sample", sample, spread) for sample, spread in zip(samples, spreads, strict=True)]
        for block in blocks:
            _check_width(len(block) - 1, scoring.shape[1] - 1)
        sums = (sums_by_cluster(scoring, block) for block in blocks)
        return [("sums", total, spread) for total, spread in zip(sums, spreads, strict=True)]

    def add(self, first: Gathered, second: Gathered) -> Gathered:
        """What both contribute."""
        _check_width(second[1].shape[1], first[1].shape[1])
        spread = None if first[2] is None or second[2] is None else joined(first[2], second[2])
        if first[0] == "sums":
            return ("sums", first[1] + second[1], spread)
        both = np.concatenate([first[1], second[1]])
        return ("sample", sample_of(both, self._sample_size, self._seed), spread)

    def move(self, value: Value, totals: Any) -> list[Value]:
        """The value of the next round, of all that was gathered."""
        [(kind, total, spread)] = totals
        spread = value["spread"] if spread is None else spread
        if kind == "sample":
            chosen = choose_centroids(total, self._clusters, self._seed)
            return [_first_value(chosen, self._clusters) | {"spread": spread}]
        centroids, counts = moved(value["centroids"], total), total[:, -1].astype(np.int64)
        return [
            {
                "centroids": centroids,
                "scoring": scoring_of(centroids),
                "counts": counts,
                "move": largest_move(value["centroids"], centroids),
                "inertia": inertia_of(spread, centroids, counts),
                "spread": spread,
            }
        ]


class _SomePoints(Operator, IterationListener):
    """Passes on what was gathered, and refuses that it was nothing: there is nothing to choose centroids among."""

    def __init__(self) -> None:
        self._is_found = False

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._is_found = self._is_found or len(batch) > 0
        out.emit_batch(batch)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if not self._is_found:
            raise ModelError(
                "k_means: expected points to choose centroids among, given none; look at what comes before"
            )

    def snapshot(self) -> bool:
        return self._is_found

    def restore(self, state: bool) -> None:
        self._is_found = state


def _first_value(centroids: Floats | None, clusters: int) -> Value:
    return {
        "centroids": centroids,
        "scoring": None if centroids is None else scoring_of(centroids),
        "counts": np.zeros(clusters, dtype=np.int64),
        "move": math.inf,
        "inertia": math.inf,
        "spread": None,
    }


def _as_model(value: Value) -> ModelSnapshot:
    counts = value["counts"]
    has_moved = math.isfinite(value["move"])
    metrics = {"move": value["move"], "inertia": value["inertia"]} if has_moved else {}
    return ModelSnapshot(
        {"centroids": value["centroids"], "counts": counts}, records=int(counts.sum()), metrics=metrics
    )


def _check_width(given: int, expected: int) -> None:
    if given != expected:
        raise ModelError(
            f"k_means: expected points of one length, given some of {expected} coordinates and some of {given}; "
            "filter out those that are no points"
        )


def _check_points(points: Any) -> None:
    check_stream("k_means", points, "points", bounded=True)
    if not points.is_bounded:
        raise GraphError(
            f"k_means: expected a bounded stream, given {points.name!r}, which never ends; read the topic with "
            'stop="latest", or use online_k_means'
        )
