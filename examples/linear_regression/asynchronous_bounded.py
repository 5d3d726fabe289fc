"""Linear regression, asynchronous and bounded, after FLIP-176: no worker waits for another.

Each worker keeps its examples, and sends the gradient of one mini-batch after another to the owner of the parameters.
The owner applies the gradient at once, and sends the new parameters back to that worker. With generated data::

    python examples/linear_regression/asynchronous_bounded.py

Or with the records that a topic has now, such as a file with lines like ``{"x": [0.1, …, 1.0], "y": 38.5}``::

    python examples/linear_regression/asynchronous_bounded.py file:examples.jsonl
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
    IterationConfig,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    topic,
)
from streamiter.topics import JsonColumns

FEATURES = 10
WORKERS = 2
MINI_BATCH = 50
MINI_BATCHES = 200
"""What each worker learns from: fewer than it has examples for, or some of them again."""
LEARNING_RATE = 0.1


class Parameters(Operator):
    """Applies each gradient when it arrives, and answers its worker with the new parameters."""

    def __init__(self) -> None:
        self.parameters = np.zeros(FEATURES)

    def process(self, step: dict[str, Any], out: Any) -> None:
        self.parameters = self.parameters - LEARNING_RATE * step["gradient"]
        out.emit({"worker": step["worker"], "parameters": self.parameters})


class Train(Operator):
    """Keeps its examples; for each parameters it receives, sends the gradient of the next mini-batch."""

    def __init__(self) -> None:
        self.features = np.zeros((0, FEATURES))
        self.targets = np.zeros(0)
        self.examples_ended = False
        self.mini_batches = 0

    def open(self, context: Any) -> None:
        self.worker = context.subtask_index

    def wanted_inputs(self) -> Sequence[str] | None:
        return None if self.examples_ended else ("examples",)

    def input_ended(self, name: str, out: Any) -> None:
        self.examples_ended = True

    def process_examples_batch(self, examples: Columns, out: Any) -> None:
        self.features = np.concatenate([self.features, examples["x"]])
        self.targets = np.concatenate([self.targets, examples["y"]])

    def process_parameters(self, answer: dict[str, Any], out: Any) -> None:
        if self.mini_batches == MINI_BATCHES or not len(self.targets):
            return  # Nothing more is fed back, and so the iteration ends.
        first = self.mini_batches * MINI_BATCH % len(self.targets)
        self.mini_batches += 1
        features = self.features[first : first + MINI_BATCH]
        targets = self.targets[first : first + MINI_BATCH]
        gradient = features.T @ (features @ answer["parameters"] - targets) / len(targets)
        out.emit({"worker": self.worker, "gradient": gradient})


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
    start = flow.from_items(
        [{"worker": worker, "parameters": np.zeros(FEATURES)} for worker in range(WORKERS)], name="start", parallelism=1
    )

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [answers], [examples] = variables, data
        training = connect(
            parameters=answers.partition_by(lambda answer: answer["worker"]), examples=examples.rebalance()
        )
        steps = training.process(Train, name="train", parallelism=WORKERS)
        new_answers = steps.process(Parameters, name="parameters", parallelism=1)
        models = new_answers.map(lambda answer: answer["parameters"], name="models")
        return IterationBodyResult([new_answers], [models])

    [models] = iterate_bounded_streams_until_termination(
        [start], [examples], body, IterationConfig(max_epochs_ahead=None)
    )
    return models


def made_up_examples(count: int = 20_000) -> Columns:
    """Return examples with y = 1·x₀ + 2·x₁ + … + 10·x₉ and a little noise."""
    generator = np.random.default_rng(seed=1)
    features = generator.normal(size=(count, FEATURES))
    noise = 0.1 * generator.normal(size=count)
    return Columns({"x": features, "y": features @ np.arange(1.0, FEATURES + 1) + noise})


def flow(urls: Sequence[str] = ()) -> Flow:
    """Return the flow from generated examples, or the examples of a topic, to the report."""
    made = Flow("linear regression, asynchronous, bounded")
    if urls:
        decode = JsonColumns({"x": ("float64", FEATURES), "y": "float64"})
        examples = made.source(topic(urls[0]), decode=decode, stop="latest")
    else:
        examples = made.from_items(made_up_examples())
    regression(made, examples).process(Report, name="report", parallelism=1)
    return made


if __name__ == "__main__":
    flow(sys.argv[1:]).run(on_interrupt="drain")
