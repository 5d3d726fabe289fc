"""Flows that change between two runs: for each row of the page on upgrades the step before and after the change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Json,
    KeyedStream,
    Operator,
    OutputTag,
    Stream,
    calendar,
    epochs_every,
    fold,
    hopping,
    iterate_unbounded_streams,
    quantile,
    session,
    tumbling,
)
from streamiter import sliding as sliding_windows
from streamiter.learn import DelayedLabels, LinearRegression, LogisticRegression, online_k_means, train_online
from streamiter.optimizers import SGD
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


def trained_later(within_s: float = 5.0, **options: Any) -> Build:
    """Return the same of questions, whose answers have a key again."""
    labels = DelayedLabels(
        key_of=lambda record: record["id"],
        is_answer=lambda record: record["t"] >= 5,
        features=["v"],
        target_of=lambda record: record["k"] == 2,
        within_s=within_s,
        otherwise=False,
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


LATE = OutputTag("late")
N_AND_S = {"n": "count", "s": ("sum", "v")}
COUNT_AND_SUM = windows(None, **N_AND_S)
WINDOW, JOIN, TABLE, TABLE_NOW = "`window`", "`interval_join`", "`join_table`", '`join_table`, `time="processing"`'
BETWEEN = {"lower_s": -10, "upper_s": 10}


def windowed(change: str, before: Build, after: Build, becomes: Any, says: str = "", **more: Any) -> Change:
    return Change((WINDOW, change), before, after, becomes, says, **more)


CHANGES: list[Change] = [
    windowed("the order of aggregates", COUNT_AND_SUM, windows(None, s=("sum", "v"), n="count"), "keep"),
    windowed(
        "an aggregate is added",
        windows(None, n="count"),
        COUNT_AND_SUM,
        "keep",
        results=values,
        expected=[{"n": 3, "s": None}, {"n": 1, "s": 8}, {"n": 1, "s": 16}],
    ),
    windowed(
        "an aggregate is added",
        windows(session(30), s=("sum", "v")),
        windows(session(30), c=("collect", "v"), s=("sum", "v")),
        "keep",
        results=values,
        expected=[{"c": None, "s": 15}, {"c": [16], "s": 16}],
    ),
    windowed(
        "an aggregate is added",
        windows(sliding_windows(9), m=("max", "v")),
        windows(sliding_windows(9), m=("max", "v"), n="count"),
        "keep",
        results=values,
        expected=[{"m": 1}, {"m": 2, "n": None}, {"m": 4, "n": None}, {"m": 8, "n": None}, {"m": 16, "n": 1}],
    ),
    windowed("an aggregate is removed or renamed", COUNT_AND_SUM, windows(None, n="count"), "refuse", "'s' .* is gone"),
    windowed(
        "an aggregate is removed or renamed",
        windows(None, n="count"),
        windows(None, m="count"),
        "refuse",
        r"'n' \(count\) is gone",
    ),
    windowed(
        "what an aggregate computes", windows(None, x="count"), windows(None, x=("sum", "v")), "refuse", "'x' was"
    ),
    windowed(
        "what an aggregate computes",
        windows(None, ("sum", "v")),
        windows(None, ("sum", "w")),
        "refuse",
        "'value' was sum of field 'v', now sum of field 'w'",
    ),
    windowed("`q` of a `quantile`", windows(None, (quantile(0.1), "v")), windows(None, (quantile(0.9), "v")), "keep"),
    windowed(
        "functions of your own, such as those of `fold`",
        windows(None, (fold(0, lambda total, v: total + v), lambda record: record["v"])),
        windows(None, (fold(0, lambda total, v: v + total), lambda record: record["v"])),
        "keep",
    ),
    windowed("the kind of the window", windows(), windows(session(10)), "refuse", "windows was tumbling, now session"),
    *(
        windowed("its length, step, offset, gap, unit or zone", windows(before), windows(after), "refuse", says)
        for before, after, says in [
            (tumbling(10), tumbling(20), "size_ms was 10000, now 20000"),
            (tumbling(10), tumbling(10, 3), "offset_ms was 0, now 3000"),
            (hopping(10, 5), hopping(10, 2), "step_ms was 5000, now 2000"),
            (sliding_windows(10), sliding_windows(20), "size_ms was 10000, now 20000"),
            (session(10), session(20), "gap_ms was 10000, now 20000"),
            (calendar("day", "UTC"), calendar("week", "UTC"), "unit was day, now week"),
            (calendar("day", "UTC"), calendar("day", "Europe/Berlin"), "time_zone was UTC, now Europe/Berlin"),
        ]
    ),
    windowed("the same windows in other words", windows(tumbling(10)), windows(hopping(10, 10, offset_s=20)), "keep"),
    windowed("`allowed_lateness_s`, shorter", windows(options={"allowed_lateness_s": 60}), windows(), "drop"),
    windowed(
        "`allowed_lateness_s`, longer",
        windows(),
        windows(options={"allowed_lateness_s": 60}),
        "refuse",
        "allowed_lateness_ms was 0, now 60000",
    ),
    windowed("`early_every_s`, `late`", windows(), windows(options={"early_every_s": 3600, "late": LATE}), "keep"),
    windowed("`early_every_s`, `late`", windows(options={"early_every_s": 3600, "late": LATE}), windows(), "keep"),
    windowed("`results`", windows(), windows(options={"results": "retracting"}), "refuse", "results was accumulating"),
    windowed("`time`", windows(), windows(options={"time": "processing"}), "refuse", "time was event, now processing"),
    windowed(
        "the order of aggregates",
        windows(tumbling(1e6), options={"time": "processing"}, **N_AND_S),
        windows(tumbling(1e6), options={"time": "processing"}, s=("sum", "v"), n="count"),
        "keep",
        results=values,
    ),
    Change(
        ("`as_of_window`", "`size_s`, shorter"),
        before_each(30),
        before_each(3),
        "drop",
        results=lambda results: [value["n"] for _, value in results],
        expected=[0, 1, 1, 0, 0],
    ),
    Change(("`as_of_window`", "`size_s`, longer"), before_each(3), before_each(30), "refuse", "size_ms was 3000"),
    Change(
        ("`as_of_window`", "an aggregate is added"),
        before_each(7, n="count"),
        before_each(7, s=("sum", "v"), n="count"),
        "keep",
        results=lambda results: [value for _, value in results],
        expected=[{"n": 0}, {"n": 1}, {"s": None, "n": 2}, {"s": 4, "n": 1}, {"s": 0, "n": 0}],
    ),
    Change(
        ("`as_of_window`", "other aggregates"),
        before_each(5, x="count"),
        before_each(5, x=("max", "v")),
        "refuse",
        "'x' was count, now max",
    ),
    Change(
        (JOIN, "bounds that are nearer"),
        joined("interval_join", **BETWEEN, how="left"),
        joined("interval_join", lower_s=-2, upper_s=2, how="left"),
        "drop",
        results=later_pairs,
    ),
    Change(
        (JOIN, "bounds that are further"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", lower_s=-10, upper_s=20),
        "refuse",
        "upper_ms was 10000, now 20000",
    ),
    Change(
        (JOIN, "bounds that are further"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", lower_s=-20, upper_s=None),
        "refuse",
        "lower_ms was -10000, now -20000, upper_ms",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, how="left"),
        "refuse",
        "how was inner, now left",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, one_to_one=True),
        "refuse",
        "one_to_one was False, now True",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, time="processing"),
        "refuse",
        "time was event, now processing",
    ),
    Change(
        (JOIN, "`kept_max`, `late`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, kept_max=100, late=LATE),
        "keep",
        results=later_pairs,
    ),
    Change(
        ("joins by event time", "`allowed_lateness_s`, shorter"),
        joined("interval_join", **BETWEEN, allowed_lateness_s=60),
        joined("interval_join", **BETWEEN),
        "drop",
        results=later_pairs,
    ),
    Change(
        ("joins by event time", "`allowed_lateness_s`, longer"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, allowed_lateness_s=60),
        "refuse",
        "allowed_lateness_ms was 0",
    ),
    Change(
        ("`window_join`", "the window, `time`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(20)),
        "refuse",
        "size_ms was 10000, now 20000",
    ),
    Change(
        ("`window_join`", "the window, `time`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(10), time="processing"),
        "refuse",
        "time was event",
    ),
    Change(
        ("`window_join`", "`how`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(10), how="full"),
        "keep",
        results=later_pairs,
    ),
    Change(
        (TABLE, "`how`, `strict`"),
        joined("join_table", value="v", how="inner"),
        joined("join_table", value="v", strict=True),
        "keep",
        results=lambda pairs: [value for _, value in pairs],
        expected=[1, 1, 2, 4, None],
    ),
    Change(
        (TABLE, "`value`, `time`"),
        joined("join_table", value="v"),
        joined("join_table", value="w"),
        "refuse",
        "value was field 'v', now field 'w'",
    ),
    Change(
        (TABLE, "`value`, `time`"),
        joined("join_table", value="v"),
        joined("join_table", value="v", time="processing"),
        "refuse",
        "time was event, now processing",
    ),
    Change(
        (TABLE_NOW, "`value`"),
        joined("join_table", value="v", time="processing", wait_for_table=False),
        joined("join_table", time="processing", wait_for_table=False),
        "refuse",
        "value was field 'v'",
    ),
    Change(
        (TABLE_NOW, "`how`, `wait_for_table`"),
        joined("join_table", value="v", time="processing", wait_for_table=False),
        joined("join_table", value="v", time="processing", how="inner"),
        "keep",
        results=len,
        expected=5,
    ),
    Change(("`deduplicate`", "`within_s`, shorter"), once(), once(within_s=4), "drop"),
    Change(
        ("`deduplicate`", "`within_s`, longer"), once(within_s=4), once(), "refuse", "within_ms was 4000, now 60000"
    ),
    Change(("`deduplicate`", "`by`, `time`"), once(), once("v"), "refuse", "by was field 'id', now field 'v'"),
    Change(("`deduplicate`", "`by`, `time`"), once(), once(time="processing"), "refuse", "time was event"),
    Change(("`reduce`", "a function of Python or numpy"), reduced(max), reduced(min), "refuse", "f was max, now min"),
    Change(("`reduce`", "a function of Python or numpy"), reduced(np.add), reduced(np.maximum), "refuse", "numpy.add"),
    Change(("`reduce`", "a function of your own"), reduced(lambda a, b: a + b), reduced(lambda a, b: b + a), "keep"),
    Change(
        ("`stateful_map`", "its function, `initial`"),
        lambda inputs: (
            inputs.plain().key_by(lambda one: one["k"]).stateful_map(lambda n, one: (n + 1, n), 0, name="step")
        ),
        lambda inputs: (
            inputs.plain().key_by(lambda one: one["k"]).stateful_map(lambda n, one: (n + 1, n), 100, name="step")
        ),
        "keep",
        expected=[0, 1, 2, 3, 100],
    ),
    Change(
        ("`process`", "the class of the operator"),
        processed(Sums),
        processed(Totals),
        "refuse",
        "it was Sums, now Totals",
    ),
    Change(("`process`", "the class, with the old `definition()`"), processed(Sums), processed(RenamedSums), "keep"),
    Change(
        ("`process`", "what its `definition()` returns"),
        processed(RenamedSums),
        processed(DoubledSums),
        "refuse",
        "factor is new",
    ),
    Change(("`process`", "`time_to_live_s`"), processed(Sums, time_to_live_s=60), processed(Sums), "keep"),
    Change(("`process`", "`time_to_live_s`"), processed(Sums), processed(Sums, time_to_live_s=60), "keep"),
    Change(
        ("`key_by`", "a function of Python"),
        lambda inputs: inputs.plain().map(str).key_by(str.lower).reduce(max, name="step"),
        lambda inputs: inputs.plain().map(str).key_by(str.strip).reduce(max, name="step"),
        "refuse",
        "key was str.lower, now str.strip",
    ),
    Change(
        ("`key_by`", "a function of Python"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(abs).process(Last, name="step"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(str).process(Last, name="step"),
        "refuse",
        "keys was",
    ),
    Change(
        ("`event_time`", "the field or function, `unit`, `time_zone`"),
        timed(),
        timed("v"),
        "refuse",
        "of was field 't', now field 'v'",
    ),
    Change(
        ("`event_time`", "the field or function, `unit`, `time_zone`"),
        timed(),
        timed(unit="ms"),
        "refuse",
        "unit was s, now ms",
    ),
    Change(
        ("`event_time`", "`out_of_orderness_s` and all others"),
        timed(),
        timed(out_of_orderness_s=30, idle_after_s=1, max_ahead_s=None),
        "keep",
    ),
    Change(
        ("`batch`", "`n`, `timeout_s`"),
        lambda inputs: inputs.plain().batch(100, name="step"),
        lambda inputs: inputs.plain().batch(4, 3600, name="step"),
        "keep",
    ),
    Change(
        ("`sort`, `join`", "the key, `reverse`"),
        lambda inputs: inputs.bounded().sort("v", name="step"),
        lambda inputs: inputs.bounded().sort("w", reverse=True, name="step"),
        "keep",
    ),
    Change(
        ("`sort`, `join`", "the key, `reverse`"),
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="k", name="step"),
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="v", name="step"),
        "keep",
    ),
    Change(
        ("`reduce_all`", "a function of Python or numpy"),
        lambda inputs: inputs.bounded().map(lambda one: one["v"]).reduce_all(max, name="step"),
        lambda inputs: inputs.bounded().map(lambda one: one["v"]).reduce_all(min, name="step"),
        "refuse",
        "f was max, now min",
    ),
    Change(
        ("any", "another kind of step"),
        reduced(max),
        lambda inputs: (
            inputs.plain()
            .map(lambda one: one["v"])
            .key_by(lambda v: v % 2)
            .stateful_map(lambda n, v: (n, v), 0, name="step")
        ),
        "refuse",
        "it was reduce, now stateful_map",
    ),
    Change(
        ("any", "its name, or whether it is there"),
        reduced(max),
        lambda inputs: inputs.plain().map(lambda one: one["v"]),
        "refuse",
        "state of step 'step', which the flow",
    ),
    Change(
        ("any", "its name, or whether it is there"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]),
        reduced(max),
        "refuse",
        "no state of step 'step'",
    ),
    Change(
        ("any", "`parallelism`"),
        COUNT_AND_SUM,
        windows(None, s=("sum", "v"), n="count", options={"parallelism": 2}),
        "keep",
    ),
    Change(
        ("any, in a loop", "what is refused outside of a loop"),
        looped(Sums),
        looped(Totals),
        "refuse",
        "it was Sums, now Totals",
        has_remedy=False,
    ),
    Change(
        ("a source", "`decode`, `start`, `stop`, `on_error`"),
        lambda inputs: inputs.plain(),
        lambda inputs: inputs.plain(decode=Json(), start="latest", on_error="skip"),
        "keep",
        expected=[*FIRST, *REST],
    ),
    Change(
        ("a source", "its topic"),
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step"),
        "refuse",
        "the topic was created again, with other records",
    ),
    Change(
        ("a source", 'its topic, with `on_lost="skip"`'),
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step", on_lost="skip"),
        "drop",
        results=len,
        expected=7,
    ),
    Change(
        ("a source", "a topic, items, or a source of your own"),
        lambda inputs: inputs.plain(name="step"),
        lambda inputs: inputs.flow.from_items([*FIRST, *REST], name="step"),
        "refuse",
        "it was TopicSource, now ItemsSource",
    ),
    Change(
        ("`train_online`", "`model`"),
        trained(lambda: LogisticRegression(1)),
        trained(lambda: LinearRegression(1)),
        "refuse",
        "model was LogisticRegression, now LinearRegression",
        has_remedy=False,
        step="step: ",
    ),
    Change(
        ("`train_online`", "`labels`: `time`, `schedule`"),
        trained_later(),
        trained_later(schedule="weighted"),
        "refuse",
        "schedule was end, now weighted",
        has_remedy=False,
        step="step: ",
    ),
    Change(
        ("`train_online`", "`labels`: `within_s`, `otherwise`, `waiting_max`"),
        trained_later(),
        trained_later(50.0, waiting_max=10),
        "keep",
        results=lambda models: models[-1].records,
        expected=2,
    ),
    Change(
        ("`train_online`", "the number of features, the optimizer, `loss`"),
        trained(lambda: LogisticRegression(1)),
        trained(lambda: LogisticRegression(2), width=2),
        "refuse",
        "features was 1, now 2",
        has_remedy=False,
        step="step: ",
    ),
    Change(
        ("`train_online`", "the number of features, the optimizer, `loss`"),
        trained(features=["v"], loss="absolute"),
        trained(features=["v"], loss="poisson"),
        "refuse",
        "loss was",
        has_remedy=False,
        step="step: ",
    ),
    Change(
        ("`train_online`", "learning rates, `publish_every`, `report_every`"),
        trained(lambda: LogisticRegression(1, optimizer=SGD(0.1))),
        trained(lambda: LogisticRegression(1, optimizer=SGD(0.001)), publish_every=1),
        "keep",
        results=lambda models: models[-1].records,
        expected=5,
    ),
    Change(
        ("`online_k_means`", "`clusters`"),
        clustered(2),
        clustered(3),
        "refuse",
        "clusters was 2, now 3",
        step="step: centroids",
    ),
    Change(
        ("`online_k_means`", "`decay`, `mini_batch`"),
        clustered(2),
        clustered(2, decay=0.5, mini_batch=3),
        "keep",
        results=lambda models: models[-1].records,
        expected=5,
    ),
    Change(
        ("`map_async`", "its function and options"),
        lambda inputs: inputs.plain().map_async(unchanged, name="step"),
        lambda inputs: inputs.plain().map_async(unchanged, 2, ordered=False, retries=3, name="step"),
        "keep",
    ),
    Change(
        ("`epochs_every`", "`records`, `seconds`"),
        lambda inputs: epochs_every(inputs.plain(), records=3, name="step"),
        lambda inputs: epochs_every(inputs.plain(), records=1, name="step"),
        "keep",
    ),
    Change(
        ("`from_items`", "the items"),
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["a", "b"], name="items")),
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["c", "d", "e"], name="items")),
        "keep",
        expected=["a", "b", *FIRST, *REST],
    ),
    Change(
        ("`map`, `filter`, `sink` and other steps without state", "any"),
        lambda inputs: inputs.plain().map(str),
        lambda inputs: inputs.plain().filter(lambda one: one["v"] > 4),
        "keep",
        results=len,
        expected=4,
    ),
    Change(
        ("`key_by`", "a function of your own"),
        reduced(max),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(lambda v: v & 1).reduce(max, name="step"),
        "keep",
    ),
]
