"""Places in the engine where a test can kill or stop a process.

A timer would hit such a moment once in a thousand kills; `mortal.py`, which wraps the function, hits it each time.
"""

from typing import Final, Literal, NamedTuple

__all__ = [
    "CHECKPOINT",
    "KAFKA_COMMIT",
    "KAFKA_TAKING_OVER",
    "RESTORE",
    "SHUTDOWN",
    "SQLITE_COMMIT",
    "SQLITE_TAKING_OVER",
    "STORE_COMMIT",
    "Place",
]

When = Literal["before", "after"]

_CHECKPOINTER: Final = "streamiter.engine.job.checkpointer:Checkpointer"
_JOB_RESTORE = "streamiter.engine.checkpointing.restore:JobRestore"
_TRANSACTION: Final = "streamiter.engine.checkpointing.commit:JobTransaction"
_WRITER: Final = "streamiter.engine.checkpointing.commit:TransactionalWriter"
_FLOW: Final = "streamiter.engine.storage.flow_checkpoints:FlowCheckpoints"
_FOLDER: Final = "streamiter.engine.storage.folder_blobs:FolderBlobs"
_KAFKA: Final = "streamiter_kafka.transactions:KafkaTransactions"
_SQLITE: Final = "streamiter_sqlite.writer:SqliteTransactions"


class Place(NamedTuple):
    """A place before or after the call of a function."""

    when: When
    function: str
    """The function as ``module:name`` or ``module:Class.name``."""

    def __str__(self) -> str:
        return f"{self.when} {self.function}"


def _both(function: str) -> list[Place]:
    return [Place("before", function), Place("after", function)]


# The places are in the order in which a run reaches them.
RESTORE: Final = [
    *_both(f"{_TRANSACTION}.open"),
    *_both(f"{_FLOW}.claim"),
    *_both(f"{_JOB_RESTORE}._opened"),
    *_both(f"{_JOB_RESTORE}.confirm"),
    *_both("streamiter.engine.storage.store:CheckpointStore.list"),
    Place("after", f"{_CHECKPOINTER}.open"),
    *_both("streamiter.engine.tasks.task:Task.open"),
    Place("after", f"{_CHECKPOINTER}.restored"),
]
"""A run reaches each of these places once, except the opening of tasks; loading happens from the second run on."""

CHECKPOINT: Final = [
    Place("after", f"{_CHECKPOINTER}._seal_sinks"),
    Place("before", "streamiter.engine.checkpointing.checkpoint_follower:CheckpointFollower.acknowledge"),
    Place("before", f"{_CHECKPOINTER}._save"),
    Place("after", f"{_FOLDER}.create"),
    Place("before", f"{_FOLDER}.complete"),
    *_both(f"{_FOLDER}.publish"),
    Place("after", f"{_CHECKPOINTER}._save"),
    Place("before", f"{_TRANSACTION}.commit"),
    Place("after", f"{_TRANSACTION}._commit"),
    Place("before", f"{_TRANSACTION}.checkpoint_over"),
    Place("before", f"{_WRITER}.unseal"),
    Place("after", f"{_WRITER}.unseal"),
    *_both(f"{_FLOW}.commit"),
    Place("before", f"{_FOLDER}.replace"),
    *_both(f"{_FLOW}.prune"),
]
"""Each checkpoint reaches these places at least once."""

KAFKA_COMMIT: Final = [
    *_both(f"{_KAFKA}.commit"),
    Place("before", f"{_KAFKA}._end"),
    # The broker has decided and answered, but the records are not visible yet.
    Place("before", "streamiter_kafka.transactions:Coordinator.wait_until_visible"),
    *_both(f"{_KAFKA}.begin"),
]

SQLITE_COMMIT: Final = [
    *_both(f"{_SQLITE}.commit"),
    # These places are in the middle of the file's own transaction, and right after it.
    Place("before", "streamiter_sqlite.writer:append_blocks"),
    Place("before", "streamiter_sqlite.writer:_set_deadline"),
    Place("after", "streamiter_sqlite.writer:commit"),
    *_both(f"{_SQLITE}.begin"),
]

STORE_COMMIT: Final = [
    *_both(f"{_FLOW}.commit"),
    Place("before", f"{_FOLDER}.replace"),
    Place("after", f"{_FOLDER}.replace"),
]
"""The places of a commit in flows without transactions, in which the store commits."""

SHUTDOWN: Final = [
    *_both(f"{_CHECKPOINTER}.finish"),
    *_both(f"{_TRANSACTION}.close"),
    Place("before", "streamiter.engine.job.follower:JobFollower._close"),
    Place("after", f"{_CHECKPOINTER}.close"),
]
"""A run that must end reaches each of these places once."""

KAFKA_TAKING_OVER: Final = Place("before", "streamiter_kafka.transactions:Coordinator.take_over")
SQLITE_TAKING_OVER: Final = Place("before", "streamiter_sqlite.topic:take_over")
"""The last moments before older runs are fenced."""
