"""Subscriptions on a shard: which changes are sent, when, and how many are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter.errors import OutOfTurn, UnknownMatrix, UnknownWorker, WorkerHasLeft
from streamiter.parameter_server import ASP, BSP, SSP, Matrix, psf
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix_shard import MatrixShard
from streamiter.parameter_server.requests import (
    AddPart,
    AddRequest,
    Changes,
    ClockRequest,
    NextChanges,
    Unsubscribe,
    UpdateRequest,
)
from streamiter.parameter_server.subscriptions import Subscriptions

_WORKERS = (0, 1)
_ROWS, _COLUMNS = 5, 4
_ROW_BYTES = 2 * 8
_REPLY_BYTES = 3 * _ROW_BYTES  # three rows of one block, so that all rows take several replies


class _OnShard:
    """One matrix in blocks of 2 × 2 on one shard, with its workers and its subscriptions."""

    def __init__(self, consistency: Consistency) -> None:
        self.matrix = Matrix("w", rows=_ROWS, columns=_COLUMNS, consistency=consistency, block=(2, 2))
        self.shard = MatrixShard(self.matrix, shard=0, shards=1, workers=_WORKERS)
        self.subscriptions = Subscriptions(self._find, reply_bytes=_REPLY_BYTES)
        self.clocks = dict.fromkeys(_WORKERS, 0)
        self.adds = 0

    def _find(self, name: str) -> MatrixShard:
        if name != "w":
            raise UnknownMatrix(name)
        return self.shard

    @property
    def minimum(self) -> int:
        return min(self.clocks.values())

    def add(self, worker: int, row: int, column: int) -> None:
        if isinstance(self.matrix.consistency, BSP) and self.clocks[worker] > self.minimum:
            return  # the add would be out of turn
        self.adds += 1
        [part] = self.shard.partitioning.split(row, np.array([column]))
        parts = (AddPart(part.block.number, row, part.columns, np.array([float(self.adds)])),)
        self.shard.add(AddRequest("w", worker, parts=parts))

    def fill(self, row: int) -> None:
        self.adds += 1
        function = psf.Fill("w", row=row, value=float(self.adds))
        split = function.split(self.matrix, self.shard.partitioning)
        parts = [(block.number, part) for block, part in split]
        self.shard.update(UpdateRequest("w", 0, function=function, parts=parts))

    def clock(self, worker: int) -> None:
        if isinstance(self.matrix.consistency, BSP) and self.clocks[worker] > self.minimum:
            return
        self.clocks[worker] += 1
        self.shard.clock(ClockRequest("w", worker))

    def row(self, row: int) -> list[float]:
        blocks = self.shard.partitioning.blocks_of_row(row)
        return [value for block in blocks for value in self.shard.blocks[block.number].get(row, None).tolist()]

    def next(self, after: int, rows: list[int] | None = None, subscription: int = 0) -> Any:
        wanted = None if rows is None else np.array(rows, np.int64)
        return self.subscriptions.next(NextChanges("w", 0, subscription=subscription, rows=wanted, after=after))


class _Subscriber:
    """Stores the values that a subscription has received."""

    def __init__(self, server: _OnShard, rows: list[int] | None, subscription: int = 0) -> None:
        self.server = server
        self.rows = rows
        self.subscription = subscription
        self.number = 0
        self.seen: dict[tuple[int, int], list[float]] = {}
        self.waiting: WaitingReply[Changes] | None = None

    def ask(self, *, is_lost: bool = False) -> bool:
        """Ask for changes, or take the reply to an earlier call; return whether a reply was there."""
        if self.waiting is None:
            reply = self.server.next(self.number, self.rows, self.subscription)
            if isinstance(reply, WaitingReply):
                self.waiting = reply
        if self.waiting is not None:
            if not self.waiting.is_settled:
                return False
            reply, self.waiting = self.waiting.result(), None
        if not is_lost:
            self.take(reply)
        return True

    def take(self, changes: Changes) -> None:
        assert changes.parts
        size_bytes = sum(values.nbytes for _, _, values in changes.parts)
        assert size_bytes <= _REPLY_BYTES
        self.number = changes.number
        for block, rows, values in changes.parts:
            for row, part in zip(rows.tolist(), values.tolist(), strict=True):
                self.seen[block, row] = part

    def row(self, row: int) -> list[float]:
        blocks = self.server.shard.partitioning.blocks_of_row(row)
        return [value for block in blocks for value in self.seen[block.number, row]]


_steps = st.one_of(
    st.tuples(st.just("add"), st.integers(0, _ROWS - 1), st.integers(0, _COLUMNS - 1)),
    st.tuples(st.just("fill"), st.integers(0, _ROWS - 1), st.just(0)),
    st.tuples(st.just("clock"), st.sampled_from(_WORKERS), st.just(0)),
    st.tuples(st.sampled_from(["ask", "lose", "cancel", "unsubscribe", "reload"]), st.integers(0, 1), st.just(0)),
)


@given(
    consistency=st.sampled_from([ASP(), BSP(), SSP(staleness=1)]),
    steps=st.lists(_steps, min_size=10, max_size=50),
    rows=st.none() | st.lists(st.integers(0, _ROWS - 1), min_size=1, max_size=3, unique=True),
)
def test_the_last_values_that_subscribers_receive_are_the_stored_values(
    consistency: Consistency, steps: list[tuple[str, int, int]], rows: list[int] | None
) -> None:
    """A served model kept an old row forever: its last change fell between two pushes, or the reply was lost."""
    server = _OnShard(consistency)
    subscribers = [_Subscriber(server, None, 0), _Subscriber(server, rows, 1)]
    for kind, first, second in steps:
        if kind == "add":
            server.add(worker=second % 2, row=first, column=second)
        elif kind == "fill":
            server.fill(first)
        elif kind == "clock":
            server.clock(first)
        elif kind == "reload":
            server.subscriptions.reload()
        else:
            subscriber = subscribers[first]
            if kind in {"ask", "lose"}:
                subscriber.ask(is_lost=kind == "lose")
            elif kind == "cancel" and subscriber.waiting is not None:
                subscriber.waiting.give_up()
                subscriber.waiting = None
            elif kind == "unsubscribe":
                server.subscriptions.unsubscribe(Unsubscribe("w", 0, subscription=first))
                subscriber.waiting = None
    for _ in range(2):  # both workers clock, which pushes all pending changes
        for worker in _WORKERS:
            while server.clocks[worker] <= server.minimum:
                server.clock(worker)
    for subscriber in subscribers:
        while subscriber.ask():
            pass
        for row in range(_ROWS) if subscriber.rows is None else subscriber.rows:
            assert subscriber.row(row) == server.row(row)
        followed = None if subscriber.rows is None else set(subscriber.rows)
        assert followed is None or {row for _, row in subscriber.seen} == followed


@pytest.mark.parametrize("consistency", [BSP(), SSP(staleness=1)], ids=["BSP", "SSP"])
def test_changes_are_sent_when_the_minimum_clock_moves(consistency: Consistency) -> None:
    """A subscriber received half of an iteration and worked with weights that belong to no clock."""
    server = _OnShard(consistency)
    subscriber = _Subscriber(server, [0, 3])
    while subscriber.ask():
        pass
    server.add(0, row=0, column=1)
    server.add(1, row=1, column=1)
    server.clock(0)
    assert not subscriber.ask()
    server.clock(1)
    waiting = subscriber.waiting
    assert waiting is not None
    changes = waiting.result()
    assert changes.clock == 1
    assert [(block, rows.tolist()) for block, rows, _ in changes.parts] == [(0, [0])]
    assert subscriber.ask()
    assert subscriber.row(0) == server.row(0) == [0.0, 1.0, 0.0, 0.0]


def test_under_asp_changes_are_sent_after_each_request() -> None:
    """Under ASP, changes waited for a clock that never moved."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, None)
    while subscriber.ask():
        pass
    server.add(1, row=4, column=3)
    assert subscriber.ask()
    assert subscriber.row(4) == [0.0, 0.0, 0.0, 1.0]
    assert not subscriber.ask()


