"""k-means on bounded data, as a flow: Lloyd's rounds in a bounded iteration.

The variable stream carries the centroids. Points are cut into blocks at the entrance and replayed in every
round; each subtask adds up those that are nearest to each centroid, and of the sums of all subtasks one step
makes the centroids of the next round.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.algorithms import check_stream, step_names
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
from streamiter.learn.rows.checks import Floats
from streamiter.models.update import ModelSnapshot

__all__ = ["Clustering", "cluster", "k_means"]

# A block costs some 20 µs a round beside its arithmetic of some 250 µs (10 clusters, 10 coordinates); larger ones
# were measured to be no quicker, and of points with a thousand coordinates this is 64 MiB.
_BLOCK_POINTS: Final = 8192

Value = dict[str, Any]
"""What the variable stream carries: ``centroids``, their ``counts``, how far the furthest ``move`` was, and
``scoring``, which assigns points to them; ``centroids`` is None until they are chosen."""

Gathered = tuple[str, Any]
"""``("sums", …)`` of some points by cluster, or a ``("sample", …)`` of them to choose the first centroids from."""


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
    k-means++, from a sample that depends on the ``seed`` and the set of points, not on their order or the
    parallelism; the data is then gone through once more.

    The work is done by as many subtasks as ``points`` has; how many changes the last digits of the result, and
    nothing else does. Points are kept as float64, in memory and then on disk (``config``:
    ``IterationConfig(replay_memory_bytes=…)``). ``name`` stands before the names of the steps.

    The parameters of the snapshot: ``centroids``, an array (clusters, coordinates), and ``counts``, how many
    points were nearest to each before it moved for the last time; ``records``: the points; metric ``move``: how
    far the furthest centroid moved in the last round. It can go to ``publish_model``.

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
        following = map_with(total, values, lloyd.move, name=label("move"), parallelism=1)
        moves = following.map(lambda value: value["move"])
        return IterationBodyResult(
            feedback_variable_streams=[following],
            output_streams=[last_round(values, name=label("last")), following],
            termination_criteria=terminate_after(
                moves, rounds=options.passes, tolerance=options.tolerance, name=label("end")
            ),
        )

    last, every = iterate_bounded_streams_until_termination([start], [replayed(blocks)], body, options.config)
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
        if scoring is None:
            return [("sample", sample_of(block[:-1].T, self._sample_size, self._seed)) for block in blocks]
        for block in blocks:
            _check_width(len(block) - 1, scoring.shape[1] - 1)
        return [("sums", sums_by_cluster(scoring, block)) for block in blocks]

    def add(self, first: Gathered, second: Gathered) -> Gathered:
        """What both contribute."""
        if first[0] == "sums":
            return ("sums", first[1] + second[1])
        _check_width(second[1].shape[1], first[1].shape[1])
        both = np.concatenate([first[1], second[1]])
        return ("sample", sample_of(both, self._sample_size, self._seed))

    def move(self, value: Value, totals: Any) -> list[Value]:
        """The value of the next round, of all that was gathered."""
        [(kind, total)] = totals
        if kind == "sample":
            chosen = choose_centroids(total, self._clusters, self._seed)
            return [_first_value(chosen, self._clusters)]
        centroids = moved(value["centroids"], total)
        return [
            {
                "centroids": centroids,
                "scoring": scoring_of(centroids),
                "counts": total[:, -1].astype(np.int64),
                "move": largest_move(value["centroids"], centroids),
            }
        ]


def _first_value(centroids: Floats | None, clusters: int) -> Value:
    return {
        "centroids": centroids,
        "scoring": None if centroids is None else scoring_of(centroids),
        "counts": np.zeros(clusters, dtype=np.int64),
        "move": math.inf,
    }


def _as_model(value: Value) -> ModelSnapshot:
    counts = value["counts"]
    if value["centroids"] is None:
        raise ModelError(
            "k_means: expected points to choose centroids among, given none; look at what comes before"
        )
    metrics = {"move": value["move"]} if math.isfinite(value["move"]) else {}
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
