"""Streams for tests of embeddings: users and items, with lists, numbers, missing values and fields that come late."""

from random import Random
from typing import Any

import numpy as np

from streamiter.learn import AdaptiveLinearModel, Embeddings

Record = dict[str, Any]

SMALL = Embeddings(factors=4, hidden=(8, 4), at_most="2 MB")
EXPIRING = Embeddings(kind="fm", factors=4, expire=300, time="at", at_most="2 MB")


def views(count: int, seed: int = 1, *, users: int = 60, items: int = 40) -> list[Record]:
    """Return records of views: a user, an item, tags, numbers and a time; the field ``shop`` comes at row 300."""
    draw, found = Random(seed), []
    for row in range(count):
        record: Record = {
            "user": f"u{draw.randrange(users)}",
            "item": f"i{draw.randrange(items)}",
            "tags": draw.sample("abcdef", draw.randrange(3)),
            "price": draw.gauss(20, 5),
            "at": row + draw.randrange(20),
        }
        if row >= 300:
            record["shop"] = draw.choice(["north", "south", None])
        if draw.random() < 0.1:
            record["price"] = None
        found.append(record)
    return found


def visits(count: int, seed: int) -> tuple[list[Record], list[bool]]:
    """Return records of a user, who has 20 of them and then never comes again, and an item that fits or not."""
    draw = np.random.default_rng(seed)
    users = np.arange(count) // 20 + draw.integers(0, count // 200, count)
    items, of_users, of_items = draw.integers(0, 40, count), draw.normal(size=(count, 2)), draw.normal(size=(40, 2))
    scores = 1.5 * (of_users[users] * of_items[items]).sum(axis=1) + draw.normal(size=count)[users]
    records = [{"user": f"u{user}", "item": f"i{item}"} for user, item in zip(users, items, strict=True)]
    return records, (draw.random(count) < 1 / (1 + np.exp(-scores))).tolist()


def scores_of(records: list[Record], *, interaction: float = 2.0) -> np.ndarray[Any, Any]:
    """Return scores that depend on how user and item fit, and on the price."""
    draw = np.random.default_rng(7)
    of_users, of_items = draw.normal(size=(1_000, 2)), draw.normal(size=(1_000, 2))
    numbers = [(int(each["user"][1:]), int(each["item"][1:])) for each in records]
    users, items = np.array(numbers).T
    fit = (of_users[users] * of_items[items]).sum(axis=1)
    prices = np.array([20 if each["price"] is None else each["price"] for each in records])
    return np.asarray(interaction * fit + 0.1 * (prices - 20) + 0.5 * of_items[items, 0])


def labels_of(records: list[Record], kind: str = "binary", **options: Any) -> list[Any]:
    """Return truth values, two texts, three of them or numbers."""
    scores, draw = scores_of(records, **options), np.random.default_rng(9)
    if kind == "classes":
        of_classes = np.stack([scores, -scores, np.zeros(len(scores))], axis=1)
        return np.array(["good", "bad", "so so"])[
            (of_classes + draw.gumbel(size=of_classes.shape)).argmax(axis=1)
        ].tolist()
    if kind == "number":
        return list(100 + 10 * (scores + 0.3 * draw.normal(size=len(scores))))
    are_true = draw.random(len(scores)) < 1 / (1 + np.exp(-scores))
    return [("yes" if each else "no") if kind == "texts" else bool(each) for each in are_true]


def loss_of_classes(predictions: Any, labels: list[str], classes: list[Any]) -> float:
    """Return the mean logarithmic loss of probabilities in the order of the classes."""
    own = predictions[np.arange(len(labels)), [classes.index(label) for label in labels]]
    return float(-np.log(np.clip(own, 1e-9, 1.0)).mean())


def log_loss(predictions: Any, labels: Any) -> float:
    """Return the mean logarithmic loss."""
    chances = np.clip(predictions, 1e-9, 1 - 1e-9)
    return float(-np.where(np.asarray(labels), np.log(chances), np.log(1 - chances)).mean())


def uncompiled_results() -> dict[str, list[Any]]:
    """Return predictions and numbers of models with embeddings, as they are with a compiler or without."""
    records, found = views(150), {}
    for name, embeddings in (("deepfm", SMALL), ("fm", EXPIRING)):
        for kind in ("binary", "number", "classes"):
            model = AdaptiveLinearModel(shapes=False, embeddings=embeddings)
            made = model.learn_each(records, labels_of(records, kind))
            experts = model.parameters(state=False)["embeddings"]["experts"]
            numbers = [made.tolist(), experts[0]["vectors"].tolist(), experts[1]["commons"].tolist()]
            found[f"{name} {kind}"] = [*numbers, [layer["weights"].tolist() for layer in experts[0]["layers"]]]
    return found
