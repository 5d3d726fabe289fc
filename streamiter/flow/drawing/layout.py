"""Layered layout: gives nodes, boxes and labels places in columns from left to right, and each link a route.

A *region* is a part of the picture that is arranged as a whole. The inside of each box is a region; so is the rest,
where a box is one spot. A link that crosses the border of a box has a *port* there.

Each spot is in a column to the right of all spots that it takes data from. A link that passes a column has a spot
there, too; so it never crosses a node, and a label is a spot with a size. The order in each column makes few
crossings, the heights make links straight. A link that closes a loop runs in a lane of its own below everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, permutations

from streamiter.flow.drawing.captions import Caption, fit, node_caption
from streamiter.flow.drawing.picture import Box, Link, Node, Picture

MARGIN = 20.0
_TITLE_HEIGHT = 36.0
_TITLE_SIZE = 16.0
_HEADING_SIZE = 12.0
_LABEL_SIZE = 11.0

# The characters of one line. A title may be wider than a small picture.
_TITLE_CHARACTERS, _HEADING_CHARACTERS, _LABEL_CHARACTERS = 50, 70, 35

# Between the text of a node and its border; the text is below the upper end of a cylinder.
_PADDING_X, _PADDING_Y, _LID = 16.0, 11.0, 10.0
_NODE_WIDTH_MIN, _NODE_HEIGHT_MIN = 80.0, 44.0

# Between the border of a box and its nodes.
_BOX_PADDING, _BOX_HEADING_HEIGHT = 18.0, 38.0

# Between a label and the link below it.
_LABEL_GAP = 3.0

# Between two columns: room for a curve and an arrowhead. A curve that goes far up or down has more room.
_GAP, _GAP_MAX, _SLOPE = 26.0, 60.0, 0.2

# Between a link and an item, or between two links, in a column.
_LINK_GAP = 12.0

# A port is the place where a link touches its item. Ports are at most this far apart, and not at the corners.
_PORT_DISTANCE, _CORNER = 16.0, 10.0

# Between two links that close loops: side by side, and one above the other.
_CHANNEL, _LANE_GAP = 12.0, 14.0

# How much it matters that a piece of a link is level, by the number of items at its ends: a long link is straight above
# all between its own spots, then at its ends. A link to a service may bend so that the links of data are straight.
_WEIGHTS = (8.0, 2.0, 1.0)
_SERVICE_WEIGHT = 0.05

# Sweeps over all columns: the order hardly gets better after the first few, and after the others no eye sees a change.
_ORDER_SWEEPS, _HEIGHT_SWEEPS = 8, 40

Run = tuple[float, float, float]
"""A level part of a route: where it begins, where it ends, and its height.

