"""Frequent item sets by Apriori.

A *transaction* is a set of items, such as a shopping basket. Apriori (Agrawal and Srikant, 1994) finds the item sets
that are in many transactions, in a bounded iteration: workers hold the transactions and count candidates in them; one
step keeps the frequent candidates, and makes the candidates with one more item for the next round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamiter.errors import GraphError, ModelError, shortened
from streamiter.flow.flow import all_or_nothing, check_stream, connect, step_names
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.helpers import all_reduce
from streamiter.operators.declared_state import LISTS_BY_KEY, SAME, DeclaredOperator, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.operator import Context, IterationListener
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.numbers import whole_number
from streamiter.values.records import Batch, OutputTag

ItemSet = tuple[int | str, ...]
"""Items in ascending order, ints before texts."""


def as_transaction(given: object) -> ItemSet:
    """Return the items of a transaction, each once, in ascending order."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ModelError(
            f"apriori: expected a transaction to be a list of items, given {shortened(given)}; "
            "write [item, …], also for one item"
        )
    return tuple(sorted({_item(item) for item in given}, key=_order))


def _item(given: object) -> int | str:
    if isinstance(given, str):
        return str(given)
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return int(given)
    raise ModelError(
        f"apriori: expected items to be whole numbers or texts, given {shortened(given)}; "
        "give each item a number or a name"
    )


def _order(item: int | str) -> tuple[bool, Any]:
    return isinstance(item, str), item


CANDIDATES: Final = OutputTag("candidates")


