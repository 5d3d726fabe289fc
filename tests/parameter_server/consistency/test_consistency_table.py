"""The table of ASP, BSP and SSP, cell by cell; joins, leaves and restores are compared with the brute force."""

from typing import Any

import pytest

from streamiter.errors import OutOfTurn, UnknownWorker
from streamiter.parameter_server.consistency import ASP, BSP, SSP, Consistency, ConsistencyModel, Released

Model = ConsistencyModel[str, str]
ALL = [ASP(), BSP(), SSP(0), SSP(2)]


def model_at(consistency: Consistency, clocks: dict[int, int]) -> Model:
    """Return a model whose workers have finished this many iterations."""
    model: Model = ConsistencyModel(consistency, clocks, name="matrix 'w'")
    for worker, clock in clocks.items():
        for _ in range(clock):
            model.tracker.advance_and_get_changed_min_clock(worker)
    return model


# -- all three -----------------------------------------------------------------------------------------


CALLS: dict[str, tuple[Any, ...]] = {"add": ("a",), "get": ("g",), "clock": (), "leave": (), "raise_worker": (3,)}
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
    model.add(1, ["last add"])
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


def test_bsp_returns_the_adds_of_a_worker_in_order_of_its_clocks() -> None:
    """A worker's own adds were summed in another order than they were later applied in, so the last digits differed."""
    model = model_at(BSP(), {0: 1, 1: 0, 2: 0})
    model.add(0, ["of another worker, a clock ahead"], 1)
    model.add(1, ["of clock 0"])
    model.clock(1)
    model.add(1, ["of clock 1"], 1)
    assert list(model.pending_adds(1)) == ["of clock 0", "of clock 1"]


def test_bsp_applies_adds_of_an_already_passed_clock_with_the_next_move() -> None:
    """A shard that restored the clocks of another shard lost adds of a clock that its minimum had passed."""
    model = model_at(BSP(), {})
    model.restore(
        {
            "tracker": {"progress": {1: 5}, "min clock": 5, "highest": 5},
            "adds": {"by clock": [(3, 0, ["late"]), (5, 1, ["a"])]},
        }
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


# -- other ends of a wait ------------------------------------------------------------------------------


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


def test_a_restore_forgets_the_waiting_gets() -> None:
    """A get that had failed with the restore would be answered once more, when its clock is reached."""
    model = model_at(SSP(0), {0: 1, 1: 0})
    state = model.state()
    model.get(0, "g")
    model.restore(state)
    assert model.waiting_gets == 0
    assert model.clock(1) == [Released(1, [], [])]


@pytest.mark.parametrize("held_clocks", range(5))
@pytest.mark.parametrize("clock", range(4))
def test_clocks_that_a_checkpoint_holds_back_count_for_the_staleness_of_a_get(clock: int, held_clocks: int) -> None:
    """A worker after its barrier read ahead of the others by more than the staleness bound."""
    model = model_at(SSP(2), {0: clock, 1: 1})
    is_within_bound = clock + held_clocks <= min(clock, 1) + 2
    assert model.get(0, "g", held_clocks=held_clocks) is is_within_bound
