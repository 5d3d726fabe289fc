"""Model updates: a training step emits a ``ModelSnapshot``, a reader gets a ``ModelUpdate``.

An update is a record of a topic. Its headers name the model, the generation and the version (:class:`UpdateHeaders`).
An update that is larger than a record is cut into chunks, which the reader joins again.

All chunks except the last have their own keys (model, generation, version, index), so that compaction keeps each of
them. The last chunk has the model's key, like an update in one record: it closes the update, and compaction drops it
when a newer update is closed. Then the publisher deletes the chunks of the previous update by their keys. So in a
compacted topic the last closed update is complete at any time, and a crash while chunks are written harms no earlier
update.

An update may be a *change* of the update before it (:class:`ChainLink`). All records of a change have their own keys.
They are deleted after the next update that is whole, so a compacted topic has the last whole update and its changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from streamiter.errors import ModelError, shortened
from streamiter.models.documents import EMBEDDINGS, SHAPES, Parameters, names_of, without_state
from streamiter.topics.topic import Headers
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.notebooks import html_facts
from streamiter.values.numbers import whole_number_in

Rank = tuple[int, int]
"""Generation and version; updates of one model are ordered by it."""

NO_RANK: Final[Rank] = (0, 0)
"""The rank before all updates."""

ChunkSet = tuple[int, int, int]
"""Generation, version, and the number of records of an update that have keys of their own: all chunks except the last,
or all records of a change."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """A model with the properties of its training, for a training step to emit; bare parameters may be emitted, too.

    >>> ModelSnapshot({"weights": [0.5]}, records=1000, metrics={"loss": 0.31}).records
    1000
    """

    parameters: Any
    """An array, or a dict of names to arrays, numbers and strings."""
    records: int | None = None
    """The number of examples that the model has learned from so far."""
    metrics: dict[str, float] = {}
    """Numbers by name, such as the loss."""
    epoch: int | None = None
    """The epoch of the model; None: the epoch in which it is published."""
    since_rollback: tuple[int, int] | None = None
    """The generation and version of the last rollback that the trainer has taken over, ``(0, 0)`` before the first;
    the update gets a later version than that. None: the trainer follows no rollbacks."""

    def __repr__(self) -> str:
        return f"ModelSnapshot(records={self.records}, parameters={names_of(self.parameters)}, metrics={self.metrics})"

    def _repr_html_(self) -> str:
        """Return a table of the snapshot, for notebooks."""
        return _html("snapshot", {"epoch": self.epoch, "records": self.records}, self)


def _html(title: str, facts: dict[str, Any], of: ModelSnapshot | ModelUpdate) -> str:
    given = of.parameters if isinstance(of.parameters, dict) else {"parameters": of.parameters}
    return html_facts(title, {**facts, **of.metrics, **given})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelUpdate:
    """One published state of a model, exactly as it was published; its arrays are read-only."""

    model: str
    """The name of the model."""
    generation: int
    """The number of the run or rollback that the update follows; a run that restores no checkpoint begins a new one."""
    version: int
    """The number of the update within its generation."""
    epoch: int | None
    """The epoch of the model, None if the publisher named none."""
    created_at_ms: int
    """The publisher's clock, in milliseconds since 1970-01-01 UTC."""
    records: int | None
    """The number of examples learned from, None if the publisher named none."""
    metrics: dict[str, float]
    """Numbers by name, such as the loss."""
    parameters: Parameters
    """An array, or a dict of names to arrays, numbers and strings."""
    since_rollback: Rank | None = None
    """The rank of the last rollback before this update; a rollback has its own rank here. None: there was none."""
    rollback_to: Rank | None = None
    """The rank of the update that this one publishes again; None if it is no rollback."""

    @property
    def rank(self) -> Rank:
        """``(generation, version)``; of two updates the one with the higher rank is newer."""
        return (self.generation, self.version)

    @property
    def has_state(self) -> bool:
        """Whether the parameters carry the state of the learner."""
        return without_state(self.parameters) is not self.parameters

    def _repr_html_(self) -> str:
        """Return a table of the update, for notebooks."""
        facts = {"generation": self.generation, "version": self.version, "epoch": self.epoch, "records": self.records}
        return _html(self.model, facts, self)

    def __repr__(self) -> str:
        return (
            f"ModelUpdate({self.model!r} {self.generation}.{self.version}, records={self.records}, "
            f"parameters={names_of(self.parameters)}, metrics={self.metrics})"
        )

    def age_s(self, clock: Clock) -> float:
        """Return the seconds since the update was made; 0 if the publisher's clock is ahead of this one."""
        return max(0, clock.now_ms() - self.created_at_ms) / 1000


# Records of format 1 carry no header of it: docs/model-updates.md.
_FORMAT: Final = "1"

# A consumer of format 1 would predict with the linear member alone, so it must refuse the update.
_FORMAT_OF_SHAPES: Final = "2"

# A consumer of format 2 would predict without the embeddings.
_FORMAT_OF_EMBEDDINGS: Final = "3"

# A consumer of earlier formats has no use for the part of a model that has changed.
FORMAT_OF_CHANGES: Final = "4"

