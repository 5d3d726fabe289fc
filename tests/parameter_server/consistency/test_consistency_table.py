"""The table of ASP, BSP and SSP, cell by cell."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.errors import InternalError, OutOfTurn, UnknownWorker
from streamiter.parameter_server.consistency import (
    ASP,
    BSP,
    SSP,
    Consistency,
    ConsistencyModel,
    Released,
    consistency_model,
)

Model = ConsistencyModel[str, str]
ALL = [ASP(), BSP(), SSP(0), SSP(2)]


def model_at(consistency: Consistency, clocks: dict[int, int]) -> Model:
    """Return a model whose workers have finished this many iterations."""
    model: Model = consistency_model(consistency, clocks, name="matrix 'w'")
    for worker, clock in clocks.items():
        for _ in range(clock):
            model.tracker.advance_and_get_changed_min_clock(worker)
    return model


# -- all three -----------------------------------------------------------------------------------------


CALLS: dict[str, tuple[Any, ...]] = {
    "add": ("a",),
    "get": ("g",),
    "clock": (),
    "leave": (),
    "raise_worker": (3,),
    "merge_pending": (lambda adds: adds,),
}
"""The arguments of each call of a worker, after the worker's number."""


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_an_unknown_worker_is_an_error_everywhere(consistency: Consistency) -> None:
    """An unknown worker's add changed the model, and no clock ever accounted for it."""
    model = model_at(consistency, {3: 1, 4: 0})
    for name, arguments in CALLS.items():
        with pytest.raises(UnknownWorker, match=r"^matrix 'w': worker 9 takes no part: expected one of 3, 4;"):
            getattr(model, name)(9, *arguments)
        assert model.waiting_gets == 0, name
        assert list(model.pending_adds()) == [], name


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_every_clock_of_a_single_worker_finishes_an_iteration(consistency: Consistency) -> None:
    """A single worker waited for other workers, or its shard did not step with each of its clocks."""
    model = model_at(consistency, {5: 0})
    for clock in range(1, 4):
        assert model.get(5, "g")
        added_now = model.add(5, f"a{clock}")
        adds = [] if added_now else [f"a{clock}"]
        assert model.clock(5) == [Released(clock, adds, [])]


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_a_worker_joins_at_the_clock_of_the_slowest(consistency: Consistency) -> None:
    """A worker that joined late was out of turn, or the others did not wait for it."""
    model = model_at(consistency, {0: 3, 1: 2})
    assert model.join(7) == 2
    assert model.get(7, "g")
    model.add(7, "a")
    assert model.clock(1) == []
    assert [move.clock for move in model.clock(7)] == [3]


def test_an_unknown_consistency_is_refused() -> None:
    """A consistency without a model of its own was treated as one of the three."""
    with pytest.raises(InternalError, match=r"expected ASP\(\), BSP\(\) or SSP\(staleness=…\), given Consistency\(\)"):
        consistency_model(Consistency(), [0])


# -- ASP -----------------------------------------------------------------------------------------------


def test_asp_applies_and_answers_at_once_however_far_ahead() -> None:
    """The slowest of many workers slowed down a run under ASP."""
    model = model_at(ASP(), {0: 100, 1: 0})
    assert model.add(0, "a")
    assert model.get(0, "g")
    assert model.clock(0) == []
    assert model.tracker.get_progress(0) == 101


# -- BSP -----------------------------------------------------------------------------------------------


def test_bsp_keeps_adds_until_all_have_clocked() -> None:
    """Workers saw adds of the same iteration, so the result depended on which worker was faster."""
    model = model_at(BSP(), {0: 0, 1: 0})
    assert not model.add(1, "b")
    assert not model.add(0, "a")
    assert list(model.pending_adds()) == ["a", "b"]
    assert list(model.pending_adds(0)) == ["a"]
    assert model.get(0, "g")
    assert model.clock(0) == []
    assert model.clock(1) == [Released(1, ["a", "b"], [])]
    assert list(model.pending_adds()) == []


