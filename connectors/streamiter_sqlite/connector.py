"""From a ``sqlite:`` URL to its topics."""

from __future__ import annotations

from collections.abc import Mapping

from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Connector
from streamiter_sqlite.database import Database
from streamiter_sqlite.log import topic_names
from streamiter_sqlite.options import absolute, parse_options, parse_url
from streamiter_sqlite.topic import SqliteTopic

__all__ = ["SqliteConnector"]


class SqliteConnector(Connector):
    """Serves ``sqlite:///relative.db?topic=clicks`` and ``sqlite:////absolute.db?topic=clicks``.

    A relative path is taken from the working directory at the time the topic is made.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> SqliteTopic:
        parsed = parse_url(url)
        if parsed.topic is None:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected ?topic=<name> behind the path")
        return SqliteTopic(parsed, parsed.topic, parse_options(url, options))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        path, parsed = absolute(parse_url(url).path), parse_options(url, options)
        try:
            database = await Database.open(path, parsed)
        except TopicNotFound:  # no file, no topics
            return []
        try:
            return await database.run(topic_names)
        finally:
            await database.close()
