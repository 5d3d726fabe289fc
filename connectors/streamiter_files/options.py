"""URLs, options and formats of file topics, the files that a path matches, and the errors of the operating system.

=============================  ===========================================================
``file:///data/clicks.jsonl``  an absolute path
``file:data/clicks.jsonl``     a path relative to the folder the process runs in
``file:///data/clicks/``       a folder: each of its files is a partition
``file:data/day-*.csv.gz``     a pattern (``*``, ``**``, ``[0-9]``): each match is a partition
``file:part-0?format=libsvm``  options may follow a ``?``
=============================  ===========================================================

The characters ``?``, ``#`` and ``%`` of a path are written ``%3F``, ``%23`` and ``%25``. Two slashes begin a host, so
``file://clicks.jsonl`` is refused.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote

from streamiter.errors import ConfigurationError, StorageFull, TopicDenied, TopicError, TopicNotFound, did_you_mean
from streamiter.topics.urls import shown_url, split_url
from streamiter.values.helpers.files import FULL_DISK, advice_for

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Raise an ``OSError`` of the body as the error of the tree that fits."""
    try:
        yield
    except OSError as error:
        raise file_failure(error, path) from error


def file_failure(error: OSError, path: str | Path) -> TopicError:
    """Return the error of the tree for an ``OSError`` about ``path``."""
    reason = error.strerror or str(error)
    if error.errno in _MISSING:
        return not_found(path)
    if error.errno in _DENIED:
        return TopicDenied(
            f"file {str(path)!r}: {reason}; the process runs as user {os.geteuid()}, which needs the right "
            "to read (a source) or write (a sink) the file and to enter its folders"
        )
    if error.errno in FULL_DISK:
        return StorageFull(
            f"file {str(path)!r}: {reason}; the records stored before are complete, the rest was not written. "
            "Make room, then run again"
        )
    code = errno.errorcode.get(error.errno or 0, "?")
    return TopicError(f"file {str(path)!r}: {reason} ({code}); {advice_for(reason)}, then run again")


def not_found(path: str | Path) -> TopicNotFound:
    """Return a ``TopicNotFound`` that names a file of a similar name, or the first missing folder."""
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path("/"))
        missing = existing / folder.relative_to(existing).parts[0]
        return TopicNotFound(f"file {str(path)!r}: there is no folder {str(missing)!r}{nearby(missing)}")
    return TopicNotFound(f"file {str(path)!r}: there is no such file{nearby(path)}")


def nearby(path: Path) -> str:
    """Return a similar name in the folder of ``path``, as the end of a message."""
    try:
        siblings = sorted(os.listdir(path.parent))
    except OSError:
        return ""
    return did_you_mean(path.name, siblings, likeness=0.5) or f" in {str(path.parent)!r}"


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One format of lines. The suffix of the file, or the option ``format``, tells the format."""

    name: str
    """The name in messages."""
    suffixes: tuple[str, ...]
    """The suffixes of its files, without the dot."""
    comment: bytes | None = None
    """The beginning of a line that is not a record; None for a format without comments."""
    delimiter: str | None = None
    """The text between two fields; None for formats other than CSV and TSV."""
    is_table: bool = False
    """Whether its files have rows of a table in place of lines; such files are not compressed as a whole."""


FILE_FORMATS: Final = (
    FileFormat("jsonl", ("jsonl", "ndjson", "json")),
    FileFormat("csv", ("csv",), delimiter=","),
    FileFormat("tsv", ("tsv",), delimiter="\t"),
    FileFormat("libsvm", ("libsvm",), comment=b"#"),
    FileFormat("dummy", ("dummy",), comment=b"#"),
    FileFormat("txt", ("txt",)),
    FileFormat("parquet", ("parquet",), is_table=True),
    FileFormat("arrow", ("arrow", "feather"), is_table=True),
)


def known_suffixes() -> str:
    """Return the suffixes, for error messages.

    >>> known_suffixes()
    '.jsonl, .ndjson, .json, .csv, .tsv, .libsvm, .dummy, .txt (each also with .gz), .parquet, .arrow, .feather'
    """
    lines, tables = (
        ", ".join(f".{suffix}" for known in FILE_FORMATS if known.is_table is is_table for suffix in known.suffixes)
        for is_table in (False, True)
    )
    return f"{lines} (each also with .gz), {tables}"


def is_gzip(name: str) -> bool:
    """Return whether a file of that name is compressed."""
    return name.endswith(".gz")


def format_of_name(name: str) -> FileFormat | None:
    """Return the format of a file name by its suffix; None for an unknown suffix.

    >>> format_of_name("clicks.ndjson.gz").name, format_of_name("README.md")
    ('jsonl', None)
    """
    suffix = name.removesuffix(".gz").rpartition(".")[2]
    known = _with_suffix(suffix) if "." in name else None
    return None if known is not None and known.is_table and is_gzip(name) else known


def _with_suffix(suffix: str) -> FileFormat | None:
    return next((known for known in FILE_FORMATS if suffix in known.suffixes), None)


@dataclass(frozen=True, slots=True)
class Location:
    """The parts of a ``file:`` URL."""

    url: str
    """The URL as it was given."""
    name: str
    """The path as the URL has it."""
    path: str
    """The absolute path."""
    options: dict[str, str]
    """The options of the query, as texts."""


def parse_file_url(url: str) -> Location:
    """Return the parts of a URL; raise ``ConfigurationError`` for a malformed one.

    >>> parse_file_url("file:///data/a%20b.csv?format=tsv").path, parse_file_url("file:a.csv").name
    ('/data/a b.csv', 'a.csv')
    >>> parse_file_url("file://a.csv")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'file://a.csv': expected file:///absolute/path or \
