"""The frame that lines and bars stand in: title, axes, numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from streamiter.charts.ticks import tick_labels

__all__ = ["CANVAS", "COLOURS", "GREY", "HEIGHT", "PANEL_WIDTH", "TEXT", "Plot", "text"]

# In units of the drawing, which are pixels on most screens.
PANEL_WIDTH: Final = 460
HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 24, 46, 56
"""Around the plot of a panel: room for numbers, the title, the name of the axis."""
TEXT, GREY, _GRID, CANVAS = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
COLOURS: Final = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df")
"""Of the first line or bar, of the second, and so on; then the first again."""


@dataclass
class Plot:
    """Where numbers lie in a panel, whose own place in the drawing is ``left_of_panel``."""

    left_of_panel: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def __post_init__(self) -> None:
        self.left, self.right = self.left_of_panel + _LEFT, self.left_of_panel + PANEL_WIDTH - _RIGHT
        self.top, self.bottom = _TOP, HEIGHT - _BOTTOM

    def x(self, value: float) -> float:
        """Of a number on the axis below."""
        first, last = self.x_range
        return self.left + (self.right - self.left) * (value - first) / (last - first)

    def y(self, value: float) -> float:
        """Of a number on the axis at the left."""
        lowest, highest = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - lowest) / (highest - lowest)

    def frame(self, title: str, y_ticks: Sequence[float], y_name: str = "") -> Iterator[str]:
        """The title, a line for each number at the left, and the axis below."""
        yield text(self.left, _TOP - 20, title, TEXT, anchor="start", size=15)
        for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
            yield f'<path d="M{self.left},{self.y(tick):.1f} H{self.right}" stroke="{_GRID}"/>'
            yield text(self.left - 8, self.y(tick) + 4, label, GREY, anchor="end")
        yield f'<path d="M{self.left},{self.bottom} H{self.right}" stroke="{GREY}"/>'
        if y_name:
            x, y = self.left_of_panel + 18, (self.top + self.bottom) / 2
            yield f'<g transform="rotate(-90 {x} {y})">{text(x, y, y_name, GREY)}</g>'


def text(x: float, y: float, words: str, colour: str, *, anchor: str = "middle", size: int = 12) -> str:
    """One line, legible also on a line of the grid."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'stroke="{CANVAS}" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{escape(words)}</text>'
    )
