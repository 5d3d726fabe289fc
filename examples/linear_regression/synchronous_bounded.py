"""Linear regression, synchronous and bounded, after FLIP-176: all workers make one step together in each round.

The workers keep their examples. When an epoch is complete, each sends the gradient of all its examples, and the owner
of the parameters makes a step with their mean in its own callback. With generated data::

    python examples/linear_regression/synchronous_bounded.py

Or with the records that a topic has now, such as a file with lines like ``{"x": [0.1, …, 1.0], "y": 38.5}``::

    python examples/linear_regression/synchronous_bounded.py file:examples.jsonl
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
    IterationListener,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    topic,
)
from streamiter.iteration import terminate_after
from streamiter.topics import JsonColumns

FEATURES = 10
WORKERS = 2
ROUNDS = 100
LEARNING_RATE = 0.1


class Train(Operator, IterationListener):
    """Keeps its examples; computes their gradient with the parameters of each epoch."""

    def __init__(self) -> None:
        self.features = np.zeros((0, FEATURES))
        self.targets = np.zeros(0)

    def process_examples_batch(self, examples: Columns, out: Any) -> None:
        self.features = np.concatenate([self.features, examples["x"]])
        self.targets = np.concatenate([self.targets, examples["y"]])

    def process_parameters(self, parameters: np.ndarray[Any, Any], out: Any) -> None:
        self.parameters = parameters

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        gradient = self.features.T @ (self.features @ self.parameters - self.targets)
        out.emit({"gradient": gradient, "count": len(self.targets)})


class Parameters(Operator, IterationListener):
    """Adds up the gradients of an epoch; makes a step with their mean when the epoch is complete."""

    def __init__(self) -> None:
        self.parameters = np.zeros(FEATURES)
        self.gradient = np.zeros(FEATURES)
        self.count = 0

    def process(self, part: dict[str, Any], out: Any) -> None:
        self.gradient = self.gradient + part["gradient"]
        self.count += part["count"]

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        self.parameters = self.parameters - LEARNING_RATE * self.gradient / self.count
        self.gradient, self.count = np.zeros(FEATURES), 0
        out.emit(self.parameters)


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
    start = flow.from_items([np.zeros(FEATURES)], name="start", parallelism=1)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [parameters], [examples] = variables, data
        training = connect(parameters=parameters.broadcast(), examples=examples.rebalance())
        gradients = training.process(Train, name="train", parallelism=WORKERS)
        stepped = gradients.process(Parameters, name="parameters", parallelism=1)
        return IterationBodyResult([stepped], [stepped], terminate_after(stepped, rounds=ROUNDS))

    [models] = iterate_bounded_streams_until_termination([start], [examples], body)
    return models


def made_up_examples(count: int = 20_000) -> Columns:
    """Return examples with y = 1·x₀ + 2·x₁ + … + 10·x₉ and a little noise."""
    generator = np.random.default_rng(seed=1)
    features = generator.normal(size=(count, FEATURES))
    noise = 0.1 * generator.normal(size=count)
    return Columns({"x": features, "y": features @ np.arange(1.0, FEATURES + 1) + noise})


def flow(urls: Sequence[str] = ()) -> Flow:
    """Return the flow from generated examples, or the examples of a topic, to the report."""
    made = Flow("linear regression, synchronous, bounded")
    if urls:
        decode = JsonColumns({"x": ("float64", FEATURES), "y": "float64"})
        examples = made.source(topic(urls[0]), decode=decode, stop="latest")
    else:
        examples = made.from_items(made_up_examples())
    regression(made, examples).process(Report, name="report", parallelism=1)
    return made


if __name__ == "__main__":
    flow(sys.argv[1:]).run(on_interrupt="drain")
