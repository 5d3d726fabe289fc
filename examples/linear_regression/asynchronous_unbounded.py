"""Linear regression, asynchronous and unbounded, after FLIP-176: workers never wait.

Each worker sends the gradient of every mini-batch to the owner of the parameters. The owner applies it at once, and
sends the new parameters back to that worker, which continues with its old parameters until then. With generated data::

    python examples/linear_regression/asynchronous_unbounded.py

Or with topics, here in a SQLite file. Each line of ``events.jsonl`` is a record such as
``{"x": [0.1, …, 1.0], "y": 38.5}``, with ten numbers in x; end it with Ctrl-C, because a topic has no end::

    streamiter topics create 'sqlite:///lr.db?topic=updates'
    streamiter topics produce 'sqlite:///lr.db?topic=events' events.jsonl --create
    python examples/linear_regression/asynchronous_unbounded.py 'sqlite:///lr.db?topic=events' 'sqlite:///lr.db?topic=updates'
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
    """Holds the model; applies the gradient of a worker, and answers with the new parameters."""

    def __init__(self) -> None:
        self.parameters = np.zeros(FEATURES)

    def process(self, step: dict[str, Any], out: Any) -> None:
        self.parameters = self.parameters - LEARNING_RATE * step["step"]
        out.emit({"worker": step["worker"], "parameters": self.parameters})
        out.emit(self.parameters, tag=MODEL_UPDATES)

    def snapshot(self) -> Any:
        return self.parameters

    def restore(self, state: Any) -> None:
        self.parameters = state


class Train(Operator):
    """Computes the gradient of each mini-batch with its newest parameters."""

    def __init__(self) -> None:
        self.parameters = np.zeros(FEATURES)

    def open(self, context: Any) -> None:
        self.worker = context.subtask_index

    def process_parameters(self, answer: dict[str, Any], out: Any) -> None:
        self.parameters = answer["parameters"]

    def process_examples(self, examples: Columns, out: Any) -> None:
        features, targets = examples["x"], examples["y"]
        gradient = features.T @ (features @ self.parameters - targets)
        out.emit({"worker": self.worker, "step": gradient / len(targets)})

    def snapshot(self) -> Any:
        return self.parameters

    def restore(self, state: Any) -> None:
        self.parameters = state


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
        [{"worker": worker, "step": np.zeros(FEATURES)} for worker in range(WORKERS)], name="start", parallelism=1
    )

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [steps], [examples] = variables, data
        parameters = steps.process(Parameters, name="parameters", parallelism=1)
        training = connect(
            parameters=parameters.partition_by(lambda answer: answer["worker"]),
            examples=examples.batch(MINI_BATCH, parallelism=WORKERS),
        )
        new_steps = training.process(Train, name="train", parallelism=WORKERS)
        return IterationBodyResult(
            feedback_variable_streams=[new_steps.rebalance()], output_streams=[parameters.side_output(MODEL_UPDATES)]
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
    made = Flow("linear regression, asynchronous, unbounded")
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
