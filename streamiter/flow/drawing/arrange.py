"""Layered layout: everything's place, and the ways of the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamiter.flow.drawing.columns import Arc, Columns, Item, Piece, make_columns
from streamiter.flow.drawing.heights import place_heights, spread_ports

__all__ = ["Arrangement", "Back", "Place", "Point", "Run", "arrange"]

Point = tuple[float, float]

# Between two columns: enough for a curve and an arrowhead. A curve that goes far up or down has more.
_GAP = 26.0
_GAP_MAX = 60.0
_SLOPE = 0.2

# Between two links that go back side by side, and above the first one.
_CHANNEL = 12.0
_LANE_GAP = 14.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: its left upper corner and its size."""

    x: float
    y: float
    width: float
    height: float

    def moved(self, x: float, y: float) -> Place:
        """The same elsewhere."""
        return Place(self.x + x, self.y + y, self.width, self.height)


@dataclass(frozen=True, slots=True)
class Run:
    """A level part of a link; the next one follows behind a curve."""

    left: float
    right: float
    y: float

    def moved(self, x: float, y: float) -> Run:
        """The same elsewhere."""
        return Run(self.left + x, self.right + x, self.y + y)


@dataclass(slots=True)
class Back:
    """A link that goes back, below everything else."""

    source: int
    target: int
    label_width: float
    label_height: float


@dataclass(slots=True)
class Arrangement:
    """Where everything lies; the left upper corner of it all is 0, 0."""

    width: float = 0.0
    height: float = 0.0
    items: list[Place] = field(default_factory=list)
    arcs: list[list[Run]] = field(default_factory=list)
    arc_labels: list[Place | None] = field(default_factory=list)
    backs: list[list[Point]] = field(default_factory=list)
    """Corners of the links that go back."""
    back_labels: list[Place] = field(default_factory=list)


def arrange(items: Sequence[Item], arcs: Sequence[Arc], backs: Sequence[Back] = ()) -> Arrangement:
    """Lay items out from left to right; ``arcs`` have no cycle, ``backs`` may close some."""
    made = make_columns(items, arcs)
    ports = spread_ports(made, arcs, [(back.source, back.target) for back in backs])
    place_heights(made)
    return _Arranger(made, backs, ports).arrangement(arcs)


class _Arranger:
    """Goes from columns to places on a plane."""

    def __init__(self, made: Columns, backs: Sequence[Back], ports: Sequence[Point]) -> None:
        self._made = made
        self._backs = backs
        self._ports = ports
        self._column_of = {spot: number for number, column in enumerate(made.columns) for spot in column}
        self._place_columns()

    def _place_columns(self) -> None:
        """The left and right end of each column."""
        channels = [0] * (len(self._made.columns) + 1)
        self._channels = []
        for back in self._backs:
            begin = self._column_of[self._made.items[back.source]] + 1
            end = self._column_of[self._made.items[back.target]]
            channels[begin] += 1
            right = channels[begin]
            channels[end] += 1
            self._channels.append((begin, right, end, channels[end]))
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

    def arrangement(self, arcs: Sequence[Arc]) -> Arrangement:
        columns = self._made.columns
        bottom = max((spot.y + spot.height / 2 for column in columns for spot in column), default=0.0)
        result = Arrangement(self._width, bottom)
        for spot in self._made.items:
            number = self._column_of[spot]
            x = (self._lefts[number] + self._rights[number] - spot.width) / 2
            result.items.append(Place(x, spot.y - spot.height / 2, spot.width, spot.height))
        for arc, chain in zip(arcs, self._made.chains, strict=True):
            result.arcs.append(self._runs(arc, chain, result.items))
            result.arc_labels.append(self._label(arc, chain))
        self._go_back(result)
        return result

    # -- links -------------------------------------------------------------------------------------------

    def _runs(self, arc: Arc, chain: Sequence[Piece], items: Sequence[Place]) -> list[Run]:
        first, last = chain[0], chain[-1]
        begin, end = items[arc.source], items[arc.target]
        runs = [
            Run(
                begin.x + begin.width,
                self._rights[self._column_of[first.left]],
                first.left.y + first.left_port,
            )
        ]
        for piece in chain[:-1]:
            number = self._column_of[piece.right]
            runs.append(Run(self._lefts[number], self._rights[number], piece.right.y + piece.right.line))
        runs.append(Run(self._lefts[self._column_of[last.right]], end.x, last.right.y + last.right_port))
        return runs

    def _label(self, arc: Arc, chain: Sequence[Piece]) -> Place | None:
        if not arc.label_width:
            return None
        spot = chain[-1].left
        number = self._column_of[spot]
        x = (self._lefts[number] + self._rights[number] - spot.width) / 2
        return Place(x, spot.y - spot.height / 2, spot.width, spot.height)

    # -- links that go back --------------------------------------------------------------------------------

    def _go_back(self, result: Arrangement) -> None:
        """Each has a lane of its own below all else, the shortest one the highest, so that few cross."""
        ways = [self._ends(number) for number in range(len(self._backs))]
        lanes = [0.0] * len(ways)
        for number in sorted(
            range(len(ways)), key=lambda number: (ways[number][0] - ways[number][1], number)
        ):
            result.height += _LANE_GAP + self._backs[number].label_height
            lanes[number] = result.height
        for number, (back, (right, left), lane) in enumerate(zip(self._backs, ways, lanes, strict=True)):
            begin, end = result.items[back.source], result.items[back.target]
            from_y = begin.y + begin.height / 2 + self._ports[number][0]
            to_y = end.y + end.height / 2 + self._ports[number][1]
            result.backs.append(
                [
                    (begin.x + begin.width, from_y),
                    (right, from_y),
                    (right, lane),
                    (left, lane),
                    (left, to_y),
                    (end.x, to_y),
                ]
            )
            x = max(0.0, (left + right - back.label_width) / 2)
            result.back_labels.append(Place(x, lane - back.label_height, back.label_width, back.label_height))
            result.width = max(result.width, x + back.label_width)

    def _ends(self, number: int) -> Point:
        """Where a link goes down, behind the column of its source, and up again, before that of its target."""
        begin, right, end, left = self._channels[number]
        return self._rights[begin - 1] + right * _CHANNEL, self._lefts[end] - left * _CHANNEL


def _gap(piece: Piece) -> float:
    rise = abs(piece.left.y + piece.left_port - piece.right.y - piece.right_port)
    return min(_GAP_MAX, _GAP + _SLOPE * rise)
