"""A chart of one or more panels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamiter.charts.bars import BarPanel
from streamiter.charts.lines import Panel
from streamiter.charts.plot import CANVAS, HEIGHT, PANEL_WIDTH

__all__ = ["chart"]

_FONTS: Final = "DejaVu Sans, Verdana, sans-serif"


def chart(panels: Sequence[Panel | BarPanel]) -> str:
    """The drawing as SVG; :func:`~streamiter.flow.drawing.png.png_of_svg` makes PNG of it.

    >>> from streamiter.charts import BarPanel, Line, Panel
    >>> loss = Panel("Loss", "epoch", [Line("training", [1, 2, 3], [0.5, 0.4, 0.35])])
    >>> drawing = chart([loss, BarPanel("Seconds", {"BSP": 3.0, "ASP": 1.25})])
    >>> drawing.count("<polyline"), "epoch" in drawing, "1.25" in drawing
    (1, True, True)
    """
    width = PANEL_WIDTH * len(panels)
    parts = [part for number, panel in enumerate(panels) for part in panel.parts(number * PANEL_WIDTH)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
            f'viewBox="0 0 {width} {HEIGHT}" font-family="{_FONTS}">',
            f'<rect width="{width}" height="{HEIGHT}" fill="{CANVAS}"/>',
            *parts,
            "</svg>",
        ]
    )
