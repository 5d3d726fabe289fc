"""One link to one shard in simulated time, for tests of a single behaviour."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from parameter_server.transport.lossy_network import CALM, LossyNetwork, NetworkCarrier, NetworkFaults
from parameter_server.transport.recording_shard import RecordingShard

from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    CreateRequest,
    GetPart,
    GetRequest,
    JoinRequest,
    SessionId,
)
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport import LOST_AFTER_S, RemoteLink, RequestHandler, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

__all__ = ["Connection", "add_ones", "recording", "whole_row", "with_matrix"]


class Connection:
    """A shard with its sessions, and the links to it."""

    def __init__(
        self,
        shard: RequestHandler,
        *,
        time: SimulatedTime | None = None,
        faults: NetworkFaults = CALM,
        seed: int = 0,
        window: int = 4,
    ) -> None:
        self.time = time or SimulatedTime()
        self.network = LossyNetwork(self.time, random.Random(seed), faults)
        self.sessions = ShardSessions(shard)
        self.window = window

    def link(
        self, client: str = "worker 0", incarnation: int = 0, lost_after_s: float = LOST_AFTER_S
    ) -> tuple[RemoteLink, NetworkCarrier]:
        """Return a new link and the carrier of its messages."""
        carrier = NetworkCarrier(self.network, self.sessions)
        session = SessionId(client, incarnation)
        link = RemoteLink("shard 0", session, carrier, self.time, window=self.window, lost_after_s=lost_after_s)
        return link, carrier

    def pass_s(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.time.pass_until(self.time.now_s + seconds)

    def ask(self, link: RemoteLink, request: Any) -> Any:
        """Send a request and return its reply, or raise the error of the call."""
        waiting = link.send(request)
        self.pass_s(1.0)
        assert waiting.is_settled, f"{request} is not answered within a second"
        return waiting.result()


def with_matrix(consistency: Consistency, workers: int = 1, window: int = 4) -> tuple[Connection, Shard]:
    shard = Shard()
    connection = Connection(shard, window=window)
    shard.handle(CreateRequest(Matrix("w", rows=1, columns=4, consistency=consistency), 1))
    for worker in range(workers):
        shard.handle(JoinRequest(worker))
    return connection, shard


def recording(window: int = 4, faults: NetworkFaults | None = None) -> tuple[Connection, RecordingShard]:
    time = SimulatedTime()
    shard = RecordingShard(time, random.Random(0))
    return Connection(shard, time=time, window=window, faults=faults or NetworkFaults()), shard


def whole_row(out: Any = None) -> GetRequest:
    return GetRequest("w", 0, parts=[GetPart(0, 0, None, out)])


def add_ones(values: Any = None) -> AddRequest:
    return AddRequest("w", 0, parts=[AddPart(0, 0, None, np.ones(4) if values is None else values)])
