"""The settings of a service: a dataclass for each table of its file, with the parser of each key.

A time has the unit of its name: ``interval_s`` is the key ``interval = "1s"``. Relative paths begin at the working
directory. ``file`` reads it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from streamiter.errors import ConfigurationError
from streamiter.learn.quality.field_watch import FieldWatch
from streamiter.parameter_server.optimizers import FTRL, SGD, AdaDelta, AdaGrad, Adam, Momentum, Optimizer, RMSProp
from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.topics.topic import StartPosition
from streamiter.topics.urls import with_secrets
from streamiter.values.field_kinds import KINDS, Kind, is_kind, time_zone_of
from streamiter.values.settings import (
    WrongValue,
    any_of,
    choice_of,
    duration_of,
    items_of,
    pattern_of,
    shown_value,
    size_of,
    text_of,
    whole_of,
)
from streamiter.values.times import in_seconds

LearningKind = Literal["classification", "regression", "multiclass"]
FeatureKind = Kind
"""The kind of a field in the file, or ``ignore``; ``text`` is another name of ``words``."""


@dataclass(frozen=True)
class _Table:
    """The base of tables with durations in seconds, which a program may also give as a ``timedelta``."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name.endswith("_s"):
                object.__setattr__(self, each.name, in_seconds(getattr(self, each.name)))


READY_MADE: Final = ("default", "network")
"""The learners that find the columns themselves; ``network`` has embeddings, too."""

READY_MADE_OPTIONS: Final = ("crosses", "bits", "shapes", "loss", "quantile")
"""Their settings that are options of ``AdaptiveLinearModel``."""

SERVICE_OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = MappingProxyType(
    {
        "ftrl": FTRL,
        "sgd": SGD,
        "adam": Adam,
        "adagrad": AdaGrad,
        "adadelta": AdaDelta,
        "rmsprop": RMSProp,
        "momentum": Momentum,
    }
)
"""The other learners: a linear model with this optimizer."""


def topic_url_of(value: Any) -> str:
    """Parse the URL of a topic; refuse one with a password in it."""
    url = text_of(value)
    place, _, query = url.partition("?")
    if "@" in place:
        raise WrongValue(
            "a URL without a user and a password",
            "write ?sasl_username=…&sasl_password_env=VARIABLE, or …&sasl_password_file=FILE",
            given="one with a user before the host (not shown)",
        )
    for option in query.split("&"):
        name = option.partition("=")[0]
        if _SECRET_OPTION.fullmatch(name):
            raise WrongValue(
                "a URL without a password",
                f"write {name}_env=VARIABLE or {name}_file=FILE",
                given=f"one with {name} (not shown)",
            )
    return url


_SECRET_OPTION: Final = re.compile(r"\w*(?:pas|pwd|secret|token)\w*(?<!_env)(?<!_file)", re.IGNORECASE)


def history_url_of(value: Any) -> str:
    """Parse the URL of a topic, or the path of files."""
    url = topic_url_of(value)
    return url if _URL.match(url) else f"file:{url}"


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:")


def position_of(value: Any) -> StartPosition:
    """Parse where a topic begins behind a history: its end or beginning, offsets, or a time."""
    if value in ("earliest", "latest") and isinstance(value, str):
        return "earliest" if value == "earliest" else "latest"
    if isinstance(value, (str, datetime)):
        with contextlib.suppress(ValueError):
            at = datetime.fromisoformat(value) if isinstance(value, str) else value
            if at.tzinfo is not None:
                return at
    offsets = value if isinstance(value, list) else [value]
    if offsets and all(type(offset) is int and offset >= 0 for offset in offsets):
        return dict(enumerate(offsets))
    raise WrongValue(
        'an offset for each partition, a time with its zone, "earliest" or "latest"',
        "write at = [1200, 1180] for two partitions, or at = 2026-01-31T00:00:00Z",
    )


service_name_of: Final = pattern_of(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "a name of at most 100 letters, digits, '.', '_' and '-'",
    'write it in quotes, as "late-flights"',
)
_variable_of: Final = pattern_of(
    r"[A-Z_][A-Z0-9_]*",
    "the name of an environment variable, as SERVICE_TOKEN",
    "the secret itself is set outside of the file",
    given="another value (not shown, since it may be the secret)",
)
_decoder_of: Final = pattern_of(
    r"default|json|predictions|[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*",
    '"default", "json", "predictions", or a decoder of your own as "module:name"',
    "write one of them in quotes",
)


def standby_of(value: Any) -> float:
    """Parse the time after which a standby takes over; a shorter one than 2 s would mistake a pause for an end."""
    seconds = duration_of(value)
    if seconds < _STANDBY_S_MIN:
        raise WrongValue(f"a time of at least {_STANDBY_S_MIN:g} s", 'write "5s"')
    return seconds


