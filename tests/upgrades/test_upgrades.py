"""A flow that changes between two runs keeps its state, or does not start: each row of the page on upgrades."""

import re
from collections.abc import Sequence
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import orjson
import pytest
from processes.linked_jobs import joined_jobs
from runtime.checkpointed_sums import settings
from support.waiting import until
from upgrades.changed_flows import FIRST, REST, Build, Change, Inputs, windows
from upgrades.changes_of_learners import CHANGES

import streamiter.iteration
import streamiter.learn
import streamiter.networks
from streamiter import Flow, KeyedStream, RocksState, Stream, tumbling
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.store import CheckpointStore, MemoryStore
from streamiter.errors import CheckpointError, JobFailed
from streamiter.flow.keyed_joins import KeyedJoins
from streamiter.operators.source import Collected
from streamiter.topics import MemoryBroker, OutgoingBatch

PAGE = (Path(__file__).parents[2] / "docs" / "upgrades-of-a-flow.md").read_text(encoding="utf-8")


async def write(broker: MemoryBroker, records: Sequence[dict[str, Any]]) -> None:
    for name in ("left", "right"):
        writer = await broker.topic(name).open_writer()
        await writer.write(OutgoingBatch([orjson.dumps(record) for record in records]))
        await writer.close()


async def broker_with(*parts: Sequence[dict[str, Any]]) -> MemoryBroker:
    broker = MemoryBroker()
    for name in ("left", "right"):
        await broker.topic(name).create()
    for records in parts:
        await write(broker, records)
    return broker


def flow_of(build: Build, broker: MemoryBroker, *, ends: bool, state: Any = None) -> tuple[Flow, Collected[Any]]:
    flow = Flow("upgraded", state=state)
    return flow, build(Inputs(flow, broker, ends=ends)).collect(name="results")


async def finished(build: Build, broker: MemoryBroker, state: Any = None, **options: Any) -> list[Any]:
    """Run the flow to the end of its topics; return its results."""
    flow, results = flow_of(build, broker, ends=True, state=state)
    job = await flow.start(**options)
    await job.wait()
    return results.items


async def suspended(
    build: Build, broker: MemoryBroker, store: Path | CheckpointStore, state: Any = None, records: int = len(FIRST)
) -> None:
    """Run the flow until it has handled the first records, and suspend it."""
    flow, _ = flow_of(build, broker, ends=False, state=state)
    job = await flow.start(checkpoints=settings(store))
    sources = {"left", "right", "step"} & {step.name for step in flow.steps if step.source is not None}
    await until(lambda: all(job.statistics().step(name).records_in >= records for name in sources))
    await job.stop("suspend")


def in_order(results: Any) -> Any:
    return sorted(results, key=repr) if isinstance(results, list) else results


def named(change: Change) -> str:
    return ": ".join(change.row)


@pytest.mark.parametrize("change", CHANGES, ids=named)
async def test_a_change_has_the_effect_that_the_page_says(change: Change) -> None:
    """Counts became sums, a window of 20 s had the count of 10 s, and other flows crashed with an IndexError."""
    broker, store = await broker_with(FIRST), MemoryStore()
    await suspended(change.before, broker, store)
    await write(broker, REST)
    if change.becomes == "refuse":
        changed, _ = flow_of(change.after, broker, ends=True)
        with pytest.raises((CheckpointError, JobFailed), match=change.says) as refused:
            await changed.start(checkpoints=settings(store.another()))
        assert f" '{change.step}" in str(refused.value)
        remedy = {"changed_steps": sorted([change.step, *change.also])} if change.has_remedy else {"restore": None}
        name, value = next(iter(remedy.items()))
        assert f"{name}={value}" in str(refused.value)
        await finished(change.after, broker, checkpoints=settings(store.another()), **remedy)
        return
    results = await finished(change.after, broker, checkpoints=settings(store.another()))
    of_results = change.results or (lambda each: each)
    expected = change.expected
    if expected is None:
        expected = of_results(await finished(change.after, await broker_with(FIRST, REST)))
    assert in_order(of_results(results)) == in_order(expected)


