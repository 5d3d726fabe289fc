"""These flows train a model and publish it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import orjson

from streamiter import Flow, Stream
from streamiter.learn import FTRL, Examples, LogisticRegression, train_online
from streamiter.models.update import UpdateHeaders
from streamiter.testing import Simulation
from streamiter.topics.topic import TopicRecord


def _example_rows(rows: list[dict[str, Any]]) -> Examples:
    return Examples(np.array([row["x"] for row in rows]), [row["y"] for row in rows])


def version_and_parameters(record: TopicRecord) -> Hashable:
    """Return the fields of a model update that do not depend on time."""
    headers = UpdateHeaders.parse(record.headers)
    assert headers is not None
    return headers.generation, headers.version, headers.epoch, record.value


def version_and_records(record: TopicRecord) -> Hashable:
    """Return the fields of a model update that do not depend on the order in which gradients arrive."""
    headers = UpdateHeaders.parse(record.headers)
    assert headers is not None
    assert record.value is not None
    return headers.generation, headers.version, orjson.loads(record.value)["records"]


def _examples(flow: Flow, simulation: Simulation) -> Stream:
    features = np.random.default_rng(5).normal(size=(48, 3)).round(3)
    rows = [{"x": x.tolist(), "y": float(x.sum() > 0)} for x in features]
    return flow.source(simulation.input("examples", rows, over_s=0.5))


def _model() -> LogisticRegression:
    return LogisticRegression(3, optimizer=FTRL(alpha=0.5))


def online_learner(simulation: Simulation) -> Flow:
    """Return a flow that learns synchronously, with optimizer slots, and publishes every version once."""
    flow = Flow("learner")
    training = train_online(
        _examples(flow, simulation), _model, extract=_example_rows, mini_batch=6, mode="synchronous", report_every=12
    )
    training.models.publish_model(simulation.output("models", compare=version_and_parameters), model="m")
    training.validation.sink(simulation.output("validation"))
    return flow


def asynchronous_learner(simulation: Simulation) -> Flow:
    """Return a flow whose workers do not wait: versions have no gaps, and contain every example once."""
    flow = Flow("asynchronous learner")
    training = train_online(_examples(flow, simulation), _model, extract=_example_rows, mini_batch=4, workers=2)
    training.models.publish_model(simulation.output("models", compare=version_and_records), model="m")
    return flow