_FORMATS: Final = (_FORMAT, _FORMAT_OF_SHAPES, _FORMAT_OF_EMBEDDINGS, FORMAT_OF_CHANGES)


def format_of(parameters: Parameters) -> str:
    """Return the format of an update with these parameters.

    >>> format_of({"weights": [0.5]}), format_of({"shapes": {}}), format_of({"shapes": {}, "embeddings": {}})
    ('1', '2', '3')
    """
    if isinstance(parameters, dict) and EMBEDDINGS in parameters:
        return _FORMAT_OF_EMBEDDINGS
    return _FORMAT_OF_SHAPES if isinstance(parameters, dict) and SHAPES in parameters else _FORMAT


# It separates a model's name from the rest of a chunk's key, so a model's name must not contain this character.
_KEY_SEPARATOR: Final = "#"


class Chunk(msgspec.Struct, frozen=True):
    """The part of an update's value that a record holds."""

    index: int
    """The number of the chunk, from 0."""
    count: int
    """The number of chunks of the update."""
    sha256: str
    """The SHA-256 of the whole value, hexadecimal."""


class ChainLink(msgspec.Struct, frozen=True):
    """The place of a change in its chain: a whole update, the base, and the changes that follow it, without a gap."""

    base: Rank
    """The rank of the whole update that the chain begins with."""
    follows: Rank
    """The rank of the update that the change applies to."""


class UpdateHeaders(msgspec.Struct, frozen=True):
    """The headers of one record of an update.

    >>> headers = UpdateHeaders("ctr", 1, 7, None, 1700000000000, "application/json")
    >>> UpdateHeaders.parse(headers.encoded()) == headers
    True
    """

    model: str
    generation: int
    version: int
    epoch: int | None
    created_at_ms: int
    content_type: str
    chunk: Chunk | None = None
    since_rollback: Rank | None = None
    rollback_to: Rank | None = None
    format: str = _FORMAT
    link: ChainLink | None = None
    """The place in a chain; None for an update that is whole."""
    chain: str | None = None
    """The checksum of the chain up to here (:func:`chain_checksum`); None for an update that no change follows."""

    @property
    def rank(self) -> Rank:
        """Generation and version."""
        return (self.generation, self.version)

    @property
    def is_last(self) -> bool:
        """Whether the record closes its update: it is the only record, or the last chunk."""
        return self.chunk is None or self.chunk.index == self.chunk.count - 1

    @property
    def own_keys(self) -> int:
        """The number of records of the update that have keys of their own."""
        count = 1 if self.chunk is None else self.chunk.count
        return count if self.link is not None else count - 1

    def encoded(self) -> Headers:
        """Return the headers as a record carries them: texts and decimal numbers; a field of None is left out."""
        fields = {
            "model": self.model,
            "generation": self.generation,
            "version": self.version,
            "created_at": self.created_at_ms,
            "content_type": self.content_type,
            "format": None if self.format == _FORMAT else self.format,
            "epoch": self.epoch,
            "chunk_index": self.chunk and self.chunk.index,
            "chunk_count": self.chunk and self.chunk.count,
            "sha256": self.chunk and self.chunk.sha256,
            "chain": self.chain,
            "since_rollback": self.since_rollback and shown_rank(self.since_rollback),
            "rollback_to": self.rollback_to and shown_rank(self.rollback_to),
            "base": self.link and shown_rank(self.link.base),
            "follows": self.link and shown_rank(self.link.follows),
        }
        return tuple((name, str(value).encode()) for name, value in fields.items() if value is not None)

    @staticmethod
    def parse(headers: Headers) -> UpdateHeaders:
        """Return the parsed headers of a record; ``ValueError`` with the reason for headers of no update."""
        fields = {name: (value or b"").decode() for name, value in headers}
        if (form := fields.get("format", _FORMAT)) not in _FORMATS:
            raise ValueError(
                f"expected an update of format {_FORMAT}, which has no header format, {_FORMAT_OF_SHAPES}, "
                f"{_FORMAT_OF_EMBEDDINGS} or {FORMAT_OF_CHANGES}, given {form!r}; install the version of streamiter "
                "that publishes it"
            )
        try:
            return UpdateHeaders(
                model=fields["model"],
                generation=_number(fields, "generation"),
                version=_number(fields, "version"),
                epoch=_number(fields, "epoch") if "epoch" in fields else None,
                created_at_ms=_number(fields, "created_at"),
                content_type=fields["content_type"],
                format=form,
                chunk=_parse_chunk(fields),
                since_rollback=_rank(fields, "since_rollback"),
                rollback_to=_rank(fields, "rollback_to"),
                link=_parse_link(fields) if form == FORMAT_OF_CHANGES else None,
                chain=fields["chain"] if form == FORMAT_OF_CHANGES else fields.get("chain"),
            )
        except KeyError as error:
            raise ValueError(f"header {error} is missing") from error


