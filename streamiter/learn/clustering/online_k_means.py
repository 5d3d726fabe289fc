"""k-means on a stream: centroids that follow the points and forget old ones, a version for each mini-batch."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream, connect
from streamiter.learn.clustering.online_centroids import OnlineKMeans
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = ["online_k_means"]


@all_or_nothing
def online_k_means(
    points: Stream,
    *,
    clusters: int,
    decay: float = 1.0,
    mini_batch: int = 1000,
    timeout_s: float | None = None,
    initial: Stream | npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Centroids that follow a stream: a ``ModelSnapshot`` for each mini-batch, for ``publish_model``.

    What a mini-batch of ``mini_batch`` points changes is told by :class:`OnlineKMeans`. Fewer than that are learned
    from at the end of the input and ``timeout_s`` seconds after the first of them. All of it happens in one subtask;
    where several bring the points, which of them meet in a mini-batch depends on who is faster.

    ``initial`` are the centroids to begin with and ``weights`` what they weigh; or a stream of one record that holds
    both, such as ``flow.from_source(initial_model(…))``; its None stands for none. Without any they are chosen
    among the points of the first mini-batch. Records that are no points follow ``on_error`` or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("follow")
    >>> points = flow.from_items([[1.0], [9.0], [1.0], [9.0]])
    >>> models = online_k_means(points, clusters=2, decay=0.5, mini_batch=2, initial=[[0.0], [10.0]], weights=[2, 2])
    >>> versions = models.collect()
    >>> flow.run().state, [model.parameters["centroids"].ravel().tolist() for model in versions.items]
    ('finished', [[0.5, 9.5], [0.75, 9.25]])
    """
    check_stream("online_k_means", points, "points")
    flow = points.flow
    label = step_names(flow, name)
    given = None if isinstance(initial, Stream) else initial
    try:
        OnlineKMeans(clusters, decay=decay, initial=given, weights=weights, seed=seed)
    except ModelError as error:
        raise GraphError(f"online_k_means(initial=): {error}") from None
    except ConfigurationError as error:
        raise GraphError(f"online_k_means: {error}") from None

    def make() -> OnlineKMeans:
        return OnlineKMeans(clusters, decay=decay, initial=given, weights=weights, seed=seed)

    start = (
        initial if isinstance(initial, Stream) else flow.from_items([], name=label("start"), parallelism=1)
    )
    mini_batches = points.batch(mini_batch, timeout_s, parallelism=1, name=label("mini-batches"))
    return connect(start=start, points=mini_batches).process(
        lambda: _Learn(make()),
        name=label("centroids"),
        parallelism=1,
        on_error=on_error,
        dead_letter=dead_letter,
    )


class _Learn(Operator):
    """Takes over the centroids to begin with, then learns from each mini-batch and emits what came of it."""

    def __init__(self, model: OnlineKMeans) -> None:
        self._model = model
        self._is_started = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Nothing can be learned before it is known what from."""
        return None if self._is_started else ("start",)

    def process_start(self, parameters: Any, out: Output) -> None:
        if self._is_started:
            raise ConfigurationError(
                "online_k_means(initial=): expected a stream of one record, given a second; choose the one to "
                "start from"
            )
        self._is_started = True
        if parameters is not None:
            self._model.start_from(parameters)

    def input_ended(self, name: str, out: Output) -> None:
        self._is_started = True

    def process_points(self, mini_batch: Batch, out: Output) -> None:
        update = of_good_rows(
            lambda rows: blaming_rows(self._learned, rows, self._model.check), mini_batch, out
        )
        if update is not None:
            out.emit(update)

    def _learned(self, mini_batch: Any) -> ModelSnapshot:
        self._model.learn(mini_batch)
        return self._model.to_update()

    def snapshot(self) -> dict[str, Any]:
        return {"model": self._model.state(), "is started": self._is_started}

    def restore(self, state: dict[str, Any]) -> None:
        self._model.restore(state["model"])
        self._is_started = state["is started"]
