"""Lines over common axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.charts.plot import CANVAS, COLOURS, GREY, TEXT, Plot, text
from streamiter.charts.ticks import tick_labels, ticks

__all__ = ["Line", "Panel"]

_LEGEND_WIDTH: Final = 116
_LEGEND_LINE: Final = 20
# Closer together, the marks would hide the line that joins them.
_DISTANCE_OF_MARKS: Final = 8


@dataclass(frozen=True)
class Line:
    """Points that are joined, from left to right; at least one."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Lines over common axes, with a legend where there are several; points are marked where there is room for it."""

    title: str
    x_name: str
    lines: Sequence[Line]
    y_name: str = ""
    cut_above: float | None = None
    """The axis ends with the next number above this, so that a high beginning does not flatten the rest."""
    has_whole_xs: bool = False
    """Whether the axis below counts something, such as epochs: its numbers are whole."""

    def parts(self, left: float) -> Iterator[str]:
        """What is drawn, from ``left`` on."""
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
        start = plot.right - _LEGEND_WIDTH + 8
        height = _LEGEND_LINE * len(self.lines)
        yield f'<rect x="{start - 8}" y="{plot.top + 4}" width="{_LEGEND_WIDTH}" height="{height}" fill="{CANVAS}"/>'
        for number, line in enumerate(self.lines):
            y = plot.top + 14 + _LEGEND_LINE * number
            yield f'<path d="M{start},{y} h24" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="3"/>'
            yield text(start + 32, y + 4, line.name, TEXT, anchor="start")
