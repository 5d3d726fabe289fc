"""The exceptions of streamiter, one tree.

::

    StreamiterError
    ├── GraphError             the flow is wrong; raised while it is built
    ├── ConfigurationError     an option, a URL or an extra is wrong or missing
    ├── PlainDataError         a value that is not plain data, or bytes that are not its encoding
    ├── DecodeError            bytes of a topic that the decoder cannot read
    ├── EncodeError            a record that the encoder cannot write
    ├── RejectRecords          raised by an operator: these records, not the job, are at fault
    ├── ModelError             a model was fed with what it cannot take, or its arithmetic broke down
    │   ├── NoModel            (streamiter.models) nothing has been published yet
    │   ├── Diverged           (streamiter.networks) a training has numbers that are not finite any more
    │   └── BadRows            (streamiter.learn) these rows of a mini-batch, not the model, are at fault
    ├── TopicError             a topic, its server or its file
    │   ├── TopicUnavailable   the server does not answer
    │   ├── TopicNotFound      it has no such topic, or the topic was deleted
    │   ├── TopicDenied        wrong credentials, or not allowed
    │   ├── OffsetOutOfRange   a position that the topic no longer (or not yet) has
    │   ├── RecordTooLarge     one record is above the topic's limit
    │   ├── StorageFull        no room left on the disk
    │   └── ProducerFenced     a newer writer with the same transactional id has taken over
    ├── ParameterServerError   what a parameter server was asked cannot be
    │   ├── UnknownMatrix      it has no such matrix
    │   ├── UnknownWorker      this worker takes no part
    │   ├── WorkerHasLeft      it did, and has left, or was taken for dead
    │   ├── OutOfRange         a row or column that the matrix does not have
    │   ├── RowsInDifferentBlocks  a function needs its rows in one row block
    │   ├── OutOfTurn          a call that the consistency of the matrix forbids at this clock
    │   ├── ServerReset        the server started over, or is closed, while the call waited
    │   ├── ShardLost          a shard's process is gone
    │   └── RolledBack         the shards went back to a snapshot: go back to its clock, too
    ├── LoopOverflow           feedback, or replayed data, went past the disk limit of its loop
    ├── OutputOverflow         one call of an operator emitted more than can wait
    ├── JobFailed              a job ended because a step failed; the cause is its ``__cause__``
    └── InternalError          our own mistake, never the user's: please report it

Messages follow one grammar: which step (or topic, or option), what was expected, what was given, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streamiter.user_code import user_line

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DecodeError",
    "EncodeError",
    "GraphError",
    "InternalError",
    "JobFailed",
    "LoopOverflow",
    "ModelError",
    "OffsetOutOfRange",
    "OutOfRange",
    "OutOfTurn",
    "OutputOverflow",
    "ParameterServerError",
    "PlainDataError",
    "ProducerFenced",
    "RecordTooLarge",
    "RejectRecords",
    "RolledBack",
    "RowsInDifferentBlocks",
    "ServerReset",
    "ShardLost",
    "StorageFull",
    "StreamiterError",
    "TopicDenied",
    "TopicError",
    "TopicNotFound",
    "TopicUnavailable",
    "TransactionExpired",
    "UnknownMatrix",
    "UnknownWorker",
    "WorkerHasLeft",
]


class StreamiterError(Exception):
    """Whatever streamiter raises on purpose."""


class GraphError(StreamiterError):
    """The flow as written cannot run: raised by the line that is wrong, before anything starts.

    ``where`` is that line, ``file:line`` in the user's code, and stands at the end of the message. What is
    found out only when the job is started names the line that added the step.

    >>> print(GraphError("step 'map': expected a function, given 3", where="job.py:12"))
    step 'map': expected a function, given 3 (at job.py:12)
    """

    def __init__(self, message: str, *, where: str | None = None) -> None:
        self.where = where or user_line()
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.args[0]} (at {self.where})"


class ConfigurationError(StreamiterError):
    """An option, a URL or an extra is wrong or missing."""


class PlainDataError(StreamiterError):
    """A value is not plain data, or bytes are not the encoding of any."""


class DecodeError(StreamiterError):
    """Values of a topic that a decoder cannot read.

    ``failures`` gives the reason for each bad value by its index in the batch; all the others are good.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(_first_failure("value", self.failures))


