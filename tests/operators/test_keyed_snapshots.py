"""Snapshots of keyed state are frozen at the barrier, and encoded in slices while records change the state."""

import random
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from operators.keyed_snapshots import (
    PLAIN,
    CopiedState,
    MakeStates,
    by_key,
    items_of,
    keyed_state,
    restore,
    restored,
    small_slices,
)
from operators.operator_harness import Driven, ManualClock, frozen, quick

from streamiter.engine.states import rocks_state
from streamiter.errors import InternalError, PlainDataError
from streamiter.operators import KeyedReduce, KeyedReduceBatch, Operator, StatefulMap
from streamiter.operators.keyed_state import FrozenStates, in_turns, select_keys

TIME_TO_LIVE_S = 10.0
KEYS = st.integers(0, 11) | st.sampled_from(["a", "b", ("a", 1)])
VALUES = st.none() | st.integers(0, 9) | st.builds(lambda number: {"seen": [number]}, st.integers(0, 9))


class AnyInterleaving(RuleBasedStateMachine):
    """A keyed state, and a reference that copies everything at each barrier, receive the same calls."""

    time_to_live_s: float | None = None
    make: MakeStates

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.state = self.make(self.clock, self.time_to_live_s)
        self.oracle = CopiedState(self.clock, self.time_to_live_s)
        self.under_way: list[tuple[Any, Iterator[bytes], list[bytes], Any]] = []

    @rule(key=KEYS, number=st.integers(0, 9))
    def change_in_place(self, key: Any, number: int) -> None:
        for states in (self.state, self.oracle):
            state = states.get(key)
            if isinstance(state, dict):
                state.setdefault("seen", []).append(number)
        self.end_call(number)

    def end_call(self, number: int) -> None:
        """Keep the changes, mostly at once: a call may use several keys."""
        if number % 3:
            self.state.store()

    @rule(key=KEYS, value=VALUES)
    def replace(self, key: Any, value: Any) -> None:
        for states in (self.state, self.oracle):
            states.set(key, PLAIN.decode(PLAIN.encode(value)))
        self.state.store()

    @rule(keys=st.lists(KEYS, min_size=4), value=VALUES)
    def fill(self, keys: list[Any], value: Any) -> None:
        for key in keys:
            self.replace(key, value)

    @rule(key=KEYS)
    def delete(self, key: Any) -> None:
        for states in (self.state, self.oracle):
            states.delete(key)
        self.state.store()

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def drop_expired(self) -> None:
        self.state.store()
        for _ in range(8):  # A sweep of the database has several parts; it begins when no checkpoint is made.
            while self.state.drop_expired() == 0:
                pass
        self.oracle.drop_expired()

    @rule()
    def clear(self) -> None:
        for states in (self.state, self.oracle):
            states.clear()

    @precondition(lambda self: len(self.under_way) < 3)
    @rule()
    def barrier(self) -> None:
        self.state.store()
        snapshot = self.state.snapshot()
        self.under_way.append((snapshot, snapshot.frames(), [], by_key(self.oracle.snapshot())))

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 2), slices=st.integers(1, 3))
    def advance(self, which: int, slices: int) -> None:
        _, frames, taken, _ = self.under_way[which % len(self.under_way)]
        taken += islice(frames, slices)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 2))
    def abandon(self, which: int) -> None:
        self.under_way.pop(which % len(self.under_way))[0].release()

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 2))
    def finish(self, which: int) -> None:
        _, frames, taken, expected = self.under_way.pop(which % len(self.under_way))
        taken += frames
        assert by_key(items_of(taken)) == expected

    def teardown(self) -> None:
        while self.under_way:
            self.finish(0)
        assert by_key(items_of(self.state.snapshot().frames())) == by_key(self.oracle.snapshot())


@pytest.mark.parametrize("remember", [False, True])
@pytest.mark.parametrize("time_to_live_s", [None, TIME_TO_LIVE_S])
def test_a_snapshot_is_the_state_at_its_barrier_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch, time_to_live_s: float | None, remember: bool, make_states: MakeStates
) -> None:
    """If a count changed between barrier and encoding, the replayed records would count twice."""
    small_slices(monkeypatch, remember=remember)
    monkeypatch.setattr(rocks_state, "_SWEPT_AT_ONCE", 3)
    monkeypatch.setattr(rocks_state, "_SWEEP_MIN_S", 0.0)
    given = {"time_to_live_s": time_to_live_s, "make": staticmethod(make_states)}
    machine = type("Machine", (AnyInterleaving,), given)
    # A database for each example takes longer than its steps.
    examples = 30 if make_states is keyed_state else 6
    phases = list(Phase) if make_states is keyed_state else [Phase.generate]
    steps = settings(max_examples=examples, stateful_step_count=40, deadline=None, phases=phases)
    run_state_machine_as_test(machine, settings=steps)


