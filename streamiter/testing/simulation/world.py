"""The world of a simulated flow, which survives its crashes: inputs, outputs, topics, the checkpoint store, time.

``Simulation`` is the object with which a user's function builds the flow. ``World`` feeds the inputs. After every
commit it compares the committed records of the outputs with those of an undisturbed run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow, listed_items
from streamiter.testing.simulated_time import SimulatedTime, Trace, at_once, generator
from streamiter.testing.simulation.network import Levels, SimulatedNetwork, SimulatedTopic, SimulatedTopics
from streamiter.testing.simulation.sockets import SimulatedSockets
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, ReadRequest, Topic, TopicRecord
from streamiter.values.numbers import whole_number
from streamiter.values.times import Seconds, in_seconds

KeyOfRecord = Callable[[Any], bytes | str]


OutputOrder = Literal["partition", "key", "any"]


Delivery = Literal["exactly_once", "at_least_once"]


ComparedParts = Callable[[TopicRecord], Hashable]


OutputRecords = Mapping[str, Sequence[TopicRecord]]
"""Committed records by the name of their topic."""


CheckOutputs = Callable[[OutputRecords], object]
"""Checks the committed records after every commit; raises AssertionError if they cannot be right."""


def key_and_value(record: TopicRecord) -> Hashable:
    """Return the parts of a record that are compared by default."""
    return record.key, record.value


class Simulation:
    """Makes the topics of a simulated flow; the function that builds the flow gets it.

    The function is called again for every restart. It must build a flow that can be restored from the state of the last
    one.
    """

    def __init__(self, world: World, cluster: SimulatedTopics, run: int = 1) -> None:
        self.seed = world.seed
        self.run = run
        """The number of this start, from 1: for changes of the flow between starts, such as a parallelism."""
        self.random = generator(world.seed, "flow")
        """For values that should differ between seeds, such as the inputs; the same again after a restart."""
        self._world = world
        self._cluster = cluster
        self._given: dict[str, None] = {}

    def input(
        self,
        name: str,
        records: Iterable[object],
        *,
        partitions: int = 1,
        key: KeyOfRecord | None = None,
        over_s: Seconds = 0.0,
    ) -> Topic:
        """Return a topic to read from. ``records`` are bytes, or values for JSON.

        All records are in the topic at the start, or arrive one by one within the first ``over_s`` seconds. Without
        ``key``, record i goes to partition i mod ``partitions``.
        """
        self._take_name(name)
        whole_number("Simulation.input: partitions", partitions, 1)
        if name not in self._world.inputs:
            self._world.feed(Input(name, records, partitions=partitions, key=key, over_s=in_seconds(over_s)))
        return SimulatedTopic(self._cluster, name)

    def output(
        self,
        name: str,
        *,
        partitions: int = 1,
        order: OutputOrder = "partition",
        delivery: Delivery = "exactly_once",
        compare: ComparedParts = key_and_value,
    ) -> Topic:
        """Return a topic to write to; its records must equal those of an undisturbed run.

        ``order="partition"``: each partition has the same records in the same order. ``order="key"``: the records of
        each key have the same order. ``order="any"``: the same records in any order, as after a union of subtasks.
        ``compare`` returns the part of a :class:`~streamiter.topics.TopicRecord` that must be equal; by default, key
        and value. ``delivery="at_least_once"`` allows records to occur more than once, for sinks that write at once.
        """
        self._take_name(name)
        self._create(name, partitions)
        self._world.outputs[name] = OutputRules(name, order, delivery, compare)
        return SimulatedTopic(self._cluster, name)

    def topic(self, name: str, *, partitions: int = 1) -> Topic:
        """Return a topic that is neither fed nor compared, such as one for feedback."""
        self._take_name(name)
        self._create(name, partitions)
        return SimulatedTopic(self._cluster, name)

    def _create(self, name: str, partitions: int) -> None:
        whole_number("Simulation: partitions", partitions, 1)
        at_once(self._world.broker.topic(name).create(partitions=partitions))

    def _take_name(self, name: str) -> None:
        if name in self._given:
            raise ConfigurationError(
                f"simulation: expected a name of its own for each topic, given {name!r} twice; use the topic twice "
                "where the flow reads it twice"
            )
        self._given[name] = None


MakeFlow = Callable[[Simulation], Flow]


class World:
    """What survives the crashes of a simulated job: topics, the store, time, and the findings.

    ``expected`` are the committed records of an undisturbed run; None in that run itself.
    """

    def __init__(
        self, seed: int, levels: Levels, *, expected: OutputRecords | None, check: CheckOutputs | None
    ) -> None:
        self.seed = seed
        self.time = SimulatedTime()
        self.trace = Trace()
        self.random = generator(seed, "world")
        self.network = SimulatedNetwork(self.time, self.trace, generator(seed, "network"), levels)
        self.sockets = SimulatedSockets(self.network, self.time, generator(seed, "sockets"))
        self._ids = generator(seed, "ids")
        self.broker = MemoryBroker(clock=self.time)
        self.store = MemoryStore()
        self.inputs: dict[str, Input] = {}
        self.outputs: dict[str, OutputRules] = {}
        self.committed = CommittedRecords(self.broker)
        self.violation: str | None = None
        """The first finding."""
        self._expected = expected
        self._check = check

    @property
    def is_fed(self) -> bool:
        """Whether all records of all inputs are in their topics."""
        return all(given.is_fed for given in self.inputs.values())

    def new_id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"

    def feed(self, given: Input) -> None:
        self.inputs[given.name] = given
        # The undisturbed run is the same under every seed, so that one such run can serve many seeds.
        is_undisturbed = self._expected is None
        chosen = None if is_undisturbed else generator(self.seed, f"arrivals of {given.name}")
        given.start(self.broker, self.time, chosen)

    def look(self, *, is_complete: bool = False) -> None:
        """Compare the committed records with the expected ones; ``is_complete``: no further records will be written."""
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
        if wrong is not None and self.violation is None:
            self.violation = wrong


class Input:
    """An input topic and the records that are fed to it.

    Without keys, record i goes to partition i mod n, so that the partitions are the same under every seed.
    """

    def __init__(
        self, name: str, records: Iterable[Any], *, partitions: int, key: KeyOfRecord | None, over_s: float
    ) -> None:
        self.name = name
        self.partitions = partitions
        self._over_s = over_s
        given = listed_items(f"Simulation.input({name!r})", records)
        self._waiting = [self._outgoing(index, record, key) for index, record in enumerate(given)]
        self._waiting.reverse()

    def _outgoing(self, index: int, record: object, key: KeyOfRecord | None) -> OutgoingBatch:
        value = record if isinstance(record, bytes) else orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
        if key is None:
            return OutgoingBatch([value], partition=index % self.partitions)
        of_record = key(record)
        return OutgoingBatch([value], keys=[of_record.encode() if isinstance(of_record, str) else of_record])

    @property
    def is_fed(self) -> bool:
        """Whether all records are in the topic."""
        return not self._waiting

    def start(self, broker: MemoryBroker, time: SimulatedTime, chosen: random.Random | None) -> None:
        """Feed the records: at once, or at random times within ``over_s`` seconds; evenly without ``chosen``."""
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


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What must be equal in every run for one output."""

    name: str
    order: OutputOrder
    """Within what the order of records must be equal."""
    delivery: Delivery
    """Whether records may occur more than once."""
    compare: ComparedParts
    """Returns the part of a record that must be equal."""

    def group(self, record: TopicRecord) -> Hashable:
        """Return the group of a record; the records of one group have an order."""
        if self.order == "partition":
            return record.partition
        return record.key if self.order == "key" else None

    def what_is_wrong(
        self, committed: Sequence[TopicRecord], expected: Sequence[TopicRecord], *, is_complete: bool
    ) -> str | None:
        """Return why these records are no part (if complete: not all) of the expected ones; None if they are."""
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


def _wrong_multiset(given: list[Hashable], wanted: list[Hashable], once: bool, is_complete: bool) -> str | None:
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
    """The committed records of topics, as readers see them; each read continues where the last one ended."""

    broker: MemoryBroker
    records: dict[str, list[TopicRecord]] = field(default_factory=dict)
    _positions: dict[str, Mapping[int, int]] = field(default_factory=dict)

    def read(self, name: str) -> list[TopicRecord]:
        """Read and return all committed records of a topic, in the order of the reads, then of partitions."""
        records = self.records.setdefault(name, [])
        request = ReadRequest(positions=self._positions.get(name), stop="latest")
        reader = at_once(self.broker.topic(name).open_reader(request))
        while (batch := at_once(reader.read())) is not None:
            records.extend(batch.records())
        self._positions[name] = reader.positions()
        return records
