"""A picture as Mermaid text, as SVG and as PNG.

Mermaid places the nodes itself, so its text needs no layout. The SVG is drawn from left to right with the font of the
package, and PNG is the SVG as pixels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from streamiter.engine.graph.graph import Step
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.arrange import LevelRun, Point, Rectangle
from streamiter.flow.drawing.layout import (
    FONT_FAMILY,
    FONT_FILE,
    MARGIN,
    Caption,
    CaptionLine,
    PlacedBox,
    PlacedLink,
    PlacedNode,
    advances,
    lay_out,
    printable,
)
from streamiter.flow.drawing.picture import Link, Node, Picture, picture_of

DrawingFormat = Literal["mermaid", "svg", "png"]


def drawing_of(
    flow: str, steps: Sequence[Step], statistics: JobStatistics | None, drawing_format: DrawingFormat
) -> str | bytes:
    """Return the drawing of a flow as text, or as bytes for PNG."""
    return draw_picture(picture_of(flow, steps, statistics), drawing_format, f"flow {flow!r}")


def draw_picture(picture: Picture, drawing_format: DrawingFormat, owner: str) -> str | bytes:
    """Return the picture as text, or as bytes for PNG; ``owner`` is the flow or network that errors name."""
    drawers: dict[str, Callable[[Picture], str | bytes]] = {"mermaid": mermaid, "svg": svg, "png": png}
    if drawing_format not in drawers:
        raise ConfigurationError(
            f"{owner}: draw expected the format {', '.join(map(repr, drawers))}, given {drawing_format!r}; "
            "choose one of these"
        )
    return drawers[drawing_format](picture)


# -- Mermaid -----------------------------------------------------------------------------------------------

_MERMAID_SHAPES = {
    "source": ("[(", ")]"),
    "sink": ("[/", "/]"),
    "iteration": ("{{", "}}"),
    "operator": ("[", "]"),
    "service": ("[[", "]]"),
}
# Mermaid writes a character that has a meaning in Mermaid or in HTML as its number.
_CODES = {ord(character): f"#{ord(character)};" for character in '"#&<>`'} | dict.fromkeys((*range(32), 127), " ")
_PLAIN_TITLE = re.compile(r"[A-Za-z][\w ()-]*")
_PLAIN_LABEL = re.compile(r"[\w ,+-]*")


def mermaid(picture: Picture) -> str:
    """Return the picture as Mermaid text; links that close a loop, and links to services, are dotted."""
    lines = ["---", f"title: {_mermaid_title(picture.title)}", "---", "flowchart LR"]
    lines += _mermaid_nodes(picture, None, indent=4)
    for number, box in enumerate(picture.boxes):
        lines.append(f'    subgraph loop{number + 1}["{_mermaid_text(box.heading)}"]')
        lines += _mermaid_nodes(picture, number, indent=8)
        lines.append("    end")
    lines += [f"    {_mermaid_link(link)}" for link in picture.links]
    return "\n".join(lines) + "\n"


def _mermaid_nodes(picture: Picture, box: int | None, *, indent: int) -> Iterable[str]:
    for number, node in enumerate(picture.nodes):
        if node.box == box:
            yield f"{' ' * indent}s{number}{_mermaid_node(node)}"


def _mermaid_node(node: Node) -> str:
    opening, closing = _MERMAID_SHAPES[node.shape]
    name = f"{_mermaid_text(node.name)} {node.times}".rstrip()
    return f'{opening}"{"<br>".join((name, *map(_mermaid_text, node.notes)))}"{closing}'


def _mermaid_link(link: Link) -> str:
    if link.kind != "data":
        tail = "<-." if link.kind == "service" else "-."
        return f's{link.source} {tail} "{_mermaid_text(link.label)}" .-> s{link.target}'
    plain = _PLAIN_LABEL.fullmatch(link.label)
    label = link.label if plain else f'"{_mermaid_text(link.label)}"'
    return f"s{link.source} -->{f'|{label}|' if label else ''} s{link.target}"


def _mermaid_text(text: str) -> str:
    return text.translate(_CODES)


def _mermaid_title(text: str) -> str:
    """Return the title as YAML: a plain scalar if possible, else a string in JSON's quotes, which YAML reads."""
    return text if _PLAIN_TITLE.fullmatch(text) else json.dumps(text)


# -- SVG ---------------------------------------------------------------------------------------------------

# The text is measured with the first font. Verdana is as wide, the fonts after it are narrower.
_FONTS = f"'{FONT_FAMILY}', Verdana, 'Segoe UI', Helvetica, Arial, sans-serif"

# The radius of round corners; the height of half the end of a cylinder; the size of cut corners.
_RADIUS = 6.0
_ELLIPSE = 6.0
_CUT = 9.0

# The share of a line of text that is above its baseline.
_ASCENT = 0.86

_KINDS = ("data", "feedback", "criteria", "service")

# The distance of the two upright lines in a service from its ends.
_SIDE = 6.0

