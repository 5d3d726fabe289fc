"""What a ``sqlite:`` URL and its options say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError
from streamiter.topics.secrets import shown_url
from streamiter_sqlite.schema import Synchronous

__all__ = ["SqliteOptions", "SqliteUrl", "parse_options", "parse_url"]


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """The file, and the topic in it where the URL names one."""

    path: Path
    topic: str | None

    def __str__(self) -> str:
        query = f"?topic={quote(self.topic, safe='')}" if self.topic is not None else ""
        return f"sqlite:///{quote(str(self.path))}{query}"


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """How topics in a file are read and written.

    ``clock``: gives the time stamps of records that come without.
    ``poll_interval_s``: how often a waiting reader looks for new records. After some empty looks it looks
    less often, down to once in ``poll_interval_max_s``.
    ``synchronous``: "full", a flush or commit survives a power cut; "normal", it survives the end of the
    process, and a power cut may take the last ones.
    ``lock_timeout_s``: how long a commit waits for other writers of the file. They hold the lock for as long
    as it takes to write some megabytes: a minute means that one of them hangs.
    """

    clock: Clock = field(default_factory=SystemClock)
    poll_interval_s: float = 0.02
    poll_interval_max_s: float = 0.2
    synchronous: str = "full"
    lock_timeout_s: float = 60.0

    @property
    def synchronous_mode(self) -> Synchronous:
        """The same as SQLite has it."""
        return "FULL" if self.synchronous == "full" else "NORMAL"


def parse_url(url: str) -> SqliteUrl:
    """Three slashes and a path: a fourth slash makes it absolute.

    >>> parse_url("sqlite:///data/log.db?topic=clicks")
    SqliteUrl(path=PosixPath('data/log.db'), topic='clicks')
    >>> print(parse_url("sqlite:////var/log.db"))
    sqlite:////var/log.db
    >>> parse_url("sqlite://log.db?topic=clicks")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite://log.db?topic=clicks': expected three slashes before \
a relative path and four before an absolute one, as in sqlite:///relative.db?topic=clicks
    """
    parts = urlsplit(url)
    path = unquote(parts.path).removeprefix("/")
    has_slashes = url.partition(":")[2].startswith("///")
    if not has_slashes or not path or path.endswith("/"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected three slashes before a relative path and four before an absolute one, "
            "as in sqlite:///relative.db?topic=clicks"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    topic = query.pop("topic", None)
    if query or parts.fragment or topic == "":
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected ?topic=<name> and nothing else behind the path"
        )
    return SqliteUrl(Path(path), topic)


def parse_options(url: str, options: Mapping[str, object]) -> SqliteOptions:
    """Check the options of :func:`streamiter.topic`.

    >>> parse_options("sqlite:///a.db", {"poll": 1})
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite:///a.db': expected options out of clock, \
poll_interval_s, poll_interval_max_s, synchronous, lock_timeout_s, given 'poll'
    """
    known = [option.name for option in fields(SqliteOptions)]
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"topic {shown_url(url)!r}: expected options out of {', '.join(known)}, given {name!r}"
            )
    parsed = SqliteOptions(**cast(Mapping[str, Any], options))
    if parsed.synchronous not in ("full", "normal"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected synchronous 'full' or 'normal', given {parsed.synchronous!r}"
        )
    if not 0 < parsed.poll_interval_s <= parsed.poll_interval_max_s:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected 0 < poll_interval_s <= poll_interval_max_s, "
            f"given {parsed.poll_interval_s} and {parsed.poll_interval_max_s}"
        )
    return parsed


def absolute(path: Path) -> Path:
    """The one name of a file: relative to the working directory of now, symbolic links followed."""
    return Path(os.path.realpath(path))
