"""The picture with a place for everything: nodes as large as their text, a box around each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamiter.flow.drawing.arrange import Arc, Arrangement, Back, Item, LevelRun, Point, Rectangle, arrange
from streamiter.flow.drawing.picture import (
    Caption,
    Node,
    NodeEdge,
    Picture,
    heading_caption,
    label_caption,
    node_caption,
    title_caption,
)

__all__ = [
    "MARGIN",
    "PlacedBox",
    "PlacedLink",
    "PlacedNode",
    "lay_out",
]


MARGIN = 20.0
_TITLE_HEIGHT = 36.0

# A title may be wider than a small picture.
_TITLE_WIDTH = 480.0


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node with its text around its middle."""

    node: Node
    place: Rectangle
    caption: Caption


@dataclass(frozen=True, slots=True)
class PlacedLink:
    """A link with its way, and its label above it."""

    link: NodeEdge
    runs: tuple[LevelRun, ...]
    """Where it goes forward."""
    corners: tuple[Point, ...]
    """Where it goes back."""
    caption: Caption
    label: Rectangle | None


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box with its text at its left upper corner."""

    place: Rectangle
    caption: Caption


@dataclass(frozen=True, slots=True)
class DrawingLayout:
    """Everything with its place; the left upper corner of the drawing is 0, 0."""

    width: float
    height: float
    caption: Caption
    nodes: tuple[PlacedNode, ...]
    links: tuple[PlacedLink, ...]
    boxes: tuple[PlacedBox, ...]


def lay_out(picture: Picture) -> DrawingLayout:
    """Arrange the inside of each box, then the boxes among the other nodes."""
    sizes = Sizes(
        picture,
        nodes=[node_caption(node) for node in picture.nodes],
        labels=[label_caption(link) for link in picture.links],
        headings=[heading_caption(box) for box in picture.boxes],
    )
    insides = [inside(sizes, number) for number in range(len(picture.boxes))]
    around = outside(sizes, insides)
    around.x, around.y = MARGIN, MARGIN + _TITLE_HEIGHT
    boxes = [around.place(("box", number)) for number in range(len(insides))]
    for inner, box in zip(insides, boxes, strict=True):
        move_into(inner, box)
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


def _region(node: Node, insides: Sequence[Region], around: Region) -> Region:
    return around if node.box is None else insides[node.box]


def _placed_link(number: int, sizes: Sizes, insides: Sequence[Region], around: Region) -> PlacedLink:
    """Its way out of the box it begins in, among the boxes, and into the one it ends in."""
    link, nodes = sizes.picture.links[number], sizes.picture.nodes
    begin, end = (_region(nodes[node], insides, around) for node in (link.source, link.target))
    way = [begin] if begin is end and number not in around.arcs else [begin, around, end]
    regions = [region for place, region in enumerate(way) if region not in way[:place]]
    return PlacedLink(
        link,
        runs=tuple(run for region in regions for run in region.runs(number)),
        corners=tuple(corner for region in regions for corner in region.corners(number)),
        caption=sizes.labels[number],
        label=next((label for region in regions if (label := region.label(number)) is not None), None),
    )


# Between the text of a node and its border.
_PADDING_X = 16.0
_PADDING_Y = 11.0
_NODE_WIDTH_MIN = 80.0
_NODE_HEIGHT_MIN = 44.0

# The upper end of a cylinder, which its text stays clear of.
_LID = 10.0

# Between the border of a box and what is in it.
_BOX_PADDING = 18.0
_BOX_HEADING_HEIGHT = 38.0

# Between a label and the link below it.
_LABEL_GAP = 3.0

# Links to services are level where that bends no way of data.
_SERVICE_WEIGHT = 0.05

Key = tuple[str, int]
"""A node, a box, or the place where a link crosses a box's border: "node", "box" or "port", and its number."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What everything's size follows from."""

    picture: Picture
    nodes: Sequence[Caption]
    labels: Sequence[Caption]
    headings: Sequence[Caption]

    def label(self, number: int) -> tuple[float, float]:
        """Width and height of the label of a link."""
        caption = self.labels[number]
        return caption.width, caption.height + _LABEL_GAP if caption.lines else 0.0


@dataclass(eq=False, slots=True)
class Region:
    """What is arranged, by key and by number of the link.

    A part of the picture that is arranged at once: the inside of a box, or all that is outside.
    """

    sizes: Sizes
    items: dict[Key, Item] = field(default_factory=dict)
    arcs: dict[int, Arc] = field(default_factory=dict)
    backs: dict[int, Back] = field(default_factory=dict)
    arrangement: Arrangement = field(default_factory=Arrangement)
    x: float = 0.0
    y: float = 0.0

    # -- building ----------------------------------------------------------------------------------------

    def add_node(self, number: int) -> None:
        caption = self.sizes.nodes[number]
        lid = _LID if self.sizes.picture.nodes[number].shape in ("source", "sink") else 0.0
        width = max(_NODE_WIDTH_MIN, caption.width + 2 * _PADDING_X)
        height = max(_NODE_HEIGHT_MIN, caption.height + lid + 2 * _PADDING_Y)
        self.items["node", number] = Item(width, height)

    def add_box(self, number: int, region: Region) -> None:
        inner = region.arrangement
        width = max(inner.width, self.sizes.headings[number].width) + 2 * _BOX_PADDING
        self.items["box", number] = Item(width, inner.height + _BOX_HEADING_HEIGHT + _BOX_PADDING)

    def add_link(self, number: int, source: Key, target: Key, *, labelled: bool = True) -> None:
        numbers = {key: place for place, key in enumerate(self.items)}
        width, height = self.sizes.label(number) if labelled else (0.0, 0.0)
        if self.sizes.picture.links[number].goes_back:
            self.backs[number] = Back(numbers[source], numbers[target], width, height)
        else:
            arc = self.arcs[number] = Arc(numbers[source], numbers[target], width, height)
            if self.sizes.picture.links[number].kind == "service":
                arc.weight = _SERVICE_WEIGHT

    def arrange(self) -> None:
        self.arrangement = arrange(
            list(self.items.values()), list(self.arcs.values()), list(self.backs.values())
        )

    # -- asking --------------------------------------------------------------------------------------------

    def place(self, key: Key) -> Rectangle:
        return self.arrangement.items[list(self.items).index(key)].moved(self.x, self.y)

    def runs(self, number: int) -> list[LevelRun]:
        """The part of a link that lies in here, if any."""
        if number not in self.arcs:
            return []
        return [run.moved(self.x, self.y) for run in self.arrangement.arcs[list(self.arcs).index(number)]]

    def corners(self, number: int) -> list[Point]:
        """Those of a link that goes back in here."""
        if number not in self.backs:
            return []
        corners = self.arrangement.backs[list(self.backs).index(number)]
        return [(x + self.x, y + self.y) for x, y in corners]

    def label(self, number: int) -> Rectangle | None:
        """Where the label of a link is written, without the gap below it."""
        if number in self.arcs:
            place = self.arrangement.arc_labels[list(self.arcs).index(number)]
        elif number in self.backs:
            place = self.arrangement.back_labels[list(self.backs).index(number)]
        else:
            return None
        if place is None or not place.width:
            return None
        return Rectangle(place.x + self.x, place.y + self.y, place.width, place.height - _LABEL_GAP)


def inside(sizes: Sizes, box: int) -> Region:
    """The inside of a box, arranged; links that cross its border begin or end there."""
    region = Region(sizes)
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


def outside(sizes: Sizes, insides: Sequence[Region]) -> Region:
    """Everything that is in no box, and the boxes, arranged."""
    region = Region(sizes)
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


def _seen_from_outside(picture: Picture, node: int) -> Key:
    box = picture.nodes[node].box
    return ("node", node) if box is None else ("box", box)


def _port(region: Region, box: Key, inner: Region, link: int) -> float:
    """How far below the middle of a box a link crosses its border."""
    return _BOX_HEADING_HEIGHT + inner.place(("port", link)).y - region.items[box].height / 2


def move_into(inner: Region, box: Rectangle) -> None:
    """Put the inside of a box to where its box is."""
    inner.x, inner.y = box.x + _BOX_PADDING, box.y + _BOX_HEADING_HEIGHT
