"""Gives everything in a picture a place: nodes as large as their text, and a box around each iteration.

A *region* is a part of the picture that is arranged as a whole. The inside of each box is a region; so is the rest,
where a box is one item. A link that crosses the border of a box has a *port* there.

A *caption* is the text of a node, a link, a box or the drawing, in lines that fit. Its width is measured with the font
of the package, which also draws PNG: a machine may have no font at all. The font file is read here, so that SVG needs
no other package.
"""

from __future__ import annotations

import functools
import re
import struct
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamiter.flow.drawing.arrange import Arc, Arrangement, DrawnItem, ItemKey, LevelRun, Point, Rectangle, arrange
from streamiter.flow.drawing.picture import Link, Node, Picture

MARGIN = 20.0
_TITLE_HEIGHT = 36.0

# A title may be wider than a small picture.
_TITLE_WIDTH = 480.0


# Between the text of a node and its border.
_PADDING_X = 16.0
_PADDING_Y = 11.0
_NODE_WIDTH_MIN = 80.0
_NODE_HEIGHT_MIN = 44.0

# The height of the upper end of a cylinder; the text is below it.
_LID = 10.0

# Between the border of a box and its nodes.
_BOX_PADDING = 18.0
_BOX_HEADING_HEIGHT = 38.0

# Between a label and the link below it.
_LABEL_GAP = 3.0

# A link to a service may bend so that the links of data are straight.
_SERVICE_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node with its place; the text is in its middle."""

    node: Node
    place: Rectangle
    caption: Caption


@dataclass(frozen=True, slots=True)
class PlacedLink:
    """A link with its route."""

    link: Link
    runs: tuple[LevelRun, ...]
    """The level parts of a link that goes forward, else empty."""
    corners: tuple[Point, ...]
    """The corners of a link that goes back, else empty."""
    caption: Caption
    label: Rectangle | None
    """The place of the caption, above the link; None without text."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box with its place; the text is in its upper left corner."""

    place: Rectangle
    caption: Caption


@dataclass(frozen=True, slots=True)
class DrawingLayout:
    """Everything with its place; the upper left corner of the drawing is 0, 0."""

    width: float
    height: float
    caption: Caption
    """The title."""
    nodes: tuple[PlacedNode, ...]
    links: tuple[PlacedLink, ...]
    boxes: tuple[PlacedBox, ...]


def lay_out(picture: Picture) -> DrawingLayout:
    """Arrange the inside of each box, then the boxes and the other nodes."""
    sizes = _Sizes(
        picture,
        nodes=[node_caption(node) for node in picture.nodes],
        labels=[_one_line(link.label, _LABEL_SIZE, _LABEL_WIDTH) for link in picture.links],
        headings=[_one_line(box.heading, _HEADING_SIZE, _HEADING_WIDTH) for box in picture.boxes],
    )
    insides = [_inside(sizes, number) for number in range(len(picture.boxes))]
    around = _outside(sizes, insides)
    around.x, around.y = MARGIN, MARGIN + _TITLE_HEIGHT
    boxes = [around.place(("box", number)) for number in range(len(insides))]
    for inner, box in zip(insides, boxes, strict=True):
        _move_into(inner, box)
    title = _one_line(picture.title, _TITLE_SIZE, max(_TITLE_WIDTH, around.arrangement.width))
    return DrawingLayout(
        width=2 * MARGIN + max(title.width, around.arrangement.width),
        height=2 * MARGIN + _TITLE_HEIGHT + around.arrangement.height,
        caption=title,
        nodes=tuple(
            PlacedNode(node, _region(node, insides, around).place(("node", number)), sizes.nodes[number])
            for number, node in enumerate(picture.nodes)
        ),
        links=tuple(_placed_link(number, sizes, insides, around) for number in range(len(picture.links))),
        boxes=tuple(map(PlacedBox, boxes, sizes.headings)),
    )


def _region(node: Node, insides: Sequence[_Region], around: _Region) -> _Region:
    return around if node.box is None else insides[node.box]


