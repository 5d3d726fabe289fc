"""Lines of a file or of standard input, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from typing import Final

from streamiter.errors import ConfigurationError

__all__ = ["lines_of"]

_READ_BYTES: Final = 1 << 20
_STANDARD_INPUT: Final = 0

# Chunks that are read ahead: one is written while the next is read.
_CHUNKS_AHEAD: Final = 2


async def lines_of(file: str) -> AsyncGenerator[list[bytes], None]:
    """The lines of ``file`` (``-``: standard input) without their ends, as many at a time as there are.

    It is read in a thread of its own, so that a slow pipe or a terminal holds nothing else up. The thread is a
    daemon: a read that never returns does not keep the program from ending.
    """
    descriptor = _STANDARD_INPUT if file == "-" else _opened(file)
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_CHUNKS_AHEAD)
    reading = (descriptor, chunks, asyncio.get_running_loop())
    threading.Thread(target=_read, args=reading, daemon=True, name=f"read {file}").start()
    rest = b""
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise ConfigurationError(f"cannot read {file!r}: {chunk.strerror}") from chunk
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


def _opened(file: str) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file!r}: {error.strerror}") from error


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
