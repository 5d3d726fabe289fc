"""Find the goods that are often bought together (Apriori), and the rules that follow from them.

With generated baskets of a grocer's shop::

    python examples/frequent_item_sets.py

Or with the baskets of a topic, here a file of JSON lines such as ``["bread", "milk"]``, and the smallest share of
all baskets::

    python examples/frequent_item_sets.py file:baskets.jsonl 0.01
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamiter import Flow, Operator, connect, topic
from streamiter.learn import ItemSet, apriori

WORKERS = 2


def made_up_baskets(count: int = 5_000) -> list[list[str]]:
    """Return baskets for breakfasts, evenings with friends, and random purchases."""
    generator = random.Random(1)
    goods = ["apples", "beer", "bread", "butter", "cheese", "crisps", "jam", "milk", "rice", "tea"]
    habits = [["bread", "butter", "jam"], ["beer", "crisps"], ["milk", "tea"], []]
    baskets = []
    for _ in range(count):
        habit = [item for item in generator.choice(habits) if generator.random() < 0.9]
        baskets.append(sorted({*habit, *generator.sample(goods, generator.randrange(3))}))
    return baskets


@dataclass(frozen=True)
class AssociationRule:
    """Transactions that hold the antecedent often hold the consequent, too."""

    antecedent: ItemSet
    """The items on the left side of the rule."""
    consequent: ItemSet
    """The items on the right side of the rule."""
    count: int
    """The number of transactions with both."""
    confidence: float
    """The share of the transactions with the antecedent that hold both."""
    lift: float
    """The confidence divided by the consequent's share of all transactions: 1 if the two are independent."""

    def __str__(self) -> str:
        left, right = ", ".join(map(str, self.antecedent)), ", ".join(map(str, self.consequent))
        return f"{left} → {right} (confidence {self.confidence:.2f}, lift {self.lift:.2f})"


def association_rules(
    item_sets: Iterable[tuple[ItemSet, int]], *, transactions: int, minimum_confidence: float
) -> list[AssociationRule]:
    """Return the rules that follow from all item sets of ``apriori``, in descending order of confidence and count."""
    rules = rules_of(dict(item_sets), transactions)
    good = [rule for rule in rules if rule.confidence >= minimum_confidence]
    return sorted(good, key=lambda rule: (-rule.confidence, -rule.count))


def rules_of(counts: dict[ItemSet, int], transactions: int) -> Iterator[AssociationRule]:
    """Yield all rules; each part of a frequent item set is frequent, so its count is there."""
    for items, count in counts.items():
        for size in range(1, len(items)):
            for antecedent in itertools.combinations(items, size):
                consequent = tuple(item for item in items if item not in antecedent)
                confidence = count / counts[antecedent]
                lift = confidence / (counts[consequent] / transactions)
                yield AssociationRule(antecedent, consequent, count, confidence, lift)


class Report(Operator):
    """Prints the frequent item sets and the rules at the end."""

    def __init__(self) -> None:
        self.baskets = 0
        self.item_sets: list[tuple[ItemSet, int]] = []

    def process_baskets_batch(self, baskets: Any, out: Any) -> None:
        self.baskets += len(baskets)

    def process_item_sets(self, item_set: tuple[ItemSet, int], out: Any) -> None:
        self.item_sets.append(item_set)

    def finish(self, out: Any) -> None:
        print(f"{len(self.item_sets)} item sets in {self.baskets} baskets, such as")
        for items, count in self.item_sets[-3:]:
            print(f"  {', '.join(map(str, items))}: {count}")
        print("What follows:")
        for rule in association_rules(self.item_sets, transactions=self.baskets, minimum_confidence=0.7):
            if rule.lift > 1.5:
                print(f"  {rule}")


def flow(arguments: Sequence[str] = ()) -> Flow:
    """Return the flow from generated baskets, or the baskets of a topic, to the report."""
    made = Flow("frequent item sets", parallelism=WORKERS)
    if arguments:
        url, share = arguments
        baskets, minimum_support = made.source(topic(url), stop="latest"), float(share)
    else:
        baskets, minimum_support = made.from_items(made_up_baskets()), 0.1
    item_sets = apriori(baskets, minimum_support=minimum_support, name="apriori")
    connect(baskets=baskets, item_sets=item_sets).process(Report, name="report", parallelism=1)
    return made


if __name__ == "__main__":
    flow(sys.argv[1:]).run()