class ChooseFrequent(DeclaredOperator):
    """Emits the frequent candidates with their counts, and to a side output the candidates with one more item."""

    _transactions = declared(0)
    _candidates: list[ItemSet] | None = declared(None)

    def __init__(self, minimum_support: float, maximum_size: int | None) -> None:
        self._minimum_support = minimum_support
        self._maximum_size = maximum_size

    def process(self, counts: Counts, out: Output) -> None:
        if self._candidates is None:
            self._transactions = counts[()]
            self._candidates = sorted((items for items in counts if items), key=lambda items: [*map(_order, items)])
        # A division, because the user's ``count / transactions`` is a division, too: then equal shares are equal.
        frequent = [
            items for items in self._candidates if counts.get(items, 0) / self._transactions >= self._minimum_support
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

    def definition(self) -> Definition:
        return {**super().definition(), "minimum_support": self._minimum_support}


def _one_item_more(frequent: Sequence[ItemSet]) -> Iterator[ItemSet]:
    """Yield the sets with one more item whose subsets of the old size are all frequent, in the given order."""
    known = frozenset(frequent)
    for shared, group in itertools.groupby(frequent, key=lambda items: items[:-1]):
        for first, second in itertools.combinations((items[-1] for items in group), 2):
            joined = (*shared, first, second)
            # A set without its last item, or without the item before, is one of the two joined sets, which are
            # frequent.
            if all(joined[:at] + joined[at + 1 :] in known for at in range(len(shared))):
                yield joined


Counts = dict[ItemSet, int]
"""The number of transactions that hold each item set."""


class CountItemSets(DeclaredOperator, IterationListener):
    """Keeps its transactions; at the end of each epoch counts the candidates of that epoch in them.

    In epoch 0 it counts the single items, and the empty set, which is in every transaction.
    """

    _transactions = declared(0)
    _rows: dict[int | str, list[int]] = declared(made=dict, form=LISTS_BY_KEY)
    """The numbers of the transactions that hold an item; used until the frequent items are known."""
    _bits: dict[int | str, int] = declared(made=dict)
    """The transactions of each frequent item: bit t for transaction t, as & and bit_count of ints are quick."""
    _candidates: list[ItemSet] = declared(made=list)

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
        """Yield the candidates with a count above 0. Neighbouring candidates differ in the last item only."""
        for shared, group in itertools.groupby(self._candidates, key=lambda candidate: candidate[:-1]):
            bits = (1 << self._transactions) - 1
            for item in shared:
                bits &= self._bits.get(item, 0)
            for candidate in group:
                if count := (bits & self._bits.get(candidate[-1], 0)).bit_count():
                    yield candidate, count

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give the transactions of old subtask i to the new subtask i modulo ``parallelism``."""
        [candidates] = SAME("candidates", [state["candidates"] for state in states], 1)
        shared = []
        for given in (states[subtask::parallelism] for subtask in range(parallelism)):
            rows: dict[int | str, list[int]] = {}
            bits: dict[int | str, int] = {}
            transactions = 0
            for state in given:
                for item, of_item in state["rows"].items():
                    rows.setdefault(item, []).extend(transactions + row for row in of_item)
                for item, marks in state["bits"].items():
                    bits[item] = bits.get(item, 0) | marks << transactions
                transactions += state["transactions"]
            shared.append({"transactions": transactions, "rows": rows, "bits": bits, "candidates": candidates})
        return shared


def added_counts(first: Counts, second: Counts) -> Counts:
    total = dict(first)
    for items, count in second.items():
        total[items] = total.get(items, 0) + count
    return total


def _as_bits(rows: Sequence[int], length: int) -> int:
    marks = np.zeros(length, dtype=np.bool_)
    marks[rows] = True
    return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")


@all_or_nothing
def apriori(
    transactions: Stream,
    *,
    minimum_support: float,
    maximum_size: int | None = None,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Find the item sets that are in at least ``minimum_support`` of all transactions, each with its count.

    A transaction is a list, tuple, set or array of items, which are whole numbers or texts; an item that occurs twice
    in it counts once. ``minimum_support`` is a share, above 0 and up to 1: for a count write ``count / transactions``.
    The records are ``(items, count)``, with ``items`` a tuple in ascending order: smaller sets first, sets of one size
    in ascending order. Without transactions there are no records. ``maximum_size`` limits the size of the sets.

    Each round of the iteration counts the candidates with one more item. ``workers`` subtasks (unless given, as many as
    ``transactions`` has) hold their transactions in memory: first unchanged, then as one bit for each transaction and
    frequent item.

    Records that are not transactions follow ``on_error`` or go to ``dead_letter``. ``name`` is put in front of the
    names of the steps. Raises GraphError for a stream that never ends, and for options out of range.

    >>> from streamiter import Flow
    >>> flow = Flow("baskets")
    >>> baskets = flow.from_items([["bread", "milk"], ["beer", "bread"], ["beer", "bread", "milk"], ["milk"]])
    >>> item_sets = apriori(baskets, minimum_support=0.5).collect()
    >>> _ = flow.run()
    >>> for items, count in item_sets.items:
    ...     print(*items, count)
    beer 2
    bread 3
    milk 3
    beer bread 2
    bread milk 2
    """
    _check_options(transactions, minimum_support)
    if maximum_size is not None:
        maximum_size = whole_number("apriori(maximum_size=)", maximum_size, 1, error=GraphError)
    flow = transactions.flow
    label = step_names(flow, name)
    clean = transactions.map(as_transaction, name=label("transactions"), on_error=on_error, dead_letter=dead_letter)
    candidates: Stream = flow.from_items([], name=label("no candidates"), parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        inputs = connect(candidates=variables[0].broadcast(), transactions=data[0])
        counts = inputs.process(
            CountItemSets, name=label("count item sets"), parallelism=clean.parallelism if workers is None else workers
        )
        frequent = all_reduce(counts, added_counts, name=label("add counts")).process(
            lambda: ChooseFrequent(minimum_support, maximum_size), name=label("choose item sets"), parallelism=1
        )
        return IterationBodyResult([frequent.side_output(CANDIDATES)], [frequent])

    item_sets: Stream
    [item_sets] = iterate_bounded_streams_until_termination([candidates], [clean], body, IterationConfig(name=name))
    return item_sets


def _check_options(transactions: object, minimum_support: object) -> None:
    check_stream("apriori", transactions, "transactions", bounded=True)
    if not _is_share(minimum_support):
        raise GraphError(
            "apriori(minimum_support=): expected a share of the transactions, above 0 and up to 1, given "
            f"{minimum_support!r}; for a count write count / transactions"
        )


def _is_share(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= 1
