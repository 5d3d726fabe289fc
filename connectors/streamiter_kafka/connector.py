"""What stands behind ``kafka://`` URLs."""

from __future__ import annotations

from collections.abc import Mapping

from streamiter.errors import ConfigurationError
from streamiter.topics.topic import Connector
from streamiter_kafka.address import KafkaAddress
from streamiter_kafka.cluster import Cluster
from streamiter_kafka.options import KafkaOptions
from streamiter_kafka.topic import KafkaTopic

__all__ = ["KafkaConnector"]


class KafkaConnector(Connector):
    """Topics on Kafka: ``kafka://host:9092,host2:9092/topic``.

    Options are given by keyword or in the URL's query; passwords better by keyword. What they are,
    :class:`KafkaOptions` tells.

    >>> KafkaConnector().topic("kafka://127.0.0.1:9092/clicks?compression=lz4", {"give_up_after_s": 5})
    KafkaTopic('kafka://127.0.0.1:9092/clicks?compression=lz4')
    """

    def topic(self, url: str, options: Mapping[str, object]) -> KafkaTopic:
        address = KafkaAddress.parse(url)
        if not address.topic:
            raise ConfigurationError(f"topic {address.url!r}: expected a topic, as in {address.url}clicks")
        return KafkaTopic(address, _options(address, options, f"topic {address.url!r}"))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        address = KafkaAddress.parse(url)
        subject = f"topics of {address.cluster}"
        async with Cluster(address.servers, _options(address, options, subject), subject) as cluster:
            return await cluster.persist(cluster.topic_names)


def _options(address: KafkaAddress, options: Mapping[str, object], subject: str) -> KafkaOptions:
    """Keyword options go before those of the URL."""
    return KafkaOptions.parse({**address.query, **options}, subject)
