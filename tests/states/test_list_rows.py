"""Lists of keys in the rows of a database: what is written, what stays in memory, and what is read again."""

import contextlib
import threading
from bisect import insort
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from operators.operator_harness import ManualClock
from support.examples import random_examples
from support.waiting import PATIENCE_S

from streamiter import RocksState
from streamiter.engine.states import database as database_module
from streamiter.engine.states import list_rows
from streamiter.engine.states.database import Database
from streamiter.engine.states.list_rows import ListRows
from streamiter.engine.states.rocks_state import RocksStates
from streamiter.engine.states.stored import whole_states
from streamiter.errors import CheckpointError, PlainDataError
from streamiter.operators.timed.joining import IntervalJoin
from streamiter.values.plain_data import PlainData
from streamiter.values.subtasks import encode_each_key

PLAIN = PlainData()


def row_keys(keys: list[Any]) -> list[bytes]:
    return [b"\x01" + key for key in encode_each_key(keys)]


class Step:
    """A step with two lists for each key, as a join has them, in a database; None: in memory only."""

    def __init__(self, database: Database | None) -> None:
        self.states: dict[Any, Any] = {}
        self._database = database
        if database is not None:
            self.rows = ListRows(database, PLAIN, self.states, lambda _, states: PLAIN.encode_each(states, name_of=str))
        self.number = 0

    def load(self, *keys: Any) -> None:
        self.rows.load(keys, row_keys)

    def add(self, key: Any, place: int, time: int, record: Any) -> None:
        entry = [time, self.number, record, False]
        self.number += 1
        insort(self.states.setdefault(key, [[], []])[place], entry, key=itemgetter(0))
        if self._database is not None:
            self.rows.came(key, place, entry)

    def pair(self, key: Any, place: int, at: int) -> None:
        entry = self.states[key][place][at]
        entry[3] = True
        if self._database is not None:
            self.rows.changed(key, place, entry)

    def drop(self, key: Any, place: int, at: int) -> None:
        entry = self.states[key][place].pop(at)
        if self._database is not None:
            self.rows.left(key, place, entry)
        if not any(self.states[key]):
            del self.states[key]

    def store(self, *, whole: bool = False) -> list[tuple[bytes, bytes | None]]:
        assert self._database is not None
        changes = self.rows.store(whole=whole)
        self._database.write(changes)
        return changes


def stored(database: Database) -> dict[bytes, Any]:
    """Return the states that a snapshot of the database has, by row."""
    rows = whole_states(database.rows(b"", b"\x80"), PLAIN)
    return {row: state for of_keys, states in rows for (row, _), state in zip(of_keys, states, strict=True)}


def test_one_more_entry_of_a_long_list_is_one_more_row(database: Database) -> None:
    """The lists of a key were read and written whole for each batch in which the key had a record."""
    step = Step(database)
    step.load("ann")
    for time in range(1000):
        step.add("ann", 0, time, "x")
    assert len(step.store(whole=True)) == 1 + 1000
    step.add("ann", 1, 5, "y")
    step.pair("ann", 0, 7)
    step.drop("ann", 0, 0)
    assert sorted(value is None for _, value in step.store(whole=True)) == [False, False, True]
    assert stored(database) == {row_keys(["ann"])[0]: step.states["ann"]}


def test_what_leaves_early_is_never_written(database: Database) -> None:
    """Each record of a join was written, and most were deleted some batches later."""
    step = Step(database)
    step.load("ann", "bo")
    for time in range(20):
        step.add("ann", 0, time, "x")
    step.store(whole=True)
    for key in ("ann", "bo"):
        step.add(key, 1, 50, "y")
        assert step.store() == []
        step.drop(key, 1, 0)
    assert step.store(whole=True) == []


def test_large_lists_leave_the_memory(database: Database) -> None:
    """Entries of a megabyte, whose number was limited, filled the memory."""
    step = Step(database)
    for key in range(40):
        step.load(key)
        step.add(key, 0, key, bytes(1 << 20))
        step.store()
    assert len(step.states) < 20
    step.load(*range(40))
    assert [step.states[key][0][0][0] for key in range(40)] == list(range(40))


def test_an_entry_that_is_no_plain_data_is_named_with_its_key(tmp_path: Path) -> None:
    """The error had the place of the entry among the rows that were written at once."""
    job = RocksState(tmp_path / "state")._of_job("tests", PLAIN)
    with contextlib.closing(job):
        states = job.of_subtask("join", clock=ManualClock())
        assert isinstance(states, RocksStates)
        join = IntervalJoin(0, 10)
        join.keep_in(states)
        states.load(["ann", "bo"])
        for time in range(20):
            join.add("left", "ann", time, "x")
            join.add("left", "bo", time, {1, 2} if time == 13 else "x")
        with pytest.raises(PlainDataError, match=r"^state of step 'join', key 'bo': state\[0\]\[13\]\[2\]: expected"):
            states.snapshot()


