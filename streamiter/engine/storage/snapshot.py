"""A snapshot and its format: the state of a job, in parts, as a store keeps it.

A part is the state of one subtask of one step: a *content* of plain data, and deferred pieces, which are sequences of
*frames*. The file of a snapshot is a preamble, the frames, the *manifest* (JSON), which has the place of each frame,
and a trailer with the place of the manifest. The manifest comes last, so that a snapshot can be written while it is
made, in little memory. If several processes take a snapshot, each writes its parts into a file of its own, and the
manifest of process 0 names the other files. docs/checkpoint-format.md describes the same for other readers.

Here are the data types, and the conversion of each piece of the format to bytes and back;
:mod:`~streamiter.engine.storage.snapshot_file` reads and writes the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Annotated, Any, Final

import msgspec

from streamiter.errors import ConfigurationError
from streamiter.values.deferred import Deferred


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The id of a checkpoint of a flow."""

    number: int
    """Its number; numbers grow from run to run."""
    run: str
    """The run that took it."""

    def __str__(self) -> str:
        return f"{self.number} of run {self.run}"


@dataclass(frozen=True, slots=True)
class StepState:
    """A step with state, as a snapshot describes it."""

    parallelism: int
    """The number of its subtasks."""
    operator: str
    """The class of its operators, for human readers."""
    is_source: bool = False
    """Whether the step is a source."""
    definition: Mapping[str, Any] = field(default_factory=dict)
    """On what the meaning of its state depends, as the operators return it."""
    keeps: str = "its state"
    """The state in words."""


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The description of a snapshot, which is read before its parts."""

    flow: str
    """The name of the flow."""
    id: CheckpointId
    """The id of the checkpoint."""
    created_at_ms: int
    """Milliseconds since 1970-01-01 UTC."""
    steps: Mapping[str, StepState]
    """The steps with state, by name."""
    job_ended: bool = False
    """Whether it is the last snapshot of a job whose inputs have all ended."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """For human readers: versions of streamiter, Python and numpy; the commit domain."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One named part of a snapshot: the state of one subtask of one step."""

    name: str
    """The name of the part, unique in the snapshot."""
    content: bytes
    """The state as encoded plain data, which refers to deferred pieces by number."""
    deferred: Sequence[Deferred] = ()
    """The deferred pieces, in the order of their numbers."""


FORMAT: Final = 1

# The first byte is not text, and the line ends show whether a transfer as text has changed the file.
_MAGIC: Final = b"\x93streamiter checkpoint\r\n"
_END: Final = b"ENDS\r\n\n\x93"

_PREAMBLE: Final = Struct(f"<{len(_MAGIC)}sII")
_TRAILER: Final = Struct(f"<QQII{len(_END)}s")
FRAME_HEAD: Final = Struct("<QI")
"""The length of a frame's content in bytes, and its CRC-32."""
_FRAME_PLACE: Final = Struct("<QQ")
_CRC32_BYTES: Final = 4

PREAMBLE_BYTES: Final = _PREAMBLE.size
TRAILER_BYTES: Final = _TRAILER.size


class Damage(Exception):
    """The bytes of a file are damaged; the message has what was expected and what was given."""


class OtherFormat(Exception):
    """The file is of another version of the format, and not damaged as far as this version can tell."""

    def __init__(self, given: int) -> None:
        self.given = given
        super().__init__(given)


NaturalNumber = Annotated[int, msgspec.Meta(ge=0)]


class SharedFile(msgspec.Struct, frozen=True):
    """A file of a deferred piece, which the snapshots of several checkpoints may name."""

    name: str
    """The name that its owner gave it."""
    blob: str
    """The name of the blob, in the folder of the flow."""
    bytes: NaturalNumber
    """Its size."""
    crc32: NaturalNumber
    """The CRC-32 of its content."""


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of consecutive frames in the file, and the shared files that belong to them."""

    offset: NaturalNumber
    """The position of the first frame."""
    bytes: NaturalNumber
    """The length of all frames, with their heads."""
    frames: NaturalNumber
    """The number of frames."""
    files: tuple[SharedFile, ...] | None = None
    """The shared files of a deferred piece that is files, perhaps none; then the frames have what is not in the files.
    None for a piece that is frames."""


class PartEntry(msgspec.Struct, frozen=True):
    """The place of a part in the file: its content is one frame, and each deferred piece is a section."""

    name: str
    content: Section
    deferred: list[Section]


class PartsFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file with the parts of another process than 0."""

    process: NaturalNumber
    """The number of the process."""
    bytes: NaturalNumber
    """The size of the file."""
    manifest_crc32: NaturalNumber
    """The CRC-32 of its manifest, so that no other file can replace it."""
    new_bytes: NaturalNumber = 0
    """The bytes of the shared files that were stored with it."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The header of the snapshot, the places of its parts, and the files of other processes."""

    header: SnapshotHeader
    parts: Sequence[PartEntry]
    others: tuple[PartsFile, ...] = ()


