"""URLs of topics: from a URL to its connector, the options of a topic, and messages and logs without secrets.

The scheme of a URL names a connector, which is registered under the entry point group ``streamiter.topics``. A package
of your own registers its connector with two lines in its ``pyproject.toml``::

    [project.entry-points."streamiter.topics"]
    pulsar = "my_package:PulsarConnector"

Messages show a URL or a path as :func:`shown_url` and :func:`shown_path` return it. A text of a library or of a parser
of arguments may repeat a secret, so it goes through :func:`hide` first.

A connector describes its options by the fields of a dataclass, and :func:`options_from` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import SplitResult, unquote, unquote_plus, urlsplit

from streamiter.errors import ConfigurationError, did_you_mean, shortened
from streamiter.topics.topic import Connector, Topic
from streamiter.values.numbers import has_plain_digits
from streamiter.values.settings import WrongValue, choice_of, flag_of
from streamiter.values.times import in_seconds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP: Final = "streamiter.topics"

# The extra of the distribution that installs the client library of a scheme, and the package of that library.
_EXTRA_OF_SCHEME: Final[Mapping[str, tuple[str, str]]] = MappingProxyType({"kafka": ("kafka", "aiokafka")})


def topic(url: str, **options: object) -> Topic:
    """Return the topic at ``url``. This connects to no server yet.

    ``options`` are those of the connector, such as timeouts and credentials. The error for an unknown option lists
    them.

    Raises :class:`~streamiter.errors.ConfigurationError` for an unknown scheme, a missing extra, a
    malformed URL or an unknown option.

    >>> topic("memory://clicks").name
    'clicks'
    >>> topic("carrier-pigeon://roof/clicks")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'carrier-pigeon://roof/clicks': expected one of the \
schemes file://, kafka://, memory://, sqlite://, given carrier-pigeon://
    """
    return connector_for(url).topic(url, options)


def connector_for(url: str) -> Connector:
    """Return the connector that serves the scheme of ``url``; raises the errors of :func:`topic`."""
    scheme = _scheme(url)
    if entry_point := _registered(scheme):
        return _load(entry_point, url)
    known = known_schemes()
    raise ConfigurationError(
        f"topic {shown_url(url)!r}: expected one of the schemes {_listed(known)}, given {scheme}://"
        f"{did_you_mean(scheme, known)}"
    )


def check_options(subject: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise ``ConfigurationError`` for options that a connector does not have."""
    if problems := _unknown(subject, options, list(known)):
        raise ConfigurationError("\n".join(problems))


def _unknown(subject: str, options: Mapping[str, object], listed: Sequence[str]) -> list[str]:
    """Return what is wrong with options that a connector does not have."""
    known_ones = f"the options are {', '.join(listed)}" if listed else "there are no options"
    problems = []
    for name in options:
        if name not in listed:
            # A text that is no name may be part of a password.
            shown = repr(name) if name.isidentifier() else "(not shown, since it is no name)"
            meant = did_you_mean(name, listed) if name.isidentifier() else ""
            problems.append(f"{subject}: unknown option {shown}; {known_ones}{meant}")
    return problems


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; raise ``ConfigurationError`` for one such as ``kafka://[::1``."""
    try:
        return urlsplit(url)
    except ValueError:  # Its text may have a password in it.
        raise ConfigurationError(f"topic {shown_url(url)!r}: expected a URL, given a malformed host") from None


def known_schemes() -> list[str]:
    """Return the schemes that have a connector, sorted.

    >>> "memory" in known_schemes()
    True
    """
    _entry_points.cache_clear()
    return sorted(_entry_points().names)


def _registered(scheme: str) -> EntryPoint | None:
    """Return the entry point of a scheme, or None.

    Packages are searched again for a scheme that the last search did not find: its package may have come since then.
    """
    if scheme not in _entry_points().names:
        _entry_points.cache_clear()
    return next(iter(_entry_points().select(name=scheme)), None)


@functools.cache
def _entry_points() -> EntryPoints:
    """Search all packages once: this takes 1 ms, or 6 ms with 200 packages, which each topic would cost."""
    from importlib.metadata import entry_points  # takes 5 ms, which an import of streamiter should not

    return entry_points(group=ENTRY_POINT_GROUP)


def _scheme(url: str) -> str:
    scheme, separator, rest = url.partition(":")
    is_url = rest.startswith("//") or _registered(scheme.lower())  # file:relative.csv has no slashes
    if not (scheme and separator and is_url):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected a URL such as kafka://127.0.0.1:9092/clicks; "
            f"the schemes are {_listed(known_schemes())}"
        )
    return scheme.lower()


