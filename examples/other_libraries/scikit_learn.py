"""A classifier of scikit-learn in a flow, which learns mini-batches with ``partial_fit``.

The features are made into a matrix, with squares, so that a linear classifier can learn the circle. The model is saved
as a pickle, because scikit-learn has no other writer: load only pickles that you trust::

    pip install scikit-learn
    python examples/other_libraries/scikit_learn.py
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from moving_boundary import points
from sklearn.linear_model import SGDClassifier

from streamiter import Flow
from streamiter.learn import ForeignModel, train_online


def features(mini_batch: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return a row of coordinates and their squares for each point."""
    places = np.array([(point["x"], point["y"]) for point in mini_batch])
    return np.column_stack([places, places**2])


MODEL = ForeignModel(
    make=lambda: SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, random_state=1),
    learn=lambda model, rows, labels: model.partial_fit(rows, labels, classes=[False, True]),
    predict=lambda model, rows: model.predict_proba(rows)[:, 1],
    save=pickle.dumps,
    load=pickle.loads,
    task="classification",
    by="mini-batch",
)

if __name__ == "__main__":
    flow = Flow("moving boundary")
    training = train_online(flow.from_items(points()), MODEL, label="inside", features=features, mini_batch=20)
    quality, versions = training.validation.collect(), training.models.collect()
    flow.run()
    last = quality.items[-1]
    of_share = f"always the share: {last['baseline_loss']:.3f}"
    print(f"log loss {last['loss']:.3f} ({of_share}), accuracy {last['accuracy']:.3f}")
    served = MODEL.predictor(versions.items[-1].parameters)
    print("probability that (0, 0) is inside:", served(features([{"x": 0.0, "y": 0.0}])).round(2))
