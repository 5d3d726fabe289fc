"""The files of a topic, in the order of its partitions."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from streamiter.errors import ConfigurationError, TopicError, TopicNotFound
from streamiter_files.file_errors import file_errors, nearby, not_found
from streamiter_files.formats import FileFormat, format_of_name, known_suffixes

__all__ = ["common_format", "folder_files", "in_order", "is_pattern", "matching_files", "names_a_folder"]

_DIGITS: Final = re.compile(r"([0-9]+)")


def in_order(paths: Iterable[str]) -> list[Path]:
    """Sorted by name, runs of digits as numbers, so that part-2 comes before part-10.

    >>> [path.name for path in in_order(["part-10", "part-2", "a"])]
    ['a', 'part-2', 'part-10']
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
