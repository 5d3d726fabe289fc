"""From a URL to its topic.

The scheme of the URL names a connector, which is registered under the entry point group ``streamiter.topics``. A
package of your own registers its connector with two lines in its ``pyproject.toml``::

    [project.entry-points."streamiter.topics"]
    pulsar = "my_package:PulsarConnector"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from streamiter.errors import ConfigurationError
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Connector, Topic

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP: Final = "streamiter.topics"

# The extra of the distribution that installs the client library of a scheme.
_EXTRA_OF_SCHEME: Final[Mapping[str, str]] = MappingProxyType({"kafka": "kafka"})


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
schemes file://, kafka:// (pip install 'streamiter[kafka]'), memory://, sqlite://, given carrier-pigeon://
    """
    return connector_for(url).topic(url, options)


def connector_for(url: str) -> Connector:
    """Return the connector that serves the scheme of ``url``; raises the errors of :func:`topic`.

    Each call looks up the entry points again (about 1 ms), because a job makes few topics.
    """
    scheme = _scheme(url)
    for entry_point in _entry_points():
        if entry_point.name == scheme:
            return _load(entry_point, url)
    raise ConfigurationError(
        f"topic {shown_url(url)!r}: expected one of the schemes {_listed(known_schemes())}, given {scheme}://"
    )


def check_options(subject: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise ``ConfigurationError`` for an option that a connector does not have."""
    listed = list(known)
    for name in options:
        if name not in listed:
            # A text that is no name may be part of a password.
            shown = repr(name) if name.isidentifier() else "(not shown, since it is no name)"
            raise ConfigurationError(
                f"{subject}: unknown option {shown}; the options are {', '.join(listed)}"
            )


def known_schemes() -> list[str]:
    """Return the schemes that have a connector, sorted.

    >>> "memory" in known_schemes()
    True
    """
    return sorted({entry_point.name for entry_point in _entry_points()})


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # takes 5 ms, which an import of streamiter should not

    return entry_points(group=ENTRY_POINT_GROUP)


def _scheme(url: str) -> str:
    scheme, separator, rest = url.partition(":")
    is_url = rest.startswith("//") or scheme.lower() in known_schemes()  # file:relative.csv has no slashes
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
    extra = _EXTRA_OF_SCHEME.get(scheme)
    return f"; install it with: pip install 'streamiter[{extra}]'" if extra else ""


def _listed(schemes: list[str]) -> str:
    """Return the schemes as text, each with the command that installs its client library."""
    extras = {scheme: f" (pip install 'streamiter[{extra}]')" for scheme, extra in _EXTRA_OF_SCHEME.items()}
    return ", ".join(f"{scheme}://{extras.get(scheme, '')}" for scheme in schemes)
