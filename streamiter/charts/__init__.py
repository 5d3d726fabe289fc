"""Small charts: panels of lines side by side, as SVG or PNG."""

from streamiter.charts.chart import Line, Panel, chart

__all__ = ["Line", "Panel", "chart"]
