"""Lines of a file or of standard input, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from typing import Final

from streamiter.errors import ConfigurationError

__all__ = ["lines_of", "open_lines"]

_READ_BYTES: Final = 1 << 20
_STANDARD_INPUT: Final = 0

# Chunks that are read ahead: one is written while the next is read.
_CHUNKS_AHEAD: Final = 2


def open_lines(file: str) -> int:
    """A descriptor to read ``file`` with; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT
    if os.path.isdir(file):
        raise ConfigurationError(f"cannot read {file!r}: {os.strerror(errno.EISDIR)}")
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file!r}: {error.strerror}") from error


async def lines_of(descriptor: int) -> AsyncGenerator[list[bytes], None]:
    """The lines without their ends, as many at a time as there are; closes the descriptor.

    They are read in a thread of its own, so that a slow pipe or a terminal holds nothing else up. The thread is a
    daemon: a read that never returns does not keep the program from ending.
    """
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_CHUNKS_AHEAD)
    reading = (descriptor, chunks, asyncio.get_running_loop())
    threading.Thread(target=_read, args=reading, daemon=True, name="read lines").start()
    rest = b""
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise ConfigurationError(f"cannot read on: {chunk.strerror}") from chunk
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


def _read(descriptor: int, chunks: asyncio.Queue[bytes | OSError], loop: asyncio.AbstractEventLoop) -> None:
    """Put chunks into the queue, at the end an empty one; on an error the error."""
    with contextlib.suppress(RuntimeError, CancelledError):  # the loop is closed: nobody wants more
        try:
            while chunk := os.read(descriptor, _READ_BYTES):
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            asyncio.run_coroutine_threadsafe(chunks.put(b""), loop).result()
        except OSError as error:
            asyncio.run_coroutine_threadsafe(chunks.put(error), loop).result()
    if descriptor != _STANDARD_INPUT:
        os.close(descriptor)
