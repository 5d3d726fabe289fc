"""What is bought together: frequent item sets by Apriori, and the rules that follow from them.

With made-up baskets of a grocer's shop::

    python examples/frequent_item_sets.py

Or with those of a topic, here lines of JSON such as ``["bread", "milk"]``, and the least share of all baskets::

    python examples/frequent_item_sets.py file:baskets.jsonl 0.01
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from streamiter import Flow, topic
from streamiter.learn import apriori, association_rules

WORKERS = 2


def made_up_baskets(count: int = 5_000) -> list[list[str]]:
    """Breakfasts, evenings with friends, and whatever comes to mind."""
    generator = random.Random(1)
    goods = ["apples", "beer", "bread", "butter", "cheese", "crisps", "jam", "milk", "rice", "tea"]
    habits = [["bread", "butter", "jam"], ["beer", "crisps"], ["milk", "tea"], []]
    baskets = []
    for _ in range(count):
        habit = [item for item in generator.choice(habits) if generator.random() < 0.9]
        baskets.append(sorted({*habit, *generator.sample(goods, generator.randrange(3))}))
    return baskets


def main(arguments: Sequence[str]) -> None:
    flow = Flow("frequent item sets", parallelism=WORKERS)
    if arguments:
        url, share = arguments
        baskets, minimum_support = flow.source(topic(url), stop="latest"), float(share)
    else:
        baskets, minimum_support = flow.from_items(made_up_baskets()), 0.1
    item_sets = apriori(baskets, minimum_support=minimum_support, name="apriori").collect()
    transactions = flow.run().step("apriori: transactions").records_out
    print(f"{len(item_sets)} item sets in {transactions} baskets, such as")
    for items, count in item_sets.items[-3:]:
        print(f"  {', '.join(items)}: {count}")
    print("What follows:")
    for rule in association_rules(item_sets, transactions=transactions, minimum_confidence=0.7):
        if rule.lift > 1.5:
            print(f"  {rule}")


if __name__ == "__main__":
    main(sys.argv[1:])
