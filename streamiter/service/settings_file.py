"""The file of a service: ``read_settings`` returns its settings, or raises all its errors at once.

``changed`` compares two versions of the file, and says which settings apply while the service runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from streamiter.engine.storage.store import Checkpoints
from streamiter.errors import ConfigurationError
from streamiter.learn import Embeddings
from streamiter.learn.field_watch import ROWS_MIN
from streamiter.service.settings import (
    ANSWER,
    ANSWERS_FIELD,
    READY_MADE,
    SERVICE_OPTIMIZERS,
    FieldComparison,
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    ServiceSettings,
    WatchSettings,
    label_value_of,
    service_name_of,
    standby_of,
)
from streamiter.service.toml_document import toml_document
from streamiter.topics import topic
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
    shown_value,
    size_of,
    text_of,
    whole_of,
)

_KEY_NAMES: Final = {"learner_settings": "settings", "body_bytes_max": "body_max"}


def _key_of(field: str) -> str:
    return _KEY_NAMES.get(field) or field.removesuffix("_s")


TABLES: Final[Mapping[str, tuple[type[Any], Mapping[str, Setting]]]] = MappingProxyType(
    {
        "service": (
            ServiceSettings,
            {"name": Setting(service_name_of, is_required=True), "standby": Setting(standby_of, "standby_s")},
        )
    }
    | {
        name: (kind, setting_keys(kind, _key_of))
        for name, kind in get_type_hints(ServiceSettings).items()
        if name not in ("name", "standby_s", "source")
    }
)
"""The tables of the file: the class of each, and its keys."""

_LABEL_KEYS: Final = setting_keys(LabelSettings, _key_of) | {
    "field": Setting(text_of),
    "value": Setting(label_value_of),  # Or field, or neither if the answer itself is the label.
}


# ---- the whole file


def read_settings(given: str | os.PathLike[str] | Mapping[str, object]) -> ServiceSettings:
    """Return the settings of a file, of a TOML text, or of a dict with the same tables.

    A text with a line end is TOML, any other text is a path. Raises :class:`SettingsError` with all errors of the file,
    each with its line, and ``ConfigurationError`` for a file that cannot be read.

    >>> settings = read_settings('''
    ... service.name = "late-flights"
    ... input.topic = "memory://flights"
    ... learn = { kind = "classification", label = { field = "late" } }
    ... publish = { topic = "memory://model-updates", every = "500ms" }
    ... ''')
    >>> settings.publish.every_s, settings.http.address
    (0.5, '127.0.0.1:8080')
    """
    return read_document(given)[0]


def read_document(given: str | os.PathLike[str] | Mapping[str, object]) -> tuple[ServiceSettings, SettingsDocument]:
    """Return the settings, and the document with the place of each key."""
    document = _document(given)
    return _read(document), document


def _read(document: SettingsDocument) -> ServiceSettings:
    document.table((), {name: Setting(any_of) for name in TABLES})
    tables = {name: document.table((name,), _keys_of(name, document)) for name in TABLES}
    _check_watch(document, tables["watch"])
    _check_learn(document, tables["learn"], has_answers="answers" in tables["input"])
    _check_history(document, tables)
    _check_publish(document, tables["publish"])
    _check_http(document, tables["http"])
    _check_topics(document, tables)
    _check_challenger(document, tables)
    _check_store(document, tables)
    document.check()
    made = {name: kind(**tables[name]) for name, (kind, _) in TABLES.items() if name != "service"}
    return ServiceSettings(**tables["service"], **made, source=document.source)


def _keys_of(table: str, document: SettingsDocument) -> Mapping[str, Setting]:
    """Return the keys of a table. With a history, the topic that is read behind it is ``then``."""
    keys = TABLES[table][1]
    if table != "input" or {"history", "then"}.isdisjoint(document.names(("input",))):
        return keys
    return {"then": keys["topic"]} | {name: key for name, key in keys.items() if name not in ("topic", "start")}


def _check_history(document: SettingsDocument, tables: Mapping[str, Mapping[str, Any]]) -> None:
    given = document.names(("input",))
    label, path = tables["learn"].get("label"), ("input", "history")
    if "at" in given and {"history", "then"}.isdisjoint(given):
        document.expect(("input", "at"), "it with input.history only", "write start, or add the history")
    if "then" in given and "history" not in given:
        document.expect(path, "history and then together", "add the history, or write topic")
    for key in ("answers_history", "answers_at"):
        if (key in given) is not {"answers", "history"}.issubset(given):
            remedy = "answers in a topic of their own have a history of their own; add it, or leave it out"
            document.expect(("input", key), "it together with history and answers", remedy)
    if "history" not in given:
        return
    if "at" not in given:
        remedy = 'write at = [1200, 1180] for two partitions, a time, or "earliest" for all of the topic'
        document.expect(("input", "at"), "the place in the topic at which the history ends", remedy)
    if label is not None and label.event is not None and label.time is None:
        remedy = "add the field with the time of an event: files tell none"
        document.expect(("learn", "label", "time"), "it with input.history", remedy)


def _document(given: str | os.PathLike[str] | Mapping[str, object]) -> SettingsDocument:
    if isinstance(given, Mapping):
        return SettingsDocument("settings", given)
    if isinstance(given, str) and "\n" in given:
        return toml_document("settings", given)
    path = Path(given)
    expected = f"{str(path)!r}: expected a file of settings (TOML)"
    try:
        content = path.read_bytes()
        return toml_document(str(path), content.decode())
    except OSError as error:
        remedy = f"streamiter serve {path} --init URL writes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError("; ".join(filter(None, (f"{expected}, given {error.strerror}", remedy)))) from None
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):  # No path has a null character.
            raise ConfigurationError(
                f"{expected}, given a path with a null character; write the path of a file"
            ) from None
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{expected} in UTF-8, given other bytes in line {line}; save it as UTF-8") from None


def _check_learn(document: SettingsDocument, learn: dict[str, Any], *, has_answers: bool) -> None:
    if "label" in learn:
        learn["label"] = _label(document, learn["label"], learn.get("kind"), has_answers=has_answers)
    label, learner = learn.get("label"), learn.get("learner", "default")
    if label is not None and label.event is not None and "weight" in learn:
        document.expect(("learn", "weight"), "no weight with label.event", "leave one of them out")
    # A question may have a field of the label's name, and a field that a comparison reads may be known in time.
    name = label.value if label is not None and label.event is None else None
    if isinstance(name, str) and (learn.get("features") or {}).get(name, "ignore") != "ignore":
        path = ("learn", "features", name)
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
        crossed = {name for pair in learn["learner_settings"].get("crosses", ()) for name in pair}
        kinds = learn.get("features")
        known = [name for name, kind in (kinds or {}).items() if kind in _CROSSED_KINDS]
        known += [part_of(name, part) for name, kind in (kinds or {}).items() if kind == "time" for part in _PARTS]
        if kinds is not None and (unknown := crossed.difference(known)):
            remedy = f"give {', '.join(sorted(unknown))} one of these kinds in features"
            document.expect((*_SETTINGS, "crosses"), "crosses of numbers and categories among the features", remedy)
        _check_loss(document, learn["learner_settings"], learn.get("kind"))
        return
    _check_optimizer(document, learner)
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


def _check_watch(document: SettingsDocument, watch: dict[str, Any]) -> None:
    """Refuse a sample with too few rows."""
    given = WatchSettings(**watch)
    if given.sample * given.window < ROWS_MIN and not document.is_wrong(("watch", "window")):
        expected = f"a sample of at least {ROWS_MIN} rows"
        document.expect(("watch", "window"), expected, "write sample = 1.0, or a larger window")


def _check_network(document: SettingsDocument, learn: Mapping[str, Any]) -> None:
    """Refuse several classes, and embeddings that expire by times that no event has."""
    if learn.get("kind") == "multiclass":
        document.expect(("learn", "learner"), '"default" for multiclass', 'write "default"')
    given, label = learn["learner_settings"], learn.get("label")
    if "network" in given:
        _read_network(document, given)
    for name in ("hidden", "at_most"):
        try:
            Embeddings(**{name: given[name]} if name in given else {})
        except ConfigurationError as error:
            expected = str(error).partition("expected ")[2].partition(", given ")[0]
            document.expect((*_SETTINGS, name), expected, "leave it out for the default, or write another one")
    if "time" in given and "expire" not in given:
        remedy = "add expire, the time after which a feature is forgotten, or leave time out"
        document.expect((*_SETTINGS, "time"), "expire and time together", remedy, given="no expire")
    if "expire" in given and "time" not in given and label is not None and label.event is None:
        remedy = 'add the field with the time of an event, as time = "at"'
        document.expect((*_SETTINGS, "expire"), "expire and time together", remedy, given="no time")


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


def _check_optimizer(document: SettingsDocument, learner: str) -> None:
    """Make the optimizer with each of its settings alone; its error says which numbers are good."""
    kind = SERVICE_OPTIMIZERS[learner]
    names = signature(kind).parameters
    keys = {name: Setting(flag_of if name == "keep_start" else _NUMBER) for name in names} | _LINEAR_KEYS
    settings = document.table(_SETTINGS, keys)
    for name in [name for name in settings if name in names]:
        try:
            kind(**{name: settings[name]})
        except ConfigurationError as error:
            expected = str(error).partition("expected ")[2].partition(", given ")[0]
            remedy = f"leave it out for the default {shown_value(names[name].default)}, or write another one"
            document.expect((*_SETTINGS, name), expected, remedy)


_SETTINGS: Final = ("learn", "settings")
_NUMBER: Final = number_of("a number", lambda _: True)
_BITS_MAX: Final = 28
_CROSSED_KINDS: Final = ("number", "category")
_PARTS: Final = (*PARTS, TREND)


def _check_loss(document: SettingsDocument, settings: Mapping[str, Any], kind: str | None) -> None:
    loss = settings.get("loss")
    if loss is not None and kind not in (None, "regression"):
        document.expect((*_SETTINGS, "loss"), 'no loss, or learn.kind = "regression"', "change one of them", given=loss)
    is_wrong = any(document.is_wrong((*_SETTINGS, name)) for name in ("loss", "quantile"))
    if not is_wrong and ("quantile" in settings) != (loss == "quantile"):
        document.expect(
            (*_SETTINGS, "loss"),
            'loss = "quantile" and a quantile together',
            "add the other one, or leave it out",
            given=loss,
        )


def _scales_of(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping) and all(
        type(scale) in (int, float) and 0.0 < plain_float(scale) < math.inf for scale in value.values()
    ):
        return dict(value)
    raise WrongValue("a table of fields with a scale above 0 for each", "write { distance = 0.001 }")


def _crosses_of(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in value
    ):
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
    "bits": Setting(whole_of(1, _BITS_MAX)),
    "scales": Setting(_scales_of),
    "mini_batch": Setting(whole_of(1)),
}
_READY_MADE_KEYS: Final = {
    "mini_batch": Setting(whole_of(1)),
    "crosses": Setting(_crosses_of),
    "bits": Setting(whole_of(1, _BITS_MAX)),
    "shapes": Setting(flag_of),
}
_NETWORK_KEYS: Final = _READY_MADE_KEYS | {
    "kind": Setting(choice_of("fm", "deepfm", "wide and deep")),
    "network": Setting(text_of),
    "factors": Setting(whole_of(1, 256)),
    "hidden": Setting(items_of(whole_of(1, 1024), "numbers of units, as [32, 16]")),
    "admit": Setting(whole_of(1, 1_000_000)),
    "expire": Setting(duration_of),
    "at_most": Setting(size_of),
    "time": Setting(text_of),
}
_DEFAULT_KEYS: Final = _READY_MADE_KEYS | {
    "loss": Setting(choice_of("squared", "absolute", "huber", "quantile", "poisson")),
    "quantile": Setting(number_of("a share above 0 and below 1, such as 0.9", lambda share: 0.0 < share < 1.0)),
}


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
    is_answered = "event" in label and kind == "classification" and label.get("otherwise") is False
    if is_answered and "field" not in given and "value" not in given:
        label["value"] = FieldComparison(label.get("event_field", "event"), "==", label["event"])
    elif len([name for name in ("field", "value") if name in given]) != 1:
        both = "both" if "field" in given else "none"
        document.expect(path, "field or value", 'write { field = "late" }', given=both)
    if kind == "regression" and isinstance(label.get("value"), FieldComparison):
        expected = "a field for a regression"
        document.expect((*path, "value"), expected, 'write kind = "classification", or the field')
    if ("event" in label) != ("key" in given):
        missing = "event" if "key" in given else "key"
        remedy = "event says which records are answers, and key which field they share with their question"
        document.expect((*path, missing), "event and key together", remedy, given=f"no {missing}")
    needs = {"event_field": "event", "question": "event", "within": "event", "time": "within", "otherwise": "within"}
    needs |= {"schedule": "within"}
    for name, needed in needs.items():
        if name in given and needed not in given and needed not in label:
            document.expect(
                (*path, name), f"it with {needed} only", f"leave it out, or add {needed}", given=f"no {needed}"
            )
    if "positive" in given and (kind != "classification" or "field" not in given):
        document.expect(
            (*path, "positive"),
            "it with the field of a classification only",
            "leave it out; a comparison says what is true",
        )
    if "otherwise" in label and kind is not None and not _fits(kind, label["otherwise"]):
        document.expect((*path, "otherwise"), f"a label of a {kind}", "write false, without quotes")
    if "field" in label:
        label["value"] = label.pop("field")
    return LabelSettings(**label) if "value" in label else None


def _fits(kind: str, label: object) -> bool:
    """Whether a label that the file gives fits the kind."""
    if kind == "classification":
        return isinstance(label, (bool, str))
    return type(label) in ((int, float) if kind == "regression" else (int, str))


def _check_publish(document: SettingsDocument, publish: dict[str, Any]) -> None:
    if "records" in publish:
        if "every" in document.names(("publish",)):
            document.expect(("publish", "records"), "every or records", "leave one out", given="both")
        publish["every_s"] = None


def _check_http(document: SettingsDocument, http: dict[str, Any]) -> None:
    settings = HttpSettings(**http)
    for name in ("token", "tls_key_password"):
        if f"{name}_env" in http and f"{name}_file" in http:
            document.expect(("http", f"{name}_file"), f"{name}_env or {name}_file", "leave one out", given="both")
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        given = "tls_key" if settings.tls_certificate is None else "tls_certificate"
        document.expect(
            ("http", given), "tls_certificate and tls_key together", "add the other", given=f"{given} alone"
        )
    if settings.is_loopback or document.is_wrong(("http", "address")):
        return
    keys = frozenset(document.names(("http",)))
    if keys.isdisjoint({"token", "token_env", "token_file"}):
        remedy = "add token_file or token_env, or write 127.0.0.1"
        document.expect(("http", "address"), "a token for an address that others reach", remedy)
    if keys.isdisjoint({"tls_certificate", "tls_key"}) and not settings.behind_proxy:
        remedy = "add tls_certificate and tls_key, or behind_proxy = true where a proxy adds TLS"
        document.expect(("http", "address"), "TLS for an address that others reach", remedy)


def _check_topics(document: SettingsDocument, given: dict[str, dict[str, Any]]) -> None:
    """Refuse URLs that no connector takes, and to write to the topic that is read."""
    read = [given["input"].get(name) for name in ("topic", "answers")]
    topic_path = ("input", "then" if "then" in document.names(("input",)) else "topic")
    for path in (
        topic_path,
        ("input", "history"),
        ("input", "answers_history"),
        ("input", "answers"),
        ("publish", "topic"),
        ("input", "dead_letter"),
        ("predictions", "log"),
    ):
        if (url := given[path[0]].get("topic" if path == topic_path else path[1])) is None:
            continue
        try:
            topic(url)
        except ConfigurationError as error:
            document.refuse(path, " ".join(str(error).split()))
        for other, name in zip(read, ("topic", "answers"), strict=True):
            # A service may learn from its own log.
            if url == other and path not in (topic_path, ("input", name), ("predictions", "log")):
                document.expect(path, f"another topic than input.{name}", "choose one of its own", given="the same")


def _check_challenger(document: SettingsDocument, given: dict[str, dict[str, Any]]) -> None:
    """Read the file of the challenger; refuse one that is of other rows, labels or losses, which cannot be compared."""
    challenger, path = given["challenger"], ("challenger", "file")
    for name, needed in (("share", "key"), ("key", "share"), ("share", "file")):
        if name in challenger and needed not in challenger:
            document.expect(("challenger", name), f"it with {needed} only", f"add {needed}", given=f"no {needed}")
    if "file" not in challenger:
        return
    try:
        second = _document(challenger["file"])
        if second.names(("challenger",)):  # It might even name this file.
            document.expect(path, "a file without a challenger of its own", "leave [challenger] out there", given="one")
            return
        other = challenger["file"] = _read(second)
    except ConfigurationError as error:
        document.refuse(path, f"expected the file of a service, given one with errors: {' '.join(str(error).split())}")
        return
    if any(document.is_wrong((name,)) for name in ("service", "input", "learn", "publish")):
        return
    learn, of_input = LearnSettings(**given["learn"]), InputSettings(**given["input"])
    pairs = {
        "publish.topic": (given["publish"]["topic"], other.publish.topic),
        **{f"input.{name}": (getattr(of_input, name), getattr(other.input, name)) for name in _SAME_INPUT},
        **{f"learn.{name}": (getattr(learn, name), getattr(other.learn, name)) for name in _SAME_LABELS},
        **{
            f"learn.settings.{name}": (learn.learner_settings.get(name), other.learn.learner_settings.get(name))
            for name in ("loss", "quantile")
        },
    }
    if different := [key for key, (own, others) in pairs.items() if own != others]:
        expected = "a file with the same input, labels, loss and topic of models"
        document.expect(path, expected, "write these keys as in this file", given=f"another {', '.join(different)}")
    if other.name == given["service"]["name"]:
        document.expect(path, "a file with another service.name", "give it another", given="the same")
    if unfit := [each for each in (learn.learner, other.learn.learner) if each not in READY_MADE]:
        document.expect(path, 'learners "default" or "network" in both files', "write one of them", given=unfit[0])
    if learn.weight is not None:
        document.expect(path, "no learn.weight with a challenger", "leave one of them out", given="a weight")


_SAME_INPUT: Final = ("topic", "answers", "decoder")
_SAME_LABELS: Final = ("kind", "label", "weight", "negatives")


def _check_store(document: SettingsDocument, given: dict[str, dict[str, Any]]) -> None:
    """Refuse URLs that no store of checkpoints has."""
    if "store" in given["checkpoints"]:
        try:
            Checkpoints(given["checkpoints"]["store"])
        except ConfigurationError as error:
            document.refuse(("checkpoints", "store"), " ".join(str(error).split()))


# ---- changes


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs between two versions of a file."""

    key: str
    """The key with the tables above it: ``publish.every``."""
    needs: str | None
    """Why the service must be started again for it, and how; None: it applies at once."""


