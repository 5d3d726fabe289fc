"""Where an operator emits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import numpy as np

from streamiter.operators.functions import batch_of
from streamiter.operators.rejection import (
    DEAD_LETTERS,
    DeadLetter,
    Origin,
    RecordFailure,
    RejectionPolicy,
    described,
)
from streamiter.records import Batch, BatchOrigin, Columns, OutputTag

__all__ = ["Output", "Receiver"]

Receiver = Callable[[Batch], object]
"""Takes a batch: a chained operator's entry, or the writer of a channel."""

# Single emitted records are gathered to batches of at most this many: large enough that the cost of a
# hop (about 2 µs) disappears, small enough that an operator's output of one call stays in the CPU cache.
_GATHER_RECORDS: Final = 1024

_BATCHES: Final = frozenset({list, np.ndarray, Columns})


class Output:
    """Handed to every method of an operator that may emit.

    ``emit(record)`` gathers records; the engine sends them on when the call returns, or earlier when
    many have gathered. ``emit_batch(batch)`` sends a list, a numpy array or ``Columns`` as it is, in order
    with the records emitted before. With ``tag=`` either goes to that side output instead. What was
    emitted must not be changed afterwards.

    Used by one task. What nobody reads is dropped.
    """

    __slots__ = (
        "_gathered",
        "_origin_now",
        "_policy",
        "_receivers",
        "_step",
        "_tagged_gathered",
        "_tagged_receivers",
        "records_emitted",
        "rejected",
    )

    def __init__(self, step: str = "operator", policy: RejectionPolicy = "fail") -> None:
        self._step = step
        self._policy = policy
        self.rejected = 0
        self._origin_now: Callable[[], BatchOrigin | None] | None = None
        self._receivers: list[Receiver] = []
        self._tagged_receivers: dict[OutputTag, list[Receiver]] = {}
        self._gathered: list[Any] = []
        self._tagged_gathered: dict[OutputTag, list[Any]] = {}
        self.records_emitted = 0

    def connect(self, receiver: Receiver, tag: OutputTag | None) -> None:
        """For the engine: let ``receiver`` have what is emitted (to ``tag``)."""
        if tag is None:
            self._receivers.append(receiver)
        else:
            self._tagged_receivers.setdefault(tag, []).append(receiver)

    def ask_for_origin(self, origin_now: Callable[[], BatchOrigin | None]) -> None:
        """For the engine: ``origin_now`` gives the origin of the batch that the operator is handling."""
        self._origin_now = origin_now

    @property
    def batch_origin(self) -> BatchOrigin | None:
        """Where the batch that the operator is handling was read, as far as known: for ``reject`` of its records."""
        return None if self._origin_now is None else self._origin_now()

    def detach(self) -> Callable[[], None]:
        """For the engine: gather what is emitted, until the function given back is called: it sends that on.

        So an operator may be called in another thread than those who receive what it emits.
        """
        receivers, tagged_receivers = self._receivers, self._tagged_receivers
        gathered: list[tuple[Receiver, Batch]] = []

        def gathering(receiver: Receiver) -> Receiver:
            return lambda batch: gathered.append((receiver, batch))

        def attach() -> None:
            self._receivers, self._tagged_receivers = receivers, tagged_receivers
            for receiver, batch in gathered:
                receiver(batch)

        self._receivers = [gathering(receiver) for receiver in receivers]
        self._tagged_receivers = {
            tag: [gathering(receiver) for receiver in several] for tag, several in tagged_receivers.items()
        }
        return attach

    def emit(self, record: Any, tag: OutputTag | None = None) -> None:
        """Emit one record."""
        if tag is not None:
            self._tagged_gathered.setdefault(tag, []).append(record)
            return
        self._gathered.append(record)
        if len(self._gathered) >= _GATHER_RECORDS:
            self._send_gathered()

    def emit_batch(self, batch: Batch, tag: OutputTag | None = None) -> None:
        """Emit the records of a batch; those of a table of pandas, polars or Arrow are its rows."""
        if type(batch) not in _BATCHES:
            batch = batch_of(f"step {self._step!r}, emit_batch", batch)
        if tag is not None:
            self._send_tagged(tag)
            self._deliver(self._tagged_receivers.get(tag, ()), batch)
            return
        if self._gathered:
            self._send_gathered()
        self.records_emitted += len(batch)
        if len(batch):
            for receiver in self._receivers:
                receiver(batch)

    @property
    def step(self) -> str:
        """The name of the step."""
        return self._step

    @property
    def tolerates_rejections(self) -> bool:
        """Whether the step goes on after a refused record (policy ``skip`` or ``dead_letter``)."""
        return self._policy != "fail"

    def reject(
        self,
        record: Any,
        reason: str | Exception,
        *,
        origin: Origin | BatchOrigin | None = None,
        key: bytes | None = None,
    ) -> None:
        """Refuse a record: by the step's policy it is skipped, becomes a dead letter, or ends the job.

        ``origin`` says where the record was read: ``out.batch_origin`` for a record of the batch at hand, nothing for
        one that the operator has kept from earlier.
        """
        if self._policy == "fail":
            self.fail(reason, record, origin=origin if isinstance(origin, Origin) else None)
        self.rejected += 1
        if self._policy == "dead_letter":
            self.emit(DeadLetter(record, self._step, described(reason), origin, key), tag=DEAD_LETTERS)

    def fail(self, reason: str | Exception, record: Any, *, origin: Origin | None = None) -> NoReturn:
        """End the job, naming the step and the record."""
        cause = reason if isinstance(reason, Exception) else ValueError(reason)
        raise RecordFailure(self._step, record, has_record=True, origin=origin) from cause

    def flush(self) -> None:
        """For the engine: send on what has gathered."""
        if self._gathered:
            self._send_gathered()
        if self._tagged_gathered:
            for tag in list(self._tagged_gathered):
                self._send_tagged(tag)

    def _send_gathered(self) -> None:
        batch, self._gathered = self._gathered, []
        self.records_emitted += len(batch)
        for receiver in self._receivers:
            receiver(batch)

    def _send_tagged(self, tag: OutputTag) -> None:
        batch = self._tagged_gathered.pop(tag, None)
        if batch:
            self._deliver(self._tagged_receivers.get(tag, ()), batch)

    def _deliver(self, receivers: list[Receiver] | tuple[()], batch: Batch) -> None:
        self.records_emitted += len(batch)
        if len(batch):
            for receiver in receivers:
                receiver(batch)
