"""Offline training as part of a flow: a bounded iteration around a parameter owner and its workers.

The workers keep their examples, or have them replayed. Synchronous, the owner makes a step in the callback of each
epoch, with the gradients of all workers; asynchronous, with each gradient as it comes, and answers the worker
that sent it. That is all there is between the two.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from streamiter.errors import GraphError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.bounded import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.replayed import replayed
from streamiter.iteration.terminate_after import terminate_after
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.linear.parameter_owner import MODELS, check_makes_model
from streamiter.learn.offline.owners import LOSSES, AsynchronousOfflineOwner, SynchronousOfflineOwner
from streamiter.learn.offline.workers import (
    AsynchronousWorker,
    OfflineExtract,
    OfflineWorkerOptions,
    ReplayingWorker,
    SynchronousWorker,
)
from streamiter.numbers import is_number, whole_number
from streamiter.operators.rejection import RejectionPolicy
from streamiter.topics.topic import Topic

__all__ = ["OfflineTraining", "train_offline"]


@dataclass(frozen=True)
class OfflineTraining:
    """What :func:`train_offline` gives."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and each n-th before it with ``publish_every=n``."""
    losses: Stream
    """For each step the mean loss before it."""


@all_or_nothing
def train_offline(
    examples: Stream,
    model: Callable[[], LinearModel],
    *,
    extract: OfflineExtract,
    rounds: int,
    mini_batch: int | None = None,
    tolerance: float | None = None,
    mode: Literal["synchronous", "asynchronous"] = "synchronous",
    replay: bool = False,
    publish_every: int | None = None,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> OfflineTraining:
    """Train a linear model on a bounded stream, in ``rounds`` rounds.

    ``model()`` makes the (same) model for the owner and each worker; any optimizer will do, the usual one is
    ``GradientDescent``. ``extract(batch)`` gives the :class:`Examples` of a batch of records.

    In each round every worker takes its share of the next ``mini_batch`` rows of all workers: the next of the rows it
    has, fewer at their end, and then from their beginning. None takes all rows. Training ends after ``rounds``
    rounds, or after the first in which the mean loss, before its step, was ``tolerance`` or less.

    ``"synchronous"``: one step a round, with the mean of all rows' gradients. The result does not depend on timing;
    nor does it, but for the last digits, on the number of workers, where all rows are taken, or where their number
    divides the mini-batch, the mini-batch the rows, and rows are dealt out in turn (``workers=`` does so).
    ``"asynchronous"``: a step for each worker's share as soon as it is there; the worker goes on with what came of it
    while others are still at theirs.

    Workers keep their examples in memory. With ``replay`` they are read through again in every round, from memory
    and beyond a limit from disk (``IterationConfig(replay_memory_bytes=…)``): synchronous only.

    Rows that are no examples follow ``on_error`` or go to ``dead_letter``. ``name`` stands before the names of the
    steps. Raises GraphError for what cannot run; a job without examples fails.
    """
    check_stream("train_offline", examples, "examples", bounded=True)
    check_makes_model("train_offline", model)
    check_function(
        extract, "train_offline(extract=)", ["batch"], expected="a function that makes Examples of a batch"
    )
    rounds = _count("rounds", rounds)
    workers = examples.parallelism if workers is None else _count("workers", workers)
    every = sys.maxsize if publish_every is None else _count("publish_every", publish_every)
    if mini_batch is not None:
        mini_batch = _checked_mini_batch(mini_batch, workers)
    _check_tolerance(tolerance)
    _check_mode(mode, replay)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = OfflineWorkerOptions(model, extract, mini_batch, rounds)

    def make_worker() -> SynchronousWorker | AsynchronousWorker | ReplayingWorker:
        if not synchronous:
            return AsynchronousWorker(options)
        return ReplayingWorker(options) if replay else SynchronousWorker(options)

    def make_owner() -> SynchronousOfflineOwner | AsynchronousOfflineOwner:
        if synchronous:
            return SynchronousOfflineOwner(model, every)
        return AsynchronousOfflineOwner(model, every, workers=workers, tolerance=tolerance)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [answers] = variables
        to_workers = answers.broadcast() if synchronous else answers.partition_by(_worker_of)
        gradients = connect(model=to_workers, examples=data[0]).process(
            make_worker, name=label("train"), parallelism=workers, on_error=on_error, dead_letter=dead_letter
        )
        # In the workers' task, where there is one of them only.
        owner = gradients.process(make_owner, name=label("parameters"), parallelism=1)
        losses = owner.side_output(LOSSES)
        criteria = None
        if synchronous:
            criteria = terminate_after(losses, rounds=rounds, tolerance=tolerance, name=label("rounds"))
        return IterationBodyResult([owner], [owner.side_output(MODELS), losses], criteria)

    starts = [None] if synchronous else [{"worker": worker, "parameters": None} for worker in range(workers)]
    start = flow.from_items(starts, name=label("start"), parallelism=1)
    given = replayed(examples) if replay else examples
    if config is None:
        config = (
            IterationConfig(name=name) if synchronous else IterationConfig(max_epochs_ahead=None, name=name)
        )
    models, losses = iterate_bounded_streams_until_termination([start], [given], body, config)
    return OfflineTraining(models, losses)


def _worker_of(answer: dict[str, Any]) -> int:
    worker: int = answer["worker"]
    return worker


def _count(option: str, count: Any) -> int:
    return whole_number(f"train_offline({option}=)", count, 1, error=GraphError)


def _checked_mini_batch(mini_batch: Any, workers: int) -> int:
    rows = _count("mini_batch", mini_batch)
    if rows < workers:
        raise GraphError(
            f"train_offline(mini_batch=): expected at least a row for each of {workers} workers, given {rows}; "
            "make it larger, or take fewer workers"
        )
    return rows


def _check_tolerance(tolerance: Any) -> None:
    if tolerance is not None and not (is_number(tolerance) and not math.isnan(tolerance)):
        raise GraphError(
            f"train_offline(tolerance=): expected a number, given {tolerance!r}; leave it out for none"
        )


def _check_mode(mode: Any, replay: bool) -> None:
    if mode not in ("synchronous", "asynchronous"):
        raise GraphError(
            f'train_offline: expected mode "synchronous" or "asynchronous", given {mode!r}; choose one of them'
        )
    if replay and mode == "asynchronous":
        raise GraphError(
            "train_offline(replay=): expected the mode synchronous, given asynchronous, whose workers go through their "
            "examples each at its own pace; leave replay out, or take the mode synchronous"
        )
