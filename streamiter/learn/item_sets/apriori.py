"""Apriori: which items come together often; source: Agrawal and Srikant, 1994."""

from __future__ import annotations

from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.all_reduce import all_reduce
from streamiter.iteration.bounded import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.learn.item_sets.candidates import CANDIDATES, ChooseFrequent
from streamiter.learn.item_sets.counting import CountItemSets, added_counts
from streamiter.learn.item_sets.transactions import as_transaction
from streamiter.numbers import whole_number
from streamiter.operators.rejection import RejectionPolicy
from streamiter.topics.topic import Topic

__all__ = ["apriori"]


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
    """The item sets that come in at least ``minimum_support`` of all transactions, each with its count.

    A transaction is a list, tuple, set or array of items, which are whole numbers or texts; an item that comes
    twice in it counts once. ``minimum_support`` is a share, above 0 and up to 1: for a count write
    ``count / transactions``. Gives records ``(items, count)``, ``items`` a tuple in ascending order: the smaller
    sets first, those of one size in ascending order; of no transactions, nothing. ``maximum_size`` bounds the
    size of the sets.

    A bounded iteration: the candidates of one more item in each round, counted by ``workers`` subtasks (as many
    as ``transactions`` has unless said otherwise), which hold their transactions in memory: first as they are,
    then a bit for each transaction and frequent item.

    What is no transaction follows ``on_error`` or goes to ``dead_letter``. ``name`` stands before the names of
    the steps. Raises GraphError for a stream that never ends and options out of range.

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
    clean = transactions.map(
        as_transaction,
        name=label("transactions"),
        on_error=on_error,
        dead_letter=dead_letter,
    )
    candidates = flow.from_items([], name=label("no candidates"), parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        inputs = connect(candidates=variables[0].broadcast(), transactions=data[0])
        counts = inputs.process(
            CountItemSets,
            name=label("count item sets"),
            parallelism=clean.parallelism if workers is None else workers,
        )
        frequent = all_reduce(counts, added_counts, name=label("add counts")).process(
            lambda: ChooseFrequent(minimum_support, maximum_size),
            name=label("choose item sets"),
            parallelism=1,
        )
        return IterationBodyResult([frequent.side_output(CANDIDATES)], [frequent])

    item_sets: Stream
    [item_sets] = iterate_bounded_streams_until_termination(
        [candidates], [clean], body, IterationConfig(name=name)
    )
    return item_sets


def _check_options(transactions: Any, minimum_support: Any) -> None:
    check_stream("apriori", transactions, "transactions", bounded=True)
    if not _is_share(minimum_support):
        raise GraphError(
            "apriori(minimum_support=): expected a share of the transactions, above 0 and up to 1, given "
            f"{minimum_support!r}; for a count write count / transactions"
        )


def _is_share(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= 1