class EncodeError(StreamiterError):
    """Records that an encoder cannot write; ``failures`` as in :class:`DecodeError`."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(_first_failure("record", self.failures))


def _first_failure(noun: str, failures: Mapping[int, str]) -> str:
    index, reason = next(iter(failures.items()))
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{noun} {index} of the batch: {reason}{more}"


class RejectRecords(StreamiterError):
    """Raised by an operator to refuse single records of a batch before it has acted on any of them.

    The records named follow the step's policy (fail, skip or dead letter); the operator is then
    called again with the others. An operator that works record by record names index 0.

    >>> print(RejectRecords([1, 4], "negative price"))
    negative price (records 1, 4 of the batch)
    """

    def __init__(self, indices: Iterable[int], reason: str) -> None:
        self.indices = tuple(indices)
        self.reason = reason
        listed = ", ".join(str(index) for index in self.indices)
        super().__init__(f"{reason} (records {listed} of the batch)")


class ModelError(StreamiterError):
    """A model was fed with what it cannot take, or its arithmetic broke down (NaN, infinity)."""


class TopicError(StreamiterError):
    """Something is wrong with a topic, its server or its file."""


class TopicUnavailable(TopicError):
    """The topic's server does not answer."""


class TopicNotFound(TopicError):
    """There is no such topic, or it was deleted."""


class TopicDenied(TopicError):
    """Wrong credentials, or not allowed to read, write or create."""


class OffsetOutOfRange(TopicError):
    """A position that the topic no longer has (retention) or does not have yet."""


class RecordTooLarge(TopicError):
    """One record is above what the topic takes."""


class StorageFull(TopicError):
    """No room left where the topic is stored."""


class ProducerFenced(TopicError):
    """A newer writer with the same transactional id has taken over; this one must stop."""


class TransactionExpired(ProducerFenced):
    """A transaction was open for longer than its timeout, and is gone.

    Where a job fails with it, no other run has taken over, and going on from the last checkpoint is safe. Raised by
    :class:`~streamiter.topics.Transactions`, a newer writer may have taken over since.
    """


class CheckpointError(StreamiterError):
    """A checkpoint is missing, damaged, of another flow or version, or cannot be taken or gone on from."""


class ParameterServerError(StreamiterError):
    """What a parameter server was asked cannot be; nothing has changed there."""


class UnknownMatrix(ParameterServerError):
    """It has no such matrix."""


class UnknownWorker(ParameterServerError):
    """The worker takes no part."""


class WorkerHasLeft(UnknownWorker):
    """It did, and has left, or was not heard of for too long."""


class OutOfRange(ParameterServerError):
    """A row or a column that the matrix does not have."""


class RowsInDifferentBlocks(ParameterServerError):
    """A function needs all its rows in one row block."""


class OutOfTurn(ParameterServerError):
    """A call that the consistency of the matrix forbids at this clock."""


class ServerReset(ParameterServerError):
    """The server started over, or was closed, while this call waited."""


class ShardLost(ParameterServerError):
    """A shard's process is gone, and with it what was on its way."""


class RolledBack(ParameterServerError):
    """All shards went back to a snapshot. ``clocks`` has the worker's clocks there, by matrix: go on from them."""

    def __init__(self, message: str, clocks: Mapping[str, int]) -> None:
        super().__init__(message)
        self.clocks = dict(clocks)

    def __reduce__(self) -> tuple[type[RolledBack], tuple[str, dict[str, int]]]:
        return type(self), (str(self), self.clocks)


class LoopOverflow(StreamiterError):
    """Feedback, or replayed data, went past the disk limit of its loop."""


class OutputOverflow(StreamiterError):
    """One call of an operator emitted more than can wait for room."""


class JobFailed(StreamiterError):
    """A job ended because one of its steps failed.

    ``step`` names it; ``__cause__`` is what the step raised.
    """

    def __init__(self, message: str, *, step: str) -> None:
        self.step = step
        super().__init__(message)


class InternalError(StreamiterError):
    """A state that streamiter itself must never reach. Please report it."""