# Brokers answer a standby that waits for signs of life after half a second, and the signs are five in this time.
_STANDBY_S_MIN: Final = 2.0


def _address_of(value: Any) -> str:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > _PORT_MAX:
        raise WrongValue(
            'an address with its port, as "127.0.0.1:8080" or "[::1]:8080"',
            f"write a host, a colon and a port from 0 to {_PORT_MAX}",
        )
    return match[0]


_ADDRESS: Final = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)
_PORT_MAX: Final = 65_535


def _features_of(value: Any) -> dict[str, FeatureKind] | None:
    if value == "all":
        return None
    if not isinstance(value, Mapping) or not value:
        raise WrongValue('"all", or a table with a kind for each field', 'write { km = "number", town = "category" }')
    if set(value.values()) == {"ignore"}:
        raise WrongValue("a field to learn from", "give one of them another kind", given='"ignore" for all fields')
    return _kinds_of(value)


def _kinds_of(value: Any) -> dict[str, FeatureKind]:
    if not isinstance(value, Mapping):
        raise WrongValue("a table with a kind for each field", 'write { zip = "category", title = "words" }')
    for name, kind in value.items():
        try:
            if kind not in ("text", "ignore") and not is_kind(kind):
                _feature_kind_of(kind)
        except WrongValue as wrong:
            raise WrongValue(wrong.expected, wrong.remedy, given=shown_value(kind), key=(name,)) from None
    return dict(value)


_feature_kind_of: Final = choice_of(*KINDS, "ignore")


def _time_zone_of(value: Any) -> str:
    name = text_of(value)
    try:
        time_zone_of("", name)
    except ConfigurationError:
        raise WrongValue("the name of a time zone of the IANA", 'write "Europe/Berlin", or "UTC"') from None
    return name


def label_value_of(value: Any) -> str | FieldComparison:
    text = text_of(value)
    if comparison := FieldComparison.of(text):
        return comparison
    if _FIELD.fullmatch(text):
        return text
    raise WrongValue(
        "a field, or a field compared with a number or a text",
        'write "delay > 15" or "outcome == \'click\'"; the operators are > >= < <= == !=',
    )


_FIELD: Final = re.compile(r"[^<>=!'\"]+")


@dataclass(frozen=True)
class InputSettings:
    """The table ``[input]``: the events."""

    topic: Annotated[str, topic_url_of]
    """The URL of the topic."""
    answers: Annotated[str | None, topic_url_of] = None
    """The URL of the topic of the answers, if labels come later, and in a topic of their own."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where the first run begins to read; later runs resume from their checkpoint."""
    decoder: Annotated[str, _decoder_of] = "default"
    """``default``: JSON, or the format of the topic, such as CSV; ``json``; ``predictions``: the rows of a log of
    predictions; or your own decoder, as ``module:name``."""
    on_error: Literal["fail", "skip"] = "fail"
    """The effect of a record that cannot be read or learned from, if there is no ``dead_letter``."""
    on_lost: Literal["fail", "skip"] = "fail"
    """The effect of a position that the topic no longer has: by retention, or because it is another topic."""
    dead_letter: Annotated[str | None, topic_url_of] = None
    """The URL of the topic for such records."""
    history: Annotated[str | None, history_url_of] = None
    """The URL of a topic, or the path of files, that is read to its end before the topic. With it, the key of ``topic``
    is ``then``."""
    at: Annotated[StartPosition | None, position_of] = None
    """Where the topic begins behind the history."""
    answers_history: Annotated[str | None, history_url_of] = None
    answers_at: Annotated[StartPosition | None, position_of] = None
    """The same for the topic of the answers."""


# Records of ``input.answers`` get this field with this value, so that they are known among the questions.
ANSWERS_FIELD: Final = "input.answers"
ANSWER: Final = "answer"


@dataclass(frozen=True)
class LabelSettings(_Table):
    """The key ``label`` of ``[learn]``: where labels come from.

    Without ``event`` each record has its label. With ``event`` the label of a question comes later, in an answer.
    """

    value: Annotated[str | FieldComparison, label_value_of]
    """The field of the label, or a comparison."""
    event: str | None = None
    """The value of ``event_field`` by which an answer is known."""
    event_field: str = "event"
    key: str | None = None
    """The field that an answer shares with its question."""
    within_s: float | None = None
    """A question that waited for this many seconds is forgotten. None: no limit; above a million waiting questions the
    oldest is forgotten."""
    otherwise: Annotated[bool | float | str | None, any_of] = None
    """The label of a question that waited for ``within_s``; None: it is forgotten."""
    question: str | None = None
    """The value of ``event_field`` of questions. None: each record that is no answer is a question."""
    time: str | None = None
    """The field with the time of an event; None: the time is that of the topic, or else of the clock."""
    schedule: Literal["expected", "end", "weighted", "at once"] | None = None
    """When a question is learned from, see ``DelayedLabels``; None: the default of ``DelayedLabels``."""
    positive: str | None = None
    """Of two texts, the label whose probability is predicted; None: the later one in alphabetical order."""

    @property
    def field(self) -> str:
        """The field that ``value`` reads."""
        return self.value if isinstance(self.value, str) else self.value.field


