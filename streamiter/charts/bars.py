"""Bars side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from streamiter.charts.plot import COLOURS, TEXT, Plot, text
from streamiter.charts.ticks import ticks

__all__ = ["BarPanel"]

# Of the place that a bar has, at either side of it.
_MARGIN: Final = 0.22
# The number above a bar has room below the highest line of the grid, or stands little above it.
_ROOM_ABOVE: Final = 1.08


@dataclass(frozen=True)
class BarPanel:
    """A bar for each name, at least one, with its number above it; none is below 0.

    The first has the colour of the first line of a :class:`Panel`, and so on.
    """

    title: str
    heights: Mapping[str, float]

    def parts(self, left: float) -> Iterator[str]:
        """What is drawn, from ``left`` on."""
        y_ticks = ticks([0.0, _ROOM_ABOVE * max(self.heights.values()) or 1.0])
        plot = Plot(left, (0.0, float(len(self.heights))), (y_ticks[0], y_ticks[-1]))
        yield from plot.frame(self.title, y_ticks)
        for number, (name, height) in enumerate(self.heights.items()):
            x, right, top = plot.x(number + _MARGIN), plot.x(number + 1 - _MARGIN), plot.y(height)
            yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{right - x:.1f}" height="{plot.bottom - top:.1f}" '
            yield f'fill="{COLOURS[number % len(COLOURS)]}" rx="2"/>'
            yield text((x + right) / 2, top - 7, f"{height:.2f}", TEXT)
            yield text((x + right) / 2, plot.bottom + 18, name, TEXT)
