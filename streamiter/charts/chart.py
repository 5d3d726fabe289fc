"""A chart of one or more panels side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from streamiter.charts.ticks import tick_labels, ticks

__all__ = ["Line", "Panel", "chart"]

# In units of the drawing, which are pixels on most screens: three panels are as wide as one.
_PANEL_WIDTH: Final = 460
_HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 24, 46, 56
"""Around the plot of a panel: room for numbers, the title, the name of the axis."""
_LEGEND_WIDTH: Final = 116
_LEGEND_LINE: Final = 20
_TEXT, _GREY, _GRID, _CANVAS = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
_COLOURS: Final = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df")
_FONTS: Final = "DejaVu Sans, Verdana, sans-serif"


@dataclass(frozen=True)
class Line:
    """Points that are joined, from left to right; at least one."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Lines over common axes, with a legend where there are several."""

    title: str
    x_name: str
    lines: Sequence[Line]


def chart(panels: Sequence[Panel]) -> str:
    """The drawing as SVG; :func:`~streamiter.flow.drawing.png.png_of_svg` makes PNG of it.

    >>> drawing = chart([Panel("Loss", "epoch", [Line("training", [1, 2, 3], [0.5, 0.4, 0.35])])])
    >>> drawing.count("<polyline"), "epoch" in drawing
    (1, True)
    """
    width = _PANEL_WIDTH * len(panels)
    parts = [part for number, panel in enumerate(panels) for part in _panel(panel, number * _PANEL_WIDTH)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
            f'viewBox="0 0 {width} {_HEIGHT}" font-family="{_FONTS}">',
            f'<rect width="{width}" height="{_HEIGHT}" fill="{_CANVAS}"/>',
            *parts,
            "</svg>",
        ]
    )


def _panel(panel: Panel, left: float) -> Iterator[str]:
    x_ticks = ticks([x for line in panel.lines for x in line.xs])
    y_ticks = ticks([y for line in panel.lines for y in line.ys])
    plot = _Plot(left, (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    yield _text(plot.left, _TOP - 20, panel.title, _TEXT, anchor="start", size=15)
    for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        yield f'<path d="M{plot.left},{plot.y(tick):.1f} H{plot.right}" stroke="{_GRID}"/>'
        yield _text(plot.left - 8, plot.y(tick) + 4, label, _GREY, anchor="end")
    yield f'<path d="M{plot.left},{plot.bottom} H{plot.right}" stroke="{_GREY}"/>'
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        yield _text(plot.x(tick), plot.bottom + 18, label, _GREY)
    yield _text((plot.left + plot.right) / 2, plot.bottom + 40, panel.x_name, _GREY)
    for number, line in enumerate(panel.lines):
        yield from _line(line, _COLOURS[number % len(_COLOURS)], plot)
    if len(panel.lines) > 1:
        yield from _legend(panel, plot)


def _line(line: Line, colour: str, plot: _Plot) -> Iterator[str]:
    points = [(plot.x(x), plot.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'


def _legend(panel: Panel, plot: _Plot) -> Iterator[str]:
    start = plot.right - _LEGEND_WIDTH + 8
    height = _LEGEND_LINE * len(panel.lines)
    yield f'<rect x="{start - 8}" y="{plot.top + 4}" width="{_LEGEND_WIDTH}" height="{height}" fill="{_CANVAS}"/>'
    for number, line in enumerate(panel.lines):
        y = plot.top + 14 + _LEGEND_LINE * number
        yield f'<path d="M{start},{y} h24" stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="3"/>'
        yield _text(start + 32, y + 4, line.name, _TEXT, anchor="start")


@dataclass
class _Plot:
    """Where numbers lie in the picture."""

    left_of_panel: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def __post_init__(self) -> None:
        self.left, self.right = self.left_of_panel + _LEFT, self.left_of_panel + _PANEL_WIDTH - _RIGHT
        self.top, self.bottom = _TOP, _HEIGHT - _BOTTOM

    def x(self, value: float) -> float:
        first, last = self.x_range
        return self.left + (self.right - self.left) * (value - first) / (last - first)

    def y(self, value: float) -> float:
        lowest, highest = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - lowest) / (highest - lowest)


def _text(x: float, y: float, words: str, colour: str, *, anchor: str = "middle", size: int = 12) -> str:
    """One line, legible also on a line of the grid."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'stroke="{_CANVAS}" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{escape(words)}</text>'
    )