A straight line leads to the next part if that begins where this one ends, else a curve.
"""


@dataclass(eq=False, slots=True)
class Spot:
    """A node, a box, a port of a box, a label, or a link that passes a column."""

    width: float = 0.0
    height: float = 0.0
    caption: Caption = field(default_factory=Caption)
    is_item: bool = True
    """Whether links begin and end here; else they pass."""
    side: int = 0
    """-1: at the left border of its region, 1: at the right border, 0: in between."""
    ports: dict[int, float] = field(default_factory=dict)
    """Of a box: where each link, by its number, crosses the border, downwards from the middle."""
    x: float = 0.0
    """The left side."""
    y: float = 0.0
    """The height of the middle; it grows downwards."""
    column: int = 0
    pieces: tuple[list[_Piece], list[_Piece]] = field(default_factory=lambda: ([], []))
    """The pieces of links at the left and at the right."""

    @property
    def right(self) -> float:
        """Return the right side."""
        return self.x + self.width

    @property
    def top(self) -> float:
        """Return the upper side."""
        return self.y - self.height / 2


@dataclass(eq=False, slots=True)
class _Piece:
    """The part of a link between two columns: its left and its right spot, and the ports there."""

    spots: tuple[Spot, Spot]
    ports: list[float]
    weight: float

    def height(self, end: int) -> float:
        """Return the height of the left end (0) or the right one (1)."""
        return self.spots[end].y + self.ports[end]


@dataclass(eq=False, slots=True)
class _Part:
    """The part of a link in a region, from one spot to another."""

    ends: tuple[Spot, Spot]
    link: Link
    label: Spot = field(default_factory=Spot)
    pieces: list[_Piece] = field(default_factory=list)
    """From left to right; a single one if the link closes a loop."""
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DrawingLayout:
    """Everything with its place, in the order of the picture; the upper left corner of the drawing is 0, 0."""

    width: float
    height: float
    title: Caption
    nodes: Sequence[Spot]
    boxes: Sequence[Spot]
    routes: Sequence[Sequence[Run]]
    """The route of each link."""
    labels: Sequence[Spot]
    """The label of each link, without lines if the link has no text."""


def lay_out(picture: Picture) -> DrawingLayout:
    """Arrange the inside of each box, then the boxes and the other nodes."""
    homes = [node.box for node in picture.nodes]
    nodes = [_node_spot(node) for node in picture.nodes]
    labels = [_label_spot(link.label) for link in picture.links]
    insides, boxes = [], []
    for number, box in enumerate(picture.boxes):
        within = [spot if home == number else None for spot, home in zip(nodes, homes, strict=True)]
        insides.append(_Region(within, picture.links, labels))
        boxes.append(_box_spot(box, insides[-1]))
    seen = [spot if home is None else boxes[home] for spot, home in zip(nodes, homes, strict=True)]
    around = _Region(seen, picture.links, labels, boxes)
    around.move(MARGIN, MARGIN + _TITLE_HEIGHT)
    for spot, inside in zip(boxes, insides, strict=True):
        inside.move(spot.x + _BOX_PADDING, spot.top + _BOX_HEADING_HEIGHT)
    title = fit(picture.title, _TITLE_SIZE, max(_TITLE_CHARACTERS, int(around.width / _TITLE_SIZE)))
    routes = []
    for number, link in enumerate(picture.links):
        begin, end = (around if home is None else insides[home] for home in (homes[link.source], homes[link.target]))
        # Out of the first box, between the boxes, and into the last one.
        parts = [region.parts[number] for region in dict.fromkeys((begin, around, end)) if number in region.parts]
        routes.append([run for part in parts for run in part.runs])
    width, height = max(title.width, around.width), _TITLE_HEIGHT + around.height
    return DrawingLayout(2 * MARGIN + width, 2 * MARGIN + height, title, nodes, boxes, routes, labels)


def _node_spot(node: Node) -> Spot:
    caption = node_caption(node)
    lid = _LID if node.shape in ("source", "sink") else 0.0
    width = max(_NODE_WIDTH_MIN, caption.width + 2 * _PADDING_X)
    return Spot(width, max(_NODE_HEIGHT_MIN, caption.height + lid + 2 * _PADDING_Y), caption)


def _label_spot(text: str) -> Spot:
    caption = fit(text, _LABEL_SIZE, _LABEL_CHARACTERS)
    return Spot(caption.width, caption.height + _LABEL_GAP if caption.lines else 0.0, caption, is_item=False)


def _box_spot(box: Box, inside: _Region) -> Spot:
    caption = fit(box.heading, _HEADING_SIZE, _HEADING_CHARACTERS)
    height = inside.height + _BOX_HEADING_HEIGHT + _BOX_PADDING
    ports = {number: _BOX_HEADING_HEIGHT + port.y - height / 2 for number, port in inside.ports.items()}
    return Spot(max(inside.width, caption.width) + 2 * _BOX_PADDING, height, caption, ports=ports)


class _Region:
    """The inside of a box, or everything outside of the boxes, arranged in columns from left to right.

    ``seen`` has a spot for each node: its own, that of its box, or none if the node is beyond the border.
    """

    def __init__(
        self, seen: Sequence[Spot | None], links: Sequence[Link], labels: Sequence[Spot], boxes: Sequence[Spot] = ()
    ) -> None:
        self.width = 0.0
        self.height = 0.0
        self.parts: dict[int, _Part] = {}
        """By the number of the link."""
        self.ports: dict[int, Spot] = {}
        """Where a link, by its number, crosses the border of the box."""
        for number, link in enumerate(links):
            source, target = seen[link.source], seen[link.target]
            if source and target and not (source is target and source in boxes):
                self.parts[number] = _Part((source, target), link, labels[number])
            elif source and not target:
                self.ports[number] = Spot(side=1)
                self.parts[number] = _Part((source, self.ports[number]), link)
            elif target and not source:
                self.ports[number] = Spot(side=-1)
                self.parts[number] = _Part((self.ports[number], target), link)
        self._items = list(dict.fromkeys(spot for spot in (*seen, *boxes, *self.ports.values()) if spot))
        self._columns: list[list[Spot]] = []
        """From left to right, each from top to bottom."""
        self._arrange()

    def move(self, x: float, y: float) -> None:
        """Move everything to the right and down."""
        for spot in (*self._items, *(part.label for part in self.parts.values())):
            spot.x, spot.y = spot.x + x, spot.y + y
        for part in self.parts.values():
            part.runs = [(begin + x, end + x, height + y) for begin, end, height in part.runs]

    def _arrange(self) -> None:
        forward = {number: part for number, part in self.parts.items() if not part.link.closes_loop}
        backs = [part for part in self.parts.values() if part.link.closes_loop]
        for part in backs:
            part.pieces.append(_Piece(part.ends, [0.0, 0.0], 0.0))
        self._make_columns(forward)
        self._sweep([()])
        self._sweep([(0,), (1,)] * _ORDER_SWEEPS, is_sorting=True)
        self._spread_ports(backs)
        self._sweep([(0,), (1,)] * _HEIGHT_SWEEPS)
        self._sweep([(0, 1), (1, 0)] * _HEIGHT_SWEEPS)
        spots = [spot for column in self._columns for spot in column]
        top = min((spot.top for spot in spots), default=0.0)
        for spot in spots:
            spot.y -= top
        self.height = max((spot.top + spot.height for spot in spots), default=0.0)
        self._set_widths_and_routes(forward.values(), backs)

    def _make_columns(self, forward: dict[int, _Part]) -> None:
        """Put items into columns with even numbers, and labels between them; then leave out the empty columns."""
        _rank(self._items, [part.ends for part in forward.values()])
        labelled = {part.ends[1].column - 1 for part in forward.values() if part.label.width}
        used = sorted(labelled | {item.column for item in self._items})
        self._columns = [[item for item in self._items if item.column == column] for column in used]
        for number, part in forward.items():
            first, last = part.ends
            chain = [first]
            for column in used[used.index(first.column) + 1 : used.index(last.column)]:
                is_label = column == last.column - 1 and part.label.width
                chain.append(part.label if is_label else Spot(is_item=False))
                chain[-1].column = column
                self._columns[used.index(column)].append(chain[-1])
            chain.append(last)
            # A link runs below its label.
            ports = [spot.height / 2 for spot in chain]
            ports[0], ports[-1] = (end.ports.get(number, 0.0) for end in part.ends)
            weight = _SERVICE_WEIGHT if part.link.kind == "service" else 1.0
            part.pieces = [
                _Piece(spots, [*ends], weight) for spots, ends in zip(pairwise(chain), pairwise(ports), strict=True)
            ]
            for piece in part.pieces:
                piece.spots[0].pieces[1].append(piece)
                piece.spots[1].pieces[0].append(piece)
        for place, spots in enumerate(self._columns):
            for spot in spots:
                spot.column = place

    def _sweep(self, neighbours: Iterable[tuple[int, ...]], *, is_sorting: bool = False) -> None:
        """Move all spots towards their neighbours at the left (0), at the right (1), or at both sides, again and again.

        The columns are visited from left to right, and back if the neighbours at the right are first.
        """
        for sides in neighbours:
            for column in self._columns[:: -1 if sides[:1] == (1,) else 1]:
                if is_sorting:
                    column.sort(key=partial(_middle, side=sides[0]))
                _straighten([(*_wish(spot, sides), spot) for spot in column])

    def _spread_ports(self, backs: Sequence[_Part]) -> None:
        """Spread the links of each item over its sides, in the order of their other ends; ``backs`` are the lowest."""
        for item in self._items:
            for side in (0, 1) if not item.ports else ():
                pieces = sorted(item.pieces[side], key=lambda piece: piece.height(side))
                # A link that closes a loop ends at the left side, and begins at the right side.
                pieces += [part.pieces[0] for part in backs if part.ends[1 - side] is item]
                distance = min(_PORT_DISTANCE, max(0.0, item.height - 2 * _CORNER) / max(1, len(pieces)))
                for number, piece in enumerate(pieces):
                    piece.ports[1 - side] = distance * (number - (len(pieces) - 1) / 2)

    def _set_widths_and_routes(self, forward: Iterable[_Part], backs: Sequence[_Part]) -> None:
        """Place the columns side by side, with room for the links between them, and find all routes."""
        # A link that closes a loop turns right of its source's column, and left of its target's column.
        turns = {gap for part in backs for gap in (part.ends[0].column + 1, part.ends[1].column)}
        lefts, rights = [], []
        for number, column in enumerate(self._columns):
            self.width += len(backs) * _CHANNEL * (number in turns)
            if number:
                rises = (abs(piece.height(0) - piece.height(1)) for spot in column for piece in spot.pieces[0])
                self.width += max(min(_GAP_MAX, _GAP + _SLOPE * rise) for rise in (0.0, *rises))
            lefts.append(self.width)
            self.width += max(spot.width for spot in column)
            rights.append(self.width)
            for spot in column:
                spot.x = (lefts[-1] + rights[-1] - spot.width) / 2
        self.width += len(backs) * _CHANNEL * (len(self._columns) in turns)
        for part in forward:
            (source, target), heights = part.ends, [piece.height(0) for piece in part.pieces]
            begins = [source.right, *lefts[source.column + 1 : target.column + 1]]
            ends = [*rights[source.column : target.column], target.x]
            part.runs = list(zip(begins, ends, [*heights, part.pieces[-1].height(1)], strict=True))
        # The shortest link has the highest lane, so that few links cross.
        backs = sorted(backs, key=lambda part: part.ends[0].right - part.ends[1].x)
        for lane, part in enumerate(backs, 1):
            (source, target), [piece], label = part.ends, part.pieces, part.label
            right, left = rights[source.column] + lane * _CHANNEL, lefts[target.column] - lane * _CHANNEL
            self.height += _LANE_GAP + label.height
            part.runs = [
                (source.right, right, piece.height(0)),
                (right, left, self.height),
                (left, target.x, piece.height(1)),
            ]
            label.x, label.y = max(0.0, (left + right - label.width) / 2), self.height - label.height / 2
            self.width = max(self.width, label.right)


def _rank(items: Sequence[Spot], links: Sequence[tuple[Spot, Spot]]) -> None:
    """Set every column to twice the length of the longest path to it; a source is just before its first target."""
    borders = [(one, other) for one, other in permutations(items, 2) if one.side < other.side]
    for _ in items:
        for source, target in (*links, *borders):
            target.column = max(target.column, source.column + 2)
    for item in items:
        behind = [target.column for source, target in links if source is item]
        if behind and not item.side and all(target is not item for _, target in links):
            item.column = min(behind) - 2


def _middle(spot: Spot, side: int) -> float:
    heights = [piece.height(side) for piece in spot.pieces[side]]
    return sum(heights) / len(heights) if heights else spot.y


def _wish(spot: Spot, sides: Iterable[int]) -> tuple[float, float]:
    """Return the height where links to the neighbours at these sides are nearest to level, and its weight."""
    wishes = [
        (piece.height(side) - piece.ports[1 - side], piece.weight * _WEIGHTS[sum(end.is_item for end in piece.spots)])
        for side in sides
        for piece in spot.pieces[side]
    ] or [(spot.y, 0.01)]
    weight = sum(weight for _, weight in wishes)
    return sum(height * weight for height, weight in wishes) / weight, weight


def _straighten(wished: Sequence[tuple[float, float, Spot]]) -> None:
    """Move the spots of a column as near to the wished heights, by their weights, as their order and gaps allow."""
    steps = [0.0]
    for (_, _, above), (_, _, below) in pairwise(wished):
        gap = _GAP if above.is_item and below.is_item else _LINK_GAP
        steps.append(steps[-1] + (above.height + below.height) / 2 + gap)
    rising = _rising((height - step, weight) for (height, weight, _), step in zip(wished, steps, strict=True))
    for (_, _, spot), height, step in zip(wished, rising, steps, strict=True):
        spot.y = height + step


def _rising(wishes: Iterable[tuple[float, float]]) -> list[float]:
    """Return the rising heights that are nearest to the wished ones; each wish is a height and its weight.

    Neighbours in the wrong order share a mean.

    >>> _rising([(1, 1), (5, 1), (3, 1), (9, 1)])
    [1, 4.0, 4.0, 9]
    """
    blocks: list[tuple[float, float, int]] = []
    for height, weight in wishes:
        count = 1
        while blocks and blocks[-1][0] > height:
            other, other_weight, other_count = blocks.pop()
            height = (height * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            count += other_count
        blocks.append((height, weight, count))
    return [height for height, _, count in blocks for _ in range(count)]
