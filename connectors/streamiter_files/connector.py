"""The entry point for ``file:`` URLs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from streamiter.errors import ConfigurationError
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Connector
from streamiter_files.formats import FileFormat, format_of_name, known_suffixes
from streamiter_files.location import Location, parse_url
from streamiter_files.matching import folder_files, is_pattern, names_a_folder
from streamiter_files.options import FileOptions, parse_options
from streamiter_files.topic import FilesTopic

__all__ = ["FilesConnector"]


class FilesConnector(Connector):
    """Serves ``file:`` URLs (:mod:`streamiter_files.location`) with the options of `FileOptions`.

    Options may be in the URL, after a ``?``, or given beside it.

    >>> FilesConnector().topic("file:data/clicks.jsonl.gz", {})
    FilesTopic('file:data/clicks.jsonl.gz')
    """

    def topic(self, url: str, options: Mapping[str, object]) -> FilesTopic:
        location = parse_url(url)
        parsed = parse_options({**location.options, **options}, topic=shown_url(url))
        _check_format(location, parsed)
        return FilesTopic(location, parsed)

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        """Names of the files of known formats in the folder at ``url``, or beside the file at ``url``."""
        location = parse_url(url)
        parsed = parse_options({**location.options, **options}, topic=shown_url(url))
        return await asyncio.to_thread(_names, location.path, parsed.format)


def _check_format(location: Location, options: FileOptions) -> None:
    if not Path(location.name).name and not location.name.endswith("/"):
        raise ConfigurationError(
            f"topic {shown_url(location.url)!r}: expected a path, as in file:data/clicks.jsonl"
        )
    is_known = options.format or format_of_name(Path(location.path).name)
    if not (is_known or names_a_folder(location.path) or is_pattern(location.path)):
        raise ConfigurationError(
            f"topic {shown_url(location.url)!r}: expected a known suffix: {known_suffixes()}; or say which format it "
            "has with the option format=; or end the path with '/' if it is a folder"
        )


def _names(path: str, given: FileFormat | None) -> list[str]:
    folder = path if names_a_folder(path) else os.path.dirname(path)
    return [file.name for file in folder_files(folder, given)]
