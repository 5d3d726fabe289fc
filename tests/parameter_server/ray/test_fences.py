"""States of several shards, taken between the same two calls of each worker."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import numpy as np
from support.examples import random_examples

from streamiter.checkpoints.plain_data import PlainData
from streamiter.parameter_server import ASP, psf
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.holding import NumberedSnapshots
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    AggregateRequest,
    CreateRequest,
    JoinRequest,
    LeaveRequest,
    PassBarrier,
)
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import thawed
from streamiter.parameter_server.transport.ray.barriers import (
    Fence,
    Fences,
    PassFences,
    TakeBetween,
)

WORKERS = (0, 1, 2)
SERVER = -1


class Case:
    """Two shards, each with one number, and what is on its way to them: in order from each sender to each shard."""

    def __init__(self) -> None:
        self.shards = [Shard(0, NumberedSnapshots(lambda number, state: None)) for _ in range(2)]
        self.fences = [Fences(shard, shard) for shard in self.shards]
        self.barriers = dict.fromkeys(WORKERS, 0)
        self.ways: dict[tuple[int, int], deque[Any]] = {
            (shard, sender): deque() for shard in (0, 1) for sender in (SERVER, *WORKERS)
        }
        self.taken: dict[int, list[WaitingReply[Any]]] = {}
        self.replies: list[Any] = []
        for fences in self.fences:
            fences.handle(create())
            for worker in WORKERS:
                fences.handle(JoinRequest(worker))

    def send(self, sender: int, request: Any) -> None:
        """To both shards."""
        for shard in (0, 1):
            self.ways[shard, sender].append(request)

    def take(self, number: int) -> None:
        """Ask for both states; no call gets in between."""
        self.send(SERVER, TakeBetween(number, WORKERS))
        for worker in WORKERS:
            self.send(worker, Fence(worker, number))

    def pass_barrier(self, worker: int) -> None:
        """A worker comes to its next barrier."""
        self.barriers[worker] += 1
        self.send(worker, PassBarrier(worker, self.barriers[worker]))

    def arrive(self, shard: int, sender: int) -> None:
        """The next message of a sender comes to a shard, if there is any."""
        if way := self.ways[shard, sender]:
            request = way.popleft()
            reply = self.fences[shard].handle(request)
            if isinstance(request, TakeBetween):
                self.taken.setdefault(request.number, []).append(reply)
            else:
                self.replies.append(reply)

    def arrive_all(self) -> None:
        for shard, sender in self.ways:
            while self.ways[shard, sender]:
                self.arrive(shard, sender)


def create() -> CreateRequest:
    return CreateRequest(Matrix("w", rows=1, columns=1, consistency=ASP()), 1)


def add(worker: int) -> AddRequest:
    return AddRequest("w", worker, -1, [AddPart(0, 0, None, np.ones(1))])


def value(shard: Shard) -> float:
    [total] = shard.handle(AggregateRequest("w", -1, -1, psf.Sum("w", row=0), [(0, None)]))
    return float(total)


def value_in(state: Any) -> float:
    copy = Shard(0)
    copy.restore(thawed(state, PlainData()))
    copy.handle(create())
    return value(copy)


def some_events(random: Random) -> list[tuple[Any, int]]:
    """Sends, barriers, and arrivals of a sender's next message at shard 0 or 1."""
    kinds = ("add", "take", "lost", "barrier", 0, 1, 0, 1)
    return [
        (kind, random.choice((SERVER, *WORKERS) if kind in (0, 1) else WORKERS))
        for kind in random.choices(kinds, k=random.randrange(25))
    ]


@random_examples(some_events)
def test_an_add_is_in_the_states_of_both_shards_or_of_none(happens: list[tuple[Any, int]]) -> None:
    """One half of an add to two shards was in the snapshot, and the whole of it was sent once more after going back.

    And a snapshot that never came where one before it had been lost with a shard: it dropped its own fences, if they
    had come before it, with those of the lost one. And one in the middle of a snapshot at clocks: what a shard held
    for that had been acknowledged, and was not in it.
    """
    case, added, number, expected = Case(), 0, 0, dict[int, float]()
    for what, which in [*happens, ("take", 0)]:
        if what == "add":
            case.send(which, add(which))
            added += 1
        elif what == "take":
            if not expected or len(case.taken.get(max(expected), ())) == 2:  # one at a time
                number += 1
                case.take(number)
                expected[number] = float(added)
        elif what == "lost":
            number += 1
            case.send(which, Fence(which, number))
        elif what == "barrier":
            case.pass_barrier(which)
        else:
            case.arrive(what, which)
    case.arrive_all()
    case.send(SERVER, PassFences(number))
    last = max(case.barriers.values())
    for worker in WORKERS:
        while case.barriers[worker] < last:
            case.pass_barrier(worker)
    case.arrive_all()
    for taken, value_then in expected.items():
        for state in case.taken[taken]:
            if taken == max(expected):  # those before it may have been ended by it
                assert state.is_settled
            if state.is_settled:
                assert value_in(state.result()) == value_then
    assert all(not isinstance(reply, WaitingReply) or reply.is_settled for reply in case.replies)
    assert [value(shard) for shard in case.shards] == [float(added)] * 2


def test_a_worker_that_leaves_or_is_not_there_yet_holds_nothing_up() -> None:
    """A snapshot that is never done, and workers that are stalled for ever with it."""
    shard = Shard(0)
    fences = Fences(shard, shard)
    fences.handle(create())
    fences.handle(JoinRequest(0))
    fences.handle(JoinRequest(1))
    state = fences.handle(TakeBetween(1, (0, 1, 2)))
    fences.handle(Fence(0, 1))
    stalled = fences.handle(add(0))
    assert not state.is_settled
    assert not stalled.is_settled
    fences.handle(LeaveRequest(1))
    assert value_in(state.result()) == 0.0
    assert stalled.is_settled
    assert value(shard) == 1.0
    fences.handle(Fence(1, 1))  # a late one
    fences.handle(JoinRequest(1))
    fences.handle(add(1))
    assert value(shard) == 2.0


def test_who_gives_up_stalls_nobody() -> None:
    """A snapshot whose caller was cancelled, with its fences still on their way."""
    shard = Shard(0)
    fences = Fences(shard, shard)
    fences.handle(create())
    fences.handle(JoinRequest(0))
    fences.handle(JoinRequest(1))
    fences.handle(Fence(0, 1))
    stalled = fences.handle(add(0))
    fences.handle(TakeBetween(1, (0, 1))).give_up()
    assert stalled.is_settled
    fences.handle(Fence(1, 1))
    fences.handle(add(1))
    assert value(shard) == 2.0
