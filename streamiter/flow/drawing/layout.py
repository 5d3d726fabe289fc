"""The picture with a place for everything: nodes as large as their text, a box around each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamiter.flow.drawing.arrange import Place, Point, Run
from streamiter.flow.drawing.captions import (
    Caption,
    heading_caption,
    label_caption,
    node_caption,
    title_caption,
)
from streamiter.flow.drawing.picture import Link, Node, Picture
from streamiter.flow.drawing.region import Region, Sizes, inside, move_into, outside

__all__ = ["MARGIN", "Layout", "PlacedBox", "PlacedLink", "PlacedNode", "lay_out"]

MARGIN = 20.0
_TITLE_HEIGHT = 36.0

# A title may be wider than a small picture.
_TITLE_WIDTH = 480.0


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node with its text around its middle."""

    node: Node
    place: Place
    caption: Caption


@dataclass(frozen=True, slots=True)
class PlacedLink:
    """A link with its way, and its label above it."""

    link: Link
    runs: tuple[Run, ...]
    """Where it goes forward."""
    corners: tuple[Point, ...]
    """Where it goes back."""
    caption: Caption
    label: Place | None


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box with its text at its left upper corner."""

    place: Place
    caption: Caption


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything with its place; the left upper corner of the drawing is 0, 0."""

    width: float
    height: float
    caption: Caption
    nodes: tuple[PlacedNode, ...]
    links: tuple[PlacedLink, ...]
    boxes: tuple[PlacedBox, ...]


def lay_out(picture: Picture) -> Layout:
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
    return Layout(
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
