"""Topics on Apache Kafka: ``streamiter.topic("kafka://127.0.0.1:9092/clicks")``.

The modules, from the top: `topic` (the connector and the topic), `reader`, `partition` (the fetched records of one
partition), `record_columns` (plain records as columns), `transactions` and `writer`, `packing` (records to record
batches), `cluster` (connections, metadata, offsets), `options`, `trouble` (error codes and retries), and `wire`, the
only module that imports aiokafka.
"""

from streamiter_kafka.topic import KafkaConnector

__all__ = ["KafkaConnector"]
