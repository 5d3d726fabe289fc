"""Layered layout, first half: which column each item lies in, and in which order from top to bottom.

Items are drawn in columns from left to right, each behind all it takes data from. A link that passes a column
has a *spot* in it, as an item has, so that it never crosses an item; a label is a spot with a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import combinations, pairwise

__all__ = ["Arc", "Columns", "Item", "Piece", "Spot", "make_columns"]

# Sweeps over all columns; the order hardly ever gets better after the first few.
_SWEEPS = 8


@dataclass(slots=True)
class Item:
    """Something with a size that links begin and end at."""

    width: float
    height: float
    side: int = 0
    """-1: at the left border of the drawing, 1: at its right border."""


@dataclass(slots=True)
class Arc:
    """A link from one item to another, by their numbers."""

    source: int
    target: int
    label_width: float = 0.0
    label_height: float = 0.0
    source_port: float | None = None
    """Where it begins, from the middle of its item downward; None if that is free."""
    target_port: float | None = None
    weight: float = 1.0
    """How much it matters that it is level."""


@dataclass(eq=False, slots=True)
class Spot:
    """An item, or a link on its way, in its column."""

    width: float = 0.0
    height: float = 0.0
    line: float = 0.0
    """Where the link passes it, from its middle downward."""
    item: int | None = None
    place: int = 0
    """Its number in the column, from the top."""
    y: float = 0.0
    """Of its middle."""
    lefts: list[Piece] = field(default_factory=list)
    rights: list[Piece] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Piece:
    """The part of a link between two columns."""

    left: Spot
    right: Spot
    left_port: float = 0.0
    right_port: float = 0.0
    weight: float = 1.0


@dataclass(slots=True)
class Columns:
    """All spots, by column from left to right, and from top to bottom."""

    columns: list[list[Spot]]
    items: list[Spot]
    """Those of the items."""
    chains: list[list[Piece]]
    """The pieces of each arc, from left to right."""


def make_columns(items: Sequence[Item], arcs: Sequence[Arc]) -> Columns:
    """Give every item and every link its spots, in an order with few crossings."""
    ranks = _ranks(items, arcs)
    labelled = {2 * ranks[arc.target] - 1 for arc in arcs if arc.label_width}
    numbers = {used: number for number, used in enumerate(sorted(labelled | {2 * rank for rank in ranks}))}
    columns: list[list[Spot]] = [[] for _ in numbers]
    spots = [Spot(item.width, item.height, item=number) for number, item in enumerate(items)]
    for spot, rank in zip(spots, ranks, strict=True):
        columns[numbers[2 * rank]].append(spot)
    chains = []
    for arc in arcs:
        first, last = 2 * ranks[arc.source], 2 * ranks[arc.target]
        passed = []
        for used in range(first + 1, last):
            if used in numbers:
                has_label = used == last - 1 and arc.label_width
                # The link runs below its label.
                spot = Spot(arc.label_width, arc.label_height, arc.label_height / 2) if has_label else Spot()
                columns[numbers[used]].append(spot)
                passed.append(spot)
        chains.append(_chain([spots[arc.source], *passed, spots[arc.target]], arc))
    made = Columns(columns, spots, chains)
    _order(made)
    return made


def _chain(spots: Sequence[Spot], arc: Arc) -> list[Piece]:
    pieces = [Piece(left, right, left.line, right.line, arc.weight) for left, right in pairwise(spots)]
    pieces[0].left_port = arc.source_port or 0.0
    pieces[-1].right_port = arc.target_port or 0.0
    for piece in pieces:
        piece.left.rights.append(piece)
        piece.right.lefts.append(piece)
    return pieces


# -- columns -----------------------------------------------------------------------------------------------


def _ranks(items: Sequence[Item], arcs: Sequence[Arc]) -> list[int]:
    """The longest way to each item; what nothing leads to lies just before what it leads to."""
    before: dict[int, list[int]] = {number: [] for number in range(len(items))}
    behind: dict[int, list[int]] = {number: [] for number in range(len(items))}
    for arc in arcs:
        before[arc.target].append(arc.source)
        behind[arc.source].append(arc.target)
    begin = 1 if any(item.side < 0 for item in items) else 0
    ranks = [begin] * len(items)
    for number in TopologicalSorter(before).static_order():
        ranks[number] = max((ranks[other] + 1 for other in before[number]), default=begin)
        if items[number].side < 0:
            ranks[number] = 0
    for number, item in enumerate(items):
        if not item.side and not before[number] and behind[number]:
            ranks[number] = min(ranks[other] for other in behind[number]) - 1
    end = max((rank + 1 for rank, item in zip(ranks, items, strict=True) if item.side <= 0), default=0)
    return [end if item.side > 0 else rank for rank, item in zip(ranks, items, strict=True)]


# -- the order in a column -----------------------------------------------------------------------------------


def _order(made: Columns) -> None:
    """Sort each column by the middle of what it is linked to, to and fro; keep the order with fewest crossings."""
    for column in made.columns:
        _number(column)
    best = [list(column) for column in made.columns]
    fewest = _crossings(made.columns)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        forth = sweep % 2 == 0
        for column in made.columns if forth else reversed(made.columns):
            column.sort(key=_middle_of_lefts if forth else _middle_of_rights)
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


def _middle_of_lefts(spot: Spot) -> float:
    return _middle(spot, [_height(piece.left, piece.left_port) for piece in spot.lefts])


def _middle_of_rights(spot: Spot) -> float:
    return _middle(spot, [_height(piece.right, piece.right_port) for piece in spot.rights])


def _middle(spot: Spot, heights: Sequence[float]) -> float:
    return sum(heights) / len(heights) if heights else float(spot.place)


def _height(spot: Spot, port: float) -> float:
    """Where a link ends, in numbers of spots from the top."""
    return spot.place + (port / spot.height if spot.height else 0.0)


def _crossings(columns: Sequence[Sequence[Spot]]) -> int:
    return sum(_crossings_behind(column) for column in columns)


def _crossings_behind(column: Sequence[Spot]) -> int:
    ends: list[tuple[float, float]] = [
        (_height(piece.left, piece.left_port), _height(piece.right, piece.right_port))
        for spot in column
        for piece in spot.rights
    ]
    return sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in combinations(ends, 2))
