"""What it means that a broker does not take a batch."""

from __future__ import annotations

from typing import Final

from streamiter.errors import ProducerFenced, RecordTooLarge, StreamiterError, TopicError
from streamiter_kafka.codes import Code
from streamiter_kafka.packing import PendingBatch, ProducerIdentity
from streamiter_kafka.trouble import BrokerTrouble, failure_of

__all__ = ["fenced", "refusal"]

_TOO_LARGE: Final = frozenset({Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE})
_FENCED: Final = frozenset({Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED})


def refusal(
    code: int, batch: PendingBatch, producer: ProducerIdentity, subject: str
) -> BrokerTrouble | StreamiterError:
    """The exception for an error code in the answer to ``batch``."""
    if code in _TOO_LARGE:
        what = "a record" if batch.count == 1 else f"a batch of {batch.count} records"
        return RecordTooLarge(
            f"{subject}: {what} of {batch.size_bytes} bytes before compression is more than the broker takes; "
            "raise the topic's max.message.bytes or lower the option max_batch_bytes"
        )
    if code in _FENCED:
        return ProducerFenced(f"{subject}: {fenced(producer)}")
    if code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER:
        return TopicError(
            f"{subject}: the broker misses records that it had confirmed to this writer "
            "(OUT_OF_ORDER_SEQUENCE_NUMBER); it lost some, perhaps by an unclean election of a leader"
        )
    if code == Code.INVALID_RECORD:
        return TopicError(
            f"{subject}: the broker refused a record as invalid; a compacted topic takes only records with keys"
        )
    return failure_of(code, subject)


def fenced(producer: ProducerIdentity) -> str:
    """Why a writer is fenced."""
    return f"the transactional id {producer.transactional_id!r} belongs to a newer writer"