def remember_all(seen: list[int], record: int) -> tuple[list[int], int]:
    seen.append(record)
    return seen, len(seen)


OPERATORS: dict[str, Callable[[], Operator]] = {
    "StatefulMap": lambda: StatefulMap(lambda record: record % 20, remember_all, list),
    "KeyedReduce": lambda: KeyedReduce(lambda record: record % 20, lambda total, record: total + record),
    "KeyedReduceBatch": lambda: KeyedReduceBatch(lambda batch: np.asarray(batch) % 20, np.add),
}
BATCHES = st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=8)


@pytest.mark.parametrize("name", OPERATORS)
@quick
@given(before=BATCHES, after=BATCHES, as_arrays=st.booleans())
def test_batches_between_two_slices_are_not_in_the_snapshot(
    name: str, before: list[list[int]], after: list[list[int]], as_arrays: bool
) -> None:
    """A key that changed before its slice was stored with records that are read again after a restore."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_slices(monkeypatch)
        cut: Callable[[list[int]], Any] = np.array if as_arrays else list
        driven = Driven(OPERATORS[name]()).feed(*map(cut, before))
        at_once = frozen([items_of(driven.operator.snapshot().frames())])
        frames = driven.operator.snapshot().frames()
        taken: list[bytes] = []
        for batch in after:
            taken += islice(frames, 1)
            driven.feed(cut(batch))
        taken += frames
    assert frozen([items_of(taken)]) == at_once


@pytest.mark.parametrize("time_to_live_s", [None, TIME_TO_LIVE_S])
def test_keys_are_restored_in_their_order(time_to_live_s: float | None) -> None:
    """A step that iterates over its keys would use another order after a restore."""
    clock = ManualClock()
    state = keyed_state(clock, time_to_live_s)
    for key in (3, "b", 1, ("x", 2), 2):
        state.set(key, {"of": key})
    state.delete(1)
    state.set(1, "again")
    snapshot = state.snapshot()
    state.get(2)["late"] = True
    state.get(3)["late"] = True
    other = keyed_state(clock, time_to_live_s)
    other.restore(restored(snapshot))
    assert [key for key, *_ in items_of(other.snapshot().frames())] == [3, "b", ("x", 2), 2, 1]
    assert frozen(items_of(other.snapshot().frames()))[1][0] == frozen(
        (3, {"of": 3}, *([0.0] if time_to_live_s else []))
    )


def test_a_time_to_live_may_be_added_or_removed_between_two_runs(make_states: MakeStates) -> None:
    """A flow that gains or loses its time to live must still start from its stored state."""
    clock = ManualClock()
    without, with_one = make_states(clock), make_states(clock, TIME_TO_LIVE_S)
    without.set("a", 1)
    restore(with_one, restored(without.snapshot()))
    clock.now_s += TIME_TO_LIVE_S - 1
    assert with_one.get("a") == 1
    restore(without, restored(with_one.snapshot()))
    clock.now_s += TIME_TO_LIVE_S + 1
    assert (without.get("a"), with_one.get("a")) == (1, {})


def test_the_states_of_a_restore_are_distributed_by_key(make_states: MakeStates) -> None:
    """With another parallelism, a subtask receives some keys of each earlier subtask."""
    state = make_states(ManualClock(), TIME_TO_LIVE_S)
    for key in range(40):
        state.set(key, {"of": key})
    other = make_states(ManualClock(), TIME_TO_LIVE_S)
    other.set("from before", 1)
    restore(other, select_keys(restored(state.snapshot()), lambda keys: [key % 3 == 1 for key in keys]))
    assert len(items_of(other.snapshot().frames())) == 13
    assert all(other.get(key) == {"of": key} for key in range(1, 40, 3))


class TestErrors:
    def snapshot_of(self, state: Any, *, touched: bool) -> FrozenStates:
        states = keyed_state(ManualClock())
        for key in range(40):
            states.set(key, {"tags": 1})
        states.set("user-7", state)
        snapshot = states.snapshot()
        if touched:
            states.get("user-7")
        assert isinstance(snapshot, FrozenStates)
        return snapshot

    @pytest.mark.parametrize("touched", [False, True])
    @pytest.mark.parametrize("value", [{1, 2}, threading.Lock()], ids=["copyable", "not copyable"])
    def test_state_that_is_not_plain_data_is_named_with_step_and_key(self, value: Any, touched: bool) -> None:
        """One of a million keys had a set in its state, and the error "cannot serialize" did not name the key."""
        snapshot = self.snapshot_of({"tags": value}, touched=touched)
        assert snapshot.name == "count"
        with pytest.raises(
            PlainDataError,
            match=r"^state of step 'count', key 'user-7': state\[\"tags\"\]: expected plain data .* given",
        ):
            list(snapshot.frames())

    @pytest.mark.parametrize("touched", [False, True])
    def test_a_state_that_contains_itself_is_named(self, touched: bool) -> None:
        """The copy of such a state never ended, and the error blamed the current record."""
        value: dict[str, Any] = {}
        value["self"] = value
        with pytest.raises(PlainDataError, match=r"^state of step 'count', key 'user-7': state.*nesting"):
            list(self.snapshot_of(value, touched=touched).frames())

    def test_a_key_that_is_not_plain_data_is_named(self) -> None:
        """States without an operator take keys of any kind."""
        states = keyed_state(ManualClock())
        states.set(frozenset({1}), {"n": 1})
        with pytest.raises(PlainDataError, match=r"^state of step 'count': key: expected .* given frozenset"):
            list(states.snapshot().frames())


def test_a_released_snapshot_keeps_no_state_and_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that was released before its end was stored as if it were complete, and still copied every state."""
    small_slices(monkeypatch)
    state = keyed_state(ManualClock())
    for key in range(10):
        state.set(key, {"n": 1})
    snapshot, held = state.snapshot(), state.get(9)
    frames = snapshot.frames()
    next(frames)
    snapshot.release()
    snapshot.release()
    assert state.get(9) is held
    with pytest.raises(InternalError, match="'count' was released before all of it was read"):
        next(frames)
    assert len(items_of(state.snapshot().frames())) == 10


