"""k-means on bounded data: ``k_means``, a step of a flow, and ``KMeans``, an object to fit.

Both run Lloyd's rounds in a bounded iteration. The variable stream carries the centroids. Points are cut into blocks
and replayed in every round: each subtask sums up the points that are nearest to each centroid, and one step turns the
sums of all subtasks into the centroids of the next round. The arithmetic is in ``centroids``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.flow import Flow, all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig, OperatorLifeCycle
from streamiter.iteration.helpers import all_reduce, last_round, map_with, terminate_after
from streamiter.iteration.marked_streams import replayed
from streamiter.learn.clusters.centroids import (
    as_columns,
    choose_centroids,
    inertia_of,
    initial_centroids,
    largest_move,
    moved,
    nearest,
    sample_of,
    sample_size,
    scoring_of,
    spread_of,
    sums_by_cluster,
)
from streamiter.learn.estimators import check_fit, read_topic, run_offline
from streamiter.learn.rows import as_points
from streamiter.models.saved_objects import Savable
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import DeclaredOperator, DeclaredState, Form, declared
from streamiter.operators.operator import Context, IterationListener
from streamiter.operators.output import Output
from streamiter.topics.topic import Decoder, Topic
from streamiter.values.numbers import Floats, Moments, plain_float, whole_number
from streamiter.values.records import BATCH_RECORDS, Batch


class KMeansOptions:
    """The checked options of :func:`~streamiter.learn.clusters.clustering.k_means`.

    Raises GraphError for options that cannot be used.
    """

    def __init__(
        self,
        *,
        clusters: int,
        rounds: int,
        initial: npt.ArrayLike | None = None,
        seed: int = 0,
        tolerance: float | None = None,
        config: IterationConfig | None = None,
    ) -> None:
        self.clusters = whole_number("k_means(clusters=)", clusters, 1, error=GraphError)
        self.rounds = whole_number("k_means(rounds=)", rounds, 1, error=GraphError)
        self.seed = whole_number("k_means(seed=)", seed, 0, error=GraphError)
        if tolerance is not None and not plain_float(tolerance) >= 0:
            raise GraphError(
                f"k_means(tolerance=): expected a distance of 0 or more, given {tolerance!r}; "
                "leave it out for all rounds"
            )
        self.tolerance = tolerance
        if config is not None and config.operator_life_cycle is not OperatorLifeCycle.ALL_ROUND:
            raise GraphError(
                "k_means(config=): expected operators that live for all rounds, given OperatorLifeCycle.PER_ROUND; "
                "leave operator_life_cycle out"
            )
        self.config = config
        self.centroids = None if initial is None else initial_centroids("k_means", initial, self.clusters)
        """The initial centroids; None to choose centroids among the points."""

    @property
    def passes(self) -> int:
        """How often the points are read at most: once more than the rounds if centroids must be chosen."""
        return self.rounds if self.centroids is not None else self.rounds + 1


# In each round a block takes about 250 µs of arithmetic and 20 µs of overhead (10 clusters, 10 coordinates). Larger
# blocks were measured to be no quicker. A block of points with a thousand coordinates takes 64 MiB.
_BLOCK_POINTS: Final = BATCH_RECORDS


PlainMoments = tuple[int, Floats, Floats]
"""The fields of ``Moments``, which as a named tuple are no plain data."""


class Value(TypedDict):
    """The record of the variable stream."""

    centroids: Floats | None
    """None until centroids are chosen."""
    scoring: Floats | None
    """The matrix that assigns points to centroids; None without centroids."""
    counts: npt.NDArray[np.int64]
    """The number of points of each centroid."""
    move: float
    """The distance of the furthest move."""
    inertia: float
    spread: PlainMoments | None
    """The moments of all points; None until all points have been read."""


Gathered = tuple[Literal["sums", "sample"], Floats, PlainMoments | None]
"""The contribution of some points: ``("sums", …)`` by cluster, or a ``("sample", …)`` to choose initial centroids from;
then the moments of the points, None if those of all points are known."""


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
    """Cluster bounded data by k-means: emits the centroids after ``rounds`` rounds as one ``ModelSnapshot``.

    A point is a record: an array or list of its coordinates (or a row of a matrix). In each round every point is
    assigned to the nearest centroid (by Euclidean distance; the first of equally near ones), and the centroids become
    the means of their points. A centroid without points does not move. With a ``tolerance`` the rounds also end after
    the first round in which no centroid moved further than the tolerance.

    ``initial`` are the initial centroids, a row for each. Without it, centroids are chosen among the points by greedy
    k-means++, from a sample that depends on the ``seed`` and the set of points, not on their order or the parallelism;
    the data is then read once more.

    There are as many subtasks as ``points`` has. Their number changes the last digits of the result; timing changes
    nothing. Points are kept as float64, in memory and beyond a limit on disk (``config``:
    ``IterationConfig(replay_memory_bytes=…)``).

    The parameters of the snapshot are ``centroids``, an array (clusters, coordinates), and ``counts``, the number of
    points that were nearest to each centroid before its last move; ``records`` is the number of points. Its metrics are
    ``move``, the distance of the furthest move in the last round, and ``inertia``, the sum of the squared distances
    between these points and their centroid after its move. ``publish_model`` publishes it.

    Raises GraphError for options that cannot be used. The job fails without points, with fewer distinct points than
    clusters, and for points that are not rows of finite numbers of one length.

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
    """The streams that :func:`cluster` returns."""

    model: Stream
    """One ``ModelSnapshot``, at the end."""
    models: Stream
    """A ``ModelSnapshot`` for each round, when the round ends."""


