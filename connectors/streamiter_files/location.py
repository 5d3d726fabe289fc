"""From a ``file:`` URL to a path and options.

=============================  ===========================================================
``file:///data/clicks.jsonl``  an absolute path
``file:data/clicks.jsonl``     a path relative to the folder the process runs in
``file:///data/clicks/``       a folder: each of its files is a partition
``file:data/day-*.csv.gz``     a pattern (``*``, ``**``, ``[0-9]``): each match is a partition
``file:part-0?format=libsvm``  options may follow a ``?``
=============================  ===========================================================

What a URL cannot hold as it is (``?``, ``#``, ``%``) is written ``%3F``, ``%23``, ``%25``. Two slashes
begin a host, so ``file://clicks.jsonl`` is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from streamiter.errors import ConfigurationError
from streamiter.topics.secrets import shown_url

__all__ = ["Location", "parse_url"]


@dataclass(frozen=True, slots=True)
class Location:
    """A URL taken apart: ``name`` is the path as written, ``path`` the same made absolute."""

    url: str
    name: str
    path: str
    options: dict[str, str]


def parse_url(url: str) -> Location:
    """Take a URL apart; raises ``ConfigurationError`` for one that is malformed.

    >>> parse_url("file:///data/a%20b.csv?format=tsv").path, parse_url("file:a.csv").name
    ('/data/a b.csv', 'a.csv')
    >>> parse_url("file://a.csv")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'file://a.csv': expected file:///absolute/path or \
file:relative/path, given a host 'a.csv'; did you mean 'file:a.csv'?
    """
    parts = _split(url)
    _check(parts, url)
    name = unquote(parts.path)
    path = os.path.join(os.getcwd(), name)  # pathlib would drop a trailing slash
    return Location(url, name, path, dict(parse_qsl(parts.query, keep_blank_values=True)))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected a file: URL, given a malformed one ({error})"
        ) from None


def _check(parts: SplitResult, url: str) -> None:
    if parts.scheme != "file":
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected the scheme file:, given {parts.scheme or 'none'!r}"
        )
    host = parts.netloc.rpartition("@")[2]
    if parts.netloc not in ("", "localhost"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected file:///absolute/path or file:relative/path, given a host "
            f"{host!r}; did you mean 'file:{host}{parts.path}'?"
        )
    if parts.fragment:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected no '#'; write %23 where the path has one"
        )
    if "\0" in unquote(parts.path):
        raise ConfigurationError(f"topic {shown_url(url)!r}: expected a path without NUL characters")
