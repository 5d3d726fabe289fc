"""Channels of a job that go through a link: both halves are in this process, and the bytes arrive in random pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from processes.pipes import Owner, Pipe, identity

from streamiter.engine.graph.channels import Channel, ChannelStatistics
from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackLimits, FeedbackStatistics, spill_queue
from streamiter.engine.plan.plan import Planner
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import ProcessLink
from streamiter.engine.processes.remote_channel import ArrivingChannel, DepartingChannel
from streamiter.engine.processes.remote_feedback import ArrivingFeedback, DepartingFeedback
from streamiter.values.helpers.clock import Clock


class MovingPipe(Pipe):
    """Delivers by itself, a random piece in each turn of the event loop."""

    def __init__(self, first: ProcessLink, second: ProcessLink, random: Random) -> None:
        self._random = random
        super().__init__(first, second)
        self._is_moving = False
        while any(end.waiting for end in self.ends):  # The handshake.
            self.deliver(0, 1000)
            self.deliver(1, 1000)
        for end in self.ends:
            end.on_write = self._move

    def _move(self) -> None:
        if not self._is_moving:
            self._is_moving = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_moving = False
        for sender in self._random.sample((0, 1), 2):
            self.deliver(sender, self._random.choice((30, 300, 1 << 20)))
        if any(end.waiting for end in self.ends):
            self._move()


def two_links(planner: Planner, random: Random) -> tuple[ProcessLink, ProcessLink]:
    clock: Clock = planner.options.clock
    links = [ProcessLink(identity(number), Owner(), FrameEncoding(planner.plain_data), clock) for number in (0, 1)]
    MovingPipe(links[0], links[1], random)
    return links[0], links[1]


class LoopedChannel(Channel):
    """A channel whose producer's methods are those of one half, and whose consumer's methods are those of the other."""

    def __init__(self, name: str, planner: Planner, random: Random) -> None:
        super().__init__(name)
        first, second = two_links(planner, random)
        limits = planner.options.channel_limits
        self.departing = DepartingChannel(name, first, 1, limit_records=limits.records, limit_bytes=limits.size_bytes)
        self.arriving = ArrivingChannel(name, second, 1)
        for of_producer in ("try_put", "put_control", "wait_for_room", "shut_intakes"):
            setattr(self, of_producer, getattr(self.departing, of_producer))
        for of_consumer in ("attach", "peek", "take", "set_aside", "release", "make_way"):
            setattr(self, of_consumer, getattr(self.arriving, of_consumer))

    def statistics(self) -> ChannelStatistics:
        return self.departing.statistics()


class LoopedFeedback(FeedbackChannel):
    """The same for feedback."""

    def __init__(self, name: str, planner: Planner, limits: FeedbackLimits, random: Random) -> None:
        first, second = two_links(planner, random)
        self.departing = DepartingFeedback(name, first, 1, spill_queue(name, limits, planner.plain_data))
        self.arriving = ArrivingFeedback(name, second, 1, spill_queue(name, limits, planner.plain_data))
        super().__init__(name, self.arriving.queue)
        for method in ("put", "put_control"):
            setattr(self, method, getattr(self.departing, method))
        for method in ("attach", "peek", "take", "take_ahead", "restore", "start_log", "end_log", "close_log"):
            setattr(self, method, getattr(self.arriving, method))

    @property
    def is_spilling(self) -> bool:
        return self.departing.is_spilling or self.arriving.is_spilling

    def close(self) -> None:
        self.departing.close()
        self.arriving.close()

    def statistics(self) -> FeedbackStatistics:
        return self.arriving.statistics()


def channels_through_links(seed: int) -> Callable[[Planner, str, FeedbackLimits | None], Any]:
    """Return a method for ``Planner._make_channel``."""
    random = Random(seed)

    def make_channel(planner: Planner, name: str, feedback: FeedbackLimits | None) -> Any:
        if feedback is None:
            return LoopedChannel(name, planner, random)
        return LoopedFeedback(name, planner, feedback, random)

    return make_channel
