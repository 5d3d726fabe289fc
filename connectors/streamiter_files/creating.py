"""New files for the partitions that a topic does not have yet."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from streamiter.errors import ConfigurationError
from streamiter_files.file_errors import file_errors
from streamiter_files.formats import FileFormat
from streamiter_files.matching import in_order, is_pattern, names_a_folder

__all__ = ["create_file", "new_files"]


def new_files(path: str, existing: Sequence[Path], partitions: int, given: FileFormat | None) -> list[Path]:
    """The files that are missing for the topic at ``path`` to have so many partitions.

    >>> [path.name for path in new_files("/data/part-*.jsonl", [Path("/data/part-0.jsonl")], 3, None)]
    ['part-1.jsonl', 'part-2.jsonl']
    """
    if not (names_a_folder(path) or is_pattern(path)):
        return _single(path, existing, partitions)
    before, after = _name_parts(path, given)
    missing = [Path(f"{before}{number}{after}") for number in range(len(existing), partitions)]
    if in_order(map(str, [*existing, *missing])) != [*existing, *missing]:
        raise ConfigurationError(
            f"topic {path!r}: a new file {missing[0].name!r} would not be the last in order of names, and "
            f"so move the partitions behind it; the last is {existing[-1].name!r}. Create the files by hand"
        )
    return missing


def _single(path: str, existing: Sequence[Path], partitions: int) -> list[Path]:
    if partitions > 1:
        folder, name = os.path.split(path)
        stem, dot, suffixes = name.partition(".")
        raise ConfigurationError(
            f"topic {path!r}: a file is one partition, asked for are {partitions}; give a pattern, such as "
            f"'file:{folder}/{stem}-*{dot}{suffixes}', or a folder"
        )
    return [] if existing else [Path(path)]


def _name_parts(path: str, given: FileFormat | None) -> tuple[str, str]:
    """What comes before and after the number in the name of a new file."""
    if names_a_folder(path):
        if given is None:
            raise ConfigurationError(
                f"topic {path!r}: expected the option format= to create files in a folder, "
                "such as format='jsonl'"
            )
        return f"{path.rstrip('/')}/part-", f".{given.suffixes[0]}"
    before, _, after = path.partition("*")
    if glob.has_magic(before) or glob.has_magic(after) or "/" in after:
        raise ConfigurationError(
            f"topic {path!r}: expected a pattern with one '*' in the file's name to create files, "
            "such as part-*.jsonl"
        )
    return before, after


def create_file(path: Path) -> None:
    """An empty file, and the folders that lead to it; what is there stays."""
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