def test_a_fused_update_is_sent_with_the_add_and_not_before_it() -> None:
    """A subscriber saw the gradient in the row, and the weights without it."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, [0])
    while subscriber.ask():
        pass
    function = psf.Scale("w", row=0, scalar=10.0)
    [(block, part), _] = function.split(server.matrix, server.shard.partitioning)
    parts = (AddPart(block.number, 0, np.array([0]), np.array([2.0])),)
    update = UpdateRequest("w", 1, function=function, parts=[(block.number, part)])
    server.shard.add(AddRequest("w", 1, parts=parts, update=update))
    assert subscriber.ask()
    assert subscriber.row(0)[0] == 20.0


def test_a_slow_subscriber_gets_the_newest_values_once() -> None:
    """A backlog for a slow subscriber filled the memory of the shard, and the subscriber never caught up."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, None)
    while subscriber.ask():
        pass
    assert subscriber.waiting is not None
    subscriber.waiting.give_up()
    subscriber.waiting = None
    for _ in range(500):
        server.add(0, row=2, column=0)
        server.add(1, row=3, column=1)
    number = subscriber.number
    assert subscriber.ask()
    assert subscriber.number == number + 1
    assert subscriber.row(2) == server.row(2)
    assert subscriber.row(3) == server.row(3)
    assert not subscriber.ask()


