"""All topics that live together: what a server would hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, ProducerFenced, TopicNotFound
from streamiter.numbers import whole_number_in
from streamiter.topics.memory.topic_log import TopicLog

__all__ = ["Fenceable", "MemoryStore"]

_SETTINGS: Final = ("compact", "max_record_bytes", "retention_records")


class Fenceable(Protocol):
    """An owner of a transactional id."""

    def fence(self, reason: ProducerFenced) -> None:
        """Abort what is open and refuse all further calls; the store's lock is held."""


class MemoryStore:
    """Topics by name, and who owns the transactional ids. ``lock`` is held around every look at a topic."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # One lock for everything: each call under it is short, and a commit is seen in all topics at once.
        self.lock = threading.Lock()
        self._logs: dict[str, TopicLog] = {}
        self._creations: Counter[str] = Counter()
        self._owners: dict[str, Fenceable] = {}

    @property
    def commit_domain(self) -> str:
        """Another store is another domain."""
        return f"memory:{id(self)}"

    def topic_names(self) -> list[str]:
        """The names of the topics there are, sorted."""
        with self.lock:
            return sorted(self._logs)

    def log(self, name: str) -> TopicLog:
        """The storage of a topic; the lock must be held."""
        log = self._logs.get(name)
        if log is None:
            there_are = ", ".join(sorted(self._logs)) or "none"
            raise TopicNotFound(
                f"no topic {name!r} in memory; the topics there are: {there_are}. Create it with "
                f"`await topic.create(partitions=...)`"
            )
        return log

    def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create or widen a topic."""
        if partitions < 1:
            raise ConfigurationError(f"topic {name!r}: expected partitions >= 1, given {partitions}")
        checked = _checked_settings(name, settings)
        with self.lock:
            if name not in self._logs:
                self._creations[name] += 1
                self._logs[name] = TopicLog(name, checked, self._creations[name])
            self._logs[name].add_partitions(partitions)

    def delete(self, name: str) -> None:
        """Delete a topic; its readers and writers find it gone."""
        with self.lock:
            self.log(name).delete()
            del self._logs[name]

    def take_over(self, transactional_id: str, transactions: Fenceable) -> None:
        """Fence whoever held ``transactional_id``, and abort what they have open."""
        with self.lock:
            previous = self._owners.get(transactional_id)
            self._owners[transactional_id] = transactions
            if previous is not None:
                previous.fence(
                    ProducerFenced(f"a newer writer with the transactional id {transactional_id!r} took over")
                )


def _checked_settings(name: str, settings: Mapping[str, str]) -> dict[str, str]:
    for setting, value in settings.items():
        if setting not in _SETTINGS:
            raise ConfigurationError(
                f"topic {name!r}: expected settings out of {', '.join(_SETTINGS)}, given {setting!r}"
            )
        if whole_number_in(str(value)) is None:
            raise ConfigurationError(f"topic {name!r}: expected {setting} as a whole number, given {value!r}")
    return {setting: str(value) for setting, value in settings.items()}
