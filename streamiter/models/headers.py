"""The headers of a model update, and of the chunks that carry one too large for a single record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamiter.errors import ModelError
from streamiter.models.update import Rank
from streamiter.topics.topic import Headers

__all__ = [
    "Chunk",
    "UpdateHeaders",
    "check_model_name",
    "chunk_key",
    "deleted_rank",
    "deletion_headers",
    "is_key_of",
    "model_of",
    "update_key",
]

# Between a model's name and the rest of a chunk's key, so no part of a model's name.
_KEY_SEPARATOR: Final = "#"

# Generation and version of up to 64 bits, and the point between them; of thousands of digits Python makes no number.
_RANK_BYTES: Final = 2 * 20 + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Which part of a value a record holds; ``sha256`` (hexadecimal) is that of the whole value."""

    index: int
    count: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UpdateHeaders:
    """What the headers of one record say.

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

    @property
    def rank(self) -> Rank:
        """Generation and version."""
        return (self.generation, self.version)

    @property
    def is_last(self) -> bool:
        """Whether it is the record that closes its update: the only one, or the last chunk."""
        return self.chunk is None or self.chunk.index == self.chunk.count - 1

    def encoded(self) -> Headers:
        """As a record carries them: text and decimal numbers; ``epoch`` is left out where there is none."""
        fields: list[tuple[str, str | int]] = [
            ("model", self.model),
            ("generation", self.generation),
            ("version", self.version),
            ("created_at", self.created_at_ms),
            ("content_type", self.content_type),
        ]
        if self.epoch is not None:
            fields.append(("epoch", self.epoch))
        if self.chunk is not None:
            fields += [("chunk_index", self.chunk.index), ("chunk_count", self.chunk.count)]
            fields.append(("sha256", self.chunk.sha256))
        return tuple((name, str(value).encode()) for name, value in fields)

    @staticmethod
    def parse(headers: Headers) -> UpdateHeaders:
        """Raises ``ValueError`` with the reason for headers that are not those of an update."""
        fields = {name: value.decode() for name, value in headers}
        try:
            return UpdateHeaders(
                model=fields["model"],
                generation=int(fields["generation"]),
                version=int(fields["version"]),
                epoch=int(fields["epoch"]) if "epoch" in fields else None,
                created_at_ms=int(fields["created_at"]),
                content_type=fields["content_type"],
                chunk=_parse_chunk(fields),
            )
        except KeyError as error:
            raise ValueError(f"header {error} is missing") from error


def _parse_chunk(fields: dict[str, str]) -> Chunk | None:
    if "chunk_index" not in fields:
        return None
    chunk = Chunk(int(fields["chunk_index"]), int(fields["chunk_count"]), fields["sha256"])
    if not 0 <= chunk.index < chunk.count:
        raise ValueError(f"expected 0 <= chunk_index < chunk_count, given {chunk.index} of {chunk.count}")
    return chunk


def model_of(headers: Headers) -> bytes | None:
    """The model that a record is about, or None; cheap enough for every record of a shared topic."""
    for name, value in headers:
        if name == "model":
            return value
    return None


def update_key(model: str) -> bytes:
    """The key of an update, so that compaction keeps the last one."""
    return model.encode()


def chunk_key(model: str, rank: Rank, index: int) -> bytes:
    """The key of a chunk: its own, or compaction would keep one chunk of many.

    >>> chunk_key("ctr", (2, 17), 0)
    b'ctr#2.17.0'
    """
    return f"{model}{_KEY_SEPARATOR}{rank[0]}.{rank[1]}.{index}".encode()


def deletion_headers(model: str, rank: Rank) -> Headers:
    """The headers of a record without a value that deletes a chunk of the update ``rank``."""
    return (("model", model.encode()), ("deletes", f"{rank[0]}.{rank[1]}".encode()))


def deleted_rank(headers: Headers) -> Rank | None:
    """The update that a record deletes a chunk of, or None.

    >>> deleted_rank(deletion_headers("ctr", (2, 17)))
    (2, 17)
    """
    for name, value in headers:
        generation, separator, version = value.partition(b".")
        is_rank = separator and generation.isdigit() and version.isdigit() and len(value) <= _RANK_BYTES
        if name == "deletes" and is_rank:
            return int(generation), int(version)
    return None


def is_key_of(model: str, key: bytes | None) -> bool:
    """Whether a record of this key belongs to ``model``."""
    return key is not None and key.partition(_KEY_SEPARATOR.encode())[0] == model.encode()


def check_model_name(model: str) -> None:
    """Raise ``ModelError`` for a name that cannot be part of a key."""
    if not model or _KEY_SEPARATOR in model or not model.isprintable():
        raise ModelError(
            f"model {model!r}: expected a name of printable characters without {_KEY_SEPARATOR!r}, which"
            " separates it from the rest of a key"
        )