def _placed_link(number: int, sizes: _Sizes, insides: Sequence[_Region], around: _Region) -> PlacedLink:
    """Join the parts of the route: out of the first box, between the boxes, and into the last one."""
    link, nodes = sizes.picture.links[number], sizes.picture.nodes
    begin, end = (_region(nodes[node], insides, around) for node in (link.source, link.target))
    passed = [begin] if begin is end and number not in around.arcs else [begin, around, end]
    regions = [region for place, region in enumerate(passed) if region not in passed[:place]]
    return PlacedLink(
        link,
        runs=tuple(run for region in regions for run in region.runs(number)),
        corners=tuple(corner for region in regions for corner in region.corners(number)),
        caption=sizes.labels[number],
        label=next((label for region in regions if (label := region.label(number)) is not None), None),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The captions of a picture; sizes follow from them."""

    picture: Picture
    nodes: Sequence[Caption]
    labels: Sequence[Caption]
    headings: Sequence[Caption]

    def label(self, number: int) -> tuple[float, float]:
        """Return width and height of the label of a link, with the gap to the link."""
        caption = self.labels[number]
        return caption.width, caption.height + _LABEL_GAP if caption.lines else 0.0


@dataclass(eq=False, slots=True)
class _Region:
    """The inside of a box, or everything outside of the boxes."""

    sizes: _Sizes
    items: dict[ItemKey, DrawnItem] = field(default_factory=dict)
    arcs: dict[int, Arc] = field(default_factory=dict)
    """By the number of the link."""
    backs: dict[int, Arc] = field(default_factory=dict)
    """By the number of the link."""
    arrangement: Arrangement = field(default_factory=Arrangement)
    x: float = 0.0
    """The left side of the region in the drawing."""
    y: float = 0.0
    """The top of the region in the drawing."""

    # -- building ----------------------------------------------------------------------------------------

    def add_node(self, number: int) -> None:
        caption = self.sizes.nodes[number]
        lid = _LID if self.sizes.picture.nodes[number].shape in ("source", "sink") else 0.0
        width = max(_NODE_WIDTH_MIN, caption.width + 2 * _PADDING_X)
        height = max(_NODE_HEIGHT_MIN, caption.height + lid + 2 * _PADDING_Y)
        self.items["node", number] = DrawnItem(width, height)

    def add_box(self, number: int, region: _Region) -> None:
        inner = region.arrangement
        width = max(inner.width, self.sizes.headings[number].width) + 2 * _BOX_PADDING
        self.items["box", number] = DrawnItem(width, inner.height + _BOX_HEADING_HEIGHT + _BOX_PADDING)

    def add_link(self, number: int, source: ItemKey, target: ItemKey, *, labelled: bool = True) -> None:
        link = self.sizes.picture.links[number]
        width, height = self.sizes.label(number) if labelled else (0.0, 0.0)
        weight = _SERVICE_WEIGHT if link.kind == "service" else 1.0
        (self.backs if link.closes_loop else self.arcs)[number] = Arc(source, target, width, height, weight=weight)

    def arrange(self) -> None:
        self.arrangement = arrange(self.items, self.arcs, self.backs)

    # -- places after arranging ---------------------------------------------------------------------------

    def place(self, key: ItemKey) -> Rectangle:
        return self.arrangement.items[key].moved(self.x, self.y)

    def runs(self, number: int) -> list[LevelRun]:
        """Return the level parts of a link within this region."""
        return [run.moved(self.x, self.y) for run in self.arrangement.runs.get(number, ())]

    def corners(self, number: int) -> list[Point]:
        """Return the corners of a link that goes back within this region."""
        return [(x + self.x, y + self.y) for x, y in self.arrangement.corners.get(number, ())]

    def label(self, number: int) -> Rectangle | None:
        """Return the place of the label of a link, without the gap below it."""
        place = self.arrangement.labels.get(number)
        if place is None:
            return None
        return Rectangle(place.x + self.x, place.y + self.y, place.width, place.height - _LABEL_GAP)


def _inside(sizes: _Sizes, box: int) -> _Region:
    """Return the inside of a box, arranged; a link that crosses the border has a port there."""
    region = _Region(sizes)
    nodes, links = sizes.picture.nodes, sizes.picture.links
    for number, node in enumerate(nodes):
        if node.box == box:
            region.add_node(number)
    for number, link in enumerate(links):
        crossing = [nodes[link.source].box == box, nodes[link.target].box == box]
        if any(crossing) and not all(crossing):
            region.items["port", number] = DrawnItem(0.0, 0.0, side=1 if crossing[0] else -1)
    for number, link in enumerate(links):
        source, target = ("node", link.source), ("node", link.target)
        if source in region.items and target in region.items:
            region.add_link(number, source, target)
        elif source in region.items:
            region.add_link(number, source, ("port", number), labelled=False)
        elif target in region.items:
            region.add_link(number, ("port", number), target, labelled=False)
    region.arrange()
    return region


def _outside(sizes: _Sizes, insides: Sequence[_Region]) -> _Region:
    """Return the boxes, and the nodes that are in no box, arranged."""
    region = _Region(sizes)
    nodes = sizes.picture.nodes
    for number, node in enumerate(nodes):
        if node.box is None:
            region.add_node(number)
    for number, inner in enumerate(insides):
        region.add_box(number, inner)
    for number, link in enumerate(sizes.picture.links):
        source, target = (_seen_from_outside(sizes.picture, end) for end in (link.source, link.target))
        if source != target or source[0] == "node":
            region.add_link(number, source, target)
            if source[0] == "box":
                region.arcs[number].source_port = _port(region, source, insides[source[1]], number)
            if target[0] == "box":
                region.arcs[number].target_port = _port(region, target, insides[target[1]], number)
    region.arrange()
    return region


def _seen_from_outside(picture: Picture, node: int) -> ItemKey:
    box = picture.nodes[node].box
    return ("node", node) if box is None else ("box", box)


def _port(region: _Region, box: ItemKey, inner: _Region, link: int) -> float:
    """Return how far below the middle of the box the link crosses its border."""
    return _BOX_HEADING_HEIGHT + inner.place(("port", link)).y - region.items[box].height / 2


def _move_into(inner: _Region, box: Rectangle) -> None:
    """Move the inside of a box to the place of the box."""
    inner.x, inner.y = box.x + _BOX_PADDING, box.y + _BOX_HEADING_HEIGHT


# -- captions ------------------------------------------------------------------------------------------------

_TITLE_SIZE: Final = 16.0
_HEADING_SIZE: Final = 12.0
_LABEL_SIZE: Final = 11.0
_NAME_SIZE: Final = 13.0
_NOTE_SIZE: Final = 11.0
_LINE_HEIGHT: Final = 1.35

# After about 25 characters a name continues in the next line; the third line is the last one.
_NAME_WIDTH: Final = 180.0
_NAME_LINES: Final = 3
_NOTE_WIDTH: Final = 280.0
_LABEL_WIDTH: Final = 220.0
_HEADING_WIDTH: Final = 480.0


@dataclass(frozen=True, slots=True)
class CaptionLine:
    """One line of a caption."""

    text: str
    size: float
    """The size of the font."""
    muted: bool = False
    """Whether the line has the colour of notes."""
    times: str = ""
    """The number of subtasks, written after the text in the colour of notes."""

    @property
    def width(self) -> float:
        """Return the width of the line."""
        return width_of(f"{self.text} {self.times}" if self.times else self.text, self.size)

    @property
    def height(self) -> float:
        """Return the height of the line, with the distance to the next line."""
        return self.size * _LINE_HEIGHT


@dataclass(frozen=True, slots=True)
class Caption:
    """A text in lines that fit."""

    lines: tuple[CaptionLine, ...]
    whole: str = ""
    """The whole text if the lines leave out a part of it, else empty."""

    @property
    def width(self) -> float:
        """Return the width of the widest line."""
        return max((line.width for line in self.lines), default=0.0)

    @property
    def height(self) -> float:
        """Return the height of all lines."""
        return sum(line.height for line in self.lines)


def node_caption(node: Node) -> Caption:
    """Return the name in up to three lines, then each note in a line."""
    name = fit(node.name, _NAME_SIZE, _NAME_WIDTH, lines=_NAME_LINES)
    notes = [fit(note, _NOTE_SIZE, _NOTE_WIDTH, lines=1) for note in node.notes]
    lines = [CaptionLine(text, _NAME_SIZE) for text in name.lines]
    if lines and node.times:
        lines[-1] = CaptionLine(lines[-1].text, _NAME_SIZE, times=node.times)
    lines += [CaptionLine(text, _NOTE_SIZE, muted=True) for note in notes for text in note.lines]
    shortened = any(fitted.shortened for fitted in (name, *notes))
    return Caption(tuple(lines), printable(", ".join((node.name, *node.notes))) if shortened else "")


def _one_line(text: str, size: float, width: float) -> Caption:
    """Return the text in one line, at most this wide."""
    fitted = fit(text, size, width, lines=1)
    return Caption(tuple(CaptionLine(line, size) for line in fitted.lines), printable(text) if fitted.shortened else "")


# XML 1.0 cannot hold these characters, not even escaped.
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# A name may be broken after a space, and after a character that joins words in a name.
_PIECES: Final = re.compile(r"[^\s_./:\-→]*[\s_./:\-→]?")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lines that are narrow enough."""

    lines: tuple[str, ...]
    shortened: bool = False
    """Whether the end of the text is left out."""


def printable(text: str) -> str:
    """Return the text in one line, without the characters that XML cannot hold."""
    return " ".join(_NOT_IN_XML.sub("\ufffd", text).split())


def fit(text: str, size: float, width: float, *, lines: int) -> Fitted:
    """Break the text into at most this many lines, between words if possible; shorten a text that is too long."""
    rest = printable(text)
    fitted: list[str] = []
    while rest and len(fitted) < lines:
        if width_of(rest, size) <= width:
            return Fitted((*fitted, rest))
        is_last = len(fitted) == lines - 1
        length = _fitting(rest, size, width - (width_of("…", size) if is_last else 0))
        if is_last:
            return Fitted((*fitted, rest[:length].rstrip() + "…"), shortened=True)
        length = _break_before(rest, length)
        fitted.append(rest[:length].rstrip())
        rest = rest[length:].lstrip()
    return Fitted(tuple(fitted))


def _fitting(text: str, size: float, width: float) -> int:
    """Return the number of characters that fit, at least one."""
    used = 0.0
    for length, character in enumerate(text):
        used += width_of(character, size)
        if used > width:
            return max(1, length)
    return len(text)


def _break_before(text: str, length: int) -> int:
    """Return the last place to break within the first ``length`` characters, or ``length`` if there is none."""
    place = 0
    for piece in _PIECES.finditer(text):
        if len(piece[0].rstrip()) + piece.start() > length:
            break
        place = piece.end()
    return place or length


# -- the width of text -------------------------------------------------------------------------------------

FONT_FAMILY: Final = "DejaVu Sans"
FONT_FILE: Final = Path(__file__).parent / "font" / "DejaVuSans.ttf"

# The width of a character that the font lacks is estimated, with some room: another font draws it.
_WIDE_EM: Final = 1.3
_NARROW_EM: Final = 1.0


def width_of(text: str, size: float) -> float:
    """Return the width of a line in a font of this size."""
    known = advances()
    return size * sum(
        width if (width := known.get(character)) is not None else _estimate(character) for character in text
    )


def _estimate(character: str) -> float:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0.0
    return _WIDE_EM if unicodedata.east_asian_width(character) in "WF" else _NARROW_EM


@functools.cache
def advances() -> Mapping[str, float]:
    """Return the width of each character of the font of the package, for a font of size 1."""
    data = FONT_FILE.read_bytes()
    tables = _tables(data)
    (units_in_em,) = struct.unpack_from(">H", data, tables["head"] + 18)
    (metrics,) = struct.unpack_from(">H", data, tables["hhea"] + 34)
    return {
        character: struct.unpack_from(">H", data, tables["hmtx"] + 4 * min(glyph, metrics - 1))[0] / units_in_em
        for character, glyph in _glyphs(data, tables["cmap"])
    }


def _tables(data: bytes) -> dict[str, int]:
    """Return the offset of each table of the font file."""
    (count,) = struct.unpack_from(">H", data, 4)
    records = (struct.unpack_from(">4sIII", data, 12 + 16 * number) for number in range(count))
    return {tag.decode(): offset for tag, _, offset, _ in records}


def _glyphs(data: bytes, cmap: int) -> Iterator[tuple[str, int]]:
    """Yield each character with its glyph, from the subtable of the basic plane (format 4)."""
    (count,) = struct.unpack_from(">H", data, cmap + 2)
    subtables = [cmap + struct.unpack_from(">I", data, cmap + 8 + 8 * number)[0] for number in range(count)]
    table = next(place for place in subtables if struct.unpack_from(">H", data, place)[0] == 4)
    segments = struct.unpack_from(">H", data, table + 6)[0] // 2
    ends, starts, deltas, ranges = (
        struct.unpack_from(f">{segments}H", data, table + 14 + 2 * segments * column + (2 if column else 0))
        for column in range(4)
    )
    for segment in range(segments):
        for code in range(starts[segment], min(ends[segment], 0xFFFE) + 1):
            glyph = code
            if ranges[segment]:
                place = table + 16 + 6 * segments + 2 * segment + ranges[segment] + 2 * (code - starts[segment])
                (glyph,) = struct.unpack_from(">H", data, place)
            yield chr(code), (glyph + deltas[segment]) & 0xFFFF