@all_or_nothing
def cluster(points: Stream, options: KMeansOptions, *, name: str | None = None) -> Clustering:
    """Add the steps of :func:`k_means`; return the models of all rounds, too."""
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


@dataclass(frozen=True)
class _Lloyd:
    """One round of Lloyd's algorithm, as functions for the steps of the loop."""

    clusters: int
    seed: int

    def gather(self, value: Value, blocks: Sequence[Floats]) -> list[Gathered]:
        """Return the contribution of each block of points to the round."""
        scoring = value["scoring"]
        spreads = [spread_of(block)[:] if value["spread"] is None else None for block in blocks]
        if scoring is None:
            samples = (sample_of(block[:-1].T, sample_size(self.clusters), self.seed) for block in blocks)
            return [("sample", sample, spread) for sample, spread in zip(samples, spreads, strict=True)]
        for block in blocks:
            _check_width(len(block) - 1, scoring.shape[1] - 1)
        sums = (sums_by_cluster(scoring, block) for block in blocks)
        return [("sums", total, spread) for total, spread in zip(sums, spreads, strict=True)]

    def add(self, first: Gathered, second: Gathered) -> Gathered:
        """Return the sum of two contributions."""
        _check_width(second[1].shape[1], first[1].shape[1])
        spread = None if first[2] is None or second[2] is None else Moments(*first[2]).plus(Moments(*second[2]))[:]
        if first[0] == "sums":
            return ("sums", first[1] + second[1], spread)
        both = np.concatenate([first[1], second[1]])
        return ("sample", sample_of(both, sample_size(self.clusters), self.seed), spread)

    def move(self, value: Value, totals: Sequence[Gathered]) -> list[Value]:
        """Return the value of the next round, made from the sum of all contributions."""
        [(kind, total, spread)] = totals
        spread = value["spread"] if spread is None else spread
        if kind == "sample":
            chosen = choose_centroids(total, self.clusters, self.seed)
            return [{**_first_value(chosen, self.clusters), "spread": spread}]
        before = value["centroids"]
        assert before is not None
        assert spread is not None
        centroids, counts = moved(before, total), total[:, -1].astype(np.int64)
        return [
            {
                "centroids": centroids,
                "scoring": scoring_of(centroids),
                "counts": counts,
                "move": largest_move(before, centroids),
                "inertia": inertia_of(Moments(*spread), centroids, counts),
                "spread": spread,
            }
        ]


class _SomePoints(DeclaredOperator, IterationListener):
    """Passes on the sum of all contributions; fails if there are no points to choose centroids among."""

    _is_found = declared(False)

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._is_found = self._is_found or len(batch) > 0
        out.emit_batch(batch)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if not self._is_found:
            raise ModelError("k_means: expected points to choose centroids among, given none; check the steps before")


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
            f"k_means: expected points of one length, given points of {expected} and of {given} coordinates; "
            "filter out the records that are not points"
        )


def _check_points(points: Stream) -> None:
    check_stream("k_means", points, "points", bounded=True)
    if not points.is_bounded:
        raise GraphError(
            f"k_means: expected a bounded stream, given {points.name!r}, which never ends; read the topic with "
            'stop="latest", or use online_k_means'
        )


_FITTED: Final = Form(
    lambda model: ({name: array.copy() for name, array in model.parameters.items()}, model.records, {**model.metrics}),
    lambda fitted: ModelSnapshot(fitted[0], records=fitted[1], metrics=fitted[2]),
)


def _nearest_of(centroids: Floats, points: npt.ArrayLike) -> npt.NDArray[np.intp]:
    return nearest(scoring_of(centroids), as_columns(points, centroids.shape[1], owner="KMeans.predict"))


