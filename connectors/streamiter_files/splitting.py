"""From chunks of bytes to records: a line each, or in CSV as many lines as the quotes hold together.

Lines end with a line feed, a carriage return before it belongs to the end. Lines of nothing but white space
are no records, nor are comments where the format has them. A byte order mark at the beginning is dropped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from streamiter.errors import RecordTooLarge, TopicError
from streamiter_files.formats import FileFormat

__all__ = ["MAX_RECORD_BYTES", "UTF8_MARK", "CsvSplitter", "LineSplitter", "record_pattern", "splitter_for"]

UTF8_MARK: Final = b"\xef\xbb\xbf"

# A line above this is a file of another kind (or a quote that nobody closed), not a record: it is refused
# before it fills the memory. Kafka takes 1 MiB unless told otherwise, large models as JSON some 10 MiB.
MAX_RECORD_BYTES: Final = 64 << 20


def splitter_for(known: FileFormat, delimiter: str | None, path: Path) -> LineSplitter:
    """The splitter of a format."""
    delimiter = delimiter or known.delimiter
    if known.delimiter and delimiter:
        return CsvSplitter(path, delimiter)
    return LineSplitter(path, known.comment)


class LineSplitter:
    r"""Lines of a file, fed with its chunks.

    >>> lines = LineSplitter(Path("a.txt"))
    >>> lines.feed(b"a\r\n\nb\nc"), lines.end()
    ([b'a', b'b'], [b'c'])
    """

    def __init__(self, path: Path, comment: bytes | None = None) -> None:
        self._path = path
        self._comment = comment
        self._rest = b""
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that are whole with this chunk."""
        return self._take(self._rest + chunk if self._rest else chunk, at_end=False)

    def end(self) -> list[bytes]:
        """The last record, where the file does not end with a line feed."""
        records = self._take(self._rest + b"\n", at_end=True) if self._rest else []
        if self._rest:
            raise self._unfinished()
        return records

    def _take(self, block: bytes, *, at_end: bool) -> list[bytes]:
        if not self._begun:
            if len(block) < len(UTF8_MARK) and not at_end:
                self._rest = block
                return []
            self._begun, block = True, block.removeprefix(UTF8_MARK)
        records, self._rest = self._split(block)
        self._check_size()
        return self._cleaned(records, block)

    def _split(self, block: bytes) -> tuple[list[bytes], bytes]:
        end = block.rfind(b"\n") + 1
        if end == 0:
            return [], block
        return block[: end - 1].split(b"\n"), block[end:]

    def _cleaned(self, records: list[bytes], block: bytes) -> list[bytes]:
        records = list(filter(bytes.strip, records))
        if b"\r\n" in block:
            records = [record.removesuffix(b"\r") for record in records]
        comment = self._comment
        if comment is not None and comment in block:
            records = [record for record in records if not record.startswith(comment)]
        return records

    def _check_size(self) -> None:
        if len(self._rest) > MAX_RECORD_BYTES:
            raise RecordTooLarge(
                f"file {str(self._path)!r}: a record has more than {MAX_RECORD_BYTES} bytes; it begins with "
                f"{self._rest[:40]!r}. Is this a file of lines?{self._hint()}"
            )

    def _hint(self) -> str:
        return ""

    def _unfinished(self) -> TopicError:
        return TopicError(f"file {str(self._path)!r}: the last record {self._rest[:40]!r} has no end")


def record_pattern(delimiter: str) -> re.Pattern[bytes]:
    r"""Matches one CSV record with its line feed; a field may be in quotes and then hold line feeds.

    A quote within a field that did not begin with one is an ordinary character, as for Python's ``csv``.
    The repetitions give nothing back: without a closing quote there is no match, in linear time.

    >>> record_pattern(",").match(b'1,"a\nb"\n2,c\n').group()
    b'1,"a\nb"\n'
    """
    separator = re.escape(delimiter).encode()
    plain = rb"[^" + separator + rb"\n]*"
    field = rb'(?:"[^"]*+(?:""[^"]*+)*+"' + plain + rb'|(?!")' + plain + rb")"
    return re.compile(field + rb"(?:" + separator + field + rb")*\n")


class CsvSplitter(LineSplitter):
    """Records of a CSV file."""

    def __init__(self, path: Path, delimiter: str) -> None:
        super().__init__(path)
        self._pattern = record_pattern(delimiter)

    def _split(self, block: bytes) -> tuple[list[bytes], bytes]:
        if b'"' not in block:
            return super()._split(block)
        records: list[bytes] = []
        position = 0
        while match := self._pattern.match(block, position):
            records.append(block[position : match.end() - 1])
            position = match.end()
        return records, block[position:]

    def _hint(self) -> str:
        return " Or is a quote not closed?" if b'"' in self._rest else ""

    def _unfinished(self) -> TopicError:
        opened = self._rest[:40]
        return TopicError(
            f"file {str(self._path)!r}: a quote is not closed in the record that begins {opened!r}"
        )
