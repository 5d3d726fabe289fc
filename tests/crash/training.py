"""Train online from topic to topic, as a program that tests kill: ``training.py OPTIONS`` (JSON, see Options).

The program also writes the number of each event that it reads to a second topic, so that two outputs must agree.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from streamiter import Checkpoints, Columns, Flow, LocalProcesses, Operator, Ray, RocksState, topic, tumbling
from streamiter.learn import Embeddings, Examples, LogisticRegression, train_online
from streamiter.models import ModelSnapshot
from streamiter.operators import Context, Output
from streamiter.parameter_server import ASP, ParameterServer
from streamiter.service import read_settings
from streamiter.service.learning import ServiceLearning, decoder_for
from streamiter.topics import Typed
from streamiter.values.field_kinds import Kind

MODEL = "model"
WIDTH = 3
KEYS = 7
WINDOW_MS = 100
PAIR_MS = 20
WEIGHTS = 1000
PARTITIONS = 3
BEFORE = 5
SERVED: dict[str, Kind] = {"km": "number", "town": "category"}


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
    kind: Literal[
        "training", "sums", "numbers", "counts", "windows", "table", "changes", "history", "embeddings", "service"
    ] = "training"
    history: str = ""
    """The topic that is read before the events, which begin at offset ``BEFORE`` of each partition then."""
    on_disk: bool = False
    """Whether the states of keys are on disk."""
    processes: int | None = None
    ray: str | None = None
    """The address of the cluster on which these processes are; None: they are on this machine."""
    min_processes: int | None = None
    """How few processes may be on the cluster."""
    changed_steps: list[str] = []
    strikes: list[tuple[Literal["before", "after"], str, int, int, str]] = []
    """Where processes kill themselves, one after the other: the call, the signal, and a file that says so."""


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


def state_of(options: Options) -> RocksState | None:
    return RocksState(Path(options.folder, "state")) if options.on_disk else None


def running_sums(options: Options) -> Flow:
    """Return a flow that publishes the number of events of each key so far, and their sum."""
    flow = Flow(options.flow, parallelism=options.parallelism, state=state_of(options))
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    ones = events.map(lambda event: (event.n % 7, 1, event.n))
    sums = ones.key_by(lambda one: one[0]).reduce(lambda a, b: (a[0], a[1] + b[1], a[2] + b[2]), name="sums")
    sums.map(list).sink(topic(options.read))
    return flow


def numbers(options: Options) -> Flow:
    """Return a flow without state that publishes the number of each event, in order unless at least once."""
    flow = Flow(options.flow, parallelism=options.parallelism)
    source = flow.source(
        topic(options.events),
        decode=Typed(Example),
        start="committed",
        first_start="earliest",
        stop=options.stop,
        name="events",
    )
    spread = source if options.delivery is None else source.rebalance()
    spread.map(lambda event: event.n).sink(topic(options.read), delivery=options.delivery)
    return flow


class Counts(Operator):
    """Counts the events on a parameter server, and emits how many there were when it read."""

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        await self._client.create_matrix("counts", rows=1, columns=4, consistency=ASP())

    async def process(self, event: Example, out: Output) -> None:
        await self._client.add("counts", row=0, values=np.ones(4))
        await self._client.clock("counts")
        out.emit([event.n, float((await self._client.get("counts", row=0))[event.n % 4])])


def counts(options: Options) -> Flow:
    """Return a flow that counts the events on a parameter server."""
    flow, server = Flow(options.flow, parallelism=options.parallelism), ParameterServer(shards=2)
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    counted = events.rebalance().process(Counts, name="counts", parameter_server=server)
    counted.sink(topic(options.read))
    return flow


def windows(options: Options) -> Flow:
    """Return a flow that counts and sums the events of each window, and pairs each event with those soon after it.

    The number of an event is its time in milliseconds.
    """
    flow = Flow(options.flow, parallelism=options.parallelism, state=state_of(options))
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    timed = events.event_time(lambda event: event.n, unit="ms", check_unit=False, name="timed")
    keyed = timed.key_by(lambda event: event.n % KEYS)
    summed = keyed.window(tumbling(WINDOW_MS / 1000), name="windows").aggregate(
        count="count", sum=("sum", lambda event: event.n)
    )
    summed.map(lambda result: [result.key, result.start, *result.value.values()]).sink(topic(options.read))
    pairs = keyed.interval_join(keyed, lower_s=0.0, upper_s=PAIR_MS / 1000, name="pairs")
    pairs.map(lambda pair: [each.n for each in pair]).sink(topic(options.updates))
    return flow


def table(options: Options) -> Flow:
    """Return a flow that gives each event the value of its key; the changes of the values are in the other topic."""
    flow = Flow(options.flow, parallelism=options.parallelism)
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    changes = flow.source(topic(options.updates), stop=options.stop, name="changes").key_by(
        lambda change: change["key"]
    )
    joined = events.key_by(lambda event: event.n % KEYS).join_table(
        changes, value="value", time="processing", name="joined"
    )
    joined.map(lambda pair: [pair[0].n, pair[1]]).sink(topic(options.read))
    return flow


def history(options: Options) -> Flow:
    """Return a flow that counts the events of each key, and of each window, in a history and then in the topic."""
    flow = Flow(options.flow, parallelism=options.parallelism)
    first, then = (
        flow.source(topic(url), decode=Typed(Example), start=start, stop=stop, name=name).event_time(
            lambda event: event.n, unit="ms", check_unit=False, out_of_orderness_s=0.1, name=f"time of {name}"
        )
        for url, start, stop, name in (
            (options.history, None, "latest", "history"),
            (options.events, dict.fromkeys(range(PARTITIONS), BEFORE), options.stop, "events"),
        )
    )
    keyed = first.then(then).key_by(lambda event: event.n % KEYS)
    counted = keyed.stateful_map(lambda count, event: (count + 1, [event.n % KEYS, count, event.n]), 0, name="counts")
    counted.sink(topic(options.read))
    in_windows = keyed.window(tumbling(WINDOW_MS / 1000), name="windows").aggregate("count")
    in_windows.map(lambda result: [result.key, result.start, result.value]).sink(topic(options.updates))
    return flow


class Table(Operator):
    """Changes one of many weights with each event, and emits all of them with the last of a mini-batch."""

    weights = np.zeros(WEIGHTS)

    def __init__(self, mini_batch: int) -> None:
        self._mini_batch = mini_batch

    def process(self, event: Example, out: Output) -> None:
        self.weights = self.weights.copy()
        self.weights[event.n * 7 % WEIGHTS] += event.x[0]
        if (event.n + 1) % self._mini_batch == 0:
            out.emit(ModelSnapshot(self.weights, records=event.n + 1))

    def snapshot(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def restore(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def changes(options: Options) -> Flow:
    """Return a flow that publishes a large model, of which little changes, as changes."""
    flow = Flow(options.flow)
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    models = events.process(lambda: Table(options.mini_batch), name="table", parallelism=1)
    models.publish_model(topic(options.updates), model=MODEL, changes=True, delivery=options.delivery)
    return flow


def embeddings(options: Options) -> Flow:
    """Return a flow that learns vectors of texts, and publishes them as changes."""
    flow = Flow(options.flow, parallelism=options.parallelism)
    events = flow.source(topic(options.events), decode=Typed(Example), stop=options.stop, name="events")
    rows = events.map(
        lambda event: {"user": f"u{event.n * 7 % 300}", "item": f"i{event.n % 11}", "x": event.x[0], "y": event.y == 1},
        name="rows",
    )
    vectors = Embeddings(kind="fm", factors=4, at_most="1 MB")
    training = train_online(
        rows, label="y", embeddings=vectors, shapes=False, mode=options.mode, mini_batch=options.mini_batch
    )
    training.models.publish_model(topic(options.updates), model=MODEL, changes=True, delivery=options.delivery)
    return flow


def service(options: Options) -> Flow:
    """Return the training of a service: it reads objects as columns, and learns when answers have come.

    It writes its predictions with their labels, and for each event whether it was in columns.
    """
    label = {"event": "answer", "key": "n", "field": "late", "time": "at", "within": "60s"}
    tables = {
        "service": {"name": MODEL},
        "input": {"topic": options.events, "on_error": "fail"},
        "learn": {
            "kind": "classification",
            "label": label,
            "features": SERVED,
            "settings": {"mini_batch": options.mini_batch},
        },
        "publish": {"topic": options.updates, "every": "100ms"},
    }
    settings, flow = read_settings(tables), Flow(options.flow)
    source = topic(options.events)
    events = flow.source(source, decode=decoder_for(settings, source), stop=options.stop, name="events")
    training = ServiceLearning(settings).train(events)
    training.models.publish_model(topic(options.updates), model=MODEL)
    predicted = training.predictions.flat_map(
        lambda rows: np.column_stack([rows["predictions"], rows["targets"]]).tolist(), name="predicted"
    )
    predicted.sink(topic(options.read))
    events.map_batch(
        lambda batch: [[event["n"], event["event"], isinstance(batch, Columns)] for event in batch], name="ways"
    ).sink(topic(f"{options.read}-ways"))
    return flow


def flow_of(options: Options) -> Flow:
    flows = {
        "training": training_flow,
        "sums": running_sums,
        "numbers": numbers,
        "counts": counts,
        "windows": windows,
        "table": table,
        "changes": changes,
        "history": history,
        "embeddings": embeddings,
        "service": service,
    }
    return flows[options.kind](options)


def of_arguments() -> Flow:
    """Return the flow of the arguments in one of several processes, which kills itself at the next place."""
    options = msgspec.json.decode(sys.argv[1], type=Options)
    for *place, marker in options.strikes:
        if not Path(marker).exists():
            importlib.import_module("mortal").strike_at(*place, Path(marker))
            break
    return flow_of(options)


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    store = {} if options.kind == "numbers" else {"store": options.folder}
    given: dict[str, Any] = {"checkpoints": Checkpoints(**store, interval_s=options.interval_s)}
    if options.processes is not None:
        given["changed_steps"] = options.changed_steps
        if options.ray:
            given["on"] = Ray(options.processes, address=options.ray, min_processes=options.min_processes, cpus=2)
        else:
            given["on"] = LocalProcesses(options.processes, flow=f"{__file__}:of_arguments")
    # Ray sends functions of a module by name.
    make_flow = importlib.import_module("crash.training").flow_of if options.ray else flow_of
    statistics = make_flow(options).run(**given)
    print(statistics.state, statistics.checkpoints)


if __name__ == "__main__":
    main()
