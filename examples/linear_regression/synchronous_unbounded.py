"""Linear regression, synchronous and unbounded, after FLIP-176: workers wait for the new model after each round.

Each worker fills a mini-batch, sends the sum of its gradients to the owner of the parameters, and reads no example
until the new parameters arrive. The owner sends them when all workers have reported. With two seconds of
generated data::

    python examples/linear_regression/synchronous_unbounded.py

Or with topics, here in a SQLite file. Each line of ``events.jsonl`` is a record such as
``{"x": [0.1, …, 1.0], "y": 38.5}``, with ten numbers in x; end it with Ctrl-C, because a topic has no end::

    streamiter topics create 'sqlite:///lr.db?topic=updates'
    streamiter topics produce 'sqlite:///lr.db?topic=events' events.jsonl --create
    python examples/linear_regression/synchronous_unbounded.py 'sqlite:///lr.db?topic=events' 'sqlite:///lr.db?topic=updates'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    connect,
    iterate_unbounded_streams,
    topic,
)
from streamiter.topics import JsonColumns

FEATURES = 10
WORKERS = 2
MINI_BATCH = 50
LEARNING_RATE = 0.1
MODEL_UPDATES = OutputTag("model updates")


class Parameters(Operator):
    """Holds the model; sends the new parameters when all workers have reported."""

    def __init__(self) -> None:
        self.parameters = np.zeros(FEATURES)
        self.reports = 0
        self.examples = 0

    def process(self, report: dict[str, Any], out: Any) -> None:
        self.parameters = self.parameters - LEARNING_RATE * report["step"]
        self.reports += 1
        if report["is start"]:
            self.reports = WORKERS
        if self.reports == WORKERS:
            self.reports = 0
            out.emit(self.parameters)
            out.emit(self.parameters, tag=MODEL_UPDATES)

    def snapshot(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "reports": self.reports}

    def restore(self, state: dict[str, Any]) -> None:
        self.parameters, self.reports = state["parameters"], state["reports"]


class Train(Operator):
    """Fills a mini-batch, computes its gradient, then waits for the parameters."""

    def __init__(self) -> None:
        self.parameters: np.ndarray[Any, Any] | None = None
        self.features: list[Any] = []
        self.targets: list[Any] = []

    def wanted_inputs(self) -> Sequence[str]:
        return ("parameters",) if self.parameters is None else ("examples",)

    def process_parameters(self, parameters: np.ndarray[Any, Any], out: Any) -> None:
        self.parameters = parameters

    def process_examples(self, example: dict[str, Any], out: Any) -> None:
        self.features.append(example["x"])
        self.targets.append(example["y"])
        if len(self.targets) == MINI_BATCH:
            self.report(out)

    def input_ended(self, name: str, out: Any) -> None:
        if name == "examples" and self.parameters is not None and self.targets:
            self.report(out)

    def report(self, out: Any) -> None:
        assert self.parameters is not None
        features, targets = np.array(self.features), np.array(self.targets)
        gradient = features.T @ (features @ self.parameters - targets)
        out.emit({"step": gradient / (WORKERS * len(targets)), "is start": False})
        self.features, self.targets, self.parameters = [], [], None

    def snapshot(self) -> dict[str, Any]:
        # Copies: a snapshot must not change when the next example arrives.
        return {"parameters": self.parameters, "features": list(self.features), "targets": list(self.targets)}

    def restore(self, state: dict[str, Any]) -> None:
        self.parameters, self.features, self.targets = (state["parameters"], state["features"], state["targets"])


class Report(Operator):
    """Prints the learned parameters at the end."""

    def __init__(self) -> None:
        self.models = 0
        self.last = np.zeros(FEATURES)

    def process(self, model: np.ndarray[Any, Any], out: Any) -> None:
        self.models += 1
        self.last = model

    def finish(self, out: Any) -> None:
        print(f"{self.models} models, the last one: {np.round(self.last, 2)}")


def regression(flow: Flow, examples: Stream) -> Stream:
    """Return the stream of models that are learned from ``examples`` (fields x: 10 numbers, y: a number)."""
    start = flow.from_items([{"step": np.zeros(FEATURES), "is start": True}], name="start", parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [reports], [examples] = variables, data
        parameters = reports.process(Parameters, name="parameters", parallelism=1)
        training = connect(parameters=parameters.broadcast(), examples=examples.rebalance())
        steps = training.process(Train, name="train", parallelism=WORKERS)
        return IterationBodyResult(
            feedback_variable_streams=[steps.rebalance()], output_streams=[parameters.side_output(MODEL_UPDATES)]
        )

    [updates] = iterate_unbounded_streams([start], [examples], body)
    return updates


def made_up_examples(count: int = 20_000) -> Columns:
    """Return examples with y = 1·x₀ + 2·x₁ + … + 10·x₉ and a little noise."""
    generator = np.random.default_rng(seed=1)
    features = generator.normal(size=(count, FEATURES))
    noise = 0.1 * generator.normal(size=count)
    return Columns({"x": features, "y": features @ np.arange(1.0, FEATURES + 1) + noise})


def flow(urls: Sequence[str] = ()) -> Flow:
    """Return the flow from generated examples to the report, or from one topic to another."""
    made = Flow("linear regression, synchronous, unbounded")
    if not urls:
        models = regression(made, made.from_items(made_up_examples()))
        models.process(Report, name="report", parallelism=1)
        return made
    events, updates = urls
    decode = JsonColumns({"x": ("float64", FEATURES), "y": "float64"})
    models = regression(made, made.source(topic(events), decode=decode))
    models.publish_model(topic(updates), model="regression")
    return made


if __name__ == "__main__":
    flow(sys.argv[1:]).run()
