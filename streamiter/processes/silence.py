"""How long the other side may be silent, and whether the other machine of a link is, as TCP itself knows it.

A process whose event loop is held by a user's function is silent, but its machine acknowledges what it gets. So a link
asks TCP, and not the other process.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

SILENCE_S: Final = 5.0
"""A process without a sign of life for so long is lost. Its signs are sent by a thread, so a long call of a user's
function does not matter; a busy machine delays them by less than a second."""

# Sent while nothing else is: after two seconds, then each second. Without three answers TCP ends the connection.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}

# struct tcp_info of Linux (uapi/linux/tcp.h): eight bytes, then 32-bit numbers.
_INFO: Final = struct.Struct("=8x13I")
_UNACKNOWLEDGED: Final = 4
_LAST_ACKNOWLEDGEMENT_MS: Final = 12


def is_tcp(connection: socket.socket) -> bool:
    """Return whether packets of this connection may be lost."""
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def ask_while_idle(connection: socket.socket) -> None:
    """Let TCP ask the other machine for an answer while nothing is sent, and end the connection without one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
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