def test_a_snapshot_that_is_done_costs_nothing_more() -> None:
    """The state made copies for snapshots that were already stored."""
    state = keyed_state(ManualClock())
    state.set("a", {"n": 1})
    list(state.snapshot().frames())
    state.snapshot().release()
    assert state._unfinished == []


def test_large_states_that_are_encoded_are_not_copied() -> None:
    """All large states were in memory twice, although most of them were already encoded."""
    state = keyed_state(ManualClock())
    for key in range(30):
        state.set(key, {"weights": np.zeros(1 << 17)})
    frames = state.snapshot().frames()
    for _ in range(10):
        next(frames)
    tracemalloc.start()
    try:
        for key in range(10):
            state.get(key)["weights"] += 1
        copied_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert copied_bytes < 1 << 20
    assert {float(entry["weights"].sum()) for _, entry in items_of(frames)} == {0.0}


def test_copies_are_freed_once_they_are_encoded() -> None:
    """All states were in memory twice until the last slice; freeing them all at once then took long."""
    state = keyed_state(ManualClock())
    for key in range(20_000):
        state.set(key, [0] * 20)
    frames = state.snapshot().frames()
    tracemalloc.start()
    try:
        for key in range(20_000):
            state.get(key)
        copied_bytes, _ = tracemalloc.get_traced_memory()
        for _ in islice(frames, 10):
            pass
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < len(items_of(frames)) < 5_000
    assert left_bytes < copied_bytes / 2


@pytest.mark.parametrize("value", [1, "x" * 100, "x" * 5000, {"a": [(1, 2)] * 50}])
def test_frames_are_small_whatever_the_states_are(value: Any) -> None:
    """A slice of a hundred megabytes delayed all records until it was encoded."""
    state = keyed_state(ManualClock())
    for key in range(10_000):
        state.set(key, value)
    sizes = [len(frame) for frame in state.snapshot().frames()]
    assert max(sizes) < 300_000
    assert len(sizes) < 1000


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Let threads alternate a hundred times as often as usual."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("eager_threads")
def test_states_that_change_in_a_thread_are_whole_in_the_snapshot() -> None:
    """A step with ``runs_in_thread`` continued during the encoding, and the snapshot contained half a change."""
    count = 60_000
    state = keyed_state(ManualClock(), in_thread=True)
    for key in range(count):
        state.set(key, {"first": 0, "second": 0})
    snapshot = state.snapshot()
    keys = random.Random(1).choices(range(2 * count), k=10 * count)
    begun, finished = threading.Event(), threading.Event()

    def change() -> None:
        for key in keys:
            if finished.is_set():
                return
            begun.set()
            one = state.get(key)
            one["first"] = one.get("first", 0) + 1
            one["second"] = one["first"]

    thread = threading.Thread(target=change)
    thread.start()
    begun.wait()
    try:
        taken = list(snapshot.frames())
    finally:
        finished.set()
        thread.join()
    assert items_of(taken) == [(key, {"first": 0, "second": 0}) for key in range(count)]
    changed = [one for _, one in items_of(state.snapshot().frames()) if one["first"]]
    assert changed
    assert all(one["first"] == one["second"] for one in changed)


