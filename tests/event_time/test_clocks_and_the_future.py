"""Clocks that are set back, machines whose clock is behind, records from the future, and silence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from flow.small_flows import Fed

from streamiter import Flow, tumbling
from streamiter.testing import VirtualClock
from streamiter.values.helpers.clock import ForwardTime, SystemClock


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