def test_bsp_answers_at_the_minimum_and_parks_one_ahead() -> None:
    """A get after a clock was answered before all workers had added in the finished iteration."""
    model = model_at(BSP(), {0: 1, 1: 0, 2: 1})
    assert model.get(1, "slow")
    assert not model.get(2, "first")
    assert not model.get(0, "second")
    assert model.waiting_gets == 2
    model.add(1, "last add")
    assert model.clock(1) == [Released(1, ["last add"], ["first", "second"])]
    assert model.waiting_gets == 0


def test_bsp_refuses_an_add_of_a_worker_that_is_ahead() -> None:
    """An add of a worker ahead was dropped silently, or applied in an iteration whose weights it had not seen."""
    model = model_at(BSP(), {3: 2, 4: 1})
    with pytest.raises(OutOfTurn) as error:
        model.add(3, "a")
    assert str(error.value) == (
        "matrix 'w': an add of worker 3 is out of turn under BSP: expected it at clock 1, given clock 2, while the "
        "minimum clock is 1; await a get after each clock, it waits for the others"
    )
    assert list(model.pending_adds()) == []


def test_bsp_refuses_a_second_clock_ahead_of_the_others() -> None:
    """A worker was two iterations ahead, and the adds of two iterations were mixed in one buffer."""
    model = model_at(BSP(), {3: 1, 4: 0})
    with pytest.raises(
        OutOfTurn, match="a clock of worker 3 is out of turn under BSP: expected it at clock 0, given clock 1"
    ):
        model.clock(3)
    assert model.tracker.get_progress(3) == 1


def test_bsp_refuses_a_get_more_than_one_ahead() -> None:
    """A raised worker asked more than one clock ahead, and its get waited for adds that no worker made yet."""
    model = model_at(BSP(), {3: 2, 4: 0})
    with pytest.raises(
        OutOfTurn, match="a get of worker 3 is out of turn under BSP: expected it at at most clock 1, given"
    ):
        model.get(3, "g")
    assert model.waiting_gets == 0


def test_bsp_accepts_calls_in_turn_on_another_shard_at_their_own_clock() -> None:
    """A shard that received a clock late refused the call, or put its add into the previous iteration."""
    model = model_at(BSP(), {0: 1, 1: 0})
    model.add(1, "of clock 0")
    assert not model.get(0, "g of clock 1", 1)
    assert not model.add(0, "of clock 1", 1)
    assert model.clock(0, 1) == []
    assert not model.get(0, "g of clock 2", 1)
    assert model.clock(1) == [Released(1, ["of clock 0"], ["g of clock 1"])]
    assert model.clock(1, 1) == [Released(2, ["of clock 1"], ["g of clock 2"])]


def test_bsp_keeps_the_adds_of_a_worker_that_leaves() -> None:
    """The sum of an iteration lacked the adds of a worker that left before the end of the iteration."""
    model = model_at(BSP(), {0: 0, 1: 0})
    model.add(0, "a")
    model.add(1, "b")
    assert model.clock(1) == []
    assert not model.get(1, "g")
    assert model.leave(0) == [Released(1, ["a", "b"], ["g"])]


def test_bsp_applies_the_remaining_adds_when_the_last_worker_leaves() -> None:
    """The last gradients of a training were lost, because the workers left and no worker clocked after them."""
    model = model_at(BSP(), {0: 0, 1: 0})
    model.add(0, "a")
    model.clock(0)
    assert model.leave(0) == []
    model.add(1, "b")
    assert model.leave(1) == [Released(1, ["a", "b"], [])]
    assert model.take_orphaned_adds() == []
    assert model.join(2) == 1


def test_bsp_applies_an_unfinished_iteration_when_the_last_worker_leaves_and_does_not_end_it() -> None:
    """The shard with adds ended the iteration, the shards without did not, and their minimum clocks differed."""
    model = model_at(BSP(), {0: 0, 1: 0})
    model.add(0, "a")
    model.add(1, "b")
    assert model.leave(0) == []
    assert model.take_orphaned_adds() == []
    assert model.leave(1) == []
    assert model.take_orphaned_adds() == ["a", "b"]
    assert not list(model.pending_adds())
    assert model.join(2) == 0


