"""How long the other side may be silent, and what the kernel knows of a process or a machine that is.

A process whose event loop is held by a user's function is silent, but its machine acknowledges what it gets. So a link
asks TCP, and not the other process. A function in C may also hold Python's lock, without which no thread can give signs
of life. So the supervisor asks the kernel whether a silent process can run, and reads in its note which step does.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from typing import Final, NamedTuple, final

SILENCE_S: Final = 5.0
"""A process without a sign of life for so long is silent, by default. Its signs are sent by a thread; a busy machine
delays them by less than a second."""

# Sent while nothing else is: after two seconds, then each second, until the other side is silent for too long.
_IDLE_S: Final = 2
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPINTVL": 1}

# Longer names of steps are cut. Further steps share the last place.
_NAME_BYTES: Final = 256
_NAMES_MAX: Final = 4096
_NUMBER: Final = struct.Struct("I")

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

    is_stopped: bool
    """Whether a signal has stopped it, so that none of its threads can run."""
    step: str
    """The step that runs, as the process has noted it; empty if none does."""


@final
class ProcessNote:
    """Where this process says which step runs: pages of memory that others can read while it holds Python's lock.

    The pages are a file without a name, which others open through ``/proc``; so only Linux has one. Each step has a
    number, by which its name is found, so that a change of the step writes four bytes only.
    """

    def __init__(self) -> None:
        self._file = -1
        self._page: mmap.mmap | None = None
        self._numbers = {"": 0}
        pages: bytearray | mmap.mmap = bytearray(_NAME_BYTES)
        if sys.platform == "linux":
            self._file = os.memfd_create("streamiter-step")
            os.ftruncate(self._file, _NAME_BYTES * _NAMES_MAX)  # Only what is written takes memory.
            pages = self._page = mmap.mmap(self._file, _NAME_BYTES * _NAMES_MAX)
        self.running = memoryview(pages)[:4].cast("I")
        """The number of the step that runs; 0 for none."""

    @property
    def place(self) -> tuple[int, int] | None:
        """The process, and the file descriptor of the note in it; None where others cannot read it."""
        return None if self._page is None else (os.getpid(), self._file)

    def number(self, step: str) -> int:
        """Return the number of a step."""
        if (number := self._numbers.get(step)) is None:
            number = min(len(self._numbers), _NAMES_MAX - 1)
            self._numbers[step] = number
            if self._page is not None:
                name = step.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
                self._page[_NAME_BYTES * number : _NAME_BYTES * (number + 1)] = name
        return number

    def close(self) -> None:
        """Give the memory back."""
        if self._page is not None:
            self.running.release()
            self._page.close()
            self._page = None
            os.close(self._file)


def look_at_process(process: int, note: int) -> ProcessLook | None:
    """Look at a process of this machine; None if it has ended, or if this is not Linux.

    >>> note = ProcessNote()
    >>> note.running[0] = note.number("slow")
    >>> note.place is None or look_at_process(*note.place) == (False, "slow")
    True
    >>> note.close()
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]  # The name of the program may have spaces.
        with open(f"/proc/{process}/fd/{note}", "rb") as file:
            [number] = _NUMBER.unpack(file.read(_NUMBER.size))
            file.seek(_NAME_BYTES * number)
            step = file.read(_NAME_BYTES) if number else b""
    except OSError:
        return None
    return ProcessLook(state == b"T", step.rstrip(b"\0").decode(errors="replace"))
