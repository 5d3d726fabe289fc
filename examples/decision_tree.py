"""Tell the kind of a flower with a decision tree.

Flowers of three kinds are generated::

    python examples/decision_tree.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.learn import DecisionTree

WORKERS = 2
FEATURES = ["petal length", "petal width", "sepal length"]
KINDS = {"setosa": (1.5, 0.25, 5.0), "versicolor": (4.3, 1.3, 5.9), "virginica": (5.6, 2.0, 6.6)}
SPREAD = (0.4, 0.2, 0.5)


def made_up_flowers(of_each: int, seed: int) -> tuple[Any, Any]:
    """Return measures in centimetres, and the kind of each flower."""
    generator = np.random.default_rng(seed)
    measures = np.vstack([generator.normal(mean, SPREAD, (of_each, 3)) for mean in KINDS.values()])
    return measures, np.repeat(list(KINDS), of_each)


def main() -> None:
    tree = DecisionTree(maximum_depth=3, minimum_rows=20, feature_names=FEATURES)
    tree.fit(*made_up_flowers(of_each=500, seed=1), parallelism=WORKERS)
    print(tree)
    measures, kinds = made_up_flowers(of_each=100, seed=2)
    known = np.mean(tree.predict(measures) == kinds)
    print(f"Of other flowers it knows {known:.1%} (always one kind: {1 / len(KINDS):.1%}).")


if __name__ == "__main__":
    main()