@dataclass(frozen=True)
class LearnSettings:
    """The table ``[learn]``: the model."""

    kind: LearningKind
    label: Annotated[LabelSettings, any_of]
    features: Annotated[Mapping[str, FeatureKind] | None, _features_of] = None
    """The kind of each field to learn from; None: all fields, found as they come."""
    weight: str | None = None
    """The field of the weight of a record; None: all records have the same."""
    learner: Annotated[str, choice_of(*READY_MADE, *SERVICE_OPTIMIZERS)] = "default"
    """``default``; ``network``: the default learner with embeddings; or the name of an optimizer."""
    learner_settings: Annotated[Mapping[str, Any], any_of] = field(default_factory=dict)
    """The table ``[learn.settings]``: those of the learner."""
    negatives: Annotated[Mapping[str, Any] | None, any_of] = None
    """The options of ``sampled_negatives``, which then adds the field of ``label``. None: events have labels."""
    drift: Literal["adwin", "page-hinkley"] | None = None
    """The detector that watches the loss. None: no detector."""
    kinds: Annotated[Mapping[str, FeatureKind], _kinds_of] = field(default_factory=dict)
    """The kinds of some fields, if all are features; the first rows decide the others."""
    time_zone: Annotated[str | None, _time_zone_of] = None
    """The time zone of the hours of times; None: their own."""

    @property
    def field_kinds(self) -> dict[str, Kind]:
        """The kinds of the fields to learn from, or of those whose kind is given."""
        given = self.kinds if self.features is None else self.features
        kinds: dict[str, Any] = {name: kind for name, kind in given.items() if kind != "ignore"}
        return {name: "words" if kind == "text" else kind for name, kind in kinds.items()}


@dataclass(frozen=True)
class PublishSettings(_Table):
    """The table ``[publish]``: the topic of the model, and when a version is published."""

    topic: Annotated[str, topic_url_of]
    every_s: float | None = 1.0
    """The seconds from one version to the next, at least; None: ``records`` decide."""
    records: int | None = None
    """The number of learned records from one version to the next, at least."""
    state: bool = True
    """Whether a version carries the state of its learner."""
    roll_back_s: float = 86_400.0
    """For how long one must be able to roll back to a version; a start warns if the topic may delete it earlier."""
    changes: bool = False
    """Whether a version has only the difference to the version before it, where that is smaller."""


def _share_of(value: Any) -> float:
    if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 1.0):
        raise WrongValue("a share above 0 and at most 1", "write 0.01 for every hundredth prediction")
    return float(value)


@dataclass(frozen=True)
class PredictionSettings(_Table):
    """The table ``[predictions]``: the log of what was answered."""

    log: Annotated[str | None, topic_url_of] = None
    """The URL of the topic of the log; None: no log."""
    sample: Annotated[float, _share_of] = 1.0
    """The share of the predictions that are logged, chosen by their ids."""
    wait: bool = False
    """Whether an answer waits until its predictions are stored."""
    exactly_once: str | None = None
    """The file to which predictions go before they are answered, and from which the flow of the service brings them
    into the log, each exactly once; None: bounded loss."""


