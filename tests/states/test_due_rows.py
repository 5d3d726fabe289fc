"""Due items on disk, the first of which are in memory, are those of the heap."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from support.examples import random_examples

from streamiter.engine.states import due_rows
from streamiter.engine.states.database import Database
from streamiter.engine.states.due_rows import DueRows
from streamiter.operators.due import DueHeap, DueItem
from streamiter.values.times import MAX_TIME

Order = tuple[int, int]
Action = tuple[str, int, int]


@pytest.fixture
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_rows, "_AHEAD", 3)


def actions(random: Random) -> list[Action]:
    names = ["push"] * 6 + ["until", "first", "take", "remove", "remove", "latest", "store", "whole", "restart"]
    return [(random.choice(names), random.randrange(-3, 12), random.randrange(3)) for _ in range(60)]


def made(database: Database, loaded: list[Any]) -> DueRows:
    return DueRows(0, 2, database, of_pairs=False, load=loaded.extend, turn=lambda: 4)


def plain(item: DueItem) -> tuple[Order, Any]:
    return item[:-2], item[-1]


def taken(due: DueRows | DueHeap, time: int, later: dict[int, tuple[Order, str]]) -> list[tuple[Order, Any]]:
    """Take all items up to a time; when the n-th is taken, push a later one."""
    items: list[tuple[Order, Any]] = []
    is_more = True
    while is_more:
        for item in due.until(time):
            items.append(plain(item))
            if (pushed := later.get(len(items))) is not None:
                due.push(*pushed)
        is_more = due.is_more
    return items


@pytest.mark.usefixtures("few_ahead")
@random_examples(actions)
def test_items_on_disk_are_those_of_the_heap(example: list[Action], database: Database) -> None:
    """Any order of calls, of writing and of reading again gives the same items in the same order."""
    database.delete_range(b"", b"\xff")
    loaded: list[Any] = []
    due, expected = made(database, loaded), DueHeap(0, 2)
    kept: dict[tuple[Order, str], None] = {}
    number = 0

    def is_kept(item: DueItem) -> bool:
        return plain(item) in kept

    for name, time, key in example:
        if name == "push":
            number += 1
            # Items of equal order have different keys: the number does not tell them apart.
            order, text = (time, number // 3), f"{key}-{number}"
            due.push(order, text)
            expected.push(order, text)
            kept[order, text] = None
        elif name == "until":
            number += 2
            later = {1: ((time, number), "soon"), 2: ((time + 5, number), "later")}
            both = taken(due, time, later), taken(expected, time, later)
            assert [order for order, _ in both[0]] == [order for order, _ in both[1]]
            assert Counter(both[0]) == Counter(both[1])
            assert set(loaded) >= {text for _, text in both[0] if text != "soon"}
            kept.clear()
            kept.update(dict.fromkeys(map(plain, expected)))
        elif name == "take" and kept:
            order, text = plain(due.take_first())
            assert order == plain(expected.peek())[0]
            kept.pop((order, text))
            expected.remove(order, text, is_kept)
        elif name == "remove" and kept:
            pair = list(kept)[key % len(kept)]
            kept.pop(pair)
            due.remove(*pair, is_kept)
            expected.remove(*pair, is_kept)
        elif name == "latest":
            assert [plain(item)[0] for item in due.latest()] == [plain(item)[0] for item in expected.latest()]
        elif name in ("store", "whole", "restart"):
            database.write(due.changes(whole=name != "store"))
            if name == "restart":
                due = made(database, loaded)
        assert due.first() == expected.first()
    assert Counter(taken(due, MAX_TIME, {})) == Counter(list(kept))
    database.write(due.changes(whole=True))
    assert list(database.rows(b"\x80", b"\xff")) == []
