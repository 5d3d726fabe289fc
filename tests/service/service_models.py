"""Tests of the service share these models, and a training that has ended."""

from typing import Any

import numpy as np

from streamiter import Flow
from streamiter.learn import AdaptiveLinearModel, train_online
from streamiter.models import LinearPredictor, ModelUpdate
from streamiter.models.served import ServedVersion
from streamiter.service.observing.observations import Observations

NOW_MS = 1_700_000_000_000


def trips(count: int, seed: int = 1) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [
        {"km": float(draw.normal(500.0, 90.0)), "sky": ("rain", "sun", "snow")[draw.integers(3)], "night": n % 2 == 0}
        for n in range(count)
    ]


def learned(labels: str = "truth values", crosses: Any = (), count: int = 300) -> AdaptiveLinearModel:
    """Return a model that has learned from some trips."""
    rows = trips(count)
    make: dict[str, Any] = {
        "truth values": lambda row: row["km"] > 500.0,
        "two labels": lambda row: "far" if row["km"] > 500.0 else "near",
        "numbers": lambda row: row["km"] / 10.0 + len(row["sky"]),
        "classes": lambda row: row["sky"] + str(row["night"]),
    }
    model = AdaptiveLinearModel(bits=12, crosses=crosses)
    model.learn(rows, [make[labels](row) for row in rows])
    return model


async def trained_in_epochs() -> Observations:
    """Return what is known about a training in epochs that has ended."""
    flow = Flow("trips")
    trips = flow.from_items([{"km": n % 7, "late": n % 7 > 3} for n in range(900)])
    train_online(trips, label="late", mode="synchronous", mini_batch=100).validation.collect()
    observations = Observations("trips")
    observations.job = await flow.start()
    await observations.job.wait()
    return observations


def version_of(parameters: Any, version: int = 7, predict: Any = None) -> ServedVersion:
    """Return a served version with these parameters, made 2.5 s ago."""
    update = ModelUpdate("late", 2, version, None, NOW_MS - 2_500, 300, {}, parameters)
    subject = f"model 'late' of memory:models, update 2.{version}"
    return ServedVersion(subject, update, predict or LinearPredictor(parameters, subject))
