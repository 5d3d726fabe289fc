"""Topics on Apache Kafka: ``streamiter.topic("kafka://127.0.0.1:9092/clicks")``.

The layers, from the top: `connector` and `topic`, which users meet through :func:`streamiter.topic`;
`reader`, `writer`, `transactions` and `admin`; `partition`, `batch`, `packing`, `sender` and `offsets`,
which these are made of; `cluster` and `connection`, which talk to brokers; `wire`, which alone knows
aiokafka.
"""

from streamiter_kafka.connector import KafkaConnector

__all__ = ["KafkaConnector"]