@pytest.mark.parametrize("stays_on_disk", [True, False])
async def test_the_states_of_keys_may_be_elsewhere(stays_on_disk: bool, tmp_path: Path) -> None:
    """A job that got a disk for its states began with empty windows."""
    pytest.importorskip("rocksdict")
    disk = RocksState(tmp_path / "state", memory_bytes=16 << 20)
    broker = await broker_with(FIRST)
    await suspended(windows(None, n="count", s=("sum", "v")), broker, tmp_path / "store", disk)
    await write(broker, REST)
    more = windows(None, s=("sum", "v"), m=("max", "v"), n="count")
    results = await finished(more, broker, disk if stays_on_disk else None, checkpoints=settings(tmp_path / "store"))
    expected = [{"s": 7, "m": None, "n": 3}, {"s": 8, "m": 8, "n": 1}, {"s": 16, "m": 16, "n": 1}]
    assert [result.value for result in results] == expected


async def test_aggregates_are_added_again_and_again(tmp_path: Path) -> None:
    """The second new aggregate got the accumulators of the first one."""
    many = [{"t": 5, "k": 1, "v": 1}] * 40
    broker = await broker_with(many)
    long = tumbling(1000)
    await suspended(windows(long, n="count"), broker, tmp_path, records=40)
    await write(broker, many)
    await suspended(windows(long, s=("sum", "v"), n="count"), broker, tmp_path, records=40)
    await write(broker, [*many, {"t": 5000, "k": 1, "v": 2}, {"t": 5001, "k": 1, "v": 3}])
    last = windows(long, m=("max", "v"), n="count", s=("sum", "v"))
    results = await finished(last, broker, checkpoints=settings(tmp_path))
    assert [result.value for result in results] == [{"m": None, "n": 120, "s": None}, {"m": 3, "n": 2, "s": 5}]


@pytest.mark.parametrize("is_confirmed", [False, True])
async def test_all_processes_take_the_state_of_a_changed_step(is_confirmed: bool, tmp_path: Path) -> None:
    """In the other processes the aggregates had the order of the new flow, and those of a dropped state were kept."""
    two = {"parallelism": 2}
    keys = [{"t": 1, "k": key, "v": 5} for key in range(8)]
    broker = await broker_with(keys)
    before = windows(None, n="count", s=("sum", "v"), options=two)
    await in_two_processes(before, broker, tmp_path, handles=8)
    await write(broker, [*keys, {"t": 90, "k": 0, "v": 5}])
    size_s = 30 if is_confirmed else 10
    after = windows(tumbling(size_s), s=("sum", "v"), n="count", options=two)
    options = {"changed_steps": frozenset(["step"])} if is_confirmed else {}
    results = await in_two_processes(after, broker, tmp_path, **options)
    one = {"s": 5, "n": 1} if is_confirmed else {"s": 10, "n": 2}
    assert [value for start, value in results if start == 0] == [one] * 8


async def in_two_processes(
    build: Build, broker: MemoryBroker, folder: Path, handles: int = 0, **options: Any
) -> list[Any]:
    """Suspend the flow when its windows have handled so many records, or run it to its end; return its results."""
    values: Build = lambda inputs: build(inputs).map(lambda result: (result.start, result.value))  # noqa: E731
    flows = [flow_of(values, broker, ends=not handles) for _ in range(2)]
    joined = joined_jobs([flow for flow, _ in flows], JobOptions(checkpoints=settings(folder), **options))
    await joined.start()
    if handles:
        await until(lambda: sum(job.statistics().step("step").records_in for job in joined.jobs) >= handles)
        await joined.jobs[0].stop("suspend")
    await joined.wait()
    return flows[0][1].items


def test_each_row_of_the_page_is_tested() -> None:
    """The page promised a state that the next run refused."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (keep|drop|refuse)", PAGE, re.MULTILINE)
    tested = {change.row: change.becomes for change in CHANGES}
    tested["any, with keys", "`state=`: in memory or on disk"] = "keep"
    assert {(step, change): becomes for step, change, becomes in rows} == tested


def test_the_page_has_each_step() -> None:
    """A new kind of step had state, and nothing was said about its changes."""
    methods = {
        name for kind in (Stream, KeyedJoins, KeyedStream) for name, each in vars(kind).items() if isfunction(each)
    }
    modules = (streamiter, streamiter.iteration, streamiter.learn, streamiter.networks)
    functions = {
        name
        for module in modules
        for name in module.__all__
        if isfunction(each := getattr(module, name)) and re.search(r"Stream\b|\bFlow\b", str(signature(each)))
    }
    steps = {name for name in methods | functions if not name.startswith("_")} - {
        "edges",
        "partitioned",
        "record_key",
        "tolerant",
    }
    assert {name for name in steps if f"`{name}`" not in PAGE} == set()
