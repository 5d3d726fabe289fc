"""Calls in simulated time that are delayed, overtake each other, and are repeated, all from one seed."""

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
    """How likely each fault is, for each way of a call; a call that lingers is overtaken by many others."""

    drop: float = 0.0
    """The call, or its result, is lost: the call is made again."""
    repeat: float = 0.0
    linger: float = 0.0
    delay_s: float = 0.01
    linger_s: float = 5.0
    again_s: float = 1.0
    """How long after a loss the call is made again."""


CALM = NetworkFaults()
EVERYTHING = NetworkFaults(drop=0.25, repeat=0.25, linger=0.2, delay_s=0.5)


class LossyNetwork:
    """Delays and loses what it carries."""

    def __init__(self, time: SimulatedTime, chances: random.Random, faults: NetworkFaults) -> None:
        self.time = time
        self.faults = faults
        self._chances = chances

    def copies(self) -> int:
        """How often a call arrives that is made once."""
        copies = 1
        while self._chances.random() < self.faults.repeat:
            copies += 1
        return copies

    def carry(self, arrives: Callable[[], None], lost: Callable[[], None]) -> None:
        """Have one way of a call arrive some time, or be lost."""
        faults, chances = self.faults, self._chances
        if chances.random() < faults.drop:
            self.time.call_later(faults.again_s, lost)
            return
        span_s = faults.linger_s if chances.random() < faults.linger else faults.delay_s
        self.time.call_later(chances.random() * span_s, arrives)


class NetworkCarrier:
    """Between one link and one shard, as another process: nothing of what arrives is the sender's.

    ``partitioned``: nothing gets through.
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
        if message.session.generation > self._sessions.generation:  # The shard has yet to go back.
            self._network.time.call_later(self._network.faults.again_s, lambda: self.attempt(call))
            return
        outcome: Any = self._sessions.receive(message)
        self.after_each_message()
        if isinstance(outcome, WaitingReply):
            outcome.when_settled(lambda: self._send_back(call, message, outcome.result()))
        else:
            self._send_back(call, message, outcome)

    def _send_back(self, call: _NetworkCall, message: ClientMessage, outcome: Any) -> None:
        if message.session.generation == self._sessions.generation:  # Others are told to go back.
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
        """Its result has come."""
        if self._carrier.partitioned:
            self._carrier.attempt(self)
        elif not self.is_over:
            self.is_over = True
            self._answered(pickle.loads(reply))
