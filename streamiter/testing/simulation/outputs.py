"""The outputs of a simulated flow: what is committed, compared with what an undisturbed run has committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamiter.testing.simulation.at_once import at_once
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import ReadRequest, TopicRecord

__all__ = ["Committed", "Compare", "Delivery", "Order", "OutputRules", "key_and_value"]

Order = Literal["partition", "key", "any"]
Delivery = Literal["exactly_once", "at_least_once"]
Compare = Callable[[TopicRecord], Hashable]


def key_and_value(record: TopicRecord) -> Hashable:
    """What of a record is compared unless said otherwise."""
    return record.key, record.value


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What must be the same in every run."""

    name: str
    order: Order
    delivery: Delivery
    compare: Compare

    def group(self, record: TopicRecord) -> Hashable:
        """Records of one group have an order."""
        if self.order == "partition":
            return record.partition
        return record.key if self.order == "key" else None

    def what_is_wrong(
        self, committed: Sequence[TopicRecord], expected: Sequence[TopicRecord], *, is_complete: bool
    ) -> str | None:
        """Why these records can be no part, or if complete not the whole, of the expected ones; None if they can."""
        groups, expected_groups = self._grouped(committed), self._grouped(expected)
        for group in {**expected_groups, **groups}:
            given, wanted = groups.get(group, []), expected_groups.get(group, [])
            if self.delivery == "at_least_once" or self.order == "any":
                wrong = _wrong_multiset(given, wanted, self.delivery == "exactly_once", is_complete)
            else:
                wrong = _wrong_sequence(given, wanted, is_complete)
            if wrong is not None:
                of_group = "" if self.order == "any" else f", {self.order} {group!r}"
                return f"output {self.name!r}{of_group}: {wrong}"
        return None

    def _grouped(self, records: Sequence[TopicRecord]) -> dict[Hashable, list[Hashable]]:
        groups: dict[Hashable, list[Hashable]] = {}
        for record in records:
            groups.setdefault(self.group(record), []).append(self.compare(record))
        return groups


def _wrong_sequence(given: list[Hashable], wanted: list[Hashable], is_complete: bool) -> str | None:
    for index, (one, other) in enumerate(zip(given, wanted, strict=False)):
        if one != other:
            return f"expected record {index} to be {other!r}, given {one!r}"
    if len(given) > len(wanted):
        return f"expected {len(wanted)} records, given {len(given)}; the first that is too many: {given[len(wanted)]!r}"
    if is_complete and len(given) < len(wanted):
        return f"expected {len(wanted)} records, given {len(given)}; the first that is missing: {wanted[len(given)]!r}"
    return None


def _wrong_multiset(
    given: list[Hashable], wanted: list[Hashable], once: bool, is_complete: bool
) -> str | None:
    counts, expected = Counter(given), Counter(wanted)
    for record, count in counts.items():
        if record not in expected:
            return f"expected no such record, given {record!r}"
        if once and count > expected[record]:
            return f"expected it {expected[record]} times, given {count} times: {record!r}"
    if is_complete:
        for record, count in expected.items():
            if counts[record] < count and (once or not counts[record]):
                return f"expected it {count} times, given {counts[record]} times: {record!r}"
    return None


@dataclass
class Committed:
    """All that readers of committed records see of some topics, read on from where they were read before."""

    broker: MemoryBroker
    records: dict[str, list[TopicRecord]] = field(default_factory=dict)
    _positions: dict[str, Mapping[int, int]] = field(default_factory=dict)

    def read(self, name: str) -> list[TopicRecord]:
        """Those of a topic, by partition and offset as far as they were there at each reading."""
        records = self.records.setdefault(name, [])
        request = ReadRequest(positions=self._positions.get(name), stop="latest")
        reader = at_once(self.broker.topic(name).open_reader(request))
        while (batch := at_once(reader.read())) is not None:
            records.extend(batch.records())
        self._positions[name] = reader.positions()
        return records
