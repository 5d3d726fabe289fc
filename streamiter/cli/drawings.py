"""What the commands that draw share: the formats, and where a drawing goes."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamiter.errors import ConfigurationError

__all__ = ["Format", "FormatOption", "OutputOption", "format_for", "write_drawing"]


class Format(StrEnum):
    """What ``--format`` takes."""

    MERMAID = "mermaid"
    SVG = "svg"
    PNG = "png"


OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to this file: .mmd, .svg or .png."),
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="What to draw, whatever the file is called.", show_default=False),
]

_FORMAT_OF_SUFFIX = {".mmd": Format.MERMAID, ".svg": Format.SVG, ".png": Format.PNG}


def format_for(output: Path | None, drawing_format: Format | None) -> Format:
    """The format that is asked for, else the one of the file's suffix; without a file Mermaid."""
    if drawing_format is not None:
        return drawing_format
    if output is None:
        return Format.MERMAID
    try:
        return _FORMAT_OF_SUFFIX[output.suffix.lower()]
    except KeyError:
        raise ConfigurationError(
            f"--output {output}: expected a file named .mmd (Mermaid), .svg or .png, given "
            f"{output.suffix or 'no suffix'}; rename it or say --format mermaid, svg or png"
        ) from None


def write_drawing(drawing: str | bytes, output: Path | None) -> None:
    """To the file, or to standard output."""
    content = drawing.encode() if isinstance(drawing, str) else drawing
    if output is None:
        sys.stdout.buffer.write(content)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: cannot write it: {error.strerror}") from error
