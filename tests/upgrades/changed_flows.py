"""A flow with one step to change between two runs, in the ways that `changes` lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    KeyedStream,
    Operator,
    Stream,
    iterate_unbounded_streams,
    tumbling,
)
from streamiter.learn import DelayedLabels, online_k_means, train_online
from streamiter.topics import MemoryBroker

Records = Sequence[dict[str, Any]]

FIRST: Records = [{"t": 0, "k": 1, "v": 1, "w": 10, "id": 7}, {"t": 4, "k": 1, "v": 2, "w": 20, "id": 8}]
"""What the first run reads of each topic. Nothing is complete before the restart."""
REST: Records = [
    {"t": 5, "k": 1, "v": 4, "w": 40, "id": 7},
    {"t": 12, "k": 1, "v": 8, "w": 80, "id": 9},
    {"t": 90, "k": 2, "v": 16, "w": 160, "id": 8},
]


class Inputs:
    """The two topics of a flow, as streams."""

    def __init__(self, flow: Flow, broker: MemoryBroker, *, ends: bool) -> None:
        self.flow = flow
        self._broker = broker
        self._stop: Any = "latest" if ends else None

    def plain(self, topic: str = "left", **options: Any) -> Stream:
        return self.flow.source(self._broker.topic(topic), **{"name": topic, "stop": self._stop, **options})

    def bounded(self, name: str = "left") -> Stream:
        """Return a stream that ends behind the records of both runs."""
        return self.plain(name, stop={0: len(FIRST) + len(REST)})

    def timed(self, name: str = "left") -> Stream:
        return self.plain(name).event_time("t", name=f"time of {name}", unit="s", check_unit=False)

    def keyed(self, name: str = "left") -> KeyedStream[Any, Any]:
        return self.timed(name).key_by(lambda record: record["k"])


Build = Callable[[Inputs], Stream]


@dataclass(frozen=True)
class Change:
    """A change of one step. ``row`` is that of the page: the step, and what is changed of it."""

    row: tuple[str, str]
    before: Build
    after: Build
    becomes: Literal["keep", "drop", "refuse"]
    says: str = ""
    """A part of the error."""
    results: Callable[[list[Any]], object] | None = None
    """What is compared of the results."""
    expected: object = None
    """None: that of a flow which was like ``after`` all the time."""
    step: str = "step"
    """The name of the changed step."""
    also: tuple[str, ...] = ()
    """The other steps that start without their state."""
    has_remedy: bool = True
    """Whether the step may start without its state; steps of loops may not."""


def windows(window: Any = None, /, *one: Any, options: dict[str, Any] | None = None, **named: Any) -> Build:
    aggregates = one or () if named else one or ("count",)
    settings = {"name": "step", **(options or {})}
    return lambda inputs: inputs.keyed().window(window or tumbling(10), **settings).aggregate(*aggregates, **named)


def before_each(size_s: float, **named: Any) -> Build:
    return lambda inputs: (
        inputs.keyed().as_of_window(inputs.keyed("right"), size_s, name="step").aggregate(**(named or {"n": "count"}))
    )


def joined(method: str, *arguments: Any, **options: Any) -> Build:
    return lambda inputs: getattr(inputs.keyed(), method)(
        inputs.keyed("right"), *arguments, **{"name": "step", **options}
    )


def once(by: Any = "id", within_s: float = 60, **options: Any) -> Build:
    return lambda inputs: inputs.keyed().deduplicate(by, within_s=within_s, name="step", **options)


def timed(of: Any = "t", **options: Any) -> Build:
    settings = {"unit": "s", "check_unit": False, "name": "step", **options}
    return lambda inputs: inputs.plain().event_time(of, **settings)


def reduced(f: Any) -> Build:
    return lambda inputs: inputs.plain().map(lambda each: each["v"]).key_by(lambda v: v % 2).reduce(f, name="step")


def processed(factory: Any, **options: Any) -> Build:
    return lambda inputs: inputs.plain().key_by(lambda record: record["k"]).process(factory, name="step", **options)


class Sums(Operator):
    """Sums by key, times a factor."""

    factor = 1

    def open(self, context: Any) -> None:
        self.context = context

    def process(self, record: Any, out: Any) -> None:
        self.context.state["sum"] = self.context.state.get("sum", 0) + record["v"] * self.factor
        out.emit(self.context.state["sum"])


def trained(model: Any = None, width: int = 1, **options: Any) -> Build:
    """Return a training that learns whether the key is 2."""
    of_rows = {
        "label": lambda record: record["k"] - 1,
        "features": lambda records: np.array([[record["v"]] * width for record in records]),
    }
    return lambda inputs: train_online(inputs.plain(), model, name="step", **{**of_rows, **options}).models


def trained_later(within_s: float = 5.0, otherwise: Any = False, **options: Any) -> Build:
    """Return the same of questions, whose answers have a key again."""
    labels = DelayedLabels(
        key_of=lambda record: record["id"],
        is_answer=lambda record: record["t"] >= 5,
        features=["v"],
        target_of=lambda record: record["k"] == 2,
        within_s=within_s,
        otherwise=otherwise,
        **options,
    )
    return lambda inputs: train_online(inputs.timed(), labels=labels, name="step").models


def clustered(clusters: int, **options: Any) -> Build:
    settings = {"mini_batch": 2, "initial": [[float(number)] for number in range(clusters)], **options}
    return lambda inputs: online_k_means(
        inputs.plain().map(lambda record: [float(record["v"])]), clusters=clusters, name="step", **settings
    )


async def unchanged(record: Any) -> Any:
    return record


def looped(operator: Any) -> Build:
    """Return a loop with an operator in it."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[list[Stream]]:
        results = data[0].key_by(lambda record: record["k"]).process(operator, name="step")
        return IterationBodyResult([variables[0].filter(lambda record: False)], [results])

    def build(inputs: Inputs) -> Stream:
        variable = inputs.flow.from_items([0], name="variable")
        return iterate_unbounded_streams([variable], [inputs.plain()], body, IterationConfig(name="loop"))[0]

    return build


class Last(Operator):
    """Keeps the last record of each key."""

    def open(self, context: Any) -> None:
        self.context = context

    def process(self, record: Any, out: Any) -> None:
        self.context.state = record
        out.emit(record)


class Totals(Sums):
    """Another class with the state of another."""


class DoubledSums(Sums):
    """A class that says what its state depends on."""

    factor = 2

    def definition(self) -> dict[str, Any]:
        return {"kind": "Sums", "factor": self.factor}


class RenamedSums(Sums):
    """A class with a new name, and the state of the old one."""

    def definition(self) -> dict[str, Any]:
        return {"kind": "Sums"}


def values(results: list[Any]) -> list[Any]:
    return [result.value for result in results]


def later_pairs(results: list[Any]) -> list[Any]:
    """Return the pairs that the first run cannot have emitted."""
    return [pair for pair in results if any(one is not None and one["t"] > 4 for one in pair)]
