"""Sentences that are printed."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Final

import typer

__all__ = ["say"]

# A terminal that nobody has told how wide it is says 0; this is what terminals were for long.
_UNKNOWN_WIDTH: Final = 80


def say(line: str, *, err: bool = False, hanging: int = 0) -> None:
    """Print a line: on a terminal broken between words (further lines indented), elsewhere whole.

    What is to be copied, as a command, is better left to the terminal to break.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        line = textwrap.fill(
            line,
            os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH,
            subsequent_indent=" " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    typer.echo(line, err=err)
