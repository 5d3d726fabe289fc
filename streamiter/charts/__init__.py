"""Small charts: panels of lines or bars side by side, as SVG."""

from streamiter.charts.bars import BarPanel
from streamiter.charts.chart import chart
from streamiter.charts.lines import Line, Panel

__all__ = ["BarPanel", "Line", "Panel", "chart"]
