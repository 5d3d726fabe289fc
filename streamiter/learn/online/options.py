"""The options of ``train_online``: what is checked of them before a step is added to the flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.flow.graph_checks import check_user_function
from streamiter.learn.gradients.features import StandardScaler
from streamiter.learn.gradients.linear import LinearModel
from streamiter.learn.gradients.training import MakeModel
from streamiter.learn.late_labels.delayed_labels import DelayedLabels, check_labels
from streamiter.learn.losses import checked_loss
from streamiter.learn.online.foreign_models import ForeignModel
from streamiter.learn.quality.drift import DriftDetector
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.rows import Extract
from streamiter.values.crossed_rows import checked_crosses, crossed_fields
from streamiter.values.numbers import one_of


def check_way_of_training(
    mode: object, label: object, features: object, weight: object, extract: Extract | None, labels: DelayedLabels | None
) -> None:
    """Raise GraphError unless label, features, weight, mini-batches and mode are given as one way of training needs."""
    given = [
        name for name, value in (("label=", label), ("extract=", extract), ("labels=", labels)) if value is not None
    ]
    if len(given) != 1:
        raise GraphError(
            f"train_online: expected one of label=, extract= and labels=, given {' and '.join(given) or 'none'}; give "
            "label= or extract= where an event has its label, labels= where labels come later"
        )
    if label is None and not (features is None and weight is None):
        raise GraphError(
            f"train_online: expected features= and weight= with label= only, given {given[0]}; "
            "extract= and labels= say themselves what the features are"
        )
    for option, value in (("label", label), ("weight", weight)):
        if callable(value):
            check_user_function(value, f"train_online({option}=)", ["record"])
        elif value is not None and not isinstance(value, str):
            raise GraphError(f"train_online({option}=): expected the name of a field or a function, given {value!r}")
    _check_features("train_online(features=)", features, "mini_batch")
    if isinstance(label, str) and isinstance(features, (list, tuple)) and label in features:
        raise GraphError(
            f"train_online(features=): expected fields without the field of the label, given {label!r}, which is "
            "label=; a model that knows the label learns nothing else, so leave it out"
        )
    if extract is not None:
        check_user_function(extract, "train_online(extract=)", ["mini_batch"])
    if labels is not None:
        check_labels(labels)
        _check_features("DelayedLabels(features=)", labels.features, "questions")
    one_of("train_online(mode=)", mode, "asynchronous", "synchronous", error=GraphError)


def check_drift(drift: object, on_drift: object, model: object, *, is_by_row: bool) -> None:
    """Raise GraphError for a detector, or an action at a drift, that the model cannot have."""
    one_of("train_online(on_drift=)", on_drift, "report", "raise rates", error=GraphError)
    if on_drift == "raise rates" and (drift is None or isinstance(model, ForeignModel)):
        given = "no drift=" if drift is None else "a ForeignModel"
        raise GraphError(
            f'train_online(on_drift="raise rates"): expected drift= and a model that learns row by row with rates of '
            f"AdaGrad, given {given}; use AdaptiveLinearModel, or act on the stream drifts"
        )
    if not isinstance(drift, (DriftDetector, type(None))):
        raise GraphError(
            f"train_online(drift=): expected ADWIN(…) or PageHinkley(…), given {drift!r}; write drift=ADWIN()"
        )
    if drift is not None and not is_by_row:
        raise GraphError(
            "train_online(drift=): expected a model that learns row by row, given model= of a fixed number of "
            "features; leave out model=, or watch the stream predictions with DriftWatch"
        )


def check_times(model: AdaptiveLinearModel, *, is_timed: bool) -> None:
    """Raise GraphError for embeddings that expire where rows have no time."""
    embeddings = model.embeddings
    if embeddings is not None and embeddings.expire_ms and embeddings.time is None and not is_timed:
        raise GraphError(
            "train_online(embeddings=): expected time=, the field of the time of a row, since embeddings expire, given "
            "none; give Embeddings(expire=…, time=…), or labels that come later in event time, whose questions have a "
            "time"
        )


def scaling(model: object, scaler: object, *, is_by_row: bool) -> MakeModel:
    """Return a function that makes the model, with features scaled."""
    if is_by_row or not isinstance(scaler, StandardScaler):
        raise GraphError(
            "train_online(scaler=): expected StandardScaler() and model= that makes a LinearModel, given "
            f"{'another model' if isinstance(scaler, StandardScaler) else shortened(scaler)}; the ready-made model "
            "standardizes its columns itself, and a model of another library has a scaler of its library"
        )
    make, start = cast(MakeModel, model), scaler.moments

    def make_scaled() -> LinearModel:
        made = make()
        made.scale(start)
        return made

    make_scaled()  # A scaler of another width is refused at the user's line.
    return make_scaled


_INSTEAD_OF: Final = {
    "crosses": ", or use FeatureHasher(crosses=…) for features",
    "loss": ", or LinearModel(…, loss=QuantileLoss(0.9))",
}


def check_ready_made(given: Mapping[str, Any], quantile: float | None, model: object, features: object) -> None:
    """Check the options of the ready-made model: None where an option is not given."""
    try:
        checked_loss("train_online", given["loss"], quantile)
    except ConfigurationError as error:
        raise GraphError(str(error)) from None
    for option in [name for name, value in given.items() if value is not None]:
        if model is not None:
            raise GraphError(
                f"train_online({option}=): expected no model=, given one; write lambda: AdaptiveLinearModel({option}=…)"
                f"{_INSTEAD_OF.get(option, '')}"
            )
        if option in ("kinds", "time_zone") and callable(features):
            raise GraphError(
                f"train_online({option}=): expected the ready-made model and fields as features, given a function that "
                f"makes features; write lambda: AdaptiveLinearModel({option}=…), or leave it out"
            )
    if given["crosses"] is not None:
        fields = set(crossed_fields(checked_crosses("train_online", given["crosses"])))
        if isinstance(features, (list, tuple)) and (unknown := sorted(fields.difference(features))):
            raise GraphError(
                f"train_online(crosses=): expected fields of features=, given {', '.join(unknown)}; add them there"
            )


def _check_features(option: str, features: object, takes: str) -> None:
    if callable(features):
        check_user_function(features, option, [takes])
    elif features is not None and not (
        isinstance(features, (list, tuple)) and all(isinstance(name, str) for name in features)
    ):
        raise GraphError(f"{option}: expected the names of fields or a function, given {features!r}")
