"""How long the other side may be silent, and what the kernel knows of a process or a machine that is.

A process whose event loop is held by a user's function is silent, but its machine acknowledges what it gets. So a link
asks TCP, and not the other process. A function in C may also hold Python's lock, without which no thread can give signs
of life. So the supervisor asks the kernel whether a silent process works, and reads in its note which step does.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from typing import Final, NamedTuple, final

SILENCE_S: Final = 5.0
"""A process without a sign of life for so long is lost, by default, unless it works. Its signs are sent by a thread; a
busy machine delays them by less than a second."""

WORKS_FROM: Final = 0.05
"""A silent process that has used the processor for this part of the time works. Threads of clients that wait for a
broker use less; a machine that gives less to a busy process runs twenty of them on each core."""

# Sent while nothing else is: after two seconds, then each second, until the other side is silent for too long.
_IDLE_S: Final = 2
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPINTVL": 1}

# Longer names of steps are cut.
_NOTE_BYTES: Final = 256

# struct tcp_info of Linux (uapi/linux/tcp.h): eight bytes, then 32-bit numbers.
_INFO: Final = struct.Struct("=8x13I")
_UNACKNOWLEDGED: Final = 4
_LAST_ACKNOWLEDGEMENT_MS: Final = 12


def is_tcp(connection: socket.socket) -> bool:
    """Return whether packets of this connection may be lost."""
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def ask_while_idle(connection: socket.socket, silence_s: float) -> None:
    """Let TCP ask the other machine for an answer while nothing is sent, and end the connection without one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux takes at most 127 questions.
    for name, value in (_KEEP_ALIVE | {"TCP_KEEPCNT": min(max(round(silence_s) - _IDLE_S, 1), 127)}).items():
        if (option := getattr(socket, name, None)) is not None:  # Windows and macOS lack some.
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def unacknowledged_s(connection: socket.socket) -> float:
    """Return for how many seconds the other machine has acknowledged nothing, while it should have.

    It is 0 where all that was sent is acknowledged, and where the system does not tell: Linux does.
    """
    if sys.platform != "linux":
        return 0.0
    info = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return info[_LAST_ACKNOWLEDGEMENT_MS] / 1000 if info[_UNACKNOWLEDGED] else 0.0


class ProcessLook(NamedTuple):
    """What the kernel tells about a process."""

    cpu_s: float
    """The seconds in which its threads have used a processor."""
    step: str
    """The step that runs, as the process has noted it; empty if none does."""


@final
class ProcessNote:
    """Where this process says which step runs: a page of memory that others can read while it holds Python's lock.

    The page is a file without a name, which others open through ``/proc``; so only Linux has one.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("streamiter-step") if sys.platform == "linux" else -1
        self._step = ""
        self._encoded: dict[str, bytes] = {}
        self._page: mmap.mmap | None = None
        if sys.platform == "linux":
            os.ftruncate(self._file, _NOTE_BYTES)
            self._page = mmap.mmap(self._file, _NOTE_BYTES)

    @property
    def place(self) -> tuple[int, int]:
        """The process, and the file descriptor of the note in it."""
        return os.getpid(), self._file

    def write(self, step: str) -> str:
        """Note a step; return the one that was noted before."""
        before, self._step = self._step, step
        if self._page is not None:
            if (encoded := self._encoded.get(step)) is None:
                encoded = self._encoded[step] = step.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
            self._page[:] = encoded
        return before

    def close(self) -> None:
        """Give the memory back."""
        if self._page is not None:
            self._page.close()
            self._page = None
            os.close(self._file)


def look_at_process(process: int, note: int) -> ProcessLook | None:
    """Look at a process of this machine; None if it has ended, or if this is not Linux.

    >>> note = ProcessNote()
    >>> note.write("slow")
    ''
    >>> look = look_at_process(*note.place)
    >>> look is None or (look.cpu_s > 0, look.step)
    (True, 'slow')
    >>> note.close()
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The name of the program may have spaces.
        with open(f"/proc/{process}/fd/{note}", "rb") as file:
            step = file.read(_NOTE_BYTES)
    except OSError:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcessLook(cpu_s, step.rstrip(b"\0").decode(errors="replace"))
