"""Windows and joins step by step: what is late, early or taken back, what is kept, and until when."""

from typing import Any

import numpy as np
import pytest
from event_time.pure_runs import Kept
from event_time.test_against_models import LISTED

from streamiter.operators.timed.as_of import AsOfJoin, AsOfWindow, Deduplication
from streamiter.operators.timed.joining import IntervalJoin, WindowJoin
from streamiter.operators.timed.kinds import Hopping, Session, Sliding, calendar
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import AlignedWindows, make_windows
from streamiter.values.times import MAX_TIME

FURTHER = {"was further": 40, "was not": 0}


@pytest.mark.parametrize("kind", [Hopping(10, 10), Sliding(10), Session(10)])
def test_a_key_is_late_by_the_watermark_that_it_had_before(kind: Any) -> None:
    """The step had other subtasks, one of which was further: a window that had been given was given again."""
    windows = make_windows(kind, Aggregates.of(["count"], {}), lateness_ms=5)
    windows.advance(10)
    windows.floor_of = FURTHER.__getitem__
    assert [windows.add(key, 22, [None]) for key in FURTHER] == [False, True]
    assert windows.add("was further", 35, [None])
    assert windows.add("was further", 36, [None])
    windows.advance(MAX_TIME)
    assert not windows.kept
    join = IntervalJoin(0, 5)
    join.floor_of = FURTHER.__getitem__
    assert [join.add("left", key, 22, None) for key in FURTHER] == [False, True]


def test_records_of_a_key_are_late_for_joins_with_a_table_and_duplicates_too() -> None:
    table, window, once = AsOfJoin(), AsOfWindow(10, Aggregates.of(["count"], {})), Deduplication(10)
    for state in (table, window, once):
        state.advance(10)
        state.floor_of = FURTHER.__getitem__
    assert [table.add(key, 39, None) for key in FURTHER] == [False, True]
    assert [window.add(key, 39, None) for key in FURTHER] == [False, True]
    assert [window.add_event(key, 29, [None]) for key in FURTHER] == [False, True]
    assert [once.add(key, 29, 1) for key in FURTHER] == [None, True]
    assert table.add("was further", 40, None)
    assert window.add_event("was further", 30, [None])
    assert once.add("was further", 30, 1)


def test_what_is_needed_no_more_is_forgotten_at_once() -> None:
    once = Deduplication(10)
    once.add("a", 5, "x")
    once.advance(24)
    assert once.kept == 1
    once.advance(25)
    assert (once.kept, once.states) == (0, {})
    for kind in (Hopping(10, 10), Sliding(10), Session(10)):
        windows = make_windows(kind, Aggregates.of(["count"], {}), lateness_ms=5)
        windows.add("a", 3, [None])
        windows.advance(10 if isinstance(kind, Hopping) else 13)
        if not isinstance(kind, Sliding):
            windows.add("a", 4, [None])  # A session grows; it has been given.
        due = {Hopping: 15, Sliding: 18, Session: 19}[type(kind)]
        windows.advance(due - 1)
        assert windows.states
        windows.advance(due)
        assert (windows.kept, windows.states) == (0, {})


def test_by_default_a_version_counts_for_its_own_time_and_an_event_does_not() -> None:
    table, window = AsOfJoin(), AsOfWindow(10, Aggregates.of(["count"], {}))
    table.add_version("a", 5, "v")
    window.add_event("a", 5, [None])
    for state in (table, window):
        state.add("a", 5, "r")
        state.advance(5)
    assert (table.results, window.results) == ([], [(5, ("r", 0))])
    table.advance(6)
    assert table.results == [(5, ("r", "v"))]


@pytest.mark.parametrize("strict", [False, True])
def test_a_record_at_the_watermark_waits_for_versions_of_its_time_unless_they_do_not_count(strict: bool) -> None:
    table = AsOfJoin(strict=strict)
    table.advance(5)
    table.add("a", 5, "r")
    assert table.results == ([(5, ("r", None))] if strict else [])
    table.add_version("a", 5, "v")
    table.advance(6)
    assert table.results == [(5, ("r", None if strict else "v"))]


