"""Updates larger than a record of their topic: cut into chunks, put together again, or never shown.

All chunks but the last have keys of their own (model, generation, version, index), so that compaction
keeps each of them. The last one has the model's key, as an update in one record has: it closes the update,
and compaction drops it as soon as a newer update is closed. When one is, the publisher deletes the chunks
of the one before by their keys. So in a compacted topic the last closed update is whole at any moment,
and a crash while chunks are written harms none that was there before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from streamiter.models.headers import Chunk, UpdateHeaders
from streamiter.models.update import Rank

__all__ = ["UPDATE_BYTES_MAX", "ChunkAssembler", "cut"]

# Publishing one larger is refused. Above that a topic is the wrong place, and a reader that holds one
# update, its joined bytes and the one before needs three times as much memory.
UPDATE_BYTES_MAX: Final = 512 * 1024 * 1024

# What a reader keeps of updates not yet whole: two of the largest, for a writer that was superseded may
# still be at its own while the new one writes.
_PENDING_BYTES_MAX: Final = 2 * UPDATE_BYTES_MAX
# Only crashes and superseded writers leave updates that never become whole: a few for each model.
_PENDING_UPDATES_MAX: Final = 256


def cut(value: bytes, chunk_bytes: int) -> list[tuple[Chunk, bytes]]:
    """The chunks of ``value`` in order, none above ``chunk_bytes``.

    >>> [(chunk.index, chunk.count, part) for chunk, part in cut(b"abcde", 2)]
    [(0, 3, b'ab'), (1, 3, b'cd'), (2, 3, b'e')]
    """
    sha256 = hashlib.sha256(value).hexdigest()
    parts = [value[start : start + chunk_bytes] for start in range(0, len(value), chunk_bytes)]
    return [(Chunk(index, len(parts), sha256), part) for index, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class _Identity:
    """Tells updates of a model apart, also two of one rank by two writers: their contents never mix."""

    rank: Rank
    sha256: str


class _Partial:
    """The chunks of one update that have come so far."""

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
    """Puts the chunks of one model together, in any order and interleaved with those of other updates.

    Bounded: past ``pending_bytes_max`` the oldest update that is not whole is dropped and counted.
    """

    def __init__(self, pending_bytes_max: int = _PENDING_BYTES_MAX) -> None:
        self._pending_bytes_max = pending_bytes_max
        self._pending: dict[_Identity, _Partial] = {}
        self.dropped = 0

    def add(self, headers: UpdateHeaders, part: bytes) -> bytes | None:
        """The whole value if this was its last missing chunk, or None.

        Raises ``ValueError`` with the reason for chunks that do not fit together.
        """
        chunk = headers.chunk
        assert chunk is not None
        identity = _Identity(headers.rank, chunk.sha256)
        partial = self._pending.setdefault(identity, _Partial(chunk.count))
        if partial.count != chunk.count:
            raise ValueError(
                f"chunk {chunk.index} is one of {chunk.count}, those before were of {partial.count}"
            )
        partial.put(chunk.index, part)
        if partial.missing:
            self._drop_oldest_above_limit()
            return None
        del self._pending[identity]
        return _verified(partial.joined(), chunk.sha256)

    def drop_up_to(self, rank: Rank) -> None:
        """Forget what is not newer than ``rank``: it will not be served any more."""
        self._drop([one for one in self._pending if one.rank <= rank])

    @property
    def closed_chunks(self) -> int:
        """How many chunks there are, here or missing, of updates whose last chunk is here already."""
        return sum(partial.count for partial in self._pending.values() if partial.is_closed)

    def _drop_oldest_above_limit(self) -> None:
        while self._is_above_limit():
            self._drop([min(self._pending, key=lambda one: one.rank)])

    def _is_above_limit(self) -> bool:
        size_bytes = sum(partial.size_bytes for partial in self._pending.values())
        return size_bytes > self._pending_bytes_max or len(self._pending) > _PENDING_UPDATES_MAX

    def _drop(self, identities: list[_Identity]) -> None:
        for identity in identities:
            del self._pending[identity]
        self.dropped += len(identities)


def _verified(value: bytes, sha256: str) -> bytes:
    given = hashlib.sha256(value).hexdigest()
    if given != sha256:
        raise ValueError(f"its chunks are damaged: expected SHA-256 {sha256}, given {given}")
    return value
