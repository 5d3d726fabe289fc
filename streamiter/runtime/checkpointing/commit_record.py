"""The commit record: what says, in the same transaction as the outputs, which checkpoint they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.errors import CheckpointError
from streamiter.topics.topic import OutgoingBatch, TopicRecord

__all__ = ["CommitRecord"]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The last commit of a flow.

    >>> record = CommitRecord("clicks", CheckpointId(7, "a1"))
    >>> record.outgoing().values
    [b'{"flow":"clicks","checkpoint":7,"run":"a1"}']
    """

    flow: str
    checkpoint: CheckpointId | None
    """None where a run has begun anew and has not committed a checkpoint yet."""

    def outgoing(self) -> OutgoingBatch:
        """The record as it is written; its key is the flow's name."""
        checkpoint = self.checkpoint
        value = {
            "flow": self.flow,
            "checkpoint": None if checkpoint is None else checkpoint.number,
            "run": None if checkpoint is None else checkpoint.run,
        }
        return OutgoingBatch(values=[orjson.dumps(value)], keys=[self.flow.encode()])

    @classmethod
    def read(cls, record: TopicRecord, where: str) -> CommitRecord:
        """What ``outgoing`` wrote. Raises CheckpointError for anything else."""
        try:
            content = orjson.loads(record.value or b"")
            number, run = content["checkpoint"], content["run"]
            checkpoint = None if number is None else CheckpointId(int(number), str(run))
            return cls(str(content["flow"]), checkpoint)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{where}, offset {record.offset}: expected a commit record, given {record.value!r}; something else "
                "writes to this topic; start with restore=None to begin anew, or with the number of a checkpoint"
            ) from error
