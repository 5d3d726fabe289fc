"""Layered layout: places items in columns from left to right, and finds a route for each link between them.

Each item is in a column to the right of all items that it takes data from. A link that passes a column has a *spot*
there, as an item has; so it never crosses an item, and a label is a spot with a size. The order in each column makes
few crossings, the heights make links straight. A link that goes back runs in a lane of its own below everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from itertools import combinations, pairwise

Point = tuple[float, float]

ItemKey = tuple[str, int]
"""An item: "node", "box" or "port", and the number of the node, the box, or the link at the port."""


@dataclass(slots=True)
class DrawnItem:
    """A node, a box or a port of a box: links begin and end at it."""

    width: float
    height: float
    side: int = 0
    """-1: at the left border, 1: at the right border, 0: in between."""


@dataclass(slots=True)
class Arc:
    """A link; one that goes back, and may close a loop, has neither given ports nor a weight."""

    source: ItemKey
    target: ItemKey
    label_width: float = 0.0
    """The width of the label; 0 without a label."""
    label_height: float = 0.0
    source_port: float | None = None
    """Where the link begins, downwards from the middle of its item; None: anywhere."""
    target_port: float | None = None
    """Where the link ends."""
    weight: float = 1.0
    """How much it matters that the link is level."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The place of an item or a label: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float

    def moved(self, x: float, y: float) -> Rectangle:
        """Return the same, moved to the right and down."""
        return Rectangle(self.x + x, self.y + y, self.width, self.height)


@dataclass(frozen=True, slots=True)
class LevelRun:
    """A level part of a link; a curve leads to the next part."""

    left: float
    right: float
    y: float

    def moved(self, x: float, y: float) -> LevelRun:
        """Return the same, moved to the right and down."""
        return LevelRun(self.left + x, self.right + x, self.y + y)


@dataclass(slots=True)
class Arrangement:
    """The place of everything; the upper left corner of the whole is 0, 0."""

    width: float = 0.0
    height: float = 0.0
    items: dict[ItemKey, Rectangle] = field(default_factory=dict)
    runs: dict[int, list[LevelRun]] = field(default_factory=dict)
    """The level parts of each arc, from left to right."""
    corners: dict[int, list[Point]] = field(default_factory=dict)
    """The corners of each link that goes back, from source to target."""
    labels: dict[int, Rectangle] = field(default_factory=dict)
    """The place of each label, by the number of its link."""


def arrange(items: Mapping[ItemKey, DrawnItem], arcs: Mapping[int, Arc], backs: Mapping[int, Arc]) -> Arrangement:
    """Place the items from left to right; ``arcs`` have no cycle, ``backs`` may close cycles. Links have numbers."""
    made = _make_columns(items, arcs)
    ports = _spread_ports(made, arcs, backs)
    _place_heights(made)
    return _Arrangement(made, backs, ports).arrangement(arcs)


# -- columns -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Spot:
    """An item in its column, or a link that passes the column."""

    width: float = 0.0
    height: float = 0.0
    line: float = 0.0
    """Where the link passes, downwards from the middle."""
    is_item: bool = False
    place: int = 0
    """The number of the spot in its column, from the top."""
    y: float = 0.0
    """The height of the middle; it grows downwards."""
    lefts: list[LinkPiece] = field(default_factory=list)
    rights: list[LinkPiece] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class LinkPiece:
    """The part of a link between two columns."""

    left: Spot
    right: Spot
    left_port: float = 0.0
    right_port: float = 0.0
    weight: float = 1.0


@dataclass(slots=True)
class _SpotColumns:
    """All spots: the columns from left to right, each from top to bottom."""

    columns: list[list[Spot]]
    items: dict[ItemKey, Spot]
    """The spot of each item."""
    chains: dict[int, list[LinkPiece]]
    """The pieces of each arc, from left to right."""


def _make_columns(items: Mapping[ItemKey, DrawnItem], arcs: Mapping[int, Arc]) -> _SpotColumns:
    """Return the spots of all items and links, in an order with few crossings."""
    ranks = _ranks(items, arcs.values())
    labelled = {2 * ranks[arc.target] - 1 for arc in arcs.values() if arc.label_width}
    numbers = {used: number for number, used in enumerate(sorted(labelled | {2 * rank for rank in ranks.values()}))}
    columns: list[list[Spot]] = [[] for _ in numbers]
    spots = {key: Spot(item.width, item.height, is_item=True) for key, item in items.items()}
    for key, spot in spots.items():
        columns[numbers[2 * ranks[key]]].append(spot)
    chains = {}
    for number, arc in arcs.items():
        first, last = 2 * ranks[arc.source], 2 * ranks[arc.target]
        passed = []
        for used in range(first + 1, last):
            if used in numbers:
                has_label = used == last - 1 and arc.label_width
                # The link runs below its label.
                spot = Spot(arc.label_width, arc.label_height, arc.label_height / 2) if has_label else Spot()
                columns[numbers[used]].append(spot)
                passed.append(spot)
        chains[number] = _chain([spots[arc.source], *passed, spots[arc.target]], arc)
    made = _SpotColumns(columns, spots, chains)
    _order(made)
    return made


