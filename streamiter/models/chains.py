"""Chains: a whole update, its base, and the changes that continue it.

The base is an update as any other, with the header ``chain``. A change applies to the update that its header
``follows`` names, and to no other: the checksum in ``chain`` is that of all values from the base to the change.
:class:`ChainAssembler` puts the changes of a reader in order, and applies them when their update is asked for.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.changes import applied
from streamiter.models.documents import Document, Parameters, checked_parameters, decode_document, freeze_arrays
from streamiter.models.update import (
    NO_RANK,
    UPDATE_BYTES_MAX,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    chain_checksum,
    shown_rank,
)

# The changes of a chain have together at most the bytes of its base. A reader without the base of one chain may get
# the next chain, too.
_WAITING_BYTES_MAX: Final = 2 * UPDATE_BYTES_MAX


class _Change(NamedTuple):
    headers: UpdateHeaders
    value: bytes


def checked_document(headers: UpdateHeaders, value: bytes) -> Document:
    """Return the document of an update. Raises ``ValueError`` if it cannot be read, or is not of these headers."""
    document = decode_document(headers.content_type, value)
    if (document.model, document.rank) != (headers.model, headers.rank):
        raise ValueError(
            f"headers say update {shown_rank(headers.rank)} of {headers.model!r}, the value"
            f" {shown_rank(document.rank)} of {document.model!r}"
        )
    if (document.changes is None) != (headers.link is None):
        raise ValueError(f"headers and value disagree whether update {shown_rank(headers.rank)} is a change")
    return document


def update_of(
    document: Document,
    parameters: Parameters,
    created_at_ms: int,
    since_rollback: Rank | None = None,
    rollback_to: Rank | None = None,
) -> ModelUpdate:
    """Return the update of a document with these parameters."""
    return ModelUpdate(
        document.model,
        *document.rank,
        document.epoch,
        created_at_ms,
        document.records,
        document.metrics,
        parameters,
        since_rollback,
        rollback_to,
    )


class ChainAssembler:
    """Puts the updates of a chain in order, in which they need not arrive, and applies changes to their base.

    Changes whose predecessor has not arrived wait; their number of bytes is bounded, and the oldest are dropped first.
    Changes that are in order are kept until :meth:`newest` applies them.
    """

    def __init__(self, *, state: bool = True, waiting_bytes_max: int = _WAITING_BYTES_MAX) -> None:
        """``state``: whether updates have the state of the learner, which programs that predict do not need."""
        self._state = state
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting: dict[Rank, dict[tuple[Rank, str | None], _Change]] = {}
        """The changes that follow each update, by their rank and checksum: of those of two writers one is the next."""
        self._waiting_bytes = 0
        self._in_order: list[_Change] = []
        self._applied: ModelUpdate | None = None
        self._checksum: str | None = None
        self.base = NO_RANK
        """The rank of the base; zeros without one."""
        self.rank = NO_RANK
        """The rank of the last update that is in order; zeros without a base."""
        self.dropped = 0
        """The number of changes that were dropped while they waited."""

    @property
    def waits(self) -> bool:
        """Whether a change waits for one before it, or for its base."""
        return bool(self._waiting)

    @property
    def first_waiting(self) -> UpdateHeaders | None:
        """The headers of the first change that waits for one before it, or for its base."""
        return min((change.headers for change in self._all_waiting()), key=lambda each: each.rank, default=None)

    @property
    def waits_for_base(self) -> bool:
        """Whether a change waits whose base has not arrived."""
        return any(_base_of(change) > self.base for change in self._all_waiting())

    def begin(self, headers: UpdateHeaders, update: ModelUpdate, value: bytes) -> None:
        """Take a whole update, which replaces the chain. Raises ``ValueError`` if it is damaged."""
        checksum = None
        if headers.chain is not None:
            # The checksum of chunks is that of their value, and was compared when they were joined.
            checksum = chain_checksum(None, value) if headers.chunk is None else headers.chunk.sha256
            if checksum != headers.chain:
                raise ValueError(f"it is damaged: expected SHA-256 {headers.chain}, given {checksum}")
        self.forget(update.rank)
        if checksum is not None:
            self.base = self.rank = update.rank
            self._applied, self._checksum = update, checksum
            self._put_in_order()

    def forget(self, rank: Rank) -> None:
        """Forget the chain, and the waiting changes whose base is before ``rank``."""
        self._applied, self._checksum, self._in_order = None, None, []
        self.base = self.rank = NO_RANK
        for change in [change for change in self._all_waiting() if _base_of(change) < rank]:
            self._drop(change)

    def add(self, headers: UpdateHeaders, value: bytes) -> bool:
        """Take a change; return whether it continues the chain now.

        Raises ``ValueError`` if it names the last update of the chain, and has not its checksum.
        """
        assert headers.link is not None
        before, change = self.rank, _Change(headers, value)
        if headers.rank <= headers.link.follows:
            raise ValueError(f"expected it to follow an earlier update, given {shown_rank(headers.link.follows)}")
        if headers.link.follows == self.rank != NO_RANK:
            if not self._continues(change):
                raise ValueError(
                    f"it is a change of another update {shown_rank(self.rank)}, or damaged: expected the checksum "
                    f"{headers.chain}, given {chain_checksum(self._checksum, value)}"
                )
        else:
            self._wait(change)
        self._put_in_order()
        return self.rank > before

    def newest(self) -> ModelUpdate:
        """Return the last update that is in order.

        Raises ``ValueError`` or ``ModelError`` for a change that cannot be read or does not fit; the chain ends there.
        """
        assert self._applied is not None
        update, changes = self._applied, self._in_order
        if not changes:
            return update
        self._in_order = []
        try:
            operations = []
            for headers, value in changes:
                document = checked_document(headers, value)
                checked_parameters({"changes": document.changes}, "value")
                operations += document.changes
            parameters: Any = applied(update.parameters, operations, state=self._state)
            if not isinstance(parameters, (np.ndarray, dict)):
                raise ValueError(f"expected parameters as arrays, given {type(parameters).__name__}")  # noqa: TRY004, TRY301
        except (ValueError, ModelError):
            self.forget(NO_RANK)
            raise
        freeze_arrays(parameters)
        self._applied = update_of(document, parameters, headers.created_at_ms, headers.since_rollback)
        return self._applied

    def _continues(self, change: _Change) -> bool:
        """Put a change behind the last update of the chain, if it has the checksum of that."""
        checksum = chain_checksum(self._checksum, change.value)
        if checksum != change.headers.chain:
            return False
        self._in_order.append(change)
        self._checksum, self.rank = checksum, change.headers.rank
        return True

    def _put_in_order(self) -> None:
        while self.base != NO_RANK and (following := self._waiting.get(self.rank)):
            rank = self.rank
            for change in [*following.values()]:
                self._forget_waiting(change)
                if self.rank > rank or not self._continues(change):
                    self.dropped += 1

    def _all_waiting(self) -> list[_Change]:
        return [change for following in self._waiting.values() for change in following.values()]

    def _wait(self, change: _Change) -> None:
        following = self._waiting.setdefault(_followed_by(change), {})
        if (key := (change.headers.rank, change.headers.chain)) not in following:
            following[key] = change
            self._waiting_bytes += len(change.value)
        while self._waiting_bytes > self._waiting_bytes_max:
            self._drop(min(self._all_waiting(), key=lambda each: each.headers.rank))

    def _drop(self, change: _Change) -> None:
        self._forget_waiting(change)
        self.dropped += 1

    def _forget_waiting(self, change: _Change) -> None:
        following = self._waiting[_followed_by(change)]
        del following[change.headers.rank, change.headers.chain]
        self._waiting_bytes -= len(change.value)
        if not following:
            del self._waiting[_followed_by(change)]


def _base_of(change: _Change) -> Rank:
    assert change.headers.link is not None
    return change.headers.link.base


def _followed_by(change: _Change) -> Rank:
    """Return the rank of the update that the change applies to."""
    assert change.headers.link is not None
    return change.headers.link.follows
