"""Online training: ``train_online`` learns while a stream flows.

Online training is an unbounded iteration of workers and one *owner*, which has the model. There are three ways. The
ready-made model learns row by row: workers read the rows, and the owner learns. A model of another library learns in
the owner alone. For a linear model with a learning rate of its own, workers predict each mini-batch with the parameters
they have, and send its gradient to the owner; the parameters go back to the workers on the variable stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, cast

from streamiter.engine.graph.output import ByKey
from streamiter.errors import GraphError, shortened
from streamiter.flow.building import functions_before
from streamiter.flow.event_time import comes_from_join, is_labelled_by_join, numbers_of_event_time
from streamiter.flow.flow import all_or_nothing, check_stream, connect, step_names
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.stamping import epochs_every
from streamiter.learn.gradients.features import StandardScaler
from streamiter.learn.gradients.linear import LinearModel
from streamiter.learn.gradients.training import BroadcastSteps, EpochSteps, MakeModel, ParameterOwner, check_makes_model
from streamiter.learn.labels import Label, LearningTask
from streamiter.learn.late_labels.delayed_labels import (
    DelayedLabels,
    come_with_questions,
    in_order_of_events,
    labels_of_rows,
    with_schedule,
)
from streamiter.learn.late_labels.event_reading import EventReader
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.learn.losses import LossName
from streamiter.learn.model_owner import MODELS, OneStart, OwnerOptions, PublishSchedule
from streamiter.learn.online.foreign_models import ForeignModel, ForeignOwner, foreign_reader
from streamiter.learn.online.gradient_workers import (
    DelayedLabelsWorker,
    OnlineWorker,
    OnlineWorkerOptions,
    function_of_features,
)
from streamiter.learn.online.options import check_drift, check_ready_made, check_times, check_way_of_training, scaling
from streamiter.learn.online.row_training import RowOwner
from streamiter.learn.quality.drift import DRIFTS, DriftDetector
from streamiter.learn.quality.field_watch import FIELD_REPORTS, FieldWatch
from streamiter.learn.quality.validation import PREDICTIONS
from streamiter.learn.quality.validation_step import TrainingAdvice, Validate
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.learn.ready_made.label_fields import FieldsBefore, LabelFields
from streamiter.learn.ready_made.row_reading import (
    NumberMiniBatches,
    RowReader,
    extracted_rows,
    features_reader,
    labelled_rows,
    times_left_out,
)
from streamiter.learn.rows import Examples, Extract, Refusals
from streamiter.models.rollbacks import Rollbacks
from streamiter.operators.definitions import function_in_words
from streamiter.operators.operator import Operator
from streamiter.operators.output import RejectionPolicy
from streamiter.operators.steps import Identity
from streamiter.topics.topic import Topic
from streamiter.values.field_kinds import Kind
from streamiter.values.numbers import positive as above_zero
from streamiter.values.numbers import whole_number
from streamiter.values.records import BATCH_RECORDS
from streamiter.values.times import Seconds, in_seconds


@dataclass(frozen=True)
class OnlineTraining:
    """The streams that :func:`train_online` returns."""

    models: Stream
    """A ``ModelSnapshot`` for each published version: ``models.publish_model(topic, model=…)``."""
    validation: Stream
    """Metrics of progressive validation, one dict every ``report_every`` rows (see ``ProgressiveValidation``)."""
    predictions: Stream
    """``PredictedRows`` for each mini-batch with labels: its predictions, made before learning, targets and weights."""
    drifts: Stream
    """A ``DriftEvent`` for each drift that ``drift=`` finds: a dict of row, loss before and since, and detector."""
    fields: Stream
    """A ``FieldReport`` for each window of rows that ``watch=`` compares with its reference: a dict."""
    mini_batches: Stream | None = None
    """The numbered mini-batches of a training row by row, which ``train_online(beside=)`` learns from, too."""
    is_timed: bool = False
    """Whether they are in the order of event time."""


@all_or_nothing
def train_online(
    examples: Stream,
    model: MakeModel | Callable[[], AdaptiveLinearModel] | ForeignModel[Any] | None = None,
    *,
    label: str | Callable[[Any], Label] | None = None,
    features: Sequence[str] | Callable[[Any], Any] | None = None,
    weight: str | Callable[[Any], float] | None = None,
    task: LearningTask | None = None,
    loss: LossName | None = None,
    quantile: float | None = None,
    positive: Label = None,
    crosses: Sequence[tuple[str, str]] = (),
    kinds: Mapping[str, Kind] | None = None,
    time_zone: str | None = None,
    shapes: bool | None = None,
    embeddings: Embeddings | None = None,
    scaler: StandardScaler | None = None,
    extract: Extract | None = None,
    labels: DelayedLabels | None = None,
    mini_batch: int | None = None,
    mode: Literal["asynchronous", "synchronous"] = "asynchronous",
    initial: Stream | None = None,
    drift: DriftDetector | None = None,
    on_drift: Literal["report", "raise rates"] = "report",
    watch: FieldWatch | None = None,
    rollbacks: Rollbacks | None = None,
    beside: OnlineTraining | None = None,
    publish_every: int | PublishSchedule | None = None,
    publish_every_s: Seconds | None = None,
    publish_state: bool = False,
    window: int = 10_000,
    report_every: int = 10_000,
    report_every_s: Seconds | None = None,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
    advice: TrainingAdvice | None = None,
) -> OnlineTraining:
    """Train a linear model on a stream while the stream flows.

    ``label`` is the field of the label, or a function that returns the label of a record. ``features`` are the fields
    to learn from, or a function that returns a matrix or ``SparseRows`` for a mini-batch of records. None: all fields
    except label, weight, and the fields that a function of the label names, or reads of the first 1,000 records.
    ``weight`` is the field, or the function, of the sample weight. Instead of these, ``extract(mini_batch)`` may return
    the :class:`Examples` of a mini-batch, or ``labels`` says how to read labels that come later than their questions.

    Without a ``model`` this trains an :class:`~streamiter.learn.ready_made.adaptive.AdaptiveLinearModel` (``task``,
    ``positive``, ``crosses``, ``loss``, ``quantile``, ``kinds``, ``time_zone``, ``shapes``, ``embeddings``) row by row,
    in mini-batches of 4,096 rows, with ``labels`` of 8,192 events, or of the rows of 25 ms. ``model()`` may make
    another linear model, such as ``lambda: LogisticRegression(width)``, which makes one step for the mean gradient of a
    mini-batch (100 rows). The owner and each worker call ``model``, and must get equal models. A ``scaler``
    standardizes its features with the statistics of the rows so far; a scaler that has learned is a start. ``initial``
    is a stream of one record to start from: parameters, bare weights, or None.

    ``mode="asynchronous"``: the owner learns from each mini-batch as it arrives. A worker that computes gradients
    continues with the parameters it has, but waits while these lack three of its own gradients (two, if there are more
    than two workers).
    ``mode="synchronous"``: in each epoch, ``mini_batch`` records of each subtask of ``examples``, the owner learns from
    the subtasks in their order, or makes one step with the gradients of all workers; the result does not depend on
    timing. A subtask that receives no records blocks the others: read quiet partitions with ``parallelism=1``.

    A version is published after every ``publish_every`` mini-batches or epochs, or instead when ``publish_every_s``
    seconds have passed since the last one; ``publish_every`` may also be a
    :class:`~streamiter.learn.model_owner.PublishSchedule`, which may be changed while the job runs. None: after each of
    them; but asynchronous training row by row publishes ten times a second if ``mini_batch`` is None, too, and its
    version with tables waits for 250 rows, or for a second, and its version of many columns for a quarter as many rows.
    After a version that took longer than a quarter of a second, it waits four times as long, and not for a second.
    With ``publish_state``, for which it waits four times as long, a version carries the state of its learner, and of
    the drift detector: a training that starts from it continues exactly.

    Validation counts each prediction before the model learns from its row, over the last ``window`` rows too, and
    reports every ``report_every`` rows, or instead ``report_every_s`` seconds after a row; it warns once, in the log
    ``streamiter.learn``, of a model that is far worse than the mean. ``drift`` is a detector for a model that learns in
    the owner; updates have the metrics ``drifts`` and ``rows_since_drift``. ``on_drift="raise rates"``: after a
    mini-batch with a drift, the ready-made model multiplies its rates of AdaGrad by almost 6. ``watch`` compares the
    fields of rows that the ready-made model reads with those of the first rows. With
    ``rollbacks=Rollbacks(topic, model)`` the owner resumes from a version that :func:`~streamiter.models.roll_back`
    publishes again; a run without a checkpoint starts from the newest version since the last rollback, unless it is
    started with ``restore=None``. ``beside`` is another training of these ``examples``, row by row, too: this one
    learns from its mini-batches, so both number the rows alike, whenever this one joins. Rows that are not examples
    follow ``on_error`` or go to ``dead_letter``. ``name`` is put in front of the names of the steps.
    ``advice`` is what warnings say to check, for users who configure the training in another place than this call.

    Raises GraphError for options that cannot be used.

    >>> from streamiter import Flow
    >>> flow = Flow("trips")
    >>> trips = flow.from_items([{"km": 9 * (n % 7), "late": n % 7 > 3} for n in range(700)])
    >>> quality = train_online(trips, label="late").validation.collect()
    >>> flow.run().state, quality.items[-1]["accuracy"] > 0.95
    ('finished', True)
    """
    check_stream("train_online", examples, "examples")
    check_way_of_training(mode, label, features, weight, extract, labels)
    check_ready_made(
        {
            "positive": positive,
            "crosses": crosses or None,
            "loss": loss,
            "kinds": kinds,
            "time_zone": time_zone,
            "shapes": shapes,
            "embeddings": embeddings,
        },
        quantile,
        model,
        labels.features if labels else features or extract,
    )
    schedule = _schedule(publish_every, publish_every_s)
    window = whole_number("train_online(window=)", window, 1, error=GraphError)
    report_every = whole_number("train_online(report_every=)", report_every, 1, error=GraphError)
    if report_every_s is not None:
        report_every_s = above_zero("train_online(report_every_s=)", in_seconds(report_every_s))
    synchronous = mode == "synchronous"
    is_by_row = model is None or isinstance(model, ForeignModel) or _makes_adaptive(model)
    if mini_batch is None:
        mini_batch = _rows_of_mini_batch(model, is_by_row=is_by_row, synchronous=synchronous)
        if mini_batch == _ROWS_A_MINI_BATCH and publish_every is None and publish_every_s is None:
            schedule = PublishSchedule(every_s=_SECONDS_A_VERSION)
        if labels is not None and mini_batch == _ROWS_A_MINI_BATCH:
            mini_batch = 2 * _ROWS_A_MINI_BATCH  # A row that is learned has two events.
    if scaler is not None:
        model = scaling(model, scaler, is_by_row=is_by_row)
    flow = examples.flow
    named = step_names(flow, name)
    if config is None:
        config = IterationConfig(max_epochs_ahead=0 if synchronous else None, name=name)
    check_drift(drift, on_drift, model, is_by_row=is_by_row)
    if watch is not None and (not isinstance(watch, FieldWatch) or not is_by_row or isinstance(model, ForeignModel)):
        given = "another model" if isinstance(watch, FieldWatch) else shortened(watch)
        raise GraphError(f"train_online(watch=): expected FieldWatch(…) and the ready-made model, given {given}")
    if not isinstance(rollbacks, (Rollbacks, type(None))):
        raise GraphError(f"train_online(rollbacks=): expected Rollbacks(topic, model), given {shortened(rollbacks)}")
    learned = label or extract or cast(DelayedLabels, labels).target_of
    in_words = function_in_words(learned) if callable(learned) else f"field {learned!r}"
    owner = OwnerOptions(
        schedule, synchronous, drift, watch, on_drift == "raise rates", rollbacks, publish_state, in_words
    )
    is_timed, without = False, [field for field in (label, weight) if isinstance(field, str)]
    if label is not None and is_labelled_by_join(examples) and not isinstance(model, ForeignModel):
        labels = labels_of_rows(label, features, weight)
    elif labels is None and comes_from_join(examples):
        is_foreign = isinstance(model, ForeignModel)
        _log.warning(
            "train_online: the rows of %r have labels of a join by time, and %s learns them as they come: validation "
            "knows labels that came after the question; %s",
            examples.name,
            "extract=" if extract is not None else "a ForeignModel" if is_foreign else "a union",
            "only the model that train_online makes itself predicts them at their question"
            if is_foreign
            else "give label= and no other rows, or labels=DelayedLabels(…)",
        )
    options: dict[str, Any] = {
        "task": task,
        "positive": positive,
        "crosses": crosses,
        "loss": loss,
        "quantile": quantile,
    }
    if shapes is not None:
        options["shapes"] = shapes
    if embeddings is not None:
        options["embeddings"] = embeddings
    own = partial(AdaptiveLinearModel, **options, kinds=kinds, time_zone=time_zone)
    times = numbers_of_event_time(examples)
    if labels is not None:
        labels = with_schedule(labels, cast(MakeModel, model or own)())
    if beside is not None:
        _check_beside(beside, is_by_row=is_by_row and not isinstance(model, ForeignModel), synchronous=synchronous)
        examples, is_timed, workers = cast(Stream, beside.mini_batches), beside.is_timed, 1
    elif labels is not None:
        examples, is_timed = in_order_of_events(examples, labels, named, synchronous=synchronous, in_columns=is_by_row)
    of_events = features if labels is None else labels.features
    before = FieldsBefore.of(learned, of_events, functions_before(examples))
    data = epochs_every(examples, records=mini_batch, name=named("epochs")) if synchronous else examples
    policy: Refusals = {"on_error": on_error, "dead_letter": dead_letter}
    shared = _TrainingOptions(mini_batch, workers, policy, labels, is_timed, owner, named, beside is not None)
    if isinstance(model, ForeignModel):
        if synchronous:
            raise GraphError(
                'train_online: expected the mode "asynchronous" with a ForeignModel, given "synchronous"; its one '
                "owner learns in the order of the stream, as long as the stream has parallelism=1"
            )
        if label is None:
            raise GraphError(
                "train_online: expected label= with a ForeignModel, given none; extract= and labels= are not for it"
            )
        body = _by_foreign(shared, model, label, features, weight, before)
    elif is_by_row:
        make_adaptive = cast(Callable[[], AdaptiveLinearModel], model or own)
        made = make_adaptive()
        check_times(made, is_timed=is_timed)
        if of_events is None and extract is None:
            without += times_left_out(times, made)
        named_fields = {} if callable(of_events) else {"features": of_events, **made.named_fields}

        def make_reader() -> Operator:
            if extract is not None:
                return RowReader(extracted_rows(extract), {})
            if labels is not None:
                made_of = LabelFields.of(label or labels.target_of, labels.features)
                noting = labels if made_of is None else replace(labels, target_of=made_of)
                read = features_reader(labels.features, without, made, made_of, before)
                return EventReader(noting, read, named_fields, is_timed=is_timed, made_of=made_of)
            assert label is not None
            made_of = LabelFields.of(label, features)
            read = features_reader(features, without, made, made_of, before)
            return RowReader(labelled_rows(read, made_of or label, weight), named_fields, made_of)

        body = _by_rows(shared, make_adaptive, make_reader)
    else:
        if label is not None:
            extract = _extract_of(label, features, weight)
        if labels is not None:
            function_of_features("DelayedLabels", labels.features)
            if labels.weight_of is not None:
                option = "train_online(weight=)" if weight is not None else "DelayedLabels(weight_of=)"
                raise GraphError(
                    f"{option}: expected none for labels that come later with model=, which learns each row with the "
                    "weight 1, given one; leave out model=, or the weight"
                )
        body = _by_gradients(shared, cast(MakeModel, model), extract)
    start = initial or flow.from_items([None], name=named("start"), parallelism=1)
    if initial is not None or rollbacks is not None:
        start = start.process(lambda: OneStart(rollbacks), name=named("initial"), parallelism=1)
    models, predictions, drifts, fields, *numbered = iterate_unbounded_streams([start], [data], body, config)
    validation = predictions.process(
        lambda: Validate(window=window, report_every=report_every, report_every_s=report_every_s, advice=advice),
        name=named("validate"),
        parallelism=1,
    )
    return OnlineTraining(models, validation, predictions, drifts, fields, numbered[0] if numbered else None, is_timed)


# A step with the mean gradient of more rows would be one step for all of them.
_ROWS_A_STEP: Final = 100

# A mini-batch costs as much time as a hundred rows more, with labels that come later as a thousand. A full batch of a
# topic leaves no rest, which would be a mini-batch of its own. On a slow stream its rows wait for at most this time: at
# 20,000 rows/s the owner then learns for 3 ms at a time, and predictions over HTTP wait no longer. In an epoch rows
# wait until the epoch is full.
_ROWS_A_MINI_BATCH: Final = BATCH_RECORDS // 2
_ROWS_AN_EPOCH: Final = 1_000
_SECONDS_A_MINI_BATCH: Final = 0.025
# A version costs as much time as some hundred rows, and much more where other programs read it.
_SECONDS_A_VERSION: Final = 0.1

_log = logging.getLogger("streamiter.learn")

TrainingBody = Callable[[list[Stream], list[Stream]], IterationBodyResult]


class _TrainingOptions(NamedTuple):
    """The options that all ways of training share."""

    mini_batch: int
    workers: int | None
    policy: Refusals
    labels: DelayedLabels | None
    is_timed: bool
    """Whether the stream has event time."""
    owner: OwnerOptions
    named: Callable[[str], str]
    is_beside: bool
    """Whether the data are the mini-batches of another training."""


def _schedule(publish_every: int | PublishSchedule | None, publish_every_s: Seconds | None) -> PublishSchedule:
    """Return when versions are published."""
    if publish_every is not None and publish_every_s is not None:
        raise GraphError("train_online: expected publish_every= or publish_every_s=, given both; choose one of them")
    if publish_every_s is not None:
        return PublishSchedule(every_s=above_zero("train_online(publish_every_s=)", in_seconds(publish_every_s)))
    if publish_every is None or isinstance(publish_every, PublishSchedule):
        return publish_every or PublishSchedule()
    every = whole_number("train_online(publish_every=)", publish_every, 1, error=GraphError)
    return PublishSchedule(mini_batches=every)


def _rows_of_mini_batch(model: object, *, is_by_row: bool, synchronous: bool) -> int:
    """Return how many rows a mini-batch has if the user does not say."""
    if not is_by_row or (isinstance(model, ForeignModel) and model.by == "mini-batch"):
        return _ROWS_A_STEP
    return _ROWS_AN_EPOCH if synchronous else _ROWS_A_MINI_BATCH


def _outputs(owner: Stream, predictions: Stream, *more: Stream) -> IterationBodyResult:
    """Return the feedback and the outputs of a loop."""
    return IterationBodyResult(
        feedback_variable_streams=[owner],
        output_streams=[
            owner.side_output(MODELS),
            predictions,
            owner.side_output(DRIFTS),
            owner.side_output(FIELD_REPORTS),
            *more,
        ],
    )


def _by_gradients(shared: _TrainingOptions, model: MakeModel, extract: Extract | None) -> TrainingBody:
    """Return the loop in which workers compute gradients, and the owner makes steps and sends parameters back."""
    labels, named = shared.labels, shared.named
    options = OnlineWorkerOptions(model, extract, shared.owner.in_epochs)

    def make_worker() -> OnlineWorker:
        return (
            OnlineWorker(options) if labels is None else DelayedLabelsWorker(options, labels, is_timed=shared.is_timed)
        )

    def make_owner() -> ParameterOwner:
        rule = EpochSteps() if shared.owner.in_epochs else BroadcastSteps()
        return ParameterOwner(model, rule, shared.owner)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        rows = data[0] if labels is None else _by_key(data[0], shared)
        mini_batches = rows.batch(shared.mini_batch, parallelism=shared.workers, name=named("mini-batches"))
        gradients = connect(model=variables[0].broadcast(), examples=mini_batches).process(
            make_worker, name=named("train"), **shared.policy
        )
        parameters = connect(start=variables[0], gradients=gradients.rebalance()).process(
            make_owner, name=named("parameters"), parallelism=1
        )
        predictions = gradients.side_output(PREDICTIONS)
        if shared.owner.in_epochs:
            # In the loop, one subtask gets the predictions of an epoch in the order of the workers. Outside they
            # would come as fast as each worker is, and the last bits of the metrics would depend on that.
            predictions = predictions.process(Identity, name=named("predictions in order"), parallelism=1)
        return _outputs(parameters, predictions)

    return body


def _by_key(events: Stream, shared: _TrainingOptions) -> Stream:
    """Send the questions and answers of one key to one subtask; the worker there refuses those without a key."""
    assert shared.labels is not None
    key_of = shared.labels.key_of
    if come_with_questions(shared.labels):
        return events.key_by(itemgetter(3))
    return events.partitioned(ByKey((lambda ordered: key_of(ordered[2])) if shared.is_timed else key_of, tolerant=True))


def _by_rows(
    shared: _TrainingOptions, make_model: Callable[[], AdaptiveLinearModel], make_reader: Callable[[], Operator]
) -> TrainingBody:
    """Return the loop in which workers read rows, and the owner learns row by row."""
    labels, named = shared.labels, shared.named
    timeout_s = None if shared.owner.in_epochs else _SECONDS_A_MINI_BATCH

    def make_owner() -> RowOwner:
        join = None if labels is None else LabelJoin(labels, is_timed=shared.is_timed)
        return RowOwner(make_model, shared.owner, join, joins_later=shared.is_beside)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        # Where labels come later, the owner handles the events in the order of the stream, so one subtask numbers them.
        one = None if labels is None else 1
        numbered = data[0]
        if not shared.is_beside:
            mini_batches = data[0].batch(shared.mini_batch, timeout_s, parallelism=one, name=named("mini-batches"))
            numbered = mini_batches.process(NumberMiniBatches, name=named("number"))
        divided = numbered if shared.workers is None else numbered.rebalance()
        rows = divided.process(make_reader, name=named("read"), parallelism=shared.workers, **shared.policy)
        owner = connect(start=variables[0], rows=rows.rebalance()).process(
            make_owner, name=named("learn"), parallelism=1, **shared.policy
        )
        return _outputs(owner, owner.side_output(PREDICTIONS), *([] if shared.is_beside else [numbered]))

    return body


def _by_foreign(
    shared: _TrainingOptions,
    model: ForeignModel[Any],
    label: str | Callable[[Any], Label],
    features: Sequence[str] | Callable[[Any], Any] | None,
    weight: str | Callable[[Any], float] | None,
    before: FieldsBefore | None,
) -> TrainingBody:
    """Return the loop in which the owner has a model of another library."""
    named = shared.named
    with_weight = ["weight"] if weight is not None else []
    check_user_function(model.learn, "ForeignModel(learn=)", ["model", "features", "label", *with_weight])
    check_user_function(model.predict, "ForeignModel(predict=)", ["model", "features"])

    def make_owner() -> ForeignOwner[Any]:
        made_of = LabelFields.of(label, features)
        read = foreign_reader(made_of or label, features, weight, before)
        return ForeignOwner(model, read, shared.owner, features, made_of)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mini_batches = data[0].batch(shared.mini_batch, _SECONDS_A_MINI_BATCH, name=named("mini-batches"))
        owner = connect(start=variables[0], rows=mini_batches.rebalance()).process(
            make_owner, name=named("learn"), parallelism=1, **shared.policy
        )
        return _outputs(owner, owner.side_output(PREDICTIONS))

    return body


def _extract_of(
    label: str | Callable[[Any], Label],
    features: Sequence[str] | Callable[[Any], Any] | None,
    weight: str | Callable[[Any], float] | None,
) -> Extract:
    """Return the function that makes the examples of a model with a fixed number of features."""
    read = labelled_rows(function_of_features("train_online", features), label, weight)
    return lambda mini_batch: Examples(*read(mini_batch))  # type: ignore[arg-type]  # The rows are no NamedRows.


def _makes_adaptive(model: object) -> bool:
    """Whether ``model`` makes a model that learns row by row."""
    of_others = "for a model of another library, or of your own, give a ForeignModel(…)"
    if not callable(model) and not isinstance(model, LinearModel):
        raise GraphError(f"train_online(model=): expected a function, given {shortened(model)}; {of_others}")
    check_makes_model("train_online", model)
    made = cast(Callable[[], object], model)()
    if not isinstance(made, (LinearModel, AdaptiveLinearModel)):
        raise GraphError(
            "train_online(model=): expected a function that makes a LinearModel, given one that makes "
            f"{shortened(made)}; {of_others}"
        )
    return isinstance(made, AdaptiveLinearModel)


def _check_beside(beside: OnlineTraining, *, is_by_row: bool, synchronous: bool) -> None:
    """Raise GraphError unless both trainings learn row by row, asynchronously, from mini-batches of one subtask."""
    numbered = beside.mini_batches
    if numbered is None or numbered.parallelism > 1 or not is_by_row or synchronous:
        raise GraphError(
            "train_online(beside=): expected two trainings of the ready-made model on a stream of one subtask, in the "
            f"mode asynchronous, given {'another model or mode' if numbered is not None else 'one of another model'}; "
            "leave model= and mode= out, or use compare_online for other learners"
        )
