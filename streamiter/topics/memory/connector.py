"""Where topics in memory come from: a broker of your own, or that of the process."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError
from streamiter.topics.memory.store import MemoryStore
from streamiter.topics.memory.topic import MemoryTopic
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Connector

__all__ = ["MemoryBroker", "MemoryConnector"]


class MemoryBroker:
    """Holds topics, as a server would: whoever has the same broker sees the same topics.

    May be used from several threads and event loops. ``clock`` gives the time stamps and the time after
    which an open transaction is aborted. Topics grow without limit unless they are created with
    ``settings={"retention_records": "100000"}``, or ``{"compact": "1"}`` for one of few keys that keeps the last
    record of each; ``max_record_bytes`` limits one record.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._store = MemoryStore(clock if clock is not None else SystemClock())

    def topic(self, name: str) -> MemoryTopic:
        """The topic of that name, which need not be there yet."""
        return MemoryTopic(self._store, name)

    def topic_names(self) -> list[str]:
        """The names of the topics there are, sorted."""
        return self._store.topic_names()


class MemoryConnector(Connector):
    """Serves ``memory://name``.

    The process itself is the server of this scheme: all ``memory://`` topics of a process live in one
    broker, from their creation to the process's end. Tests that want their own use `MemoryBroker`.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> MemoryTopic:
        _refuse_options(url, options)
        name = url.partition("://")[2].strip("/")
        if not name:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected a name, as in memory://clicks")
        return process_broker().topic(name)

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        _refuse_options(url, options)
        return process_broker().topic_names()


@functools.cache
def process_broker() -> MemoryBroker:
    """The broker of all ``memory://`` URLs of this process."""
    return MemoryBroker()


def _refuse_options(url: str, options: Mapping[str, object]) -> None:
    if options:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: memory topics take no options, given {', '.join(sorted(options))}"
        )