def test_records_of_one_time_are_given_by_arrival_whatever_their_keys() -> None:
    kept = Kept(AsOfJoin, None)
    for key, time in [("a", 1), ("b", 5), ("a", 5), ("b", 5)]:
        kept.state.add(key, time, key)
    kept.restart()
    kept.state.add("a", 5, "last")
    kept.advance(6)
    assert [record for _, (record, _) in kept.state.results] == ["a", "b", "a", "b", "last"]


def test_a_version_goes_when_the_watermark_passes_the_next_one() -> None:
    table = AsOfJoin()
    table.add_version("a", 1, "old")
    table.add_version("a", 5, "new")
    table.advance(5)
    assert table.states == {"a": [[1, 5], ["old", "new"], []]}
    table.advance(6)
    assert table.states == {"a": [[5], ["new"], []]}


def test_a_late_event_counts_for_the_records_that_are_still_to_come() -> None:
    window = AsOfWindow(10, Aggregates.of([LISTED], {}))
    for time in (1, 2, 3):
        window.add_event("a", time, [time])
    window.add("a", 8, "first")
    window.advance(8)
    window.add_event("a", 2, ["late"])
    window.add("a", 9, "second")
    window.advance(9)
    assert window.results == [(8, ("first", [1, 2, 3])), (9, ("second", [1, 2, "late", 3]))]


# -- windows -----------------------------------------------------------------------------------------------


def shown_results(windows: Any) -> list[Any]:
    """Return the results since the last call: retractions with a minus, early ones with an e, and the revision."""
    return [
        f"{'-' * each.is_retraction}{each.key}[{each.start},{each.end})={each.value}"
        f"{':e' * each.is_early}:r{each.revision}"
        for each in windows.take_results()
    ]


def test_without_options_nothing_is_early_late_or_taken_back_and_the_state_is_small() -> None:
    windows = make_windows(Hopping(10, 10), Aggregates.of(["count"], {}))
    windows.add("a", 5, [None])
    windows.early()
    assert windows.states == {"a": {0: [0, 10, 0, [1], 0, [], False, False, []]}}
    windows.advance(10)
    assert shown_results(windows) == ["a[0,10)=1:r0"]
    assert not windows.add("a", 9, [None])
    assert not windows.states


def test_a_late_window_is_given_once_and_kept_until_its_lateness_is_over() -> None:
    windows = make_windows(Hopping(10, 10), Aggregates.of(["count"], {}), lateness_ms=5)
    windows.advance(12)
    windows.add("a", 5, [None])
    assert shown_results(windows) == ["a[0,10)=1:r0"]
    assert windows.states == {"a": {0: [0, 10, 0, [1], 1, [], True, False, []]}}
    windows.advance(14)
    assert (shown_results(windows), windows.kept) == ([], 1)
    windows.advance(15)
    assert not windows.states


def test_the_next_watermark_with_an_effect_is_known() -> None:
    windows = make_windows(Hopping(10, 10), Aggregates.of(["count"], {}), lateness_ms=5)
    assert windows.next_due() is None
    for time in (15, 5):
        windows.add("a", time, [None])
    assert windows.next_due() == 10
    windows.advance(10)
    assert windows.next_due() == 15
    windows.advance(15)
    assert windows.next_due() == 20
    windows.advance(25)
    assert windows.next_due() is None


def test_early_results_come_by_end_and_creation_whatever_the_keys() -> None:
    windows = make_windows(Hopping(10, 10), Aggregates.of(["count"], {}), gives_early=True)
    for key, time in [("c", 15), ("b", 5), ("a", 5), ("b", 6)]:
        windows.add(key, time, [None])
    windows.early()
    windows.early()
    assert shown_results(windows) == ["b[0,10)=2:e:r0", "a[0,10)=1:e:r0", "c[10,20)=1:e:r0"]
    assert windows.states["b"][0] == [0, 10, 1, [2], 1, [], False, False, []]