file:relative/path, given a host 'a.csv'; did you mean 'file:a.csv'?
    """
    parts = split_url(url)
    _check(parts, url)
    name = unquote(parts.path)
    path = os.path.join(os.getcwd(), name)  # pathlib would drop a trailing slash
    return Location(url, name, path, dict(parse_qsl(parts.query, keep_blank_values=True)))


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
        raise ConfigurationError(f"topic {shown_url(url)!r}: expected no '#'; write %23 where the path has one")
    if "\0" in unquote(parts.path):
        raise ConfigurationError(f"topic {shown_url(url)!r}: expected a path without NUL characters")


_DIGITS: Final = re.compile(r"([0-9]+)")


def sorted_paths(paths: Iterable[str]) -> list[Path]:
    """Return the paths sorted by name, with digits as numbers: part-2 comes before part-10.

    This is the order of the partitions.

    >>> [path.name for path in sorted_paths(["part-10", "part-2", "a"])]
    ['a', 'part-2', 'part-10']
    """
    return [Path(path) for path in sorted(paths, key=_order)]


def _order(path: str) -> tuple[list[str | int], str]:
    parts = _DIGITS.split(path)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], path


def is_pattern(path: str) -> bool:
    """Return whether the path is a pattern with ``*``, ``?`` or ``[``, and not the name of an existing file."""
    return glob.has_magic(path) and not os.path.lexists(path)


def names_a_folder(path: str) -> bool:
    """Return whether the path is a folder, or ends with a slash."""
    return path.endswith("/") or os.path.isdir(path)  # pathlib would drop the slash


def matching_files(path: str, given: FileFormat | None) -> list[Path]:
    """Return the files at ``path`` (a file, a pattern or a folder), one for each partition.

    Raises ``TopicNotFound`` where there is none.
    """
    if names_a_folder(path):
        return _some(folder_files(path, given), path, f"files of a known suffix: {known_suffixes()}")
    if is_pattern(path):
        return _some(_pattern_files(path), path, "files that match")
    if not os.path.lexists(path):  # opening a broken link raises its error
        raise not_found(path)
    return [Path(path)]


def _pattern_files(path: str) -> list[Path]:
    found = glob.iglob(path, recursive=True)  # pathlib's takes no absolute pattern
    return sorted_paths(match for match in found if os.path.isfile(match))


def folder_files(path: str, given: FileFormat | None) -> list[Path]:
    """Return the files directly in a folder: those of a known suffix, or all files if the format is given.

    Names that begin with a dot or an underscore are left out, because other tools use such files for themselves.
    """
    if not Path(path).exists():
        raise not_found(path)
    with file_errors(path):
        entries = [entry for entry in os.scandir(path) if entry.is_file() and entry.name[0] not in "._"]
    return sorted_paths(entry.path for entry in entries if given or format_of_name(entry.name))


def _some(files: list[Path], path: str, expected: str) -> list[Path]:
    if not files:
        where = "" if names_a_folder(path) else nearby(Path(path))
        raise TopicNotFound(f"topic {path!r}: expected {expected}, found none{where}")
    return files


def new_files(path: str, existing: Sequence[Path], partitions: int, given: FileFormat | None) -> list[Path]:
    """Return the files that the topic at ``path`` lacks to have this many partitions.

    >>> [path.name for path in new_files("/data/part-*.jsonl", [Path("/data/part-0.jsonl")], 3, None)]
    ['part-1.jsonl', 'part-2.jsonl']
    """
    if not (names_a_folder(path) or is_pattern(path)):
        return _single(path, existing, partitions)
    before, after = name_parts(path, given)
    missing = [Path(f"{before}{number}{after}") for number in range(len(existing), partitions)]
    if sorted_paths(map(str, [*existing, *missing])) != [*existing, *missing]:
        raise ConfigurationError(
            f"topic {path!r}: a new file {missing[0].name!r} would not be the last in the order of names, and "
            f"would change the numbers of later partitions; the last file is {existing[-1].name!r}. "
            "Create the files by hand"
        )
    return missing


def _single(path: str, existing: Sequence[Path], partitions: int) -> list[Path]:
    if partitions > 1:
        folder, name = os.path.split(path)
        stem, dot, suffixes = name.partition(".")
        raise ConfigurationError(
            f"topic {path!r}: expected 1 partition for one file, given {partitions}; give a pattern, such as "
            f"'file:{folder}/{stem}-*{dot}{suffixes}', or a folder"
        )
    return [] if existing else [Path(path)]


def name_parts(path: str, given: FileFormat | None) -> tuple[str, str]:
    """Return the parts of a new file's name before and after its number."""
    if names_a_folder(path):
        if given is None:
            raise ConfigurationError(
                f"topic {path!r}: expected the option format= to create files in a folder, such as format='jsonl'"
            )
        return f"{path.rstrip('/')}/part-", f".{given.suffixes[0]}"
    before, _, after = path.partition("*")
    if glob.has_magic(before) or glob.has_magic(after) or "/" in after:
        raise ConfigurationError(
            f"topic {path!r}: expected a pattern with one '*' in the file's name to create files, such as part-*.jsonl"
        )
    return before, after


def create_file(path: Path) -> None:
    """Create an empty file and its folders; existing ones are kept."""
    create_folder(path.parent)
    with file_errors(path):
        path.open("ab").close()


def create_folder(folder: Path) -> None:
    """Create a folder, and those above it; existing ones are kept."""
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def common_format(files: Iterable[Path], *, topic: str) -> FileFormat:
    """Return the one format that all files have by their suffixes; raise an error if there are several."""
    by_format: dict[str, tuple[FileFormat, Path]] = {}
    for path in files:
        known = format_of_name(path.name)
        if known is None:
            raise ConfigurationError(
                f"topic {topic!r}: expected a known suffix, given {path.name!r}; known are "
                f"{known_suffixes()}; or give the format with the option format="
            )
        by_format.setdefault(known.name, (known, path))
    if len(by_format) > 1:
        shown = ", ".join(f"{name} ({path.name})" for name, (_, path) in by_format.items())
        raise TopicError(
            f"topic {topic!r}: expected files of one format, found {shown}; select the files of one format "
            "with a pattern, such as file:folder/*.jsonl"
        )
    [(found, _)] = by_format.values()
    return found


# A chunk is large enough that handing it to a thread (about 0.1 ms) is cheap compared with splitting it into lines
# (about 5 ms), and small enough that the chunks of all open files take a few dozen MiB.
_CHUNK_BYTES: Final = 1 << 20

# This many files are open and take turns; a folder of 10,000 files needs neither 10,000 handles nor 10,000 chunks.
_FILES_AT_ONCE: Final = 8


def _format(value: object) -> FileFormat:
    if (found := _with_suffix(str(value))) is None:
        raise ValueError(f"one of {', '.join(suffix for known in FILE_FORMATS for suffix in known.suffixes)}")
    return found


def _delimiter(value: object) -> str:
    if not (isinstance(value, str) and len(value) == 1 and value.isascii() and value not in '"\r\n'):
        raise ValueError("one ASCII character, no quote or line end")
    return value


def _columns(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not (isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names)):
        raise ValueError("names of columns")
    if len(set(names)) < len(names):
        raise ValueError("names that differ")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The options of a file topic.

    >>> from streamiter.topics.urls import options_from
    >>> options_from(FileOptions, {"header": "false", "columns": "a,b"}, "topic 't'").columns
    ('a', 'b')
    """

    format: FileFormat | None = field(default=None, metadata={"read": _format})
    """The format; None for the format of the suffix."""
    delimiter: str | None = field(default=None, metadata={"read": _delimiter})
    """The text between two fields of a CSV file; None for that of the format."""
    header: bool = True
    """Whether the first line of a CSV file names the columns."""
    columns: tuple[str, ...] | None = field(default=None, metadata={"read": _columns})
    """The names of the columns of a CSV file without header; otherwise the header that a reader expects, and that a
    writer writes into a new file. For tables, the columns to read."""
    chunk_bytes: int = field(default=_CHUNK_BYTES, metadata={"least": 1})
    """The number of bytes that are read at a time."""
    files_at_once: int = field(default=_FILES_AT_ONCE, metadata={"least": 1})
    """The number of files that are open and take turns; 1 reads one file after the other, in order."""
    in_order: bool = False
    """Whether the files follow each other in time, in the order of their names: they are read one after the other, and
    event time counts them as one partition, so that it goes on with each file."""
