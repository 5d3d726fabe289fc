"""A small chart: panels side by side, as SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PANEL_WIDTH = 460
HEIGHT = 340
LEFT, RIGHT, TOP, BOTTOM = 68, 24, 46, 56
"""Around the plot of a panel: room for numbers, the title, the name of the axis."""
TEXT, GREY, GRID, CANVAS = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
SHOWN = 0.93
"""The share of a line's values that are not cut off."""
PIXELS_PER_UNIT = 2


@dataclass
class Series:
    """A line."""

    name: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass
class LinePanel:
    """Lines over a common axis. What a line has at its beginning, far above the rest of it, is cut off."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]

    def svg(self, left: float) -> Iterator[str]:
        lowest = min(min(series.ys) for series in self.series)
        highest = max(sorted(series.ys)[int(SHOWN * (len(series.ys) - 1))] for series in self.series)
        x_ticks = ticks(0.0, max(x for series in self.series for x in series.xs))
        y_ticks = ticks(lowest, highest)
        plot = Plot(left, (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
        yield from plot.frame(self.title, self.y_name, y_ticks)
        for tick in x_ticks:
            yield text(plot.x(tick), plot.bottom + 18, f"{tick:g}", GREY)
        yield text((plot.left + plot.right) / 2, plot.bottom + 40, self.x_name, GREY)
        yield f'<clipPath id="plot{left:g}"><rect x="{plot.left}" y="{plot.top}" width="{plot.width}" '
        yield f'height="{plot.height}"/></clipPath>'
        for series in self.series:
            points = " ".join(
                f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in zip(series.xs, series.ys, strict=True)
            )
            yield f'<polyline points="{points}" fill="none" stroke="{series.colour}" stroke-width="2" '
            yield f'stroke-linejoin="round" clip-path="url(#plot{left:g})"/>'
        start, height = plot.right - 96, 20 * len(self.series)
        yield f'<rect x="{start - 8}" y="{plot.top + 4}" width="104" height="{height}" fill="{CANVAS}"/>'
        for number, series in enumerate(self.series):
            y = plot.top + 14 + 20 * number
            yield f'<path d="M{start},{y} h24" stroke="{series.colour}" stroke-width="3"/>'
            yield text(start + 32, y + 4, series.name, TEXT, anchor="start")


@dataclass
class BarPanel:
    """A bar for each name, with its colour and height."""

    title: str
    bars: Mapping[str, tuple[str, float]]

    def svg(self, left: float) -> Iterator[str]:
        y_ticks = ticks(0.0, max(height for _, height in self.bars.values()) * 1.08)
        plot = Plot(left, (0.0, float(len(self.bars))), (0.0, y_ticks[-1]))
        yield from plot.frame(self.title, "", y_ticks)
        for number, (name, (colour, height)) in enumerate(self.bars.items()):
            x, top = plot.x(number + 0.22), plot.y(height)
            width = plot.x(number + 0.78) - x
            yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{plot.bottom - top:.1f}" '
            yield f'fill="{colour}" rx="2"/>'
            yield text(x + width / 2, top - 7, f"{height:.2f}", TEXT)
            yield text(x + width / 2, plot.bottom + 18, name, TEXT)


@dataclass
class Plot:
    """Where numbers lie in the picture."""

    left_of_panel: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def __post_init__(self) -> None:
        self.left, self.right = self.left_of_panel + LEFT, self.left_of_panel + PANEL_WIDTH - RIGHT
        self.top, self.bottom = TOP, HEIGHT - BOTTOM
        self.width, self.height = self.right - self.left, self.bottom - self.top

    def x(self, value: float) -> float:
        first, last = self.x_range
        return self.left + self.width * (value - first) / (last - first)

    def y(self, value: float) -> float:
        lowest, highest = self.y_range
        return self.bottom - self.height * (value - lowest) / (highest - lowest)

    def frame(self, title: str, y_name: str, y_ticks: Sequence[float]) -> Iterator[str]:
        """The title, the axes, and a line for each number at the left."""
        yield text(self.left, TOP - 20, title, TEXT, anchor="start", size=15)
        digits = next(digits for digits in range(10) if is_whole((y_ticks[1] - y_ticks[0]) * 10**digits))
        for tick in y_ticks:
            y = self.y(tick)
            yield f'<path d="M{self.left},{y:.1f} H{self.right}" stroke="{GRID}"/>'
            yield text(self.left - 8, y + 4, f"{tick:.{digits}f}", GREY, anchor="end")
        yield f'<path d="M{self.left},{self.bottom} H{self.right}" stroke="{GREY}"/>'
        if y_name:
            x, y = self.left_of_panel + 18, (self.top + self.bottom) / 2
            yield f'<g transform="rotate(-90 {x} {y})">{text(x, y, y_name, GREY)}</g>'


def is_whole(number: float) -> bool:
    """But for rounding."""
    return abs(number - round(number)) < 1e-6


def ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers around both, four to eight of them."""
    rough = (highest - lowest) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def text(x: float, y: float, words: str, colour: str, *, anchor: str = "middle", size: int = 12) -> str:
    """One line, legible also on a line of the grid."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
        f'stroke="{CANVAS}" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{escape(words)}</text>'
    )


def svg(panels: Sequence[LinePanel | BarPanel]) -> str:
    """The whole picture."""
    width = PANEL_WIDTH * len(panels)
    parts = [part for number, panel in enumerate(panels) for part in panel.svg(number * PANEL_WIDTH)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
            f'viewBox="0 0 {width} {HEIGHT}" font-family="DejaVu Sans, Verdana, sans-serif">',
            f'<rect width="{width}" height="{HEIGHT}" fill="{CANVAS}"/>',
            *parts,
            "</svg>",
        ]
    )


def draw(panels: Sequence[LinePanel | BarPanel], to: Path) -> None:
    """Write the picture; PNG needs ``pip install 'streamiter[draw]'``."""
    if to.suffix == ".svg":
        to.write_text(svg(panels), encoding="utf-8")
        return
    from resvg_py import svg_to_bytes

    from streamiter.flow.drawing.font_file import FONT_FAMILY, FONT_FILE

    to.write_bytes(
        svg_to_bytes(
            svg_string=svg(panels),
            zoom=PIXELS_PER_UNIT,
            font_files=[str(FONT_FILE)],
            font_family=FONT_FAMILY,
            sans_serif_family=FONT_FAMILY,
            skip_system_fonts=True,
        )
    )
