"""The step that holds transactions and counts item sets in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from streamiter.learn.item_sets.transactions import ItemSet
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["CountItemSets", "Counts", "added_counts"]

Counts = dict[ItemSet, int]


class CountItemSets(Operator, IterationListener):
    """Keeps its transactions; at the end of each epoch counts the candidates of that epoch in them.

    In epoch 0 the candidates are the items themselves. With them goes the empty set, which is in every
    transaction.
    """

    def __init__(self) -> None:
        self._transactions = 0
        self._rows: dict[int | str, list[int]] = {}
        """The transactions that hold an item; until the frequent items are known."""
        self._bits: dict[int | str, int] = {}
        """The same for the frequent ones: bit t for transaction t, since & and bit_count of such ints are quick."""
        self._candidates: list[ItemSet] = []

    def process_transactions_batch(self, transactions: Batch, out: Output) -> None:
        for transaction in transactions:
            for item in transaction:
                self._rows.setdefault(item, []).append(self._transactions)
            self._transactions += 1

    def process_candidates(self, candidates: list[ItemSet], out: Output) -> None:
        if self._rows:
            frequent = dict.fromkeys(itertools.chain.from_iterable(candidates))
            self._bits = {item: _as_bits(self._rows.get(item, []), self._transactions) for item in frequent}
            self._rows = {}
        self._candidates = candidates

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if epoch_watermark == 0:
            counts: Counts = {(item,): len(rows) for item, rows in self._rows.items()}
            out.emit({(): self._transactions} | counts)
        else:
            out.emit(dict(self._counted()))

    def _counted(self) -> Iterator[tuple[ItemSet, int]]:
        """Candidates that are there at all. Neighbours have all but the last item in common."""
        for shared, group in itertools.groupby(self._candidates, key=lambda candidate: candidate[:-1]):
            bits = (1 << self._transactions) - 1
            for item in shared:
                bits &= self._bits.get(item, 0)
            for candidate in group:
                if count := (bits & self._bits.get(candidate[-1], 0)).bit_count():
                    yield candidate, count

    def snapshot(self) -> dict[str, Any]:
        return {
            "transactions": self._transactions,
            "rows": {item: list(rows) for item, rows in self._rows.items()},
            "bits": self._bits,
            "candidates": self._candidates,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._transactions = state["transactions"]
        self._rows = {item: list(rows) for item, rows in state["rows"].items()}
        self._bits, self._candidates = state["bits"], state["candidates"]


def added_counts(first: Counts, second: Counts) -> Counts:
    total = dict(first)
    for items, count in second.items():
        total[items] = total.get(items, 0) + count
    return total


def _as_bits(rows: Sequence[int], length: int) -> int:
    marks = np.zeros(length, dtype=np.bool_)
    marks[rows] = True
    return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")
