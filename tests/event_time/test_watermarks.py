"""Watermarks, clocks that are set back, records from the future, and silence."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed
from operators.operator_harness import stored
from support.examples import random_examples

from streamiter import Flow, tumbling
from streamiter.errors import ConfigurationError
from streamiter.operators.event_time import WatermarkGenerator
from streamiter.operators.event_timers import StepTimes, checked_time
from streamiter.operators.frontier import Frontier
from streamiter.operators.keyed_state import KeyedStates
from streamiter.testing import VirtualClock
from streamiter.values.helpers.clock import ForwardTime, SystemClock
from streamiter.values.times import MAX_TIME, MIN_TIME

# The cases 16 and 17 of the reference: a@time/partition, and behind it the watermark that follows from it.
CASES = {
    "two partitions": (
        2,
        2,
        "a@10/0 a@5/1 >w=3 a@20/0 a@9/1 >w=7 a@6/1 idle/1 >w=18 a@12/1 a@30/0 a@25/1 >w=23 END >w=MAX",
    ),
    "a new and an ended one": (1, 0, "a@10 >w=10 new/1 a@20 a@12/1 >w=12 end/1 >w=20 END >w=MAX"),
    "none is active": (2, 0, "a@10/0 idle/0 a@5/1 >w=5 idle/1 >w=10 a@7/1 idle/1 a@11/1 >w=11 END >w=MAX"),
    "the order of falling idle": (2, 0, "a@10/0 a@5/1 >w=5 idle/0 idle/1 >w=10"),
    "the other order of falling idle": (2, 0, "a@10/0 a@5/1 >w=5 idle/1 >w=10 idle/0"),
    "an ended one does not count": (2, 0, "a@10/0 a@50/1 >w=10 end/1 idle/0 a@20/0 >w=20"),
    "negative times": (1, 3, "a@-5 >w=-8 a@-9 a@0 >w=-3"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_watermark_follows_the_partitions(name: str) -> None:
    partitions, bound_ms, events = CASES[name]
    generator = WatermarkGenerator(bound_ms)
    for partition in range(partitions):
        generator.add(partition)
    told: list[str] = []
    for event in events.split():
        if event.startswith(">"):
            assert told.pop() == event
            continue
        assert not told, f"a watermark that is not expected before {event}"
        before = generator.parts.value
        _apply(generator, event)
        generator.parts.settle()
        if (now := generator.parts.value) != before:
            told.append(f">w={'MAX' if now == MAX_TIME else now}")
    assert not told


_CHANGES: dict[str, Callable[[WatermarkGenerator, int], None]] = {
    "idle": lambda generator, partition: generator.parts.idle(partition),
    "new": lambda generator, partition: generator.add(partition),
    "end": lambda generator, partition: generator.parts.end(partition, MAX_TIME),
}


def _apply(generator: WatermarkGenerator, event: str) -> None:
    if event == "END":
        for partition in (0, 1):
            generator.parts.end(partition, MAX_TIME)
    elif match := re.fullmatch(r"(idle|new|end)/(\d)", event):
        _CHANGES[match[1]](generator, int(match[2]))
    else:
        time, _, partition = event.removeprefix("a@").partition("/")
        number = int(partition or 0)
        if not generator.parts.is_active(number):
            generator.add(number)
        generator.take(number, np.array([int(time)]))


def streams(random: Random) -> tuple[int, list[tuple[int, list[int]]]]:
    batches = []
    for _ in range(random.randrange(8)):
        spread = random.choice([0, 3, 30])
        times = [random.randint(-spread, spread) + 3 * len(batches) for _ in range(random.randint(1, 9))]
        batches.append((random.randrange(3), times))
    return random.choice([0, 2, 10]), batches


@random_examples(streams)
def test_watermarks_are_as_if_sent_after_every_record(example: tuple[int, list[tuple[int, list[int]]]]) -> None:
    """A record below the running watermark must find it: how batches are cut must make no difference."""
    bound_ms, batches = example
    generator, plain = WatermarkGenerator(bound_ms), dict.fromkeys(range(3), MIN_TIME)
    for partition in plain:
        generator.add(partition)
    running = sent = MIN_TIME
    for number, (partition, times) in enumerate(batches):
        if number == len(batches) // 2:
            generator = restored_as(generator, bound_ms)
        pieces = generator.take(partition, np.array(times))
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == len(times)
        for piece in pieces:
            for time in times[piece.start : piece.stop]:
                assert sent == running or time >= running
                plain[partition] = max(plain[partition], time - bound_ms)
                running = max(running, min(plain.values()))
            if piece.watermark is not None:
                assert piece.watermark == running > sent
                sent = piece.watermark
        assert sent == running == generator.parts.value
    assert restored_as(generator, bound_ms + 5).parts.value == running, "a larger bound takes no watermark back"


def restored_as(generator: WatermarkGenerator, bound_ms: int) -> WatermarkGenerator:
    restored = WatermarkGenerator(bound_ms)
    restored.restore(generator.state())
    for partition in range(3):
        restored.add(partition)
    restored.parts.settle()
    return restored


def test_partitions_keep_their_maxima_when_other_subtasks_read_them() -> None:
    before = [WatermarkGenerator(0), WatermarkGenerator(0)]
    for number, time in enumerate((100, 200)):
        before[number].add(number)
        before[number].take(number, np.array([time]))
    [joined] = WatermarkGenerator.redistribute([each.state() for each in before], 1)
    assert (joined["greatest"], joined["parts"]) == ({0: 100, 1: 200}, 100)
    shared = WatermarkGenerator.redistribute([joined], 3)
    assert [(each["greatest"], each["parts"]) for each in shared] == [({0: 100}, 100), ({1: 200}, 100), ({}, 100)]


def changes(random: Random) -> list[tuple[str, int, int]]:
    return [
        (random.choice(["reach", "reach", "idle", "end"]), random.randrange(3), random.randrange(50)) for _ in range(20)
    ]


@random_examples(changes)
def test_the_watermark_of_a_gate_is_that_of_its_definition(example: list[tuple[str, int, int]]) -> None:
    parts, reached, idle, ended, watermark = (
        Frontier(range(3), MIN_TIME),
        dict.fromkeys(range(3), MIN_TIME),
        set(),
        set(),
        MIN_TIME,
    )
    for what, part, time in example:
        if what == "reach":
            (parts.add if part in ended else parts.reach)(part, time)
            reached[part] = max(time, reached[part]) if part not in ended else time
            idle.discard(part)
            ended.discard(part)
        elif what == "idle":
            parts.idle(part)
            idle |= {part} - ended
        else:
            parts.end(part, MAX_TIME)
            idle.discard(part)
            ended.add(part)
        active = [reached[part] for part in reached if part not in idle | ended]
        asleep = [reached[part] for part in idle]
        least = min(active) if active else max(asleep) if asleep else MAX_TIME
        has_grown = parts.settle()
        assert has_grown is (least > watermark)
        watermark = max(watermark, least)
        assert parts.value == watermark
        assert parts.is_idle is (not active and bool(asleep))


# -- timers ------------------------------------------------------------------------------------------------


NO_KEY = ((), 0)
"""Stands for the key of timers without one, in a step with keys; but a record may have this key, too."""


def operations(random: Random) -> list[tuple[str, int, Any, Any]]:
    kinds = ["set"] * 5 + ["delete", "reach", "reach"]
    return [
        (
            random.choice(kinds),
            random.randrange(40),
            random.choice(["a", "b", None, NO_KEY]),
            random.choice([None, 1, True, [1], [2]]),
        )
        for _ in range(30)
    ]


def step_times(backend: KeyedStates | None) -> StepTimes:
    times = StepTimes(repr)
    if backend is not None:
        backend.clear()
        times.keep_timers_in(lambda: backend, NO_KEY)
    return times


@random_examples(operations, fewest=20)
def test_timers_fire_by_time_and_then_in_the_order_of_setting(
    example: list[tuple[str, int, Any, Any]], backend: KeyedStates | None
) -> None:
    times, expected = step_times(backend), list[tuple[int, Any, Any]]()
    for number, (what, at, key, payload) in enumerate(example):
        times.store()
        if number == 15:
            state = stored(times.snapshot())()
            times = step_times(backend)
            if (restoring := times.restore(state, lambda key: 0)) is not None:
                asyncio.run(waited(restoring))
        same = [timer for timer in expected if repr(timer) == repr((at, key, payload))]
        if what == "set":
            times.set_timer(at, key, payload)
            expected += [] if same else [(at, key, payload)]
        elif what == "delete":
            times.delete_timer(at, key, payload)
            expected = [timer for timer in expected if timer not in same or repr(timer) != repr((at, key, payload))]
        else:
            times.reach(max(times.watermark, at))
            while (timer := times.take_due()) is not None:
                first = min(expected, key=lambda each: each[0])
                assert repr(tuple(timer)) == repr(first)
                expected.remove(first)
            assert all(at > times.watermark for at, _, _ in expected)
        assert len(times) == len(expected)


async def waited(awaitable: Awaitable[None]) -> None:
    await awaitable


def test_at_the_end_a_timer_that_sets_itself_again_ends(backend: KeyedStates | None) -> None:
    times = step_times(backend)
    for at in (5, 20, 50):
        times.set_timer(at, "a", None)
    times.delete_timer(50, "a", None)
    assert (times.is_idle, times.event_time("a")) == (False, None)
    times.reach(MAX_TIME)
    times.set_timer(20, "b", None)
    fired = []
    while (timer := times.take_due()) is not None:
        fired.append(timer.at)
        times.set_timer(timer.at + 10, "a", None)
    assert (fired, times.dropped) == ([5, 15, 20, 20], 3)
    times = StepTimes()
    times.reach(MAX_TIME)
    times.set_timer(0, "a", None)
    assert (times.take_due(), times.dropped) == (None, 1), "nothing was pending"


def test_groups_that_were_further_keep_their_event_time() -> None:
    times = StepTimes()
    times.restore({**times.snapshot(), "watermark": 10, "floors": [(0, 30), (1, 10)]}, {"a": 0, "b": 1}.__getitem__)
    assert [times.event_time(key) for key in ("a", "b", None)] == [30, 10, 10]
    times.reach(20)
    assert [times.event_time(key) for key in ("a", "b")] == [30, 20]
    assert times.has_floors
    times.reach(30)
    assert times.snapshot()["floors"] == []


@pytest.mark.parametrize("time", [True, 1.0, "1", None, 2**62, -(2**62)])
def test_a_time_is_whole_milliseconds(time: object) -> None:
    assert [checked_time("at", each) for each in (np.int32(-5), 2**62 - 1, 1 - 2**62)] == [-5, 2**62 - 1, 1 - 2**62]
    with pytest.raises(ConfigurationError, match=r"^emit\(event_time\): expected whole milliseconds since 1970"):
        checked_time("emit(event_time)", time)


def test_the_clock_of_the_machine_may_be_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record of a known key was dropped as a duplicate, until the clock had caught up."""
    wall_s, monotonic_s = 1_000.0, 5.0
    monkeypatch.setattr("time.time_ns", lambda: int(wall_s * 1e9))
    monkeypatch.setattr("time.monotonic", lambda: monotonic_s)
    clock, told = SystemClock(), []
    for second in range(700):
        wall_s, monotonic_s = 1_000.0 + second - (60 if second >= 10 else 0), 5.0 + second
        told.append(clock.now_ms())
    assert all(0 < later - earlier <= 1_000 for earlier, later in pairwise(told))
    assert (told[9], told[-1]) == (1_009_000, round(wall_s * 1000))
    assert ForwardTime().now_ms(5, 7.0) == 5


