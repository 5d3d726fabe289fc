"""Where in the user's own code we are."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

__all__ = ["user_line"]

# Packages whose frames are not the user's: our own, and the event loops that call our coroutines.
_NOT_THE_USERS: Final = frozenset(
    {"streamiter", "streamiter_files", "streamiter_kafka", "streamiter_sqlite", "asyncio", "uvloop"}
)

# What calls the commands of the program: behind it is no line that anybody has written.
_COMMAND_LINE: Final = frozenset({"typer", "click"})


def user_line() -> str:
    """``file:line`` of the innermost frame outside our packages: the line that the user wrote.

    Where that is our own command line it is called so.

    >>> user_line().count(":")
    1
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame = frame.f_back
    if _package(frame) in _COMMAND_LINE:
        return "the command line"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    # By the module, not the file: the methods that dataclasses generate have a module only.
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0]