def test_bsp_sums_up_the_adds_of_one_worker_in_this_iteration() -> None:
    """Many small adds in one iteration took unbounded memory, or adds of two iterations were summed up together."""
    model = model_at(BSP(), {0: 0, 1: 0})
    model.add(0, "a")
    model.clock(0)
    for add in ("b", "c", "d"):
        model.add(0, add, 1)
        model.add(1, add.upper(), 1)
    assert list(model.pending_adds(0)) == ["a", "b", "c", "d"]
    model.merge_pending(0, lambda adds: ["+".join(adds)])
    assert list(model.pending_adds(0)) == ["a", "b+c+d"]
    assert list(model.pending_adds()) == ["a", "B", "C", "D", "b+c+d"]
    assert model.clock(1) == [Released(1, ["a", "B", "C", "D"], [])]


def test_bsp_returns_the_adds_of_a_worker_in_order_of_its_clocks() -> None:
    """A worker's own adds were summed in another order than they were later applied in, so the last digits differed."""
    model = model_at(BSP(), {0: 1, 1: 0, 2: 0})
    model.add(0, "of another worker, a clock ahead", 1)
    model.add(1, "of clock 0")
    model.clock(1)
    model.add(1, "of clock 1", 1)
    assert list(model.pending_adds(1)) == ["of clock 0", "of clock 1"]


def test_bsp_calls_no_merge_without_pending_adds() -> None:
    """A merge without adds failed, because an empty sum has no shape."""
    model = model_at(BSP(), {0: 0})
    model.merge_pending(0, lambda adds: pytest.fail("there is nothing to merge"))


@pytest.mark.parametrize("merged", [[], ["a", "b", "c"]])
def test_bsp_refuses_a_merge_that_loses_or_invents_adds(merged: list[str]) -> None:
    """A merge lost a sum, and the loss went unnoticed until the model was wrong."""
    model = model_at(BSP(), {0: 0})
    model.add(0, "a")
    model.add(0, "b")
    with pytest.raises(InternalError, match=f"adds of worker 0 at clock 0: expected 1 to 2, given {len(merged)}"):
        model.merge_pending(0, lambda adds: merged)
    assert list(model.pending_adds()) == ["a", "b"]


def test_bsp_restores_the_adds_that_waited() -> None:
    """A restored shard lost the buffered adds of all workers in the current iteration."""
    model = model_at(BSP(), {0: 1, 1: 0})
    model.add(1, "b")
    model.add(0, "a", 1)
    model.get(0, "g", 1)
    restored = model_at(BSP(), {8: 0})
    restored.add(8, "of before")
    restored.get(8, "at once")

    assert restored.restore(model.snapshot()) == []

    assert restored.waiting_gets == 0
    assert restored.clock(1) == [Released(1, ["b"], [])]
    assert restored.clock(0) == []
    assert restored.clock(1) == [Released(2, ["a"], [])]


def test_bsp_applies_adds_of_an_already_passed_clock_with_the_next_move() -> None:
    """A shard that restored the clocks of another shard lost adds of a clock that its minimum had passed."""
    model = model_at(BSP(), {})
    model.restore(
        {"tracker": {"progress": {1: 5}, "min_clock": 5, "highest": 5}, "adds": [(3, 0, "late"), (5, 1, "a")]}
    )
    assert model.clock(1) == [Released(6, ["late", "a"], [])]


# -- SSP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_answers_up_to_its_bound_and_parks_beyond(staleness: int) -> None:
    """Gets exactly at the bound waited, so workers of equal speed waited for each other."""
    model = model_at(SSP(staleness), {0: staleness, 1: 0})
    assert model.get(0, "at the bound")
    model.clock(0)
    assert not model.get(0, "beyond")
    assert model.clock(1) == [Released(1, [], ["beyond"])]


def test_ssp_never_blocks_an_add() -> None:
    """Adds of a fast worker waited, although SSP bounds only the age of the values that it reads."""
    model = model_at(SSP(1), {0: 50, 1: 0})
    assert model.add(0, "a")
    assert model.clock(0) == []


