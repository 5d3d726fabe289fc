"""``streamiter draw``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamiter.cli.loading import Target, load_flow
from streamiter.errors import ConfigurationError

__all__ = ["draw"]


def draw(
    target: Target,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
) -> None:
    """Print the graph of a flow as Mermaid text, without running it."""
    text = load_flow(target).draw()
    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {output}: cannot write it: {error.strerror}") from error