def _limit_of(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise WrongValue("a number", "write 0.25, or leave it out for the default")
    return float(value)


@dataclass(frozen=True)
class WatchSettings(_Table):
    """The table ``[watch]``: fields of each window of rows are compared with those of the first rows.

    ``FieldWatch`` says what its numbers mean, and which are good.
    """

    enabled: bool = True
    """Whether fields are watched, if the ready-made learner learns."""
    reference: int = FieldWatch.reference
    window: int = FieldWatch.window
    sample: Annotated[float, _limit_of] = FieldWatch.sample
    psi: Annotated[float, _limit_of] = FieldWatch.psi
    ks: Annotated[float, _limit_of] = FieldWatch.ks
    missing: Annotated[float, _limit_of] = FieldWatch.missing
    new_values: Annotated[float, _limit_of] = FieldWatch.new_values
    without: Annotated[Sequence[str], items_of(text_of, "names of fields")] = ()
    """Fields that are not watched."""
    name: str | None = None
    """The name of the reference: a restart with another one takes the next rows as the reference."""


@dataclass(frozen=True)
class ChallengerSettings:
    """The table ``[challenger]``: a second service whose learner learns beside the first, and is compared with it."""

    file: Annotated[ServiceSettings | None, any_of] = None
    """The settings in the file of the second service; None: no challenger."""
    after: Annotated[int, whole_of(0)] = 1_000
    """The number of records that the challenger learns from, after its first label, before it is compared."""
    share: Annotated[float | None, _share_of] = None
    """The share of the keys that the challenger answers for; None: it answers no request."""
    key: str | None = None
    """The field of a row that has the key, such as a user."""


@dataclass(frozen=True)
class CheckpointSettings(_Table):
    """The table ``[checkpoints]``."""

    store: str = "checkpoints"
    """The folder of the snapshots, or the URL of an object store."""
    interval_s: float = 1.0
    keep: int = 3
    """The number of snapshots that are kept."""


@dataclass(frozen=True)
class HttpSettings(_Table):
    """The table ``[http]``: the server."""

    address: Annotated[str, _address_of] = "127.0.0.1:8080"
    """Host and port; port 0 is any free port."""
    token_env: Annotated[str | None, _variable_of] = None
    """The environment variable with the token that requests must have."""
    token_file: str | None = None
    """The file with this token."""
    tls_certificate: str | None = None
    """The file of the certificate and those above it (PEM)."""
    tls_key: str | None = None
    """The file of the certificate's private key."""
    tls_key_password_env: Annotated[str | None, _variable_of] = None
    tls_key_password_file: str | None = None
    behind_proxy: bool = False
    """Whether a proxy before the service adds TLS."""
    body_bytes_max: Annotated[int, size_of] = 1 << 20
    rows_max: int = 1000
    """The largest number of rows of a request for predictions."""
    requests_max: int = 256
    """The largest number of requests at a time."""
    timeout_s: float = 10.0
    """The longest time that a request may take."""

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def has_token(self) -> bool:
        """Whether requests need a token."""
        return self.token_env is not None or self.token_file is not None


def http_secret(settings: HttpSettings, name: Literal["token", "tls_key_password"]) -> bytes | None:
    """Return a secret of the environment or of a file; None if the settings name neither.

    Raises ConfigurationError for a variable that is not set, and for a file that cannot be read.
    """
    given = {f"{name}_{end}": getattr(settings, f"{name}_{end}") for end in ("env", "file")}
    secret = with_secrets(given, [name], "[http]").get(name)
    return None if secret is None else str(secret).strip().encode()


def tls_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """Return the context of the server; None without TLS. Raises ConfigurationError for a wrong certificate or key."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(settings, context)
    return context


def load_certificate(settings: HttpSettings, context: ssl.SSLContext) -> None:
    """Load the certificate and its key of these settings. Raises ConfigurationError for a wrong one."""
    assert settings.tls_certificate is not None
    password = http_secret(settings, "tls_key_password")
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password or b"")
    except OSError as error:
        raise ConfigurationError(
            f"[http]: expected a certificate and its key in PEM (tls_certificate, tls_key), given "
            f"{settings.tls_certificate} and {settings.tls_key}: {error.strerror or error}"
        ) from error


@dataclass(frozen=True)
class HealthSettings(_Table):
    """The table ``[health]``: the limits of ``/livez`` and ``/readyz``."""

    loop_limit_s: float = 10.0
    """The event loop must turn within this time."""
    stall_limit_s: float = 60.0
    """A step with input must handle a record within this time, unless it is held."""
    source_limit_s: float = 30.0
    """Each source must have an answer within this time; an empty answer counts."""
    quality_limit_s: float = 900.0
    """Recent predictions may be worse than the mean of the labels for this time."""
    exit_when_stalled: bool = False
    """Whether a stalled step ends the service, with exit code 3."""


@dataclass(frozen=True)
class LogSettings(_Table):
    """The table ``[log]``."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    """``auto``: text on a terminal, JSON elsewhere."""
    every_s: float = 30.0
    """The time from one line of figures to the next."""


@dataclass(frozen=True)
class ServiceSettings(_Table):
    """All settings of a service; :func:`~streamiter.service.settings.file.read_settings` reads them from a file."""

    name: str
    """The name of the flow and of the model."""
    input: InputSettings
    learn: LearnSettings
    publish: PublishSettings
    predictions: PredictionSettings = PredictionSettings()
    challenger: ChallengerSettings = ChallengerSettings()
    watch: WatchSettings = WatchSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    log: LogSettings = LogSettings()
    standby_s: float | None = None
    """The seconds without a sign of life of the process that learns, after which another process of this file learns.
    None: the newest process learns, and those before it end."""
    source: str = field(default="settings", compare=False)
    """The name of the file, for messages."""
