"""The step that chooses the frequent item sets, and the candidates of one item more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from streamiter.learn.item_sets.counting import Counts
from streamiter.learn.item_sets.transactions import ItemSet, order_of_items
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import OutputTag

__all__ = ["CANDIDATES", "ChooseFrequent"]

CANDIDATES: Final = OutputTag("candidates")


class ChooseFrequent(Operator):
    """Emits the frequent ones of the candidates, and beside them the candidates of one item more."""

    def __init__(self, minimum_support: float, maximum_size: int | None) -> None:
        self._minimum_support = minimum_support
        self._maximum_size = maximum_size
        self._transactions = 0
        self._candidates: list[ItemSet] | None = None

    def process(self, counts: Counts, out: Output) -> None:
        if self._candidates is None:
            self._transactions = counts[()]
            self._candidates = sorted((items for items in counts if items), key=order_of_items)
        # A division, as the user's ``count / transactions`` is one: then equal shares are equal.
        frequent = [
            items
            for items in self._candidates
            if counts.get(items, 0) / self._transactions >= self._minimum_support
        ]
        for items in frequent:
            out.emit((items, counts[items]))
        self._candidates = self._joined(frequent)
        if self._candidates:
            out.emit(self._candidates, tag=CANDIDATES)

    def _joined(self, frequent: Sequence[ItemSet]) -> list[ItemSet]:
        if not frequent or len(frequent[0]) == self._maximum_size:
            return []
        return list(_one_item_more(frequent))

    def snapshot(self) -> dict[str, Any]:
        return {"transactions": self._transactions, "candidates": self._candidates}

    def restore(self, state: dict[str, Any]) -> None:
        self._transactions, self._candidates = state["transactions"], state["candidates"]


def _one_item_more(frequent: Sequence[ItemSet]) -> Iterator[ItemSet]:
    """The sets of one item more of which every part of the old size is frequent, in the order given."""
    known = frozenset(frequent)
    for shared, group in itertools.groupby(frequent, key=lambda items: items[:-1]):
        for first, second in itertools.combinations((items[-1] for items in group), 2):
            joined = (*shared, first, second)
            # Without its last item or the one before it, it is one of the two that were joined.
            if all(joined[:at] + joined[at + 1 :] in known for at in range(len(shared))):
                yield joined
