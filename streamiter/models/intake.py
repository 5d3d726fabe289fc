"""From records to updates: :class:`UpdateIntake` takes the records of a topic, one by one.

The updates that it returns are complete, readable, and never older than the update before. An update may be a change.
A *chain* is a whole update, its base, and the changes that continue it. The base is an update as any other, with the
header ``chain``. A change applies to the update that its header ``follows`` names, and to no other: the checksum in
``chain`` is that of all values from the base to the change. :class:`ChainAssembler` puts the changes in order, and
applies them when their update is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from streamiter.errors import DecodeError, ModelError
from streamiter.models.chunks import ChunkAssembler
from streamiter.models.documents import (
    Document,
    Parameters,
    checked_parameters,
    decode_document,
    freeze_arrays,
    without_state,
)
from streamiter.models.update import (
    NO_RANK,
    UPDATE_BYTES_MAX,
    ChainLink,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    chain_checksum,
    is_change,
    is_chunk,
    is_key_of,
    model_of,
    shown_rank,
)
from streamiter.topics.topic import Topic, TopicRecord

_log = logging.getLogger("streamiter.models")

# The changes of a chain have together at most the bytes of its base. A reader without the base of one chain may get
# the next chain, too.
_WAITING_BYTES_MAX: Final = 2 * UPDATE_BYTES_MAX

# The arrays of a model are copied when they change: a megabyte in about a millisecond.
_SHORT_BYTES: Final = 1 << 20


class _Change(NamedTuple):
    headers: UpdateHeaders
    link: ChainLink
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


class ChainPlace(NamedTuple):
    """The place of an update in its chain: what the next change is compared with."""

    base: Rank = NO_RANK
    """The rank of the base; zeros for an update without a chain."""
    rank: Rank = NO_RANK
    """The rank of the update in the chain; zeros without one."""
    checksum: str | None = None
    """The checksum of all values up to the update."""
    base_bytes: int = 0
    """The number of bytes of the base."""


class ChainAssembler:
    """Puts the updates of a chain in order, in which they need not arrive, and applies changes to their base.

    Changes whose predecessor has not arrived wait; their number of bytes is bounded, and the oldest are dropped first.
    Changes that are in order are kept until :meth:`newest` applies them.
    """

    def __init__(self, *, state: bool = True) -> None:
        """``state``: whether updates have the state of the learner, which programs that predict do not need."""
        self._state = state
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
        self.base_bytes = 0
        """The number of bytes of the last base."""
        self.dropped = 0
        """The number of changes that were dropped while they waited."""
        self.unkept: list[Any] | None = None
        """The operations that were applied since :meth:`keep`; None: the update is another one."""

    @property
    def place(self) -> ChainPlace:
        """The place of the last update that is in order."""
        return ChainPlace(self.base, self.rank, self._checksum, self.base_bytes)

    def resume(self, update: ModelUpdate, place: ChainPlace) -> None:
        """Continue with this update, which has this place in its chain."""
        self.base, self.rank, self._checksum, self.base_bytes = place
        self.keep(update)

    def keep(self, update: ModelUpdate) -> None:
        """Go on with this object in place of the last update, which it equals."""
        self._applied = None if self.base == NO_RANK else update
        self.unkept = []

    @property
    def waits(self) -> bool:
        """Whether a change waits for one before it, or for its base."""
        return bool(self._waiting)

    @property
    def first_waiting(self) -> _Change | None:
        """The first change that waits for one before it, or for its base."""
        return min(self._all_waiting(), key=lambda change: change.headers.rank, default=None)

    @property
    def waits_for_base(self) -> bool:
        """Whether a change waits whose base has not arrived."""
        return any(change.link.base > self.base for change in self._all_waiting())

    def begin(self, headers: UpdateHeaders, update: ModelUpdate, value: bytes) -> None:
        """Take a whole update, which replaces the chain. Raises ``ValueError`` if it is damaged."""
        checksum = None
        if headers.chain is not None:
            # The checksum of chunks is that of their value, and was compared when they were joined.
            checksum = chain_checksum(None, value) if headers.chunk is None else headers.chunk.sha256
            if checksum != headers.chain:
                raise ValueError(f"it is damaged: expected SHA-256 {headers.chain}, given {checksum}")
        self.forget(update.rank)
        self.unkept = None
        if checksum is not None:
            self.base = self.rank = update.rank
            self.base_bytes = len(value)
            self._applied, self._checksum = update, checksum
            self._put_in_order()

    def forget(self, rank: Rank) -> None:
        """Forget the chain, and the waiting changes whose base is before ``rank``."""
        self._applied, self._checksum, self._in_order = None, None, []
        self.base = self.rank = NO_RANK
        for change in [change for change in self._all_waiting() if change.link.base < rank]:
            self._drop(change)

    def add(self, headers: UpdateHeaders, value: bytes) -> bool:
        """Take a change; return whether it continues the chain now.

        Raises ``ValueError`` if it names the last update of the chain, and has not its checksum.
        """
        link, before = headers.link, self.rank
        assert link is not None
        change = _Change(headers, link, value)
        if headers.rank <= link.follows:
            raise ValueError(f"expected it to follow an earlier update, given {shown_rank(link.follows)}")
        if link.follows == self.rank != NO_RANK:
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
        from streamiter.models.changes import applied, change_without_state  # Most topics have whole updates only.

        assert self._applied is not None
        update, changes = self._applied, self._in_order
        if not changes:
            return update
        self._in_order = []
        try:
            operations: list[Any] = []
            for headers, _, value in changes:
                document = checked_document(headers, value)
                checked_parameters({"changes": document.changes}, "value")
                operations += (
                    document.changes if self._state else filter(None, map(change_without_state, document.changes))
                )
            parameters: Any = applied(update.parameters, operations)
            if not isinstance(parameters, (np.ndarray, dict)):
                raise ValueError(f"expected parameters as arrays, given {type(parameters).__name__}")  # noqa: TRY004, TRY301
        except (ValueError, ModelError):
            self.forget(NO_RANK)
            raise
        freeze_arrays(parameters)
        if self.unkept is not None:
            self.unkept += operations
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
        following = self._waiting.setdefault(change.link.follows, {})
        if (key := (change.headers.rank, change.headers.chain)) not in following:
            following[key] = change
            self._waiting_bytes += len(change.value)
        while self._waiting_bytes > _WAITING_BYTES_MAX:
            self._drop(min(self._all_waiting(), key=lambda each: each.headers.rank))

    def _drop(self, change: _Change) -> None:
        self._forget_waiting(change)
        self.dropped += 1

    def _forget_waiting(self, change: _Change) -> None:
        following = self._waiting[change.link.follows]
        del following[change.headers.rank, change.headers.chain]
        self._waiting_bytes -= len(change.value)
        if not following:
            del self._waiting[change.link.follows]


Wanted = Callable[[UpdateHeaders], bool]
"""Whether a reader wants the update with these headers."""


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """Counts of the records of a model."""

    updates: int = 0
    """Updates that were given to the reader."""
    older: int = 0
    """Skipped updates that were not newer: updates of a superseded writer, and repetitions after a restart."""
    incomplete: int = 0
    """Updates that were skipped, because chunks, or the changes before them, were missing when a newer update
    arrived."""
    unreadable: int = 0
    """Records that claim to be of the model and cannot be read."""
    last_error: str | None = None
    """Why the last unreadable record could not be read."""

    def plus(self, later: UpdateStatistics) -> UpdateStatistics:
        """Return the sums of both counts."""
        return UpdateStatistics(
            updates=self.updates + later.updates,
            older=self.older + later.older,
            incomplete=self.incomplete + later.incomplete,
            unreadable=self.unreadable + later.unreadable,
            last_error=later.last_error if later.last_error is not None else self.last_error,
        )


class UpdateIntake:
    """Turns the records of a topic, one by one, into the updates of a model.

    It keeps the chunks of incomplete updates, and of a chain the last update and the changes that are not applied yet.
    Use it in one task only.
    """

    def __init__(
        self, topic: Topic, model: str, wanted: Wanted | None = None, *, state: bool = True, applies: bool = True
    ) -> None:
        """``state``: whether parameters have the state of the learner, if their version carries it."""
        self._state = state
        self._wanted = wanted
        """Which updates to read; the values of others are not decoded. None: all updates. The changes of a base that
        is not wanted are not read, so a reader of a change wants its base, too."""
        self._applies = applies
        """Whether to apply changes one by one; a search applies all of them at its end, by ``caught_up``."""
        self.chain = ChainAssembler(state=state)
        self._topic = topic
        self._model = model
        self._model_header = model.encode()
        self.chunks = ChunkAssembler()
        self._dropped_before = 0
        self._rank = NO_RANK
        self._updates = 0
        self._older = 0
        self._unreadable = 0
        self._last_error: str | None = None

    def take(
        self, record: TopicRecord, on_headers: Callable[[UpdateHeaders], None] | None = None
    ) -> ModelUpdate | None:
        """Return the update that ``record`` completes, if it is newer than all updates returned before; else None.

        ``on_headers`` is called with the headers of every record of the model, if they are readable.
        Raises :class:`~streamiter.errors.DecodeError` with topic, partition and offset for a record that claims to be
        of the model and cannot be read; the next record can be taken after it.
        """
        if not self.is_of_model(record):
            return None
        assert record.value is not None
        try:
            headers = UpdateHeaders.parse(record.headers)
            if on_headers is not None:
                on_headers(headers)
            return self._newer(headers, record.value)
        except (ValueError, ModelError) as error:
            raise self._unreadable_for(f"partition {record.partition}, offset {record.offset}", error) from error

    def is_of_model(self, record: TopicRecord) -> bool:
        """Whether the record is one of an update of the model."""
        if record.value is None:
            return False
        named = model_of(record.headers)
        return is_key_of(self._model, record.key) if named is None else named == self._model_header

    def takes_long(self, record: TopicRecord) -> bool:
        """Whether :meth:`take` of this record may hold the processor for more than about a millisecond."""
        if not self.is_of_model(record):
            return False
        return is_chunk(record.headers) or (is_change(record.headers) and self.chain.base_bytes > _SHORT_BYTES)

    def _unreadable_for(self, place: str, why: Exception) -> DecodeError:
        self._unreadable += 1
        self._last_error = f"{self._topic.url}, {place}: expected an update of model {self._model!r}: {why}"
        return DecodeError({0: self._last_error})

    def resume(self, update: ModelUpdate, place: ChainPlace) -> None:
        """Take what is newer than this update, which has this place in its chain."""
        self._rank = update.rank
        self.chain.resume(update, place)

    @property
    def waits(self) -> bool:
        """Whether an update is incomplete: records of it were taken."""
        return self.chain.waits or self.chunks.waits

    def restart(self, wanted: Wanted | None, update: ModelUpdate | None, error: DecodeError | None) -> None:
        """Take only wanted updates from now on, and restart the counts with this update and this unreadable record."""
        self._wanted, self._applies = wanted, True
        self._updates, self._older, self._unreadable = int(update is not None), 0, int(error is not None)
        self._last_error = None if error is None else str(error)
        self._dropped_before = self._dropped
        self.tell_gap()

    def caught_up(self) -> ModelUpdate | None:
        """Return the update after all changes that are in order; None if nothing, or no chain, was taken.

        Raises :class:`~streamiter.errors.DecodeError` for a change that cannot be read.
        """
        try:
            return None if self.chain.base == NO_RANK else self.chain.newest()
        except (ValueError, ModelError) as error:
            raise self._unreadable_for(f"after update {shown_rank(self._rank)}", error) from error

    def tell_gap(self) -> None:
        """Log a warning if a change waits for updates before it, and keep the text as the last error."""
        if (change := self.chain.first_waiting) is None:
            return
        given = "none of its chain" if self.chain.base == NO_RANK else shown_rank(self.chain.rank)
        self._last_error = (
            f"update {shown_rank(change.headers.rank)} of model {self._model!r} of {self._topic.url} is a change of "
            f"update {shown_rank(change.link.follows)}, and the last one read is {given}; it waits for the updates "
            "between them, or for the next whole one"
        )
        _log.warning("%s", self._last_error)

    @property
    def statistics(self) -> UpdateStatistics:
        """The counts so far."""
        dropped = self._dropped - self._dropped_before
        return UpdateStatistics(self._updates, self._older, dropped, self._unreadable, self._last_error)

    @property
    def _dropped(self) -> int:
        return self.chunks.dropped + self.chain.dropped

    def _newer(self, headers: UpdateHeaders, part: bytes) -> ModelUpdate | None:
        if headers.rank <= self._rank:
            self._older += headers.is_last
            return None
        is_wanted = self._wanted is None or self._wanted(headers)
        if not is_wanted and (headers.link is None or headers.link.base != self.chain.base):
            if headers.is_last:
                self._rank = headers.rank
                self.chain.forget(headers.rank)
            return None
        value = part if headers.chunk is None else self.chunks.add(headers, part)
        if value is None:
            return None
        update = self._whole(headers, value) if headers.link is None else self._changed(headers, value, is_wanted)
        self.chunks.drop_up_to(self._rank)
        if update is None or not is_wanted:
            return None
        self._updates += 1
        return update

    def _whole(self, headers: UpdateHeaders, value: bytes) -> ModelUpdate:
        document = checked_document(headers, value)
        if not self._state:
            document = replace(document, parameters=without_state(document.parameters))
        update = update_of_document(document, headers.created_at_ms, headers.since_rollback, headers.rollback_to)
        self.chain.begin(headers, update, value)
        self._rank = max(headers.rank, self.chain.rank)
        return self.chain.newest() if self._applies and self._rank > headers.rank else update

    def _changed(self, headers: UpdateHeaders, value: bytes, is_wanted: bool) -> ModelUpdate | None:
        waited = self.chain.waits
        if not self.chain.add(headers, value):
            if not waited and self._applies:
                self.tell_gap()
            return None
        self._rank = self.chain.rank
        return self.chain.newest() if self._applies and is_wanted else None


def update_of_document(
    document: Document, created_at_ms: int, since_rollback: Rank | None = None, rollback_to: Rank | None = None
) -> ModelUpdate:
    """Return the update of a document; its parameters are checked and read-only."""
    parameters = checked_parameters(document.parameters, "value")
    freeze_arrays(parameters)
    return update_of(document, parameters, created_at_ms, since_rollback, rollback_to)
