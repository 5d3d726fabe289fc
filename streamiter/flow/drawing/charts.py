"""Small charts of lines, as SVG: ``chart`` draws panels next to each other, each with lines over common axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from xml.sax.saxutils import escape

from streamiter.flow.drawing.captions import width_of

# Distances between ticks that people count in.
_STEPS: Final = (1, 2, 2.5, 5, 10)
_INTERVALS: Final = 5
"""The approximate number of ticks; rounding may double it."""


def ticks(values: Sequence[float], *, whole: bool = False) -> list[float]:
    """Return round numbers at equal distances, around all values; equal values are in the middle.

    ``whole``: the values count something, such as epochs, so the ticks are whole numbers.

    >>> ticks([0.31, 0.49]), ticks([3])
    ([0.3, 0.35, 0.4, 0.45, 0.5], [2.0, 2.5, 3.0, 3.5, 4.0])
    >>> ticks([1, 4], whole=True), ticks([3], whole=True)
    ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0])
    """
    lowest, highest = min(values), max(values)
    if highest - lowest <= 1e-9 * max(abs(lowest), abs(highest)):
        margin = abs(lowest) / 3 or 1.0
        lowest, highest = lowest - margin, highest + margin
    rough = (highest - lowest) / _INTERVALS
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * power for factor in _STEPS if factor * power >= rough * 0.999)
    step = next((each for each in steps if not whole or each.is_integer()), 1.0)
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def tick_labels(numbers: Sequence[float]) -> list[str]:
    """Return the numbers as texts with the same number of digits after the point: as many as the finest needs.

    >>> tick_labels([0.0, 0.25, 0.5])
    ['0.00', '0.25', '0.50']
    """
    digits = next(digits for digits in range(13) if all(_is_whole(number * 10**digits) for number in numbers))
    return [f"{number:.{digits}f}" for number in numbers]


def _is_whole(number: float) -> bool:
    """Return whether a number is whole, except for rounding."""
    return abs(number - round(number)) < 1e-6


_FONTS: Final = "DejaVu Sans, Verdana, sans-serif"


class Drawn(Protocol):
    """A panel: :class:`Panel`, or one of your own."""

    def parts(self, left: float, /) -> Iterator[str]:
        """Return the parts of the drawing, which starts at ``left``."""


def chart(panels: Sequence[Drawn]) -> str:
    """Return a drawing of panels next to each other, as SVG.

    :func:`~streamiter.flow.drawing.formats.png_of_svg` makes PNG of it.

    >>> from streamiter.flow.drawing.charts import Line, Panel
    >>> loss = Panel("Loss", "epoch", [Line("training", [1, 2, 3], [0.5, 0.4, 0.35])])
    >>> drawing = chart([loss])
    >>> drawing.count("<polyline"), "epoch" in drawing
    (1, True)
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


# In units of the drawing, which are pixels on most screens.
PANEL_WIDTH: Final = 460
HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 24, 46, 56
"""The margins of a plot in its panel: room for numbers, the title and the name of the axis."""
TEXT, GREY, _GRID, CANVAS = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
COLOURS: Final = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e")
"""The colours of lines, in order; the first follows the last."""


@dataclass
class Plot:
    """The plot of a panel: the places of numbers, and the frame with title, axes and ticks.

    The panel starts at ``left_of_panel`` in the drawing.
    """

    left_of_panel: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def __post_init__(self) -> None:
        self.left, self.right = self.left_of_panel + _LEFT, self.left_of_panel + PANEL_WIDTH - _RIGHT
        self.top, self.bottom = _TOP, HEIGHT - _BOTTOM

    def x(self, value: float) -> float:
        """Return the place of a number on the horizontal axis."""
        first, last = self.x_range
        return self.left + (self.right - self.left) * (value - first) / (last - first)

    def y(self, value: float) -> float:
        """Return the place of a number on the vertical axis."""
        lowest, highest = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - lowest) / (highest - lowest)

    def frame(self, title: str, y_ticks: Sequence[float], y_name: str = "") -> Iterator[str]:
        """Draw the title, a grid line for each vertical tick, and the horizontal axis."""
        yield text(self.left, _TOP - 20, title, TEXT, anchor="start", size=15)
        for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
            yield f'<path d="M{self.left},{self.y(tick):.1f} H{self.right}" stroke="{_GRID}"/>'
            yield text(self.left - 8, self.y(tick) + 4, label, GREY, anchor="end")
        yield f'<path d="M{self.left},{self.bottom} H{self.right}" stroke="{GREY}"/>'
        if y_name:
            x, y = self.left_of_panel + 18, (self.top + self.bottom) / 2
            yield f'<g transform="rotate(-90 {x} {y})">{text(x, y, y_name, GREY)}</g>'