async def test_a_record_far_in_the_future_is_named_when_others_are_late(caplog: pytest.LogCaptureFixture) -> None:
    """One wrong clock of a sender made every later record late, and no line said so."""
    clock, given, flow = VirtualClock(), Fed(), Flow("f")
    timed = flow.from_source(lambda: given).event_time(lambda at: at, unit="ms", check_unit=False, name="times")
    timed.key_by(lambda at: 0).window(tumbling(1)).aggregate("count").collect()
    job = await flow.start(clock=clock)
    now = clock.now_ms()
    for at in (now, now - 5_000, now + 3 * 86_400_000, now + 1_000, now + 2_000):
        given.give(at)
        await clock.advance(0.0)
    await job.stop("abort")
    [message] = [each.getMessage() for each in caplog.records if "ahead of the clock" in each.getMessage()]
    assert message.startswith("step 'times': records are late, because one has the time ")
    assert "3.0 days ahead of the clock; refuse such times with event_time(…, max_ahead_s=3600)" in message


async def test_silence_is_no_standstill_of_event_time(caplog: pytest.LogCaptureFixture) -> None:
    """An idle source was said to stand still although records arrive, and none did."""
    clock, given, flow = VirtualClock(), Fed(), Flow("f")
    flow.from_source(lambda: given).event_time(lambda at: at, unit="ms", check_unit=False, name="times").collect()
    job = await flow.start(clock=clock, stall_after_s=4)
    given.give(1)
    for _ in range(60):
        await clock.advance(1.0)
    await job.stop("drain")
    assert not [each for each in caplog.records if "although records arrive" in each.getMessage()]
