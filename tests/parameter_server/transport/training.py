"""Workers that get, add and clock on two real shards over a lossy network, and the values that each must read."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
from parameter_server.transport.lossy_network import LossyNetwork, NetworkCarrier, NetworkFaults
from parameter_server.transport.schedule import Broken

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import ASP, BSP, SSP, Consistency
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    ClockRequest,
    CreateRequest,
    GetPart,
    GetReply,
    GetRequest,
    JoinRequest,
    SessionId,
)
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport import RemoteLink, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

__all__ = ["Training"]

_BOUND_S = 3_000.0
_SHARDS = 2

Step = Generator[list[WaitingReply[Any]], None, None]
"""A worker: it yields the replies that it waits for, and continues when all of them are settled."""


class Training:
    """Each worker adds 1 to its column on each shard in every iteration, so a read shows whose adds it contains."""

    def __init__(self, seed: int, consistency: Consistency, faults: NetworkFaults) -> None:
        chances = random.Random(seed)
        self.seed = seed
        self.consistency = consistency
        self.workers = chances.randint(1, 4)
        self.iterations = chances.randint(2, 5)
        self.matrix = Matrix("w", rows=2, columns=_SHARDS * self.workers, dtype="float64", consistency=consistency)
        self.time = SimulatedTime()
        self.network = LossyNetwork(self.time, chances, faults)
        self.chances = chances
        self.shards = [Shard(number) for number in range(_SHARDS)]
        window = chances.choice([1, 3, 16])
        self.sessions = [ShardSessions(shard) for shard in self.shards]
        self.links = [
            [self._link(worker, sessions, window) for sessions in self.sessions] for worker in range(self.workers)
        ]
        self.finished = 0
        self.added: list[WaitingReply[Any]] = []
        self.begun = [0] * self.workers
        """The number of iterations of each worker whose add has been sent."""

    def _link(self, worker: int, sessions: ShardSessions, window: int) -> RemoteLink:
        carrier = NetworkCarrier(self.network, sessions)
        return RemoteLink("a shard", SessionId(f"worker {worker}"), carrier, self.time, window=window)

    # -- workers ---------------------------------------------------------------------------------------

    def _everywhere(self, worker: int, request: Any) -> list[WaitingReply[Any]]:
        return [link.send(request) for link in self.links[worker]]

    def _meet(self, worker: int) -> Step:
        yield self._everywhere(worker, CreateRequest(self.matrix, _SHARDS))
        yield self._everywhere(worker, JoinRequest(worker))

    def _train(self, worker: int) -> Step:
        observed = 0
        for iteration in range(self.iterations):
            read = [self._get(worker, shard, observed) for shard in range(_SHARDS)]
            yield read
            replies: list[GetReply] = [waiting.result() for waiting in read]
            assert all(isinstance(reply, GetReply) for reply in replies), f"was given {replies}"
            observed = max(observed, *(reply.clock for reply in replies))
            for reply in replies:
                self._check_read(worker, iteration, reply.values)
            self.begun[worker] += 1
            for shard in range(_SHARDS):
                self._add(worker, shard, observed)
            clocked = self._everywhere(worker, ClockRequest("w", worker, observed))
            if self.chances.random() < 0.5:  # Otherwise the next get follows at once, and must not overtake the clock.
                yield clocked
                observed = max(observed, *(waiting.result() for waiting in clocked))
            yield self._pause()

    def _get(self, worker: int, shard: int, observed: int) -> WaitingReply[Any]:
        out = np.full(self.workers, np.nan)
        columns = np.arange(self.workers)[::-1].copy() + shard * self.workers
        parts = [GetPart(shard, 1, None, out), GetPart(shard, 1, columns)]
        return self.links[worker][shard].send(GetRequest("w", worker, observed, parts=parts))

    def _add(self, worker: int, shard: int, observed: int) -> None:
        column = worker + shard * self.workers
        part = AddPart(shard, 1, np.array([column, column]), np.array([0.25, 0.75]))
        self.added.append(self.links[worker][shard].send(AddRequest("w", worker, observed, parts=[part])))

    def _pause(self) -> list[WaitingReply[Any]]:
        waiting: WaitingReply[Any] = WaitingReply()
        self.time.call_later(self.chances.random() * self.chances.choice([0.1, 10.0]), lambda: waiting.succeed(None))
        return [waiting]

    def _check_read(self, worker: int, clock: int, values: list[Any]) -> None:
        whole, backwards = values
        self.require(np.array_equal(whole, backwards[::-1]), f"one row is read as {whole} and as {backwards}")
        self.require(whole[worker] == clock, f"worker {worker} at clock {clock} reads {whole[worker]} of its own adds")
        for other in range(self.workers):
            seen = whole[other]
            if isinstance(self.consistency, BSP):
                holds = seen == clock
            else:
                staleness = self.consistency.staleness if isinstance(self.consistency, SSP) else clock
                holds = clock - staleness <= seen <= self.begun[other]
            self.require(holds, f"worker {worker} at clock {clock} reads {seen} adds of worker {other}")

    # -- playing ---------------------------------------------------------------------------------------

    def play(self) -> None:
        """Run until all workers are done; raise Broken where a check fails."""
        for part in (self._meet, self._train):
            self.finished = 0
            for worker in range(self.workers):
                self._step(part(worker))
            self._until(lambda: self.finished == self.workers, "workers hang")
        self._until(lambda: not any(link.unanswered for of in self.links for link in of), "requests hang")
        self.time.pass_until(self.time.now_s + 60.0)
        for waiting in self.added:
            waiting.result()
        for number, shard in enumerate(self.shards):
            total = shard.matrices["w"].blocks[number].get(1, None)
            self.require(bool((total == self.iterations).all()), f"in the end shard {number} has {total}")
            self.require(shard.statistics().matrices[0].waiting == 0, "gets are left on a shard")

    def _step(self, worker: Step) -> None:
        waits = next(worker, None)
        if waits is None:
            self.finished += 1
        else:
            self._step_after(waits, worker)

    def _step_after(self, waits: list[WaitingReply[Any]], worker: Step) -> None:
        left = [waiting for waiting in waits if not waiting.is_settled]
        if left:
            left[0].when_settled(lambda: self._step_after(left, worker))
        else:
            self._step(worker)

    def _until(self, condition: Any, otherwise: str) -> None:
        while not condition():
            due_s = self.time.next_timer_s
            self.require(due_s is not None and due_s < _BOUND_S, otherwise)
            assert due_s is not None
            self.time.pass_until(due_s)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(f"seed {self.seed}, {self.consistency}: {what}; {self.iterations} iterations")


ALL = (ASP(), BSP(), SSP(staleness=0), SSP(staleness=2))
