"""Association rules: what frequent item sets say about what follows from what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamiter.errors import ModelError
from streamiter.learn.item_sets.transactions import ItemSet

__all__ = ["AssociationRule", "association_rules"]


@dataclass(frozen=True, slots=True)
class AssociationRule:
    """Transactions with the one often hold the other too."""

    antecedent: ItemSet
    consequent: ItemSet
    count: int
    """Transactions with both."""
    confidence: float
    """Their share of the transactions with the antecedent."""
    lift: float
    """The confidence over the consequent's share of all transactions: 1 where the two are independent."""

    def __str__(self) -> str:
        left, right = ", ".join(map(str, self.antecedent)), ", ".join(map(str, self.consequent))
        return f"{left} → {right} (confidence {self.confidence:.2f}, lift {self.lift:.2f})"


def association_rules(
    item_sets: Iterable[tuple[ItemSet, int]], *, transactions: int, minimum_confidence: float = 0.5
) -> list[AssociationRule]:
    """The rules of at least ``minimum_confidence`` among what ``apriori`` found in so many ``transactions``.

    The surest first, then those of more transactions.

    Raises ModelError for item sets of which parts are missing, a number of transactions that does not fit them,
    and a confidence that is not between 0 and 1.

    >>> found = [(("beer",), 3), (("crisps",), 4), (("beer", "crisps"), 3)]
    >>> for rule in association_rules(found, transactions=6, minimum_confidence=0.8):
    ...     print(rule)
    beer → crisps (confidence 1.00, lift 1.50)
    """
    if not 0 <= minimum_confidence <= 1:
        raise ModelError(
            f"association_rules: expected minimum_confidence between 0 and 1, given {minimum_confidence!r}; "
            "it is the share of the antecedent's transactions that hold the consequent too"
        )
    counts = {tuple(items): count for items, count in item_sets}
    if transactions < max(counts.values(), default=0):
        raise ModelError(
            f"association_rules: expected at least {max(counts.values())} transactions, as one item set has, given "
            f"{transactions}; give the number of all of them"
        )
    rules = [
        rule
        for items in counts
        for rule in _rules_of(items, counts, transactions)
        if rule.confidence >= minimum_confidence
    ]
    return sorted(rules, key=lambda rule: (-rule.confidence, -rule.count))


def _rules_of(items: ItemSet, counts: dict[ItemSet, int], transactions: int) -> Iterator[AssociationRule]:
    for size in range(1, len(items)):
        for antecedent in itertools.combinations(items, size):
            consequent = tuple(item for item in items if item not in antecedent)
            confidence = counts[items] / _count_of(antecedent, counts, items)
            expected = _count_of(consequent, counts, items) / transactions
            yield AssociationRule(antecedent, consequent, counts[items], confidence, confidence / expected)


def _count_of(part: ItemSet, counts: dict[ItemSet, int], items: ItemSet) -> int:
    if part not in counts:
        raise ModelError(
            f"association_rules: expected every part of a frequent item set, given {items!r} without {part!r}; give "
            "all that apriori found"
        )
    return counts[part]
