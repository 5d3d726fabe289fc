"""Sentences that are printed."""

from __future__ import annotations

import os
import sys
import textwrap

import typer

__all__ = ["say"]


def say(line: str, *, err: bool = False, hanging: int = 0) -> None:
    """Print a line: on a terminal broken between words (further lines indented), elsewhere whole.

    What is to be copied, as a command, is better left to the terminal to break.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        line = textwrap.fill(
            line,
            os.get_terminal_size(stream.fileno()).columns,
            subsequent_indent=" " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    typer.echo(line, err=err)