def changed(before: ServiceSettings, after: ServiceSettings) -> list[SettingChange]:
    """Return the settings that differ, in the order of the tables, and which of them apply while the service runs.

    >>> from dataclasses import replace
    >>> before = read_settings({
    ...     "service": {"name": "late-flights"},
    ...     "input": {"topic": "memory://flights"},
    ...     "learn": {"kind": "regression", "label": {"field": "delay"}},
    ...     "publish": {"topic": "memory://model-updates"},
    ... })
    >>> after = replace(before, publish=replace(before.publish, every_s=5.0))
    >>> changed(before, after)
    [SettingChange(key='publish.every', needs=None)]
    """
    old, new = _by_key(before), _by_key(after)
    at_once = _AT_ONCE - ({"learn.settings.learning_rate"} if before.learn.learner != after.learn.learner else set())
    return [
        SettingChange(key, None if key in at_once else _needed(key, before, after))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def _by_key(settings: ServiceSettings) -> dict[str, object]:
    """Return the value of each key of the file; those of ``[learn.settings]`` one by one."""
    values: dict[str, object] = {"service.name": settings.name, "service.standby": settings.standby_s}
    for table, (_, keys) in TABLES.items():
        if table != "service":
            of_table = getattr(settings, table)
            values |= {f"{table}.{name}": getattr(of_table, key.name or name) for name, key in keys.items()}
    of_learner: Mapping[str, object] = settings.learn.learner_settings
    del values["learn.settings"]
    return values | {f"learn.settings.{name}": value for name, value in of_learner.items()}


def _needed(key: str, before: ServiceSettings, after: ServiceSettings) -> str:
    """Return what a change needs that does not apply at once."""
    if key == "learn.learner" and before.learn.learner in READY_MADE and after.learn.learner in READY_MADE:
        return _NEW_EMBEDDINGS
    if key == "learn.settings.bits" and after.learn.learner not in READY_MADE:  # All its columns are hashed.
        return _NEW_STATE
    items = [(settings.learn.negatives or {}).get("item") for settings in (before, after)]
    if key == "learn.negatives" and items[0] != items[1]:  # The checkpoint has items with the old fields.
        return _NEW_STATE
    return _NEEDS.get(key, _RESTART)


_AT_ONCE: Final = frozenset(
    {"publish.every", "publish.records", "learn.settings.learning_rate", "log.level", "log.every"}
    | {f"health.{name}" for name in TABLES["health"][1]}
)
_RESTART: Final = "it applies after a restart, which resumes from the last checkpoint"
_NEW_STATE: Final = (
    "the state in the checkpoints is of the old setting; give the service a new service.name and start it again: it "
    "learns from the beginning"
)
_WHAT_FITS: Final = (
    "it applies after a restart, which keeps what fits: columns of numbers, weights of texts with the same bits, and "
    "all counts; the log says what is lost"
)
_NEW_EMBEDDINGS: Final = "it applies after a restart, which keeps the other members; embeddings begin anew, or are left"
_NEEDS: Final[Mapping[str, str]] = dict.fromkeys(
    ("learn.kind", "learn.learner", "learn.settings.loss", "learn.settings.quantile"), _NEW_STATE
) | {
    "learn.settings.crosses": _WHAT_FITS,
    "learn.settings.bits": _WHAT_FITS,
    "learn.settings.shapes": "it applies after a restart, which keeps the linear model; tables begin anew, or are left",
    **dict.fromkeys((f"learn.settings.{name}" for name in ("kind", "factors", "hidden")), _NEW_EMBEDDINGS),
    **dict.fromkeys(
        ("input.topic", "input.answers"),
        'it applies after a restart with on_lost = "skip" in [input], which keeps the model and all other state, and '
        "reads the new topic from its start on",
    ),
    "service.name": "the flow, its checkpoints and its model have this name; with another one it is another service",
    **dict.fromkeys(
        ("input.start", "input.at", "input.answers_at"),
        "it counts in the first run only, and later runs resume from their checkpoint",
    ),
}
