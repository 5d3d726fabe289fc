"""``streamiter draw``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamiter.cli.loading import Target, load_flow
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow

__all__ = ["draw"]


class Format(StrEnum):
    """What ``--format`` takes."""

    MERMAID = "mermaid"
    SVG = "svg"
    PNG = "png"


_FORMAT_OF_SUFFIX = {".mmd": Format.MERMAID, ".svg": Format.SVG, ".png": Format.PNG}


def draw(
    target: Target,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file: .mmd, .svg or .png."),
    ] = None,
    drawing_format: Annotated[
        Format | None,
        typer.Option("--format", help="What to draw, whatever the file is called.", show_default=False),
    ] = None,
) -> None:
    """Draw the graph of a flow, without running it: as Mermaid text, SVG or PNG."""
    chosen = drawing_format or _format_of(output)
    drawing = _drawn(load_flow(target), chosen)
    if output is None:
        sys.stdout.buffer.write(drawing)
        return
    try:
        output.write_bytes(drawing)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: cannot write it: {error.strerror}") from error


def _format_of(output: Path | None) -> Format:
    if output is None:
        return Format.MERMAID
    try:
        return _FORMAT_OF_SUFFIX[output.suffix.lower()]
    except KeyError:
        raise ConfigurationError(
            f"--output {output}: expected a file named .mmd (Mermaid), .svg or .png, given "
            f"{output.suffix or 'no suffix'}; rename it or say --format mermaid, svg or png"
        ) from None


def _drawn(flow: Flow, drawing_format: Format) -> bytes:
    match drawing_format:
        case Format.PNG:
            return flow.draw(format="png")
        case Format.SVG:
            return flow.draw(format="svg").encode()
        case Format.MERMAID:
            return flow.draw().encode()
