"""``streamiter draw``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamiter.cli.loading import load_flow

__all__ = ["draw"]


def draw(
    target: Annotated[str, typer.Argument(metavar="MODULE:FLOW", help="A Flow, or a function that makes one.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
) -> None:
    """Print the graph of a flow as Mermaid text."""
    text = load_flow(target).draw()
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