def _chain(spots: Sequence[Spot], arc: Arc) -> list[LinkPiece]:
    pieces = [LinkPiece(left, right, left.line, right.line, arc.weight) for left, right in pairwise(spots)]
    pieces[0].left_port = arc.source_port or 0.0
    pieces[-1].right_port = arc.target_port or 0.0
    for piece in pieces:
        piece.left.rights.append(piece)
        piece.right.lefts.append(piece)
    return pieces


def _ranks(items: Mapping[ItemKey, DrawnItem], arcs: Iterable[Arc]) -> dict[ItemKey, int]:
    """Return the rank of each item: the length of the longest path to it; a source is just before its first target."""
    before: dict[ItemKey, list[ItemKey]] = {key: [] for key in items}
    behind: dict[ItemKey, list[ItemKey]] = {key: [] for key in items}
    for arc in arcs:
        before[arc.target].append(arc.source)
        behind[arc.source].append(arc.target)
    begin = 1 if any(item.side < 0 for item in items.values()) else 0
    ranks: dict[ItemKey, int] = {}
    for key in TopologicalSorter(before).static_order():
        ranks[key] = max((ranks[other] + 1 for other in before[key]), default=begin) if items[key].side >= 0 else 0
    for key, item in items.items():
        if not item.side and not before[key] and behind[key]:
            ranks[key] = min(ranks[other] for other in behind[key]) - 1
    end = max((ranks[key] + 1 for key, item in items.items() if item.side <= 0), default=0)
    return {key: end if item.side > 0 else ranks[key] for key, item in items.items()}


_Neighbour = tuple[Spot, float, float, LinkPiece]
"""The spot at the other end of a piece, the port there, the own port, and the piece."""

_Neighbours = Callable[[Spot], list[_Neighbour]]


def _lefts(spot: Spot) -> list[_Neighbour]:
    return [(piece.left, piece.left_port, piece.right_port, piece) for piece in spot.lefts]


def _rights(spot: Spot) -> list[_Neighbour]:
    return [(piece.right, piece.right_port, piece.left_port, piece) for piece in spot.rights]


def _both(spot: Spot) -> list[_Neighbour]:
    return [*_lefts(spot), *_rights(spot)]


# -- the order in a column -----------------------------------------------------------------------------------

# Sweeps over all columns; after the first few the order hardly gets better.
_COLUMN_SWEEPS = 8


def _order(made: _SpotColumns) -> None:
    """Sort each column by the mean place of its neighbours, in both directions; keep the best order."""
    for column in made.columns:
        _number(column)
    best = [list(column) for column in made.columns]
    fewest = _crossings(made.columns)
    for sweep in range(_COLUMN_SWEEPS):
        if not fewest:
            break
        forth = sweep % 2 == 0
        for column in made.columns if forth else reversed(made.columns):
            column.sort(key=partial(_middle, neighbours=_lefts if forth else _rights))
            _number(column)
        crossings = _crossings(made.columns)
        if crossings < fewest:
            fewest, best = crossings, [list(column) for column in made.columns]
    made.columns[:] = best
    for column in best:
        _number(column)


def _number(column: Sequence[Spot]) -> None:
    for place, spot in enumerate(column):
        spot.place = place


def _middle(spot: Spot, neighbours: _Neighbours) -> float:
    heights = [_height(other, port) for other, port, _, _ in neighbours(spot)]
    return sum(heights) / len(heights) if heights else float(spot.place)


def _height(spot: Spot, port: float) -> float:
    """Return where a link ends, counted in spots from the top."""
    return spot.place + (port / spot.height if spot.height else 0.0)


def _crossings(columns: Sequence[Sequence[Spot]]) -> int:
    return sum(_crossings_after(column) for column in columns)


def _crossings_after(column: Sequence[Spot]) -> int:
    ends: list[tuple[float, float]] = [
        (_height(piece.left, piece.left_port), _height(piece.right, piece.right_port))
        for spot in column
        for piece in spot.rights
    ]
    return sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in combinations(ends, 2))


# -- ports and heights ---------------------------------------------------------------------------------------

# The distance between a link and an item, or between two links, in a column.
_LINK_GAP = 12.0

# A port is the place where a link touches its item. Ports are at most this far apart, and not at the corners.
_PORT_DISTANCE = 16.0
_CORNER = 10.0

