"""Gives everything in a picture a place: nodes as large as their text, and a box around each iteration.

A *region* is a part of the picture that is arranged as a whole. The inside of each box is a region; so is the rest,
where a box is one item. A link that crosses the border of a box has a *port* there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamiter.flow.drawing.arrange import Arc, Arrangement, Back, Item, LevelRun, Point, Rectangle, arrange
from streamiter.flow.drawing.captions import (
    Caption,
    heading_caption,
    label_caption,
    node_caption,
    title_caption,
)
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
        labels=[label_caption(link) for link in picture.links],
        headings=[heading_caption(box) for box in picture.boxes],
    )
    insides = [_inside(sizes, number) for number in range(len(picture.boxes))]
    around = _outside(sizes, insides)
    around.x, around.y = MARGIN, MARGIN + _TITLE_HEIGHT
    boxes = [around.place(("box", number)) for number in range(len(insides))]
    for inner, box in zip(insides, boxes, strict=True):
        _move_into(inner, box)
    title = title_caption(picture.title, max(_TITLE_WIDTH, around.arrangement.width))
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


_Key = tuple[str, int]
"""An item of a region: "node", "box" or "port", and the number of the node, the box, or the link at the port."""


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
    items: dict[_Key, Item] = field(default_factory=dict)
    arcs: dict[int, Arc] = field(default_factory=dict)
    """By the number of the link."""
    backs: dict[int, Back] = field(default_factory=dict)
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
        self.items["node", number] = Item(width, height)

    def add_box(self, number: int, region: _Region) -> None:
        inner = region.arrangement
        width = max(inner.width, self.sizes.headings[number].width) + 2 * _BOX_PADDING
        self.items["box", number] = Item(width, inner.height + _BOX_HEADING_HEIGHT + _BOX_PADDING)

    def add_link(self, number: int, source: _Key, target: _Key, *, labelled: bool = True) -> None:
        numbers = {key: place for place, key in enumerate(self.items)}
        width, height = self.sizes.label(number) if labelled else (0.0, 0.0)
        if self.sizes.picture.links[number].closes_loop:
            self.backs[number] = Back(numbers[source], numbers[target], width, height)
        else:
            arc = self.arcs[number] = Arc(numbers[source], numbers[target], width, height)
            if self.sizes.picture.links[number].kind == "service":
                arc.weight = _SERVICE_WEIGHT

    def arrange(self) -> None:
        self.arrangement = arrange(
            list(self.items.values()), list(self.arcs.values()), list(self.backs.values())
        )

    # -- places after arranging ---------------------------------------------------------------------------

    def place(self, key: _Key) -> Rectangle:
        return self.arrangement.items[list(self.items).index(key)].moved(self.x, self.y)

    def runs(self, number: int) -> list[LevelRun]:
        """Return the level parts of a link within this region."""
        if number not in self.arcs:
            return []
        return [run.moved(self.x, self.y) for run in self.arrangement.arcs[list(self.arcs).index(number)]]

    def corners(self, number: int) -> list[Point]:
        """Return the corners of a link that goes back within this region."""
        if number not in self.backs:
            return []
        corners = self.arrangement.backs[list(self.backs).index(number)]
        return [(x + self.x, y + self.y) for x, y in corners]

    def label(self, number: int) -> Rectangle | None:
        """Return the place of the label of a link, without the gap below it."""
        if number in self.arcs:
            place = self.arrangement.arc_labels[list(self.arcs).index(number)]
        elif number in self.backs:
            place = self.arrangement.back_labels[list(self.backs).index(number)]
        else:
            return None
        if place is None or not place.width:
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
            region.items["port", number] = Item(0.0, 0.0, side=1 if crossing[0] else -1)
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


def _seen_from_outside(picture: Picture, node: int) -> _Key:
    box = picture.nodes[node].box
    return ("node", node) if box is None else ("box", box)


def _port(region: _Region, box: _Key, inner: _Region, link: int) -> float:
    """Return how far below the middle of the box the link crosses its border."""
    return _BOX_HEADING_HEIGHT + inner.place(("port", link)).y - region.items[box].height / 2


def _move_into(inner: _Region, box: Rectangle) -> None:
    """Move the inside of a box to the place of the box."""
    inner.x, inner.y = box.x + _BOX_PADDING, box.y + _BOX_HEADING_HEIGHT