def test_two_snapshots_at_once_are_independent(make_states: MakeStates) -> None:
    """A second snapshot during the first one ended the first early, or used its states."""
    driven = Driven(OPERATORS["StatefulMap"](), make_states=make_states).feed([1, 2, 3])
    first = driven.operator.snapshot()
    driven.feed([1, 2, 3])
    second = driven.operator.snapshot()
    driven.feed([1, 2, 3])
    assert by_key(items_of(second.frames())) == by_key([(1, [1, 1]), (2, [2, 2]), (3, [3, 3])])
    assert by_key(items_of(first.frames())) == by_key([(1, [1]), (2, [2]), (3, [3])])


# ---- what a state is, wherever it is kept

ODD_KEYS = [0, -1, 2**63, 2**70, -(2**70), "", "1", b"1", ("1",), (1, ("a", b"")), "\ud800", 1]
ODD_STATES = [
    None, True, 2**80, -0.0, float("nan"), "\ud800", (1, [2, (3,)]), {(1, "a"): {"b": [b""]}}, np.float32(0.1),
    np.arange(6, dtype=">i2").reshape(2, 3), [np.zeros(0), np.zeros(5000)],
]  # fmt: skip


@pytest.mark.parametrize("keys_at_once", [1, 3, 8192])
def test_all_keys_and_states_are_kept_exactly(
    make_states: MakeStates, keys_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuple became a list, or the keys 1 and "1" shared a state."""
    monkeypatch.setattr(rocks_state, "_KEYS_AT_ONCE", keys_at_once)
    states = make_states(ManualClock())
    expected = [(key, (key, state)) for key, state in zip(ODD_KEYS, [*ODD_STATES, 0], strict=True)]
    for key, value in expected:
        states.set(key, value)
    states.store()
    assert [frozen(states.get(key)) for key in ODD_KEYS] == [frozen(value) for _, value in expected]
    states.store()
    other = make_states(ManualClock())
    restore(other, restored(states.snapshot()))
    assert by_key(items_of(other.snapshot().frames())) == by_key(expected)
    for keys, _ in in_turns(other, ODD_KEYS, [*ODD_KEYS]):
        for key in keys:
            other.load(keys)[key] = "new"
    assert {other.get(key) for key in ODD_KEYS} == {"new"}


def test_a_state_is_the_object_that_was_changed_in_place_until_the_call_returns(make_states: MakeStates) -> None:
    """A state was read a second time within a call, and the first change was lost."""
    states = make_states(ManualClock())
    first = states.get("a")
    first["n"] = 1
    assert states.get("a") is first
    states.prefetch(["a", "b"])
    assert states.get("a") is states.load(["a"])["a"] is first
    first["n"] += 1
    states.store()
    assert states.get("a") == {"n": 2}
    states.set("a", [1])
    states.get("a").append(2)
    states.delete("b")
    states.store()
    assert (states.get("a"), states.get("b")) == ([1, 2], {})
    states.store()
    assert by_key(items_of(states.snapshot().frames())) == by_key([("a", [1, 2]), ("b", {})])


def test_a_record_that_is_refused_leaves_only_what_it_has_changed_in_place(make_states: MakeStates) -> None:
    """With states on disk, a change before the error was lost, so a restart changed the results."""

    def count(state: list[int], record: int) -> tuple[list[int], list[int]]:
        state.append(record)
        if record % 3 == 0:
            raise ValueError(record)
        return state, list(state)

    def results(make: MakeStates) -> Any:
        operator = StatefulMap(lambda record: record % 2, count, list)
        driven = Driven(operator, policy="skip", make_states=make).feed([3, 1], [3, 6], [5, 2])
        return driven.records, by_key(items_of(operator.snapshot().frames()))

    assert results(make_states) == results(keyed_state)
    assert results(make_states)[0] == [[1], [1, 3, 5], [2]]


def test_a_state_that_is_not_plain_data_is_named_at_the_latest_in_the_snapshot(make_states: MakeStates) -> None:
    """The error did not name the key."""
    driven = Driven(StatefulMap(lambda record: record, lambda state, record: ({record}, 0)), make_states=make_states)
    with pytest.raises(PlainDataError, match=r"^state of step '.*', key 7: state: expected plain data .* given set"):
        list(driven.feed([7]).operator.snapshot().frames())