def _parse_chunk(fields: dict[str, str]) -> Chunk | None:
    if "chunk_index" not in fields:
        return None
    chunk = Chunk(_number(fields, "chunk_index"), _number(fields, "chunk_count"), fields["sha256"])
    if not chunk.index < chunk.count:
        raise ValueError(f"expected chunk_index < chunk_count, given {chunk.index} of {chunk.count}")
    return chunk


def _parse_link(fields: dict[str, str]) -> ChainLink:
    base, follows = _rank(fields, "base"), _rank(fields, "follows")
    if base is None or follows is None:
        raise ValueError(f"header {'base' if base is None else 'follows'!r} is missing")
    return ChainLink(base, follows)


def chain_checksum(before: str | None, value: bytes) -> str:
    """Return the checksum of a chain up to an update with this value, from that of the update before it.

    It is the SHA-256, hexadecimal, of the bytes of the checksum before, and the value. The base has none before it.

    >>> chain_checksum(chain_checksum(None, b"base"), b"change")[:16]
    'c9cfa74c0beab1e3'
    """
    digest = hashlib.sha256(bytes.fromhex(before or ""))
    digest.update(value)
    return digest.hexdigest()


LEARNER_ENTRY: Final = "learner"
"""The entry of parameters with the name of their learner, where several learners publish under one name."""

PROMOTED_ENTRY: Final = "promoted"
"""The entry of parameters with the version of their learner that was promoted, such as ``"3.17"``."""


def learner_in(parameters: Any) -> str:
    """Return the name of the learner that parameters are of; empty where one learner publishes alone.

    >>> learner_in({"weights": [0.5], "learner": "wide"}), learner_in([0.5])
    ('wide', '')
    """
    return str(parameters.get(LEARNER_ENTRY, "")) if isinstance(parameters, dict) else ""


def shown_rank(rank: Rank) -> str:
    """Return a rank as headers and messages have it.

    >>> shown_rank((2, 17))
    '2.17'
    """
    return f"{rank[0]}.{rank[1]}"


def rank_in(text: str) -> Rank | None:
    """Return the rank that a text spells; None for any other text.

    >>> rank_in("2.17"), rank_in("2"), rank_in("2.-17")
    ((2, 17), None, None)
    """
    generation, _, version = text.partition(".")
    first, second = whole_number_in(generation), whole_number_in(version)
    return None if first is None or second is None else (first, second)


def _rank(fields: dict[str, str], name: str) -> Rank | None:
    if name not in fields:
        return None
    if (rank := rank_in(fields[name])) is None:
        raise ValueError(f"expected header {name} as generation.version, given {shortened(fields[name])}")
    return rank


def _number(fields: dict[str, str], name: str) -> int:
    if (number := whole_number_in(fields[name])) is None:
        raise ValueError(f"expected header {name} as a whole number, given {shortened(fields[name])}")
    return number


def model_of(headers: Headers) -> bytes | None:
    """Return the model that a record names, or None; cheap enough for every record of a shared topic."""
    for name, value in headers:
        if name == "model":
            return value
    return None


def is_change(headers: Headers) -> bool:
    """Whether a record with these headers is one of a change, and not of a whole update."""
    return any(name == "follows" for name, _ in headers)


def is_chunk(headers: Headers) -> bool:
    """Whether a record with these headers is a part of an update that was too large for one record."""
    return any(name == "chunk_index" for name, _ in headers)


def update_key(model: str) -> bytes:
    """Return the key of an update; compaction keeps the last update with it."""
    return model.encode()


def chunk_key(model: str, rank: Rank, index: int) -> bytes:
    """Return the key of a chunk. Each chunk has its own key, or compaction would keep only one chunk of many.

    >>> chunk_key("ctr", (2, 17), 0)
    b'ctr#2.17.0'
    """
    return f"{model}{_KEY_SEPARATOR}{rank[0]}.{rank[1]}.{index}".encode()


def deletion_headers(model: str, rank: Rank) -> Headers:
    """Return the headers of a record without a value, which deletes a chunk of the update ``rank``."""
    return (("model", model.encode()), ("deletes", shown_rank(rank).encode()))


def deleted_rank(headers: Headers) -> Rank | None:
    """Return the rank of the update whose chunk a record deletes, or None.

    >>> deleted_rank(deletion_headers("ctr", (2, 17)))
    (2, 17)
    """
    deleted = (value or b"" for name, value in headers if name == "deletes")
    return next((rank_in(value.decode("ascii", "replace")) for value in deleted), None)


def is_key_of(model: str, key: bytes | None) -> bool:
    """Whether a record with this key belongs to ``model``."""
    return key is not None and key.partition(_KEY_SEPARATOR.encode())[0] == model.encode()


def check_model_name(model: str) -> None:
    """Raise ``ModelError`` for a name that cannot be part of a key."""
    if not model or _KEY_SEPARATOR in model or not model.isprintable():
        raise ModelError(
            f"model {model!r}: expected a name of printable characters without {_KEY_SEPARATOR!r}, which"
            " separates it from the rest of a key"
        )


# Larger updates are refused. A topic is the wrong place for them, and a reader that holds an update, its joined bytes
# and the update before needs three times as much memory.
UPDATE_BYTES_MAX: Final = 512 * 1024 * 1024