# Each sweep makes links straighter; after these no eye sees a difference.
_SWEEPS = 40

# A long link is straight above all between its own spots, then at its ends.
_WEIGHT_WITHIN_LINK = 8.0
_WEIGHT_AT_ITEM = 2.0

_Wish = tuple[float, float]
"""A height and its weight."""


def _spread_ports(made: _SpotColumns, arcs: Mapping[int, Arc], backs: Mapping[int, Arc]) -> dict[int, _Wish]:
    """Set the ports of all links; return the two ports of each of ``backs``, which are the lowest.

    >>> from streamiter.flow.drawing.arrange import DrawnItem, _make_columns
    >>> arcs = {1: Arc(("node", 0), ("node", 1)), 2: Arc(("node", 0), ("node", 2))}
    >>> made = _make_columns({("node", number): DrawnItem(100, 40) for number in range(3)}, arcs)
    >>> _spread_ports(made, arcs, backs={})
    {}
    >>> [piece.left_port for [piece] in made.chains.values()]
    [-5.0, 5.0]
    """
    free_left = [made.chains[number][-1] for number, arc in arcs.items() if arc.target_port is None]
    free_right = [made.chains[number][0] for number, arc in arcs.items() if arc.source_port is None]
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for key, spot in made.items.items():
        arriving = sorted((piece for piece in free_left if piece.right is spot), key=_left_end)
        own = [number for number, back in backs.items() if back.target == key]
        ports = _ports(spot, len(arriving) + len(own))
        for piece, port in zip(arriving, ports, strict=False):
            piece.right_port = port
        ends |= zip(own, ports[len(arriving) :], strict=True)
        leaving = sorted((piece for piece in free_right if piece.left is spot), key=_right_end)
        own = [number for number, back in backs.items() if back.source == key]
        ports = _ports(spot, len(leaving) + len(own))
        for piece, port in zip(leaving, ports, strict=False):
            piece.left_port = port
        begins |= zip(own, ports[len(leaving) :], strict=True)
    return {number: (begins[number], ends[number]) for number in backs}


def _left_end(piece: LinkPiece) -> tuple[int, float]:
    return piece.left.place, piece.left_port


def _right_end(piece: LinkPiece) -> tuple[int, float]:
    return piece.right.place, piece.right_port


def _ports(spot: Spot, count: int) -> list[float]:
    distance = min(_PORT_DISTANCE, max(0.0, spot.height - 2 * _CORNER) / max(1, count))
    return [distance * (number - (count - 1) / 2) for number in range(count)]


def _place_heights(made: _SpotColumns) -> None:
    """Set every ``Spot.y`` so that links are as straight as the order allows; the top is 0."""
    for column in made.columns:
        _place(column, lambda _: [])
    for _ in range(_SWEEPS):
        for column in made.columns:
            _place(column, _lefts)
        for column in reversed(made.columns):
            _place(column, _rights)
    for _ in range(_SWEEPS):
        for column in (*made.columns, *reversed(made.columns)):
            _place(column, _both)
    top = min((spot.y - spot.height / 2 for column in made.columns for spot in column), default=0.0)
    for column in made.columns:
        for spot in column:
            spot.y -= top


def _weight(piece: LinkPiece) -> float:
    items = piece.left.is_item + piece.right.is_item
    return piece.weight * (_WEIGHT_WITHIN_LINK, _WEIGHT_AT_ITEM, 1.0)[items]


def _place(column: Sequence[Spot], neighbours: _Neighbours) -> None:
    """Move the spots of a column as near to level links with these neighbours as their order and gaps allow."""
    steps = [0.0]
    for above, below in pairwise(column):
        gap = _GAP if above.is_item and below.is_item else _LINK_GAP
        steps.append(steps[-1] + (above.height + below.height) / 2 + gap)
    wishes = []
    for spot, step in zip(column, steps, strict=True):
        wished = [(other.y + port - own, _weight(piece)) for other, port, own, piece in neighbours(spot)]
        wished = wished or [(spot.y, 0.01)]
        weight = sum(weight for _, weight in wished)
        wishes.append((sum(height * weight for height, weight in wished) / weight - step, weight))
    for spot, height, step in zip(column, _rising(wishes), steps, strict=True):
        spot.y = height + step


