"""Files as topics: the connector, the topic, and the files at its path.

`FilesConnector` serves ``file:`` URLs. `FilesTopic` opens readers and writers. `FileSet` finds, opens, creates and
deletes the files, each of which is a partition; all of it blocks, so it runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, NoReturn

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicError, TopicNotFound
from streamiter.topics.connecting import (
    check_named_partitions,
    check_partition_count,
    check_request,
    named_positions,
    partitions_of,
)
from streamiter.topics.formats import Json, Text
from streamiter.topics.topic import Connector, Decoder, Encoder, ReadRequest, Topic, TopicDescription, TopicWriter
from streamiter.topics.urls import options_from, shown_url
from streamiter.values.helpers.closing import close_now, undone_on_failure
from streamiter.values.helpers.importing import need_package
from streamiter_files.chunks import file_identity, file_state, has_identity
from streamiter_files.csv_format import Csv
from streamiter_files.options import (
    FileFormat,
    FileOptions,
    Location,
    common_format,
    create_file,
    create_folder,
    file_errors,
    folder_files,
    format_of_name,
    is_gzip,
    is_pattern,
    known_suffixes,
    matching_files,
    names_a_folder,
    new_files,
    not_found,
    parse_file_url,
)
from streamiter_files.reader import (
    FileLayout,
    FilePartition,
    FilesReader,
    LinesPartition,
    bounds,
    count_records,
    known_identities,
)
from streamiter_files.sparse_format import Dummy, Libsvm
from streamiter_files.table_format import Table, TablePartition, TableWriter, count_rows
from streamiter_files.writer import AppendFile, FilesWriter, is_whole_json, torn_path


class FilesConnector(Connector):
    """Serves ``file:`` URLs (:mod:`streamiter_files.options`) with the options of `FileOptions`.

    Options are in the URL, after a ``?``, or given by keyword.

    >>> FilesConnector().topic("file:data/clicks.jsonl.gz", {})
    FilesTopic('file:data/clicks.jsonl.gz')
    """

    def topic(self, url: str, options: Mapping[str, object]) -> FilesTopic:
        location = parse_file_url(url)
        parsed = options_from(FileOptions, {**location.options, **options}, f"topic {shown_url(url)!r}")
        _check_format(location, parsed)
        return FilesTopic(location, parsed)

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        """Return the names of the files of known formats in the folder of, or at, ``url``."""
        location = parse_file_url(url)
        parsed = options_from(FileOptions, {**location.options, **options}, f"topic {shown_url(url)!r}")
        return await asyncio.to_thread(_names, location.path, parsed.format)


def _check_format(location: Location, options: FileOptions) -> None:
    if not Path(location.name).name and not location.name.endswith("/"):
        raise ConfigurationError(f"topic {shown_url(location.url)!r}: expected a path, as in file:data/clicks.jsonl")
    known = options.format or format_of_name(Path(location.path).name)
    if known is not None and known.is_table:
        need_package(f"topic {shown_url(location.url)!r}", "pyarrow", "arrow")
    if not (known or names_a_folder(location.path) or is_pattern(location.path)):
        raise ConfigurationError(
            f"topic {shown_url(location.url)!r}: expected a known suffix: {known_suffixes()}; or give the format "
            "with the option format=; or end the path with '/' if it is a folder"
        )


def _names(path: str, given: FileFormat | None) -> list[str]:
    folder = path if names_a_folder(path) else os.path.dirname(path)
    return [file.name for file in folder_files(folder, given)]


class FilesTopic(Topic):
    """The lines of a file as a topic. If the path is a folder or a pattern, file i is partition i.

    **Reading is bounded**: it ends at the end that each file had when the reader was opened, also with ``stop=None``
    or a later offset; the next reader reads lines that were appended since. The offset of a record is its number in
    its file, from 0; blank lines, comments and a CSV header do not count. So positions stay valid as long as files
    are only appended to, and new files sort after the old ones (digits in names sort as numbers). To resume at an
    offset, the reader reads and skips the lines before it. The time stamp of all records of a file is the time of the
    file's last change, so a ``start`` given as a time includes or excludes whole files.

    **Writing** appends lines. Several writers, also of several processes, may append to one file: they take turns, and
    lines stay whole. The first writer of a missing file creates it; only ``create`` creates a missing folder. Flushed
    records survive a crash. The next writer cuts off a torn last line and keeps it in a file next to it
    (:mod:`streamiter_files.writer`). Tables are written to new files (`TableWriter`). Keys are not stored, and headers
    are refused. There are no transactions: a sink is at-least-once.
    """

    bounded: Final = True
    has_transactions: ClassVar[bool] = False
    has_headers: ClassVar[bool] = False
    has_tombstones: ClassVar[bool] = False
    has_timestamps: ClassVar[bool] = False

    def __init__(self, location: Location, options: FileOptions) -> None:
        self._location = location
        self._options = options
        self._files = FileSet(location, options)
        self.is_one_sequence = options.in_order
        """Whether partitions are read one after the other and follow each other in time: event time counts one."""

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def name(self) -> str:
        """The path as the URL has it."""
        return self._location.name

    @property
    def commit_domain(self) -> str:
        """The commit domain: each path has one of its own, since files are never committed together."""
        return f"file:{self._location.path}"

    def beside(self, name: str) -> NoReturn:
        """Raise ``ConfigurationError``: files share no commit domain."""
        raise ConfigurationError(
            f"topic {self.url!r}: expected a topic with transactions for {name!r}, given a file; files are "
            "never committed together. Use topics of sqlite:// or kafka://"
        )

    def default_decoder(self) -> Decoder:
        """Return the decoder of the format: ``Json``, ``Csv`` (fields as text), ``Libsvm``, ``Dummy`` or ``Text``.

        It lists the folder if only the files in the folder tell the format.
        """
        layout = self._files.layout()
        if layout.format.is_table:
            return Table()
        if layout.delimiter is not None:
            return Csv(columns=self._options.columns, delimiter=layout.delimiter)
        decoders: dict[str, Decoder] = {"libsvm": Libsvm(), "dummy": Dummy(), "txt": Text()}
        return decoders.get(layout.format.name, Json())

    def default_encoder(self) -> Encoder | None:
        """Return the encoder of tables; None for lines."""
        try:
            return Table() if self._files.layout().format.is_table else None
        except TopicError:  # a folder without files
            return None

    async def open_reader(self, request: ReadRequest) -> FilesReader:
        """Return a reader. For a position after the end of a file, ``read`` raises ``OffsetOutOfRange`` at the end."""
        check_request(request, self.name)
        partitions = await asyncio.to_thread(self._files.partitions, request)
        at_once = 1 if self._options.in_order else self._options.files_at_once
        return FilesReader(partitions, topic=self.name, max_records=request.max_records, files_at_once=at_once)

    async def open_writer(self) -> TopicWriter:
        """Return a writer; create a missing file. Raises ``TopicNotFound`` where the folder is missing."""
        if (tables := await asyncio.to_thread(self._files.table_writer)) is not None:
            return tables
        files, comment = await asyncio.to_thread(self._files.append_files)
        return FilesWriter(files, topic=self.name, comment=comment)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> NoReturn:
        """Raise ``ConfigurationError``: files have no transactions."""
        raise ConfigurationError(
            f"topic {self.url!r} (transactional id {transactional_id!r}): files have no transactions; "
            "use topics of sqlite:// or kafka://, or accept duplicates after a crash with "
            "sink(delivery='at_least_once')"
        )

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create empty files and their folders. More than one file needs a folder or a pattern.

        Of tables (Parquet, Arrow) only the folder is created: each writer adds whole files.
        In a folder the files are ``part-0.jsonl``, ``part-1.jsonl`` …; in a pattern the number replaces the ``*``.
        """
        check_partition_count(self.name, partitions)
        if settings:
            raise ConfigurationError(
                f"topic {self.name!r}: expected no settings for files, given {', '.join(settings)}"
            )
        await asyncio.to_thread(self._files.create, partitions)

    async def describe(self) -> TopicDescription:
        """Return the offsets; reads all files to count the records."""
        return await asyncio.to_thread(self._files.describe)

    async def delete(self) -> None:
        """Delete the files, and their folder if it is empty then."""
        await asyncio.to_thread(self._files.delete)