def pack_preamble() -> bytes:
    """Return the first bytes of each file."""
    return _PREAMBLE.pack(_MAGIC, FORMAT, zlib.crc32(_MAGIC + FORMAT.to_bytes(4, "little")))


def check_preamble(preamble: bytes) -> None:
    """Check the first bytes of a file. Raises ``Damage``, and ``OtherFormat`` for another version of the format."""
    try:
        magic, version, crc32 = _PREAMBLE.unpack(preamble)
    except error:
        raise Damage(f"expected at least {PREAMBLE_BYTES} bytes, given {len(preamble)}") from None
    if magic != _MAGIC:
        raise Damage(f"expected a file that begins with {_MAGIC!r}, given {magic!r}")
    if crc32 != zlib.crc32(preamble[:-_CRC32_BYTES]):
        raise Damage("its version does not match its checksum")
    if version != FORMAT:
        raise OtherFormat(version)


def frame_crc32(offset: int, length: int) -> int:
    """Return the start value of a frame's checksum, made of its place, so that no frame can replace another."""
    return zlib.crc32(_FRAME_PLACE.pack(offset, length))


def frame_head(offset: int, content: bytes) -> bytes:
    """Return the bytes before the content of a frame that begins at ``offset``."""
    return FRAME_HEAD.pack(len(content), zlib.crc32(content, frame_crc32(offset, len(content))))


def pack_manifest(header: SnapshotHeader, parts: Sequence[PartEntry], others: Sequence[PartsFile] = ()) -> bytes:
    """Return the manifest as JSON. Raises ``ConfigurationError`` for a name that is not text."""
    try:
        return msgspec.json.encode(Manifest(header, parts, tuple(others)))
    except UnicodeEncodeError as problem:
        raise ConfigurationError(
            f"flow {header.flow!r}: expected names of text, given one with half a character "
            f"({problem.object!r}); rename it"
        ) from problem


def pack_trailer(manifest_offset: int, manifest: bytes) -> bytes:
    """Return the last bytes of a file with this manifest."""
    fields = (manifest_offset, len(manifest), zlib.crc32(manifest))
    covered = Struct("<QQI").pack(*fields)
    return _TRAILER.pack(*fields, zlib.crc32(covered), _END)


def unpack_trailer(trailer: bytes) -> tuple[int, int, int]:
    """Return the offset, the length and the CRC-32 of the manifest. Raises ``Damage``."""
    offset, length, manifest_crc32, crc32, end = _TRAILER.unpack(trailer)
    if end != _END:
        raise Damage(f"expected a file that ends with {_END!r}, given {end!r}: it is cut off, or never was whole")
    if crc32 != zlib.crc32(trailer[: -len(_END) - _CRC32_BYTES]):
        raise Damage("its last bytes do not match their checksum")
    return offset, length, manifest_crc32


def unpack_manifest(data: bytes, crc32: int, *, offset: int) -> Manifest:
    """Return the manifest, which begins at ``offset``. Raises ``Damage``, also for gaps between its sections."""
    if zlib.crc32(data) != crc32:
        raise Damage("its manifest does not match its checksum")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damage(f"its manifest is not one of format {FORMAT} ({problem})") from None
    position = PREAMBLE_BYTES
    for part in manifest.parts:
        for section in (part.content, *part.deferred):
            if section.offset != position:
                raise Damage(f"part {part.name!r} begins at byte {section.offset} where {position} is due")
            position += section.bytes
    if position != offset:
        raise Damage(f"its parts end at byte {position}, and its manifest begins at {offset}")
    if len({part.name for part in manifest.parts}) < len(manifest.parts):
        raise Damage("two of its parts have one name")
    return manifest
