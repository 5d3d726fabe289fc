"""Linear models trained by workers that share their weights through a parameter server."""

from __future__ import annotations

from typing import Any, Final, Literal

from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream
from streamiter.learn.estimators.sources import labelled
from streamiter.learn.linear.losses import LogLoss, SquaredLoss
from streamiter.learn.on_parameter_server.flow import REPEAT_MEMORY_BYTES, ParameterServerTraining, trained
from streamiter.learn.on_parameter_server.linear_learner import Labels, LinearLearner
from streamiter.learn.on_parameter_server.mini_batches import Prepare
from streamiter.learn.on_parameter_server.options import (
    check_bounded,
    check_consistency,
    check_dtype,
    check_server,
    check_worker,
    count_of,
)
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker
from streamiter.learn.rows.examples import CheckedExamples, Extract, as_examples
from streamiter.operators.rejection import RejectionPolicy
from streamiter.optimizers import FTRL, Optimizer, checked_optimizer
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.matrix import DType
from streamiter.parameter_server.server import ParameterServer
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = ["train_on_parameter_server"]

_OWNER: Final = "train_on_parameter_server"

_LOSSES: Final = ("log", "squared")


@all_or_nothing
def train_on_parameter_server(
    examples: Stream,
    server: ParameterServer,
    *,
    features: int,
    consistency: Consistency,
    matrix: str = "w",
    optimizer: Optimizer | None = None,
    loss: Literal["log", "squared"] = "log",
    labels: Labels = "0/1",
    intercept: bool = True,
    extract: Extract | None = None,
    batch: int = 100,
    epochs: int = 1,
    workers: int | None = None,
    publish_every: int | None = None,
    dtype: DType = "float64",
    worker: type[ParameterServerWorker] = ParameterServerWorker,
    memory_bytes: int = REPEAT_MEMORY_BYTES,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> ParameterServerTraining:
    """Train a linear model whose weights lie on a parameter server: logistic, or with ``"squared"`` linear regression.

    Each of the ``workers`` (as many as ``examples`` has subtasks, unless said otherwise) has a part of the examples,
    and goes through it ``epochs`` times in mini-batches of ``batch`` rows: it pulls the weights of the features that
    are there, pushes the gradient, and clocks. When its part has ended it leaves. ``consistency`` says who waits:

    - ``BSP()``: one step for a mini-batch of each worker, with the mean of their gradients (one that is shorter, or
      missing, counts less). Neither timing nor the number of shards changes more than the last digits of the result.
    - ``ASP()``: a step for every mini-batch, with the mean of its rows' gradients, and nobody waits.
    - ``SSP(staleness=s)``: the same, and nobody is more than s mini-batches ahead of the slowest.

    ``matrix`` is made with ``features`` columns and one for the intercept (l1 and l2 of the ``optimizer`` act on that,
    too). The optimizer runs on the server, and changes only weights whose features are there; it is
    ``FTRL(alpha=0.3, beta=0.1)`` unless given. ``extract(records)`` makes :class:`Examples` of a list of records; the
    records of libsvm and dummy files are understood without. ``labels`` says which targets come, ``"0/1"`` or
    ``"-1/1"``.

    The server is the training's own for as long as the flow runs. The matrix outlives it: another flow with the same
    settings goes on from what it holds.

    The first worker gives a version of the model after every ``publish_every`` of its clocks, and the last one comes
    when all have left. Each worker keeps its mini-batches for later epochs, up to ``memory_bytes`` in memory, then on
    disk. With one epoch the stream may be endless. ``worker`` is a class derived from :class:`ParameterServerWorker`,
    where more is to happen for each mini-batch. Rows that are no examples follow ``on_error`` or go to
    ``dead_letter``. ``name`` stands before the names of the steps.

    Raises GraphError for what cannot run; a job without examples fails.

    >>> import numpy as np
    >>> from streamiter import Flow
    >>> from streamiter.learn import Examples
    >>> from streamiter.parameter_server import BSP, ParameterServer
    >>> flow = Flow("parity")
    >>> rows = flow.from_items(np.array([[0.0, 1.0], [1.0, 0.0]] * 4))
    >>> training = train_on_parameter_server(
    ...     rows, ParameterServer(shards=2), features=2, consistency=BSP(), workers=2, batch=2, epochs=20,
    ...     extract=lambda records: Examples(np.array(records), np.array(records)[:, 0]),
    ... )
    >>> models = training.models.collect()
    >>> flow.run().state, [model.parameters["weights"].round().tolist() for model in models.items]
    ('finished', [[2.0, -2.0]])
    """
    check_stream(_OWNER, examples, "examples")
    check_server(_OWNER, server, examples.flow)
    check_consistency(_OWNER, consistency)
    check_dtype(_OWNER, dtype)
    check_worker(_OWNER, worker)
    _check_kinds(loss, labels, extract)
    epochs = count_of(_OWNER, "epochs", epochs)
    batch = count_of(_OWNER, "batch", batch)
    workers = examples.parallelism if workers is None else count_of(_OWNER, "workers", workers)
    memory_bytes = count_of(_OWNER, "memory_bytes", memory_bytes)
    if publish_every is not None:
        publish_every = count_of(_OWNER, "publish_every", publish_every)
    check_bounded(_OWNER, examples, epochs)
    learner = LinearLearner(
        matrix=matrix,
        features=count_of(_OWNER, "features", features),
        intercept=bool(intercept),
        loss=LogLoss() if loss == "log" else SquaredLoss(),
        labels=labels,
        optimizer=_optimizer(optimizer),
        consistency=consistency,
        dtype=dtype,
        rows_in_step=batch * workers,
    )

    def checked(records: Batch) -> CheckedExamples:
        if extract is None:
            return learner.checked(_OWNER, labelled(_OWNER, records, learner.features))
        return learner.checked(_OWNER, as_examples(f"{_OWNER}(extract=)", extract(records)))

    label = step_names(examples.flow, name)
    mini_batches = examples.batch(batch, parallelism=workers, name=label("mini-batches")).process(
        lambda: Prepare(checked, intercept=learner.intercept),
        name=label("prepare"),
        on_error=on_error,
        dead_letter=dead_letter,
    )
    return trained(
        mini_batches,
        learner,
        server,
        owner=_OWNER,
        epochs=epochs,
        publish_every=publish_every,
        worker=worker,
        memory_bytes=memory_bytes,
        label=label,
    )


def _optimizer(given: Optimizer | None) -> Optimizer:
    if given is None:
        return FTRL(alpha=0.3, beta=0.1)  # As LogisticRegression has it.
    try:
        return checked_optimizer(_OWNER, given)
    except ConfigurationError as error:
        raise GraphError(str(error)) from None


def _check_kinds(loss: Any, labels: Any, extract: Any) -> None:
    if loss not in _LOSSES:
        raise GraphError(f'{_OWNER}(loss=): expected "log" or "squared", given {loss!r}; choose one of them')
    if labels not in ("0/1", "-1/1"):
        raise GraphError(f'{_OWNER}(labels=): expected "0/1" or "-1/1", given {labels!r}; choose one of them')
    if extract is not None:
        expected = "a function that makes Examples of records"
        check_function(extract, f"{_OWNER}(extract=)", ["records"], expected=expected)
