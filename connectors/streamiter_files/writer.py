"""Writing lines to one file or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamiter.errors import TopicError
from streamiter.topics.outgoing import check_outgoing, spread
from streamiter.topics.topic import Headers, OutgoingBatch, TopicWriter
from streamiter_files.append_file import AppendFile
from streamiter_files.outgoing_lines import check_lines
from streamiter_files.threads import OneAtATime

__all__ = ["FilesWriter"]

# What is gathered before it is appended: as for reading, large enough that a thread's hop is nothing.
_BUFFER_BYTES: Final = 1 << 20


class FilesWriter(TopicWriter):
    """Appends values as lines; ``flush`` makes them durable.

    What lines cannot hold is refused with ``TopicError`` before anything of the batch is written: values of
    None, with a line feed in them, or with nothing but white space; and headers. Keys choose the file where
    there are several (CRC-32 modulo their number) and are not stored; time stamps are not stored either.
    """

    def __init__(self, files: Sequence[AppendFile], *, topic: str, comment: bytes | None) -> None:
        self._files = tuple(files)
        self._gathered: list[list[bytes]] = [[] for _ in files]
        self._gathered_bytes = 0
        self._topic = topic
        self._comment = comment
        self._turn = 0
        self._calls = OneAtATime()
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        """Take over a batch; waits for the disk once about 1 MiB has gathered."""
        self._check(batch)
        await self._calls.settle()
        if self._gathered_bytes >= _BUFFER_BYTES:
            await self._calls.run(self._append)
        self._gather(batch)

    def _check(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise TopicError(f"topic {self._topic!r}: expected an open writer, this one was closed")
        check_outgoing(batch, topic=self._topic, partitions=len(self._files))
        if batch.headers is not None:
            self._check_headers(batch.headers)
        check_lines(batch.values, self._comment, topic=self._topic)

    def _check_headers(self, headers: Sequence[Headers]) -> None:
        if any(headers):
            raise TopicError(
                f"topic {self._topic!r}: expected records without headers, as lines have none; put what they "
                "say into the values, or write to a topic that has headers (kafka://, sqlite://)"
            )

    def _gather(self, batch: OutgoingBatch) -> None:
        for partition, part in spread(batch, len(self._files), unkeyed=self._turn):
            lines = b"\n".join([*filter(None, part.values), b""])
            self._gathered[partition].append(lines)
            self._gathered_bytes += len(lines)
        self._turn = (self._turn + 1) % len(self._files)

    def _append(self) -> None:
        for file, gathered in zip(self._files, self._gathered, strict=True):
            if gathered:
                lines = b"".join(gathered)
                file.append(lines)
                gathered.clear()
                self._gathered_bytes -= len(lines)

    async def flush(self) -> None:
        """Append what has gathered and wait until the disk has it. After an error it may be called again."""
        await self._calls.run(self._append_and_sync)

    def _append_and_sync(self) -> None:
        self._append()
        for file in self._files:
            file.sync()

    async def close(self) -> None:
        """Flush, then close the files."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.flush()
        finally:
            await self._calls.run(self._close_files)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
