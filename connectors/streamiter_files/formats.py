"""The formats a file topic may have, told by the file's suffix or by the option ``format``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamiter.errors import ConfigurationError

__all__ = ["FORMATS", "FileFormat", "format_named", "format_of_name", "is_gzip", "known_suffixes"]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One format of lines.

    ``comment`` begins a line that is no record; ``delimiter`` (CSV and TSV only) stands between two fields.
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
