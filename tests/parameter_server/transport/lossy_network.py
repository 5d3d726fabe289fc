"""A network in simulated time that drops, delays, reorders and repeats messages, both ways, all from one seed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.transport.remote_link import RemoteLink
from streamiter.parameter_server.transport.sessions import (
    Answer,
    ClientMessage,
    SessionControl,
    ShardSessions,
)
from streamiter.testing.simulation.simulated_time import SimulatedTime

__all__ = ["CALM", "EVERYTHING", "LossyNetwork", "NetworkCarrier", "NetworkFaults"]

M = TypeVar("M")


@dataclass(frozen=True)
class NetworkFaults:
    """How likely what is, for each message; a message that lingers is overtaken by many others."""

    drop: float = 0.0
    repeat: float = 0.0
    linger: float = 0.0
    delay_s: float = 0.01
    linger_s: float = 5.0


CALM = NetworkFaults()
EVERYTHING = NetworkFaults(drop=0.25, repeat=0.25, linger=0.2, delay_s=0.5)


class LossyNetwork:
    """Carries messages as another process would get them: nothing of what arrives is the sender's."""

    def __init__(self, time: SimulatedTime, chances: random.Random, faults: NetworkFaults) -> None:
        self.time = time
        self.faults = faults
        self._chances = chances

    def deliver(self, message: M, to: Callable[[M], object]) -> None:
        """Have it arrive some time, perhaps twice or never."""
        faults, chances = self.faults, self._chances
        sent = pickle.dumps(message, protocol=5)
        copies = 1
        while chances.random() < faults.repeat:
            copies += 1
        for _ in range(copies):
            if chances.random() < faults.drop:
                continue
            span_s = faults.linger_s if chances.random() < faults.linger else faults.delay_s
            self.time.call_later(chances.random() * span_s, lambda: to(pickle.loads(sent)))


class NetworkCarrier:
    """Between one link and one shard. ``partitioned``: nothing gets through."""

    def __init__(self, network: LossyNetwork, sessions: ShardSessions) -> None:
        self._network = network
        self._sessions = sessions
        self.link: RemoteLink | None = None
        self.partitioned = False
        self.requests_sent: dict[int, int] = {}
        """How often each request went out whole, by number."""
        self.after_each_message: Callable[[], None] = lambda: None

    def send(self, message: ClientMessage) -> None:
        if not isinstance(message.request, SessionControl):
            self.requests_sent[message.number] = self.requests_sent.get(message.number, 0) + 1
        if not self.partitioned:
            self._network.deliver(message, self._at_the_shard)

    def _at_the_shard(self, message: ClientMessage) -> None:
        answer: Any = self._sessions.receive(message)
        self.after_each_message()
        if isinstance(answer, WaitingReply):
            answer.when_settled(lambda: self._send_back(answer.result()))
        else:
            self._send_back(answer)

    def _send_back(self, answer: Answer) -> None:
        if answer is not None and self.link is not None and not self.partitioned:
            self._network.deliver(answer, self.link.receive)
