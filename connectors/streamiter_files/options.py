"""What the operating system says about a file, told as an error of the tree, with what to do."""

from __future__ import annotations

import difflib
import errno
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from streamiter.errors import ConfigurationError, StorageFull, TopicDenied, TopicError, TopicNotFound
from streamiter.numbers import whole_number_in
from streamiter.topics.secrets import shown_url

__all__ = [
    "FileFormat",
    "FileOptions",
    "Location",
    "common_format",
    "file_errors",
    "folder_files",
    "format_of_name",
    "in_order",
    "is_gzip",
    "is_pattern",
    "known_suffixes",
    "matching_files",
    "names_a_folder",
    "parse_options",
    "parse_url",
]


# EFBIG is a limit on the file's size (ulimit -f, or what the file system can hold): no room either.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})

# Names listed in an error message: a reader takes in about as many at a glance.
_NAMES_SHOWN: Final = 3


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` of the body into the error of the tree that fits."""
    try:
        yield
    except OSError as error:
        raise translated(error, path) from error


def translated(error: OSError, path: str | Path) -> TopicError:
    """The error of the tree for an ``OSError`` about ``path``."""
    reason = error.strerror or str(error)
    if error.errno in _MISSING:
        return not_found(path)
    if error.errno in _DENIED:
        return TopicDenied(
            f"file {str(path)!r}: {reason}; the process runs as user {os.geteuid()}, which needs the right "
            "to read (a source) or write (a sink) the file and to enter its folders"
        )
    if error.errno in _FULL:
        return StorageFull(
            f"file {str(path)!r}: {reason}; what was stored before is whole, the rest was not written. "
            "Make room, then run again"
        )
    return TopicError(f"file {str(path)!r}: {reason} ({errno.errorcode.get(error.errno or 0, '?')})")


def not_found(path: str | Path) -> TopicNotFound:
    """A ``TopicNotFound`` that names the files of similar names, or the first folder that is missing."""
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path("/"))
        missing = existing / folder.relative_to(existing).parts[0]
        return TopicNotFound(f"file {str(path)!r}: there is no folder {str(missing)!r}{nearby(missing)}")
    return TopicNotFound(f"file {str(path)!r}: there is no such file{nearby(path)}")


def nearby(path: Path) -> str:
    """Names beside ``path`` that resemble its own, as the end of a message."""
    try:
        siblings = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=_NAMES_SHOWN, cutoff=0.5)
    return f"; near it are {', '.join(map(repr, close))}" if close else f" in {str(path.parent)!r}"


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One format of lines.

    ``comment`` begins a line that is no record; ``delimiter`` (CSV and TSV only) stands between two fields.

    The formats a file topic may have, told by the file's suffix or by the option ``format``.
    """

    name: str
    suffixes: tuple[str, ...]
    comment: bytes | None = None
    delimiter: str | None = None


FORMATS: Final = (
    FileFormat("jsonl", ("jsonl", "ndjson", "json")),
    FileFormat("csv", ("csv",), delimiter=","),
    FileFormat("tsv", ("tsv",), delimiter="\t"),
    FileFormat("libsvm", ("libsvm",), comment=b"#"),
    FileFormat("dummy", ("dummy",), comment=b"#"),
    FileFormat("txt", ("txt",)),
)


def known_suffixes() -> str:
    """The suffixes, for error messages.

    >>> known_suffixes()
    '.jsonl, .ndjson, .json, .csv, .tsv, .libsvm, .dummy, .txt (each also with .gz)'
    """
    suffixes = ", ".join(f".{suffix}" for known in FORMATS for suffix in known.suffixes)
    return f"{suffixes} (each also with .gz)"


def is_gzip(name: str) -> bool:
    """Whether a file of that name is compressed."""
    return name.endswith(".gz")


def format_of_name(name: str) -> FileFormat | None:
    """The format that the suffix of a file name tells, or None.

    >>> format_of_name("clicks.ndjson.gz").name, format_of_name("README.md")
    ('jsonl', None)
    """
    suffix = name.removesuffix(".gz").rpartition(".")[2]
    return _with_suffix(suffix) if "." in name else None


def format_named(name: str, *, where: str) -> FileFormat:
    """The format that the option ``format`` names: a suffix without its dot."""
    found = _with_suffix(name)
    if found is None:
        names = ", ".join(suffix for known in FORMATS for suffix in known.suffixes)
        raise ConfigurationError(f"{where}: expected one of {names}, given {name!r}")
    return found


def _with_suffix(suffix: str) -> FileFormat | None:
    return next((known for known in FORMATS if suffix in known.suffixes), None)


@dataclass(frozen=True, slots=True)
class Location:
    """A URL taken apart: ``name`` is the path as written, ``path`` the same made absolute.

    From a ``file:`` URL to a path and options.

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


_DIGITS: Final = re.compile(r"([0-9]+)")


def in_order(paths: Iterable[str]) -> list[Path]:
    """Sorted by name, runs of digits as numbers, so that part-2 comes before part-10.

    >>> [path.name for path in in_order(["part-10", "part-2", "a"])]
    ['a', 'part-2', 'part-10']

    The files of a topic, in the order of its partitions.
    """
    return [Path(path) for path in sorted(paths, key=_order)]


def _order(path: str) -> tuple[list[str | int], str]:
    parts = _DIGITS.split(path)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], path


def is_pattern(path: str) -> bool:
    """Whether the path matches several files by ``*``, ``?`` or ``[``; an existing file never does."""
    return glob.has_magic(path) and not os.path.lexists(path)


def names_a_folder(path: str) -> bool:
    """Whether the path is a folder, or written as one (with a slash at its end)."""
    return path.endswith("/") or os.path.isdir(path)  # pathlib would drop the slash


def matching_files(path: str, given: FileFormat | None) -> list[Path]:
    """The files at ``path`` (a file, a pattern or a folder), one for each partition.

    Raises ``TopicNotFound`` where there is none.
    """
    if names_a_folder(path):
        return _some(folder_files(path, given), path, f"files of a known suffix: {known_suffixes()}")
    if is_pattern(path):
        return _some(_pattern_files(path), path, "files that match")
    if not os.path.lexists(path):  # a broken link is told when it is opened
        raise not_found(path)
    return [Path(path)]


def _pattern_files(path: str) -> list[Path]:
    found = glob.iglob(path, recursive=True)  # pathlib's takes no absolute pattern
    return in_order(match for match in found if os.path.isfile(match))


def folder_files(path: str, given: FileFormat | None) -> list[Path]:
    """The files right in a folder: of a known suffix, or all of them where the format is given.

    Names that begin with a dot or an underscore are left out, as other tools keep their own notes there.
    """
    if not Path(path).exists():
        raise not_found(path)
    with file_errors(path):
        entries = [entry for entry in os.scandir(path) if entry.is_file() and entry.name[0] not in "._"]
    return in_order(entry.path for entry in entries if given or format_of_name(entry.name))


def _some(files: list[Path], path: str, expected: str) -> list[Path]:
    if not files:
        where = "" if names_a_folder(path) else nearby(Path(path))
        raise TopicNotFound(f"topic {path!r}: expected {expected}, found none{where}")
    return files


def common_format(files: Iterable[Path], *, topic: str) -> FileFormat:
    """The one format that all the files have by their suffixes."""
    by_format: dict[str, tuple[FileFormat, Path]] = {}
    for path in files:
        known = format_of_name(path.name)
        if known is None:
            raise ConfigurationError(
                f"topic {topic!r}: expected a known suffix, given {path.name!r}; known are "
                f"{known_suffixes()}; or say which with the option format="
            )
        by_format.setdefault(known.name, (known, path))
    if len(by_format) > 1:
        shown = ", ".join(f"{name} ({path.name})" for name, (_, path) in by_format.items())
        raise TopicError(
            f"topic {topic!r}: expected files of one format, found {shown}; name those of one with a "
            "pattern, such as file:folder/*.jsonl"
        )
    [(found, _)] = by_format.values()
    return found


# A chunk large enough that handing it to a thread (some 0.1 ms) is nothing beside splitting it into
# lines (some 5 ms), small enough that the chunks of all open files stay within a few dozen MiB.
_CHUNK_BYTES: Final = 1 << 20

# Files that take turns; the others wait, so that a folder of 10,000 needs neither 10,000 handles nor chunks.
_FILES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How the files of a topic are read and written.

    ``format`` None leaves it to the suffix, ``delimiter`` None to the format. ``header`` says whether the
    first line of a CSV file names the columns; ``columns`` names them where there is no header, or tells
    which header is expected (when reading) or written (into a new file). ``chunk_bytes`` are read at a
    time; ``files_at_once`` files take turns (1 reads one file after the other, in order).

    The options of a file topic, checked.
    """

    format: FileFormat | None = None
    delimiter: str | None = None
    header: bool = True
    columns: tuple[str, ...] | None = None
    chunk_bytes: int = _CHUNK_BYTES
    files_at_once: int = _FILES_AT_ONCE


def parse_options(options: Mapping[str, object], *, topic: str) -> FileOptions:
    """Options as given in Python or, as text, in the URL; ``ConfigurationError`` for a wrong one.

    >>> parse_options({"header": "false", "columns": "a,b"}, topic="t").columns
    ('a', 'b')
    """
    unknown = sorted(name for name in options if name not in _PARSERS)
    if unknown:
        raise ConfigurationError(
            f"topic {topic!r}: unknown option {unknown[0]!r}; a file topic has {', '.join(_PARSERS)}"
        )
    parsed = {
        name: _PARSERS[name](value, f"topic {topic!r}, option {name}") for name, value in options.items()
    }
    return FileOptions(**parsed)


def _format(value: object, where: str) -> FileFormat:
    if not isinstance(value, str):
        raise ConfigurationError(f"{where}: expected a name such as 'jsonl', given {value!r}")
    return format_named(value, where=where)


def _delimiter(value: object, where: str) -> str:
    if not (isinstance(value, str) and len(value) == 1 and value.isascii() and value not in '"\r\n'):
        raise ConfigurationError(
            f"{where}: expected one ASCII character, no quote or line end, given {value!r}"
        )
    return value


def _header(value: object, where: str) -> bool:
    named = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(named, bool):
        raise ConfigurationError(f"{where}: expected true or false, given {value!r}")
    return named


def _columns(value: object, where: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not (isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names)):
        raise ConfigurationError(f"{where}: expected names of columns, given {value!r}")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"{where}: expected names that differ, given {value!r}")
    return tuple(names)


def _count(value: object, where: str) -> int:
    number = whole_number_in(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigurationError(f"{where}: expected a whole number of at least 1, given {value!r}")
    return number


_PARSERS: Final[Mapping[str, Callable[[object, str], Any]]] = MappingProxyType(
    {
        "format": _format,
        "delimiter": _delimiter,
        "header": _header,
        "columns": _columns,
        "chunk_bytes": _count,
        "files_at_once": _count,
    }
)
