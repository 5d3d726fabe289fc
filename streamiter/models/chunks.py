"""The chunks of an update that is larger than a record: cutting its value, and joining the chunks again."""

from __future__ import annotations

import hashlib
from typing import Final

from streamiter.models.update import UPDATE_BYTES_MAX, Chunk, Rank, UpdateHeaders


def cut(value: bytes, chunk_bytes: int) -> list[tuple[Chunk, bytes]]:
    """Return the chunks of ``value`` in order, none longer than ``chunk_bytes``.

    >>> [(chunk.index, chunk.count, part) for chunk, part in cut(b"abcde", 2)]
    [(0, 3, b'ab'), (1, 3, b'cd'), (2, 3, b'e')]
    """
    sha256 = hashlib.sha256(value).hexdigest()
    parts = [value[start : start + chunk_bytes] for start in range(0, len(value), chunk_bytes)]
    return [(Chunk(index, len(parts), sha256), part) for index, part in enumerate(parts)]


# A reader keeps at most this many bytes of incomplete updates: two of the largest updates, because a superseded writer
# may still write its update while the new writer writes another one.
_PENDING_BYTES_MAX: Final = 2 * UPDATE_BYTES_MAX

# Only crashes and superseded writers leave updates that are never completed: a few for each model.
_PENDING_UPDATES_MAX: Final = 256

_UpdateIdentity = tuple[Rank, str]
"""Rank and SHA-256 of an update: the chunks of two writers that wrote updates of one rank never mix."""


class _Partial:
    """The chunks of one update that have arrived so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.size_bytes = 0
        self._parts: dict[int, bytes] = {}

    def put(self, index: int, part: bytes) -> None:
        self.size_bytes += len(part) - len(self._parts.get(index, b""))
        self._parts[index] = part

    @property
    def missing(self) -> int:
        return self.count - len(self._parts)

    @property
    def is_closed(self) -> bool:
        return self.count - 1 in self._parts

    def joined(self) -> bytes:
        return b"".join(self._parts[index] for index in range(self.count))


class ChunkAssembler:
    """Joins the chunks of one model's updates, which may arrive in any order and interleaved with other updates.

    Its memory is bounded: beyond ``pending_bytes_max`` the oldest incomplete update is dropped and counted.
    """

    def __init__(self, pending_bytes_max: int = _PENDING_BYTES_MAX) -> None:
        self._pending_bytes_max = pending_bytes_max
        self._pending: dict[_UpdateIdentity, _Partial] = {}
        self.dropped = 0

    def add(self, headers: UpdateHeaders, part: bytes) -> bytes | None:
        """Return the whole value if this was its last missing chunk, else None.

        Raises ``ValueError`` with the reason for chunks that do not belong together.
        """
        chunk = headers.chunk
        assert chunk is not None
        identity = (headers.rank, chunk.sha256)
        partial = self._pending.setdefault(identity, _Partial(chunk.count))
        if partial.count != chunk.count:
            raise ValueError(f"chunk {chunk.index} is one of {chunk.count}, the chunks before are of {partial.count}")
        partial.put(chunk.index, part)
        if partial.missing:
            self._drop_oldest_above_limit()
            return None
        del self._pending[identity]
        value = partial.joined()
        given = hashlib.sha256(value).hexdigest()
        if given != chunk.sha256:
            raise ValueError(f"its chunks are damaged: expected SHA-256 {chunk.sha256}, given {given}")
        return value

    def drop_up_to(self, rank: Rank) -> None:
        """Drop the updates that are not newer than ``rank``: no reader needs them any more."""
        self._drop([identity for identity in self._pending if identity[0] <= rank])

    @property
    def waits(self) -> bool:
        """Whether an update is incomplete."""
        return bool(self._pending)

    @property
    def closed_chunks(self) -> int:
        """The number of chunks, present or missing, of updates whose last chunk has arrived."""
        return sum(partial.count for partial in self._pending.values() if partial.is_closed)

    def _drop_oldest_above_limit(self) -> None:
        while (
            len(self._pending) > _PENDING_UPDATES_MAX
            or sum(partial.size_bytes for partial in self._pending.values()) > self._pending_bytes_max
        ):
            self._drop([min(self._pending, key=lambda identity: identity[0])])

    def _drop(self, identities: list[_UpdateIdentity]) -> None:
        for identity in identities:
            del self._pending[identity]
        self.dropped += len(identities)
