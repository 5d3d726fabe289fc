"""Train online from topic to topic, as a program that tests kill: ``training.py OPTIONS`` (JSON, see Options).

The program also writes the number of each event that it reads to a second topic, so that two outputs must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from streamiter import Checkpoints, Flow, topic
from streamiter.learn import Examples, LogisticRegression, train_online
from streamiter.topics import Typed

MODEL = "model"
WIDTH = 3


class Example(msgspec.Struct):
    """An event with its number, its features and its label."""

    n: int
    x: list[float]
    y: int


class Options(msgspec.Struct):
    """The arguments of the program."""

    flow: str
    events: str
    updates: str
    read: str
    folder: str
    interval_s: float
    mode: Literal["asynchronous", "synchronous"]
    parallelism: int
    mini_batch: int
    stop: Literal["latest"] | None = None
    delivery: Literal["at_least_once"] | None = None


def extracted(mini_batch: Sequence[Example]) -> Examples:
    """Return the features and targets of a mini-batch."""
    return Examples(np.array([each.x for each in mini_batch]), np.array([each.y for each in mini_batch], float))


def training_flow(options: Options) -> Flow:
    """Return the flow from the topic of events to the topics of updates and of the events that were read."""
    flow = Flow(options.flow, parallelism=options.parallelism)
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    training = train_online(
        events, lambda: LogisticRegression(WIDTH), extract=extracted, mode=options.mode, mini_batch=options.mini_batch
    )
    training.models.publish_model(topic(options.updates), model=MODEL, delivery=options.delivery)
    events.map(lambda event: event.n).sink(topic(options.read), delivery=options.delivery)
    return flow


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    statistics = training_flow(options).run(checkpoints=Checkpoints(options.folder, interval_s=options.interval_s))
    print(statistics.state, statistics.checkpoints)


if __name__ == "__main__":
    main()
