"""A file, or several, as a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar, Final, NoReturn

from streamiter.errors import ConfigurationError
from streamiter.topics.formats import Json, Text
from streamiter.topics.positions import check_request
from streamiter.topics.topic import Decoder, ReadRequest, Topic, TopicDescription
from streamiter_files.csv_format import Csv
from streamiter_files.dummy_format import Dummy
from streamiter_files.file_set import FileSet
from streamiter_files.libsvm_format import Libsvm
from streamiter_files.location import Location
from streamiter_files.options import FileOptions
from streamiter_files.reader import FilesReader
from streamiter_files.writer import FilesWriter

__all__ = ["FilesTopic"]


class FilesTopic(Topic):
    """Lines of a file; of several files where the path is a folder or a pattern, file i being partition i.

    **Reading is bounded**: it ends at the end that each file had when the reader was opened, also with
    ``stop=None`` or an offset behind it; what is appended later is for the next reader. The offset of a
    record is its number in its file, from 0; blank lines, comments and a CSV header do not count. So
    positions stay right as long as files are only appended to, and new files sort behind the old ones
    (digits in names sort as numbers).
    To go on at an offset, the lines before it are read and skipped. All records of a file have the time it
    was last changed as their time stamp: a ``start`` given as a time takes or leaves whole files.

    **Writing** appends lines. Several writers, also of several processes, may append to one file: they take
    turns, and lines stay whole. A missing file is created by its first writer, a missing folder by
    ``create`` only. What was flushed survives a crash; a torn last line is cut off by the next writer and
    kept beside the file (:mod:`streamiter_files.torn_lines`). Keys are not stored, headers are refused.
    There are no transactions: a sink is at-least-once.
    """

    bounded: Final = True
    has_transactions: ClassVar[bool] = False
    has_headers: ClassVar[bool] = False

    def __init__(self, location: Location, options: FileOptions) -> None:
        self._location = location
        self._options = options
        self._files = FileSet(location, options)

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def name(self) -> str:
        """The path as it is in the URL."""
        return self._location.name

    @property
    def commit_domain(self) -> str:
        """One of its own for each path: nothing is committed together."""
        return f"file:{self._location.path}"

    def beside(self, name: str) -> NoReturn:
        """Files have no commit domain to share: always a ``ConfigurationError``."""
        raise ConfigurationError(
            f"topic {self.url!r}: there is no topic {name!r} beside a file, as files are never committed "
            "together; topics of sqlite:// and kafka:// are"
        )

    def default_decoder(self) -> Decoder:
        """By format: ``Json()``, ``Csv()`` (fields as text), ``Libsvm()``, ``Dummy()`` or ``Text()``.

        Looks into the folder where only the files in it tell the format.
        """
        layout = self._files.layout()
        if layout.delimiter is not None:
            return Csv(columns=self._options.columns, delimiter=layout.delimiter)
        decoders: dict[str, Decoder] = {"libsvm": Libsvm(), "dummy": Dummy(), "txt": Text()}
        return decoders.get(layout.format.name, Json())

    async def open_reader(self, request: ReadRequest) -> FilesReader:
        """A position behind a file's end is an ``OffsetOutOfRange`` of ``read``, once the end is reached."""
        check_request(request, self.name)
        partitions = await asyncio.to_thread(self._files.partitions, request)
        return FilesReader(
            partitions,
            topic=self.name,
            max_records=request.max_records,
            files_at_once=self._options.files_at_once,
        )

    async def open_writer(self) -> FilesWriter:
        """Creates a missing file; where its folder is missing: ``TopicNotFound``."""
        files, comment = await asyncio.to_thread(self._files.append_files)
        return FilesWriter(files, topic=self.name, comment=comment)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> NoReturn:
        """Files have none: always a ``ConfigurationError``."""
        raise ConfigurationError(
            f"topic {self.url!r} (transactional id {transactional_id!r}): files have no transactions, "
            "topics of sqlite:// and kafka:// have; or accept records that come twice after a crash with "
            "sink(delivery='at_least_once')"
        )

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Empty files, and the folders that lead to them. More than one needs a folder or a pattern.

        In a folder they are ``part-0.jsonl``, ``part-1.jsonl`` …; in a pattern the number replaces the ``*``.
        """
        if partitions < 1:
            raise ConfigurationError(f"topic {self.name!r}: expected partitions >= 1, given {partitions}")
        if settings:
            raise ConfigurationError(
                f"topic {self.name!r}: files have no settings, given {', '.join(settings)}"
            )
        await asyncio.to_thread(self._files.create, partitions)

    async def describe(self) -> TopicDescription:
        """Counts the records, so it reads all files."""
        return await asyncio.to_thread(self._files.describe)

    async def delete(self) -> None:
        """Delete the files; a folder goes too if nothing else is in it."""
        await asyncio.to_thread(self._files.delete)

    def __repr__(self) -> str:
        return f"FilesTopic({self.url!r})"
