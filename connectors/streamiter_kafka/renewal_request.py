"""InitProducerId of version 3, which aiokafka lacks: a new epoch for whoever has the current one.

With the producer's id and epoch in it, the broker gives a new epoch only if they are still the newest ones of
the transactional id (KIP-360). Without, as in version 0, it would fence a newer owner in any case. With them it
still does so while that one has a transaction open, which it aborts first; so this is no way to ask who the owner is.
"""

from __future__ import annotations

from typing import Any

from streamiter_kafka.wire import (
    CompactString,
    Int16,
    Int32,
    Int64,
    Request,
    RequestStruct,
    ResponseStruct,
    Schema,
    TaggedFields,
)

__all__ = ["RenewProducerRequest"]

_API_KEY = 22
_API_VERSION = 3


class _Response(ResponseStruct):  # type: ignore[misc]
    API_KEY = _API_KEY
    API_VERSION = _API_VERSION
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _Request(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = _API_KEY
    API_VERSION = _API_VERSION
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class RenewProducerRequest(Request[_Request]):  # type: ignore[misc]
    """Asks for the epoch after ``epoch``; the error of one who is not the owner any more is that of a fence."""

    API_KEY = _API_KEY

    def __init__(self, transactional_id: str, timeout_ms: int, number: int, epoch: int) -> None:
        self._fields = (transactional_id, timeout_ms, number, epoch)

    def build(self, request_struct_class: Any) -> Any:
        """The fields as the protocol has them."""
        return request_struct_class(*self._fields, {})