def _rising(wishes: Sequence[_Wish]) -> list[float]:
    """Return the rising heights that are nearest to the wished ones; neighbours in the wrong order share a mean.

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


# -- places and routes ---------------------------------------------------------------------------------------

# Between two columns: room for a curve and an arrowhead. A curve that goes far up or down has more room.
_GAP = 26.0
_GAP_MAX = 60.0
_SLOPE = 0.2

# Between two links that go back: side by side, and one above the other.
_CHANNEL = 12.0
_LANE_GAP = 14.0


class _Arrangement:
    """Places the columns side by side and draws the routes of the links."""

    def __init__(self, made: _SpotColumns, backs: Mapping[int, Arc], ports: Mapping[int, Point]) -> None:
        self._made = made
        self._backs = backs
        self._ports = ports
        self._column_of = {spot: number for number, column in enumerate(made.columns) for spot in column}
        self._place_columns()

    def _place_columns(self) -> None:
        """Set the left and the right end of each column."""
        channels = [0] * (len(self._made.columns) + 1)
        self._channels = {}
        for key, back in self._backs.items():
            begin = self._column_of[self._made.items[back.source]] + 1
            end = self._column_of[self._made.items[back.target]]
            channels[begin] += 1
            right = channels[begin]
            channels[end] += 1
            self._channels[key] = begin, right, end, channels[end]
        self._lefts: list[float] = []
        self._rights: list[float] = []
        x = channels[0] * _CHANNEL
        for number, column in enumerate(self._made.columns):
            if number:
                pieces = [piece for spot in column for piece in spot.lefts]
                x += max([_GAP, *map(_gap, pieces)]) + channels[number] * _CHANNEL
            self._lefts.append(x)
            x += max(spot.width for spot in column)
            self._rights.append(x)
        self._width = x + channels[-1] * _CHANNEL

    def arrangement(self, arcs: Mapping[int, Arc]) -> Arrangement:
        columns = self._made.columns
        bottom = max((spot.y + spot.height / 2 for column in columns for spot in column), default=0.0)
        items = {key: self._placed(spot) for key, spot in self._made.items.items()}
        result = Arrangement(self._width, bottom, items)
        for number, arc in arcs.items():
            chain = self._made.chains[number]
            result.runs[number] = self._runs(arc, chain, items)
            if arc.label_width:
                result.labels[number] = self._placed(chain[-1].left)
        self._route_backs(result)
        return result

    def _placed(self, spot: Spot) -> Rectangle:
        """Return the place of an item or a label, in the middle of its column."""
        number = self._column_of[spot]
        x = (self._lefts[number] + self._rights[number] - spot.width) / 2
        return Rectangle(x, spot.y - spot.height / 2, spot.width, spot.height)

    # -- links -------------------------------------------------------------------------------------------

    def _runs(self, arc: Arc, chain: Sequence[LinkPiece], items: Mapping[ItemKey, Rectangle]) -> list[LevelRun]:
        first, last = chain[0], chain[-1]
        begin, end = items[arc.source], items[arc.target]
        runs = [
            LevelRun(begin.x + begin.width, self._rights[self._column_of[first.left]], first.left.y + first.left_port)
        ]
        for piece in chain[:-1]:
            number = self._column_of[piece.right]
            runs.append(LevelRun(self._lefts[number], self._rights[number], piece.right.y + piece.right.line))
        runs.append(LevelRun(self._lefts[self._column_of[last.right]], end.x, last.right.y + last.right_port))
        return runs

    # -- links that go back --------------------------------------------------------------------------------

    def _route_backs(self, result: Arrangement) -> None:
        """Give each link that goes back a lane; the shortest has the highest lane, so that few links cross."""
        ways = {number: self._ends(number) for number in self._backs}
        for number in sorted(ways, key=lambda number: (ways[number][0] - ways[number][1], number)):
            back, (right, left), (from_port, to_port) = self._backs[number], ways[number], self._ports[number]
            lane = result.height = result.height + (_LANE_GAP + back.label_height)
            begin, end = result.items[back.source], result.items[back.target]
            from_y = begin.y + begin.height / 2 + from_port
            to_y = end.y + end.height / 2 + to_port
            result.corners[number] = [
                (begin.x + begin.width, from_y),
                (right, from_y),
                (right, lane),
                (left, lane),
                (left, to_y),
                (end.x, to_y),
            ]
            x = max(0.0, (left + right - back.label_width) / 2)
            if back.label_width:
                result.labels[number] = Rectangle(x, lane - back.label_height, back.label_width, back.label_height)
            result.width = max(result.width, x + back.label_width)

    def _ends(self, number: int) -> Point:
        """Return where a link goes down, right of the column of its source, and up, left of the target's column."""
        begin, right, end, left = self._channels[number]
        return self._rights[begin - 1] + right * _CHANNEL, self._lefts[end] - left * _CHANNEL


def _gap(piece: LinkPiece) -> float:
    rise = abs(piece.left.y + piece.left_port - piece.right.y - piece.right_port)
    return min(_GAP_MAX, _GAP + _SLOPE * rise)