# The light and the dark colour.
_COLOURS = {
    "canvas": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#f0f6fc"),
    "muted": ("#59636e", "#9aa4af"),
    "box": ("#f6f8fa", "#161b22"),
    "box border": ("#afb8c1", "#484f58"),
    "operator": ("#ffffff", "#21262d"),
    "operator border": ("#6e7781", "#848d97"),
    "source": ("#ddf0ff", "#0c2d4d"),
    "source border": ("#0969da", "#58a6ff"),
    "sink": ("#dcf7e3", "#0f3320"),
    "sink border": ("#1a7f37", "#3fb950"),
    "iteration": ("#fff4d4", "#3a2d0a"),
    "iteration border": ("#9a6700", "#d29922"),
    "service": ("#ffe9dc", "#3d1f0a"),
    "service border": ("#bc4c00", "#f0883e"),
    "data link": ("#57606a", "#9aa4af"),
    "feedback link": ("#bf3989", "#f778ba"),
    "criteria link": ("#8250df", "#be8fff"),
    "service link": ("#bc4c00", "#f0883e"),
}


def svg(picture: Picture, *, for_screens: bool = True) -> str:
    """Return the picture as SVG; with ``for_screens`` it is dark on a screen with a dark theme."""
    layout = lay_out(picture)
    width, height = _number(layout.width), _number(layout.height)
    style = _style(0)
    if for_screens:
        style += f"@media (prefers-color-scheme: dark) {{\n{_style(1)}}}\n"
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


def _style(theme: Literal[0, 1]) -> str:
    colours = {name: pair[theme] for name, pair in _COLOURS.items()}
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
    """Yield a cylinder, seen a little from above."""
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
    """Yield a rectangle with a line near its left and its right end."""
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
        f'x="{_number(place.x)}" y="{_number(place.y)}" width="{_number(place.width)}" height="{_number(place.height)}"'
    )


# -- links -------------------------------------------------------------------------------------------------


def _link(placed: PlacedLink) -> Iterable[str]:
    kind = placed.link.kind
    ends = ("start", "end") if kind == "service" else ("end",)
    markers = " ".join(f'marker-{end}="url(#streamiter-{kind})"' for end in ends)
    yield f'<path class="link {kind}" d="{svg_path(placed)}" {markers}/>'
    if (place := placed.label) is not None:
        for line in placed.caption.lines:
            x, y = place.x + place.width / 2, place.y + line.size
            yield _text(line, x, y, f"label {kind}", tooltip=placed.caption.whole)


def svg_path(placed: PlacedLink) -> str:
    """Return the route of a link, as the data of a path in SVG."""
    return _curves(placed.runs) if placed.runs else _rounded(placed.corners)


def _curves(runs: Sequence[LevelRun]) -> str:
    """Return a path of level lines with a curve between two of them."""
    parts = [f"M{_point((runs[0].left, runs[0].y))}"]
    for run, following in pairwise(runs):
        parts.append(f"L{_point((run.right, run.y))}")
        middle = (run.right + following.left) / 2
        bends = ((middle, run.y), (middle, following.y), (following.left, following.y))
        parts.append(f"C{' '.join(map(_point, bends))}")
    parts.append(f"L{_point((runs[-1].right, runs[-1].y))}")
    return " ".join(parts)


def _rounded(corners: Sequence[Point]) -> str:
    """Return a path of straight lines with round corners between them."""
    parts = [f"M{_point(corners[0])}"]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        radius = min(_RADIUS + 2, _distance(before, corner) / 2, _distance(corner, after) / 2)
        begin, end = _towards(corner, before, radius), _towards(corner, after, radius)
        parts.append(f"L{_point(begin)} Q{_point(corner)} {_point(end)}")
    parts.append(f"L{_point(corners[-1])}")
    return " ".join(parts)


def _distance(one: Point, other: Point) -> float:
    """Return the length of a level or upright line."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _towards(corner: Point, other: Point, by: float) -> Point:
    """Return the point at this distance from a corner, on the line to the other one."""
    share = by / distance if (distance := _distance(corner, other)) else 0.0
    return corner[0] + share * (other[0] - corner[0]), corner[1] + share * (other[1] - corner[1])


# -- text --------------------------------------------------------------------------------------------------


def _text(line: CaptionLine, x: float, y: float, classes: str, *, tooltip: str = "", anchor: str = "middle") -> str:
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


# Pixels for each unit of the drawing: the text is sharp on screens with small pixels too.
_SCALE = 2


def png(picture: Picture) -> bytes:
    """Return the picture as PNG, light, and with the same font on every machine."""
    return png_of_svg(svg(picture, for_screens=False))


def png_of_svg(text: str) -> bytes:
    """Return a drawing in SVG as PNG. Raises ConfigurationError if resvg_py is missing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ConfigurationError(
            "drawing PNG: expected the package resvg_py, which is not installed; "
            "install it with: pip install 'streamiter[draw]', or draw SVG"
        ) from error
    return svg_to_bytes(
        svg_string=text,
        zoom=_SCALE,
        font_files=[str(FONT_FILE)],
        font_family=FONT_FAMILY,
        sans_serif_family=FONT_FAMILY,
        # It takes long to search the machine for fonts; only characters that this font lacks need them.
        skip_system_fonts=all(character in advances() for character in text if character != "\n"),
    )
