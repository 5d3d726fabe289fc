"""Topics in memory, for tests and for trying things out: ``memory://clicks``.

They do what Kafka's do: partitions, transactions with fencing, reading committed records only, gaps in
the offsets where transactions end, retention. They are as durable as their process.

>>> import asyncio
>>> from streamiter.topics import OutgoingBatch, ReadRequest
>>> async def main():
...     topic = MemoryBroker().topic("clicks")
...     await topic.create(partitions=1)
...     writer = await topic.open_writer()
...     await writer.write(OutgoingBatch([b"a", b"b"]))
...     reader = await topic.open_reader(ReadRequest(stop="latest"))
...     print((await reader.read()).values, await reader.read())
>>> asyncio.run(main())
[b'a', b'b'] None
"""

from streamiter.topics.memory.connector import MemoryBroker, MemoryConnector
from streamiter.topics.memory.topic import MemoryTopic

__all__ = ["MemoryBroker", "MemoryConnector", "MemoryTopic"]
