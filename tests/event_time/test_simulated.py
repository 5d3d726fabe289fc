"""Event time, windows and joins under random cuts, orders, sizes of channels and crashes, in one to three processes.

The flows fail if a watermark overtakes a record, and their committed results must equal those of an undisturbed run.
"""

import asyncio
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from event_time.operators import Countdown, NeverLate, WindowCounts, events, window_counts
from event_time.test_against_models import windows_of
from support.soak import ForEachSeed

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    RocksState,
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
from streamiter.engine.inbox.port_progress import PortProgress
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators.event_timers import StepTimes
from streamiter.operators.holding import MiniBatch
from streamiter.testing import Faults, Simulation, SimulationFailed, simulate
from streamiter.testing.simulation.simulate import Undisturbed
from streamiter.values.records import EventTimeWatermark

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


MakeFlow = Callable[[Simulation], Flow]

ALL_FLOWS = [*TIMED_FLOWS, *FLOWS]
OF_ONE_SUBTASK = (timers_of_one_partition, late_windows)
IN_A_LOOP = (in_a_loop, loop_with_records_set_aside)
"""Their steps are those of other flows; only their inboxes differ, which keep nothing on disk."""


@functools.cache
def undisturbed(flow: MakeFlow) -> Undisturbed:
    return simulate(flow, 0, faults=Faults.none()).undisturbed


@pytest.mark.parametrize("flow", ALL_FLOWS, ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("processes", [1, 3])
def test_results_depend_on_no_cut_order_or_crash(flow: MakeFlow, processes: int) -> None:
    if processes > 1 and flow in OF_ONE_SUBTASK:
        pytest.skip("all of its steps have one subtask")
    for seed in range(2 if processes == 1 and flow in TIMED_FLOWS else 1):
        simulate(flow, seed, processes=processes, undisturbed=undisturbed(flow))


@pytest.mark.soak
@pytest.mark.parametrize("flow", ALL_FLOWS, ids=lambda flow: flow.__name__)
def test_soak_of_event_time(flow: MakeFlow, for_each_soak_seed: ForEachSeed) -> None:
    for_each_soak_seed(lambda seed: simulate(flow, seed, processes=1 + seed % 3, undisturbed=undisturbed(flow)))


def ignore_what_is_set_aside(patch: pytest.MonkeyPatch) -> None:
    bring = PortProgress.bring
    patch.setattr(
        PortProgress,
        "bring",
        lambda progress, port, mark: (
            progress._act(port, mark) if isinstance(mark, EventTimeWatermark) else bring(progress, port, mark)
        ),
    )


def hold_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MiniBatch, "on_event_time_watermark", lambda step, watermark, out: watermark)


def forget_timers(patch: pytest.MonkeyPatch) -> None:
    snapshot = StepTimes.snapshot
    patch.setattr(StepTimes, "snapshot", lambda times: {**snapshot(times), "keyed timers": None})


@pytest.mark.parametrize(
    ("flow", "plant"),
    [
        (loop_with_records_set_aside, ignore_what_is_set_aside),
        (windows_over_partitions, hold_nothing_back),
        (timers_of_one_partition, forget_timers),
    ],
)
def test_a_planted_bug_is_found(
    flow: MakeFlow, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flows in which a watermark has nothing to overtake, or no timer waits at a crash, would find nothing."""
    expected = undisturbed(flow)
    plant(monkeypatch)
    assert any(fails(flow, seed, expected) for seed in range(10))


def fails(flow: MakeFlow, seed: int, expected: Undisturbed) -> bool:
    try:
        simulate(flow, seed, undisturbed=expected)
    except SimulationFailed:
        return True
    return False


def test_the_undisturbed_results_are_those_of_a_plain_loop() -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(windows_over_partitions).outputs["counts"]]
    assert sorted(found) == window_counts(events(90))


@pytest.mark.filterwarnings("ignore:unclosed file")  # A simulated crash leaves the lock of its folder open.
@pytest.mark.parametrize("flow", [flow for flow in ALL_FLOWS if flow not in IN_A_LOOP], ids=lambda flow: flow.__name__)
def test_results_with_states_on_disk_are_those_in_memory(flow: MakeFlow, tmp_path: Path) -> None:
    def on_disk(simulation: Simulation) -> Flow:
        made = flow(simulation)
        made.state = RocksState(tmp_path, memory_bytes=16 << 20)
        return made

    simulate(on_disk, 1, undisturbed=undisturbed(flow))
    gc.collect()


@pytest.mark.parametrize("name", WINDOWS)
def test_the_undisturbed_windows_are_those_of_a_model(name: str) -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(windows).outputs[name]]
    records = [("x", event["user"], event["at"], event["id"]) for event in EVENTS]
    expected = {
        interval: [record[3] for record in sorted(records, key=lambda record: (record[2], record[3]))]
        for interval, records in windows_of(WINDOWS[name], records).items()  # type: ignore[arg-type]
    }
    assert {(key, start, end): sorted(value["ids"]) for key, start, end, value, *_ in found} == {
        interval: sorted(ids) for interval, ids in expected.items()
    }
    assert len(found) == len(expected)


def test_the_undisturbed_joins_are_those_of_a_model() -> None:
    found = {
        name: sorted(map(orjson.loads, (record.value or b"" for record in records)), key=repr)
        for name, records in undisturbed(joins).outputs.items()
    }
    near = [
        (view, click)
        for view in EVENTS
        for click in CLICKS
        if view["user"] == click["user"] and view["at"] - 30 <= click["at"] <= view["at"] + 50
    ]
    paired = {view["id"] for view, _ in near}, {click["id"] for _, click in near}
    interval = [[view["id"], click["id"]] for view, click in near]
    interval += [[view["id"], None] for view in EVENTS if view["id"] not in paired[0]]
    interval += [[None, click["id"]] for click in CLICKS if click["id"] not in paired[1]]
    assert found["interval"] == sorted(interval, key=repr)
    before = {
        view["id"]: [click for click in CLICKS if click["user"] == view["user"] and click["at"] <= view["at"]]
        for view in EVENTS
    }
    as_of = [[view, clicks[-1]["id"] if clicks else None] for view, clicks in before.items()]
    assert found["as of"] == sorted(as_of, key=repr)
    features = [
        [view["id"], sum(view["at"] - 200 <= click["at"] < view["at"] for click in before[view["id"]])]
        for view in EVENTS
    ]
    assert found["features"] == sorted(features, key=repr)
    passed: list[Any] = []
    for click in CLICKS:
        same = [one for one in passed if (one["user"], one["id"] % 2) == (click["user"], click["id"] % 2)]
        passed += [] if any(abs(one["at"] - click["at"]) < 300 for one in same) else [click]
    assert found["once"] == sorted((click["id"] for click in passed), key=repr)


def test_the_undisturbed_records_have_the_last_values_of_the_table() -> None:
    found = [orjson.loads(record.value or b"") for record in undisturbed(endless_tables).outputs["joined"]]
    assert sorted(found) == [[n, [48 + n % 12, f"fruit {n % 3}"]] for n in range(80)]