Action = tuple[str, int, int, int]


def actions(random: Random) -> list[Action]:
    names = ["add", "add", "add", "pair", "drop", "drop", "store", "write", "forget", "restart"]
    return [(random.choice(names), random.randrange(3), random.randrange(2), random.randrange(100)) for _ in range(60)]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_rows, "_ENTRIES_IN_ONE_ROW", 2)
    monkeypatch.setattr(list_rows, "_CHANGES_MAX", 5)


@pytest.mark.usefixtures("small_limits")
@random_examples(actions)
def test_lists_are_those_of_a_dict(example: list[Action], database: Database) -> None:
    """Any order of arrivals, changes and removals, of writing and of reading again gives the same lists."""
    database.delete_range(b"", b"\xff")
    step, expected = Step(database), Step(None)
    for name, key, place, number in example:
        step.load(key)
        entries = expected.states.get(key, [[], []])[place]
        if name == "add":
            step.number = expected.number
            for each in (step, expected):
                each.add(key, place, number % 7, number)
        elif name in ("pair", "drop") and entries:
            for each in (step, expected):
                (each.pair if name == "pair" else each.drop)(key, place, number % len(entries))
        elif name == "forget":
            step.rows._bytes = 1 << 30
            step.store()
        elif name == "restart":
            step.store(whole=True)
            step = Step(database)
        else:
            step.store(whole=name == "write")
        step.load(key)
        assert step.states.get(key) == expected.states.get(key)
    step.store(whole=True)
    assert stored(database) == {row_keys([key])[0]: state for key, state in expected.states.items()}


def test_rows_of_a_list_are_read_while_a_checkpoint_is_made(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that waited for a checkpoint were no part of their list."""
    go_on, make = threading.Event(), database_module.Checkpoint

    class Slow:
        def __init__(self, rows: Any) -> None:
            self._checkpoint = make(rows)

        def create_checkpoint(self, path: str) -> None:
            assert go_on.wait(PATIENCE_S)
            self._checkpoint.create_checkpoint(path)

    monkeypatch.setattr(database_module, "Checkpoint", Slow)
    database.write([(b"\0a", b"1"), (b"\0aa", b"1"), (b"\0ac", b"1"), (b"\0ad", b"1"), (b"\0b", b"1")])
    _, made = database.checkpoint()
    database.write([(b"\0ab", b"2"), (b"\0ac", None), (b"\0ad", b"2"), (b"\0ba", b"2")])
    behind_a = [(b"\0aa", b"1"), (b"\0ab", b"2"), (b"\0ad", b"2")]
    assert database.rows_behind([b"\0a", b"\0b", b"\0c"]) == [behind_a, [(b"\0ba", b"2")], []]
    go_on.set()
    made.result()
    assert database.rows_behind([b"\0a", b"\0b", b"\0c"]) == [behind_a, [(b"\0ba", b"2")], []]


def test_a_damaged_row_of_a_list_is_an_error(database: Database) -> None:
    """A damaged block ended a list as if it had no more entries."""
    step = Step(database)
    step.load("ann")
    for time in range(5000):
        step.add("ann", 0, time, f"{time * 7919 % 5003}")
    step.store(whole=True)
    folder, made = database.checkpoint()
    made.result()
    [file] = folder.glob("*.sst")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    file.unlink()  # It is linked with the file of the open database.
    file.write_bytes(content)
    database.replace(folder)
    step = Step(database)
    with pytest.raises(CheckpointError, match=r"^step 'join': expected to read and write its state"):
        step.load("ann")


def some_key(random: Random, levels: int = 2) -> Any:
    kind = random.randrange(7 if levels else 5)
    if kind == 0:
        return random.choice([0, 1, -1, 127, 128, 255, 65535, 2**31, 2**62, -(2**40), random.getrandbits(20)])
    if kind == 1:
        return "".join(random.choice("ab\0é") for _ in range(random.choice([0, 1, 2, 31, 32, 33, 255, 256])))
    if kind == 2:
        return bytes(random.choice(b"a\0\xff") for _ in range(random.choice([0, 1, 2, 255, 256])))
    if kind == 3:
        return random.choice([None, True, False])
    if kind == 4:
        return random.choice([0.0, 1.5, -2.25, float("inf")])
    return tuple(some_key(random, levels - 1) for _ in range(random.randrange(4)))


@random_examples(lambda random: [some_key(random) for _ in range(8)])
def test_no_encoded_key_is_the_beginning_of_another_one(keys: list[Any]) -> None:
    """Otherwise the row of a key would be taken for an entry of the key before."""
    encoded = sorted(set(encode_each_key(keys)))
    for one, following in pairwise(encoded):
        assert not following.startswith(one)
