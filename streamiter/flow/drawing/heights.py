"""Layered layout: how high each spot lies, so that links are as straight as the order allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from streamiter.flow.drawing.columns import Arc, Columns, Piece, Spot

__all__ = ["place_heights", "spread_ports"]

# Free room between two items, and between a link and whatever is next to it.
_GAP = 26.0
_LINK_GAP = 12.0

# Ports of an item are at most this far apart, and stay clear of its corners.
_PORT_DISTANCE = 16.0
_CORNER = 10.0

# Each brings links nearer to level; behind these no eye sees the difference.
_SWEEPS = 40

# A long link is straight first of all between its own spots, then at its ends.
_WEIGHT_WITHIN_LINK = 8.0
_WEIGHT_AT_ITEM = 2.0

_Wish = tuple[float, float]
"""A height, and its weight."""


def spread_ports(made: Columns, arcs: Sequence[Arc], backs: Sequence[tuple[int, int]]) -> list[_Wish]:
    """Where links begin and end at their items; for each of ``backs`` (source, target) its two ports, the lowest.

    >>> from streamiter.flow.drawing.columns import Item, make_columns
    >>> arcs = [Arc(0, 1), Arc(0, 2)]
    >>> made = make_columns([Item(100, 40), Item(100, 40), Item(100, 40)], arcs)
    >>> spread_ports(made, arcs, backs=[])
    []
    >>> [piece.left_port for [piece] in made.chains]
    [-5.0, 5.0]
    """
    free_left = [chain[-1] for arc, chain in zip(arcs, made.chains, strict=True) if arc.target_port is None]
    free_right = [chain[0] for arc, chain in zip(arcs, made.chains, strict=True) if arc.source_port is None]
    begins, ends = [0.0] * len(backs), [0.0] * len(backs)
    for number, spot in enumerate(made.items):
        pieces = sorted((piece for piece in free_left if piece.right is spot), key=_left_end)
        going = [back for back, (_, target) in enumerate(backs) if target == number]
        ports = _ports(spot, len(pieces) + len(going))
        for piece, port in zip(pieces, ports, strict=False):
            piece.right_port = port
        for back, port in zip(going, ports[len(pieces) :], strict=True):
            ends[back] = port
        pieces = sorted((piece for piece in free_right if piece.left is spot), key=_right_end)
        going = [back for back, (source, _) in enumerate(backs) if source == number]
        ports = _ports(spot, len(pieces) + len(going))
        for piece, port in zip(pieces, ports, strict=False):
            piece.left_port = port
        for back, port in zip(going, ports[len(pieces) :], strict=True):
            begins[back] = port
    return list(zip(begins, ends, strict=True))


def _left_end(piece: Piece) -> tuple[int, float]:
    return piece.left.place, piece.left_port


def _right_end(piece: Piece) -> tuple[int, float]:
    return piece.right.place, piece.right_port


def _ports(spot: Spot, count: int) -> list[float]:
    distance = min(_PORT_DISTANCE, max(0.0, spot.height - 2 * _CORNER) / max(1, count))
    return [distance * (number - (count - 1) / 2) for number in range(count)]


def place_heights(made: Columns) -> None:
    """Set every ``Spot.y``; the topmost thing begins at 0."""
    for column in made.columns:
        _place(column, lambda _: [])
    for _ in range(_SWEEPS):
        for column in made.columns:
            _place(column, _wishes_of_lefts)
        for column in reversed(made.columns):
            _place(column, _wishes_of_rights)
    for _ in range(_SWEEPS):
        for column in (*made.columns, *reversed(made.columns)):
            _place(column, _wishes_of_both)
    top = min((spot.y - spot.height / 2 for column in made.columns for spot in column), default=0.0)
    for column in made.columns:
        for spot in column:
            spot.y -= top


def _wishes_of_lefts(spot: Spot) -> list[_Wish]:
    return [(piece.left.y + piece.left_port - piece.right_port, _weight(piece)) for piece in spot.lefts]


def _wishes_of_rights(spot: Spot) -> list[_Wish]:
    return [(piece.right.y + piece.right_port - piece.left_port, _weight(piece)) for piece in spot.rights]


def _wishes_of_both(spot: Spot) -> list[_Wish]:
    return [*_wishes_of_lefts(spot), *_wishes_of_rights(spot)]


def _weight(piece: Piece) -> float:
    items = (piece.left.item is not None) + (piece.right.item is not None)
    return piece.weight * (_WEIGHT_WITHIN_LINK, _WEIGHT_AT_ITEM, 1.0)[items]


def _place(column: Sequence[Spot], wishes_of: Callable[[Spot], Iterable[_Wish]]) -> None:
    """Move the spots of a column as near to their wishes as their order and their gaps allow."""
    steps = [0.0]
    for above, below in pairwise(column):
        gap = _GAP if above.item is not None and below.item is not None else _LINK_GAP
        steps.append(steps[-1] + (above.height + below.height) / 2 + gap)
    wishes = []
    for spot, step in zip(column, steps, strict=True):
        wished = list(wishes_of(spot)) or [(spot.y, 0.01)]
        weight = sum(weight for _, weight in wished)
        wishes.append((sum(height * weight for height, weight in wished) / weight - step, weight))
    for spot, height, step in zip(column, _rising(wishes), steps, strict=True):
        spot.y = height + step


def _rising(wishes: Sequence[_Wish]) -> list[float]:
    """The heights that never fall and are nearest to those wished for: neighbours that would fall share a mean.

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