def _load(entry_point: EntryPoint, url: str) -> Connector:
    try:
        loaded = entry_point.load()
    except ImportError as error:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: the connector {entry_point.value} cannot be imported ({error})"
            + _install_hint(entry_point.name)
        ) from error
    return _checked(loaded(), entry_point, url)


def _checked(connector: object, entry_point: EntryPoint, url: str) -> Connector:
    if not isinstance(connector, Connector):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected {entry_point.value} to be a subclass of streamiter.topics.Connector, "
            f"given {type(connector).__qualname__}"
        )
    return connector


def _install_hint(scheme: str) -> str:
    extra, _ = _EXTRA_OF_SCHEME.get(scheme, ("", ""))
    return f"; install it with: pip install 'streamiter[{extra}]'" if extra else ""


def _listed(schemes: list[str]) -> str:
    """Return the schemes as text, with the commands that install the client libraries that are missing."""
    missing = {
        scheme: f" (pip install 'streamiter[{extra}]')"
        for scheme, (extra, package) in _EXTRA_OF_SCHEME.items()
        if find_spec(package) is None
    }
    return ", ".join(f"{scheme}://{missing.get(scheme, '')}" for scheme in schemes)


_HIDDEN: Final = "…"

# The one option that is part of a topic's name, so messages show it.
_NAMING_OPTION: Final = "topic"

# A password with an & in it, or without =, splits into pieces that are not names.
_OPTION_NAME: Final = re.compile(r"[A-Za-z_]\w{0,39}")
_VARIABLE_NAME: Final = re.compile(r"[A-Z_][A-Z0-9_]*")

_USER: Final = re.compile(r"^([A-Za-z][\w+.-]*:/*).*@", re.DOTALL)
# An option before the question mark: `kafka://host/clicks&sasl_password=…`.
_MISPLACED: Final = re.compile(r"((?:^|\W)\w*(?:pas|pwd|secret|token|sasl|ssl)\w*=).*", re.DOTALL | re.IGNORECASE)

# Pieces of a URL that are not secret and are frequent in messages.
_SHORTEST_SECRET: Final = 4
_HARMLESS: Final = re.compile(
    r"(?i:true|false|yes|no|none|gzip|snappy|zstd|-?\d+(\.\d+)?)|(SASL|SCRAM|PLAIN|SSL)[A-Z\d_-]*"
)

# A secret is one line; a file of this size is the wrong one, or has no end.
_FILE_BYTES_MAX: Final = 1 << 16
_FILE_SUFFIXES: Final = (".pem", ".crt", ".cer", ".key", ".p12", ".txt", ".pass", ".password", ".secret")


def shown_url(url: str) -> str:
    """Return a URL without its user, password and values of options, even if the URL is malformed.

    >>> shown_url("sqlite:///data.db?topic=clicks"), shown_url("kafka://h/t?pass&word")
    ('sqlite:///data.db?topic=clicks', 'kafka://h/t?…&…')
    >>> shown_url("kafka://alice:hush@127.0.0.1:9092/clicks?sasl_pasword=hush&topic=clicks")
    'kafka://…@127.0.0.1:9092/clicks?sasl_pasword=…&topic=clicks'
    """
    place, mark, query = url.partition("?")
    place, hash_mark, fragment = _USER.sub(rf"\1{_HIDDEN}@", place).partition("#")
    place = _MISPLACED.sub(rf"\1{_HIDDEN}", place) + (f"#{_HIDDEN}" if fragment else hash_mark)
    return place + mark + "&".join(_shown_option(option) for option in query.split("&"))


def _shown_option(option: str) -> str:
    name, equals, value = option.partition("=")
    if not value and not equals and not name:
        return ""
    if not equals or _OPTION_NAME.fullmatch(name) is None:
        return _HIDDEN
    return f"{name}={value.partition('#')[0] if name == _NAMING_OPTION else _HIDDEN}"


def shown_given(given: object) -> str:
    """Return the repr of a value that was given in place of a topic, cut if it is long; for a URL, without its secrets.

    >>> shown_given("kafka://h/t?sasl_password=hush"), shown_given(None)
    ("'kafka://h/t?sasl_password=…'", 'None')
    """
    return repr(shown_url(given)) if isinstance(given, str) else shortened(given)


def shown_path(path: str) -> str:
    """Return the repr of a path. A text that does not look like a path is not shown: it may be the password itself."""
    first, slash, _ = path.lstrip("/").partition("/")
    root = "/" if path.startswith("/") else ""
    is_path = os.path.exists(path) or path.endswith(_FILE_SUFFIXES) or (slash and os.path.isdir(root + first))
    return repr(path) if is_path else "a text that is no path (not shown, since it may be a secret)"