def test_a_session_that_only_gets_a_record_takes_nothing_back_but_one_that_grows_does() -> None:
    windows = make_windows(Session(10), Aggregates.of(["count"], {}), lateness_ms=1)
    for time in (0, 5):
        windows.add("a", time, [None])
    windows.advance(15)
    windows.add("a", 3, [None])
    assert shown_results(windows) == ["a[0,15)=2:r0", "a[0,15)=3:r1"]
    windows.add("a", 14, [None])
    windows.advance(24)
    assert shown_results(windows) == ["-a[0,15)=3:r1", "a[0,24)=4:r2"]
    windows.advance(25)
    assert not windows.kept


def test_a_merged_session_is_given_in_the_order_of_its_start() -> None:
    windows = make_windows(Session(10), Aggregates.of(["count"], {}))
    for key, time in [("a", 16), ("b", 10), ("b", 16), ("a", 0), ("a", 8)]:
        windows.add(key, time, [None])
    windows.advance(26)
    assert shown_results(windows) == ["a[0,26)=3:r0", "b[10,26)=2:r0"]


def test_a_late_record_changes_the_sliding_windows_that_contain_it() -> None:
    windows = make_windows(Sliding(10), Aggregates.of(["count"], {}), lateness_ms=100)
    for time in (1, 11, 12, 50):
        windows.add("a", time, [None])
    windows.advance(60)
    windows.take_results()
    windows.add("a", 2, [None])
    assert shown_results(windows) == ["a[-7,3)=2:r0", "a[2,12)=2:r1"]
    windows = make_windows(Sliding(10), Aggregates.of(["count"], {}))
    windows.advance(15)
    # The last window that can have the record 5 ends with 14.
    assert [windows.add("a", time, [None]) for time in (5, 6, 15)] == [False, True, True]
    windows.advance(MAX_TIME)
    assert shown_results(windows) == ["a[6,16)=2:r0"]


def test_windows_of_the_calendar_take_no_columns() -> None:
    windows = AlignedWindows(calendar("day", "UTC"), Aggregates.of(["count"], {}))
    assert not windows.add_batch(np.array([1]), np.array([1]), [None])
    assert not windows.kept


@pytest.mark.parametrize("restarts", [False, True])
def test_unpaired_records_of_one_limit_leave_by_arrival_whatever_their_keys(restarts: bool) -> None:
    kept = Kept(lambda: IntervalJoin(-5, 0, "left"), None)
    for key, time in [("a", 1), ("b", 5), ("a", 5)]:
        kept.state.add("left", key, time, (key, time))
    if restarts:
        kept.restart()
    kept.state.add("left", "b", 5, "last")
    kept.advance(MAX_TIME)
    assert [left for _, (left, _) in kept.state.results] == [("a", 1), ("b", 5), ("a", 5), "last"]


def test_a_record_waits_for_partners_at_the_watermark() -> None:
    join = IntervalJoin(-5, 0)
    join.advance(10)
    join.add("left", "a", 10, "left")
    join.add("right", "a", 10, "right")
    assert join.results == [(10, ("left", "right"))]


@pytest.mark.parametrize(
    ("how", "expected"), [("inner", [0, 0, 0]), ("left", [7, 0, 2]), ("right", [0, 9, 5]), ("full", [7, 9, 5])]
)
def test_a_join_holds_back_the_watermark_for_its_unpaired_records(how: Any, expected: list[int]) -> None:
    assert [IntervalJoin(*bounds, how).held_back_ms() for bounds in [(3, 7), (-9, -4), (-5, 2)]] == expected


def test_a_window_join_has_simultaneous_records_by_arrival_and_knows_late_ones() -> None:
    join = WindowJoin(Hopping(10, 10))
    for side, time, record in [
        ("right", 4, "y"),
        ("right", 4, "x"),
        ("left", 5, "b"),
        ("left", 5, "a"),
        ("left", 4, "c"),
    ]:
        assert join.add(side, "a", time, record)  # type: ignore[arg-type]
    assert join.kept == 1
    join.advance(10)
    assert [pair for _, pair in join.results] == [(left, right) for left in "cba" for right in "yx"]
    join.floor_of = {"a": 0, "was further": 40}.__getitem__
    assert [join.add("left", key, 15, None) for key in ("a", "was further")] == [True, False]
    assert not join.add("left", "a", 9, None)
