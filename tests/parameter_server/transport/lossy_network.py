"""Calls in simulated time that are delayed, reordered and repeated, all from one seed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import ClientMessage, GiveUp, SessionControl
from streamiter.parameter_server.transport import ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

__all__ = ["CALM", "EVERYTHING", "LossyNetwork", "NetworkCarrier", "NetworkFaults"]


@dataclass(frozen=True)
class NetworkFaults:
    """The probability of each fault for each direction of a call; many calls overtake a call that lingers."""

    drop: float = 0.0
    """The probability that a call or its result is lost; the call is then made again."""
    repeat: float = 0.0
    linger: float = 0.0
    delay_s: float = 0.01
    linger_s: float = 5.0
    again_s: float = 1.0
    """The time after a loss until the call is made again."""


CALM = NetworkFaults()
EVERYTHING = NetworkFaults(drop=0.25, repeat=0.25, linger=0.2, delay_s=0.5)


class LossyNetwork:
    """Delays and loses messages."""

    def __init__(self, time: SimulatedTime, chances: random.Random, faults: NetworkFaults) -> None:
        self.time = time
        self.faults = faults
        self._chances = chances

    def copies(self) -> int:
        """Return how often a call arrives that is made once."""
        copies = 1
        while self._chances.random() < self.faults.repeat:
            copies += 1
        return copies

    def carry(self, arrives: Callable[[], None], lost: Callable[[], None]) -> None:
        """Deliver one direction of a call after a delay, or lose it."""
        faults, chances = self.faults, self._chances
        if chances.random() < faults.drop:
            self.time.call_later(faults.again_s, lost)
            return
        span_s = faults.linger_s if chances.random() < faults.linger else faults.delay_s
        self.time.call_later(chances.random() * span_s, arrives)


class NetworkCarrier:
    """Carries messages between one link and one shard as between two processes: no object is shared.

    While ``partitioned``, no message arrives.
    """

    def __init__(self, network: LossyNetwork, sessions: ShardSessions) -> None:
        self._network = network
        self._sessions = sessions
        self.partitioned = False
        self.requests_sent: dict[int, int] = {}
        """How often the link sent each request, by number."""
        self.after_each_message: Callable[[], None] = lambda: None

    def send(self, message: ClientMessage, answered: Callable[[Any], None]) -> None:
        if not isinstance(message.request, (SessionControl, GiveUp)):
            self.requests_sent[message.number] = self.requests_sent.get(message.number, 0) + 1
        call = _NetworkCall(self, pickle.dumps(message, protocol=5), answered)
        for _ in range(self._network.copies()):
            self.attempt(call)

    def attempt(self, call: _NetworkCall) -> None:
        """Make a call, for the first time or again."""
        if call.is_over:
            return
        if self.partitioned:
            self._network.time.call_later(self._network.faults.again_s, lambda: self.attempt(call))
            return
        self._network.carry(lambda: self._at_the_shard(call), lambda: self.attempt(call))

    def _at_the_shard(self, call: _NetworkCall) -> None:
        message: ClientMessage = pickle.loads(call.sent)
        if message.session.generation > self._sessions.generation:  # The shard has not been rolled back yet.
            self._network.time.call_later(self._network.faults.again_s, lambda: self.attempt(call))
            return
        outcome: Any = self._sessions.receive(message)
        self.after_each_message()
        if isinstance(outcome, WaitingReply):
            outcome.when_settled(lambda: self._send_back(call, message, outcome.result()))
        else:
            self._send_back(call, message, outcome)

    def _send_back(self, call: _NetworkCall, message: ClientMessage, outcome: Any) -> None:
        if (
            message.session.generation == self._sessions.generation
        ):  # Clients of other generations receive the rollback.
            reply = pickle.dumps(outcome, protocol=5)
            self._network.carry(lambda: call.end(reply), lambda: self.attempt(call))


class _NetworkCall:
    """A call that returns once, however often it is made."""

    def __init__(self, carrier: NetworkCarrier, sent: bytes, answered: Callable[[Any], None]) -> None:
        self._carrier = carrier
        self.sent = sent
        self._answered = answered
        self.is_over = False

    def end(self, reply: bytes) -> None:
        """Take the result of the call, unless it has one already."""
        if self._carrier.partitioned:
            self._carrier.attempt(self)
        elif not self.is_over:
            self.is_over = True
            self._answered(pickle.loads(reply))
