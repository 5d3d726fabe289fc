"""The table ``learn`` of a service's file: the label, the learner with its settings, and what fits what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, Final, get_args

from streamiter.errors import ConfigurationError
from streamiter.learn import AdaptiveLinearModel, Embeddings
from streamiter.learn.losses import LossName
from streamiter.learn.ready_made.row_columns import BITS_MAX
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.service.settings.labels import task_of
from streamiter.service.settings.tables import (
    ANSWER,
    ANSWERS_FIELD,
    READY_MADE,
    READY_MADE_OPTIONS,
    SERVICE_OPTIMIZERS,
    LabelSettings,
    label_value_of,
)
from streamiter.values.field_kinds import PARTS, TREND, part_of
from streamiter.values.numbers import plain_float
from streamiter.values.settings import (
    Setting,
    SettingsDocument,
    WrongValue,
    any_of,
    choice_of,
    duration_of,
    flag_of,
    items_of,
    number_of,
    setting_keys,
    size_of,
    text_of,
    whole_of,
)

_SETTINGS: Final = ("learn", "settings")
_NUMBER: Final = number_of("a number", lambda _: True)
_CROSSED_KINDS: Final = ("number", "category")
_PARTS: Final = (*PARTS, TREND)
_LABEL_KEYS: Final = setting_keys(LabelSettings, lambda name: name.removesuffix("_s")) | {
    "field": Setting(text_of),
    "value": Setting(label_value_of),  # Or field, or neither if the answer itself is the label.
}


def check_learn(document: SettingsDocument, learn: dict[str, Any], *, has_answers: bool) -> None:
    """Read the tables below learn, and add what is wrong in them. ``has_answers``: in a topic of their own."""
    if "label" in learn:
        learn["label"] = _label(document, learn["label"], learn.get("kind"), has_answers=has_answers)
    label, learner = learn.get("label"), learn.get("learner", "default")
    if label is not None and label.event is not None and "weight" in learn:
        document.expect(("learn", "weight"), "no weight with labels that come later", "leave one of them out")
    # A question may have a field of the label's name, and a field that a comparison reads may be known in time.
    name = label.value if label is not None and label.event is None else None
    crosses = document.value((*_SETTINGS, "crosses"))
    crossed = {each for pair in crosses for each in pair} if _is_pairs(crosses) else set[str]()
    for path, is_there in (
        (("learn", "features", str(name)), (learn.get("features") or {}).get(name, "ignore") != "ignore"),
        (("learn", "kinds", str(name)), (learn.get("kinds") or {}).get(name, "ignore") != "ignore"),
        ((*_SETTINGS, "crosses"), name in crossed),
    ):
        if isinstance(name, str) and is_there:
            document.refuse(path, "expected fields without the field of the label, given it; leave it out")
    if learn.get("kinds") and learn.get("features") is not None:
        document.expect(("learn", "kinds"), 'no kinds, unless features = "all"', "give them in features")
    if "negatives" in learn:
        _check_negatives(document, learn)
    if document.is_wrong(("learn", "learner")):
        return  # What it needs is not known.
    if learner in READY_MADE:
        keys = _DEFAULT_KEYS if learner == "default" else _NETWORK_KEYS
        learn["learner_settings"] = document.table(_SETTINGS, keys)
        if learner == "network":
            _check_network(document, learn)
        _check_ready_made(document, learn)
        kinds = learn.get("features")
        known = [name for name, kind in (kinds or {}).items() if kind in _CROSSED_KINDS]
        known += [part_of(name, part) for name, kind in (kinds or {}).items() if kind == "time" for part in _PARTS]
        if kinds is not None and (unknown := crossed.difference(known)):
            remedy = f"give {', '.join(sorted(unknown))} one of these kinds in features"
            document.expect((*_SETTINGS, "crosses"), "crosses of numbers and categories among the features", remedy)
        return
    kind = SERVICE_OPTIMIZERS[learner]
    names = signature(kind).parameters
    keys = {name: Setting(flag_of if name == "keep_start" else _NUMBER) for name in names} | _LINEAR_KEYS
    given = document.table(_SETTINGS, keys)
    document.check_options(_SETTINGS, {name: given[name] for name in given if name in names}, kind)
    refusals = {
        "learner": ("default for multiclass", learn.get("kind") == "multiclass", 'write "default"'),
        "features": (
            f'a table of fields for "{learner}"',
            learn.get("features") is None,
            'write the kind of each field, or learner = "default"',
        ),
        "drift": (f'no detector with "{learner}"', "drift" in learn, 'leave it out, or write learner = "default"'),
    }
    if document.names(("watch",)):
        document.expect(("watch",), f'no table with "{learner}"', 'leave it out, or write learner = "default"')
    for key, (expected, is_refused, remedy) in refusals.items():
        if is_refused and not document.is_wrong(("learn", key)):
            document.expect(("learn", key), expected, remedy)


def _check_negatives(document: SettingsDocument, learn: dict[str, Any]) -> None:
    """Read the table of negatives; refuse labels of events, which are choices then, and items without a feature."""
    path, label = ("learn", "negatives"), learn.get("label")
    learn["negatives"] = document.table(path, _NEGATIVE_KEYS)
    item, features = learn["negatives"].get("item", ()), learn.get("features")
    if learn.get("kind", "classification") != "classification":
        document.expect(("learn", "kind"), '"classification" with negatives', "change it, or leave negatives out")
    if label is not None and (label != LabelSettings(label.value) or not isinstance(label.value, str)):
        remedy = 'write { field = "chosen" }, or leave negatives out'
        document.expect(("learn", "label"), "the name of a new field with negatives", remedy, given="labels of events")
    if label is not None and label.field in item:
        document.expect((*path, "item"), "fields without that of the label", "give the label the name of a new field")
    if item and features is not None and not set(item).intersection(features):
        document.expect((*path, "item"), "a field of the features", "add a field of the item to the features")


def _check_network(document: SettingsDocument, learn: Mapping[str, Any]) -> None:
    """Refuse embeddings that expire by times that no event has, and layers that are not used."""
    given, label = learn["learner_settings"], learn.get("label")
    if "network" in given:
        _read_network(document, given)
    document.check_options(_SETTINGS, {name: given[name] for name in given if name in _EMBEDDING_KEYS}, Embeddings)
    if label is not None and label.event is None:
        document.check_needs(_SETTINGS, {"expire": "time"})
    if given.get("kind") == "fm" and "hidden" in document.names(_SETTINGS):
        document.expect((*_SETTINGS, "hidden"), 'no layers with kind = "fm"', "leave one of them out")


def _check_ready_made(document: SettingsDocument, learn: Mapping[str, Any]) -> None:
    given, kind = learn["learner_settings"], learn.get("kind")
    options = {name: given[name] for name in given if name in READY_MADE_OPTIONS}
    task = None if kind is None else task_of(kind)
    document.check_options(_SETTINGS, options, partial(AdaptiveLinearModel, task=task))


def _read_network(document: SettingsDocument, settings: dict[str, Any]) -> None:
    """Replace the name of the file of a network by the kind and the sizes that it has."""
    path = (*_SETTINGS, "network")
    if given := [name for name in ("kind", "factors", "hidden") if name in settings]:
        document.expect(path, f"network without {', '.join(given)}, which the file says", "leave one of them out")
    from streamiter.networks.embeddings import embeddings_from

    try:
        found = embeddings_from(settings.pop("network"))
    except ConfigurationError as error:
        document.refuse(path, f"expected the file of a network, given {error}")
        return
    settings |= {"kind": found.kind, "factors": found.factors, "hidden": list(found.hidden)}


def _scales_of(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping) and all(
        type(scale) in (int, float) and 0.0 < plain_float(scale) < math.inf for scale in value.values()
    ):
        return dict(value)
    raise WrongValue("a table of fields with a scale above 0 for each", "write { distance = 0.001 }")


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in value
    )


def _crosses_of(value: Any) -> list[tuple[str, str]]:
    if _is_pairs(value):
        return [(first, second) for first, second in value]
    raise WrongValue("pairs of fields", 'write [["carrier", "dest"]]')


def _item_of(value: Any) -> list[str]:
    return [text_of(value)] if isinstance(value, str) else items_of(text_of, "fields of an item")(value)


_NEGATIVE_KEYS: Final = {
    "item": Setting(_item_of, is_required=True),
    "each": Setting(whole_of(1, 1_000)),
    "items": Setting(whole_of(2, 10_000_000)),
}
_LINEAR_KEYS: Final = {
    "bits": Setting(whole_of(1, BITS_MAX)),
    "scales": Setting(_scales_of),
    "mini_batch": Setting(whole_of(1)),
}
_READY_MADE_KEYS: Final = {
    "mini_batch": Setting(whole_of(1)),
    "crosses": Setting(_crosses_of),
    "bits": Setting(any_of),
    "shapes": Setting(flag_of),
}
_EMBEDDING_KEYS: Final = {
    "kind": Setting(choice_of(*get_args(EmbeddingKind))),
    "factors": Setting(any_of),
    "hidden": Setting(any_of),
    "admit": Setting(any_of),
    "expire": Setting(duration_of),
    "at_most": Setting(size_of),
    "time": Setting(text_of),
}
_NETWORK_KEYS: Final = _READY_MADE_KEYS | {"network": Setting(text_of)} | _EMBEDDING_KEYS
_DEFAULT_KEYS: Final = _READY_MADE_KEYS | {"loss": Setting(choice_of(*get_args(LossName))), "quantile": Setting(any_of)}


def _label(document: SettingsDocument, given: Any, kind: str | None, *, has_answers: bool) -> LabelSettings | None:
    """Return the settings of the label; None if it has problems. ``has_answers``: in a topic of their own."""
    path = ("learn", "label")
    if not isinstance(given, Mapping):
        document.expect(path, "a table", 'write { field = "late" }, or { value = "delay > 15" }')
        return None
    label = document.table(path, _LABEL_KEYS)
    if has_answers:
        for name in ("event", "event_field", "question"):
            if name in given:
                document.expect(
                    (*path, name), "it without input.answers only", "leave it out: the topic tells what is an answer"
                )
        label |= {"event": ANSWER, "event_field": ANSWERS_FIELD}
    # A kind that is wrong has its own error.
    is_answered = "event" in label and kind in ("classification", None) and label.get("otherwise") is False
    if is_answered and "field" not in given and "value" not in given:
        label["value"] = FieldComparison(label.get("event_field", "event"), "==", label["event"])
    elif len([name for name in ("field", "value") if name in given]) != 1:
        both = "both" if "field" in given else "none"
        remedy = 'write { field = "late" }'
        if "event" in label and kind == "classification":
            remedy += ", or otherwise = false, so that each answer is true"
        document.expect(path, "field or value", remedy, given=both)
    if kind == "regression" and isinstance(label.get("value"), FieldComparison):
        expected = "a field for a regression"
        document.expect((*path, "value"), expected, 'write kind = "classification", or the field')
    if has_answers and "key" not in given:
        document.expect(
            (*path, "key"), "it with input.answers", "add the field that an answer shares with its question"
        )
    elif ("event" in label) != ("key" in given):
        missing = "event" if "key" in given else "key"
        remedy = (
            "event says which records are answers, and key which field they share with their question; answers in a "
            "topic of their own need input.answers instead of event"
        )
        document.expect((*path, missing), "event and key together", remedy, given=f"no {missing}")
    needs = {"event_field": "event", "question": "event", "within": "event", "time": "within", "otherwise": "within"}
    document.check_needs(path, needs | {"schedule": "within"}, also=["event"] if has_answers else [])
    if "positive" in given and (kind != "classification" or "field" not in given):
        document.expect(
            (*path, "positive"),
            "it with the field of a classification only",
            "leave it out; a comparison says what is true",
        )
    if "otherwise" in label and kind is not None and not _fits(kind, label["otherwise"]):
        remedy = {"classification": "false, without quotes", "regression": "a number"}.get(
            str(kind), "one of its labels"
        )
        document.expect((*path, "otherwise"), f"a label of a {kind}", f"write {remedy}")
    if "field" in label:
        label["value"] = label.pop("field")
    return LabelSettings(**label) if "value" in label else None


def _fits(kind: str, label: object) -> bool:
    """Whether a label that the file gives fits the kind."""
    if kind == "classification":
        return isinstance(label, (bool, str))
    return type(label) in ((int, float) if kind == "regression" else (int, str))
