"""Flows with event time, windows and joins, for jobs, the simulator and the check of restores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from event_time.operators import Countdown, NeverLate, WindowCounts, events

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    WindowResult,
    connect,
    epochs_every,
    hopping,
    iterate_unbounded_streams,
    quantile,
    session,
    sliding,
    tumbling,
)
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.testing import Simulation

COUNT = 90


async def ask(event: Any) -> int:
    for _ in range(event["id"] % 3):
        await asyncio.sleep(0)
    return int(event["id"])


def user_of(event: Any) -> int:
    return int(event["user"])


def timed(simulation: Simulation, flow: Flow, **options: Any) -> Stream:
    """Return the stream of a topic with three partitions, in which records are at most 40 ms out of order."""
    given = events(COUNT)
    source = flow.source(
        simulation.input("events", given, partitions=3, over_s=0.5),
        stop=dict.fromkeys(range(3), COUNT // 3),
        name="events",
        **options,
    )
    return source.map(lambda event: event).event_time(
        "at", unit="ms", out_of_orderness_s=0.04, check_unit=False, name="times"
    )


def windows_over_partitions(simulation: Simulation) -> Flow:
    """Return a flow with windows by timers, behind everything that watermarks must not overtake records in."""
    flow = Flow("windows", parallelism=2)
    spread = timed(simulation, flow).rebalance().process(NeverLate, parallelism=3, name="rebalanced")
    asked = spread.map_async(ask, concurrency=5, ordered=False, name="asked").process(NeverLate, name="answers")
    asked.sink(simulation.output("answers", order="any"), parallelism=1)
    kept = spread.batch(4, name="fours").process(NeverLate, name="batches").flat_map(lambda batch: batch)
    kept.map(lambda event: event["id"]).sink(simulation.output("ids", order="any"), parallelism=1)
    counts = spread.key_by(user_of).process(WindowCounts, name="counts")
    counts.sink(simulation.output("counts", order="any"), parallelism=1)
    return flow


def timers_of_one_partition(simulation: Simulation) -> Flow:
    """Return a flow whose whole output has a fixed order: one partition, and timers with and without keys."""
    flow = Flow("timers")
    # Timers are behind the timestamps of their records: otherwise their order would depend on how batches are cut.
    given = [
        {"key": n % 3, "at": (at := n * 10 - n % 4 * 3), "timer": at + 1 + n % 5 * 20, "again": n % 2 * 35}
        for n in range(40)
    ]
    source = flow.source(simulation.input("given", given, over_s=0.5), stop={0: 40}, name="given")
    stream = source.event_time("at", unit="ms", check_unit=False, out_of_orderness_s=0.009, name="times")
    stream.key_by(lambda record: record["key"]).process(Countdown, name="keyed").sink(simulation.output("keyed"))
    stream.process(Countdown, name="plain").sink(simulation.output("plain"))
    return flow


class Merged(NeverLate):
    """Merges data in the order of epochs with a model, and is never late."""

    epochs_in_order = True
    process_model = NeverLate.process
    process_data = NeverLate.process


def loop_with_records_set_aside(simulation: Simulation) -> Flow:
    """Return a flow with a stale loop, whose inboxes set records of later epochs aside."""
    flow = Flow("loop", parallelism=2)
    data = epochs_every(timed(simulation, flow), records=7, name="sevens")
    initial = flow.from_items([0], name="initial").filter(lambda n: False)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
        merged = connect(model=variables[0].broadcast(), data=data[0].rebalance()).process(Merged, name="merged")
        counts = merged.key_by(user_of).process(WindowCounts, name="counts")
        return IterationBodyResult([counts.filter(lambda row: False, name="nothing")], [counts])

    [counts] = iterate_unbounded_streams([initial], [data], body, IterationConfig(max_epochs_ahead=1))
    counts.sink(simulation.output("counts", order="any"), parallelism=1)
    return flow


FLOWS = [windows_over_partitions, timers_of_one_partition, loop_with_records_set_aside]


OTHERS = 40
CLICKS = [{"user": n % 5, "at": n * 23, "id": n} for n in range(OTHERS)]


def clicks_of(simulation: Simulation, flow: Flow) -> Stream:
    """Return a second stream of the same users, one partition, in order."""
    source = flow.source(simulation.input("clicks", CLICKS, over_s=0.3), stop={0: OTHERS}, name="clicks")
    return source.event_time("at", unit="ms", check_unit=False, name="times of clicks")


def plain(result: WindowResult) -> list[Any]:
    return [result.key, result.start, result.end, result.value, result.revision, result.is_retraction]


WINDOWS = {"hopping": hopping(0.2, 0.1), "sessions": session(0.1), "sliding": sliding(0.15)}


def windows(simulation: Simulation) -> Flow:
    """Return a flow with all kinds of windows, over three partitions, and no late records."""
    flow = Flow("all windows", parallelism=2)
    keyed = timed(simulation, flow).key_by(user_of)
    for name, window in WINDOWS.items():
        results = keyed.window(window, name=name).aggregate(n="count", ids=("collect", "id"), mid=(quantile(0.5), "at"))
        results.map(plain).sink(simulation.output(name, order="any"), parallelism=1)
    return flow


def late_windows(simulation: Simulation) -> Flow:
    """Return a flow of one partition whose windows have late records: its whole output has a fixed order."""
    flow = Flow("late windows")
    given = [{"user": n % 2, "at": n * 10 - n * 37 % 120, "id": n} for n in range(60)]
    source = flow.source(simulation.input("given", given, over_s=0.5), stop={0: 60}, name="given")
    keyed = source.event_time("at", unit="ms", check_unit=False, name="times").key_by(user_of)
    for name, window in {"tumbling": tumbling(0.1), **WINDOWS}.items():
        results = keyed.window(window, allowed_lateness_s=0.05, results="retracting", name=name).aggregate(
            ("sum", "id")
        )
        results.map(plain).sink(simulation.output(name))
    return flow


def joins(simulation: Simulation) -> Flow:
    """Return a flow with all joins of two streams, and no late records."""
    flow = Flow("all joins", parallelism=2)
    views, clicks = timed(simulation, flow).key_by(user_of), clicks_of(simulation, flow).key_by(user_of)
    for name, joined in join_steps(views, clicks).items():
        joined.sink(simulation.output(name, order="any"), parallelism=1)
    return flow


def join_steps(views: KeyedStream, clicks: KeyedStream) -> dict[str, Stream]:
    # By unique keys: which of two records of one key is paired depends on the order of arrival.
    view, click = views.key_by(id_of), clicks.key_by(id_of)
    pairs = {
        "one": view.interval_join(click, lower_s=-0.03, upper_s=0.05, how="full", one_to_one=True, name="one"),
        "interval": views.interval_join(clicks, lower_s=-0.03, upper_s=0.05, how="full", name="interval"),
        "window": views.window_join(clicks, tumbling(0.1), how="left", name="window"),
        "as of": views.join_table(clicks, value="id", name="as of"),
    }
    ids = {name: stream.map(lambda pair: [id_of(side) for side in pair]) for name, stream in pairs.items()}
    features = views.as_of_window(clicks, 0.2, name="features").aggregate("count")
    once = clicks.deduplicate(lambda click: click["id"] % 2, within_s=0.3, name="once")
    return {**ids, "features": features.map(lambda pair: [pair[0]["id"], pair[1]]), "once": once.map(id_of)}


def id_of(side: Any) -> Any:
    return side["id"] if isinstance(side, dict) else side


def in_a_loop(simulation: Simulation) -> Flow:
    """Return a flow with windows and a join in a loop, whose inboxes set records of later epochs aside."""
    flow = Flow("windows in a loop", parallelism=2)
    data = epochs_every(timed(simulation, flow), records=7, name="sevens")
    initial = flow.from_items([0], name="initial").filter(lambda n: False)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Any]:
        keyed = data[0].key_by(user_of)
        counts = keyed.window(tumbling(0.1), name="counts").aggregate("count").map(plain)
        pairs = keyed.interval_join(keyed, lower_s=0, upper_s=0.05, name="pairs")
        ids = pairs.map(lambda pair: [pair[0]["id"], pair[1]["id"]])
        nothing = counts.union(variables[0]).filter(lambda row: False, name="nothing")
        return IterationBodyResult([nothing], [counts, ids])

    counts, ids = iterate_unbounded_streams([initial], [data], body, IterationConfig(max_epochs_ahead=1))
    counts.sink(simulation.output("counts", order="any"), parallelism=1)
    ids.sink(simulation.output("ids", order="any"), parallelism=1)
    return flow


def endless_tables(simulation: Simulation) -> Flow:
    """Return a flow with two endless tables, of which one waits for the other; no stream has event time."""
    flow = Flow("endless tables", parallelism=2)
    prices = [{"id": n % 12, "price": n, "fruit": n % 3} for n in range(60)]
    fruits = simulation.input("fruits", [{"id": n, "fruit": f"fruit {n}"} for n in range(3)], partitions=3)
    table = flow.source(simulation.input("prices", prices, partitions=2, key=lambda each: str(each["id"])))
    names = flow.source(fruits).key_by(lambda fruit: fruit["id"])
    named = table.key_by(lambda price: price["fruit"]).join_table(names, value="fruit", time="processing", name="named")
    views = flow.source(simulation.input("views", range(80), partitions=2, over_s=2.0))
    joined = views.key_by(lambda n: n % 12).join_table(
        named.map(lambda pair: {**pair[0], "name": pair[1]}).key_by(lambda price: price["id"]),
        value=lambda price: [price["price"], price["name"]],
        time="processing",
        name="joined",
    )
    joined.sink(simulation.output("joined", order="any"), parallelism=1)
    return flow


TIMED_FLOWS: list[Callable[[Simulation], Flow]] = [windows, late_windows, joins, in_a_loop, endless_tables]
EVENTS = events(COUNT)