class KMeans(DeclaredState, Savable):
    """Clusters around centroids, learned offline: fit, then predict.

    ``fit`` runs a flow of :func:`~streamiter.learn.clusters.clustering.k_means`, and has its options.

    >>> points = [[0, 0], [0, 0.3], [0.3, 0], [9, 0], [9, 0.6], [9.6, 0]]
    >>> model = KMeans(clusters=2, rounds=2, initial=[[0, 0], [9, 0]]).fit(points)
    >>> model.centroids.round(3).tolist(), model.counts.tolist(), model.predict([[1, 1], [8, 1]]).tolist()
    ([[0.1, 0.1], [9.2, 0.2]], [3, 3], [0, 1])
    >>> round(model.inertia, 6)
    0.6
    """

    _model: ModelSnapshot | None = declared(None, form=_FITTED)
    _rounds_made = declared(0)

    def __init__(
        self,
        *,
        clusters: int,
        rounds: int = 100,
        initial: npt.ArrayLike | None = None,
        seed: int = 0,
        tolerance: float | None = 0.0,
        config: IterationConfig | None = None,
    ) -> None:
        """Rounds end when no centroid moves further than ``tolerance``; None makes all rounds."""
        self._options = KMeansOptions(
            clusters=clusters, rounds=rounds, initial=initial, seed=seed, tolerance=tolerance, config=config
        )

    def fit(
        self,
        points: npt.ArrayLike | Topic,
        *,
        decode: Decoder | None = None,
        extract: Callable[[Any], Batch] | None = None,
        parallelism: int = 1,
        progress: bool | None = None,
    ) -> Self:
        """Learn centroids from an array, a row for each point, or from the records that are in a topic now.

        For a topic, ``decode`` decodes its values, and ``extract(batch)`` returns the points of a batch of records, if
        the records are not points. ``parallelism`` subtasks share the work. A second fit starts again from the initial
        centroids.

        On a terminal a bar shows the rounds (``progress`` True: everywhere, False: never). Ctrl-C ends the fit after
        the current round, and the model keeps the centroids of that round.

        Raises GraphError for options that cannot be used, and JobFailed for data without clusters; then the model of
        the previous fit is kept.
        """
        title = "KMeans.fit"
        check_fit(title, points, parallelism, decode=decode, extract=extract)
        flow = Flow(title, parallelism)
        if isinstance(points, Topic):
            records = read_topic(flow, points, decode, parallelism=parallelism)
            stream = records if extract is None else records.map_batch(extract)
        else:
            stream = flow.from_items(self._checked(title, points))
        clustering = cluster(stream, self._options)
        fitted = clustering.model.collect()
        rounds = clustering.models.map(lambda model: model.metrics["inertia"]).collect()
        run_offline(
            flow,
            title=title,
            rounds=self._options.rounds,
            first_round=self._options.passes - self._options.rounds,
            progress=progress,
            describe=lambda: f"inertia {rounds.items[-1]:.6g}" if rounds.items else "",
        )
        [self._model] = fitted.items
        self._rounds_made = len(rounds.items)
        return self

    def _checked(self, title: str, points: npt.ArrayLike) -> Floats:
        checked = as_points(title, points)
        initial = self._options.centroids
        if not len(checked):
            raise ModelError(f"{title}: expected one point or more, given none; give points")
        if initial is not None and checked.shape[1] != initial.shape[1]:
            raise ModelError(
                f"{title}: expected points of {initial.shape[1]} numbers, as in initial=, given points of "
                f"{checked.shape[1]}; give both the same columns"
            )
        return checked

    def predict(self, points: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return the number of the nearest centroid of each point (row); the first one of equally near centroids."""
        return _nearest_of(self.centroids, points)

    @staticmethod
    def predictor(parameters: Mapping[str, Any]) -> Callable[[npt.ArrayLike], int | npt.NDArray[np.intp]]:
        """Return the function that predicts with a published version: ``ServedModel(…, load=KMeans.predictor)``.

        The versions are those of ``k_means`` or ``online_k_means``. Of a point, an array of shape (d,), it returns the
        number of the nearest centroid; of points, a row for each, it returns an array of these numbers. Raises
        ModelError for other points.

        >>> nearest_of = KMeans.predictor({"centroids": [[0.0, 0.0], [9.0, 0.0]]})
        >>> nearest_of([8, 1]), nearest_of([[1, 1], [8, 1]]).tolist()
        (1, [0, 1])
        """
        centroids = initial_centroids("KMeans.predictor", parameters["centroids"])

        def predict(points: npt.ArrayLike) -> int | npt.NDArray[np.intp]:
            if isinstance(points, (list, tuple, np.ndarray)) and np.ndim(points) == 1:
                return int(_nearest_of(centroids, [points])[0])
            return _nearest_of(centroids, points)

        return predict

    @property
    def centroids(self) -> Floats:
        """The centroids, a row for each cluster."""
        centroids: Floats = self._fitted().parameters["centroids"]
        return centroids

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of points that were nearest to each centroid in the last round, before it moved."""
        counts: npt.NDArray[np.int64] = self._fitted().parameters["counts"]
        return counts

    @property
    def inertia(self) -> float:
        """The sum of the squared distances between points and centroids: of equally many centroids, lower is better.

        The distance of a point is the distance to the centroid that was nearest before the last move, at the place
        after this move. If no centroid moved, such as after a fit that ended by a ``tolerance`` of 0, this is the
        nearest centroid. The rounding error is relative to the sum of the squared distances to the mean of all points,
        which is larger.
        """
        return self._fitted().metrics.get("inertia", math.nan)

    def parameters(self) -> dict[str, Any]:
        """Return copies of ``centroids`` and ``counts``. Raises ModelError before the first fit."""
        return {"centroids": self.centroids.copy(), "counts": self.counts.copy()}

    @property
    def rounds_made(self) -> int:
        """The number of rounds of the last fit; 0 before the first fit."""
        return self._rounds_made

    def _fitted(self) -> ModelSnapshot:
        if self._model is None:
            raise ModelError("KMeans: expected a fitted model, given one without a fit; call fit(points)")
        return self._model
