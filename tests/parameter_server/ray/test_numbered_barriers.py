"""Barriers that workers pass at their own pace, on a shard in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.examples import random_examples

from streamiter.checkpoints.plain_data import PlainData
from streamiter.parameter_server import ASP, psf
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import (
    Add,
    AddPart,
    Aggregate,
    Clock,
    Create,
    Join,
    Leave,
    PassBarrier,
)
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.snapshots import thawed
from streamiter.parameter_server.transport.ray.barriers import NumberedBarriers
from streamiter.parameter_server.waiting import Waiting

EVERY = 2


class Case:
    """A shard with one matrix of one number, and what its snapshots held."""

    def __init__(self, workers: int) -> None:
        self.taken: list[tuple[int, float]] = []
        self.shard = Shard(0)
        self.barriers = NumberedBarriers(self.shard, self._take)
        self.barriers.handle(Create(Matrix("w", rows=1, columns=1, consistency=ASP()), 1))
        self.clocks = dict.fromkeys(range(workers), 0)
        self.replies: list[Any] = []
        for worker in self.clocks:
            self.barriers.handle(Join(worker))

    def _take(self, number: int, state: Any) -> None:
        copy = Shard(0)
        copy.restore(thawed(state, PlainData()))
        copy.handle(Create(Matrix("w", rows=1, columns=1, consistency=ASP()), 1))
        self.taken.append((number, _value(copy)))

    def iterate(self, worker: int) -> None:
        """Add 1, clock, and pass a barrier at every second clock."""
        add = Add("w", worker, -1, [AddPart(0, 0, None, np.ones(1))])
        for request in (add, Clock("w", worker)):
            self.replies.append(self.barriers.handle(request))
        self.clocks[worker] += 1
        if self.clocks[worker] % EVERY == 0:
            self.replies.append(self.barriers.handle(PassBarrier(worker, self.clocks[worker] // EVERY)))


def _value(shard: Shard) -> float:
    [total] = shard.handle(Aggregate("w", -1, -1, psf.Sum("w", row=0), [(0, None)]))
    return float(total)


@random_examples(lambda random: [random.randrange(3) for _ in range(random.randrange(13))])
def test_a_snapshot_holds_of_each_worker_what_came_before_its_barrier(order: list[int]) -> None:
    """Under ASP a fast worker came to its next barrier before the others had passed this one, and its adds got in."""
    case = Case(3)
    for worker in order:
        case.iterate(worker)
    complete = min(case.clocks.values()) // EVERY
    assert case.taken == [(number, 3.0 * EVERY * number) for number in range(1, complete + 1)]
    end = (max(case.clocks.values()) // EVERY + 1) * EVERY
    for worker in case.clocks:  # the rest of the way: nothing that was stalled is lost
        while case.clocks[worker] < end:
            case.iterate(worker)
    assert all(not isinstance(reply, Waiting) or reply.is_settled for reply in case.replies)
    assert _value(case.shard) == sum(case.clocks.values())


def test_a_worker_that_leaves_holds_no_barrier_up() -> None:
    """Snapshots that end for ever with the first worker that dies."""
    case = Case(2)
    for _ in range(5):
        case.iterate(0)
    assert case.taken == []
    case.barriers.handle(Leave(1))
    assert case.taken == [(1, 2.0), (2, 4.0)]
    assert _value(case.shard) == 5.0


def test_a_stalled_worker_that_leaves_gets_an_error() -> None:
    """A call of a worker that was taken for dead, which waits for ever."""
    case = Case(2)
    for _ in range(6):
        case.iterate(0)
    waiting = [reply for reply in case.replies if isinstance(reply, Waiting) and not reply.is_settled]
    assert waiting
    case.barriers.handle(Leave(0))
    assert all(reply.is_settled for reply in waiting)
    for _ in range(2):
        case.iterate(1)
    assert [number for number, _ in case.taken] == [1]


def test_a_worker_that_joins_behind_barriers_passes_them_with_its_next() -> None:
    """A shard that is behind waited for a barrier that a worker had never come to: it joined above it elsewhere."""
    case = Case(1)
    case.iterate(0)
    case.barriers.handle(Join(1))
    case.barriers.handle(PassBarrier(1, 2))  # it stands at clock 4 elsewhere
    for _ in range(3):
        case.iterate(0)
    assert case.taken == [(1, 2.0), (2, 4.0)]
    case.barriers.handle(PassBarrier(1, 1))  # long complete: nothing happens
    case.iterate(0)
    assert _value(case.shard) == 5.0
