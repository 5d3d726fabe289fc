"""From where to where one file is read."""

from __future__ import annotations

import asyncio
import csv
import glob
import io
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Final, NoReturn

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicError, TopicNotFound
from streamiter.topics.formats import Json, Text
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import (
    Connector,
    Decoder,
    ReadRequest,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    check_named_partitions,
    check_request,
    named_positions,
    partitions_of,
    timestamp_of,
)
from streamiter_files.chunks import OneAtATime, file_state, has_identity, identity_of
from streamiter_files.csv_format import Csv
from streamiter_files.options import (
    FileFormat,
    FileOptions,
    Location,
    common_format,
    file_errors,
    folder_files,
    format_of_name,
    in_order,
    is_gzip,
    is_pattern,
    known_suffixes,
    matching_files,
    names_a_folder,
    parse_options,
    parse_url,
)
from streamiter_files.partition import FileLayout, FilePartition, count_records
from streamiter_files.sparse_format import Dummy, Libsvm
from streamiter_files.writer import AppendFile, FilesWriter, is_whole_json, torn_path

__all__ = [
    "FilesConnector",
    "FilesReader",
    "FilesTopic",
]


def bounds(request: ReadRequest, number: int, mtime_ms: int, *, topic: str) -> tuple[int, int | None]:
    """The first offset to read of partition ``number``, and the one to stop before (None: the end).

    >>> bounds(ReadRequest(positions={0: 7}, stop="latest"), 0, 0, topic="t")
    (7, None)
    """
    start = _start(request, number, mtime_ms)
    if start is None:
        return 0, 0
    if start < 0:
        raise OffsetOutOfRange(f"topic {topic!r}, partition {number}: expected offsets from 0, given {start}")
    return start, request.stop.get(number, start) if isinstance(request.stop, Mapping) else None


def _start(request: ReadRequest, number: int, mtime_ms: int) -> int | None:
    """None is the end of the file."""
    if request.positions is not None:
        return request.positions.get(number, 0)
    start = request.start
    if isinstance(start, datetime):
        return 0 if mtime_ms >= timestamp_of(start) else None
    if isinstance(start, Mapping):
        return start.get(number, 0)
    return None if start == "latest" else 0


