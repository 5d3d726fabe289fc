"""Draws a graph as Mermaid text, SVG or PNG: the steps of a flow, or the layers of a network.

``picture`` states which nodes and links a drawing shows, ``layout`` places them, ``formats`` writes them.
"""

from streamiter.flow.drawing.formats import DrawingFormat, drawing_of

__all__ = ["DrawingFormat", "drawing_of"]
