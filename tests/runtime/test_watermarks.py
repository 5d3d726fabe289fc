"""The watermark of an operator: the minimum over its channels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter.errors import InternalError
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS, WatermarkTracker

STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3) | st.none()), max_size=40)


@given(steps=STEPS)
def test_it_is_the_least_of_the_unfinished_channels_and_never_goes_back(
    steps: list[tuple[int, int | None]],
) -> None:
    """Against the definition: one too early is a wrong result, one too late a loop that stands still."""
    tracker = WatermarkTracker(4)
    watermarks: dict[int, int] = dict.fromkeys(range(4), BEFORE_ALL_EPOCHS)
    expected = highest = BEFORE_ALL_EPOCHS
    for channel, growth in steps:
        if channel not in watermarks:
            continue
        if growth is None:
            del watermarks[channel]
            moved = tracker.finish(channel)
        else:
            watermarks[channel] += growth
            moved = tracker.advance(channel, watermarks[channel])
        highest = max([highest, *watermarks.values()])
        least = min(watermarks.values(), default=highest)
        assert moved == (least if least > expected else None)
        expected = max(expected, least)
        assert tracker.watermark == expected
        restored = WatermarkTracker(4)
        restored.restore(tracker.snapshot())
        assert restored.all_finished == tracker.all_finished == (not watermarks)
        if watermarks:
            assert restored.watermark == tracker.watermark


def test_the_fifth_of_five_channels_brings_the_callback() -> None:
    """An operator with inputs of two and three channels hears nothing before all five have spoken."""
    tracker = WatermarkTracker(5)
    assert [tracker.advance(channel, 0) for channel in range(5)] == [None, None, None, None, 0]


def test_a_channel_that_goes_back_is_a_mistake_of_ours() -> None:
    """It would bring callbacks twice; it must not pass unseen."""
    tracker = WatermarkTracker(1)
    tracker.advance(0, 3)
    with pytest.raises(InternalError, match="went back from 3 to 2"):
        tracker.advance(0, 2)