class FileSet:
    """The files of a topic, one for each partition: finds, opens, creates and deletes them. Every call blocks."""

    def __init__(self, location: Location, options: FileOptions) -> None:
        self._name = location.name
        self._path = location.path
        self._options = options

    def layout(self, files: Sequence[Path] = ()) -> FileLayout:
        """Return the format: by the option, by the suffix of the path, or by the files in the folder."""
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
        """Return the partitions of a reader's share."""
        files = self._files()
        layout = self.layout(files)
        check_named_partitions(request, len(files), topic=self._name)
        share = partitions_of(request, len(files))
        return [self._partition(number, files[number], layout, request) for number in share]

    def _partition(self, number: int, path: Path, layout: FileLayout, request: ReadRequest) -> FilePartition:
        state = file_state(path)
        start, stop = bounds(request, number, state.mtime_ms, topic=self._name)
        _check_identity(request, number, path, start)
        if layout.format.is_table:
            identity = file_identity(path, is_table=True)
            columns = layout.options.columns
            return TablePartition(number, state, layout.format, columns, start=start, stop=stop, identity=identity)
        return LinesPartition(number, state, layout, start=start, stop=stop, identity=file_identity(path))

    def table_writer(self) -> TableWriter | None:
        """Return the writer of tables; None for lines."""
        existing = self._files_so_far()
        if not existing and names_a_folder(self._path) and self._options.format is None:
            return None  # append_files asks for the format
        known = self.layout(existing).format
        if not known.is_table:
            return None
        folder = Path(self._path) if names_a_folder(self._path) else Path(self._path).parent
        if not folder.is_dir():
            raise not_found(Path(self._path))
        return TableWriter(self._path, known, self._options.format or known, existing, self._name)

    def append_files(self) -> tuple[list[AppendFile], bytes | None]:
        """Open the files for writing; return them and the beginning of a comment line.

        If there is no file, the first one is created, but no folder.
        """
        files = self._files_so_far() or new_files(self._path, [], 1, self._options.format)
        layout = self.layout(files)
        opened: list[AppendFile] = []
        with undone_on_failure(lambda: close_now(file.close for file in opened)):
            for path in files:
                opened.append(self._append_file(path, layout))  # noqa: PERF401 - a failure closes the opened ones
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
                f"topic {self._name!r}: expected the option columns=('name', ...) for the header of a new "
                f"file ({path.name}); for a file without header give header=False"
            )
        return None

    def create(self, partitions: int) -> None:
        """Create the missing files; of tables only the folder, since a table without rows has no columns either."""
        existing = self._files_so_far()
        known = self._options.format or format_of_name(Path(self._path).name)
        if known is None and existing:
            known = common_format(existing, topic=self._name)
        missing = new_files(self._path, existing, partitions, known)
        if known is None or not known.is_table:
            for path in missing:
                create_file(path)
        elif partitions == 1:
            create_folder(missing[0].parent if missing else existing[0].parent)
        else:
            raise ConfigurationError(
                f"topic {self._name!r}: expected 1 partition for a topic of {known.name} files, given {partitions}; "
                "each writer adds whole files, and each file is a partition"
            )

    def describe(self) -> TopicDescription:
        """Count the records of all files, which reads them, and return the description."""
        files = self._files()
        layout = self.layout(files)
        is_table = layout.format.is_table
        counts = [
            count_rows(path, layout.format) if is_table else count_records(file_state(path), layout) for path in files
        ]
        packed = sorted({"gzip" if is_gzip(path.name) else "none" for path in files})
        return TopicDescription(
            self._name,
            {number: (0, count) for number, count in enumerate(counts)},
            {"format": layout.format.name, "compression": ", ".join(packed)},
            known_identities({number: file_identity(path, is_table=is_table) for number, path in enumerate(files)}),
        )

    def delete(self) -> None:
        """Delete the files, and the folder if it is empty then."""
        for path in self._files():
            with file_errors(path):
                path.unlink()
                torn_path(path).unlink(missing_ok=True)
        if names_a_folder(self._path):
            with suppress(OSError):  # not empty
                Path(self._path).rmdir()


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
        "file was replaced, or cut and written again, or files were added or removed before it in the order of names. "
        "Restore the files, or start from 'earliest'"
    )


def _header_line(columns: tuple[str, ...], delimiter: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerow(columns)
    return text.getvalue().encode()


def _check_header(path: Path, layout: FileLayout) -> None:
    """Read the first chunk, which raises if the header of the file is not the expected one."""
    partition = LinesPartition(0, file_state(path), layout)
    with contextlib.closing(partition):
        partition.fill()
