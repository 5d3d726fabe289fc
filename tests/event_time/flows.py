"""Flows with event time for the simulator, and for the check of restores."""

from __future__ import annotations

import asyncio
from typing import Any

from event_time.operators import Countdown, NeverLate, WindowCounts, events

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
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
