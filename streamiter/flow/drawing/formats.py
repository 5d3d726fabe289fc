"""A picture as Mermaid text, as SVG and as PNG.

Mermaid places the nodes itself, so its text needs no layout. The SVG is drawn from left to right with the font of the
package, and PNG is the SVG as pixels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, get_args
from xml.sax.saxutils import escape, quoteattr

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.captions import FONT_FAMILY, FONT_FILE, Caption, advances, printable
from streamiter.flow.drawing.layout import MARGIN, Run, Spot, lay_out
from streamiter.flow.drawing.picture import Link, LinkKind, Picture
from streamiter.values.helpers.importing import need_package

DrawingFormat = Literal["mermaid", "svg", "png"]


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

_MERMAID_SHAPES: Final = {
    "source": '[("{}")]',
    "sink": '[/"{}"/]',
    "iteration": '{{{{"{}"}}}}',
    "operator": '["{}"]',
    "service": '[["{}"]]',
}
# Mermaid writes a character that has a meaning in Mermaid or in HTML as its number.
_CODES: Final = {ord(each): f"#{ord(each)};" for each in '"#&<>`'} | dict.fromkeys((*range(32), 127), " ")
_PLAIN_TITLE: Final = re.compile(r"[A-Za-z][\w ()-]*")
_PLAIN_LABEL: Final = re.compile(r"[\w ,+-]*")


def mermaid(picture: Picture) -> str:
    """Return the picture as Mermaid text; links that close a loop, and links to services, are dotted."""
    # The title is a plain scalar of YAML if possible, else a string in JSON's quotes, which YAML reads.
    title = picture.title if _PLAIN_TITLE.fullmatch(picture.title) else json.dumps(picture.title)
    lines = ["---", f"title: {title}", "---", "flowchart LR", *_mermaid_nodes(picture, None)]
    for number, box in enumerate(picture.boxes):
        lines.append(f'    subgraph loop{number + 1}["{box.heading.translate(_CODES)}"]')
        lines += [f"    {line}" for line in _mermaid_nodes(picture, number)]
        lines.append("    end")
    lines += [f"    s{link.source} {_mermaid_arrow(link)} s{link.target}" for link in picture.links]
    return "\n".join(lines) + "\n"


def _mermaid_nodes(picture: Picture, box: int | None) -> Iterable[str]:
    for number, node in enumerate(picture.nodes):
        if node.box == box:
            name = f"{node.name.translate(_CODES)} {node.times}".rstrip()
            text = "<br>".join((name, *(note.translate(_CODES) for note in node.notes)))
            yield f"    s{number}{_MERMAID_SHAPES[node.shape].format(text)}"


def _mermaid_arrow(link: Link) -> str:
    quoted = f'"{link.label.translate(_CODES)}"'
    if link.kind != "data":
        return f"{'<-.' if link.kind == 'service' else '-.'} {quoted} .->"
    label = link.label if _PLAIN_LABEL.fullmatch(link.label) else quoted
    return f"-->|{label}|" if label else "-->"


# -- SVG ---------------------------------------------------------------------------------------------------

# The text is measured with the first font. Verdana is as wide, the fonts after it are narrower.
_FONTS: Final = f"'{FONT_FAMILY}', Verdana, 'Segoe UI', Helvetica, Arial, sans-serif"

# The radius of round corners; half the height of the end of a cylinder; the size of cut corners; the distance of the
# two upright lines in a service from its ends.
_RADIUS, _ELLIPSE, _CUT, _SIDE = 6.0, 6.0, 9.0, 6.0

# The share of a line of text that is above its baseline.
_ASCENT: Final = 0.86

# What has these classes, light and dark; ``color`` is the colour of lines.
_COLOURS: Final = {
    ".canvas": ("fill: #ffffff", "fill: #0d1117"),
    "text": ("fill: #1f2328", "fill: #f0f6fc"),
    ".muted": ("fill: #59636e", "fill: #9aa4af"),
    ".loop": ("fill: #f6f8fa; stroke: #afb8c1", "fill: #161b22; stroke: #484f58"),
    ".operator .body": ("fill: #ffffff; color: #6e7781", "fill: #21262d; color: #848d97"),
    ".source .body": ("fill: #ddf0ff; color: #0969da", "fill: #0c2d4d; color: #58a6ff"),
    ".sink .body": ("fill: #dcf7e3; color: #1a7f37", "fill: #0f3320; color: #3fb950"),
    ".iteration .body": ("fill: #fff4d4; color: #9a6700", "fill: #3a2d0a; color: #d29922"),
    ".service .body": ("fill: #ffe9dc; color: #bc4c00", "fill: #3d1f0a; color: #f0883e"),
    ".data": ("color: #57606a", "color: #9aa4af"),
    ".feedback": ("color: #bf3989", "color: #f778ba"),
    ".criteria": ("color: #8250df", "color: #be8fff"),
    ".service": ("color: #bc4c00", "color: #f0883e"),
}
_LINES: Final = {
    ".body": "stroke: currentColor; stroke-width: 1.3",
    ".link": "fill: none; stroke: currentColor; stroke-width: 1.4; stroke-dasharray: 5 4",
    ".link.data": "stroke-dasharray: none",
    ".label, .streamiter .arrowhead": "fill: currentColor",
}


def svg(picture: Picture) -> str:
    """Return the picture as SVG; it is dark on a screen with a dark theme."""
    layout = lay_out(picture)
    size = f'width="{layout.width:g}" height="{layout.height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="streamiter" {size} '
        f'viewBox="0 0 {layout.width:g} {layout.height:g}" role="img" aria-label={quoteattr(printable(picture.title))} '
        f'font-family="{_FONTS}">',
        "<style>",
        *_rules({**{selector: light for selector, (light, _) in _COLOURS.items()}, **_LINES}),
        "@media (prefers-color-scheme: dark) {",
        *_rules({selector: dark for selector, (_, dark) in _COLOURS.items()}),
        "}</style><defs>",
        *map(_arrowhead, get_args(LinkKind)),
        "</defs>",
        f'<rect class="canvas" {size}/>',
        *_texts(layout.title, "title", MARGIN, MARGIN, anchor="start"),
    ]
    for box in layout.boxes:
        parts.append(f'<rect class="loop" {_rectangle(box)} rx="10"/>')
        parts += _texts(box.caption, "heading muted", box.x + 14, box.top + 10, anchor="start")
    for link, route, label in zip(picture.links, layout.routes, layout.labels, strict=True):
        markers = f'marker-end="url(#streamiter-{link.kind})"'
        if link.kind == "service":
            markers = f'marker-start="url(#streamiter-service)" {markers}'
        parts.append(f'<path class="link {link.kind}" d="{svg_path(route)}" {markers}/>')
        parts += _texts(label.caption, f"label {link.kind}", label.x + label.width / 2, label.top)
    for node, spot in zip(picture.nodes, layout.nodes, strict=True):
        lid = _ELLIPSE if node.shape in ("source", "sink") else 0.0
        top = spot.y + (lid - spot.caption.height) / 2
        texts = _texts(spot.caption, "name", spot.x + spot.width / 2, top)
        parts += [f'<g class="node {node.shape}">', _body(node.shape, spot), *texts, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _rules(rules: Mapping[str, str]) -> Iterable[str]:
    return (f".streamiter {selector} {{ {rule} }}" for selector, rule in rules.items())


def _arrowhead(kind: str) -> str:
    return (
        f'<marker id="streamiter-{kind}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        f'<path class="arrowhead {kind}" d="M0,1 L10,5 L0,9 Z"/></marker>'
    )


def _rectangle(spot: Spot) -> str:
    return f'x="{spot.x:g}" y="{spot.top:g}" width="{spot.width:g}" height="{spot.height:g}"'


def _body(shape: str, spot: Spot) -> str:
    """Return the body of a node: a cylinder, seen a little from above, or a rectangle with what marks its shape."""
    left, right, top, bottom = spot.x, spot.right, spot.top, spot.top + spot.height
    if shape in ("source", "sink"):
        upper, lower, end = top + _ELLIPSE, bottom - _ELLIPSE, f"A{spot.width / 2:g},{_ELLIPSE:g} 0 0 1"
        path = f"M{left:g},{upper:g} {end} {right:g},{upper:g} {end} {left:g},{upper:g} {end} {right:g},{upper:g} "
        path += f"L{right:g},{lower:g} {end} {left:g},{lower:g} Z"
    elif shape == "iteration":
        xs = (left + _CUT, right - _CUT, right, right, right - _CUT, left + _CUT, left, left)
        ys = (top, top, top + _CUT, bottom - _CUT, bottom, bottom, bottom - _CUT, top + _CUT)
        path = f"M{' '.join(f'{x:g},{y:g}' for x, y in zip(xs, ys, strict=True))} Z"
    elif shape == "service":
        path = f"M{left:g},{top:g} H{right:g} V{bottom:g} H{left:g} Z"
        path += "".join(f" M{x:g},{top:g} V{bottom:g}" for x in (left + _SIDE, right - _SIDE))
    else:
        return f'<rect class="body" {_rectangle(spot)} rx="{_RADIUS:g}"/>'
    return f'<path class="body" d="{path}"/>'


def svg_path(route: Sequence[Run]) -> str:
    """Return a route as the data of a path in SVG."""
    parts = [f"M{route[0][0]:g},{route[0][2]:g}"]
    for (_, end, y), (begin, _, next_y) in pairwise(route):
        if begin == end:  # Straight down and back, or up and on, with round corners.
            radius = _RADIUS if next_y > y else -_RADIUS
            parts.append(f"L{end - radius:g},{y:g} Q{end:g},{y:g} {end:g},{y + radius:g}")
            parts.append(f"L{end:g},{next_y - radius:g} Q{end:g},{next_y:g} {end - radius:g},{next_y:g}")
        else:
            middle = (end + begin) / 2
            parts.append(f"L{end:g},{y:g} C{middle:g},{y:g} {middle:g},{next_y:g} {begin:g},{next_y:g}")
    return " ".join([*parts, f"L{route[-1][1]:g},{route[-1][2]:g}"])


def _texts(caption: Caption, classes: str, x: float, top: float, *, anchor: str = "middle") -> Iterable[str]:
    """Yield each line of a caption, from this height downwards; the whole text is the tooltip of a shortened one."""
    tooltip = f"<title>{escape(caption.whole)}</title>" if caption.whole else ""
    for line in caption.lines:
        baseline = top + (line.height - line.size) / 2 + line.size * _ASCENT
        times = f' <tspan class="muted">{escape(line.times)}</tspan>' if line.times else ""
        yield f'<text class="{"muted" if line.is_note else classes}" x="{x:g}" y="{baseline:g}" '
        yield f'font-size="{line.size:g}" text-anchor="{anchor}">{tooltip}{escape(line.text)}{times}</text>'
        top, tooltip = top + line.height, ""


# -- PNG ---------------------------------------------------------------------------------------------------

# Pixels for each unit of the drawing: the text is sharp on screens with small pixels too.
_SCALE: Final = 2


def png(picture: Picture) -> bytes:
    """Return the picture as PNG, light, and with the same font on every machine."""
    return png_of_svg(svg(picture))


def png_of_svg(text: str) -> bytes:
    """Return a drawing in SVG as PNG. Raises ConfigurationError if resvg_py is missing."""
    need_package("drawing PNG", "resvg_py", "draw", ", or draw SVG")
    from resvg_py import svg_to_bytes

    return svg_to_bytes(
        svg_string=text,
        zoom=_SCALE,
        font_files=[str(FONT_FILE)],
        font_family=FONT_FAMILY,
        sans_serif_family=FONT_FAMILY,
        # It takes long to search the machine for fonts; only characters that this font lacks need them.
        skip_system_fonts=all(character in advances() for character in text if character != "\n"),
    )