_TEXT_SIZE: Final = 12


def text(x: float, y: float, words: str, colour: str, *, anchor: str = "middle", size: int = _TEXT_SIZE) -> str:
    """Return a line of text that is legible on a grid line, too."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'stroke="{CANVAS}" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{escape(words)}</text>'
    )


_LEGEND_WIDTH: Final = 116
_LEGEND_LINE: Final = 20
# Marks that are closer together would hide the line that joins them.
_DISTANCE_OF_MARKS: Final = 8


@dataclass(frozen=True)
class Line:
    """A line through points, from left to right; at least one point."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Lines over common axes. Several lines have a legend; points are marked if there is room."""

    title: str
    x_name: str
    lines: Sequence[Line]
    y_name: str = ""
    cut_above: float | None = None
    """The vertical axis ends at the next tick above this value, so that high first values do not flatten the rest."""
    has_whole_xs: bool = False
    """Whether the horizontal axis counts something, such as epochs: its ticks are whole numbers."""

    def parts(self, left: float) -> Iterator[str]:
        """Return the parts of the drawing, which starts at ``left``."""
        x_ticks = ticks([x for line in self.lines for x in line.xs], whole=self.has_whole_xs)
        ys = [y for line in self.lines for y in line.ys]
        y_ticks = ticks(ys if self.cut_above is None else [min(y, self.cut_above) for y in ys])
        plot = Plot(left, (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
        yield from plot.frame(self.title, y_ticks, self.y_name)
        for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
            yield text(plot.x(tick), plot.bottom + 18, label, GREY)
        yield text((plot.left + plot.right) / 2, plot.bottom + 40, self.x_name, GREY)
        if self.cut_above is None:
            yield from self._drawn_lines(plot)
        else:
            yield f'<clipPath id="plot{left:g}"><path d="M{plot.left},{plot.top} H{plot.right} V{plot.bottom} '
            yield f'H{plot.left} Z"/></clipPath><g clip-path="url(#plot{left:g})">'
            yield from self._drawn_lines(plot)
            yield "</g>"
        if len(self.lines) > 1:
            yield from self._legend(plot)

    def _drawn_lines(self, plot: Plot) -> Iterator[str]:
        are_marked = _DISTANCE_OF_MARKS * max(len(line.xs) for line in self.lines) <= plot.right - plot.left
        for number, line in enumerate(self.lines):
            colour = COLOURS[number % len(COLOURS)]
            points = [(plot.x(x), plot.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2" '
            yield 'stroke-linejoin="round"/>'
            for x, y in points if are_marked else ():
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'

    def _legend(self, plot: Plot) -> Iterator[str]:
        width = max(_LEGEND_WIDTH, 48 + math.ceil(max(width_of(line.name, _TEXT_SIZE) for line in self.lines)))
        start = plot.right - width + 8
        height = _LEGEND_LINE * len(self.lines)
        yield f'<rect x="{start - 8}" y="{plot.top + 4}" width="{width}" height="{height}" fill="{CANVAS}"/>'
        for number, line in enumerate(self.lines):
            y = plot.top + 14 + _LEGEND_LINE * number
            yield f'<path d="M{start},{y} h24" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="3"/>'
            yield text(start + 32, y + 4, line.name, TEXT, anchor="start")
