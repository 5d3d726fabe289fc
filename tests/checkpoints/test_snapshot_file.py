"""The file of a snapshot: every kind of damage is reported, and no damaged content is returned."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints.snapshots import FRAMES, Frames, header
from hypothesis import given
from hypothesis import strategies as st

from streamiter.engine.storage.folder_blobs import FileReader
from streamiter.engine.storage.snapshot import (
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    SnapshotPart,
    check_preamble,
    pack_manifest,
    pack_preamble,
    pack_trailer,
)
from streamiter.engine.storage.snapshot_file import SnapshotWriter, StoredSnapshot
from streamiter.errors import CheckpointError, ConfigurationError

PARTS = [SnapshotPart("read/0", b"positions"), SnapshotPart("größe/0", b"", (Frames(), Frames([])))]


def write(path: Path, parts: list[SnapshotPart], notes: dict[str, str] | None = None) -> Path:
    """Write a whole file of these parts, and return its path."""
    writer = SnapshotWriter(path.name)
    writer.begin(open(path, "wb"))  # noqa: SIM115 closed below
    for part in parts:
        writer.add_part(part.name, part.content)
        for deferred in part.deferred:
            writer.begin_deferred()
            for frame in deferred.frames():
                writer.add_frame(frame)
    size_bytes = writer.finish(header(7, notes=notes or {}))
    writer.file.close()
    assert path.stat().st_size == size_bytes
    return path


def opened(path: Path) -> StoredSnapshot:
    return StoredSnapshot(FileReader(str(path), path), str(path.parent.parent))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a small file with all kinds of content."""
    folder = tmp_path / "checkpoints" / "clicks"
    folder.mkdir(parents=True)
    return write(folder / "7.checkpoint", PARTS)


def read_everything(path: Path) -> list[bytes]:
    """Read the whole content, and close the file in any case."""
    snapshot = opened(path)
    try:
        snapshot.verify()
        return list(contents(snapshot))
    finally:
        snapshot.close()


def contents(snapshot: StoredSnapshot) -> Iterator[bytes]:
    for part in PARTS:
        [content] = snapshot._frames(part.name, snapshot._parts[part.name].content)
        yield content
        for number in range(len(part.deferred)):
            yield from snapshot.frames(part.name, number)


def refusal(path: Path) -> str:
    """Return the message for a file that must be refused; ``verify`` and reading raise similar messages."""
    with pytest.raises(CheckpointError) as refused:
        read_everything(path)
    with pytest.raises(CheckpointError):  # noqa: PT012 opening refuses some, reading others
        snapshot = opened(path)
        try:
            list(contents(snapshot))
        finally:
            snapshot.close()
    assert str(refused.value).startswith(str(path))
    return str(refused.value)