def test_ssp_releases_the_gets_parked_at_each_clock_in_order_of_arrival() -> None:
    """A get was released at the wrong clock and saw too few adds, or was released out of order and starved."""
    model = model_at(SSP(1), {0: 3, 1: 2, 2: 3, 3: 0})
    for worker in (2, 1, 0):
        assert not model.get(worker, f"g{worker}")
    assert model.clock(3) == [Released(1, [], ["g1"])]
    assert model.clock(3) == [Released(2, [], ["g2", "g0"])]


def test_ssp_0_reads_like_bsp_and_adds_at_once() -> None:
    """SSP(0) made other gets wait than BSP; the two must differ only in when adds are seen."""
    model = model_at(SSP(0), {0: 1, 1: 0})
    assert model.add(0, "a")
    assert not model.get(0, "g")
    assert model.get(1, "g")
    assert model.clock(1) == [Released(1, [], ["g"])]


def test_ssp_does_not_answer_by_a_clock_observed_on_another_shard() -> None:
    """A get was answered by a clock seen on another shard before the slowest worker's adds had arrived here."""
    model = model_at(SSP(0), {0: 1, 1: 0})
    assert not model.get(0, "g", 1)


@pytest.mark.parametrize("leave", [True, False], ids=["leave", "raise"])
def test_a_move_by_several_clocks_releases_them_one_by_one(leave: bool) -> None:
    """A get for a clock that the minimum skipped waited forever."""
    model = model_at(SSP(1), {0: 2, 1: 3, 2: 0})
    assert not model.get(1, "wants 2")
    assert not model.get(0, "wants 1")
    released = model.leave(2) if leave else model.raise_worker(2, 2)
    assert released == [Released(1, [], ["wants 1"]), Released(2, [], ["wants 2"])]
    assert model.waiting_gets == 0


# -- other ends of a wait ------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
def test_a_cancelled_get_is_not_released(consistency: Consistency) -> None:
    """A cancelled get was answered: the shard read its memory for a reply that no caller received."""
    model = model_at(consistency, {0: 1, 1: 0, 2: 1})
    model.get(0, "g0")
    model.get(2, "g2")
    model.get(0, "g0 again")
    assert model.waiting_gets == 3
    model.forget("g0")
    model.forget("g0")
    model.forget("never seen")
    assert model.waiting_gets == 2
    assert [move.gets for move in model.clock(1)] == [["g2", "g0 again"]]


@pytest.mark.parametrize("consistency", ALL, ids=repr)
def test_a_reset_returns_all_waiting_requests_and_starts_over(consistency: Consistency) -> None:
    """Requests parked before a reset waited forever, or were answered from the next run."""
    model = model_at(consistency, {0: 0, 1: 0})
    model.add(1, "b")
    model.add(0, "a")
    buffered = list(model.pending_adds())
    for _ in range(3):
        model.tracker.advance_and_get_changed_min_clock(0)
    waiting = [] if model.get(0, "g", 2) else ["g"]

    assert model.reset([1, 2]) == (buffered, waiting)

    assert model.tracker.workers == (1, 2)
    assert model.tracker.get_min_clock() == 0
    assert (model.waiting_gets, list(model.pending_adds())) == (0, [])
    assert model.clock(1) == []
    assert model.clock(2) == [Released(1, [], [])]


def test_a_restore_returns_the_waiting_gets() -> None:
    """A get that waited during a restore was never answered, because it was not part of the restored state."""
    model = model_at(SSP(0), {0: 1, 1: 0})
    state = model.snapshot()
    model.get(0, "g")
    assert model.restore(state) == ["g"]
    assert model.clock(1) == [Released(1, [], [])]


@pytest.mark.parametrize("held_clocks", range(5))
@pytest.mark.parametrize("clock", range(4))
def test_clocks_that_a_checkpoint_holds_back_count_for_the_staleness_of_a_get(clock: int, held_clocks: int) -> None:
    """A worker after its barrier read ahead of the others by more than the staleness bound."""
    model = model_at(SSP(2), {0: clock, 1: 1})
    is_within_bound = clock + held_clocks <= min(clock, 1) + 2
    assert model.get(0, "g", held_clocks=held_clocks) is is_within_bound