def test_changes_of_a_lost_reply_are_sent_again() -> None:
    """A task was cancelled in the turn in which its reply came, and the row in the reply was not sent again."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, None)
    while subscriber.ask():
        pass
    server.add(0, row=2, column=0)
    server.add(0, row=4, column=3)
    assert subscriber.ask(is_lost=True)
    assert subscriber.ask()
    while subscriber.ask():
        pass
    for row in range(_ROWS):
        assert subscriber.row(row) == server.row(row)


def test_rows_take_turns_when_more_change_than_fit_into_a_reply() -> None:
    """The last rows were never sent, because the first rows had changed again before each reply."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, None)
    for _ in range(8):
        for row in range(_ROWS):
            server.fill(row)
        subscriber.ask()
    assert len(subscriber.seen) == 2 * _ROWS
    replies_for_all = -(-2 * _ROWS * _ROW_BYTES // _REPLY_BYTES)
    oldest_received = min(values[0] for values in subscriber.seen.values())
    assert oldest_received > server.adds - (replies_for_all + 1) * _ROWS


def test_a_shard_sends_all_rows_to_an_unknown_subscription() -> None:
    """A restarted shard waited for changes, and its subscribers missed the restored values."""
    server = _OnShard(SSP(staleness=1))
    changes = server.next(after=17)
    assert isinstance(changes, Changes)
    assert changes.number == 18
    assert len(changes.parts) > 0


def test_a_second_call_of_one_subscription_ends_the_first_with_an_error() -> None:
    """Two calls waited for one reply, and one of them was never answered."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, [1])
    while subscriber.ask():
        pass
    earlier = subscriber.waiting
    assert earlier is not None
    assert isinstance(server.next(subscriber.number, [1]), WaitingReply)
    with pytest.raises(
        OutOfTurn, match="subscription 0 of worker 0 to matrix 'w': expected one call for changes at a time"
    ):
        earlier.result()


def test_all_subscriptions_of_a_worker_that_leaves_end() -> None:
    """Rows remained marked for a departed worker, and its calls waited forever."""
    server = _OnShard(ASP())
    subscribers = [_Subscriber(server, [1], number) for number in range(2)]
    for subscriber in subscribers:
        while subscriber.ask():
            pass
    assert len(server.subscriptions) == 2
    server.subscriptions.leave(1)
    assert len(server.subscriptions) == 2
    server.subscriptions.leave(0, WorkerHasLeft("worker 0 has left"))
    assert len(server.subscriptions) == 0
    assert server.shard.followed is None
    for subscriber in subscribers:
        assert subscriber.waiting is not None
        with pytest.raises(WorkerHasLeft, match="worker 0 has left"):
            subscriber.waiting.result()


def test_a_closed_shard_ends_subscriptions_and_takes_no_more() -> None:
    """A call for changes after the shard was closed was never answered."""
    server = _OnShard(ASP())
    subscriber = _Subscriber(server, [1])
    while subscriber.ask():
        pass
    server.subscriptions.close()
    assert subscriber.waiting is not None
    assert subscriber.waiting.result().has_ended
    assert server.next(subscriber.number, [1]).has_ended
    assert len(server.subscriptions) == 0


def test_an_unknown_worker_cannot_subscribe() -> None:
    """A subscription of an unknown worker never ended, because the worker could not leave."""
    server = _OnShard(ASP())
    with pytest.raises(UnknownWorker):
        server.subscriptions.next(NextChanges("w", 9))
    with pytest.raises(UnknownMatrix):
        server.subscriptions.next(NextChanges("v", 0))
    assert len(server.subscriptions) == 0
