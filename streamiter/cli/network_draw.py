"""``streamiter network draw``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamiter.cli.drawings import Format, FormatOption, OutputOption, format_for, write_drawing
from streamiter.cli.network_arguments import ConfigurationFile, load_network

if TYPE_CHECKING:
    from streamiter.networks.network import Network

__all__ = ["draw_network"]


def draw_network(
    file: ConfigurationFile, output: OutputOption = None, drawing_format: FormatOption = None
) -> None:
    """Draw the layers of a network: as Mermaid text, SVG or PNG."""
    chosen = format_for(output, drawing_format)
    write_drawing(_drawn(load_network(file), chosen), output)


def _drawn(network: Network, drawing_format: Format) -> str | bytes:
    match drawing_format:
        case Format.PNG:
            return network.draw(format="png")
        case Format.SVG:
            return network.draw(format="svg")
        case Format.MERMAID:
            return network.draw()
