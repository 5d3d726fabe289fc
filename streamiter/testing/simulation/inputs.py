"""The inputs of a simulated flow: records that come into topics as time passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from streamiter.flow.flow import listed_items
from streamiter.testing.simulation.at_once import at_once
from streamiter.testing.simulation.simulated_time import SimulatedTime
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch

__all__ = ["Input", "KeyOf"]

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
