"""The graph as a picture: a neutral model of it, and what draws that as Mermaid, SVG or PNG."""

from streamiter.flow.drawing.drawing import DrawingFormat, draw

__all__ = ["DrawingFormat", "draw"]
