"""Read the bodies, links and texts that an SVG drawing shows from its XML."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from xml.etree import ElementTree

from PIL import ImageFont

from streamiter.flow.drawing.captions import FONT_FILE

SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# The widths of texts are measured by another program than the one that makes the drawing.
_FONT = ImageFont.truetype(str(FONT_FILE), 1000)


@dataclass(frozen=True)
class Rectangle:
    left: float
    top: float
    right: float
    bottom: float

    def contains(self, other: Rectangle, slack: float = 0.02) -> bool:
        return (
            self.left - slack <= other.left
            and self.top - slack <= other.top
            and other.right <= self.right + slack
            and other.bottom <= self.bottom + slack
        )

    def overlaps(self, other: Rectangle, slack: float = 0.02) -> bool:
        return (
            self.left + slack < other.right
            and other.left + slack < self.right
            and self.top + slack < other.bottom
            and other.top + slack < self.bottom
        )

    def has_inside(self, point: Point, slack: float = 0.02) -> bool:
        x, y = point
        return self.left + slack < x < self.right - slack and self.top + slack < y < self.bottom - slack


@dataclass(frozen=True)
class Shown:
    """The parts of a drawing; its nodes and links are in the order of the picture."""

    canvas: Rectangle
    nodes: list[Rectangle]
    node_texts: list[list[tuple[str, Rectangle]]]
    boxes: list[Rectangle]
    headings: list[tuple[str, Rectangle]]
    links: list[list[Point]]
    """Points along each link, close to each other."""
    labels: list[tuple[str, Rectangle]]
    titles: list[str]
    """The texts of the tooltips."""


def read(svg: str) -> Shown:
    root = ElementTree.fromstring(svg)
    texts = list(root.iter(f"{SVG}text"))
    groups = [group for group in root.iter(f"{SVG}g") if _is(group, "node")]
    return Shown(
        canvas=Rectangle(0, 0, float(root.attrib["width"]), float(root.attrib["height"])),
        nodes=[_bounds(part) for group in groups for part in group if _is(part, "body")],
        node_texts=[[_text(text) for text in group.iter(f"{SVG}text")] for group in groups],
        boxes=[_bounds(part) for part in root if _is(part, "loop")],
        headings=[_text(text) for text in texts if _is(text, "heading")],
        links=[_points(part.attrib["d"]) for part in root if _is(part, "link")],
        labels=[_text(text) for text in texts if _is(text, "label")],
        titles=[title.text or "" for title in root.iter(f"{SVG}title")],
    )


def _is(part: ElementTree.Element, name: str) -> bool:
    return name in part.attrib.get("class", "").split()


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]


def _bounds(part: ElementTree.Element) -> Rectangle:
    if part.tag == f"{SVG}rect":
        x, y, width, height = (float(part.attrib[name]) for name in ("x", "y", "width", "height"))
        return Rectangle(x, y, x + width, y + height)
    # Ends of lines, and of arcs that begin and end at both sides: A rx,ry 0 0 1 x,y
    path = re.sub(r"A(\S+),(\S+) 0 0 1 ", "L", part.attrib["d"])
    corners = [_numbers(rest) for command, rest in re.findall(r"([ML])([^A-Z]*)", path)]
    xs = [x for numbers in corners for x in numbers[::2]] + [float(x) for x in re.findall(r"H(\S+)", path)]
    ys = [y for numbers in corners for y in numbers[1::2]] + [float(y) for y in re.findall(r"V(\S+)", path)]
    arc = max((float(ry) for ry in re.findall(r"A\S+,(\S+) 0 0 1 ", part.attrib["d"])), default=0.0)
    return Rectangle(min(xs), min(ys) - arc, max(xs), max(ys) + arc)


def _points(way: str) -> list[Point]:
    points: list[Point] = []
    for command, rest in re.findall(r"([MLCQ])([^MLCQ]*)", way):
        numbers = _numbers(rest)
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        points += ends if command == "M" else [_bezier([points[-1], *ends], k / 20) for k in range(1, 21)]
    return points


def _bezier(points: list[Point], share: float) -> Point:
    while len(points) > 1:
        points = [
            ((1 - share) * a + share * c, (1 - share) * b + share * d) for (a, b), (c, d) in itertools.pairwise(points)
        ]
    return points[0]


def _text(text: ElementTree.Element) -> tuple[str, Rectangle]:
    written = "".join(
        [text.text or "", *((part.text or "") for part in text if part.tag == f"{SVG}tspan")]
        + [part.tail or "" for part in text if part.tag == f"{SVG}title"]
    )
    x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
    width = float(_FONT.getlength(written)) * size / 1000
    left = x - width / 2 if text.attrib["text-anchor"] == "middle" else x
    # Except accents, this font's characters reach at most 0.8 of its size above the line, and 0.24 below it.
    return written, Rectangle(left, y - 0.8 * size, left + width, y + 0.24 * size)
