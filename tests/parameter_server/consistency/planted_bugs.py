"""Bugs of consistency models, each a small change to a real model; the comparison must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamiter.errors import OutOfTurn
from streamiter.parameter_server.consistency import (
    ASP,
    BSP,
    SSP,
    BulkSynchronousModel,
    Consistency,
    ConsistencyModel,
    PendingAdds,
    ProgressTracker,
    Released,
    StaleSynchronousModel,
    WaitingGets,
)
from streamiter.parameter_server.matrix_shard import MatrixShard

Plant = Callable[[pytest.MonkeyPatch], None]


def gets_wait_at_the_bound_of_staleness(patch: pytest.MonkeyPatch) -> None:
    def get(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        wanted = self.tracker.get_progress(worker) - self._staleness
        if wanted < self.tracker.get_min_clock():
            return True
        self._gets.park(wanted + 1, request)
        return False

    patch.setattr(StaleSynchronousModel, "get", get)


def gets_go_one_past_the_bound_of_staleness(patch: pytest.MonkeyPatch) -> None:
    def get(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        wanted = self.tracker.get_progress(worker) - self._staleness - 1
        if wanted <= self.tracker.get_min_clock():
            return True
        self._gets.park(wanted, request)
        return False

    patch.setattr(StaleSynchronousModel, "get", get)


def gets_are_parked_under_the_worker_s_own_clock(patch: pytest.MonkeyPatch) -> None:
    def get(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        clock = self.tracker.get_progress(worker)
        if clock - self._staleness <= self.tracker.get_min_clock():
            return True
        self._gets.park(clock, request)
        return False

    patch.setattr(StaleSynchronousModel, "get", get)


def a_clock_of_another_shard_ends_the_wait_here(patch: pytest.MonkeyPatch) -> None:
    def get(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        wanted = self.tracker.get_progress(worker) - self._staleness
        if wanted <= max(self.tracker.get_min_clock(), observed):
            return True
        self._gets.park(wanted, request)
        return False

    patch.setattr(StaleSynchronousModel, "get", get)


def gets_are_answered_before_the_adds(patch: pytest.MonkeyPatch) -> None:
    original = ConsistencyModel._released

    def released(self: Any, before: int, moved_to: int) -> list[Released[Any, Any]]:
        return [
            part
            for move in original(self, before, moved_to)
            for part in (Released(move.clock, [], move.gets), Released(move.clock, move.adds, []))
        ]

    patch.setattr(ConsistencyModel, "_released", released)


def a_worker_that_leaves_releases_no_get(patch: pytest.MonkeyPatch) -> None:
    for model in (ConsistencyModel, BulkSynchronousModel):
        patch.setattr(model, "leave", lambda self, worker: [][: self.tracker.leave(worker)])


def a_worker_that_leaves_releases_its_last_clock_only(patch: pytest.MonkeyPatch) -> None:
    original = ConsistencyModel.leave
    patch.setattr(ConsistencyModel, "leave", lambda self, worker: original(self, worker)[-1:])


def a_worker_that_leaves_takes_its_adds_with_it(patch: pytest.MonkeyPatch) -> None:
    original = BulkSynchronousModel.leave

    def leave(self: Any, worker: int) -> list[Released[Any, Any]]:
        for by_worker in self._adds._by_clock.values():
            by_worker.pop(worker, None)
        return original(self, worker)

    patch.setattr(BulkSynchronousModel, "leave", leave)


def a_worker_that_leaves_holds_the_others_back(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Any, worker: int) -> int:
        self.get_progress(worker)
        del self._progress[worker]
        return -1

    patch.setattr(ProgressTracker, "leave", leave)


def gets_are_answered_last_come_first(patch: pytest.MonkeyPatch) -> None:
    original = WaitingGets.take
    patch.setattr(WaitingGets, "take", lambda self, clock: original(self, clock)[::-1])


def adds_are_applied_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    def take(self: Any, clock: int) -> list[Any]:
        # By the arrival of the first add of each worker.
        return [request for entries in self._by_clock.pop(clock, {}).values() for request in entries]

    patch.setattr(PendingAdds, "take", take)


def workers_join_at_the_start(patch: pytest.MonkeyPatch) -> None:
    original = ProgressTracker.join

    def join(self: Any, worker: int, at: int | None = None) -> int:
        original(self, worker, at)
        self._uncount_at(self._progress[worker])
        self._progress[worker] = 0
        self._count_at(0)
        self._min_clock = 0
        return 0

    patch.setattr(ProgressTracker, "join", join)


def workers_join_ahead_of_the_minimum(patch: pytest.MonkeyPatch) -> None:
    original = ProgressTracker.join
    patch.setattr(
        ProgressTracker,
        "join",
        lambda self, worker, at=None: original(self, worker, max(self._progress.values(), default=self._min_clock)),
    )


def a_raised_worker_releases_no_get(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsistencyModel, "raise_worker", lambda self, worker, to: [][: self.tracker.raise_to(worker, to)])


def a_call_out_of_turn_is_dropped_in_silence(patch: pytest.MonkeyPatch) -> None:
    original = BulkSynchronousModel.add

    def add(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        try:
            return original(self, worker, request, observed)
        except OutOfTurn:
            return False

    patch.setattr(BulkSynchronousModel, "add", add)


def a_clock_counts_even_if_it_is_refused(patch: pytest.MonkeyPatch) -> None:
    def clock(self: Any, worker: int, observed: int = -1) -> list[Released[Any, Any]]:
        released = ConsistencyModel.clock(self, worker, observed)
        if self.tracker.get_progress(worker) > max(self.tracker.get_min_clock(), observed) + 1:
            raise OutOfTurn("too far ahead")
        return released

    patch.setattr(BulkSynchronousModel, "clock", clock)


def a_clock_of_another_shard_is_ignored(patch: pytest.MonkeyPatch) -> None:
    original = BulkSynchronousModel._check_turn
    patch.setattr(
        BulkSynchronousModel,
        "_check_turn",
        lambda self, worker, observed, call, ahead: original(self, worker, -1, call, ahead),
    )


def early_adds_go_with_the_next_release(patch: pytest.MonkeyPatch) -> None:
    original = PendingAdds.keep

    def add(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        self._check_turn(worker, observed, "an add", ahead=0)
        original(self._adds, self.tracker.get_min_clock(), worker, request)
        return False

    patch.setattr(BulkSynchronousModel, "add", add)


def early_gets_are_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    def get(self: Any, worker: int, request: Any, observed: int = -1, held_clocks: int = 0) -> bool:
        clock = self._check_turn(worker, observed, "a get", ahead=1)
        if clock <= max(self.tracker.get_min_clock(), observed):
            return True
        self._gets.park(clock, request)
        return False

    patch.setattr(BulkSynchronousModel, "get", get)


def gets_are_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingGets, "forget", lambda self, request: None)


def a_reset_loses_the_gets(patch: pytest.MonkeyPatch) -> None:
    original = WaitingGets.clear
    patch.setattr(WaitingGets, "clear", lambda self: original(self)[:0])


def a_snapshot_has_no_pending_adds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingAdds, "state", lambda self: {"by clock": []})


def every_clock_of_a_slowest_worker_moves_the_minimum(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Any, worker: int) -> int:
        was_slowest = self.get_progress(worker) == self._min_clock
        self._uncount_at(self._progress[worker])
        self._progress[worker] += 1
        self._count_at(self._progress[worker])
        if was_slowest:
            self._min_clock += 1
            return self._min_clock
        return -1

    patch.setattr(ProgressTracker, "advance_and_get_changed_min_clock", advance)


def any_worker_may_add(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProgressTracker, "check_worker_valid", lambda self, worker: None)


# -- in the shard --------------------------------------------------------------------------------------


def the_shard_answers_before_it_adds(patch: pytest.MonkeyPatch) -> None:
    original = MatrixShard._release

    def release(self: Any, released: Any) -> None:
        original(
            self, [part for move in released for part in (Released(move.clock, [], move.gets), replace(move, gets=[]))]
        )

    patch.setattr(MatrixShard, "_release", release)


def the_shard_forgets_to_finish_the_iteration(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MatrixShard, "_finish_iteration", lambda self: None)


def the_shard_releases_no_get_when_a_worker_leaves(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Any, worker: int, error: Any) -> None:
        for get, waiting in [waits for waits in self._waiting.values() if waits[0].worker == worker]:
            self._forget(get)
            waiting.fail(error)
        self.model.leave(worker)

    patch.setattr(MatrixShard, "leave", leave)


def the_gets_of_a_worker_that_has_left_hang(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Any, worker: int, error: Any) -> None:
        if released := self.model.leave(worker):
            self._release(released)

    patch.setattr(MatrixShard, "leave", leave)


def gets_hang_across_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MatrixShard, "fail_waiting", lambda self, error: None)


def the_shard_ignores_calls_out_of_turn(patch: pytest.MonkeyPatch) -> None:
    original = MatrixShard.add

    def add(self: Any, request: Any) -> Any:
        try:
            return original(self, request)
        except OutOfTurn:
            return self.model.tracker.get_min_clock()

    patch.setattr(MatrixShard, "add", add)


def buffered_adds_are_applied_at_once(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, request: Any) -> Any:
        self._check_worker(request.worker)
        self._apply(request)
        return self.model.tracker.get_min_clock() if request.get is None else self.get(request.get)

    patch.setattr(MatrixShard, "add", add)


PLANTED: tuple[tuple[Plant, Consistency], ...] = (
    (gets_wait_at_the_bound_of_staleness, SSP(1)),
    (gets_go_one_past_the_bound_of_staleness, SSP(1)),
    (gets_are_parked_under_the_worker_s_own_clock, SSP(1)),
    (a_clock_of_another_shard_ends_the_wait_here, SSP(0)),
    (gets_are_answered_before_the_adds, BSP()),
    (a_worker_that_leaves_releases_no_get, BSP()),
    (a_worker_that_leaves_releases_no_get, SSP(0)),
    (a_worker_that_leaves_releases_its_last_clock_only, SSP(2)),
    (a_worker_that_leaves_takes_its_adds_with_it, BSP()),
    (a_worker_that_leaves_holds_the_others_back, ASP()),
    (gets_are_answered_last_come_first, BSP()),
    (gets_are_answered_last_come_first, SSP(0)),
    (adds_are_applied_in_order_of_arrival, BSP()),
    (workers_join_at_the_start, ASP()),
    (workers_join_ahead_of_the_minimum, SSP(3)),
    (a_raised_worker_releases_no_get, BSP()),
    (a_call_out_of_turn_is_dropped_in_silence, BSP()),
    (a_clock_counts_even_if_it_is_refused, BSP()),
    (a_clock_of_another_shard_is_ignored, BSP()),
    (early_adds_go_with_the_next_release, BSP()),
    (early_gets_are_answered_at_once, BSP()),
    (gets_are_never_forgotten, SSP(1)),
    (a_reset_loses_the_gets, SSP(0)),
    (a_snapshot_has_no_pending_adds, BSP()),
    (every_clock_of_a_slowest_worker_moves_the_minimum, ASP()),
    (any_worker_may_add, ASP()),
    (any_worker_may_add, SSP(0)),
)

PLANTED_IN_THE_SHARD: tuple[tuple[Plant, Consistency], ...] = (
    (the_shard_answers_before_it_adds, BSP()),
    (the_shard_forgets_to_finish_the_iteration, ASP()),
    (the_shard_releases_no_get_when_a_worker_leaves, BSP()),
    (the_shard_releases_no_get_when_a_worker_leaves, SSP(0)),
    (the_gets_of_a_worker_that_has_left_hang, SSP(0)),
    (gets_hang_across_a_reset, BSP()),
    (the_shard_ignores_calls_out_of_turn, BSP()),
    (buffered_adds_are_applied_at_once, BSP()),
)
