"""The originals of a batch follow its records through cuts, joins and other processes."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from support.examples import random_examples

from streamiter.topics import TopicBatch
from streamiter.values.origins import BatchOrigin, Originals

Read = list[tuple[str, int, int, bytes | None] | None]
"""What is known of each record: topic, partition, offset and key."""


def told(originals: Originals) -> Read:
    found = [originals.of(row) for row in range(len(originals))]
    return [each and (each[0], each[1].partition, each[1].offsets[each[2]], each[1].keys[each[2]]) for each in found]


def some_read(random: Random) -> tuple[Originals, Read]:
    topic, partition, count = random.choice("ab"), random.randrange(3), random.randrange(1, 6)
    offsets = [random.randrange(100) for _ in range(count)]
    keys = [random.choice([None, b"%d" % offset]) for offset in offsets]
    batch = TopicBatch(partition=partition, values=[b""] * count, offsets=offsets, keys=keys)
    expected: Read = [(topic, partition, offset, key) for offset, key in zip(offsets, keys, strict=True)]
    return Originals.read(topic, batch, count), expected


def changed(random: Random, originals: Originals, expected: Read) -> tuple[Originals, Read]:
    """Return what a step or a channel makes of a batch."""
    kind, count = random.choice(["slice", "rows", "join", "send", "objects"]), len(expected)
    if kind == "slice":
        start = random.randrange(count)
        rows: Any = range(start, random.randint(start + 1, count))
    elif kind == "rows":
        rows = [random.randrange(count) for _ in range(random.randint(1, 6))]
        rows = random.choice([rows, np.array(rows)])
    elif kind == "join":
        other, of_other = some_read(random)
        return Originals.joined([originals, other]), [*expected, *of_other]
    elif kind == "send":
        sent = BatchOrigin("a", 1, 2, 3, originals).plain()
        arrived = BatchOrigin.from_plain(*msgspec.msgpack.decode(msgspec.msgpack.encode(sent))).originals
        assert arrived is not None
        return arrived, expected
    else:
        of = [object() for _ in expected]
        rows = random.sample(range(count), random.randint(1, count))
        made = originals.same_objects(
            [*(of[row] for row in rows), *([object()] if count > 1 else [])], of, by_place=True
        )
        assert made is not None
        return made, [*(expected[row] for row in rows), *([None] if count > 1 else [])]
    return originals.taken(rows), [expected[row] for row in rows]


def batches(random: Random) -> list[tuple[Originals, Read]]:
    """Return a batch as it was read, and what steps, channels and links make of it."""
    made = [some_read(random)]
    for _ in range(random.randrange(6)):
        made.append(changed(random, *made[-1]))
    return made


@random_examples(batches)
def test_each_record_keeps_its_original(made: list[tuple[Originals, Read]]) -> None:
    """A letter had the key of a row that was another one before the batch was cut or joined."""
    for originals, expected in made:
        assert told(originals) == expected


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (["a", "b", "c"], [0, 1, 2]),  # as many others
        (["a", "b"], None),
        ([7, 7, 8], [0, 1, 2]),
        ([8, 7, 7], [2, 0, 1]),
        ([7, 8], [None, 2]),  # which of two?
        ([8, 8, 8], [2, 2, 2]),  # emitted three times
        ([7, "a", 8], [None, None, 2]),
    ],
)
def test_a_record_of_an_operator_that_says_nothing_is_found_or_unknown(made: list[Any], rows: list[int] | None) -> None:
    """A letter had the key of another row with the same small number."""
    read = Originals.read("a", TopicBatch(values=[b""] * 3, offsets=[0, 1, 2]), 3)
    found = read.same_objects(made, [7, 7, 8], by_place=True)
    assert found is not None
    assert [each and each[2] for each in told(found)] == (rows or [None] * len(made))
    assert read.same_objects(np.arange(3), np.arange(3), by_place=True) is read
    assert read.same_objects(np.arange(2), np.arange(3), by_place=True) is None
