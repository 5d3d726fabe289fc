"""The picture as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.arrange import LevelRun, Point, Rectangle
from streamiter.flow.drawing.layout import MARGIN, PlacedBox, PlacedLink, PlacedNode, lay_out
from streamiter.flow.drawing.picture import (
    FONT_FAMILY,
    FONT_FILE,
    Caption,
    CaptionLine,
    Picture,
    advances,
    printable,
)

__all__ = [
    "png",
    "png_of_svg",
    "svg",
]


# Verdana is as wide as the font that the text was measured with; what comes behind it is narrower.
_FONTS = f"'{FONT_FAMILY}', Verdana, 'Segoe UI', Helvetica, Arial, sans-serif"

# The roundness of corners; of a cylinder's ends; of an iteration's cut corners.
_RADIUS = 6.0
_ELLIPSE = 6.0
_CUT = 9.0

# Of a line of text, what lies above the line it is written on.
_ASCENT = 0.86

_KINDS = ("data", "feedback", "criteria", "service")

# From the ends of a service to the lines beside its text.
_SIDE = 6.0

_LIGHT = {
    "canvas": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "box": "#f6f8fa",
    "box border": "#afb8c1",
    "operator": "#ffffff",
    "operator border": "#6e7781",
    "source": "#ddf0ff",
    "source border": "#0969da",
    "sink": "#dcf7e3",
    "sink border": "#1a7f37",
    "iteration": "#fff4d4",
    "iteration border": "#9a6700",
    "service": "#ffe9dc",
    "service border": "#bc4c00",
    "data link": "#57606a",
    "feedback link": "#bf3989",
    "criteria link": "#8250df",
    "service link": "#bc4c00",
}
_DARK = {
    "canvas": "#0d1117",
    "text": "#f0f6fc",
    "muted": "#9aa4af",
    "box": "#161b22",
    "box border": "#484f58",
    "operator": "#21262d",
    "operator border": "#848d97",
    "source": "#0c2d4d",
    "source border": "#58a6ff",
    "sink": "#0f3320",
    "sink border": "#3fb950",
    "iteration": "#3a2d0a",
    "iteration border": "#d29922",
    "service": "#3d1f0a",
    "service border": "#f0883e",
    "data link": "#9aa4af",
    "feedback link": "#f778ba",
    "criteria link": "#be8fff",
    "service link": "#f0883e",
}


def svg(picture: Picture, *, for_screens: bool = True) -> str:
    """A drawing from left to right; ``for_screens`` it is dark where the reader's screen is."""
    layout = lay_out(picture)
    width, height = _number(layout.width), _number(layout.height)
    style = _style(_LIGHT)
    if for_screens:
        style += f"@media (prefers-color-scheme: dark) {{\n{_style(_DARK)}}}\n"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="streamiter" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(printable(picture.title))} '
        f'font-family="{_FONTS}">',
        f"<style>\n{style}</style>",
        "<defs>",
        *map(_arrowhead, _KINDS),
        "</defs>",
        f'<rect class="canvas" width="{width}" height="{height}"/>',
        *_title(layout.caption),
        *(part for box in layout.boxes for part in _box(box)),
        *(part for link in layout.links for part in _link(link)),
        *(part for node in layout.nodes for part in _node(node)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style(colours: dict[str, str]) -> str:
    rules = {
        ".canvas": f"fill: {colours['canvas']}",
        "text": f"fill: {colours['text']}",
        ".muted": f"fill: {colours['muted']}",
        ".loop": f"fill: {colours['box']}; stroke: {colours['box border']}",
    }
    for shape in _SHAPES:
        border = colours[f"{shape} border"]
        rules[f".{shape} .body"] = f"fill: {colours[shape]}; stroke: {border}; stroke-width: 1.3"
        rules[f".{shape} .rim"] = f"fill: none; stroke: {border}; stroke-width: 1.3"
    for kind in _KINDS:
        dashes = "" if kind == "data" else "; stroke-dasharray: 5 4"
        rules[f".link.{kind}"] = f"fill: none; stroke: {colours[f'{kind} link']}; stroke-width: 1.4{dashes}"
        rules[f".label.{kind}"] = f"fill: {colours['muted' if kind == 'data' else f'{kind} link']}"
        rules[f".arrowhead.{kind}"] = f"fill: {colours[f'{kind} link']}"
    return "".join(f".streamiter {selector} {{ {rule} }}\n" for selector, rule in rules.items())


def _arrowhead(kind: str) -> str:
    return (
        f'<marker id="streamiter-{kind}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path class="arrowhead {kind}" d="M0,1 L10,5 L0,9 Z"/></marker>'
    )


# -- nodes and boxes -----------------------------------------------------------------------------------------


def _title(caption: Caption) -> Iterable[str]:
    for line in caption.lines:
        yield _text(line, MARGIN, MARGIN + line.size, "title", tooltip=caption.whole, anchor="start")


def _box(box: PlacedBox) -> Iterable[str]:
    yield f'<rect class="loop" {_rectangle(box.place)} rx="10"/>'
    for line in box.caption.lines:
        x, y = box.place.x + 14, box.place.y + 22
        yield _text(line, x, y, "heading muted", tooltip=box.caption.whole, anchor="start")


def _node(placed: PlacedNode) -> Iterable[str]:
    place, caption = placed.place, placed.caption
    yield f'<g class="node {placed.node.shape}">'
    if caption.whole:
        yield f"<title>{escape(caption.whole)}</title>"
    yield from _SHAPES[placed.node.shape](place)
    lid = _ELLIPSE if placed.node.shape in ("source", "sink") else 0.0
    top = place.y + (place.height + lid - caption.height) / 2
    for line in caption.lines:
        baseline = top + (line.height - line.size) / 2 + line.size * _ASCENT
        yield _text(line, place.x + place.width / 2, baseline, "muted" if line.muted else "name")
        top += line.height
    yield "</g>"


def _plain(place: Rectangle) -> Iterable[str]:
    yield f'<rect class="body" {_rectangle(place)} rx="{_number(_RADIUS)}"/>'


def _cylinder(place: Rectangle) -> Iterable[str]:
    """Its ends are ellipses; the upper one is seen from above."""
    left, right = _number(place.x), _number(place.x + place.width)
    top, bottom = _number(place.y + _ELLIPSE), _number(place.y + place.height - _ELLIPSE)
    end = f"A{_number(place.width / 2)},{_number(_ELLIPSE)} 0 0"
    yield f'<path class="body" d="M{left},{top} {end} 1 {right},{top} L{right},{bottom} {end} 1 {left},{bottom} Z"/>'
    yield f'<path class="rim" d="M{left},{top} {end} 0 {right},{top}"/>'


def _cut_rectangle(place: Rectangle) -> Iterable[str]:
    left, right, top, bottom = place.x, place.x + place.width, place.y, place.y + place.height
    corners = [
        (left + _CUT, top),
        (right - _CUT, top),
        (right, top + _CUT),
        (right, bottom - _CUT),
        (right - _CUT, bottom),
        (left + _CUT, bottom),
        (left, bottom - _CUT),
        (left, top + _CUT),
    ]
    yield f'<polygon class="body" points="{" ".join(map(_point, corners))}"/>'


def _with_sides(place: Rectangle) -> Iterable[str]:
    """A line along its left and right end."""
    yield f'<rect class="body" {_rectangle(place)} rx="3"/>'
    top, bottom = _number(place.y), _number(place.y + place.height)
    for x in (place.x + _SIDE, place.x + place.width - _SIDE):
        yield f'<path class="rim" d="M{_number(x)},{top} L{_number(x)},{bottom}"/>'


_SHAPES = {
    "operator": _plain,
    "source": _cylinder,
    "sink": _cylinder,
    "iteration": _cut_rectangle,
    "service": _with_sides,
}


def _rectangle(place: Rectangle) -> str:
    return (
        f'x="{_number(place.x)}" y="{_number(place.y)}" '
        f'width="{_number(place.width)}" height="{_number(place.height)}"'
    )


# -- links -------------------------------------------------------------------------------------------------


def _link(placed: PlacedLink) -> Iterable[str]:
    kind = placed.link.kind
    way = _curves(placed.runs) if placed.runs else _rounded(placed.corners)
    ends = ("start", "end") if kind == "service" else ("end",)
    markers = " ".join(f'marker-{end}="url(#streamiter-{kind})"' for end in ends)
    yield f'<path class="link {kind}" d="{way}" {markers}/>'
    if (place := placed.label) is not None:
        for line in placed.caption.lines:
            x, y = place.x + place.width / 2, place.y + line.size
            yield _text(line, x, y, f"label {kind}", tooltip=placed.caption.whole)


def _curves(runs: Sequence[LevelRun]) -> str:
    """Level runs with a curve between any two."""
    parts = [f"M{_point((runs[0].left, runs[0].y))}"]
    for run, following in pairwise(runs):
        parts.append(f"L{_point((run.right, run.y))}")
        middle = (run.right + following.left) / 2
        bends = ((middle, run.y), (middle, following.y), (following.left, following.y))
        parts.append(f"C{' '.join(map(_point, bends))}")
    parts.append(f"L{_point((runs[-1].right, runs[-1].y))}")
    return " ".join(parts)


def _rounded(corners: Sequence[Point]) -> str:
    """Straight lines with round corners between them."""
    parts = [f"M{_point(corners[0])}"]
    for before, corner, behind in zip(corners, corners[1:], corners[2:], strict=False):
        radius = min(_RADIUS + 2, _distance(before, corner) / 2, _distance(corner, behind) / 2)
        begin, end = _towards(corner, before, radius), _towards(corner, behind, radius)
        parts.append(f"L{_point(begin)} Q{_point(corner)} {_point(end)}")
    parts.append(f"L{_point(corners[-1])}")
    return " ".join(parts)


def _distance(one: Point, other: Point) -> float:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _towards(point: Point, other: Point, by: float) -> Point:
    """From a point by so much towards another one that lies level with it, or above or below it."""
    share = by / distance if (distance := _distance(point, other)) else 0.0
    return point[0] + share * (other[0] - point[0]), point[1] + share * (other[1] - point[1])


# -- text --------------------------------------------------------------------------------------------------


def _text(
    line: CaptionLine, x: float, y: float, classes: str, *, tooltip: str = "", anchor: str = "middle"
) -> str:
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    times = f' <tspan class="muted">{escape(line.times)}</tspan>' if line.times else ""
    return (
        f'<text class="{classes}" x="{_number(x)}" y="{_number(y)}" font-size="{_number(line.size)}" '
        f'text-anchor="{anchor}">{title}{escape(line.text)}{times}</text>'
    )


def _point(point: Point) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


# Pixels for each unit of the drawing: text is sharp on screens with small pixels too.
_SCALE = 2


def png(picture: Picture) -> bytes:
    """The light drawing, with the same font on every machine.

    The picture as PNG.
    """
    return png_of_svg(svg(picture, for_screens=False))


def png_of_svg(text: str) -> bytes:
    """Any drawing in SVG. Raises ConfigurationError where the package that renders it is missing."""
    render = _renderer()
    return render(
        svg_string=text,
        zoom=_SCALE,
        font_files=[str(FONT_FILE)],
        font_family=FONT_FAMILY,
        sans_serif_family=FONT_FAMILY,
        # To look through a machine's fonts takes a while; only names in other scripts need them.
        skip_system_fonts=all(character in advances() for character in text if character != "\n"),
    )


def _renderer() -> Callable[..., bytes]:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ConfigurationError(
            "drawing PNG: expected the package resvg_py, which is not installed; "
            "install it with: pip install 'streamiter[draw]', or draw SVG"
        ) from error
    return svg_to_bytes
