"""The options of a file topic, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from streamiter.errors import ConfigurationError
from streamiter.numbers import whole_number_in
from streamiter_files.formats import FileFormat, format_named

__all__ = ["FileOptions", "parse_options"]

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
