"""``streamiter draw``."""

from __future__ import annotations

from streamiter.cli.drawings import Format, FormatOption, OutputOption, format_for, write_drawing
from streamiter.cli.loading import Target, load_flow
from streamiter.flow.flow import Flow

__all__ = ["draw"]


def draw(target: Target, output: OutputOption = None, drawing_format: FormatOption = None) -> None:
    """Draw the graph of a flow, without running it: as Mermaid text, SVG or PNG."""
    chosen = format_for(output, drawing_format)
    write_drawing(_drawn(load_flow(target), chosen), output)


def _drawn(flow: Flow, drawing_format: Format) -> str | bytes:
    match drawing_format:
        case Format.PNG:
            return flow.draw(format="png")
        case Format.SVG:
            return flow.draw(format="svg")
        case Format.MERMAID:
            return flow.draw()
