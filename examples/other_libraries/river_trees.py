"""Online trees of river in a flow, compared with a linear model.

A Hoeffding adaptive tree replaces its branches when their data changes; an adaptive random forest has several such
trees. On this stream no linear model can be good. Both trees are trained, validated, published and served like every
model. They are saved as pickles, because river has no other writer: load only pickles that you trust::

    pip install river
    python examples/other_libraries/river_trees.py
"""

from __future__ import annotations

import pickle

from moving_boundary import points
from river import forest, tree

from streamiter import Flow
from streamiter.learn import AdaptiveLinearModel, ForeignModel, train_online

MODELS = {
    "linear": lambda: AdaptiveLinearModel(shapes=False),
    "Hoeffding adaptive tree": ForeignModel.of_river(
        lambda: tree.HoeffdingAdaptiveTreeClassifier(seed=1), save=pickle.dumps, load=pickle.loads
    ),
    "adaptive random forest": ForeignModel.of_river(
        lambda: forest.ARFClassifier(n_models=5, seed=1), save=pickle.dumps, load=pickle.loads
    ),
}

if __name__ == "__main__":
    flow = Flow("moving boundary")
    stream = flow.from_items(points())
    trainings = {
        name: train_online(stream, model, label="inside", mini_batch=500, name=name) for name, model in MODELS.items()
    }
    quality = {name: training.validation.collect() for name, training in trainings.items()}
    versions = trainings["adaptive random forest"].models.collect()
    flow.run()
    for name, metrics in quality.items():
        last = metrics.items[-1]
        of_share = f"always the share: {last['baseline_loss']:.3f}"
        print(f"{name}: log loss {last['loss']:.3f} ({of_share}), accuracy {last['accuracy']:.3f}")
    served = MODELS["adaptive random forest"].predictor(versions.items[-1].parameters)
    print("probability that (0, 0) is inside:", round(served({"x": 0.0, "y": 0.0})[True], 2))
