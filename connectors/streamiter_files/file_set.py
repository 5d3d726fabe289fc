"""The files of a topic: found, opened, created, deleted. All of it blocks: it runs in threads."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound
from streamiter.topics.positions import check_named_partitions, named_positions, partitions_of
from streamiter.topics.topic import ReadRequest, TopicDescription
from streamiter_files.append_file import AppendFile
from streamiter_files.bounds import bounds
from streamiter_files.chunks import file_state, has_identity, identity_of
from streamiter_files.creating import create_file, new_files
from streamiter_files.file_errors import file_errors
from streamiter_files.formats import format_of_name, is_gzip
from streamiter_files.location import Location
from streamiter_files.matching import common_format, matching_files, names_a_folder
from streamiter_files.options import FileOptions
from streamiter_files.partition import FileLayout, FilePartition, count_records
from streamiter_files.torn_lines import is_whole_json, torn_path

__all__ = ["FileSet", "known_identities"]


class FileSet:
    """The files at a location, one for each partition."""

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