def secrets_in(url: str) -> set[str]:
    """Return the texts of a URL that may be secrets: the user, the password, and the values of options.

    Secrets that options name, as ``…_env`` and ``…_file``, are among them.

    >>> sorted(secrets_in("kafka://alice:hush@h/t?sasl_password=a%26bcd&compression=zstd"))
    ['a%26bcd', 'a&bcd', 'alice', 'alice:hush', 'hush']
    """
    place, _, query = url.partition("?")
    pieces: list[str] = []
    named: dict[str, list[str]] = {"env": [], "file": []}
    if user := _USER.match(place):
        pieces += [user[0][len(user[1]) : -1], *user[0][len(user[1]) : -1].split(":", 1)]
    if misplaced := _MISPLACED.search(place):
        pieces += misplaced[0][len(misplaced[1]) :].split("&")
    for option in query.split("&"):
        name, equals, value = option.partition("=")
        if name != _NAMING_OPTION:
            pieces.append(value if equals else name)
        named.get(name.rpartition("_")[2], []).append(unquote_plus(value))
    pieces += [piece for given in pieces for piece in (unquote(given), unquote_plus(given))]
    pieces = [piece for piece in pieces if len(piece) >= _SHORTEST_SECRET and not _HARMLESS.fullmatch(piece)]
    return {*pieces, *named_secrets(named["env"], named["file"])}


def named_secrets(variables: Iterable[str | None], files: Iterable[str | None]) -> set[str]:
    """Return the secrets in these environment variables and files, without any that cannot be read."""
    found = {os.environ[name].strip() for name in variables if name is not None and name in os.environ}
    for path in files:
        # A pipe can be read only once, by the program that needs the secret.
        if path is not None and os.path.isfile(path):
            with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                found.add(file.read(_FILE_BYTES_MAX).decode().strip())
    return found


def hide(text: str, secrets: Iterable[str]) -> str:
    r"""Return the text without the secrets, in their own form and in the repr of a text or of bytes.

    Secrets of less than four characters are not removed, because most of the message would be removed with them.

    >>> hide(r"login of 'hush' failed: b'hush\xc3\xa9'", ["hush", "hushé"])
    "login of '…' failed: b'…'"
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            for written in _written(secret):
                text = text.replace(written, _HIDDEN)
    return text


def has_secret(text: str, secrets: Iterable[str]) -> bool:
    """Return whether the text contains one of the secrets, however short."""
    return any(written in text for secret in secrets if secret for written in _written(secret))


def _written(secret: str) -> tuple[str, ...]:
    """Return a secret in its own form, and in the repr of a text and of bytes."""
    return secret, repr(secret)[1:-1], repr(secret.encode(errors="replace"))[2:-1]


def secret_option_names(names: Iterable[str]) -> list[str]:
    """Return the options that can give a secret: ``name``, ``name_env`` and ``name_file`` for each name."""
    return [f"{name}{suffix}" for name in names for suffix in ("", "_env", "_file")]


def with_secrets(given: Mapping[str, object], names: Collection[str], subject: str) -> dict[str, object]:
    """Return the options with each secret in place of its source: an environment variable or a file.

    ``names`` are the options that are secrets. ``<name>_env`` names a variable, ``<name>_file`` a file of one line.
    Raises ``ConfigurationError`` for a secret that is given twice, and for a source that is missing.

    >>> with_secrets({"password_env": "NOWHERE"}, ["password"], "topic 't'")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 't': expected the environment variable NOWHERE to hold password \
