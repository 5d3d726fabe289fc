"""Topics on Apache Kafka: ``streamiter.topic("kafka://127.0.0.1:9092/clicks")``.

The layers, from the top: `connector` and `topic`, which users meet through :func:`streamiter.topic`;
`reader`, `writer`, `transactions` and `admin`; what these are made of (`partition` and `batch` for reading,
`packing`, `partition_queue` and `sender` for writing, `coordinator` for transactions, `offsets`); `cluster`
and `connection`, which talk to brokers; `wire`, which alone knows aiokafka.
"""

from streamiter_kafka.topic import KafkaConnector

__all__ = ["KafkaConnector"]
