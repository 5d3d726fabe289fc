"""The watermark of an operator: the minimum over its channels."""

from __future__ import annotations

from random import Random

import pytest
from support.examples import random_examples

from streamiter.errors import InternalError
from streamiter.runtime.gate_epochs import BEFORE_ALL_EPOCHS, WatermarkTracker

Steps = list[tuple[int, int | None]]


def some_steps(random: Random) -> Steps:
    """By how much the watermark of a channel grows, or None where the channel ends."""
    growths = (1, 1, 2, 3, None) if random.random() < 0.5 else (1, 1, 1, 1, 1, 1, 2, 3, 3, None)
    return [(random.randrange(4), random.choice(growths)) for _ in range(random.randrange(41))]


@random_examples(some_steps)
def test_it_is_the_least_of_the_unfinished_channels_and_never_goes_back(steps: Steps) -> None:
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


def test_a_task_without_channels_is_restored() -> None:
    """A source has none: the greatest of no watermarks is an error."""
    tracker, restored = WatermarkTracker(0), WatermarkTracker(0)
    restored.restore(tracker.snapshot())
    assert restored.watermark == BEFORE_ALL_EPOCHS


def test_a_channel_that_goes_back_is_a_mistake_of_ours() -> None:
    """It would bring callbacks twice; it must not pass unseen. The same once more is no step back."""
    tracker = WatermarkTracker(1)
    assert [tracker.advance(0, 3), tracker.advance(0, 3)] == [3, None]
    with pytest.raises(InternalError, match="given 2 after 3"):
        tracker.advance(0, 2)