def new_files(path: str, existing: Sequence[Path], partitions: int, given: FileFormat | None) -> list[Path]:
    """The files that are missing for the topic at ``path`` to have so many partitions.

    >>> [path.name for path in new_files("/data/part-*.jsonl", [Path("/data/part-0.jsonl")], 3, None)]
    ['part-1.jsonl', 'part-2.jsonl']

    New files for the partitions that a topic does not have yet.
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


class FileSet:
    """The files at a location, one for each partition.

    The files of a topic: found, opened, created, deleted. All of it blocks: it runs in threads.
    """

    def __init__(self, location: Location, options: FileOptions) -> None:
        self._name = location.name
        self._path = location.path
        self._options = options

    def layout(self, files: Sequence[Path] = ()) -> FileLayout:
        """The format, by option, by the suffix in the path or, in a folder, by the files there are."""
        known = self._options.format
        if known is None and not names_a_folder(self._path):
            known = format_of_name(Path(self._path).name)
        return FileLayout(known or common_format(files or self._files(), topic=self._name), self._options)

    def _files(self) -> list[Path]:
        return matching_files(self._path, self._options.format)

    def _files_so_far(self) -> list[Path]:
        try:
            return self._files()
        except TopicNotFound:
            return []

    def partitions(self, request: ReadRequest) -> list[FilePartition]:
        """The share of a reader."""
        files = self._files()
        layout = self.layout(files)
        check_named_partitions(request, len(files), topic=self._name)
        share = partitions_of(request, len(files))
        return [self._partition(number, files[number], layout, request) for number in share]

    def _partition(self, number: int, path: Path, layout: FileLayout, request: ReadRequest) -> FilePartition:
        state = file_state(path)
        start, stop = bounds(request, number, state.mtime_ms, topic=self._name)
        _check_identity(request, number, path, start)
        return FilePartition(number, state, layout, start=start, stop=stop, identity=identity_of(path))

    def append_files(self) -> tuple[list[AppendFile], bytes | None]:
        """Files open for writing, and what begins a comment in them.

        Where there is no file, the first one is created, but no folder.
        """
        files = self._files_so_far() or new_files(self._path, [], 1, self._options.format)
        layout = self.layout(files)
        opened: list[AppendFile] = []
        try:
            for path in files:
                opened.append(self._append_file(path, layout))  # noqa: PERF401 - those opened get closed
        except BaseException:
            for file in opened:
                file.close()
            raise
        return opened, layout.format.comment

    def _append_file(self, path: Path, layout: FileLayout) -> AppendFile:
        is_new = not path.exists() or path.stat().st_size == 0
        header = self._header(path, layout, is_new=is_new)
        is_whole = is_whole_json if layout.format.name == "jsonl" else None
        file = AppendFile(path, header=header, is_whole=is_whole)
        if layout.has_header and not is_new:
            _check_header(path, layout)
        return file

    def _header(self, path: Path, layout: FileLayout, *, is_new: bool) -> bytes | None:
        if not layout.has_header or layout.delimiter is None:
            return None
        if self._options.columns is not None:
            return _header_line(self._options.columns, layout.delimiter)
        if is_new:
            raise ConfigurationError(
                f"topic {self._name!r}: expected the option columns=('name', ...), which a new file "
                f"({path.name}) begins with; for a file without header give header=False"
            )
        return None

    def create(self, partitions: int) -> None:
        """Create the files that are missing."""
        existing = self._files_so_far()
        known = self._options.format
        if known is None and existing:
            known = common_format(existing, topic=self._name)
        for path in new_files(self._path, existing, partitions, known):
            create_file(path)

    def describe(self) -> TopicDescription:
        """Counts the records: reads all files."""
        files = self._files()
        layout = self.layout(files)
        counts = [count_records(file_state(path), layout) for path in files]
        packed = sorted({"gzip" if is_gzip(path.name) else "none" for path in files})
        return TopicDescription(
            self._name,
            {number: (0, count) for number, count in enumerate(counts)},
            {"format": layout.format.name, "compression": ", ".join(packed)},
            known_identities({number: identity_of(path) for number, path in enumerate(files)}),
        )

    def delete(self) -> None:
        """Delete the files, and a folder that is empty then."""
        for path in self._files():
            with file_errors(path):
                path.unlink()
                torn_path(path).unlink(missing_ok=True)
        if names_a_folder(self._path):
            with suppress(OSError):  # not empty
                Path(self._path).rmdir()


def known_identities(identities: Mapping[int, str | None]) -> dict[int, str]:
    """Without those of files that have none yet."""
    return {number: identity for number, identity in identities.items() if identity is not None}


def _check_identity(request: ReadRequest, number: int, path: Path, start: int) -> None:
    """Raise ``OffsetOutOfRange`` where the offsets of a request belong to another file."""
    known = (request.identities or {}).get(number)
    if known is None or number not in named_positions(request):
        return
    with file_errors(path), path.open("rb") as file:
        if has_identity(known, file.read):
            return
    raise OffsetOutOfRange(
        f"file {str(path)!r}, partition {number}: offset {start} belongs to a file that began with other lines: this "
        "one was replaced, or cut and written again, or files were added or removed before it in the order of names. "
        "Bring the files back as they were, or start from 'earliest'"
    )


def _header_line(columns: tuple[str, ...], delimiter: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerow(columns)
    return text.getvalue().encode()


def _check_header(path: Path, layout: FileLayout) -> None:
    """The first chunk tells whether the file has the columns it should."""
    partition = FilePartition(0, file_state(path), layout)
    try:
        partition.fill()
    finally:
        partition.close()


class FilesReader(TopicReader):
    """Reads files to the end each had when the reader was opened.

    ``files_at_once`` files are open and take turns, the next one is opened when one of them ends: with 1,
    the files are read one after the other, in the order of their partitions.

    Reading several files in turns.
    """

    def __init__(
        self, partitions: Sequence[FilePartition], *, topic: str, max_records: int, files_at_once: int
    ) -> None:
        self._topic = topic
        self._is_closed = False
        self._partitions = tuple(partitions)
        self._waiting = deque(partitions)
        self._open: deque[FilePartition] = deque()
        self._max_records = max_records
        self._files_at_once = files_at_once
        self._calls = OneAtATime()

    async def read(self) -> TopicBatch | None:
        """The next records of some file, None when all files have ended."""
        if self._is_closed:
            raise TopicError(f"topic {self._topic!r}: expected an open reader, this one was closed")
        await self._calls.settle()
        while partition := self._next_partition():
            if not partition.has_records and not partition.is_ended:
                await self._calls.run(partition.fill)
            if partition.has_records:
                self._open.rotate(-1)
                return partition.take(self._max_records)
            partition.close()
            self._open.popleft()
        return None

    def _next_partition(self) -> FilePartition | None:
        while self._waiting and len(self._open) < self._files_at_once:
            self._open.append(self._waiting.popleft())
        return self._open[0] if self._open else None

    def positions(self) -> Mapping[int, int]:
        return {partition.number: partition.next_offset for partition in self._partitions}

    def identities(self) -> Mapping[int, str]:
        return known_identities({partition.number: partition.identity for partition in self._partitions})

    def lag(self) -> Mapping[int, int]:
        """Estimated by the bytes left; a file of which nothing was read yet is missing."""
        lags = {partition.number: partition.lag() for partition in self._partitions}
        return {number: lag for number, lag in lags.items() if lag is not None}

    async def close(self) -> None:
        """Close the files."""
        self._is_closed = True
        self._waiting.clear()
        try:
            with suppress(TopicError):  # of a read that was cancelled: nobody waits for it any more
                await self._calls.settle()
        finally:
            while self._open:
                self._open.pop().close()


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
    kept beside the file (:mod:`streamiter_files.writer`). Keys are not stored, headers are refused.
    There are no transactions: a sink is at-least-once.

    A file, or several, as a topic.
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


class FilesConnector(Connector):
    """Serves ``file:`` URLs (:mod:`streamiter_files.options`) with the options of `FileOptions`.

    Options may be in the URL, after a ``?``, or given beside it.

    >>> FilesConnector().topic("file:data/clicks.jsonl.gz", {})
    FilesTopic('file:data/clicks.jsonl.gz')

    The entry point for ``file:`` URLs.
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
