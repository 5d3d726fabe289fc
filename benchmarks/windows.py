"""Windows and joins by event time: a count by key and minute, and an interval join, compared with bytewax."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Columns, Flow, Operator, tumbling

__all__ = ["DISORDER_MS", "KEYS", "SIZE_S", "interval_join", "pair_count", "stream", "tumbling_count"]

RECORDS: Final = "records/s"
KEYS: Final = 1000
SIZE_S: Final = 60
DISORDER_MS: Final = 100
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Counts = dict[tuple[int, int], int]
"""The number of records by key and window."""


def tumbling_count(session: Session) -> Iterator[Figure]:
    """Ten million records, 1 ms apart and up to 100 ms out of order, are counted by 1,000 keys and minutes."""
    count = session.size(10_000_000, 50_000)
    names = "streamiter, records", "streamiter, columns"
    # A contender has the rate of as many records as it counts in some seconds.
    contenders = {names[0]: _counting(count // 10, _records_in_flow), names[1]: _counting(count, _columns_in_flow)}
    peer = ""
    if importlib.util.find_spec("bytewax") is not None:
        peer = "bytewax, records"
        contenders[peer] = _counting(count // 100, _bytewax)
    series = alternate(contenders, repeat=session.repeat)
    if peer:
        yield series.figure(peer, RECORDS)
    for name, factor in zip(names, (5, 20), strict=True):
        target = Target("ratio", at_least=factor) if peer else None
        yield series.figure(name, RECORDS, compared_with=peer, target=target)


def stream(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the keys and the times of records, in the order of their arrival."""
    random = np.random.default_rng(0)
    return random.integers(0, KEYS, count), np.arange(count) + DISORDER_MS - random.integers(0, DISORDER_MS, count)


def _counting(count: int, work: Callable[[Any, Any, Stopwatch], Counts]) -> Contender:
    keys, times = stream(count)
    places, expected = np.unique(keys + KEYS * (times // (SIZE_S * 1000)), return_counts=True)
    windows = {(place % KEYS, place // KEYS): n for place, n in zip(places.tolist(), expected.tolist(), strict=True)}

    def run() -> Trial:
        watch = Stopwatch()
        counts = work(keys, times, watch)
        assert counts == windows, f"{work.__name__} has counted wrongly"
        return Trial(watch.rates(count, "records"))

    return run


class _Kept(Operator):
    """Keeps all batches, and emits nothing."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def process_batch(self, batch: Any, out: Any) -> None:
        self._batches.append(batch)


def _counted(batches: list[Any]) -> Counts:
    return {(result.key, result.start // (SIZE_S * 1000)): result.value for batch in batches for result in batch}


def _records_in_flow(keys: Any, times: Any, watch: Stopwatch) -> Counts:
    records = list(zip(keys.tolist(), times.tolist(), strict=True))
    batches: list[Any] = []
    flow = Flow("count of records")
    timed = flow.from_items(records).event_time(
        lambda record: record[1], unit="ms", check_unit=False, out_of_orderness_s=DISORDER_MS / 1000
    )
    counts = timed.key_by(lambda record: record[0]).window(tumbling(SIZE_S)).aggregate("count")
    counts.process(lambda: _Kept(batches))
    with watch:
        run_to_end(flow)
    return _counted(batches)


def _columns_in_flow(keys: Any, times: Any, watch: Stopwatch) -> Counts:
    batches: list[Any] = []
    flow = Flow("count of columns")
    timed = flow.from_items(Columns({"key": keys, "at": times})).event_time(
        "at", unit="ms", check_unit=False, out_of_orderness_s=DISORDER_MS / 1000
    )
    counts = timed.key_by_batch(lambda batch: batch["key"]).window(tumbling(SIZE_S)).aggregate("count")
    counts.process(lambda: _Kept(batches))
    with watch:
        run_to_end(flow)
    return _counted(batches)


def _bytewax(keys: Any, times: Any, watch: Stopwatch) -> Counts:
    import bytewax.operators as op
    from bytewax.dataflow import Dataflow
    from bytewax.operators import windowing
    from bytewax.testing import TestingSink, TestingSource, run_main

    records = [
        (str(key), EPOCH + timedelta(milliseconds=time))
        for key, time in zip(keys.tolist(), times.tolist(), strict=True)
    ]
    found: list[tuple[str, tuple[int, int]]] = []
    flow = Dataflow("count")
    source = op.input("records", flow, TestingSource(records, batch_size=1000))
    # Its watermark is not bounded by the disorder alone, but also goes on with the system's clock.
    clock = windowing.EventClock(
        ts_getter=lambda record: record[1], wait_for_system_duration=timedelta(milliseconds=DISORDER_MS)
    )
    windower = windowing.TumblingWindower(length=timedelta(seconds=SIZE_S), align_to=EPOCH)
    counts = windowing.count_window("count", source, clock, windower, key=lambda record: record[0])
    op.output("found", counts.down, TestingSink(found))
    late: list[Any] = []
    op.output("late", counts.late, TestingSink(late))
    with watch:
        run_main(flow)
    windows = {(int(key), window): n for key, (window, n) in found}
    for _, (window, record) in late:  # What it calls late is given by a side output, and counts here.
        place = int(record[0]), window
        windows[place] = windows.get(place, 0) + 1
    return windows


def interval_join(session: Session) -> Iterator[Figure]:
    """A million records of two streams, 1 ms apart, are joined by 1,000 keys where they are at most 2 s apart."""
    count = session.size(1_000_000, 20_000)
    yield alternate({"streamiter": _joining(count)}, repeat=session.repeat).figure("streamiter", RECORDS)


def _joining(count: int) -> Contender:
    keys, times = stream(count)
    expected = pair_count(keys, times)
    records = list(zip(keys.tolist(), times.tolist(), strict=True))

    def run() -> Trial:
        watch = Stopwatch()
        flow = Flow("join")
        batches: list[Any] = []
        left, right = (
            flow.from_items(half)
            .event_time(lambda record: record[1], unit="ms", check_unit=False, out_of_orderness_s=DISORDER_MS / 1000)
            .key_by(lambda record: record[0])
            for half in (records[::2], records[1::2])
        )
        left.interval_join(right, lower_s=-2, upper_s=2).process(lambda: _Kept(batches))
        with watch:
            run_to_end(flow)
        found = sum(map(len, batches))
        assert found == expected, f"expected {expected:,} pairs, given {found:,}"
        return Trial(watch.rates(count, "records"), found)

    return run


def pair_count(keys: Any, times: Any) -> int:
    """Return the number of pairs of an even and an odd record."""
    span = int(times.max()) + 10_000
    left, right = (np.sort(keys[first::2] * span + times[first::2] + 4_000) for first in (0, 1))
    return int((np.searchsorted(right, left + 2000, "right") - np.searchsorted(right, left - 2000, "left")).sum())
