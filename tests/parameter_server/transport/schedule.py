"""One random run of several clients on one shard over a lossy network, and its checks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from parameter_server.transport.lossy_network import EVERYTHING, LossyNetwork, NetworkCarrier, NetworkFaults
from parameter_server.transport.recording_shard import Ask, RecordingShard

from streamiter.errors import OutOfTurn
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import SessionId
from streamiter.parameter_server.transport import RemoteLink, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

__all__ = ["Broken", "Schedule", "check_schedule"]

# Simulated seconds within which all calls must be answered: three times the time with the worst faults here.
_BOUND_S = 1_500.0
# After this time, lingering messages and the last messages of the links have arrived.
_AFTERWARDS_S = 60.0


class Broken(AssertionError):
    """A check of a run has failed."""


@dataclass(frozen=True)
class Schedule:
    """The settings of a run."""

    seed: int
    faults: NetworkFaults = EVERYTHING
    clients: int = 3
    requests: int = 12
    give_up: float = 0.1


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chances = random.Random(schedule.seed)
        self.time = SimulatedTime()
        self.network = LossyNetwork(self.time, self.chances, schedule.faults)
        self.shard = RecordingShard(self.time, self.chances)
        self.window = self.chances.choice([1, 2, 4, 16])
        self.sessions = ShardSessions(self.shard)
        self.calls: list[tuple[Ask, WaitingReply[Any]]] = []
        self.carriers: list[NetworkCarrier] = []
        self.to_be_settled = schedule.clients * schedule.requests
        self.links = [self._client(f"client {number}") for number in range(schedule.clients)]

    def _client(self, name: str) -> RemoteLink:
        carrier = NetworkCarrier(self.network, self.sessions)
        self.carriers.append(carrier)
        link = RemoteLink("shard 0", SessionId(name), carrier, self.time, window=self.window)
        carrier.after_each_message = self.check_bounds
        at_s = 0.0
        for index in range(self.schedule.requests):
            at_s += self.chances.choice([0.0, 0.1, 1.0]) * self.chances.random()
            ask = Ask(name, index, self.chances.choice(["answered", "answered", "waits", "refused", "endless"]))
            self.time.call_later(at_s, lambda ask=ask: self._send(link, ask))
        return link

    def _send(self, link: RemoteLink, ask: Ask) -> None:
        waiting = link.send(ask)
        self.calls.append((ask, waiting))
        waiting.when_settled(self._one_is_settled)
        if ask.kind == "endless" or self.chances.random() < self.schedule.give_up:
            self.time.call_later(self.chances.random() * 10.0, waiting.give_up)

    def _one_is_settled(self) -> None:
        self.to_be_settled -= 1

    # -- checks ----------------------------------------------------------------------------------------

    def check_bounds(self) -> None:
        for link in self.links:
            # In addition to the window, each cancelled call may have a message of its own under way.
            self.require(link.unanswered <= 2 * self.window, "more is unanswered than the window")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self.broken(what)

    def broken(self, what: str) -> Broken:
        return Broken(f"seed {self.schedule.seed}, window {self.window}, at {self.time.now_s:.1f} s: {what}")

    def play(self) -> None:
        while self.to_be_settled:
            due_s = self.time.next_timer_s
            if due_s is None or due_s > _BOUND_S:
                hanging = [ask for ask, waiting in self.calls if not waiting.is_settled]
                self._check_replies()
                raise self.broken(f"these hang: {hanging[:3]}")
            self.time.pass_until(due_s)
        while any(link.unanswered for link in self.links):  # These belong to cancelled calls.
            self.require(self.time.now_s < _BOUND_S, "cancelled calls stay open")
            self.time.pass_until(self.time.now_s + 1.0)
        self.time.pass_until(self.time.now_s + _AFTERWARDS_S)

    def check(self) -> None:
        self.require(not any(link.queued for link in self.links), "requests are left in the queue")
        wanted = {f"client {number}": list(range(self.schedule.requests)) for number in range(self.schedule.clients)}
        if self.shard.handled != wanted:
            raise self.broken(f"requests were handled as {self.shard.handled}")
        self._check_replies()
        self.require(not self.shard.parked, "cancelled requests stay parked on the shard")
        again = [count for carrier in self.carriers for count in carrier.requests_sent.values() if count > 1]
        self.require(not again, f"requests were sent whole {again} times")
        self.require(self.sessions.kept == 0, "the shard keeps outcomes that its clients have")
        self.require(self.time.next_timer_s is None, "a timer is set while no call is under way")

    def _check_replies(self) -> None:
        for ask, waiting in self.calls:
            if waiting.is_settled:
                self._check_reply(ask, waiting)

    def _check_reply(self, ask: Ask, waiting: WaitingReply[Any]) -> None:
        right = self.shard.replies.get(ask)
        refusal = f"{ask.client}, {ask.index}: refused as {right}"
        try:
            reply = waiting.result()
        except asyncio.CancelledError:
            return  # The call was cancelled.
        except OutOfTurn as error:
            if ask.kind != "refused" or str(error) != refusal:
                raise self.broken(f"{ask} failed with {error!r}") from error
        else:
            if reply != right or ask.kind == "refused":
                raise self.broken(f"{ask} was given {reply}, right is {refusal if ask.kind == 'refused' else right}")


def check_schedule(schedule: Schedule) -> None:
    """Play a schedule and check it; raise Broken where a check fails."""
    run = _Run(schedule)
    run.play()
    run.check()
