"""Records of several partitions in one order, whatever was read first, and wherever batches were cut."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from iteration.iteration_support import cut_items, run
from support.examples import random_examples

from streamiter import Flow, Stream
from streamiter.engine.graph.graph import SINGLE_INPUT
from streamiter.flow.building import add_next_step
from streamiter.operators.event_time import WatermarkGenerator
from streamiter.operators.timed.in_order import InOrder, RecordOrder, SpansInOrder
from streamiter.values.records import BEFORE, KNOWN, REACHED, TimedBatch
from streamiter.values.times import MAX_TIME, MIN_TIME


class Parts(NamedTuple):
    """The timestamps of each partition, in the order of arrival, and the bound of disorder."""

    times: list[list[int]]
    bound_ms: int
    seed: int


def some_parts(draw: random.Random) -> Parts:
    bound = draw.choice([0, 0, 5])
    times = []
    for _ in range(draw.randint(1, 3)):
        at, own = 0, []
        for _ in range(draw.randint(1, 12)):
            at += draw.randint(0, 4)
            own.append(at - draw.randint(0, bound))
        times.append(own)
    return Parts(times, bound, draw.randrange(10**6))


def read(parts: Parts, rows: Callable[[random.Random], int]) -> list[tuple[str, int]]:
    """Read the partitions in any turn, in batches of this many rows; return the records with the watermarks before."""
    draw, generator, order = random.Random(parts.seed), WatermarkGenerator(parts.bound_ms), RecordOrder()
    waiting = dict(enumerate(parts.times))
    for part in waiting:
        generator.add(part)
    found: list[tuple[str, int]] = []

    def take(released: TimedBatch | None) -> None:
        if released is not None:
            assert released.order is not None
            found.extend(zip(released, released.order[:, BEFORE].tolist(), strict=True))

    done = dict.fromkeys(waiting, 0)
    while waiting:
        part = draw.choice(sorted(waiting))
        times, waiting[part] = np.array(waiting[part][: (n := rows(draw))], np.int64), waiting[part][n:]
        records = [f"{part}-{done[part] + number}" for number in range(len(times))]
        done[part] += len(times)
        batch = TimedBatch(records, times, generator.order(part, times, part))
        for piece in generator.take(part, times):
            order.add(batch[piece.start : piece.stop])
            take(order.release(generator.parts.value))
        if not waiting[part]:
            del waiting[part]
            generator.parts.end(part, MAX_TIME)
            generator.parts.settle()
            take(order.release(generator.parts.value))
    take(order.release(MAX_TIME))
    assert order.held == 0
    return found


@random_examples(some_parts)
def test_the_order_is_the_same_for_any_cut_and_any_turn(parts: Parts) -> None:
    """What was read first, and where batches were cut, decided which label was learned before which prediction."""
    expected = [
        (max(running) - parts.bound_ms, part, number)
        for part, times in enumerate(parts.times)
        for number in range(len(times))
        for running in [times[: number + 1]]
    ]
    reached, before = MIN_TIME, []
    for greatest, _, _ in sorted(expected):
        before.append(reached)
        reached = max(reached, greatest)
    names = [f"{part}-{number}" for _, part, number in sorted(expected)]
    for seed in range(3):
        again = parts._replace(seed=parts.seed + seed)
        for rows in (lambda draw: 1, lambda draw: draw.randint(1, 5), lambda draw: 100):
            assert read(again, rows) == list(zip(names, before, strict=True))


def test_records_whose_order_is_not_told_are_sorted_by_their_timestamps() -> None:
    order = RecordOrder()
    order.add(TimedBatch(["c", "a"], np.array([7, 3])))
    order.add(TimedBatch(["b"], np.array([5])))
    released = order.release(6)
    assert released is not None
    assert (list(released), order.held) == (["a", "b"], 1)


def test_a_part_that_is_far_behind_is_not_waited_for() -> None:
    """A partition that brought nothing for hours filled the memory with the records of the others."""
    order = RecordOrder()
    generator = WatermarkGenerator(0)
    for part in (0, 1):
        times = np.arange(10)
        order.add(TimedBatch([f"{part}-{n}" for n in times], times, generator.order(part, times, part)))
    assert order.release(0) is None
    early = order.release_too_many(10)
    assert early is not None
    assert (len(early), order.held, order.unsorted) == (10, 10, 10)


def in_order(stream: Stream) -> Stream:
    step = add_next_step({SINGLE_INPUT: stream}, "in order", InOrder, {"parallelism": 1}, order="needs")
    return Stream(stream.flow, step)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("step", ["none", "records", "batches", "keys"])
def test_steps_channels_and_processes_keep_the_order(step: str, processes: int) -> None:
    """A step between event time and a training lost which record came first."""
    draw = random.Random(1)
    sides: list[list[dict[str, Any]]] = [[], []]
    for n in range(60):
        sides[n % 2].append({"id": n, "at": 10 * n + draw.randrange(8)})
    results = []
    for seed in range(3):
        flow = Flow("f", parallelism=2)
        parts = [
            cut_items(flow, side, seed=seed + place).event_time(
                "at", unit="ms", check_unit=False, out_of_orderness_s=0.008, name=f"times {place}"
            )
            for place, side in enumerate(sides)
        ]
        stream: Stream = parts[0].union(parts[1])
        if step == "records":
            stream = stream.map(lambda event: event | {"seen": True}).filter(lambda event: event["id"] != 7)
            stream = stream.flat_map(lambda event: [event])
        elif step == "batches":
            stream = stream.map_batch(lambda batch: batch).filter_batch(lambda batch: [e["id"] != 7 for e in batch])
        elif step == "keys":
            stream = stream.key_by(lambda event: event["id"] % 3).stateful_map(lambda s, e: (s, e), 0, parallelism=1)
        collected = in_order(stream).collect()
        run(flow, seed=seed, processes=processes)
        results.append([(before, event["id"]) for before, _, event in collected.items])
    assert results == [results[0]] * 3
    assert len(results[0]) == (60 if step in ("none", "keys") else 59)


def test_pairs_that_wait_to_be_known_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A join with long waits filled the memory: each pair waited until the end of its wait, however many they were."""
    operator = SpansInOrder(one_way=True, held_max=2)
    context: Any = SimpleNamespace(name="in order", event_time=0, event_time_is_idle=False)
    operator.open(context)
    emitted: list[Any] = []
    out: Any = SimpleNamespace(emit=lambda record, event_time: emitted.append(record))
    # At 1, 2, 3 and 4, known at 104, 103, 102 and 101.
    order = np.array([[at, MIN_TIME, 0, at, 105 - at] for at in range(1, 5)])
    order[:, REACHED], order[:, KNOWN] = range(1, 5), range(104, 100, -1)
    context.event_time = 50
    operator.process_batch(TimedBatch(list("abcd"), np.arange(1, 5), order), out)
    operator.on_event_time_watermark(50, out)
    assert operator.kept == 2
    assert [(record, is_known) for _, _, record, _, is_known in emitted] == [
        ("a", False),
        ("b", False),
        ("c", False),
        ("c", True),
        ("d", False),
        ("d", True),
    ]
    [warning] = caplog.records
    assert "at most 2 pairs of the join to wait" in warning.getMessage()
    operator.on_event_time_watermark(MAX_TIME, out)
    assert [record for _, _, record, _, _ in emitted[6:]] == ["b", "a"]