def test_any_parts_are_restored_unchanged(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Empty parts, frames around the size that is read at once, or thousands of small frames were not restored."""
    folder = tmp_path_factory.mktemp("any")
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    frames = st.lists(st.binary(max_size=300) | st.integers(65_500, 65_560).map(bytes), max_size=5)

    @given(parts=st.dictionaries(names, st.tuples(st.binary(), st.lists(frames, max_size=3)), max_size=4))
    def check(parts: dict[str, tuple[bytes, list[list[bytes]]]]) -> None:
        path = folder / "any.checkpoint"
        written = [
            SnapshotPart(name, content, tuple(map(Frames, deferred))) for name, (content, deferred) in parts.items()
        ]
        snapshot = opened(write(path, written, notes={name: name for name in parts}))
        snapshot.verify()
        assert snapshot.header == header(7, notes={name: name for name in parts})
        assert list(snapshot.part_names()) == list(parts)
        for name, (content, deferred) in parts.items():
            assert list(snapshot._frames(name, snapshot._parts[name].content)) == [content]
            assert [list(snapshot.frames(name, number)) for number in range(len(deferred))] == deferred
        snapshot.close()

    check()


def test_a_reader_made_after_the_documentation_reads_it(file: Path) -> None:
    """docs/checkpoint-format.md was not enough to write a reader; this reader uses nothing else."""
    whole = file.read_bytes()
    assert (whole[:24], whole[24:28]) == (b"\x93streamiter checkpoint\r\n", (1).to_bytes(4, "little"))
    assert int.from_bytes(whole[28:32], "little") == zlib.crc32(whole[:28])
    offset, length, manifest_crc32, crc32, end = struct.unpack("<QQII8s", whole[-32:])
    assert (crc32, end) == (zlib.crc32(whole[-32:-12]), b"ENDS\r\n\n\x93")
    assert offset + length + 32 == len(whole)
    assert zlib.crc32(whole[offset : offset + length]) == manifest_crc32
    manifest = json.loads(whole[offset : offset + length])
    position, read = 32, {}
    for part in manifest["parts"]:
        frames = read[part["name"]] = []
        for section in (part["content"], *part["deferred"]):
            assert section["offset"] == position
            for _ in range(section["frames"]):
                size, crc32 = struct.unpack_from("<QI", whole, position)
                content = whole[position + 12 : position + 12 + size]
                assert crc32 == zlib.crc32(struct.pack("<QQ", position, size) + content)
                position += 12 + size
                frames.append(content)
            assert position == section["offset"] + section["bytes"]
    assert position == offset
    assert read == {"read/0": [b"positions"], "größe/0": [b"", *FRAMES]}
    told = manifest["header"]
    assert (told["flow"], told["id"]) == ("clicks", {"number": 7, "run": "a"})
    assert told["created_at_ms"] == 1_700_000_000_007
    assert told["job_ended"] is False
    described = {"definition": {}, "keeps": "its state"}
    assert told["steps"]["read"] == {"parallelism": 2, "operator": "TopicSource", "is_source": True, **described}


def test_every_flipped_bit_of_a_file_is_found(file: Path) -> None:
    """Disks and memories flip bits, and a model learned from a flipped weight."""
    whole = file.read_bytes()
    assert read_everything(file) == [b"positions", b"", *FRAMES]
    for position in range(len(whole)):
        for bit in range(8):
            changed = whole[position] ^ (1 << bit)
            with open(file, "r+b") as damaged:
                damaged.seek(position)
                damaged.write(bytes([changed]))
            with pytest.raises(CheckpointError):
                read_everything(file)
        file.write_bytes(whole)
    assert refusal_of(file, whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])


def refusal_of(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal(path)


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    """A disk lost the end of a file that it had confirmed, and the rest was read."""
    whole = file.read_bytes()
    for length in range(len(whole)):
        said = refusal_of(file, whole[:length])
        assert "the checkpoint is damaged: " in said
        assert f"`streamiter checkpoints list {file.parents[1]}` shows them" in said
    assert "expected at least 32 bytes, given 0" in refusal_of(file, b"")


def test_more_bytes_at_the_end_are_refused(file: Path) -> None:
    """A file that contains two files, or was written over a longer one, was read."""
    whole = file.read_bytes()
    assert "damaged" in refusal_of(file, whole + b"\0")
    assert f"given {2 * len(whole)}" in refusal_of(file, whole + whole)


def test_a_block_of_zeros_is_refused(file: Path) -> None:
    """After a power failure a file system shows zeros, because it stored the size without the content."""
    whole = file.read_bytes()
    for start in range(0, len(whole), 16):
        length = len(whole[start : start + 16])
        assert "damaged" in refusal_of(file, whole[:start] + bytes(length) + whole[start + length :])


def test_the_damaged_part_is_named(file: Path) -> None:
    """The error did not name the part, so a user did not know which state was lost."""
    whole = file.read_bytes()
    position = whole.index(b"third")
    said = refusal_of(file, whole[:position] + b"T" + whole[position + 1 :])
    assert said.startswith(f"{file}, part 'größe/0': the checkpoint is damaged: frame 2 does not match its checksum")
    assert "start from an older one" in said


def test_two_frames_that_changed_places_are_found(tmp_path: Path) -> None:
    """Two exchanged frames, each with its own correct checksum, were accepted."""
    path = write(tmp_path / "x.checkpoint", [SnapshotPart("p", b"", (Frames([b"a" * 50, b"b" * 50]),))])
    whole = path.read_bytes()
    first, second = whole.index(b"a" * 50) - 12, whole.index(b"b" * 50) - 12
    swapped = whole[:first] + whole[second : second + 62] + whole[first : first + 62] + whole[second + 62 :]
    path.write_bytes(swapped)
    snapshot = opened(path)
    with pytest.raises(CheckpointError, match="part 'p': the checkpoint is damaged: frame 0 does not match"):
        snapshot.verify()
    snapshot.close()


def with_manifest(whole: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    """Return the file with another manifest, and correct checksums."""
    end = len(whole) - TRAILER_BYTES
    offset = int.from_bytes(whole[end : end + 8], "little")
    manifest = json.loads(whole[offset:end])
    change(manifest)
    packed = json.dumps(manifest).encode()
    return whole[:offset] + packed + pack_trailer(offset, packed)


FORGED: dict[str, Callable[[dict[str, object]], object]] = {
    "its manifest is not one of format 1": lambda manifest: manifest.pop("parts"),
    "Expected `int` >= 0": lambda manifest: manifest["parts"][0]["content"].update(offset=-1),
    "part 'read/0' begins at byte 33 where 32 is due": lambda m: m["parts"][0]["content"].update(offset=33),
    "and its manifest begins at": lambda manifest: manifest["parts"].pop(),
    "two of its parts have one name": lambda manifest: manifest["parts"][0].update(name="größe/0"),
    "belong to no frame": lambda manifest: manifest["parts"][1]["deferred"][0].update(frames=2),
    "more bytes of it, given 0": lambda manifest: manifest["parts"][1]["deferred"][0].update(frames=4),
}


@pytest.mark.parametrize("said", FORGED)
def test_a_manifest_that_does_not_fit_is_refused(file: Path, said: str) -> None:
    """A manifest of another program, or after an error in the engine, has right checksums and was accepted."""
    assert said in refusal_of(file, with_manifest(file.read_bytes(), FORGED[said]))


def test_a_forged_length_takes_no_memory(file: Path) -> None:
    """A frame of 2 to the 63 bytes was requested, and the process ended."""
    whole = file.read_bytes()
    said = refusal_of(file, whole[:PREAMBLE_BYTES] + b"\xff" * 7 + b"\x7f" + whole[PREAMBLE_BYTES + 8 :])
    assert "expected 9223372036854775807 more bytes of it, given 9" in said


def test_an_unknown_field_of_the_manifest_is_ignored(file: Path) -> None:
    """A field of a later version of this format was refused."""
    file.write_bytes(with_manifest(file.read_bytes(), lambda manifest: manifest.update(more=[1, 2])))
    assert read_everything(file) == [b"positions", b"", *FRAMES]


def test_a_file_of_another_version_is_distinguished_from_a_damaged_one(file: Path) -> None:
    """After a downgrade, the message advised an older checkpoint instead of the newer program."""
    whole = file.read_bytes()
    head = whole[: PREAMBLE_BYTES - 8] + (4).to_bytes(4, "little")
    newer = head + zlib.crc32(head).to_bytes(4, "little") + b"whatever comes"
    assert f"{file}: written by a newer streamiter (format 4), expected format 1; use that version" in refusal_of(
        file, newer
    )
    head = whole[: PREAMBLE_BYTES - 8] + bytes(4)
    assert "written by another streamiter (format 0)" in refusal_of(file, head + zlib.crc32(head).to_bytes(4, "little"))
    check_preamble(pack_preamble())


def test_a_file_of_something_else_is_refused(file: Path) -> None:
    """A renamed file, or one of another program, was read as a snapshot."""
    assert "expected a file that begins with" in refusal_of(file, b"PK\3\4" * 50)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """The error was the system's own message, without a remedy."""
    with pytest.raises(CheckpointError, match=r"No such file or directory.*start from another checkpoint"):
        opened(tmp_path / "none")
    with pytest.raises(CheckpointError, match="Is a directory"):
        opened(tmp_path)


def test_nothing_is_read_after_closing(file: Path) -> None:
    """The number of a closed file is used for the next file, whose bytes were taken for the snapshot."""
    snapshot = opened(file)
    frames = snapshot.frames("größe/0", 0)
    snapshot.close()
    with open(file, "rb"), pytest.raises(ValueError, match="closed file"):
        next(iter(frames))


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """The JSON contained a text that no reader accepts."""
    with pytest.raises(ConfigurationError, match="expected names of text, given one with half a character"):
        pack_manifest(header(1, notes={"name": "\ud800"}), [])
