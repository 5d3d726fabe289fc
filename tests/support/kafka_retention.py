"""Tests delete records of a broker at the moment of their choice, instead of waiting for the retention."""

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from streamiter.topics import Topic

__all__ = ["delete_records"]


async def delete_records(bootstrap: str, topic: Topic, before: int) -> None:
    """Delete the records before an offset of partition 0."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic.name, 0): RecordsToDelete(before)})
    finally:
        await admin.close()
