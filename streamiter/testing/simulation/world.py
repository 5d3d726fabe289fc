"""The inputs of a simulated flow: records that come into topics as time passes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from streamiter.checkpoints.memory_store import MemoryStore
from streamiter.flow.flow import listed_items
from streamiter.testing.simulation.network import Levels, SimulatedNetwork
from streamiter.testing.simulation.simulated_time import SimulatedTime, Trace, at_once, generator
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, ReadRequest, TopicRecord

__all__ = [
    "Check",
    "Compare",
    "Delivery",
    "Input",
    "KeyOf",
    "Order",
    "OutputRules",
    "Outputs",
    "World",
    "key_and_value",
]


KeyOf = Callable[[Any], bytes | str]


class Input:
    """A topic that is fed with given records.

    Without keys record i goes to partition i mod n, so that the same records are the same input under every seed.
    """

    def __init__(
        self,
        name: str,
        records: Iterable[Any],
        *,
        partitions: int,
        key: KeyOf | None,
        over_s: float,
    ) -> None:
        self.name = name
        self.partitions = partitions
        self._over_s = over_s
        given = listed_items(f"Simulation.input({name!r})", records)
        self._waiting = [self._outgoing(index, record, key) for index, record in enumerate(given)]
        self._waiting.reverse()

    def _outgoing(self, index: int, record: Any, key: KeyOf | None) -> OutgoingBatch:
        value = (
            record if isinstance(record, bytes) else orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
        )
        if key is None:
            return OutgoingBatch([value], partition=index % self.partitions)
        of_record = key(record)
        return OutgoingBatch([value], keys=[of_record.encode() if isinstance(of_record, str) else of_record])

    @property
    def is_fed(self) -> bool:
        """Whether all records are in the topic."""
        return not self._waiting

    def start(self, broker: MemoryBroker, time: SimulatedTime, chosen: random.Random | None) -> None:
        """Put the records in: at once, or within ``over_s`` seconds at random times; evenly without ``chosen``."""
        topic = broker.topic(self.name)
        at_once(topic.create(partitions=self.partitions))
        writer = at_once(topic.open_writer())

        def feed() -> None:
            at_once(writer.write(self._waiting.pop()))

        for arrival_s in self._arrivals_s(chosen):
            if arrival_s > 0.0:
                time.call_later(arrival_s, feed)
            else:
                feed()

    def _arrivals_s(self, chosen: random.Random | None) -> Sequence[float]:
        count = len(self._waiting)
        if chosen is None:
            return [self._over_s * (index + 1) / count for index in range(count)]
        return sorted(self._over_s * chosen.random() for _ in range(count))


Order = Literal["partition", "key", "any"]
Delivery = Literal["exactly_once", "at_least_once"]
Compare = Callable[[TopicRecord], Hashable]


def key_and_value(record: TopicRecord) -> Hashable:
    """What of a record is compared unless said otherwise.

    The outputs of a simulated flow: what is committed, compared with what an undisturbed run has committed.
    """
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
class CommittedRecords:
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


Outputs = Mapping[str, Sequence[TopicRecord]]
"""Committed records by the name of their topic."""

Check = Callable[[Outputs], object]
"""Looks at what is committed, after every commit; raises AssertionError if that can be no part of a right result."""


class World:
    """One for each simulated run, however often its job begins again.

    ``expected`` is what an undisturbed run has committed, None in that run itself.

    What survives the crashes of a simulated job: topics, the store, time, and what is known of the outputs.
    """

    def __init__(self, seed: int, levels: Levels, *, expected: Outputs | None, check: Check | None) -> None:
        self.seed = seed
        self.time = SimulatedTime()
        self.trace = Trace()
        self.random = generator(seed, "world")
        self.network = SimulatedNetwork(self.time, self.trace, generator(seed, "network"), levels)
        self._ids = generator(seed, "ids")
        self.broker = MemoryBroker(clock=self.time)
        self.store = MemoryStore()
        self.inputs: dict[str, Input] = {}
        self.outputs: dict[str, OutputRules] = {}
        self.committed = CommittedRecords(self.broker)
        self.violation: str | None = None
        """The first thing that was found to be wrong."""
        self._expected = expected
        self._check = check

    @property
    def is_fed(self) -> bool:
        """Whether all records of all inputs are in their topics."""
        return all(given.is_fed for given in self.inputs.values())

    def new_id(self) -> str:
        """A name for a run, each time another one."""
        return f"{self._ids.getrandbits(128):032x}"

    def feed(self, given: Input) -> None:
        """Let the records of an input come in."""
        self.inputs[given.name] = given
        # Undisturbed it is the same under every seed, so that one such run can serve many.
        is_undisturbed = self._expected is None
        chosen = None if is_undisturbed else generator(self.seed, f"arrivals of {given.name}")
        given.start(self.broker, self.time, chosen)

    def look(self, *, is_complete: bool = False) -> None:
        """Compare what is committed with what is expected; ``is_complete`` says that nothing more is to come."""
        if self.violation is not None:
            return
        seen = {name: self.committed.read(name) for name in self.outputs}
        for name, rules in self.outputs.items():
            if self._expected is not None:
                wrong = rules.what_is_wrong(seen[name], self._expected[name], is_complete=is_complete)
                self.found(wrong)
        if self._check is not None:
            try:
                self._check(seen)
            except AssertionError as error:
                self.found(f"the check of committed outputs fails: {error}")

    def found(self, wrong: str | None) -> None:
        """Remember the first thing that is wrong."""
        if wrong is not None and self.violation is None:
            self.violation = wrong
