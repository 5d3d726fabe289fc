"""Dead letters: refused records on their way into a topic."""

from __future__ import annotations

from typing import Any

import orjson

from streamiter.operators.rejection import DeadLetter
from streamiter.records import Batch
from streamiter.topics.topic import Headers, OutgoingBatch

__all__ = ["DeadLetterEncoder"]


class DeadLetterEncoder:
    """The refused value as it was (bytes), or else as JSON; why and from where in the headers.

    Headers: ``error``, ``step``, and where known ``topic``, ``partition``, ``offset``.
    """

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Never refuses: what JSON cannot hold is written as its repr."""
        letters: list[Any] = list(batch)
        return OutgoingBatch(
            values=[_value(letter.record) for letter in letters],
            keys=[letter.key for letter in letters],
            headers=[_headers(letter) for letter in letters],
        )


def _value(record: Any) -> bytes | None:
    if record is None or isinstance(record, bytes):
        return record
    return orjson.dumps(record, default=repr, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _headers(letter: DeadLetter) -> Headers:
    headers = [("error", letter.error.encode()), ("step", letter.step.encode())]
    if letter.origin is not None:
        headers += [
            ("topic", letter.origin.topic.encode()),
            ("partition", str(letter.origin.partition).encode()),
            ("offset", str(letter.origin.offset).encode()),
        ]
    return tuple(headers)
