"""The file of a service: ``read_settings`` returns its settings, or raises all its errors at once.

``changed`` compares two versions of the file, and says which settings apply while the service runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from streamiter.engine.storage.store import Checkpoints
from streamiter.errors import ConfigurationError
from streamiter.learn.quality.field_watch import FieldWatch
from streamiter.service.settings.learn_table import check_learn
from streamiter.service.settings.tables import (
    READY_MADE,
    HttpSettings,
    InputSettings,
    LearnSettings,
    ServiceSettings,
    service_name_of,
    standby_of,
)
from streamiter.service.settings.toml_document import toml_document
from streamiter.topics import topic
from streamiter.values.settings import Parser, Setting, SettingsDocument, WrongValue, any_of, setting_keys

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
    watched = {name: given for name, given in tables["watch"].items() if name != "enabled"}
    document.check_options(("watch",), watched, FieldWatch)
    document.check_needs(("predictions",), dict.fromkeys(("sample", "wait", "exactly_once"), "log"))
    check_learn(document, tables["learn"], has_answers="answers" in tables["input"])
    _check_history(document, tables)
    _check_dead_letters(document)
    _check_publish(document, tables["publish"])
    _check_http(document, tables["http"])
    _check_topics(document, tables)
    _check_exactly_once(document, tables)
    _check_challenger(document, tables)
    _check_store(document, tables)
    document.check()
    made = {name: kind(**tables[name]) for name, (kind, _) in TABLES.items() if name != "service"}
    return ServiceSettings(**tables["service"], **made, source=document.source)


def _keys_of(table: str, document: SettingsDocument) -> Mapping[str, Setting]:
    """Return the keys of a table. With a history, the topic that is read behind it is ``then``."""
    keys, names = TABLES[table][1], document.names(("input",))
    if table != "input" or {"history", "then"}.isdisjoint(names):
        return keys
    instead = {
        "topic": Setting(_instead("then", "names the topic behind the history")),
        "start": Setting(_instead("at", "says where the topic begins behind the history")),
    }
    then = Setting(keys["topic"].parse, "topic", is_required="topic" not in names)
    return {**keys, **instead, "then": then}


def _instead(key: str, does: str) -> Parser:
    """Return the parser of a key in whose place there is another one."""

    def parse(value: Any) -> Any:
        raise WrongValue(f"{key}, which {does}", f"write {key} in its place")

    return parse


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


def _check_dead_letters(document: SettingsDocument) -> None:
    if {"on_error", "dead_letter"}.issubset(document.names(("input",))):
        document.expect(("input", "on_error"), "on_error or dead_letter", "leave one out", given="both")


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
    needs = {"tls_certificate": "tls_key", "tls_key": "tls_certificate"}
    needs |= dict.fromkeys(("tls_key_password_env", "tls_key_password_file"), "tls_key")
    document.check_needs(("http",), needs)
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
    """Refuse URLs that no connector takes, and one topic for two purposes."""
    topic_key = "then" if "then" in document.names(("input",)) else "topic"
    seen: dict[str, tuple[str, str]] = {}
    for path in (
        ("input", topic_key),
        ("input", "answers"),
        ("input", "history"),
        ("input", "answers_history"),
        ("publish", "topic"),
        ("input", "dead_letter"),
        ("predictions", "log"),
    ):
        if (url := given[path[0]].get("topic" if path == ("input", topic_key) else path[1])) is None:
            continue
        try:
            topic(url)
        except ConfigurationError as error:
            document.refuse(path, " ".join(str(error).split()))
        other = seen.setdefault(url, path)
        is_own_log = path == ("predictions", "log") and other[0] == "input" and other[1] != "dead_letter"
        reads_log = is_own_log and given["input"].get("decoder", "default") not in ("default", "json")
        if other != path and not reads_log:  # A service may learn from its own log.
            remedy = "choose one of its own" + (', or write input.decoder = "predictions"' if is_own_log else "")
            document.expect(path, f"another topic than {'.'.join(other)}", remedy, given="the same")


def _check_exactly_once(document: SettingsDocument, given: dict[str, dict[str, Any]]) -> None:
    """Refuse what a log cannot have that has each answer exactly once."""
    path, log, updates = ("predictions", "exactly_once"), given["predictions"].get("log"), given["publish"].get("topic")
    if path[1] not in given["predictions"]:
        return
    if "wait" in given["predictions"]:
        document.expect(path, "exactly_once or wait", "leave wait out", given="both")
    if "standby_s" in given["service"]:
        remedy = "write wait = true in its place; the file of one machine is not read by the standby of another"
        document.expect(path, "no service.standby with it", remedy, given="one")
    if log is None or updates is None or document.is_wrong(("predictions", "log")):
        return
    topics = topic(log), topic(updates)
    if topics[0].commit_domain != topics[1].commit_domain or not topics[0].has_transactions:
        remedy = "write the same brokers, or the same file, in both, or leave exactly_once out"
        expected = "a topic that one transaction writes together with publish.topic, as exactly_once needs"
        document.expect(("predictions", "log"), expected, remedy)


def _check_challenger(document: SettingsDocument, given: dict[str, dict[str, Any]]) -> None:
    """Read the file of the challenger; refuse one that is of other rows, labels or losses, which cannot be compared."""
    challenger, path = given["challenger"], ("challenger", "file")
    document.check_needs(("challenger",), {"share": "key", "key": "share"})
    if "file" not in challenger:
        if document.names(("challenger",)):
            document.refuse(path, "expected this key, given none; add the file of the challenger's service")
        return
    if not isinstance(challenger["file"], (str, os.PathLike, Mapping)):
        document.expect(path, "the path of a file", 'write it in quotes, as "service-b.toml"')
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


_SAME_INPUT: Final = ("topic", "answers", "decoder", "history", "at", "answers_history", "answers_at")
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
