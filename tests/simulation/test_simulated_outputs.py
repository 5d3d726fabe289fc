"""The rules of outputs decide whether committed records equal an undisturbed run, or a part of it."""

from __future__ import annotations

import pytest

from streamiter.testing.simulation.world import Delivery, OutputOrder, OutputRules, key_and_value
from streamiter.topics.topic import TopicRecord


def records(*written: str) -> list[TopicRecord]:
    """Return records from texts such as ``"0 key value"``: partition, key and value."""
    parts = [text.split() for text in written]
    return [
        TopicRecord(int(partition), offset, 0, key.encode(), value.encode())
        for offset, (partition, key, value) in enumerate(parts)
    ]


EXPECTED = records("0 a 1", "0 b 2", "1 a 3", "0 a 4")


@pytest.mark.parametrize(
    ("order", "delivery", "given", "part", "whole"),
    [
        ("partition", "exactly_once", [], None, "the first that is missing: (b'a', b'1')"),
        ("partition", "exactly_once", ["0 a 1", "0 b 2"], None, "the first that is missing: (b'a', b'4')"),
        ("partition", "exactly_once", ["1 a 3", "0 a 1", "0 b 2", "0 a 4"], None, None),
        (
            "partition",
            "exactly_once",
            ["0 b 2"],
            "expected record 0 to be (b'a', b'1'), given (b'b', b'2')",
            "expected",
        ),
        ("partition", "exactly_once", ["1 a 3", "1 a 3"], "the first that is too many: (b'a', b'3')", "expected"),
        ("partition", "exactly_once", ["2 a 3"], "expected 0 records, given 1", "expected"),
        ("key", "exactly_once", ["1 b 2", "0 a 1", "0 a 3", "1 a 4"], None, None),
        ("key", "exactly_once", ["0 a 1", "0 a 4"], "expected record 1 to be (b'a', b'3')", "expected"),
        ("any", "exactly_once", ["0 a 4", "0 a 3", "0 b 2", "0 a 1"], None, None),
        ("any", "exactly_once", ["0 a 4", "0 a 4"], "expected it 1 times, given 2 times", "expected"),
        ("any", "exactly_once", ["0 a 5"], "expected no such record, given (b'a', b'5')", "expected"),
        ("any", "at_least_once", ["0 a 4", "0 a 4", "0 a 3", "0 b 2"], None, "expected it 1 times, given 0 times"),
        ("any", "at_least_once", ["0 a 4", "0 a 4", "0 a 3", "0 b 2", "1 a 1"], None, None),
        ("partition", "at_least_once", ["1 a 1"], "expected no such record", "expected"),
    ],
)
def test_a_part_may_lack_only_its_end_and_the_whole_must_be_complete(
    order: OutputOrder, delivery: Delivery, given: list[str], part: str | None, whole: str | None
) -> None:
    """A check that accepts a gap or a repeated record misses the bugs that it must find."""
    rules = OutputRules("out", order, delivery, key_and_value)
    for is_complete, expected in ((False, part), (True, whole)):
        wrong = rules.what_is_wrong(records(*given), EXPECTED, is_complete=is_complete)
        if expected is None:
            assert wrong is None
        else:
            assert wrong is not None
            assert expected in wrong
