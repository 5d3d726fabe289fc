"""Records that a step refuses, and what the step's policy makes of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from streamiter.records import Batch, BatchOrigin, Columns, OutputTag

__all__ = [
    "DEAD_LETTERS",
    "DeadLetter",
    "Origin",
    "RecordFailure",
    "RejectionPolicy",
    "described",
    "record_at_fault",
    "safe_repr",
    "shortened",
]

RejectionPolicy = Literal["fail", "skip", "dead_letter"]
"""What becomes of a record that cannot be decoded or that an operator refuses."""

DEAD_LETTERS: Final = OutputTag("streamiter.dead-letters")
"""The side output on which a step with the policy ``dead_letter`` emits :class:`DeadLetter`."""

# Long enough to recognise a record in a log line, short enough to keep it a line.
_SHOWN_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record was read."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}, partition {self.partition}, offset {self.offset}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A refused record with the reason.

    ``key`` where the record came straight from a topic. ``origin`` where it is known: of a record that came straight
    from a topic its offset, of others the range of offsets that the batch was read from.
    """

    record: Any
    step: str
    error: str
    origin: Origin | BatchOrigin | None = None
    key: bytes | None = None


class RecordFailure(Exception):
    """For the engine: a step failed, on this record where known; the cause is ``__cause__``."""

    def __init__(
        self, step: str, record: Any = None, *, has_record: bool = False, origin: Origin | None = None
    ) -> None:
        self.step = step
        self.record = record
        self.has_record = has_record
        self.origin = origin
        self.place: str | None = None
        """The batch that failed, where it came straight from a source."""
        super().__init__(step)


def shortened(record: Any) -> str:
    """A record as it is shown in an error: its repr, cut after 200 characters."""
    shown = safe_repr(record)
    return (
        shown
        if len(shown) <= _SHOWN_CHARACTERS
        else f"{shown[:_SHOWN_CHARACTERS]}… ({len(shown)} characters)"
    )


def safe_repr(record: Any) -> str:
    """The repr of a user's value; its type where that has none: nested too deeply, or ``__repr__`` raises.

    >>> class Broken:
    ...     def __repr__(self):
    ...         raise ValueError
    >>> safe_repr([1]), safe_repr(Broken())
    ('[1]', '<Broken without a repr>')
    """
    try:
        return repr(record)
    except Exception:
        return f"<{type(record).__name__} without a repr>"


def described(reason: str | Exception) -> str:
    """The reason of a refusal as text; of an exception that has none its type."""
    if isinstance(reason, str):
        return reason
    try:
        return f"{type(reason).__name__}: {reason}"
    except Exception:
        return type(reason).__name__


def record_at_fault(batch: Batch, records: Iterator[Any]) -> tuple[bool, Any]:
    """The record that a half-consumed iterator over ``batch`` gave last, if that can be told.

    >>> batch = [3, 0, 5]
    >>> records = iter(batch)
    >>> [next(records), next(records)]
    [3, 0]
    >>> record_at_fault(batch, records)
    (True, 0)
    """
    if isinstance(batch, Columns):
        return False, None
    consumed = len(batch) - operator.length_hint(records)
    return (True, batch[consumed - 1]) if consumed > 0 else (False, None)
