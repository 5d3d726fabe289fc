"""Online training as part of a flow: an unbounded iteration around a parameter owner and its workers.

The variable stream carries the parameters: the start, then what the owner feeds back. Workers bring them
together with their examples and send gradients to the owner, which makes a step of each as it comes
(asynchronous), or in the callback of each epoch one of all of them (synchronous).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.stamping import epochs_every
from streamiter.iteration.unbounded import iterate_unbounded_streams
from streamiter.learn.linear.losses import LogLoss
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.linear.parameter_owner import MODELS, check_makes_model
from streamiter.learn.online.delayed_labels import DelayedGradientWorker, DelayedLabels
from streamiter.learn.online.gradient_worker import PREDICTIONS, GradientWorker, WorkerOptions
from streamiter.learn.online.owners import AsynchronousOwner, SynchronousOwner
from streamiter.learn.rows.examples import Examples, Extract
from streamiter.learn.validation.validate import Validate
from streamiter.numbers import whole_number
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.topics.topic import Topic

__all__ = ["OnlineTraining", "train_online"]


@dataclass(frozen=True)
class OnlineTraining:
    """What :func:`train_online` gives."""

    models: Stream
    """A ``ModelSnapshot`` for each published version: ``models.publish_model(topic, model=…)``."""
    validation: Stream
    """Metrics of progressive validation, a dict now and then (see ``ProgressiveValidation``)."""


@all_or_nothing
def train_online(
    examples: Stream,
    model: Callable[[], LinearModel],
    *,
    extract: Extract | None = None,
    labels: DelayedLabels | None = None,
    mini_batch: int = 100,
    mode: Literal["asynchronous", "synchronous"] = "asynchronous",
    initial: Stream | None = None,
    publish_every: int = 1,
    window: int = 10_000,
    report_every: int = 10_000,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> OnlineTraining:
    """Train a linear model on a stream, for as long as it flows.

    ``model()`` makes the (same) model for the owner and each worker. ``extract(mini_batch)`` gives the
    :class:`Examples` of a mini-batch of ``mini_batch`` records of one worker; or, where labels come later
    than questions, ``labels`` tells the two apart. ``initial`` is a stream of one record to start from:
    parameters, bare weights, or None.

    ``"asynchronous"``: every mini-batch's gradient goes to the owner at once, and workers go on with the
    parameters they have, for eight mini-batches at most.
    ``"synchronous"``: the owner makes one step of the gradients of one mini-batch of each worker, and the
    workers wait for it; the result does not depend on timing. An epoch is ``mini_batch`` records of each
    subtask of ``examples``: one that has partitions but no records holds the others up, so read a topic with
    quiet partitions with ``parallelism=1``.

    Rows that are no examples follow ``on_error`` or go to ``dead_letter``. ``name`` stands before the names
    of the steps, for a flow with more than one training.
    """
    _check_options(examples, model, mode, extract, labels)
    publish_every = whole_number("train_online(publish_every=)", publish_every, 1, error=GraphError)
    window = whole_number("train_online(window=)", window, 1, error=GraphError)
    report_every = whole_number("train_online(report_every=)", report_every, 1, error=GraphError)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = WorkerOptions(model, extract or _no_examples, synchronous)
    owner = SynchronousOwner if synchronous else AsynchronousOwner
    data = epochs_every(examples, records=mini_batch, name=label("epochs")) if synchronous else examples
    if config is None:
        config = IterationConfig(max_epochs_ahead=0 if synchronous else None, name=name)

    def make_worker() -> GradientWorker:
        return GradientWorker(options) if labels is None else DelayedGradientWorker(options, labels)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0] if labels is None else data[0].key_by(labels.key_of)
        mini_batches = rows.batch(mini_batch, parallelism=workers, name=label("mini-batches"))
        gradients = connect(model=variables[0].broadcast(), examples=mini_batches).process(
            make_worker, name=label("train"), on_error=on_error, dead_letter=dead_letter
        )
        parameters = connect(start=variables[0], gradients=gradients.rebalance()).process(
            lambda: owner(model, publish_every), name=label("parameters"), parallelism=1
        )
        return IterationBodyResult(
            feedback_variable_streams=[parameters],
            output_streams=[parameters.side_output(MODELS), gradients.side_output(PREDICTIONS)],
        )

    if initial is None:
        start = flow.from_items([None], name=label("start"), parallelism=1)
    else:
        start = initial.process(OneStart, name=label("initial"), parallelism=1)
    models, predictions = iterate_unbounded_streams([start], [data], body, config)
    kind: Literal["classification", "regression"] = (
        "classification" if isinstance(model().loss, LogLoss) else "regression"
    )
    validation = predictions.process(
        lambda: Validate(kind, window=window, report_every=report_every),
        name=label("validate"),
        parallelism=1,
    )
    return OnlineTraining(models, validation)


class OneStart(Operator):
    """Passes on the one record that training starts from."""

    def __init__(self) -> None:
        self._passed = 0

    def process(self, parameters: Any, out: Output) -> None:
        """Refuse a second one: the owner and the workers would go on from different ones."""
        self._passed += 1
        if self._passed > 1:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given a second; choose the one to start from"
            )
        out.emit(parameters)

    def finish(self, out: Output) -> None:
        if not self._passed:
            raise ConfigurationError(
                "train_online(initial=): expected a stream of one record, given none; give None as the record to start "
                "as the model was made"
            )

    def snapshot(self) -> int:
        return self._passed

    def restore(self, state: int) -> None:
        self._passed = state


def _check_options(
    examples: Any, model: Any, mode: Any, extract: Extract | None, labels: DelayedLabels | None
) -> None:
    check_stream("train_online", examples, "examples")
    check_makes_model("train_online", model)
    if (extract is None) == (labels is None):
        raise GraphError(
            f"train_online: expected one of extract= and labels=, given {'neither' if extract is None else 'both'}; "
            "give extract= where an event has its label, labels= where labels come later"
        )
    if extract is not None:
        check_function(extract, "train_online(extract=)", ["mini_batch"])
    if labels is not None:
        for option, takes in (
            ("key_of", "event"),
            ("is_answer", "event"),
            ("features", "events"),
            ("target_of", "event"),
        ):
            check_function(getattr(labels, option), f"DelayedLabels({option}=)", [takes])
    if mode not in ("asynchronous", "synchronous"):
        raise GraphError(
            f'train_online: expected mode "asynchronous" or "synchronous", given {mode!r}; choose one of them'
        )


def _no_examples(mini_batch: object) -> Examples:
    raise NotImplementedError
