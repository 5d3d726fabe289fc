"""The drawing of a flow in the format that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.mermaid import mermaid
from streamiter.flow.drawing.picture import Picture, picture_of
from streamiter.flow.drawing.png import png
from streamiter.flow.drawing.svg import svg
from streamiter.runtime.graph import Step
from streamiter.runtime.statistics import JobStatistics

__all__ = ["DrawingFormat", "draw"]

DrawingFormat = Literal["mermaid", "svg", "png"]


def draw(
    flow: str, steps: Sequence[Step], statistics: JobStatistics | None, drawing_format: DrawingFormat
) -> str | bytes:
    """The steps of a flow as text, or as bytes for PNG."""
    drawers: dict[str, Callable[[Picture], str | bytes]] = {"mermaid": mermaid, "svg": svg, "png": png}
    if drawing_format not in drawers:
        raise ConfigurationError(
            f"flow {flow!r}: draw expected the format {', '.join(map(repr, drawers))}, given {drawing_format!r}; "
            "choose one of these"
        )
    return drawers[drawing_format](picture_of(flow, steps, statistics))
