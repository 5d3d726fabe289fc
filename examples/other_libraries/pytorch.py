"""A network of PyTorch in a flow, which learns mini-batches. It is saved by PyTorch's own writer, as tensors::

pip install torch
python examples/other_libraries/pytorch.py
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from moving_boundary import points

from streamiter import Flow
from streamiter.learn import ForeignModel, train_online


class Classifier:
    """A small network with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.02)

    def learn(self, rows: list[list[float]], labels: list[bool]) -> None:
        scores = self.network(torch.tensor(rows)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(labels, dtype=torch.float32))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def predict(self, rows: list[list[float]]) -> list[float]:
        with torch.no_grad():
            return torch.sigmoid(self.network(torch.tensor(rows)).squeeze(1)).tolist()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    @staticmethod
    def load(data: bytes) -> Classifier:
        stored = torch.load(io.BytesIO(data), weights_only=True)
        classifier = Classifier()
        classifier.network.load_state_dict(stored["network"])
        classifier.optimizer.load_state_dict(stored["optimizer"])
        return classifier


def features(mini_batch: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the coordinates of each point."""
    return [[point["x"], point["y"]] for point in mini_batch]


MODEL = ForeignModel(
    make=Classifier,
    learn=Classifier.learn,
    predict=Classifier.predict,
    save=Classifier.save,
    load=Classifier.load,
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
    print("probability that (0, 0) is inside:", round(served(features([{"x": 0.0, "y": 0.0}]))[0], 2))
