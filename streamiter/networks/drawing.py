"""A network as a picture, drawn with what draws flows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.mermaid import mermaid
from streamiter.flow.drawing.picture import Link, Node, Picture
from streamiter.flow.drawing.png import png
from streamiter.flow.drawing.svg import svg
from streamiter.networks.configuration.settings import Configuration, LayerConfiguration
from streamiter.networks.summary import Summary, SummaryRow

__all__ = ["DrawingFormat", "draw", "picture_of"]

DrawingFormat = Literal["mermaid", "svg", "png"]

_DRAWERS: Final[Mapping[str, Callable[[Picture], str | bytes]]] = {"mermaid": mermaid, "svg": svg, "png": png}


def draw(configuration: Configuration, summary: Summary, drawing_format: str) -> str | bytes:
    """Text, or bytes for PNG."""
    if drawing_format not in _DRAWERS:
        raise ConfigurationError(
            f"network {configuration.source!r}: draw expected the format {', '.join(map(repr, _DRAWERS))}, "
            f"given {drawing_format!r}"
        )
    return _DRAWERS[drawing_format](picture_of(configuration, summary))


def picture_of(configuration: Configuration, summary: Summary) -> Picture:
    """The mini-batch, then the layers; links say how many numbers of each row go along them."""
    numbers = {row.layer: number for number, row in enumerate(summary.rows, 1)}
    links = []
    for row in summary.rows:
        for name in row.inputs:
            dim = summary.rows[numbers[name] - 1].output_dim
            links.append(Link(numbers[name], numbers[row.layer], label=f"{dim:,}"))
        if not row.inputs:
            links.append(Link(0, numbers[row.layer]))
    return Picture(
        title=configuration.source,
        nodes=(
            _mini_batch(configuration),
            *map(_layer, configuration.layers, summary.rows),
        ),
        links=tuple(links),
    )


def _mini_batch(configuration: Configuration) -> Node:
    data, features = configuration.data, configuration.features
    notes = [
        f"{data.format}, features from the data"
        if features is None
        else f"{data.format}, {features:,} features"
    ]
    if data.num_field > 0:
        notes.append(f"{data.num_field:,} fields")
    return Node("mini-batch", "source", notes=tuple(notes))


def _layer(layer: LayerConfiguration, row: SummaryRow) -> Node:
    notes = [row.type] if layer.num_factors is None else [f"{row.type}, {layer.num_factors} factors"]
    if row.parameters or row.parameters_per_feature:
        notes.append(f"{row.cells[4]} parameters")
    if layer.optimizer_settings is not None:
        notes.append(str(layer.optimizer_settings))
    return Node(layer.name, "operator" if layer.loss is None else "sink", notes=tuple(notes))