(password_env), given none; set it
    """
    options = dict(given)
    for name in names:
        ways = [way for way in secret_option_names([name]) if options.get(way) is not None]
        if len(ways) > 1:
            raise ConfigurationError(f"{subject}: expected one of {', '.join(ways)}, given {len(ways)}; leave one")
        variable, file = options.pop(f"{name}_env", None), options.pop(f"{name}_file", None)
        if variable is not None:
            options[name] = _out_of_environment(name, str(variable), subject)
        elif file is not None:
            options[name] = _out_of_file(name, str(file), subject)
    return options


def _out_of_environment(name: str, variable: str, subject: str) -> str:
    if _VARIABLE_NAME.fullmatch(variable) is None:
        raise ConfigurationError(
            f"{subject}: expected {name}_env to be the name of an environment variable, as KAFKA_PASSWORD, given "
            f"another text (not shown, since it may be the secret); give the secret itself as {name}"
        )
    if not (secret := os.environ.get(variable, "")).strip():
        given = "an empty one" if variable in os.environ else "none"
        raise ConfigurationError(
            f"{subject}: expected the environment variable {variable} to hold {name} ({name}_env), given {given}; "
            "set it"
        )
    return secret


def _out_of_file(name: str, path: str, subject: str) -> str:
    expected = f"{subject}: expected {name}_file to name a file with {name} in it, given {shown_path(path)}"
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        secret = content.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, a file that is not text
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise ConfigurationError(f"{expected}, which cannot be read ({reason})") from None
    if not secret.strip() or len(content) > _FILE_BYTES_MAX:
        raise ConfigurationError(f"{expected}, which is {'empty' if not secret.strip() else 'too large for a secret'}")
    return secret


T = TypeVar("T")

_TRUTHS: Final[Mapping[str, bool]] = MappingProxyType(
    {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
)


def options_from(kind: type[T], given: Mapping[str, object], subject: str) -> T:
    """Return the options of a connector, given as values or as texts of a URL; None is the same as no value.

    ``kind`` is a dataclass. A field has the type str, bool, int or float, or one of these or None; a field of another
    type is not changed. The metadata of a field may have the key

    - ``choices``, the texts that are allowed; ``least`` or ``above``, the lower bound of a number;
    - ``read``, a function that converts a value, or raises ``ValueError`` with the text that follows "expected";
    - ``is_secret``. Then ``with_secrets`` finds the secret, and errors show no text that was given for any option,
      because a secret may have been given for the wrong one.

    Raises ``ConfigurationError`` with all unknown options and wrong values, each with ``subject`` and its name.

    >>> from dataclasses import dataclass, field
    >>> @dataclass
    ... class Options:
    ...     acks: str = field(default="all", metadata={"choices": ("all", "1")})
    ...     wait_s: float = field(default=1.0, metadata={"above": 0})
    >>> options_from(Options, {"wait_s": "5"}, "topic 't'")
    Options(acks='all', wait_s=5.0)
    >>> options_from(Options, {"acks": "0"}, "topic 't'")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 't', option acks: expected "all" or "1", given '0'; choose one of them
    """
    known: dict[str, Field[Any]] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    secrets = [name for name, each in known.items() if each.metadata.get("is_secret")]
    listed = sorted({*known, *secret_option_names(secrets)})
    values, problems = {}, _unknown(subject, given, listed)
    given = {name: value for name, value in given.items() if name in listed}
    for name, value in with_secrets(given, secrets, subject).items():
        if value is not None:
            try:
                values[name] = _option(known[name], value)
            except ValueError as error:
                shown = _shown_value(value) if secrets else repr(value)
                remedy = f"; {error.remedy}" if isinstance(error, WrongValue) and error.remedy else ""
                problems.append(f"{subject}, option {name}: expected {error}, given {shown}{remedy}")
    if problems:
        raise ConfigurationError("\n".join(problems))
    return kind(**values)


def _option(option: Field[Any], value: object) -> object:
    """Return the value of an option; raise ``ValueError`` with the expected values."""
    if "read" in option.metadata:
        return option.metadata["read"](value)
    match str(option.type).removesuffix(" | None"):
        case "str":
            choices = option.metadata.get("choices")
            return choice_of(*choices)(str(value)) if choices else str(value)
        case "bool":
            return flag_of(_TRUTHS.get(str(value).lower()))
        case "int" | "float" as kind:
            return _number_option(option, str(in_seconds(value)), is_whole=kind == "int")
    return value


def _number_option(option: Field[Any], text: str, *, is_whole: bool) -> float:
    least, above = option.metadata.get("least"), option.metadata.get("above")
    bound = f" above {above}" if above is not None else f" of at least {least}" if least is not None else ""
    expected = ValueError(f"a {'whole ' if is_whole else ''}number{bound}")
    try:
        number = (int if is_whole else float)(text if has_plain_digits(text) else "")
    except ValueError:
        raise expected from None
    if (above is not None and not number > above) or (least is not None and not number >= least):
        raise expected
    return number


def is_shown_option(kind: type, name: str, value: str) -> bool:
    """Whether a URL may show an option: a number, a truth value or a known word, which is no secret."""
    option = next((each for each in fields(kind) if each.name == name), None)
    if option is None or (option.type in ("str", "str | None") and "choices" not in option.metadata):
        return False
    try:
        _option(option, value)
    except ValueError:
        return False
    return True


def _shown_value(value: object) -> str:
    """Return the repr of a number; other texts are not shown."""
    is_number = not isinstance(value, str) or re.fullmatch(r"[-+.\d]{1,12}", value)
    return repr(value) if is_number else "another text (not shown, since it may be a secret)"
