"""What a loop feeds back through a topic, as ``streamiter topics tail --feedback`` prints it."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any, Final

import numpy as np
import orjson

from streamiter.errors import DecodeError
from streamiter.operators.rejection import shortened
from streamiter.records import Columns
from streamiter.runtime.topic_feedback.message import RUN_HEADER
from streamiter.topics import TopicBatch, TopicRecord

__all__ = ["feedback_document", "feedback_line", "is_feedback"]

# Of a run that nobody named; as many digits as tell the runs in one topic apart.
_MADE_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_RUN_ID_DIGITS: Final = 8

_JSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def is_feedback(record: TopicRecord) -> bool:
    """Whether a loop wrote it."""
    return any(name == RUN_HEADER for name, _ in record.headers)


def feedback_line(record: TopicRecord) -> str:
    """Who fed back what, for people; of another record why it is none."""
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return error.failures[0]
    epoch = "" if fed_back["epoch"] is None else f" epoch {fed_back['epoch']}"
    what = shortened(fed_back["records"]) if fed_back["kind"] == "data" else fed_back.get("step", "")
    run = fed_back["run"][:_RUN_ID_DIGITS] if _MADE_RUN_ID.fullmatch(fed_back["run"]) else fed_back["run"]
    return f"run {run} producer {fed_back['producer']} {fed_back['kind']}{epoch} {what}".rstrip()


def feedback_document(record: TopicRecord) -> bytes:
    """The same as a JSON object, with all records: bytes as base64, and of what JSON cannot say Python's text."""
    place = {"partition": record.partition, "offset": record.offset, "timestamp_ms": record.timestamp_ms}
    try:
        fed_back = _decoded(record)
    except DecodeError as error:
        return orjson.dumps({**place, "error": error.failures[0]})
    try:
        return _as_json(place | fed_back)
    except TypeError:  # such as a number of more than 64 bits, or a key that is a tuple
        return _as_json(place | fed_back | {"records": [repr(each) for each in fed_back["records"]]})


def _decoded(record: TopicRecord) -> dict[str, Any]:
    from streamiter.iteration.feedback_records import FeedbackRecords  # only who watches a loop needs it

    batch = TopicBatch(partition=record.partition, values=[record.value], headers=[record.headers])
    [fed_back] = FeedbackRecords().decode(batch)
    return fed_back


def _as_json(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, default=_for_json, option=_JSON_OPTIONS)


def _for_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Columns):
        return list(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)
